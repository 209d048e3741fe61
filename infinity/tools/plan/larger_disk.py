"""The disk that a plan which does not fit needs: what is full is said, and what would hold it."""

from __future__ import annotations

from dataclasses import replace

from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...errors import CapacityError, ConfigError
from .machine_file import Machine
from .plan_job import Job
from .saved import quietly

GIB = 1 << 30
TIMES = (1, 1.25, 1.5, 2)  # of what a plan with any disk puts there: homes differ by the disk
ANY = 1 << 60  # bytes, more than any disk has


def with_larger_disk(
    error: CapacityError, job: Job, machine: Machine | None, nodes: int
) -> CapacityError:
    """Returns ``error`` with the capacity of a disk with which the plan fits, tried; the same if
    there is none. ``machine``: what is planned for; None: this one."""
    capacity = job.config.nvme_capacity
    if str(error).startswith("nvme_capacity"):  # it says what is enough, to the byte
        return error
    nbytes = _planned(job, machine, nodes, ANY)
    sizes = [-int(-(nbytes or 0) * times // GIB) * GIB for times in TIMES]
    most = next((each for each in sizes if each and _planned(job, machine, nodes, each)), None)
    if most is None:
        return error
    size = f"--nvme-capacity {most // GIB}GiB"
    if capacity is None:
        return CapacityError(f"{error} or plan with a disk: {size}")
    if most <= int(capacity):
        return error
    less = _planned(job, machine, nodes, int(capacity), moments="int8") is not None
    return CapacityError(
        f"the disk is full: {format_nbytes(most)} would be on it, and it has"
        f" {format_nbytes(int(capacity))} to plan with."
        f" Plan with {'moments in 8 bits: --moments int8, or with ' if less else ''}a larger one:"
        f" {size}"
    )


def _planned(
    job: Job, machine: Machine | None, nodes: int, capacity: int, **changes: str
) -> int | None:
    """Returns what a plan with a disk of ``capacity`` puts on it; None if it does not fit."""
    from ...core.wrap.lay_out import lay_out
    from ...ranks.parallel_dims import ParallelDims
    from .cluster import OnPaper

    paths = job.config.nvme_paths or (".",)
    ranks = None
    if machine is not None:
        ranks = ParallelDims(size=nodes * machine.devices, local_size=machine.devices)
    try:
        config = replace(job.config, nvme_capacity=capacity, nvme_paths=paths, **changes)
        device = OnPaper(job.saved.nbytes(job.batch["length"]))  # of one sample at a time
        with quietly():
            plan, _ = lay_out(job.model, job.optimizers, config, ranks, device, explains=False)
    except (CapacityError, ConfigError):
        return None
    return plan.planned_nbytes(Tier.NVME)
