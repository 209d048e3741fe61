"""Closed forms of the papers, which tests compare with what the engine and its planner do. A user
reaches none of them: orders come from schedules, and bytes from what runs.

words      elements; times their size they are bytes
parts      ranks of the tp axis, which share a batch
intensity  operations for every byte that passes a link
cap        the share of a device's rate if nothing overlaps: intensity x bandwidth over the same
           plus the device's rate (Rajbhandari et al., ZeRO-Infinity, 2021, section 4)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from infinity.errors import ConfigError
from infinity.tools.plan.mesh_bytes import all_reduce_nbytes
from infinity.tools.plan.pipeline_clock import (
    BACKWARD,
    FORWARD,
    ChunkSeconds,
    Orders,
    PipelineRun,
    jobs_of,
)
from infinity.tools.plan.queues import Job, run

ALL_REDUCES, WITH_RECOMPUTATION = 4, 6  # of a layer with tensor parallelism, both directions


def seconds_with_sums(
    orders: Orders, seconds: Sequence[ChunkSeconds], batch: int, sum_seconds: float
) -> float:
    """The seconds of a pipeline without flush, with sums of gradients over replicas, each beside
    the next batch of ``batch`` micro-batches. A batch begins when the sum of the last but one has
    ended (Narayanan et al., PipeDream-2BW, 2021, section 3.1)."""
    jobs, sums = jobs_of(orders, seconds), {}
    for rank, order in enumerate(orders):
        for op in order:
            of, place = divmod(op.number, batch)
            if op.kind == FORWARD and (rank, of - 2) in sums:
                jobs[op].follow(sums[rank, of - 2])
            if op.kind == BACKWARD and place == batch - 1:
                sums[rank, of] = Job(("sums", rank), sum_seconds)
                sums[rank, of].follow(jobs[op])
    run([*jobs.values(), *sums.values()])
    return max(job.end for job in jobs.values())


def idle_shares(run: PipelineRun) -> list[float]:
    """Seconds that each rank stands idle, in parts of those that it computes."""
    return [(run.seconds - busy) / busy if busy else 0.0 for busy in run.busy]


def tensor_nbytes(
    tokens: int, width: int, itemsize: int, parts: int, layers: int, *, recomputes: bool = False
) -> float:
    """Counts the bytes that a rank sends among the ``parts`` for ``tokens`` through ``layers``
    transformer blocks, forward and backward (PTD-P, section 2.3)."""
    times = WITH_RECOMPUTATION if recomputes else ALL_REDUCES
    return layers * times * all_reduce_nbytes(tokens * width * itemsize, parts)


@dataclass(frozen=True)
class Transformer:
    """A GPT by its sizes, as PTD-P counts one. ``length``: tokens of a sample."""

    layers: int
    width: int
    vocabulary: int = 51200
    length: int = 2048

    @property
    def parameters(self) -> float:
        """Parameters (PTD-P, equation 2)."""
        l, h = self.layers, self.width
        return 12 * l * h**2 * (1 + 13 / (12 * h) + (self.vocabulary + self.length) / (12 * l * h))

    def flops(self, samples: float, *, recomputes: bool = True) -> float:
        """Counts multiplications and additions of a step over ``samples`` (PTD-P, equation 3)."""
        l, h, s = self.layers, self.width, self.length
        blocks = (96 if recomputes else 72) * samples * s * l * h**2 * (1 + s / (6 * h))
        return blocks + 6 * samples * s * h * self.vocabulary

    def days(self, tokens: float, rate: float) -> float:
        """Computes the days of ``tokens`` at ``rate`` operations per second of all ranks."""
        return tokens / self.length * self.flops(1) / rate / 86400


@dataclass(frozen=True)
class Dense:
    """A layer of a network without blocks: elements of its input, output and weight."""

    inputs: float
    outputs: float
    weights: float


def grid_words(
    layers: Sequence[Dense], batch: float, parts: Sequence[int], ranks: int
) -> dict[str, float]:
    """Counts the words that a rank receives in a step: those of outputs, of gradients of inputs,
    and of gradients of weights. Each layer has a grid of so many ``parts`` and of replicas
    (Gholami et al., Integrated Model, Batch and Domain Parallelism, 2018, section 2). The first
    layer's input has no gradient.
    """
    found = {"forward": 0.0, "backward": 0.0, "weights": 0.0}
    for number, (layer, count) in enumerate(zip(layers, parts)):
        replicas = ranks // count
        own, others = batch / replicas, (count - 1) / count
        found["forward"] += own * others * layer.outputs
        found["backward"] += 2 * own * others * layer.inputs * (number > 0)
        found["weights"] += 2 * (replicas - 1) / replicas * layer.weights / count
    return found


def grid_seconds(
    layers: Sequence[Dense],
    batch: float,
    parts: Sequence[int],
    ranks: int,
    *,
    latency: float,
    bandwidth: float,
    itemsize: int = 4,
) -> float:
    """Computes the seconds of :func:`grid_words`. ``latency``: of a message, of which an all-gather
    has a logarithm of its ranks one after the other, and an all-reduce twice as many."""
    words = sum(grid_words(layers, batch, parts, ranks).values())
    messages = 0
    for number, count in enumerate(parts):
        of_parts, of_replicas = (math.ceil(math.log2(n)) for n in (count, ranks // count))
        messages += (3 if number else 1) * of_parts + 2 * of_replicas
    return words * itemsize / bandwidth + messages * latency


def crossover(layer: Dense) -> float:
    """Returns the batch below which a layer's parts pass fewer words than its replicas."""
    return 2 * layer.weights / (layer.outputs + 2 * layer.inputs)


