"""Checkpoints: what is saved is whole, and a run that goes on from it has the bits of one that was never interrupted.

Words used here: **home**, **child** as in `models.py`. **the job**: seven blocks with dropout, computing in bf16, AdamW
with a schedule, no seeding inside the loop: only saved random state can make a resumed run meet the same noise.
**uninterrupted**: the job's weights, moments and losses after every step, in one go.
"""

from __future__ import annotations

import copy
import errno
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    with_least,
)
from runs import adamw
from torch import nn

import infinity
import infinity.checkpoint.pretrained
from infinity.checkpoint import manifest

SEED = 40
LR = 1e-2
HOMES = [(params, optimizer) for params in TIERS for optimizer in TIERS]


class Job:
    """A wrapped model, its optimizer and its scheduler, and the loop around them."""

    def __init__(self, homes: tuple[str, str], folder: Path, *, seed: int = SEED, **more: Any) -> None:
        model = transformer(seed, blocks=more.pop("blocks", 3))
        optimizer = adamw(model, LR)
        config = {"param_dtype": "bf16", **at_home(*homes, folder), **more}
        config = with_least(model, optimizer, config) if "nvme" in homes else config
        self.model, self.optimizer = infinity.wrap_model(model, optimizer, config)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=LR, total_steps=64)
        self.losses: dict[int, float] = {}
        self.step = 0

    def run(self, until: int) -> Job:
        while self.step < until:
            # Data by the step's number, noise from the generators.
            loss = loss_of(self.model, tokens(SEED + self.step))
            loss = loss * (1 + 1e-3 * random.random() + 1e-3 * float(np.random.rand()))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses[self.step] = loss.item()
            self.step += 1
        return self

    def save(self, path: Path) -> None:
        extra = {"step": self.step, "scheduler": self.scheduler.state_dict()}
        infinity.save_checkpoint(path, self.model, self.optimizer, extra)

    def load(self, path: Path) -> Job:
        extra = infinity.load_checkpoint(path, self.model, self.optimizer)
        self.step = extra["step"]
        self.scheduler.load_state_dict(extra["scheduler"])
        return self

    def state(self) -> dict[str, torch.Tensor]:
        state = dict(self.model.state_dict())
        for index, entry in self.optimizer.state_dict()["state"].items():
            state |= {f"{index} {name}": torch.as_tensor(value) for name, value in entry.items()}
        return state


def seed_everything() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, tuple[dict[str, torch.Tensor], dict[int, float]]]:
    """State and losses after every one of sixteen steps."""
    torch.set_num_threads(1)
    seed_everything()
    job = Job(("device", "device"), tmp_path_factory.mktemp("none"))
    return {until: (job.run(until).state(), dict(job.losses)) for until in range(17)}


def check_like(job: Job, uninterrupted: dict, first: int) -> None:
    state, losses = uninterrupted[job.step]
    assert {at: loss for at, loss in losses.items() if at >= first} == {a: x for a, x in job.losses.items() if a >= first}
    assert differing(job.state(), state) == []


# ---------------------------------------------------------------------------------------------------------------------
# Resuming
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("homes", HOMES, ids="-".join)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(homes, uninterrupted, tmp_path, swap):
    """Method: train four steps at these homes, save, forget everything, scramble the generators, load into a fresh wrap
    at other homes, and go on; losses, weights (masters), moments and counts are those of one run."""
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
    """Method: the twin; without the generators' state, or without the scheduler's, the same comparison raises."""
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
    """Method: masters of every kind and optimizers with two, one and no moment; the resumed run has the same bits."""

    def build():
        model = transformer(SEED, blocks=1, dropout=0.0)
        optimizer = {
            "AdamW": lambda: torch.optim.AdamW(model.parameters(), lr=LR),
            "SGD-momentum": lambda: torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
            "SGD": lambda: torch.optim.SGD(model.parameters(), lr=LR),
        }[make]()
        return infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap, param_dtype=dtype, master=master))

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
    """Method: save after every step; the run has the bits of one that never saved, and the folder holds one
    checkpoint."""
    seed_everything()
    job = Job(("nvme", "nvme"), swap)
    for until in range(1, 5):
        job.run(until).save(tmp_path / "saved")
        job.save(tmp_path / "saved")
    check_like(job, uninterrupted, 0)
    assert len(list((tmp_path / "saved").glob("infinity-*"))) == 1
    other = tmp_path / "other"
    job.save(other)
    nbytes = [sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in (tmp_path / "saved", other)]
    assert nbytes[0] == pytest.approx(nbytes[1], rel=0.01)


