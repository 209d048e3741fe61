"""Engine: what parameters, hooks and the optimizer ask of it is asked of the right part, in order.

Words used here: **noted**: a proxy for a part of the job, which notes what it is asked.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deleted import needs
from models import at_home
from small import RAMP, AtHome, Small, small_at_home
from torch import nn

import infinity
from infinity.core.run import one_thread
from infinity.core.run.engine import Engine
from infinity.core.run.operations import Call, OperationKind, State
from infinity.core.run.registry import wrapped
from infinity.core.step.context import StepContext
from infinity.core.units.handle import handle_of, own_bytes
from infinity.errors import UsageError

ONES = [[1.0] * 4] * 2


class Noted:
    """Notes each call in ``log``; ``facts`` are its other attributes."""

    def __init__(self, log: list, name: str = "", returns: Any = None, **facts: Any):
        self._log, self._name, self._returns = log, name, returns
        vars(self).update(facts)

    def __getattr__(self, asked: str) -> Any:
        def note(*args: Any, **named: Any) -> Any:
            self._log.append((f"{self._name}.{asked}".strip("."), *args, *named.values()))
            return self._returns

        return note


def with_parts(job: AtHome, **parts: Any) -> Engine:
    """The engine of ``job``, whose job has other parts."""
    job.engine.job = dataclasses.replace(job.engine.job, **parts)
    return job.engine


def engine_of(job: AtHome, free: Any = lambda: None) -> Engine:
    """Another engine of the same parts."""
    return Engine(job.engine.job, None, free)


# --- what it is made of ---


def test_parameters_find_the_parts_of_the_job():
    engine = small_at_home(activations="host").engine
    job = engine.job
    for name in ("uses", "steps", "device", "gradients"):
        assert getattr(engine, name) is getattr(job, name) is not None


class Mixed(nn.Module):
    """Of three layers the second is frozen, and the third has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.layers[2].weight = self.layers[0].weight

    def forward(self) -> torch.Tensor:
        return sum(param.sum() for param in self.parameters())


def test_every_parameter_is_known_by_its_names_and_place():
    """Those that are stepped are trained, and have a record of their gradient. Twin: the frozen
    ones are not."""
    model = Mixed()
    params = [param for param in model.parameters() if param.requires_grad]
    model, _ = infinity.wrap_model(model, torch.optim.SGD(params), at_home("host", "host", None))
    engine = wrapped(model).engine
    handles = [handle_of(param) for param in model.parameters()]
    assert handles[0].names == ["layers.0.weight", "layers.2.weight"]
    assert [handle.name for handle in handles[1:]] == [
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "layers.2.bias",
    ]
    for handle, param in zip(handles, model.parameters(), strict=True):
        assert handle.engine is engine and handle.param is param
        assert handle.flat_param in handle.unit.flat_params and handle.unit in engine.job.units
        assert handle.flat_param.handles[handle.index] is handle
        assert handle.flat_param.names[handle.index] == handle.name
    trained = {handles[0], handles[1], handles[4]}
    assert set(engine.job.trained) == trained == set(engine.gradients.values.handles)
    assert len(engine.job.trained) == 3
    assert {handle for handle in handles if handle.grad is not None} == trained


def test_a_weight_is_found_by_its_memory():
    """Method: what a hook sees in a forward. Twin: another tensor is not."""
    job, found = small_at_home(), []
    storages = job.engine.job.storages
    first = job.model.layers[0]
    first.register_forward_hook(lambda *_: found.append(storages.find(own_bytes(first.weight))))
    job.backward(RAMP)
    assert found[0][0] is handle_of(first.weight).unit and storages.find(torch.ones(1)) is None


def test_the_units_of_a_block_are_those_with_its_parameters_and_whole():
    """Twin: one that is gathered in tiles is left out."""
    job = small_at_home()
    engine, layers = job.engine, job.model.layers
    first, second = (handle_of(layers[index].weight).unit for index in (0, 1))
    assert engine.units_of(layers[0]) == [first] and engine.units_of(layers[1]) == [second]
    assert engine.units_of(nn.Sequential(layers[1], layers[0])) == [first, second]
    assert engine.units_of(nn.Linear(1, 1)) == [] and len(engine.units_of(job.model)) == 6
    whole = small_at_home(bias=True)
    part = nn.Module()
    part.weight = whole.model.layers[0].weight
    assert whole.engine.units_of(part) == [handle_of(part.weight).unit]
    sizes = engine.job.planned.sizes
    sizes[first.index] = dataclasses.replace(sizes[first.index], at_once_nbytes=8)
    assert engine.units_of(nn.Sequential(layers[1], layers[0])) == [second]


