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
from .queues import Job, run

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
    jobs = jobs_of(orders, seconds, hops)
    run([*jobs.values()])
    owner = {op.chunk: rank for rank, order in enumerate(orders) for op in order}
    return PipelineRun(
        seconds=max((job.end for job in jobs.values()), default=0.0),
        busy=tuple(sum(seconds[op.chunk].of(op.kind) for op in order) for order in orders),
        messages=sum(
            owner.get(op.chunk + (1 if op.kind == FORWARD else -1), rank) != rank
            for rank, order in enumerate(orders)
            for op in order
            if op.kind != WEIGHTS
        ),
        in_flight=tuple(in_flight(order) for order in orders),
        ends=tuple(jobs[order[-1]].end if order else 0.0 for order in orders),
    )


def jobs_of(
    orders: Orders, seconds: Sequence[ChunkSeconds], hops: Sequence[float] = ()
) -> dict[Op, Job]:
    """Makes a job of each op, which waits for the one before it in its rank's order and for those
    that give its inputs. Arguments as :func:`run_orders` takes them."""
    jobs: dict[Op, Job] = {}
    for rank, order in enumerate(orders):
        for op, before in zip(order, (None, *order)):
            jobs[op] = Job(rank, seconds[op.chunk].of(op.kind))
            if before is not None:
                jobs[op].follow(jobs[before])
    last, hops = len(seconds) - 1, hops or [0.0] * len(seconds)

    def end_of(*ops: Op) -> Job:
        for op in ops:
            if op in jobs:
                return jobs[op]
        raise InternalError(f"no rank of a pipeline runs {' or '.join(map(str, ops))}")

    def gradient(chunk: int, number: int) -> Job:
        return end_of(Op(BACKWARD, chunk, number), Op(INPUTS, chunk, number))

    for (kind, chunk, number), job in jobs.items():
        if kind == WEIGHTS:
            job.follow(gradient(chunk, number))
        elif kind == FORWARD:
            if chunk:
                job.follow(end_of(Op(FORWARD, chunk - 1, number)), hops[chunk - 1])
        else:
            job.follow(end_of(Op(FORWARD, chunk, number)))
            if chunk < last:
                job.follow(gradient(chunk + 1, number), hops[chunk])
    return jobs


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
