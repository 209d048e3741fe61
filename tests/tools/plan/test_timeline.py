"""The timeline of steps: laws of its queues, and steps of other engines and of ours that were
measured.

Published figures: seconds or TFLOPS that their makers measured; constants of their machines are
data sheets' or rows of theirs, and none was changed to meet another row.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from infinity.tools.plan import timeline
from infinity.tools.plan.timeline import (
    COMPUTE,
    DOWN,
    IN_ORDER,
    OPTIMIZER,
    RANKS_LINK,
    UP,
    Timeline,
    UnitSeconds,
    plan_gathers,
    simulate,
    step_seconds,
)

SEED = random.SystemRandom().randrange(1 << 30)


def units_of(count: int, **seconds: float) -> list[UnitSeconds]:
    given = {"forward": 1.0, "backward": 2.0} | seconds
    return [UnitSeconds(f"unit {index}", 1, **given) for index in range(count)]


def random_units(draw: random.Random) -> list[UnitSeconds]:
    names = ("copy", "read", "landing", "load", "step", "save", "step_on_device")
    names += ("gather", "reduce", "activations")
    units = []
    for index in range(draw.randint(1, 6)):
        seconds = {name: draw.choice([0.0, draw.random()]) for name in names}
        if not seconds["copy"] and not seconds["gather"]:
            seconds["read"] = 0.0
        if not seconds["load"]:
            seconds["save"] = 0.0
        units.append(UnitSeconds(f"{index}", draw.randint(1, 3), draw.random(), 1.0, **seconds))
    return units


def random_job(draw: random.Random) -> Timeline:
    units = random_units(draw)
    return simulate(units, draw.randint(6, 20), slots=draw.randint(1, 3))


def test_a_queue_runs_one_job_after_the_other_and_bounds_the_step():
    """A step is no shorter than the work of any queue."""
    draw = random.Random(SEED)
    for _ in range(200):
        found = random_job(draw)
        for queue, busy in found.busy.items():
            jobs = sorted((job for job in found.jobs if job.queue == queue), key=lambda j: j.start)
            assert all(one.end <= two.start + 1e-9 for one, two in zip(jobs, jobs[1:]))
            if queue in IN_ORDER:
                assert found.seconds >= busy - 1e-9


def test_a_step_of_several_passes_steps_once():
    """Method: seconds of each queue with three passes beside those with one. What is at home on
    disk is added to in between. Twin: without it the disks have nothing more to do."""
    work = {"copy": 0.5, "landing": 0.25, "step": 1.5, "load": 0.3, "save": 0.2}
    for add in (0.0, 0.4):
        units = units_of(4, **work, add=add)
        one, three = (simulate(units, 2, passes=passes) for passes in (1, 3))
        for queue in (COMPUTE, UP, DOWN):
            assert three.busy[queue] == pytest.approx(3 * one.busy[queue])
        assert three.busy[OPTIMIZER] == pytest.approx(one.busy[OPTIMIZER])
        assert three.busy["disks"] - one.busy["disks"] == pytest.approx(2 * 4 * add)
        assert one.seconds < three.seconds < 3 * one.seconds


def test_many_passes_take_what_a_few_tell(monkeypatch):
    """Method: beside a clock that runs all of them, over random units. Twin: gradients that come
    faster than disks add them, which a few passes do not tell of many."""
    ran: list[int] = []
    made = timeline._Steps.__init__

    def noted(self, units, window_nbytes, *, passes, **rest):
        ran.append(passes)
        made(self, units, window_nbytes, passes=passes, **rest)

    def check(units, window, passes, **how) -> bool:
        whole = simulate(units, window, passes=passes, **how).seconds
        ran.clear()
        assert step_seconds(units, window, passes=passes, **how) == pytest.approx(whole, rel=1e-9)
        return max(ran) < passes

    monkeypatch.setattr(timeline._Steps, "__init__", noted)
    draw, told = random.Random(SEED), 0
    for _ in range(60):
        units = [replace(unit, add=draw.choice([0.0, 0.5])) for unit in random_units(draw)]
        how = {"averaged": draw.choice([None, 1]), "after_backward": draw.random() < 0.5}
        how |= {"slots": draw.randint(1, 3), "again": draw.choice([None, 0])}
        told += check(units, draw.randint(3, 20), draw.randint(15, 50), **how)
    assert told > 10
    late = units_of(4, copy=0.5, landing=0.5, load=0.3, step=0.1, save=0.3, add=3.2)
    assert not check(late, 2, 30)
    few, more, whole = (simulate(late, 2, passes=passes).seconds for passes in (5, 6, 30))
    assert few + 25 * (more - few) != pytest.approx(whole, rel=1e-2)


def test_what_can_overlap_does():
    """Copies, landings and updates beside a compute that takes longer: only the last unit's
    landing and update, before the next forward can begin with it, are left."""
    units = units_of(4, copy=0.5, landing=0.5, step=0.5)
    assert simulate(units, 100).seconds == pytest.approx(4 * 3 + 0.5 + 0.5 + 0.5)


def test_parts_of_other_ranks_come_before_a_unit_computes():
    """Method: gathers for two uses ahead. Twin: with sums over ranks on the same link a step is
    longer than with landings on another."""
    gathered = simulate(units_of(4, gather=2.5), 100)
    spans = {(job.kind, job.unit): (job.start, job.end) for job in gathered.jobs}
    for unit in range(1, 4):
        assert spans["gather", unit][1] <= spans["forward", unit][0]
        assert unit < 3 or spans["gather", unit][0] >= spans["forward", unit - 3][1]
    assert gathered.seconds > simulate(units_of(4), 100).seconds
    landed, summed = (
        simulate(units_of(4, gather=2.5, **work), 2) for work in ({"landing": 2}, {"reduce": 2})
    )
    assert landed.seconds < summed.seconds


def test_sums_over_ranks_wait_for_the_last_passes_that_average():
    """Twin: where all passes average, each has its sums."""
    units = units_of(3, reduce=0.5, landing=0.25)
    for averaged in (1, 3):
        busy = simulate(units, 100, passes=3, averaged=averaged).busy
        assert busy[RANKS_LINK] == pytest.approx(averaged * 3 * 0.5)
        assert busy[DOWN] == pytest.approx(averaged * 3 * 0.25)


def test_what_forwards_save_goes_home_and_comes_back():
    """Beside a longer compute it costs the last unit's way. Twin: a slow link decides."""
    plain, few, many = (simulate(units_of(4, activations=a), 100) for a in (0.0, 0.25, 5.0))
    assert few.busy[UP] == few.busy[DOWN] == pytest.approx(4 * 0.25)
    assert few.seconds == pytest.approx(plain.seconds + 2 * 0.25)
    assert many.seconds >= 2 * 4 * 5.0 - 1e-9


