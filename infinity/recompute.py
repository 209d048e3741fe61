"""Recomputation: of what a forward saves for its backward, which blocks keep it, which send it home, which compute it again.

keep       on the device, as far as its budget reaches
send       to the host, and back for the backward (:mod:`infinity.activations`)
recompute  only the block's input is kept, and the backward runs the block's forward again

With ``activations="auto"`` and a device budget the choice is made for each block from what two passes measure: the bytes
that it saves, the seconds that its forward takes, and what sending costs. A block is run again only where that is sure to
give the same: nothing but tensors and plain values go in, nobody's hooks are inside, it leaves nothing changed behind, and it
was seen to give the same bits twice.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .replaced import own_forward
from .tiers import Tier

if TYPE_CHECKING:
    from .engine import Engine
    from .unit import ParamUnit

logger = logging.getLogger(__name__)

SCALARS = (bool, int, float, str, torch.dtype, torch.device)
MEASURED_PASSES = 2  # the first one also waits for what no later one does


class Checkpointed:
    """A block's forward of which only the input is kept."""

    def __init__(self, engine: Engine, units: Sequence[ParamUnit], forward: Any):
        self._engine, self._units, self.forward = engine, units, forward

    def run(self, leaves: list, spec: Any) -> Any:
        """The forward, run again in the backward; where there will be none, just the forward."""
        if not torch.is_grad_enabled():
            return self.compute(spec, *leaves)
        return checkpoint(self.compute, spec, *leaves, use_reentrant=False)

    def compute(self, spec: Any, *leaves: Any) -> Any:
        """The forward of arguments that were flattened."""
        args, kwargs = tree_unflatten(list(leaves), spec)
        if torch._C._current_graph_task_id() != -1:  # recomputation: nobody else may have asked for the weights yet
            for unit in self._units:
                self._engine.passes.hold_for_backward(unit)
        with self._engine.saving_tensors():
            return self.forward(*args, **kwargs)


class Choice(Enum):
    """What is done with what a block saves."""

    KEEP = "kept"
    SEND = "sent"
    RECOMPUTE = "recomputed"


@dataclass(frozen=True)
class Measured:
    """One block: bytes that its forward saves, seconds that it takes, and whether it may be run again."""

    nbytes: int
    seconds: float
    is_repeatable: bool


def choose(blocks: Sequence[Measured], *, device_nbytes: int, host_nbytes: float, send_rate: float) -> list[Choice]:
    """The choices that cost least: on the device stays what would cost most, by its bytes, to do without. ``send_rate``: bytes
    per second there and back. Of equal blocks the last stay: the backward needs them first."""

    def cost(block: Measured) -> float:
        sending = block.nbytes / send_rate
        return min(sending, block.seconds) if block.is_repeatable else sending

    if sum(block.nbytes for block in blocks) <= device_nbytes:
        return [Choice.KEEP] * len(blocks)
    room = device_nbytes - max(block.nbytes for block in blocks)  # one block at a time is there while it is run again
    choices = [Choice.SEND] * len(blocks)
    for index in sorted(range(len(blocks)), key=lambda i: (cost(blocks[i]) / max(1, blocks[i].nbytes), i), reverse=True):
        block = blocks[index]
        if block.nbytes <= room:
            choices[index], room = Choice.KEEP, room - block.nbytes
        elif block.is_repeatable and (block.seconds < block.nbytes / send_rate or block.nbytes > host_nbytes):
            choices[index] = Choice.RECOMPUTE
        else:
            host_nbytes -= block.nbytes
    return choices


class ActivationPlanner:
    """Measures the blocks of a model, then chooses for each."""

    def __init__(self, engine: Engine, *, send_rate: float):
        self._of = weakref.ref(engine)  # the engine holds this object
        self._send_rate = send_rate
        self._blocks: list[weakref.ref[PlannedBlock]] = []  # their modules have them
        self._passes = 0
        self.is_decided = False

    @property
    def engine(self) -> Engine:
        return self._of()

    def add(self, block: nn.Module, units: Sequence[ParamUnit]) -> PlannedBlock:
        """What ``block`` is to run in place of its forward."""
        planned = PlannedBlock(self, block, Checkpointed(self.engine, units, own_forward(block)))
        self._blocks.append(weakref.ref(planned))
        return planned

    @property
    def blocks(self) -> list[PlannedBlock]:
        """In the model's order."""
        return [block for ref in self._blocks if (block := ref()) is not None]

    def begin(self) -> None:
        """A pass that trains starts."""
        measured = [block for block in self.blocks if block.calls == 1]
        if not self.is_decided and self._passes >= MEASURED_PASSES and measured:
            self._decide(measured)
        self._passes += bool(measured) or not self._passes
        for block in self.blocks:
            block.begin_pass()

    def _decide(self, blocks: list[PlannedBlock]) -> None:
        activations, ledger = self.engine.activations, self.engine.ledger
        host = ledger.accounts[Tier.HOST]
        left = float("inf") if host.budget_nbytes is None else host.budget_nbytes - host.planned_nbytes
        found = choose(
            [block.measured() for block in blocks],
            device_nbytes=max(0, activations.spare_nbytes - activations.outside_nbytes),
            host_nbytes=left,
            send_rate=self._send_rate,
        )
        for block, choice in zip(blocks, found):
            block.choice = choice
        self.is_decided = True
        logger.info("activations of %d blocks: %s", len(blocks), self.counts())

    def counts(self) -> dict[str, int]:
        """How many blocks are kept, sent and recomputed; nothing before that is chosen."""
        if not self.is_decided:
            return {}
        return {choice.value: sum(block.choice is choice for block in self.blocks) for choice in Choice}


