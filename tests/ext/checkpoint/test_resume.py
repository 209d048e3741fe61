"""A checkpoint resumes bit for bit, and is replaced atomically."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import (  # noqa: F401
    LR,
    SEED,
    Job,
    check_like,
    saved,
    seed_everything,
    uninterrupted,
)
from models import (
    TIERS,
    at_home,
    differing,
    leftovers,
    loss_of,
    seeded,
    start_child,
    swap_files,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn

import infinity
import infinity.ext.checkpoint.pretrained

HOMES = [(params, optimizer) for params in TIERS for optimizer in TIERS]


@pytest.mark.parametrize("homes", HOMES, ids="-".join)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(homes, uninterrupted, tmp_path, swap):
    """Method: train four steps at these homes, save, forget everything, scramble the generators,
    load into a fresh wrap at other homes, and go on; losses, weights (masters), moments and counts
    are those of one run.
    """
    seed_everything()
    Job(homes, swap).run(4).save(tmp_path / "saved")
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    others = HOMES[(HOMES.index(homes) + 4) % len(HOMES)]
    resumed = Job(others, swap, seed=SEED + 1).load(tmp_path / "saved")
    assert resumed.step == 4
    check_like(resumed, uninterrupted, 4)
    check_like(resumed.run(7), uninterrupted, 4)
    del resumed
    assert leftovers(swap) == []


def test_a_forgotten_part_would_be_seen(uninterrupted, tmp_path, swap):
    """Method: the twin; without the generators' state, or without the scheduler's, the same
    comparison raises."""
    for forget in ("random", "scheduler"):
        seed_everything()
        Job(("host", "host"), swap).run(4).save(tmp_path / "saved")
        resumed = Job(("host", "host"), swap)
        resumed.scheduler.load_state_dict = lambda state: None
        if forget == "random":
            del resumed.scheduler.load_state_dict
        resumed.load(tmp_path / "saved")
        if forget == "random":
            torch.manual_seed(5)
        with pytest.raises(AssertionError):
            check_like(resumed.run(6), uninterrupted, 4)


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
@pytest.mark.parametrize("master", ["split", "fp32", "none"])
@pytest.mark.parametrize("make", ["AdamW", "SGD-momentum", "SGD"])
def test_every_kind_of_state_resumes(make, master, dtype, tmp_path, swap):
    """Method: masters of every kind and optimizers with two, one and no moment; the resumed run has
    the same bits."""

    def build():
        model = transformer(SEED, blocks=1, dropout=0.0)
        optimizer = {
            "AdamW": lambda: torch.optim.AdamW(model.parameters(), lr=LR),
            "SGD-momentum": lambda: torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
            "SGD": lambda: torch.optim.SGD(model.parameters(), lr=LR),
        }[make]()
        return infinity.wrap_model(
            model, optimizer, at_home("nvme", "nvme", swap, param_dtype=dtype, master=master)
        )

    def go_on(model, optimizer, steps):
        for at in steps:
            loss_of(model, tokens(at)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())

    model, optimizer = build()
    go_on(model, optimizer, range(2))
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    expected = go_on(model, optimizer, range(2, 4))
    model, optimizer = build()
    assert infinity.load_checkpoint(tmp_path / "saved", model, optimizer) is None
    assert differing(go_on(model, optimizer, range(2, 4)), expected) == []


def test_saving_disturbs_nothing(uninterrupted, tmp_path, swap):
    """Method: save after every step; the run has the bits of one that never saved, and the folder
    holds one checkpoint."""
    seed_everything()
    job = Job(("nvme", "nvme"), swap)
    for until in range(1, 5):
        job.run(until).save(tmp_path / "saved")
        job.save(tmp_path / "saved")
    check_like(job, uninterrupted, 0)
    assert len(list((tmp_path / "saved").glob("infinity-*"))) == 1
    other = tmp_path / "other"
    job.save(other)
    nbytes = [
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in (tmp_path / "saved", other)
    ]
    assert nbytes[0] == pytest.approx(nbytes[1], rel=0.01)


def test_loading_back_in_the_same_process_repeats_the_run(uninterrupted, tmp_path, swap):
    """Method: save at step 3, train to 6, load, train to 6 again, twice; also with a backward in
    between whose gradients must not survive the load."""
    seed_everything()
    job = Job(("nvme", "nvme"), swap)
    job.run(3).save(tmp_path / "saved")
    for _ in range(2):
        check_like(job.run(6), uninterrupted, 3)
        loss_of(job.model, tokens(1)).backward()
        job.load(tmp_path / "saved")
        assert all(param.grad is None for param in job.model.parameters())
        assert job.step == 3


def test_a_learning_rate_that_is_a_tensor_survives(tmp_path, swap):
    """Method: param groups with a tensor as lr, and with keys of the user's own."""

    def build():
        model = transformer(SEED, blocks=1)
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": list(model.parameters()),
                    "lr": torch.tensor(LR),
                    "name": "all",
                    "tags": ("a", 1),
                }
            ]
        )
        return infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap))

    model, optimizer = build()
    optimizer.param_groups[0]["lr"].mul_(0.5)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    model, optimizer = build()
    infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    group = optimizer.param_groups[0]
    assert float(group["lr"]) == pytest.approx(LR / 2, rel=1e-6) and torch.is_tensor(group["lr"])
    assert group["name"] == "all" and group["tags"] == ("a", 1)


