"""State dicts, checkpoints and files of weights of several ranks.

Words used here: see `ranks` (job, launch), `rank_jobs` and `checkpoint_jobs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import models
import pytest
import rank_jobs
import torch
from rank_jobs import moments
from ranks import Jobs
from safetensors.torch import load_file, save_file

import infinity

pytestmark = pytest.mark.timeout(700)  # the launches that the tests share take minutes
MODES = ["parameters", "gradients", "optimizer"]


@pytest.fixture(scope="module")
def two(tmp_path_factory, standing_ranks) -> Mapping[str, list[Any]]:
    """What two ranks save and load."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "swap").mkdir()
    jobs: dict[str, dict] = {
        f"states:{mode}": {"shard": mode, "folder": str(folder / "swap")} for mode in MODES
    }
    jobs |= {
        f"full_disk:{rank}": {"path": str(folder / f"full-{rank}"), "full": rank} for rank in (0, 1)
    }
    jobs |= {
        f"beside:{full}": {"path": str(folder / f"beside-{full}"), "full": full}
        for full in (None, 0, 1)
    }
    jobs["running_statistics"] = {"path": str(folder / "statistics")}
    jobs["on_meta:drawn"] = {"weights": None}
    weights = folder / "model.safetensors"
    state = rank_jobs.build(7).state_dict()
    save_file({name: value for name, value in state.items() if name != "head.weight"}, weights)
    jobs["on_meta:file"] = {"weights": str(weights)}
    jobs["save"] = {
        "path": str(folder / "checkpoint"),
        "config": models.at_home("nvme", "host", folder / "swap"),
    }
    jobs["load:same"] = {
        "path": str(folder / "checkpoint"),
        "config": {"params": "host", "optimizer": "host"},
    }
    jobs["load:optimizer"] = {
        "path": str(folder / "checkpoint"),
        "config": {"params": "device", "optimizer": "device", "shard": "optimizer"},
    }
    return Jobs(
        standing_ranks(2),
        "checkpoint_jobs",
        jobs,
        needs=lambda name: ["save"] * name.startswith("load:"),
        folder=folder,
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory, standing_ranks, two) -> Mapping[str, list[Any]]:
    """The same of four ranks, which also load what two have saved."""
    folder = tmp_path_factory.mktemp("four")
    (folder / "swap").mkdir()
    jobs: dict[str, dict] = {
        "load:of-two": {
            "path": str(two["folder"] / "checkpoint"),
            "config": models.at_home("nvme", "nvme", folder / "swap"),
        },
        "save": {
            "path": str(folder / "checkpoint"),
            "config": {"params": "host", "optimizer": "host"},
        },
    }
    return Jobs(standing_ranks(4), "checkpoint_jobs", jobs, folder=folder)


def test_ranks_of_one_machine_check_each_file_of_a_checkpoint_once(standing_ranks, tmp_path):
    """And one that finds damage tells the others, before anything changed anywhere."""
    ranks = standing_ranks(2).run("checkpoint_jobs", "checked_together", {"path": str(tmp_path)})
    first, second = (rank["summed"] for rank in ranks)
    assert first and second and not first & second and first | second == ranks[0]["all"]
    kinds = sorted(rank["told"].partition(":")[0] for rank in ranks)
    assert kinds == ["CorruptionError", "PeerError"] and all(
        "CRC-32C" in rank["told"] for rank in ranks
    )
    assert all(rank["same"] for rank in ranks)


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_missed_a_load_trains_with_nobody_until_it_has_loaded(
    again, standing_ranks, tmp_path
):
    """Ctrl-C on one rank when all have agreed to load: it has its old values, of as many steps as
    the others' new ones. ``again``: these are of the same checkpoint, edited."""
    first, second = standing_ranks(2).run(
        "checkpoint_jobs", "struck_before_it_begins", {"path": str(tmp_path), "again": again}
    )
    assert (
        first["load"] == "struck"
        and second["load"].startswith("PeerError")
        and "KeyboardInterrupt" in second["load"]
    )
    for rank in (first, second):
        assert rank["forward"].startswith("UsageError") and rank["forward"].endswith(
            "load a checkpoint on all."
        ), rank["forward"]
        assert rank["again"] == "was taken" and rank["same"]


@pytest.mark.parametrize("mode", MODES)
def test_state_dicts_are_full_on_every_rank(two, mode):
    """What plain torch loads, and what comes back from edits, loads and files."""
    first, second = two[f"states:{mode}"]
    for key in ("weights", "full", "edited", "loaded"):
        assert not models.differing(first[key], second[key])
    plain = rank_jobs.build(5)
    plain.load_state_dict(first["weights"])
    torch.optim.AdamW(plain.parameters()).load_state_dict(first["optimizer"])
    assert all(torch.equal(value, first["weights"][name]) for name, value in first["full"].items())
    edited = first["edited"]
    assert (edited["positions"] == 0.25).all() and edited["blocks.3.feed.0.weight"][5, 7] == 9.0
    assert not models.differing(first["loaded"], first["weights"])
    assert "writeback=True" in first["refused"]
    assert not models.differing(moments(first["again"]), moments(first["optimizer"]))
    written = load_file(two["folder"] / "swap" / f"pretrained-{mode}" / "model.safetensors")
    assert all(torch.equal(value, first["weights"][name]) for name, value in written.items())


