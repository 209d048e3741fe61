"""Pipeline clock: runs the order of a pipeline schedule with given seconds, without any process.

op        one forward or backward of a chunk for a micro-batch. Some schedules compute gradients of
          inputs and of weights apart
order     the ops of one rank, one after the other
hop       seconds for what passes from one chunk to the next, which both ranks compute beside
in flight what a rank keeps of forwards whose backward has not come

Of many micro-batches the first and the last ones decide: between them each adds the same time. So a
long run is extrapolated linearly from two shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import InternalError

FORWARD, BACKWARD, INPUTS, WEIGHTS = "forward", "backward", "inputs", "weights"
ROUNDS = 4  # rounds of micro-batches that are run; more are extrapolated linearly


class Op(NamedTuple):
    """One op of a rank. ``number``: of the micro-batch."""

    kind: str
    chunk: int
    number: int


Orders = Sequence[Sequence[Op]]  # of each rank


@dataclass(frozen=True)
class ChunkSeconds:
    """The seconds of one micro-batch in a chunk. ``inputs`` and ``weights``: the parts of a
    backward that computes their gradients apart."""

    forward: float
    backward: float
    inputs: float = 1 / 2
    weights: float = 1 / 2

    def of(self, kind: str) -> float:
        """Returns the seconds of an op."""
        if kind == FORWARD:
            return self.forward
        return self.backward * {BACKWARD: 1.0, INPUTS: self.inputs, WEIGHTS: self.weights}[kind]


@dataclass(frozen=True)
class PipelineRun:
    """One run of a schedule. ``busy``: seconds that each rank computes; ``in_flight``: chunks'
    activations that each rank keeps at most; ``ends``: of each rank's last op."""

    seconds: float
    busy: tuple[float, ...]
    messages: float
    in_flight: tuple[float, ...]
    ends: tuple[float, ...]


def run_orders(
    orders: Orders,
    seconds: Sequence[ChunkSeconds],
    hops: Sequence[float] = (),
) -> PipelineRun:
    """Runs the ``orders`` of all ranks. ``seconds``: of each chunk. ``hops``: seconds from each
    chunk to the next one; none: 0."""
    clock = Clock(orders, seconds, hops)
    clock.run()
    owner = {op.chunk: rank for rank, order in enumerate(orders) for op in order}
    return PipelineRun(
        seconds=max(clock.now, default=0.0),
        busy=tuple(sum(seconds[op.chunk].of(op.kind) for op in order) for order in orders),
        messages=sum(
            owner.get(op.chunk + (1 if op.kind == FORWARD else -1), rank) != rank
            for rank, order in enumerate(orders)
            for op in order
            if op.kind != WEIGHTS
        ),
        in_flight=tuple(in_flight(order) for order in orders),
        ends=tuple(clock.now),
    )


def in_flight(order: Sequence[Op], weights: Sequence[float] | None = None) -> float:
    """Counts the chunks' activations that a rank keeps at most. ``weights``: of each chunk, as its
    bytes; None: 1."""
    now = most = 0.0
    for op in order:
        weight = 1 if weights is None else weights[op.chunk]
        now += weight if op.kind == FORWARD else -weight if op.kind != INPUTS else 0
        most = max(most, now)
    return most


def run_long(
    orders_of: Callable[[int], Orders],
    micro_batches: int,
    step: int,
    seconds: Sequence[ChunkSeconds],
    hops: Sequence[float] = (),
) -> PipelineRun:
    """Runs a schedule for any number of micro-batches. ``orders_of``: of a number of them, which
    may grow by ``step``."""

    def at(count: int) -> list[float]:
        run = run_orders(orders_of(count), seconds, hops)
        return [run.seconds, run.messages, *run.busy, *run.in_flight, *run.ends]

    total, messages, *of_ranks = extrapolated(at, micro_batches, step)
    ranks = len(of_ranks) // 3
    busy, kept, ends = (tuple(of_ranks[at * ranks : (at + 1) * ranks]) for at in range(3))
    return PipelineRun(total, busy, messages, kept, ends)


def extrapolated(
    at: Callable[[int], Sequence[float]], micro_batches: int, step: int
) -> list[float]:
    """Returns ``at(micro_batches)``; for many micro-batches it is extrapolated linearly from two
    smaller runs, ``step`` micro-batches apart."""
    if micro_batches <= ROUNDS * step:
        return list(at(micro_batches))
    last = (ROUNDS - 1) * step + micro_batches % step
    more = (micro_batches - last) // step
    return [b + more * (b - a) for a, b in zip(at(last - step), at(last))]


class Clock:
    """When each op ends. ``now``: of each rank."""

    def __init__(self, orders: Orders, seconds: Sequence[ChunkSeconds], hops: Sequence[float] = ()):
        self._orders, self._seconds = orders, seconds
        self._hops = hops or [0.0] * len(seconds)
        self._last = len(seconds) - 1
        self.now = [0.0] * len(orders)
        self._outputs: dict[tuple[int, int], float] = {}  # chunk and micro-batch -> its end
        self._grads: dict[tuple[int, int], float] = {}  # of the gradient of a chunk's input

    def run(self) -> None:
        """Runs all ops. Raises InternalError if ranks wait for each other."""
        places = [0] * len(self._orders)
        left = sum(map(len, self._orders))
        while left:
            before = left
            for rank, order in enumerate(self._orders):
                place = places[rank]
                while place < len(order) and (ready := self.ready(rank, order[place])) is not None:
                    self.do(rank, order[place], max(ready, self.now[rank]))
                    place += 1
                left -= place - places[rank]
                places[rank] = place
            if left == before:
                waiting = [o[at] for o, at in zip(self._orders, places) if at < len(o)]
                raise InternalError(f"the ranks of a pipeline wait for each other: {waiting}")

    def ready(self, rank: int, op: Op) -> float | None:
        """Returns when the inputs of an op of ``rank`` are there; None: not known yet."""
        kind, chunk, number = op
        if kind == FORWARD:
            given = self._outputs.get((chunk - 1, number)) if chunk else 0.0
            return None if given is None else given + (self._hops[chunk - 1] if chunk else 0.0)
        if kind == WEIGHTS:
            return self._grads.get((chunk, number))
        mine = self._outputs.get((chunk, number))
        if chunk == self._last or mine is None:
            return mine
        given = self._grads.get((chunk + 1, number))
        return None if given is None else max(mine, given + self._hops[chunk])

    def do(self, rank: int, op: Op, start: float) -> None:
        """Ends an op that begins at ``start``."""
        end = start + self._seconds[op.chunk].of(op.kind)
        self.now[rank] = end
        if op.kind == FORWARD:
            self._outputs[op.chunk, op.number] = end
        elif op.kind != WEIGHTS:
            self._grads[op.chunk, op.number] = end
