"""Updates: what steps the state, when a step ends, and what listeners are told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from small import RAMP, small_at_home

from infinity.core.machine.device import Device
from infinity.core.machine.traffic import UPDATES, Traffic
from infinity.core.step.updates import Updates, draw_updates


class Line:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.marks: list[tuple] = []

    def add(self, lane: str, name: str, start: float, end: float, **details) -> None:
        self.marks.append((lane, name, start, end))


class Updater:
    """Has made some steps, and tells of them once."""

    def __init__(self, elements: int = 0, step_seconds: float = 0.0):
        self.elements, self.step_seconds, self.is_recording = elements, step_seconds, False
        self.events: list[tuple] = []

    def record_events(self) -> None:
        self.is_recording = True

    def take_events(self) -> list[tuple]:
        events, self.events = self.events, []
        return events


EVENTS = [
    ("load", 0, 9, 1.0, 2.0, 0.5),
    ("step", 1, 9, 2.0, 3.0, 2.0),
    ("save", 1, 9, 3.0, 4.0, 3.0),
]


def make(line: Line | None = None, *, kernels=None) -> SimpleNamespace:
    """Updates of the units of a wrapped model: each element has a weight and two moments."""
    units = parts_of(small_at_home(make=torch.optim.AdamW)).units
    traffic = Traffic(moved=[line.add] if line else [])
    device = Device(torch.device("cpu"), traffic)
    device.kernels = kernels
    updates = Updates(units, traffic)
    return SimpleNamespace(it=updates, device=device, traffic=traffic, units=units)


def test_each_event_is_drawn_in_the_lane_of_its_edge():
    line, updater = Line(), Updater()
    updater.events = list(EVENTS)
    draw_updates(updater, Traffic(moved=[line.add]), ["a", "b"])
    assert line.marks == [
        ("nvme->host", "a state", 1.0, 2.0),
        ("optimizer", "b", 2.0, 3.0),
        ("host->nvme", "b state", 3.0, 4.0),
    ]


@pytest.mark.parametrize("is_drawn", [True, False])
def test_events_are_recorded_and_told_only_to_listeners(is_drawn):
    line, updater = Line(), Updater()
    updates = make(line if is_drawn else None)
    updates.it.draw()  # before there is an updater
    updates.it.use(updater, updates.device, 0)
    updater.events = list(EVENTS)
    updates.it.draw()
    assert updater.is_recording == is_drawn and len(line.marks) == 3 * is_drawn
    assert updates.it.recorded == [updater] * is_drawn and updates.it.updater is updater
    assert len(updater.events) == 3 * (not is_drawn)


def test_the_end_of_a_step_is_counted_and_its_events_are_told():
    line, updater = Line(), Updater()
    updates = make(line)
    updates.it.use(updater, updates.device, 0)
    for number in (1, 2):
        updater.events = EVENTS[1:2]
        updates.it.end_step()
        assert updates.it.clock.steps == number
    assert [mark[:2] for mark in line.marks] == [("optimizer", "layers.1")] * 2


def test_without_listeners_a_step_is_counted_alone():
    updates = make()
    updates.it.use(Updater(), updates.device, 0)
    updates.it.end_step()
    assert updates.it.clock.steps == 1


def test_the_device_steps_only_with_kernels():
    updates = make()
    updates.it.use(Updater(), updates.device, 64)
    assert updates.it.stepper is None
    updates = make(kernels=object())
    updates.it.use(Updater(), updates.device, 64)
    assert updates.it.stepper is not None
    updates.it.close()
    assert updates.it.stepper is None is updates.it.updater


@pytest.mark.parametrize("has_stepped", [True, False])
def test_the_devices_share_is_chosen_by_what_the_last_step_waited_for(has_stepped, monkeypatch):
    """Twin: before the first step nothing is known of the processor. A wait is told once."""
    updates = make(kernels=object())
    updates.it.use(Updater(400, 4.0 * has_stepped), updates.device, 1 << 16)
    updates.traffic.stood_still(UPDATES, "a", 1.0, 3.0)
    asked: list[tuple] = []
    monkeypatch.setattr(updates.it.stepper, "choose_fraction", lambda *args: asked.append(args))
    units = updates.units[::-1]
    for waits in ([2.0], []):
        updates.it.begin_step(units)
        flat_params, *rest = asked.pop()
        assert flat_params == [flat for unit in units for flat in unit.flat_params]
        assert rest == [waits, 100.0 * has_stepped]


def test_a_step_begins_without_a_device_that_steps():
    updates = make()
    updates.it.use(Updater(400, 4.0), updates.device, 0)
    updates.it.begin_step([])
    assert updates.it.stepper is None


def test_the_engine_ends_each_step_here():
    """Twin: a backward is no step."""
    job = small_at_home()
    assert parts_of(job).updates.names == [f"layers.{index}" for index in range(6)]
    job.backward(RAMP)
    assert parts_of(job).updates.clock.steps == 0
    job.optimizer.step()
    assert parts_of(job).updates.clock.steps == 1
