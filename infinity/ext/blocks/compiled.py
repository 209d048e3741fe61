"""Compiled blocks: compiles each repeated block of a model by itself, until the model is unwrapped.

Blocks of one class share a graph, as with torch's own regional compilation. What the engine moves
between blocks stays outside of the graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError


def check_options(options: Any) -> None:
    """Raises ConfigError if torch.compile refuses ``options``."""
    try:
        torch.compile(lambda: None, **(options if isinstance(options, Mapping) else {}))
    except Exception as error:
        raise ConfigError(f"compile={options!r}: torch.compile refuses it: {error}") from error


class CompiledBlock:
    """Compiles ``block`` in place until :meth:`remove`. One that is compiled already stays so."""

    def __init__(self, block: nn.Module, options: Mapping[str, Any]):
        self._block, self._compiled = weakref.ref(block), None
        if block._compiled_call_impl is None:
            block.compile(**options)
            self._compiled = block._compiled_call_impl

    def remove(self) -> None:
        """Makes the block eager again, if it is still compiled as here. Idempotent."""
        block = self._block()
        if block is not None and block._compiled_call_impl is self._compiled:
            block._compiled_call_impl = None
