"""Accelerator: what it makes sure of before a pass. Method: an object of the class without streams,
and torch's functions of CUDA in its place; the streams run in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.core.machine.accelerator import Accelerator, StreamClock, make_device
from infinity.core.machine.card_memory import CardMemory
from infinity.core.machine.traffic import Traffic
from infinity.errors import CapacityError, ConfigError, UsageError


class Cuda:
    """torch's allocator, as far as a pass asks it."""

    def __init__(self) -> None:
        self.reserved, self.is_capturing, self.has_room = 100, False, True


@pytest.mark.parametrize("several", [False, True])
def test_what_a_card_can_give_leaves_room_for_libraries(several, cuda, monkeypatch):
    """Claim: what is free and what torch keeps for no tensor, without cuBLAS's workspaces, and
    NCCL's buffers where ranks use them."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (8 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda where: 40)
    given = WithoutStreams(cuda).memory.left_nbytes(several_ranks=several)
    assert given == (8 << 30) + 60 - (96 << 20) - several * (1 << 30)


@pytest.mark.parametrize("peak, unused", [(40, 60), (100, 0), (107, -7)])
def test_what_no_tensor_ever_had_is_unused(peak, unused, cuda, monkeypatch):
    """The allocator has 100 bytes, and 7 are free. Twins: tensors once had all of those, also
    what the driver has."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (7, 1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda where: peak)
    assert WithoutStreams(cuda).memory.unused_nbytes() == 7 + unused


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda where: cuda.reserved)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.is_capturing)
    return cuda


class WithoutStreams(Accelerator):
    """Takes the window's memory from ``cuda`` when it warms up."""

    def __init__(self, cuda: Cuda):
        self.where, self._cuda = torch.device("cuda"), cuda
        self.memory = CardMemory(self.where)

    def put(self, queue, work, *, after=(), transfer=None):
        if not self._cuda.has_room:
            raise CapacityError("no room")
        self._cuda.reserved += 50


def test_memory_that_was_given_back_between_steps_is_taken_again(cuda):
    """Twins: it grew, it was not given back."""
    device = WithoutStreams(cuda)
    device.warm(50)
    assert cuda.reserved == 150
    for reserved, expected in ((150, 150), (400, 400), (30, 80), (80, 80)):
        cuda.reserved = reserved
        device.begin_pass()
        assert cuda.reserved == expected


def test_a_pass_runs_without_the_memory_if_there_is_no_room(cuda):
    device = WithoutStreams(cuda)
    device.warm(50)
    cuda.reserved, cuda.has_room = 0, False
    device.begin_pass()
    assert cuda.reserved == 0


def test_a_pass_that_a_graph_would_record_is_refused(cuda):
    """Twin: outside of a recording."""
    device = WithoutStreams(cuda)
    device.begin_pass()
    cuda.is_capturing = True
    with pytest.raises(UsageError, match="CUDA graph"):
        device.begin_pass()


def test_rocm_is_refused_by_name(monkeypatch):
    """It calls itself cuda. Twin: without it the reason is another one here."""
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ConfigError, match="ROCm"):
        make_device(torch.device("cuda"), Traffic())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no device cuda"):
        make_device(torch.device("cuda"), Traffic())


class Moment:
    """An event of a stream: a place in its time."""

    def __init__(self, stream: SimpleNamespace):
        self.stream, self.at = stream, None

    def record(self, stream) -> None:
        self.at = stream.now

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.stream.done >= self.at

    def elapsed_time(self, end: Moment) -> float:
        return 1000 * (end.at - self.at)


def test_a_stall_lasts_as_long_as_the_stream_stands_still(cuda):
    """The training thread's own time does not count, nor is it waited for. A wait for an update is
    told apart."""
    device, stream = WithoutStreams(cuda), SimpleNamespace(now=0.0, done=0.0)
    device.traffic = Traffic()
    device.streams = SimpleNamespace(current=lambda: stream, event=lambda timing: Moment(stream))
    device._clock = StreamClock(device.streams)
    edge = device.traffic.edges["host->device"]
    with device.stalled("host->device", "a unit"):
        stream.now += 2.0
    assert edge.stall_seconds == 0.0
    with device.stalled("optimizer", "a unit"):
        stream.now += 3.0
        stream.done = stream.now
    assert edge.stall_seconds == pytest.approx(2.0)
    assert device.traffic.updates.stall_seconds == pytest.approx(3.0)
    assert device.traffic.take_update_waits() == [pytest.approx(3.0)]
    assert device.traffic.take_update_waits() == []
