"""Group: tensors that are converted together. Their values are in memory from the first read of a
result until the last."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .source import Source


class Group:
    """The ``given`` tensors, and the results of ``convert``: ``made``, in its order."""

    def __init__(
        self,
        convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
        given: dict[str, Source] | None = None,
        made: list[str] | None = None,
    ):
        self._convert = convert
        self.given, self.made = given or {}, made or []
        self._ready: dict[str, torch.Tensor] = {}

    def take_in(self, other: Group) -> None:
        """Merges another group into this one: their tensors are converted together."""
        self.given |= other.given
        self.made += other.made

    def read(self, name: str) -> torch.Tensor:
        """Returns the result ``name``, and drops it: a second read of it converts the whole group
        again."""
        if name not in self._ready:
            made = self._convert({origin: source.read() for origin, source in self.given.items()})
            # Some renamings depend on tensors outside of the group: then go by the order.
            self._ready = (
                made
                if made.keys() == set(self.made)
                else dict(zip(self.made, made.values(), strict=True))
            )
        return self._ready.pop(name)


def empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor without bytes, to learn the results of a conversion."""
    return torch.empty(shape, dtype=dtype, device="meta")
