"""DeviceStepper: the optimizer's step on the device, for state at home there or in host memory.

in place   arrays at home on the device
passing    arrays at home in host memory: copied in, stepped and copied out in chunks, in slots
slot       device memory for one chunk of passing arrays; one is stepped while the next is copied
           in and the last copied out
fraction   the part of the state at home on the host that is stepped here (:mod:`.device_fraction`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ... import native
from ..homes.arrays import StateArray
from ..machine.device import PAST, Copy, Device, Event
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from ..units.flat_layout import SHARD_ALIGNMENT
from ..units.flat_param import FlatParam
from ..units.flat_param_spec import block_numel
from ..units.home_arrays import Draft
from .device_fraction import DeviceFraction, Rates
from .device_slots import DEVICE_SLOTS, SLOT_ALIGNMENT

Span = tuple[int, int, native.Hyperparameters]  # first element, end, hyperparameters


def passing(flat_param: FlatParam) -> list[str]:
    """Lists a step's arrays that are in host memory."""
    return [name for name, array in flat_param.arrays.items() if array.tier is Tier.HOST]


def steps_on_device(flat_param: FlatParam) -> bool:
    """Returns whether a flat param's state is on a device that the processor cannot access."""
    return any(
        array.tier is Tier.DEVICE for name, array in flat_param.arrays.items() if name != "grad"
    )


@dataclass
class DeviceUpdate:
    """A submitted step, of which the processor may do a part."""

    event: Event
    on_device: bool  # all arrays are on the device: the host need not wait
    ticket: native.Ticket | None = None

    @property
    def done(self) -> bool:
        return self.event.done and (self.ticket is None or self.ticket.done)

    def wait(self) -> None:
        """Orders later computation and reads after the step. Blocks unless all of it is on the
        device."""
        if self.ticket is not None:
            self.ticket.wait()
        self.event.precede() if self.on_device else self.event.wait()


@dataclass
class _Slot:
    memory: torch.Tensor
    free: Event = PAST


