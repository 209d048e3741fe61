"""infinity.parallel.pipeline: models cut here, two stages over gloo; 3D where it is marked slow.

**one process**: the whole model by torch, given the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import made_pipeline_jobs
import models
import pytest
import torch
from parallel_jobs import off
from ranks import Jobs, near, run_all
from safetensors.torch import save_file

import infinity

FAMILIES = ("llama", "qwen3", "gpt2", "gemma3", "mixtral")
TIED = {"qwen3": "lm_head.weight", "gpt2": "lm_head.weight"}
RUNS = {"auto": "nvme", "1F1B": "device", "InterleavedZeroBubble": "host", "ZBVZeroBubble": "host"}
REFUSED = {
    "layers": "ConfigError: 3 layers cannot be cut into 4 chunks (pp=2, 2 on each rank): use fewer",
    "schedule": "ConfigError: schedule: there is no '2F2B'; there are auto, GPipe",
    "chunks": "ConfigError: schedule 1F1B takes 1 chunks of the model on each rank, not 2",
    "micro": "ConfigError: DualPipeV takes at least 4 micro-batches",
    "costs": "ConfigError: costs has 2 numbers, the model 4 layers",
    "chain": "ConfigError: T5ForConditionalGeneration is not cut here",
    "no loss": "ConfigError: Sequential has no loss of its own",
    "mesh": "ConfigError: pipeline takes the mesh of the whole job, with an axis pp",
    "batch": "UsageError: a batch of 6 does not divide into 4 micro-batches",
    "no labels": "UsageError: a pipeline's step takes inputs and targets",
}


LEAST = ("LoopedBFS", "1F1B", "hand-made")


@pytest.fixture(scope="module")
def two(launch_folder, standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    folder, swap = launch_folder, launch_folder / "swap"
    jobs: dict[str, dict] = {f"alone:{name}": {"name": name} for name in FAMILIES}
    for name in FAMILIES:
        for schedule, home in (
            RUNS.items()
            if name in ("llama", "qwen3")
            else (("auto", "nvme"), ("ZBVZeroBubble", "host"))
        ):
            jobs[f"piped:{name}-{schedule}"] = {
                "name": name,
                "schedule": schedule,
                "config": models.at_home(home, home, swap),
            }
    for home in ("device", "host"):
        jobs[f"piped:llama-auto-{home}"] = {
            "name": "llama",
            "schedule": "auto",
            "config": models.at_home(home, home, swap),
        }
    jobs["piped:llama-one chunk"] = {
        "name": "llama",
        "schedule": "auto",
        "chunks": 1,
        "config": models.at_home("host", "host", swap),
    }
    jobs["piped:qwen3-saved"] = {
        "name": "qwen3",
        "schedule": "auto",
        "path": str(folder / "saved"),
        "config": models.at_home("host", "host", swap),
    }
    weights = folder / "model.safetensors"
    state = made_pipeline_jobs.causal("qwen3").state_dict()
    save_file({name: value for name, value in state.items() if name != "lm_head.weight"}, weights)
    jobs["piped:qwen3-meta"] = {
        "name": "qwen3",
        "schedule": "auto",
        "weights": str(weights),
        "config": models.at_home("nvme", "host", swap),
    }
    jobs |= {"piped_chains": {}, "refused_pipelines": {}}
    jobs |= {
        f"shapes:{schedule}": {"config": models.at_home(home, home, swap), "schedule": schedule}
        for schedule, home in (("1F1B", "host"), ("auto", "nvme"))
    }
    jobs |= {
        f"saved_whole:{name}-{schedule}": {
            "name": name,
            "folder": str(folder / f"{name}-{schedule}"),
            "schedule": schedule,
            "config": models.at_home("nvme", "host", swap),
        }
        for name, schedule in (
            ("llama", "auto"),
            ("qwen3", "auto"),
            ("qwen3", "1F1B"),
            ("gpt2", "ZBVZeroBubble"),
        )
    }
    jobs |= {
        f"tied:{what}": {"config": models.at_home("nvme", "host", swap), "fault": what == "fault"}
        for what in ("ten", "fault")
    }
    jobs |= {f"least:{kind}": {"schedule": kind} for kind in LEAST}
    jobs |= {f"no_room_on:{rank}": {"at": rank} for rank in range(2)}
    jobs["memory"] = {"config": {"params": "host", "optimizer": "host"}}
    jobs["reviewed"] = {"config": models.at_home("host", "host", swap)}
    return Jobs(standing_ranks(2), "made_pipeline_jobs", jobs, folder=folder)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        (n, s)
        for n in FAMILIES
        for s in RUNS
        if n in ("llama", "qwen3") or s in ("auto", "ZBVZeroBubble")
    ],
)
def test_a_model_of_transformers_trains_as_in_one_process(two, name, schedule):
    """The loss is that of the whole batch, on every rank; one norm; a table that is the head, too,
    stays one."""
    alone, ranks = two[f"alone:{name}"][0], two[f"piped:{name}-{schedule}"]
    assert ranks[0]["losses"] == ranks[1]["losses"] and ranks[0]["norms"] == ranks[1]["norms"]
    assert near(ranks[0]["losses"][:1], alone["losses"][:1]) and near(
        ranks[0]["losses"], alone["losses"], 1e-5
    )
    assert near(ranks[0]["norms"], alone["norms"], 1e-4)
    for rank in ranks:
        assert off(rank["weights"], alone["weights"]) < 1e-3
    held = [set(rank["weights"]) for rank in ranks]
    assert held[0] | held[1] == set(alone["weights"])


@pytest.mark.parametrize("other", ["auto-device", "auto-host", "one chunk"])
def test_homes_and_cuts_change_no_bit(two, other):
    """Of losses, norms and weights, with the schedule that is taken where nobody names one. The
    failing twin adds up in another order."""
    merged = {}
    for way in ("auto", other, "InterleavedZeroBubble"):
        ranks = two[f"piped:llama-{way}"]
        weights = {name: value for rank in ranks for name, value in rank["weights"].items()}
        merged[way] = ranks[0]["losses"], ranks[0]["norms"], weights
    assert merged[other][:2] == merged["auto"][:2] and not models.differing(
        merged[other][2], merged["auto"][2]
    )
    assert models.differing(merged["InterleavedZeroBubble"][2], merged["auto"][2])


@pytest.mark.parametrize("schedule", ["auto", "1F1B", "InterleavedZeroBubble"])
def test_both_copies_of_a_tie_have_the_same_bits(two, schedule):
    first, last = two[f"piped:qwen3-{schedule}"]
    assert torch.equal(
        first["weights"]["model.embed_tokens.weight"], last["weights"]["lm_head.weight"]
    )


TABLE = 98 * 64 * 4  # bytes of its gradient


def test_a_tie_has_equal_bits_after_ten_steps_and_each_rank_sends_its_gradient_once(two):
    """The failing twin: stages that step by their own gradients part."""
    assert torch.equal(*(rank["copy"] for rank in two["tied:ten"]))
    assert [rank["sent"] for rank in two["tied:ten"]] == [TABLE, TABLE]
    assert not torch.equal(*(rank["copy"] for rank in two["tied:fault"]))


def test_a_checkpoint_is_that_of_the_whole_model(two):
    """One process loads it: a tie is one entry."""
    saved = two["piped:qwen3-saved"]
    model = made_pipeline_jobs.causal("qwen3")
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), {"params": "host"}
    )
    infinity.load_checkpoint(two["folder"] / "saved", model, optimizer)
    found = model.state_dict()
    for rank in saved:
        assert all(torch.equal(found[name], value) for name, value in rank["weights"].items())
    assert near([float(optimizer.state_dict()["state"][0]["step"])], [3.0])


def test_a_model_on_meta_is_read_from_its_file_and_never_whole(two):
    for mine, theirs in zip(two["piped:qwen3-meta"], two["piped:qwen3-auto"]):
        assert mine["losses"] == theirs["losses"]
        assert not models.differing(mine["weights"], theirs["weights"])


def test_other_chains_train_as_in_one_process(two):
    for name in ("titan", "sequential"):
        for rank in two["piped_chains"]:
            alone, piped = rank[name]
            assert near(piped, alone, 1e-5), name


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_the_numbers(two, what):
    for rank in two["refused_pipelines"]:
        assert rank[what].startswith(REFUSED[what]), rank[what]


FROZEN = (
    "a frozen first stage",
    "a frozen last stage",
    "a stage that begins frozen",
    "a frozen tie",
    *(
        f"a frozen first stage of {schedule}"
        for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ),
)


@pytest.mark.parametrize("what", ["two steps of a tie", "positions in bf16", *FROZEN])
def test_norms_are_those_of_one_process_also_when(two, what):
    """Steps without an update between them, 16-bit tables of positions, stages and ties that are
    not trained."""
    for rank in two["reviewed"]:
        ours, alone = rank[what]
        assert ours == pytest.approx(alone, rel=2e-2 if "bf16" in what else 1e-5)


def test_what_a_review_found(two):
    for rank in two["reviewed"]:
        assert len(set(rank["several schedules"])) == 1
        assert rank["another tie"].startswith(
            "ConfigError: 0.weight is one parameter in chunks 0, 1, on different ranks"
        )
        assert "adds a loss of its routers" in rank["routers"]
        assert rank["too small"].startswith("CapacityError") and rank["given back"] is True
        assert rank["its own parameter"] is True


@pytest.mark.parametrize("schedule", ["1F1B", "auto"])
def test_batches_may_have_other_lengths_in_every_step(two, schedule):
    for rank in two[f"shapes:{schedule}"]:
        alone, piped = rank["losses"]
        assert near(piped, alone, 1e-5)


@pytest.mark.parametrize("schedule", ["1F1B", "auto"])
def test_stages_with_other_batches_are_told_before_anything_runs(two, schedule):
    """Outputs of one batch would be compared with the labels of another, and nobody would see."""
    for rank in two[f"shapes:{schedule}"]:
        assert rank["refused"].startswith(
            "UsageError: ranks 0 and 1 have other batches (the inputs, the targets)"
        )
        assert "a batch of 6 does not divide into 4 micro-batches" in rank["odd"]  # on both
        assert rank["goes on"] and rank["evaluated first"][0] == rank["evaluated first"][1]


@pytest.mark.parametrize("what", ["llama-auto", "qwen3-auto", "qwen3-1F1B", "gpt2-ZBVZeroBubble"])
def test_stages_write_one_folder_that_transformers_loads(two, what):
    assert two[f"saved_whole:{what}"] == [True, True]


def test_a_machine_is_divided_as_its_stages_need(two):
    """One layer beside seven, and just what both plan: halves would not do."""
    for number, rank in enumerate(two["memory"]):
        assert rank["share"] == pytest.approx([1 / 8, 7 / 8][number], abs=1e-5)
        assert max(rank["planned"]) > rank["halves"]
        assert rank["fits"] == "was taken"


def test_what_passes_between_stages_is_charged_and_the_window_gives_way(two):
    """Four buffers of each of two shapes: 2 and 4 rows of 256 features in fp32. One that leaves no
    room for weights is refused."""
    between = 4 * (2 + 4) * 256 * 4
    for rank in two["memory"]:
        narrower, left = rank["window"]
        assert rank["between"] == between and narrower == max(0, between - left)
    assert narrower > 0  # of the seven layers
    assert (
        rank["too much"].startswith("CapacityError: the device window")
        and "Raise device_memory by" in rank["too much"]
    )


@pytest.mark.parametrize("at", range(2))
def test_an_error_on_one_rank_ends_the_step_of_hand_made_stages_on_the_other(two, at):
    """Raises in a forward of one rank, which then waits for the other: that one learns of a closed
    connection, not of its group's limit. Twin: the step before trains."""
    for said in two[f"no_room_on:{at}"]:
        assert said[at] == "CapacityError: no room here"
        other = said[1 - at]
        assert other.startswith("PeerError: rank") and "a step of the pipeline" in other
        assert "onnection" in other and "imed out" not in other


