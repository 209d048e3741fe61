"""Operations: calls that users make of a job, and the states in which each is refused.

operation   one call that users make: of the model, of its optimizer or of this package
state       a running activity at the time of the call; several can run at once

A cell of the table is a dot if the operation is allowed. Otherwise it has the state's letter: the
call raises UsageError with the remedy for that state, before anything changed. The arguments of an
allowed call may still be refused. Two states are outside the table, since they concern all
operations. A forked process refuses everything, and a job whose state was lost everything but a
load.
"""

from __future__ import annotations

from enum import Enum

from ...errors import UsageError


class State(Enum):
    """A running activity. The value is its letter in the table."""

    __hash__ = object.__hash__  # in C: it is looked up in every use

    UNWRAPPED = "u"  # unwrap_model has returned plain objects
    FORWARD = "f"  # a forward of the model runs: the call comes from a hook or a module
    BACKWARD = "b"  # a backward runs: the call comes from a hook
    ACCUMULATING = "a"  # gradients of several micro-batches wait for the end of their pass
    STEPPING = "s"  # inside `with optimizer.step_in_backward()`
    STEPPED = "p"  # between that block and optimizer.step(): part of the units are stepped
    AVERAGED = "e"  # inside `with average.applied()`: the averages are the model's weights
    STALE = "w"  # a pipeline runs without flush
    BETWEEN = "o"  # the same, except for the updates that it makes itself


class Operation(Enum):
    """A call of a user. The value is its name in messages."""

    __hash__ = object.__hash__  # as of State

    FORWARD = "a forward"
    LONE_FORWARD = "a forward of its own"
    BACKWARD = "a backward"
    SCHEDULE_STEP = "a step of a schedule"
    PIPELINE_BATCH = "another batch"
    PIPELINE_RUN = "another run"
    ACCUMULATE = "infinity.accumulate"
    ACCUMULATION_PASS = "a pass of several micro-batches"
    STEP = "optimizer.step()"
    STEP_IN_BACKWARD = "step_in_backward()"
    ZERO_GRAD = "zero_grad()"
    USE_GRAD = "param.grad"
    SET_GRAD = "setting param.grad"
    ADD_PARAM_GROUP = "add_param_group()"
    USE_OPTIMIZER_STATE = "optimizer.state"
    SWITCH_OPTIMIZER = "optimizer.train() and eval()"
    OPTIMIZER_STATE_DICT = "optimizer.state_dict()"
    LOAD_OPTIMIZER_STATE_DICT = "optimizer.load_state_dict()"
    STATE_DICT = "state_dict()"
    LOAD_STATE_DICT = "load_state_dict()"
    WRITE_STATE_DICT = "writing to a tensor of a state dict"
    TOUCH = "using a parameter"
    WRITE_VALUE = "writing to a parameter"
    FULL_PARAMS = "full_params"
    WRITE_FULL_PARAMS = "full_params(writeback=True)"
    SAVE_CHECKPOINT = "save_checkpoint"
    LOAD_CHECKPOINT = "load_checkpoint"
    SAVE_PRETRAINED = "save_pretrained"
    SAVE_MERGED = "save_merged"
    UPDATE_AVERAGE = "updating the average"
    APPLY_AVERAGE = "average.applied()"
    EXCHANGE_AVERAGE = "exchanging weights and averages"
    AVERAGE_STATE_DICT = "the average's state dict"
    LOAD_AVERAGE = "loading the average"
    REMOVE_AVERAGE = "removing the average"
    SHARE_BATCH = "dividing a batch by infinity.Shares"
    LOCAL_STEPS = "LocalSteps"
    PARK = "park"
    UNWRAP = "unwrap_model"


