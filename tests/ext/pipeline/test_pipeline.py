"""Pipelines over homes: two ranks over gloo; four where it is marked slow.

**twin**: the same schedule by torch alone, with torch's optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import models
import pipeline_jobs
import pytest
import torch
from idle_time import idle_share
from parallel_jobs import off
from ranks import Jobs, fall, near, run_all, what_was_saved

import infinity

HOMES = ("device", "host", "nvme")
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
ONE_DIRECTION = (
    ("GPipe", "1F1B"),
    ("Interleaved1F1B", "InterleavedZeroBubble"),
    ("ZBVZeroBubble", "DualPipeV"),
)
MESHES = ("pp2", "dp2", "tp2")
REFUSED = {
    "not wrapped": "UsageError: this Chunk is not wrapped",
    "no schedule": (
        "ConfigError: attach takes a schedule of torch.distributed.pipelining, not a Chunk"
    ),
    "settings": "ConfigError: wrap_model: Config(max_grad_norm) is 1.0 on rank 0 and 2.0 on rank 1",
    "apart": "ConfigError: the 2 stages of this rank were wrapped apart",
    **{
        field: f"ConfigError: {field}: not available with pipeline parallelism (pp=2)"
        for field in ("micro_batch", "recompute")
    },
    "torch's clip": (
        "UsageError: torch's clip_grad_norm_ sees the gradients of this stage of the pipeline only"
    ),
}


@pytest.fixture(scope="module")
def two(launch_folder, standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    folder, swap = launch_folder, launch_folder / "swap"
    config = {home: models.at_home(home, home, swap) for home in HOMES}
    jobs: dict[str, dict] = {
        f"trained:{kind}-twin": {"kind": kind, "config": None} for kind in SCHEDULES
    }
    jobs |= {
        f"trained:{kind}-{home}": {"kind": kind, "config": config[home]}
        for kind in SCHEDULES
        for home in HOMES
    }
    jobs["trained:by config"] = {
        "kind": "1F1B",
        "config": config["nvme"] | {"max_grad_norm": 0.5},
        "by": "config",
    }
    jobs |= {
        f"counted:{kind}-{home}": {"kind": kind, "config": config[home]}
        for kind in SCHEDULES
        for home in HOMES
    }
    jobs |= {
        f"loads:{window}": {"window": window, "chunks": 8, "config": config["nvme"]}
        for window in (1, 2, 3)
    }
    jobs |= {
        f"saved:{what}": {"path": str(folder / what), "what": what, "config": config["nvme"]}
        for what in MESHES
    }
    jobs |= {
        f"loaded:{what} onto {onto}": {
            "path": str(folder / what),
            "what": onto,
            "config": config["host"],
        }
        for what in MESHES
        for onto in MESHES
        if "pp2" in (what, onto)
    }
    jobs["alike"] = {"path": str(folder / "alike"), "config": config["nvme"]}
    jobs["alike:fault"] = {
        "path": str(folder / "alike-fault"),
        "config": config["host"],
        "fault": True,
    }
    jobs |= {"refused": {}, "forgotten": {"config": config["host"]}}
    jobs |= {f"executed:{kind}": {"kind": kind} for kind in SCHEDULES}
    return Jobs(standing_ranks(2), "pipeline_jobs", jobs, needs=what_was_saved)


def losses(ranks: list[dict]) -> list[float]:
    """Of the rank that has the last chunk."""
    return next(rank["losses"] for rank in ranks if rank["losses"][0] is not None)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_trains_as_it_does_without_the_engine(two, kind):
    """Losses, norms of all stages together and weights are near torch's own; the same bits from
    every home."""
    twin, first = two[f"trained:{kind}-twin"], two[f"trained:{kind}-device"]
    assert near(losses(first), losses(twin), 1e-5) and near(
        first[0]["norms"], twin[0]["norms"], 1e-5
    )
    assert first[0]["norms"] == first[1]["norms"]
    for rank, theirs in zip(first, twin):
        assert off(rank["weights"], theirs["weights"]) < 1e-4
        assert rank["evaluates"] and rank["unwrapped"]
    for home in ("host", "nvme"):
        for mine, theirs in zip(two[f"trained:{kind}-{home}"], first):
            assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"])
            assert not models.differing(mine["weights"], theirs["weights"])
            assert mine["evaluates"] and mine["unwrapped"]


def test_an_unwrapped_pipeline_leaves_no_engine(two):
    assert two["forgotten"] == [0, 0]


@pytest.mark.parametrize("alike", ONE_DIRECTION)
def test_schedules_that_add_in_one_order_have_the_same_bits(two, alike):
    """Also where gradients of weights are computed apart from those of inputs; LoopedBFS adds in
    reverse and is near."""
    a, b = (two[f"trained:{kind}-nvme"] for kind in alike)
    assert losses(a) == losses(b) and a[0]["norms"] == b[0]["norms"]
    merged = [
        {name: value for rank in ranks for name, value in rank["weights"].items()}
        for ranks in (a, b)
    ]
    assert not models.differing(*merged)
    assert near(losses(two["trained:LoopedBFS-nvme"]), losses(a), 1e-5)


def test_max_grad_norm_is_of_all_stages(two):
    for mine, theirs in zip(two["trained:by config"], two["trained:1F1B-nvme"]):
        assert not models.differing(mine["weights"], theirs["weights"])


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("kind", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_data_ranks_gather_and_reduce_once_a_step_and_meet_once_for_gradients(two, kind, home):
    """Eight micro-batches and two chunks: what each backward would do without the seam is done once
    a step."""
    for rank in two[f"counted:{kind}-{home}"]:
        for number, step in enumerate(rank["steps"]):
            assert step["all-gather"] == step["reduce-scatter"] == 1.0
            if number:
                assert step["meetings"] <= step["units"] + 2 and step["misses"] == 0
        assert (
            rank["steps"][-1]["meetings"] == 1
        )  # for all gradients; the step that came before has agreed on the rest


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_of_few_chunks_loads_what_the_formula_says(two, window):
    """2v - W loads of a chunk in a step, all from the disk ahead of their use."""
    for rank in two[f"loads:{window}"]:
        assert window <= rank["window"] < window + 0.5
        for step in rank["steps"][1:]:
            assert step == {"loads": 2 * 8 - window, "misses": 0}


@pytest.mark.parametrize(
    ("what", "onto"), [(a, b) for a in MESHES for b in MESHES if "pp2" in (a, b)]
)
def test_checkpoints_pass_between_stages_data_ranks_and_parts(two, what, onto):
    saved = two[f"saved:{what}"][0]
    for rank in two[f"loaded:{what} onto {onto}"]:
        assert rank["extra"] == "two steps"
        assert not models.differing(rank["values"], saved["values"]) and len(saved["values"]) > 100
        assert what != onto or not models.differing(rank["after"], saved["after"])


def test_stages_that_call_their_parameters_the_same_train_and_have_checkpoints(two):
    """As torch's own stages do; weights, moments and buffers come back. The failing twin has names
    that mean two parameters each."""
    for rank in two["alike"]:
        assert (
            rank["off"] < 1e-6
            and rank["load"] == "was taken"
            and rank["loaded"]
            and rank["goes on"]
        )
        assert (
            rank["named"][0] == "layers.0.bias"
            and "full_params(model, ['layers.0.weight'])" in rank["advice"]
        )
        assert rank["folder"].startswith(
            "UsageError: save_pretrained: stages of this pipeline call parameters the same"
        )
    assert not all(rank["loaded"] for rank in two["alike:fault"])


@pytest.mark.parametrize("kind", SCHEDULES)
def test_ranks_stand_idle_as_long_as_the_papers_say(two, kind):
    """With F = 1 and B = 2, p ranks, m micro-batches, v chunks: (p - 1) / m, and (p - 1) / (v m)
    where chunks are interleaved. Less where gradients of weights fill the gaps."""
    ranks, p, m = two[f"executed:{kind}"], 2, pipeline_jobs.MICRO
    v = ranks[0]["chunks"] // p
    share = idle_share(ranks, pipeline_jobs.MICRO)
    if kind in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"):
        assert share == pytest.approx((p - 1) / (v * m))
    else:
        assert share < (p - 1) / (v * m) + 1e-9


IDLE_OF_FOUR = {
    "Interleaved1F1B": 0.1875,
    "InterleavedZeroBubble": 0.0625,
    "LoopedBFS": 0.1875,
}  # p = 4, v = 2, m = 8


@pytest.mark.parametrize("kind", IDLE_OF_FOUR)
def test_four_ranks_stand_idle_as_long_as_the_papers_say(kind):
    """In the order of torch's schedule, for which no rank need be there."""
    ranks = pipeline_jobs.ordered(kind, 4)
    assert idle_share(ranks, pipeline_jobs.MICRO) == pytest.approx(IDLE_OF_FOUR[kind])
    if kind == "InterleavedZeroBubble":
        for rank in ranks:
            rank["done"].sort(
                key=lambda each: each[0] == "weights"
            )  # the failing twin: nothing fills the gaps
        assert idle_share(ranks, pipeline_jobs.MICRO) > IDLE_OF_FOUR[kind] + 0.01


