"""DeviceStepper: the optimizer's step on the device, of state that lies there and of state that passes through.

in place   arrays at home on the device
passing    arrays at home in host memory: copied in, stepped and copied out again, chunk by chunk, in slots
slot       device memory for the passing arrays of one chunk; while one is stepped, the next is coming and the last leaving
share      of state at home on the host, the part that is stepped here while the processor steps the rest
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .. import native
from ..machine.device import PAST, Copy, Device, Event
from ..machine.tiers import Tier
from ..machine.traffic import Traffic
from ..planning.device_slots import DEVICE_SLOTS, SLOT_ALIGNMENT
from ..state.flat_layout import SHARD_ALIGNMENT
from ..state.shard import ParamShard
from ..state.shard_spec import elements_each
from ..storage.arrays import StateArray

Span = tuple[int, int, native.Hyperparameters]  # first element, the one behind the last, how they are stepped


def passing(shard: ParamShard) -> list[str]:
    """Lists the arrays of a step that lie in host memory."""
    return [name for name, array in shard.arrays.items() if array.tier is Tier.HOST]


def steps_on_device(shard: ParamShard) -> bool:
    """Tells whether a shard's state lies on a device that the processor cannot reach."""
    return any(array.tier is Tier.DEVICE for name, array in shard.arrays.items() if name != "grad")


@dataclass
class DeviceUpdate:
    """A submitted step, of which the processor may do a part."""

    event: Event
    on_device: bool  # whether everything lies there, so that nobody has to stand still for it
    ticket: native.Ticket | None = None

    @property
    def done(self) -> bool:
        return self.event.done and (self.ticket is None or self.ticket.done)

    def wait(self) -> None:
        """Puts what is computed or read from now on behind the step."""
        if self.ticket is not None:
            self.ticket.wait()
        self.event.precede() if self.on_device else self.event.wait()


@dataclass
class _Slot:
    memory: torch.Tensor
    free: Event = PAST


