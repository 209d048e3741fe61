"""Lasting: keeps the Parameters of modules that make them anew, so that each has one home.

PEFT's LoRA of ``nn.MultiheadAttention`` takes two weights out of their modules in each forward,
puts merged tensors there, and then Parameters with what unmerging leaves. While the model is
wrapped, what a call leaves is copied to the Parameters of before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...core.seams import Change

KIND = "peft.tuners.lora.layer.MultiheadAttention"
CALLS = ("forward", "merge", "unmerge")  # the calls that make the weights anew
LISTINGS = "_restore_weights"  # makes them anew for each listing of modules


class Lasting(Change):
    """The modules of one model whose Parameters last while it is wrapped."""

    def __init__(self) -> None:
        self._layers: list[nn.Module] = []

    def prepare(self, model: nn.Module) -> None:
        """Has the modules keep their Parameters."""
        for layer in [each for each in model.modules() if _is_known(each)]:
            self._layers.append(layer)
            depth = [0]  # of the calls: a forward merges and unmerges
            for name in CALLS:
                layer.__dict__[name] = _keeping(weakref.ref(layer), name, depth)
            layer.__dict__[LISTINGS] = _nothing

    def undo(self) -> None:
        """Gives the modules their own calls back. Idempotent."""
        for layer in self._layers:
            for name in (*CALLS, LISTINGS):
                layer.__dict__.pop(name, None)
        self._layers.clear()

    release = undo


def _is_known(module: nn.Module) -> bool:
    return f"{type(module).__module__}.{type(module).__qualname__}" == KIND


def _nothing() -> None:
    pass


def _keeping(found: Callable[[], Any], name: str, depth: list[int]) -> Callable[..., Any]:
    """Makes a call of the layer that ``found`` returns: held, it would live as long as its call."""

    def keeping(*args: Any, **kwargs: Any) -> Any:
        layer = found()
        call = getattr(type(layer), name)
        if depth[0]:
            return call(layer, *args, **kwargs)
        with _kept(layer, depth):
            return call(layer, *args, **kwargs)

    return keeping


@contextmanager
def _kept(layer: Any, depth: list[int]) -> Iterator[None]:
    base = layer.get_base_layer()
    places = [(base, "in_proj_weight"), (base.out_proj.get_base_layer(), "weight")]
    before = [module._parameters for module, _ in places]
    for module, _ in places:
        module._parameters = dict(module._parameters)
    depth[0] += 1
    left: list[torch.Tensor | None] = [None] * len(places)  # a call that failed leaves nothing
    try:
        yield
        left = [getattr(module, name) for module, name in places]
    finally:
        depth[0] -= 1
        for (module, name), params, value in zip(places, before, left):
            module.__dict__.pop(name, None)
            module._parameters = params
            if value is not None and value is not params[name]:
                with torch.no_grad():
                    if not torch.equal(params[name], value):
                        params[name].copy_(value)