# Three reasons fill the table. Weights are not read while units or stages are at different steps.
# Values are not set if a running activity would lose them, or use both old and new. Operations that
# free all homes, or load all of them, need an idle job.
TABLE = """
                               u f b a s p e w o
    FORWARD                    u . . . . . . . .
    LONE_FORWARD               u . . . . p . w .
    BACKWARD                   u . . . . . . . .
    SCHEDULE_STEP              u . . . . p . w .
    PIPELINE_BATCH             u . . . . p . w .
    PIPELINE_RUN               u . . a s p e w .
    ACCUMULATE                 u f b a . p . w .
    ACCUMULATION_PASS          u f b a . p . . .
    STEP                       u . b a . . e . o
    STEP_IN_BACKWARD           u f b a s p e w .
    ZERO_GRAD                  u . . a s p . . .
    USE_GRAD                   . . . a . . . . .
    SET_GRAD                   . . . a . p . . .
    ADD_PARAM_GROUP            u f b a s p e w .
    USE_OPTIMIZER_STATE        u . . . . . . w .
    SWITCH_OPTIMIZER           u f b a s p e w .
    OPTIMIZER_STATE_DICT       u . . . s p . w .
    LOAD_OPTIMIZER_STATE_DICT  u . . a s p e w .
    STATE_DICT                 u . . . s p . w .
    LOAD_STATE_DICT            u f . a s p e w .
    WRITE_STATE_DICT           u . . a . . . w .
    TOUCH                      u . . . s p . w .
    WRITE_VALUE                u . . . . p e w .
    FULL_PARAMS                u . . . s p . w .
    WRITE_FULL_PARAMS          u . . a s p e w .
    SAVE_CHECKPOINT            u . b a s p e w .
    LOAD_CHECKPOINT            u f b a s . e w .
    SAVE_PRETRAINED            u . . . s p . w .
    SAVE_MERGED                u . . . s p . w .
    UPDATE_AVERAGE             u . . . s p e w .
    APPLY_AVERAGE              u f b a s p e w .
    EXCHANGE_AVERAGE           u f b a s p . w .
    AVERAGE_STATE_DICT         u . . . s p e w .
    LOAD_AVERAGE               u . . . . . e w .
    REMOVE_AVERAGE             u . . . . . e w .
    SHARE_BATCH                u f b a s p . w .
    LOCAL_STEPS                u f b a s p e w .
    PARK                       u f b a s p . w .
    UNWRAP                     u f b a s p e w .
"""

# Checked in every pass, or inside a use, against the states as they are. All other operations first
# recover from an exception, and send home what users wrote to state dicts.
QUICK = {
    Operation.FORWARD,
    Operation.LONE_FORWARD,
    Operation.BACKWARD,
    Operation.ACCUMULATION_PASS,
    Operation.SCHEDULE_STEP,
    Operation.PIPELINE_BATCH,
    Operation.PIPELINE_RUN,
    Operation.STEP,
    Operation.STEP_IN_BACKWARD,
    Operation.ZERO_GRAD,
    Operation.USE_GRAD,
    Operation.SET_GRAD,
    Operation.ADD_PARAM_GROUP,
    Operation.WRITE_STATE_DICT,
    Operation.TOUCH,
    Operation.WRITE_VALUE,
}

STALE_REMEDY = (
    "{} is not available while a pipeline runs without flush: its stages are not all after the same"
    " update. Call it when run() has returned, which flushes: between two calls there is one"
    " version of the weights."
)
REMEDIES = {
    State.UNWRAPPED: (
        "{} needs weights that went with the engine: the model was unwrapped, or is gone. Use the"
        " model and the optimizer that unwrap_model returned, and run a backward before"
        " unwrap_model."
    ),
    State.FORWARD: (
        "{} inside a forward of the model, from a hook or a module: call it when the forward is"
        " over."
    ),
    State.BACKWARD: (
        "{} inside a backward of the model, from a hook: call it when the backward is over."
    ),
    State.ACCUMULATING: (
        "{} is not available here: gradients of several micro-batches are incomplete until the"
        " `with infinity.accumulate(...)` block, or the step of the pipeline's schedule, is over."
        " Read, clip, step and zero gradients after it."
    ),
    State.STEPPING: (
        "{} inside `with optimizer.step_in_backward()`: part of the units are stepped there. Call"
        " it before that block, or after optimizer.step()."
    ),
    State.STEPPED: (
        "{} between step_in_backward and its step(): part of the units are stepped. Call"
        " optimizer.step() first."
    ),
    State.AVERAGED: (
        "{} is not available inside `with average.applied()`: the model has its average for"
        " weights. Call it after that block."
    ),
    State.STALE: STALE_REMEDY,
    State.BETWEEN: STALE_REMEDY,
}
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


def _read(table: str) -> dict[Operation, tuple[State, ...]]:
    header, *rows = table.strip().splitlines()
    states = [State(letter) for letter in header.split()]
    found: dict[Operation, tuple[State, ...]] = {}
    for name, *cells in map(str.split, rows):
        found[Operation[name]] = tuple(
            state for state, cell in zip(states, cells, strict=True) if cell == state.value
        )
    return found


REFUSED = _read(TABLE)


def refusal(operation: Operation, state: State, what: str | None = None) -> UsageError:
    """Makes the error for ``operation`` in ``state``. ``what``: its name in the message."""
    return UsageError(
        SPECIAL.get((operation, state), REMEDIES[state]).format(what or operation.value)
    )
