"""The page on data names every data set, partition and shuffle, and the page on models every model."""

from pathlib import Path

import pytest

from scalebench.data.batch_plan import PARTITIONS
from scalebench.data.builder import DATASETS
from scalebench.data.layout import SHUFFLES
from scalebench.models.architecture import MODELS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", [*DATASETS.names(), *PARTITIONS.names(), *SHUFFLES])
def test_data_page(name):
    assert (
        f"| `{name}`" in (DOCS / "data.md").read_text()
        or f", `{name}` |" in (DOCS / "data.md").read_text()
    )


@pytest.mark.parametrize("name", MODELS.names())
def test_models_page(name):
    assert f"| `{name}` |" in (DOCS / "models.md").read_text()


@pytest.mark.parametrize("name", DATASETS.names())
def test_every_option_is_on_the_page(name):
    text = (DOCS / "data.md").read_text()
    assert [
        option
        for option in DATASETS.find(name).model_fields
        if f"`{option}" not in text
    ] == []
