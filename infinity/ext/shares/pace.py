"""Pace: the seconds in which the device computes a model's forwards, without what it waits for.

Each innermost forward of an owner of units is timed from when its weights are there until it ends,
so waits for disks, copies and other ranks are left out. Forwards that a backward repeats are
counted, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ...core.machine.device import Device
from ...core.run.job import Job
from ...core.seams import Extension


class _Forward:
    """A running forward. ``is_innermost``: no other one has begun inside it."""

    timing: AbstractContextManager[None]

    def __init__(self, module: nn.Module):
        self.module, self.is_innermost = module, True


class Pace(Extension):
    """Times the forwards of one wrapped model on ``device``. Used from the threads that run
    forwards, one at a time."""

    def __init__(self, device: Device):
        self._device, self._seconds = device, 0.0
        self._running: list[_Forward] = []

    def install(self, job: Job, model: object) -> None:
        """Adds listeners for forwards."""
        job.events.forward_begun.append(self.begin)
        job.events.forward_ended.append(self.end)

    def begin(self, module: nn.Module, units: Any) -> None:
        """Begins to time a forward of ``module``."""
        if self._running:
            self._running[-1].is_innermost = False
        forward = _Forward(module)

        def count(start: float, end: float) -> None:
            self._seconds += end - start if forward.is_innermost else 0.0

        forward.timing = self._device.timing(count)
        forward.timing.__enter__()
        self._running.append(forward)

    def end(self, module: nn.Module) -> None:
        """Ends the forward of ``module``, and those inside it that an exception has ended."""
        while self._running:
            forward = self._running.pop()
            forward.timing.__exit__(None, None, None)
            if forward.module is module:
                return

    def drop(self, job: Job) -> None:
        """Forgets the forwards that an exception has ended."""
        while self._running:
            self._running.pop().is_innermost = False

    def take(self) -> float:
        """Returns the seconds since the last call. A device's arrive when they are over, perhaps in
        a later step."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
