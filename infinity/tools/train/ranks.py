"""Ranks of `infinity train` under torchrun or Ray Train.

rank    this process among those that the launcher started; 0 without one
first   rank 0, which prints, samples and writes the files that exist once
data    a rank that reads batches of its own; those of tp, cp and pp share a data rank's batches
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
from typing import TYPE_CHECKING

from ...errors import ConfigError, UsageError
from ...ext.restarts.restarts import store_of_start

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
BY_TORCHRUN = "Start the job with torchrun, or unset RANK and WORLD_SIZE."


def _number(name: str, least: int) -> int:
    """Reads a variable that torchrun sets. Raises ConfigError if it is not a number."""
    text = os.environ.get(name) or str(least)
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}={text!r} is not a number from {least} on. {BY_TORCHRUN}")
    return int(text)


def count_of() -> int:
    """Returns how many ranks torchrun started; 1 without it. Raises ConfigError."""
    return _number("WORLD_SIZE", 1) if os.environ.get("RANK") else 1


def refuse_several(command: str) -> None:
    """Raises UsageError under torchrun with several ranks, for a command that is one process."""
    if (count := count_of()) > 1:
        raise UsageError(
            f"`infinity {command}` is one process, and {count} ranks were started, which would each"
            " do all of it. Start it without torchrun; weights need not fit a GPU."
        )


class Ranks:
    """The process group of the job. With one process, no group is created."""

    def __init__(self, timeout_seconds: float | None = None) -> None:
        """Joins the process group if there are several ranks; blocks until all have joined.

        ``timeout_seconds``: of waiting for other ranks (None: torch's half an hour). Raises
        ConfigError if they do not join.
        """
        self.count = count_of()
        self.rank = _number("RANK", 0) if self.count > 1 else 0
        self.mesh: DeviceMesh | None = None  # of --mesh, which has axes beside dp
        # Those that have batches of their own, and this one's place among them
        self.data_count, self.data_rank = self.count, self.rank
        self._made_group = False
        if self.count > 1:
            import torch
            import torch.distributed as dist

            if "TORCHELASTIC_RUN_ID" in os.environ:
                # Else ranks outlive a torchrun that is killed, and write to the same folders as the
                # job that was started in its place.
                ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
            if dist.is_initialized():
                return  # by Ray Train, whose group it is
            try:
                timeout = (
                    None if timeout_seconds is None else datetime.timedelta(seconds=timeout_seconds)
                )
                gpus = torch.cuda.is_available()
                backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
                dist.init_process_group(
                    backend,
                    timeout=timeout,
                    store=store_of_start(self.rank, self.count, timeout),
                    rank=self.rank,
                    world_size=self.count,
                )
            except (RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"the {self.count} ranks of RANK and WORLD_SIZE do not come together:"
                    f" {error}. {BY_TORCHRUN}"
                ) from error
            self._made_group = True

    def join(self, mesh: DeviceMesh | None) -> None:
        """Has only the ranks of dp and ep of a mesh read batches of their own."""
        if mesh is None:
            return
        self.mesh, self.data_count, self.data_rank = mesh, 1, 0
        for name in ("dp", "ep"):
            if name in (mesh.mesh_dim_names or ()):
                size = mesh[name].size()
                self.data_count *= size
                self.data_rank = self.data_rank * size + mesh.get_local_rank(name)

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
        """Leaves the process group, if this job has made it."""
        if self._made_group:
            import torch.distributed as dist

            dist.destroy_process_group()