# --- the beginning of a use ---


class Repair(OperationKind):
    """An operation of an extension, which loads all state."""

    LOAD = Call("loading all", frozenset(), loads_all=True)


def test_a_use_is_prepared_in_its_order():
    """What listens to its begin, then recovery, then what waits until it may run, then what users
    wrote. Twin: a use that loads all state leaves the journal and what waits."""
    for operation, expected in (
        (None, ["begun", "recover", "ready", "lents.begin_use"]),
        (Repair.LOAD, ["begun", "recover", "lents.begin_use"]),
    ):
        job, log = small_at_home(), []
        engine = with_parts(job, lents=Noted(log, "lents"))
        engine.job.events.use_begun.append(lambda which, log=log: log.append(("begun", which)))
        engine.job.events.use_ready.append(lambda log=log: log.append(("ready",)))
        engine.recover = lambda *, finishing, log=log: log.append(("recover", finishing))
        engine.prepare(operation)
        assert [name for name, *_ in log] == expected
        assert log[:2] == [("begun", operation), ("recover", operation is None)]
        assert log[-1] == ("lents.begin_use", operation is not None)


def test_a_halted_job_is_told_to_the_other_ranks_and_refused():
    """Once it is recovered. Twin: what loads all state may begin."""
    job, log = small_at_home(), []
    engine = with_parts(job, collectives=Noted(log), lents=Noted(log, "lents"))
    engine.job.events.use_ready.append(lambda: log.append(("ready",)))
    engine.uses.halt("lost")
    engine.recover = lambda *, finishing: log.append(("recover", finishing))
    with pytest.raises(UsageError, match="lost") as refused:
        engine.prepare(None)
    assert log == [("recover", True), ("fail", refused.value, True)]
    log.clear()
    engine.prepare(Repair.LOAD)
    assert log == [("recover", False), ("lents.begin_use", True)]


def test_nothing_begins_as_the_process_ends(monkeypatch):
    """Method: a daemon thread after the main thread has ended, as it seems to it."""
    engine, log, told = small_at_home().engine, [], []
    engine.job.events.use_begun.append(lambda operation: log.append(("begun",)))
    ended = threading.Thread(target=lambda: None)
    monkeypatch.setattr(one_thread.threading, "main_thread", lambda: ended)

    def late() -> None:
        with pytest.raises(UsageError, match="the process ends") as refused:
            engine.prepare(None)
        told.append(refused.value)

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    thread.join()
    assert told and log == []


def test_an_interrupted_job_is_recovered_while_its_homes_exist():
    """To the end, unless another use does the rest. Twins: one that was not interrupted has nothing
    to repair, nor has one without homes."""
    job, log = small_at_home(), []
    engine, scopes = job.engine, job.engine.job.scopes
    job.engine.job.extensions.append(SimpleNamespace(drop=lambda job: log.append(("recovered",))))
    engine.recover()
    assert log == []
    scopes.interrupted = True
    engine.recover(finishing=False)
    assert scopes.interrupted and log == [("recovered",)]
    engine.recover()
    assert not scopes.interrupted and len(log) == 2
    engine.shut_down()
    scopes.interrupted = True
    engine.recover()
    assert scopes.interrupted and len(log) == 2


def test_a_backward_that_is_the_first_use_recovers():
    engine = small_at_home().engine
    engine.job.scopes.interrupted = True
    engine.backward._recover()
    assert not engine.job.scopes.interrupted


def test_the_states_of_a_running_pass_are_known():
    """Twin: before and after it the job is in none."""
    job, seen = small_at_home(), []

    def states() -> set[State]:
        return {state for state in State if job.engine.uses.is_in(state)}

    job.model.layers[0].register_forward_hook(lambda *_: seen.append(states()))
    assert states() == set()
    job.backward(RAMP)
    assert seen == [{State.FORWARD}] and states() == set()


# --- what parameters ask ---


def test_a_parameter_at_home_is_brought_in_a_forward_and_refused_outside():
    """And is there until the forward ends."""
    job, seen = small_at_home(), []
    engine, handles = job.engine, job.handles
    residency = lambda: handles[3].unit.residency.name

    def hook(*_: Any) -> None:
        assert engine.computing
        engine.touch(handles[3], "a use")
        seen.extend([residency(), engine.job.prefetcher.is_held(handles[3].unit)])

    job.model.layers[0].register_forward_hook(hook)
    job.backward(RAMP)
    assert seen == ["RESIDENT", True] and not engine.job.prefetcher.is_held(handles[3].unit)
    assert not engine.computing
    with pytest.raises(UsageError, match="^a use on parameter layers.3.weight, which is at home"):
        engine.touch(handles[3], "a use")


