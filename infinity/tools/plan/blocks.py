"""Blocks on paper: what the blocks of a model save, and which of them are kept or computed again.

The choice is the engine's own (:mod:`infinity.ext.blocks.activation_choice`). On a device that is
there it gets what two passes have measured; here the bytes are counted on meta, and the seconds
follow from the sizes of products. The room is what the plan leaves beside a pass that computes
every block again, as the engine measures it. Nothing is sent: on paper no link is that fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...core.machine.sizes import format_nbytes
from ...ext.blocks.activation_choice import SHARE_FOR_SAVED, ActivationChoice, Measured, choose
from ..cli.amounts import format_count

CHOSEN = (
    "blocks are chosen for as the engine does by what it measures, in four fifths of the room"
    " beside a pass that keeps none; it would send them, too, over a link that is fast enough"
)
UNCHOSEN = (
    "every block is computed again: what is worth keeping is not known without the rates of"
    " products and of memory, and the operations of the model's blocks"
)
SAID = {
    ActivationChoice.KEEP: "kept",
    ActivationChoice.KEEP_PRODUCTS: "computed again but for products",
    ActivationChoice.RECOMPUTE: "computed again",
}


@dataclass(frozen=True)
class Choice:
    """What is done with the blocks of one pass. ``kept_nbytes``: beside a pass that keeps none;
    ``again_seconds``: of what the backward computes again; ``room_nbytes``: for all that."""

    counts: Counter[ActivationChoice]
    kept_nbytes: int
    again_nbytes: int
    again_seconds: float
    room_nbytes: int

    @property
    def said(self) -> str:
        """The choice as a part of a plan's line."""
        blocks = ", ".join(
            f"{format_count(self.counts[choice], 'block')} {words}"
            for choice, words in SAID.items()
            if self.counts[choice]
        )
        return f"{blocks}, {format_nbytes(self.again_nbytes)} made again"

    def described(self) -> dict[str, Any]:
        """Returns it as plain data, with the counts as `infinity.stats` has them."""
        counts = {choice.value: self.counts[choice] for choice in ActivationChoice}
        return counts | {
            "kept_nbytes": self.kept_nbytes,
            "recomputed_nbytes": self.again_nbytes,
            "recomputed_seconds": self.again_seconds,
        }


@dataclass(frozen=True)
class BlocksOnPaper:
    """The ``count`` equal blocks of a model: bytes a token that one saves, its input, and the
    products among what it computes that are worth keeping; the work of its forward, and of these
    products."""

    count: int
    saved: float
    inputs: float
    products: float
    work: Any = field(repr=False)  # a Work, whose module imports torch
    product_work: Any = field(repr=False)

    def measured(self, samples: int, length: int, machine: Any) -> list[Measured]:
        """Returns what the engine would measure of each block, with ``samples`` of ``length``
        tokens on a device of ``machine``, whose rates are known."""
        tokens = samples * length
        block = Measured(
            int(self.saved * tokens),
            self.work.seconds(samples, length, machine),
            True,
            int(self.inputs * tokens),
            int(self.products * tokens),
            self.product_work.seconds(samples, length, machine),
        )
        return [block] * self.count

    def choices(self, samples: int, length: int, machine: Any) -> Iterator[Choice]:
        """Yields what is chosen with more and more room: for no block, for half of the products,
        for all, for half of the rest, and for all that is saved."""
        blocks = self.measured(samples, length, machine)
        beside = sum(block.nbytes - block.input_nbytes for block in blocks)
        products = sum(block.product_nbytes for block in blocks if block.splits)
        steps = {0, products // 2, products, (products + beside) // 2, beside}
        for kept in sorted(steps):
            yield self._choice(blocks, int(-(-kept // SHARE_FOR_SAVED)) if kept else 0)

    def _choice(self, blocks: list[Measured], room_nbytes: int) -> Choice:
        found = choose(
            blocks,
            device_nbytes=int(SHARE_FOR_SAVED * room_nbytes),
            host_nbytes=0,
            send_rate=1.0,
            is_beside=True,
        )
        kept = again = 0
        seconds = 0.0
        for block, choice in zip(blocks, found):
            stays = block.nbytes - block.input_nbytes
            if choice is not ActivationChoice.KEEP:
                stays = block.product_nbytes if choice.has_products else 0
                seconds += block.elementwise_seconds if choice.has_products else block.seconds
                again += max(0, block.nbytes - stays)
            kept += stays
        return Choice(Counter(found), kept, again, seconds, room_nbytes)
