"""Blocks: a device budget is spent on what blocks save, and sending is priced by the link."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from infinity.config import Config
from infinity.core.machine.traffic import Traffic
from infinity.core.seams import Events
from infinity.core.units.weight_storages import WeightStorages
from infinity.errors import ConfigError
from infinity.ext.blocks import blocks
from infinity.ext.blocks.blocks import LINK_RATE, Blocks, plan_activations
from infinity.ext.rates.rates import memory_rate

MIB = 1 << 20


def ranks_of(*, divided: str = "") -> SimpleNamespace:
    """One rank, or several that have parts of blocks (``"blocks"``) or of sequences."""
    part = "a channel" if divided == "sequences" else None
    return SimpleNamespace(
        alone=not divided,
        is_cut=divided == "blocks",
        cp_group=part,
        all_channels=[],
        process_groups=[],
    )


def job_of(*, spare: int | None = MIB, divided: str = "", **config: Any) -> SimpleNamespace:
    """A job on the processor, whose activations may have ``spare`` bytes."""
    activations = SimpleNamespace(
        spare_nbytes=spare, home=SimpleNamespace(room_nbytes=None), planner=None
    )
    return SimpleNamespace(
        config=Config(activations="auto", **config),
        activations=activations,
        ranks=ranks_of(divided=divided),
        device=SimpleNamespace(memory=None, is_host=True),
        traffic=None,
        schedule=None,
        storages=WeightStorages(),
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_a_device_budget_is_spent_on_activations(recompute):
    """Twins: without one, and with ranks that have parts of the blocks or their sequences."""
    job = job_of(recompute=recompute)
    planner = plan_activations(job, lambda: "context")
    assert job.activations.planner is planner and planner.find_context() == "context"
    assert planner.recomputes == recompute and planner.spare_nbytes == MIB
    assert planner._send_rate() == memory_rate() / 4
    without = job_of()
    without.activations = None
    parts = [job_of(divided=divided) for divided in ("blocks", "sequences")]
    for other in (job_of(spare=None), *parts, without):
        assert plan_activations(other, lambda: None) is None


def test_only_one_of_parts_of_a_batch_and_choices_runs_a_block():
    """Claim: with a micro-batch each block runs in parts. Twins: without one each is chosen for,
    and without a budget each runs as it is."""
    block = nn.Linear(2, 2)
    of, described = [("block", block, [])], SimpleNamespace(module=block)
    for job, replaces, chooses in (
        (job_of(micro_batch=2), True, False),
        (job_of(), True, True),
        (job_of(spare=None), False, False),
    ):
        removers = Blocks(places_saved=False).replace_forwards(job, described, lambda: None, of)
        assert ("forward" in block.__dict__) == replaces == bool(removers)
        assert bool(job.activations.planner) == chooses
        for remover in removers:
            remover.remove()
    assert "forward" not in block.__dict__


def test_what_blocks_save_is_placed_in_a_job_that_may_recompute():
    """Twins: without the option, and where ranks have parts of the blocks, which is told."""
    for recompute, divided in ((True, ""), (False, ""), (True, "blocks"), (True, "sequences")):
        ranks = SimpleNamespace(ranks=ranks_of(divided=divided))
        made = Blocks.begin(Config(recompute=recompute), None, ranks, Events())
        assert made.places_saved == (recompute and not divided)


def test_a_choice_that_is_not_made_is_told(caplog):
    """For each of its reasons. Twin: a choice that is made is not told."""
    job = job_of(recompute=True)
    blocks._tell_if_nothing_is_chosen(job)
    assert not caplog.records
    at_home = job_of(recompute=True)
    at_home.config = Config(activations="host", recompute=True)
    without = job_of(recompute=True)
    without.activations = None
    jobs = (job_of(recompute=True, divided="blocks"), at_home, without)
    reasons = ("divided over ranks", "is the home", "no device_memory")
    for each, why in zip(jobs, reasons):
        caplog.clear()
        blocks._tell_if_nothing_is_chosen(each)
        assert why in caplog.text


def test_a_micro_batch_without_blocks_is_refused():
    """Twins: batch norm in a block is, too; without a micro-batch nothing is looked at."""
    of = [("block", nn.Sequential(nn.BatchNorm1d(2)))]
    for given in ([], of):
        with pytest.raises(ConfigError, match="micro_batch"):
            Blocks.check_blocks(Config(micro_batch=2), nn.Linear(2, 2), given)
        Blocks.check_blocks(Config(), nn.Linear(2, 2), given)


@pytest.mark.parametrize(
    ("out", "into", "expected"),
    [((10, 1.0), (30, 1.0), 7.5), (None, None, LINK_RATE / 2), ((10, 0.0), None, LINK_RATE / 2)],
)
def test_sending_is_priced_by_what_the_link_has_moved(out, into, expected):
    """Both ways of a round trip, by copies that are over. Twins: a link that nothing was moved by,
    and one whose clock stood still."""
    traffic = Traffic()
    for edge, moved in (("device->host", out), ("host->device", into)):
        traffic.edges[edge].nbytes += 1000  # launched
        if moved is not None:
            traffic.copied(edge, moved[0], "by hand", 0.0, moved[1], is_counted=True)
    device = SimpleNamespace(is_host=False)
    assert blocks._send_rate(device, traffic, Config()) == pytest.approx(expected)
