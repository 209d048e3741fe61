"""Control groups (v1 and v2): the folders in which the kernel shows the limits of this process."""

from __future__ import annotations

import functools
import io
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
V1_UNLIMITED = 1 << 62  # v1 shows "max" as a number near 2**63


def folders(controller: str, root: Path = ROOT, own: Path = OWN) -> tuple[list[Path], list[Path]]:
    """Lists the folders of this process's groups and their parents for ``controller`` (v1's name):
    those of v1, and of v2. In a container the kernel's path may differ from the mounted one; only
    existing parts count."""
    try:
        lines = read(own).splitlines()
    except OSError:
        return [], []
    first, second = [], []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            second += [
                folder for base in (root, root / "unified") for folder in _upward(base, path)
            ]
        elif controller in controllers.split(","):
            first += _upward(root / controller, path)
    return first, second


@functools.cache
def _upward(root: Path, path: str) -> list[Path]:
    folder = root / path.lstrip("/")
    return [parent for parent in (folder, *folder.parents) if parent.is_relative_to(root)]


def read(file: Path) -> str:
    """Reads ``file`` of the kernel: every wrap reads some thirty. Raises OSError."""
    with io.FileIO(file) as opened:  # no descriptor of ours: an interrupt would leave it open
        return opened.readall().decode()


def number(file: Path) -> int | None:
    """Reads the number in ``file``; None for "max", v1's number for it, or a missing file."""
    try:
        limit = int(read(file))
    except (OSError, ValueError):
        return None
    return limit if limit < V1_UNLIMITED else None


def table(file: Path) -> dict[str, int]:
    """Reads the lines "name number" of ``file``; empty if there is none."""
    try:
        pairs = [line.split() for line in read(file).splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}
