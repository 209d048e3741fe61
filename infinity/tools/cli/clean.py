"""`infinity clean`: lists files that killed jobs left, and removes them with ``--yes``.

There are few: swap files have no name, so the kernel frees them with their process. Left over can
be data of an interrupted checkpoint save, folders of ended runs, and disk probes. A name alone is
not enough to count as a leftover.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import ConfigError
from .answers import print_object
from .options import FLAG, FOLDER

PROBE = re.compile(r"infinity-probe-[a-z0-9_]{8}")
DATA_FILES = re.compile(
    r"(unit-\d{5}(-rank-\d{5})?(-\d+)?\.safetensors|other\.safetensors|manifest\.json)"
)
PROBE_SECONDS = 3600  # a probe takes two seconds


@dataclass(frozen=True)
class Leftover:
    """A folder that no process uses. ``why``: the evidence that an Infinity job left it."""

    path: str
    nbytes: int
    why: str


OPTIONS = (
    (
        "folder",
        FOLDER | {"nargs": "*"},
        "checkpoints and scratch folders to look in, beside the cache",
    ),
    ("--yes", FLAG, "remove what is found"),
    ("--json", FLAG, "what was found as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the leftovers, and removes them with ``--yes``."""
    from ...core.machine.sizes import format_nbytes

    for folder in args.folder:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: name folders that exist, or none")
    leftovers = list(find(args.folder))
    if args.yes:
        remove(args.folder)
    if args.json:
        print_object({"leftovers": [asdict(each) for each in leftovers], "removed": args.yes})
        return 0
    stayed = [each for each in leftovers if args.yes and os.path.lexists(each.path)]
    for each in leftovers:
        done = "" if not args.yes else "not removed " if each in stayed else "removed "
        print(f"{done}{format_nbytes(each.nbytes):>11}  {each.path}  ({each.why})")
    if not leftovers:
        print("Nothing is left of any job here.")
    elif args.yes:
        nbytes = sum(each.nbytes for each in leftovers if each not in stayed)
        print(f"removed {len(leftovers) - len(stayed)} of {len(leftovers)}, {nbytes:,} bytes")
    else:
        print("Nothing is removed. Add --yes to remove these.")
    return 0


def find(folders: list[Path]) -> Iterator[Leftover]:
    """Finds the leftovers in ``folders``, the cache and the temporary folder."""
    from ...core.machine import disk_profile
    from ..watch import run_files

    for folder in run_files.runs(disk_profile.cache_folder() / "runs"):
        if run_files.is_ours(folder) and not run_files.is_running(folder):
            yield Leftover(
                str(folder),
                _nbytes(folder),
                "a run that is over: only a run's files are in it, and its process is gone",
            )
    for folder in dict.fromkeys([*folders, Path(tempfile.gettempdir())]):
        for path in _probes(folder):
            yield Leftover(
                str(path),
                _nbytes(path),
                "a disk's probe of more than an hour ago: it has its one file",
            )
    for folder in folders:
        for path in _data(folder):
            yield Leftover(
                str(path),
                _nbytes(path),
                "checkpoint data without a manifest that no process uses",
            )


def remove(folders: list[Path]) -> None:
    """Removes the leftovers after a second check of each. A checkpoint's data is removed under its
    lock, and not while it is being read."""
    from ...ext.checkpoint.folder import remove_unread, writing

    for folder in folders:
        if _data(folder):
            with writing(folder):
                for path in _unneeded(folder):
                    remove_unread(path)
    for leftover in find([]):
        shutil.rmtree(leftover.path, ignore_errors=True)
    for path in (path for folder in folders for path in _probes(folder)):
        shutil.rmtree(path, ignore_errors=True)


def _probes(folder: Path) -> list[Path]:
    probes = []
    for path in folder.iterdir() if os.access(folder, os.R_OK) else ():
        with contextlib.suppress(OSError):  # it may be removed meanwhile
            if (
                PROBE.fullmatch(path.name)
                and stat.S_ISDIR((status := path.lstat()).st_mode)
                and status.st_uid == os.geteuid()
            ):
                old = time.time() - status.st_mtime > PROBE_SECONDS
                if old and [entry.name for entry in path.iterdir()] in ([], ["probe"]):
                    probes.append(path)
    return probes


def _data(root: Path) -> list[Path]:
    """Lists the unneeded data folders of a checkpoint; empty while a save is running."""
    return [] if _is_being_written(root) else _unneeded(root)


def _unneeded(root: Path) -> list[Path]:
    """Lists the data folders that the manifest does not name, and that contain only files of a
    save."""
    from ...ext.checkpoint.folder import DATA_NAME

    named = _named(root)
    return [
        path
        for path in root.iterdir()
        if DATA_NAME.fullmatch(path.name)
        and path.name != named
        and path.is_dir()
        and not path.is_symlink()
        and all(
            DATA_FILES.fullmatch(entry.name.removesuffix(".partial")) for entry in path.iterdir()
        )
    ]


def _named(root: Path) -> str:
    """Returns the data folder that the manifest names, or "" without a manifest. Raises if it
    cannot be read: then no folder is known to be unneeded."""
    from ...ext.checkpoint.manifest import MANIFEST, read_manifest

    return read_manifest(root)["data"] if (root / MANIFEST).exists() else ""


def _is_being_written(root: Path) -> bool:
    import fcntl

    from ...ext.checkpoint.folder import LOCK

    try:
        descriptor = os.open(root / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _nbytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))
