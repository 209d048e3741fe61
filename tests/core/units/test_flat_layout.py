"""FlatLayout: where parameters lie in a flat param's flat arrays, and which elements a rank has."""

from __future__ import annotations

import pytest
import torch

from infinity.core.units.flat_layout import FlatLayout, Placement, is_dense
from infinity.ranks.parallel_dims import ParallelDims

ARRAYS = ("weight", "exp_avg_scale", "grad")


def over(size: int, rank: int = 0, **kw) -> ParallelDims:
    return ParallelDims(rank=rank, size=size, **kw)


@pytest.mark.parametrize(
    "shape, stride, dense",
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3, 4), (4, 8, 1), True),
        ((1, 3), (99, 1), True),  # nobody walks along a dimension of one
        ((), (), True),
        ((2, 3), (4, 1), False),
        ((3,), (2,), False),
        ((3,), (0,), False),
        ((2, 2), (1, 1), False),
    ],
)
def test_strides_are_dense_if_they_visit_each_element_once_without_gaps(shape, stride, dense):
    assert is_dense(torch.Size(shape), stride) is dense


def test_parameters_begin_at_multiples_of_64_in_their_order():
    """Twin: one that ends at a multiple is followed at once."""
    layout = FlatLayout.of([torch.ones(65), torch.ones(64), torch.ones(3, 2), torch.ones(1)])
    assert [place.offset for place in layout.placements] == [0, 128, 192, 256]
    assert [place.end for place in layout.placements] == [65, 192, 198, 257]


@pytest.mark.parametrize(
    "elements, ranks, length",
    [(0, 1, 4096), (4096, 1, 4096), (4097, 1, 8192), (1, 3, 12288), (12289, 3, 24576)],
)
def test_the_length_is_padded_to_4096_elements_on_each_rank(elements, ranks, length):
    layout = FlatLayout.of([torch.ones(elements)] if elements else [], over(ranks))
    assert (layout.numel, layout.shard_numel) == (length, length // ranks)


def test_dense_parameters_keep_their_strides_and_others_become_row_major():
    column_major, gaps = torch.ones(2, 3).t(), torch.ones(4, 6)[:, ::2]
    places = FlatLayout.of([column_major, gaps, torch.ones(2, 3)]).placements
    assert [place.stride for place in places] == [(1, 3), (3, 1), (3, 1)]
    assert [place.is_row_major for place in places] == [False, True, True]


def test_a_view_has_the_elements_of_its_place_and_shares_their_memory():
    """Twin: of a flat that is itself part of a buffer, the offsets begin at that part."""
    buffer = torch.arange(20.0)
    place = Placement(2, torch.Size((2, 3)), (1, 2))
    assert place.view(buffer).tolist() == [[2, 4, 6], [3, 5, 7]]
    view = place.view(buffer[10:])
    assert view.tolist() == [[12, 14, 16], [13, 15, 17]]
    view[0, 1] = -1
    assert buffer[14] == -1


def test_ranks_have_equal_slices_one_after_the_other():
    layouts = [FlatLayout.of([torch.ones(5000)], over(3, rank)) for rank in range(3)]
    assert [layout.own_shard for layout in layouts] == [(0, 4096), (4096, 8192), (8192, 12288)]
    assert [layout.home_range("weight") for layout in layouts] == [
        each.own_shard for each in layouts
    ]
    # A scale is for 64 elements.
    assert [layout.home_range("exp_avg_scale") for layout in layouts] == [
        (0, 64),
        (64, 128),
        (128, 192),
    ]
    assert layouts[0].home_range("exp_avg_scale", rank=2) == (128, 192)


def test_a_whole_gradient_is_at_home_if_ranks_keep_theirs_and_a_slice_if_not():
    """Twin: the weights are sharded either way."""
    for shard, grad in (("optimizer", (0, 8192)), ("gradients", (4096, 8192))):
        layout = FlatLayout.of([torch.ones(5000)], over(2, 1, shard=shard))
        assert layout.home_range("grad") == grad
        assert layout.home_range("weight") == (4096, 8192)


def test_a_parameter_across_two_slices_has_a_part_on_each_and_none_elsewhere():
    params = [torch.ones(100), torch.ones(4096), torch.ones(10)]  # at 0, 128 and 4224
    first, second, third = (FlatLayout.of(params, over(3, rank)) for rank in range(3))
    assert first.shard_part(1) == (128, 4096)
    assert second.shard_part(1) == first.shard_part(1, rank=1) == (4096, 4224)
    begin, end = third.shard_part(1)
    assert begin == end
    begin, end = second.shard_part(0)
    assert begin == end
    assert second.shard_part(2) == (4224, 4234)
    # The same part in three ways: in the whole array, in the array at home, in the parameter.
    assert second.own_part("weight", 1) == (4096, 4224)
    assert second.part_at_home("weight", 1) == (0, 128)
    assert second.part_of_param("weight", 1) == (3968, 4096)
    begin, end = third.own_part("weight", 1)
    assert begin == end


def test_a_parameter_has_a_scale_for_each_begun_block_of_64_elements():
    layout = FlatLayout.of([torch.ones(65), torch.ones(64), torch.ones(1)])
    assert [layout.part("exp_avg_scale", index) for index in range(3)] == [(0, 2), (2, 3), (3, 4)]
    assert layout.part("weight", 0) == (0, 65)


@pytest.mark.parametrize("name", ARRAYS)
def test_the_parts_of_all_ranks_make_up_every_parameter_once(name):
    params = [torch.ones(3000), torch.ones(3000), torch.ones(70)]
    layouts = [FlatLayout.of(params, over(2, rank)) for rank in range(2)]
    for index in range(3):
        begin, end = layouts[0].part(name, index)
        taken = [range(*layout.part_of_param(name, index)) for layout in layouts]
        assert [element for each in taken for element in each] == list(range(end - begin))
