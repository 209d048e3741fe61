"""Experts that are divided among data ranks: two ranks over gloo with a batch of their own each;
four where it is marked slow.

**alone**: one process that is given every rank's batch in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import parallel_families
import pytest
import torch
from parallel_jobs import adamw, values_of
from ranks import Jobs, near, run_all

import infinity

transformers = pytest.importorskip("transformers", minversion="5.23")  # which applies plans
HOMES = ("device", "host", "nvme")
OTHERS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
AXES = {"dp": 1, "ep": 2}
WAYS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"config": {"params": "host", "optimizer": "host", "shard": "optimizer"}},
    "ZeRO-2": {"config": {"params": "host", "optimizer": "host", "shard": "gradients"}},
    "checkpointing": {"checkpoints": True},
    "a small window": {
        "config": {"params": "host", "optimizer": "host", "device_memory": 5_000_000}
    },
}
REFUSED = {
    "exchange": "ConfigError: expert_parallel: exchange is 'both'; there are outputs, tokens",
    "cut_rest": "ConfigError: expert_parallel: cut_rest needs ranks that share a batch",
    "no mixture": "ConfigError: LlamaForCausalLM has no plan for its experts",
    "another mesh": (
        "ConfigError: the experts of model.layers.0.mlp.experts.gate_up_proj are divided among"
        " ranks [0, 1], but the ep axis"
    ),
    "micro_batch": "ConfigError: micro_batch: not available with divided experts (ep=2)",
    "axis": (
        "ConfigError: the experts of model.layers.0.mlp.experts.gate_up_proj are divided among"
        " ranks [0, 1], but the ep axis"
    ),
}


@pytest.fixture(scope="module")
def two(launch_folder, standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    folder, swap = launch_folder, launch_folder / "swap"
    host = models.at_home("host", "host", swap)
    jobs: dict[str, dict] = {
        f"divided:mixtral-{home}": {
            "name": "mixtral",
            "axes": AXES,
            "config": models.at_home(home, home, swap),
        }
        for home in HOMES
    }
    jobs |= {
        f"divided:{name}": {
            "name": name,
            "axes": AXES,
            "config": models.at_home("nvme", "host", swap),
        }
        for name in OTHERS
    }
    jobs |= {
        f"divided:{way}": {"name": "mixtral", "axes": AXES, "config": host, **more}
        for way, more in WAYS.items()
    }
    jobs["divided:meta"] = {"name": "mixtral", "axes": AXES, "config": host, "meta": True}
    jobs["divided:norms"] = {"name": "mixtral", "axes": AXES, "config": host, "clip": "torch's"}
    jobs["divided:fault"] = {"name": "mixtral", "axes": AXES, "config": host, "fault": "divisor"}
    jobs["moved"] = {
        "name": "mixtral",
        "axes": AXES,
        "config": models.at_home("nvme", "host", swap),
        "folder": str(folder),
    }
    jobs["refused"] = {"config": host}
    jobs["given_back"] = {"name": "mixtral", "axes": AXES, "config": host}
    return Jobs(standing_ranks(2), "expert_jobs", jobs, folder=folder)


def trains_as_alone(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert near(rank["losses"][:1], rank["expected losses"][:1]) and near(
            rank["losses"], rank["expected losses"], 1e-5
        )
        assert rank["grads off"] < 1e-6 and rank["weights off"] < 1e-4
        assert rank["norms"] == ranks[0]["norms"] and near(
            rank["norms"], rank["expected norms"], 1e-5
        )


@pytest.mark.parametrize("name", ["mixtral-host", *OTHERS])
def test_ranks_with_batches_of_their_own_train_as_one_process_does(two, name):
    """Losses of each rank's batch, gradients averaged over all of them, one norm."""
    trains_as_alone(two[f"divided:{name}"])


def test_a_divisor_of_the_ranks_with_the_same_experts_is_found(two):
    """The failing twin: experts' gradients averaged over their own row are as many times too large
    as there are such rows."""
    for rank in two["divided:fault"]:
        assert rank["grads off"] > 1e-3


def test_homes_change_no_bit(two):
    for home in HOMES[1:]:
        for mine, theirs in zip(two[f"divided:mixtral-{home}"], two["divided:mixtral-device"]):
            assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"])
            assert not models.differing(mine["weights"], theirs["weights"])


def test_each_rank_has_its_experts_alone_and_a_slice_of_all_else(two):
    ranks = two["divided:mixtral-host"]
    for rank in ranks:
        assert rank["own"]["experts"] == rank["elements"]["experts"] / 2
    assert sum(rank["own"]["rest"] for rank in ranks) == rank["elements"]["rest"]


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_of_training_are_near_too(two, way):
    trains_as_alone(two[f"divided:{way}"])


