"""Checkpoints: saves a loop as often as a share of its time allows, and resumes it."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.run.job import Job
from ...core.run.registry import wrapped
from ...core.seams import Extension
from ...core.wrap.agreement import least
from ...errors import ConfigError, InfinityError, UsageError
from ...files.outputs import folder_of
from .background_save import Saving
from .interval import Interval, share_of
from .load import load_checkpoint
from .manifest import MANIFEST, read_manifest
from .save import save_checkpoint
from .signals import Listener, handler_before, others_end

logger = logging.getLogger(__name__)


class Steps(int):
    """A number of steps that a checkpoint came with. An Order that begins with it is compared with
    the one that was saved, and saved from then on. So is one of a multiple, for accumulation."""

    _owner: Callable[[], Checkpoints | None]
    _factor: int

    def __new__(cls, value: int, owner: Checkpoints, factor: int = 1):
        made = super().__new__(cls, value)
        made._owner, made._factor = weakref.ref(owner), factor
        return made

    def __mul__(self, other: int) -> int:
        owner = self._owner()
        if owner is None:
            return int(self) * other
        return Steps(int(self) * other, owner, self._factor * other)

    def __reduce__(self) -> tuple:
        return int, (int(self),)

    __rmul__ = __mul__

    def continues(self, order: dict[str, Any]) -> None:
        """Raises ConfigError if the ``order`` that was saved is another one."""
        if (owner := self._owner()) is not None:
            owner._take_order(order)

    def now(self) -> int | None:
        """Returns the number after the steps so far; None if its Checkpoints is gone."""
        owner = self._owner()
        return None if owner is None else owner.steps * self._factor


class EndedSteps(Extension):
    """Whether a step has ended since this was asked last: the weights of the job are newer."""

    may_stand_aside = True

    def __init__(self) -> None:
        self.has_ended = False

    def install(self, job: Job, model: object) -> None:
        """Adds a listener for steps."""
        job.events.step_ended.append(self.note)

    def note(self, steps: int) -> None:
        """Notes a step."""
        self.has_ended = True

    def take(self) -> bool:
        """Returns whether one has ended, and forgets it."""
        has_ended, self.has_ended = self.has_ended, False
        return has_ended


@dataclass(frozen=True)
class Resumed:
    """What a job goes on from. ``steps``: that were trained before; ``extra``: what the last save
    was given, None without a checkpoint."""

    steps: Steps
    extra: Any


class Checkpoints:
    """Saves a job to ``folder`` as often as ``overhead`` allows, and on SIGTERM and SIGUSR1.

        saver = infinity.Checkpoints("saved", model, optimizer, overhead=0.02)
        order = infinity.data.Order(len(dataset), batch_size=64, consumed=saver.resume().steps)
        for batch in DataLoader(dataset, batch_sampler=order):
            ...
            optimizer.step()
            optimizer.zero_grad()
            saver.after_step()
        saver.close()

    overhead
        The share of the time that saving may take: a number between 0 and 1, or a text as "2%".
    extra
        A value to save, or a function that returns one. ``resume()`` gives the last one back.
    between_failures
        Mean seconds between two failures, if they are known: then it saves more often if that loses
        less time.
    loader
        A torchdata ``StatefulDataLoader``, whose state is saved and loaded, too.

    It saves beside the next forward and backward. The folder has the last checkpoint that is
    complete. The interval follows what saving costs: it is chosen anew
    after each save, on the first rank, for all of them. After SIGTERM the job is saved at the end
    of its step, and ends; another one after two seconds ends it at once. After SIGUSR1 it goes on.
    Every rank makes one, in its main thread, and makes the same calls.

    Raises ConfigError for an overhead that is not a share, UsageError for a plain model.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        overhead: float | str = 0.02,
        extra: Any | Callable[[], Any] = None,
        between_failures: float | None = None,
        loader: Any = None,
    ):
        self._folder = folder_of(folder, "Checkpoints' folder")
        job = wrapped(model).engine.job
        self._collectives = job.collectives
        self._model, self._optimizer, self._extra = model, optimizer, extra
        self._loader = _checked_loader(loader)
        if between_failures is not None and not _is_seconds(between_failures):
            raise ConfigError(f"between_failures={between_failures!r} must be seconds above 0")
        self._interval = Interval(share_of(overhead), between_failures)
        self._orders: list[dict[str, Any]] = []  # of the loop, as they were made
        self._saved_orders: list[dict[str, Any]] = []
        self._steps, self._may_replace = 0, False
        self._unsaved = False
        self._ended = job.add(EndedSteps())
        # Whether after_step() counts steps, and the last one was counted before its call.
        self._counts = self._is_ahead = False
        # Of the job, which must not keep this, nor the model that this has
        self._leave = weakref.finalize(self, job.remove, self._ended)
        self._saving: tuple[Saving, int, float] | None = None  # with its step, seconds of its call
        self._signals = Listener()
        self._last = time.monotonic()

    @property
    def steps(self) -> int:
        """Steps of the loop, over all runs."""
        return self._steps

    @property
    def every(self) -> int | None:
        """Steps from one save to the next; None before the first."""
        return self._interval.steps

    def resume(self) -> Resumed:
        """Loads the checkpoint of the folder, if it has one. Every rank calls this, before the
        first step.

        Raises UsageError after a step or for a checkpoint of :func:`save_checkpoint`, and what
        :func:`load_checkpoint` raises.
        """
        if self._may_replace:
            raise UsageError("Checkpoints.resume() again, or after a step: call it once, first")
        extra = None
        if self._has_checkpoint():
            self._refuse_others()
            saved = load_checkpoint(self._folder, self._model, self._optimizer)
            own, extra = saved["checkpoints"], saved["extra"]
            self._load_loader(own["loaders"])
            self._steps, self._saved_orders = own["steps"], own["orders"]
        self._may_replace, self._is_ahead = True, False
        self._ended.take()
        self._last = time.monotonic()
        return Resumed(Steps(self._steps, self), extra)

    def after_step(self) -> bool:
        """Counts a step, and begins to save if that is due. Every rank calls this after
        ``zero_grad()``. Returns whether it began.

        Ends the process by SystemExit if it was saved on SIGTERM. Raises what
        :func:`save_checkpoint` raises, also of the save before; then the old checkpoint stands, and
        the next try is as far away as after a save.
        """
        self._refuse_replacing()
        if self._ended.take() or not self._is_ahead:  # a scaler may have skipped it
            self._steps, self._unsaved = self._steps + 1, True
        self._counts, self._is_ahead = True, False
        self._interval.note_step(time.monotonic() - self._last)
        is_over, is_due, is_ending = self._agree()
        if is_over:
            self._finish()
        if is_due:
            self._save(wait=is_ending)
        self._last = time.monotonic()
        if is_ending:
            self._end()
        return is_due

    def save(self) -> None:
        """Saves now, and waits until it is saved. Every rank calls this, between two steps. A step
        that ended before counts, and :meth:`after_step` does not count it again."""
        self._refuse_replacing()
        self._count_last()
        self._save(wait=True)
        self._last = time.monotonic()

    def _count_last(self) -> None:
        """Counts a step that has ended since the last :meth:`after_step`."""
        if self._counts and self._ended.take():
            self._steps, self._unsaved, self._is_ahead = self._steps + 1, True, True

    def _save(self, *, wait: bool) -> None:
        self._finish(raises=False)  # the new save replaces it
        self._interval.begin_save()
        began, saving = time.monotonic(), None
        try:
            own = {"steps": self._steps, "orders": self._orders, "loaders": self._loaders()}
            extra = self._extra() if callable(self._extra) else self._extra
            saved = {"checkpoints": own, "extra": extra}
            saving = save_checkpoint(self._folder, self._model, self._optimizer, saved, wait=wait)
        except BaseException:
            self._interval.end_save(None, None)
            raise
        self._unsaved, stall = False, time.monotonic() - began
        if saving is None:
            self._note_saved(self._steps, stall, stall)
        else:
            self._saving = saving, self._steps, stall

    def _finish(self, *, raises: bool = True) -> None:
        """Waits until the save beside the last steps is over. Raises its error, which is logged."""
        if self._saving is None:
            return
        (saving, steps, stall), began = self._saving, time.monotonic()
        try:
            saving.wait()
        except InfinityError:
            self._note_failed()
            if raises:
                raise
            return
        if not saving.is_saved:  # another call has raised the error
            self._note_failed()
            return
        self._saving = None
        total = saving.seconds or time.monotonic() - began
        self._note_saved(steps, stall + time.monotonic() - began, total)

    def _note_failed(self) -> None:
        self._saving, self._unsaved = None, True
        self._interval.end_save(None, None)

    def _note_saved(self, steps: int, stall: float, total: float) -> None:
        self._interval.end_save(stall, total)
        if self._collectives.ranks.is_first:
            logger.info(
                "checkpoint of step %d saved in %.2f s: the next one after %d steps (%s)",
                steps,
                total,
                self._interval.steps,
                self._folder,
            )

    def close(self) -> None:
        """Saves the last steps, if they are not saved yet, and gives the signals back. The step
        after which the loop was left counts, though :meth:`after_step` was not called. Ends the
        process if SIGTERM came after the last step. Every rank calls this after the loop.
        Idempotent."""
        try:
            self._finish(raises=False)  # then it is saved once more
            self._count_last()
            if self._unsaved:
                self.save()
        finally:
            is_ending = self._signals.ends
            self._signals.close()
            self._leave()
        if is_ending:
            self._end()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:  # the last checkpoint stands
            self._signals.close()
            self._leave()

    # --- ranks ---

    def _agree(self) -> tuple[bool, bool, bool]:
        """Returns whether the running save is over, whether to save after this step, and whether to
        end then: as the first rank says, or a signal to any rank."""
        is_first = self._collectives.ranks.is_first
        over = is_first and self._saving is not None and self._saving[0].done
        ending = self._signals.ends
        asked = self._signals.saves or (is_first and self._interval.is_due)
        self._signals.forget(signal.SIGUSR1)
        if not self._collectives.ranks.alone:
            flags = [int(not each) for each in (over, asked, ending)]
            agreed = least(self._collectives, flags, "Checkpoints.after_step")
            over, asked, ending = (not each for each in agreed)
        return over, asked or ending, ending

    def _has_checkpoint(self) -> bool:
        """Tells whether the folder has a checkpoint: as the first rank sees it."""
        exists = int((self._folder / MANIFEST).is_file())
        if self._collectives.ranks.alone:
            return bool(exists)
        return bool(self._collectives.collect(exists, "the folder of Checkpoints")[0])

    def _refuse_others(self) -> None:
        """Raises UsageError if the folder's checkpoint is not of this class."""
        extra = str(read_manifest(self._folder)["extra"])
        if "'checkpoints'" not in extra or "'orders'" not in extra:
            raise UsageError(
                f"{self._folder} has a checkpoint of save_checkpoint(), which does not know its"
                " steps. Load it by load_checkpoint(), and give Checkpoints another folder."
            )

    def _refuse_replacing(self) -> None:
        if not self._may_replace and self._has_checkpoint():
            raise UsageError(
                f"{self._folder} has a checkpoint, which the first save would replace. Call"
                " resume() before the loop, or give another folder."
            )
        self._may_replace = True

    # --- data ---

    def _take_order(self, order: dict[str, Any]) -> None:
        before = self._saved_orders[len(self._orders) :][:1]
        if before and before[0] != order:
            differs = ", ".join(
                f"{name}={order[name]} (it was {before[0].get(name)})"
                for name in order
                if order[name] != before[0].get(name)
            )
            raise ConfigError(
                f"the Order goes on from {self._folder}, and has {differs}. Set it as it was, or"
                " begin anew in another folder."
            )
        self._orders.append(order)

    def _loaders(self) -> list[Any] | None:
        if self._loader is None:
            return None
        own_state = self._collectives.ranks.world_rank, self._loader.state_dict()
        everyones = dict(self._collectives.collect(own_state, "the loaders' states"))
        return [everyones[rank] for rank in sorted(everyones)]

    def _load_loader(self, states: list[Any] | None) -> None:
        if (self._loader is None) != (states is None):
            has = "has no state of a loader" if states is None else "has the state of a loader"
            raise ConfigError(
                f"{self._folder} {has}: give Checkpoints loader= as it was, or another folder"
            )
        if self._loader is None or states is None:
            return
        rank = self._collectives.ranks.world_rank
        count = len(self._collectives.collect(rank, "the number of ranks"))
        if len(states) != count:
            raise ConfigError(
                f"{self._folder} has the states of {len(states)} loaders, and there are {count}"
                " ranks: resume with as many, or use infinity.data.Order"
            )
        self._loader.load_state_dict(states[rank])

    # --- signals ---

    def _end(self) -> None:
        """Ends the process by SystemExit, unless another Checkpoints has to save first."""
        self._signals.forget(signal.SIGTERM)
        if others_end():
            return
        self._signals.close()
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)  # an exit here would only end this thread
        if callable(before := handler_before(signal.SIGTERM)):
            before(signal.SIGTERM, None)
        sys.exit(128 + signal.SIGTERM)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _checked_loader(loader: Any) -> Any:
    if loader is None or (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return loader
    raise ConfigError(
        f"loader={type(loader).__name__} has no state_dict(): give a torchdata StatefulDataLoader,"
        " or use infinity.data.Order as the batch_sampler of this one"
    )
