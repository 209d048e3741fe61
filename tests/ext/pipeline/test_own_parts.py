"""The part of a parameter that is at home on this rank, of which tied stages exchange theirs."""

from __future__ import annotations

import pytest
import torch
from memory_arrays import MemoryStore, Told, give_arrays

from infinity import native
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.ext.pipeline.ties import read_own

F32 = torch.float32
CODED = FlatParamSpec(F32, F32, native.Master.OWN, F32, torch.uint8, MOMENTS[:1], stepped=True)
# Whole arrays have 8192 elements: parameters at 0, 128 and 4096 + 64, the second one on two shards.
LENGTHS = 70, 4000, 100
PARTS = [(0, 70), (128, 4128), (4160, 4260)]


@pytest.mark.parametrize("rank, size", [(0, 1), (0, 2), (1, 2)])
def test_ones_own_part_is_what_is_at_home_here(rank, size):
    """Claim: nobody is met. Twin: of a parameter elsewhere it is empty, in the array's dtype, and
    nothing is read."""
    told, store, whole = Told(rank, size, "parameters"), MemoryStore(), torch.arange(8192.0)
    params = [torch.nn.Parameter(torch.zeros(n)) for n in LENGTHS]
    flat_param = give_arrays(FlatParam(CODED, params, told))
    low, high = flat_param.layout.home_range("weight")
    flat_param.arrays["weight"].flat.copy_(whole[low:high])
    for index, (begin, end) in enumerate(PARTS):
        expected = whole[max(begin, low) : max(min(end, high), max(begin, low))]
        found = read_own(store, flat_param, "weight", index)
        assert torch.equal(found, expected) and found.is_cpu
    nowhere, store.read = 0 if rank else 2, None
    if size > 1:
        empty = read_own(store, flat_param, "exp_avg", nowhere)
        assert empty.shape == (0,) and empty.dtype is torch.uint8
    assert told.meetings == []
