"""ArrayParts: reads and writes each parameter's part of a flat param's arrays, over one rank or
two."""

from __future__ import annotations

import pytest
import torch
from memory_arrays import Counted, MemoryArray, MemoryStore, Told, Write, give_arrays

from infinity import native
from infinity.core.machine.device import PAST
from infinity.core.units.array_parts import ArrayParts
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import MOMENTS, FlatParamSpec
from infinity.core.units.home_arrays import COPY

F32 = torch.float32
CODED = FlatParamSpec(F32, F32, native.Master.OWN, F32, torch.uint8, MOMENTS[:1], stepped=True)
# Whole arrays have 8192 elements: parameters at 0, 128 and 4096 + 64, the second one on two shards.
LENGTHS = 70, 4000, 100
PARTS = [(0, 70), (128, 4128), (4160, 4260)]
SCALES = [(0, 2), (2, 65), (65, 67)]


def whole(name: str) -> torch.Tensor:
    """What an array would be on one rank."""
    return torch.arange(8192.0) if name != "exp_avg_scale" else torch.arange(128).byte()


class Case:
    """A flat param on rank ``rank`` of ``size``, with its shards of such arrays at home."""

    def __init__(self, rank: int = 0, size: int = 2, shard: str = "parameters"):
        self.told, self.store = Told(rank, size, shard), MemoryStore()
        params = [torch.nn.Parameter(torch.zeros(n)) for n in LENGTHS]
        self.flat_param = give_arrays(FlatParam(CODED, params, self.told))
        self.homes, self.arrays = self.flat_param.homes, self.flat_param.arrays
        self.parts = ArrayParts(self.homes, self.told, ["a", "b", "c"])
        for name, array in self.arrays.items():
            begin, end = self.flat_param.layout.home_range(name)
            array.flat.copy_(whole(name)[begin:end])
            self.told.wholes[f"reading {name} of a and its unit"] = whole(name)
            for param, (begin, end) in zip("abc", SCALES if "scale" in name else PARTS):
                self.told.wholes[f"reading {name} of {param}"] = whole(name)[begin:end]

    def read(self, name: str, index: int, **kw) -> torch.Tensor:
        return self.parts.read(self.store, name, index, **kw)


RANKS = [(0, 1), (0, 2), (1, 2)]


# --- reads ---


@pytest.mark.parametrize("rank, size", RANKS)
def test_a_part_is_read_whole_wherever_its_elements_are(rank, size):
    """Claim: ranks meet once for each, and one rank meets nobody."""
    case = Case(rank, size)
    for name, parts in (("weight", PARTS), ("exp_avg_scale", SCALES)):
        for index, (begin, end) in enumerate(parts):
            case.told.meetings.clear()
            assert torch.equal(case.read(name, index), whole(name)[begin:end])
            expected = [f"reading {name} of {'abc'[index]}"] if size > 1 else []
            assert case.told.meetings == expected


def test_every_rank_says_which_elements_of_a_part_each_has():
    """Method: what a meeting is asked for. By hand: of the second parameter 3968 elements are on
    rank 0."""
    asked = []
    for rank in range(2):
        case = Case(rank)
        case.told.assemble = lambda out, what, pieces: asked.append((out.numel(), pieces))
        for index in range(3):
            case.read("weight", index)
    first, second, third = (
        (70, [(0, 70), (4096, 4096)]),
        (4000, [(0, 3968), (3968, 4000)]),
        (100, [(0, -64), (0, 100)]),
    )
    for numel, pieces in (first, second, third):
        found = [each for each in asked if each[0] == numel]
        assert len(found) == 2 and found[0] == found[1]
        taken = [element for begin, end in found[0][1] for element in range(begin, end)]
        expected = [element for begin, end in pieces for element in range(begin, end)]
        assert taken == expected == list(range(numel))


@pytest.mark.parametrize("rank, size", RANKS)
def test_a_part_of_another_array_of_the_layout_is_read_in_its_stead(rank, size):
    """Twin: inside a block that has assembled the array of that name, too."""
    case = Case(rank, size)
    own = case.arrays["weight"].flat
    other = MemoryArray("older", own + 0.5)
    case.told.wholes["reading weight of b"] = whole("weight")[128:4128] + 0.5
    expected = whole("weight")[128:4128] + 0.5
    assert torch.equal(case.read("weight", 1, array=other), expected)
    with case.parts.assembling(case.store, ["weight"]):
        assert torch.equal(case.read("weight", 1, array=other), expected)
        assert torch.equal(case.read("weight", 1), expected - 0.5)


def test_a_part_is_in_the_arrays_dtype_and_on_the_processor():
    case = Case(1)
    with torch.device("meta"):
        for name, dtype in (("weight", F32), ("exp_avg", torch.uint8)):
            case.told.wholes[f"reading {name} of b"] = torch.zeros(4000, dtype=dtype, device="cpu")
            read = case.read(name, 1)
            assert read.dtype is dtype and read.is_cpu


