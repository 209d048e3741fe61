"""Outputs: the rule for all paths that are written, checked before any write.

input   a path that a command or a function reads
output  a path that it writes: a file, or a folder in which it creates and replaces files

An output must not be, contain or lie in an input, whatever the names are. Paths are
compared by what they lead to, so symbolic links, mounts and hard links change nothing.

Existing files are not replaced without ``overwrite``. A page, a picture or a timeline made by
Infinity is replaced by the next one, because it takes a second to make again.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, StorageError

Identity = tuple[int, int] | str  # device and inode; the path itself if nothing exists there
MODEL_NAMES = re.compile(r"[^.].*")  # tokenizers and configurations have files of any name
PICTURE = b"<svg xmlns='http://www.w3.org/2000/svg'"
OVERWRITE = "--overwrite"


@dataclass(frozen=True)
class Output:
    """A path that is written.

    name
        The caller's name for it: an option, or an argument.
    replaces
        Of a folder: the names of files that may be created or replaced in it. None: only new names.
    made
        Of a file: the first bytes of files of this kind, which may be replaced. None: a folder.
    """

    name: str
    path: Path
    replaces: re.Pattern[str] | None = None
    made: bytes | None = None

    @property
    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.made is not None

    def may_replace(self, name: str) -> bool:
        """Returns whether a file of this name in the folder may be replaced."""
        return self.replaces is not None and self.replaces.fullmatch(name) is not None

    def taken(self) -> list[Path]:
        """Lists existing files that would be replaced."""
        if self.is_file:
            return [self.path] if os.path.isfile(self.path) and not self._is_made_here() else []
        entries = (
            os.scandir(self.path) if self.replaces is not None and os.path.isdir(self.path) else ()
        )
        found = (Path(entry.path) for entry in entries if self.may_replace(entry.name))
        return sorted(path for path in found if path.is_symlink() or not path.is_dir())

    def _is_made_here(self) -> bool:
        try:
            with open(self.path, "rb") as file:
                return file.read(len(self.made)) in (b"", self.made)
        except OSError:
            return False


def check_outputs(
    outputs: Sequence[Output],
    inputs: Iterable[tuple[str, Path | None]],
    *,
    overwrite: bool = False,
    way: str | None = OVERWRITE,
) -> None:
    """Checks every output against every input, each other, and existing files. Changes nothing.

    inputs
        The caller's name for it, and a path that is read, or None.
    way
        How the user can allow a replacement, for messages. None: not possible.

    Raises ConfigError, and StorageError for a place that cannot be written.
    """
    from ..core.machine.disk_profile import (
        cache_folder,  # imports torch, which a command's help does without
    )

    read = [(name, path) for name, path in inputs if path is not None]
    for output in outputs:
        check_place(output)
        if identity_of(cache := cache_folder()) in map(
            identity_of, (output.path, *_above(output.path))
        ):
            raise ConfigError(
                f"{output.name} {output.path} is in Infinity's own cache, {cache}. Give another"
                " place."
            )
        for name, path in read:
            _check_distinct(output, name, path)
    for number, output in enumerate(outputs):
        for other in outputs[:number]:
            if identity_of(output.path) == identity_of(other.path):
                raise ConfigError(
                    f"{output.name} and {other.name} are both {output.path}. Give each a place of"
                    " its own."
                )
    for output in outputs if not overwrite else ():
        check_free(output, way=way)


def check_free(output: Output, *, way: str | None = OVERWRITE) -> None:
    """Raises ConfigError if ``output`` would replace an existing file."""
    if not (taken := output.taken()):
        return
    replace = f", or {way} to replace it" if way is not None else ""
    if output.is_file:
        raise ConfigError(
            f"{output.name} {output.path} is a file that was not made by Infinity for this. Give"
            f" another name{replace}."
        )
    names = ", ".join(path.name for path in taken[:3]) + (", ..." if len(taken) > 3 else "")
    raise ConfigError(
        f"{output.name} {output.path} holds files already ({names}), which would be replaced. Give"
        f" another folder{replace}."
    )


def folder_of(path: str | os.PathLike, what: str, *, writes: bool = True) -> Path:
    """Returns the path of a folder that ``what`` reads, or ``writes``. Raises ConfigError if it is
    not a path, empty, or the address of another place; StorageError for a file to be written to."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{what} is a {type(path).__name__}: give the path of a folder")
    if not os.fspath(path):
        raise ConfigError(f"{what} is empty: give the path of a folder")
    if "://" in os.fspath(path):
        raise ConfigError(f"{what} {path} is not on this machine: give a folder, and copy it there")
    if writes and os.path.isfile(path):
        message = f"{what} {path} is a file: give the path of a folder"
        raise StorageError(errno.ENOTDIR, message, str(path))
    return Path(path)


