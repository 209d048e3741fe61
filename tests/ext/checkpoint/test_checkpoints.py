"""Checkpoints: a loop that is killed anywhere ends with the bits of one that never was."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import prepared
import pytest
import torch
from inside import parts_of
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader

import infinity
from infinity.core.seams import Events
from infinity.data import Order
from infinity.errors import ConfigError, StorageError, UsageError
from infinity.ext.checkpoint import interval
from infinity.ext.checkpoint.checkpoints import EndedSteps
from infinity.ext.checkpoint.interval import share_of

SCRIPT = Path(__file__).parents[2] / "support" / "jobs" / "saved_loop.py"
STEPS = 60


def job(folder, **options):
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    net, optimizer = infinity.wrap_model(
        net, torch.optim.AdamW(net.parameters(), lr=0.1), {"params": "host", "optimizer": "host"}
    )
    return net, optimizer, infinity.Checkpoints(folder, net, optimizer, **options)


def train(net, optimizer, saver, steps: int) -> None:
    for _ in range(steps):
        net(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.after_step()


def weights(net) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.fixture(autouse=True)
def saves_at_once(monkeypatch):
    monkeypatch.setattr(interval, "FIRST_STEPS", 2)
    monkeypatch.setattr(interval, "FIRST_SECONDS", 0.0)


def test_a_loop_goes_on_where_it_was_saved(tmp_path):
    """The twin: a loop that does not resume has other weights."""
    whole = job(tmp_path / "whole")
    with whole[2]:
        assert whole[2].resume().steps == 0
        train(*whole, 6)
    with job(tmp_path / "saved", extra=lambda: {"epoch": 3})[2] as saver:
        net, optimizer = saver._model, saver._optimizer
        saver.resume()
        train(net, optimizer, saver, 4)
        saver.save()
    net, optimizer, saver = job(tmp_path / "saved")
    with saver:
        resumed = saver.resume()
        assert resumed.steps == 4 == saver.steps and resumed.extra == {"epoch": 3}
        train(net, optimizer, saver, 2)
    assert all(torch.equal(v, weights(net)[k]) for k, v in weights(whole[0]).items())
    again = job(tmp_path / "third")
    with again[2]:
        train(*again, 2)
    assert not torch.equal(again[0].weight, net.weight)


@pytest.mark.parametrize("left", ["by close", "by save", "by save and on"])
def test_a_step_counts_though_the_loop_was_left_behind_it(left, tmp_path):
    """Method: the last step ends, and its after_step() is not called, or is after a save; the run
    that goes on is compared with a whole one. Twins: a step that a scaler skips counts as ever;
    without any after_step() nothing counts."""
    whole = job(tmp_path / "whole")
    with whole[2]:
        whole[2].resume()
        train(*whole, 5)
    net, optimizer, saver = job(tmp_path / "saved")
    saver.resume()
    train(net, optimizer, saver, 2)
    net(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert saver.steps == 2
    if left != "by close":
        saver.save()
        assert saver.steps == 3
    if left == "by save and on":
        saver.after_step()
        assert saver.steps == 3
        train(net, optimizer, saver, 1)
        assert saver.steps == 4
        saver.after_step()  # of a step that was skipped
        assert saver.steps == 5
    saver.close()
    net, optimizer, saver = job(tmp_path / "saved")
    steps = saver.resume().steps
    assert steps == (5 if left == "by save and on" else 3)
    train(net, optimizer, saver, 5 - steps or 1)
    saver.close()
    assert all(torch.equal(v, weights(net)[k]) for k, v in weights(whole[0]).items())


def ours(events: Events) -> list:
    """What of a Checkpoints listens for steps."""
    return [each for each in events.step_ended if isinstance(each.__self__, EndedSteps)]


def test_without_an_after_step_a_saved_loop_has_no_steps(tmp_path):
    """Twin: what listens ends with the object, closed or not."""
    net, optimizer, saver = job(tmp_path / "saved")
    events = parts_of(net).job.events
    net(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    saver.save()
    assert saver.steps == 0 and len(ours(events)) == 1
    saver.close()
    saver.close()
    assert not ours(events)
    saver = infinity.Checkpoints(tmp_path / "other", net, optimizer)
    assert len(ours(events)) == 1
    saver._signals.close()
    del saver
    gc.collect()
    assert not ours(events)


def test_it_saves_as_often_as_the_share_allows(tmp_path):
    """Claim: the first save comes at once here, and the next as its cost says."""
    net, optimizer, saver = job(tmp_path / "saved", overhead=0.5)
    with saver:
        saver.resume()
        assert saver.every is None
        train(net, optimizer, saver, 2)
        while saver.every is None:  # it is saved beside the next steps
            train(net, optimizer, saver, 1)
        assert saver.every >= 1
        saved, least = 0, saver.every
        steps = max(200, 2 * least)  # a busy machine may have made the save dear
        for _ in range(steps):
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saved += saver.after_step()
        assert 0 < saved <= steps / max(1, least / 20)


def run_killed(folder, seeds, workers: int, ranks: int = 1) -> None:
    """Runs the loop, and kills it at a random moment for each of ``seeds``; then to its end."""
    for seed in seeds:
        process = prepared.start(SCRIPT, folder, STEPS, workers)
        log = folder / "log.0"
        before = log.stat().st_size if log.exists() else 0
        deadline = time.monotonic() + 60
        while process.returncode is None and time.monotonic() < deadline:
            if log.exists() and log.stat().st_size > before:
                break
            with suppress(TimeoutError):
                process.wait(0.01)
        time.sleep(random.Random(seed).random() * 0.3)
        process.kill()
    done = prepared.run(SCRIPT, folder, STEPS, workers, seconds=120)
    assert done.returncode == 0, done.stderr[-3000:]


def last_of_each_step(folder) -> dict[int, dict]:
    told = [json.loads(line) for line in (folder / "log.0").read_text().splitlines()]
    return {each["step"]: each for each in told}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kills", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_loop_that_is_killed_ends_with_the_bits_of_one_that_is_not(kills, workers, tmp_path):
    """Claim: weights, losses and samples of every step. The twin: other seeds kill elsewhere."""
    (whole := tmp_path / "whole").mkdir()
    run_killed(whole, [], 0)
    (killed := tmp_path / "killed").mkdir()
    run_killed(killed, range(kills), workers)
    assert (killed / "done.0").read_text() == (whole / "done.0").read_text()
    expected, found = last_of_each_step(whole), last_of_each_step(killed)
    assert found == expected and len(expected) == STEPS
    lines = (killed / "log.0").read_text().splitlines()
    assert len(lines) >= STEPS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_at_the_end_of_the_step(number, tmp_path):
    """Claim: SIGTERM ends the loop with Python's way out, SIGUSR1 does not."""
    net, optimizer, saver = job(tmp_path / "saved", overhead=1e-6)
    with saver:
        saver.resume()
        train(net, optimizer, saver, 3)  # saved after the second
        os.kill(os.getpid(), number)
        if number == signal.SIGTERM:
            with pytest.raises(SystemExit) as ended:
                train(net, optimizer, saver, 1)
            assert ended.value.code == 143
        else:
            train(net, optimizer, saver, 1)
            assert not saver._unsaved
    net, optimizer, saver = job(tmp_path / "saved")
    with saver:
        assert saver.resume().steps == 4
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_forked_child_ends_at_a_signal(tmp_path):
    """Claim: children are not kept alive by the parent's handler."""
    net, optimizer, saver = job(tmp_path / "saved")
    ready, tell = os.pipe()
    with saver:
        child = os.fork()
        if child == 0:
            os.write(tell, b"1")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


