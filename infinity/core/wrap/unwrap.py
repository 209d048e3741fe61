"""unwrap_model: restores plain torch objects, with the values that are at home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ... import native
from ...torch_private import clear_python_key
from ..grads.at_home import AtHome
from ..run.operations import Operation
from ..run.registry import RECORD, Wrapped, wrapped
from ..step.optimizer import InfinityOptimizer
from ..step.recognised import as_given, like_given
from ..units.forms import form_of, local_of, plain_class
from ..units.handle import HANDLE
from ..units.unit import flat_params_of
from .parts import parts_of


@torch.no_grad()
def unwrap_model(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> tuple[nn.Module | list[nn.Module], Any]:
    """Returns plain torch objects: parameters with their bytes on their original device, in the
    dtypes of the wrap, and the wrapped optimizer (or the list of them) with its state. Closes and
    removes the homes. Without ``optimizer`` uses the one that was wrapped with the model, while it
    is alive. Every rank calls this.

    Raises UsageError when ``model`` is not wrapped, or has its average for weights, or
    ``optimizer`` is not the one that wrap_model returned with it. If an exception interrupts it,
    call it again.
    """
    given = as_given(optimizer)
    roots = list(model) if isinstance(model, (list, tuple)) else [model]
    if (
        (ours := [each for each in given if isinstance(each, InfinityOptimizer)])
        and all(each.is_unwrapped for each in ours)
        and not any(RECORD in root.__dict__ for root in roots)
    ):
        # The unwrap completed although an exception interrupted the call.
        return _as_given(model), like_given(
            [getattr(each, "wrapped", each) for each in given], optimizer
        )
    record = wrapped(model)
    job = record.engine.job
    managed = record.take_optimizers(given)[0] if given else record.optimizers
    form = record.optimizer if optimizer is None else optimizer
    plain = like_given([getattr(each, "wrapped", each) for each in given or managed], form)
    if (change := record.unwrapping) is None:
        with job.uses.operation(Operation.UNWRAP):
            change = _plan_unwrap(record, managed)
        native.insist(partial(_begin, record, change))
    try:
        native.insist(change)
    except BaseException:
        for each in managed:
            each.is_unwrapped = True
        raise
    record.unwrapping = None  # the change refers to the record, and so keeps the engine alive
    return _as_given(model), plain


def _begin(record: Wrapped, change: Callable[[], None]) -> None:
    """Refuses everything but ``change``, which the next call finds. Both, or nothing would end the
    refusal."""
    record.engine.uses.refuse_all(
        "unwrap_model was cut short by an exception: call it again, with the same model"
    )
    record.unwrapping = change


def _as_given(model: nn.Module | Sequence[nn.Module]) -> nn.Module | list[nn.Module]:
    """Returns the model, or its parts as a list, as wrap_model did."""
    return model if isinstance(model, nn.Module) else list(model)


def _plan_unwrap(record: Wrapped, managed: Sequence[InfinityOptimizer]) -> Callable[[], None]:
    """Reads all values and state into memory. Returns the function that makes the model and its
    optimizers plain. Nothing changes before that is called. It is idempotent: call it until it
    completes."""
    engine, model = record.engine, record.model
    engine.finish_background()
    engine.wait_idle()
    books = [
        (each.plain, each.plain_state_dict(), each.state_outside_groups(), each.own_attributes)
        for each in managed
    ]
    values: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for flat_param in flat_params_of(engine.job.units):
        with flat_param.assembling_values(engine.job.store):
            read = [
                flat_param.read_value(engine.job.store, index)
                for index in range(len(flat_param.params))
            ]
        for param, value in zip(flat_param.params, read):
            grad, place = param.grad, record.came_from[param]
            if grad is not None and isinstance(local_of(grad), AtHome):
                grad = grad.clone()  # an assigned tensor stays the gradient
            values[param] = (
                value.to(place),
                None if grad is None else grad.to(place, flat_param.spec.wrapped_dtype),
            )
    engine.job.prefetcher.release_all(engine.job.units)

    def change() -> None:
        # Reversed: a forward may have been replaced twice.
        for remover in reversed(record.removers):
            remover.remove()
        for param, (value, grad) in values.items():
            clear_python_key(param)
            param.__class__ = plain_class(param)
            param.__dict__.pop(HANDLE, None)
            form_of(param).show(param, value)
            param.grad = grad
        record.release()
        record.take_views()
        for given, state, outside, attributes in books:
            given.take_back(state, outside, attributes)
        engine.shut_down()
        for module in (*parts_of(model), model):
            module.__dict__.pop(RECORD, None)
        engine.uses.go_on()

    return change
