"""What a job may be asked for in each of its states: every cell of the table, tried.

Words used here: a **call** is an operation as a user makes it; a **state** is entered by what a
user does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import parts_of
from models import differing
from operation_table import OPERATIONS, REFUSED, STATES, as_text
from torch import nn

import infinity
from infinity.core.run.operations import SPECIAL, Operation, OperationKind, State, StateKind
from infinity.ext.averages.weight_average import AverageOperation, AverageState
from infinity.ext.checkpoint.operations import CheckpointOperation
from infinity.ext.park.park import ParkOperation
from infinity.ext.shares.shares import ShareOperation
from infinity.ext.versions_2bw.stale_weights import StaleWeights, VersionState

WIDTH = 16


class Job:
    """A wrapped model, its optimizer and its average, which have made a step."""

    def __init__(self, folder: Path):
        folder.mkdir()
        torch.manual_seed(3)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        )
        model.extra = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.AdamW(
            [*model[0].parameters(), *model[1].parameters(), *model[2].parameters()], lr=1e-2
        )
        self.folder, self.plain_state = (
            folder,
            {name: value.clone() for name, value in model.state_dict().items()},
        )
        self.model, self.optimizer = infinity.wrap_model(
            model, optimizer, {"params": "host", "optimizer": "host"}
        )
        self.engine, self.average = parts_of(self.model).engine, infinity.ema(self.model, 0.9)
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update()
        self.weight, self.averaged = model[0][0].weight, self.average.state_dict()
        self.entry, self.saved = self.optimizer.state[self.weight], self.optimizer.state_dict()

    def loss(self) -> torch.Tensor:
        return self.model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)).square().sum()


def enter(context: Any) -> None:
    """Enters and leaves ``context``."""
    with context:
        pass


@torch.no_grad()
def write(param: torch.Tensor) -> None:
    param.copy_(torch.ones(WIDTH, WIDTH))


CALLS: dict[OperationKind, Callable[[Job], Any]] = {
    Operation.LONE_FORWARD: lambda job: job.loss(),
    Operation.ACCUMULATE: lambda job: enter(infinity.accumulate(job.model)),
    Operation.STEP: lambda job: job.optimizer.step(),
    Operation.STEP_IN_BACKWARD: lambda job: enter(job.optimizer.step_in_backward()),
    Operation.ZERO_GRAD: lambda job: job.optimizer.zero_grad(),
    Operation.USE_GRAD: lambda job: job.weight.grad,
    Operation.SET_GRAD: lambda job: setattr(job.weight, "grad", None),
    Operation.WRITE_VALUE: lambda job: write(job.weight),
    Operation.ADD_PARAM_GROUP: lambda job: job.optimizer.add_param_group(
        {"params": [job.model.extra]}
    ),
    Operation.USE_OPTIMIZER_STATE: lambda job: job.entry["exp_avg"].sum(),
    Operation.OPTIMIZER_STATE_DICT: lambda job: job.optimizer.state_dict(),
    Operation.LOAD_OPTIMIZER_STATE_DICT: lambda job: job.optimizer.load_state_dict(job.saved),
    Operation.STATE_DICT: lambda job: job.model.state_dict(),
    Operation.LOAD_STATE_DICT: lambda job: job.model.load_state_dict(job.plain_state),
    Operation.FULL_PARAMS: lambda job: enter(infinity.full_params(job.model)),
    Operation.WRITE_FULL_PARAMS: lambda job: enter(infinity.full_params(job.model, writeback=True)),
    CheckpointOperation.SAVE: lambda job: infinity.save_checkpoint(
        job.folder / "new", job.model, job.optimizer, overwrite=True
    ),
    CheckpointOperation.LOAD: lambda job: infinity.load_checkpoint(
        job.folder / "good", job.model, job.optimizer
    ),
    CheckpointOperation.SAVE_PRETRAINED: lambda job: infinity.save_pretrained(
        job.model, job.folder / "folder"
    ),
    AverageOperation.UPDATE: lambda job: job.average.update(),
    AverageOperation.APPLY: lambda job: enter(job.average.applied()),
    AverageOperation.STATE_DICT: lambda job: job.average.state_dict(),
    AverageOperation.LOAD: lambda job: job.average.load_state_dict(job.averaged),
    AverageOperation.REMOVE: lambda job: job.average.remove(),
    ShareOperation.DIVIDE: lambda job: infinity.Shares(batch=4, model=job.model),
    ParkOperation.PARK: lambda job: infinity.park(job.model, job.folder),
    Operation.UNWRAP: lambda job: infinity.unwrap_model(job.model, job.optimizer),
}
# Of these no call stands alone: they are begun inside of others, or need a pipeline of several
# ranks, which `ext/versions_2bw/test_without_flush.py` has. Here the door is asked.
ASKED = [operation for operation in OPERATIONS if operation not in CALLS]
CALLS |= {
    operation: lambda job, operation=operation: job.engine.uses.check(operation)
    for operation in ASKED
}

# Of an unwrapped model torch's own, which are not asked for here any more.
PLAIN = (
    Operation.LONE_FORWARD,
    Operation.STATE_DICT,
    Operation.LOAD_STATE_DICT,
    Operation.WRITE_VALUE,
)
# What is refused for what is given, and not for the state: gradients that wait for their step, an
# optimizer that was stepped, a model without a folder of its own.
OWN_REASONS = (
    "would be lost",
    "wait for it",
    "without a new gradient",
    "no average yet",
    "is not wrapped",
    "no config",
    "parameter groups",
)


@contextmanager
def hooked(job: Job, attempt: Callable[[], None], *, backward: bool) -> Iterator[None]:
    """Makes the attempt in a hook of the next forward, or of its backward."""
    left = [attempt]
    hook = lambda *_: left.pop()() if left else None
    handle = (
        job.model[1].register_full_backward_hook(hook)
        if backward
        else job.model[1].register_forward_hook(hook)
    )
    yield
    handle.remove()
    assert not left


def train_in(state: StateKind, job: Job, attempt: Callable[[], None]) -> None:
    """Makes a step, with the attempt while the job is in ``state``."""
    step_at_end = True
    with ExitStack() as stack:
        if state in (State.FORWARD, State.BACKWARD):
            stack.enter_context(hooked(job, attempt, backward=state is State.BACKWARD))
        elif state is State.ACCUMULATING:
            stack.enter_context(infinity.accumulate(job.model))
            job.loss().backward()
            attempt()
        elif state in (State.STEPPING, State.STEPPED):
            with job.optimizer.step_in_backward():
                job.loss().backward()
                if state is State.STEPPING:
                    attempt()
            if state is State.STEPPED:
                attempt()
            job.optimizer.step()
            step_at_end = False
        elif state is AverageState.AVERAGED:
            with job.average.applied():
                attempt()
        elif state in (VersionState.STALE, VersionState.BETWEEN):
            with parts_of(job).job.add(StaleWeights(parts_of(job).job)).running():
                attempt()
        if step_at_end:
            job.loss().backward()
    if step_at_end:
        job.optimizer.step()


def told(
    state: StateKind, operation: OperationKind, folder: Path
) -> tuple[str | None, dict[str, torch.Tensor] | None]:
    """What the call raises in ``state``, and the weights after the step, None where the call has
    unwrapped the model."""
    job, said = Job(folder), []
    if operation is CheckpointOperation.LOAD:
        infinity.save_checkpoint(folder / "good", job.model, job.optimizer)

    def attempt() -> None:
        try:
            CALLS[operation](job)
            said.append(None)
        except infinity.InfinityError as error:
            said.append(f"{type(error).__name__}: {error}")

    if state is State.UNWRAPPED:
        infinity.unwrap_model(job.model, job.optimizer)
        attempt()
        return said[0], None
    try:
        train_in(state, job, attempt)
        weights = job.model.state_dict()
    except (infinity.UsageError, AttributeError):
        assert said == [None], (
            said
        )  # what was allowed may have ended the job, or have made the step
        weights = None
    return said[0], weights


def is_of_table(said: str, state: StateKind) -> bool:
    """Whether ``said`` is the remedy of ``state``, for whatever operation."""
    texts = [state.activity.remedy, *(text for (_, of), text in SPECIAL.items() if of is state)]
    return any(said.endswith(text.split("{}")[-1]) for text in texts)


def cells(state: StateKind, *, refused: bool) -> list[OperationKind]:
    together = set(VersionState)
    held = together if state in together else {state}
    return [
        operation
        for operation in OPERATIONS
        if any(each in REFUSED[operation] for each in held) == refused
    ]


def test_the_page_has_the_table_that_follows():
    """Every operation has a row and every state a column. Twin: cells with a remedy of their own
    are refused."""
    page = (Path(__file__).parents[2] / "docs" / "seams.md").read_text()
    assert as_text() in page, "docs/seams.md has another table than operation_table.as_text()"
    assert all(state in REFUSED[operation] for operation, state in SPECIAL)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_what_the_table_refuses_is_refused_and_changes_nothing(state, tmp_path):
    """Method: each refused cell of the state; the error is typed, names what was asked and the way
    that works, and what goes on ends with the bits of a run in which nobody asked. Twin: the next
    test, of the empty cells."""
    twin = None
    if state is not State.UNWRAPPED:
        job = Job(tmp_path / "twin")
        train_in(state, job, lambda: None)
        twin = job.model.state_dict()
    wrong = {}
    for operation in cells(state, refused=True):
        if state is State.UNWRAPPED and operation in PLAIN:
            continue
        said, weights = told(state, operation, tmp_path / str(operation))
        if said is None or not (
            is_of_table(said, state) or (state is State.UNWRAPPED and "wrapped" in said)
        ):
            wrong[operation] = said
        elif twin is not None and differing(weights, twin):
            wrong[operation] = "other weights"
    assert not wrong


@pytest.mark.parametrize(
    "state",
    [state for state in STATES if state is not State.UNWRAPPED],
    ids=lambda state: state.name,
)
def test_what_the_table_allows_is_done(state, tmp_path):
    """Method: each empty cell of the state: the call is made, or refused for another reason than
    the state."""
    told_of = {
        operation: told(state, operation, tmp_path / str(operation))[0]
        for operation in cells(state, refused=False)
    }
    assert not {
        o: said
        for o, said in told_of.items()
        if said and not any(reason in said for reason in OWN_REASONS)
    }