def unflushed_seconds(micro_batches: int, stages: int, seconds: float, sums: float) -> float:
    """Computes the seconds of a batch in a pipeline of equal stages without flush.

    ``seconds``: of a micro-batch in a stage. ``sums``: of the gradients over the replicas, beside
    the next batch. PipeDream-2BW's own form, max(m t, sum), leaves out that the next batch begins
    ``stages`` - 1 backwards before the sum of the last one does.
    """
    return max(micro_batches * seconds, sums + (stages - 1) * seconds)


def unflushed_nbytes(
    layers: float, stages: int, weights: float, state: float, saved: float, edge: float
) -> float:
    """Counts the bytes of a stage without flush: two versions of its ``weights`` and their
    ``state``, one layer's ``saved`` for each of its layers, and an ``edge`` for each micro-batch in
    flight (Narayanan et al., PipeDream-2BW, 2021, section 3.2, with recomputation). All but the
    edge are of one layer."""
    share = layers / stages
    return share * (2 * weights + state) + share * saved + stages * edge


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Computes the cap. ``bandwidth`` in bytes per second, ``peak`` in operations per second.
    Raises ConfigError for a rate that is not above 0."""
    if min(intensity, bandwidth, peak) <= 0:
        raise ConfigError(
            f"rates are above 0: intensity {intensity}, bandwidth {bandwidth}, peak {peak}"
        )
    return intensity * bandwidth / (intensity * bandwidth + peak)


def bandwidth_for(share: float, intensity: float, peak: float) -> float:
    """Computes the bandwidth at which the cap is ``share``."""
    return share / (1 - share) * peak / intensity


def intensity_of_weights(tokens: float) -> float:
    """Returns the operations for a byte of weights and gradients, of a step of ``tokens`` on a
    device that computes its blocks again."""
    return tokens


def intensity_of_state(tokens: float) -> float:
    """Returns the operations for a byte of master weights and moments."""
    return tokens / 4


def intensity_of_activations(width: int, interval: int = 1) -> float:
    """Returns the operations for a byte of the inputs kept every ``interval`` blocks."""
    return 24 * width * interval


@dataclass(frozen=True)
class Layer:
    """One layer of a chain. ``seconds``: forward and backward of a micro-batch."""

    seconds: float
    parameter_nbytes: float = 0.0
    activation_nbytes: float = 0.0  # its output, sent to the next layer


@dataclass(frozen=True)
class Stage:
    """Layers ``begin`` to ``end`` (exclusive), on ``replicas`` machines that share its
    micro-batches."""

    begin: int
    end: int
    replicas: int = 1


@dataclass(frozen=True)
class Level:
    """A number of equal machines, connected at ``bandwidth`` bytes per second."""

    machines: int
    bandwidth: float


@dataclass(frozen=True)
class Partition:
    """A chain's stages, and the seconds of the slowest one."""

    seconds: float
    stages: tuple[Stage, ...]