class DeviceStepper:
    """Steps flat params on ``device``, whose memory the processor cannot access."""

    def __init__(self, device: Device, traffic: Traffic, slot_nbytes: int):
        self._device, self._traffic = device, traffic
        count = DEVICE_SLOTS if slot_nbytes else 0
        self._slots = [
            _Slot(device.zeros(slot_nbytes, torch.uint8, "optimizer slots")) for _ in range(count)
        ]
        self._turn = 0
        self.fraction = DeviceFraction()

    def choose_fraction(
        self, flat_params: Sequence[FlatParam], waits: Sequence[float], processor_rate: float
    ) -> None:
        """Chooses which elements of ``flat_params``, which come in order of next use, the device
        steps. ``waits``: see :class:`DeviceFraction`. ``processor_rate``: elements per second; 0 if
        unknown."""
        passing = [
            flat
            for flat in (flat_params if self._slots else ())
            if all(array.tier is Tier.HOST for array in flat.arrays.values())
        ]
        link, rates = self._traffic.rate("host->device"), None
        if passing and processor_rate and link is not None:
            per_element = max(
                sum(flat_param.spec.nbytes_per_element.values()) for flat_param in passing
            )
            numel = sum(flat_param.layout.shard_numel for flat_param in passing)
            rates = Rates(processor_rate, link / per_element, numel)
        self.fraction.note(waits, rates)
        self.fraction.divide(passing)

    def step(
        self,
        flat_param: FlatParam,
        layout: native.Layout,
        spans: Sequence[Span],
        draft: Draft,
        *,
        version: int,
        after: Sequence[Event],
    ) -> DeviceUpdate:
        """Steps ``spans`` of a flat param to ``draft``, after ``after``, its landing gradients,
        and after the compute enqueued so far unless all is in host memory."""
        names, arrays = passing(flat_param), flat_param.arrays
        for ticket in draft.tickets:
            ticket.wait()
        after = [*draft.events, *after]
        if len(names) < len(arrays):
            after.append(self._device.now())
        event: Event = PAST
        if draft.fresh is not None:
            arrays = arrays | {"weight": draft.fresh}
            weight, fresh = flat_param.weight.flat, draft.fresh.flat  # now: soon they are others
            if flat_param.weight.tier is Tier.HOST:
                for read in draft.events:
                    read.wait()
                native.copy_flat(fresh, weight)
            else:
                copy = partial(fresh.copy_, weight, non_blocking=True)
                event = self._device.put("step", copy, after=after)
                after.append(event)
        for begin, end, part in _chunks(
            spans, self._chunk(flat_param, names) if names else flat_param.layout.shard_numel
        ):
            event = self._step_chunk(flat_param, arrays, layout, names, begin, end, part, after)
        for array in arrays.values():
            array.extent.version = version
        return DeviceUpdate(event, on_device=not names)

    def _chunk(self, flat_param: FlatParam, names: list[str]) -> int:
        """Returns how many elements fit a slot."""
        sizes = [flat_param.arrays[name].dtype.itemsize / block_numel(name) for name in names]
        fitting = int((self._slots[0].memory.numel() - len(names) * SLOT_ALIGNMENT) / sum(sizes))
        return fitting // SHARD_ALIGNMENT * SHARD_ALIGNMENT

    def _step_chunk(
        self,
        flat_param: FlatParam,
        arrays: dict[str, StateArray],
        layout: native.Layout,
        names: list[str],
        begin: int,
        end: int,
        spans: list[Span],
        after: list[Event],
    ) -> Event:
        def part(name: str) -> torch.Tensor:
            block = block_numel(name)
            flat = flat_param.layout  # under ZeRO-1 the gradient is whole
            before = flat.own_shard[0] - flat.home_range(name)[0] if name == "grad" else 0
            return arrays[name].flat[before + begin // block : before - (-end // block)]

        runs = [native.Run(*span) for span in spans]
        if not names:
            parts = {name: part(name) for name in arrays}
            return self._device.put(
                "step", partial(self._kernel, layout, parts, begin, runs), after=after
            )
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        there = dict(zip(names, _lay_out(slot.memory, [part(name) for name in names])))
        parts = {name: there[name] if name in there else part(name) for name in arrays}
        label = f"state of {flat_param.names[0]}"
        for name in names:
            self._device.pin(arrays[name].region)

        def come() -> None:
            for name, target in there.items():
                target.copy_(part(name), non_blocking=True)

        def leave() -> None:
            for name, source in there.items():
                if name != "grad":
                    part(name).copy_(source, non_blocking=True)

        nbytes = sum(target.nbytes for target in there.values())
        transfer, before = Copy("host->device", nbytes, label), [slot.free, *after]
        arrived = self._device.put("state-in", come, after=before, transfer=transfer)
        stepped = self._device.put(
            "step", partial(self._kernel, layout, parts, begin, runs), after=[arrived]
        )
        nbytes -= there["grad"].nbytes if "grad" in there else 0
        slot.free = self._device.put(
            "state-out", leave, after=[stepped], transfer=Copy("device->host", nbytes, label)
        )
        return slot.free

    def _kernel(
        self,
        layout: native.Layout,
        parts: dict[str, torch.Tensor],
        begin: int,
        runs: list[native.Run],
    ) -> None:
        """Launches the kernel. ``parts`` start at element ``begin`` of the flat param. Addresses
        are offset to the flat param's start, because random rounding depends on an element's index
        in the flat param."""
        addresses = {
            name: (flat.data_ptr() - begin // block_numel(name) * flat.element_size()) % 2**64
            for name, flat in parts.items()
        }
        self._device.kernels.step(layout, runs=runs, stream=self._device.stream_handle, **addresses)


def _chunks(spans: Sequence[Span], size: int) -> Iterator[tuple[int, int, list[Span]]]:
    """Yields first element, end and spans of each chunk of ``size`` elements with anything to step.
    Chunks are whole blocks of 8-bit moments. They skip what is before the first span: the processor
    may step it."""
    for begin in range(0, max((end for _, end, _ in spans), default=0), size):
        inside = [
            (max(first, begin), min(last, begin + size), hyper) for first, last, hyper in spans
        ]
        inside = [(first, last, hyper) for first, last, hyper in inside if first < last]
        if inside:
            block = native.MOMENT_BLOCK
            yield inside[0][0] // block * block, -(-inside[-1][1] // block) * block, inside


def _lay_out(memory: torch.Tensor, sources: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields views of ``memory`` for tensors like ``sources``, one after the other."""
    offset = 0
    for source in sources:
        yield memory[offset : offset + source.nbytes].view(source.dtype)
        offset += -(-source.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
