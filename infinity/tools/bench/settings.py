"""Settings: the folder, rounds, sizes and threads of a benchmark run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .rounds import Name, Times, alternate


@dataclass(frozen=True)
class Settings:
    """``scale`` multiplies the sizes: the results in ``bench/results`` use 1; less is faster and
    noisier.

    seconds
        Of further rounds for each loop, as :func:`rounds.alternate` has them.
    only
        The rows to measure: those whose names begin so. Empty: all.
    """

    folder: str = "."  # io, update and step create files in it, and remove them
    other_folders: tuple[str, ...] = ()  # machine: on further disks
    rounds: int = 5
    scale: float = 1.0
    seconds: float = 0.0
    only: tuple[str, ...] = ()
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

    def alternate(
        self, jobs: Mapping[Name, Callable[[], object]], **options: Any
    ) -> dict[Name, Times]:
        """Runs ``jobs`` in turns, as :func:`rounds.alternate`, for these rounds and seconds."""
        return alternate(jobs, self.rounds, seconds=self.seconds, **options)

    @contextlib.contextmanager
    def torch_threads(self) -> Iterator[None]:
        """Gives torch's own loops as many threads as ours."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def wants(self, row: str) -> bool:
        """Tells whether the row of this name is to be measured."""
        return not self.only or row.startswith(self.only)

    def wants_any_of(self, part: str) -> bool:
        """Tells whether a row whose name begins with ``part`` is."""
        return self.wants(part) or any(each.startswith(f"{part}.") for each in self.only)

    @property
    def folders(self) -> tuple[str, ...]:
        """All folders, each on a disk of its own."""
        return (self.folder, *self.other_folders)

    def kept(self) -> dict[str, Any]:
        """Returns what a result file keeps of the settings."""
        names = ("rounds", "scale", "seconds", "rivals", "threads")
        kept = {name: getattr(self, name) for name in names}
        return kept | ({"only": list(self.only)} if self.only else {})
