"""Settings: what a run of the benchmarks may use."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """``scale`` multiplies the sizes: 1 is what the results in ``bench/results`` use, less is quicker and noisier."""

    folder: str = "."  # files for io, update and step are made in it, and removed
    rounds: int = 5
    scale: float = 1.0
    rivals: bool = True
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def scaled(self, nbytes: int, multiple: int) -> int:
        """Scales ``nbytes``, to whole multiples of ``multiple``, at least one."""
        return max(1, round(nbytes * self.scale / multiple)) * multiple
