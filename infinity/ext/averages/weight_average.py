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
from collections.abc import Callable
from functools import partial

import torch

from ...core.homes.arrays import StateArray
from ...core.run.job import Job, wait_idle
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
from ...core.units.flat_param import FlatParam
from ...core.units.handle import ParamHandle
from ...core.units.pieces import (
    Piece,
    Progress,
    allocate_beside,
    change_pieces,
    check_room_beside,
    read_value,
)
from ...errors import UsageError

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


class WeightAverage(Extension):
    """The averages of one engine's trained parameters: fp32 where they have masters, else in the
    parameters' dtype."""

    def __init__(self, job: Job, blend: Blend):
        # Users hold the average, which must not keep the homes alive.
        self._job, self._blend = weakref.ref(job), blend
        self.count = 0  # updates
        self.is_exchanged = False
        self.is_wanted = False  # as the weights: else the next use brings the weights back
        self._arrays: dict[FlatParam, StateArray] = {}
        dtypes = {
            flat_param: torch.float32 if "master" in flat_param.arrays else flat_param.spec.dtype
            for unit in job.units
            for flat_param in unit.flat_params
            if flat_param.spec.stepped
        }
        otherwise, version = job.planned.plan.tiers["master"], job.steps.index
        try:
            check_room_beside(job.store, dtypes.items(), "the average", otherwise=otherwise)
            for flat_param, dtype in dtypes.items():
                self._arrays[flat_param] = allocate_beside(
                    job.store,
                    flat_param,
                    dtype,
                    "the average",
                    version=version,
                    otherwise=otherwise,
                )
        except BaseException:
            self.free()
            raise
        me = weakref.ref(self)
        job.uses.define(
            AverageState.AVERAGED,
            lambda: (average := me()) is not None and average.is_exchanged and average.is_wanted,
        )

    def install(self, job: Job, model: object) -> None:
        """Adds listeners for the end of an interrupted block and for parameters that come later."""
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

    @property
    def arrays_in_memory(self) -> list[StateArray]:
        """The averages that are not on a disk."""
        return [array for array in self._arrays.values() if array.flat is not None]

    def free(self) -> None:
        """Frees the memory. Idempotent."""
        while self._arrays:
            self.job.store.arrays.free_more(self._arrays.popitem()[1])

    # --- pieces ---

    def _average(self, piece: Piece) -> torch.Tensor:
        return self.job.store.read(self._arrays[piece.flat_param], piece.begin, piece.end)

    def _write(self, piece: Piece, parts: dict[str, torch.Tensor]) -> None:
        for name, part in parts.items():
            array = (
                self._arrays[piece.flat_param]
                if name == "average"
                else piece.flat_param.arrays[name]
            )
            self.job.store.write(array, piece.begin, part, version=self.job.steps.index)

    # --- changes ---

    def update(self) -> None:
        """Adds the present parameters to the average. Blocks on running updates and on the disk."""
        job = self.job
        for flat_param in self._arrays:
            flat_param.homes.wait_idle()  # a save may still read the averages
        job.journal.carry_out(
            partial(self._carry_out, self._updated, Progress(), self._end_update, self.count + 1)
        )

    def _updated(self, piece: Piece) -> dict[str, torch.Tensor]:
        value = read_value(self.job.store, piece)
        if self.count:
            average = self._average(piece)
            self._blend([average], [value], torch.tensor(self.count))
            value = average
        return {"average": value}

    def _end_update(self, count: int) -> None:
        self.count = count

    def exchange(self) -> None:
        """Swaps the model's weights, masters included, with their averages; a second call swaps
        them back. Blocks until all bytes are at home."""
        job = self.job
        wait_idle(job)
        job.prefetcher.release_all(job.units)
        for flat_param in self._arrays:
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
            with self.job.store.guarding():
                self.exchange()

    def _exchanged(self, piece: Piece) -> dict[str, torch.Tensor]:
        average = self._average(piece)
        return {"average": read_value(self.job.store, piece)} | encode(
            piece.flat_param.spec, average
        )

    def _end_exchange(self, exchanged: bool) -> None:
        self.is_exchanged = exchanged

    def _carry_out(
        self, compute: Callable, progress: Progress, end: Callable, argument: int | bool
    ) -> None:
        change_pieces(self._arrays, compute, self._write, progress)
        end(argument)

    # --- values by parameter ---

    def has(self, handle: ParamHandle) -> bool:
        """Tells whether a parameter is averaged: those that the optimizer steps are."""
        return handle.flat_param in self._arrays

    def dtype_of(self, handle: ParamHandle) -> torch.dtype:
        return self._arrays[handle.flat_param].dtype

    def read(self, handle: ParamHandle) -> torch.Tensor:
        """Reads a parameter's average, flat, in the order of its array. Every rank calls this."""
        return handle.flat_param.parts.read(
            self.job.store, "weight", handle.index, array=self._arrays[handle.flat_param]
        )

    def array_of(self, flat_param: FlatParam) -> StateArray:
        """Returns the array of averages of a flat param."""
        return self._arrays[flat_param]

    def write_own(self, handle: ParamHandle, values: torch.Tensor) -> None:
        """Writes this rank's shard of a parameter's average."""
        begin, end = handle.flat_param.layout.part_at_home("weight", handle.index)
        if begin < end:
            self.job.store.write(
                self._arrays[handle.flat_param], begin, values, version=self.job.steps.index
            )

    def resume(self, count: int) -> None:
        """Sets the number of updates, after a load of the averages."""
        self.count = count