def test_a_forked_process_touches_nothing():
    def refuse() -> None:
        raise UsageError("forked")

    engine = with_parts(small_at_home(), store=Noted([], check_process=refuse))
    with pytest.raises(UsageError, match="forked"):
        engine.touch(None, "a use")


def test_a_refusal_says_where_the_parameter_is_and_what_to_do():
    """Its name is that of this stage; a known mistake has a remedy of its own."""
    job = small_at_home()
    engine, handle = with_parts(job, prefix="layers."), job.handles[0]
    said = str(engine.refusal(handle, "a use"))
    assert said.startswith("a use on parameter layers.0.weight, which is at home on host. Read or")
    assert "infinity.full_params(model, ['0.weight'])" in said
    refuse = lambda: engine.refusal(handle, "a use")
    code = compile("said = str(refuse())", "/x/torch/optim/swa_utils.py", "exec")
    exec(code, {"refuse": refuse}, found := {})
    assert "infinity.ema(model, decay)" in found["said"]
    assert "Read or change it inside" not in found["said"]


def test_a_value_is_written_and_read_at_home():
    """Twins: while it is refused nothing is written; a tensor of a state dict that is loaded is
    current afterwards, and what was written to one is read."""
    job = small_at_home()
    engine, handle = job.engine, job.handles[0]
    state = job.model.state_dict()["layers.0.weight"]
    state.fill_(2.0)
    assert engine.read_value(handle).tolist() == [[2.0] * 4] * 2
    engine.write_value(handle, state.fill_(3.0))
    assert engine.read_value(handle).tolist() == [[3.0] * 4] * 2
    state.fill_(4.0)
    assert engine.read_value(handle).tolist() == [[4.0] * 4] * 2
    with engine.uses.begin():
        state.fill_(5.0)
        assert engine.read_value(handle).tolist() == [[5.0] * 4] * 2
    engine.write_value(handle, torch.full((2, 4), 4.0))
    assert engine.read_value(handle).tolist() == [[4.0] * 4] * 2
    engine.uses.define({State.STEPPED: lambda: True})
    with pytest.raises(UsageError, match="^writing to a parameter between step_in_backward"):
        engine.write_value(handle, torch.ones(2, 4))
    assert engine.read_value(handle).tolist() == [[4.0] * 4] * 2
    assert engine.read_value(job.handles[1]).tolist() == ONES
    engine.uses.halt("lost")
    with pytest.raises(UsageError, match="lost"):
        engine.read_value(handle)


def test_the_passes_say_how_tensors_are_saved():
    """Method: what the passes are asked."""
    job, log = small_at_home(), []
    engine = job.engine
    engine.passes = Noted(log, "passes", returns="a block", is_recomputed="perhaps")
    assert engine.saving_tensors() == "a block" and log == [("passes.saving_tensors",)]
    context = engine.make_forward_context()
    assert context.saving_tensors() == "a block" and context.is_recomputed() == "perhaps"


def test_blocks_that_run_another_way_have_the_parts_of_this_job():
    """And call the passes and the backward. Twin: the context alone keeps the engine."""
    job, log = small_at_home(), []
    engine = job.engine
    engine.backward = Noted(log)
    engine.passes = Noted(log, returns="a block")
    context = engine.make_forward_context()
    for name in ("journal", "device", "ledger", "traffic", "store", "gradients"):
        assert getattr(context, name) is getattr(engine.job, name)
    assert context.running_again(["a unit"]) == "a block"
    context.track_backward()
    assert log == [("running_again", ["a unit"]), ("track_task",)]
    assert context.owner is engine


# --- what the optimizer asks ---


def test_the_optimizer_has_the_parts_of_this_job():
    """And calls the parts that do what it asks."""
    job = small_at_home()
    engine, context = job.engine, job.engine.make_step_context()
    shared = {f.name for f in dataclasses.fields(StepContext)}
    shared &= {f.name for f in dataclasses.fields(engine.job)}
    assert len(shared) == 14
    for name in shared:
        assert getattr(context, name) is getattr(engine.job, name)
    assert context.release == engine.job.prefetcher.release_all
    assert context.end_step == engine.end_step
    assert context.admit.func == engine.admit and context.admit.keywords == {"optimizer_index": 0}


