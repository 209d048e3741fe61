"""Node shards: this rank's parts of gathered weights come again, while they are the newest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.core.units.unit_buffers import Second
from infinity.ext.shared_homes.node_shards import NodeShards, SecondShards


def gathered(scale: float = 1.0) -> list[torch.Tensor]:
    return [torch.arange(12.0) * scale, torch.arange(6.0) * scale]


def second(rank: int) -> NodeShards:
    """Of one of three ranks of a machine."""
    made = NodeShards(SimpleNamespace(size=3, rank=rank))
    made.allocate(gathered())
    return made


@pytest.mark.parametrize("rank", [0, 2])
def test_a_kept_slice_is_copied_to_this_ranks_part_and_nowhere_else(rank):
    shards, flats = second(rank), [torch.full((n,), -1.0) for n in (12, 6)]
    shards.keep(gathered(), 4)
    shards.copy_out(flats)
    for flat, whole in zip(flats, gathered()):
        each = flat.numel() // 3
        expected = torch.full_like(flat, -1)
        expected[rank * each : (rank + 1) * each] = whole[rank * each : (rank + 1) * each]
        assert torch.equal(flat, expected)


def test_slices_have_the_version_that_was_kept_last_until_they_forget_it():
    shards = second(1)
    assert not shards.have(0)
    shards.keep(gathered(), 4)
    assert shards.have(4) and not shards.have(5) and not shards.have(3)
    shards.keep(gathered(2), 5)
    assert shards.have(5) and not shards.have(4)
    shards.forget()
    assert not shards.have(5) and not shards.have(4)


def test_a_version_that_is_there_is_not_kept_again():
    """Twin: another one is, and so is the same one after it was forgotten."""
    shards, flats = second(1), gathered()
    for version, scale, kept in ((4, 1, 1), (4, 2, 1), (5, 3, 3)):
        shards.keep(gathered(scale), version)
        shards.copy_out(flats)
        assert flats[1][2:4].tolist() == [2 * kept, 3 * kept]
    shards.forget()
    shards.keep(gathered(7), 5)
    shards.copy_out(flats)
    assert flats[1][2:4].tolist() == [14, 21]


def test_machines_that_do_not_share_weights_keep_no_slices():
    """Method: without a machine's ranks the extension is not there, and a unit's second place has
    nothing."""
    alone = SimpleNamespace(ranks=SimpleNamespace(node_group=None))
    assert SecondShards.begin(None, None, alone, None) is None
    nothing = Second()
    nothing.allocate(gathered())
    nothing.keep(gathered(), 4)
    assert not nothing.have(4)
