"""The updater: load -> step -> save over extents gives the bits of a step in memory, or a typed
error, and never both.

Words used here:

**chunk**: what fits one slot; the updater loads, steps and saves it as one. **smallest slot**:
holds `CHUNK_GRAIN` elements of every array at home in the file; one byte less is refused.
**reached**: a chunk that was stepped before something went wrong.
"""

from __future__ import annotations

import errno
import gc
import itertools
import time
from collections.abc import Sequence

import doubles
import pytest
import torch
from doubles import fault_plan
from native_arrays import (
    CHUNK_GRAIN,
    ENGINES,
    MIB,
    Arrays,
    Disk,
    Form,
    MemorySteps,
    Runs,
    Staging,
    Unit,
    bits,
    different,
    every_form,
    hyper,
    outcome_in_child,
    random_arrays,
    same_bits,
    seeded,
)

from infinity import native
from infinity.errors import CorruptionError, StorageError, UsageError

BLOCK = native.BLOCK_NBYTES
CHECKED = native.CHECKSUM_NBYTES
ALL = ("weight", "master", "exp_avg", "exp_avg_sq", "grad")
SPLIT = Form(native.Rule.ADAMW, torch.bfloat16, native.Master.SPLIT, torch.bfloat16)
PLAIN = Form(native.Rule.ADAMW)
NUMEL = 3 * CHUNK_GRAIN + 4096  # three whole chunks of the smallest slot and a short one
MADE = dict(lr=1e-2, weight_decay=0.1, step=3, grad_factors=[0.7])


@pytest.fixture(params=ENGINES)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def steps() -> MemorySteps:
    return MemorySteps()


def file_nbytes_per_element(form: Form, in_file: Sequence[str]) -> int:
    return sum(dtype.itemsize for name, dtype in form.dtypes.items() if name in in_file)


def smallest_slot_nbytes(form: Form, in_file: Sequence[str]) -> int:
    return CHUNK_GRAIN * file_nbytes_per_element(form, in_file)


class Pipeline:
    """An updater with slots of its own. It has to outlive its updates: the updater knows the slots'
    address only."""

    def __init__(self, disk: Disk, slot_nbytes: int, *, slots: int = 4, threads: int = 1):
        staging = Staging(slots * slot_nbytes) if slot_nbytes else None
        address, slots = (staging.address, slots) if staging else (0, 0)
        self.updater = native.Updater(disk.engine, address, slots * slot_nbytes, slots, threads)
        self.staging = (
            staging  # after the updater: attributes go in this order, and its end may still save
        )

    def submit(self, update: native.UnitUpdate) -> native.Ticket:
        return self.updater.submit(update)

    def step(self, update: native.UnitUpdate) -> None:
        """Submits and waits."""
        self.submit(update).wait()


def step_from_disk(
    folder,
    kind: str,
    form: Form,
    arrays: Arrays,
    in_file: Sequence[str],
    runs: Runs,
    *,
    slots: int = 4,
    slot_nbytes: int | None = None,
    threads: int = 2,
    faults: doubles.FaultPlan | None = None,
) -> Arrays:
    """The arrays after one step with those of ``in_file`` at home in a file, read back and
    verified."""
    disk = Disk(folder, kind, faults=faults)
    unit = Unit(form, arrays, disk=disk, in_file=in_file)
    slot_nbytes = smallest_slot_nbytes(form, in_file) if slot_nbytes is None else slot_nbytes
    Pipeline(disk, slot_nbytes, slots=slots, threads=threads).step(unit.update(runs))
    return unit.arrays()


# --- where arrays live changes no bit ---


@pytest.mark.parametrize("count", range(len(ALL) + 1), ids=lambda count: f"{count}_in_file")
def test_any_arrays_in_files_give_the_bits_of_all_in_memory(tmp_path, kind, count, steps):
    """Steps a split-master AdamW with every choice of arrays at home in the file, through the
    smallest slots."""
    arrays = random_arrays(SPLIT, NUMEL, seeded(1))
    runs = [(0, NUMEL, hyper(**MADE))]
    expected = steps(SPLIT, arrays, runs)
    assert set(different(arrays, expected)) == set(ALL) - {"grad"}
    for in_file in itertools.combinations(ALL, count):
        assert not different(
            expected, step_from_disk(tmp_path, kind, SPLIT, arrays, in_file, runs)
        ), in_file


