"""Added tensors: frozen tensors of modules that the engine moves, though they are not parameters.

An extension adds them to a module, and marks them: a part of a packed weight in a buffer, for
instance. They always rest, as do parameters that it marks: views of them, which modules keep for
the backward, would hold the device's memory. So views of them leave at rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

ADDED = "_infinity_added"  # attribute of a module: its added tensors by their names
RESTS = "_infinity_rests"  # attribute of a tensor that always rests


def always_rests(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` is at rest even while its bytes are on the device."""
    return RESTS in tensor.__dict__


def own_tensors(module: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters and added tensors of ``module`` itself."""
    return [*module.parameters(recurse=False), *module.__dict__.get(ADDED, {}).values()]


def tensors_of(module: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters and added tensors of ``module`` and its children, each once."""
    return list(
        dict.fromkeys(tensor for inner in module.modules() for tensor in own_tensors(inner))
    )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters and added tensors of ``module`` and its children under all their
    names."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, added in inner.__dict__.get(ADDED, {}).items():
            yield f"{path}.{name}" if path else name, added
