"""Draws: detects which generators of random numbers forwards draw from, and in which states.

drawn     the state of a generator (torch's, NumPy's or Python's) before a root forward drew from
          it, as a digest that also covers earlier forwards
"""

from __future__ import annotations

import random

import numpy
import torch

from ... import native
from ...core.machine.device import Device
from .described import number_of

MASK = 2**62 - 1  # of a number that ranks exchange


class Draws:
    """The generators that dropout draws from. Used from the thread that runs forwards."""

    def __init__(self, device: Device):
        self._device = device
        self._before: dict[str, int] = {}  # generators' states before the running forward
        self.drawn: dict[str, int] = {}  # generators that forwards drew from since the last forget

    def begin(self, *, are_compared: bool) -> None:
        """Begins a forward. ``are_compared``: ranks have to draw the same numbers in it."""
        self._before = self._states() if are_compared else {}

    def end(self) -> None:
        """Ends the forward, and adds what it drew."""
        now = self._states() if self._before else {}
        drawn = [name for name, state in now.items() if state != self._before.get(name, state)]
        self.drawn |= {
            name: number_of((self.drawn.get(name, 0), self._before[name])) for name in drawn
        }

    def forget(self) -> None:
        """Forgets what was drawn: ranks have compared it."""
        self.drawn = {}

    def drop(self) -> None:
        """Forgets the running forward, too, which does not end."""
        self._before = {}
        self.forget()

    def _states(self) -> dict[str, int]:
        """Computes digests of all generators."""
        states = {
            "torch's generator": native.crc32c(torch.get_rng_state()),
            "NumPy's generator": _numpy_state(),
            "Python's generator": _python_state(),
        }
        where = self._device.where
        if where.type != "cpu":
            states[f"the generator of {where}"] = native.crc32c(
                torch.get_device_module(where).get_rng_state(where)
            )
        return states


def _python_state() -> int:
    _, internal, gauss = random.getstate()
    # hash(None) differs between processes
    return hash((internal, 0.0 if gauss is None else gauss)) & MASK


def _numpy_state() -> int:
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # the user set another one
        return number_of(state) & MASK
    key = native.crc32c(torch.from_numpy(state["state"]["key"].view(numpy.int32)))
    return hash((key, state["state"]["pos"], state["has_gauss"], state["gauss"])) & MASK
