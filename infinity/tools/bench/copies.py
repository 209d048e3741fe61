"""copy: memory to memory as the engine gathers weights, against what only moves bytes.

That is a loop of the engine's, and torch's copy between two tensors of its own. The faster of both
is the ceiling.
"""

from __future__ import annotations

import torch

from infinity import native

from .results import Measured, row
from .settings import Settings

MIB = 1024 * 1024
NBYTES = 256 * MIB


def measure(settings: Settings) -> Measured:
    """Measures rows copy.memory.from_home and copy.memory.to_home, in GB/s. It is this machine's
    memory on both sides, also where there is a GPU."""
    count = settings.scaled(NBYTES, 4 * MIB) // 2
    home = native.Region(2 * count, True, settings.threads)
    host = native.tensor_at(home, home.address, count, torch.bfloat16)
    host.zero_()
    device = torch.zeros(count, dtype=torch.bfloat16, device="cpu")
    plain = torch.zeros_like(device)
    other = native.Region(2 * count, True, settings.threads)
    streams = [(home.address, 2, True, False), (other.address, 2, False, True)]
    jobs = {
        "copy.memory.from_home": lambda: device.copy_(host),
        "copy.memory.to_home": lambda: host.copy_(device),
        "moving": lambda: native.move_streams(streams, count, settings.threads),
        "torch": lambda: plain.copy_(device),
    }
    times = settings.alternate(jobs)
    rates = {
        name: [2 * count / seconds / 1e9 for seconds in of_one.wall]
        for name, of_one in times.items()
    }
    fastest = [max(pair) for pair in zip(rates.pop("moving"), rates.pop("torch"))]
    ceiling = ("the faster of moving the bytes and torch's copy", fastest)
    return Measured([row(name, "GB/s", each, ceiling=ceiling) for name, each in rates.items()])
