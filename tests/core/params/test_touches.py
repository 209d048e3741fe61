"""Touches: units are resident for one operation outside of a pass, if it is allowed now."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from lines import is_line
from small import RAMP, AtHome, small_at_home

import infinity
from infinity.core.params.touches import Touches
from infinity.errors import UsageError


def touches(job: AtHome, **parts) -> Touches:
    return Touches(
        SimpleNamespace(**vars(parts_of(job).job) | parts),
        lambda handle, what: UsageError(f"{what} of {handle.name} is refused"),
    )


def residency(job: AtHome, number: int = 0) -> str:
    return job.handles[number].unit.residency.name


def test_the_units_are_resident_and_held_in_the_block_alone():
    """Claim: a unit that two parameters share is held once. Twin: another unit is not brought."""
    job = small_at_home(bias=True)
    held = parts_of(job).prefetcher.is_held
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
        before = list(parts_of(job).schedule.uses)
        for handle in job.handles:
            with touches(job).holding([handle], "a use", writes=False):
                pass
        assert parts_of(job).schedule.uses == before != []


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
    assert not any(parts_of(job).prefetcher.is_held(handle.unit) for handle in job.handles)


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
    caplog.set_level("INFO", logger="infinity.core.params.touches")
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


# --- whatever comes in between ---

STRUCK = (
    "core/params/touches.py",
    "core/params/touch.py",
    "core/units/exposure.py",
    "core/params/forward_edits.py",
)


def struck_at(line: int) -> Callable:
    """A tracer that interrupts at that line of the files of a touch."""
    lines = itertools.count(1)

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(STRUCK):
            return None
        if is_line(frame, event) and next(lines) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    return trace


def is_struck(line: int, work: Callable[[], object]) -> bool:
    before = sys.gettrace()
    sys.settrace(struck_at(line))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("home", ["host", "device"])
def test_after_an_interrupt_at_any_line_the_old_or_the_new_value_stands(home):
    """Method: every line of a write, to bf16 weights with masters; then what is read, written,
    stepped and saved agrees, and a backward from before is right or refused. Twin: some strikes
    leave the old value and some the new one."""
    seen = set()
    for line in itertools.count(1):
        model = torch.nn.Linear(4, 4).bfloat16()
        config = {"params": home, "optimizer": home}
        model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)
        weight, old = model.weight, model.weight.detach().clone()
        x = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
        loss = (x * weight.detach()).sum()
        if not is_struck(line, lambda weight=weight: weight.data.mul_(2)):
            break
        now = weight.detach().clone()
        is_old = torch.equal(now, old)
        seen.add(is_old)
        assert is_old or torch.equal(now, 2 * old)
        assert torch.equal(model.state_dict()["weight"], now)
        try:
            loss.backward()
        except (RuntimeError, UsageError):
            pass
        else:
            assert is_old and torch.equal(x.grad, old)
        weight.data.add_(1)
        model(x.detach()).sum().backward()
        optimizer.zero_grad()
        optimizer.step()
        assert torch.equal(model.state_dict()["weight"], now + 1)
        master = optimizer.state_dict()["state"].get(0, {}).get("master", now + 1)
        assert torch.equal(master.bfloat16(), now + 1)
    assert seen == {True, False} and line > 50


@pytest.mark.parametrize("home", ["host", "device"])
def test_a_write_is_counted_wherever_the_home_is(home):
    """Method: fp32 weights that are their own masters; a state dict and a graph from before the
    write are told. Twin: those of a parameter that is not written to."""
    job = small_at_home(home)
    first, second = job.model.layers[0].weight, job.model.layers[1].weight
    loss, state = (first * first).sum(), job.model.state_dict()
    second.data.zero_()
    loss.backward(retain_graph=True)
    first.data.zero_()
    with pytest.raises(UsageError, match="they were changed since"):
        loss.backward()
    state["layers.0.weight"][0] = 5
    with pytest.raises(UsageError, match="was written to after"):
        job.model.state_dict()


@pytest.mark.parametrize("home", ["host", "device"])
def test_a_write_that_torch_does_not_name_as_one_is_found(home):
    """Method: relu in place, which masters follow; and inside an average's block, where it is
    refused with the values of before. Twin: copying the averages out is a read."""
    relu = torch.nn.functional.relu
    model = torch.nn.Linear(4, 4).bfloat16()
    config = {"params": home, "optimizer": home}
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)
    with torch.no_grad():
        relu(model.weight, True)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert (optimizer.state_dict()["state"][0]["master"] > -0.01).all()
    job = small_at_home(home)
    job.model.layers[0].weight.data.neg_()
    average = infinity.ema(job.model, 0.5)
    average.update()
    with average.applied(), torch.no_grad():
        with pytest.raises(UsageError, match="inside `with average.applied"):
            relu(job.model.layers[0].weight, True)
        copy = torch.empty(2, 4).copy_(job.model.layers[0].weight)
    for values in (copy, average.state_dict()["layers.0.weight"], job.model.layers[0].weight):
        assert torch.equal(values.detach() + 0, torch.full((2, 4), -1.0))


def test_units_that_were_touched_give_way_to_full_params():
    """Twin: without that, a block would not fit its budget."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
    config = {"params": "host", "device_memory": "200KiB"}
    model, _ = infinity.wrap_model(model, None, config)
    for weight in model.parameters():
        weight.detach().norm()
    with infinity.full_params(model, ["0.weight"]) as params:
        assert params["0.weight"].shape == (128, 128)


def test_a_touch_beside_another_threads_pass_waits_for_it():
    """Method: one thread trains while another reads a tensor at rest, until that has seen several
    steps. In the other's pass the parameter itself is an ordinary one."""
    job, seen, failures = small_at_home(), set(), []
    is_over, weight = threading.Event(), job.model.layers[0].weight.detach()

    def read() -> None:
        try:
            while not is_over.is_set():
                seen.add((weight * 1)[0, 0].item())
        except Exception as error:  # noqa: BLE001 - whatever it is, the other thread waits for it
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while len(seen) < 3 and not failures:
        job.backward(RAMP)
        job.optimizer.step()
        job.optimizer.zero_grad()
    is_over.set()
    thread.join()
    assert failures == []