class DeviceStepper:
    """Steps shards on ``device``, whose memory the processor does not reach."""

    def __init__(self, device: Device, traffic: Traffic, slot_nbytes: int):
        self._device, self._traffic = device, traffic
        count = DEVICE_SLOTS if slot_nbytes else 0
        self._slots = [_Slot(device.zeros(slot_nbytes, torch.uint8, "optimizer slots")) for _ in range(count)]
        self._turn = 0
        self.share = 0.0  # of the elements of state on the host

    def choose_share(self, processor_rate: float, shard_bytes: float) -> None:
        """Splits the update so that device and processor finish together. ``processor_rate``: its elements a second;
        ``shard_bytes``: what passes over the busier direction, per element."""
        edge = self._traffic.edges["host->device"]
        if self._slots and processor_rate and edge.busy_seconds and shard_bytes:
            own_rate = edge.nbytes / edge.busy_seconds / shard_bytes
            self.share = own_rate / (own_rate + processor_rate)

    def first_own(self, shard: ParamShard) -> int:
        """Returns the first element of a shard on the host that is stepped here; those before it are the processor's."""
        if not self.share or not self._slots or any(array.tier is not Tier.HOST for array in shard.arrays.values()):
            return shard.slice_numel
        return round(shard.slice_numel * (1 - self.share)) // SHARD_ALIGNMENT * SHARD_ALIGNMENT

    def step(
        self,
        shard: ParamShard,
        layout: native.Layout,
        spans: Sequence[Span],
        *,
        version: int,
        behind: Sequence[Event],
        newer: StateArray | None = None,
    ) -> DeviceUpdate:
        """Steps ``spans`` of a shard, after what has been computed and ``behind``. ``newer``: where the new weights go; None: in their place."""
        names, arrays = passing(shard), shard.arrays
        behind = [self._device.now(), *behind]
        event: Event = PAST
        if newer is not None:
            arrays = arrays | {"weight": newer}
            event = self._copy_weights(shard, newer, behind)
            behind.append(event)
        for begin, end, part in _chunks(spans, self._chunk(shard, names) if names else shard.slice_numel):
            event = self._step_chunk(shard, arrays, layout, names, begin, end, part, behind)
        for array in arrays.values():
            array.extent.version = version
        return DeviceUpdate(event, on_device=not names)

    def _copy_weights(self, shard: ParamShard, newer: StateArray, behind: list[Event]) -> Event:
        """Makes ``newer`` what the weights are: there they are stepped."""
        weight = shard.weight.flat  # as it is now: soon the shard's is the newer one
        if shard.weight.tier is Tier.HOST:
            shard.last_read.wait()
            native.copy_flat(newer.flat, weight)
            return PAST

        def copy() -> None:
            newer.flat.copy_(weight, non_blocking=True)

        return self._device.put("step", copy, behind=[*behind, shard.last_read])

    def _chunk(self, shard: ParamShard, names: list[str]) -> int:
        """Elements that fit a slot."""
        sizes = [shard.arrays[name].dtype.itemsize / elements_each(name) for name in names]
        fitting = int((self._slots[0].memory.numel() - len(names) * SLOT_ALIGNMENT) / sum(sizes))
        return fitting // SHARD_ALIGNMENT * SHARD_ALIGNMENT

    def _step_chunk(
        self, shard: ParamShard, arrays: dict[str, StateArray], layout: native.Layout, names: list[str], begin: int, end: int,
        spans: list[Span], behind: list[Event],
    ) -> Event:  # fmt: skip
        def part(name: str) -> torch.Tensor:
            each = elements_each(name)
            before = shard.own_slice[0] - shard.own(name)[0] if name == "grad" else 0  # of the whole gradient (ZeRO-1)
            return arrays[name].flat[before + begin // each : before - (-end // each)]

        runs = [native.Run(*span) for span in spans]
        if not names:
            parts = {name: part(name) for name in arrays}
            return self._device.put("step", partial(self._kernel, layout, parts, begin, runs), behind=behind)
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        there = dict(zip(names, _lay_out(slot.memory, [part(name) for name in names])))
        parts = {name: there[name] if name in there else part(name) for name in arrays}
        label = f"state of {shard.names[0]}"

        def come() -> None:
            for name, target in there.items():
                target.copy_(part(name), non_blocking=True)

        def leave() -> None:
            for name, source in there.items():
                if name != "grad":
                    part(name).copy_(source, non_blocking=True)

        nbytes = sum(target.nbytes for target in there.values())
        arrived = self._device.put("in", come, behind=[slot.free, *behind], transfer=Copy("host->device", nbytes, label))
        stepped = self._device.put("step", partial(self._kernel, layout, parts, begin, runs), behind=[arrived])
        nbytes -= there["grad"].nbytes if "grad" in there else 0
        slot.free = self._device.put("out", leave, behind=[stepped], transfer=Copy("device->host", nbytes, label))
        return slot.free

    def _kernel(self, layout: native.Layout, parts: dict[str, torch.Tensor], begin: int, runs: list[native.Run]) -> None:
        """``parts`` start at element ``begin`` of the shard. The kernel is given addresses as if they were whole: what it draws
        at random goes by an element's place in the shard."""
        addresses = {
            name: (flat.data_ptr() - begin // elements_each(name) * flat.element_size()) % 2**64 for name, flat in parts.items()
        }
        self._device.kernels.step(layout, runs=runs, stream=self._device.stream_handle, **addresses)


def _chunks(spans: Sequence[Span], size: int) -> Iterator[tuple[int, int, list[Span]]]:
    """First element, end and spans of each chunk of ``size`` elements in which anything is stepped: whole blocks of 8-bit
    moments, and nothing before the first span, which may be the processor's."""
    for begin in range(0, max((end for _, end, _ in spans), default=0), size):
        inside = [(max(first, begin), min(last, begin + size), hyper) for first, last, hyper in spans]
        inside = [(first, last, hyper) for first, last, hyper in inside if first < last]
        if inside:
            block = native.MOMENT_BLOCK
            yield inside[0][0] // block * block, -(-inside[-1][1] // block) * block, inside


def _lay_out(memory: torch.Tensor, sources: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Places in ``memory`` for tensors like ``sources``, one after the other."""
    offset = 0
    for source in sources:
        yield memory[offset : offset + source.nbytes].view(source.dtype)
        offset += -(-source.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
