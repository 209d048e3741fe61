"""CheckpointFolder: locks a checkpoint's folder for writers, and keeps data that others read.

    manifest.json          the checkpoint: names the complete data folder
    infinity-<random>/     data; removable if no manifest names it and no process uses it
    .lock                  exists while a process saves and holds its lock (flock); a killed
                           process leaves it, empty and unlocked

A reader holds a shared lock on a file of the data that it reads. A writer that has replaced the
manifest removes old data only if it gets that lock exclusively; data that is being read is left to
the next save. This works across hosts if the file system's flock does (NFS from 4, Lustre with -o
flock).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import StorageError, UsageError
from .removal import remove_folder

DATA_NAME = re.compile(r"infinity-[0-9a-f]{12}")
LOCK = ".lock"
# The file of a data folder that readers lock; every save writes one.
OF_READERS = "other.safetensors"
TRIES = 100  # attempts to read while others save
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)
# Errors of file systems without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


class Busy(Exception):
    """Another process has the lock."""


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Locks the folder ``root`` for writing inside the block, and creates it if needed. Raises
    UsageError while another process writes it, OSError if it cannot be written."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / LOCK
    try:
        lock = _made_and_locked(path)
    except Busy:
        raise UsageError(
            f"another process is saving a checkpoint to {root} just now: two jobs need two folders."
            " If it is the same job, wait until the other save is over."
        ) from None
    try:
        yield
    finally:
        try:
            with contextlib.suppress(OSError):
                # While it is held: a process that has opened it finds no link to it.
                path.unlink(missing_ok=True)
        finally:
            lock.close()


def _open(path: Path, flags: int) -> io.FileIO:
    """Opens a file that is no link. It is an object, not a number: whatever line an interrupt comes
    behind, it is closed, and its lock is free."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return io.FileIO(path, opener=lambda name, _: os.open(name, flags, 0o666))


def _made_and_locked(path: Path) -> io.FileIO:
    """Returns the locked lock file ``path``. Raises Busy, or OSError if it cannot be created."""
    for _ in range(TRIES):
        lock = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(lock, fcntl.LOCK_EX)
            status = os.fstat(lock.fileno())
            if status.st_size:
                raise UsageError(
                    f"{path} is not an (empty) lock file: a save would remove it. Give another"
                    " folder."
                )
            if status.st_nlink:
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()  # its holder has just removed it
    raise Busy


@contextmanager
def reading(root: Path, read_name: Callable[[], str]) -> Iterator[Path]:
    """Yields the data folder that ``read_name`` reads from the manifest, and keeps it inside the
    block. If a save replaces it before it is locked, tries again with the new data. Raises the
    errors of ``read_name``."""
    for _ in range(TRIES):
        name = read_name()
        held = hold(root / name)
        # If there is nothing to lock, reading reports what is missing.
        if held is not None or read_name() == name:
            break
    try:
        yield root / name
    finally:
        if held is not None:
            held.close()


def hold(data: Path) -> io.FileIO | None:
    """Opens a file that keeps ``data`` from being removed until it is closed; None if it is gone,
    or being removed."""
    try:
        held = _open(data / OF_READERS, os.O_RDONLY)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise StorageError(
            error.errno, f"{data} cannot be read: {error.strerror}", str(data)
        ) from error
    try:
        _lock(held, fcntl.LOCK_SH)
        if os.fstat(held.fileno()).st_nlink:
            return held
    except Busy:
        pass
    held.close()
    return None


def remove_data(root: Path, *, keep: str = "") -> None:
    """Removes data folders except ``keep``, and except those that are being read. Only inside
    :func:`writing`. Files that cannot be removed stay."""
    for old in root.iterdir():
        if DATA_NAME.fullmatch(old.name) and old.name != keep and not old.is_symlink():
            remove_unread(old)


def remove_unread(data: Path) -> None:
    """Removes a data folder unless it is being read. Only inside :func:`writing`."""
    try:
        file = _open(data / OF_READERS, os.O_RDWR)
    except OSError as error:
        if error.errno in GONE:
            remove_folder(data)  # of an interrupted save: no manifest ever named it
        return
    with file, contextlib.suppress(Busy):
        _lock(file, fcntl.LOCK_EX)
        remove_folder(data)


def _lock(file: io.FileIO, kind: int) -> None:
    """Takes the lock without waiting, or raises Busy. Does without if the file system has no
    locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
