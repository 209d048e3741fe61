"""A run's missed steps: updates with a gradient of zeros, all in one pass over its elements.

Twins: a missed step that is left out, or its gradient, changes the result.
"""

from __future__ import annotations

import pytest
import torch
from marks import every
from native_arrays import (
    CHUNK_GRAIN,
    Disk,
    MemorySteps,
    Unit,
    different,
    every_form,
    hyper,
    same_bits,
    seeded,
)
from native_arrays import random_arrays as random
from test_update import ALL, NUMEL, PLAIN, Pipeline, smallest_slot_nbytes, step_from_disk

from infinity import native
from infinity.errors import CorruptionError

BEGIN, END = CHUNK_GRAIN - 640, 2 * CHUNK_GRAIN + 64  # the run, over the ends of chunks


@pytest.fixture(scope="module")
def steps() -> MemorySteps:
    return MemorySteps()


def hypers(count: int) -> list[native.Hyperparameters]:
    return [
        hyper(lr=1e-2 / (1 + n), momentum=0.9, weight_decay=0.1, step=3 + n) for n in range(count)
    ]


def one_by_one(steps: MemorySteps, form, arrays, made: list, *, last: bool):
    """The same by updates of their own, each but perhaps the last with zeros for a gradient."""
    grad = arrays["grad"]
    for number, each in enumerate(made):
        is_last = last and number == len(made) - 1
        given = arrays | {"grad": grad if is_last else torch.zeros_like(grad)}
        arrays = steps(form, given, [(BEGIN, END, each)])
    return arrays | {"grad": grad}


@pytest.mark.parametrize("form", every(every_form()[::2], 3), ids=str)
def test_missed_steps_are_those_of_zeros(form, steps, tmp_path):
    arrays, made = random(form, NUMEL, seeded(1)), hypers(4)
    for last in (True, False):
        missed = made[:-1] if last else made
        run = BEGIN, END, made[-1], missed, last
        expected = one_by_one(steps, form, arrays, made, last=last)
        assert different(arrays, expected)
        assert not different(expected, steps(form, arrays, [run]))
        assert not different(
            expected, step_from_disk(tmp_path, "threads", form, arrays, ALL, [run])
        )


def test_a_missed_step_that_is_left_out_shows(steps):
    arrays, made = random(PLAIN, NUMEL, seeded(2)), hypers(3)
    expected = one_by_one(steps, PLAIN, arrays, made, last=True)
    assert different(expected, steps(PLAIN, arrays, [(BEGIN, END, made[-1], made[1:-1], True)]))
    assert different(expected, steps(PLAIN, arrays, [(BEGIN, END, made[-1], made[:-1], False)]))


def test_chunks_without_a_run_are_left_alone(tmp_path, steps):
    """Claim: of arrays on disk, only the chunk that a run touches is loaded, stepped and saved."""
    arrays, made = random(PLAIN, NUMEL, seeded(3)), hypers(2)
    disk = Disk(tmp_path, "threads")
    unit = Unit(PLAIN, arrays, disk=disk, in_file=ALL)
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, ALL))
    run = 3 * CHUNK_GRAIN, NUMEL, made[1], [made[0]], False
    pipeline.step(unit.update([run]))
    assert not different(steps(PLAIN, arrays, [run]), unit.arrays())
    assert pipeline.updater.elements == NUMEL - 3 * CHUNK_GRAIN


def test_a_gradient_is_read_where_a_run_has_one_alone(tmp_path, steps):
    """Claim: an update reads the gradient's tiles on disk only for runs that have a gradient. Other
    tiles may be unwritten or damaged. Twin: a run with a gradient finds the damage."""
    arrays, made = random(PLAIN, NUMEL, seeded(4)), hypers(2)
    damaged = 2 * CHUNK_GRAIN, 3 * CHUNK_GRAIN
    runs = [
        (0, 640, made[1], [made[0]], True),
        (damaged[0] + 64, damaged[1] - 64, made[1], made, False),
    ]
    expected = steps(PLAIN, arrays, runs)
    disk = Disk(tmp_path, "threads")
    unit = Unit(PLAIN, arrays, disk=disk, in_file=ALL)
    with open(disk.path, "r+b") as file:
        size = PLAIN.dtypes["grad"].itemsize
        file.seek(unit.extents["grad"].offset + damaged[0] * size)
        file.write(b"\xaa" * (damaged[1] - damaged[0]) * size)
    pipeline = Pipeline(disk, smallest_slot_nbytes(PLAIN, ALL))
    pipeline.step(unit.update(runs))
    found = unit.arrays(raw=True)
    assert not different(expected | {"grad": found["grad"]}, found)
    with pytest.raises(CorruptionError):
        pipeline.step(unit.update([(*damaged, made[1], [], True)]))


def test_elements_between_runs_stay_as_they_are(steps):
    """Claim: of a tile, only the elements of the runs change, in every format."""
    for form in every_form()[::4]:
        arrays, made = random(form, NUMEL, seeded(5)), hypers(3)
        runs = [(64, 128, made[2], made[:2], False), (640, 1280, made[2], made[:2], True)]
        found = steps(form, arrays, runs)
        for name, value in found.items():
            for begin, end in ((0, 64), (128, 640), (1280, NUMEL)):
                assert same_bits(value[begin:end], arrays[name][begin:end]), (form, name)