def test_buffers_and_unmanaged_parameters_are_saved(tmp_path, swap):
    """Method: running statistics, a buffer that no state dict has, and a parameter that was added
    after the wrap."""

    def build(value):
        model = seeded(
            SEED, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        )
        model.register_buffer("seen", torch.full((3,), float(value)), persistent=False)
        pair = infinity.wrap_model(
            model, torch.optim.AdamW(model.parameters()), at_home("nvme", "nvme", swap)
        )
        model.added = nn.Parameter(torch.full((2,), float(value)))
        return pair

    model, optimizer = build(1)
    model(torch.randn(6, 8)).sum().backward()
    optimizer.step()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    other, other_optimizer = build(2)
    infinity.load_checkpoint(tmp_path / "saved", other, other_optimizer)
    assert differing(dict(other.state_dict()), dict(model.state_dict())) == []
    assert torch.equal(other.seen, model.seen) and torch.equal(
        other.added.detach(), model.added.detach()
    )
    assert other[1].num_batches_tracked == 1


@pytest.mark.parametrize("moment", ["landed", "clipped", "accumulated"])
def test_saving_between_backward_and_step_loses_nothing_silently(moment, tmp_path, swap):
    """Method: save with gradients landed and not yet applied; a resumed run that takes the step has
    the bits of the one that was not interrupted, or saving (or loading) says that gradients are not
    part of a checkpoint.
    """

    def build():
        model = transformer(SEED, blocks=1, dropout=0.0)
        return infinity.wrap_model(model, adamw(model, LR), at_home("nvme", "nvme", swap))

    model, optimizer = build()
    loss_of(model, tokens(1)).backward()
    if moment == "accumulated":
        loss_of(model, tokens(2)).backward()
    if moment == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    try:
        infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    except infinity.UsageError as error:
        assert "gradient" in str(error)
        return
    optimizer.step()
    expected = dict(model.state_dict())
    model, optimizer = build()
    infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    optimizer.step()
    assert differing(dict(model.state_dict()), expected) == []


def test_inference_wrap_loads_what_was_trained(tmp_path, swap):
    """Method: load a training checkpoint without an optimizer, into a wrap without one; outputs
    have the same bits. Or a UsageError says what to do instead."""
    seed_everything()
    job = Job(("nvme", "nvme"), swap).run(2)
    job.save(tmp_path / "saved")
    with torch.no_grad():
        expected = job.model.eval()(tokens(1))
    model, _ = infinity.wrap_model(
        transformer(0, blocks=3).eval(), None, at_home("nvme", "auto", swap, param_dtype="bf16")
    )
    try:
        extra = infinity.load_checkpoint(tmp_path / "saved", model)
    except infinity.UsageError as error:
        assert "optimizer" in str(error) or "save_pretrained" in str(error), (
            f"says not what to do: {error}"
        )
    else:
        assert extra["step"] == 2
        with torch.no_grad():
            assert torch.equal(model(tokens(1)), expected)


def train_and_save(path: Path, swap: Path, homes: tuple[str, str], steps: int) -> None:
    seed_everything()
    job = Job(homes, swap)
    for until in range(1, steps + 1):
        job.run(until).save(path)


def kill_after(child: int, path: Path, delay: float) -> None:
    """Waits for the first checkpoint, then ``delay`` seconds, then kills."""
    deadline = time.monotonic() + 60
    while not (path / "manifest.json").exists():
        assert time.monotonic() < deadline, "no checkpoint within a minute"
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)


def kill_and_resume(moment: int, uninterrupted: dict, tmp_path: Path, swap: Path) -> int:
    path = tmp_path / f"saved-{moment}"
    child, reader = start_child(lambda: train_and_save(path, swap, HOMES[moment % 9], 16))
    try:
        kill_after(child, path, random.Random(SEED + moment).uniform(0.0, 0.6))
    finally:
        os.waitpid(child, 0)
        os.close(reader)
    assert os.listdir(swap) == []
    job = Job(("nvme", "nvme"), swap).load(path)
    reached = job.step
    assert 1 <= reached <= 16
    check_like(job, uninterrupted, reached)
    until = min(16, reached + 2)
    check_like(job.run(until), uninterrupted, reached)
    job.save(path)
    assert (
        len(list(path.glob("infinity-*"))) == 1
        and sorted(p.name for p in path.iterdir())[1] == "manifest.json"
    )
    del job
    assert leftovers(swap) == []
    return reached


