"""Operations, the rights that they need, the states that take these, and the errors that follow.

`tests/ext/test_table_cells.py` tries every cell of the table, those of extensions too.
"""

from __future__ import annotations

import pytest
from operation_table import members

from infinity.core.run import operations
from infinity.core.run.operations import (
    IDLE,
    READ,
    SET,
    SPECIAL,
    Activity,
    Call,
    Operation,
    OperationKind,
    Right,
    State,
    StateKind,
    refuses,
)
from infinity.errors import UsageError

ALL = set(State)
QUICK = {operation for operation in Operation if operation.call.is_quick}
READS = {operation for operation in Operation if operation.call.needs >= READ}
SETS = {operation for operation in Operation if operation.call.needs >= SET}


class Resting(StateKind):
    """A state of an extension."""

    ASLEEP = Activity("z", frozenset({Right.LOOP_STEPS}), "{} while it sleeps: wake it")


class Waking(OperationKind):
    """An operation of an extension."""

    WAKE = Call("waking", frozenset({Right.NO_FORWARD}))


def refused(state: StateKind) -> set[OperationKind]:
    return {operation for operation in Operation if refuses(state, operation)}


# --- what follows from rights ---


def test_a_state_refuses_what_needs_a_right_that_it_takes():
    """Each right alone. Twin: a state that takes another one."""
    for right in Right:
        needs = {operation for operation in Operation if right in operation.call.needs}
        takes = [state for state in State if right in state.activity.takes]
        assert all(needs <= refused(state) for state in takes)
    assert refuses(Resting.ASLEEP, Operation.STEP)
    assert not refuses(Resting.ASLEEP, Operation.FORWARD)


def test_an_extension_adds_operations_and_states_of_its_own():
    """Twin: the engine's own states refuse them by the same rights."""
    assert Waking.WAKE in members(OperationKind) and Resting.ASLEEP in members(StateKind)
    assert [state for state in State if refuses(state, Waking.WAKE)] == [State.FORWARD]
    assert str(operations.refusal(Operation.STEP, Resting.ASLEEP)) == (
        "optimizer.step() while it sleeps: wake it"
    )


def test_weights_are_not_read_while_units_are_at_different_steps():
    """Twin: in a forward, a backward or a pass of micro-batches they are."""
    for state in (State.STEPPING, State.STEPPED):
        assert {Operation.STATE_DICT, Operation.FULL_PARAMS} <= READS <= refused(state), state
    reads_only = READS - SETS
    for state in (State.FORWARD, State.BACKWARD, State.ACCUMULATING):
        assert not reads_only & refused(state), state


def test_values_are_not_set_where_they_would_be_lost():
    """Nor gradients read that are not complete. Twin: in a backward values may be set."""
    for state in (State.ACCUMULATING, State.STEPPING):
        assert {Operation.LOAD_STATE_DICT, Operation.WRITE_FULL_PARAMS} <= SETS <= refused(state)
    of_grads = {Operation.USE_GRAD, Operation.SET_GRAD, Operation.ZERO_GRAD, Operation.STEP}
    assert of_grads <= refused(State.ACCUMULATING)
    needs_rest = {operation for operation in Operation if operation.call.needs >= IDLE}
    assert refused(State.BACKWARD) & SETS == needs_rest


def test_what_frees_or_loads_all_homes_needs_an_idle_job():
    rest = {Operation.UNWRAP, Operation.STEP_IN_BACKWARD, Operation.ADD_PARAM_GROUP}
    for state in ALL:
        assert rest <= refused(state), state


def test_training_goes_on_in_every_state_of_a_model_that_is_wrapped():
    """Twin: once it is unwrapped only gradients are there."""
    for operation in (Operation.FORWARD, Operation.BACKWARD):
        assert [state for state in State if refuses(state, operation)] == [State.UNWRAPPED]
    allowed = {state for state in State if not refuses(state, Operation.STEP)}
    assert allowed == {State.FORWARD, State.STEPPING, State.STEPPED}
    assert refused(State.UNWRAPPED) == {*Operation} - {Operation.USE_GRAD, Operation.SET_GRAD}


def test_only_what_recovers_at_its_own_beginning_is_checked_without_a_use():
    """The parts of a step are quick. Twin: what reads or loads all state recovers first, except
    that it is asked inside of another use."""
    assert {Operation.FORWARD, Operation.BACKWARD, Operation.STEP, Operation.ZERO_GRAD} <= QUICK
    assert {Operation.USE_GRAD, Operation.SET_GRAD, Operation.WRITE_STATE_DICT} <= QUICK
    inside = {Operation.TOUCH, Operation.STEP_IN_BACKWARD, Operation.ADD_PARAM_GROUP}
    assert QUICK & (READS | SETS) == inside


# --- the errors ---


def test_a_refusal_names_the_call_and_the_way_out():
    """By the name of the operation, or another that is given."""
    told = operations.refusal(Operation.UNWRAP, State.FORWARD)
    assert isinstance(told, UsageError)
    assert str(told) == (
        "unwrap_model inside a forward of the model, from a hook or a module: call it when the"
        " forward is over."
    )
    told = operations.refusal(Operation.UNWRAP, State.STEPPED, "my call")
    assert str(told).startswith("my call between step_in_backward and its step()")


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_every_refused_cell_has_its_own_remedy(state):
    """Two cells have a better one than the state's, and are refused. Twin: the same operation in
    another state, and another one in that state, have the state's."""
    for operation in refused(state):
        said = str(operations.refusal(operation, state))
        if (operation, state) not in SPECIAL:
            assert said == state.activity.remedy.format(operation.call.name)
    assert all(refuses(of, operation) for operation, of in SPECIAL)
    assert "loss.backward()" in str(operations.refusal(Operation.STEP, State.BACKWARD))
    assert "{}" in state.activity.remedy
