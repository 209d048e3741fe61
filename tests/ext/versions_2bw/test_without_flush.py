"""Pipelines without flush: two ranks over gloo; four where it is marked slow.

**alone**: one process that keeps two versions of the weights and does the rule by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
import torch
from gpu_stand_in import build_stand_in
from idle_time import idle_share
from parallel_jobs import off
from ranks import Jobs, near, run_all
from unflushed_jobs import BATCHES, MICRO, RULES

from infinity.ext.versions_2bw.continuous import order_of

HOMES = ("device", "host", "nvme")
NARROW = 600_000  # bytes of the device: all blocks of a stage in one version, not in two
ELSEWHERE = (  # what is on a device that is not the processor, and whether that makes updates
    ("host", {}, False),
    ("host, with kernels", {}, True),
    ("optimizer", {"optimizer": "device"}, True),
    ("all", {"params": "device", "optimizer": "device"}, True),
)
REFUSED = {
    "max_grad_norm": "ConfigError: without_flush with max_grad_norm=1.0",
    "no room": "CapacityError: ",
    "no room goes on": "True",
    "GPipe": "ConfigError: without_flush takes torch's Schedule1F1B, not a ScheduleGPipe",
    "no loss": "ConfigError: without_flush: this schedule has no loss_fn",
    "few": "ConfigError: without_flush: 1 micro-batches for 2 stages",
    "plain optimizer": "UsageError: without_flush takes the optimizer that wrap_model returned",
    "nothing was taken": "True",
    "not a batch": "UsageError: run() takes batches (inputs, target)",
    "does not divide": "UsageError: run(): batch 0 of 6 does not divide into 4 micro-batches",
    "shapes": "UsageError: run() takes batches of one shape, these have 2",
    "numbers": "ConfigError: run(): the number of batches is 1 on rank 0 and 2 on rank 1",
    "built for another shape": (
        "run(): micro-batches of shapes [(2, 8)] for a stage that was built for [(4, 8)]"
    ),
    "no grad": "UsageError: run() trains",
    "gradients": "UsageError: run() with gradients of an earlier backward",
    "step_in_backward": "UsageError: another run inside `with optimizer.step_in_backward()`",
    "inside: save": (
        "UsageError: save_checkpoint is not available while a pipeline runs without flush"
    ),
    "inside: state_dict": (
        "UsageError: state_dict() is not available while a pipeline runs without flush"
    ),
    "inside: optimizer's": (
        "UsageError: optimizer.state_dict() is not available while a pipeline runs without flush"
    ),
    "inside: full_params": (
        "UsageError: full_params is not available while a pipeline runs without flush"
    ),
    "inside: unwrap": (
        "UsageError: unwrap_model is not available while a pipeline runs without flush"
    ),
    "inside: step": (
        "UsageError: a step of a schedule is not available while a pipeline runs without flush"
    ),
    "inside: eval": (
        "UsageError: a step of a schedule is not available while a pipeline runs without flush"
    ),
    "inside: accumulate": (
        "UsageError: infinity.accumulate is not available while a pipeline runs without flush"
    ),
    "inside: optimizer's step": (
        "UsageError: optimizer.step() is not available while a pipeline runs without flush"
    ),
    "inside: add_param_group": (
        "UsageError: add_param_group() is not available while a pipeline runs without flush"
    ),
    "inside: run": "UsageError: another run is not available while a pipeline runs without flush",
    "goes on": "was taken",
}


@pytest.fixture(scope="module")
def two(launch_folder, standing_ranks, tmp_path_factory) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    config = {home: models.at_home(home, home, launch_folder / "swap") for home in HOMES}
    jobs: dict[str, dict] = {
        f"alone:{rule}-{by}": {"rule": rule, "by": by}
        for rule in RULES
        for by in ("engine", "torch")
    }
    jobs |= {f"alone:{rule}-at once": {"rule": rule, "delay": 0} for rule in RULES}
    jobs |= {
        f"trained:{rule}-{home}": {"rule": rule, "config": config[home]}
        for rule in RULES
        for home in HOMES
    }
    jobs["trained:AdamW-flushed"] = {"rule": "AdamW", "config": config["host"], "flushes": True}
    jobs["trained:AdamW-apart"] = {
        "rule": "AdamW",
        "config": config["host"],
        "runs": [range(2), range(2, BATCHES)],
    }
    jobs["trained:AdamW-audited"] = {"rule": "AdamW", "config": config["host"] | {"audit": 1.0}}
    jobs["trained:AdamW-narrow"] = {
        "rule": "AdamW",
        "config": config["nvme"] | {"device_memory": NARROW},
    }
    halves = {"param_dtype": torch.bfloat16}
    jobs |= {
        f"trained:bf16-{home}": {"rule": "AdamW", "config": config[home] | halves} for home in HOMES
    }
    kernels = build_stand_in().__file__
    jobs |= {
        f"elsewhere:{where}": {
            "rule": "AdamW",
            "config": config["host"] | more,
            "kernels": by and kernels,
        }
        for where, more, by in ELSEWHERE
    }
    jobs |= {"made": {"config": config["host"]}, "made_refused": {}}
    jobs |= {
        f"shapes:{how}": {"config": config["host"], "anew": how == "anew"}
        for how in ("one schedule", "anew")
    }
    jobs["executed:without"] = {"config": config["host"]}
    jobs["executed:with"] = {"config": config["host"], "flushes": True}
    jobs |= {f"room:{home}": {"config": config[home]} for home in HOMES}
    jobs["room:narrow"] = {"config": config["host"] | {"device_memory": NARROW}}
    jobs["resumed"] = {"path": str(launch_folder / "checkpoint"), "config": config["nvme"]}
    jobs["refused"] = {"path": str(launch_folder / "never")}
    jobs |= {
        "one_lacks_room": {},
        "forward_inside": {},
        "warned": {},
        "forgotten": {"config": config["host"]},
    }
    jobs |= {f"cut_short:{home}": {"config": config[home], "at": 2} for home in HOMES}
    return Jobs(standing_ranks(2), "unflushed_jobs", jobs)


def merged(ranks: list[dict], what: str = "weights") -> dict[str, torch.Tensor]:
    return {name: value for rank in ranks for name, value in rank[what].items()}


@pytest.mark.parametrize("rule", RULES)
def test_pipedream_2bw_batches_follow_the_rule_bit_for_bit_from_every_home(two, rule):
    """Against one process that keeps two versions of the weights: by the engine's kernels the same
    bits, by torch's near. The failing twin: gradients of the newest weights give others."""
    expected, torchs, at_once = (
        two[f"alone:{rule}-{by}"][0] for by in ("engine", "torch", "at once")
    )
    assert off(expected["weights"], torchs["weights"]) < 1e-5
    assert off(expected["weights"], at_once["weights"]) > 1e-4
    for home in HOMES:
        ranks = two[f"trained:{rule}-{home}"]
        assert not models.differing(merged(ranks), expected["weights"]), home
        assert [loss.tolist() for loss in ranks[1]["losses"]] == [
            loss.tolist() for loss in expected["losses"]
        ]
        for rank, first in zip(ranks, two[f"trained:{rule}-device"]):
            assert not models.differing(rank["state"], first["state"])
            assert rank["steps"] == BATCHES and rank["empty"] and rank["plain"]


