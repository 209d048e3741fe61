"""Cuts: divides a chain of layers into the stages of a pipeline, by PipeDream's dynamic programme.

    A(i, j, m) = min over k, m' of max(A(i, k, m - m'), T(k + 1, j, m'))
    T(i, j, m) = (C + 4 (m - 1) W / (B m)) / m

A is the time of the slowest stage of layers i to j on m machines. Of a stage, C is its seconds, W
its bytes of parameters, m its replicas. B is the bandwidth between machines, in bytes per second
(Narayanan et al., PipeDream, 2019, section 3.1). Exact: equal to trying every partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

from ...errors import ConfigError


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


def cut_evenly(
    seconds: Sequence[float], stages: int, *, loading: Sequence[float] | None = None
) -> list[int]:
    """Cuts a chain into ``stages`` stages of one machine each, so that the slowest is as fast as
    possible. Returns the number of layers of each stage.

    seconds
        Of each layer, forward and backward.
    loading
        Seconds to load each layer's weights from home, which overlaps with compute. A stage takes
        the larger of both sums.

    Raises ConfigError with the numbers if there are fewer layers than stages.
    """
    if len(seconds) < stages:
        raise ConfigError(
            f"a model of {len(seconds)} layers cannot be cut into {stages} stages: use fewer stages"
            " (pp), or chunks of a rank"
        )
    return list(_cut(tuple(seconds), stages, tuple(loading or ())))


@lru_cache(maxsize=64)  # a search over meshes asks for the same cut again and again
def _cut(seconds: tuple[float, ...], stages: int, loading: tuple[float, ...]) -> tuple[int, ...]:
    sums = [0.0, *accumulate(seconds)]
    loads = [0.0, *accumulate(loading)] if loading else [0.0] * len(sums)

    @cache
    def best(end: int, count: int) -> tuple[float, tuple[int, ...]]:
        if count == 1:
            return max(sums[end], loads[end]), (end,)
        options = ((k, best(k, count - 1)) for k in range(count - 1, end))
        return min(
            (max(slowest, sums[end] - sums[k], loads[end] - loads[k]), (*lengths, end - k))
            for k, (slowest, lengths) in options
        )

    return best(len(seconds), stages)[1]


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
