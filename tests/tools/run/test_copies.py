"""Copies: a script that pickles or deep-copies its wrapped model gets a plain one."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.core.run.registry import is_wrapped
from infinity.errors import UsageError
from infinity.tools.run import auto

SCRIPT = Path(__file__).parents[2] / "support" / "scripts" / "whole_model.py"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder to work in."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield tmp_path


def printed(*words: str) -> str:
    sys.argv = [str(SCRIPT), *words]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return text.getvalue()


@pytest.mark.parametrize(
    ("home", "keep"), [("device", "save"), ("host", "deepcopy"), ("nvme", "save")]
)
def test_a_model_that_is_kept_as_a_whole_is_plain(home, keep, monkeypatch):
    """Method: tied weights, an LSTM's list of its weights, a hook of the script, an attribute from
    after the wrap, and one that refers to the model. Twin: without copies the script is refused."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    alone = printed(keep)
    with infinity.auto({"params": home, "optimizer": home, "nvme_paths": ["."]}):
        assert printed(keep) == alone
    monkeypatch.setattr(auto, "plain_copies", lambda root: contextlib.nullcontext())
    with infinity.auto("host"), pytest.raises(UsageError, match="cannot be pickled"):
        printed(keep)


def trained(home: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.PReLU(), nn.Linear(3, 2)))
    with infinity.auto(home):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert is_wrapped(model)
    return model, optimizer


def test_a_file_names_no_class_of_the_engine_and_has_the_latest_values():
    """Method: a part of the model, and a list of both, before and after a step."""
    model, optimizer = trained("host")
    for _ in range(2):
        assert b"infinity" not in pickle.dumps([model, model[1]])
        loaded, part = pickle.loads(pickle.dumps([model, model[1]]))
        state = model.state_dict()
        for name, value in loaded.state_dict().items():
            assert value.equal(state[name])
        assert part[1].weight.equal(loaded[1][1].weight)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert not loaded[0].weight.equal(model.state_dict()["0.weight"])  # a copy, of its time


def test_a_copy_is_trained_and_wrapped_as_any_model():
    """Twin: the model that it was made of keeps its values."""
    model, _ = trained("host")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = copy.deepcopy(model)
    wrapped, optimizer = infinity.wrap_model(
        other, torch.optim.SGD(other.parameters(), lr=0.1), {"params": "host"}
    )
    wrapped(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    after = wrapped.state_dict()
    for name, value in model.state_dict().items():
        assert value.equal(before[name])
    assert not after["0.weight"].equal(before["0.weight"])


def test_an_unwrapped_model_is_pickled_by_torch_alone():
    model, _ = trained("host")
    infinity.unwrap_model(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert all("__reduce_ex__" not in vars(each) for each in (*model.modules(), *loaded.modules()))
    assert loaded[0].weight.equal(model[0].weight)


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_members_that_a_script_changes_after_the_wrap_are_copied_as_they_are(change):
    """Twin: a dict that stays is copied with what it has by then."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2))
    model.cache, model.seen = {}, {}
    with infinity.auto("host"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    model.seen[1] = 2
    if change == "deleted":
        del model.cache
    else:
        model.cache = None
    copied = copy.deepcopy(model)
    assert copied.seen == {1: 2} and getattr(copied, "cache", None) is None
    assert hasattr(copied, "cache") == (change == "replaced")
