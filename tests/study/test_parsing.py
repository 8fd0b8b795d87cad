"""Parsing of worker counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.study.parsing import parse_workers


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
        ValueError, match=r"expected counts such as|runs backwards; write 1\.\.64|expected 1 to 1,000 worker counts"
    ):
        parse_workers(text)


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.none() | st.integers(20, 500))
def test_range_starts_at_its_first_count_and_stays_inside(first: int, more: int, step: int | None) -> None:
    last = first + more
    counts = parse_workers(f"{first}..{last}" + (f":{step}" if step else ""))
    assert counts[0] == first
    assert counts == sorted(set(counts))
    assert counts[-1] <= last
    for count in counts[1:]:
        assert count % step == 0 if step else count & (count - 1) == 0


@given(st.lists(st.integers(1, 100_000), min_size=1))
def test_list_is_sorted_and_distinct(counts: list[int]) -> None:
    assert parse_workers(counts) == parse_workers(",".join(map(str, counts))) == sorted(set(counts))
