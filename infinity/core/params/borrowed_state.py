"""BorrowedState: keeps the tensors of optimizer state that users hold equal to the state at home.

borrowed   a tensor that ``optimizer.state[p][key]`` returned, or that was assigned there. Users may
           change it in any way, also through views, NumPy or DLPack, as they may torch's own

Changes are detected by a checksum of all the tensor's bytes, so none is missed. A change reaches
home at the next use of the state. After a step, borrowed tensors that are still held are read
again. With several ranks all of them would have to take part, so there a tensor keeps the state of
the time of the read.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch

from ...errors import UsageError
from ..homes.store import ArrayStore
from ..machine import storage_guard
from ..run.journal import Journal
from ..run.step_counter import StepCounter
from ..units.forms import is_plain, like, local_of, part_of
from ..units.handle import ParamHandle
from .tensors import checksum_of

STEP = "step"  # the key of a step count, kept in the handle and in no array
MOST_STEPS = 2**31
TRIMMED_AT_COUNT, TRIMMED_AT_NBYTES = 64, 32 * 1024 * 1024


class _Borrowed:
    """One borrowed tensor. ``bytes``: our own view of its local part, which outlives its last
    user."""

    _kept: torch.Tensor | None

    def __init__(self, tensor: torch.Tensor, index: int):
        self.bytes = local_of(tensor).detach()
        self.give(tensor)
        self.note(index)

    def give(self, tensor: torch.Tensor) -> None:
        """Sets the tensor that users hold. Keeps it alive until it is checked: users may give it
        other memory, and drop it."""
        self.tensor, self._kept = weakref.ref(tensor), tensor

    def let_go(self) -> None:
        """Stops keeping the tensor alive."""
        self._kept = None

    def note(self, index: int) -> None:
        """Records the tensor's present values as those of the state at home at step ``index``."""
        self.checksum, self.index = checksum_of(self.bytes), index

    @property
    def is_changed(self) -> bool:
        """Whether the tensor's values have changed, or its memory was replaced (``set_``, ``.data
        =``)."""
        if (tensor := self.tensor()) is not None and _memory_of(local_of(tensor)) != _memory_of(
            self.bytes
        ):
            self.bytes = local_of(tensor).detach()
        return checksum_of(self.bytes) != self.checksum

    @property
    def is_held(self) -> bool:
        """Whether anything but this object refers to the tensor's memory."""
        return self.tensor() is not None or storage_guard.is_held_beside([self.bytes])


