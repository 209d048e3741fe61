"""Operations: calls that users make of a job, the rights that they need, and the states that take
these.

operation   one call that users make: of the model, of its optimizer or of this package
state       a running activity at the time of the call; several can run at once
right       what an operation needs, and a state may take: weights at home, no running pass, ...

An operation is refused in a state that takes a right that it needs: the call raises UsageError with
the state's remedy, before anything changed. The arguments of an allowed call may still be refused.
Extensions add operations and states: members of an enum of their own, derived from the ones here.
docs/seams.md has the table that follows from all of them.

Two states are none of these, since they concern all operations. A forked process refuses
everything, and a job whose state was lost everything but a load.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ...errors import UsageError


class Right(Enum):
    """What an operation needs."""

    HOMES = "weights at home"
    NO_FORWARD = "no forward runs"
    NO_BACKWARD = "no backward runs"
    WHOLE_GRADS = "the gradients of all micro-batches have landed"
    NO_STREAM = "no unit is stepped in a backward"
    WHOLE_STEP = "all units are at one step"
    OWN_WEIGHTS = "the weights are the model's own"
    ONE_VERSION = "there is one version of the weights"
    LOOP_STEPS = "the loop makes the steps"


NO_PASS = frozenset({Right.HOMES, Right.NO_FORWARD, Right.NO_BACKWARD, Right.WHOLE_GRADS})
NO_STEP_RUNS = frozenset({Right.HOMES, Right.NO_STREAM, Right.WHOLE_STEP})
ONE_VERSION = frozenset({Right.HOMES, Right.ONE_VERSION})
OWN_WEIGHTS = frozenset({Right.HOMES, Right.OWN_WEIGHTS})
READ = NO_STEP_RUNS | ONE_VERSION  # units are at one step, stages at one version
SET = READ | OWN_WEIGHTS | {Right.WHOLE_GRADS}  # and nothing that runs would lose what is set
IDLE = NO_PASS | SET  # nothing runs: all homes are freed, or loaded


@dataclass(frozen=True)
class Activity:
    """What a state takes. ``remedy`` has a place for the operation's name."""

    letter: str
    takes: frozenset[Right]
    remedy: str


@dataclass(frozen=True)
class Call:
    """What an operation needs. ``is_quick``: it is checked in every pass, or inside a use, against
    the states as they are; all others first recover from an exception, and send home what users
    wrote to state dicts. ``loads_all``: it may repair a job whose state was lost."""

    name: str  # in messages
    needs: frozenset[Right]
    is_quick: bool = False
    loads_all: bool = False


class StateKind(Enum):
    """States of the engine or of one extension."""

    __hash__ = object.__hash__  # in C: it is looked up in every use

    def __init__(self, activity: Activity):
        self.activity = activity  # `value` is slower, and asked for in every pass


class OperationKind(Enum):
    """Operations of the engine or of one extension."""

    __hash__ = object.__hash__  # as of StateKind

    def __init__(self, call: Call):
        self.call = call  # as of StateKind


class State(StateKind):
    """The engine's own states."""

    UNWRAPPED = Activity(  # unwrap_model has returned plain objects
        "u",
        frozenset({Right.HOMES}),
        "{} needs weights that went with the engine: the model was unwrapped, or is gone. Use the"
        " model and the optimizer that unwrap_model returned, and run a backward before"
        " unwrap_model.",
    )
    FORWARD = Activity(  # the call comes from a hook or a module
        "f",
        frozenset({Right.NO_FORWARD}),
        "{} inside a forward of the model, from a hook or a module: call it when the forward is"
        " over.",
    )
    BACKWARD = Activity(  # the call comes from a hook
        "b",
        frozenset({Right.NO_BACKWARD}),
        "{} inside a backward of the model, from a hook: call it when the backward is over.",
    )
    ACCUMULATING = Activity(  # gradients of several micro-batches wait for the end of their pass
        "a",
        frozenset({Right.WHOLE_GRADS}),
        "{} is not available here: gradients of several micro-batches are incomplete until the"
        " `with infinity.accumulate(...)` block, or the step of the pipeline's schedule, is over."
        " Read, clip, step and zero gradients after it.",
    )
    STEPPING = Activity(  # inside `with optimizer.step_in_backward()`
        "s",
        frozenset({Right.NO_STREAM}),
        "{} inside `with optimizer.step_in_backward()`: part of the units are stepped there. Call"
        " it before that block, or after optimizer.step().",
    )
    STEPPED = Activity(  # between that block and optimizer.step()
        "p",
        frozenset({Right.WHOLE_STEP}),
        "{} between step_in_backward and its step(): part of the units are stepped. Call"
        " optimizer.step() first.",
    )


