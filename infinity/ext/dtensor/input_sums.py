"""Input sums: one all-reduce for the gradient of an input that several column layers share.

partial   of a gradient: this rank's part of the sum over the ranks, by its own columns or heads
shared    of an input: the one DTensor with which all column layers of a module compute. Their
          gradients are added up on each rank before they are summed over the ranks (the f of
          Megatron-LM, Shoeybi et al., 2019, section 3)
norm      a module beside the column layers that is whole on every rank and normalizes the heads
          there (Qwen3's q_norm and k_norm): gradients of its parameters are partial as well
way       of a parameter: a tensor without memory, whose gradient becomes the parameter's once it
          is summed. It exists before the parameter is used, which may be at home until then
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ...errors import InternalError


def share_inputs(
    model: nn.Module, mesh: DeviceMesh, columns: Iterable[str], norms: Iterable[str] = ()
) -> None:
    """Makes the column layers of each module of ``model`` share their inputs over ``mesh``, and
    sums the gradients of the ``norms`` beside them with those of the inputs. ``columns`` and
    ``norms`` are names of modules."""
    shared: dict[str, _SharedInput] = {}
    for names, add in ((columns, _SharedInput.add_column), (norms, _SharedInput.add_norm)):
        for name in names:
            parent = name.rpartition(".")[0]
            if parent not in shared:
                shared[parent] = _SharedInput(mesh, model.get_submodule(parent))
            add(shared[parent], model.get_submodule(name))


def sum_gradients(mesh: DeviceMesh, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns ``tensors`` with the same values. Their gradients are summed over ``mesh``, by one
    all-reduce for all that have one dtype."""
    return _Summed.apply(mesh, len(tensors), *tensors)


class _SharedInput:
    """The input of a module's column layers, from the first one's forward to the end of the
    module's."""

    def __init__(self, mesh: DeviceMesh, module: nn.Module):
        self._mesh = mesh
        self._norms: list[nn.Module] = []
        self._given: tuple[torch.Tensor, int] | None = None  # the input, and its version
        self._shared: torch.Tensor | None = None
        self._ways: dict[tuple[nn.Module, str], torch.Tensor] = {}
        # Also after an exception, by which torch's checkpoint ends a recomputation early.
        module.register_forward_hook(self._forget, always_call=True)

    def add_column(self, layer: nn.Module) -> None:
        """Gives a column layer the shared input."""
        layer.register_forward_pre_hook(self._give)

    def add_norm(self, norm: nn.Module) -> None:
        """Sums the gradients of a norm's parameters together with the input's."""
        self._norms.append(norm)
        norm.register_forward_pre_hook(self._show)
        norm.register_forward_hook(_hide, always_call=True)

    def _give(self, _: nn.Module, args: tuple) -> tuple | None:
        if not args or not torch.is_grad_enabled():
            return None
        tensor = args[0]
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            return None
        known = self._given
        if known is None or known[0] is not tensor or known[1] != tensor._version:
            (whole,) = self._sum((tensor,), self._norms)
            self._shared, self._given = _Shared.apply(whole, self._mesh), (tensor, tensor._version)
        return self._shared, *args[1:]

    def _sum(self, values: tuple, norms: Iterable[nn.Module]) -> tuple[torch.Tensor, ...]:
        """Begins a sum of the gradients of ``values``, which it returns, and of the ``norms``."""
        params = {(norm, key): param for norm in norms for key, param in _trained(norm)}
        sums = _Summed.apply(self._mesh, len(values), *values, *params.values())
        self._ways.update(zip(params, sums[len(values) :]))
        return sums[: len(values)]

    def _show(self, norm: nn.Module, _: Any) -> None:
        """Lets a norm's forward compute with its parameters by their ways."""
        if not torch.is_grad_enabled():
            return
        if any((norm, key) not in self._ways for key, _ in _trained(norm)):
            self._sum((), (norm,))  # before any column layer
        for key, param in _trained(norm):
            # An attribute of the module is found before its parameter.
            norm.__dict__[key] = _Used.apply(param.detach(), self._ways[norm, key])

    def _forget(self, *_: Any) -> None:
        self._given = self._shared = None
        self._ways.clear()


def _trained(norm: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [each for each in norm.named_parameters(recurse=False) if each[1].requires_grad]


def _hide(norm: nn.Module, *_: Any) -> None:
    """Ends what :meth:`_SharedInput._show` began."""
    for key in norm._parameters:
        norm.__dict__.pop(key, None)


class _Summed(torch.autograd.Function):
    """Passes the first ``count`` of its tensors on, and makes ways of the others. Sums their
    partial gradients over the ranks, by one all-reduce for all of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, mesh: DeviceMesh, count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.mesh = mesh
        ctx.set_materialize_grads(False)
        ways = (
            torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)
            for param in tensors[count:]
        )
        return *(tensor.view_as(tensor) for tensor in tensors[:count]), *ways

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        summed_grads = list(grads)
        placed = [(place, grad) for place, grad in enumerate(grads) if grad is not None]
        for dtype in dict.fromkeys(grad.dtype for _, grad in placed):
            same = [(place, grad) for place, grad in placed if grad.dtype == dtype]
            flat = [grad.reshape(-1) for _, grad in same]
            parts = torch.cat(flat) if len(flat) > 1 else flat[0]
            whole = (
                DTensor.from_local(parts, ctx.mesh, [Partial()], run_check=False)
                .redistribute(placements=[Replicate()])
                .to_local()
            )
            for (place, grad), summed in zip(same, whole.split([g.numel() for g in flat])):
                summed_grads[place] = summed.view(grad.shape)
        return None, None, *summed_grads


class _Shared(torch.autograd.Function):
    """Makes a whole DTensor, whose gradient stays partial: its sum over the ranks comes later."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return DTensor.from_local(whole.view_as(whole), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None]:
        if grad is None:
            return None, None
        if not all(isinstance(placement, Partial) for placement in grad.placements):
            raise InternalError(f"the gradient of a column layer's input is {grad.placements}")
        return grad.to_local(), None


class _Used(torch.autograd.Function):
    """A parameter's value, whose gradient takes the parameter's way."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad
