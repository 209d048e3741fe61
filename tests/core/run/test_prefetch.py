"""The prefetcher, with units made up: what it does with one whatever stage that is in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from inside import parts_of
from torch import nn

import infinity
from infinity.core.machine.device import PAST, Device
from infinity.core.machine.ledger import Ledger
from infinity.core.machine.traffic import Traffic
from infinity.core.run.journal import Journal
from infinity.core.run.pass_state import Pass
from infinity.core.run.prefetch import Prefetcher
from infinity.core.run.schedule import Schedule
from infinity.core.units.residency import Residency
from infinity.ranks.collectives import Collectives

FLEETING = {
    Residency.FETCHING: ["drop"],
    Residency.STAGED: ["drop"],
    Residency.GATHERING: ["finish_gather", "release"],
    Residency.RESIDENT: ["release"],
    Residency.STORED: [],
}


class Unit:
    """One that notes what is asked of it."""

    index, name, weight_nbytes, computes_at_home, lies_on_disk = 0, "a unit", 8, False, False

    def __init__(self, residency: Residency):
        self.residency, self.asked, self.older = residency, [], []

    @property
    def in_use(self) -> Unit:
        return self

    def drop(self) -> None:
        self.asked.append("drop")

    def finish_gather(self, store) -> None:
        self.asked.append("finish_gather")
        self.residency = Residency.RESIDENT

    def release(self) -> None:
        assert self.residency is Residency.RESIDENT, "what is under way still writes to the memory"
        self.asked.append("release")


@pytest.mark.parametrize("residency", Residency, ids=lambda residency: residency.name)
def test_a_unit_goes_home_from_every_stage(residency):
    """What is under way is finished, or dropped, before its memory goes; of weights before the last
    update, too."""
    unit, device = Unit(residency), Device(torch.device("cpu"), Traffic())
    unit.older = [Unit(residency), Unit(residency)]
    prefetcher = Prefetcher(
        [unit],
        SimpleNamespace(),
        Ledger(),
        Schedule(),
        window_nbytes=8,
        explain=lambda error, *nbytes: error,
        units_ahead=1,
        give_way=lambda: False,
        collectives=Collectives(),
        device=device,
        journal=Journal(),
        running=Pass(),
    )
    prefetcher.release_all([unit])
    assert [each.asked for each in (unit, *unit.older)] == [FLEETING[residency]] * 3


class Gathered(Unit):
    """One of several, whose weights other ranks have parts of; what it is asked is noted by all in
    one list."""

    weight_nbytes, is_ready, is_sharded = 8, True, True

    def __init__(self, index: int, asked: list[tuple[str, int]], *, on_disk: bool = False):
        super().__init__(Residency.STAGED if on_disk else Residency.STORED)
        self.index, self.flat_params, self.asked = index, (), asked
        self.is_staged_from_disk = self.lies_on_disk = on_disk
        self.copies_while_fetching = False
        self.arrival = SimpleNamespace(event=PAST, comes_ahead=True, rows=None)
        self.exposure = SimpleNamespace(begin=lambda **_: None, end=lambda: None)
        self.buffers = SimpleNamespace(note_use=lambda event: None)

    def start_gather(self, store, ledger) -> None:
        self.asked.append(("gather", self.index))
        self.residency = Residency.GATHERING

    def finish_gather(self, store) -> None:
        self.residency = Residency.RESIDENT

    def write_edits(self, store, journal) -> None:
        pass

    def wait_for_update(self) -> None:
        pass

    def complete(self, store, take_slots) -> None:
        pass

    def take_read_times(self) -> None:
        return None

    def release(self) -> None:
        super().release()
        self.asked[-1] = "evict", self.index
        self.residency = Residency.STORED


def of_two_ranks(
    units: list[Gathered], schedule: Schedule, *, agree: bool, window_nbytes: int
) -> Prefetcher:
    ranks = SimpleNamespace(size=2, keeps_weights=False, alone=False)
    collectives = SimpleNamespace(
        ranks=ranks,
        wait_for_ordered=lambda: None,
        begin_pass=lambda *given, **more: lambda: agree,
    )
    made = Prefetcher(
        units,
        SimpleNamespace(staging=SimpleNamespace(pool=SimpleNamespace(capacity_nbytes=8))),
        Ledger(),
        schedule,
        window_nbytes=window_nbytes,
        explain=lambda error, *nbytes: error,
        units_ahead=1,
        give_way=lambda: False,
        collectives=collectives,
        device=Device(torch.device("cpu"), Traffic()),
        journal=Journal(),
        running=Pass(),
    )
    made.begin_pass(training=True)
    return made


@pytest.mark.parametrize(
    ("backward", "agree", "on_disk", "window", "expected"),
    [
        (True, True, False, 40, [3, 2, 1]),
        (False, True, False, 40, [3, 4]),
        (True, False, False, 40, [3]),
        (True, True, True, 40, [3, 2]),
        (True, True, False, 16, [3, 2]),
        (True, True, False, 12, [3]),
    ],
    ids=["backward", "forward", "traces that differ", "disk", "window", "window of one and a half"],
)
def test_ranks_gather_two_units_ahead_where_nothing_holds_that_up(
    backward, agree, on_disk, window, expected
):
    """Claim: with several ranks the next two units are on their way in a backward; one in a
    forward, whose units may still be stepped, and of units that come from a disk; none where the
    ranks expect different ones, and no more than the window holds. Method: unit 3 of a trace of
    five, with a ring of two ranks that is made up."""
    asked: list[tuple[str, int]] = []
    units, schedule = [Gathered(index, asked, on_disk=on_disk) for index in range(5)], Schedule()
    prefetcher = of_two_ranks(units, schedule, agree=agree, window_nbytes=window)
    schedule.upcoming = lambda *, backward: iter((2, 1, 0) if backward else (4,))
    prefetcher.hold(units[3], backward=backward)
    assert [index for what, index in asked if what == "gather"] == expected


def test_idle_units_make_room_before_another_comes():
    """Method: three units of 8 bytes, one after the other, in a window of 20; the one that was used
    first goes. Twin: in one of 24 it stays."""
    for window, evicted in ((20, [("evict", 0)]), (24, [])):
        asked: list[tuple[str, int]] = []
        units = [Gathered(index, asked) for index in range(3)]
        prefetcher = of_two_ranks(units, Schedule(), agree=False, window_nbytes=window)
        for unit in units:
            prefetcher.hold(unit)
            prefetcher.unhold(unit)
        assert asked == [("gather", 0), ("gather", 1), *evicted, ("gather", 2)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_unit_that_was_not_exposed_has_no_edits(fails):
    """Method: unit 0 has come, and the fetch of unit 1 behind it fails: its error is raised, unit 0
    is not held, and not asked for edits. Twin: without the failure it is, once it is let go."""
    asked: list[tuple[str, int]] = []
    units, schedule = [Gathered(index, asked) for index in range(2)], Schedule()
    prefetcher = of_two_ranks(units, schedule, agree=True, window_nbytes=16)
    schedule.upcoming = lambda *, backward: iter((1,))
    edits: list[int] = []
    units[0].write_edits = lambda store, journal: edits.append(0)
    if fails:
        units[1].start_gather = lambda *args, **kwargs: (_ for _ in ()).throw(
            infinity.CorruptionError("unit 1")
        )
        with pytest.raises(infinity.CorruptionError, match="unit 1"):
            prefetcher.hold(units[0])
    else:
        prefetcher.hold(units[0])
        prefetcher.unhold(units[0])
    assert units[0].residency is Residency.RESIDENT and not prefetcher.is_held(units[0])
    assert edits == ([] if fails else [0])


class ReturnsViews(nn.Module):
    """Gives views of its own weight beside a result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4096.0).view(64, 64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x @ self.weight, "row": self.weight[1], "all": self.weight.t()}


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_views_of_weights_in_an_output_outlive_the_unit(home, swap):
    """Method: a forward gives views of its weight; they have its values after another unit took the
    memory, and after a step."""
    model = nn.ModuleList([ReturnsViews(), nn.Linear(64, 64)])
    root = nn.Module()
    root.blocks = model
    root.forward = lambda x: (model[0](x), model[1](x))
    expected = model[0].weight.detach().clone()
    config = {"params": home, "optimizer": home, "nvme_paths": [str(swap)]}
    root, optimizer = infinity.wrap_model(
        root, torch.optim.AdamW(root.parameters(), lr=0.1), config
    )
    first, second = root(torch.ones(2, 64))
    (first["y"].sum() + second.sum()).backward()
    optimizer.step()
    root(torch.ones(2, 64))
    assert torch.equal(first["row"], expected[1]) and torch.equal(first["all"], expected.t())


def test_units_of_a_model_that_is_never_called_itself_are_fetched_ahead(swap):
    """Method: call two modules of an nn.ModuleDict by hand; from the second step on no unit is
    waited for that was not on its way. Twin: the first step, which has nothing to go by."""
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 64)) for name in "ab"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(swap)]}
    model, optimizer = infinity.wrap_model(model, optimizer, config | {"units": ["Linear"]})
    prefetcher, misses = parts_of(model).job.prefetcher, [0]
    for _ in range(3):
        model["b"](model["a"](torch.ones(1, 64))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        misses.append(prefetcher.misses)
    assert misses[1] > 0 and misses[1:] == [misses[1]] * 3
