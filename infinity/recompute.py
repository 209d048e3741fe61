"""Recomputation: of what a forward saves for its backward, which blocks keep it, which send it home, which compute it again.

keep       on the device, as far as its budget reaches
send       to the host, and back for the backward (:mod:`infinity.activations`)
recompute  only the block's input is kept, and the backward runs the block's forward again

With ``activations="auto"`` and a device budget the choice is made for each block from what two passes measure: the bytes
that it saves, the seconds that its forward takes, and what sending costs. A block is run again only where its user allows that
(``Config(recompute=True)``, as one does who calls torch's checkpoint), and not where it is seen to leave something changed behind,
to draw from other generators than torch's, or to have somebody's hooks inside.
"""

from __future__ import annotations

import inspect
import logging
import random
import time
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .errors import UsageError
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
        self.journal = engine.journal

    def run(self, leaves: list, spec: Any) -> Any:
        """The forward, run again in the backward; where there will be none, just the forward."""
        if not torch.is_grad_enabled():
            return self.compute(spec, *leaves)
        versions = [unit.version for unit in self._units]
        return checkpoint(partial(self.compute, versions=versions), spec, *leaves, use_reentrant=False)

    def compute(self, spec: Any, *leaves: Any, versions: list[int] | None = None) -> Any:
        """The forward of arguments that were flattened. ``versions``: of its units' values, the first time."""
        args, kwargs = tree_unflatten(list(leaves), spec)
        if torch._C._current_graph_task_id() != -1:  # recomputation: nobody else may have asked for the weights yet
            if versions is not None and versions != [unit.version for unit in self._units]:
                raise UsageError(
                    "this backward runs a block's forward again, but its weights were changed since (by optimizer.step() or "
                    "load_state_dict()). Run backward before the step."
                )
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
    """Measures the blocks of a model, then chooses for each; anew when blocks are seen that were not before."""

    def __init__(self, engine: Engine, *, send_rate: float, recomputes: bool):
        self._of = weakref.ref(engine)  # the engine holds this object
        self._send_rate, self.recomputes = send_rate, recomputes
        self._blocks: list[weakref.ref[PlannedBlock]] = []  # their modules have them
        self._chosen = 0  # blocks that have been chosen for

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
        for block in self.blocks:
            block.end_pass()
        measured = [block for block in self.blocks if block.is_measured]
        if len(measured) > self._chosen:
            self._choose(measured)

    def forget_choices(self) -> None:
        """Has the next passes choose anew."""
        self._chosen = 0

    def _choose(self, blocks: list[PlannedBlock]) -> None:
        activations, host = self.engine.activations, self.engine.ledger.accounts[Tier.HOST]
        left = float("inf") if host.budget_nbytes is None else host.budget_nbytes - host.planned_nbytes
        found = choose(
            [block.measured() for block in blocks],
            device_nbytes=max(0, activations.spare_nbytes - activations.outside_nbytes),
            host_nbytes=left,
            send_rate=self._send_rate,
        )
        for block, choice in zip(blocks, found):
            block.choice = choice
        self._chosen = len(blocks)
        logger.info("activations of %d blocks: %s", len(blocks), self.counts())

    def counts(self) -> dict[str, int]:
        """How many blocks are kept, sent and recomputed; nothing before that is chosen."""
        chosen = [block for block in self.blocks if block.is_measured]
        return {choice.value: sum(block.choice is choice for block in chosen) for choice in Choice} if self._chosen else {}


