"""Peers: other systems' loops, each behind ``find``, which gives a runner or the reason why there is none.

Disk peers        ``find(path, nbytes)`` -> an object with ``run("read" | "write" | "mixed")`` and ``close()``
Optimizer peers   ``find(count, whole_job=, factor=)`` -> a callable, one step
"""

from . import deepspeed_aio, fio
from .optimizers import OPTIMIZER_PEERS, openmp_threads

DISK_PEERS = (fio, deepspeed_aio)

__all__ = ["DISK_PEERS", "OPTIMIZER_PEERS", "openmp_threads"]