class Operation(OperationKind):
    """The engine's own operations."""

    FORWARD = Call("a forward", frozenset({Right.HOMES}), True)
    LONE_FORWARD = Call("a forward of its own", ONE_VERSION | {Right.WHOLE_STEP}, True)
    BACKWARD = Call("a backward", frozenset({Right.HOMES}), True)
    ACCUMULATE = Call("infinity.accumulate", NO_PASS | ONE_VERSION | {Right.WHOLE_STEP})
    ACCUMULATION_PASS = Call("a pass of several micro-batches", NO_PASS | {Right.WHOLE_STEP}, True)
    STEP = Call(
        "optimizer.step()",
        OWN_WEIGHTS | {Right.NO_BACKWARD, Right.WHOLE_GRADS, Right.LOOP_STEPS},
        True,
    )
    STEP_IN_BACKWARD = Call("step_in_backward()", IDLE, True)
    ZERO_GRAD = Call("zero_grad()", NO_STEP_RUNS | {Right.WHOLE_GRADS, Right.WHOLE_STEP}, True)
    USE_GRAD = Call("param.grad", frozenset({Right.WHOLE_GRADS}), True)
    SET_GRAD = Call("setting param.grad", frozenset({Right.WHOLE_GRADS, Right.WHOLE_STEP}), True)
    ADD_PARAM_GROUP = Call("add_param_group()", IDLE, True)
    USE_OPTIMIZER_STATE = Call("optimizer.state", ONE_VERSION)
    SWITCH_OPTIMIZER = Call("optimizer.train() and eval()", IDLE)
    OPTIMIZER_STATE_DICT = Call("optimizer.state_dict()", READ)
    LOAD_OPTIMIZER_STATE_DICT = Call("optimizer.load_state_dict()", SET)
    STATE_DICT = Call("state_dict()", READ)
    LOAD_STATE_DICT = Call("load_state_dict()", SET | {Right.NO_FORWARD})
    WRITE_STATE_DICT = Call(
        "writing to a tensor of a state dict", ONE_VERSION | {Right.WHOLE_GRADS}, True
    )
    TOUCH = Call("using a parameter", READ, True)
    WRITE_VALUE = Call(
        "writing to a parameter", ONE_VERSION | OWN_WEIGHTS | {Right.WHOLE_STEP}, True
    )
    FULL_PARAMS = Call("full_params", READ)
    WRITE_FULL_PARAMS = Call("full_params(writeback=True)", SET)
    UNWRAP = Call("unwrap_model", IDLE)


# Better remedies for single cells than the state's.
SPECIAL = {
    (
        Operation.STEP,
        State.BACKWARD,
    ): (
        "optimizer.step() inside a backward, from a hook: to step units while it runs, use "
        "`with optimizer.step_in_backward(): loss.backward()`, and call step() after that."
    ),
    (
        Operation.ACCUMULATE,
        State.ACCUMULATING,
    ): (
        "infinity.accumulate inside another one, or inside a step of a pipeline's schedule: its"
        " micro-batches are added up by the outer one already. Leave the inner block out."
    ),
}


def refuses(state: StateKind, operation: OperationKind) -> bool:
    """Tells whether ``operation`` is refused in ``state``."""
    return not operation.call.needs.isdisjoint(state.activity.takes)


def refusal(operation: OperationKind, state: StateKind, name: str | None = None) -> UsageError:
    """Makes the error for ``operation`` in ``state``. ``name``: its name in the message."""
    remedy = SPECIAL.get((operation, state), state.activity.remedy)
    return UsageError(remedy.format(name or operation.call.name))
