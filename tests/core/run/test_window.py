"""Window: how many bytes gathered weights may take, and what is refused to be taken off them."""

from __future__ import annotations

import pytest

from infinity.core.run.window import Window
from infinity.errors import CapacityError


def test_a_narrow_window_is_of_the_plan_less_what_is_taken():
    """Twin: narrowed again, it is of the plan once more and not of what was left."""
    window = Window(100)
    window.narrow(30, largest_nbytes=50)
    assert (window.nbytes, window.planned_nbytes) == (70, 100)
    window.narrow(10, largest_nbytes=50)
    assert (window.nbytes, window.planned_nbytes) == (90, 100)


def test_widening_adds_to_the_plan_and_to_what_is_left():
    window = Window(100)
    window.narrow(30, largest_nbytes=50)
    window.widen(8)
    assert (window.nbytes, window.planned_nbytes) == (78, 108)
    window.narrow(0, largest_nbytes=50)
    assert window.nbytes == 108


@pytest.mark.parametrize(("taken", "fits"), [(59, True), (60, True), (61, False)])
def test_the_largest_unit_has_to_fit_what_is_left(taken, fits):
    """Claim: a refusal changes nothing, and says what does not fit."""
    window = Window(100)
    if fits:
        window.narrow(taken, largest_nbytes=40)
        assert window.nbytes == 100 - taken
        return
    with pytest.raises(CapacityError, match="leave 61 B .* takes 40 B"):
        window.narrow(taken, largest_nbytes=40)
    assert (window.nbytes, window.planned_nbytes) == (100, 100)


def test_nothing_is_left_of_an_empty_plan_and_nothing_is_refused():
    """Claim: a plan without gathered weights has none to make room for. Twin: a window as large as
    the plan's largest unit gives nothing away, however large that unit is said to be."""
    window = Window(0)
    window.narrow(16, largest_nbytes=40)
    assert (window.nbytes, window.planned_nbytes) == (0, 0)
    whole = Window(100)
    with pytest.raises(CapacityError):
        whole.narrow(1, largest_nbytes=400)
    whole.narrow(0, largest_nbytes=400)
    assert whole.nbytes == 100
