"""WeightAverage: keeps a running average of a wrapped model's trained parameters at home, beside
their masters.

blend      makes a new average of the old one, a value and the number of updates so far, in place:
           torch's ``multi_avg_fn``
exchanged  the model's weights are the averages, and the weights are in the averages' arrays

If an exception interrupts an update or an exchange, the next use of the engine completes it. The
new value of a piece is computed first, which changes nothing, and then written, which may be
repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...core.params.lent import Source, Written
from ...core.run.job import Job, wait_idle
from ...core.run.journal import Meet, call
from ...core.run.operations import (
    IDLE,
    ONE_VERSION,
    OWN_WEIGHTS,
    READ,
    Activity,
    Call,
    OperationKind,
    Right,
    State,
    StateKind,
)
from ...core.seams import Extension
from ...core.units.encoding import encode
from ...core.units.forms import is_common
from ...core.units.handle import ParamHandle
from ...core.units.pieces import Piece, read_value
from ...errors import UsageError
from ...ranks.collectives import in_turn
from .change import Progress, change_pieces

Blend = Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], None]


class AverageState(StateKind):
    """Inside `with average.applied()`."""

    AVERAGED = Activity(
        "e",
        frozenset({Right.OWN_WEIGHTS}),
        "{} is not available inside `with average.applied()`: the model has its average for"
        " weights. Call it after that block.",
    )


class AverageOperation(OperationKind):
    """Calls of an average."""

    UPDATE = Call("updating the average", READ | OWN_WEIGHTS)
    APPLY = Call("average.applied()", IDLE)
    EXCHANGE = Call("exchanging weights and averages", IDLE - {Right.OWN_WEIGHTS})
    STATE_DICT = Call("the average's state dict", READ | OWN_WEIGHTS)
    LOAD = Call("loading the average", ONE_VERSION | OWN_WEIGHTS)
    REMOVE = Call("removing the average", ONE_VERSION | OWN_WEIGHTS)


class WeightAverage(Extension, Source):
    """The averages of one engine's trained parameters: fp32 where they have masters, else in the
    parameters' dtype. ``kept``: their arrays, of which users hold tensors, once installed."""

    def __init__(self, job: Job, blend: Blend):
        # Users hold the average, which must not keep the homes alive.
        self._job, self._blend = weakref.ref(job), blend
        self.count = 0  # updates
        self._changes = 0  # of the averages
        self.is_exchanged = False
        self.is_wanted = False  # as the weights: else the next use brings the weights back

    def rights(self, job: Job) -> dict[StateKind, Callable[[], bool]]:
        """Takes the weights while they are the averages."""
        return {AverageState.AVERAGED: lambda: self.is_exchanged and self.is_wanted}

    def install(self, job: Job, model: object) -> None:
        """Allocates the averages, and adds listeners for the end of an interrupted block and for
        parameters that come later. Raises CapacityError."""
        self.kept = job.kept.keep(
            "average",
            keeper=self,
            purpose="the average",
            otherwise=job.planned.plan.tiers["master"],
        )
        job.events.use_ready.append(self.bring_back)
        job.events.admitting.append(self.refuse_more)

    def refuse_more(self, asked: str) -> None:
        """Raises UsageError: ``asked`` would step parameters that have no average."""
        raise UsageError(
            f"{asked}: the average of this model does not have these parameters. Make"
            " infinity.ema or swa afterwards."
        )

    @property
    def job(self) -> Job:
        """The job. Raises UsageError if it is gone."""
        if (job := self._job()) is None or job.uses.is_in(State.UNWRAPPED):
            raise UsageError("the average went with its model, which was unwrapped or is gone")
        return job

    # --- changes ---

    def update(self) -> None:
        """Adds the present parameters to the average. Blocks on running updates and on the disk."""
        job = self.job
        for flat_param in self.kept.flat_params:
            flat_param.homes.wait_idle()  # a save may still read the averages
        job.journal.carry_out(
            partial(self._carry_out, self._updated, Progress(), self._changed, self.count + 1)
        )

    def _updated(self, piece: Piece) -> dict[str, torch.Tensor]:
        value = read_value(self.job.store, piece)
        if self.count:
            average = self.kept.read(piece)
            self._blend([average], [value], torch.tensor(self.count))
            value = average
        return {"average": value}

    def _changed(self, count: int) -> None:
        self.count = count
        self._changes += 1

    def exchange(self) -> None:
        """Swaps the model's weights, masters included, with their averages; a second call swaps
        them back. Blocks until all bytes are at home."""
        job = self.job
        wait_idle(job)
        job.prefetcher.release_all(job.units)
        for flat_param in self.kept.flat_params:
            flat_param.homes.wait_idle()
        for handle in job.trained:
            handle.changed()
        job.journal.carry_out(
            partial(
                self._carry_out,
                self._exchanged,
                Progress(),
                self._end_exchange,
                not self.is_exchanged,
            )
        )

    @torch.no_grad()
    def bring_back(self) -> None:
        """Swaps the weights back if the block that swapped them is over."""
        if self.is_exchanged and not self.is_wanted:
            with self.job.store.guard:
                self.exchange()

    def _exchanged(self, piece: Piece) -> dict[str, torch.Tensor]:
        average = self.kept.read(piece)
        return {"average": read_value(self.job.store, piece)} | encode(
            piece.flat_param.spec, average
        )

    def _end_exchange(self, exchanged: bool) -> None:
        self.is_exchanged = exchanged

    def _carry_out(
        self, compute: Callable, progress: Progress, end: Callable, argument: int | bool
    ) -> None:
        change_pieces(self.kept.flat_params, compute, self.job.kept.write, progress)
        end(argument)

    # --- checkpoints ---

    def describe(self) -> int:
        """Returns the number of updates."""
        return self.count

    def expect(self, told: Any) -> None:
        """Raises ValueError if ``told`` is not a number of updates."""
        if type(told) is not int or not 0 <= told < 1 << 53:
            raise ValueError(f"an average of {told!r} updates")

    def resume(self, told: int | None) -> None:
        """Sets the number of updates. Weights and averages are read to their own places."""
        self.is_exchanged = False
        self._changed(told or 0)

    # --- tensors that users hold ---

    def name_of(self, handle: ParamHandle) -> str:
        """Names the average of a parameter."""
        return f"the average of {handle.name}"

    def stamp(self, handle: ParamHandle) -> int:
        """Returns the number of changes of the averages."""
        return self._changes

    def check(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Raises UsageError while the averages are the model's weights."""
        if self.is_exchanged:
            raise UsageError(
                f"{self.name_of(handle)} was written to inside `with average.applied()`. Nothing"
                " was changed: write to it after that block."
            )

    def write(self, written: Sequence[Written]) -> None:
        """Sends home what was written to tensors of a state dict. Every rank calls this."""

        def then() -> None:
            for _, _, end in written:
                end()

        comparisons = [
            partial(
                handle.flat_param.collectives.meet,
                f"writing {self.name_of(handle)}",
                value,
                over_tensors=is_common(handle.param),
            )
            for handle, value, _ in written
        ]
        parts = {handle: value.clone() for handle, value, _ in written}
        self.replace(parts, self.count, partial(in_turn, comparisons), then)

    def replace(
        self,
        parts: Mapping[ParamHandle, torch.Tensor],
        count: int,
        meet: Meet = call,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Sets the averages of parameters to local ``parts``, as those of ``count`` updates. Blocks
        on a save that reads them. An interrupt leaves them to the next use, which restarts."""

        def change() -> None:
            for handle, part in parts.items():
                flat_param, index = handle.flat_param, handle.index
                begin, end = flat_param.layout.part_of_param("weight", index)
                flat = flat_param.flattened(part, index)[begin:end]
                self.kept.write_own(handle, flat)
            self._changed(count)
            then()

        for handle in parts:
            handle.flat_param.homes.wait_idle()
        with self.job.store.guard:
            self.job.journal.carry_out(change, meet)
