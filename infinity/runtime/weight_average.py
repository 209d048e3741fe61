"""WeightAverage: keeps a running average of a wrapped model's trained parameters at home, beside
their masters.

piece      some elements of one parameter that this rank has at home: what is in memory at once
blend      makes a new average of the old one, a value and the number of updates so far, in place:
           torch's ``multi_avg_fn``
exchanged  the model's weights are the averages, and the weights are in the averages' arrays

If an exception interrupts an update or an exchange, the next use of the engine completes it. The
new value of a piece is computed first, which changes nothing, and then written, which may be
repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from .. import native
from ..errors import UsageError
from ..machine.tiers import Tier
from ..state.encoding import encode
from ..state.flat_param import FlatParam
from ..state.handle import ParamHandle
from ..state.operations import State
from ..storage.arrays import StateArray
from .job import Job, wait_idle

Blend = Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], None]
# Whole SIMD vectors on every CPU, so that elements round as in a whole tensor.
PIECE_NUMEL = 4 * 1024 * 1024


@dataclass(frozen=True)
class Piece:
    """Elements ``begin`` to ``end`` of this rank's shard of a flat param, all of one parameter."""

    flat_param: FlatParam
    begin: int
    end: int


@dataclass
class Progress:
    """Progress of a change: the number of pieces done, and the computed parts of the next, perhaps
    unwritten."""

    at: tuple[int, dict[str, torch.Tensor] | None] = (0, None)


class WeightAverage:
    """The averages of one engine's trained parameters: fp32 where they have masters, else in the
    parameters' dtype."""

    def __init__(self, job: Job, blend: Blend):
        # Users hold the average, which must not keep the homes alive.
        self._job, self._blend = weakref.ref(job), blend
        self.count = 0  # updates
        self.is_exchanged = False
        self.is_wanted = False  # as the weights: else the next use brings the weights back
        self._arrays: dict[FlatParam, StateArray] = {}
        self._taken: list[StateArray] = []
        try:
            for unit in job.units:
                for flat_param in unit.flat_params:
                    if flat_param.spec.stepped:
                        self._arrays[flat_param] = self._allocate(
                            flat_param, f"average of unit {unit.name}"
                        )
        except BaseException:
            self.free()
            raise
        me = weakref.ref(self)
        job.uses.define(
            State.AVERAGED,
            lambda: (average := me()) is not None and average.is_exchanged and average.is_wanted,
        )

    @property
    def job(self) -> Job:
        """The job. Raises UsageError if it is gone."""
        if (job := self._job()) is None or job.uses.is_in(State.UNWRAPPED):
            raise UsageError("the average went with its model, which was unwrapped or is gone")
        return job

    def _allocate(self, flat_param: FlatParam, what: str) -> StateArray:
        home = flat_param.arrays.get("master", flat_param.weight)
        dtype = torch.float32 if "master" in flat_param.arrays else flat_param.spec.dtype
        raw = self.job.store.arrays.allocate_more(
            home.tier, flat_param.layout.shard_numel * dtype.itemsize, what
        )
        self._taken.append(raw)
        # Disk space may hold old bytes, which writes of partial blocks would keep.
        if raw.tier is Tier.NVME:
            for at in range(0, raw.nbytes, PIECE_NUMEL):
                zeros = torch.zeros(
                    min(PIECE_NUMEL, raw.nbytes - at), dtype=torch.uint8, device="cpu"
                )
                self.job.store.write(raw, at, zeros, version=self.job.steps.index)
        flat = raw.flat.view(dtype) if raw.flat is not None else None
        return StateArray(
            raw.tier, dtype, flat_param.layout.shard_numel, raw.extent, flat, raw.charge
        )

    @property
    def arrays_in_memory(self) -> list[StateArray]:
        """The averages that are not on a disk."""
        return [array for array in self._taken if array.flat is not None]

    def free(self) -> None:
        """Frees the memory. Idempotent."""
        self._arrays.clear()
        while self._taken:
            self.job.store.arrays.free_more(self._taken.pop())

    # --- pieces ---

    def _pieces(self) -> Iterator[Piece]:
        for flat_param in self._arrays:
            for index in range(len(flat_param.params)):
                begin, end = flat_param.layout.part_at_home("weight", index)
                for at in range(begin, end, PIECE_NUMEL):
                    yield Piece(flat_param, at, min(end, at + PIECE_NUMEL))

    def _value(self, piece: Piece) -> torch.Tensor:
        """Reads the value that the optimizer steps: the master, or the parameter itself."""
        store, flat_param = self.job.store, piece.flat_param
        weight = store.read(flat_param.weight, piece.begin, piece.end)
        if "master" not in flat_param.arrays:
            return weight
        master = store.read(flat_param.arrays["master"], piece.begin, piece.end)
        return (
            native.join_master(weight, master)
            if flat_param.spec.master == native.Master.SPLIT
            else master
        )

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
        value = self._value(piece)
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
        return {"average": self._value(piece)} | encode(piece.flat_param.spec, average)

    def _end_exchange(self, exchanged: bool) -> None:
        self.is_exchanged = exchanged

    def _carry_out(
        self, compute: Callable, progress: Progress, end: Callable, argument: int | bool
    ) -> None:
        for number, piece in enumerate(self._pieces()):
            done, ready = progress.at
            if number < done:
                continue
            if ready is None:
                ready = compute(piece)
                progress.at = (number, ready)
            self._write(piece, ready)
            progress.at = (number + 1, None)
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

    def array_of(self, handle: ParamHandle) -> StateArray:
        """Returns the array of averages of a parameter's flat param."""
        return self._arrays[handle.flat_param]

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
