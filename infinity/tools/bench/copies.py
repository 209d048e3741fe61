"""copy: memory to memory as the engine gathers weights, against a loop that only moves bytes."""

from __future__ import annotations

import torch

from infinity import native

from .results import Measured, row
from .rounds import alternate
from .settings import Settings

MIB = 1024 * 1024
NBYTES = 256 * MIB


def measure(settings: Settings) -> Measured:
    """Measures rows copy.host_to_device and copy.device_to_host, in GB/s. The device is the CPU,
    even on a machine with a GPU."""
    count = settings.scaled(NBYTES, 4 * MIB) // 2
    home = native.Region(2 * count, True, settings.threads)
    host = native.tensor_at(home, home.address, count, torch.bfloat16)
    host.zero_()
    device = torch.zeros(count, dtype=torch.bfloat16)  # of the CPU, even if there is a GPU
    other = native.Region(2 * count, True, settings.threads)
    streams = [(home.address, 2, True, False), (other.address, 2, False, True)]
    jobs = {
        "copy.host_to_device": lambda: device.copy_(host),
        "copy.device_to_host": lambda: host.copy_(device),
        "moving": lambda: native.move_streams(streams, count, settings.threads),
    }
    times = alternate(jobs, settings.rounds)
    rates = {
        name: [2 * count / seconds / 1e9 for seconds in of_one.wall]
        for name, of_one in times.items()
    }
    ceiling = ("moving the same bytes", rates["moving"])
    rows = [row(name, "GB/s", rates[name], ceiling=ceiling) for name in jobs if name != "moving"]
    return Measured(rows, ["copy: the device is this machine's memory"])