def partition(
    layers: Sequence[Layer], levels: Sequence[Level], *, with_activations: bool = False
) -> Partition:
    """Divides a chain over machines in nested ``levels``, innermost first: a server, then groups of
    servers.

    with_activations
        Counts the traffic between stages too: twice the activations, divided by the replicas.
    """
    count = len(layers)
    inner: dict[tuple[int, int], float] | None = None
    within = 1
    best: dict[tuple[int, int, int], tuple[float, tuple[Stage, ...]]] = {}
    for number, level in enumerate(levels):
        best = _solve(
            layers, level, inner, within, with_activations, whole_only=number == len(levels) - 1
        )
        inner = {
            (i, j): best[i, j, level.machines][0]
            for i in range(count)
            for j in range(i + 1, count + 1)
            if (i, j, level.machines) in best
        }
        within *= level.machines
    seconds, stages = best[0, count, levels[-1].machines]
    return Partition(seconds, stages)


def _solve(
    layers: Sequence[Layer],
    level: Level,
    inner: dict[tuple[int, int], float] | None,
    within: int,
    with_activations: bool,
    *,
    whole_only: bool,
) -> dict[tuple[int, int, int], tuple[float, tuple[Stage, ...]]]:
    """Returns the best division of layers i to j on m machines of a level, for every i
    (``whole_only``: i = 0), j and m."""
    count = len(layers)
    seconds = [0.0, *accumulate(layer.seconds for layer in layers)]
    nbytes = [0.0, *accumulate(layer.parameter_nbytes for layer in layers)]

    def alone(i: int, j: int, m: int) -> float:
        """Computes the time of one stage of ``m`` replicas. Each replica is a whole inner level, if
        there is one."""
        compute = inner[i, j] if inner is not None else seconds[j] - seconds[i]
        return (
            compute + 4 * (m - 1) * (nbytes[j] - nbytes[i]) / (level.bandwidth * m) / within
        ) / m

    def stage_time(k: int, j: int, m: int) -> float:
        compute = inner[k, j] if inner is not None else seconds[j] - seconds[k]
        time = (compute + 4 * (m - 1) * (nbytes[j] - nbytes[k]) / (level.bandwidth * m)) / m
        if with_activations:
            edges = [layers[k - 1].activation_nbytes] + (
                [layers[j - 1].activation_nbytes] if j < count else []
            )
            time = max(time, *(2 * edge / (level.bandwidth * m) for edge in edges))
        return time

    best: dict[tuple[int, int, int], tuple[float, tuple[Stage, ...]]] = {}
    for i in range(1 if whole_only else count):
        for j in range(i + 1, count + 1):
            for m in range(1, level.machines + 1):
                found: tuple[float, tuple[Stage, ...]] = alone(i, j, m), (Stage(i, j, m),)
                for k in range(i + 1, j):
                    for replicas in range(1, m):
                        before, stages = best[i, k, m - replicas]
                        time = max(before, stage_time(k, j, replicas))
                        if time < found[0]:
                            found = time, (*stages, Stage(k, j, replicas))
                best[i, j, m] = found
    return best