def test_loading_back_in_the_same_process_repeats_the_run(uninterrupted, tmp_path, swap):
    """Method: save at step 3, train to 6, load, train to 6 again, twice; also with a backward in between whose
    gradients must not survive the load."""
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
            [{"params": list(model.parameters()), "lr": torch.tensor(LR), "name": "all", "tags": ("a", 1)}]
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
    """Method: running statistics, a buffer that no state dict has, and a parameter that was added after the wrap."""

    def build(value):
        model = seeded(SEED, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
        model.register_buffer("seen", torch.full((3,), float(value)), persistent=False)
        pair = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), at_home("nvme", "nvme", swap))
        model.added = nn.Parameter(torch.full((2,), float(value)))
        return pair

    model, optimizer = build(1)
    model(torch.randn(6, 8)).sum().backward()
    optimizer.step()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    other, other_optimizer = build(2)
    infinity.load_checkpoint(tmp_path / "saved", other, other_optimizer)
    assert differing(dict(other.state_dict()), dict(model.state_dict())) == []
    assert torch.equal(other.seen, model.seen) and torch.equal(other.added.detach(), model.added.detach())
    assert other[1].num_batches_tracked == 1


@pytest.mark.parametrize("moment", ["landed", "clipped", "accumulated"])
def test_saving_between_backward_and_step_loses_nothing_silently(moment, tmp_path, swap):
    """Method: save with gradients landed and not yet applied; a resumed run that takes the step has the bits of the one
    that was not interrupted, or saving (or loading) says that gradients are not part of a checkpoint."""

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
    """Method: load a training checkpoint without an optimizer, into a wrap without one; outputs have the same bits.
    Or a UsageError says what to do instead."""
    seed_everything()
    job = Job(("nvme", "nvme"), swap).run(2)
    job.save(tmp_path / "saved")
    with torch.no_grad():
        expected = job.model.eval()(tokens(1))
    model, _ = infinity.wrap_model(transformer(0, blocks=3).eval(), None, at_home("nvme", "auto", swap, param_dtype="bf16"))
    try:
        extra = infinity.load_checkpoint(tmp_path / "saved", model)
    except infinity.UsageError as error:
        assert "optimizer" in str(error) or "save_pretrained" in str(error), f"says not what to do: {error}"
    else:
        assert extra["step"] == 2
        with torch.no_grad():
            assert torch.equal(model(tokens(1)), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Atomicity
# ---------------------------------------------------------------------------------------------------------------------


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
    assert len(list(path.glob("infinity-*"))) == 1 and sorted(p.name for p in path.iterdir())[1] == "manifest.json"
    del job
    assert leftovers(swap) == []
    return reached


@pytest.mark.parametrize("moment", range(8))
def test_a_killed_job_resumes_from_its_last_checkpoint(moment, uninterrupted, tmp_path, swap):
    """Method: a child trains and saves to one path in a loop and is killed by SIGKILL at a seeded random moment; what
    is there loads into a fresh wrap, equals the uninterrupted run at its step, and goes on with its bits; the killed
    job's swap folder is removed by the wrap, and what its last save left by the next save."""
    print("resumed from step", kill_and_resume(moment, uninterrupted, tmp_path, swap))


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(8, 60))
def test_a_job_killed_at_many_more_moments_resumes(moment, uninterrupted, tmp_path, swap):
    """Method: as above."""
    kill_and_resume(moment, uninterrupted, tmp_path, swap)


