"""Index tensors of a step: copied to a device together."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.runtime import step_tensors
from flexhybrid.runtime.step_tensors import together_to_device

DTYPES = st.sampled_from([np.int64, np.int32, np.bool_])
SHAPES = st.one_of(st.tuples(st.integers(0, 4)), st.tuples(st.integers(0, 3), st.integers(0, 3)))


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8))
def test_arrays_arrive_by_their_names_in_a_copy_for_each_dtype(drawn):
    """On the meta device as on a GPU, whose copies are counted and kept."""
    generator, copies = np.random.default_rng(0), []
    arrays = {i: generator.integers(0, 2, shape).astype(dtype) for i, (shape, dtype) in enumerate(drawn)}

    def copy(array: np.ndarray, device: torch.device) -> torch.Tensor:
        copies.append(array.dtype)
        return torch.from_numpy(array.copy())

    own, step_tensors.to_device = step_tensors.to_device, copy
    try:
        there = together_to_device(arrays, torch.device("meta"))
    finally:
        step_tensors.to_device = own
    assert len(copies) == len(set(copies)) and set(copies) == {array.dtype for array in arrays.values()}
    assert there.keys() == arrays.keys()
    for name, array in arrays.items():
        assert there[name].shape == array.shape and np.array_equal(there[name].numpy(), array)