def test_an_audited_run_has_the_same_bits(two):
    """A forward has weights of an older version, which the newest's holds do not count."""
    audited, plain = merged(two["trained:AdamW-audited"]), merged(two["trained:AdamW-host"])
    assert not models.differing(audited, plain)


def test_a_flush_between_batches_has_gradients_of_the_newest_weights(two):
    assert not models.differing(
        merged(two["trained:AdamW-flushed"]), two["alone:AdamW-at once"][0]["weights"]
    )


def test_a_run_begins_with_one_version(two):
    """Two runs flush between them: other bits than those of one run."""
    apart, one = merged(two["trained:AdamW-apart"]), merged(two["trained:AdamW-host"])
    assert models.differing(apart, one) and off(apart, one) < 0.1


def test_sixteen_bit_weights_with_split_masters_have_the_same_bits_from_every_home(two):
    first = two["trained:bf16-device"]
    for home in ("host", "nvme"):
        for mine, theirs in zip(two[f"trained:bf16-{home}"], first):
            assert not models.differing(
                mine["weights"], theirs["weights"]
            ) and not models.differing(mine["state"], theirs["state"])
    assert 0 < off(merged(first), two["alone:AdamW-engine"][0]["weights"]) < 0.1


def test_a_window_that_holds_one_version_of_a_block_changes_no_bit(two):
    assert not models.differing(
        merged(two["trained:AdamW-narrow"]), two["alone:AdamW-engine"][0]["weights"]
    )


@pytest.mark.parametrize("where", [where for where, _, _ in ELSEWHERE])
def test_a_device_of_its_own_has_the_same_bits(two, where):
    assert not models.differing(
        merged(two[f"elsewhere:{where}"]), two["alone:AdamW-engine"][0]["weights"]
    )


