"""A save beside the next forward and backward has the bytes of one that the training waits for.

Words used here: **home** as in `models.py`; **the job** as in `checkpoint_cases.py`. **held**: the
thread of a save stands before its first file, until it is let go.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import prepared
import pytest
import torch
from checkpoint_cases import Job, check_like, seed_everything, uninterrupted  # noqa: F401
from inside import parts_of
from models import leftovers

import infinity
from infinity.core.machine.tiers import Tier
from infinity.core.units.home_arrays import HomeArrays
from infinity.ext.checkpoint import background_save, publish

HOMES = [("device", "device"), ("host", "host"), ("nvme", "host"), ("nvme", "nvme")]


def started(homes: tuple[str, str], swap: Path, steps: int, **options) -> Job:
    """The job after some steps, whose host memory has room for the buffers of a save."""
    seed_everything()
    job = Job(homes, swap, **options)
    account = parts_of(job.model).ledger.accounts[Tier.HOST]
    if account.budget_nbytes is not None:
        account.budget_nbytes += 2**28
    return job.run(steps)


def files(path: Path) -> dict[str, bytes]:
    """The files of the checkpoint in ``path``, and its manifest without the data's name."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    data, _ = manifest.pop("data"), manifest.pop("crc32c")
    found = {file.name: file.read_bytes() for file in (path / data).iterdir()}
    return found | {"manifest": json.dumps(manifest).encode()}


