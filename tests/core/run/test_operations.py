"""The table of operations: how it is read, what it says, and the errors that its cells raise.

`core/run/test_table_cells.py` tries every cell.
"""

from __future__ import annotations

import pytest

from infinity.core.run import operations
from infinity.core.run.operations import QUICK, REFUSED, REMEDIES, SPECIAL, TABLE, Operation, State
from infinity.errors import UsageError

ALL = set(State)
SMALL = """
             f b s
    FORWARD  f . s
    STEP     . . .
    PARK     f b s
"""


def refused(state: State) -> set[Operation]:
    return {operation for operation in Operation if state in REFUSED[operation]}


# --- how it is read ---


def test_a_row_lists_the_states_of_its_letters_in_the_order_of_the_header():
    """Twin: a row of dots lists none."""
    assert operations._read(SMALL) == {
        Operation.FORWARD: (State.FORWARD, State.STEPPING),
        Operation.STEP: (),
        Operation.PARK: (State.FORWARD, State.BACKWARD, State.STEPPING),
    }


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("f b s\n    FORWARD", "f b x\n    FORWARD", ValueError),
        ("FORWARD  f . s", "FORWARD  f .", ValueError),
        ("FORWARD  f . s", "FORWARD  f . s .", ValueError),
        ("STEP ", "STOP ", KeyError),
    ],
)
def test_a_table_that_does_not_fit_is_not_read(old, new, error):
    """A state or an operation that there is not, and a row with too few cells or too many."""
    assert old in SMALL
    with pytest.raises(error):
        operations._read(SMALL.replace(old, new))


def test_every_cell_is_a_dot_or_the_letter_of_its_column():
    """Of the table itself, in which every operation has one row and every state a column. Twin: a
    letter in another column counts for nothing."""
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    assert header == [state.value for state in State]
    assert [name for name, *_ in rows] == [operation.name for operation in Operation]
    assert not [row for row in rows if any(c not in (".", h) for c, h in zip(row[1:], header))]
    assert operations._read(SMALL.replace("f . s", "b f s"))[Operation.FORWARD] == (State.STEPPING,)


# --- what it says ---

IN_STEPS = {State.STEPPING, State.STEPPED, State.STALE}  # units or stages are at different steps
RUNNING = {State.FORWARD, State.BACKWARD, State.ACCUMULATING, State.STEPPING}
READS = {
    Operation.STATE_DICT,
    Operation.OPTIMIZER_STATE_DICT,
    Operation.FULL_PARAMS,
    Operation.SAVE_PRETRAINED,
    Operation.SAVE_MERGED,
    Operation.AVERAGE_STATE_DICT,
    Operation.UPDATE_AVERAGE,
    Operation.SAVE_CHECKPOINT,
    Operation.WRITE_FULL_PARAMS,
}
SETS = {
    Operation.LOAD_STATE_DICT,
    Operation.LOAD_OPTIMIZER_STATE_DICT,
    Operation.WRITE_FULL_PARAMS,
    Operation.LOAD_CHECKPOINT,
}
NEEDS_REST = {
    Operation.UNWRAP,
    Operation.LOAD_CHECKPOINT,
    Operation.PARK,
    Operation.APPLY_AVERAGE,
    Operation.EXCHANGE_AVERAGE,
    Operation.STEP_IN_BACKWARD,
    Operation.ADD_PARAM_GROUP,
    Operation.SWITCH_OPTIMIZER,
}


def test_weights_are_not_read_while_units_are_at_different_steps():
    """Twin: in a forward, a backward or a pass of micro-batches they are."""
    for state in IN_STEPS:
        assert READS <= refused(state), state
    reads_only = READS - SETS - {Operation.SAVE_CHECKPOINT}
    for state in (State.FORWARD, State.BACKWARD, State.ACCUMULATING):
        assert not reads_only & refused(state), state


def test_values_are_not_set_where_they_would_be_lost():
    """Nor gradients read that are not complete. Twin: in a backward values may be set."""
    for state in (State.ACCUMULATING, State.STEPPING, State.AVERAGED, State.STALE):
        assert SETS <= refused(state), state
    of_grads = {Operation.USE_GRAD, Operation.SET_GRAD, Operation.ZERO_GRAD, Operation.STEP}
    assert of_grads <= refused(State.ACCUMULATING)
    assert refused(State.BACKWARD) & SETS == {Operation.LOAD_CHECKPOINT}


def test_what_frees_or_loads_all_homes_needs_an_idle_job():
    for state in (*RUNNING, State.STALE):
        assert NEEDS_REST <= refused(state), state


def test_training_goes_on_in_every_state_of_a_model_that_is_wrapped():
    """Twin: once it is unwrapped only gradients are there."""
    for operation in (Operation.FORWARD, Operation.BACKWARD):
        assert REFUSED[operation] == (State.UNWRAPPED,)
    assert ALL - {*REFUSED[Operation.STEP]} == {
        State.FORWARD,
        State.STEPPING,
        State.STEPPED,
        State.STALE,
    }
    of_grads = {Operation.USE_GRAD, Operation.SET_GRAD}
    assert refused(State.UNWRAPPED) == {*Operation} - of_grads
    assert refused(State.BETWEEN) == {Operation.STEP}


def test_only_what_recovers_at_its_own_beginning_is_checked_without_a_use():
    """The parts of a step are quick. Twin: what reads or loads all state recovers first, except
    that it is asked inside of another use."""
    assert {Operation.FORWARD, Operation.BACKWARD, Operation.STEP, Operation.ZERO_GRAD} <= QUICK
    assert {Operation.USE_GRAD, Operation.SET_GRAD, Operation.WRITE_STATE_DICT} <= QUICK
    assert not QUICK & (READS | SETS)
    assert QUICK & NEEDS_REST == {Operation.STEP_IN_BACKWARD, Operation.ADD_PARAM_GROUP}


# --- the errors ---


def test_a_refusal_names_the_call_and_the_way_out():
    """By the name of the operation, or another that is given."""
    told = operations.refusal(Operation.PARK, State.FORWARD)
    assert isinstance(told, UsageError)
    assert str(told) == (
        "park inside a forward of the model, from a hook or a module: call it when the forward is"
        " over."
    )
    told = operations.refusal(Operation.PARK, State.STEPPED, "my call")
    assert str(told).startswith("my call between step_in_backward and its step()")


def test_every_refused_cell_has_its_own_remedy():
    """Two cells have a better one than the state's, and are refused. Twin: the same operation in
    another state, and another one in that state, have the state's."""
    for operation, states in REFUSED.items():
        for state in states:
            said = str(operations.refusal(operation, state))
            if (operation, state) not in SPECIAL:
                assert said == REMEDIES[state].format(operation.value)
    assert all(state in REFUSED[operation] for operation, state in SPECIAL)
    assert "loss.backward()" in str(operations.refusal(Operation.STEP, State.BACKWARD))
    assert "Leave the inner block out" in str(
        operations.refusal(Operation.ACCUMULATE, State.ACCUMULATING)
    )
    assert set(REMEDIES) == ALL and all("{}" in remedy for remedy in REMEDIES.values())
    assert len({*REMEDIES.values()}) == len(ALL) - 1  # the two states of a pipeline have one
