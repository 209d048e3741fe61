"""Exposure: makes one unit's parameters ordinary ones while a forward or backward uses them, and
sends home what a forward changed in them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from ...errors import UsageError
from ...ranks.collectives import Collectives
from ...torch_private import clear_python_key, set_python_key
from ..homes.store import ArrayStore
from ..machine.tiers import Tier
from ..params.forward_edits import ForwardEdits
from ..params.parameter import ResidentParameter, StoredParameter, class_at_rest
from ..run.journal import Journal
from .added import always_rests
from .flat_param import FlatParam
from .forms import form_of
from .handle import own_bytes
from .unit_buffers import UnitBuffers

CLASSES = ResidentParameter, StoredParameter


class Exposure:
    """The parameters of one unit, as modules and users see them.

    refusal
        Why a forward may not change them, as changes are lost; "": it may.
    edits
        What was changed since :meth:`begin`.
    """

    def __init__(
        self,
        name: str,
        flat_params: Sequence[FlatParam],
        buffers: UnitBuffers,
        collectives: Collectives,
        *,
        refusal: str = "",
    ):
        self._name, self._flat_params, self._buffers = name, flat_params, buffers
        self._collectives, self._ranks = collectives, collectives.ranks
        self._refusal = refusal
        self.edits = ForwardEdits(flat_params)

    def begin(self, *, shows: bool = True) -> None:
        """Watches the parameters for changes, while a forward or backward uses them. ``shows``:
        makes them ordinary ones."""
        if shows:
            self.show()
        # Values exported before this hold were compared with home already. A change is lost if the
        # device's bytes have a copy, elsewhere or as masters.
        self.edits.begin(
            [
                param
                for buffer in self._buffers.all
                if not self._ranks.alone
                or buffer.flat_param.weight.tier is not Tier.DEVICE
                or "master" in buffer.flat_param.arrays
                if buffer.is_exported
                for param in buffer.flat_param.params
            ]
        )

    def show(self) -> None:
        """Makes the parameters ordinary ones."""
        self._switch(rests=False)

    def end(self) -> None:
        """Hooks every use of a parameter: the engine handles it, even while its bytes are on the
        device.

        Otherwise a write would change a copy that is about to be dropped, and be lost without an
        error.
        """
        self._switch(rests=True)

    def forget(self) -> None:
        """Drops everything watched, after an exception, and hooks every use of a parameter."""
        self.edits.forget()
        self.end()

    def attach(self) -> None:
        """Puts the parameters to rest for the first time. Some stay so."""
        for flat_param in self._flat_params:
            for param in filter(always_rests, flat_param.params):
                param.__class__ = class_at_rest(param)
                set_python_key(param)
        self.end()

    @cached_property
    def _switched(self) -> list[tuple[torch.nn.Parameter, Any]]:
        """The parameters that do not always rest, each with the classes of its form."""
        return [
            (param, form_of(param).classes)
            for flat_param in self._flat_params
            for param in flat_param.params
            if not always_rests(param)
        ]

    def _switch(self, *, rests: bool) -> None:
        plain = [param for param, classes in self._switched if classes is None]
        if not rests:
            clear_python_key(*plain)  # first: a class that is asked has to answer
        for param, classes in self._switched:
            param.__class__ = (classes or CLASSES)[rests]
        if rests:
            set_python_key(*plain)

    def watch(self, param: torch.nn.Parameter, data: torch.Tensor, *, no_copy: bool) -> None:
        """Watches for changes through ``data``, the ``param.data`` that a user got: torch does not
        count them."""
        self.edits.watch(param, data, self._can_be_compared(no_copy))

    def _can_be_compared(self, no_copy: bool) -> bool:
        """Returns whether a comparison with home shows a change. Not for a device home, which has
        no other copy, nor for gathers in an encoding, whose values differ anyway. The home of
        weights that may not change may have a shard only: each rank compares with a whole copy, so
        that all find the same."""
        return not self._refusal and not no_copy and self._ranks.encoding is None

    def find_edits(self, store: ArrayStore, *, no_copy: bool) -> bool:
        """Returns whether a forward may have changed its own parameters (clamping a weight, for
        example). ``no_copy``: the weights have no second copy (home on the device), or rows
        are missing, so that comparing with home finds no change.

        Raises UsageError if weights were changed that may not be, or if a change cannot be carried
        home.
        """
        if self._refusal:
            if self.edits.find():
                raise UsageError(self._refusal)
            return False
        self._look_at_exports(store, no_copy)
        return self.edits.look()

    def write_edits(self, store: ArrayStore, journal: Journal, *, no_copy: bool) -> None:
        """Sends home what :meth:`find_edits` has found. Raises UsageError if a change cannot be
        distinguished from the earlier value."""
        self.edits.write(
            store, journal, self._collectives, encoding=self._ranks.encoding, no_copy=no_copy
        )

    def _look_at_exports(self, store: ArrayStore, no_copy: bool) -> None:
        """Watches parameters changed through an export (NumPy, DLPack), which torch does not count.

        Raises UsageError if an export moved them to other memory, or if other ranks would need the
        change.
        """
        for buffer in self._buffers.all:
            if buffer.is_moved:
                raise UsageError(
                    f"share_memory_() of weights of unit {self._name}: what other processes would"
                    " see of them is not what is trained, whose home is on"
                    f" {buffer.flat_param.weight.tier}. Share a copy:"
                    " weight.detach().clone().share_memory_()."
                )
            if not self._can_be_compared(no_copy) or not buffer.is_exported:
                continue
            for index, param in enumerate(buffer.flat_param.params):
                if self.edits.knows(param) or buffer.flat_param.holds(
                    store, index, own_bytes(param)
                ):
                    continue
                if not self._ranks.alone:
                    raise UsageError(
                        f"{buffer.flat_param.names[index]} was changed in a forward through an"
                        " array or an export of it. With several ranks change it through .data, or"
                        " inside infinity.full_params(..., writeback=True)."
                    )
                self.edits.watch(param, own_bytes(param), True)
