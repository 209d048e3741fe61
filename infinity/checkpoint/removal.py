"""Removal: folders of large files whose names go at once and whose space follows.

A file system frees the blocks of a large file when its last name and its last descriptor are gone, and takes long for it. Here a thread
closes the last descriptors, so that a save need not wait.
"""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

FILES_HELD = 256  # the space of more files than that goes while the caller waits
_under_way: list[threading.Thread] = []


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
        thread = threading.Thread(target=_close, args=(held, folder), name="infinity-removal")
        _under_way.append(thread)
        try:
            thread.start()
        except (
            RuntimeError
        ):  # the system refuses a thread, or the interpreter is about to end: a checkpoint that is written is not to fail of it
            _close(held, folder)


def wait_for_space() -> None:
    """Returns when all space is free that removed folders took."""
    for thread in tuple(_under_way):  # another thread may wait, too, and take them off
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join()
        with suppress(ValueError):
            _under_way.remove(thread)


def _close(held: list[int], folder: Path) -> None:
    for descriptor in held:
        os.close(descriptor)
    # Over a network a file that is open keeps a name of the system's own, and its folder stays for it.
    shutil.rmtree(folder, ignore_errors=True)


os.register_at_fork(before=wait_for_space)  # a child has the descriptors too, and would keep the space
