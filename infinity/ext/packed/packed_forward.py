"""Packed forward: keeps no dense copy of a packed weight for the backward.

A library may unpack a weight and multiply by it. Autograd then keeps the dense weight until the
backward, in each layer: more than the packed model has. Such a tensor follows from the packed
weight alone, so the backward makes it again, by a forward of one row.

probe    a forward of one row, of which everything that autograd saves is noted
dense    a saved tensor with as many elements as the weight has rows times columns; or a part of
         what a coded weight was unpacked to
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...core.machine.sizes import format_nbytes
from ...core.run.replaced_forward import ReplacedForward, own_forward
from ...core.run.saved_tensor import SavedTensor
from ...core.run.saved_weights import is_checkpoint
from ...core.run.scoped_call import UNCOMPILED
from ...core.seams import Events, Extension
from ...core.units.added import ADDED
from ...core.units.inner import has_inner
from ...core.wrap.described_model import DescribedModel
from ...torch_private import top_hooks
from ..coded.coded import Coded, Unpacked, noting_unpacked
from .packed import is_code

logger = logging.getLogger(__name__)

_told: set[str] = set()  # classes of layers whose dense copies were told


class PackedForward:
    """The forward of a layer with a packed weight."""

    def __init__(self, layer: nn.Module, dense_numel: int):
        self._own, self._kind = own_forward(layer), type(layer).__name__
        self._dense_numel = dense_numel
        # Kind of input -> shapes of what two probes save; None: differs between them
        self._known: dict[tuple, list[torch.Size | None]] = {}

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        outer, counted = _hooks_around()
        if args or kwargs or counted or not (torch.is_grad_enabled() and x.requires_grad):
            return self._own(x, *args, **kwargs)
        kind = x.dtype, x.device, _autocast_of(x.device), x.shape[-1]
        if kind not in self._known:
            self._known[kind] = self._learn(kind)
        with torch.autograd.graph.saved_tensors_hooks(*self._hooks(kind, outer)):
            return self._own(x)

    def _hooks(self, kind: tuple, outer: tuple | None) -> tuple[Callable, Callable]:
        shapes, numbers, count = self._known[kind], itertools.count(), _count_of(outer)

        def pack(tensor: torch.Tensor) -> Any:
            number = next(numbers)
            if self._is_dense(tensor):
                if number < len(shapes) and shapes[number] == tensor.shape:
                    count(tensor)
                    return Again(self, number, kind)
                _tell(self._kind, tensor)
            return outer[0](tensor) if outer else SavedTensor.of(tensor)

        return pack, partial(_unpack, outer)

    def probe(
        self,
        dtype: torch.dtype,
        device: torch.device,
        autocast: torch.dtype | None,
        width: int,
        value: float,
    ) -> list[torch.Tensor]:
        """Returns what a forward of one row of ``width`` times ``value`` saves. ``autocast``: the
        dtype of it, if it is on."""
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            return saved[-1]

        row = torch.full((1, width), value, dtype=dtype, device=device, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        casting = torch.autocast(device.type, autocast, enabled=autocast is not None)
        with torch.enable_grad(), hooks, casting:
            self._own(row)
        return saved

    def _learn(self, kind: tuple) -> list[torch.Size | None]:
        zeros, ones = (self.probe(*kind, value) for value in (0.0, 1.0))
        return [
            a.shape if self._is_dense(a) and a.shape == b.shape and torch.equal(a, b) else None
            for a, b in zip(zeros, ones)
        ]

    def _is_dense(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.numel() == self._dense_numel
            and tensor.is_floating_point()
            and not has_inner(tensor)
            and not is_code(tensor)
        )


def _tell(kind: str, dense: torch.Tensor) -> None:
    """Warns once of the class ``kind`` of layers, which keeps ``dense`` for the backward."""
    if kind not in _told:
        _told.add(kind)
        logger.warning(
            "%s keeps a dense copy of its packed weight for the backward, %s a layer beside the"
            " plan: recompute its blocks (gradient checkpointing)",
            kind,
            format_nbytes(dense.nbytes),
        )


class Again:
    """A dense tensor that the backward makes again."""

    def __init__(self, forward: PackedForward, number: int, kind: tuple):
        self._forward, self._number, self._kind = forward, number, kind

    def tensor(self) -> torch.Tensor:
        """Makes the tensor."""
        return self._forward.probe(*self._kind, 0.0)[self._number]


class CodedForward:
    """The forward of a module of coded weights, such as experts."""

    def __init__(self, module: nn.Module):
        self._own, self._kind = own_forward(module), type(module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, counted = _hooks_around()
        if counted or not torch.is_grad_enabled():
            return self._own(*args, **kwargs)
        count = _count_of(outer)
        with noting_unpacked() as made:

            def pack(tensor: torch.Tensor) -> Any:
                code = made.get(tensor.untyped_storage()._cdata)
                if code is not None and not code.storage.expired():
                    count(tensor)
                    return CodedAgain(code, tensor)
                if any(tensor.shape == each.shape for each in made.values()):
                    _tell(self._kind, tensor)
                return outer[0](tensor) if outer else SavedTensor.of(tensor)

            with torch.autograd.graph.saved_tensors_hooks(pack, partial(_unpack, outer)):
                return self._own(*args, **kwargs)


class CodedAgain:
    """A view of a dense tensor that the backward unpacks again."""

    def __init__(self, made: Unpacked, view: torch.Tensor):
        self._weight, self._some, self._rows = made.weight, made.some, made.rows
        self._form = view.size(), view.stride(), view.storage_offset()

    def tensor(self) -> torch.Tensor:
        """Makes the tensor."""
        return self._weight.unpacked(self._some, self._rows).as_strided(*self._form)


def _hooks_around() -> tuple[tuple | None, bool]:
    """Returns the hooks for saved tensors, and whether these are a checkpoint's, which keeps
    nothing and counts what is saved."""
    outer = top_hooks(True)
    counted = is_checkpoint(outer) or (outer and getattr(outer[0], "is_counted", False))
    return outer, bool(counted) and not hasattr(outer[0], "count")


def _count_of(outer: tuple | None) -> Callable[[torch.Tensor], Any]:
    """Returns what counts a saved tensor for a checkpoint outside of ``outer``, which keeps it."""
    return getattr(outer[0], "count", lambda tensor: None) if outer else lambda tensor: None


def _autocast_of(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of autocast on ``device``; None if it is off."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _unpack(outer: tuple | None, held: Any) -> torch.Tensor:
    if isinstance(held, (Again, CodedAgain)):
        return held.tensor()
    return outer[1](held) if outer else held.tensor()


class PackedForwards(Extension):
    """The forwards and loads of one model's modules with packed weights."""

    may_stand_aside = True

    @classmethod
    def begin(cls, config: Any, device: Any, collectives: Any, events: Events) -> PackedForwards:
        return cls()

    def replace_forwards(
        self, job: Any, model: DescribedModel, find: Any, blocks: Any
    ) -> list[ReplacedForward]:
        modules = dict.fromkeys(each for part in model.parts for each in part.modules())
        forwards = ((module, _forward_of(module)) for module in modules)
        return [ReplacedForward(module, made) for module, made in forwards if made is not None]


def _forward_of(module: nn.Module) -> Callable | None:
    params = [param for param in module._parameters.values() if param is not None]
    if ADDED not in module.__dict__ and not any(map(_has_codes, params)):
        return None
    is_coded = any(isinstance(param, Coded) for param in params)
    sizes = [getattr(module, name, None) for name in ("out_features", "in_features")]
    inner = [param for param in params if has_inner(param)]
    if all(isinstance(size, int) for size in sizes):
        made: Callable = PackedForward(module, math.prod(map(int, sizes)))  # type: ignore[arg-type]
    elif not is_coded and [param.dim() for param in inner] == [2]:
        made = PackedForward(module, inner[0].numel())
    elif is_coded:
        made = CodedForward(module)
    else:
        return None
    return torch.compiler.disable(made, reason=UNCOMPILED) if is_coded else made


def _has_codes(param: nn.Parameter) -> bool:
    return not param.requires_grad and is_code(param)