@pytest.mark.parametrize("form", every_form()[::3], ids=str)
def test_every_kind_of_array_can_live_in_files(tmp_path, form, steps):
    """Steps forms of every rule, master and dtype with all arrays in the file, with odd runs and a
    gap."""
    arrays = random_arrays(form, NUMEL, seeded(2))
    made = [hyper(momentum=0.9, **MADE), hyper(lr=0.5, momentum=0.5, step=1)]
    runs = [
        (0, 12345, made[0]),
        (12345, CHUNK_GRAIN + 1, made[1]),
        (2 * CHUNK_GRAIN - 1, NUMEL - 7, made[0]),
    ]
    expected = steps(form, arrays, runs)
    assert different(arrays, expected)
    assert not different(expected, step_from_disk(tmp_path, "threads", form, arrays, ALL, runs))


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "extra", [0, 1, CHUNK_GRAIN, 10**6], ids=lambda extra: f"plus_{extra}_elements"
)
def test_any_number_and_size_of_slots_gives_the_same_bits(tmp_path, kind, slots, extra, steps):
    """Steps through 1 to 5 slots from the smallest to one that holds the whole unit."""
    in_file = ("weight", "exp_avg", "exp_avg_sq")
    arrays = random_arrays(PLAIN, NUMEL, seeded(3))
    runs = [(5, NUMEL - 5, hyper(**MADE))]
    slot_nbytes = min(CHUNK_GRAIN + extra, NUMEL) * file_nbytes_per_element(PLAIN, in_file)
    slot_nbytes = -(-slot_nbytes // BLOCK) * BLOCK
    found = step_from_disk(
        tmp_path, kind, PLAIN, arrays, in_file, runs, slots=slots, slot_nbytes=slot_nbytes
    )
    assert not different(steps(PLAIN, arrays, runs), found)


def test_a_slot_below_the_smallest_is_refused_with_its_size(tmp_path):
    """Offers slots one block short of 32768 elements; the twin is the smallest itself."""
    disk = Disk(tmp_path)
    unit = Unit(PLAIN, random_arrays(PLAIN, NUMEL, seeded(4)), disk=disk, in_file=ALL)
    smallest = smallest_slot_nbytes(PLAIN, ALL)
    with pytest.raises(UsageError, match=f"a slot of {smallest - BLOCK} bytes"):
        Pipeline(disk, smallest - BLOCK).submit(unit.whole(hyper()))
    with pytest.raises(UsageError, match="a slot of 0 bytes"):
        native.Updater(disk.engine, 0, 0, 0, 1).submit(unit.whole(hyper()))
    Pipeline(disk, smallest).step(unit.whole(hyper()))


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize(
    "faults",
    [
        {"short_transfer": 0.8},
        {"delay": 0.2, "delay_seconds": 0.0003},
        {"reorder": 0.6},
        {"short_transfer": 0.5, "delay": 0.1, "delay_seconds": 0.0003, "reorder": 0.4},
    ],
    ids="+".join,
)
def test_short_late_and_reordered_transfers_change_no_bit(tmp_path, kind, faults, seed, steps):
    """Takes three steps in a row under a seeded fault plan, in both numbers of slots that wait for
    each other most."""
    arrays = random_arrays(SPLIT, NUMEL, seeded(seed))
    expected = arrays
    for step in (1, 2, 3):
        expected = steps.whole(SPLIT, expected, hyper(lr=1e-2, step=step))
    for slots in (2, 3):
        disk = Disk(
            tmp_path, kind, faults=fault_plan(seed, **faults), block_nbytes=16 * BLOCK, depth=8
        )
        unit = Unit(SPLIT, arrays, disk=disk, in_file=ALL)
        pipeline = Pipeline(disk, smallest_slot_nbytes(SPLIT, ALL), slots=slots)
        ticket = None
        for step in (1, 2, 3):
            ticket = pipeline.submit(unit.whole(hyper(lr=1e-2, step=step), after=ticket))
        ticket.wait()
        assert not different(expected, unit.arrays())


# --- what moves, and when ---


def test_chunks_without_a_run_move_no_bytes(tmp_path, kind):
    """Steps a few elements of the second chunk and counts the engine's bytes: one chunk in, its
    saved arrays out."""
    disk = Disk(tmp_path, kind)
    in_file = ("weight", "exp_avg", "grad")
    arrays = random_arrays(PLAIN, NUMEL, seeded(7))
    unit = Unit(PLAIN, arrays, disk=disk, in_file=in_file)
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, in_file))

    def moved(runs: Runs) -> tuple[int, int]:
        before = [disk.engine.nbytes(op) for op in (native.Op.READ, native.Op.WRITE)]
        pipeline.submit(unit.update(runs)).wait()
        after = [disk.engine.nbytes(op) for op in (native.Op.READ, native.Op.WRITE)]
        return after[0] - before[0], after[1] - before[1]

    made = hyper(**MADE)
    chunk = 4 * CHUNK_GRAIN
    assert moved([]) == (0, 0)
    assert moved([(CHUNK_GRAIN + 9, CHUNK_GRAIN + 10, made)]) == (3 * chunk, 2 * chunk)
    assert moved([(NUMEL - 1, NUMEL, made)]) == (3 * 4 * 4096, 2 * 4 * 4096)  # the short last chunk
    assert moved([(CHUNK_GRAIN - 1, CHUNK_GRAIN + 1, made)]) == (
        6 * chunk,
        4 * chunk,
    )  # the twin: two chunks
    assert moved([(0, NUMEL, made)]) == (3 * 4 * NUMEL, 2 * 4 * NUMEL)


