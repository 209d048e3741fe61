"""The figures of Integrated Model, Batch and Domain Parallelism (Gholami et al., 2018): words on
the wire of a grid of ranks, and the batch at which parts begin to pay.

The paper's factor of 9.7 for AlexNet's dense layers is not reproduced: its accounting is another.
"""

from __future__ import annotations

import itertools

import pytest
from paper_formulas import Dense, crossover, grid_seconds, grid_words


def convolution(side: int, inputs: int, outputs: int, kernel: int) -> Dense:
    return Dense(side**2 * inputs, side**2 * outputs, kernel**2 * inputs * outputs)


def dense(inputs: int, outputs: int) -> Dense:
    return Dense(inputs, outputs, inputs * outputs)


CONVOLUTIONS_OF_ALEXNET = [
    convolution(55, 3, 96, 11),
    convolution(27, 96, 256, 5),
    convolution(13, 256, 384, 3),
    convolution(13, 384, 384, 3),
    convolution(13, 384, 256, 3),
]
DENSE_OF_ALEXNET = [dense(9216, 4096), dense(4096, 4096), dense(4096, 1000)]


def ring_words(counts: list[int], *, reduces: bool = False) -> list[int]:
    """The words that each rank of a ring receives until all have the blocks of all, of ``counts``
    words; with ``reduces`` they are added up first. Block after block, as a ring passes them."""
    ranks, received = len(counts), [0] * len(counts)
    for step, rank in itertools.product(range(ranks - 1), range(ranks)):
        received[rank] += counts[(rank - 1 - step) % ranks]
        received[rank] += counts[(rank - 2 - step) % ranks] if reduces else 0
    return received


@pytest.mark.parametrize(("parts", "replicas"), [(1, 4), (2, 2), (4, 1), (2, 4), (4, 2), (8, 1)])
def test_integrated_words_are_those_that_a_ring_passes(parts, replicas):
    """Counts blocks. Each rank has 1/parts of each weight's rows and 1/replicas of the batch.
    Failing twin: one replica more in the formula."""
    layers, batch = [dense(16, 32), dense(32, 8), dense(8, 64)], 64
    own, forward, backward, weights = batch // replicas, 0, 0, 0
    for number, layer in enumerate(layers):
        forward += max(ring_words([own * int(layer.outputs) // parts] * parts))
        if number:
            block = own * int(layer.inputs) // parts
            backward += max(ring_words([block] * parts, reduces=True))
        block = int(layer.weights) // parts // replicas
        weights += max(ring_words([block] * replicas, reduces=True))
    found = grid_words(layers, batch, [parts] * 3, parts * replicas)
    assert found == {"forward": forward, "backward": backward, "weights": weights}
    assert grid_words(layers, batch, [parts] * 3, 2 * parts * replicas) != found


def test_crossovers():
    """Below these batches, parts of a layer pass fewer words than replicas."""
    found = [crossover(layer) for layer in (*CONVOLUTIONS_OF_ALEXNET[1:], *DENSE_OF_ALEXNET)]
    assert found == pytest.approx([3.8, 11.7, 13.6, 10.2, 3351.3, 2730.7, 891.2], abs=0.05)
    h = 1024
    assert crossover(dense(h, 4 * h)) == pytest.approx(4 * h / 3)
    assert crossover(dense(4 * h, h)) == pytest.approx(8 * h / 9)


def test_a_block_of_megatron_pays_below_three_widths_of_tokens():
    """Its four all-reduces pass 8 h words a token, its weights 2 x 12 h^2."""
    h = 1024
    assert 2 * 12 * h**2 / (4 * 2 * h) == 3 * h


def test_the_best_grid_of_alexnets_dense_layers():
    """A batch of 2,048 on 512 ranks, 2 us and 6 GB/s; convolutions have replicas alone. With 32
    parts all layers together take 7.4 times less than with replicas alone, with 512 parts 1.28
    times."""
    layers = [*CONVOLUTIONS_OF_ALEXNET, *DENSE_OF_ALEXNET]
    times = {
        parts: grid_seconds(layers, 2048, [1] * 5 + [parts] * 3, 512, latency=2e-6, bandwidth=6e9)
        for parts in (2**n for n in range(10))
    }
    assert min(times, key=times.__getitem__) == 32
    assert times[1] / times[32] == pytest.approx(7.43, abs=0.02)
    assert times[1] / times[512] == pytest.approx(1.28, abs=0.01)
