"""Cuts of a chain into stages: the published answers, and every partition of small chains.

**profile**: seconds and bytes of each layer, as PipeDream measured and published them
(`pipedream.json`).
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from paper_formulas import Layer, Level, partition

from infinity.errors import ConfigError
from infinity.ext.pipeline.cuts import cut_evenly

PROFILES = json.loads((Path(__file__).parent / "pipedream.json").read_text())
SEED = 20261123


def profile(name: str) -> list[Layer]:
    return [
        Layer(milliseconds / 1000, parameters, activations)
        for milliseconds, parameters, activations in PROFILES[name]
    ]


@pytest.mark.parametrize(
    ("name", "seconds"), [("vgg16", 0.672535), ("alexnet", 0.085321), ("gnmt", 0.089416)]
)
def test_one_machine_takes_the_sum(name, seconds):
    found = partition(profile(name), [Level(1, 16e9)])
    assert found.seconds == pytest.approx(seconds, abs=1e-9) and len(found.stages) == 1


@pytest.mark.parametrize(
    ("name", "levels", "with_activations", "seconds", "replicas"),
    [
        ("vgg16", [(4, 16)], False, 0.169947664, [3, 1]),
        ("vgg16", [(4, 16), (4, 1.25)], False, 0.04397225946667, [3, 1]),
        ("vgg16", [(4, 16), (4, 1.25)], True, 0.06658219613, [3, 1]),
        ("vgg16", [(16, 1.25)], False, 0.0465874887, None),
        ("vgg16", [(16, 1.25)], True, 0.05479489083, None),
        ("vgg16", [(8, 150), (2, 3.125)], False, 0.0463694102, None),
        ("vgg16", [(8, 150), (2, 3.125)], True, 0.06477972917, None),
        ("gnmt", [(4, 16)], False, 0.025868, [1, 1, 1, 1]),
    ],
)
def test_pipedream_partitions_as_published(name, levels, with_activations, seconds, replicas):
    found = partition(
        profile(name),
        [Level(n, rate * 1e9) for n, rate in levels],
        with_activations=with_activations,
    )
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    assert replicas in (None, [stage.replicas for stage in found.stages])  # None: not published
    assert [stage.begin for stage in found.stages[1:]] == [stage.end for stage in found.stages[:-1]]


def every_partition(count: int, machines: int):
    """Stages of layers, and the machines of each."""
    for stages in range(1, min(count, machines) + 1):
        for ends in itertools.combinations(range(1, count), stages - 1):
            bounds = list(zip((0, *ends), (*ends, count)))
            for replicas in itertools.product(range(1, machines + 1), repeat=stages):
                if sum(replicas) == machines:
                    yield list(zip(bounds, replicas))


@pytest.mark.parametrize("machines", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_nothing_is_better_than_the_answer(count, machines):
    """Over random chains: the least of the slowest stages of all partitions that use all
    machines."""
    draw = random.Random(SEED + 10 * count + machines)
    for _ in range(5):
        layers = [Layer(draw.random(), draw.random() * 1e9) for _ in range(count)]
        rate = draw.choice([1e9, 8e9])

        def time(bounds, m, layers=layers, rate=rate):
            chosen = layers[slice(*bounds)]
            return (
                sum(layer.seconds for layer in chosen)
                + 4 * (m - 1) * sum(layer.parameter_nbytes for layer in chosen) / (rate * m)
            ) / m

        best = min(
            max(time(bounds, m) for bounds, m in stages)
            for stages in every_partition(count, machines)
        )
        assert partition(layers, [Level(machines, rate)]).seconds == pytest.approx(best)


def test_even_cuts_make_the_slowest_stage_as_fast_as_can_be():
    draw = random.Random(SEED)
    for count, stages in [(1, 1), (4, 2), (7, 3), (8, 4), (9, 8)]:
        seconds = [draw.random() for _ in range(count)]
        lengths = cut_evenly(seconds, stages)
        ends = list(itertools.accumulate(lengths))
        assert sum(lengths) == count and min(lengths) >= 1 and len(lengths) == stages
        slowest = max(sum(seconds[end - n : end]) for end, n in zip(ends, lengths))
        options = (
            zip((0, *cut), (*cut, count))
            for cut in itertools.combinations(range(1, count), stages - 1)
        )
        assert slowest == pytest.approx(
            min(max(sum(seconds[a:b]) for a, b in bounds) for bounds in options)
        )


def test_more_stages_than_layers_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="3 layers cannot be cut into 4 stages"):
        cut_evenly([1.0, 1.0, 1.0], 4)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [4, 6, 8])
def test_a_stage_takes_the_larger_of_computing_and_loading(count, stages):
    """As the best of every cut; one that looks at computing alone is worse somewhere."""
    draw = random.Random(SEED + count * stages)
    worse = 0
    for _ in range(20):
        seconds, loading = ([draw.uniform(0.1, 2) for _ in range(count)] for _ in range(2))

        def slowest(lengths, seconds=seconds, loading=loading):
            ends = [0, *itertools.accumulate(lengths)]
            return max(
                max(sum(seconds[a:b]), sum(loading[a:b])) for a, b in itertools.pairwise(ends)
            )

        every = [
            [b - a for a, b in itertools.pairwise((0, *ends, count))]
            for ends in itertools.combinations(range(1, count), stages - 1)
        ]
        best = min(map(slowest, every))
        assert slowest(cut_evenly(seconds, stages, loading=loading)) == pytest.approx(best)
        worse += slowest(cut_evenly(seconds, stages)) > best * (1 + 1e-9)
    assert worse or stages in (1, count)