CALLS = ["os.replace", "os.fsync", "shutil.rmtree", "save_file", "json.dumps"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()], ids=["full", "interrupt", "memory"]
)
def test_a_save_that_fails_leaves_the_old_checkpoint(call, error, tmp_path, swap, monkeypatch):
    """Method: let every n-th call of what a save is made of fail, for all n; the old checkpoint loads (or the new one,
    once it is in place), nothing half-written stays, and the next save works."""
    import infinity.checkpoint.save as module

    seed_everything()
    job = Job(("host", "host"), swap)
    job.run(1).save(tmp_path / "saved")
    old = job.state()
    job.run(2)
    new = job.state()
    owner, name = {
        "os.replace": (os, "replace"), "os.fsync": (os, "fsync"), "shutil.rmtree": (shutil, "rmtree"),
        "save_file": (module, "save_file"), "json.dumps": (json, "dumps"),
    }[call]  # fmt: skip
    original = getattr(owner, name)
    for failing in range(40):
        calls = []

        def fail(*args, **kwargs):
            calls.append(1)
            if len(calls) == failing + 1:
                raise error
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            try:
                job.save(tmp_path / "saved")
            except infinity.StorageError as raised:
                assert isinstance(error, OSError) and raised.errno == 28
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
    """Method: save into a folder that holds files and folders of the user's own, some named data-...; all are there
    afterwards, with what is in them."""
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
    """Method: save under a regular file and onto one; StorageError with errno and path, which is also an OSError."""
    (tmp_path / "file").write_text("mine")
    job = Job(("host", "host"), swap)
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(infinity.StorageError) as raised:
            job.save(place)
        assert raised.value.errno and str(tmp_path / "file") in str(raised.value)
        assert isinstance(raised.value, OSError)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_living_jobs_swap_file_is_left_alone(uninterrupted, tmp_path, swap):
    """Method: a child trains on the folder while others wrap and finish there; its swap file stays, and its numbers are
    right."""

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


# ---------------------------------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of the job at step 2; to be copied, not changed."""
    torch.set_num_threads(1)
    seed_everything()
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    Job(("host", "host"), path.parent).run(2).save(path)
    return path


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)


def data_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json")


DAMAGES: dict[str, Callable[[Path], Path]] = {}


def damage(do: Callable[[Path], Path]) -> Callable:
    DAMAGES[do.__name__] = do
    return do


