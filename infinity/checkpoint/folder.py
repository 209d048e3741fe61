"""CheckpointFolder: who may write a checkpoint's folder, and what of it may be removed while others read.

    manifest.json          the checkpoint: names the data folder that is whole
    infinity-<random>/     data; of one that no manifest names, and nobody reads, nothing is needed any more
    .lock                  there while a process saves, which holds it (flock); a killed one leaves it, empty and free

A reader holds a shared lock on a file of the data that it reads. A writer that has replaced the manifest removes old data only where
it gets that lock for itself; what is being read is left to the next save. All of it works across hosts where the file system's
flock does (NFS from 4, Lustre with -o flock).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageError, UsageError
from .removal import remove_folder

DATA_NAME = re.compile(r"infinity-[0-9a-f]{12}")
LOCK = ".lock"
OF_READERS = "other.safetensors"  # the file of a data folder that readers lock: every save writes one
TRIES = 100  # to read while others save
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)  # what file systems without locks say


class Busy(Exception):
    """Somebody else has the lock."""


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Lets the block write the folder ``root``, which is made where there is none. Raises UsageError while another process does,
    OSError where it cannot be written."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / LOCK
    try:
        descriptor = _made_and_locked(path)
    except Busy:
        raise UsageError(
            f"another process is saving a checkpoint to {root} just now: two jobs need two folders. If it is the same job, "
            "wait until the other save is over."
        ) from None
    try:
        yield
    finally:
        try:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # while it is held: who has opened it meanwhile finds it without a name
        finally:
            os.close(descriptor)


def _made_and_locked(path: Path) -> int:
    """A descriptor of the lock file ``path``, locked. Raises Busy, or OSError where it cannot be made."""
    for _ in range(TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            status = os.fstat(descriptor)
            if status.st_size:
                raise UsageError(f"{path} is no lock of a save, which is empty: a save would remove it. Give another folder.")
            if status.st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has just removed it
    raise Busy


@contextmanager
def reading(root: Path, read_name: Callable[[], str]) -> Iterator[Path]:
    """Yields the data folder that ``read_name`` reads off the manifest: nothing of it is removed inside the block. A save that
    replaces it meanwhile is waited for, and its data read instead. Raises what ``read_name`` raises."""
    for _ in range(TRIES):
        name = read_name()
        held = hold(root / name)
        if held is not None or read_name() == name:  # where there is nothing to lock, reading says what is missing
            break
    try:
        yield root / name
    finally:
        if held is not None:
            os.close(held)


def hold(data: Path) -> int | None:
    """Opens a descriptor that keeps ``data`` from being removed until it is closed; None where it is gone, or going."""
    try:
        descriptor = os.open(data / OF_READERS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise StorageError(error.errno, f"{data} cannot be read: {error.strerror}", str(data)) from error
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except Busy:
        pass
    os.close(descriptor)
    return None


def remove_data(root: Path, *, keep: str = "") -> None:
    """Removes data folders but ``keep``, and but those that are being read. Only inside :func:`writing`. What cannot be removed
    stays."""
    for old in root.iterdir():
        if DATA_NAME.fullmatch(old.name) and old.name != keep and not old.is_symlink():
            remove_unread(old)


def remove_unread(data: Path) -> None:
    """Removes a data folder but where it is being read. Only inside :func:`writing`."""
    try:
        descriptor = os.open(data / OF_READERS, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in GONE:
            remove_folder(data)  # a save that was cut short: no manifest ever named it
        return
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        remove_folder(data)
    except Busy:
        pass
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    """Takes the lock, or raises Busy. Where the file system has none, does without."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
