"""States of gradients move along their table only."""

from __future__ import annotations

import itertools

import pytest

from infinity.core.grads.record import MOVES, GradRecord, GradState
from infinity.errors import InternalError


@pytest.mark.parametrize(
    "start, to", list(itertools.product(GradState, GradState)), ids=lambda state: state.name
)
def test_a_gradient_moves_along_its_table(start, to):
    """Method: every pair of states; what is not in the table raises, and changes nothing."""
    record = GradRecord(start)
    if to in MOVES[start]:
        record.move(to)
        assert record.state is to
    else:
        with pytest.raises(InternalError, match=start.name):
            record.move(to)
        assert record.state is start
