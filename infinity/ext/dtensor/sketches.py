"""Sketches: projects the gradients that reach a model's outputs, so that ranks can compare them.

sample     a few elements of an output
sketch     a random projection, and its norm, of the gradient that reaches an output. If an output
           is the same on all ranks, its sketch must be, too
"""

from __future__ import annotations

import struct
import weakref
from collections import deque

import torch

from ...core.grads.record import sample_of
from ...core.units.forms import is_common, local_of

MOST_OUTPUTS = 256  # between two steps


class Sketches:
    """The sketches of the last outputs that a backward reached. Used from the threads that run
    forward and backward."""

    def __init__(self) -> None:
        self._found: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=MOST_OUTPUTS)

    def watch(self, output: torch.Tensor) -> None:
        """Hooks ``output``, so that its gradient is sketched."""
        me, sample = weakref.ref(self), sample_of(local_of(output))

        def note(grad: torch.Tensor) -> None:
            if (alive := me()) is not None and is_common(grad):
                alive._found.append((sample, _sketch_of(local_of(grad))))

        output.register_hook(note)

    def take(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the samples of the outputs and the sketches of their gradients, and forgets
        them."""
        taken = list(self._found)
        self._found.clear()
        return [sample for sample, _ in taken], [sketch for _, sketch in taken]


def _sketch_of(grad: torch.Tensor) -> torch.Tensor:
    """Projects the rows of ``grad`` on signs, and these sums again. Returns [projection, norm of
    the sums] in fp32. Reads ``grad`` once."""
    with torch.no_grad():
        rows = grad.detach().reshape(-1, grad.size(-1) if grad.dim() else 1)
        sums = (rows @ _signs(rows.size(1), rows)).float()
        return torch.stack([sums @ _signs(sums.numel(), sums), sums.norm()])


def _signs(count: int, like: torch.Tensor) -> torch.Tensor:
    """Makes ``count`` signs, the same on every rank."""
    numbers = torch.arange(1, count + 1, device=like.device)
    return (1 - 2 * ((numbers * 2654435761 >> 15) & 1)).to(like.dtype)


def projected(tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Computes the projection of all elements of ``tensors`` on signs, and their norm."""
    if not tensors:
        return 0.0, 0.0
    flat = torch.cat([each.float() for each in tensors]).double().cpu()
    return float(flat @ _signs(flat.numel(), flat)), float(flat.norm())


def ordered(number: float) -> int:
    """Converts a float to an int64 that keeps its order; NaN counts as infinity."""
    bits = struct.unpack("<q", struct.pack("<d", number if number == number else float("inf")))[0]
    return bits if bits >= 0 else -(bits & 0x7FFF_FFFF_FFFF_FFFF)


def number_of_ordered(number: int) -> float:
    """Converts the int64 of :func:`ordered` back to its float."""
    magnitude = struct.unpack("<d", struct.pack("<q", abs(number)))[0]
    return magnitude if number >= 0 else -magnitude
