"""Own processors: divides the processors of a machine among its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ...core.machine import numa, processors
from ...core.machine.device import Device
from ...core.seams import Events, Extension
from ...ranks.collectives import Collectives

DEVICES = "/sys/bus/pci/devices"


class OwnProcessors(Extension):
    """The processors of this rank, so that it starts no more threads than its part of the
    machine."""

    @classmethod
    def begin(cls, config: Any, device: Device, collectives: Collectives, events: Events) -> None:
        """Exchanges the processors that each rank may use. A rank that computes on a GPU moves to
        the GPU's node first."""
        ranks, where = collectives.ranks, device.where
        if ranks.alone:
            processors.share_with([])
            return
        before_binding = ranks.allowed_processors
        if where.type == "cuda" and before_binding is not None:
            bind_to_gpu(pci_address(where.index), before_binding)
        here = ranks.world_rank, socket.gethostname(), sorted(processors.allowed())
        everyones = collectives.collect(here, "where the ranks may run")
        processors.share_with(
            [set(theirs) for rank, host, theirs in everyones if host == here[1] and rank != here[0]]
        )


def pci_address(index: int) -> str:
    """Returns the PCI address of CUDA's device ``index``, as the kernel writes it; "" if torch does
    not tell."""
    gpu: Any = torch.cuda.get_device_properties(index)
    if not hasattr(gpu, "pci_domain_id"):
        return ""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def bind_to_gpu(
    address: str,
    allowed: Collection[int],
    root: str | os.PathLike = numa.SYSFS,
    devices: str | os.PathLike = DEVICES,
) -> bool:
    """Binds this thread, and those it starts later, to the ``allowed`` processors of the node that
    the GPU at PCI ``address`` is on: a copy from another node's memory is slower. Returns whether
    that is known."""
    try:
        node = int(Path(devices, address, "numa_node").read_text())
        near = numa.parse(Path(root, f"node{node}", "cpulist").read_text().strip()) & set(allowed)
    except (OSError, ValueError):  # no such device or node; -1: the firmware does not tell
        return False
    if near:
        os.sched_setaffinity(0, near)
    return bool(near)
