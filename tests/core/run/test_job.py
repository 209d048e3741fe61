"""Job: when every byte of it is at home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import RAMP, small_at_home

from infinity.core.run.job import wait_idle
from infinity.core.run.operations import Activity, Operation, Right, StateKind
from infinity.core.seams import Extension
from infinity.errors import CapacityError, UsageError


class Update:
    """Of a flat param; counts its waits."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


def momentum(params):
    return torch.optim.SGD(params, lr=1.0, momentum=0.5)


def test_every_update_has_been_waited_for():
    """Of each flat param of each unit, once. Twin: before, of none."""
    job = small_at_home(bias=True)
    flat_params = [flat for unit in job.engine.job.units for flat in unit.flat_params]
    updates = [Update() for _ in flat_params]
    for flat_param, update in zip(flat_params, updates, strict=True):
        flat_param.homes.commit(flat_param.homes.draft(), update)
    assert {update.waits for update in updates} == {0}
    wait_idle(job.engine.job)
    assert {update.waits for update in updates} == {1} and len(updates) >= 6


def test_what_users_wrote_is_at_home():
    """To a state dict, and to optimizer state. Method: what is read from home past both."""
    job = small_at_home(make=momentum)
    job.backward(RAMP)
    job.optimizer.step()
    first, store = job.handles[0], job.engine.job.store
    weights = job.model.state_dict()
    weights["layers.0.weight"].fill_(3.0)
    job.optimizer.state[first.param]["momentum_buffer"].fill_(4.0)
    wait_idle(job.engine.job)
    assert (
        first.flat_param.read_value(store, first.index, torch.float32).tolist() == [[3.0] * 4] * 2
    )
    assert first.flat_param.read_moment(store, "exp_avg", first.index).tolist() == [[4.0] * 4] * 2


def test_the_timeline_of_updates_is_drawn(monkeypatch):
    """Method: what the job's updates are told, after the last of them has ended."""
    job, seen = small_at_home(), []
    update = Update()
    job.handles[0].flat_param.homes.commit(job.handles[0].flat_param.homes.draft(), update)
    monkeypatch.setattr(job.engine.job.updates, "draw", lambda: seen.append(update.waits))
    wait_idle(job.engine.job)
    assert seen == [1]


class Sleep(StateKind):
    """A state of :class:`Sleeping`."""

    ASLEEP = Activity("z", frozenset({Right.NO_FORWARD}), "{} while it sleeps: wake it")


class Sleeping(Extension):
    """Takes a right while it sleeps, keeps an array, and listens. ``fails``: as it is installed."""

    def __init__(self, fails: type[BaseException] | None = None):
        self.fails, self.sleeps = fails, True

    def rights(self, job: Any) -> dict[StateKind, Callable[[], bool]]:
        return {Sleep.ASLEEP: lambda: self.sleeps}

    def install(self, job: Any, model: Any) -> None:
        job.kept.keep("sleep", keeper=self)
        job.events.step_ended.append(self.wake)
        if self.fails is not None:
            raise self.fails("no sleep")

    def wake(self, steps: int) -> None:
        self.sleeps = False


def test_an_extension_has_its_rights_while_it_is_there():
    """Method: a forward is refused in its state. Twins: in no such state, and once it has left."""
    made = small_at_home()
    job = made.engine.job
    sleeping = job.add(Sleeping())
    with pytest.raises(UsageError, match="optimizer.step.* while it sleeps"):
        job.uses.check(Operation.LOAD_STATE_DICT, "optimizer.step()")
    sleeping.wake(1)
    assert not job.uses.is_in(Sleep.ASLEEP)
    job.uses.check(Operation.LOAD_STATE_DICT)
    sleeping.sleeps = True
    assert job.uses.is_in(Sleep.ASLEEP)
    job.remove(sleeping)
    job.uses.check(Operation.LOAD_STATE_DICT)
    assert job.find(Sleeping) is None and not job.uses.is_in(Sleep.ASLEEP)


@pytest.mark.parametrize("fails", [CapacityError, KeyboardInterrupt, ValueError])
def test_an_extension_that_cannot_be_installed_leaves_nothing(fails):
    """Neither an array, a listener nor a state. Twin: one that can be has all three."""
    made = small_at_home()
    job = made.engine.job

    def held() -> tuple:
        kept = [homes.kept for unit in job.units for homes in (f.homes for f in unit.flat_params)]
        return any(kept), len(job.events.step_ended), job.uses.is_in(Sleep.ASLEEP)

    before, plan = held(), job.planned.plan
    with pytest.raises(fails, match="no sleep"):
        job.add(Sleeping(fails))
    assert held() == before == (False, before[1], False)
    assert job.planned.plan == plan and job.find(Sleeping) is None
    job.add(Sleeping())
    assert held() == (True, before[1] + 1, True)
