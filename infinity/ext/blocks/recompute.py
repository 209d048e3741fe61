"""Recompute: measures blocks, and chooses for each to keep, send home or recompute its activations.

Two passes are measured first: the bytes that each block saves and the seconds that its forward
computes. Sending is priced at the rate of the link. With a budget, what a measured block saves is
kept or sent as there is room. If there is none, it is dropped at the block's end and computed again
in the backward. Without one the room is measured, too: every block is computed again until a step
was made, and what the card has left then is for blocks that are kept. A larger input than those
measured is measured again.

A block is recomputed only if ``Config(recompute=True)`` allows it. It never is if its forward
changes Python state, draws from generators other than torch's, has hooks of others inside, or needs
other ranks (:mod:`.unaided`).
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

from ...core.machine.card_memory import CardMemory
from ...core.machine.device import Device
from ...core.run.context import ForwardContext
from ...core.run.saved_tensor import READ_AHEAD
from ...core.units.unit import ParamUnit
from .activation_choice import (
    SHARE_FOR_SAVED,
    ActivationChoice,
    Measured,
    choose,
    least_nbytes,
)
from .around import around_own
from .checkpointed import Checkpointed, Held
from .products import Counted, Products
from .unaided import Unaided
from .value_snapshot import MODULE_OWN, SCALARS, NoSnapshot, Snapshot, has_containers

logger = logging.getLogger(__name__)

MEASURED_PASSES = 2  # the first one includes one-time costs
SHARE_IN_FLIGHT = 1 / 8  # of the measured room


class MeasuredRoom:
    """The room on a card beside passes that recompute every block, which are measured first."""

    def __init__(
        self,
        memory: CardMemory,
        *,
        several_ranks: bool,
        is_shown: Callable[[], bool],
        limit_in_flight: Callable[[int], None],
    ):
        """Before the first pass. ``is_shown``: whether a whole step was made. ``limit_in_flight``:
        is told how much of the room may be on its way home, or back."""
        self._memory, self.is_shown = memory, is_shown
        self._left_nbytes = memory.left_nbytes(several_ranks=several_ranks) or 0
        self._limit_in_flight = limit_in_flight
        self._first: tuple[int, int] | None = None  # bytes of room, and least for the blocks then

    def measure(self, least_nbytes: int, largest_nbytes: int) -> tuple[int, bool]:
        """Returns the bytes that may be kept, and whether others can be sent. ``least_nbytes``:
        what blocks have in such a pass; ``largest_nbytes``: of one tensor that they save."""
        unused = self._memory.unused_nbytes()
        if self._first is None:
            self._first = unused, least_nbytes
        else:  # the peak may be that of a pass that kept blocks; such a pass grows as they do
            first, least = self._first
            growth = least_nbytes / max(1, least) - 1
            unused = max(unused, int(first - growth * (self._left_nbytes - first)))
        in_flight = int(SHARE_IN_FLIGHT * unused)
        self._limit_in_flight(in_flight)
        return int(SHARE_FOR_SAVED * unused), READ_AHEAD * largest_nbytes <= in_flight


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
        unaided: Unaided,
        home_nbytes: Callable[[], float] = lambda: float("inf"),
        room: MeasuredRoom | None = None,
    ):
        """``spare_nbytes``: that activations may have on ``device``. ``send_rate``: bytes per
        second of the round trip. ``unaided``: tells which blocks need other ranks to run again.
        ``home_nbytes``: that they may have at home. ``room``: in place of ``spare_nbytes``, if no
        budget tells it."""
        self.find_context, self.device, self.spare_nbytes = find, device, spare_nbytes
        self._room = room
        self._send_rate, self._home_nbytes = send_rate, home_nbytes
        self.recomputes, self.unaided = recomputes, unaided
        # Of the device's bytes, what is left to a block that is computed again
        self.reserved_nbytes, self.found_no_room = 0, False
        # By class and shapes: what a block saves, and what of that is its input
        self._known: dict[tuple, tuple[int, int]] = {}
        self._inputs: set[int] = set()  # the storages of this pass's inputs
        self.block: PlannedBlock | None = None  # the block whose forward runs
        self._largest_nbytes = 0  # of the storages that blocks saved
        self.outside_nbytes = 0  # bytes that this pass saved outside of blocks
        self._blocks: list[weakref.ref[PlannedBlock]] = []  # owned by their modules
        self._chosen = 0  # blocks in the last choice
        self._chooses_again = False

    @property
    def measures_room(self) -> bool:
        """Whether the room on the device is measured."""
        return self._room is not None

    @property
    def first_choice(self) -> ActivationChoice:
        """What happens to a block until it is chosen for. A pass that leaves room to none shows
        how much there is."""
        return ActivationChoice.RECOMPUTE if self.measures_room else ActivationChoice.KEEP

    def plan(
        self, block: nn.Module, units: Sequence[ParamUnit], *, is_part: bool = False
    ) -> PlannedBlock:
        """Returns what runs ``block`` as it is chosen from now on. ``is_part``: on one part of its
        batch, for which nothing is kept unless it is chosen."""
        planned = PlannedBlock(self, block, units, is_part=is_part)
        self._blocks.append(weakref.ref(planned))
        return planned

    def add(self, block: nn.Module, units: Sequence[ParamUnit]) -> Callable:
        """Builds the forward that ``block`` is to run in place of its own."""
        forward = around_own(block, self.plan(block, units).run)
        forward.__signature__ = inspect.signature(block.forward)  # type: ignore[attr-defined]
        return forward

    @property
    def blocks(self) -> list[PlannedBlock]:
        """The blocks that still exist, in the order they were added."""
        return [block for ref in self._blocks if (block := ref()) is not None]

    def begin(self) -> None:
        """Begins a training pass: ends the blocks' last pass, and chooses if more are measured."""
        for block in self.blocks:
            block.end_pass(counts=True)
        measured = [block for block in self.blocks if block.is_measured]
        is_shown = self._room is None or self._room.is_shown()
        if is_shown and (len(measured) > self._chosen or self._chooses_again):
            self._choose(measured)
        self._forget_pass()

    def drop(self) -> None:
        """Forgets a pass that an exception has ended."""
        for block in self.blocks:
            block.end_pass(counts=False)
        self.reserved_nbytes = 0
        self._forget_pass()

    def _forget_pass(self) -> None:
        self.outside_nbytes, self.block = 0, None
        self._inputs.clear()

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
            self._largest_nbytes = max(self._largest_nbytes, storage.nbytes())
        else:
            self.outside_nbytes += storage.nbytes()

    @property
    def is_sending(self) -> bool:
        """Whether what the running block saves goes home, though the device may have room."""
        return self.block is not None and self.block.choice.is_sent

    def forget_choices(self) -> None:
        """Makes the next pass choose again."""
        self._chooses_again = True

    @contextmanager
    def measuring(self, kind: tuple) -> Iterator[None]:
        """Leaves room to compute a block again, and tells in ``found_no_room`` whether what is
        saved inside found none. ``kind``: a block of none before is kept on the device by no
        byte."""
        if kind in self._known:
            saved, inputs = (max(each) for each in zip(*self._known.values()))
            to_come = sum(not block.has_run for block in self.blocks)
            self.reserved_nbytes = saved + inputs * to_come
        elif self.recomputes:
            self.reserved_nbytes = self.spare_nbytes
        self.found_no_room = False
        try:
            yield
        finally:
            self.reserved_nbytes = 0

    def note(self, kind: tuple, nbytes: int, inputs: Sequence[torch.Tensor]) -> int:
        """Notes what a block of ``kind`` saves: ``nbytes``, its ``inputs`` among them. Returns how
        many bytes those have that are not inputs of an earlier block."""
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in inputs}
        new = storages.keys() - self._inputs
        self._inputs |= new
        input_nbytes = sum(storages[key].nbytes() for key in new)
        self._known[kind] = max((nbytes, input_nbytes), self._known.get(kind, (0, 0)))
        return input_nbytes

    def _choose(self, blocks: list[PlannedBlock]) -> None:
        measured = [block.measured() for block in blocks]
        device_nbytes, host_nbytes = self.spare_nbytes - self.outside_nbytes, self._home_nbytes()
        if self._room is not None:
            device_nbytes, sends = self._room.measure(least_nbytes(measured), self._largest_nbytes)
            host_nbytes = host_nbytes if sends else 0
        choices = choose(
            measured,
            device_nbytes=max(0, device_nbytes),
            host_nbytes=host_nbytes,
            send_rate=self._send_rate(),
            is_beside=self._room is not None,
        )
        for block, choice in zip(blocks, choices):
            block.choice = choice
        self._chosen, self._chooses_again = len(blocks), False
        logger.info("activations of %d blocks: %s", len(blocks), self.counts())

    def counts(self) -> dict[str, int]:
        """Counts the blocks by what is done with them, and the bytes that are kept, sent and made
        again; empty before the first choice."""
        if not self._chosen:
            return {}
        chosen = [block for block in self.blocks if block.is_measured]
        counts = {
            choice.value: sum(block.choice is choice for block in chosen)
            for choice in ActivationChoice
        }
        nbytes = dict.fromkeys(("kept_nbytes", "sent_nbytes", "recomputed_nbytes"), 0)
        for block in chosen:
            measured, place = block.measured(), "sent" if block.choice.is_sent else "kept"
            stays = measured.product_nbytes if block.choice.has_products else measured.nbytes
            stays = 0 if block.choice is ActivationChoice.RECOMPUTE else stays
            nbytes[f"{place}_nbytes"] += stays
            nbytes["recomputed_nbytes"] += max(0, measured.nbytes - stays)
        return counts | nbytes


