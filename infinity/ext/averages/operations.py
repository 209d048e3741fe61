"""Operations of averages, and the state in which they are the model's weights."""

from __future__ import annotations

from ...core.run.operations import (
    IDLE,
    ONE_VERSION,
    OWN_WEIGHTS,
    READ,
    Activity,
    Call,
    OperationKind,
    Right,
    StateKind,
)


class AverageState(StateKind):
    """Inside `with average.applied()`."""

    AVERAGED = Activity(
        "e",
        frozenset({Right.OWN_WEIGHTS}),
        "{} is not available inside `with average.applied()`: the model has its average for"
        " weights. Call it after that block.",
    )


class AverageOperation(OperationKind):
    """Calls of an average."""

    UPDATE = Call("updating the average", READ | OWN_WEIGHTS)
    APPLY = Call("average.applied()", IDLE)
    EXCHANGE = Call("exchanging weights and averages", IDLE - {Right.OWN_WEIGHTS})
    STATE_DICT = Call("the average's state dict", READ | OWN_WEIGHTS)
    LOAD = Call("loading the average", ONE_VERSION | OWN_WEIGHTS)
    REMOVE = Call("removing the average", ONE_VERSION | OWN_WEIGHTS)
