"""Arrival: weights come into their device buffers, in order and told of, from wherever they are."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from memory_arrays import give_arrays

from infinity import native
from infinity.core.machine.device import PAST, Copy, Device
from infinity.core.machine.tiers import Tier
from infinity.core.machine.traffic import Traffic
from infinity.core.units.arrival import Arrival
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.home_arrays import COPY
from infinity.core.units.unit_buffers import UnitBuffers
from infinity.errors import CorruptionError, PeerError
from infinity.ranks.parallel_dims import ParallelDims

F32, BF16 = torch.float32, torch.bfloat16
NOW = SimpleNamespace(name="now", done=True, precede=lambda: None)


class Said:
    """What happened, in order; an error for what is to fail."""

    def __init__(self) -> None:
        self.events: list = []
        self.errors: dict[str, BaseException] = {}

    def note(self, what: str) -> None:
        self.events.append(what)
        if what in self.errors:
            raise self.errors[what]


class Event:
    done = False

    def __init__(self, said: Said, name: str):
        self.said, self.name = said, name

    def precede(self) -> None:
        self.said.note(f"{self.name} precedes")

    def wait(self) -> None:
        self.said.note(f"{self.name} is waited for")


class Queues(Device):
    """Runs work at once, and keeps what it was told of it."""

    def __init__(self, said: Said):
        super().__init__(torch.device("cpu"), Traffic())
        self.puts, self.said = [], said

    @contextmanager
    def stalled(self, edge: str, what: str):
        self.said.note(f"stalled by {edge} of {what}")
        yield
        self.said.note("no more")

    def now(self):
        return NOW

    def put(self, queue, work, *, after=(), transfer=None):
        work()
        self.puts.append((queue, list(after), transfer))
        return Event(self.said, f"copy {len(self.puts)}")


class Pending:
    """A gather that runs; ``borrowed``: until then another rank reads this one's home."""

    def __init__(self, said: Said, name: str, borrowed: object | None = None):
        self.said, self.name, self.borrowed = said, name, borrowed

    def wait(self) -> None:
        self.said.note(f"{self.name} is waited for")

    def drop(self) -> None:
        self.said.note(f"{self.name} is dropped")


class Bulk:
    """Starts gathers that are over or not, by the flat's number."""

    def __init__(self, said: Said, ranks: ParallelDims):
        self.said, self.ranks, self.asked, self.pending = said, ranks, [], {}

    def gather(self, flat, what, *, regions, in_node):
        self.asked.append((flat, what, "in node" if in_node else regions))
        return self.pending.get(what)

    def complete_started(self) -> None:
        self.said.note("lost gathers are dropped")


class Case:
    """The arrival of a unit of two flat params on a rank: homes are full of 1 and 2, buffers are
    empty."""

    def __init__(self, rank: int = 0, size: int = 1, device: type[Device] = Queues):
        self.said = Said()
        ranks = ParallelDims(rank=rank, size=size)
        self.bulk = self.collectives = Bulk(self.said, ranks)
        self.device = device(self.said)
        self.flat_params = []
        for number, dtype in enumerate((F32, BF16)):
            spec = FlatParamSpec(dtype, dtype, native.Master.OWN, dtype, dtype, (), stepped=False)
            flat_param = FlatParam(spec, [torch.nn.Parameter(torch.zeros(5000))], self.collectives)
            self.flat_params.append(give_arrays(flat_param, number + 1))
        self.homes = [flat.weight for flat in self.flat_params]
        self.buffers = UnitBuffers(self.flat_params, self.device)
        self.buffers.allocate(None)
        self.buffers.empty()
        if isinstance(self.device, Queues):
            self.device.puts.clear()
            self.said.events.clear()
        self.second = SimpleNamespace(copy_out=self.copy_out)
        self.store = SimpleNamespace()
        self.arrival = Arrival(
            "block", self.flat_params, self.buffers, self.second, self.collectives, self.device
        )

    @staticmethod
    def copy_out(flats: list[torch.Tensor]) -> None:
        for flat in flats:
            flat.fill_(7)

    def start(self, reads: object | None = None, *, in_node: bool = False) -> list[torch.Tensor]:
        """The buffers, which are full of -1 where nothing came."""
        for buffer in self.buffers.all:
            buffer.fill()
            buffer.flat.fill_(-1)
        self.arrival.start(self.store, self.homes, reads, in_node=in_node)
        return self.buffers.flats


