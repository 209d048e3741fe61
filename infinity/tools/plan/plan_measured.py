"""`infinity plan --machine this`: this machine, by its own rates, as a machine file."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from ...core.machine import limits, scratch
from ...errors import ConfigError
from .machine_file import Machine

NETWORK, LATENCY = 1.25e9, 30e-6  # assumed: 10 Gb/s of Ethernet
PROBE_NBYTES = 64 << 20
BLOCKS, WIDTH, HEADS, TOKENS, ROUNDS = 4, 512, 8, 512, 5  # of the halves of a backward


def measured_machine(nvme_paths: list[str], dtype: str) -> Machine:
    """Measures this machine's memory, disks, links and matrix products of ``dtype``. Without a GPU
    the processor is planned as a device with half of the memory. Raises ConfigError without a
    folder for the disks."""
    import torch

    from ...ext.rates.rates import Rates
    from ..train.compute import ALONE, Sharing, product_rate

    folders = [os.path.abspath(path) for path in nvme_paths]
    if not folders:
        folder = scratch.choose(scratch.candidates(), 0)
        if folder is None:
            raise ConfigError("--machine this: no disk was found; name a folder, --nvme-path")
        folders = [folder.folder]
    sharing, has_gpu = Sharing(), torch.accelerator.is_available()
    where = str(torch.accelerator.current_accelerator()) if has_gpu else "cpu"
    rates = Rates.measure(folders, where)
    memory = limits.memory_left()
    disk = os.statvfs(folders[0])
    host_link = _copy_rate(where) if has_gpu else rates.memory / 2
    of_inputs, of_weights = measured_halves(where, getattr(torch, dtype))
    flops, share = product_rate(getattr(torch, dtype), where), sharing.share
    return Machine(
        name="this machine",
        devices=torch.accelerator.device_count() if has_gpu else 1,
        device_memory=_device_nbytes() if has_gpu else memory // 2,
        device_flops=flops,
        host_memory=memory if has_gpu else memory // 2,
        host_bandwidth=rates.memory,
        checksum_rate=rates.checksum,
        disks=1,
        disk_capacity=disk.f_bavail * disk.f_frsize,
        disk_read=rates.disk_read or 0.0,
        disk_write=rates.disk_write or 0.0,
        device_link=host_link,
        host_link=host_link,
        network=NETWORK,
        latency=LATENCY,
        sources=(
            f"measured now on this machine: memory, copies, checksums of one thread, products of"
            f" {dtype} on {where}, the halves of a backward ({of_inputs:.2f} for inputs,"
            f" {of_weights:.2f} for weights), and the disk of {folders[0]}",
            "assumed: devices reach each other through the host, and nodes at 10 Gb/s in 30 us",
            *(
                ()
                if share is None or share > ALONE
                else (f"other work took {1 - share:.0%} of the processors' time meanwhile",)
            ),
            *(() if has_gpu else ("no GPU is here: the processor has half of the memory as one",)),
        ),
        device=torch.device(where).type,
        device_bandwidth=rates.device_memory or rates.memory,
        of_inputs=of_inputs,
        of_weights=of_weights,
    )


def measured_halves(where: str, dtype: Any) -> tuple[float, float]:
    """Measures what gradients of inputs, and of weights, take alone, in parts of a whole backward:
    medians over a transformer's blocks, by torch's functions."""
    import torch
    from torch import nn

    from ...ext.pipeline.schedules import stage_backward_input, stage_backward_weight

    blocks = nn.Sequential(
        *(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, nn.functional.gelu)
            for _ in range(BLOCKS)
        )
    ).to(where, dtype)
    taken = []
    for _ in range(ROUNDS + 1):
        given = torch.randn(TOKENS, 1, WIDTH, device=where, dtype=dtype, requires_grad=True)

        def forward(given: Any = given) -> Any:
            blocks.zero_grad()
            return blocks(given).sum()

        whole = _seconds(forward().backward, where)
        outputs, groups = forward(), list[Any]()
        inputs = _seconds(
            lambda outputs=outputs, groups=groups, given=given: groups.extend(
                stage_backward_input([outputs], None, [given], blocks.parameters())[1]
            ),
            where,
        )
        weights = _seconds(
            lambda groups=groups: stage_backward_weight(blocks.parameters(), groups), where
        )
        taken.append((whole, inputs, weights))
    whole, inputs, weights = (statistics.median(each) for each in zip(*taken[1:]))
    return inputs / whole, weights / whole


def _seconds(work: Callable[[], Any], where: str) -> float:
    import torch

    def settle() -> None:
        if where != "cpu":
            torch.accelerator.synchronize()

    settle()
    start = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - start


def _device_nbytes() -> int:
    import torch

    return torch.accelerator.get_memory_info()[1]


def _copy_rate(where: str) -> float:
    """Measures bytes per second from pinned host memory to a device."""
    import torch

    from ..train.compute import fastest

    source = torch.empty(PROBE_NBYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=where)
    return PROBE_NBYTES / fastest(lambda: target.copy_(source, non_blocking=True), where)