def test_clipping_puts_all_updates_behind_the_last_landing():
    """The twin of early updates: those that do not fit beside the next forward are waited for."""
    units = units_of(4, copy=0.1, landing=0.5, step=3.0)
    early, late = (simulate(units, 100, after_backward=after) for after in (False, True))
    assert early.seconds < late.seconds
    landed = max(job.end for job in late.jobs if job.queue == DOWN)
    assert all(job.start >= landed for job in late.jobs if job.queue == OPTIMIZER)


def test_what_the_next_forward_needs_first_is_stepped_first():
    """Of those that have landed: unit 1 before 2, and 0, which lands last, before 2."""
    units = units_of(5, copy=0.1, landing=0.1, step=3.0)
    jobs = [job for job in simulate(units, 100).jobs if job.queue == OPTIMIZER]
    assert [job.unit for job in sorted(jobs, key=lambda job: job.start)] == [4, 3, 1, 0, 2]


def test_a_narrow_window_copies_again_and_waits_for_memory():
    """Twin: with room for all, each unit is copied once."""
    narrow, wide = (simulate(units_of(6, copy=0.9), window) for window in (2, 6))
    assert sum(job.queue == UP for job in wide.jobs) == 6
    assert sum(job.queue == UP for job in narrow.jobs) == 6 + 3
    gather = plan_gathers([1] * 6, 2)[2]
    assert (gather.unit, gather.behind) == (2, (0,))


