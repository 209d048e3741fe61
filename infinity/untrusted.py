"""Untrusted: files that anybody may have written, read without harm. Whatever is in them ends in a
ValueError, or an OSError.

format  the number in a kind of file, by which a reader knows it
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError, UsageError

KEY = "format"
MOST = 1e18  # of a number: more is a typo
LARGEST_NBYTES = 1 << 30  # of a text file: more is none of ours
# Outside of texts in JSON: comments, then commas at the end of a list or table.
REMARKS = r"//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", r",(?=\s*[}\]])"


def read_text(path: str | os.PathLike, *, most_nbytes: int = LARGEST_NBYTES) -> str:
    """Reads the text of a regular file. Raises OSError for anything else (a pipe would be waited
    for, a device never ends), ValueError for what is too long or not UTF-8."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most_nbytes:
            raise ValueError(
                f"{path} has {status.st_size} bytes, more than the {most_nbytes} that are read"
            )
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(most_nbytes + 1)
    finally:
        os.close(descriptor)
    if len(raw) > most_nbytes:
        raise ValueError(f"{path} has more than the {most_nbytes} bytes that are read")
    return raw.decode("utf-8")


def parse_json(text: str) -> Any:
    """Parses JSON as data. Raises ValueError for invalid JSON, non-finite or overlong numbers, and
    unbounded nesting."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"the number {constant}")

    def number(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits[:20])

    try:
        return json.loads(text, parse_constant=refuse, parse_float=number)
    except RecursionError:
        raise ValueError("lists and tables are nested too deep") from None


def read_table(path: Path) -> dict[str, Any]:
    """Reads a file of keys and values: TOML, YAML by its suffix, else JSON, which may have comments
    and commas at ends, as DeepSpeed reads it. Raises ConfigError if it cannot be read, is invalid,
    or no table."""
    try:
        text = read_text(path).removeprefix("\ufeff")  # of editors on Windows
    except OSError as error:
        raise ConfigError(
            f"config file {path} cannot be read: {error.strerror}. Give one of TOML, YAML or JSON"
        ) from error
    except ValueError as error:
        raise ConfigError(f"config file {path} is not UTF-8 text: {error}") from error
    if not text.strip() and path.suffix != ".toml":
        raise ConfigError(
            f'config file {path} is empty: give keys and values, as {{"params": "nvme"}}'
        )
    try:
        found = _parse_table(path, text)
    except (ValueError, RecursionError) as error:  # deep nesting recurses in TOML's reader too
        raise ConfigError(
            f"config file {path} is neither valid TOML (*.toml), YAML (*.yaml) nor JSON: {error}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"config file {path} holds a {type(found).__name__}, not a table of keys. Give names"
            ' and values, as {"params": "nvme"}.'
        )
    return found


def _parse_table(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix not in (".yaml", ".yml"):
        for pattern in REMARKS:
            text = re.sub(
                rf'("(?:\\.|[^"\\])*")|{pattern}',
                lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]),  # places stay
                text,
                flags=re.DOTALL,
            )
        return parse_json(text)
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{path} is YAML, which needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def check_number(
    value: Any, name: str, *, whole: bool = False, least: float | None = None
) -> float:
    """Returns a number of a file. Raises ConfigError, which names ``name``, unless it is one above
    0 (or from ``least`` on)."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and value <= MOST and (not whole or value == int(value)):
        if value > 0 if least is None else value >= least:
            return float(value)
    kind = "a whole number" if whole else "a finite number"
    above = "above 0" if least is None else f"from {least:g} on"
    raise ConfigError(f"{name} = {value!r:.40} must be {kind} {above}, at most {MOST:g}")


def printable(text: str) -> str:
    """Returns ``text`` with its control characters shown, not obeyed, by a terminal."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def is_regular(path: Path, *, links: bool = True) -> bool:
    """Tells whether ``path`` is a regular file (a pipe would be waited for). Without ``links`` no
    link is one: a link may lead anywhere."""
    try:
        return stat.S_ISREG((os.stat if links else os.lstat)(path).st_mode)
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class Format:
    """The format of one kind of file. It rises only with a reader of the one before
    (docs/compatibility.md).

    what
        What such a file is, for messages.
    number
        That this version writes.
    oldest
        The first that it reads.
    readers
        What reads the formats before ``oldest``, by number.
    unnumbered
        The number of files that have none; None: every version wrote one.
    """

    what: str
    number: int
    oldest: int = 1
    readers: Mapping[int, str] = field(default_factory=dict)
    unnumbered: int | None = None

    def numbered(self, content: dict[str, Any]) -> dict[str, Any]:
        """Returns ``content`` with this version's number first."""
        return {KEY: self.number} | content

    def check(self, path: str | os.PathLike, content: Mapping[str, Any]) -> int:
        """Returns the format of the file ``path``, whose ``content`` has it. Raises UsageError with
        what reads it, if this version does not."""
        found = content.get(KEY, self.unnumbered)
        if type(found) is int and self.oldest <= found <= self.number:
            return found
        reads = f"{self.oldest} to {self.number}" if self.oldest < self.number else f"{self.number}"
        told = f"{os.fspath(path)} is a {self.what} of format {found!r}, this version reads {reads}"
        if type(found) is not int or found < 1:
            raise UsageError(f"{told}: no version of Infinity wrote it.")
        if found > self.number:
            raise UsageError(
                f"{told}: a newer version wrote it. Take that one:"
                " pip install --upgrade infinity-engine"
            )
        raise UsageError(f"{told}. {self.readers[found]}")
