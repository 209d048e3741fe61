"""The pieces of a class step: every element once, in order, and memory that is used again."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from models import at_home
from small_net import model, same, stepped_by_class, steps

import infinity
from infinity.ext.class_step import entries
from infinity.ext.class_step.segments import EVERY, Buffers, segments_of


def handles(counts: list[int], ranks: int = 1) -> list:
    """Stand-ins of parameters of one flat param, of which ``counts`` elements are here."""
    layout = SimpleNamespace(shard_part=lambda index: (7, 7 + counts[index]))
    flat_param = SimpleNamespace(layout=layout, ranks=SimpleNamespace(size=ranks))
    return [SimpleNamespace(flat_param=flat_param, index=index) for index in range(len(counts))]


def test_pieces_have_every_element_once_and_the_last_one_counts():
    given = handles([10, 0, 4])
    found = list(segments_of(given, [1, 2, 3], 4))
    assert [(given.index(each.handles[0]), *each.spans, each.is_last) for each in found] == [
        (0, (0, 4), False),
        (0, (4, 8), False),
        (0, (8, 10), True),
        (1, (0, 0), True),
        (2, (0, 4), True),
    ]
    assert [each.numbers for each in found] == [[1], [1], [1], [2], [3]]


def test_whole_parameters_come_in_rounds_of_the_ranks():
    """The twin: one rank, or a class that may step any part, has them one at a time."""
    given = handles([10, 3, 4], ranks=2)
    assert [len(each.handles) for each in segments_of(given, [1, 1, 1], EVERY)] == [2, 1]
    assert [len(each.handles) for each in segments_of(handles([10, 3, 4]), [1] * 3, EVERY)] == [
        1
    ] * 3
    assert [len(each.handles) for each in segments_of(given, [1, 1, 1], 100)] == [1] * 3
    assert list(segments_of([], [], EVERY)) == []


def test_buffers_are_used_again_and_freed():
    buffers = Buffers()
    first, other = buffers.take(8), buffers.take(8)
    assert first.data_ptr() != other.data_ptr() and first.dtype == torch.float32
    given = [first]
    buffers.give(given)
    assert given == [] and buffers.take(9).numel() == 9
    assert buffers.take(8).data_ptr() == first.data_ptr()
    buffers.give([first])
    buffers.clear()
    assert buffers.take(8).numel() == 8


def test_a_step_in_pieces_has_the_bits_of_a_whole_one(tmp_path, monkeypatch):
    def trained(home):
        net = model()
        optimizer = stepped_by_class(net.parameters())
        if home is not None:
            given = at_home(home, home, tmp_path)
            net, optimizer = infinity.wrap_model(net, optimizer, given)
        steps(net, optimizer, 5)
        state = optimizer.state_dict()["state"]
        return (
            {name: value.detach().clone() for name, value in net.state_dict().items()},
            {i: {k: v.clone() for k, v in of.items()} for i, of in state.items()},
        )

    expected = trained(None)
    monkeypatch.setattr(entries, "PIECE", 1000)
    assert same(trained("hostile"), expected)