class PlannedBlock:
    """A block's forward, as it was chosen to run."""

    def __init__(self, planner: ActivationPlanner, block: nn.Module, checkpointed: Checkpointed):
        self._planner, self._block, self._checkpointed = planner, weakref.ref(block), checkpointed
        self.choice = Choice.KEEP
        self.calls = 0  # in this pass
        self.nbytes = 0  # that it saved in this pass
        self._storages: set[int] = set()
        self._seconds = float("inf")
        self._is_repeatable = True
        self._was_repeated = False  # and gave the same bits

    def begin_pass(self) -> None:
        """Counts start anew."""
        self.calls = self.nbytes = 0
        self._storages.clear()

    def measured(self) -> Measured:
        """What the passes so far have shown."""
        return Measured(self.nbytes, self._seconds, self._is_repeatable)

    def saves(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage once."""
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.nbytes += storage.nbytes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        engine = self._planner.engine
        activations = engine.activations
        plain = torch.compiler.is_compiling() or not torch.is_grad_enabled() or engine.passes.is_recomputed
        if plain or activations.block is not None:
            return self._checkpointed.forward(*args, **kwargs)
        self.calls += 1
        activations.block = self
        try:
            if self.calls > 1:
                self._is_repeatable = False
            if self.choice is Choice.RECOMPUTE and self._is_repeatable and self._was_repeated:
                return self._checkpointed.run(leaves, spec)
            if self.choice is Choice.RECOMPUTE and self._is_repeatable:
                return self._run_twice(leaves, spec)
            return self._run(leaves, spec)
        finally:
            activations.block = None

    def _run(self, leaves: list, spec: Any) -> Any:
        if self._planner.is_decided:
            args, kwargs = tree_unflatten(leaves, spec)
            return self._checkpointed.forward(*args, **kwargs)
        traffic = self._planner.engine.traffic
        stalled = sum(edge.stall_seconds for edge in traffic.edges.values())
        before, began = self._state(), time.perf_counter()
        args, kwargs = tree_unflatten(leaves, spec)
        output = self._checkpointed.forward(*args, **kwargs)
        stalled = sum(edge.stall_seconds for edge in traffic.edges.values()) - stalled
        self._seconds = max(0.0, time.perf_counter() - began - stalled)
        known = all(leaf is None or isinstance(leaf, (torch.Tensor, *SCALARS)) for leaf in leaves)
        self._is_repeatable &= known and before == self._state() and not self._is_heard()
        return output

    def _run_twice(self, leaves: list, spec: Any) -> Any:
        """The forward, and once more to see whether it gives the same. This pass keeps what it saves as before."""
        places = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)} | {torch.device("cpu")}
        before = random_states(places)
        args, kwargs = tree_unflatten(leaves, spec)
        output = self._checkpointed.forward(*args, **kwargs)
        after, state = random_states(places), self._state()
        set_random_states(before)
        with torch.no_grad():
            args, kwargs = tree_unflatten(leaves, spec)
            again = self._checkpointed.forward(*args, **kwargs)
        same = all(torch.equal(now, then) for now, then in zip(random_states(places).values(), after.values()))
        set_random_states(after)
        self._was_repeated = self._is_repeatable = same and state == self._state() and _is_same(output, again)
        return output

    def _state(self) -> list[tuple]:
        """Everything small that a forward might leave changed: torch's counts of changes of buffers, and plain values."""
        found: list[tuple] = []
        for module in self._block().modules():
            found += [(id(buffer), buffer._version) for buffer in module._buffers.values() if buffer is not None]
            found += [(name, value) for name, value in vars(module).items() if isinstance(value, SCALARS)]
        return found

    def _is_heard(self) -> bool:
        """Whether someone's hooks hear what runs inside: they would hear it twice."""
        block = self._block()
        return any(
            not getattr(hook, "is_infinity", False)
            for module in block.modules() if module is not block
            for hooks in (module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values()
        )  # fmt: skip


def _is_same(one: Any, other: Any) -> bool:
    """Whether two outputs have the same bits, and nothing but tensors and plain values in them."""
    (ones, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    if spec != other_spec:
        return False
    for a, b in zip(ones, others):
        if isinstance(a, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(_bits(a), _bits(b)):
                return False
        elif not (a is None and b is None) and not (isinstance(a, SCALARS) and a == b):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def random_states(places: set[torch.device]) -> dict[torch.device, torch.Tensor]:
    """Of the processor's generator, and of those of ``places``."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    elsewhere = [place for place in places if place.type != "cpu"]
    return states | {place: torch.get_device_module(place).get_rng_state(place) for place in elsewhere}


def set_random_states(states: dict[torch.device, torch.Tensor]) -> None:
    """Puts generators back to what :func:`random_states` found."""
    for place, state in states.items():
        torch.set_rng_state(state) if place.type == "cpu" else torch.get_device_module(place).set_rng_state(state, place)
