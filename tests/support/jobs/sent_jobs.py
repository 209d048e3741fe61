"""Jobs that compare the bytes that a rank says it sends with those that the kernel counts.

**kernel's counter**: payload bytes that this process has given to all of its TCP sockets: those
that the peers acknowledged (``TCP_INFO``) and those that still wait for it (``SIOCOUTQ``). Bytes
sent, less those sent again, are less exact: the kernel also counts segments that it fails to send
again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))
from ranks import serve

import infinity

BYTES_ACKED = 120  # where the struct tcp_info of Linux 4.1 and newer has them


def kernel_sent() -> dict[str, int]:
    """Reads the kernel's counter of each socket. Sockets of a former job's groups may close
    meanwhile, so a total would fall."""
    counted = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}")
            if not inode.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.type == socket.SOCK_STREAM and found.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    before = -1
                    # What is acknowledged between the two would count twice, or not at all.
                    while (acked := _acknowledged(found)) != before:
                        before, waiting = acked, fcntl.ioctl(found, termios.TIOCOUTQ, bytes(4))
                    counted[inode] = acked + struct.unpack("=i", waiting)[0]
    return counted


def _acknowledged(found: socket.socket) -> int:
    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("=Q", info, BYTES_ACKED)[0]


def sent(
    config: dict, dtype: torch.dtype = torch.float32, shape: Any = None, besides: int = 0
) -> dict[str, Any]:
    """Takes three steps of a model of 4 MiB in fp32. ``besides``: elements that the loop itself
    adds up over the ranks in each of them."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mesh = shape and dist.device_mesh.init_device_mesh(
        "cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")
    )
    config = {"params": "host", "optimizer": "host"} | config
    model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)

    def counters() -> tuple[dict[str, int], dict[str, Any]]:
        dist.barrier()
        return kernel_sent(), infinity.stats(model).collectives

    def step() -> None:
        model(torch.randn(8, 512, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if besides:
            dist.all_reduce(torch.zeros(besides))

    step()  # connects what is not connected yet
    before, then = counters()
    for _ in range(3):
        step()
    after, now = counters()
    nbytes = {name: now[name].nbytes - then[name].nbytes for name in now}
    operations = {name: now[name].operations - then[name].operations for name in now}
    kernel = sum(count - before.get(inode, 0) for inode, count in after.items())
    infinity.unwrap_model(model, optimizer)
    return {"kernel": kernel, "nbytes": nbytes, "operations": operations}


if __name__ == "__main__":
    serve(globals())
