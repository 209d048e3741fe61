"""Seams: extensions join a job by its events, and the engine trains without any of them."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deleted import needs
from inside import parts_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core import seams
from infinity.core.homes.staging import ThroughHost, backend_for
from infinity.core.machine.tiers import Tier
from infinity.core.run.replaced_forward import ReplacedForward, own_forward
from infinity.core.seams import (
    EXTENSIONS,
    Events,
    Extension,
    Term,
    begin_extensions,
)
from infinity.core.units.residency import Residency
from infinity.errors import ConfigError


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

    def drop(self, job: Any) -> None:
        self.told.append(("dropped", job.running.is_cut_short))


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


class Holding(Extension):
    """Holds 8 bytes of the host for each unit, refuses a model that repeats a LayerNorm, and
    doubles the outputs of other blocks."""

    told: list[str] = []

    @classmethod
    def terms(cls, config: Any, units: Any, device: Any) -> list[Term]:
        return [Term(Tier.HOST, "what is held", 8 * len(units))]

    @classmethod
    def describe_ranks(cls, config: Any, ranks: Any) -> Any:
        cls.told.append("ranks")
        return ranks

    @classmethod
    def check_blocks(cls, config: Any, model: nn.Module, blocks: Any) -> None:
        if any(isinstance(block, nn.LayerNorm) for _, block in blocks):
            raise ConfigError("no LayerNorm")

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> Holding:
        holding = cls()
        events.allocated.append(holding.charge)
        return holding

    def charge(self, job: Any) -> None:
        planned = job.planned.plan.terms[Tier.HOST]["what is held"]
        self.charged = job.ledger.reserve(Tier.HOST, planned, "what is held")
        self.told.append(f"{planned} bytes")

    def replace_forwards(self, job: Any, model: Any, find: Any, blocks: Any) -> list[Any]:
        self.told.append(", ".join(name for name, _, units in blocks if units))
        return [
            ReplacedForward(block, lambda x, own=own_forward(block): 2 * own(x))
            for _, block, _ in blocks
        ]


class Bypass(ThroughHost):
    """A backend that a device of this name can use."""

    @classmethod
    def works(cls, config: Any, device: Any) -> bool:
        return device == "able"


@pytest.fixture
def listed(monkeypatch) -> None:
    """Lists the extensions of this file, as a script does."""
    monkeypatch.setattr(Noting, "told", [])
    monkeypatch.setattr(Holding, "told", [])
    monkeypatch.setattr(seams, "EXTENSIONS", [*EXTENSIONS, Noting, Lane])


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


@pytest.mark.parametrize("how", ["whole", "failed", "repeated"])
def test_an_extension_is_told_where_each_forward_computes_and_ends(how):
    """Method: of the root, and of two owners, whose weights are there then; one that fails ends,
    and one that the backward repeats is told again. Twin: an evaluation is told as well."""
    model, _ = wrap()
    events, told = parts_of(model).job.events, []

    def begun(module: nn.Module, units: list[Any]) -> None:
        assert all(unit.residency is Residency.RESIDENT for unit in units)
        told.append((module, len(units)))

    events.forward_begun.append(begun)
    events.forward_ended.append(told.append)
    first, last = model
    owner = [(first, 1), first]
    if how == "failed":
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3))
        assert told == [(model, 0), *owner, model]
    elif how == "whole":
        with torch.no_grad():
            model(torch.ones(1, 4))
        assert told == [(model, 0), *owner, (last, 1), last, model]
    else:
        x = torch.ones(1, 4, requires_grad=True)
        checkpoint(first, x, use_reentrant=False).sum().backward()
        assert told == owner * 2


def raise_stop(*_: Any) -> None:
    raise KeyboardInterrupt("stop")


@pytest.mark.parametrize("where", ["a forward", "a backward", "a step"])
def test_an_extension_drops_what_only_a_pass_had(where, listed, monkeypatch):
    """Method: an exception ends a forward, a backward or a step; the next use drops the pass, when
    nothing of it runs any more. Twin: a use after that one."""
    model, optimizer = wrap(max_grad_norm=1.0)
    job = parts_of(model).job
    hooks = {
        "a forward": raise_stop,
        "a backward": lambda module, args, output: args[0].register_hook(raise_stop) and None,
    }
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="stop"):
        handle = model[1].register_forward_hook(hooks.get(where, lambda *_: None))
        if where == "a step":
            patch.setattr(job.journal, "begin", raise_stop)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    handle.remove()
    assert "dropped" not in [told[0] for told in Noting.told]
    optimizer.zero_grad()
    assert [told for told in Noting.told if told[0] == "dropped"] == [("dropped", False)]
    model(torch.ones(1, 4)).sum().backward()
    assert [told[0] for told in Noting.told].count("dropped") == 1
    infinity.unwrap_model(model, optimizer)


@needs("tools")
def test_an_extension_draws_a_lane_of_its_own(listed, tmp_path):
    """Twin: without it the timeline has no such lane."""
    for name, has_lane in (("with.json", True), ("without.json", False)):
        if not has_lane:
            seams.EXTENSIONS.remove(Lane)
        model, optimizer = wrap(trace=tmp_path / name)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        infinity.unwrap_model(model, optimizer)
        events = json.loads((tmp_path / name).read_text())
        found = [each for each in events if each.get("cat") == "my lane"]
        assert [each["name"] for each in found] == ["after step 1"] * has_lane


def test_the_listed_extensions_are_there():
    """Imports each by its path."""
    for path in filter(lambda each: isinstance(each, str), EXTENSIONS):
        module, _, name = path.rpartition(".")
        assert issubclass(getattr(importlib.import_module(f"infinity.{module}"), name), Extension)


@needs("ext/class_step")
def test_a_deleted_extension_is_skipped(listed, monkeypatch):
    """And one that builds on a folder that was deleted. Twin: an extension that is there and cannot
    be imported raises."""
    monkeypatch.setattr(seams, "EXTENSIONS", ["ext.gone.away.Nothing"])
    assert begin_extensions(None, None, None, Events()) == []

    def imported(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(seams.importlib, "import_module", imported)
    # What an older version has left of a folder: compiled files alone.
    folder = SimpleNamespace(origin=None)
    monkeypatch.setattr(seams.importlib.util, "find_spec", lambda name: folder)
    seams.is_there.cache_clear()
    missing = "infinity.ext.left.module"
    assert [*seams.classes_of(["ext.left.module.OfCompiled"])] == []
    monkeypatch.undo()
    seams.is_there.cache_clear()
    monkeypatch.setattr(seams.importlib, "import_module", imported)
    missing = "infinity.ext.gone.deep"
    assert [*seams.classes_of(["ext.park.park.OnDeleted"])] == []
    of_engine = "infinity.core.stpe", "infinity.nativ"
    for missing in ("infinity.ext.park.misspelt", *of_engine, "a_library"):
        with pytest.raises(ModuleNotFoundError, match=missing):
            [*seams.classes_of(["ext.park.park.OnMissing"])]


@pytest.mark.parametrize("path", ["ext.park.prak.Park", "mine.Lane", "infinity.ext.park.park.Park"])
def test_a_path_that_was_mistyped_is_not_skipped(path):
    """Its folder is there, or is no extension's. Twin: one whose folder was deleted."""
    with pytest.raises(ModuleNotFoundError):
        [*seams.classes_of([path])]
    assert [*seams.classes_of(["ext.gone.away.Nothing"])] == []


