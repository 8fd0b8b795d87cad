"""Each strategy's page says which options it takes, what they default to, and where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalebench.strategies import registry

FOLDER = Path(__file__).parents[2] / "docs" / "strategies"
PAGES = [page for page in sorted(FOLDER.glob("*.md")) if page.stem in registry.names()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_agrees_with_its_strategy(page):
    strategy = registry.find(page.stem)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {strategy.name}\n")
    assert f"Source: {strategy.source}." in text
    for name, field in strategy.model_fields.items():
        default = "" if field.default is None else f"`{_in_yaml(field.default)}`"
        assert f"| `{name}` | {default} | {field.description} |" in text


def _in_yaml(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", registry.names())
def test_every_strategy_has_a_page_with_its_timeline(name):
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    picture = FOLDER / "timelines" / f"{name}.png"
    assert f"](timelines/{name}.png)" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 100_000


@pytest.mark.parametrize(
    ("page", "form"),
    [("README.md", "**{} strategies**"), ("docs/alternatives.md", "| {} strategies,")],
)
def test_pages_count_the_strategies(page, form):
    text = (FOLDER.parents[1] / page).read_text(encoding="utf-8")
    assert form.format(len(registry.names())) in text
