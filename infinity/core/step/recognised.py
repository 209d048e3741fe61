"""Recognised: the optimizers that were given to wrap_model, and the rules that they step by.

optimizer index   of an optimizer among those of one job; a flat param belongs to one of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...config import Config
from ...errors import ConfigError
from .known import NO_NAMES, Known, Names
from .rules import recognise


@dataclass(frozen=True, eq=False)
class Recognised:
    """One optimizer, and how it steps."""

    optimizer: torch.optim.Optimizer
    known: Known

    @property
    def moments(self) -> dict[str, str]:
        """torch's name of each moment -> the flat param's array for it."""
        return self.known.moments_of(self.optimizer.param_groups)


class Optimizers:
    """The optimizers of one job, with disjoint parameters. Empty: nothing is stepped.

    plain
        Those of the given ones without a parameter that the engine moves. They step by themselves.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        is_moved: Callable[[torch.Tensor], bool] = lambda param: True,
        names: Names = NO_NAMES,
    ):
        """``is_moved``: whether the engine moves a parameter. ``names``: those of the parameters
        before they are moved. Raises ConfigError for an optimizer whose step is not exactly a known
        one."""
        self._given, self._order = list(optimizers), {}
        self._all: list[Recognised] = []
        for optimizer in optimizers:
            moved = {
                param: (len(self._all), group_index)
                for group_index, group in enumerate(optimizer.param_groups)
                for param in group["params"]
                if is_moved(param)
            }
            if moved or not any(group["params"] for group in optimizer.param_groups):
                known = recognise(optimizer)
                known.check_shapes(optimizer.param_groups, is_moved, names)
                self._all.append(Recognised(optimizer, known))
            self._order |= moved

    @property
    def plain(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step by themselves."""
        moved = [recognised.optimizer for recognised in self._all]
        return [given for given in self._given if all(given is not other for other in moved)]

    def results(self, stepping: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Returns the replacement of each given optimizer: one of ``stepping``, or itself."""
        of_optimizer = {
            id(known.optimizer): result for known, result in zip(self._all, stepping, strict=True)
        }
        return [of_optimizer.get(id(given), given) for given in self._given]

    def __iter__(self) -> Iterator[Recognised]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def optimizer_index_of(self, param: torch.Tensor) -> int | None:
        """Returns which optimizer steps ``param``; None: none does."""
        return self._order[param][0] if param in self._order else None

    def order_of(self, param: torch.Tensor) -> tuple[int, int]:
        """Returns the indices of the optimizer and the group of ``param``, to sort by."""
        return self._order.get(param, (0, 0))

    def moments_of(self, param: torch.Tensor) -> dict[str, str]:
        """Returns the moments of ``param``, which is stepped, by the settings of its group: torch's
        name -> array."""
        optimizer_index, group_index = self._order[param]
        recognised = self._all[optimizer_index]
        return recognised.known.moments_of([recognised.optimizer.param_groups[group_index]])

    def arrays_of(self, param: torch.Tensor, config: Config) -> dict[str, torch.dtype]:
        """Returns the arrays of the moments of ``param``, which is stepped, and their dtype. Raises
        ConfigError as :meth:`Known.arrays_of` does."""
        optimizer_index, group_index = self._order[param]
        recognised = self._all[optimizer_index]
        group = recognised.optimizer.param_groups[group_index]
        dtype = config.param_dtype or param.dtype
        recognised.known.check_dtype(recognised.optimizer, group, dtype, config)
        return recognised.known.arrays_of(
            self.moments_of(param), config, recognised.known.dtype_at_wrap(param)
        )

    def of(self, param: torch.Tensor) -> Recognised | None:
        """Returns the optimizer that steps ``param``, or None."""
        optimizer_index = self.optimizer_index_of(param)
        return None if optimizer_index is None else self._all[optimizer_index]


def as_given(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    """Lists the optimizers of an argument that may be one, several or None."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def like_given(optimizers: Sequence[torch.optim.Optimizer], argument: Any) -> Any:
    """Returns ``optimizers`` in the form of the argument ``argument``: a list, one, or None."""
    if isinstance(argument, (list, tuple)):
        return list(optimizers)
    return optimizers[0] if optimizers else None


def check_together(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Names,
    config: Config,
) -> None:
    """Raises ConfigError for what several optimizers of one model do not allow. ``names``: of the
    parameters."""
    indices: dict[torch.Tensor, int] = {}
    for index, optimizer in enumerate(optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if indices.setdefault(param, index) != index:
                name = names.get(param, [f"of shape {tuple(param.shape)}"])[0]
                raise ConfigError(
                    f"parameter {name} is in the optimizers {indices[param]} and {index}"
                    " of the list: give each parameter to one of them"
                )
    check_count(len(optimizers), config)


def check_count(count: int, config: Config) -> None:
    """Raises ConfigError for options of ``config`` that ``count`` optimizers do not have."""
    if count > 1 and config.max_grad_norm:
        raise ConfigError(
            f"max_grad_norm with {count} optimizers: it is for a step of all parameters."
            " Clip in the loop: torch.nn.utils.clip_grad_norm_(model.parameters(), ...)"
        )
