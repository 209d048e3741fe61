"""The simulated disk: real files, with seeded faults between them and every engine of a program."""

from __future__ import annotations

import collections

import doubles
from doubles import DoubledDisks

from infinity import native

MILD = {"short_transfer": 0.3, "delay": 0.1, "reorder": 0.3}  # a transfer survives them
SAID = ("eio", "enospc", "read_only")  # the disk says what is wrong
LYING = ("lost_write", "torn_write", "bit_flip")  # only checksums can tell


class SimulatedDisk(DoubledDisks):
    """The disk of one program. ``on``: whether what a transfer does not survive happens now;
    what it does survive happens always."""

    def __init__(self, faults: dict[str, float]):
        self.on = self.was_on = False
        self.is_lying = bool(faults.keys() & set(LYING))
        self._faults, self._layers = faults, []

    def layer(self) -> doubles.Doubles | None:
        if not self._faults:
            return None
        seed = int(self._faults.get("seed", 0)) + len(self._layers)
        layer = doubles.layer(doubles.fault_plan(**self._faults | {"seed": seed}))
        layer.on = self.on or not self.is_hard
        self._layers.append(layer)
        return layer

    state_layer = layer

    @property
    def is_hard(self) -> bool:
        """Whether it has faults that a transfer does not survive."""
        return bool(self._faults.keys() & {*SAID, *LYING})

    def turn(self, on: bool) -> None:
        """Begins or ends the faults."""
        self.on, self.was_on = on, self.was_on or on
        for layer in self._layers:
            layer.on = on or not self.is_hard

    def struck(self) -> collections.Counter[str]:
        """Counts the faults so far, by kind."""
        return sum((collections.Counter(layer.struck()) for layer in self._layers), _none())

    def __enter__(self) -> SimulatedDisk:
        self._before, native.disks = native.disks, self
        return self

    def __exit__(self, *_: object) -> None:
        native.disks = self._before


def _none() -> collections.Counter[str]:
    return collections.Counter()
