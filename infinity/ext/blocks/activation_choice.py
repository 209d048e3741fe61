"""Activation choice: chooses for each block to keep, send home or recompute its activations.

keep       on the device, as far as its budget reaches
send       to the host, and back for the backward
recompute  only the block's input is kept; the backward runs the block's forward again
products   of a block that is recomputed, the results of its matrix products and attention may be
           kept or sent: only elementwise operations run again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

SHARE_FOR_SAVED = 0.8  # of the measured room; the rest is for gaps between tensors


class ActivationChoice(Enum):
    """What happens to the activations that a block saves."""

    KEEP = "kept"
    SEND = "sent"
    RECOMPUTE = "recomputed"
    KEEP_PRODUCTS = "products_kept"
    SEND_PRODUCTS = "products_sent"

    @property
    def is_sent(self) -> bool:
        """Whether something goes home."""
        return self in (ActivationChoice.SEND, ActivationChoice.SEND_PRODUCTS)

    @property
    def has_products(self) -> bool:
        """Whether elementwise operations only run again."""
        return self in (ActivationChoice.KEEP_PRODUCTS, ActivationChoice.SEND_PRODUCTS)

    @property
    def repeats(self) -> bool:
        """Whether the block's forward runs again."""
        return self is ActivationChoice.RECOMPUTE or self.has_products


@dataclass(frozen=True)
class Measured:
    """One block: bytes its forward saves, seconds it takes, and whether it may be recomputed.
    ``input_nbytes``: of those, what stays if it is. ``product_nbytes``, ``product_seconds``: of
    its matrix products and attention."""

    nbytes: int
    seconds: float
    is_repeatable: bool
    input_nbytes: int = 0
    product_nbytes: int = 0
    product_seconds: float = 0.0

    @property
    def splits(self) -> bool:
        """Whether keeping its products takes less than keeping all."""
        return self.is_repeatable and 0 < self.product_nbytes < self.nbytes - self.input_nbytes

    @property
    def elementwise_seconds(self) -> float:
        """Seconds of what runs again if products are there."""
        return max(0.0, self.seconds - self.product_seconds)


@dataclass(frozen=True)
class _Step:
    """Keeps more of block ``index`` on the device: ``nbytes`` more, for ``seconds`` saved."""

    index: int
    choice: ActivationChoice
    nbytes: int
    seconds: float

    @property
    def worth(self) -> float:
        return self.seconds / max(1, self.nbytes)


def choose(
    blocks: Sequence[Measured],
    *,
    device_nbytes: int,
    host_nbytes: float,
    send_rate: float,
    is_beside: bool = False,
) -> list[ActivationChoice]:
    """Chooses greedily: what costs most per byte to send or recompute stays on the device.

    Of equal blocks the last stay: the backward needs them first. ``send_rate``: bytes per second of
    the round trip. Blocks that cannot be recomputed are sent even beyond ``host_nbytes``.
    ``is_beside``: ``device_nbytes`` are beside all that a pass needs which keeps no block.
    """
    needed_nbytes = _kept_nbytes if is_beside else _peak_nbytes
    if needed_nbytes(blocks, all_kept := [ActivationChoice.KEEP] * len(blocks)) <= device_nbytes:
        return all_kept
    # One block at a time is on the device while it is recomputed.
    running = max(block.nbytes for block in blocks)
    room = float("inf") if is_beside else device_nbytes - running
    choices = [
        ActivationChoice.RECOMPUTE if block.is_repeatable else ActivationChoice.SEND
        for block in blocks
    ]
    steps = sorted(
        (step for index, block in enumerate(blocks) for step in _steps(index, block, send_rate)),
        key=lambda step: (step.worth, step.index),
        reverse=True,
    )
    for step in steps:
        before = choices[step.index]
        if step.nbytes <= room:
            choices[step.index] = step.choice
            if needed_nbytes(blocks, choices) <= device_nbytes:
                room -= step.nbytes
                continue
            choices[step.index] = before
    for index in dict.fromkeys(step.index for step in steps):
        block = blocks[index]
        if choices[index] in (ActivationChoice.KEEP, ActivationChoice.KEEP_PRODUCTS):
            continue
        for _, choice, nbytes in _away(block, send_rate):
            if not block.is_repeatable or nbytes <= host_nbytes:
                choices[index] = choice
                host_nbytes -= nbytes
                break
    return choices


def _away(block: Measured, send_rate: float) -> list[tuple[float, ActivationChoice, int]]:
    """Lists what may happen to a block that is not on the device, the cheapest first: seconds, the
    choice, bytes on the host."""
    options = [(block.nbytes / send_rate, ActivationChoice.SEND, block.nbytes)]
    if block.splits:
        seconds = block.elementwise_seconds + block.product_nbytes / send_rate
        options.append((seconds, ActivationChoice.SEND_PRODUCTS, block.product_nbytes))
    if block.is_repeatable:
        options.append((block.seconds, ActivationChoice.RECOMPUTE, 0))
    return sorted(options, key=lambda option: option[0])


def _steps(index: int, block: Measured, send_rate: float) -> list[_Step]:
    """Lists the steps that keep ``block`` on the device: its products first if their bytes save
    more each than those of the rest."""
    seconds = _away(block, send_rate)[0][0]
    whole = _Step(index, ActivationChoice.KEEP, block.nbytes, seconds)
    if not block.splits or seconds <= block.elementwise_seconds:
        return [whole]
    left = block.elementwise_seconds
    products = _Step(index, ActivationChoice.KEEP_PRODUCTS, block.product_nbytes, seconds - left)
    rest = _Step(index, ActivationChoice.KEEP, block.nbytes - block.product_nbytes, left)
    return [products, rest] if products.worth > rest.worth else [whole]


def least_nbytes(blocks: Sequence[Measured]) -> int:
    """Returns the bytes on the device that ``blocks`` need if none is kept."""
    return _peak_nbytes(
        blocks,
        [
            ActivationChoice.RECOMPUTE if block.is_repeatable else ActivationChoice.SEND
            for block in blocks
        ],
    )


def _kept_nbytes(blocks: Sequence[Measured], choices: Sequence[ActivationChoice]) -> int:
    kept = {
        ActivationChoice.KEEP: lambda block: max(0, block.nbytes - block.input_nbytes),
        ActivationChoice.KEEP_PRODUCTS: lambda block: block.product_nbytes,
    }
    return sum(kept[choice](block) for block, choice in zip(blocks, choices) if choice in kept)


def _peak_nbytes(blocks: Sequence[Measured], choices: Sequence[ActivationChoice]) -> int:
    """Returns the most bytes on the device at the end of the forward, and as the backward reaches
    each block, from the last: it frees what the later ones had."""
    stays = peak = 0
    for block, choice in zip(blocks, choices):
        # Some products are not among what autograd saves
        products = block.product_nbytes if choice.has_products else 0
        peak = max(peak, stays + block.nbytes + products)
        if choice is ActivationChoice.KEEP_PRODUCTS:
            stays += block.input_nbytes + products
        elif choice is not ActivationChoice.SEND:
            stays += block.nbytes if choice is ActivationChoice.KEEP else block.input_nbytes
    return max(peak, stays)
