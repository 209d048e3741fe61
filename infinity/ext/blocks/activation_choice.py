"""Activation choice: chooses for each block to keep, send home or recompute its activations.

keep       on the device, as far as its budget reaches
send       to the host, and back for the backward
recompute  only the block's input is kept; the backward runs the block's forward again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class ActivationChoice(Enum):
    """What happens to the activations that a block saves."""

    KEEP = "kept"
    SEND = "sent"
    RECOMPUTE = "recomputed"


@dataclass(frozen=True)
class Measured:
    """One block: bytes its forward saves, seconds it takes, and whether it may be recomputed.
    ``input_nbytes``: of those, what stays if it is."""

    nbytes: int
    seconds: float
    is_repeatable: bool
    input_nbytes: int = 0


def choose(
    blocks: Sequence[Measured],
    *,
    device_nbytes: int,
    host_nbytes: float,
    send_rate: float,
    is_beside: bool = False,
) -> list[ActivationChoice]:
    """Chooses greedily: blocks that cost most per byte to send or recompute stay on the device.

    Of equal blocks the last stay: the backward needs them first. ``send_rate``: bytes per second of
    the round trip. Blocks that cannot be recomputed are sent even beyond ``host_nbytes``.
    ``is_beside``: ``device_nbytes`` are beside all that a pass needs which keeps no block.
    """

    def cost(block: Measured) -> float:
        sending = block.nbytes / send_rate
        return min(sending, block.seconds) if block.is_repeatable else sending

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
    for index in sorted(
        range(len(blocks)),
        key=lambda i: (cost(blocks[i]) / max(1, blocks[i].nbytes), i),
        reverse=True,
    ):
        block, otherwise = blocks[index], choices[index]
        if block.nbytes <= room:
            choices[index] = ActivationChoice.KEEP
            if needed_nbytes(blocks, choices) <= device_nbytes:
                room -= block.nbytes
                continue
            choices[index] = otherwise
        if not block.is_repeatable or not (
            block.seconds < block.nbytes / send_rate or block.nbytes > host_nbytes
        ):
            choices[index] = ActivationChoice.SEND
            host_nbytes -= block.nbytes
    return choices


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
    return sum(
        max(0, block.nbytes - block.input_nbytes)
        for block, choice in zip(blocks, choices)
        if choice is ActivationChoice.KEEP
    )


def _peak_nbytes(blocks: Sequence[Measured], choices: Sequence[ActivationChoice]) -> int:
    """Returns the most bytes on the device at the end of the forward, and as the backward reaches
    each block, from the last: it frees what the later ones had."""
    stays = peak = 0
    for block, choice in zip(blocks, choices):
        peak = max(peak, stays + block.nbytes)
        if choice is not ActivationChoice.SEND:
            is_kept = choice is ActivationChoice.KEEP
            stays += block.nbytes if is_kept else block.input_nbytes
    return max(peak, stays)
