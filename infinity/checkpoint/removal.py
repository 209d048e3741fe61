"""Removal: folders of large files whose names go at once and whose space follows.

A file system frees the blocks of a large file when its last name and its last descriptor are gone, and takes long for it. Here a thread
closes the last descriptors, so that a save need not wait.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

FILES_HELD = 256  # the space of more files than that goes while the caller waits
_under_way: list[tuple[threading.Thread, Callable[[], None]]] = []


def remove_folder(folder: Path) -> None:
    """Removes ``folder`` with the files in it. What cannot be removed stays. The space is free when :func:`wait_for_space` returns."""
    held: list[int] = []
    try:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if len(held) < FILES_HELD and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        held.append(os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        free = partial(_close, held, folder)
        thread = threading.Thread(target=free, name="infinity-removal")
        _under_way.append((thread, free))
        try:
            thread.start()
        except (
            RuntimeError
        ):  # no more threads, or the interpreter is about to end: a checkpoint that is written does not fail of it
            free()


def wait_for_space() -> None:
    """Returns when all space is free that removed folders took."""
    for entry in tuple(_under_way):  # another thread may wait, too, and take them off
        thread, free = entry
        if thread.ident is None:  # an exception came before it had started
            free()
        elif thread is not threading.current_thread():
            thread.join()
        with suppress(ValueError):
            _under_way.remove(entry)


def _close(held: list[int], folder: Path) -> None:
    """Closes each descriptor once, however often and by whomever it is called."""
    with suppress(IndexError):
        while True:
            descriptor = held.pop()
            with suppress(OSError):  # of a network's file system; it is closed all the same
                os.close(descriptor)
    # Over a network a file that is open keeps a name of the system's own, and its folder stays for it.
    shutil.rmtree(folder, ignore_errors=True)


os.register_at_fork(before=wait_for_space)  # a child has the descriptors too, and would keep the space
