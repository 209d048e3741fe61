"""Seams: extensions join a job by its events, and the engine trains without any of them."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core import seams
from infinity.core.seams import EXTENSIONS, Events, Extension, NoValues, begin_extensions


class Noting(Extension):
    """Notes what it is told."""

    told: list[tuple] = []

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> Noting | None:
        if config.max_grad_norm is None:
            return None
        events.pass_begun.append(lambda module, args, kwargs: cls.told.append(("begun", module)))
        events.pass_ended.append(lambda module, outputs: cls.told.append(("ended", module)))
        events.unit_landed.append(lambda unit: cls.told.append(("landed", unit.name)))
        events.step_ended.append(lambda steps: cls.told.append(("step", steps)))
        events.closed.append(lambda: cls.told.append(("closed",)))
        return cls()

    def install(self, job: Any, model: Any) -> None:
        self.told.append(("installed", model))


class Lane(Extension):
    """Tells a timeline of work that the engine knows nothing of."""

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> Lane:
        return cls()

    def install(self, job: Any, model: Any) -> None:
        job.events.step_ended.append(
            lambda steps: job.traffic.tell("my lane", f"after step {steps}", 1.0, 2.0)
        )


def wrap(**config: Any) -> tuple[nn.Module, Any]:
    """Wraps two layers with all state in host memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return infinity.wrap_model(model, optimizer, {"params": "host", "optimizer": "host"} | config)


@pytest.fixture
def listed(monkeypatch) -> None:
    """Lists the extensions of this file, as infinity/__init__.py lists the package's."""
    module = ModuleType("infinity.mine")
    module.Noting, module.Lane = Noting, Lane
    module.__spec__ = ModuleSpec("infinity.mine", None)
    monkeypatch.setitem(sys.modules, "infinity.mine", module)
    monkeypatch.setattr(Noting, "told", [])
    monkeypatch.setattr(seams, "EXTENSIONS", [*EXTENSIONS, "mine.Noting", "mine.Lane"])


def test_an_extension_is_told_of_each_event(listed):
    """Twin: a wrap that does not need it."""
    model, optimizer = wrap(max_grad_norm=1.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    told = [("installed", model), ("begun", model), ("ended", model)]
    assert Noting.told[:3] == told and Noting.told[-1] == ("step", 1)
    assert {what for what, _ in Noting.told[3:-1]} == {"landed"}
    infinity.unwrap_model(model, optimizer)
    assert Noting.told[-1] == ("closed",)
    Noting.told.clear()
    model, _ = wrap()
    model(torch.ones(1, 4)).sum().backward()
    assert Noting.told == []


def test_an_extension_draws_a_lane_of_its_own(listed, tmp_path):
    """Twin: without it the timeline has no such lane."""
    for name, has_lane in (("with.json", True), ("without.json", False)):
        if not has_lane:
            seams.EXTENSIONS.remove("mine.Lane")
        model, optimizer = wrap(trace=tmp_path / name)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        infinity.unwrap_model(model, optimizer)
        events = json.loads((tmp_path / name).read_text())
        found = [each for each in events if each.get("cat") == "my lane"]
        assert [each["name"] for each in found] == ["after step 1"] * has_lane


def test_the_listed_extensions_are_there():
    """Imports each by its path."""
    for path in EXTENSIONS:
        module, _, name = path.rpartition(".")
        assert issubclass(getattr(importlib.import_module(f"infinity.{module}"), name), Extension)


def test_a_deleted_extension_is_skipped(listed, monkeypatch):
    """Twin: an extension that is there and cannot be imported raises."""
    monkeypatch.setattr(seams, "EXTENSIONS", ["ext.gone.away.Nothing", "ext.park.away.Nothing"])
    assert begin_extensions(None, None, None, Events()) == []
    monkeypatch.setattr(seams, "is_there", lambda module: True)
    with pytest.raises(ModuleNotFoundError, match="infinity.ext.gone"):
        begin_extensions(None, None, None, Events())


def test_a_comparison_of_nothing_agrees():
    nothing = NoValues()
    assert nothing.values() == [] and nothing.agrees([(0, 1)]) and nothing.check([(0, 1)]) is None