# --- the copy ---


@pytest.mark.parametrize("rank, size", [(0, 1), (0, 2), (1, 2)])
def test_this_ranks_slices_are_copied_to_their_place_in_the_queue_to_the_device(rank, size):
    """Claim: with its bytes. Twin: the other rank's elements are let be."""
    case = Case(rank, size)
    flats = case.start()
    for number, flat in enumerate(flats):
        expected = torch.full_like(flat, -1)
        each = flat.numel() // size
        expected[rank * each : (rank + 1) * each] = number + 1
        assert torch.equal(flat, expected)
    nbytes = 8192 * (4 + 2) // size
    assert case.device.puts[0] == ("in", [], Copy("host->device", nbytes, "block"))


def test_the_buffers_get_memory_before_bytes_come():
    """Twin: before the start they have none."""
    case = Case()
    assert [flat.untyped_storage().nbytes() for flat in case.buffers.flats] == [0, 0]
    case.arrival.start(case.store, case.homes, None, in_node=False)
    assert [flat.unique().tolist() for flat in case.buffers.flats] == [[1], [2]]


def test_other_homes_than_the_current_weights_are_copied_if_they_are_given():
    case = Case()
    case.homes = [SimpleNamespace(tier=Tier.HOST, flat=home.flat + 3) for home in case.homes]
    assert [flat.unique().tolist() for flat in case.start()] == [[4], [5]]


@pytest.mark.parametrize("on_device", [0, 1, None])
def test_a_home_on_the_device_is_copied_after_the_compute_so_far(on_device):
    """Claim: one is enough. Twin: homes elsewhere wait for nothing."""
    case = Case()
    if on_device is not None:
        case.homes[on_device].tier = Tier.DEVICE
    case.start()
    assert case.device.puts[0][1] == ([] if on_device is None else [NOW])


def test_bytes_from_disk_come_as_they_are_read():
    """Twin: the homes are not copied."""
    case, asked = Case(), []
    reads = SimpleNamespace(copy=lambda *args: asked.append(args))
    flats = case.start(reads)
    ((store, flat_params, given, name),) = asked
    assert (store, flat_params, name) == (case.store, case.flat_params, "block")
    assert all(one is other for one, other in zip(given, flats, strict=True))
    assert all(bool((flat == -1).all()) for flat in flats)


def test_in_a_machine_that_has_them_the_second_slices_come():
    """Claim: even if there are reads."""
    for reads in (None, SimpleNamespace(copy=None)):
        assert [flat.unique().tolist() for flat in Case(0, 2).start(reads, in_node=True)] == [
            [7],
            [7],
        ]


@pytest.mark.parametrize("size", [1, 2])
def test_the_homes_are_lent_until_the_last_work_of_the_queue(size):
    """Twin: before the start nobody reads them."""
    case = Case(0, size)
    assert case.arrival.event is PAST
    case.start()
    assert case.arrival.event.name == f"copy {size}"
    assert all(flat.homes.readers[COPY].until is case.arrival.event for flat in case.flat_params)


def test_a_copy_that_is_over_lends_no_homes():
    """Method: a processor, which copies at once. An earlier read is not forgotten by it."""
    case = Case(device=lambda said: Device(torch.device("cpu"), Traffic()))
    for flat_param in case.flat_params:
        flat_param.homes.read_until(COPY, "an earlier one")
    case.start()
    assert case.arrival.event is PAST
    assert all(flat.homes.readers[COPY].until == "an earlier one" for flat in case.flat_params)


# --- the gather ---


@pytest.mark.parametrize("in_node", [True, False])
def test_the_other_ranks_slices_are_gathered_after_this_ranks_copy(in_node):
    """Twin: one rank gathers nothing."""
    case = Case(0, 2)
    flats = case.start(in_node=in_node)
    assert [put[0] for put in case.device.puts] == ["in", "in"]
    assert case.device.puts[1][2] is None
    for number, (asked, flat) in enumerate(zip(case.bulk.asked, flats, strict=True)):
        assert asked[0] is flat and asked[1] == f"block ({number})"
        assert asked[2] == ("in node" if in_node else [None])
    alone = Case()
    alone.start(in_node=False)
    assert alone.bulk.asked == [] and len(alone.device.puts) == 1


