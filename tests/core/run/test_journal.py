"""Journal: begun changes are completed, in order, however often they are interrupted."""

from __future__ import annotations

import pytest

from infinity.core.run.journal import Journal


class Change:
    """Notes its name each time it is made, after it has raised ``interrupts`` times."""

    def __init__(self, name: str, made: list[str], interrupts: int = 0):
        self.name, self.made, self.interrupts = name, made, interrupts

    def __call__(self) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.made.append(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Change)  # equal, but not the same

    __hash__ = None


def test_a_change_that_is_carried_out_is_made_once_and_leaves_nothing():
    journal, made = Journal(), []
    assert journal.is_clear
    journal.carry_out(Change("a", made))
    assert made == ["a"] and journal.is_clear
    journal.finish()
    assert made == ["a"]


def test_a_change_that_was_interrupted_is_made_when_the_journal_finishes():
    journal, made = Journal(), []
    with pytest.raises(KeyboardInterrupt):
        journal.carry_out(Change("a", made, interrupts=1))
    assert made == [] and not journal.is_clear
    journal.finish()
    assert made == ["a"] and journal.is_clear


def test_a_change_is_recorded_while_it_is_made():
    """Twin: it is not before the ranks agree, and not afterwards."""
    journal, clear = Journal(), []

    def meet(verified):
        clear.append(journal.is_clear)
        verified()
        clear.append(journal.is_clear)

    journal.carry_out(lambda: clear.append(journal.is_clear), meet)
    assert clear == [True, False, False] and journal.is_clear


def test_an_interrupt_after_the_ranks_agree_leaves_the_change_and_one_before_does_not():
    for agrees in (True, False):
        journal, made = Journal(), []

        def meet(verified, agrees=agrees):
            if agrees:
                verified()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            journal.carry_out(Change("a", made), meet)
        assert made == [] and journal.is_clear == (not agrees)
        journal.finish()
        assert made == (["a"] if agrees else [])


def test_a_change_that_begins_twice_is_made_once_and_another_one_is_made_too():
    """Twin: an equal change is another one."""
    journal, made = Journal(), []
    first, second = Change("a", made), Change("b", made)
    assert first == second
    for change in (first, second, first):
        journal.begin(change)
    assert made == []
    journal.finish()
    assert made == ["a", "b"]


def test_changes_are_finished_in_order_and_one_that_raises_holds_up_the_later_ones():
    journal, made = Journal(), []
    for change in (Change("a", made), Change("b", made, interrupts=2), Change("c", made)):
        journal.begin(change)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            journal.finish()
        assert made == ["a"] and not journal.is_clear
    journal.finish()
    assert made == ["a", "b", "c"] and journal.is_clear


def test_the_end_of_one_change_leaves_the_others():
    journal, made = Journal(), []
    first, second = (lambda: made.append("a")), (lambda: made.append("b"))
    journal.begin(first)
    journal.begin(second)
    journal.end(second)
    assert made == ["b"] and not journal.is_clear
    journal.finish()
    assert made == ["b", "a"]


def test_forgotten_changes_are_never_made_and_later_ones_are():
    journal, made = Journal(), []
    journal.begin(Change("a", made))
    journal.forget()
    assert journal.is_clear
    journal.begin(Change("b", made))
    journal.finish()
    assert made == ["b"]


def test_of_two_equal_changes_the_one_that_ended_is_removed():
    class Change:
        def __init__(self) -> None:
            self.made = 0

        def __call__(self) -> None:
            self.made += 1

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    journal, first, second = Journal(), Change(), Change()
    journal.begin(first)
    journal.begin(second)
    journal.end(second)
    journal.finish()
    assert (first.made, second.made) == (1, 1)
