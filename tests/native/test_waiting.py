import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.native.waiting import Attendance, waits

MOMENTS = st.lists(st.lists(st.floats(0, 1e3), min_size=4, max_size=4), min_size=1, max_size=6)


def attend(arrivals, stays=None, epochs=None):
    departures = [came + stay for came, stay in zip(arrivals, stays, strict=True)] if stays else []
    return Attendance(arrivals, departures, epochs or [len(arrivals)])


def test_who_comes_first_waits_for_who_comes_last():
    early, late = attend([1.0, 10.0], [2.0, 3.0], [1, 2]), attend([2.5, 12.0], [0.5, 1.0], [1, 2])
    assert waits([early, late]) == [[1.5, 2.0], [0.0, 0.0]]


def test_nobody_waits_in_an_operation_it_has_left():
    root, leaf = attend([1.0], [0.1]), attend([5.0], [0.2])
    assert waits([root, leaf]) == [[pytest.approx(0.1)], [0.0]]


def test_what_lies_after_the_last_epoch_counts_to_it():
    first, second = attend([1.0, 2.0, 3.0], epochs=[1, 2]), attend([2.0, 4.0, 6.0], epochs=[1, 2])
    assert waits([first, second]) == [[1.0, 5.0], [0.0, 0.0]]


def test_unknown_without_collectives_or_when_the_numbers_differ():
    assert waits([attend([]), attend([])]) is None
    assert waits([attend([1.0]), attend([1.0, 2.0])]) is None


@given(MOMENTS)
def test_waiting_is_never_negative_and_somebody_never_waits(moments):
    """moments[k][i]: when worker i came to collective k."""
    workers = [attend([moment[worker] for moment in moments]) for worker in range(4)]
    waited = waits(workers)
    assert all(seconds >= 0 for row in waited for seconds in row)
    total = sum(sum(row) for row in waited)
    assert total == pytest.approx(sum(sum(max(moment) - came for came in moment) for moment in moments), abs=1e-6)
