"""Residency: the moves of a unit's bytes that are legal, and the error for the others."""

from __future__ import annotations

import pytest

from infinity.core.units.residency import Moves, Residency
from infinity.errors import UsageError

STORED, FETCHING, STAGED, GATHERING, RESIDENT = Residency
LEGAL = {  # by hand: upwards one by one, past the slots from memory, and back home from anywhere
    (STORED, FETCHING),
    (STORED, GATHERING),
    (FETCHING, STAGED),
    (FETCHING, GATHERING),
    (STAGED, GATHERING),
    (GATHERING, RESIDENT),
    *((begin, STORED) for begin in (FETCHING, STAGED, GATHERING, RESIDENT)),
}


@pytest.mark.parametrize("begin", Residency, ids=lambda state: state.name)
def test_a_unit_makes_the_legal_moves_and_no_others(begin):
    for to in Residency:
        moves = Moves("unit a")
        if (begin, to) in LEGAL:
            moves.note(begin, to)
            noted = f"{begin.name}->{to.name}"
        else:
            refusal = f"unit a is {begin.name} and cannot go to {to.name};"
            with pytest.raises(UsageError, match=refusal):
                moves.note(begin, to)
            noted = "none"  # a refused move was not made
        assert str(moves.illegal(to, "be read")).endswith(f"its last moves: {noted}")


def test_an_error_tells_the_unit_its_state_the_action_and_the_moves_in_order():
    moves = Moves("unit layers.3")
    moves.note(STORED, GATHERING)
    moves.note_rebuild(GATHERING)
    moves.note(STORED, FETCHING)
    error = moves.illegal(FETCHING, "be stepped")
    assert isinstance(error, UsageError)
    assert str(error) == (
        "unit layers.3 is FETCHING and cannot be stepped; its last moves:"
        " STORED->GATHERING, GATHERING given up, STORED->FETCHING"
    )


@pytest.mark.parametrize("rounds", [2, 3])
def test_the_last_six_moves_are_told_and_older_ones_are_not(rounds):
    moves = Moves("unit a")
    moves.note_rebuild(STAGED)
    for _ in range(rounds):
        moves.note(STORED, GATHERING)
        moves.note(GATHERING, STORED)
    told = str(moves.illegal(STORED, "be read")).partition("its last moves: ")[2].split(", ")
    there_and_back = ["STORED->GATHERING", "GATHERING->STORED"]
    first = ["STAGED given up"] if rounds == 2 else []
    assert told == first + there_and_back * rounds