def test_the_least_of_a_pipeline_with_data_ranks_has_room_for_whole_gradients(standing_ranks):
    """What the test below does, on two stages of two ranks each, which average their gradients when
    a pass ends: no step asks for the memory of gradients."""
    four = Jobs(standing_ranks(4), "made_pipeline_jobs", {"least:data ranks": {"schedule": "1F1B"}})
    for said in four["least:data ranks"]:
        assert "gradients to be averaged" in said[0] and said[-1] == "was taken", said
        assert not any("the gradients of unit" in each for each in said)


@pytest.mark.parametrize("schedule", LEAST)
def test_the_least_that_a_pipeline_needs_is_named_in_two_errors_at_most(two, schedule):
    """The wrap names what it plans, and says that the batch's buffers come on top; the first step
    names all. The ranks train with the most that one of them says."""
    for said in two[f"least:{schedule}"]:
        assert len(said) == 3, said
        wrap, step, last = said
        assert wrap.startswith("CapacityError: device_memory is 4.0 KiB") and (
            "What passes between stages comes on top: the first step tells how much." in wrap
        )
        assert step.startswith("CapacityError: the device window of"), step
        assert "with its gradients" in step and last == "was taken"


BOUNDARY = 2 * 12 * 64 * 4  # bytes of a micro-batch of two sequences of 12, 64 features in fp32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "axes"),
    [
        (4, {"tp": 2}),
        (4, {}),
        (8, {"tp": 2}),
        (4, {"ep": 2}),
        (8, {"replicas": 2}),
        (4, {"ep": 2, "exchange": "tokens"}),
    ],
    ids=["pp2 x tp2", "pp2 x dp2", "2 x 2 x 2", "pp2 x ep2", "pp2 x hybrid", "pp2 x ep2 of tokens"],
)
def test_stages_data_ranks_and_parts_together(tmp_path, world, axes):
    """Norms of one process that is given every data rank's batch, on every rank; a boundary carries
    b s h / t."""
    swap = tmp_path / "swap"
    swap.mkdir()
    parts = (
        1 if "exchange" in axes else axes.get("tp", 1) * axes.get("ep", 1)
    )  # that a batch is divided among
    names = ("mixtral",) if "ep" in axes else ("llama", "qwen3")
    jobs: dict[str, dict] = {
        f"alone:{name}": {"name": name, "data_ranks": world // 2 // parts} for name in names
    }
    for name in names:
        jobs |= {
            f"piped:{name}-{home}": {
                "name": name,
                "schedule": "auto",
                "axes": axes,
                "config": models.at_home(home, home, swap),
            }
            for home in ("host", "nvme")
        }
    found = run_all(tmp_path / "jobs", world, jobs, script="made_pipeline_jobs.py")
    for name in names:
        alone, ranks = found[f"alone:{name}"][0], found[f"piped:{name}-host"]
        assert len({tuple(rank["norms"]) for rank in ranks}) == 1
        assert near(ranks[0]["norms"], alone["norms"], 1e-4)
        assert near(ranks[-1]["losses"], alone["losses"], 1e-4)
        assert set().union(*(rank["sent"] for rank in ranks)) == {BOUNDARY // parts}
        for mine, theirs in zip(found[f"piped:{name}-nvme"], ranks):
            assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"])
            assert not models.differing(mine["weights"], theirs["weights"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "largest"), [({"tp": 2}, TABLE // 2), ({}, 4096 * 4)], ids=["pp2 x tp2", "pp2 x dp2"]
)
def test_a_tie_sends_each_rank_its_part_of_the_gradient(axes, largest, tmp_path):
    """Of a table that t ranks have parts of, and d ranks shards of (in whole runs of 4,096
    elements): each sends its own to the one at its place in the other stage, so that a stage sends
    the table once, whatever t and d."""
    swap = tmp_path / "swap"
    swap.mkdir()
    jobs = {"tied:parts": {"config": models.at_home("nvme", "host", swap), "axes": axes}}
    ranks = run_all(tmp_path / "jobs", 4, jobs, script="made_pipeline_jobs.py")["tied:parts"]
    sent = [rank["sent"] for rank in ranks]
    assert sent[0] + sent[1] == sent[2] + sent[3] == TABLE and max(sent) == largest
    assert all(torch.equal(rank["copy"], ranks[0]["copy"]) for rank in ranks)


@pytest.mark.slow
def test_data_ranks_may_have_batches_of_other_lengths(tmp_path):
    """One has a new length while the other's is known, in each order, and evaluations between:
    stages of the one try it out, which gathers weights from the other."""
    jobs: dict[str, dict] = {
        "lengths": {
            "steps": [(12, 12), (12, 7), (9, 12), (12, 9), (12, 12)],
            "config": {"params": "host", "optimizer": "host"},
        }
    }
    for rank in run_all(tmp_path, 4, jobs, script="made_pipeline_jobs.py")["lengths"]:
        alone, piped = rank["losses"]
        assert near(piped, alone, 1e-4)


@pytest.mark.slow
def test_checkpoints_pass_between_3d_and_everything_else(tmp_path):
    """From 2 x 2 x 2 to pp2, to pp2 x dp2, and to one process; weights and moments keep their bits
    on the way."""
    config = {"params": "host", "optimizer": "host"}
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    jobs = {
        "piped": {
            "name": "qwen3",
            "schedule": "auto",
            "axes": {"tp": 2},
            "config": config,
            "path": first,
        }
    }
    saved = run_all(tmp_path / "eight", 8, jobs, script="made_pipeline_jobs.py")["piped"]
    weights = {name: value for rank in saved for name, value in rank["weights"].items()}
    for world, path, onto in ((2, first, second), (4, second, third)):
        jobs = {"reloaded": {"name": "qwen3", "path": path, "tp": 1, "onto": onto}}
        for rank in run_all(tmp_path / f"of {world}", world, jobs, script="made_pipeline_jobs.py")[
            "reloaded"
        ]:
            assert not models.differing(rank, {name: weights[name] for name in rank})
    states = []
    for path in (first, third):
        model = made_pipeline_jobs.causal("qwen3")
        model, optimizer = infinity.wrap_model(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), config
        )
        infinity.load_checkpoint(path, model, optimizer)
        assert not models.differing(model.state_dict(), weights)
        state = optimizer.state_dict()["state"]
        states.append(
            {
                f"{index} {name}": value
                for index, of_one in state.items()
                for name, value in of_one.items()
            }
        )
    assert not models.differing(*states)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_weights_apart_with_checkpointing_are_warned_of(schedule, standing_ranks):
    """Torch computes a block again for each group of its weights. Twins: without checkpointing, and
    by another schedule."""
    ranks = standing_ranks(2)

    def said(schedule: str, recomputes: bool) -> list[list[str]]:
        given = {"schedule": schedule, "recomputes": recomputes}
        return ranks.run("made_pipeline_jobs", "recomputing", given)

    for found in said(schedule, True):
        assert len(found) == 1 and f"{schedule} with gradient checkpointing" in found[0]
    assert said(schedule, False) == said("Interleaved1F1B", True) == [[], []]
