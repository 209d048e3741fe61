"""ClassCosts: measures what a class step makes and keeps beside a parameter, for the plan."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS, COLUMNS = 60, 64  # of the measured matrix: large beside counts, and not alike
STEPS = 3
Run = Callable[[torch.nn.Parameter, Mapping[str, Any]], dict[str, Any]]


class ClassPiece(NamedTuple):
    """Memory of one class step. ``numel``: elements of a parameter per piece, at most.
    ``temporaries``: tensors of as many elements. ``rows``, ``columns``, ``elements``,
    ``of_vectors``: values that the class keeps in host memory for each row and column of a matrix,
    for each element of one, and of a vector."""

    numel: int
    temporaries: int = 3
    rows: int = 0
    columns: int = 0
    elements: float = 0.0
    of_vectors: float = 0.0

    def kept_nbytes(self, shape: Sequence[int]) -> int:
        """Counts the bytes, in fp32, that the class keeps for a parameter of ``shape``."""
        numel = math.prod(shape)
        if len(shape) < 2 or not numel:
            return 4 * math.ceil(self.of_vectors * numel)
        of_sums = self.rows * (numel // shape[-1]) + self.columns * (numel // shape[-2])
        return 4 * (of_sums + math.ceil(self.elements * numel))


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside it, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._live, self.nbytes, self._known = 0, 0, weakref.WeakSet[Any]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._known.add(value.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage not in self._known:
                    self._known.add(storage)
                    self._count(storage.nbytes())
                    weakref.finalize(storage, self._count, -storage.nbytes())
        return result

    def _count(self, nbytes: int) -> None:
        self._live += nbytes
        self.nbytes = max(self.nbytes, self._live)


def costs_of(
    run: Run, moments: Sequence[str], where: torch.device, piece: ClassPiece
) -> ClassPiece:
    """Returns ``piece`` with what ``run``, a class step, makes and keeps: of a matrix and, if it
    takes one, of a vector on ``where``. ``moments``: the values that have arrays at home."""
    shape, numel = (ROWS, COLUMNS), ROWS * COLUMNS
    nbytes, state = _steps(run, shape, where)
    own = _kept(state, moments)
    sums = [value for value in own if _is_sum(value)]
    try:
        _, of_vector = _steps(run, (COLUMNS,), where)
    except Exception:  # noqa: BLE001 - it takes matrices only
        of_vector = {}
    return piece._replace(
        temporaries=math.ceil(nbytes / (4 * numel) - 1 / 8),  # less the sums
        rows=sum(ROWS in value.shape for value in sums),
        columns=sum(COLUMNS in value.shape for value in sums),
        elements=sum(value.numel() for value in own if not _is_sum(value)) / numel,
        of_vectors=sum(value.numel() for value in _kept(of_vector, moments)) / COLUMNS,
    )


def _is_sum(value: torch.Tensor) -> bool:
    return value.numel() in (ROWS, COLUMNS)


def _kept(state: Mapping[str, Any], moments: Sequence[str]) -> list[torch.Tensor]:
    """Lists the values, but for counts, that have no array at home."""
    return [
        value
        for name, value in state.items()
        if name not in moments and isinstance(value, torch.Tensor) and value.numel() > 1
    ]


def _steps(run: Run, shape: tuple[int, ...], where: torch.device) -> tuple[int, dict[str, Any]]:
    """Steps a parameter of ``shape``. Returns the most bytes that a step has made, after the first,
    which makes the state."""
    values = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float32, device=where)
    param, state, most = torch.nn.Parameter(values.view(shape)), {}, 0
    for number in range(STEPS):
        param.grad = torch.cos(values * (number + 40)).view(shape)
        with Peak() as peak:
            state = run(param, state)
        most = max(most, peak.nbytes) if number else 0
    return most, state
