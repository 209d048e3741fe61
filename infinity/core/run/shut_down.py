"""Shut-down: frees everything that an engine holds, from any thread; idempotent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ... import native
from ...errors import UsageError
from ...ranks.collectives import Collectives
from ..homes.store import ArrayStore
from ..machine.device import Device
from ..step.updates import draw_updates
from ..units.home_arrays import HomeArrays
from .one_thread import wait_for_others


def shut_down(
    scopes: native.Scopes,
    store: ArrayStore,
    homes: list[HomeArrays],
    updaters: list[native.Updater],
    names: list[str],
    collectives: Collectives,
    device: Device,
    closed: list[Callable[[], None]],
) -> None:
    """Frees everything, and calls ``closed``. After an interrupt it is called again, and does the
    rest."""
    if store.pid != os.getpid():
        return  # a forked child ends (a data loader's worker): the parent owns everything
    # Called by the garbage collector on the device's own thread, which the rest waits for.
    if device.is_own_thread:
        threading.Thread(
            target=shut_down,
            args=(scopes, store, homes, updaters, names, collectives, device, closed),
        ).start()
        return
    try:
        # A daemon thread may be in a forward as the process ends: its next one is refused.
        wait_for_others(scopes)
    except UsageError:
        pass  # it makes no progress
    for of_flat_param in homes:
        of_flat_param.settle()
    device.close()
    for updater in updaters:
        draw_updates(updater, store.traffic, names)
    updaters.clear()
    store.close()
    collectives.close()
    for listener in closed:
        listener()
    for of_flat_param in homes:
        of_flat_param.clear()