@pytest.mark.parametrize("case", ["load:same", "load:optimizer"])
def test_a_checkpoint_resumes_bit_for_bit(two, case):
    """Saved with ZeRO-3 from NVMe, loaded on the host with ZeRO-3, and on the device with
    ZeRO-1."""
    for saved, loaded in zip(two["save"], two[case]):
        assert loaded["extra"] == {"step": 2}
        assert torch.equal(saved["random"], loaded["random"])
        for key in ("weights", "later"):
            assert not models.differing(saved[key], loaded[key])
        assert not models.differing(moments(saved["optimizer"]), moments(loaded["optimizer"]))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_loaded_by_four(two, four):
    saved = two["save"][0]
    for loaded in four["load:of-two"]:
        assert not models.differing(loaded["weights"], saved["weights"])
        assert not models.differing(moments(loaded["optimizer"]), moments(saved["optimizer"]))


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_is_loaded_by_one(four):
    saved = four["save"][0]
    model = rank_jobs.build(9)
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host"}
    )
    infinity.load_checkpoint(four["folder"] / "checkpoint", model, optimizer)
    assert not models.differing(rank_jobs.cloned(model.state_dict()), saved["weights"])
    assert not models.differing(moments(optimizer.state_dict()), moments(saved["optimizer"]))
    infinity.unwrap_model(model, optimizer)


@pytest.mark.slow
def test_torch_distributed_checkpoint_loads_what_four_ranks_wrote(four):
    """torch's own reader puts the shards together: weights and moments, in one process without
    Infinity."""
    import torch.distributed.checkpoint as dcp

    saved = four["save"][0]
    folder = next((four["folder"] / "checkpoint").glob("infinity-*"))
    names = list(dict(rank_jobs.build().named_parameters()))
    state = {
        f"{kind}/{name}": torch.full_like(saved["weights"][name], float("nan"))
        for name in names
        for kind in ("weight", "exp_avg")
    }
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    for i, name in enumerate(names):
        assert torch.equal(state[f"weight/{name}"], saved["weights"][name])
        assert torch.equal(state[f"exp_avg/{name}"], saved["optimizer"]["state"][i]["exp_avg"])


@pytest.mark.slow
def test_a_checkpoint_that_lacks_a_ranks_file_is_refused(four, tmp_path):
    """The twin: with one rank's file of one unit gone, or cut short, nothing is loaded."""
    import shutil

    assert four["save"]
    for harm in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-8])):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(four["folder"] / "checkpoint", copy)
        harm(next(copy.glob("infinity-*/unit-00002-rank-00003.safetensors")))
        model = rank_jobs.build(9)
        before = rank_jobs.cloned(model.state_dict())
        model, optimizer = infinity.wrap_model(
            model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host"}
        )
        with pytest.raises(infinity.CorruptionError, match="rank-00003"):
            infinity.load_checkpoint(copy, model, optimizer)
        assert not models.differing(rank_jobs.cloned(model.state_dict()), before)
        infinity.unwrap_model(model, optimizer)


def test_models_on_meta_are_the_first_ranks(two):
    """Drawn from another seed on every rank: the first rank's count. From a file: its values."""
    first, second = two["on_meta:drawn"]
    assert not models.differing(first["weights"], second["weights"])
    state = rank_jobs.build(7).state_dict()
    for found in two["on_meta:file"]:
        assert not models.differing(found["weights"], rank_jobs.cloned(state))


def test_running_statistics_resume_on_every_rank(two):
    """Each rank's BatchNorm has seen its own batches: after a load it has its own statistics again,
    not the first rank's."""
    found = two["running_statistics"]
    for of_rank in found:
        assert models.differing(of_rank["resumed"], of_rank["whole"]) == []
    assert not torch.equal(
        found[0]["whole"]["1.running_mean"], found[1]["whole"]["1.running_mean"]
    )  # the twin: they do differ


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_one_rank_is_told_to_the_others(two, full):
    """The rank with the disk raises ENOSPC, the other one names it and the reason; the old
    checkpoint stands, and the next is made."""
    found = two[f"full_disk:{full}"]
    assert found[full]["said"].startswith("StorageError") and "No space left" in found[full]["said"]
    other = found[1 - full]["said"]
    assert other.startswith("PeerError") and f"rank {full}" in other and "No space left" in other, (
        other
    )
    assert all(of_rank["loaded"] == "first" and len(of_rank["names"]) == 1 for of_rank in found)


@pytest.mark.parametrize("full", [None, 0, 1])
def test_ranks_save_beside_their_training(two, full):
    """The files are those of a save that waits, though the training went on. A full disk of one
    rank is told at the next call on both; the checkpoint before stands."""
    for rank, found in enumerate(two[f"beside:{full}"]):
        assert len(found["names"][0]) == 2, found["names"]  # the manifest and its data
        if full is None:
            assert found["said"] == "saved" and found["extra"] == "second"
            assert models.differing(found["loaded"], found["saved"]) != []  # the twin: it is later
            assert found["files"][0].keys() == found["files"][1].keys()
            continue
        assert found["extra"] == "first" and models.differing(found["loaded"], found["saved"]) == []
        assert found["files"][0] == found["files"][1]
        kind = "StorageError" if rank == full else "PeerError"
        assert found["said"].startswith(kind) and "No space left" in found["said"]
        assert rank == full or f"rank {full}" in found["said"]
