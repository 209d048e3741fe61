"""Watch: writes a loop's status to files, for ``infinity top`` and ``infinity report``.

The training thread replaces a small file of each rank from time to time, between two steps or two
units. There is no extra thread, nothing blocks, and the model and its arithmetic are not touched. A
file that cannot be written is skipped.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ...core.machine import disk_profile
from ...core.machine.kernel import process_space
from ...core.machine.tiers import Tier
from ...core.machine.traffic import DATA, Traffic
from ...core.run.job import Job
from ...core.run.registry import is_wrapped, wrapped
from ...core.units.unit import ParamUnit
from ...errors import ConfigError, UsageError
from ...ext.audit.audit import audited
from ...ext.card.launches import launch_seconds
from ...ext.rates.rates import disk_rates
from ...files.outputs import folder_of
from . import run_files
from .stats import edges_of, stats
from .time_shares import shares_of

logger = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
# Of the history: at the limit every other point is dropped, and the stride doubles.
MOST_POINTS = 512
HISTORY_EVERY = 10  # in statuses
OF_TIERS = ("charged_nbytes", "peak_nbytes", "planned_nbytes", "budget_nbytes")
LATER = "taken since the wrap"  # in the memory map: what has no part of its own
SMOOTHING = 0.2  # weight of the last step in the mean step time


def _check(steps: int | None, folder: str | os.PathLike | None) -> None:
    if steps is not None and (not hasattr(steps, "__index__") or steps < 0):
        raise ConfigError(f"steps={steps!r}: give the number of steps, or None")
    if folder is not None:
        folder_of(folder, "Watch's folder")


class Watch:
    """Context: writes the status of a loop around a wrapped ``model`` to ``folder``.

        with infinity.Watch(model, steps=1000) as watch:
            for batch in loader:
                ...
                watch.update(loss=loss.item(), tokens=batch.numel())

    steps
        Number of steps of the loop, for the remaining time.
    folder
        None: a folder of this job in the cache (``INFINITY_CACHE``), read by ``infinity top``.
    every
        Minimum seconds between two writes.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        steps: int | None = None,
        first_step: int = 0,
        folder: str | os.PathLike | None = None,
        every: float = EVERY_SECONDS,
    ):
        _check(steps, folder)
        engine = wrapped(model).engine
        job = engine.job
        self._model, self._traffic = weakref.ref(wrapped(model).model), job.traffic
        self._root = disk_profile.cache_folder() / "runs"
        self.folder = Path(folder) if folder is not None else self._root / _free_name()
        _open.add(self)
        self._every, self._steps, self._step, self._rank = (
            every,
            steps,
            first_step,
            job.ranks.world_rank,
        )
        self._loss: float | None = None
        self._step_seconds = self._tokens = 0.0
        self._at, self._next, self._written = time.monotonic(), 0.0, 0
        self._bound: str | None = None  # what the last step was bound by, once the loop is over
        self._doing: tuple[str, str] = ("starting", "")
        self._before: tuple[float, dict] | None = None  # time, and the edges' bytes then
        self._waits = job.traffic.waits()  # then
        self._history: list[tuple[int, float | None, float]] = []
        self._stride = 1
        self._told: dict[str, Any] | None = None  # the last status
        self._lock = threading.Lock()  # autograd has threads of its own if a GPU computes
        self._process = run_files.this_process()
        self._limits = _limits(job)
        itself = weakref.ref(self)  # a watch that is dropped ends

        def begun(module: nn.Module, units: Sequence[ParamUnit]) -> None:
            if units and (watch := itself()) is not None:
                watch._tell("forward", units[0].name)

        def landed(unit: ParamUnit) -> None:
            if (watch := itself()) is not None:
                watch._tell("backward", unit.name)

        self._listens: list[tuple[list[Any], Any]] = [
            (job.events.forward_begun, begun),
            (job.events.unit_landed, landed),
        ]
        for listeners, listener in self._listens:
            listeners.append(listener)
        if job.ranks.is_first and folder is None:
            run_files.remove_old(self._root)
        self._has_failed = False
        self._plan = _plan(job) | {"model": type(model).__name__}
        self._write(run_files.PLAN, self._plan)
        self._tell("starting", "", now=True)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close("ended" if exc_info[0] is None else f"ended by {exc_info[0].__name__}")

    def update(self, *, loss: float | None = None, tokens: int = 0) -> None:
        """Counts one more step of the loop. ``tokens``: its tokens, over all ranks."""
        for name, value in (("loss", loss), ("tokens", tokens)):
            if value is not None and not hasattr(value, "__float__"):
                raise UsageError(f"{name} is a {type(value).__name__}: give a number")
        if tokens < 0:
            raise UsageError(f"tokens={tokens}: give the number of a step's tokens")
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        first = not self._step_seconds
        self._step_seconds += (seconds - self._step_seconds) * (1.0 if first else SMOOTHING)
        self._tokens += (tokens - self._tokens) * (1.0 if first else SMOOTHING)
        self._step += 1
        self._loss = float(loss) if loss is not None and math.isfinite(loss) else None
        if self._step % self._stride == 0:
            self._history.append((self._step, self._loss, round(seconds, 6)))
            if len(self._history) > MOST_POINTS:
                self._history, self._stride = self._history[::2], 2 * self._stride
        self._tell("step", "")

    def data(self, loader: Iterable[Any]) -> WatchedData:
        """Returns ``loader`` as one that counts the seconds in which the loop waits for its next
        batch, and the bytes of its tensors: as the edge ``data`` of :func:`stats`, of ``infinity
        top`` and of the report."""
        if not hasattr(loader, "__iter__"):
            raise UsageError(f"Watch.data: a {type(loader).__name__} cannot be iterated over")
        return WatchedData(loader, self._traffic)

    def close(self, state: str = "ended") -> None:
        """Writes that the loop is over, and listens no more. Idempotent."""
        _open.discard(self)
        while self._listens:
            listeners, listener = self._listens.pop()
            listeners.remove(listener)
        if self._doing[0] != state and not self._doing[0].startswith("ended"):
            model = self._model()
            # Not after an exception: the caller is to see that one.
            if state == "ended" and model is not None and is_wrapped(model):
                self._bound = stats(model).bottleneck
            self._tell(state, "", now=True)
            self._write(run_files.HISTORY, {"points": self._history})

    def _tell(self, phase: str, unit: str, *, now: bool = False) -> None:
        """Records the phase, and writes it if the last write is long enough ago."""
        if self._doing[0].startswith("ended"):
            return
        self._doing = (phase, unit)
        if (now or time.monotonic() >= self._next) and self._lock.acquire(blocking=False):
            try:
                self._next = time.monotonic() + self._every
                self._written += 1
                self._write(run_files.STATUS, self._status())
                if self._written % HISTORY_EVERY == 0:
                    self._write(run_files.HISTORY, {"points": self._history})
            finally:
                self._lock.release()

    def _status(self) -> dict[str, Any]:
        now, model = time.monotonic(), self._model()
        doing = {
            "at": time.time(),
            "phase": self._doing[0],
            "unit": self._doing[1],
            "step": self._step,
            "steps": self._steps,
            "loss": self._loss,
            "bound": self._bound,
        }
        if model is None or not is_wrapped(model):  # the counters are final
            return (self._told or {}) | doing
        job = wrapped(model).engine.job
        if (tiers := _memory_map(job)) != self._plan["tiers"]:  # an average came, for example
            self._plan["tiers"] = tiers
            self._write(run_files.PLAN, self._plan)
        counted = edges_of(job) | ({} if job.ranks.alone else job.traffic.collectives)
        edges = {name: asdict(moved) for name, moved in counted.items()}
        before_at, before = self._before or (now, edges)
        self._before, seconds = (now, edges), max(now - before_at, 1e-9)
        waits = job.traffic.waits() | launch_seconds(job)
        waited = {name: wait - self._waits.get(name, 0.0) for name, wait in waits.items()}
        self._waits = waits
        rate = self._tokens / self._step_seconds if self._step_seconds else 0.0
        self._told = doing | {
            "pid": self._process.pid,
            "started": self._process.started,
            "host": os.uname().nodename,
            "space": process_space(),
            "rank": self._rank,
            "ranks": job.ranks.data_size * job.ranks.tp_size,
            "tokens_per_second": rate,
            "step_seconds": self._step_seconds,
            "remaining_seconds": (
                (self._steps - self._step) * self._step_seconds if self._steps is not None else None
            ),
            "tiers": {
                str(tier): {name: getattr(account, name) for name in OF_TIERS}
                for tier, account in job.ledger.accounts.items()
            },
            "edges": _edge_status(edges, before, seconds, self._limits),
            "shares": shares_of(seconds, waited),
            "audited": (audits := audited(job)),
            "audited_nbytes": audits.get("nbytes", {}),
            "written": {
                "nbytes": edges["host->nvme"]["nbytes"],
                "seconds": job.updates.clock.total_seconds,
                "drives": len(job.config.nvme_paths),
            },
        }
        return self._told

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        if not self.folder.is_absolute() and self.folder.parts[:1] == ("~",):
            return  # without a home folder; the current folder is the user's
        try:
            run_files.write(self.folder, kind, self._rank, content)
        except OSError as error:  # a full disk, for example: the training continues
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "no status is written to %s: %s. `infinity top` and `report` do not show this"
                    " job; INFINITY_CACHE, or Watch(folder=...), names another folder.",
                    self.folder,
                    os.strerror(error.errno or 0),
                )


