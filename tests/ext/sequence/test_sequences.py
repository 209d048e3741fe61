"""Sequences: ranks with parts of the same sequences are told what differs at their forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pair
import pytest
import torch
from torch import nn

from infinity.core.machine.device import Device
from infinity.core.machine.traffic import Traffic
from infinity.core.seams import Events
from infinity.errors import UsageError
from infinity.ext.sequence.sequences import Sequences
from infinity.ranks import kinds
from infinity.ranks.collectives import Collectives
from infinity.ranks.parallel_dims import ParallelDims

Forward = tuple[nn.Module, tuple, dict]
SHORT, LONG = torch.zeros(2, 3), torch.zeros(2, 4)


@pytest.fixture
def begin(monkeypatch) -> Callable[..., list]:
    """Begins a forward on two ranks: what each raised, and the meetings that both came to."""
    monkeypatch.setattr(kinds, "all_gather", pair.all_gather)
    monkeypatch.setattr(kinds, "dist", pair)
    monkeypatch.setattr(ParallelDims, "world_rank", property(lambda ranks: ranks.cp_group.rank + 4))

    def run(*forwards: Forward) -> tuple[list[str | None], list[str]]:
        def make(meeting: pair.Pair, rank: int) -> tuple[Collectives, int]:
            return Collectives(ParallelDims(cp_group=pair.PairChannel(meeting, rank))), rank

        def work(made: tuple[Collectives, int]) -> tuple[str | None, list[str]]:
            collectives, rank = made
            device = Device(torch.device("cpu"), Traffic())
            try:
                Sequences(collectives, device).compare(*forwards[rank])
            except UsageError as error:
                return str(error), collectives.ranks.cp_group.pair.meetings
            return None, collectives.ranks.cp_group.pair.meetings

        both = pair.run_pair(make, work)
        return [error for error, _ in both], both[0][1]

    return run


def of(*args: object, model: nn.Module | None = None, **kwargs: object) -> Forward:
    return model if model is not None else nn.Identity(), args, kwargs


def test_equal_shapes_pass_whatever_the_values_are(begin):
    """Claim: the ranks meet once. Twin: the same tensors under two names are told."""
    errors, meetings = begin(of(torch.ones(2, 3)), of(torch.zeros(2, 3)))
    assert errors == [None, None] and meetings.count("spans") == 1
    errors, _ = begin(of(ids=SHORT), of(more=SHORT))
    assert None not in errors


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (of(SHORT), of(LONG), ("argument 0", "float32 of (2, 3)", "float32 of (2, 4)")),
        (
            of(ids=SHORT),
            of(ids=SHORT.to(torch.int64)),
            ("ids", "float32 of (2, 3)", "int64 of (2, 3)"),
        ),
        (
            of(SHORT),
            of(SHORT, model=nn.Identity().eval()),
            ("the mode", "training, with gradients", "evaluation, with gradients"),
        ),
        (of(SHORT, mask=SHORT), of(SHORT), ("mask", "float32 of (2, 3)", "absent")),
        (of(SHORT), of(SHORT, mask=SHORT), ("mask", "absent", "float32 of (2, 3)")),
        (
            of(SHORT, {"ids": SHORT}),
            of(SHORT, {"ids": LONG}),
            ("argument 1.ids", "float32 of (2, 3)", "float32 of (2, 4)"),
        ),
    ],
    ids=["length", "dtype", "mode", "missing", "more", "nested"],
)
def test_all_ranks_are_told_the_first_thing_that_differs(begin, first, second, told):
    """Claim: by the ranks' numbers in the job, which are 4 and 5 here."""
    name, here, there = told
    errors, _ = begin(first, second)
    assert errors[0] == errors[1]
    assert f"a forward: {name} is {here} on rank 4 and {there} on rank 5," in errors[0]


def test_without_parts_of_sequences_nothing_is_compared():
    """Twin: with a cp axis every root forward is compared."""
    device, events = Device(torch.device("cpu"), Traffic()), Events()
    assert Sequences.begin(None, device, Collectives(), events) is None and not events.pass_begun
    collectives = Collectives(ParallelDims(cp_group=SimpleNamespace()))
    sequences = Sequences.begin(None, device, collectives, events)
    assert events.pass_begun == [sequences.compare]


def test_other_ranks_with_these_units_are_told_too(begin, monkeypatch):
    """Twin: nobody is, where nothing differs."""
    told: list[str] = []

    @contextmanager
    def heard(self: Collectives, channel: object) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            told.append(str(error))
            raise

    monkeypatch.setattr(Collectives, "heard_elsewhere", heard)
    begin(of(SHORT), of(SHORT))
    assert told == []
    errors, _ = begin(of(SHORT), of(LONG))
    assert told == errors