@pytest.mark.parametrize("rank", [0, 1])
def test_inside_a_block_parts_come_from_whole_arrays_without_another_meeting(rank):
    """Twins: a copy each time; an array that the block was not asked for; the end of the block."""
    case = Case(rank)
    with case.parts.assembling(case.store, ["weight", "exp_avg_scale", "none such"]):
        assert case.told.meetings == [
            f"reading {name} of a and its unit" for name in ("weight", "exp_avg_scale")
        ]
        case.told.meetings.clear()
        for _ in range(2):
            for name, parts in (("weight", PARTS), ("exp_avg_scale", SCALES)):
                for index, (begin, end) in enumerate(parts):
                    read = case.read(name, index)
                    assert torch.equal(read, whole(name)[begin:end])
                    read.zero_()
        assert case.told.meetings == []
        case.read("grad", 1)
        assert case.told.meetings == ["reading grad of b"]
    case.arrays["weight"].flat.fill_(-1)
    assert case.read("weight", 2 * rank)[0] == -1


def test_whole_gradients_are_assembled_of_each_ranks_own():
    """Method: gradients that every rank has whole, of which the last rank's counts."""
    case = Case(0, shard="optimizer")
    asked = []
    case.told.assemble = lambda out, what, pieces: asked.append((out.clone(), pieces))
    with case.parts.assembling(case.store, ["grad"]):
        pass
    ((out, pieces),) = asked
    assert pieces == [(0, 8192), (0, 8192)] and torch.equal(out, whole("grad"))


def test_a_block_on_one_rank_reads_nothing_ahead():
    case = Case(0, 1)
    with case.parts.assembling(case.store, ["weight"]):
        case.arrays["weight"].flat[3] = -1
        assert case.read("weight", 0)[3] == -1
    assert case.told.meetings == []


@pytest.mark.parametrize("is_struck_late", [True, False])
def test_an_interrupted_block_keeps_no_array(is_struck_late):
    """Method: while the second array is assembled, or inside the block."""
    case = Case(0)
    if not is_struck_late:
        del case.told.wholes["reading grad of a and its unit"]
    with pytest.raises(KeyError), case.parts.assembling(case.store, ["weight", "grad"]):
        raise KeyError
    case.arrays["weight"].flat.fill_(-1)
    assert case.read("weight", 0)[0] == -1


# --- writes ---


@pytest.mark.parametrize("rank, size", RANKS)
def test_a_part_is_written_as_far_as_it_is_at_home_here(rank, size):
    """Twin: a parameter elsewhere is not written, nor is anything beside it."""
    case = Case(rank, size)
    for index, (begin, end) in enumerate(PARTS):
        expected = whole("weight")
        expected[begin:end] = torch.arange(float(end - begin)) - 9000
        case.parts.write(case.store, "weight", index, expected[begin:end].clone(), version=4)
        first, last = case.flat_param.layout.home_range("weight")
        assert torch.equal(case.arrays["weight"].flat, expected[first:last])
        case.arrays["weight"].flat.copy_(whole("weight")[first:last])
    assert len(case.store.writes) == (3 if size == 1 else 2)
    assert {(each.version, each.stable) for each in case.store.writes} == {(4, False)}


@pytest.mark.parametrize(
    "rank, begin, numel, written",
    [
        (0, 3000, 10, (3128, 10)),
        (0, 3960, 20, (4088, 8)),
        (1, 3960, 20, (0, 12)),
        (1, 3980, 20, (12, 20)),
        (0, 3968, 5, None),
        (1, 3000, 10, None),
    ],
)
def test_some_elements_of_a_part_are_written_from_where_they_begin(rank, begin, numel, written):
    """By hand: the second parameter is at 128, and rank 1 begins at 4096."""
    case, values = Case(rank), -torch.arange(1.0, numel + 1)
    case.parts.write(case.store, "weight", 1, values, version=1, begin=begin, stable=True)
    expected = whole("weight")
    expected[128 + begin : 128 + begin + numel] = values
    first, last = case.flat_param.layout.home_range("weight")
    assert torch.equal(case.arrays["weight"].flat, expected[first:last])
    assert case.store.writes == ([Write("weight", *written, 1, True)] if written else [])


def test_a_write_waits_for_the_last_read():
    """Twin: it leaves the update of the last step running, and lets other reads come after it."""
    case = Case(1)
    read, update = Counted(), Counted()
    case.homes.read_until(COPY, read)
    order = []
    case.store.write = lambda *args, **kw: order.append(read.waits)
    case.parts.write(case.store, "weight", 1, torch.zeros(4000), version=1)
    assert order == [1]
    case.homes.commit(case.homes.draft(), update)
    case.parts.write(case.store, "weight", 1, torch.zeros(4000), version=1)
    assert update.waits == 0 and case.homes.update is update
    case.homes.read_until(COPY, PAST)
