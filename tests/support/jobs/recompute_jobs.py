"""Jobs of ranks of which each chooses what its blocks keep (see `ranks`), and the same in one
process.

Words used here:

**runs**: forwards of blocks in a step, again in a backward or not; **loop**: what a job does around
its steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from inside import parts_of
from torch import nn

import infinity
from infinity.ext.blocks import recompute
from infinity.ext.blocks.activation_choice import ActivationChoice
from infinity.ext.blocks.unaided import Unaided

WIDTH, BLOCKS, STEPS, ROWS = 128, 3, 7, 160
RUNS = [0]
STEP = [0]


class Block(nn.Module):
    """Saves several times what it is given."""

    def __init__(self, model: Model, number: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.drop, self.number = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0), number
        self.count, self.longest = 0, 0
        vars(self)["model"] = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS[0] += 1
        inside = self.norm(self.model.effect(self, x))
        return x + self.drop(self.down(nn.functional.gelu(self.up(inside))))


def nothing(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x


def anothers_weight(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Brings a unit that its own forward does not hold."""
    return x @ block.model.head.weight.tanh()


def meets(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Communicates with other ranks, as models do that the engine does not know."""
    if not dist.is_initialized():
        return x
    scale = torch.ones(())
    dist.all_reduce(scale)
    return x * (scale / dist.get_world_size())


def counts_on_one_rank(block: Block, x: torch.Tensor) -> torch.Tensor:
    block.count += rank() == 1
    return x


def meets_late(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Communicates for the first time once blocks are chosen for, and not in the last step."""
    return meets(block, x) if STEP[0] in (4, 5) else x


def roots_weight(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Computes with a weight that the model's own forward holds, and that nothing saves."""
    return x + block.model.shift


def grows(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Keeps its longest input's length, as a cache of masks does."""
    block.longest = max(block.longest, len(x), ROWS)
    return x


def counts_long_ones(block: Block, x: torch.Tensor) -> torch.Tensor:
    block.count += len(x) > ROWS
    return x * (1 + block.count)


class Model(nn.Module):
    def __init__(self, effect: Callable) -> None:
        super().__init__()
        self.head, self.effect = nn.Linear(WIDTH, WIDTH), effect
        if effect is roots_weight:
            self.shift = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(self, number) for number in range(BLOCKS))
        for block in self.blocks:
            block.longest = ROWS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def batch(step: int, of: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * step + of))


class Loop:
    """One training, with its losses and what it was told."""

    def __init__(self, model: nn.Module, optimizer: Any, ranks: list[int]):
        self.model, self.optimizer, self.ranks = model, optimizer, ranks
        self.losses: list[float] = []
        self.runs: list[int] = []
        self.said: list[str] = []
        self.heard = 0

    def loss(self, step: int, of: int, rows: int = ROWS) -> torch.Tensor:
        loss = self.model(batch(step, of, rows)).square().mean()
        self.losses.append(loss.item())
        return loss / len(self.ranks)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hear(self, *_: Any) -> None:
        self.heard += 1

    def plain(self, step: int) -> None:
        for of in self.ranks:
            self.loss(step, of).backward()

    def lengths(self, step: int) -> None:
        """From the fifth step on the second rank has more."""
        for of in self.ranks:
            self.loss(step, of, ROWS * (1 + (of and step > 3))).backward()

    def accumulates(self, step: int) -> None:
        with infinity.accumulate(self.model):
            for part in range(2):
                for of in self.ranks:
                    self.loss(step + part, of).backward()

    def two_forwards(self, step: int) -> None:
        for of in self.ranks:
            (self.loss(step, of) + self.loss(step + 1, of)).backward()

    def in_pieces(self, step: int) -> None:
        """Calls its parts, not the model."""
        for of in self.ranks:
            x = batch(step, of)
            for block in self.model.blocks:
                x = block(x)
            loss = self.model.head(x).square().mean()
            self.losses.append(loss.item())
            (loss / len(self.ranks)).backward()

    def evaluates_alone(self, step: int) -> None:
        if rank() == 0:
            with torch.no_grad():
                self.model(batch(step, 0))
        self.plain(step)

    def evaluates(self, step: int) -> None:
        """Also with a graph, which is dropped."""
        self.model.eval()
        with torch.no_grad():
            self.model(batch(step, 0))
        self.model(batch(step, 0))
        self.model.train()
        self.plain(step)

    def in_the_backward(self, step: int) -> None:
        with self.optimizer.step_in_backward() if step > 1 else contextlib.nullcontext():
            self.plain(step)

    def hooks(self, step: int) -> None:
        """The second rank listens to a block from the fifth step on."""
        if step == 4 and rank() == 1:
            self.model.blocks[1].up.register_forward_hook(self.hear)
        self.plain(step)

    def modes(self, step: int) -> None:
        if step == 3:
            self.model.blocks[0].drop.eval()
        self.plain(step)

    def raises(self, step: int) -> None:
        """The second rank fails once, after blocks are chosen for, and comes again."""
        self._struck(step, self.fail)

    def hooks_in_a_pass(self, step: int) -> None:
        """The second rank starts to listen to a block before that runs."""
        block = self.model.blocks[1]

        def listen(*_: Any) -> None:
            block.up.register_forward_hook(self.hear)

        self._struck(step, listen)

    def fail(self, *_: Any) -> None:
        raise ZeroDivisionError("struck")

    def _struck(self, step: int, strike: Callable) -> None:
        """Has the second rank call ``strike`` once, behind a block of the fifth step."""

        def run() -> None:
            is_due = rank() == 1 and step == 4 and not self.said
            block = self.model.blocks[0]
            handle = block.register_forward_hook(strike) if is_due else None
            try:
                self.plain(step)
            finally:
                handle.remove() if handle is not None else None

        self._try(run, times=4)

    def _try(self, run: Callable[[], None], times: int = 1) -> None:
        """Runs it until it succeeds, at most so many times."""
        for _ in range(times):
            before = len(self.losses)
            try:
                return run()
            except (ZeroDivisionError, infinity.UsageError) as error:
                self.said.append(f"{type(error).__name__}: {error}")
                self.optimizer.zero_grad()
                del self.losses[before:]


@contextlib.contextmanager
def choosing(choice: str | list[str], *, careless: bool) -> Iterator[None]:
    """Has this rank choose ``choice``, or its own of them, where a block may be run again.
    ``careless``: it may be whatever it needs of other ranks, which is the fault."""
    wanted = ActivationChoice(choice if isinstance(choice, str) else choice[rank()])

    def chosen(blocks: list, **_: Any) -> list[ActivationChoice]:
        return [
            wanted if block.is_repeatable or not wanted.repeats else ActivationChoice.SEND
            for block in blocks
        ]

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(recompute, "choose", chosen))
        if careless:
            stack.enter_context(mock.patch.object(Unaided, "allows", lambda *_: True))
            stack.enter_context(mock.patch.object(Unaided, "used_others", lambda *_: False))
            stack.enter_context(mock.patch.object(Unaided, "watch", lambda *_: None))
        yield


