"""Pace: the seconds in which the device computes a model's forwards, without what it waits for.

Each innermost owner of units is timed from its pre-hook to the end of its forward. Its weights are
gathered before that, so waits for disks, copies and other ranks are left out. Forwards that a
backward repeats are counted, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...core.run.job import Job
from ...core.wrap.described_model import read_model


class Pace:
    """Times the forwards of a wrapped ``model`` until :meth:`close`. Used from the threads that run
    forwards, one at a time."""

    def __init__(self, model: nn.Module, job: Job):
        self._device, self._seconds = job.device, 0.0
        self._running: list[AbstractContextManager[None]] = []
        itself = weakref.ref(self)  # hooks must not keep it

        def begin(module: nn.Module, args: Any) -> None:
            if (pace := itself()) is not None:
                pace._begin()

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if (pace := itself()) is not None:
                pace._end()

        begin, end = torch.compiler.disable(begin), torch.compiler.disable(end)
        self._hooks = [
            hook
            for module in _innermost(model, {unit.name for unit in job.units})
            for hook in (
                module.register_forward_pre_hook(begin),  # behind the engine's, which may wait
                module.register_forward_hook(end, prepend=True, always_call=True),
            )
        ]

    def _begin(self) -> None:
        timing = self._device.timing(self._count)
        timing.__enter__()
        self._running.append(timing)

    def _end(self) -> None:
        if self._running:  # not after an exception in another pre-hook
            self._running.pop().__exit__(None, None, None)

    def _count(self, start: float, end: float) -> None:
        self._seconds += end - start

    def take(self) -> float:
        """Returns the seconds since the last call. A device's arrive when they are over, perhaps in
        a later step."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Removes the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()


def _innermost(model: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Yields the modules that are units of their own, or are called inside such a container, and
    contain no other; ``model`` itself if there are none."""
    described = read_model(model)
    owners = {
        part
        for module, name in described.modules.items()
        if name in names
        for part in described.called_in(module)
    }
    found = [
        module
        for module in owners
        if not any(inner in owners for inner in module.modules() if inner is not module)
    ]
    yield from found or [model]
