"""Rivals: other systems' loops, each behind ``find``, which gives a runner or the reason why there
is none.

Disk rivals        ``find(path, nbytes)`` -> an object with ``run("read" | "write" | "mixed")`` and
                   ``close()``
Optimizer rivals   ``find(count, whole_job=, factor=)`` -> a callable, one step
"""

from . import deepspeed_aio, fio
from .optimizers import OPTIMIZER_RIVALS, openmp_threads

DISK_RIVALS = (fio, deepspeed_aio)

__all__ = ["DISK_RIVALS", "OPTIMIZER_RIVALS", "openmp_threads"]