def test_an_embedding_that_is_also_the_head_is_used_at_both_ends():
    """Its head's compute is at the end of the forward, where the first landing begins; in a narrow
    window it comes again for it. Its gradient lands last. Twin: a head of its own."""
    head = UnitSeconds("both", 1, 0.0, 0.0, 1.0, 2.0, copy=0.5, landing=0.5, step=0.5)
    units = [head, *units_of(4, copy=0.5, landing=0.5, step=0.5)]
    for window, copies in ((100, 1), (2, 2)):
        found = simulate(units, window, again=0)
        assert sum(job.queue == UP and job.unit == 0 for job in found.jobs) == copies
        computes = [(job.unit, job.kind) for job in found.jobs if job.queue == COMPUTE]
        forward = [(0, "forward"), *((unit, "forward") for unit in range(1, 5)), (0, "forward")]
        assert computes == forward + [(unit, "backward") for unit, _ in reversed(forward)]
        landed = [job.unit for job in found.jobs if job.queue == DOWN]
        assert landed == [4, 3, 2, 1, 0]


def test_the_spans_name_every_kind_once():
    found = dict(simulate(units_of(3, copy=0.5, landing=0.5, step=0.5), 1).spans())
    assert list(found) == ["unit 0", "unit 1", "unit 2"]
    assert set(found["unit 1"]) == {
        *("copy", "forward", "copy again", "backward", "landing", "step"),
    }
    assert set(found["unit 2"]) == set(found["unit 1"]) - {"copy again"}
    assert all(start <= end for spans in found.values() for start, end in spans.values())


# --- steps that were measured ---

LOHAN = {  # samples of 1,024 tokens -> TFLOPS of 13 B with 1, 2, 3, 6 and 12 disks
    32: (37.5, 64.3, 81.1, 121.7, 142.0),
    48: (53.1, 89.7, 121.7, 146.3, 153.9),
    64: (70.3, 111.7, 136.3, 151.5, 148.2),
}
DISKS = (1, 2, 3, 6, 12)
SIZES = {"13 B": (12.58e9, 40), "70 B": (64.4e9, 80), "175 B": (174e9, 96)}  # parameters, blocks
LOHAN_CARDS = {  # model, cards -> samples of a step -> TFLOPS with 12 disks
    ("13 B", 1): {8: 42.8, 16: 84.3, 32: 143.1, 64: 155.8, 128: 153.8},
    ("175 B", 1): {8: 52.6, 16: 86.9},
    ("13 B", 2): {16: 55.0, 32: 103.2, 64: 194.7, 128: 278.2},
    ("70 B", 2): {16: 64.6, 32: 128.8, 48: 183.5},
    ("13 B", 4): {32: 106.5, 64: 209.7, 128: 358.7, 256: 514.4},
    ("70 B", 4): {32: 124.8, 64: 249.7, 96: 348.4},
}


def lohan(samples: int, disks: int = 12, *, model: str = "13 B", cards: int = 1) -> float:
    """Predicts LoHan's TFLOPS on 4090s with D7-P5510 disks and 16 channels of DDR4-3200: 6.5 and
    3.4 GB/s a disk, 409 GB/s of memory, 20 GB/s of link. Compute at 156 TFLOPS a card, its best
    row, counted with recomputation. One unit's state at a time is on its way, as its I/O, which is
    DeepSpeed's, has it."""
    (parameters, blocks), tokens = SIZES[model], 1024 * samples
    block = parameters / blocks
    compute = 8 * block * tokens / 156e12 / cards
    unit = UnitSeconds(
        "block",
        int(2 * block),
        compute / 4,
        compute * 3 / 4,
        copy=2 * block / 20e9,
        read=2 * block / 6.5e9 / disks,
        landing=2 * block / 20e9,
        load=12 * block / 6.5e9 / disks,
        step=28 * block / 409e9,
        save=14 * block / 3.4e9 / disks,
    )
    found = simulate([unit] * blocks, 4 * unit.nbytes, slots=1, pieces=1)
    return 8 * parameters * tokens / found.seconds / 1e12


def test_lohans_disk_sweep():
    """Within 10 % where disks or compute decide alone (1 and 12 disks). Where both take as long,
    theirs overlap less than any queues of this kind, by up to 26 %. On average 10 %."""
    errors = {
        (samples, disks): lohan(samples, disks) / measured - 1
        for samples, row in LOHAN.items()
        for disks, measured in zip(DISKS, row)
    }
    for (samples, disks), error in errors.items():
        assert -0.02 < error < (0.10 if disks in (1, 12) else 0.28), (samples, disks, error)
    assert sum(map(abs, errors.values())) / len(errors) < 0.11
    assert sum(abs(error) < 0.10 for error in errors.values()) >= 8


