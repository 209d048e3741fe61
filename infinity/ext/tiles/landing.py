"""Landing: sends a gradient of a layer in tiles home, in ranges of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from ...core.grads.bank import GradientBank
from ...core.grads.record import SAMPLED, GradState, sample_of
from ...core.units.forms import is_common, local_of
from ...core.units.handle import ParamHandle


@contextmanager
def sampling(gradients: GradientBank, handle: ParamHandle, land: Callable) -> Iterator[Callable]:
    """Yields ``land`` of :func:`landing_rows`. Samples what lands, as :meth:`GradientBank.land`
    does, if other ranks must have the same: the sum of a few elements of each range of rows."""
    if not (gradients.takes_samples and is_common(handle.param)):
        yield land
        return
    samples: list[torch.Tensor] = []
    numel = local_of(handle.param).numel()
    count = -(-numel // max(1, numel // SAMPLED))  # as of a gradient that lands whole

    def sampled(begin: int, end: int, compute: Callable[[], torch.Tensor]) -> None:
        part = compute()
        few = sample_of(part)[:count]
        samples.append(F.pad(few, (0, count - few.numel())))
        land(begin, end, lambda: part)

    yield sampled
    if samples:
        handle.grad.take_sample(torch.stack(samples).sum(0))


@contextmanager
def landing_rows(gradients: GradientBank, handle: ParamHandle) -> Iterator[Callable]:
    """Lands a gradient in ranges of rows. Yields ``land(begin, end, compute)``, which adds the
    result of ``compute()`` to rows ``begin`` to ``end``, all of them if it is the first. Raises
    UsageError as :meth:`GradientBank.land` does."""
    record, assigned = handle.grad, gradients.assigned.lands_on(handle)
    gradients.reopen(handle)
    if record.state is GradState.TORN:
        yield lambda begin, end, compute: None
        return
    gradients.changes.begin(handle)
    first = record.state is GradState.ABSENT

    def land(begin: int, end: int, compute: Callable[[], torch.Tensor]) -> None:
        part = compute()
        if assigned is not None:
            assigned.change(lambda tensor: tensor[begin:end].add_(part))
            return
        with gradients.store.guard:
            at = begin * part.shape[1]
            gradients.lander.land_span(handle, at, part.reshape(-1), adds=not first)

    yield land
    record.move(GradState.LANDED)
