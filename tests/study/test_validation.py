"""Validation errors of pydantic become one message for each key; counts, shares and durations are read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, PositiveInt, ValidationError

from scalebench.errors import UsageError
from scalebench.launch.planning import plan_study
from scalebench.strategies import registry
from scalebench.study.load import load_study
from scalebench.study.spec import Component
from scalebench.study.validation import StrictModel, find_faults, parse_workers
from scalebench.training.optimizers import check_optimizer


class Inner(StrictModel):
    part: float = Field(0.5, gt=0.0, le=1.0)


class Example(StrictModel):
    count: PositiveInt = 1
    share: float = Field(0.5, ge=0, lt=1)
    inner: Inner = Inner()
    flag: bool = False
    text: str = ""
    choice: Literal["a", "b"] = "a"
    few: list[int] = Field([1], min_length=1)
    factors: dict[int, float] = Field({})
    either: PositiveInt | Literal["auto"] = "auto"
    file: Path | None = None


def message(**said: Any) -> str:
    with pytest.raises(ValidationError) as raised:
        Example.model_validate(said)
    first = find_faults(raised.value)[0]
    return f"{first.path}: {first.message}"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"count": 1.5}, "count: expected an integer, got 1.5"),
        ({"count": "x"}, "count: expected an integer, got 'x'"),
        ({"count": 0}, "count: expected a number greater than 0, got 0"),
        ({"share": 1}, "share: expected a number less than 1, got 1"),
        ({"share": -0.5}, "share: expected a number greater than or equal to 0, got -0.5"),
        ({"inner": {"part": 2}}, "inner.part: expected a number less than or equal to 1, got 2"),
        ({"share": "x"}, "share: expected a number, got 'x'"),
        ({"share": float("inf")}, "share: expected a finite number, got inf"),
        ({"flag": 3}, "flag: expected true or false, got 3"),
        ({"count": True}, "count: expected no yes or no (true, false, on, off) here"),
        ({"text": 3}, "text: expected text, got 3"),
        ({"choice": "c"}, "choice: expected 'a' or 'b', got 'c'"),
        ({"few": []}, "few: expected at least 1 item, got []"),
        ({"few": 3}, "few: expected a list, got 3"),
        ({"few": [1, "x"]}, "few.1: expected an integer, got 'x'"),
        ({"factors": 3}, "factors: expected a mapping, got 3"),
        ({"factors": {"a": 1}}, "factors.a: expected an integer, got 'a'"),
        ({"either": "x"}, "either: expected an integer or 'auto', got 'x'"),
        ({"either": 0}, "either: expected a number greater than 0 or 'auto', got 0"),
        ({"file": 3}, "file: expected a path, got 3"),
        ({"text": ["x" * 100]}, f"text: expected text, got ['{'x' * 55}..."),
    ],
    ids=str,
)  # fmt: skip
def test_message_of_each_kind_of_fault(said: dict[str, Any], expected: str) -> None:
    assert message(**said) == expected


def test_unknown_key_comes_first_and_a_union_is_one_fault() -> None:
    with pytest.raises(ValidationError) as raised:
        Example.model_validate({"count": 0, "either": "x", "cuont": 3})
    assert [(fault.path, fault.unknown) for fault in find_faults(raised.value)] == [
        ("cuont", True), ("count", False), ("either", False),
    ]  # fmt: skip


def refusal(ask: Any) -> str:
    with pytest.raises(UsageError) as raised:
        ask()
    return str(raised.value)


def test_all_components_have_equal_messages() -> None:
    words = "expected an integer, got 'x'"
    said = [
        refusal(lambda: registry.create("local_sgd", {"steps": "x"})),
        refusal(
            lambda: plan_study(
                load_study(None, {"model": {"mlp": {"hidden": ["x"]}}}, [])
            )
        ),
        refusal(lambda: load_study(None, {}, ["epochs=x"])),
    ]
    assert [text.rpartition(": ")[2] for text in said] == [words] * 3
    said.append(
        refusal(
            lambda: check_optimizer(Component(name="sgd", options={"momentum": "x"}))
        )
    )
    assert said[-1].endswith("option 'momentum': expected a number, got 'x'")
    assert not any("Input should" in text for text in said)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1..64", [1, 2, 4, 8, 16, 32, 64]),
        ("1..64:8", [1, 8, 16, 24, 32, 40, 48, 56, 64]),
        ("1,2,6", [1, 2, 6]),
        ("3..20", [3, 4, 8, 16]),
        ("6..20:6", [6, 12, 18]),
        ("5..5", [5]),
        ("4, 1..2 ,4", [1, 2, 4]),
        (7, [7]),
        ([2, "1..4", 2], [1, 2, 4]),
    ],
)
def test_parse_workers_accepts_all_forms(text: object, counts: list[int]) -> None:
    assert parse_workers(text) == counts


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "64..1",
        "1..",
        "..4",
        "",
        "a",
        "1..4:0",
        "-1",
        "1.5",
        "1..2..3",
        "1;2",
        "9999999",
        "1..2000:1",
        True,
        None,
        [],
        {},
    ],
)
def test_invalid_worker_counts_are_refused(text: object) -> None:
    with pytest.raises(
        ValueError,
        match=r"expected counts such as|runs backwards; write 1\.\.64|expected 1 to 1,000 worker counts",
    ):
        parse_workers(text)


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.none() | st.integers(20, 500))
def test_range_starts_at_its_first_count_and_stays_inside(
    first: int, more: int, step: int | None
) -> None:
    last = first + more
    counts = parse_workers(f"{first}..{last}" + (f":{step}" if step else ""))
    assert counts[0] == first
    assert counts == sorted(set(counts))
    assert counts[-1] <= last
    for count in counts[1:]:
        assert count % step == 0 if step else count & (count - 1) == 0


@given(st.lists(st.integers(1, 100_000), min_size=1))
def test_list_is_sorted_and_distinct(counts: list[int]) -> None:
    assert (
        parse_workers(counts)
        == parse_workers(",".join(map(str, counts)))
        == sorted(set(counts))
    )
