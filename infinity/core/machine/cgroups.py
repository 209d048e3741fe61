"""Control groups (v1 and v2): the folders in which the kernel shows the limits of this process."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, own: Path = OWN) -> tuple[list[Path], list[Path]]:
    """Lists the folders of this process's groups and their parents for ``controller`` (v1's name):
    those of v1, and of v2. In a container the kernel's path may differ from the mounted one; only
    existing parts count."""
    try:
        lines = own.read_text().splitlines()
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


def _upward(root: Path, path: str) -> list[Path]:
    folder = root / path.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(root)]


def number(file: Path) -> int | None:
    """Reads the number in ``file``; None for "max" or a missing file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def table(file: Path) -> dict[str, int]:
    """Reads the lines "name number" of ``file``; empty if there is none."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}
