"""Settings: the folder, rounds, sizes and threads of a benchmark run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """``scale`` multiplies the sizes: the results in ``bench/results`` use 1; less is faster and
    noisier. ``seconds``: of further rounds for each loop, as :func:`rounds.alternate` has them."""

    folder: str = "."  # io, update and step create files in it, and remove them
    rounds: int = 5
    scale: float = 1.0
    seconds: float = 0.0
    rivals: bool | list[str] = True  # all, none, or those with these names
    retune: bool = False  # rivals: their settings are looked for anew
    keep_profile: bool = False  # io: its rates replace the disk's stored profile
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    show: Callable[[Sequence[Any]], None] = lambda rows: None  # prints rows as they are measured
    keep: Callable[[Any], None] = lambda measured: None  # saves what has been measured so far

    def measures(self, rival: str) -> bool:
        """Tells whether a rival is measured."""
        return self.rivals if isinstance(self.rivals, bool) else rival in self.rivals

    def scaled(self, nbytes: int, multiple: int) -> int:
        """Scales ``nbytes`` and rounds it to a multiple of ``multiple``, at least one."""
        return max(1, round(nbytes * self.scale / multiple)) * multiple

    def kept(self) -> dict[str, Any]:
        """Returns what a result file keeps of the settings."""
        names = ("rounds", "scale", "seconds", "rivals", "threads")
        return {name: getattr(self, name) for name in names}
