"""Rivals: other systems' loops, each behind ``find``, which gives a runner or the reason why there
is none.

Disk rivals        ``find(path, nbytes)`` -> an object with ``run("read" | "write" | "mixed")``,
                   ``told()`` (what the result file keeps: version, options, trials) and ``close()``
Optimizer rivals   ``find(count, whole_job=, factor=)`` -> a callable, one step; with ``told()``

DeepSpeed compiles its operations when they are first used, which takes minutes.
"""

import signal
from types import SimpleNamespace
from typing import Any

from infinity.tools.bench.rounds import tell

from . import deepspeed_aio, fio
from .optimizers import DEEPSPEED_ADAM, TORCH_ADAM, openmp_threads

BUILD_SECONDS = 300


def limited(rival: Any, seconds: int = BUILD_SECONDS) -> SimpleNamespace:
    """Returns a rival whose ``find`` tells that it begins, and ends after so many seconds with the
    reason."""

    def find(*args: Any, **kwargs: Any) -> Any:
        tell(f"{rival.NAME} is compiled if it was not yet, for at most {seconds} s")
        before = signal.signal(signal.SIGALRM, _end)
        signal.alarm(seconds)
        try:
            return rival.find(*args, **kwargs)
        except TimeoutError:
            return f"not built within {seconds} s"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    return SimpleNamespace(NAME=rival.NAME, find=find)


def _end(signum: int, frame: Any) -> None:
    raise TimeoutError


DISK_RIVALS = (fio, limited(deepspeed_aio))
OPTIMIZER_RIVALS = (limited(DEEPSPEED_ADAM), TORCH_ADAM)

__all__ = ["DISK_RIVALS", "OPTIMIZER_RIVALS", "limited", "openmp_threads"]
