"""named_weights: yields a wrapped model's weights one after the other, for histograms and norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..run.registry import engine_of
from ..units.forms import like


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and a copy of every weight of a wrapped ``model``, on the CPU, in the dtype
    of the wrapped parameter, read from the master if that is wider. One weight is in memory at a
    time; a tied weight is yielded once.

    For loggers:
    ``for name, value in infinity.named_weights(model): writer.add_histogram(name, value, step)``.
    Every rank iterates to the end. Raises UsageError if the model is not wrapped.
    """
    job = engine_of(model).job
    for unit in job.units:
        for handle in unit.handles:
            with job.uses.begin(), torch.no_grad():
                job.lents.settle()
                value = like(handle.param, handle.flat_param.read_value(job.store, handle.index))
            yield handle.name.removeprefix(job.prefix), value
