"""Agreement: lets the ranks of a job choose the same for each block, from what all have measured.

news    what a rank has found out since the last choice: more measured blocks, a larger input, a
        full host, a block that may not run again

As a training pass begins, where all data ranks meet anyway, each tells whether it has news. If one
has, all exchange what they measured. Each takes the largest bytes and seconds and the least room,
and computes the choice from that. It is taken once every rank is known to have computed the same,
even if one is interrupted meanwhile. Passes inside ``accumulate()`` but its first keep the choice.

Where the room is measured, blocks run again before there is a choice, but for those that a rank
knows not to run again, as they have hooks. At the end of the forward ranks compare what they are
about to do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ...core.run.pass_state import Pass
from ...core.units.unit import ParamUnit
from ...errors import UsageError
from ...ranks.collective_trace import number_of
from ...ranks.collectives import Collectives
from .activation_choice import ActivationChoice, Measured, choose
from .recompute import ActivationPlanner
from .shared_block import SharedBlock

logger = logging.getLogger(__name__)


class Told(NamedTuple):
    """What one rank tells the others. ``blocks``: in their order; None: not measured, or gone."""

    blocks: list[Measured | None]
    device_nbytes: int
    host_nbytes: float
    send_rate: float


def merged(everyones: Sequence[Measured | None]) -> Measured | None:
    """Returns what to expect of one block on the rank where it takes most; None if some rank has
    not measured it."""
    known = [each for each in everyones if each is not None]
    if len(known) < len(everyones):
        return None
    input_nbytes = max(each.input_nbytes for each in known)
    return Measured(
        input_nbytes + max(each.nbytes - each.input_nbytes for each in known),
        max(each.seconds for each in known),
        all(each.is_repeatable for each in known),
        input_nbytes,
        max(each.product_nbytes for each in known),
        max(each.product_seconds for each in known),
    )


def choose_for_all(everyones: Sequence[Told], *, is_beside: bool) -> list[ActivationChoice | None]:
    """Chooses for each block, from what all ranks told: None if some rank has not measured it."""
    blocks = [merged(of_one) for of_one in zip(*(told.blocks for told in everyones))]
    chosen = iter(
        choose(
            [block for block in blocks if block is not None],
            device_nbytes=min(told.device_nbytes for told in everyones),
            host_nbytes=min(told.host_nbytes for told in everyones),
            send_rate=min(told.send_rate for told in everyones),
            is_beside=is_beside,
        )
    )
    return [None if block is None else next(chosen) for block in blocks]


class SharedPlanner(ActivationPlanner):
    """Measures the blocks that several ranks run. An :class:`Agreement` chooses for them."""

    has_begun = False  # a pass of all ranks; until then blocks run as they are
    is_compared = False  # this pass, at the end of its forward: see shared_block.py
    _has_told = False
    _has_compared = False
    _most_at_home = float("inf")  # bytes that were sent when no more found room

    def _plan(self, block: nn.Module, units: Sequence[ParamUnit]) -> SharedBlock:
        return SharedBlock(self, block, units, number=len(self._blocks))

    @property
    def _places(self) -> list[SharedBlock | None]:
        """The blocks by their numbers; None: it is gone."""
        return [ref() for ref in self._blocks]  # type: ignore[misc]

    def begin(self) -> None:
        """Begins a training pass. Chooses nothing: other ranks may not begin one."""
        if not (self.has_begun or self._has_told):
            self._has_told = True
            logger.warning(
                "recompute=True has no effect as long as several ranks call parts of the model one"
                " by one: they choose as a forward of the whole model begins."
            )
        self.end_pass()
        self._forget_pass()

    def drop(self) -> None:
        """Forgets a pass that an exception has ended. What is agreed stays."""
        super().drop()
        self.is_compared = False

    def begin_pass(self) -> str:
        """Begins a pass of all ranks, before :meth:`begin`. Returns what must be the same on all
        of them."""
        self.has_begun = True
        self.end_pass()
        for block in self.blocks:
            block.begin_pass()
        trained = [block is not None and block.is_in_training for block in self._places]
        return f"what blocks keep, {sum(trained)} in training ({number_of(trained) % 65536:x})"

    def has_news(self) -> bool:
        """Tells whether the ranks are to choose again: also if a block that they agreed to run
        again must not."""
        return super().has_news() or any(
            block.agreed and not block.is_repeatable for block in self.blocks
        )

    def refused(self) -> list[bool]:
        """Returns for each block whether this rank must not run it again, as far as is known."""
        return [block is not None and not block.is_repeatable for block in self._places]

    def refuse(self, everyones: Sequence[Sequence[bool]]) -> None:
        """Refuses what one of the ranks must not run again."""
        for block, refused in zip(self._places, map(any, zip(*everyones))):
            if block is not None and refused:
                block.refuse()

    @property
    def is_open(self) -> bool:
        """Whether blocks may run of which it is not agreed whether they run again."""
        return not self._has_compared or any(
            block.agreed is None and block.has_ever_run for block in self.blocks
        )

    def note_full_home(self, block: SharedBlock) -> None:
        """Notes that what ``block`` sends found no room beside what others have sent."""
        others = [each for each in self.blocks if each.has_run and each is not block]
        sent = sum(each.stays_nbytes() for each in others if each.choice.is_sent)
        if sent < self._most_at_home:
            self._most_at_home = sent
            self.forget_choices()

    def tell(self) -> Told:
        """Returns what this rank has measured."""
        is_shown = self._room is None or self._room.is_shown()
        blocks = [
            block.measured() if block is not None and block.is_measured and is_shown else None
            for block in self._places
        ]
        if not is_shown:
            return Told(blocks, 0, 0.0, 1.0)
        device, host, rate = self.room([block for block in blocks if block is not None])
        return Told(blocks, device, min(host, self._most_at_home), rate)

    def take(self, choices: Sequence[ActivationChoice | None]) -> None:
        """Takes the choice of all ranks. Can be repeated after an interrupt."""
        for block, choice in zip(self._places, choices):
            if block is not None:
                block.agree(choice)
        self._note_chosen()

    def promises(self) -> list[tuple[bool, ...]]:
        """Returns for each block which of its calls the backward runs again."""
        return [() if block is None else block.promises for block in self._places]

    def take_compared(self, everyones: Sequence[Sequence[tuple[bool, ...]]]) -> None:
        """Takes as agreed what was done with blocks that ran on all ranks, until they are chosen
        for. Can be repeated after an interrupt."""
        self._has_compared = True
        for block, of_ranks in zip(self._places, zip(*everyones)):
            if block is not None and block.agreed is None and all(of_ranks):
                again = all(all(calls) for calls in of_ranks)
                block.agree(ActivationChoice.RECOMPUTE if again else ActivationChoice.SEND)

    @staticmethod
    def compare(everyones: Sequence[Sequence[tuple[bool, ...]]]) -> None:
        """Raises UsageError if ranks are about to run other blocks again in the backward.
        ``everyones``: the promises of each rank."""
        for number, of_ranks in enumerate(zip(*everyones)):
            ran = {rank: calls for rank, calls in enumerate(of_ranks) if calls}
            if len(set(ran.values())) > 1:
                no = next(rank for rank, calls in ran.items() if not all(calls))
                raise UsageError(
                    f"recompute=True: data rank {no} cannot run block {number} again for the"
                    " backward, and others can. It changes Python state, draws from generators"
                    " other than torch's, has hooks inside or is called more often there. Let it"
                    " do the same on all ranks, or use Config(recompute=False)."
                )


class Agreement:
    """Where the data ranks of one job choose together. Used from the training thread."""

    def __init__(self, planner: SharedPlanner, collectives: Collectives, running: Pass):
        self._planner, self._collectives, self._running = planner, collectives, running
        self._root: nn.Module | None = None  # whose forward is compared at its end

    def begin(self, root: nn.Module, args: tuple, kwargs: dict) -> None:
        """Begins a root forward. Every data rank calls this for each pass that trains, and waits
        for the others. Raises UsageError if they are at other things."""
        if not torch.is_grad_enabled() or not self._begins:
            return
        planner, collectives = self._planner, self._collectives
        what = planner.begin_pass()
        has_news, is_open = collectives.meet(what, flags=[planner.has_news(), planner.is_open])
        if has_news:
            everyones = collectives.collect(planner.tell(), "what blocks save")
            choices = choose_for_all(everyones, is_beside=planner.measures_room)
            said = f"taking choice {number_of(choices) % 65536:x} of what blocks keep"
            collectives.meet(said, then=partial(planner.take, choices))
        planner.is_compared = planner.measures_room and (is_open or has_news)
        self._root = root if planner.is_compared else None
        if has_news or planner.is_compared:
            # No rank is to leave a verified sequence: one that waits for its device meanwhile would
            # have its listener take that for an error.
            collectives.ranks.dp_group.collective_trace.known.clear()
        if planner.is_compared:
            planner.refuse(collectives.collect(planner.refused(), "what blocks may not run again"))

    @property
    def _begins(self) -> bool:
        return not (self._running.is_accumulating and self._running.has_begun)

    def end(self, root: nn.Module, outputs: Iterable[torch.Tensor]) -> None:
        """Ends a root forward. One that has failed has no ``outputs``, and meets nobody. Raises
        UsageError, on all ranks, if they are about to run other blocks again."""
        if root is not self._root:
            return
        self._root = None
        planner = self._planner
        if planner.is_compared and any(True for _ in outputs):
            planner.is_compared = False
            everyones = self._collectives.collect(planner.promises(), "what blocks run again")
            planner.compare(everyones)
            then = partial(planner.take_compared, everyones)
            self._collectives.meet("running blocks again", then=then)