def test_versions_of_stepped_extents_are_the_updates(tmp_path, kind):
    """Submits updates with versions 7 and 8 and reads the extents' own; a gradient is not written
    and keeps its."""
    disk = Disk(tmp_path, kind)
    unit = Unit(
        SPLIT,
        random_arrays(SPLIT, NUMEL, seeded(8)),
        disk=disk,
        in_file=("weight", "exp_avg", "grad"),
    )
    pipeline = Pipeline(disk, MIB)
    for version in (7, 8):
        pipeline.submit(unit.whole(hyper(step=version), version=version)).wait()
        versions = {name: extent.version for name, extent in unit.extents.items()}
        assert versions == {
            "weight": version,
            "master": version,
            "exp_avg": version,
            "exp_avg_sq": version,
            "grad": 0,
        }


def test_a_ticket_ends_when_the_new_values_are_at_home(tmp_path, kind):
    """Reads the file by the operating system right after each ticket, while every piece is
    delayed."""
    disk = Disk(tmp_path, kind, faults=fault_plan(9, delay=0.3, delay_seconds=0.001, reorder=0.5))
    units = [
        Unit(PLAIN, random_arrays(PLAIN, 8192, seeded(9 + i)), disk=disk, in_file=ALL)
        for i in range(4)
    ]
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, ALL))
    before = [unit.arrays(raw=True) for unit in units]
    tickets = [pipeline.submit(unit.whole(hyper(lr=0.1))) for unit in units]
    for unit, ticket, old in zip(units, tickets, before):
        ticket.wait()
        assert ticket.done
        assert set(different(old, unit.arrays(raw=True))) == set(PLAIN.dtypes) - {"grad"}


def test_the_gradient_may_still_be_landing(tmp_path, kind, steps):
    """Submits the update before its gradient's write has ended, with `after` its ticket, under
    delays."""
    disk = Disk(tmp_path, kind, faults=fault_plan(10, delay=0.5, delay_seconds=0.001))
    arrays = random_arrays(PLAIN, NUMEL, seeded(10))
    unit = Unit(PLAIN, arrays | {"grad": torch.zeros(NUMEL)}, disk=disk, in_file=ALL)
    staging = Staging(4 * NUMEL)
    staging.bytes[:] = arrays["grad"].view(torch.uint8)
    landing = disk.engine.write(unit.extents["grad"], 0, staging.address, 4 * NUMEL)
    Pipeline(disk, smallest_slot_nbytes(PLAIN, ALL)).step(unit.whole(hyper(**MADE), after=landing))
    assert not different(steps.whole(PLAIN, arrays, hyper(**MADE)), unit.arrays())