def test_lohans_larger_models_and_cards():
    """Claim: a bound that no measured row beats; within 10 % where one card's compute decides.

    Not reproduced: 18 of 21 rows, of small batches or several cards. Their steps do not get
    shorter with the batch: 19.3 and 19.6 s of 13 B with 8 and 16 samples, 30 to 34 s with two
    cards and 16 to 64. The data sheets' disks, memory and links explain 9 s of that.
    """
    errors = {
        (model, cards, samples): lohan(samples, model=model, cards=cards) / measured - 1
        for (model, cards), rows in LOHAN_CARDS.items()
        for samples, measured in rows.items()
    }
    assert len(errors) == 21 and min(errors.values()) > -0.02
    assert [row for row, error in errors.items() if error < 0.10] == [
        *(("13 B", 1, samples) for samples in (32, 64, 128))
    ]
    seconds = {
        (cards, samples): 8 * 12.58e9 * 1024 * samples / tflops / 1e12
        for cards in (1, 2)
        for samples, tflops in LOHAN_CARDS["13 B", cards].items()
    }
    assert seconds[1, 8] == pytest.approx(19.3, abs=0.05)
    assert seconds[1, 16] == pytest.approx(19.6, abs=0.05)
    assert [round(seconds[2, samples]) for samples in (16, 32, 64)] == [30, 32, 34]
    assert 8 * 12.58e9 * 1024 * 8 / lohan(8) / 1e12 == pytest.approx(8.8, abs=0.1)


def trainstream(layers: int, streamed: int, nbytes: float, compute: float, link: float) -> float:
    """Predicts a step of LoRA over frozen blocks, the first of which are streamed."""
    units = [
        UnitSeconds(
            "layer",
            int(nbytes / layers),
            compute / layers / 3,
            compute / layers * 2 / 3,
            copy=nbytes / layers / link if index < streamed else 0.0,
        )
        for index in range(layers)
    ]
    return simulate(units, int(3 * nbytes / layers)).seconds


def test_trainstreams_streamed_lora():
    """Its 7 B model resident (0.27 s) and with all layers streamed (1.25 s) give this laptop's
    compute and link: 13.06 GB of layers pass 54 of 28 times. They predict 14 B, of which 20 of 48
    layers are streamed: 1.37 s."""
    nbytes, other = 2 * 6.53e9, 2 * 13.1e9
    link = 54 / 28 * nbytes / 1.25
    assert trainstream(28, 28, nbytes, 0.27, link) == pytest.approx(1.25, rel=0.05)
    predicted = trainstream(48, 20, other, 0.27 * other / nbytes, link)
    assert predicted == pytest.approx(1.37, rel=0.10)


@pytest.mark.parametrize(
    ("state_nbytes", "measured"), [(14, 3.837), (None, 3.531)], ids=["host, int8", "auto"]
)
def test_our_own_steps_of_8_b_on_an_h100(state_nbytes, measured):
    """32 blocks of 218 M, an embedding and a head of 525 M, 32 K tokens. Compute 3.47 s (its
    kernels alone), 165 GB/s of memory, 37.5 GB/s each way while both are used. ``auto``: the first
    ten units on the device."""
    counts = [525e6, *[218e6] * 32, 525e6]
    units = []
    for index, count in enumerate(counts):
        share = 3.47 * count / sum(counts)
        is_there = state_nbytes is None and index < 10
        way = 0.0 if is_there else 2 * count / 37.5e9
        step = (state_nbytes or 28) * count / 165e9
        units.append(
            UnitSeconds(
                str(index),
                int(2 * count),
                share / 4,
                share * 3 / 4,
                copy=way,
                landing=way,
                step=0.0 if is_there else step,
                step_on_device=step * 165e9 / 2.8e12 if is_there else 0.0,
            )
        )
    found = simulate(units, int(17e9))
    assert found.seconds == pytest.approx(measured, rel=0.10)
    assert found.bound == COMPUTE
