"""Control groups: the folders in which the kernel shows what this process, and everything above it, may use (v1 and v2)."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, own: Path = OWN) -> tuple[list[Path], list[Path]]:
    """Lists the folders of this process's groups and of all above them that ``controller`` (as v1 calls it) has: of v1, and of v2.
    In a container the path that the kernel tells may be another one than what is mounted; what there is of it counts."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return [], []
    first, second = [], []
    for line in lines:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            second += [folder for base in (root, root / "unified") for folder in _upward(base, path)]
        elif controller in controllers.split(","):
            first += _upward(root / controller, path)
    return first, second


def _upward(root: Path, path: str) -> list[Path]:
    folder = root / path.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(root)]


def number(file: Path) -> int | None:
    """Reads the number in ``file``; None for "max", or where there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def table(file: Path) -> dict[str, int]:
    """Reads the lines "name number" of ``file``; empty where there is none."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}
