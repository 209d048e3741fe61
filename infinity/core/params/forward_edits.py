"""ForwardEdits: finds the changes that a forward made to its own parameters, and sends them
home."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...errors import UsageError
from ...ranks.collectives import Collectives
from ..homes.store import ArrayStore
from ..run.journal import Journal
from ..units.encoding import same_bits
from ..units.flat_param import FlatParam
from ..units.forms import is_common, is_plain, local_of
from ..units.handle import DisableTorchFunction, own_bytes
from .outside_modes import outside_modes
from .tensors import fingerprint

COMPARED_FIRST = 4  # times that a unit is resident: two forwards with their backwards


class ForwardEdits:
    """Changes of one unit's parameters while they are resident, by version counter or, for
    ``.data``, by comparison."""

    def __init__(self, flat_params: Sequence[FlatParam]):
        self._flat_params = flat_params
        self._params = [param for flat in flat_params for param in flat.params]
        # With the value before, if home does not have it.
        self._watched: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self._versions: list[int] = []  # torch's counters when the parameters became resident
        # No counter shows changes of a tensor around its local part through .data or detach().
        # They are compared the first times, and always after a change was found.
        self._around = [param for param in self._params if not is_plain(param)]
        self._compared = 0
        self._edited: set[torch.nn.Parameter] = set()
        self._prints: dict[torch.nn.Parameter, int] = {}

    def begin(self, exported: Sequence[torch.nn.Parameter] = ()) -> None:
        """Begins to watch for changes, before compute. ``exported``: parameters that may be changed
        in a way that torch does not count."""
        self._watched.clear()
        self._versions = self._counts()
        compared = self._around if self._compared < COMPARED_FIRST else self._edited
        self._prints = {param: fingerprint(own_bytes(param)) for param in (*compared, *exported)}
        self._compared += bool(self._around)

    @contextmanager
    def adding_rows(self) -> Iterator[None]:
        """Lets more bytes of the parameters come in the block, which is not a change of them."""
        unchanged = {p: at for p, at in self._prints.items() if fingerprint(own_bytes(p)) == at}
        try:
            yield
        finally:  # else rows of a read that failed would be sent home as an edit
            self._prints |= {param: fingerprint(own_bytes(param)) for param in unchanged}

    def count(self, param: torch.nn.Parameter) -> None:
        """Has torch count a change of ``param`` that the engine makes, and no forward."""
        torch.autograd.graph.increment_version(param)
        self._prints.pop(param, None)
        if self._versions:
            index = next(i for i, other in enumerate(self._params) if other is param)
            self._versions[index] += 1

    def forget(self) -> None:
        """Drops everything watched."""
        self._watched.clear()
        self._prints = {}

    @outside_modes
    def watch(self, param: torch.nn.Parameter, data: torch.Tensor, can_be_compared: bool) -> None:
        """Watches for changes of ``param`` through ``data``. ``can_be_compared``: with the value at
        home."""
        if param not in self._watched:
            self._watched[param] = None if can_be_compared else data.clone()

    def knows(self, param: torch.nn.Parameter) -> bool:
        """Tells whether any change of ``param`` will be found, however it is made."""
        return param in self._prints or param in self._watched

    def look(self) -> bool:
        """Tells whether any parameter was changed, or given to a user who may have changed it."""
        for param, before in self._prints.items():
            # On every data rank: each has the whole local part.
            if fingerprint(own_bytes(param)) != before:
                if not is_plain(param):
                    self._edited.add(param)
                self._watched.setdefault(param, None)
        return self._counts() != self._versions or bool(self._watched)

    def _counts(self) -> list[int]:
        with DisableTorchFunction():
            counts = [param._version for param in self._params]
            return counts + [local_of(param)._version for param in self._around]

    def _counted(self) -> set[torch.nn.Parameter]:
        """Returns the parameters of which torch has counted a change."""
        counted = zip([*self._params, *self._around], self._versions, self._counts())
        return {param for param, before, now in counted if before != now}

    def find(self) -> list[torch.nn.Parameter]:
        """Lists the parameters that were changed. One given to a user is compared with its value
        before, or counts as changed if that was not kept."""
        if not self.look():
            return []
        changed = self._counted()
        changed |= {
            param
            for param, before in self._watched.items()
            if before is None or not same_bits(own_bytes(param), local_of(before)).all()
        }
        return [param for param in self._params if param in changed]

    def take_back(self) -> None:
        """Restores the values before of the parameters that home would not have."""
        for param, before in self._watched.items():
            if before is not None:
                own_bytes(param).copy_(local_of(before))

    def write(
        self,
        store: ArrayStore,
        journal: Journal,
        collectives: Collectives,
        *,
        encoding: Any,
        no_copy: bool,
    ) -> None:
        """Sends every change home. If any parameter was changed, ranks compare it, so every rank
        calls this.

        ``encoding``: of gathered weights, which differ from home then; None: none.
        ``no_copy``: the device's bytes are the home. Raises UsageError if a change cannot be
        distinguished from the value before.
        """
        params = [
            (flat, i, param) for flat in self._flat_params for i, param in enumerate(flat.params)
        ]
        changed = self._counted()
        for flat_param, index, param in params:
            if param not in changed and param not in self._watched:
                continue
            before = self._watched.get(param)
            name = param._infinity.name
            collectives.meet(
                f"changing {name} in a forward", own_bytes(param), over_tensors=is_common(param)
            )
            if encoding is not None and before is None:
                raise UsageError(
                    f"{name} was changed in place inside a forward, but it came there"
                    f" {encoding.said}. Change it through .data, inside"
                    f" infinity.full_params(..., writeback=True), or set {encoding.way_out}."
                )
            if no_copy and before is None:
                if "master" not in flat_param.arrays:
                    continue  # the device's bytes are the master
                raise UsageError(
                    f"{name} was changed in place inside a forward, and its master cannot follow. "
                    "Change it through .data, or inside infinity.full_params(..., writeback=True)."
                )
            parts = flat_param.changes(store, index, own_bytes(param), before=before)
            version = flat_param.weight.extent.version
            param._infinity.forward_edits += 1
            write = partial(flat_param.write_changes, store, index, parts, version=version)
            journal.carry_out(partial(self._finish, param, write))

    def _finish(self, param: torch.nn.Parameter, write: Callable[[], None]) -> None:
        """Writes a change home. Can be called again."""
        write()
        self._watched.pop(param, None)  # from here on nobody may restore the value before
