"""Job: when every byte of it is at home."""

from __future__ import annotations

import torch
from small import RAMP, small_at_home

from infinity.core.run.job import wait_idle


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
