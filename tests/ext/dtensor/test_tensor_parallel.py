"""Tensor parallelism over homes: two ranks over gloo, and four where it is marked slow.

**twin**: the same training by torch's own tensor parallelism, and by one process with the whole
model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import models
import parallel_jobs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from decoder import decoder
from ranks import Jobs, fall, near, what_was_saved
from safetensors.torch import load_file, save_file

import infinity
from infinity.ext.checkpoint.export import export

HOMES = ("device", "host", "nvme")
MESHES_OF_TWO = {"dp2": 2, "tp2": 1}  # and their data ranks
KINDS = {"rows": "columns and rows", "sequences": "sequences"}
REFUSED = {
    "heads": "ConfigError: blocks.0.up: 27 features cannot be cut into 2 equal parts",
    "style": "ConfigError: plan: blocks.*.up has style 'columns'; there are colwise, rowwise",
    "name": "ConfigError: plan: blocks.*.upper is not a module of Decoder",
    "two axes": "ConfigError: tensor_parallel takes the tp axis of a mesh",
    "values": "ConfigError: 26 of 40 parameters that are whole on every rank of the tp axis",
    "degrees": (
        "ConfigError: parameter embedding.weight is cut over 2 ranks, but the mesh that wrap_model"
        " was given has tp=1"
    ),
    "partial": "ConfigError: parameter norm.weight is a DTensor with placement Partial",
    "micro_batch": "ConfigError: micro_batch: not available with tensor parallelism (tp=2)",
    "recompute": "ConfigError: recompute: not available with tensor parallelism (tp=2)",
}
WINDOW = "260KiB"  # of the device: two blocks of this model's parts, not three


def config_of(home: str, swap) -> dict[str, Any]:
    return models.at_home(home, home, swap)


@pytest.fixture(scope="module")
def two(launch_folder, standing_ranks) -> Mapping[str, Any]:
    """Everything that two ranks do."""
    folder, swap = launch_folder, launch_folder / "swap"
    jobs: dict[str, dict] = {}
    for short, kind in KINDS.items():
        jobs[f"twins:{short}"] = {"kind": kind}
        jobs[f"twins:{short}-clipped"] = {"kind": kind, "clip": True}
        for home in HOMES:
            jobs[f"trained:{short}-{home}"] = {"kind": kind, "config": config_of(home, swap)}
            jobs[f"trained:{short}-{home}-clipped"] = {
                "kind": kind,
                "config": config_of(home, swap),
                "clip": "ours",
            }
        jobs[f"trained:{short}-clipped by the config"] = {
            "kind": kind,
            "config": config_of("nvme", swap) | {"max_grad_norm": 0.5},
        }
        jobs[f"trained:{short}-window"] = {
            "kind": kind,
            "config": config_of("nvme", swap) | {"device_memory": WINDOW},
        }
        jobs[f"twins:{short}-checkpointed"] = {"kind": kind, "checkpoints": True, "micro": 2}
        jobs[f"trained:{short}-checkpointed"] = {
            "kind": kind,
            "config": config_of("nvme", swap) | {"activations": "host"},
            "checkpoints": True,
            "micro": 2,
        }
        jobs[f"trained:{short}-int8"] = {
            "kind": kind,
            "config": config_of("nvme", swap) | {"moments": "int8"},
            "dtype": torch.bfloat16,
        }
        jobs[f"scaled:{short}"] = {"kind": kind, "config": config_of("nvme", swap)}
        jobs[f"round_trips:{short}"] = {"kind": kind, "config": config_of("nvme", swap)}
    jobs["norms_without:"] = {"left_out": 3, "config": config_of("host", swap)}
    jobs["trained:sequences-torch's clip"] = {
        "kind": "sequences",
        "config": config_of("host", swap),
        "clip": "torch's",
    }
    jobs["scaled:one process"] = {"kind": "columns and rows", "config": None}
    jobs["frozen"] = {"config": config_of("nvme", swap)}
    weights = folder / "model.safetensors"
    save_file(decoder(3).state_dict(), weights)
    for source, home in itertools.product(("drawn", "file"), HOMES):
        jobs[f"on_meta:{source}-{home}"] = {
            "config": config_of(home, swap),
            "weights": str(weights) if source == "file" else None,
        }
    jobs |= {f"untied:{again}": {"tie_again": again} for again in (False, True, "by the config")}
    jobs |= {f"refused:{what}": {"what": what} for what in REFUSED}
    jobs |= {
        f"edited:{how}-{home}": {"how": how, "home": home}
        for how in parallel_jobs.EDITS
        for home in HOMES
    }
    jobs["small_things"] = {}
    jobs["without_mesh"] = {"config": config_of("host", swap)}
    jobs |= {
        f"dropped:{checkpoints}": {"checkpoints": checkpoints} for checkpoints in (False, True)
    }
    host = {"params": "host", "optimizer": "host"}
    for name, dp in MESHES_OF_TWO.items():
        jobs[f"saved:{name}"] = {
            "path": str(folder / name),
            "kind": "sequences",
            "config": config_of("nvme", swap),
            "dp": dp,
        }
        coded = {"kind": "sequences", "config": host | {"moments": "int8"}, "dp": dp}
        jobs[f"saved:{name}-int8"] = {"path": str(folder / f"{name}-int8"), **coded}
    for name, (onto, dp) in itertools.product(MESHES_OF_TWO, MESHES_OF_TWO.items()):
        jobs[f"loaded:{name} onto {onto}"] = {
            "path": str(folder / name),
            "kind": "columns and rows",
            "config": host,
            "dp": dp,
        }
        coded = {"kind": "sequences", "config": host | {"moments": "int8"}, "dp": dp}
        jobs[f"loaded:{name} onto {onto}-int8"] = {"path": str(folder / f"{name}-int8"), **coded}
    return Jobs(standing_ranks(2), "parallel_jobs", jobs, needs=what_was_saved, folder=folder)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_torchs_tensor_parallelism(two, kind):
    twin = two[f"twins:{kind}"][0]
    for rank in two[f"trained:{kind}-host"]:
        assert near(rank["losses"], twin["torch"]["losses"]), (
            rank["losses"],
            twin["torch"]["losses"],
        )
        assert near(rank["losses"], twin["one process"]["losses"], 1e-4)


@pytest.mark.parametrize("clipped", ["", "-clipped"])
@pytest.mark.parametrize("kind", KINDS)
def test_homes_change_no_bit(two, kind, clipped):
    first = two[f"trained:{kind}-device{clipped}"]
    for home in HOMES:
        for mine, theirs in zip(two[f"trained:{kind}-{home}{clipped}"], first):
            assert (mine["losses"], mine["norms"], mine["again"]) == (
                theirs["losses"],
                theirs["norms"],
                theirs["again"],
            )
            assert not models.differing(mine["weights"], theirs["weights"])
            assert not models.differing(mine["moments"], theirs["moments"])
            assert mine["unwrapped"]


@pytest.mark.parametrize("job", ["nvme", "host-clipped", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_hold_in_common_has_the_same_bits_on_all(two, kind, job):
    """A vocabulary of 97 gives one rank a row more: that moves nothing that rounding at random
    could tell."""
    assert all(rank["replicas are equal"] for rank in two[f"trained:{kind}-{job}"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_few_blocks_changes_no_bit(two, kind):
    for mine, theirs in zip(two[f"trained:{kind}-window"], two[f"trained:{kind}-host"]):
        assert mine["losses"] == theirs["losses"]
        assert not models.differing(mine["weights"], theirs["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_accumulation_and_activations_at_home(two, kind):
    twin = two[f"twins:{kind}-checkpointed"][0]["torch"]
    for rank in two[f"trained:{kind}-checkpointed"]:
        assert near(rank["losses"], twin["losses"], 1e-5), (rank["losses"], twin["losses"])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_at_home_follow_the_formula(two, kind):
    """Each array has as many elements as this rank's parts, padded: half of what is cut, and all of
    the rest."""
    whole = sum(param.numel() for param in decoder().parameters())
    for rank in two[f"trained:{kind}-nvme"]:
        assert set(rank["arrays"].values()) == {rank["padded"]}
        assert rank["local"] <= rank["padded"] <= 1.2 * rank["local"] + 4 * 4096
        assert whole / 2 <= rank["local"] < 0.55 * whole
        assert set(rank["at_rest"]) == {0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_counts_each_element_once_with_the_same_bits_on_all_ranks(two, kind):
    first, second = two[f"trained:{kind}-nvme-clipped"]
    assert first["norms"] == second["norms"]
    assert near(first["norms"], two[f"twins:{kind}-clipped"][0]["one process"]["norms"])
    by_config = two[f"trained:{kind}-clipped by the config"]
    assert [rank["losses"] for rank in by_config] == [rank["losses"] for rank in (first, second)]
    assert not models.differing(by_config[0]["weights"], first["weights"])


def test_what_was_taken_out_of_the_groups_is_not_in_the_norm(two):
    norms = two["norms_without:"][0]
    assert near([norms["ours"]], [norms["plain"]]) and not near([norms["plain"]], [norms["of all"]])


def test_torchs_own_clipping_has_the_right_norm_of_stand_ins(two):
    assert near(
        two["trained:sequences-torch's clip"][0]["norms"],
        two["twins:sequences-clipped"][0]["torch"]["norms"],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_in_one_part_skips_the_step_on_all(two, kind):
    expected = two["scaled:one process"][0]
    for rank in two[f"scaled:{kind}"]:
        assert rank["scales"] == expected["scales"] == [4.0, 2.0, 2.0]
        assert near(rank["losses"], expected["losses"], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_edits_and_reads(two, kind):
    for rank in two[f"round_trips:{kind}"]:
        for what in (
            "state is of DTensors",
            "loaded",
            "goes on",
            "global tensors load",
            "full_params is right",
            "edited",
            "infers",
        ):
            assert rank[what] is True, what
        assert rank["full_params gives"] == ("DTensor", (256, 64)) and rank["shape"] == (
            (256, 64),
            True,
        )
        for what in ("to_local", "full_tensor"):
            assert "full_params(model, ['blocks.0.up.weight'])" in rank[what]


def test_adapters_beside_a_frozen_base(two):
    for rank in two["frozen"]:
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["off"] < 1e-6


# --- plans, values, refusals ---


def test_two_weights_that_were_one_are_told(two):
    """The twin: tied again, by hand or by Config(tied=), nothing is said."""
    assert any(
        "embedding.weight and head.weight have the same values" in text
        for text in two["untied:False"][0]
    )
    for again in ("True", "by the config"):
        assert not any("same values" in text for text in two[f"untied:{again}"][0])


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("source", ["drawn", "file"])
def test_a_model_on_meta_has_the_bits_of_one_process(two, source, home):
    expected = (
        two[f"on_meta:{source}-{home}"][0]["one process"]
        if source == "drawn"
        else decoder(3).state_dict()
    )
    for rank in two[f"on_meta:{source}-{home}"]:
        assert not models.differing(rank["weights"], expected)
        assert rank["same objects"]


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_the_numbers_and_the_next_wrap_works(two, what):
    for said in two[f"refused:{what}"]:
        assert said.startswith(REFUSED[what]) and "CHANGED" not in said, said


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("how", parallel_jobs.EDITS)
def test_a_weight_that_a_forward_changes_reaches_its_home(two, how, home):
    for by_torch, ours in two[f"edited:{how}-{home}"]:
        assert ours == by_torch <= 0.05 + 1e-6


def test_what_a_review_found(two):
    """Norms of infinite and of empty parts, edits that part the ranks, an input changed between two
    layers, plans and meshes that do not fit, and a generator after an exception."""
    for found in two["small_things"]:
        assert found["largest"] is True
        assert found["infinite"] == (float("inf"), True)
        assert "values of digest" in found["edit apart"]
        assert found["changed between"] < 1e-6
        assert "cut in different ways by the plan" in found["ties"][0] and found["ties"][1] is False
        assert found["seeded"] is True
        assert "mesh is a str" in found["another mesh"]
        assert "rank 0 was given" in found["other rows"] and "rank 1" in found["other rows"]


def test_the_mesh_is_found_in_the_model(two):
    assert two["without_mesh"] == [True, True]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_dropout_masks_differ_inside_a_region_only(two, checkpoints):
    first, second = two[f"dropped:{checkpoints}"][0]["masks"]
    for (inside, outside), (other_inside, other_outside) in zip(first[:2], second[:2], strict=True):
        assert outside == other_outside and inside != other_inside
    assert two[f"dropped:{checkpoints}"][0]["state"] == two[f"dropped:{checkpoints}"][1]["state"]
    if checkpoints:  # each block again, the last one first
        assert [inside for inside, _ in first[2:]] == [first[1][0], first[0][0]]


# What a fall says is promised for data ranks (ranks/test_rank_failures.py): here once, and of
# every kind where it may take long.
@pytest.mark.parametrize(
    "how",
    [
        "raises in a backward",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("killed", "raises in a forward")),
    ],
)
def test_a_rank_that_falls_ends_the_others_which_name_it(tmp_path, how):
    """In a collective of torch's own, without a launcher that ends the others first."""
    said = fall(tmp_path, how, script="parallel_jobs.py")
    told = "rank 1 (process" if how == "killed" else "rank 1 failed: ValueError: the user's own"
    assert told in said, said[-3000:]


