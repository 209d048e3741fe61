"""Faults that are planted in the engine, to see that the simulator finds each of them.

**plant**: a change of one function of the engine, in a child. It is a twin of the programs that
nothing is wrong with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infinity
from infinity.core.grads.bank import GradientBank
from infinity.core.homes.allocator import ArrayAllocator
from infinity.core.homes.store import ArrayStore
from infinity.core.machine.tiers import Tier
from infinity.core.run.engine import Engine
from infinity.core.run.journal import Journal
from infinity.core.units.flat_param import FlatParam

PLANTS: dict[str, Callable[[], None]] = {}


def plant(make: Callable[[], None]) -> Callable[[], None]:
    PLANTS[make.__name__.replace("_", " ")] = make
    return make


@plant
def a_landing_is_dropped() -> None:
    land = GradientBank._land

    def dropped(self: GradientBank, handle: Any, grad: Any) -> None:
        if handle.index != 1:
            land(self, handle, grad)

    GradientBank._land = dropped


@plant
def a_write_is_skipped() -> None:
    FlatParam.write_changes = lambda self, *args, **given: None


@plant
def a_save_is_skipped() -> None:
    """The second one to a folder, and all that follow."""
    save = infinity.save_checkpoint

    def skipped(path: Path, *args: Any, **given: Any) -> None:
        if not Path(path).exists():
            save(path, *args, **given)

    infinity.save_checkpoint = skipped


@plant
def a_descriptor_is_left() -> None:
    load = infinity.load_checkpoint

    def leaking(*args: Any) -> Any:
        os.dup(0)
        return load(*args)

    infinity.load_checkpoint = leaking


@plant
def a_thread_is_left() -> None:
    park = infinity.park

    def leaking(*args: Any, **given: Any) -> None:
        threading.Thread(target=threading.Event().wait, name="infinity left", daemon=True).start()
        park(*args, **given)

    infinity.park = leaking


@plant
def a_wait_has_no_end() -> None:
    Engine.recover = lambda self, **given: threading.Event().wait()


@plant
def an_interrupted_pass_stays() -> None:
    Engine.recover = lambda self, **given: None


@plant
def a_change_is_left_half_done() -> None:
    Journal.finish = lambda self: None


@plant
def room_is_promised_twice() -> None:
    """To what the plan needs in a pass, and to arrays that stay."""

    def careless(self: ArrayAllocator, tier: Tier, nbytes: int, what: str) -> None:
        if tier is not Tier.NVME:
            self._ledger.reserve(tier, nbytes, what).release()

    ArrayAllocator.make_room = careless


@plant
def checksums_are_not_verified() -> None:
    init = ArrayStore.__init__

    def careless(self: ArrayStore, *args: Any, checksums: bool, **given: Any) -> None:
        init(self, *args, checksums=False, **given)

    ArrayStore.__init__ = careless