class PlannedBlock:
    """A block's forward, as it was chosen to run."""

    def __init__(self, planner: ActivationPlanner, block: nn.Module, checkpointed: Checkpointed):
        self._planner, self._block, self._checkpointed = planner, weakref.ref(block), checkpointed
        self.choice = Choice.KEEP
        self._passes = 0  # in which it ran, and was measured
        self._calls = self._saved = 0  # of this pass: how often it ran, and the bytes that it saved
        self._storages: set[int] = set()
        self._nbytes, self._seconds = 0, float("inf")
        self._is_repeatable = planner.recomputes
        self._mode: tuple = ()  # training or not, of every module inside, as it was measured
        self.__signature__ = inspect.signature(block.forward)

    @property
    def is_measured(self) -> bool:
        return self._passes >= MEASURED_PASSES

    def end_pass(self) -> None:
        """Takes what the last pass showed, where the block ran in it; counts start anew."""
        if self._calls:
            self._passes += 1
            self._nbytes = self._saved if self.choice is not Choice.RECOMPUTE else self._nbytes
        self._calls = self._saved = 0
        self._storages.clear()

    def measured(self) -> Measured:
        """What the passes so far have shown."""
        return Measured(self._nbytes, self._seconds, self._is_repeatable)

    def saves(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage once."""
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._saved += storage.nbytes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._planner.engine
        activations = engine.activations
        plain = torch.compiler.is_compiling() or not torch.is_grad_enabled() or engine.passes.is_recomputed
        if plain or activations.block is not None or not self._block().training:  # an evaluation is nothing to plan by
            return self._checkpointed.forward(*args, **kwargs)
        self._calls += 1
        activations.block = self
        try:
            if self._calls > 1 and self._is_repeatable:
                self._refuse()
            if not self.is_measured:
                return self._measure(args, kwargs)
            if self.choice is Choice.RECOMPUTE:
                if self._is_heard():
                    self._refuse()
                elif self._mode != self._modes():  # another module by now: what was seen of it has to be seen again
                    self._passes, self.choice = 0, Choice.SEND
                    self._planner.forget_choices()
                    return self._measure(args, kwargs)
                else:
                    return self._checkpointed.run(*tree_flatten((args, kwargs)))
            return self._checkpointed.forward(*args, **kwargs)
        finally:
            activations.block = None

    def _refuse(self) -> None:
        """The block is not to be run again."""
        self._is_repeatable = False
        if self.choice is Choice.RECOMPUTE:
            self.choice = Choice.SEND

    def _measure(self, args: tuple, kwargs: dict) -> Any:
        traffic = self._planner.engine.traffic
        state = self._state(args, kwargs) if self._is_repeatable else None
        stalled, began = sum(edge.stall_seconds for edge in traffic.edges.values()), time.perf_counter()
        output = self._checkpointed.forward(*args, **kwargs)
        stalled = sum(edge.stall_seconds for edge in traffic.edges.values()) - stalled
        self._seconds = max(0.0, time.perf_counter() - began - stalled)
        plain = all(leaf is None or isinstance(leaf, (torch.Tensor, *SCALARS)) for leaf in tree_leaves(output))
        if self._is_repeatable and (not plain or state is None or state != self._state(args, kwargs) or self._is_heard()):
            self._is_repeatable = False
        self._mode = self._modes()
        return output

    def _modes(self) -> tuple:
        return tuple(module.training for module in self._block().modules())

    def _state(self, args: tuple, kwargs: dict) -> list | None:
        """Everything that a forward might leave changed: what it is called with, its modules' attributes, and the state of
        random numbers that a checkpoint does not bring back. None: it has something whose changes cannot be told."""
        leaves = tree_flatten((args, kwargs))[0]
        if not all(leaf is None or isinstance(leaf, (torch.Tensor, *SCALARS)) for leaf in leaves) or _has_containers(args, kwargs):
            return None
        _, keys, *place = numpy.random.get_state()
        found: list = [random.getstate(), keys.tobytes(), place, [_Told.of(leaf) for leaf in leaves]]
        try:
            for module in self._block().modules():
                found.append({name: _Told.of(value) for name, value in vars(module).items() if name not in MODULE_OWN})
        except _Untold:
            return None
        return found

    def _is_heard(self) -> bool:
        """Whether someone's hooks hear what runs inside: they would hear it twice."""
        block, everyones = self._block(), torch.nn.modules.module
        inside = [hooks for module in block.modules() if module is not block for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        heard = [*inside, everyones._global_forward_hooks, everyones._global_forward_pre_hooks]
        return any(not getattr(hook, "is_infinity", False) for hooks in heard for hook in hooks.values())


MODULE_OWN = {"_parameters", "_modules", *(name for name in vars(nn.Module()) if "hooks" in name), "forward"}
LARGEST_TOLD = 64 * 1024  # elements of a tensor whose bytes are looked at; of larger ones torch's count of changes has to do
DEEPEST_TOLD = 6
IMMUTABLE = (type(None), *SCALARS, bytes, complex, range, torch.Size, torch.layout, Enum, type, types.FunctionType, types.BuiltinFunctionType,
             types.ModuleType)  # fmt: skip


class _Untold(Exception):
    """Something whose changes cannot be told."""


class _Told:
    """A value as it is now, to be compared with what it is later. Holds the object, so that no other gets its identity."""

    def __init__(self, value: Any, content: Any):
        self._value, self._content = value, content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Told) and self._value is other._value and self._content == other._content

    @classmethod
    def of(cls, value: Any, depth: int = 0) -> _Told:
        """Raises _Untold."""
        if depth > DEEPEST_TOLD:
            raise _Untold
        if isinstance(value, torch.Tensor):
            small = value.numel() <= LARGEST_TOLD and value.layout is torch.strided and handle_free(value)
            data = value.detach().resolve_conj().resolve_neg().cpu().contiguous() if small else None
            return cls(value, (value._version, None if data is None else data.reshape(-1).view(torch.uint8).numpy().tobytes()))
        if isinstance(value, torch.Generator):
            return cls(value, value.get_state().numpy().tobytes())
        if isinstance(value, (bool, int, float, str)):
            return cls(None, value)
        if isinstance(value, IMMUTABLE):
            return cls(value, None)
        if isinstance(value, nn.Module):  # told by its own attributes, where it is inside the block
            return cls(value, None)
        if isinstance(value, dict):
            return cls(value, [(key, cls.of(each, depth + 1)) for key, each in value.items()])
        if isinstance(value, (list, tuple, set, frozenset)):
            which = None if isinstance(value, (tuple, frozenset)) else value  # those are what is in them
            return cls(which, [cls.of(each, depth + 1) for each in value])
        if isinstance(value, types.MethodType):
            return cls(value.__func__, cls.of(value.__self__, depth + 1))
        if hasattr(value, "__dict__"):
            return cls(value, [(key, cls.of(each, depth + 1)) for key, each in vars(value).items()])
        try:  # an iterator tells where it is
            return cls(value, [cls.of(each, depth + 1) for each in value.__reduce_ex__(2)])
        except TypeError:
            raise _Untold from None


def handle_free(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its bytes with it: a parameter at home has not."""
    return not isinstance(tensor, nn.Parameter) and type(tensor) is torch.Tensor


def _has_containers(args: tuple, kwargs: dict) -> bool:
    """Whether a list or a dict is among the arguments: the block may put something into it."""
    pending = [*args, *kwargs.values()]
    while pending:
        value = pending.pop()
        if isinstance(value, tuple):
            pending += value
        elif isinstance(value, (list, dict, set)):
            return True
    return False


def random_states(places: set[torch.device]) -> dict[torch.device, torch.Tensor]:
    """Of the processor's generator, and of those of ``places``."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    elsewhere = [place for place in places if place.type != "cpu"]
    return states | {place: torch.get_device_module(place).get_rng_state(place) for place in elsewhere}


def set_random_states(states: dict[torch.device, torch.Tensor]) -> None:
    """Puts generators back to what :func:`random_states` found."""
    for place, state in states.items():
        torch.set_rng_state(state) if place.type == "cpu" else torch.get_device_module(place).set_rng_state(state, place)