# --- checkpoints ---


@pytest.mark.parametrize("onto", reversed(MESHES_OF_TWO))  # so that what is run first crosses over
@pytest.mark.parametrize("name", MESHES_OF_TWO)
def test_any_mesh_reads_any_other(two, name, onto):
    """bf16 with split masters and fp32 moments: weights, masters and moments have their bits; on
    the same mesh the next step too."""
    saved = two[f"saved:{name}"][0]
    for rank in two[f"loaded:{name} onto {onto}"]:
        assert rank["extra"] == "two steps"
        assert not models.differing(rank["values"], saved["values"])


@pytest.mark.parametrize(
    ("name", "onto"),
    [
        ("dp2", "tp2"),
        ("tp2", "tp2"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("dp2", "dp2"), ("tp2", "dp2")]),
    ],
)
def test_8_bit_moments_are_exact_in_the_same_parts_and_near_in_others(two, name, onto):
    saved = two[f"saved:{name}-int8"][0]
    for rank in two[f"loaded:{name} onto {onto}-int8"]:
        if name == onto:
            assert not models.differing(rank["values"], saved["values"])
            assert not models.differing(rank["after"], saved["after"])
            continue
        for key, value in saved["values"].items():
            if key.startswith("exp_avg"):
                assert (rank["values"][key] - value).abs().max() <= value.abs().max() / 8
            else:
                assert torch.equal(rank["values"][key], value), key


