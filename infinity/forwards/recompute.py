"""Recompute: measures blocks, and chooses for each to keep, send home or recompute its activations.

Two passes are measured first: the bytes that each block saves and the seconds that its forward
computes. Sending is priced at the rate of the link.

A block is recomputed only if ``Config(recompute=True)`` allows it. It never is if its forward
changes Python state, draws from generators other than torch's, or has hooks of others inside.
"""

from __future__ import annotations

import inspect
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from ..machine.device import Device
from ..machine.tiers import Tier
from ..planning.activation_choice import ActivationChoice, Measured, choose
from ..state.unit import ParamUnit
from .checkpointed import Checkpointed
from .context import ForwardContext
from .replaced_forward import own_forward
from .value_snapshot import MODULE_OWN, SCALARS, NoSnapshot, Snapshot, has_containers

logger = logging.getLogger(__name__)

MEASURED_PASSES = 2  # the first one includes one-time costs


class ActivationPlanner:
    """Measures the blocks of a model and chooses for each. Chooses again when more blocks have been
    measured."""

    def __init__(
        self,
        find: Callable[[], ForwardContext],
        device: Device,
        *,
        spare_nbytes: int,
        send_rate: Callable[[], float],
        recomputes: bool,
    ):
        """``spare_nbytes``: that activations may have on ``device``. ``send_rate``: bytes per
        second of the round trip."""
        self.find_context, self.device, self.spare_nbytes = find, device, spare_nbytes
        self._send_rate, self.recomputes = send_rate, recomputes
        self.block: PlannedBlock | None = None  # the block whose forward runs
        self.outside_nbytes = 0  # bytes that this pass saved outside of blocks
        self._blocks: list[weakref.ref[PlannedBlock]] = []  # owned by their modules
        self._chosen = 0  # blocks in the last choice

    def add(self, block: nn.Module, units: Sequence[ParamUnit]) -> PlannedBlock:
        """Builds the forward that ``block`` is to run in place of its own."""
        planned = PlannedBlock(
            self, block, Checkpointed(self.find_context, units, own_forward(block))
        )
        self._blocks.append(weakref.ref(planned))
        return planned

    @property
    def blocks(self) -> list[PlannedBlock]:
        """The blocks that still exist, in the order they were added."""
        return [block for ref in self._blocks if (block := ref()) is not None]

    def begin(self) -> None:
        """Begins a training pass: ends the blocks' last pass, and chooses if more are measured."""
        for block in self.blocks:
            block.end_pass()
        measured = [block for block in self.blocks if block.is_measured]
        if len(measured) > self._chosen:
            self._choose(measured)
        self.outside_nbytes, self.block = 0, None

    @contextmanager
    def run_block(self, block: PlannedBlock) -> Iterator[None]:
        """Counts the storages saved inside as ``block``'s."""
        self.block = block
        try:
            yield
        finally:
            self.block = None

    def saves(self, storage: torch.UntypedStorage) -> None:
        """Counts the bytes of a saved storage, in the running block or outside of all."""
        if self.block is not None:
            self.block.saves(storage)
        else:
            self.outside_nbytes += storage.nbytes()

    @property
    def is_sending(self) -> bool:
        """Whether what the running block saves goes home, though the device may have room."""
        return self.block is not None and self.block.choice is ActivationChoice.SEND

    def forget_choices(self) -> None:
        """Makes the next pass choose again."""
        self._chosen = 0

    def _choose(self, blocks: list[PlannedBlock]) -> None:
        host = self.find_context().ledger.accounts[Tier.HOST]
        left = (
            float("inf") if host.budget_nbytes is None else host.budget_nbytes - host.planned_nbytes
        )
        found = choose(
            [block.measured() for block in blocks],
            device_nbytes=max(0, self.spare_nbytes - self.outside_nbytes),
            host_nbytes=left,
            send_rate=self._send_rate(),
        )
        for block, choice in zip(blocks, found):
            block.choice = choice
        self._chosen = len(blocks)
        logger.info("activations of %d blocks: %s", len(blocks), self.counts())

    def counts(self) -> dict[str, int]:
        """Counts the blocks that are kept, sent and recomputed; empty before the first choice."""
        chosen = [block for block in self.blocks if block.is_measured]
        return (
            {
                choice.value: sum(block.choice is choice for block in chosen)
                for choice in ActivationChoice
            }
            if self._chosen
            else {}
        )


