"""Saves: how long writing a checkpoint takes, and reading it when a job restarts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...core.machine.sizes import format_nbytes
from ..cli.amounts import format_seconds

LAUNCHER_SECONDS = 30  # that torchrun, and Slurm, leave a job after SIGTERM


@dataclass(frozen=True)
class Saves:
    """A checkpoint of ``nbytes`` in all, and bytes per second of the disks that it lies on; None:
    unknown."""

    nbytes: int
    write: float | None
    read: float | None

    @property
    def save_seconds(self) -> float | None:
        """Seconds of a save beside the steps, as the disks take it."""
        return self.nbytes / self.write if self.write else None

    @property
    def load_seconds(self) -> float | None:
        """Seconds of the read of a job that comes back."""
        return self.nbytes / self.read if self.read else None

    @property
    def line(self) -> str:
        """The line of a plan."""
        size, save, load = format_nbytes(self.nbytes), self.save_seconds, self.load_seconds
        if save is None or load is None:
            return f"a checkpoint has {size}"
        said = f"a save writes {size} in {format_seconds(save)}"
        said += f", and a return reads it in {format_seconds(load)}, on disks as these"
        if save <= LAUNCHER_SECONDS:
            return said
        return (
            f"{said}. More than the {LAUNCHER_SECONDS} s that torchrun waits after SIGTERM: send"
            " SIGUSR1 first"
        )

    def described(self) -> dict[str, Any]:
        """Returns all of it as plain data, with the seconds as a profile of `infinity cost` has
        them."""
        seconds = {"save_seconds": self.save_seconds, "load_seconds": self.load_seconds}
        return seconds | {"checkpoint": asdict(self) | seconds | {"line": self.line}}