@pytest.mark.parametrize("what, ends", [("later", True), ("gone", True), ("at once", False)])
def test_a_job_that_takes_no_step_ends_all_the_same(what, ends, tmp_path):
    """Claim: a later SIGTERM ends the process, and so does the first if the object is gone. Two at
    once are one request: a launcher and the system both send it."""
    script = f"""
import signal, torch, infinity
from infinity.ext.checkpoint import signals
net = torch.nn.Linear(2, 2)
net, optimizer = infinity.wrap_model(net, torch.optim.SGD(net.parameters()), {{"params": "host"}})
saver = infinity.Checkpoints({str(tmp_path / "saved")!r}, net, optimizer)
if {what!r} == "later":
    signals.ONE_REQUEST_SECONDS = -1.0
    saver._signals._asked[signal.SIGTERM] = 0.0
elif {what!r} == "gone":
    del saver
else:
    signal.raise_signal(signal.SIGTERM)
print("goes on", flush=True)
signal.raise_signal(signal.SIGTERM)
print("still there")
"""
    done = prepared.run("-c", script, seconds=60)
    assert done.stdout.startswith("goes on\n"), done.stderr
    assert (done.returncode == -signal.SIGTERM) == ends == ("still" not in done.stdout)


def test_the_handlers_of_before_are_back_and_called(tmp_path):
    """Claim: after the last of two objects is closed, and if one is gone without it."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        first, second = (job(tmp_path / str(each))[2] for each in range(2))
        first.close()
        signal.raise_signal(signal.SIGUSR1)
        assert second._signals.saves and not heard
        del second
        gc.collect()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)
        job(tmp_path / "last")[2].close()


def test_two_objects_are_both_saved_before_the_end(tmp_path):
    one, other = job(tmp_path / "one"), job(tmp_path / "other")
    for each in (one, other):
        each[2].resume()
        train(*each, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    train(*one, 1)
    with pytest.raises(SystemExit):
        train(*other, 1)
    one[2].close()
    for name in ("one", "other"):
        again = job(tmp_path / name)[2]
        assert again.resume().steps == 2
        again.close()


def test_the_end_of_the_loop_is_saved_by_close(tmp_path):
    """The twin: after an exception the last checkpoint stands."""
    net, optimizer, saver = job(tmp_path / "saved", overhead=1e-6)
    saver.resume()
    train(net, optimizer, saver, 5)
    saver.close()
    net, optimizer, saver = job(tmp_path / "saved", overhead=1e-6)
    with pytest.raises(KeyError), saver:
        assert saver.resume().steps == 5
        train(net, optimizer, saver, 1)
        raise KeyError
    with job(tmp_path / "saved")[2] as saver:
        assert saver.resume().steps == 5


def test_a_signal_after_the_last_step_is_met_by_close(tmp_path):
    net, optimizer, saver = job(tmp_path / "saved", overhead=1e-6)
    saver.resume()
    train(net, optimizer, saver, 5)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        saver.close()
    with job(tmp_path / "saved")[2] as saver:
        assert saver.resume().steps == 5


def test_an_epoch_that_is_left_early_goes_on_after_the_last_step(tmp_path):
    """Claim: also after a look at a batch that is not trained on."""
    net, optimizer, saver = job(tmp_path / "saved")
    with saver:
        order = Order(40, batch_size=4, consumed=saver.resume().steps)
        loader = DataLoader(range(40), batch_sampler=order)
        next(iter(loader))
        found = []
        for epoch in range(2):
            for number, batch in enumerate(loader):
                train(net, optimizer, saver, 1)
                found += batch.tolist()
                if epoch == 0 and number == 5:
                    break
    assert sorted(found) == list(range(40)) and saver.steps == 10


def test_a_save_that_fails_is_told_and_not_tried_at_every_step(tmp_path, monkeypatch):
    net, optimizer, saver = job(tmp_path / "saved", overhead=0.01)
    calls = []

    def full(*args, wait):
        calls.append(1)
        time.sleep(0.05)
        raise StorageError(28, "no space", str(tmp_path))

    monkeypatch.setattr("infinity.ext.checkpoint.checkpoints.save_checkpoint", full)
    with saver:
        saver.resume()
        for _ in range(8):
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with suppress(StorageError):
                saver.after_step()
        saver._unsaved = False  # its close would fail, too
    assert len(calls) == 4 and saver.steps == 8  # every second step, as before the first save


def no_room(*args, **kwargs):
    raise OSError(28, "No space left on device", "unit-00000.safetensors")


def test_a_save_that_fails_beside_a_step_is_told_at_a_later_one(tmp_path, monkeypatch):
    """Claim: its steps count as not saved, so that close() saves them."""
    net, optimizer, saver = job(tmp_path / "saved", overhead=0.01)

    with saver:
        saver.resume()
        with monkeypatch.context() as patch:
            patch.setattr("infinity.ext.checkpoint.background_save.write_files", no_room)
            with pytest.raises(StorageError, match="the old one stands"):
                train(net, optimizer, saver, 1000)
        assert 2 < saver.steps < 1000
        steps = saver.steps
    assert job(tmp_path / "saved")[2].resume().steps == steps


def test_the_last_steps_are_saved_though_the_save_before_failed(tmp_path, monkeypatch):
    net, optimizer, saver = job(tmp_path / "saved", overhead=1e-6)

    with saver:
        saver.resume()
        with monkeypatch.context() as patch:
            patch.setattr("infinity.ext.checkpoint.background_save.write_files", no_room)
            train(net, optimizer, saver, 2)
            while not saver._saving[0].done:
                time.sleep(0.01)
    assert job(tmp_path / "saved")[2].resume().steps == 2


def test_a_checkpoint_that_was_not_resumed_is_not_replaced(tmp_path):
    net, optimizer, saver = job(tmp_path / "saved")
    with saver:
        saver.resume()
        saver.save()
    net, optimizer, saver = job(tmp_path / "saved")
    with saver:
        for use in (saver.save, lambda: train(net, optimizer, saver, 1)):
            with pytest.raises(UsageError, match="Call resume\\(\\) before the loop"):
                use()


def test_an_order_that_is_another_one_is_refused(tmp_path):
    """Claim: both are named. An order of as many samples, batches and the same seed goes on."""
    net, optimizer, saver = job(tmp_path / "saved")
    with saver:
        Order(64, batch_size=8, seed=1, consumed=saver.resume().steps)
        train(net, optimizer, saver, 2)
    net, optimizer, saver = job(tmp_path / "saved")
    with saver:
        steps = saver.resume().steps
        with pytest.raises(ConfigError, match=r"batch_size=4 \(it was 8\), seed=2 \(it was 1\)"):
            Order(64, batch_size=4, seed=2, consumed=steps)
        assert next(iter(Order(64, batch_size=8, seed=1, consumed=steps * 2))).number == 4


class Loader:
    """As a StatefulDataLoader."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