@pytest.mark.slow
def test_four_ranks_execute_what_their_schedules_order(tmp_path):
    """And stand idle as long: also 1F1B, of which torch's order is another than what runs."""
    kinds = (*IDLE_OF_FOUR, "GPipe", "1F1B")
    four = run_all(
        tmp_path,
        4,
        {f"executed:{kind}": {"kind": kind, "ranks": 4} for kind in kinds},
        script="pipeline_jobs.py",
    )
    for kind in kinds:
        ranks = four[f"executed:{kind}"]
        assert idle_share(ranks, pipeline_jobs.MICRO) == pytest.approx(
            IDLE_OF_FOUR.get(kind, 3 / 8)
        ), kind
        if kind in IDLE_OF_FOUR:
            assert [rank["done"] for rank in ranks] == [
                rank["done"] for rank in pipeline_jobs.ordered(kind, 4)
            ], kind


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_boundary_carries_b_s_h_each_way(two, kind):
    ranks = two[f"executed:{kind}"]
    crossings = sum(a != b for a, b in itertools.pairwise(owners(kind)))
    for direction in ("forward", "backward"):
        sent = [nbytes for rank in ranks for nbytes in rank["sent"][direction]]
        assert set(sent) == {ranks[0]["boundary"]} and len(sent) == crossings * pipeline_jobs.MICRO


