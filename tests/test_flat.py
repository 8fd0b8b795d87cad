"""One flat vector: whether it is finite."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.flat import is_finite

FLOATS = st.floats(width=32)


@given(values=st.lists(FLOATS, min_size=1, max_size=20), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_vector_is_finite_if_every_element_is(values, dtype):
    vector = torch.tensor(values, dtype=dtype)
    assert is_finite(vector) is all(map(torch.isfinite, vector))