def test_updates_of_memory_run_in_the_order_of_submission(steps):
    """Submits ten different updates of the same arrays without waiting, and holds the end against
    them one by one."""
    arrays = random_arrays(PLAIN, 4096, seeded(11))
    made = [hyper(lr=0.1 / (1 + i), weight_decay=0.1 * i, step=1 + i) for i in range(10)]
    expected = arrays
    for each in made:
        expected = steps.whole(PLAIN, expected, each)
    unit = Unit(PLAIN, arrays)
    updater = native.Updater(native.IoEngine(kind="threads"), 0, 0, 0, 2)
    tickets = [updater.submit(unit.whole(each)) for each in made]
    tickets[-1].wait()
    assert all(ticket.done for ticket in tickets)
    assert not different(expected, unit.arrays())
    backwards = arrays
    for each in reversed(made):
        backwards = steps.whole(PLAIN, backwards, each)
    assert different(expected, backwards)  # the twin: the order matters


@pytest.mark.parametrize("chained", [True, False], ids=["after_the_last", "only_submitted"])
def test_updates_of_one_file_run_in_the_order_of_submission(tmp_path, kind, chained, steps):
    """Submits six updates of the same extents without waiting: each must load what the one before
    saved."""
    arrays = random_arrays(PLAIN, 8192, seeded(12))
    made = [hyper(lr=0.1 / (1 + i), step=1 + i) for i in range(6)]
    expected = arrays
    for each in made:
        expected = steps.whole(PLAIN, expected, each)
    disk = Disk(tmp_path, kind)
    unit = Unit(PLAIN, arrays, disk=disk, in_file=ALL)
    pipeline, ticket = Pipeline(disk, smallest_slot_nbytes(PLAIN, ALL)), None
    for each in made:
        ticket = pipeline.submit(unit.whole(each, after=ticket if chained else None))
    ticket.wait()
    assert not different(expected, unit.arrays())


def test_many_units_through_few_slots(tmp_path, kind, steps):
    """Submits 12 units of different forms, sizes and homes at once, and waits for them from the
    last to the first."""
    generator = seeded(13)
    disk = Disk(tmp_path, kind, nbytes=32 * MIB)
    forms = [PLAIN, SPLIT, every_form()[5], every_form()[40]]
    homes = [ALL, ("grad",), (), ("exp_avg", "exp_avg_sq"), ("weight", "master")]
    cases = []
    for i in range(12):
        form = forms[i % 4]
        arrays = random_arrays(form, 4096 * (1 + 3 * i), generator)
        made = hyper(lr=0.01 * (1 + i), step=1 + i, momentum=0.9)
        cases.append((form, arrays, made, Unit(form, arrays, disk=disk, in_file=homes[i % 5])))
    pipeline = Pipeline(disk, CHUNK_GRAIN * 20, slots=2, threads=2)
    tickets = [pipeline.submit(unit.whole(made)) for *_, made, unit in cases]
    for ticket in reversed(tickets):
        ticket.wait()
    for form, arrays, made, unit in cases:
        assert not different(steps.whole(form, arrays, made), unit.arrays())
    assert pipeline.updater.elements == sum(arrays["weight"].numel() for _, arrays, *_ in cases)


@pytest.mark.parametrize("in_file", [(), ALL], ids=["in memory", "on disk"])
def test_updates_begin_as_their_gradients_arrive(tmp_path, kind, in_file, steps):
    """The first in line lands last, and holds up nobody: with slots for one it takes none before.
    Twin: two that have landed go in the order of submission."""
    disk, made = Disk(tmp_path, kind, nbytes=32 * MIB), hyper(**MADE)
    units = [
        Unit(PLAIN, random_arrays(PLAIN, 8192, seeded(50 + i)), disk=disk, in_file=in_file)
        for i in range(4)
    ]
    before = [unit.arrays() for unit in units]
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, ALL), slots=1)
    pipeline.updater.record_events()
    landings = [native.Ticket(1) for _ in units]
    tickets = [
        pipeline.submit(unit.whole(made, after=landing, label=label))
        for label, (unit, landing) in enumerate(zip(units, landings))
    ]
    for label in (2, 1):
        landings[label].part_done()
        tickets[label].wait()
    assert not tickets[0].done and not tickets[3].done
    for label in (3, 0):
        landings[label].part_done()
    for ticket in tickets:
        ticket.wait()
    stepped = [label for what, label, *_ in pipeline.updater.take_events() if what == "step"]
    assert stepped[:2] == [2, 1] and sorted(stepped) == [0, 1, 2, 3]
    for arrays, unit in zip(before, units):
        assert not different(steps.whole(PLAIN, arrays, made), unit.arrays())


