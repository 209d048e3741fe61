"""Ranks of `infinity train` under torchrun: who says what, and what they have to agree on.

rank    this process among those that torchrun started; alone there is one
first   the rank that prints, samples and writes what there is one of
"""

from __future__ import annotations

import datetime
import os

from ...errors import ConfigError


class Ranks:
    """The process group of the job. Alone, nothing is started and nothing is said."""

    def __init__(self, timeout_seconds: float | None = None) -> None:
        """Joins the others where torchrun says there are some. ``timeout_seconds``: how long one waits for the others (None: torch's
        half an hour). Raises ConfigError where they do not come together."""
        self.count = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
        self.rank = int(os.environ["RANK"]) if self.count > 1 else 0
        if self.count > 1:
            import torch.distributed as dist

            try:
                timeout = None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
                dist.init_process_group("gloo", timeout=timeout)
            except (RuntimeError, ValueError) as error:
                raise ConfigError(f"the {self.count} ranks that torchrun announced do not come together: {error}") from error

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, value: float) -> float:
        """Averages every rank's ``value``."""
        return self._reduce(value, "SUM") / self.count

    def largest(self, value: int) -> int:
        """Returns the largest of every rank's ``value``: a signal that any of them got, say."""
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