class BorrowedState:
    """The borrowed tensors of one engine. Used inside a use of the engine, from one thread."""

    def __init__(self, store: ArrayStore, steps: StepCounter, journal: Journal):
        self._store, self._steps, self._journal = store, steps, journal
        self._borrowed: dict[tuple[ParamHandle, str], _Borrowed] = {}
        self._left_count, self._left_nbytes = TRIMMED_AT_COUNT, TRIMMED_AT_NBYTES  # until a trim
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
            own for handle in sorted(self._edits, key=_name_of) if (own := self._edits[handle][1])
        ]

    def edits_of(self, handle: ParamHandle) -> tuple[bytes, bytes] | None:
        """Returns both digests of one parameter; None if nothing was written."""
        return self._edits.get(handle)

    def read(self, handle: ParamHandle, name: str) -> torch.Tensor:
        """Returns array ``name`` of a parameter, or its step count, as a tensor that may be
        changed."""
        borrowed = self._borrowed.get((handle, name))
        if (
            borrowed is not None
            and borrowed.index != self._steps.index
            and not self._refresh(handle, name, borrowed)
        ):
            borrowed = None
        if borrowed is None:
            with torch.inference_mode(False), torch.no_grad():
                tensor = self._read(handle, name)
            self.lend(handle, name, tensor)
            return tensor
        tensor = borrowed.tensor()
        if tensor is None:
            tensor = like(handle.param, borrowed.bytes.detach())
            borrowed.give(tensor)
        return tensor

    def lend(self, handle: ParamHandle, name: str, tensor: torch.Tensor) -> None:
        """Starts to watch ``tensor``, which equals the state at home."""
        self._left_count, self._left_nbytes = (
            self._left_count - 1,
            self._left_nbytes - tensor.nbytes,
        )
        if self._left_count < 0 or self._left_nbytes < 0:
            self._trim()
        self._borrowed[handle, name] = _Borrowed(tensor, self._steps.index)

    def part(self, handle: ParamHandle, name: str) -> None:
        """Makes the tensor of array ``name``, if there is one, the user's own."""
        self._borrowed.pop((handle, name), None)

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
        common, own = self._edits.get(handle, (b"", b""))
        for name, value in values.items():
            told = checksum_of(local_of(value)).to_bytes(4)
            common += name.encode()
            if name == STEP or is_plain(handle.param):
                common += told
            else:
                own = hashlib.blake2b(own + told, digest_size=16).digest()
        self._edits[handle] = hashlib.blake2b(common, digest_size=16).digest(), own
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
        for key in [key for key in self._borrowed if key[0] is handle]:
            del self._borrowed[key]

    def settle(self) -> None:
        """Writes changed tensors home. Raises UsageError for a tensor of two parameters, which
        torch would update twice in a step, for a changed shape, or a change of stale values."""
        self._refuse_shared()
        for (handle, name), borrowed in list(self._borrowed.items()):
            if borrowed.is_changed:
                if borrowed.index != self._steps.index and not handle.flat_param.ranks.alone:
                    raise UsageError(
                        f"optimizer.state: {name} of {handle.name} was read at step"
                        f" {borrowed.index} and changed after step {self._steps.index}. With"
                        " several ranks read it again after each step."
                    )
                wanted = torch.Size() if name == STEP else local_of(handle.param).shape
                if borrowed.bytes.shape != wanted:
                    # The user's own from now on: the state at home stands
                    del self._borrowed[handle, name]
                    raise UsageError(
                        f"optimizer.state: {name} of {handle.name} was given the shape"
                        f" {tuple(borrowed.bytes.shape)}, not {tuple(wanted)}: assign a tensor of"
                        " that shape to optimizer.state[parameter][key]"
                    )
                value = borrowed.bytes.clone()
                value = (
                    checked_step(value, handle.name) if name == STEP else like(handle.param, value)
                )
                self.write(handle, {name: value})
                borrowed.note(self._steps.index)
            borrowed.let_go()
            if not borrowed.is_held:
                del self._borrowed[handle, name]

    def _refuse_shared(self) -> None:
        first: dict[tuple, tuple[ParamHandle, str]] = {}
        for (handle, name), borrowed in self._borrowed.items():
            if borrowed.bytes.numel() == 0:
                continue
            other, of_other = first.setdefault(_memory_of(borrowed.bytes)[:2], (handle, name))
            if (other, of_other) != (handle, name):
                raise UsageError(
                    f"optimizer.state: {of_other} of {other.name} and {name} of {handle.name} are"
                    " one tensor. Assign a copy: optimizer.state[parameter][key] = tensor.clone()."
                )

    def forget_edits(self) -> None:
        """Starts a new digest of writes, after a step has applied them."""
        self._edits = {}

    def refresh(self) -> None:
        """Reads the tensors that are still held again, after a step."""
        for (handle, name), borrowed in list(self._borrowed.items()):
            if not borrowed.is_held:
                del self._borrowed[handle, name]
            else:
                self._refresh(handle, name, borrowed)

    def forget(self) -> None:
        """Releases all borrowed tensors to their users, before all state is loaded."""
        self._borrowed.clear()
        self._edits = {}
        self._forgotten += 1

    def changes_of(self, handle: ParamHandle, name: str) -> tuple[int, int]:
        """Returns a value that differs after every write of array ``name`` of a parameter outside
        of steps."""
        return self._forgotten, self._changes[handle, name]

    def follow(self, handle: ParamHandle, name: str, value: torch.Tensor) -> None:
        """Copies ``value``, which was written home, to the borrowed tensor, if there is one."""
        if (borrowed := self._borrowed.get((handle, name))) is not None:
            borrowed.bytes.copy_(value)
            borrowed.note(self._steps.index)

    def _refresh(self, handle: ParamHandle, name: str, borrowed: _Borrowed) -> bool:
        """Returns False, with the tensor unchanged, if there are other ranks: they do not read
        now."""
        if not handle.flat_param.ranks.alone:
            return False
        with torch.no_grad():
            borrowed.bytes.copy_(local_of(self._read(handle, name)))
        borrowed.note(self._steps.index)
        return True

    def _trim(self) -> None:
        """Settles, which drops tensors that are not held."""
        self.settle()
        self._left_count = max(TRIMMED_AT_COUNT, len(self._borrowed))
        self._left_nbytes = max(
            TRIMMED_AT_NBYTES, sum(borrowed.bytes.nbytes for borrowed in self._borrowed.values())
        )

    def _read(self, handle: ParamHandle, name: str) -> torch.Tensor:
        if name == STEP:
            return torch.tensor(float(handle.step), dtype=torch.float32, device="cpu")
        value = handle.flat_param.read_moment(self._store, name, handle.index)
        return like(handle.param, value.to(local_of(handle.param).device))

    def _write(
        self, handle: ParamHandle, values: dict[str, torch.Tensor], then: Callable[[], None]
    ) -> None:
        with self._store.guarding():
            for name, value in values.items():
                self._changes[handle, name] += 1
                if name == STEP:
                    handle.flat_param.homes.wait()  # experts have the steps until now
                    handle.step = int(value.item())
                else:
                    handle.flat_param.write_moment(
                        self._store, name, handle.index, value, version=self._steps.index
                    )
        handle.keeps_moments = not handle.step
        then()


def _memory_of(tensor: torch.Tensor) -> tuple:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


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