def test_values_drawn_on_meta_are_the_same_on_all_ranks_but_for_their_experts(two):
    first, second = two["divided:meta"]
    assert not models.differing(first["weights"], second["weights"])
    assert all(
        bool(value.isfinite().all()) and value.std() > 0
        for key, value in first["weights"].items()
        if "proj" in key
    )


def test_torchs_own_norm_of_the_experts_counts_each_element_once(two):
    """Of the first step, before anything was clipped."""
    for rank in two["divided:norms"]:
        assert rank["norms"] == two["divided:norms"][0]["norms"]
        assert near(rank["norms"][:1], [rank["expected norm of experts"]])


def test_only_what_is_sliced_passes_between_the_ranks_once_a_step(two):
    """Weights are gathered, and gradients averaged, of all but experts, of which no other rank has
    the same."""
    for rank in two["divided:mixtral-host"]:
        assert rank["passed"]["all-gather"] == rank["passed"]["reduce-scatter"] == 1.0


def test_ranks_agree_on_passes_with_experts_and_do_not_meet_in_them(two):
    """A step has the meetings that it has without experts: one for its gradients, one for their
    norm, one for the step."""
    for home in HOMES:
        for rank in two[f"divided:mixtral-{home}"]:
            assert len(rank["meetings"]) <= 3, rank["meetings"]


def test_a_checkpoint_an_edit_and_a_load_reach_every_part(two):
    for rank in two["moved"]:
        for what in ("loaded", "goes on", "edited", "put back"):
            assert rank[what] is True, what


def test_one_process_reads_the_checkpoint_and_transformers_the_folder(two):
    saved = two["moved"][0]["saved"]
    model = parallel_families.mixture("mixtral")
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    infinity.load_checkpoint(two["folder"] / "checkpoint", model, optimizer)
    assert not models.differing(values_of(model, optimizer), saved)
    state = transformers.MixtralForCausalLM.from_pretrained(two["folder"] / "weights").state_dict()
    assert all(torch.equal(value, saved[f"weight/{key}"]) for key, value in state.items())


def test_gradients_and_state_that_are_given_back_change_nothing(two):
    """Each rank's experts are compared over those that share them. The failing twin: what all ranks
    have, with other values on one."""
    for rank in two["given_back"]:
        assert rank["same"] is True and rank["an expert's gradient"] == "was taken"
        assert rank["a gradient that all have"].startswith("UsageError: rank ")
        said = rank["state that all have"]
        assert "loading the optimizer's state with" in said and "to values of digest" in said


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_on_every_rank(two, what):
    for rank in two["refused"]:
        assert rank[what].startswith(REFUSED[what]), rank[what]
        assert rank["goes on"] == "True"


MESHES = {
    "dp2 x ep2": {"dp": 2, "ep": 2},
    "ep2 x dp2": {"ep": 2, "dp": 2},
    "replicas x ep2": {"dp_replicate": 2, "ep": 2},
    "ep4": {"ep": 4},
}


@pytest.mark.slow
def test_four_ranks_in_every_mesh(tmp_path, two):
    """Rows of two ranks with the same experts, and replicas of them; checkpoints pass from two
    ranks to four."""
    swap, saved = tmp_path / "swap", two["moved"][0]["saved"]
    swap.mkdir()
    jobs: dict[str, dict] = {}
    for mesh, axes in MESHES.items():
        for home in ("host", "nvme"):
            jobs[f"divided:{mesh}-{home}"] = {
                "name": "mixtral",
                "axes": axes,
                "config": models.at_home(home, home, swap),
            }
        config = {"params": "host", "optimizer": "host", "shard": "optimizer"}
        jobs[f"divided:{mesh}-ZeRO-1"] = {"name": "mixtral", "axes": axes, "config": config}
        jobs[f"loaded:{mesh}"] = {
            "name": "mixtral",
            "axes": axes,
            "config": config,
            "folder": str(two["folder"]),
        }
    four = run_all(tmp_path / "jobs", 4, jobs, script="expert_jobs.py")
    for mesh, axes in MESHES.items():
        for way in ("host", "nvme", "ZeRO-1"):
            trains_as_alone(four[f"divided:{mesh}-{way}"])
        ranks = four[f"divided:{mesh}-host"]
        for mine, theirs in zip(four[f"divided:{mesh}-nvme"], ranks):
            assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"])
            assert not models.differing(mine["weights"], theirs["weights"])
        shares = 4 // axes.get("dp_replicate", 1)
        assert (
            sum(rank["own"]["experts"] for rank in ranks) * shares
            == 4 * ranks[0]["elements"]["experts"]
        )
        for rank in four[f"loaded:{mesh}"]:
            assert not models.differing(rank, saved)
