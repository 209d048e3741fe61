"""Which schedule, how many chunks, cut where: without any rank."""

from __future__ import annotations

import made_pipeline_jobs
import pytest
import torch
from torch import nn

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.ext.pipeline.choice import Choice, choose
from infinity.ext.pipeline.stages import Chain, chain_of
from infinity.parallel import measure_costs

LAYER = 256 * 256 * 4 + 256 * 4  # bytes of one


def chain(layers: int = 16) -> Chain:
    return chain_of(nn.Sequential(*(nn.Linear(256, 256) for _ in range(layers))))


def chosen(
    config: dict,
    ranks: int = 2,
    *,
    layers: int = 16,
    schedule: str = "auto",
    micro: int = 4,
    **options,
) -> Choice:
    arguments = {"chunks": None, "costs": None, "load_rate": None, **options}
    return choose(
        chain(layers),
        Config.make(config),
        ranks,
        schedule=schedule,
        micro_batches=micro,
        **arguments,
    )


@pytest.mark.parametrize(
    "options", [{}, {"layers": 3}, {"chunks": 1}, {"costs": [1.0] * 15 + [5.0]}]
)
def test_the_schedule_does_not_follow_the_home_of_the_weights(options):
    """The same one, and the same chunks, wherever they are and whatever window there is room for in
    both places."""
    room = {"device_memory": 32 * LAYER, "nvme_paths": ["."]}
    found = [chosen(room | {"params": home}, **options) for home in ("device", "host", "nvme")]
    assert (
        len(set(found)) == 1
        and found[0].name == "LoopedBFS"
        and "the same at every home" in found[0].why
    )


@pytest.mark.parametrize(
    ("window", "chunks"),
    [(None, 2), (16 * LAYER, 2), (8 * LAYER, 2), (6 * LAYER, 3), (4 * LAYER, 4), (2 * LAYER, 8)],
)
def test_chunks_are_at_most_half_of_the_window(window, chunks):
    found = chosen({"params": "host", "device_memory": window})
    assert found.chunks == 2 * chunks
    assert window is None or 2 * max(found.lengths) * LAYER <= window


def test_an_interleaved_schedule_under_a_window_of_less_than_two_chunks_is_refused():
    small = {"params": "host", "device_memory": 7 * LAYER}
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        with pytest.raises(
            ConfigError, match=r"does not hold two of the largest.*Use schedule='LoopedBFS'"
        ):
            chosen(small, schedule=name)
        assert chosen(small | {"device_memory": 8 * LAYER}, schedule=name).chunks == 4
        assert chosen(small | {"params": "device"}, schedule=name).chunks == 4


def test_cuts_follow_measured_costs_and_loading():
    """Twice as dear layers at the end; with weights from a slow home, loading decides."""
    costs = [1.0] * 12 + [3.0] * 4
    found = chosen({"params": "device"}, costs=costs, chunks=1, schedule="1F1B")
    assert found.lengths == (12, 4)
    slow = chosen(
        {"params": "host"}, costs=costs, chunks=1, schedule="1F1B", load_rate=LAYER / 1000
    )
    assert slow.lengths == (8, 8)
    fast = chosen(
        {"params": "host"}, costs=costs, chunks=1, schedule="1F1B", load_rate=LAYER * 1000
    )
    assert fast.lengths == (12, 4)
    with pytest.raises(ConfigError, match="costs has 3 numbers, the model 16 layers"):
        chosen({"params": "device"}, costs=[1.0, 2.0, 3.0])


def test_chunks_lie_as_the_schedule_takes_them():
    looped, v = chosen({"params": "host"}), chosen({"params": "device"}, schedule="ZBVZeroBubble")
    assert [looped.chunks_of(rank) for rank in range(2)] == [
        [0, 2],
        [1, 3],
    ] and looped.last_rank == 1
    assert [v.chunks_of(rank) for rank in range(2)] == [[0, 3], [1, 2]] and v.last_rank == 0
    assert sum(looped.lengths) == 16 and looped.layers_of(1) == range(4, 8)


@pytest.mark.parametrize("where", ["here", "meta"])
def test_costs_are_measured_one_layer_at_a_time(where, monkeypatch):
    """A number for each layer; layers of one kind have the same one; the model is not changed."""
    runs = []
    monkeypatch.setattr(
        "infinity.ext.pipeline.costs._time",
        lambda work, where: runs.append(work()) or float(len(runs)),
    )
    if where == "meta":
        with torch.device("meta"):
            model = made_pipeline_jobs.causal("llama")
    else:
        model = made_pipeline_jobs.causal("llama")
    before = {name: param.clone() for name, param in model.named_parameters()}
    costs = measure_costs(model, torch.arange(24).view(2, 12), device="cpu", repeats=2)
    assert len(costs) == 4 and costs[1] == costs[2] and len({*costs}) == 3 and len(runs) == 6
    for name, param in model.named_parameters():
        assert param.device == before[name].device and param.grad is None
        assert param.is_meta or torch.equal(param, before[name])