def test_an_update_that_is_waited_for_goes_first(tmp_path, kind):
    """Twin: the others keep their order. Waiting hurries: the test looks whether they are done."""
    disk = Disk(tmp_path, kind)
    units = [Unit(PLAIN, random_arrays(PLAIN, 8192, seeded(60 + i)), disk=disk) for i in range(4)]
    pipeline, landing = Pipeline(disk, 0), native.Ticket(1)
    pipeline.updater.record_events()
    tickets = [
        pipeline.submit(unit.whole(hyper(**MADE), after=landing, label=label))
        for label, unit in enumerate(units)
    ]
    assert not tickets[2].wait_for(0)
    landing.part_done()
    while not all(ticket.done for ticket in tickets):
        time.sleep(0.001)
    stepped = [label for what, label, *_ in pipeline.updater.take_events() if what == "step"]
    assert stepped == [2, 0, 1, 3]


def test_dropping_the_updater_finishes_what_was_submitted(tmp_path, kind, steps):
    """Drops the updater with updates under way; their values are at home afterwards."""
    disk = Disk(tmp_path, kind, faults=fault_plan(14, delay=0.2, delay_seconds=0.001))
    arrays = random_arrays(SPLIT, NUMEL, seeded(14))
    unit = Unit(SPLIT, arrays, disk=disk, in_file=ALL)
    pipeline = Pipeline(disk, smallest_slot_nbytes(SPLIT, ALL), slots=2)
    ticket = pipeline.submit(unit.whole(hyper(**MADE)))
    del pipeline.updater
    gc.collect()
    assert ticket.done
    assert not different(steps.whole(SPLIT, arrays, hyper(**MADE)), unit.arrays())


# --- when something goes wrong in the middle ---


def poisoned(submit, tell: type[Exception], unit: Unit) -> bool:
    with pytest.raises(tell):
        submit(unit.whole(hyper()))
    return True


def assert_kept(old: Arrays, new: Arrays, first: int) -> None:
    """Elements from ``first`` on have their old bits."""
    for name in old:
        assert torch.equal(bits(old[name])[first:], bits(new[name])[first:]), name


