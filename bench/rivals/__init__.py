"""Rivals: other systems' loops, each behind ``find``, which gives a runner or the reason why there
is none.

Disk rivals        ``find(path, nbytes)`` -> an object with ``run("read" | "write" | "mixed")``,
                   ``told()`` (what the result file keeps: version, options, trials) and ``close()``
Optimizer rivals   ``find(count, whole_job=, factor=)`` -> a callable, one step; with ``told()``

DeepSpeed compiles its operations when they are first used, which takes minutes.
"""

import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

from infinity.tools.bench.rounds import tell
from infinity.tools.bench.settings import Settings

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


def of_disks(settings: Settings) -> list[Any]:
    """Returns the disk rivals that are measured."""
    aio = SimpleNamespace(
        NAME=deepspeed_aio.NAME, find=partial(deepspeed_aio.find, retune=settings.retune)
    )
    return [rival for rival in (fio, limited(aio)) if settings.measures(rival.NAME)]


def of_optimizers(settings: Settings) -> list[Any]:
    """Returns the optimizer rivals that are measured."""
    known = (limited(DEEPSPEED_ADAM), TORCH_ADAM)
    return [rival for rival in known if settings.measures(rival.NAME)]


__all__ = ["limited", "of_disks", "of_optimizers", "openmp_threads"]