@pytest.mark.parametrize("name", MESHES_OF_TWO)
def test_one_process_reads_and_exports_what_ranks_wrote(two, tmp_path, name):
    saved = two[f"saved:{name}"][0]
    model = decoder(7, torch.bfloat16)
    model, optimizer = infinity.wrap_model(
        model, parallel_jobs.adamw(model), {"params": "host", "optimizer": "host"}
    )
    infinity.load_checkpoint(two["folder"] / name, model, optimizer)
    assert not models.differing(parallel_jobs.values_of(model, optimizer), saved["values"])
    infinity.unwrap_model(model, optimizer)
    export(two["folder"] / name, tmp_path / "out", dtype=torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, saved["values"][f"master/{key}"]) for key, value in found.items())
    assert found.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("name", MESHES_OF_TWO)
def test_torchs_reader_gives_global_tensors(two, name):
    saved = two[f"saved:{name}"][0]["values"]
    keys = [key for key in saved if key.partition("/")[0] in ("weight", "exp_avg", "exp_avg_sq")]
    state = {key: torch.full_like(saved[key], float("nan")) for key in keys}
    folder = next((two["folder"] / name).glob("infinity-*"))
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert not models.differing(state, {key: saved[key] for key in keys})


# --- four ranks: data and tensor parallel together ---

