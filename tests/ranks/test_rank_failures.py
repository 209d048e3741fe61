"""Ranks that fall, part or start again, each in a launch of its own; and the command line under
torchrun.

Words used here: see `ranks` (job, launch) and `rank_jobs`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import rank_jobs
import torch
from ranks import Failed, launch, launch_without, run_torchrun
from safetensors.torch import load_file

import infinity
from infinity.tools.cli import main


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("killed", "without a word: it left, or was killed"),
        ("raises", "rank 1 failed: ValueError: the user's own"),
        pytest.param(
            "raises in a forward", "rank 1 failed: KeyError: 'no such key'", marks=pytest.mark.slow
        ),
        pytest.param(
            "raises in a backward", "rank 1 failed: ZeroDivisionError", marks=pytest.mark.slow
        ),
        pytest.param(
            "has no memory", "rank 1 failed: MemoryError: 2 GiB of 1 GiB", marks=pytest.mark.slow
        ),
        pytest.param("is interrupted", "rank 1 failed: KeyboardInterrupt", marks=pytest.mark.slow),
        ("disk", "rank 1 failed: CorruptionError"),
        pytest.param("hangs", "lost its peers", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_falls_ends_the_job_on_all(tmp_path, how, told):
    """Rank 1 of 2 is killed, raises, reads a damaged disk or hangs: rank 0 ends with a PeerError
    that tells, soon, and the last checkpoint is whole."""
    jobs = {"one_falls": {"how": how, "folder": str(tmp_path)}}
    last = 0 if how == "hangs" else None
    results, ends = launch_without(tmp_path, 2, jobs, environment={"RANK_TIMEOUT": "8"}, last=last)
    assert all(status != 0 for status, _ in ends)
    failed = results["one_falls"][0]
    assert isinstance(failed, Failed) and failed.kind == "PeerError" and told in failed.text, failed
    assert float((tmp_path / "took.0").read_text()) < 30
    check_saved(tmp_path)


@pytest.mark.slow
def test_a_killed_rank_ends_a_job_of_torchrun(tmp_path):
    """torchrun ends the other rank, which may have said what it saw; the last checkpoint is
    whole."""
    jobs = {"one_falls": {"how": "killed", "folder": str(tmp_path)}}
    results, done = launch(
        tmp_path, 2, jobs, environment={"RANK_TIMEOUT": "8"}, options=("--max-restarts", "0")
    )
    assert done.returncode != 0 and results["one_falls"][1] is None
    failed = results["one_falls"][0]
    assert failed is None or failed.kind == "PeerError", failed
    check_saved(tmp_path)


@pytest.mark.parametrize(
    ("who", "how", "extra"),
    [
        (1, "killed", "first"),
        (0, "killed", "first"),
        (1, "cannot be seen", "first"),
        (1, "raises", "second"),  # the twin: its thread lives, and is waited for
    ],
)
def test_a_process_ends_though_a_rank_fell_beside_a_save(tmp_path, who, how, extra):
    """The process group's limit is ten minutes: no rank waits for it once another one is known to
    be gone. The checkpoint is the last whole one."""
    jobs = {"falls_beside_a_save": {"who": who, "how": how, "folder": str(tmp_path)}}
    _, ends = launch_without(tmp_path, 2, jobs, environment={"RANK_TIMEOUT": "600"}, seconds=120)
    status, said = ends[1 - who]
    assert status not in (0, None) and "PeerError" in said, said
    check_loaded(tmp_path, extra)


def check_loaded(folder: Path, extra: object) -> None:
    """The checkpoint is whole, and has ``extra``."""
    model = rank_jobs.build(9)
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host"}
    )
    assert infinity.load_checkpoint(folder / "checkpoint", model, optimizer) == extra
    infinity.unwrap_model(model, optimizer)


def check_saved(folder: Path) -> None:
    """The checkpoint that the job made before a rank fell is loaded."""
    assert (folder / "saved").exists()
    check_loaded(folder, {"step": 2})


@pytest.mark.slow
def test_torchrun_restarts_from_the_checkpoint(tmp_path):
    """Rank 1 is killed after its third step; the second start goes on and ends as an undisturbed
    run does."""
    results, done = launch(
        tmp_path,
        2,
        {"restarted": {"folder": str(tmp_path)}},
        environment={"RANK_TIMEOUT": "8"},
        options=("--max-restarts", "1"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model = rank_jobs.build(3)
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "device", "optimizer": "device"}
    )
    rank_jobs.in_turn(model, optimizer, 2, steps=6)
    for found in results["restarted"]:
        assert found["first"] >= 2
        assert not models.differing(found["weights"], rank_jobs.cloned(model.state_dict()))
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("keys", [False, True])
def test_ranks_come_together_though_their_torchruns_counted_other_restarts(tmp_path, keys):
    """On several machines only the torchrun whose rank died counts a restart. Twin: with that count
    in their keys, ranks wait for each other until the limit."""
    jobs = {"counted_apart": {"keys": keys}}
    results, _ = launch_without(tmp_path, 2, jobs, environment={"RANK_TIMEOUT": "4"})
    if keys:
        assert {failed.kind for failed in results["counted_apart"]} == {"PeerError"}
    else:
        assert results["counted_apart"] == [1, 1]


@pytest.mark.slow
def test_the_command_line_trains_under_torchrun_and_exports(tmp_path):
    """`torchrun -m infinity train` on two ranks: the folder that it saves, and `infinity export` of
    its checkpoint, hold the same weights; --resume goes on from it."""
    tiny = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "n_positions": 32,
        "vocab_size": 256,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    (tmp_path / "text.txt").write_text("All that is gold does not glitter. " * 200)
    command = [
        "-m",
        "infinity",
        "train",
        "--model",
        str(tmp_path / "config.json"),
        "--data",
        str(tmp_path / "text.txt"),
        "--batch-size",
        "2",
        "--sequence-length",
        "16",
        "--threads",
        "1",
        "--eval-batches",
        "1",
        "--params",
        "host",
        "--optimizer",
        "host",
        "--checkpoint",
        str(tmp_path / "checkpoint"),
        "--sample-bytes",
        "0",
        "--json",
    ]
    done = run_torchrun(2, [*command, "--steps", "3", "--out", str(tmp_path / "out")])
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)  # of the first rank alone
    assert len(report["losses"]) == 3 and {"all-gather", "reduce-scatter"} <= set(report["edges"])
    assert (
        main(
            [
                "export",
                str(tmp_path / "checkpoint"),
                str(tmp_path / "exported"),
                "--model",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    saved = load_file(tmp_path / "out" / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert saved.keys() == exported.keys() and all(
        torch.equal(saved[name], exported[name]) for name in saved
    )
    more = run_torchrun(2, [*command, "--steps", "4", "--resume"])
    assert more.returncode == 0 and len(json.loads(more.stdout)["losses"]) == 1, more.stderr[-3000:]
    damaged = next((tmp_path / "checkpoint").glob("infinity-*/unit-00001-rank-00001.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-4])
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "again")]) == 2
    assert (
        subprocess.run(
            [sys.executable, "-m", "infinity", "export", "--help"], capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("a rank skips a step", "with learning rates 0.01"),
        ("a rank has another micro-batch", "2 backwards"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("learning rates differ", "learning rates 0.1"),
                ("other parameters are read", "reading weight of blocks.1.feed.0.weight"),
                ("one rank edits", "leaving full_params with 1 tensors"),
                ("other values are loaded", "setting"),
                ("other gradients are set", "setting the gradient of positions"),
                ("one rank saves", "naming a checkpoint"),
            ]
        ),
    ],
)
def test_ranks_that_part_are_told(tmp_path, how, told):
    """Each in a launch of its own: such a job is over. Both ranks raise within seconds, naming what
    each is at."""
    results, _ = launch_without(
        tmp_path, 2, {"apart": {"how": how}}, environment={"RANK_TIMEOUT": "20"}
    )
    said = [found["said"] for found in results["apart"]]
    assert all(
        text.startswith(("UsageError", "PeerError", "RuntimeError")) or "Storage" in text
        for text in said
    ), said
    assert any(told in text for text in said), said