class WatchedData:
    """The batches of ``loader``, each of which is waited for on the record."""

    def __init__(self, loader: Any, traffic: Traffic):
        self._loader, self._traffic = loader, traffic

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        with self._traffic.stalled(DATA):
            batches = iter(self._loader)
        while True:
            with self._traffic.stalled(DATA):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            leaves = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)[0]
            self._traffic.data.nbytes += sum(
                each.nbytes
                for each in leaves
                if isinstance(each, torch.Tensor) and each.layout is torch.strided
            )
            yield batch


_open: weakref.WeakSet[Watch] = weakref.WeakSet()  # open watches


def _free_name() -> str:
    """Returns the name of this job's folder. A further model of the same process gets a number, the
    same on all ranks."""
    taken, name = {watch.folder.name for watch in _open}, run_files.job_name()
    return next(
        each
        for number in itertools.count(1)
        if (each := name if number == 1 else f"{name}-{number}") not in taken
    )


def _edge_status(
    edges: dict[str, dict], before: dict[str, dict], seconds: float, limits: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """Describes the traffic of every edge; its rates are of the last ``seconds``. ``limits``: bytes
    per second."""
    status, new = {}, {"nbytes": 0, "stall_seconds": 0.0}
    for name, moved in edges.items():
        was = before.get(name, new)  # data comes later
        status[name] = {
            "nbytes": moved["nbytes"],
            "limit": limits.get(name),
            "rate": (moved["nbytes"] - was["nbytes"]) / seconds,
            "stalled": (moved["stall_seconds"] - was["stall_seconds"]) / seconds,
            "stall_seconds": moved["stall_seconds"],
        }
    return status


def _limits(job: Job) -> dict[str, float]:
    """Returns the measured bytes per second of the edges; unmeasured ones are left out."""
    if not job.planned.plan.planned_nbytes(Tier.NVME):
        return {}
    read, write, _ = disk_rates(job.config.nvme_paths)
    return {"nvme->host": read, "host->nvme": write}


def _plan(job: Job) -> dict[str, Any]:
    """Returns the data of the report: the memory map, and the path of the timeline."""
    return {
        "tiers": _memory_map(job),
        "trace": job.config.trace,
        "nvme_paths": list(job.config.nvme_paths),
        "parameters": sum(handle.param.numel() for unit in job.units for handle in unit.handles),
    }


def _memory_map(job: Job) -> dict[str, dict[str, Any]]:
    """Returns the planned bytes of every tier, by part. They are those of :func:`stats`."""
    tiers = {}
    for tier, account in job.ledger.accounts.items():
        parts = {name: nbytes for name, nbytes in job.planned.plan.terms[tier].items() if nbytes}
        if (more := account.planned_nbytes - sum(parts.values())) > 0:
            parts[LATER] = more
        tiers[str(tier)] = {"nbytes": sum(parts.values()), "parts": parts}
    return tiers