def test_a_loader_with_a_state_goes_on(tmp_path):
    loader = Loader()
    net, optimizer, saver = job(tmp_path / "saved", loader=loader)
    with saver:
        saver.resume()
        loader.at = 5
        saver.save()
    loader = Loader()
    net, optimizer, saver = job(tmp_path / "saved", loader=loader)
    with saver:
        saver.resume()
    assert loader.at == 5


def test_a_checkpoint_made_by_hand_is_neither_loaded_nor_replaced(tmp_path):
    net, optimizer, saver = job(tmp_path / "saved")
    saver.close()
    with torch.no_grad():
        net.weight.fill_(3.0)
    infinity.save_checkpoint(tmp_path / "saved", net, optimizer)
    net, optimizer, saver = job(tmp_path / "saved")
    before = weights(net)
    with saver:
        with pytest.raises(UsageError, match="does not know its steps"):
            saver.resume()
        assert all(torch.equal(value, before[name]) for name, value in weights(net).items())
        with pytest.raises(UsageError, match="has a checkpoint"):
            saver.save()


def test_it_is_resumed_once_and_first(tmp_path):
    net, optimizer, saver = job(tmp_path / "saved")
    with saver:
        saver.resume()
        with pytest.raises(UsageError, match="call it once, first"):
            saver.resume()


