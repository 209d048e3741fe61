"""Touches: units are resident for one operation outside of a pass, if it is allowed now."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small import RAMP, AtHome, small_at_home

import infinity
from infinity.errors import UsageError
from infinity.runtime.touches import Touches


def touches(job: AtHome, **parts) -> Touches:
    return Touches(
        SimpleNamespace(**vars(job.engine.job) | parts),
        lambda handle, what: UsageError(f"{what} of {handle.name} is refused"),
    )


def residency(job: AtHome, number: int = 0) -> str:
    return job.handles[number].unit.residency.name


def test_the_units_are_resident_and_held_in_the_block_alone():
    """Claim: a unit that two parameters share is held once. Twin: another unit is not brought."""
    job = small_at_home(bias=True)
    held = job.engine.job.prefetcher.is_held
    with touches(job).holding(job.handles[:2], "a use", writes=False):
        assert residency(job) == "RESIDENT" and held(job.handles[0].unit)
        assert residency(job, 2) == "STORED"
        assert torch.equal(job.handles[0].param.detach(), torch.ones(2, 4))
    assert not held(job.handles[0].unit)


def test_a_unit_stays_for_the_next_use_and_a_step_lets_it_go():
    job = small_at_home()
    for _ in range(2):
        with touches(job).holding(job.handles[:1], "a use", writes=False):
            pass
        assert residency(job) == "RESIDENT"
    job.backward(RAMP)
    job.optimizer.step()
    assert residency(job) == "STORED"
    assert torch.equal(job.model.layers[0].weight.detach() + 0, (1 - RAMP).expand(2, 4))


def test_a_use_is_none_of_the_schedules():
    """A pass is expected as it was. Twin: a forward records its own."""
    job = small_at_home()
    for _ in range(2):
        job.backward(RAMP)
        job.optimizer.zero_grad()
        before = list(job.engine.job.schedule._current)
        for handle in job.handles:
            with touches(job).holding([handle], "a use", writes=False):
                pass
        assert job.engine.job.schedule._current == before != []


def test_a_write_is_home_after_the_block_and_counted():
    """Twin: a read counts nothing, nor does a write that is none."""
    job = small_at_home()
    handle = job.handles[0]
    for value, expected in ((None, 0), (1.0, 1), (5.0, 2)):
        with touches(job).holding([handle], "a use", writes=True), torch.no_grad():
            if value is not None:
                handle.param.fill_(value)
        assert handle.version == expected
    assert job.model.state_dict()["layers.0.weight"].tolist() == [[5.0] * 4] * 2


def test_masters_follow_a_write_where_the_device_is_the_home():
    """Method: bf16 weights with masters; one element is written."""
    model = torch.nn.Linear(4, 2).bfloat16()
    kept = {"params": "device", "optimizer": "device"}
    model, _ = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), kept)
    before = model.state_dict()["weight"].clone()
    with torch.no_grad():
        model.weight[0, 0] = 3
    after = model.state_dict()["weight"]
    assert after[0, 0] == 3 and torch.equal(after.view(-1)[1:], before.view(-1)[1:])


def test_an_exception_lets_the_units_go():
    job = small_at_home()
    with pytest.raises(KeyError):
        with touches(job).holding(job.handles[:2], "a use", writes=False):
            raise KeyError
    assert not any(job.engine.job.prefetcher.is_held(handle.unit) for handle in job.handles)


@pytest.mark.parametrize("writes", [True, False])
def test_a_use_is_refused_where_the_table_refuses_it(writes):
    """Method: inside an average's block, a write is refused and a read is not."""
    job = small_at_home()
    average = infinity.ema(job.model, 0.5)
    average.update()
    with average.applied():
        if writes:
            with pytest.raises(UsageError, match="inside `with average.applied"):
                job.model.layers[0].weight.data.mul_(2)
        else:
            assert (job.model.layers[0].weight.detach() + 0).tolist() == [[1] * 4] * 2
    assert job.model.state_dict()["layers.0.weight"].tolist() == [[1] * 4] * 2


def test_what_other_ranks_have_is_refused(monkeypatch):
    job = small_at_home()
    monkeypatch.setattr(type(job.handles[0].unit), "is_sharded", property(lambda unit: True))
    with pytest.raises(UsageError, match="a use of layers.0.weight is refused"):
        with touches(job).holding(job.handles[:1], "a use", writes=False):
            pass


def test_a_known_misuse_is_refused():
    """Method: another optimizer steps the parameters. Twin: what libraries only read is not."""
    job = small_at_home()
    job.backward(RAMP)
    stray = torch.optim.SGD(job.model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="This is not the optimizer that wrap_model returned"):
        stray.step()
    assert job.model.state_dict()["layers.0.weight"].tolist() == [[1] * 4] * 2
    assert torch.nn.utils.parameters_to_vector(job.model.parameters()).sum().item() == 48


def test_what_a_loops_uses_cost_is_logged_once_at_its_second_step(caplog):
    """Twins: nothing is logged in the first step, nor for a unit that is resident anyway."""
    caplog.set_level("INFO", logger="infinity.runtime.touches")
    job = small_at_home()
    for expected in (0, 1, 1):
        for weight in job.model.parameters():
            weight.detach().norm()
        assert len(caplog.messages) == expected
        job.backward(RAMP)
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert caplog.messages[0].startswith(
        "6 operations on parameters outside of a pass (norm) brought"
    )
    caplog.clear()
    kept = small_at_home("device")
    for _ in range(2):
        kept.model.layers[0].weight.detach().norm()
        kept.backward(RAMP)
        kept.optimizer.step()
        kept.optimizer.zero_grad()
    assert caplog.messages == []