class PlannedBlock:
    """A block's forward, which runs as the planner chose."""

    def __init__(self, planner: ActivationPlanner, block: nn.Module, checkpointed: Checkpointed):
        self._planner, self._block, self._checkpointed = planner, weakref.ref(block), checkpointed
        self.choice = ActivationChoice.KEEP
        self._passes = 0  # measured passes
        self._calls = self._saved = 0  # calls and saved bytes of this pass
        self._storages: set[int] = set()
        self._nbytes, self._seconds = 0, float("inf")
        self._is_repeatable = planner.recomputes
        self._mode: tuple = ()  # the training flag of every module inside, when measured
        self.__signature__ = inspect.signature(block.forward)

    @property
    def is_measured(self) -> bool:
        return self._passes >= MEASURED_PASSES and self._seconds < float("inf")

    def end_pass(self) -> None:
        """Stores the last pass's measurements if the block ran in it, and resets the counts."""
        if self._calls:
            self._passes += 1
            self._nbytes = (
                self._saved if self.choice is not ActivationChoice.RECOMPUTE else self._nbytes
            )
        self._calls = self._saved = 0
        self._storages.clear()

    def measured(self) -> Measured:
        """Returns the block's measurements so far."""
        return Measured(self._nbytes, self._seconds, self._is_repeatable)

    def saves(self, storage: torch.UntypedStorage) -> None:
        """Counts the bytes of a saved storage, once a pass."""
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._saved += storage.nbytes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        planner = self._planner
        plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        plain = plain or planner.find_context().is_recomputed()
        # Evaluations are not measured, nor are blocks inside blocks.
        if plain or planner.block is not None or not self._block().training:
            return self._checkpointed.forward(*args, **kwargs)
        self._calls += 1
        with planner.run_block(self):
            if self._calls > 1 and self._is_repeatable:
                self._refuse()
            if not self.is_measured:
                return self._measure(args, kwargs)
            if self.choice is ActivationChoice.RECOMPUTE:
                if self._is_heard():
                    self._refuse()
                elif self._mode != self._modes():  # training flags changed: measure again
                    self._passes, self.choice = 0, ActivationChoice.SEND
                    planner.forget_choices()
                    return self._measure(args, kwargs)
                else:
                    return self._checkpointed.run(*tree_flatten((args, kwargs)))
            return self._checkpointed.forward(*args, **kwargs)

    def _refuse(self) -> None:
        """Excludes the block from recomputation."""
        self._is_repeatable = False
        if self.choice is ActivationChoice.RECOMPUTE:
            self.choice = ActivationChoice.SEND

    def _measure(self, args: tuple, kwargs: dict) -> Any:
        planner = self._planner
        edges = planner.find_context().traffic.edges.values()
        state = self._state(args, kwargs) if self._is_repeatable else None
        stalled = sum(edge.stall_seconds for edge in edges)

        def count(start: float, end: float) -> None:
            # Those of a device that is behind this thread are counted at other times
            is_here = planner.device.is_host
            waited = sum(edge.stall_seconds for edge in edges) - stalled if is_here else 0.0
            self._seconds = max(0.0, end - start - waited)

        with planner.device.timing(count):
            output = self._checkpointed.forward(*args, **kwargs)
        plain = all(
            leaf is None or isinstance(leaf, (torch.Tensor, *SCALARS))
            for leaf in tree_leaves(output)
        )
        if self._is_repeatable and (
            not plain or state is None or state != self._state(args, kwargs) or self._is_heard()
        ):
            self._is_repeatable = False
        self._mode = self._modes()
        return output

    def _modes(self) -> tuple:
        return tuple(module.training for module in self._block().modules())

    def _state(self, args: tuple, kwargs: dict) -> list | None:
        """Snapshots the state that a forward might change: its arguments, its modules' attributes,
        and the states of ``random`` and numpy, which torch's checkpoint does not restore. None if
        some value cannot be compared."""
        leaves = tree_flatten((args, kwargs))[0]
        if not all(
            leaf is None or isinstance(leaf, (torch.Tensor, *SCALARS)) for leaf in leaves
        ) or has_containers(args, kwargs):
            return None
        _, keys, *place = numpy.random.get_state()
        found: list = [
            random.getstate(),
            keys.tobytes(),
            place,
            [Snapshot.of(leaf) for leaf in leaves],
        ]
        try:
            for module in self._block().modules():
                found.append(
                    {
                        name: Snapshot.of(value)
                        for name, value in vars(module).items()
                        if name not in MODULE_OWN
                    }
                )
        except NoSnapshot:
            return None
        return found

    def _is_heard(self) -> bool:
        """Whether a module inside, or torch globally, has foreign forward hooks: a recomputation
        would call them twice."""
        block, everyones = self._block(), torch.nn.modules.module
        inside = [
            hooks
            for module in block.modules()
            if module is not block
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        heard = [*inside, everyones._global_forward_hooks, everyones._global_forward_pre_hooks]
        return any(
            not getattr(hook, "is_infinity", False) for hooks in heard for hook in hooks.values()
        )
