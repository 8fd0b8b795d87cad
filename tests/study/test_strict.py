from typing import Any

import pytest
from pydantic import Field, ValidationError

from scalebench.study.validation import StrictModel


class Inner(StrictModel):
    on: bool = False
    many: int = 1


class Example(StrictModel):
    number: int | None = None
    share: float = 0.5
    words: list[str | int] = Field([])
    flag: bool = False
    either: bool | int = 0
    anything: dict[str, Any] = Field({})
    factors: dict[int, float] = Field({})
    inner: Inner = Inner()
    inners: list[Inner] = Field([])


@pytest.mark.parametrize(
    "said",
    [
        {"number": True},
        {"share": False},
        {"words": ["a", True]},
        {"factors": {1: True}},
        {"inner": {"many": True}},
        {"inners": [{"many": True}]},
    ],
    ids=str,
)
def test_booleans_are_refused_as_numbers(said: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="expected no yes or no"):
        Example.model_validate(said)


@pytest.mark.parametrize(
    "said",
    [
        {"flag": True},
        {"either": True},
        {"anything": {"a": True}},
        {"inner": {"on": True}},
        {"inners": [{"on": True}]},
        {"number": 1, "share": 1},
    ],
    ids=str,
)
def test_booleans_are_accepted_by_boolean_fields(said: dict[str, Any]) -> None:
    assert Example.model_validate(said).model_dump(exclude_unset=True) == said


def test_infinite_numbers_and_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="finite"):
        Example.model_validate({"share": float("inf")})
    with pytest.raises(ValidationError, match="extra"):
        Example.model_validate({"shar": 0.1})
