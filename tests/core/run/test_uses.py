"""Uses: the door of a job, with parts that are made up."""

from __future__ import annotations

import pytest

import infinity
from infinity import native
from infinity.core.run.operations import Call, Operation, OperationKind, State, refuses
from infinity.core.run.uses import Uses


class Door:
    """A door, and what it has called."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.scopes = native.Scopes(lambda pack, unpack: None, lambda: None)
        self.uses = Uses(
            self.scopes,
            check_process=lambda: self.called.append("process"),
            wait=lambda: None,
            prepare=lambda operation: self.called.append(
                "repair" if operation is Repair.LOAD else "prepare"
            ),
            settle=lambda: self.called.append("settle"),
        )


class Repair(OperationKind):
    """An operation of an extension, which loads all state."""

    LOAD = Call("loading all", frozenset(), loads_all=True)


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_an_operation_is_refused_in_the_states_of_its_row_alone(state):
    """Method: each operation in the state, and again when that is over. Twin: the operations whose
    cell is empty."""
    door, lasts = Door(), [True]
    door.uses.define({state: lambda: lasts[0]})
    for operation in Operation:
        lasts[0] = True
        if refuses(state, operation):
            with pytest.raises(
                infinity.UsageError, match="unwrap|forward|backward|step|average|accumulate|flush"
            ):
                door.uses.check(operation)
        else:
            door.uses.check(operation)
        lasts[0] = False
        door.uses.check(operation)


def test_what_is_not_asked_in_every_pass_puts_things_right_first():
    """Twins: a quick operation looks at the states as they are; a load takes nothing that users
    wrote."""
    door = Door()
    for operation in (*Operation, Repair.LOAD):
        door.called.clear()
        door.uses.check(operation)
        if operation.call.is_quick:
            assert door.called == []
        elif operation.call.loads_all:
            assert door.called == ["process", "repair"]
        else:
            assert door.called == ["process", "prepare", "settle"]


def test_a_use_inside_another_prepares_nothing():
    door = Door()
    with door.uses.begin():
        assert door.called == ["process", "prepare"]
        with door.uses.operation(Operation.STEP):
            assert door.called == ["process", "prepare", "process"]
    assert not door.scopes.interrupted


def test_an_error_that_leaves_the_outermost_use_interrupts_it():
    """Twin: one that an outer use catches does not."""
    door = Door()
    with door.uses.begin():
        with pytest.raises(ValueError, match="inner"), door.uses.begin():
            raise ValueError("inner")
    assert not door.scopes.interrupted
    with pytest.raises(ValueError, match="outer"), door.uses.begin():
        raise ValueError("outer")
    assert door.scopes.interrupted


def test_a_refusal_interrupts_nothing():
    """What goes on goes on: the operation was asked for before anything changed."""
    door = Door()
    door.uses.define({State.ACCUMULATING: lambda: True})
    with pytest.raises(infinity.UsageError, match=r"optimizer\.step\(\) is not available here"):
        door.uses.operation(Operation.STEP)
    assert not door.scopes.interrupted and door.scopes.running == 0


def test_a_halted_job_says_why_until_it_goes_on():
    door = Door()
    assert not door.uses.is_halted and door.uses.halted_error() is None
    assert "a step was cut short" in str(door.uses.halt("a step was cut short"))
    assert door.uses.is_halted and "Load a checkpoint" in str(door.uses.halted_error())
    assert (
        door.uses.halted_error() is not door.uses.halted_error()
    )  # each use raises an error of its own
    door.uses.go_on()
    assert not door.uses.is_halted


def test_the_message_has_the_name_that_the_caller_gives():
    door = Door()
    door.uses.define({State.ACCUMULATING: lambda: True})
    with pytest.raises(
        infinity.UsageError, match=r"^blocks\.0\.weight\.grad is not available here"
    ):
        door.uses.check(Operation.USE_GRAD, "blocks.0.weight.grad")


def test_what_begins_while_a_use_waits_refuses_it():
    """Method: the job is another thread's until this one may begin, and in a state that refuses
    then. Twin: asked before, it was allowed."""
    door, begun = Door(), []
    door.uses.define({State.STEPPED: lambda: bool(begun)})
    door.uses.check(Operation.ZERO_GRAD)
    door.uses._prepare = lambda operation: begun.append(operation)
    with (
        pytest.raises(infinity.UsageError, match="between step_in_backward and its step"),
        door.uses.operation(Operation.ZERO_GRAD),
    ):
        pass
    assert not door.scopes.interrupted and door.scopes.running == 0
