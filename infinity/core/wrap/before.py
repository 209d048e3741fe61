"""Before: records a model and its optimizer before a wrap, and restores them if it fails."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...torch_private import clear_python_key
from ..seams import FirstValues
from ..units.forms import form_of, local_of
from ..units.inner import has_inner
from .described_model import DescribedModel, unlisted_in


class Before:
    """Model and optimizer before a wrap. Each change is known before it is made, so :meth:`restore`
    may be called at any time, and more than once. Holds references to values, not copies."""

    HOOKS = (
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_state_dict_hooks",
        "_load_state_dict_pre_hooks",
    )

    def __init__(self, model: DescribedModel, optimizers: Sequence[torch.optim.Optimizer]):
        self.values: list[FirstValues] = []  # undone by restore(), too
        self._modules = [
            (
                module,
                _attributes_of(module),
                {
                    name: type(hooks)(hooks)
                    for name in self.HOOKS
                    if (hooks := getattr(module, name, None))
                },
            )
            for module in model.modules
        ]
        self._params = [_ParamBefore(param) for param in model.names]
        self._buffers = [(buffer, buffer.data) for buffer in model.buffers.values()]
        self._small = [(place, place.tensor) for _, place in model.unlisted]
        self._optimizers = [
            (optimizer, dict(optimizer.__dict__), dict(optimizer.state)) for optimizer in optimizers
        ]

    def restore(self) -> None:
        for module, attributes, hooks_of in self._modules:
            for name in _attributes_of(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name in self.HOOKS:
                if (hooks := getattr(module, name, None)) is not None:
                    hooks.clear()
                    hooks.update(hooks_of.get(name, {}))
        for param in self._params:
            param.restore()
        for values in self.values:
            values.undo()
        for buffer, data in self._buffers:
            if buffer.device != data.device:
                buffer.data = data
        for place, tensor in self._small:
            if place.tensor is not tensor:
                place.replace(tensor)
        for optimizer, attributes, state in self._optimizers:
            for name in optimizer.__dict__.keys() - attributes.keys():
                del optimizer.__dict__[name]
            optimizer.__dict__.update(attributes)
            optimizer.state.update(state)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own attributes, except weak references to its weights: while one exists,
    torch does not let their contents be swapped."""
    return {name: value for name, value in module.__dict__.items() if name != "_flat_weight_refs"}


class _ParamBefore:
    """One parameter before the wrap."""

    def __init__(self, param: torch.Tensor):
        self._param, self._class, self._data, self._grad = (
            param,
            param.__class__,
            local_of(param).data,
            param.grad,
        )
        self._wanted = param.requires_grad
        self._has_data = (
            param.layout is torch.strided and not param.is_meta and not _is_frozen_subclass(param)
        )
        self._attributes, self._hooks = dict(param.__dict__), param._post_accumulate_grad_hooks

    def restore(self) -> None:
        param = self._param
        if param.__class__ is not self._class:
            clear_python_key(param)
            param.__class__ = self._class
        if param.__dict__.keys() != self._attributes.keys():
            for name in param.__dict__.keys() - self._attributes.keys():
                del param.__dict__[name]
        if param._post_accumulate_grad_hooks is not self._hooks:
            param._post_accumulate_grad_hooks = self._hooks
        there = local_of(param)
        if (
            self._has_data
            and not param.is_meta
            and there.untyped_storage()._cdata != self._data.untyped_storage()._cdata
        ):
            form_of(param).show(param, self._data)
        if param.grad is not self._grad:
            param.grad = self._grad
        param.requires_grad_(self._wanted)


class MovedRest:
    """Moves buffers, unmanaged parameters and small parts of packed weights to the device that
    computes; :meth:`remove` moves them back."""

    def __init__(self, model: DescribedModel, where: torch.device):
        self._model = weakref.ref(model.module)  # which keeps what removes this
        self._from: dict[torch.Tensor, torch.device] = {}
        self._small: dict[str, torch.device] = {}
        rest = [p for p in model.unmanaged.values() if not _is_frozen_subclass(p)]
        for tensor in (*model.buffers.values(), *rest):
            if not tensor.is_meta and tensor.device != where:
                self._from[tensor] = tensor.device
                tensor.data = tensor.data.to(where)
        for name, place in model.unlisted:
            if not place.tensor.is_meta and place.tensor.device != where:
                self._small[name] = place.tensor.device
                place.replace(place.tensor.to(where))

    def remove(self) -> None:
        """Moves the tensors back to their devices. Idempotent."""
        for tensor, where in self._from.items():
            tensor.data = tensor.data.to(where)
        if self._small and (model := self._model()) is not None:
            for name, place in unlisted_in(model):
                if name in self._small:
                    place.replace(place.tensor.to(self._small[name]))


def _is_frozen_subclass(param: torch.Tensor) -> bool:
    """Tells whether ``param`` is a packed weight whose inner tensors are moved one by one."""
    return has_inner(param) and not param.requires_grad
