"""One of the standing ranks (see `ranks`): runs the jobs that come over a socket until it is closed."""

from __future__ import annotations

import gc
import importlib
import io
import os
import pickle
import random
import socket
import sys
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from ranks import Failed, Plainly, join, outcome_of


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
    """Ends the process groups that a job has made, for its meshes say: each has threads that never sleep for long."""
    gc.collect()  # engines end their own
    gc.freeze()  # what a job has imported: the next ones collect often
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    main(int(sys.argv[1]))
