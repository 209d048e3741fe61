"""`infinity train --log`: what trackers of accelerate are told of a job."""

from __future__ import annotations

import argparse
import json
import re
import sys
import types
from pathlib import Path

import pytest
from lazily import need

need("accelerate", "rich")

import accelerate.tracking

from infinity.errors import ConfigError
from infinity.tools.cli import main
from infinity.tools.train.trackers import Trackers, begin_trackers, check_trackers

STEPS = 3
TINY = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 1}
WORDS = (
    f"train --model model.json --data text.txt --steps {STEPS} --batch-size 2 --dtype fp32"
    " --sequence-length 16 --eval-batches 1 --device cpu --json --lr 0.003"
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model and text; also the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    Path("model.json").write_text(json.dumps(TINY | {"n_head": 2, "eos_token_id": 0}))
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return tmp_path


@pytest.fixture
def doubles(monkeypatch):
    """Trackers by name, which keep what they are told. ``fails``: the call at which one raises."""
    made: dict[str, Kept] = {}

    def make(name: str, fails: str = "") -> None:
        def tracker(project: str) -> Kept:
            made[name] = Kept(project, fails)
            return made[name]

        tracker.requires_logging_directory = False
        monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, name, tracker)

    make.made = made
    return make


class Kept:
    """A double of a tracker."""

    def __init__(self, project: str, fails: str):
        self.project, self.fails, self.calls, self.logged = project, fails, [], []
        self.options: dict = {}

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails:
            raise RuntimeError(f"no network at {what}")

    def start(self):
        self._called("start")

    def store_init_configuration(self, values):
        self._called("options")
        self.options = values

    def log(self, values, step=None):
        self._called(f"log {step}")
        self.logged.append((step, values))

    def finish(self):
        self._called("finish")


def test_trackers_are_told_the_options_and_each_step(place, doubles, capsys):
    """Method: two doubles and TensorBoard in one job, beside its report. Twin: a job without
    trackers has the same losses, and writes no folder."""
    pytest.importorskip("tensorboard")
    doubles("one"), doubles("two")
    assert main(WORDS.split()) == 0
    plain = json.loads(capsys.readouterr().out)
    assert not doubles.made and not Path("runs").exists()
    assert main([*WORDS.split(), "--log", "one", "--log", "two", "--log", "tensorboard"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["losses"] == plain["losses"]
    assert list(Path("runs").glob("*/events.out.*"))
    one, two = doubles.made["one"], doubles.made["two"]
    assert one.logged == two.logged and one.project == "infinity"
    assert one.calls[:3] == ["start", "options", "log 0"] and one.calls.count("finish") == 1
    assert one.options["lr"] == 0.003 and one.options["parameters"] == told["parameters"]
    steps = [(step, values) for step, values in one.logged if "train/loss" in values]
    assert [step for step, _ in steps] == [1, 2, 3]
    assert [values["train/loss"] for _, values in steps] == told["losses"]
    evals = [(step, values["eval/loss"]) for step, values in one.logged if "eval/loss" in values]
    assert evals == [(0, told["held_out_loss_before"]), (STEPS, told["held_out_loss_after"])]
    last = steps[-1][1]
    assert last["train/grad_norm"] > 0 and last["speed/tokens_per_second"] > 0
    assert last["memory/device_peak_GB"] == told["tiers"]["device"]["peak_nbytes"] / 1e9
    assert all(re.fullmatch(r"[-/\w.]+", name) for name in last)  # MLflow refuses others


@pytest.mark.parametrize("fails", ["options", "log 2", "finish"])
def test_a_tracker_that_fails_ends_no_job(fails, place, doubles, capsys):
    """Method: one raises at a call; it is told once, and the other one has every step."""
    doubles("one", fails), doubles("two")
    assert main([*WORDS.split(), "--log", "one", "--log", "two"]) == 0
    assert (
        capsys.readouterr().err.count(f"--log one failed and logs no more: no network at {fails}")
        == 1
    )
    one, two = doubles.made["one"], doubles.made["two"]
    assert one.calls[-1] == fails and two.calls[-1] == "finish"
    assert [step for step, _ in two.logged] == [0, 1, 2, 3, 3]


def test_a_tracker_that_cannot_begin_is_told_before_the_first_step(place, doubles, capsys):
    """Twin: the one that has begun is finished."""
    doubles("one"), doubles("two", "start")
    assert main([*WORDS.split(), "--log", "one", "--log", "two"]) == 2
    said = capsys.readouterr()
    assert "--log two cannot begin: no network at start" in said.err and said.out == ""
    assert doubles.made["one"].calls == ["start", "finish"]


def test_trackers_finish_when_the_job_fails(doubles):
    """Method: an exception inside the block. Twin: ranks after the first begin none."""
    doubles("one")
    args = argparse.Namespace(log=["one"], tensorboard=None)
    first, second = (types.SimpleNamespace(is_first=is_first) for is_first in (True, False))
    with begin_trackers(args, second, print):
        assert not doubles.made
    with pytest.raises(ZeroDivisionError), begin_trackers(args, first, print):
        raise ZeroDivisionError
    assert doubles.made["one"].calls == ["start", "finish"]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "comet_ml"])
def test_a_tracker_that_is_not_installed_is_refused_with_its_pip_line(name, monkeypatch):
    """Twin: the same one, installed, is not."""
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: [])
    with pytest.raises(ConfigError, match=f"--log {name} needs .* pip install {name}"):
        check_trackers([name])
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: [name])
    check_trackers([name])


def test_what_is_no_tracker_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="not a tracker of accelerate. Known are .*tensorboard"):
        check_trackers(["tensorbord"])
    monkeypatch.setitem(sys.modules, "accelerate.tracking", None)
    with pytest.raises(ConfigError, match="pip install accelerate wandb"):
        check_trackers(["wandb"])
    check_trackers([])  # without trackers, accelerate is not needed


def test_trackers_that_start_when_they_are_made_are_begun(doubles, monkeypatch):
    """As those of accelerate 1.4, which have no start()."""
    doubles("one")
    monkeypatch.delattr(Kept, "start")
    trackers = Trackers(print)
    trackers.begin("one", None)
    trackers.held_out(types.SimpleNamespace(next_step=4), 2.5)
    trackers.finish()
    assert doubles.made["one"].calls == ["log 4", "finish"]