@contextmanager
def held(monkeypatch) -> Iterator[threading.Event]:
    """Saves inside the block are held until the event is set, or the block is left."""
    go, write = threading.Event(), background_save.write_files

    def wait(*args, **kwargs):
        assert go.wait(60)
        return write(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(background_save, "write_files", wait)
        try:
            yield go
        finally:
            go.set()


def no_room(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device", "unit-00000.safetensors")


@pytest.mark.parametrize("homes", HOMES, ids="-".join)
@pytest.mark.parametrize("options", [{}, {"moments": "int8"}, {"master": "fp32", "blocks": 2}])
def test_the_bytes_are_those_of_a_save_that_waits(homes, options, tmp_path, swap, monkeypatch):
    """Claim: though two steps are made before the first file is read, as far as they can be."""
    job = started(homes, swap, 3, **options)
    random = torch.get_rng_state()
    job.save(tmp_path / "waited")
    torch.set_rng_state(random)
    with held(monkeypatch) as go:
        saving = job.save(tmp_path / "beside", wait=False)
        timer = threading.Timer(0.3, go.set)
        timer.start()
        job.run(5)
        timer.join()
    saving.wait()
    assert saving.done and saving.seconds > 0
    assert files(tmp_path / "beside") == files(tmp_path / "waited")
    job.save(tmp_path / "later")  # the twin
    assert files(tmp_path / "later") != files(tmp_path / "waited")


def test_a_save_with_an_average_has_the_bytes_of_its_begin(tmp_path, swap, monkeypatch):
    """Claim: an update of the average waits for the save as well."""
    job = started(("nvme", "nvme"), swap, 0)
    average = infinity.ema(job.model, 0.5)
    job.run(2)
    average.update()
    job.save(tmp_path / "waited")
    with held(monkeypatch) as go:
        job.save(tmp_path / "beside", wait=False)
        timer = threading.Timer(0.3, go.set)
        timer.start()
        average.update()
        timer.join()
    infinity.save_checkpoint(tmp_path / "next", job.model, job.optimizer)
    beside, waited = files(tmp_path / "beside"), files(tmp_path / "waited")
    assert beside.keys() == waited.keys() and any(name.startswith("average") for name in beside)
    assert all(beside[name] == waited[name] for name in beside if name != "manifest")


@pytest.mark.parametrize("homes", HOMES, ids="-".join)
def test_the_run_has_the_bits_of_one_that_never_saved(homes, uninterrupted, tmp_path, swap):
    job = started(homes, swap, 0)
    for until in range(1, 7):
        job.run(until).save(tmp_path / "saved", wait=False)
    check_like(job, uninterrupted, 0)
    job.load(tmp_path / "saved")
    check_like(job.run(8), uninterrupted, 6)
    del job
    gc.collect()
    assert leftovers(swap) == []


def test_a_step_does_not_wait_but_its_updates_do(tmp_path, swap, monkeypatch):
    """Claim: step() returns while the save is held, and no byte at home changes before it has read
    it. The twin: without the hold, the bytes change under the save."""
    for holds in (True, False):
        job = started(("host", "host"), swap, 1)
        homes = parts_of(job.model).units[0].flat_params[0].homes
        with held(monkeypatch) as go, monkeypatch.context() as patch:
            if not holds:
                read = HomeArrays.read_until
                patch.setattr(
                    HomeArrays, "read_until", lambda s, by, e: by == "save" or read(s, by, e)
                )
            saving = job.save(tmp_path / f"{holds}", wait=False)
            homes.wait_running()  # for the update of the step before the save
            before = homes.arrays["master"].flat.clone()
            job.run(2)
            update = homes.update
            assert not saving.done
            if holds:
                assert not update.done and torch.equal(homes.arrays["master"].flat, before)
            else:
                update.wait()
                assert not torch.equal(homes.arrays["master"].flat, before)
            go.set()
        saving.wait()


CALLS = {
    "save": lambda job, path: job.save(path),
    "save beside": lambda job, path: job.save(path, wait=False).wait(),
    "load": lambda job, path: job.load(path),
    "park": lambda job, path: infinity.park(job.model, path),
    "unwrap": lambda job, path: infinity.unwrap_model(job.model, job.optimizer),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_is_raised_at_the_next_call(call, tmp_path, swap, monkeypatch):
    """Claim: the checkpoint before stands, nothing of the failed one stays, the training is not
    hurt, and the call works when it is made again."""
    job = started(("nvme", "nvme"), swap, 1)
    job.save(tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(background_save, "write_files", no_room)
        saving = job.save(tmp_path / "saved", wait=False)
        job.run(3)
        while not saving.done:
            pass
    (tmp_path / "park").mkdir()
    path = tmp_path / ("park" if call == "park" else "saved")
    with pytest.raises(infinity.StorageError, match="was not written; the old one stands"):
        CALLS[call](job, path)
    assert len(os.listdir(tmp_path / "saved")) == 2
    assert Job(("host", "host"), swap).load(tmp_path / "saved").step == 1
    CALLS[call](job, path)


@pytest.mark.parametrize("call", CALLS)
def test_other_calls_wait_for_a_save(call, tmp_path, swap, monkeypatch):
    job = started(("nvme", "nvme"), swap, 2)
    (tmp_path / "park").mkdir()
    path = tmp_path / ("park" if call == "park" else "saved")
    with held(monkeypatch) as go:
        saving = job.save(tmp_path / "saved", wait=False)
        timer = threading.Timer(0.3, go.set)
        timer.start()
        CALLS[call](job, path)
        assert saving.done and go.is_set()
        timer.join()
    assert Job(("host", "host"), swap).load(tmp_path / "saved").step == 2


@pytest.mark.parametrize("homes", HOMES, ids="-".join)
def test_edits_of_values_change_no_saved_byte(homes, tmp_path, swap, monkeypatch):
    """Claim: of weights, in every way, of the optimizer's state, of a state dict. Those at home on
    the device are in the user's hands: a copy of them is saved."""
    job = started(homes, swap, 2)
    job.save(tmp_path / "waited")
    with held(monkeypatch) as go:
        job.save(tmp_path / "saved", wait=False)
        timer = threading.Timer(0.3, go.set)
        timer.start()
        (name, param), (_, other), (_, third), *_ = job.model.named_parameters()
        with torch.no_grad():
            other.mul_(3.0)
            third.data.clamp_(-1e-3, 1e-3)
        with infinity.full_params(job.model, name, writeback=True) as params:
            params[name].fill_(7.0)
        job.optimizer.state[param]["exp_avg"].fill_(3.0)
        job.optimizer.state_dict()
        timer.join()
    job.save(tmp_path / "later")
    saved, waited = files(tmp_path / "saved"), files(tmp_path / "waited")
    assert all(saved[name] == waited[name] for name in saved if name.startswith("unit"))
    later = files(tmp_path / "later")
    assert any(later[name] != waited[name] for name in later if name.startswith("unit"))  # the twin


def test_an_error_after_the_new_one_is_current_keeps_it(tmp_path, swap, monkeypatch):
    """Claim: it says that it is written, and it loads. The twin: before that the old one stands."""
    job = started(("host", "host"), swap, 1)
    job.save(tmp_path / "saved")

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error", str(tmp_path))

    for name, stands, steps in (
        ("remove_data", "is written, but may", 3),
        ("sync_folder", "the old one stands", 3),
    ):
        job.run(job.step + 2)
        with monkeypatch.context() as patch:
            patch.setattr(publish, name, fail)
            saving = job.save(tmp_path / "saved", wait=False)
            with pytest.raises(infinity.StorageError, match=stands):
                saving.wait()
        assert Job(("host", "host"), swap).load(tmp_path / "saved").step == steps


def test_a_save_that_cannot_begin_leaves_nothing(tmp_path, swap, monkeypatch):
    """Claim: no memory is charged, no hold and no lock stay, and the next save works."""
    job = started(("nvme", "nvme"), swap, 1)
    account = parts_of(job.model).ledger.accounts[Tier.HOST]
    before = account.charged_nbytes, account.planned_nbytes
    for owner, name in (
        (threading.Thread, "start"),
        (background_save.Saving, "__init__"),
        (Path, "mkdir"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                owner, name, lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no"))
            )
            with pytest.raises(RuntimeError):
                job.save(tmp_path / "saved", wait=False)
        assert (account.charged_nbytes, account.planned_nbytes) == before
        assert (
            not list((tmp_path / "saved").glob("*")) and parts_of(job.model).events.finishing == []
        )
    job.run(2).save(tmp_path / "saved", wait=False).wait()
    assert Job(("host", "host"), swap).load(tmp_path / "saved").step == 2


def test_a_model_that_is_dropped_is_freed_when_it_is_saved(tmp_path, swap, monkeypatch):
    job = started(("nvme", "nvme"), swap, 2)
    with held(monkeypatch) as go:
        saving = job.save(tmp_path / "saved", wait=False)
        freed = weakref.ref(parts_of(job.model).engine)
        del job
        gc.collect()
        go.set()
    saving.wait()
    gc.collect()
    assert freed() is None and leftovers(swap) == []
    assert Job(("host", "host"), swap).load(tmp_path / "saved").step == 2


def test_a_process_that_ends_completes_its_save(tmp_path):
    script = """
import sys, torch, infinity
net = torch.nn.Linear(64, 64)
net, optimizer = infinity.wrap_model(net, torch.optim.AdamW(net.parameters()), {"params": "host"})
infinity.save_checkpoint(sys.argv[1], net, optimizer, extra="the last", wait=False)
"""
    done = prepared.run("-c", script, tmp_path / "saved", seconds=120)
    assert done.returncode == 0, done.stderr
    net = torch.nn.Linear(64, 64)
    net, optimizer = infinity.wrap_model(net, torch.optim.AdamW(net.parameters()), {})
    assert infinity.load_checkpoint(tmp_path / "saved", net, optimizer) == "the last"


def test_memory_is_charged_and_without_room_it_waits(tmp_path, swap, caplog, monkeypatch):
    """Claim: the buffers are given back, and stay in the plan, with which a peak is compared; the
    next save adds nothing. The twin: a budget without room for them makes the save wait, with one
    line that says so."""
    job = started(("nvme", "nvme"), swap, 1)
    account = parts_of(job.model).ledger.accounts[Tier.HOST]
    before = account.charged_nbytes, account.planned_nbytes
    account.budget_nbytes = account.charged_nbytes + 2**30
    with held(monkeypatch):
        saving = job.save(tmp_path / "saved", wait=False)
        held_nbytes = account.charged_nbytes - before[0]
        assert (
            held_nbytes >= 20 * 2**20
            and before[1] < account.planned_nbytes <= before[1] + held_nbytes
        )
        planned = account.planned_nbytes
    saving.wait()
    job.save(tmp_path / "saved", wait=False).wait()
    assert (account.charged_nbytes, account.planned_nbytes) == (before[0], planned)
    assert account.peak_nbytes <= planned
    assert sum(parts_of(job.model).planned.plan.terms[Tier.HOST].values()) == planned
    account.budget_nbytes = account.charged_nbytes + 2**20
    assert job.run(2).save(tmp_path / "saved", wait=False) is None
    assert "waits for this save: beside it, a save needs 20.0 MiB of host_memory" in caplog.text
    assert Job(("host", "host"), swap).load(tmp_path / "saved").step == 2


def test_wait_must_be_a_bool(tmp_path, swap):
    job = Job(("host", "host"), swap)
    with pytest.raises(infinity.ConfigError, match="wait='no' must be True or False"):
        job.save(tmp_path / "saved", wait="no")
    assert not (tmp_path / "saved").exists()