def test_a_gather_finds_the_homes_of_its_own_shard():
    case = Case(0, 2)
    for number, home in enumerate(case.homes):
        home.region = number
    case.start()
    assert [homes for _, _, homes in case.bulk.asked] == [[0], [1]]


def test_homes_that_other_ranks_read_are_lent_until_those_are_done():
    """Method: a queue whose events are past. Twin: of a gather that reads none, nothing is
    borrowed."""
    case = Case(0, 2, device=lambda said: Device(torch.device("cpu"), Traffic()))
    case.bulk.pending = {
        "block (0)": Pending(case.said, "first", borrowed="until the others have it"),
        "block (1)": Pending(case.said, "second"),
    }
    case.start()
    first, second = (flat.homes.draft().events for flat in case.flat_params)
    assert (first, second) == (["until the others have it"], [])


# --- the end ---


def gathering() -> Case:
    """With two gathers that run."""
    case = Case(0, 2)
    case.bulk.pending = {
        f"block ({number})": Pending(case.said, name)
        for number, name in enumerate(("first", "second"))
    }
    case.start()
    return case


def test_later_compute_comes_after_the_copy_and_the_gathers():
    """Claim: what it waits for is told of. Twin: gathers that were waited for are not again."""
    case = gathering()
    case.arrival.finish(case.store)
    copied = ["stalled by host->device of block", "copy 2 precedes", "no more"]
    gathered = [
        "stalled by all-gather of block",
        "first is waited for",
        "second is waited for",
        "no more",
    ]
    assert case.said.events == copied + gathered
    case.said.events.clear()
    case.arrival.finish(case.store)
    assert case.said.events == []


def test_another_stream_comes_after_the_gathers():
    """Claim: the event is that of the stream that waited for them. Twin: without any it is the
    copy's."""
    case = gathering()
    assert case.arrival.event is not NOW
    case.arrival.finish(case.store)
    assert case.arrival.event is NOW
    alone = Case()
    alone.start()
    alone.arrival.finish(alone.store)
    assert alone.arrival.event is not NOW


def test_nothing_is_waited_for_that_was_not_started():
    case = Case()
    case.arrival.finish(case.store)
    assert case.said.events == []


def test_a_gather_that_is_over_at_once_is_not_waited_for():
    case = gathering()
    case.bulk.pending["block (0)"] = None
    case.arrival.forget_gathers()
    case.start()
    case.said.events.clear()
    case.arrival.finish(case.store)
    assert [said for said in case.said.events if "waited" in said] == ["second is waited for"]


def test_what_is_given_up_no_longer_writes_to_the_buffers():
    """Claim: first the gathers, which were begun last. Twin: nothing of them is left."""
    case = gathering()
    case.arrival.give_up()
    assert case.said.events == [
        "first is dropped",
        "second is dropped",
        "lost gathers are dropped",
        "copy 2 is waited for",
    ]
    assert case.arrival.event is PAST
    case.said.events.clear()
    case.arrival.finish(case.store)
    assert case.said.events == []


@pytest.mark.parametrize("kind", [RuntimeError, CorruptionError, PeerError])
def test_further_errors_are_ignored_when_it_is_given_up(kind):
    """Twin: an interrupt is not."""
    case = gathering()
    case.said.errors["copy 2 is waited for"] = kind("another one")
    case.arrival.give_up()
    assert case.arrival.event is PAST
    case = gathering()
    case.said.errors["copy 2 is waited for"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        case.arrival.give_up()


def test_gathers_after_one_that_failed_are_dropped_when_it_is_given_up():
    case = gathering()
    case.said.errors["first is waited for"] = PeerError("gone")
    with pytest.raises(PeerError):
        case.arrival.finish(case.store)
    case.arrival.give_up()
    assert case.said.events[-4:-2] == ["first is dropped", "second is dropped"]


def test_forgotten_gathers_are_dropped_once():
    """Twin: the copy stays under way."""
    case = gathering()
    case.arrival.forget_gathers()
    case.arrival.forget_gathers()
    assert case.said.events == ["first is dropped", "second is dropped"]
    assert case.arrival.event.name == "copy 2"
