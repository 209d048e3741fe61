"""Mesh bytes: counts what each rank of a mesh sends over each of its links, and holds the closed
forms of the papers that this kind of planning comes from.

words      elements; times their size they are bytes
parts      ranks of the tp axis, which share a batch
A plan does not use a closed form where the code that runs can be asked: orders of schedules come
from :mod:`.pipeline_clock`, collectives of a layer from a trial on paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALL_REDUCES, WITH_RECOMPUTATION = 4, 6  # of a layer with tensor parallelism, both directions


def all_reduce_nbytes(nbytes: float, ranks: int) -> float:
    """Counts the bytes that a rank sends in a ring's all-reduce of ``nbytes``."""
    return 2 * (ranks - 1) / ranks * nbytes


def all_gather_nbytes(nbytes: float, ranks: int) -> float:
    """Counts the bytes that a rank sends in a ring's all-gather, or reduce-scatter, of ``nbytes``
    together."""
    return (ranks - 1) / ranks * nbytes


def boundary_nbytes(tokens: int, width: int, itemsize: int, parts: int = 1) -> float:
    """Counts the bytes that a rank sends to the next stage for a micro-batch of ``tokens``; of
    several ``parts`` each sends one (Narayanan et al., PTD-P, 2021, section 4.1)."""
    return tokens * width * itemsize / parts


def tensor_nbytes(
    tokens: int, width: int, itemsize: int, parts: int, layers: int, *, recomputes: bool = False
) -> float:
    """Counts the bytes that a rank sends among the ``parts`` for ``tokens`` through ``layers``
    transformer blocks, forward and backward (PTD-P, section 2.3)."""
    times = WITH_RECOMPUTATION if recomputes else ALL_REDUCES
    return layers * times * all_reduce_nbytes(tokens * width * itemsize, parts)


def expert_nbytes(tokens: int, width: int, itemsize: int, ranks: int, chosen: int) -> float:
    """Counts the bytes that a rank sends in the forward of a layer of experts over ``ranks``:
    ``tokens`` to ``chosen`` experts each, and back, if all experts are chosen as often. A backward
    sends as many."""
    return 2 * chosen * tokens * width * itemsize * (ranks - 1) / ranks


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