@pytest.mark.parametrize("moment", range(8))
def test_a_killed_job_resumes_from_its_last_checkpoint(moment, uninterrupted, tmp_path, swap):
    """Method: a child trains and saves to one path in a loop and is killed by SIGKILL at a seeded
    random moment; what is there loads into a fresh wrap, equals the uninterrupted run at its step,
    and goes on with its bits; the killed job's swap folder is removed by the wrap, and what its
    last save left by the next save."""
    print("resumed from step", kill_and_resume(moment, uninterrupted, tmp_path, swap))


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(8, 60))
def test_a_job_killed_at_many_more_moments_resumes(moment, uninterrupted, tmp_path, swap):
    """Method: as above."""
    kill_and_resume(moment, uninterrupted, tmp_path, swap)


CALLS = ["os.replace", "os.fsync", "shutil.rmtree", "start_file", "json.dumps"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error",
    [(OSError, 28, "No space left on device"), (KeyboardInterrupt,), (MemoryError,)],
    ids=["full", "interrupt", "memory"],
)
def test_a_save_that_fails_leaves_the_old_checkpoint(call, error, tmp_path, swap, monkeypatch):
    """Method: let every n-th call of what a save is made of fail, for all n; the old checkpoint
    loads (or the new one, once it is in place), nothing half-written stays, and the next save
    works."""
    import infinity.ext.checkpoint.publish as module

    seed_everything()
    job = Job(("host", "host"), swap)
    job.run(1).save(tmp_path / "saved")
    old = job.state()
    job.run(2)
    new = job.state()
    owner, name = {
        "os.replace": (os, "replace"),
        "os.fsync": (os, "fsync"),
        "shutil.rmtree": (shutil, "rmtree"),
        "start_file": (module, "start_file"),
        "json.dumps": (json, "dumps"),
    }[call]
    original = getattr(owner, name)
    for failing in range(40):
        calls = []

        def fail(*args, **kwargs):
            calls.append(1)
            if len(calls) == failing + 1:
                raise error[0](*error[1:])
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            try:
                job.save(tmp_path / "saved")
            except infinity.StorageError as raised:
                assert error[0] is OSError and raised.errno == 28
            except (KeyboardInterrupt, MemoryError, OSError) as raised:
                assert not isinstance(raised, OSError), f"{raised!r} instead of StorageError"
        if len(calls) <= failing:
            break
        other = Job(("host", "host"), swap)
        step = infinity.load_checkpoint(tmp_path / "saved", other.model, other.optimizer)["step"]
        assert differing(other.state(), {1: old, 2: new}[step]) == []
        if step == 2:
            break
    job.run(3).save(tmp_path / "saved")
    assert Job(("host", "host"), swap).load(tmp_path / "saved").step == 3
    assert len(list((tmp_path / "saved").glob("infinity-*"))) == 1


def test_saving_touches_nothing_of_the_users(tmp_path, swap):
    """Method: save into a folder that holds files and folders of the user's own, some named
    data-...; all are there afterwards, with what is in them."""
    place = tmp_path / "run"
    for name in ("data-raw", "data-", "data", "logs", "data-0123456789ab"):
        (place / name).mkdir(parents=True)
        (place / name / "mine.txt").write_text("mine")
    (place / "data-set.csv").write_text("1,2")
    (place / "notes.txt").write_text("mine")
    job = Job(("host", "host"), swap)
    job.save(place)
    job.run(1).save(place)
    for name in ("data-raw", "data-", "data", "logs", "data-0123456789ab"):
        assert (place / name / "mine.txt").read_text() == "mine", f"{name} was removed"
    assert (place / "data-set.csv").exists() and (place / "notes.txt").exists()


def test_places_that_cannot_be_written(tmp_path, swap):
    """Method: save under a regular file and onto one; StorageError with errno and path, which is
    also an OSError."""
    (tmp_path / "file").write_text("mine")
    job = Job(("host", "host"), swap)
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(infinity.StorageError) as raised:
            job.save(place)
        assert raised.value.errno and str(tmp_path / "file") in str(raised.value)
        assert isinstance(raised.value, OSError)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_living_jobs_swap_file_is_left_alone(uninterrupted, tmp_path, swap):
    """Method: a child trains on the folder while others wrap and finish there; its swap file stays,
    and its numbers are right."""

    def train():
        seed_everything()
        job = Job(("nvme", "nvme"), swap)
        (tmp_path / "almost").write_text(str(len(swap_files(swap))))
        os.rename(tmp_path / "almost", tmp_path / "ready")
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return {n: t.clone() for n, t in job.run(3).state().items()}, dict(job.losses)

    def live():
        state, losses = train()
        assert differing(state, uninterrupted[3][0]) == [] and losses == uninterrupted[3][1]
        return "right"

    child, reader = start_child(live)
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "ready").read_text() == "1"
    for _ in range(2):
        seed_everything()
        Job(("nvme", "nvme"), swap).run(1)
        assert leftovers(swap) == [] and len(swap_files(swap, child)) == 1
    (tmp_path / "go").write_text("")
    with os.fdopen(reader, "rb") as pipe:
        assert b"right" in pipe.read()
    os.waitpid(child, 0)
    Job(("nvme", "nvme"), swap)
    assert leftovers(swap) == []
