"""The rivals' AdamW over fp32 masters: the fused step alone, or the whole job with the casts and
the scaling."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..huge_pages import HUGE_PAGES


class AdamWJob:
    """A callable: one step. ``whole_job``: bf16 gradients in, scaled by ``factor``, fp32 master
    kept, bf16 weights out.

    Passes are in-place where they can be and reuse their memory, as a careful user of these
    optimizers would have it.
    """

    def __init__(self, make_optimizer: Callable, count: int, *, whole_job: bool, factor: float):
        self.factor, self.whole_job = factor, whole_job
        self.master = torch.empty(count).normal_(std=0.02).requires_grad_()
        self.master.grad = torch.empty(count).normal_(std=1e-3)
        if whole_job:
            self.weight = self.master.detach().to(torch.bfloat16)
            self.grad = self.master.grad.to(torch.bfloat16)
        self.optimizer = make_optimizer([self.master])

    def told(self) -> dict[str, Any]:
        """Returns the optimizer's class and options, and the versions that they are of."""
        options = {name: str(value) for name, value in self.optimizer.defaults.items()}
        kind = type(self.optimizer)
        version = importlib.metadata.version(kind.__module__.partition(".")[0])
        huge = {name: os.environ.get(name, "") for name in HUGE_PAGES}
        return {
            "class": kind.__qualname__,
            "version": version,
            "options": options,
            "environment": huge,
        }

    @torch.no_grad()
    def __call__(self) -> None:
        if self.whole_job:
            self.master.grad.copy_(self.grad)
            self.master.grad.mul_(self.factor)
        self.optimizer.step()
        if self.whole_job:
            self.weight.copy_(self.master)


def _find_torch(count: int, *, whole_job: bool, factor: float) -> AdamWJob | str:
    def make(params):
        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)

    return AdamWJob(make, count, whole_job=whole_job, factor=factor)


def _find_deepspeed(count: int, *, whole_job: bool, factor: float) -> AdamWJob | str:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        def make(params):
            return DeepSpeedCPUAdam(params, lr=1e-3, weight_decay=0.01, adamw_mode=True)

        return AdamWJob(make, count, whole_job=whole_job, factor=factor)
    except ImportError:
        return "not installed (pip install deepspeed)"
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever keeps a rival from being built or run is told beside the figures
        return f"its CPU Adam does not build here ({str(error)[:100]!r})"


DEEPSPEED_ADAM = SimpleNamespace(NAME="deepspeed", find=_find_deepspeed)
TORCH_ADAM = SimpleNamespace(NAME="torch", find=_find_torch)


@contextmanager
def openmp_threads(count: int) -> Iterator[None]:
    """Sets ``count`` threads for every OpenMP runtime in this process inside the block: torch and
    DeepSpeed may each have one."""
    before = torch.get_num_threads()
    _set_openmp_threads(count)
    try:
        yield
    finally:
        _set_openmp_threads(before)


def _set_openmp_threads(count: int) -> None:
    torch.set_num_threads(count)
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "omp" in line
    }
    for path in mapped:
        if path.startswith("/") and (
            setter := getattr(ctypes.CDLL(path), "omp_set_num_threads", None)
        ):
            setter(count)
