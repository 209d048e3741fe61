"""Removal: removes folders of large files, whose names go immediately and whose space is freed by a
thread.

[Note: why a thread] A file system frees the blocks of a large file when its last name and its last
descriptor are gone, and is slow at it. A thread closes the last descriptors, so that a save need
not wait.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

FILES_HELD = 256  # the caller waits for the space of files beyond this number
_under_way: list[tuple[threading.Thread, Callable[[], None]]] = []


def remove_folder(folder: Path) -> None:
    """Removes ``folder`` with the files in it. Files that cannot be removed stay. The space is free
    when :func:`wait_for_space` returns."""
    held: list[int] = []
    try:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if len(held) < FILES_HELD and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        held.append(
                            os.open(
                                entry.path,
                                os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
                            )
                        )
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        free = partial(_close, held, folder)
        thread = threading.Thread(target=free, name="infinity-removal")
        _under_way.append((thread, free))
        try:
            thread.start()
        except RuntimeError:
            # No more threads, or the interpreter is ending: a written checkpoint must not fail.
            free()


def wait_for_space() -> None:
    """Blocks until all space of removed folders is free."""
    for entry in tuple(_under_way):  # another thread may wait too, and remove entries
        thread, free = entry
        if thread.ident is None:  # interrupted before the thread started
            free()
        elif thread is not threading.current_thread():
            thread.join()
        with suppress(ValueError):
            _under_way.remove(entry)


def _close(held: list[int], folder: Path) -> None:
    """Closes each descriptor once. May be called several times, from any thread."""
    with suppress(IndexError):
        while True:
            descriptor = held.pop()
            # From a network file system; the descriptor is closed all the same.
            with suppress(OSError):
                os.close(descriptor)
    # Over a network an open file keeps a hidden name, and so its folder.
    shutil.rmtree(folder, ignore_errors=True)


# A child also has the descriptors, and would keep the space.
os.register_at_fork(before=wait_for_space)