class PlannedBlock:
    """Runs a block's forward, or that of one part of its batch, as the planner chose."""

    def __init__(
        self,
        planner: ActivationPlanner,
        block: nn.Module,
        units: Sequence[ParamUnit],
        *,
        is_part: bool,
    ):
        self._planner, self._block, self._units = planner, weakref.ref(block), units
        self._checkpointed, self._is_part = Checkpointed(planner.find_context, units), is_part
        self._first_choice = ActivationChoice.RECOMPUTE if is_part else planner.first_choice
        self.choice = self._first_choice
        self._passes = 0  # measured passes
        self._calls = self._saved = 0  # calls and saved bytes of this pass
        self._storages: set[int] = set()
        self._nbytes, self._input_nbytes, self._seconds = 0, 0, float("inf")
        self._numel = -1  # elements of the largest input that was measured
        self._is_repeatable = planner.recomputes and planner.unaided.allows(block, units)
        self._mode: tuple = ()  # the training flag of every module inside, when measured
        self._counted = Counted(planner.device)  # the products of the last measured call
        self._is_checked = False  # whether a call has shown that nothing writes to them unseen

    @property
    def has_run(self) -> bool:
        """Whether it has run, or runs, in this pass."""
        return self._calls > 0

    @property
    def is_measured(self) -> bool:
        return self._passes >= MEASURED_PASSES and self._seconds < float("inf")

    def end_pass(self, *, counts: bool) -> None:
        """Resets the counts of one pass. ``counts``: it was measured if the block ran in it."""
        self._passes += counts and bool(self._calls)
        self._calls = self._saved = 0
        self._storages.clear()

    def measured(self) -> Measured:
        """Returns the block's measurements so far."""
        return Measured(
            self._nbytes,
            self._seconds,
            self._is_repeatable,
            self._input_nbytes,
            sum(self._counted.nbytes.values()),
            self._counted.seconds(),
        )

    def saves(self, storage: torch.UntypedStorage) -> None:
        """Counts the bytes of a saved storage, once a pass."""
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self._saved += storage.nbytes()

    def run(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs ``forward``, the block's own."""
        planner = self._planner
        plain = not torch.is_grad_enabled() or planner.find_context().is_recomputed()
        # Evaluations are not measured, nor are blocks inside blocks.
        if plain or planner.block is not None or not self._block().training or self._is_left:
            return self._run_unplanned(forward, args, kwargs)
        self._calls += 1
        inputs = _tensors(args, kwargs) if planner.recomputes else []
        with planner.run_block(self):
            if self._calls > 1 and self._is_repeatable:
                self._refuse()
            recomputes = self.choice.repeats
            if recomputes and self._is_heard():
                self._refuse()
            elif recomputes and self._mode and self._mode != self._modes():  # flags changed
                self._passes, self.choice = 0, self._first_choice
                planner.forget_choices()
            if not self.is_measured or sum(map(torch.Tensor.numel, inputs)) > self._numel:
                return self._measure(forward, args, kwargs, inputs)
            planner.found_no_room = False
            if self.choice.repeats:
                output = self._run_again(forward, *tree_flatten((args, kwargs)))
            else:
                output = forward(*args, **kwargs)
            if planner.found_no_room and self.choice.is_sent:
                self.choice = ActivationChoice.RECOMPUTE if self._is_repeatable else self.choice
            return output

    @property
    def _is_left(self) -> bool:
        """Whether it is a part that is not chosen for."""
        return self._is_part and not self._is_repeatable

    def _run_unplanned(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs ``forward``; a part again in the backward."""
        if not self._is_part:
            return forward(*args, **kwargs)
        return self._checkpointed.run(*tree_flatten((args, kwargs)), forward=forward)

    def _run_again(self, forward: Callable, leaves: list, spec: Any) -> Any:
        """Runs ``forward``, and again in the backward: all of it, or all but its products. Sends
        what it saves if it turns out to need other ranks."""
        forward, unaided = self._in_one_mode(forward), self._planner.unaided
        begun = unaided.mark()
        held = None if begun is None else Held(None)
        output = self._run_held(forward, leaves, spec, held)
        if held is None:
            return output
        needs_units, choice = unaided.used_others(begun, self._units), self.choice
        if not (needs_units or unaided.communicated(begun)):
            held.drop()
            return output
        try:
            self.choice = ActivationChoice.SEND
            held.keep()
        finally:
            self.choice = choice
        if needs_units:
            self._refuse()
        return output

    def _run_held(self, forward: Callable, leaves: list, spec: Any, held: Held | None) -> Any:
        """Runs ``forward``, with what it saves in ``held``, and keeps the products if it is chosen
        to."""
        if not self.choice.has_products:
            return self._checkpointed.run(leaves, spec, forward=forward, held=held)
        products = Products(
            self._counted.nbytes,
            is_host=self._planner.device.is_host,
            checks=not self._is_checked,
        )
        output = self._checkpointed.run(leaves, spec, forward=forward, held=held, products=products)
        for number in products.end(output):
            del self._counted.nbytes[number]
        self._is_checked = True
        return output

    def _refuse(self) -> None:
        """Excludes the block from recomputation."""
        self._is_repeatable = False
        if self.choice.repeats:
            self.choice = ActivationChoice.SEND

    def _measure(
        self, forward: Callable, args: tuple, kwargs: dict, inputs: list[torch.Tensor]
    ) -> Any:
        planner = self._planner
        edges = planner.find_context().traffic.edges.values()
        state = self._state(args, kwargs) if self._is_repeatable else None
        if planner.measures_room:  # until it is chosen for again
            is_repeatable = self._is_repeatable
            self.choice = self._first_choice if is_repeatable else ActivationChoice.SEND
        if self._is_repeatable and (state is None or self._is_heard()):
            self._refuse()
        watched, begun = planner.unaided.watch(self._units), planner.unaided.mark()
        counted = Counted(planner.device, None if watched is None else watched.see)
        held = Held(counted.note_saved) if self._is_repeatable else None
        stalled = sum(edge.stall_seconds for edge in edges)

        def count(start: float, end: float) -> None:
            # Those of a device that is behind this thread are counted at other times
            is_here = planner.device.is_host
            waited = sum(edge.stall_seconds for edge in edges) - stalled if is_here else 0.0
            self._seconds = max(0.0, end - start - waited)

        kind = type(self._block()), *(each.shape for each in inputs)
        with planner.measuring(kind), planner.device.timing(count):
            if held is None:
                output = forward(*args, **kwargs)
            else:
                leaves, spec = tree_flatten((args, kwargs))
                again = self._in_one_mode(forward)
                output = self._checkpointed.run(
                    leaves, spec, forward=again, held=held, products=counted
                )
                counted.end(output)
        plain = all(
            leaf is None or isinstance(leaf, (torch.Tensor, *SCALARS))
            for leaf in tree_leaves(output)
        )
        if self._is_repeatable and (
            not plain
            or state != self._state(args, kwargs)
            or self._is_heard()
            or planner.unaided.used_others(begun, self._units)
            or (watched is not None and watched.needs_others)
        ):
            self._refuse()
        if planner.unaided.communicated(begun):
            recomputes = self._is_left
        else:
            finds_room = not (self.choice.repeats or planner.found_no_room)
            recomputes = self._is_part or (self._is_repeatable and not finds_room)
        if held is not None and recomputes:
            held.drop()
        self._note(kind, inputs, counted)
        self._mode = self._modes()
        return output

    def _note(self, kind: tuple, inputs: list[torch.Tensor], counted: Counted) -> None:
        """Notes what was measured of ``inputs``."""
        planner, numel = self._planner, sum(map(torch.Tensor.numel, inputs))
        input_nbytes = planner.note(kind, self._saved, inputs) if self._is_repeatable else 0
        if numel >= self._numel:
            if self.is_measured:  # larger than the input that was chosen for
                planner.forget_choices()
            self._numel, self._nbytes, self._input_nbytes = numel, self._saved, input_nbytes
            self._counted, self._is_checked = counted, False

    def _in_one_mode(self, forward: Callable) -> Callable:
        """Returns ``forward``, which runs again with the training flags that it has now: `eval()`
        may come before the backward."""
        modules = list(self._block().modules())
        flags = [module.training for module in modules]

        def run(*args: Any, **kwargs: Any) -> Any:
            now = [module.training for module in modules]
            _set_training(modules, flags)
            try:
                return forward(*args, **kwargs)
            finally:
                _set_training(modules, now)

        return run

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
        state: list = [
            random.getstate(),
            keys.tobytes(),
            place,
            [Snapshot.of(leaf) for leaf in leaves],
        ]
        try:
            for module in self._block().modules():
                state.append(
                    {
                        name: Snapshot.of(value)
                        for name, value in vars(module).items()
                        if name not in MODULE_OWN
                    }
                )
        except NoSnapshot:
            return None
        return state

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


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is torch.Tensor]


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags):
        if module.training is not flag:
            module.training = flag
