"""Look-ahead: the depth is the least that leaves the compute waiting no longer than any would, and
changes no bit.

Words used here: **trace**, **depth** as in `lookahead.py`. **oracle**: the same pass, played
through second by second. **job**: a transformer with everything on disk, trained for some steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import parts_of
from models import (
    at_home,
    differing,
    environment,
    least_host_memory,
    leftovers,
    loss_of,
    tokens,
    transformer,
)
from runs import adamw

import infinity
from infinity.core.run import lookahead
from infinity.core.run.lookahead import DEEPEST, NEGLIGIBLE, LookAhead, choose, waiting

SEED = 73
BLOCKS = 8
DELAYED = "seed=1,delay=1.0,delay_seconds=0.002"

pytestmark = pytest.mark.timeout(120)

UNITS = st.integers(0, 6)
TRACES = st.lists(UNITS, max_size=14)  # units come again, and in a row
SECONDS = st.dictionaries(
    UNITS, st.integers(0, 9)
)  # of some units; whole numbers, so that sums are exact
passes = given(TRACES, SECONDS, SECONDS)
quickly = settings(derandomize=True, deadline=None, max_examples=150)


def oracle(trace: list[int], reads: dict[int, int], computes: dict[int, int], depth: int) -> int:
    """Seconds that the compute waits. At each tick the disk goes on with its queue, then the
    compute does what it can."""
    wanted = [place for place, unit in enumerate(trace) if reads.get(unit)]
    queue: list[list[int]] = []  # place, seconds left
    asked, there, waited = set(), set(), 0
    for place, unit in enumerate(trace):
        ahead = [other for other in wanted if other > place][:depth]
        for other in sorted({*ahead, *(w for w in wanted if w == place)} - asked):
            queue.append([other, reads[trace[other]]])
            asked.add(other)

        def tick() -> None:
            queue[0][1] -= 1
            if not queue[0][1]:
                there.add(queue.pop(0)[0])

        while place in wanted and place not in there:
            tick()
            waited += 1
        for _ in range(computes.get(unit, 0)):
            if queue:
                tick()
    return waited


# --- the choice ---


@quickly
@passes
def test_waiting_is_what_a_simulation_says(trace, reads, computes):
    """Any pass at any depth, against the oracle: no reads, none ahead, units used twice, in a row,
    and an empty trace."""
    for depth in (0, 1, 2, 3, 5, DEEPEST):
        assert waiting(trace, reads, computes, depth) == oracle(trace, reads, computes, depth)


@quickly
@passes
def test_reading_further_ahead_never_waits_longer(trace, reads, computes):
    """Between the bounds: all reads one by one with nothing ahead, and what the disk takes longer
    than the compute."""
    waits = [waiting(trace, reads, computes, depth) for depth in range(DEEPEST + 1)]
    reading, computing = (
        sum(seconds.get(unit, 0) for unit in trace) for seconds in (reads, computes)
    )
    assert waits == sorted(waits, reverse=True)
    assert waits[0] == reading and waits[-1] >= reading - computing


@quickly
@passes
def test_the_depth_chosen_is_the_least_that_does_and_one_more(trace, reads, computes):
    """It waits, but for a hundredth of the compute, no longer than the deepest; what is two less
    would."""
    depth = choose(trace, reads, computes)
    bound = waiting(trace, reads, computes, DEEPEST) + NEGLIGIBLE * sum(
        computes.get(unit, 0) for unit in trace
    )
    assert 2 <= depth <= DEEPEST
    assert waiting(trace, reads, computes, depth - 1) <= bound or depth == DEEPEST
    assert depth == 2 or waiting(trace, reads, computes, depth - 2) > bound


@pytest.mark.parametrize(
    "reads, computes",
    [({}, {0: 1}), ({0: 1, 1: 1}, {}), ({0: 1, 1: 1}, {0: 9, 1: 9})],
    ids=["no reads", "no compute", "a quick disk"],
)
def test_no_more_is_read_ahead_where_it_would_not_help(reads, computes):
    """Nothing to read, nothing to hide reads behind, or one unit ahead hides them all: that one,
    and one more."""
    assert choose([0, 1] * 4, reads, computes) == 2
    assert choose([], reads, computes) == 2


def test_a_burst_of_reads_is_begun_as_early_as_it_takes():
    """Four long computes, then six units from the disk in a row: all six must be asked for before
    the burst."""
    trace, reads, computes = (
        list(range(10)),
        {unit: 4 for unit in range(4, 10)},
        {unit: 6 for unit in range(4)},
    )
    assert choose(trace, reads, computes) == 7
    assert waiting(trace, reads, computes, 6) == 0 < waiting(trace, reads, computes, 5)


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_nothing_is_chosen_from_nothing(depth):
    """No trace, no reads, or no staging memory to spare (depth 0): the depth stays."""
    ahead = LookAhead(depth)
    ahead.begin_pass([])
    ahead.begin_pass([0, 1, 2])
    ahead.note_compute(0, 1.0)
    ahead.begin_pass([0, 1, 2])
    ahead.note_read(0, 0.0, 5.0)
    ahead.begin_pass([])
    assert ahead.depth == depth
    ahead.begin_pass([0, 1, 2])
    assert ahead.depth == (0 if depth == 0 else 2)


def test_a_read_that_waited_for_another_counts_its_own_time_alone():
    """Three reads asked for at once come one after the other, then one that had the disk for
    itself."""
    ahead = LookAhead(1)
    for unit, (start, end) in enumerate([(0.0, 2.0), (0.0, 3.0), (0.0, 7.0), (9.0, 10.0)]):
        ahead.note_read(unit, start, end)
    assert ahead._reads == {0: 2.0, 1: 1.0, 2: 4.0, 3: 1.0}


# --- the engine ---


class Job:
    """What it was trained to, and how deep it read ahead. ``room``: bytes of host memory beyond the
    least that works."""

    def __init__(
        self,
        folder: Any,
        *,
        room: int | None = None,
        steps: int = 5,
        look: Callable = lambda engine: None,
    ):
        def pair():
            model = transformer(SEED, blocks=BLOCKS, dropout=0.0)
            return model, adamw(model, 1e-2)

        config = at_home("nvme", "nvme", folder)
        if room is not None:
            config["host_memory"] = least_host_memory(*pair(), config) + room
        self.model, optimizer = infinity.wrap_model(*pair(), config)
        engine, self.depths, self.misses, self.found = parts_of(self.model).engine, [], [], {}
        for step in range(steps):
            loss = loss_of(self.model, tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(engine)
            self.depths.append(parts_of(engine).prefetcher.look_ahead.depth)
            self.misses.append(parts_of(engine).prefetcher.misses)
            self.found[f"loss {step}"] = loss.detach()
            staging = parts_of(engine).store.staging.pool
            assert staging is None or staging.leased_nbytes <= staging.capacity_nbytes
        for tier, account in infinity.stats(self.model).tiers.items():
            assert account.peak_nbytes <= account.planned_nbytes, f"{tier}: {account}"
        self.units_ahead = parts_of(engine).planned.plan.units_ahead
        self.found |= {name: value.clone() for name, value in self.model.state_dict().items()}
        infinity.unwrap_model(self.model, optimizer)
        assert leftovers(folder) == []


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> Job:
    torch.set_num_threads(1)
    return Job(tmp_path_factory.mktemp("swap"))


@pytest.mark.parametrize("room", [None, 0, 3_500_000], ids=["any room", "no room", "room for one"])
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 16])
def test_no_depth_changes_a_bit_or_exceeds_the_staging_pool(depth, room, right, swap, monkeypatch):
    """Forces each depth, with all the staging memory that is wanted, the least that works, and
    little more."""
    monkeypatch.setattr(lookahead, "choose", lambda *_: depth)
    job = Job(swap, room=room)
    assert differing(job.found, right.found) == []
    assert {None: job.units_ahead > 1, 0: job.units_ahead == 0}.get(room, job.units_ahead == 1), (
        "this room tests another case"
    )
    assert job.depths[2:] == [depth if job.units_ahead else 0] * 3
    assert not job.units_ahead or job.misses[-1] == job.misses[1]


@pytest.mark.parametrize("long, deep", [(20.0, True), (0.0, False)])
def test_the_depth_follows_what_is_measured(long, deep, right, swap, monkeypatch):
    """Every read is measured as one second. Behind one compute of twenty, many of them can hide;
    behind none, none."""
    read, note = LookAhead.note_read, LookAhead._note
    monkeypatch.setattr(
        LookAhead,
        "note_read",
        lambda self, unit, *_: read(self, unit, self._disk_free, self._disk_free + 1.0),
    )
    monkeypatch.setattr(
        LookAhead,
        "note_compute",
        lambda self, unit, _: note(self._computes, unit, 0.0 if unit else long),
    )
    job = Job(swap)
    assert job.depths[0] == job.units_ahead
    assert job.depths[-1] > 4 if deep else job.depths[-1] == 2
    assert differing(job.found, right.found) == []


@pytest.mark.parametrize("depth, faults", [(None, ""), (None, DELAYED), (2, ""), (16, DELAYED)])
def test_what_is_waited_for_unannounced_does_not_grow(depth, faults, right, swap, monkeypatch):
    """Chosen and forced depths, on a disk that answers late: once a pass is known, nothing is read
    on demand."""
    if depth is not None:
        monkeypatch.setattr(lookahead, "choose", lambda *_: depth)
    with environment(INFINITY_FAULTS=faults):
        job = Job(swap)
    assert differing(job.found, right.found) == []
    assert job.units_ahead and job.misses[-1] == job.misses[1]


def test_reads_and_computes_are_really_measured(swap):
    """The twin: every unit on disk is known; of reads that answer 2 ms late, at least one is seen
    to take them."""
    known = []

    def look(engine):
        ahead = parts_of(engine).prefetcher.look_ahead
        known.append(({*ahead._reads}, sum(ahead._reads.values()), {*ahead._computes}))

    with environment(INFINITY_FAULTS=DELAYED):
        job = Job(swap, look=look, steps=3)
    reads, seconds, computes = known[-1]
    assert job.units_ahead and len(reads) >= BLOCKS and reads <= computes and seconds >= 0.002
