"""Ranks of `infinity train` under torchrun.

rank    this process among those that torchrun started; 0 without torchrun
first   rank 0, which prints, samples and writes the files that exist once
"""

from __future__ import annotations

import datetime
import os

from ...errors import ConfigError


class Ranks:
    """The process group of the job. With one process, no group is created."""

    def __init__(self, timeout_seconds: float | None = None) -> None:
        """Joins the process group if torchrun started several ranks; blocks until all have joined.

        ``timeout_seconds``: of waiting for other ranks (None: torch's half an hour). Raises
        ConfigError if they do not join.
        """
        self.count = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
        self.rank = int(os.environ["RANK"]) if self.count > 1 else 0
        if self.count > 1:
            import torch.distributed as dist

            try:
                timeout = (
                    None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
                )
                dist.init_process_group("gloo", timeout=timeout)
            except (RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"the {self.count} ranks that torchrun announced do not come together: {error}"
                ) from error

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, value: float) -> float:
        """Averages every rank's ``value``. Every rank calls this."""
        return self._reduce(value, "SUM") / self.count

    def largest(self, value: int) -> int:
        """Returns the largest of every rank's ``value``. Every rank calls this."""
        return int(self._reduce(value, "MAX"))

    def _reduce(self, value: float, how: str) -> float:
        if self.count == 1:
            return value
        import torch
        import torch.distributed as dist

        whole = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(whole, getattr(dist.ReduceOp, how))
        return whole.item()

    def end(self) -> None:
        """Leaves the process group."""
        if self.count > 1:
            import torch.distributed as dist

            dist.destroy_process_group()