# --- apart from inputs ---


def _check_distinct(output: Output, name: str, path: Path) -> None:
    own, read = identity_of(output.path), identity_of(path)
    what = f"{output.name} {output.path}"
    remedy = "Nothing is written where something is read: give another place."
    if own == read:
        raise ConfigError(f"{what} is what {name} {path} reads, and would overwrite it. {remedy}")
    if os.path.isdir(path) and read in map(identity_of, _above(output.path)):
        raise ConfigError(f"{what} lies in {path}, which {name} reads. {remedy}")
    if (
        not output.is_file
        and output.replaces is not None
        and own in map(identity_of, _above(path))
        and _is_within_reach(output, path)
    ):
        raise ConfigError(f"{what} has {path} inside, which {name} reads. {remedy}")
    held = {
        identity_of(each): each
        for each in ([output.path] if output.is_file else _files_of(output))
        if os.path.exists(each)
    }
    for file in _walk(path) if held else ():
        if (own_name := held.get(identity_of(file))) is not None:
            raise ConfigError(
                f"{own_name} of {what} is a link of {file}, which {name} reads. {remedy}"
            )


def _is_within_reach(output: Output, path: Path) -> bool:
    """Whether part of an input inside the folder of ``output`` may be replaced. Always true for a
    folder."""
    return (
        os.path.isdir(path)
        or identity_of(path.parent) != identity_of(output.path)
        or output.may_replace(path.name)
    )


def _files_of(output: Output) -> list[Path]:
    return (
        [path for path in output.path.iterdir() if output.may_replace(path.name)]
        if os.path.isdir(output.path)
        else []
    )


def _walk(path: Path) -> Iterator[Path]:
    """Yields a file, or all files below a folder."""
    if not os.path.isdir(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names)


def _above(path: Path) -> Sequence[Path]:
    return Path(os.path.realpath(path)).parents


def identity_of(path: Path) -> Identity:
    """Returns the identity of what a path leads to, through links and mounts."""
    real: str = os.fspath(path)
    try:
        real = os.path.realpath(path)  # also of a path through a folder not yet created
        status = os.stat(real)
    except (OSError, ValueError):
        return real
    return status.st_dev, status.st_ino


# --- a place that can be written ---


def existing(folder: Path) -> Path:
    """Returns ``folder``, or its first parent that exists."""
    folder = Path(os.path.abspath(folder))
    return next(each for each in (folder, *folder.parents) if os.path.exists(each))


def check_place(output: Output) -> None:
    """Raises ConfigError for a folder that is a file and the reverse, StorageError if no file can
    be created. Leaves nothing there."""
    what, path = f"{output.name} {output.path}", output.path
    if output.is_file:
        if os.path.isdir(path):
            raise ConfigError(f"{what} is a folder. Give the name of a file.")
        if os.path.exists(path) and not stat.S_ISREG(path.stat().st_mode):
            return  # a pipe or a device: nothing is replaced there
        if not os.path.isdir(path.parent):
            raise ConfigError(
                f"{what} cannot be written: there is no folder {path.parent}. Create it first:"
                f" mkdir -p {path.parent}"
            )
    there = existing(path.parent if output.is_file else path)
    if not os.path.isdir(there):
        whose = (
            "is a file"
            if there == Path(os.path.abspath(path))
            else f"is below {there}, which is a file"
        )
        raise ConfigError(f"{what} {whose}. Give a folder, existing or new.")
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise StorageError(
            error.errno or 0, f"{what} cannot be written: {why}. Give another folder", str(there)
        ) from error


# --- writing without following links ---


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder. At the end of the block its files move to ``folder``, which is
    created if missing.

    Names are replaced, not written through: a link in ``folder`` becomes a file, and its target
    stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".infinity-", dir=folder) as made:
        yield Path(made)
        for path in [path for path in _walk(Path(made)) if path.is_file()]:
            target = folder / path.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
