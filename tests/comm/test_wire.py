"""Conversions for the wire are exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.comm.wire import divide_

NUMBERS = st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=9)
POWERS = st.integers(-126, 126).map(lambda exponent: 2.0**exponent)


@given(
    NUMBERS,
    st.one_of(POWERS, st.integers(1, 1024), st.floats(1e-3, 1e9)),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
def test_divide_equals_torch_bit_for_bit(numbers, divisor, dtype):
    tensor = torch.tensor(numbers).to(dtype)
    expected = tensor / divisor
    divide_(tensor, divisor)
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


def test_division_of_integers_is_refused():
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        divide_(torch.tensor([4, 6]), 2)