MESHES = {"dp4": 4, "dp2tp2": 2, "tp4": 1}


@pytest.fixture(scope="module")
def four(tmp_path_factory, standing_ranks) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("four")
    swap = folder / "swap"
    swap.mkdir()
    jobs: dict[str, dict] = {}
    for short, kind in KINDS.items():
        jobs[f"twins:{short}"] = {"kind": kind, "dp": 2, "clip": True}
        for home in HOMES:
            jobs[f"trained:{short}-{home}"] = {
                "kind": kind,
                "config": config_of(home, swap),
                "dp": 2,
                "clip": "ours",
            }
        for shard in ("optimizer", "gradients"):
            config = config_of("host", swap) | {"shard": shard}
            jobs[f"trained:{short}-{shard}"] = {
                "kind": kind,
                "config": config,
                "dp": 2,
                "clip": "ours",
            }
    host = {"params": "host", "optimizer": "host"}
    for name, dp in MESHES.items():
        jobs[f"saved:{name}"] = {
            "path": str(folder / name),
            "kind": "sequences",
            "config": config_of("nvme", swap),
            "dp": dp,
        }
    for name in MESHES:
        for onto, dp in MESHES.items():
            jobs[f"loaded:{name} onto {onto}"] = {
                "path": str(folder / name),
                "kind": "sequences",
                "config": host,
                "dp": dp,
            }
    return Jobs(standing_ranks(4), "parallel_jobs", jobs, needs=what_was_saved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_data_and_tensor_parallel_together(four, kind):
    """Norms of one process that is given both batches; the same bits from every home and for every
    way of sharding."""
    twin = four[f"twins:{kind}"][0]["one process"]
    first = four[f"trained:{kind}-host"]
    assert len({tuple(rank["norms"]) for rank in first}) == 1
    assert near(first[0]["norms"][:1], twin["norms"][:1]) and near(
        first[0]["norms"], twin["norms"], 1e-4
    )
    for what in ("device", "nvme", "optimizer", "gradients"):
        for mine, theirs in zip(four[f"trained:{kind}-{what}"], first):
            assert (mine["losses"], mine["norms"]) == (theirs["losses"], theirs["norms"])
            assert not models.differing(mine["weights"], theirs["weights"])
            assert not models.differing(mine["moments"], theirs["moments"])


@pytest.mark.slow
@pytest.mark.parametrize("onto", MESHES)
@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_of_four_reads_any_other(four, name, onto):
    saved = four[f"saved:{name}"][0]
    for rank in four[f"loaded:{name} onto {onto}"]:
        assert not models.differing(rank["values"], saved["values"])
        assert name != onto or not models.differing(rank["after"], saved["after"])
