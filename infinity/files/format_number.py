"""Format: the number in a kind of file, and which numbers this version reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError

KEY = "format"


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
