"""Where a job writes its results: looked at before it begins, not found out after hours.

place   a folder that may not exist yet; what can be asked is asked of the first one above it that does
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ...errors import CapacityError, ConfigError, StorageError
from ...machine.sizes import format_nbytes


def existing(folder: Path) -> Path:
    """Returns ``folder``, or the first one above it that is there."""
    folder = Path(os.path.abspath(folder))
    return next(each for each in (folder, *folder.parents) if each.exists())


def check_writable(option: str, folder: Path) -> None:
    """Raises ConfigError for what is no folder, StorageError for one in which no file can be made. Nothing is left there."""
    there = existing(folder)
    if not there.is_dir():
        what = "is a file" if there == Path(os.path.abspath(folder)) else f"is below {there}, which is a file"
        raise ConfigError(f"{option} {folder} {what}. Give a folder, existing or new.")
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise StorageError(
            error.errno or 0, f"{option} {folder} cannot be written: {why}. Give another folder", str(there)
        ) from error


def check_room(option: str, folder: Path, nbytes: int, what: str) -> None:
    """Raises CapacityError where ``nbytes`` do not fit beside what is on the disk of ``folder``."""
    free = shutil.disk_usage(existing(folder)).free
    if nbytes > free:
        raise CapacityError(
            f"{option} {folder}: {what} needs {format_nbytes(nbytes)}, and {format_nbytes(free)} is free there. Free "
            f"{format_nbytes(nbytes - free)}, or give a folder on another disk."
        )
