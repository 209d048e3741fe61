"""BorrowedState: the values of the optimizer's state at home, and the tensors of them that users
hold.

``optimizer.state[p][key]`` returns a tensor, or has one assigned, that follows the state at home.
Users may change it in any way, also through views, NumPy or DLPack, as they may torch's own. A
change reaches home at the next use of the state. With several ranks all of them would have to read
after a step, so there a tensor keeps the state of the time of the read.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...errors import UsageError
from ..homes.store import ArrayStore
from ..run.journal import Journal
from ..run.step_counter import StepCounter
from ..units.forms import is_plain, like, local_of, part_of
from ..units.handle import ParamHandle
from .lent import Lents, Source, Written
from .tensors import checksum_of

STEP = "step"  # the key of a step count, kept in the handle and in no array
MOST_STEPS = 2**31


@dataclass(frozen=True)
class StateSource(Source):
    """Array ``name`` of the optimizer's state, or the step count, of every parameter."""

    is_state = True

    state: BorrowedState
    name: str

    def name_of(self, handle: ParamHandle) -> str:
        """Names the array and the parameter."""
        return f"{self.name} of {handle.name}"

    def stamp(self, handle: ParamHandle) -> Any:
        """Returns the step, and the number of writes outside of steps."""
        return self.state.stamp(handle, self.name)

    def read(self, handle: ParamHandle) -> torch.Tensor:
        """Reads the local part of the value, in fp32 or its dtype. Every rank calls this."""
        return self.state.read_home(handle, self.name)

    def check(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Raises UsageError for an invalid step count."""
        if self.name == STEP:
            checked_step(value, handle.name)

    def write(self, written: Sequence[Written]) -> None:
        """Writes copies of the values home, one after the other."""
        for handle, value, then in written:
            if self.name == STEP:
                value = checked_step(value, handle.name)
            else:
                value = like(handle.param, value.clone())
            self.state.write(handle, {self.name: value}, then)


class BorrowedState:
    """The optimizer state of one engine. Used inside a use of the engine, from one thread."""

    def __init__(self, store: ArrayStore, steps: StepCounter, journal: Journal, lents: Lents):
        self._store, self._steps, self._journal, self._lents = store, steps, journal, lents
        self._edits: dict[ParamHandle, tuple[bytes, bytes]] = {}
        self._changes: Counter[tuple[ParamHandle, str]] = Counter()  # writes home
        self._forgotten = 0  # number of times that all state was loaded

    @property
    def edits(self) -> list[bytes]:
        """Digests of the writes since the last step. All ranks must have written the same."""
        return [self._edits[handle][0] for handle in sorted(self._edits, key=_name_of)]

    @property
    def own_edits(self) -> list[bytes]:
        """Digests of the writes to values of which other ranks have other local parts."""
        return [
            edit for handle in sorted(self._edits, key=_name_of) if (edit := self._edits[handle][1])
        ]

    def edits_of(self, handle: ParamHandle) -> tuple[bytes, bytes] | None:
        """Returns both digests of one parameter; None if nothing was written."""
        return self._edits.get(handle)

    def stamp(self, handle: ParamHandle, name: str) -> tuple[int, int, int]:
        """Returns a value that differs after every step, and every write of array ``name`` of a
        parameter."""
        return self._steps.index, self._forgotten, self._changes[handle, name]

    def read(self, handle: ParamHandle, name: str) -> torch.Tensor:
        """Returns array ``name`` of a parameter, or its step count, as a tensor that may be
        changed."""
        source = StateSource(self, name)
        if (tensor := self._lents.follower(source, handle)) is None:
            with torch.inference_mode(False), torch.no_grad():
                tensor = like(handle.param, source.read(handle))
            self._lents.follow(source, handle, tensor, is_ours=True)
        return tensor

    def read_home(self, handle: ParamHandle, name: str) -> torch.Tensor:
        """Reads the local part of array ``name``, or the step count, from home."""
        if name == STEP:
            return torch.tensor(float(handle.step), dtype=torch.float32, device="cpu")
        value = handle.flat_param.read_moment(self._store, name, handle.index)
        return value.to(local_of(handle.param).device)

    def lend(self, handle: ParamHandle, name: str, tensor: torch.Tensor) -> None:
        """Starts to watch ``tensor``, a user's own that equals the state at home."""
        self._lents.follow(StateSource(self, name), handle, tensor)

    def part(self, handle: ParamHandle, name: str) -> None:
        """Makes the tensor of array ``name``, if there is one, the user's own."""
        self._lents.part(source=StateSource(self, name), handle=handle)

    def write(
        self,
        handle: ParamHandle,
        values: Mapping[str, torch.Tensor],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes ``values`` of arrays, and of the step count, home. Their shapes are checked
        before. ``then``: called at the end of the change. Raises UsageError inside
        step_in_backward()."""
        if self._steps.streaming:
            raise UsageError(
                f"optimizer.state of {handle.name} inside `with optimizer.step_in_backward()`: "
                "change it before that block, or after step()"
            )
        values = {
            name: (
                value if name == STEP else part_of(handle.param, value, f"{name} of {handle.name}")
            )
            for name, value in values.items()
        }
        common, local = self._edits.get(handle, (b"", b""))
        for name, value in values.items():
            checksum = checksum_of(local_of(value)).to_bytes(4)
            common += name.encode()
            if name == STEP or is_plain(handle.param):
                common += checksum
            else:
                local = hashlib.blake2b(local + checksum, digest_size=16).digest()
        self._edits[handle] = hashlib.blake2b(common, digest_size=16).digest(), local
        self._journal.carry_out(partial(self._write, handle, values, then))

    def restart(self, handle: ParamHandle, names: list[str]) -> None:
        """Resets the state of a parameter to that before its first step. Its borrowed tensors
        become the user's own."""
        if handle.has_state:
            shape = local_of(handle.param).shape
            zeros = like(
                handle.param, torch.zeros((), dtype=torch.float32, device="cpu").expand(shape)
            )
            self.write(
                handle, {name: zeros for name in names} | {STEP: torch.tensor(0.0, device="cpu")}
            )
            handle.keeps_moments = False
        self._lents.part(handle=handle)

    def forget_edits(self) -> None:
        """Starts a new digest of writes, after a step has applied them."""
        self._edits = {}

    def forget(self) -> None:
        """Releases all tensors to their users, before all state is loaded."""
        self._lents.part()
        self._edits = {}
        self._forgotten += 1

    def _write(
        self, handle: ParamHandle, values: dict[str, torch.Tensor], then: Callable[[], None]
    ) -> None:
        with self._store.guard:
            for name, value in values.items():
                self._changes[handle, name] += 1
                if name == STEP:
                    handle.flat_param.homes.wait()  # all rows have the steps until now
                    handle.step = int(value.item())
                else:
                    handle.flat_param.write_moment(
                        self._store, name, handle.index, value, version=self._steps.index
                    )
        handle.keeps_moments = not handle.step
        then()


def _name_of(handle: ParamHandle) -> str:
    return handle.name


def checked_step(value: object, name: str) -> torch.Tensor:
    """Returns a step count as a tensor. Raises UsageError for an invalid one."""
    number = float(value.item() if isinstance(value, torch.Tensor) else value)
    if not (number.is_integer() and 0 <= number < MOST_STEPS):
        raise UsageError(
            f"optimizer.state: step of {name} is {number:g}; it must be a whole number from 0 to"
            f" {MOST_STEPS - 1}"
        )
    return torch.tensor(number, dtype=torch.float32, device="cpu")
