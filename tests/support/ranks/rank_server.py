"""One of the standing ranks (see `ranks`): runs the jobs that come over a socket until it is
closed."""

from __future__ import annotations

import functools
import gc
import importlib
import io
import os
import pickle
import random
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import torch
import torch.distributed as dist
from ranks import Failed, Plainly, join, outcome_of
from torch.distributed import device_mesh


def main(port: int) -> None:
    rank = join()
    connection = Connection(socket.create_connection(("127.0.0.1", port)).detach())
    connection.send(rank)
    while True:
        try:
            script, name, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # who asked is gone
        torch.manual_seed(0)
        random.seed(0)
        result = outcome_of(lambda: getattr(importlib.import_module(script), name)(**arguments), {})
        end_groups()
        raw = io.BytesIO()
        Plainly(raw).dump(result)
        connection.send_bytes(raw.getvalue())
        if isinstance(result, Failed):
            os._exit(1)


def end_groups() -> None:
    """Ends the process groups that a job's engines have left: each has threads that never sleep for
    long."""
    gc.collect()  # engines end their own
    gc.freeze()  # what a job has imported: the next ones collect often
    names = dist.distributed_c10d._world.pg_names
    for group in list(dist.distributed_c10d._world.pg_map):
        if (
            group is not dist.group.WORLD and not names[group].isdigit()
        ):  # a number: a mesh's, which the next job has too
            dist.destroy_process_group(group)


@functools.cache
def the_mesh(
    device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None
) -> device_mesh.DeviceMesh:
    """Makes a mesh for the first job that wants it and gives it to the others: DTensor's caches
    take meshes that are alike for one, and would give a job the groups of an earlier one's."""
    return make_mesh(device, shape, mesh_dim_names=mesh_dim_names)


make_mesh = device_mesh.init_device_mesh

if __name__ == "__main__":
    device_mesh.init_device_mesh = dist.init_device_mesh = the_mesh
    main(int(sys.argv[1]))