@damage
def truncated(path):
    file = data_files(path)[1]
    os.truncate(file, file.stat().st_size // 2)
    return file


@damage
def truncated_to_nothing(path):
    file = data_files(path)[-1]
    os.truncate(file, 0)
    return file


@damage
def longer(path):
    file = data_files(path)[0]
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    return file


@damage
def missing(path):
    file = data_files(path)[-1]
    file.unlink()
    return file


@damage
def missing_other(path):
    file = next(file for file in data_files(path) if file.name == "other.safetensors")
    file.unlink()
    return file


@damage
def flipped_at_the_end(path):
    file = data_files(path)[-1]
    flip(file, -1, 3)
    return file


@damage
def flipped_in_the_header(path):
    file = data_files(path)[0]
    flip(file, 20)
    return file


@damage
def swapped_files(path):
    one, other = [file for file in data_files(path) if file.name.startswith("unit")][:2]
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return one


@damage
def manifest_truncated(path):
    file = path / "manifest.json"
    os.truncate(file, file.stat().st_size - 7)
    return file


@damage
def manifest_empty(path):
    (path / "manifest.json").write_text("")
    return path / "manifest.json"


@damage
def manifest_binary(path):
    (path / "manifest.json").write_bytes(bytes(range(256)))
    return path / "manifest.json"


@damage
def manifest_is_a_list(path):
    (path / "manifest.json").write_text("[1, 2]")
    return path / "manifest.json"


@damage
def manifest_nan(path):
    return edit_manifest(path, lambda text: re.sub(r'"step_index": \d+', '"step_index": NaN', text))


@damage
def manifest_infinity(path):
    return edit_manifest(path, lambda text: text.replace('"nbytes": ', '"nbytes": Infinity, "was": ', 1))


@damage
def manifest_another_step(path):
    return edit_manifest(path, lambda text: text.replace('"step": 2', '"step": 3', 1))


@damage
def manifest_another_rate(path):
    return edit_manifest(path, lambda text: re.sub(r'\["lr", 0\.(\d)', lambda m: f'["lr", 0.{(int(m[1]) + 1) % 10}', text, count=1))


@damage
def manifest_another_extra(path):
    return edit_manifest(path, lambda text: text.replace('"extra": {"$dict": [["step", 2]', '"extra": {"$dict": [["step", 6]', 1))


@damage
def manifest_another_random_state(path):
    return edit_manifest(path, lambda text: re.sub(r'("python": \[\d+, \[)(\d)', lambda m: m[1] + str((int(m[2]) + 1) % 10), text))


@damage
def manifest_without_a_key(path):
    return edit_manifest(path, lambda text: text.replace('"random"', '"rndom"', 1))


@damage
def manifest_wrong_type(path):
    return edit_manifest(path, lambda text: re.sub(r'"files": \{', '"files": 3, "wrong": {', text, count=1))


@damage
def manifest_entry_without_checksum(path):
    return edit_manifest(path, lambda text: text.replace('"crc32c"', '"crc32d"', 1))


@damage
def manifest_leads_elsewhere(path):
    return edit_manifest(path, lambda text: re.sub(r'"data": "', '"data": "../', text, count=1))


@damage
def data_folder_missing(path):
    folder = next(path.glob("infinity-*"))
    shutil.rmtree(folder)
    return folder


def edit_manifest(path: Path, edit: Callable[[str], str]) -> Path:
    file = path / "manifest.json"
    text = file.read_text()
    assert edit(text) != text, "the damage did nothing"
    file.write_text(edit(text))
    return file


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Job:
    """A job that a failed load must leave alone."""
    torch.set_num_threads(1)
    return Job(("host", "host"), tmp_path_factory.mktemp("none"), seed=SEED + 1).run(1)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_a_corruption_error_and_changes_nothing(kind, saved, intact, tmp_path):
    """Method: truncate, lengthen, remove, swap or flip files, and edit the manifest; loading raises CorruptionError
    naming the file, and model, optimizer and generators have every bit they had."""
    path = tmp_path / "checkpoint"
    shutil.copytree(saved, path)
    file = DAMAGES[kind](path)
    before, groups = intact.state(), copy.deepcopy(intact.optimizer.state_dict()["param_groups"])
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(infinity.CorruptionError, match=re.escape(file.name)):
        infinity.load_checkpoint(path, intact.model, intact.optimizer)
    assert differing(intact.state(), before) == []
    assert intact.optimizer.state_dict()["param_groups"] == groups
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()


def test_an_intact_copy_loads(saved, tmp_path, swap, uninterrupted):
    """Method: the twin; a copy of the checkpoint, elsewhere and unchanged, loads and goes on."""
    shutil.copytree(saved, tmp_path / "moved")
    check_like(Job(("nvme", "nvme"), swap).load(tmp_path / "moved").run(3), uninterrupted, 2)


@pytest.mark.parametrize("at", range(12))
def test_any_flipped_bit_is_found(at, saved, intact, tmp_path):
    """Method: flip one seeded bit of one file of the checkpoint, manifest included; loading raises an InfinityError
    and changes nothing, or (a bit of white space) loads the very values that were saved."""
    path = tmp_path / "checkpoint"
    shutil.copytree(saved, path)
    generator = random.Random(SEED + at)
    file = generator.choice([path / "manifest.json", *data_files(path)])
    where, bit = generator.randrange(file.stat().st_size), generator.randrange(8)
    print("flips bit", bit, "of byte", where, "of", file.name)
    flip(file, where, bit)
    before = intact.state()
    with pytest.raises(infinity.InfinityError):
        infinity.load_checkpoint(path, intact.model, intact.optimizer)
    assert differing(intact.state(), before) == []


ODD = st.one_of(st.none(), st.booleans(), st.integers(-3, 2**40), st.floats(), st.text(max_size=3), st.just([]), st.just({}))


def replaced(content: Any, path: list[int], odd: Any) -> Any:
    """``content`` with the part that ``path`` leads to replaced, or dropped."""
    if not path or not isinstance(content, (dict, list)) or not content:
        return odd
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = keys[path[0] % len(keys)]
    changed = dict(content) if isinstance(content, dict) else list(content)
    if odd == {} and len(path) == 1:
        del changed[key]
    else:
        changed[key] = replaced(content[key], path[1:], odd)
    return changed


@settings(max_examples=60, deadline=None)
@given(path=st.lists(st.integers(0, 40), max_size=5), odd=ODD)
def test_no_manifest_gets_through_unchecked(saved, intact, path, odd):
    """Method: replace or drop any part of a good manifest and seal it again, so that its checksum is right; loading
    raises an InfinityError, with every bit as it was, or (where the part does not matter) loads."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "checkpoint")
        shutil.copytree(saved, copied, copy_function=os.link)
        content = json.loads((saved / "manifest.json").read_text())
        content.pop("crc32c")
        try:
            sealed = manifest.seal_manifest(replaced(content, path, odd))
        except (TypeError, ValueError, AttributeError):
            return  # no manifest at all: other tests have those
        os.remove(copied / "manifest.json")
        (copied / "manifest.json").write_bytes(sealed)
        before = intact.state()
        try:
            infinity.load_checkpoint(copied, intact.model, intact.optimizer)
        except infinity.InfinityError:
            assert differing(intact.state(), before) == []
        else:
            infinity.load_checkpoint(saved, intact.model, intact.optimizer)


def test_no_checkpoint_there_is_a_typed_error(intact, tmp_path):
    """Method: a folder that is not there, an empty one, and a file."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("none", "empty", "file"):
        with pytest.raises(infinity.InfinityError, match=name):
            infinity.load_checkpoint(tmp_path / name, intact.model, intact.optimizer)


OTHERS: dict[str, Callable[[], tuple[nn.Module, Callable]]] = {
    "more blocks": lambda: (transformer(SEED, blocks=4), adamw),
    "fewer blocks": lambda: (transformer(SEED, blocks=2), adamw),
    "wider": lambda: (transformer(SEED, blocks=3, width=32), adamw),
    "another class": lambda: (nn.Sequential(nn.Linear(4, 4)), adamw),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model_names_the_parameters(other, saved, tmp_path, swap):
    """Method: load into models with other parameters; UsageError names some, and the model is as it was."""
    model, make = OTHERS[other]()
    model, optimizer = infinity.wrap_model(model, make(model, LR), at_home("nvme", "nvme", swap, param_dtype="bf16"))
    before = dict(model.state_dict())
    with pytest.raises(infinity.UsageError) as raised:
        infinity.load_checkpoint(saved, model, optimizer)
    assert any(name in str(raised.value) for name in ("blocks.", "weight", "positions")), str(raised.value)
    assert differing(dict(model.state_dict()), before) == []


@pytest.mark.parametrize(
    "change",
    [
        {"param_dtype": None},
        {"param_dtype": "fp16"},
        {"master": "fp32"},
        {"moments": "bf16"},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_precision_is_refused_or_converted(change, saved, uninterrupted, tmp_path, swap):
    """Method: load into the same model with another dtype, master or moments; a UsageError says what differs, or the
    fp32 values of the masters arrive."""
    try:
        job = Job(("nvme", "nvme"), swap, seed=SEED + 1, **change)
        before = job.state()
        job.load(saved)
    except infinity.UsageError as error:
        assert any(word in str(error) for word in ("dtype", "master", "moments")), str(error)
        assert differing(job.state(), before) == []
    else:
        masters = {name: value for name, value in uninterrupted[2][0].items() if " " not in name}
        assert differing({name: job.state()[name] for name in masters}, masters) == []


@pytest.mark.parametrize("make", ["SGD", "groups", "Lion-like", "Adam"])
def test_a_checkpoint_of_another_optimizer_is_refused(make, saved, tmp_path, swap):
    """Method: load AdamW's checkpoint into SGD with momentum, into other groups, into another rule; its moments mean
    nothing there, so a UsageError must say so before anything is changed."""
    model = transformer(SEED + 1, blocks=3)
    optimizer = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        "groups": lambda: torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        "Lion-like": lambda: Lion(model.parameters()),
        "Adam": lambda: torch.optim.Adam(model.parameters()),
    }[make]()
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", swap, param_dtype="bf16"))
    before, keys = dict(model.state_dict()), set(optimizer.param_groups[0])
    with pytest.raises(infinity.UsageError):
        infinity.load_checkpoint(saved, model, optimizer)
    assert differing(dict(model.state_dict()), before) == [] and set(optimizer.param_groups[0]) == keys


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None: ...


def test_buffers_of_another_shape_are_refused_before_anything_changes(tmp_path, swap):
    """Method: a checkpoint whose parameters fit and whose buffer does not; a typed error, and no weight was changed."""

    def build(size, seed):
        model = seeded(seed, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model.register_buffer("table", torch.zeros(size))
        return infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), at_home("nvme", "nvme", swap))

    infinity.save_checkpoint(tmp_path / "saved", *build(3, 0))
    model, optimizer = build(5, 1)
    before = dict(model.state_dict())
    with pytest.raises(infinity.InfinityError, match="table"):
        infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert differing(dict(model.state_dict()), before) == []


def test_unwrapped_objects_are_refused(tmp_path, swap):
    """Method: save and load with a plain model, and with another model's optimizer."""
    one, other = Job(("host", "host"), swap), Job(("host", "host"), swap)
    plain = transformer(SEED)
    for call in (
        lambda: infinity.save_checkpoint(tmp_path / "x", plain),
        lambda: infinity.load_checkpoint(tmp_path / "x", plain),
        lambda: infinity.save_checkpoint(tmp_path / "x", one.model, other.optimizer),
        lambda: infinity.save_checkpoint(tmp_path / "x", one.model, adamw(plain, LR)),
        lambda: infinity.save_pretrained(plain, tmp_path / "x"),
    ):
        with pytest.raises(infinity.UsageError):
            call()
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------------------------------------------------------------
# extra
# ---------------------------------------------------------------------------------------------------------------------

TENSOR = torch.arange(6, dtype=torch.float32).view(2, 3)

EXTRAS: dict[str, Any] = {
    "none": None,
    "numbers": [0, -1, 2**80, 0.1, -0.0, 1e-300, True, False],
    "special": {"inf": math.inf, "-inf": -math.inf, "best": (math.inf, 1.5)},
    "text": ["", "äöü €", '\x00\n"\\', "$tensor", "NaN"],
    "tuples": ((), (1,), ((2, [3, (4,)]),)),
    "keys": {2: "int", "1": "str", (2, "a"): "tuple", None: "none", True: "bool", 1.5: "float"},
    "keys like marks": {"$tensor": "x", "$tuple": [1], "$dict": 2, "$float": "nan", "a": {"$dict": []}},
    "empty": {"a": {}, "b": [], "c": ()},
    "tensors": {"a": TENSOR, "b": [TENSOR.t(), (TENSOR[0, 1:], torch.tensor(7))], "c": torch.empty(0, 3)},
    "dtypes": [
        torch.ones(3, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.uint8)
    ],  # fmt: skip
    "same tensor twice": [TENSOR, TENSOR, TENSOR[1]],
    "grad": {"p": TENSOR.clone().requires_grad_()},
    "colliding names": {1: torch.ones(1), "1": torch.zeros(1), "a.b": torch.ones(2), "a": {"b": torch.zeros(2)}},
    "colliding lists": [{"0": torch.ones(1)}, [torch.zeros(1)], {"0": {"0": torch.ones(2)}}],
    "numpy": {"i": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True), "inf": np.float64(math.inf)},
    "deep": functools.reduce(lambda inner, _: {"next": [inner]}, range(60), "end"),
    "scheduler": {"base_lrs": [0.1], "last_epoch": 3, "_schedule_phases": [{"end_step": 2.5, "start_lr": "initial_lr"}]},
}


def alike(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and differing({"x": one}, {"x": other}) == []
    if isinstance(other, dict):
        return (
            isinstance(one, dict) and list(map(repr, one)) == list(map(repr, other)) and all(alike(one[k], other[k]) for k in other)
        )
    if isinstance(other, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(other, np.generic):
        return one == other.item() and type(one) in (type(other), type(other.item()))
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = nn.Linear(4, 4)
    return infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"})


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_comes_back_as_it_was(extra, small, tmp_path):
    """Method: save and load values of every kind that a checkpoint takes; types, order and bits are the same."""
    infinity.save_checkpoint(tmp_path / "saved", *small, EXTRAS[extra])
    found = infinity.load_checkpoint(tmp_path / "saved", *small)
    assert alike(found, EXTRAS[extra]), f"{found!r} instead of {EXTRAS[extra]!r}"


def test_nan_in_extra_comes_back_and_the_manifest_is_json(small, tmp_path):
    """Method: NaN as a value; the manifest is strict JSON all the same."""
    infinity.save_checkpoint(tmp_path / "saved", *small, {"loss": math.nan})
    assert math.isnan(infinity.load_checkpoint(tmp_path / "saved", *small)["loss"])
    json.loads((tmp_path / "saved" / "manifest.json").read_text(), parse_constant=pytest.fail)


def recursive() -> list:
    value: list = []
    value.append(value)
    return value


UNSAVEABLE: dict[str, Callable[[], Any]] = {
    "function": lambda: {"f": print},
    "object": lambda: [object()],
    "set": lambda: {"s": {1, 2}},
    "bytes": lambda: b"bytes",
    "module": lambda: nn.Linear(2, 2),
    "array": lambda: np.ones(3),
    "sparse": lambda: {"t": torch.eye(3).to_sparse()},
    "complex": lambda: 1j,
    "complex tensor": lambda: torch.ones(2, dtype=torch.complex128),
    "meta tensor": lambda: torch.ones(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "recursive": recursive,
    "path": lambda: Path("x"),
}


@pytest.mark.parametrize("extra", UNSAVEABLE)
def test_extra_that_cannot_be_saved_is_a_usage_error(extra, small, tmp_path):
    """Method: values that no checkpoint holds; UsageError (or the value comes back), and the old one is intact."""
    infinity.save_checkpoint(tmp_path / "saved", *small, "old")
    try:
        infinity.save_checkpoint(tmp_path / "saved", *small, UNSAVEABLE[extra]())
    except infinity.UsageError:
        assert infinity.load_checkpoint(tmp_path / "saved", *small) == "old"
        assert len(list((tmp_path / "saved").glob("infinity-*"))) == 1
    else:
        found = infinity.load_checkpoint(tmp_path / "saved", *small)
        assert type(found) is type(UNSAVEABLE[extra]())


@pytest.mark.parametrize(
    "extra",
    [lambda m, o: m.weight, lambda m, o: {"grad": m.weight.grad}, lambda m, o: o.state_dict(), lambda m, o: m.state_dict()],
    ids=["parameter", "gradient", "optimizer state", "model state"],
)
def test_extra_with_the_models_own_tensors(extra, small, tmp_path):
    """Method: a parameter at rest, its gradient, both state dicts as extra; values come back, or a UsageError."""
    model, optimizer = small
    model(torch.ones(1, 4)).sum().backward()
    value = extra(model, optimizer)
    try:
        infinity.save_checkpoint(tmp_path / "saved", model, optimizer, value)
    except infinity.UsageError:
        optimizer.zero_grad()
        return
    optimizer.zero_grad()
    found = infinity.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert type(found) is not type(None)
    if isinstance(value, dict) and "weight" in value:
        assert differing(dict(found), dict(value)) == []


# ---------------------------------------------------------------------------------------------------------------------
# save_pretrained
# ---------------------------------------------------------------------------------------------------------------------


def languages() -> list[Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 67}
    return [
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=67, n_positions=32),
        transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=False),
        transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=67, decoder_start_token_id=0),
        transformers.BertConfig(**sizes),
    ]


@pytest.mark.parametrize("which", [0, 1, 3], ids=["gpt2 tied", "llama", "bert"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("home", ["nvme", "device"])
def test_saved_models_load_in_plain_transformers(home, sharded, which, tmp_path, swap, monkeypatch):
    """Method: train a step wrapped, save_pretrained in one file or in many, load by from_pretrained; every tensor has
    the bits of the wrapped model's state dict, ties hold, no key is missing, and logits are equal."""
    transformers = pytest.importorskip("transformers")
    config = languages()[which]
    kind = {0: "AutoModelForCausalLM", 1: "AutoModelForCausalLM", 2: "AutoModelForSeq2SeqLM", 3: "AutoModelForMaskedLM"}[which]
    auto = getattr(transformers, kind)
    torch.manual_seed(SEED)
    model = auto.from_config(config)
    model, optimizer = infinity.wrap_model(model, adamw(model, LR), at_home(home, home, swap))
    ids = tokens(SEED)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if sharded:
        monkeypatch.setattr(infinity.checkpoint.pretrained, "FILE_NBYTES", 20_000)
    folder = tmp_path / "model"
    infinity.save_pretrained(model, folder)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (len(files) > 2) == sharded and (folder / "model.safetensors.index.json").exists() == sharded
    assert not list(folder.glob("*.partial"))
    plain, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    assert differing(dict(plain.state_dict()), dict(model.state_dict())) == []
    shared = {name for name, p in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}
    assert shared == {n for n, _ in plain.named_parameters(remove_duplicate=False)} - {n for n, _ in plain.named_parameters()}
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if which == 2 else {})
    with torch.no_grad():
        assert torch.equal(plain.eval()(**inputs).logits, model.eval()(**inputs).logits)
    infinity.save_pretrained(model, folder)  # again, and the other way round
    monkeypatch.undo()
    infinity.save_pretrained(model, folder)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert differing(dict(auto.from_pretrained(folder).state_dict()), dict(model.state_dict())) == []


def test_saved_models_have_the_dtypes_they_were_wrapped_with(tmp_path, swap):
    """Method: an fp32 model that computes in bf16 is saved in fp32, from its masters; a bf16 one in bf16."""
    from safetensors.torch import load_file

    for dtype, more in ((torch.float32, {"param_dtype": "bf16"}), (torch.bfloat16, {})):
        model = transformer(SEED, blocks=1).to(dtype)
        model, optimizer = infinity.wrap_model(model, adamw(model, LR), at_home("nvme", "nvme", swap, **more))
        loss_of(model, tokens(1)).backward()
        optimizer.step()
        infinity.save_pretrained(model, tmp_path / "model")
        found = load_file(tmp_path / "model" / "model.safetensors")
        state = dict(model.state_dict())
        assert {tensor.dtype for tensor in found.values()} == {dtype}
        assert differing(found, {name: state[name] for name in found}) == []
        assert set(state) - set(found) in ({"head.weight"}, {"tokens.weight"})


def test_save_pretrained_to_a_place_that_cannot_be_written(tmp_path, swap):
    """Method: under a regular file; StorageError, which is an OSError, and the model goes on."""
    (tmp_path / "file").write_text("")
    job = Job(("nvme", "nvme"), swap)
    with pytest.raises(infinity.StorageError, match="file"):
        infinity.save_pretrained(job.model, tmp_path / "file" / "model")
    job.run(1)


def test_checkpoints_hold_no_pickle(saved):
    """Method: look at every file: JSON and safetensors only."""
    for file in saved.rglob("*"):
        if file.is_file():
            assert file.suffix in (".json", ".safetensors"), file
            head = file.read_bytes()[:16]
            assert not head.startswith(b"\x80") and not head.startswith(b"PK")


def test_a_file_that_cannot_be_written_is_a_storage_error_with_its_number(tmp_path):
    """safetensors has an error of its own for what the system refuses; the twin writes."""
    from infinity.checkpoint.weight_files import save_file

    with pytest.raises(infinity.StorageError) as caught:
        save_file({"a": torch.ones(4)}, tmp_path / "gone" / "a.safetensors", metadata={"format": "pt"})
    assert caught.value.errno == errno.ENOENT and "gone" in str(caught.value)
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "a.safetensors").exists()
