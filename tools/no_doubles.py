"""Looks for test doubles in a wheel or a source distribution, and ends with 1 if there are any:
no_doubles.py ARCHIVE..."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

NAMES = ("doubles", "delayed_network", "faulty", "modelled", "instant")
BYTES = (
    b"INFINITY_FAULTS",
    b"FaultyBackend",
    b"ModelledBackend",
    b"InstantBackend",
    b"class DelayedNetwork",
)


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the name and content of every file in ``archive``."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
        return
    with tarfile.open(archive) as source:
        for member in source:
            if (file := source.extractfile(member)) is not None:
                yield member.name, file.read()


def doubles_in(archive: Path) -> list[str]:
    """Returns the files of ``archive`` that are, or have in them, a test double. Prose may speak of
    them."""
    return [
        name
        for name, content in members(archive)
        if Path(name).stem in NAMES
        or (
            not name.endswith((".md", "PKG-INFO", "METADATA"))
            and any(each in content for each in BYTES)
        )
    ]


if __name__ == "__main__":
    found = {path: doubles_in(Path(path)) for path in sys.argv[1:]}
    for path, names in found.items():
        for name in names:
            print(f"{path} has a test double: {name}", file=sys.stderr)
    sys.exit(any(found.values()))
