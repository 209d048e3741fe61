"""accumulate: makes several micro-batches one pass, whose gradients land and are averaged once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..runtime.registry import engine_of
from ..state.operations import Operation


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Adds up the gradients of every backward inside the block on the device; they land, and are averaged over the ranks, when it ends.

    The sums are those of a plain loop over micro-batches. Without the block each backward sends its gradients home, and with several
    ranks reduces them; inside it units stay on the device between micro-batches, as far as the window reaches, and nobody meets for
    gradients. It takes device memory for the gradients of this rank, whole; where the budget has none, a single data rank sends them
    home with each backward all the same, and several raise CapacityError.

    Read, clip and step after the block. Every rank enters it, and runs as many backwards. Raises UsageError for a model that is not
    wrapped, for a block inside another, and from ``p.grad``, ``step`` and ``zero_grad`` inside it. Left by an exception, the gradients are
    half done: call ``optimizer.zero_grad()`` and run the micro-batches again.
    """
    engine = engine_of(model)
    engine.uses.check(Operation.ACCUMULATE)
    with engine.joined.opened():
        yield