BAD = {
    "more than all": {"overhead": 1.5},
    "nothing": {"overhead": 0},
    "a word": {"overhead": "little"},
    "two hundred percent": {"overhead": "200%"},
    "no failures at all": {"between_failures": 0},
    "never a failure": {"between_failures": float("inf")},
    "failures in words": {"between_failures": "1h"},
    "next to nothing": {"overhead": 1e-320},
    "not a number": {"overhead": float("nan")},
    "a plain loader": {"loader": object()},
}


@pytest.mark.parametrize("what", BAD)
def test_bad_options_are_refused(what, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError):
        job(tmp_path / "saved", **BAD[what])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_share_may_be_a_text():
    assert share_of("2%") == share_of(0.02) == share_of(" 0.02 ")


def test_ranks_save_together_and_resume(tmp_path):
    """Claim: a job of two ranks that is ended by a signal to one of them goes on."""
    command = [str(SCRIPT), str(tmp_path), "12", "0"]
    done = run_ranks(2, command, seconds=120)
    assert done.returncode == 0, done.stderr[-4000:]
    first = (tmp_path / "done.0").read_text()
    assert first == (tmp_path / "done.1").read_text()
    done = run_ranks(2, command, seconds=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "done.0").read_text()
    told = last_of_each_step(tmp_path)
    assert sorted(told) == list(range(12))