def owners(kind: str) -> list[int]:
    """The rank of each chunk, in the order of the chunks."""
    count = pipeline_jobs.chunks_of(kind, 0, 2)[1]
    return [
        rank
        for chunk in range(count)
        for rank in range(2)
        if chunk in pipeline_jobs.chunks_of(kind, rank, 2)[0]
    ]


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_on_every_rank(two, what):
    for rank in two["refused"]:
        assert rank[what].startswith(REFUSED[what]), rank[what]
        assert rank["goes on"] == "True"


FALLS = {
    "killed": "rank 1 (process",
    "hangs": "Nothing was heard from rank 1 (process",
    "raises in a forward": "rank 1 failed:",
    "raises in a backward": "rank 1 failed:",
    "eio": "rank 1 failed: StorageError",
    "enospc": "rank 1 failed: StorageError",
}


@pytest.mark.parametrize(
    "how",
    [
        how if how in ("killed", "eio") else pytest.param(how, marks=pytest.mark.slow)
        for how in FALLS
    ],
)
def test_a_stage_that_falls_ends_all_ranks_which_name_it(tmp_path, how):
    """The last checkpoint is whole."""
    said = fall(tmp_path, how, script="pipeline_jobs.py", folder=str(tmp_path))
    assert FALLS[how] in said and ("raises" not in how or "the user's own" in said), said[-3000:]
    assert how in ("killed", "hangs") or "of stage 3" in said or "of stage 1" in said, said[-3000:]
    model = pipeline_jobs.seeded(pipeline_jobs.LAYERS, 6)
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
    )
    assert infinity.load_checkpoint(tmp_path / "checkpoint", model, optimizer) == {"step": 1}
    infinity.unwrap_model(model, optimizer)


@pytest.mark.slow
def test_torchrun_restarts_a_pipeline_from_its_checkpoint(tmp_path):
    """The second stage is killed after its third step; the second start goes on and ends as an
    undisturbed run does."""
    (tmp_path / "killed").mkdir()
    (tmp_path / "alone").mkdir()
    killed = run_all(
        tmp_path / "killed",
        2,
        {"restarted": {"folder": str(tmp_path / "killed")}},
        script="made_pipeline_jobs.py",
        environment={"RANK_TIMEOUT": "8"},
        options=("--max-restarts", "1"),
    )["restarted"]
    alone = run_all(
        tmp_path / "alone",
        2,
        {"restarted": {"folder": str(tmp_path / "alone")}},
        script="made_pipeline_jobs.py",
        environment={"RANK_TIMEOUT": "8", "NOBODY_FALLS": "1"},
    )["restarted"]
    for mine, theirs in zip(killed, alone):
        assert mine["restarts"] == "1" and 2 <= mine["first"] <= 3
        assert mine["losses"] == theirs["losses"][mine["first"] :]
        assert not models.differing(mine["weights"], theirs["weights"])


@pytest.mark.slow
def test_data_ranks_and_stages_together(tmp_path):
    """Four ranks, pp2 x dp2: near torch's own with averaged gradients; the same bits from every
    home and way of sharding."""
    swap = tmp_path / "swap"
    swap.mkdir()
    kinds = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    jobs: dict[str, dict] = {
        f"trained:{kind}-twin": {"kind": kind, "config": None} for kind in kinds
    }
    for kind in kinds:
        jobs |= {
            f"trained:{kind}-{home}": {"kind": kind, "config": models.at_home(home, home, swap)}
            for home in HOMES
        }
        jobs |= {
            f"trained:{kind}-{shard}": {
                "kind": kind,
                "config": {"params": "host", "optimizer": "host", "shard": shard},
            }
            for shard in ("gradients", "optimizer")
        }
    four = run_all(tmp_path / "jobs", 4, jobs, script="pipeline_jobs.py")
    for kind in kinds:
        twin, first = four[f"trained:{kind}-twin"], four[f"trained:{kind}-device"]
        assert near(first[0]["norms"], twin[0]["norms"], 1e-4)
        assert len({tuple(rank["norms"]) for rank in first}) == 1
        for other in ("host", "nvme", "gradients", "optimizer"):
            for mine, theirs in zip(four[f"trained:{kind}-{other}"], first):
                assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"]), (
                    kind,
                    other,
                )
                assert not models.differing(mine["weights"], theirs["weights"])
