"""All operations and states, of the engine and of extensions, and the table that follows."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from infinity.core.run.operations import (
    OperationKind,
    StateKind,
    refuses,
)

for name in (
    "averages.weight_average",
    "checkpoint.operations",
    "local_steps.local_steps",
    "park.park",
    "pipeline.operations",
    "shares.shares",
    "versions_2bw.stale_weights",
):
    importlib.import_module(f"infinity.ext.{name}")


def members(kind: type[Any]) -> list[Any]:
    """The states or the operations of the engine, and of the extensions that were imported."""
    return [member for each in kind.__subclasses__() for member in each]


def of_package(members: Iterable[Any]) -> list[Any]:
    """Those that no test has added, in an order that does not depend on what was imported first."""
    found = [each for each in members if type(each).__module__.startswith("infinity.")]
    return sorted(found, key=lambda each: type(each).__module__)


STATES = sorted(
    of_package(members(StateKind)), key=lambda state: "ufbaspewo".index(state.activity.letter)
)
OPERATIONS = of_package(members(OperationKind))
REFUSED: dict[OperationKind, tuple[StateKind, ...]] = {
    operation: tuple(state for state in STATES if refuses(state, operation))
    for operation in OPERATIONS
}


def as_text() -> str:
    """The table of docs/seams.md: a row for each operation, a letter for each refusal."""
    rows = [
        " | ".join(
            [
                f"| {operation.call.name}",
                *(state.activity.letter if state in refused else "·" for state in STATES),
            ]
        )
        + " |"
        for operation, refused in REFUSED.items()
    ]
    head = " | ".join(state.name.lower() for state in STATES)
    return "\n".join([f"| operation | {head} |", "|---|" + "---|" * len(STATES), *rows])