def test_a_made_pipeline_runs_batches_of_a_causal_model(two):
    """Near one process with two versions of the weights, though micro-batches and batches have
    other numbers of labels."""
    for rank in two["made"]:
        assert (
            near(rank["losses"], rank["expected"], 1e-5)
            and rank["updates"] == BATCHES
            and rank["evaluates"]
        )
        assert (
            off(rank["weights"], {name: rank["expected weights"][name] for name in rank["weights"]})
            < 1e-5
        )


def test_a_made_pipeline_compares_what_it_is_to_run_on_all_ranks(two):
    """Batches on one rank alone, of another kind on one, or of several shapes: an error on both,
    and then they go on. None at all run nothing."""
    for rank in two["made"]:
        assert rank["numbers"].startswith(
            "ConfigError: run(): the number of batches is 0 on rank 0 and 1 on rank 1"
        )
        assert (
            "run() takes batches by name" in rank["names"] and "batch 0 is a tuple" in rank["names"]
        )
        assert (
            rank["lengths"].startswith("UsageError: run() takes batches of one shape")
            and rank["none"] == "[]"
        )


def test_runs_may_have_batches_of_any_shape(two):
    """The bits are those of a schedule of its own for each run, whose buffers are of its shapes
    from the start."""
    for mine, theirs in zip(two["shapes:one schedule"], two["shapes:anew"]):
        assert (
            not models.differing(mine["weights"], theirs["weights"])
            and mine["losses"] == theirs["losses"]
        )


def test_a_made_pipeline_says_what_does_not_run_without_flush(two):
    for rank in two["made_refused"]:
        assert rank["schedule"].startswith(
            "ConfigError: run() without flush is for the schedule 1F1B, this pipeline has LoopedBFS"
        )
        assert rank["tied"].startswith(
            "ConfigError: run() without flush: the first and the last stage share a table"
        )
        assert rank["schedule goes on"] == rank["tied goes on"] == "True"


def test_ranks_do_not_stand_idle_between_batches(two):
    """From what was executed: with a flush (p - 1) / m of the time that they compute, without one
    only once for all batches. The last stage goes straight from a batch to the next."""
    batches, p = 3, 2
    without, flushing = (
        idle_share(two[f"executed:{how}"], batches * MICRO) for how in ("without", "with")
    )
    assert without == pytest.approx((p - 1) / (batches * MICRO))
    assert flushing == pytest.approx((p - 1) / MICRO)
    done = [(what, number) for what, _, number in two["executed:without"][0]["done"]]
    for batch in range(1, batches):
        assert done.index(("forward", batch * MICRO)) < done.index(
            ("backward", batch * MICRO - 1)
        )  # what a flush forbids


@pytest.mark.parametrize("runs", [1, 3])
def test_four_ranks_stand_idle_once_a_run(runs):
    """In the order in which they go on, for which no rank need be there: 12 micro-batches in one
    run, or in three with a flush between them."""
    p, each = 4, 12 // runs
    ranks = [
        {
            "chunks": p,
            "done": [
                ("forward" if is_forward else "backward", stage, run * each + number)
                for run in range(runs)
                for is_forward, number in order_of(stage, p, each)
            ],
        }
        for stage in range(p)
    ]
    assert idle_share(ranks, 12) == pytest.approx((p - 1) / each)