@pytest.mark.parametrize("in_file", [ALL, ("exp_avg",)], ids=["all_in_file", "weights_in_memory"])
@pytest.mark.parametrize("broken", [0, 2], ids=["first_chunk", "third_chunk"])
def test_a_corrupt_block_stops_the_updater_before_it_is_used(
    tmp_path, kind, broken, in_file, steps
):
    """Flips one bit on disk in one chunk: typed error, nothing from that chunk on is changed,
    nothing later runs."""
    disk = Disk(tmp_path, kind)
    arrays = random_arrays(PLAIN, NUMEL, seeded(21))
    unit = Unit(PLAIN, arrays, disk=disk, in_file=in_file)
    behind = Unit(PLAIN, arrays, disk=disk, in_file=in_file)
    disk.change_byte(unit.extents["exp_avg"].offset + broken * 4 * CHUNK_GRAIN + 777)
    spoiled, untouched = unit.arrays(raw=True), behind.arrays()
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, in_file), slots=2)
    ticket = pipeline.submit(unit.whole(hyper(**MADE)))
    queued: list[native.Ticket] = []
    try:
        queued.append(pipeline.submit(behind.whole(hyper())))
    except CorruptionError:
        pass  # the first one had failed already
    for each in (ticket, *queued, ticket):
        with pytest.raises(CorruptionError, match="checksum mismatch") as caught:
            each.wait()
        assert str(disk.path) in str(caught.value)
    assert poisoned(pipeline.submit, CorruptionError, behind)
    assert_kept(spoiled, unit.arrays(raw=True), broken * CHUNK_GRAIN)
    assert not different(untouched, behind.arrays())
    expected = steps.whole(PLAIN, arrays, hyper(**MADE))
    reached = {name: array[: broken * CHUNK_GRAIN] for name, array in unit.arrays(raw=True).items()}
    for name, array in reached.items():
        assert same_bits(array, expected[name][: broken * CHUNK_GRAIN]), name


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_a_refused_read_stops_the_updater_with_its_errno(tmp_path, kind, broken):
    """Makes every transfer fail with EIO from the first piece of a chunk on; what was not reached
    has its old bits."""
    arrays = random_arrays(PLAIN, NUMEL, seeded(31))
    in_file, block = ("weight", "exp_avg"), 16 * BLOCK
    writes = 2 * -(-4 * NUMEL // block)  # pieces of the test's own writes, which come first
    reads = (
        broken * 2 * 4 * CHUNK_GRAIN // block
    )  # of the chunks before: with four slots all loads start at once
    faults = fault_plan(eio=1.0, first_piece=writes + reads)
    disk = Disk(tmp_path, kind, block_nbytes=block, faults=faults)
    unit = Unit(PLAIN, arrays, disk=disk, in_file=in_file)
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, in_file))
    ticket = pipeline.submit(unit.whole(hyper(**MADE)))
    with pytest.raises(StorageError) as caught:
        ticket.wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(disk.path))
    assert ticket.done
    assert poisoned(pipeline.submit, StorageError, unit)
    reached = pipeline.updater.elements
    assert (broken > 0) * CHUNK_GRAIN <= reached <= broken * CHUNK_GRAIN
    after = unit.arrays(raw=True)
    assert_kept(arrays, after, reached)
    assert bool(different(arrays, after)) == bool(reached)


def test_a_failed_gradient_landing_stops_the_update_untouched(tmp_path, kind):
    """Submits an update `after` a write that meets EIO: the update fails with that error and
    changes nothing."""
    failing = Disk(tmp_path, kind, faults=fault_plan(eio=1.0))
    disk = Disk(tmp_path, kind)
    for in_file in ((), ALL):
        arrays = random_arrays(PLAIN, 8192, seeded(41))
        unit = Unit(PLAIN, arrays, disk=disk, in_file=in_file)
        staging = Staging(CHECKED)
        landing = failing.engine.write(failing.extent(CHECKED), 0, staging.address, CHECKED)
        pipeline = Pipeline(disk, MIB)
        ticket = pipeline.submit(unit.whole(hyper(), after=landing))
        with pytest.raises(StorageError) as caught:
            ticket.wait()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(failing.path))
        assert not different(arrays, unit.arrays())
        assert poisoned(pipeline.submit, StorageError, unit)


def test_a_save_that_fails_is_an_error_of_its_ticket_and_of_all_later_ones(tmp_path, kind):
    """Makes every write but the test's own fail with ENOSPC."""
    pieces = 4  # one write for each array of the unit
    disk = Disk(tmp_path, kind, faults=fault_plan(enospc=1.0, first_piece=pieces))
    unit = Unit(PLAIN, random_arrays(PLAIN, 8192, seeded(42)), disk=disk, in_file=ALL)
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, ALL))
    with pytest.raises(StorageError) as caught:
        pipeline.submit(unit.whole(hyper())).wait()
    assert caught.value.errno == errno.ENOSPC
    assert poisoned(pipeline.submit, StorageError, unit)


def test_a_save_the_disk_lost_is_found_by_the_next_step(tmp_path, kind):
    """Lets the disk drop the first step's saves: the second must not train on the stale values it
    reads."""
    disk = Disk(tmp_path, kind, faults=fault_plan(lost_write=1.0, first_piece=4))
    unit = Unit(PLAIN, random_arrays(PLAIN, 8192, seeded(43)), disk=disk, in_file=ALL)
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, ALL))
    pipeline.submit(unit.whole(hyper(step=1))).wait()
    with pytest.raises(CorruptionError, match="lost a write"):
        pipeline.submit(unit.whole(hyper(step=2), version=2)).wait()


# --- updates that cannot be served ---


