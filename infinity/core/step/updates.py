"""Updates: holds the updater, which steps state on the processor, and the device's stepper."""

from __future__ import annotations

from collections.abc import Sequence

from ... import native
from ..machine.device import Device
from ..machine.traffic import Traffic
from ..units.unit import ParamUnit
from .device_step import DeviceStepper
from .step_clock import StepClock


def draw_updates(updater: native.Updater, traffic: Traffic, names: list[str]) -> None:
    """Tells the updater's new events to who listens to transfers."""
    lanes = {"load": "nvme->host", "step": "optimizer", "save": "host->nvme"}
    for kind, unit, _, start, end, ready in updater.take_events():
        name = names[unit] if kind == "step" else f"{names[unit]} state"
        traffic.tell(lanes[kind], name, start, end, ready=ready)


class Updates:
    """The steppers of the state of ``units``. Used from the thread that steps."""

    def __init__(self, units: Sequence[ParamUnit], traffic: Traffic):
        self._traffic = traffic
        self.names = [unit.name for unit in units]
        self.clock = StepClock()
        self.updater: native.Updater | None = None  # None: nothing is stepped
        self.stepper: DeviceStepper | None = None  # if the processor cannot access all state
        self.asked = 0.0  # when the last step was, of time.perf_counter()
        self.recorded: list[native.Updater] = []  # whose events are drawn when the engine ends

    def use(self, updater: native.Updater, device: Device, device_slot_nbytes: int) -> None:
        """Steps by ``updater``, and on ``device`` if it has kernels."""
        self.updater = updater
        if device.kernels is not None:
            self.stepper = DeviceStepper(device, self._traffic, device_slot_nbytes)
        if self._traffic.moved:
            updater.record_events()
            self.recorded.append(updater)

    def begin_step(self, units: Sequence[ParamUnit]) -> None:
        """Starts a step: chooses the device's share of it. ``units``: in the order of their next
        use."""
        waits, updater = self._traffic.take_update_waits(), self.updater
        if self.stepper is not None:
            rate = updater.elements / updater.step_seconds if updater.step_seconds else 0.0
            stepped = [flat for unit in units for flat in unit.flat_params if flat.spec.stepped]
            self.stepper.choose_fraction(stepped, waits, rate)

    def end_step(self, index: int = 0) -> None:
        """Ends what the optimizer ``index`` makes of a step, after its updates are submitted."""
        self.clock.tick(self._traffic.waits(), index)
        if self._traffic.moved:
            self.draw()

    def draw(self) -> None:
        """Tells new events, if anything listens."""
        if self._traffic.moved and self.updater is not None:
            draw_updates(self.updater, self._traffic, self.names)

    def close(self) -> None:
        """Releases the updater and the device's stepper."""
        self.updater = self.stepper = None
