"""A device that runs work at once and keeps its order, with kernels that take the gradient off the
weight, as SGD does, and spoil their copy of it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch

from infinity.core.machine.device import Device
from infinity.core.machine.traffic import Traffic

NOW = SimpleNamespace(name="now")  # the event after the compute so far


class Kernels:
    """Keep what they were given, too."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []

    def step(self, layout, *, runs, stream, weight: int, grad: int) -> None:
        for run in runs:
            values, grads = (
                torch.frombuffer(
                    (ctypes.c_float * (run.end - run.begin)).from_address(base + 4 * run.begin),
                    dtype=torch.float32,
                )
                for base in (weight, grad)
            )
            values.sub_(grads)
            grads.fill_(-1.0)
            self.runs.append((run.begin, run.end))


class Recorder(Device):
    """Runs work at once, and keeps after what it was ordered."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), Traffic())
        self.kernels, self.puts = Kernels(), []

    def now(self):
        return NOW

    def put(self, queue, work, *, after=(), transfer=None):
        super().put(queue, work, transfer=transfer)
        event = SimpleNamespace(name=f"{queue} {len(self.puts)}", done=True)
        self.puts.append((queue, event, list(after)))
        return event

    def of(self, queue: str) -> list[tuple]:
        return [(event, after) for name, event, after in self.puts if name == queue]
