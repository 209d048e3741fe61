"""Reduction: what a rank brings for gradients that it lacks, and which averages land."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from infinity import native
from infinity.core.grads.reduction import Reduction
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.ranks.collectives import Collectives
from infinity.ranks.parallel_dims import ParallelDims

NUMEL = 3000  # of each of the three parameters; all are padded to 16384, of which a rank has half
OFFSETS = (0, 3008, 6016)  # multiples of 64


def a_shard(rank: int = 1) -> FlatParam:
    """The last parameter is on both ranks, the others on the first alone."""
    spec = FlatParamSpec(
        torch.float32, torch.float32, native.Master.OWN, torch.float32, torch.float32, MOMENTS, True
    )
    params = [nn.Parameter(torch.zeros(NUMEL)) for _ in range(3)]
    return FlatParam(spec, params, Collectives(ParallelDims(rank=rank, size=2)))


HANDLES = [SimpleNamespace(name=str(index), index=index) for index in range(3)]


def reduction(flat_param: FlatParam, *got: int, is_decided: bool = False) -> Reduction:
    return Reduction(flat_param, HANDLES, got, is_decided=is_decided)


def land(reduction: Reduction, average: torch.Tensor) -> tuple[dict[str, list], list[str]]:
    """What has landed, by name, and the names of those that perhaps no rank had."""
    landed: dict[str, list] = {}
    perhaps = reduction.land(
        average, 0, lambda handle, part, begin: landed.setdefault(handle.name, part.tolist())
    )
    return landed, [handle.name for handle in perhaps]


def negative_zeros(values: torch.Tensor) -> bool:
    return bool((values == 0).all() and torch.signbit(values).all())


def test_a_rank_brings_negative_zeros_for_the_gradients_that_it_lacks():
    """They change no bit of what is added. Twins: what it has stays, and so does the padding."""
    whole = torch.full((16384,), 7.0)
    reduction(a_shard(), 1).bring_nothing(whole)
    for index, offset in enumerate(OFFSETS):
        part = whole[offset : offset + NUMEL]
        assert bool((part == 7).all()) if index == 1 else negative_zeros(part)
        assert bool((whole[offset + NUMEL : offset + 3008] == 7).all())


def test_each_gradient_lands_the_part_that_is_in_this_ranks_slice():
    """Rank 1 has the last elements of the last parameter, rank 0 the rest."""
    elements = torch.arange(16384.0)
    last = OFFSETS[2] + NUMEL
    for rank, expected in enumerate(
        (
            {
                str(i): list(range(begin, min(8192, begin + NUMEL)))
                for i, begin in enumerate(OFFSETS)
            },
            {"0": [], "1": [], "2": list(range(8192, last))},
        )
    ):
        own = elements[rank * 8192 : (rank + 1) * 8192]
        landed, perhaps = land(reduction(a_shard(rank), is_decided=True), own)
        assert landed == expected and perhaps == []


def test_an_average_of_negative_zeros_is_perhaps_of_no_rank():
    """Method: nothing was told. Twins: the rank had one itself, one of another rank has one element
    of another bit, and zeros are an average like any other."""
    average = torch.full((8192,), -0.0)
    average[OFFSETS[2] + 5] = 0.0
    landed, perhaps = land(reduction(a_shard(0), 0), average)
    assert list(landed) == ["0", "2"] and perhaps == ["1"]
    landed, perhaps = land(reduction(a_shard(0)), torch.zeros(8192))
    assert list(landed) == ["0", "1", "2"] and perhaps == []


def test_what_was_decided_lands_even_if_it_is_negative_zeros():
    average = torch.full((8192,), -0.0)
    landed, perhaps = land(reduction(a_shard(0), is_decided=True), average)
    assert list(landed) == ["0", "1", "2"] and perhaps == []
    assert negative_zeros(torch.tensor(landed["1"]))


@pytest.mark.parametrize("more", [False, True])
def test_what_the_ranks_have_told_decides_which_gradients_land(more):
    """One that no rank has stays absent, for good, whatever the average is."""
    told = reduction(a_shard(0))
    assert not told.more_comes
    told.note_flags([True, False, True, more])
    assert told.more_comes is more
    for average in (torch.ones(8192), torch.full((8192,), -0.0)):
        landed, perhaps = land(told, average)
        assert list(landed) == ["0", "2"] and perhaps == []


def test_a_gradient_with_no_element_here_is_decided_by_what_was_told_alone():
    """Twin: untold, an empty part shows nothing, and only what the rank had lands."""
    average = torch.ones(8192)
    landed, perhaps = land(reduction(a_shard(1), 0), average)
    assert list(landed) == ["0", "2"] and perhaps == ["1"]
    told = reduction(a_shard(1), 0)
    told.note_flags([True, True, False, False])
    landed, perhaps = land(told, average)
    assert list(landed) == ["0", "1"] and perhaps == []
