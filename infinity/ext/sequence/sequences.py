"""Sequences: compares the inputs of ranks with other parts of the same sequences (cp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from ...core.machine.device import Device
from ...core.seams import Events, Extension
from ...errors import UsageError
from ...ranks.collectives import Collectives
from ..dtensor.described import mode_of, number_of, shape_of, tensors_in


class Sequences(Extension):
    """Compares the inputs of root forwards over the ranks of the cp axis: shapes, dtypes and the
    mode. If these differ, the tensors that the ranks exchange do not fit."""

    def __init__(self, collectives: Collectives, device: Device):
        self._collectives, self._device = collectives, device
        self._channel = collectives.ranks.cp_group

    @classmethod
    def begin(
        cls, config: Any, device: Device, collectives: Collectives, events: Events
    ) -> Sequences | None:
        """Returns the comparison if there is a cp axis, and adds it to ``events``."""
        if collectives.ranks.cp_group is None:
            return None
        sequences = cls(collectives, device)
        events.pass_begun.append(sequences.compare)
        return sequences

    def compare(self, root: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Compares what a root forward was given. Every rank calls this, and waits for the others.
        Raises UsageError, on all of these ranks, if their shapes, dtypes or modes differ."""
        named = tensors_in([*enumerate(args), *kwargs.items()], "")
        described = {"the mode": mode_of(root, self._device)} | {
            name: shape_of(tensor) for name, tensor in named
        }
        with self._collectives.heard_elsewhere(self._channel):
            spans = self._collectives.spans(self._channel, "a forward", [number_of(described)])
            if spans[0][0] != spans[0][1]:
                self._refuse(described)

    def _refuse(self, given: dict[str, Any]) -> NoReturn:
        mine = self._collectives.ranks.world_rank, given
        (first, firsts), *others = self._collectives.collect(
            mine, "what differs at a forward", [self._channel]
        )
        rank, theirs = next((rank, theirs) for rank, theirs in others if theirs != firsts)
        name = next(name for name in {**firsts, **theirs} if firsts.get(name) != theirs.get(name))
        raise UsageError(
            f"a forward: {name} is {firsts.get(name, 'absent')} on rank {first} and"
            f" {theirs.get(name, 'absent')} on rank {rank}, though they have parts of the same"
            " sequences. Give all ranks of one coordinate of the other data axes parts of one"
            " batch, of equal lengths."
        )
