"""ExpertRows: what each expert has missed, and the runs that bring it up to date.

Twins: a run that forgets a missed step is another one; a row that was used is not run again.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from infinity import native
from infinity.core.units.rows import Replay
from infinity.errors import InternalError
from infinity.ext.rows import expert_rows
from infinity.ext.rows.expert_rows import MOST_BEHIND, ExpertRows


class Run(NamedTuple):
    begin: int
    end: int
    hyper: object
    missed: list
    has_gradient: bool = True


class Ticket:
    def __init__(self, *, done: bool = True):
        self.done, self.waits = done, 0

    def wait(self) -> None:
        self.done, self.waits = True, self.waits + 1


def replay_by(run) -> Replay:
    """Calls ``run`` with the runs of an update, once."""
    ran: list[list[Run]] = []

    def submit(update: list[Run]) -> Ticket:
        if all(update is not other for other in ran):
            ran.append(update)
            run(update)
        return Ticket()

    return Replay(lambda runs: runs, submit)


@pytest.fixture(autouse=True)
def readable_runs(monkeypatch):
    monkeypatch.setattr(native, "Run", Run)


def rows_of(*places: tuple[int, int]) -> ExpertRows:
    """Four rows of each parameter, of ten elements."""
    return ExpertRows(4, places or ((0, 10),))


def step(rows: ExpertRows, number: int, *chosen: int, index: int = 0) -> list[Run]:
    made = list(rows.runs(index, chosen, f"step {number}", number))
    rows.note_step(index, chosen, f"zeros {number}", number)
    return made


def test_neighbours_that_missed_the_same_are_one_run():
    rows = rows_of()
    assert step(rows, 1, 0, 1, 3) == [
        Run(0, 20, "step 1", []),
        Run(30, 40, "step 1", []),
    ]
    assert step(rows, 2, 1, 2, 3) == [
        Run(10, 20, "step 2", []),
        Run(20, 30, "step 2", ["zeros 1"]),
        Run(30, 40, "step 2", []),
    ]
    assert step(rows, 3, 0) == [Run(0, 10, "step 3", ["zeros 2"])]


def test_a_step_is_noted_once():
    """Claim: carrying a step out again, after an interrupt, changes nothing."""
    once, twice = rows_of(), rows_of()
    for rows, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            rows.note_step(0, [0], "zeros 1", 1)
    assert step(once, 2, 0, 1) == step(twice, 2, 0, 1)


def test_rows_are_brought_up_to_date_when_they_are_wanted():
    """Claim: only what is wanted is run, without a gradient, for all parameters; and once."""
    rows, asked = rows_of((0, 10), (64, 20)), []
    for index in (0, 1):
        step(rows, 1, 3, index=index)
        step(rows, 2, 3, index=index)

    update = rows.replay_after(None, replay_by(asked.append))
    assert not update.done
    rows.catch_up([1, 3])
    missed = ["zeros 1", "zeros 2"]
    assert asked == [
        [Run(10, 20, "zeros 2", missed, False), Run(84, 104, "zeros 2", missed, False)]
    ]
    rows.catch_up([1])
    assert len(asked) == 1
    update.wait()
    assert [run.begin for run in asked[1]] == [0, 20, 64, 104]
    assert update.done and step(rows, 3, 0) == [Run(0, 10, "step 3", [])]


def test_the_running_update_is_waited_for_without_a_replay():
    rows, ticket = rows_of(), Ticket(done=False)
    step(rows, 1, 0, 1, 2, 3)
    update = rows.replay_after(ticket, replay_by(lambda runs: pytest.fail("nothing is behind")))
    assert not update.done
    rows.wait_running()
    assert ticket.waits == 1 and update.done


def test_a_row_is_not_left_behind_for_ever():
    """Claim: after many steps a row is updated though nobody uses it, and the log stays short."""
    rows, made = rows_of(), []
    for number in range(1, 3 * MOST_BEHIND):
        made += step(rows, number, 0)
    late = [run for run in made if not run.has_gradient]
    assert [len(run.missed) for run in late] == [MOST_BEHIND] * 2
    assert all((run.begin, run.end) == (10, 40) for run in late)
    assert len(rows._steps[0].log) <= MOST_BEHIND


def test_forgetting_leaves_nothing_to_replay():
    rows = rows_of()
    step(rows, 1, 0)
    with pytest.raises(InternalError, match="nothing steps them"):
        rows.catch_up(None)
    rows.forget()
    rows.catch_up(None)
    assert rows.are_current(None)


def play(seed: int) -> tuple[list[list], list[tuple]]:
    """What a random training does to each row, in order, and what torch would have done."""
    generator, rows = random.Random(seed), rows_of((0, 10), (64, 20))
    done: list[list] = [[] for _ in range(2 * rows.count)]
    steps: list[tuple] = []

    def run(made: list[Run]) -> None:
        assert [each.begin for each in made] == sorted(each.begin for each in made)
        for each in made:
            index, size = (1, 20) if each.begin >= 64 else (0, 10)
            first, last = ((at - 64 * index) // size for at in (each.begin, each.end))
            for row in range(first, last):
                done[index * rows.count + row] += [
                    *each.missed,
                    *([each.hyper] if each.has_gradient else []),
                ]

    replay = replay_by(run)
    update = rows.replay_after(None, replay)
    for number in range(1, 40):
        stepped = {index for index in (0, 1) if generator.random() < 0.8}
        planned = [
            (index, [row for row in range(rows.count) if generator.random() < 0.4])
            for index in sorted(stepped)
        ]
        run([each for i, got in planned for each in rows.runs(i, got, ("step", number), number)])
        for index, got in planned:
            steps.append((index, number, got))
            for _ in range(generator.choice([1, 2])):  # once more after an interrupt
                rows.note_step(index, got, ("zeros", number), number)
        rows.replay_after(Ticket(), replay)
        if generator.random() < 0.5:
            rows.catch_up([row for row in range(rows.count) if generator.random() < 0.5])
    update.wait()
    assert update.done
    return done, steps


@pytest.mark.parametrize("most", [1, 2, 5, MOST_BEHIND])
def test_every_row_gets_every_step_once_and_in_order(most, monkeypatch):
    """Claim: whatever is chosen and wanted when, each row is stepped as torch would, with zeros
    where it had no gradient. Method: random trainings, played twice."""
    monkeypatch.setattr(expert_rows, "MOST_BEHIND", most)
    for seed in range(20):
        done, steps = play(seed)
        for place, found in enumerate(done):
            index, row = divmod(place, 4)
            assert found == [
                ("step" if row in got else "zeros", number)
                for of, number, got in steps
                if of == index
            ]


def test_a_note_that_was_interrupted_is_made_again():
    """Claim: an interrupt in the middle leaves nothing half: carrying the step out again is as
    doing it once."""
    once, twice = rows_of(), rows_of()

    def interrupted():
        yield 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        twice.note_step(0, interrupted(), "zeros 1", 1)
    for rows in (once, twice):
        rows.note_step(0, [1, 2], "zeros 1", 1)
    assert step(once, 2, 0, 1, 2) == step(twice, 2, 0, 1, 2)
