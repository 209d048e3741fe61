"""Inner tensors: those of a tensor subclass, by torch's own protocol (``__tensor_flatten__``). A
subclass that has a form is its local part, and has none here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .forms import is_plain
from .handle import handle_of


def has_inner(tensor: Any) -> bool:
    """Tells whether ``tensor`` is a subclass with inner tensors, as packed weights are."""
    return hasattr(tensor, "__tensor_flatten__") and is_plain(tensor)


def inner_places(name: str, tensor: Any) -> Iterator[tuple[str, Any, str]]:
    """Yields the name below ``name``, the holder and the attribute of each inner tensor, and of
    those of inner subclasses."""
    for key in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, key)
        if has_inner(inner):
            yield from inner_places(f"{name}.{key}", inner)
        else:
            yield f"{name}.{key}", tensor, key


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Lists the inner tensors of a subclass, and those of inner subclasses."""
    return [getattr(holder, key) for _, holder, key in inner_places("", tensor)]


def nbytes_of(tensor: torch.Tensor) -> int:
    """Counts the bytes of a tensor, for a subclass those of its inner tensors."""
    if has_inner(tensor):
        return sum(map(nbytes_of, inner_tensors(tensor)))
    return tensor.nbytes if tensor.layout is torch.strided else 0


def rebuilt(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Makes a subclass again, of its inner tensors as ``change`` returns them."""
    names, context = value.__tensor_flatten__()
    inner = {name: change(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def filled(value: Any) -> Any:
    """Returns a value of a state dict with the bytes of the tensors at rest in it."""
    if not isinstance(value, torch.Tensor):
        return value
    if (handle := handle_of(value)) is not None:
        return handle.engine.read_value(handle)
    return rebuilt(value, filled) if has_inner(value) else value