def test_a_micro_batch_has_one_version_and_two_are_there(two):
    """Forward and backward of batch t compute, on both stages, with the weights after max(t - 1, 0)
    updates; no stage ever needs a third."""
    most = []
    for rank in two["executed:without"]:
        used: dict[int, list[int]] = {}
        for at, ((_, _, number), version) in enumerate(zip(rank["done"], rank["versions"])):
            assert version == max(number // MICRO - 1, 0)
            used.setdefault(version, []).append(at)
        spans = [(min(places), max(places)) for places in used.values()]
        most.append(
            max(sum(begin <= at <= end for begin, end in spans) for at in range(len(rank["done"])))
        )
    assert most == [2, 1]  # the last stage has none under way when it begins a batch


@pytest.mark.parametrize("home", [*HOMES, "narrow"])
def test_a_second_version_takes_the_bytes_of_the_weights_and_the_window_holds(two, home):
    for rank in two[f"room:{home}"]:
        assert (
            rank["shards"] <= rank["taken"] <= rank["shards"] + 4096 * 100
            if home != "nvme"
            else rank["shards"] <= rank["taken"]
        )
        assert rank["most"] <= rank["window"] and (
            home != "narrow" or rank["window"] < NARROW < 2 * rank["shards"]
        )
    if (
        home
        in (
            "host",
            "nvme",
        )
        # with a wide window the first stage has both there, and loads each of two versions once
    ):
        assert two[f"room:{home}"][0]["most"] == 2 * two[f"room:{home}"][0]["shards"]
        assert [rank["loads"] for rank in two[f"room:{home}"]] == [2.0, 2.0]


def test_a_run_from_a_checkpoint_has_the_bits_of_the_one_that_went_on(two):
    """By an optimizer that has the parameters' names, which are other ones on each stage."""
    for rank in two["resumed"]:
        assert not models.differing(rank["after"], rank["again"])
        assert set(rank["names"]) == set(rank["after"])


def test_a_rank_without_room_leaves_nothing_taken_on_another(two):
    first, second = two["one_lacks_room"]
    assert first["said"].startswith("PeerError: rank 1 failed: CapacityError") and second[
        "said"
    ].startswith("CapacityError: ")
    for rank in (first, second):
        assert rank["taken"] == 0 and not rank["keeps"] and rank["goes on"] == "was taken"


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_without_flush_is_refused_on_every_rank(two, what):
    for rank in two["refused"]:
        assert REFUSED[what] in rank[what], rank[what]


def test_a_forward_between_two_batches_is_refused_and_ends_the_run(two):
    """Also where somebody catches that; the engine goes on."""
    for rank in two["forward_inside"]:
        assert rank["forward"].startswith(
            "UsageError: a forward of its own is not available while a pipeline runs without flush"
        )
        assert (
            rank["run"].startswith("UsageError: this run without flush was cut short")
            and rank["steps"] == 1
        )
    assert two["forward_inside"][1]["loss"] > 0


def test_an_unwrapped_pipeline_leaves_no_engine(two):
    assert two["forgotten"] == [0, 0]


def test_rules_of_adam_are_warned_of(two):
    for rank in two["warned"]:
        assert not rank["SGD"] and not rank["momentum"]
        assert len(rank["AdamW"]) == 1 and "2606.30634" in rank["AdamW"][0]


@pytest.mark.parametrize("home", HOMES)
def test_a_run_that_is_cut_short_leaves_the_updates_that_were_made(two, home):
    """A forward raises in the third batch: the next use goes on from the newest weights, with one
    version of them."""
    for rank in two[f"cut_short:{home}"]:
        assert "the user's own" in rank["raised"]
        assert rank["steps True"] == rank["steps False"] == 2
        assert not models.differing(rank["weights True"], rank["weights False"])


@pytest.mark.slow
def test_data_ranks_and_stages_together_follow_the_rule(tmp_path):
    """Four ranks, pp2 x dp2: near one process with averaged gradients; the same bits from every
    home and way of sharding."""
    (tmp_path / "swap").mkdir()
    jobs: dict[str, dict] = {"alone:torch": {"rule": "AdamW", "by": "torch", "data_ranks": 2}}
    jobs |= {
        f"trained:{home}": {
            "rule": "AdamW",
            "config": models.at_home(home, home, tmp_path / "swap"),
        }
        for home in HOMES
    }
    others = ("gradients", "optimizer")
    jobs |= {
        f"trained:{shard}": {
            "rule": "AdamW",
            "config": {"params": "host", "optimizer": "host", "shard": shard},
        }
        for shard in others
    }
    four = run_all(tmp_path / "jobs", 4, jobs, script="unflushed_jobs.py")
    first = four["trained:device"]
    assert off(merged(first), four["alone:torch"][0]["weights"]) < 1e-4
    for how in (*HOMES, *others):
        for mine, theirs in zip(four[f"trained:{how}"], first):
            assert not models.differing(mine["weights"], theirs["weights"]), how


@pytest.mark.slow
def test_four_stages_follow_the_rule_bit_for_bit(tmp_path):
    """The first stage begins three micro-batches of a batch before the one before is over."""
    config = {"params": "host", "optimizer": "host"}
    jobs = {"alone": {"rule": "AdamW"}} | {
        f"trained:{how}": {"rule": "AdamW", "config": config | more, "pp": 4}
        for how, more in (("wide", {}), ("device", {"params": "device", "optimizer": "device"}))
    }
    four = run_all(tmp_path, 4, jobs, script="unflushed_jobs.py")
    for how in ("wide", "device"):
        assert not models.differing(merged(four[f"trained:{how}"]), four["alone"][0]["weights"]), (
            how
        )