def test_the_optimizer_sees_the_running_pass_as_it_is():
    """Twin: before, nothing is cut short and nothing is kept."""
    job = small_at_home()
    running, context = job.engine.job.running, job.engine.make_step_context()
    assert (context.is_cut_short(), context.stages_differ()) == (False, False)
    running.tokens[1] = None
    assert (context.is_cut_short(), context.stages_differ()) == (True, False)
    running.tokens.clear()
    running.stages_differ = True
    assert (context.is_cut_short(), context.stages_differ()) == (False, True)


def test_an_engine_lives_as_long_as_its_optimizers_context():
    """Twin: the engine does not keep a context, so both go."""
    job, ended = small_at_home(), []
    engine = engine_of(job, lambda: ended.append(True))
    context, gone = engine.make_step_context(), weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is not None and ended == []
    of_context = weakref.ref(context)
    del context
    gc.collect()
    assert gone() is None is of_context() and ended == [True]


def test_the_end_of_a_step_reads_the_first_units_of_the_next_forward():
    job, log = small_at_home(), []
    schedule = Noted(log, "schedule", returns=[3, 1])
    engine = with_parts(
        job, schedule=schedule, prefetcher=Noted(log, "prefetcher"), updates=Noted(log, "updates")
    )
    engine.end_step()
    assert [each[:2] for each in log] == [
        ("schedule.first",),
        ("prefetcher.fetch_ahead", [3, 1]),
        ("schedule.end_step",),
        ("updates.end_step", 0),
    ]


@needs("ext/class_step")
def test_a_frozen_parameter_is_stepped_once_it_is_admitted():
    """With its moments and with its hook. Twin: while a listener refuses, it stays frozen."""
    model = Small()
    model.layers[2].weight.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5)
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", None))
    engine, late = wrapped(model).engine, handle_of(model.layers[2].weight)
    ended, hooked = [], []
    engine.passes.hook = hooked.append
    admit = lambda: engine.admit(
        [late.param],
        moments_of=lambda _: {"exp_avg": torch.float32},
        then=lambda: ended.append(True),
    )

    def refuse(asked: str) -> None:
        raise UsageError(f"{asked}: not now")

    engine.job.events.admitting.append(refuse)
    with pytest.raises(UsageError, match="^add_param_group: not now"):
        admit()
    engine.job.events.admitting.clear()
    assert late not in engine.job.trained and ended == hooked == []
    resources = engine._resources
    admit()
    assert late in engine.job.trained and ended == [True] and engine._resources is resources
    assert len(hooked) == 1 and hooked[0] is late.param
    assert "exp_avg" in late.flat_param.arrays and "exp_avg_sq" not in late.flat_param.arrays


def test_every_write_is_at_home_once_the_engine_is_idle():
    job = small_at_home()
    weights = job.model.state_dict()
    weights["layers.0.weight"].fill_(3.0)
    job.engine.wait_idle()
    flat_param = job.handles[0].flat_param
    assert (
        flat_param.read_value(job.engine.job.store, job.handles[0].index).tolist()
        == [[3.0] * 4] * 2
    )


# --- the end ---


def test_an_engine_that_is_shut_down_has_nothing_and_is_unwrapped():
    """However often. Twin: before it is open."""
    job, ended = small_at_home(), []
    engine = engine_of(job, lambda: ended.append(True))
    uses, updates = engine.uses, engine.job.updates
    assert engine.is_open and not uses.is_in(State.UNWRAPPED) and updates.updater is not None
    engine._resources = object()
    for _ in range(2):
        engine.shut_down()
        assert not engine.is_open and uses.is_in(State.UNWRAPPED) and ended == [True]
        assert engine._resources is None is updates.updater


def test_an_interrupt_does_not_end_the_end():
    """It is told once all is freed. Twin: the state is known to be gone after the engine is."""
    job, tries = small_at_home(), []

    def free() -> None:
        tries.append(True)
        if len(tries) == 1:
            raise KeyboardInterrupt

    engine = engine_of(job, free)
    uses = engine.uses
    try:
        engine.shut_down()
    except KeyboardInterrupt:
        pass
    assert len(tries) == 2
    other = engine_of(job)
    assert not uses.is_in(State.UNWRAPPED)
    del other
    gc.collect()
    assert uses.is_in(State.UNWRAPPED)
