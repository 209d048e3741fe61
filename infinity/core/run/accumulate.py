"""accumulate: runs several micro-batches as one pass, with one reduction of their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .operations import Operation
from .registry import engine_of


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Adds up the gradients of every backward inside the block on the device. They go home,
    averaged over the ranks, when it ends.

    The sums are those of a plain loop over micro-batches. Without the block each backward sends its
    gradients home, and with several ranks reduces them. Inside it units stay on the device between
    micro-batches, as far as the window reaches, and ranks do not synchronise for gradients. The
    block takes device memory for this rank's whole gradients. If the budget has no room, a single
    data rank sends them home with each backward, and several ranks raise CapacityError.

    Read, clip and step after the block. Every rank enters it, and runs the same number of
    backwards. Raises UsageError for a model that is not wrapped, for a block inside another, and
    from ``p.grad``, ``step`` and ``zero_grad`` inside it. If an exception leaves the block, the
    gradients are incomplete: call ``optimizer.zero_grad()`` and run the micro-batches again.
    """
    engine = engine_of(model)
    engine.uses.check(Operation.ACCUMULATE)
    with engine.accumulation.opened():
        yield