def train(
    config: dict[str, Any],
    ranks: Iterable[int],
    *,
    effect: str = "nothing",
    loop: str = "plain",
    mesh: Any = None,
) -> dict[str, Any]:
    """Trains with the batches of ``ranks``, one after the other. Returns what came of it."""
    torch.manual_seed(1)
    model = Model(globals()[effect])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
    made = Loop(model, optimizer, list(ranks))
    for STEP[0] in range(STEPS):
        RUNS[0] = 0
        getattr(made, loop)(STEP[0])
        made.step()
        made.runs.append(RUNS[0])
    activations = parts_of(model).activations
    planner = None if activations is None else activations.planner
    found = {
        "losses": made.losses,
        "runs": made.runs,
        "said": made.said,
        "heard": made.heard,
        "choices": [block.choice.value for block in planner.blocks] if planner else [],
        "blocks": infinity.stats(model).blocks,
        "tiled": [size.at_once_nbytes for size in parts_of(model).planned.sizes],
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }
    infinity.unwrap_model(model, optimizer)
    return found


def over_all(
    config: dict[str, Any],
    choice: str | list[str] = "recomputed",
    careless: bool = False,
    replicas: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Trains on this rank."""
    mesh = None
    if replicas:
        names = ("dp_replicate", "dp_shard")
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    with choosing(choice, careless=careless):
        return train({"recompute": True} | config, [rank()], mesh=mesh, **more)


def refused(config: dict[str, Any], **more: Any) -> str:
    """What a rank is told."""
    try:
        over_all(config, **more)
    except infinity.InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