def test_an_update_that_does_not_fit_its_extents_is_refused_and_breaks_nothing():
    """Tries wrong counts, missing and short extents, and runs that overlap, are empty or lie
    outside."""
    arrays = random_arrays(SPLIT, 8192, seeded(51))
    unit = Unit(SPLIT, arrays)
    updater = native.Updater(native.IoEngine(kind="threads"), 0, 0, 0, 1)
    good = dict(
        layout=SPLIT.layout,
        count=8192,
        version=1,
        runs=[native.Run(0, 8192, hyper())],
        **unit.extents,
    )
    short = native.Extent.in_memory(unit.extents["exp_avg"].address, 4096)
    wrong = [
        (dict(count=0), "0 elements"),
        (dict(count=100), "100 elements"),
        (dict(weight=None), "needs a weight"),
        (dict(grad=None), "needs a weight and a gradient"),
        (dict(master=None), "master extent and layout disagree"),
        (dict(exp_avg_sq=None), "needs an extent for exp_avg_sq"),
        (dict(exp_avg=short), "4096 bytes for 8192 elements"),
        (dict(runs=[native.Run(5, 5, hyper())]), "run 5 to 5"),
        (dict(runs=[native.Run(9, 5, hyper())]), "run 9 to 5"),
        (dict(runs=[native.Run(0, 8193, hyper())]), "run 0 to 8193 of 8192"),
        (dict(runs=[native.Run(0, 10, hyper()), native.Run(9, 20, hyper())]), "run 9 to 20"),
        (dict(runs=[native.Run(10, 20, hyper()), native.Run(0, 5, hyper())]), "run 0 to 5"),
    ]
    for change, tells in wrong:
        with pytest.raises(UsageError, match=tells):
            updater.submit(native.UnitUpdate(**(good | change)))
    assert not different(arrays, unit.arrays())
    moving = native.Layout(
        rule=native.Rule.SGD,
        weight=native.DType.BFLOAT16,
        master=native.Master.SPLIT,
        grad=native.DType.BFLOAT16,
        moments=native.DType.FLOAT32,
    )
    runs = [native.Run(0, 8192, hyper(momentum=0.9))]
    with pytest.raises(UsageError, match="needs an extent for exp_avg"):
        updater.submit(
            native.UnitUpdate(
                **(good | dict(layout=moving, runs=runs, exp_avg=None, exp_avg_sq=None))
            )
        )
    updater.submit(native.UnitUpdate(**good)).wait()
    assert different(arrays, unit.arrays())


@pytest.mark.parametrize(
    "case", ["misaligned slots", "no such file", "a longer extent", "no engine"]
)
def test_an_update_the_engine_cannot_serve_is_an_error_and_not_the_end_of_the_process(
    tmp_path, case
):
    """Submits what the I/O engine refuses: the refusal belongs to submit or to the ticket. In a
    child process."""
    numel = 8192

    def call() -> str:
        disk = Disk(tmp_path)
        unit = Unit(
            PLAIN,
            random_arrays(PLAIN, numel, torch.Generator().manual_seed(52)),
            disk=disk,
            in_file=ALL,
        )
        staging, engine, shift = Staging(4 * MIB), disk.engine, 0
        if case == "misaligned slots":
            shift = 8
        elif case == "no such file":
            unit.extents["weight"] = native.Extent.in_file(7, 0, 4 * numel)
        elif case == "a longer extent":  # ends behind the elements, in mid-block of its checksums
            unit.extents["weight"] = disk.extent(4 * numel + BLOCK)
        else:
            engine = None
        updater = native.Updater(engine, staging.address + shift, 2 * MIB, 2, 1)
        updater.submit(unit.whole(hyper())).wait()
        return "served"

    outcome = outcome_in_child(call)
    assert outcome.startswith(("UsageError", "TypeError", "RuntimeError")) or (
        case == "a longer extent" and outcome == "served"
    ), outcome


@pytest.mark.parametrize("slots, threads", [(-1, 1), (1, 0), (1, -2)])
def test_an_updater_without_hands_is_refused(slots, threads):
    """Asks for fewer than no slots, and for no threads."""
    staging = Staging(MIB)
    with pytest.raises((UsageError, ValueError)):
        native.Updater(native.IoEngine(kind="threads"), staging.address, MIB, slots, threads)