def test_an_extension_plans_charges_and_replaces(listed, monkeypatch):
    """Method: its bytes are in the plan and charged before the model is hooked; its forwards run
    until the model is unwrapped. Twins: a model that it refuses is as it was, and without it no
    byte is planned."""
    monkeypatch.setattr(seams, "EXTENSIONS", [*EXTENSIONS, Holding])
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = module(torch.ones(1, 4))
    twice = 2 * module[1](2 * module[0](torch.ones(1, 4)))
    config = {"params": "host"}
    model, _ = infinity.wrap_model(module, None, config)
    assert Holding.told == ["ranks", "16 bytes", "0, 1"]
    assert parts_of(model).planned.plan.terms[Tier.HOST]["what is held"] == 16
    assert torch.equal(model(torch.ones(1, 4)), twice)
    infinity.unwrap_model(model)
    assert torch.equal(module(torch.ones(1, 4)), plain)
    refused = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    with pytest.raises(ConfigError, match="no LayerNorm"):
        infinity.wrap_model(refused, None, config)
    assert refused(torch.ones(1, 4)).shape == (1, 4)
    monkeypatch.setattr(seams, "EXTENSIONS", list(EXTENSIONS))
    model, _ = infinity.wrap_model(module, None, config)
    assert "what is held" not in parts_of(model).planned.plan.terms[Tier.HOST]
    infinity.unwrap_model(model)


def test_the_first_staging_backend_that_works_is_taken(listed, monkeypatch):
    """Twins: one that does not work, and one whose folder is not there."""
    monkeypatch.setattr(seams, "STAGING_BACKENDS", ["ext.gone.away.Nothing", Bypass])
    assert backend_for(None, "able") is Bypass and backend_for(None, "other") is ThroughHost
    assert ThroughHost.device_nbytes(1 << 20) == 0 and not ThroughHost.passes_host
