"""Updates: has the updater, which steps state on the processor, and the device's stepper, and counts their steps."""

from __future__ import annotations

from collections.abc import Sequence

from .. import native
from ..machine.device import Device
from ..machine.traffic import Traffic
from ..state.unit import ParamUnit
from .device_step import DeviceStepper
from .step_clock import StepClock


def draw_updates(updater: native.Updater, traffic: Traffic, names: list[str]) -> None:
    """Puts on the timeline what the updater has done since the last time."""
    lanes = {"load": "nvme->host", "step": "optimizer", "save": "host->nvme"}
    for kind, unit, _, start, end in updater.take_events():
        traffic.mark(lanes[kind], names[unit] if kind == "step" else f"{names[unit]} state", start, end)


class Updates:
    """What steps the state of ``units``. Used from the thread that steps."""

    def __init__(self, units: Sequence[ParamUnit], traffic: Traffic):
        self._units, self._traffic = units, traffic
        self.names = [unit.name for unit in units]
        self.clock = StepClock()
        self.updater: native.Updater | None = None  # None: nothing is stepped
        self.stepper: DeviceStepper | None = None  # where the processor cannot step all there is
        self.recorded: list[native.Updater] = []  # whose events are to be drawn when the engine goes

    def use(self, updater: native.Updater, device: Device, device_slot_nbytes: int) -> None:
        """Steps by ``updater``, and on ``device`` where that has kernels."""
        self.updater = updater
        if device.kernels is not None:
            self.stepper = DeviceStepper(device, self._traffic, device_slot_nbytes)
        if self._traffic.timeline is not None:
            updater.record_events()
            self.recorded.append(updater)

    def begin_step(self) -> None:
        """Begins a step: chooses what of it the device does."""
        if self.stepper is not None and self.updater.step_seconds:
            self.stepper.choose_share(self.updater.elements / self.updater.step_seconds, self._passing_nbytes())

    def _passing_nbytes(self) -> float:
        """Bytes of state per element that would come in if the device stepped it."""
        specs = [shard.spec for unit in self._units for shard in unit.shards if shard.spec.stepped]
        return max((sum(spec.nbytes_per_element().values()) for spec in specs), default=0.0)

    def end_step(self) -> None:
        """Ends a step, whose updates are submitted."""
        began = self.clock.tick()
        if self._traffic.timeline is not None:
            self._traffic.mark("step", f"step {self.clock.steps}", began)
            self.draw()
            self._traffic.timeline.flush()

    def draw(self) -> None:
        """Puts on the timeline, where there is one, what was done since the last time."""
        if self._traffic.timeline is not None and self.updater is not None:
            draw_updates(self.updater, self._traffic, self.names)

    def close(self) -> None:
        """Gives up what steps."""
        self.updater = self.stepper = None
