"""Work: what a part of a model computes, operation by operation, and the seconds of it on a device.

product   a matrix product, by its sizes: [m, k] x [k, n], so many at once. A size of TOKENS stands
          for the tokens of a micro-batch, or for those of a sample where a product has two
touched   bytes that all other operations read and write, each by a kernel of its own
scored    the same of tensors with a row and a column for each token: the scores of attention, if
          no fused kernel keeps them

The rate of a product is that of large ones, less for two reasons: it has too few outputs to fill
the device, and it writes each output after few operations. Products of H100 that are published
(OpenXLA's table of measured ones) are met within 11 % from 8e9 operations on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = 61  # of a trial: no model has this width
FILLING = 1 << 20  # outputs of which half of a device is busy
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # operation -> its first factor


def product_seconds(
    count: float, m: float, n: float, k: float, *, flops: float, bandwidth: float
) -> float:
    """Computes the seconds of ``count`` products at once. ``flops``: operations per second of large
    ones; ``bandwidth``: bytes per second of the device's memory."""
    outputs = count * m * n
    if not outputs * k:
        return 0.0
    filled, deep = outputs / (outputs + FILLING), k / (k + flops / bandwidth)
    return 2 * outputs * k / (flops * filled * deep)


def sizes_of_product(operation: Any, args: tuple) -> tuple[int, int, int, int] | None:
    """Returns the sizes of a matrix product, as (count, m, n, k); None for another operation."""
    name = operation._schema.name.rpartition("::")[2]
    if operation.namespace != "aten" or name not in PRODUCTS:
        return None
    a, b = args[PRODUCTS[name] :][:2]
    return a.shape[0] if a.dim() == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1]


def has_sizes(machine: Any) -> bool:
    """Tells whether ``machine`` has the rates of products and of memory, by which all plans compute
    by the sizes of a model's products; else they have one rate for all operations."""
    return bool(machine.product_flops and machine.device_bandwidth)


def rate_of(machine: Any, *, is_counted: bool = True) -> str:
    """Tells by what rates compute is planned. ``is_counted``: the model's operations are."""
    if is_counted and has_sizes(machine):
        return (
            f"devices reach {machine.product_flops / 1e12:.3g} TFLOP/s in large products and less"
            " in small ones, by their sizes; all other operations move their bytes at"
            f" {machine.device_bandwidth / 1e12:.3g} TB/s, each by a kernel of its own"
        )
    return (
        f"devices reach {machine.device_flops / 1e12:.3g} TFLOP/s, with any number of parts and"
        " samples"
    )


@dataclass(frozen=True)
class Work:
    """Operations of a part of a model: how often each product is computed, as (count, m, n, k), the
    bytes touched a token, those scored a pair of tokens, and those ``added`` a micro-batch: its
    gradients, to the sum of the earlier ones."""

    products: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    touched: float = 0.0
    scored: float = 0.0
    added: float = 0.0

    def plus(self, other: Work, times: int = 1) -> Work:
        """Adds ``other``, ``times`` over."""
        products = Counter(self.products)
        for sizes, count in other.products.items():
            products[sizes] += times * count
        scored = self.scored + times * other.scored
        touched, added = (
            getattr(self, name) + times * getattr(other, name) for name in ("touched", "added")
        )
        return Work(products, touched, scored, added)

    def seconds(self, samples: int, length: int, machine: Any) -> float:
        """Computes the seconds for a micro-batch of ``samples`` with ``length`` tokens each, on a
        device of a machine that has the rates (:func:`has_sizes`)."""
        bandwidth = machine.device_bandwidth
        rates = {"flops": machine.product_flops, "bandwidth": bandwidth}
        touched = (self.touched + self.scored * length) * samples * length
        seconds = (touched + self.added) / bandwidth
        for (count, *sizes), times in self.products.items():
            of_samples = sizes.count(TOKENS) > 1
            tokens = length if of_samples else samples * length
            m, n, k = (tokens if size == TOKENS else size for size in sizes)
            seconds += times * product_seconds(
                count * (samples if of_samples else 1), m, n, k, **rates
            )
        return seconds


class CountingWork(TorchDispatchMode):
    """Counts the work inside the block, of one sample of TOKENS tokens. ``scores``: attention is
    computed by operations of their own."""

    def __init__(self, *, scores: bool = False) -> None:
        super().__init__()
        self._scores = scores
        self.products: Counter[tuple[int, int, int, int]] = Counter()
        self._nbytes = [0, 0]  # of tensors with one row a token, and with a row and a column

    @property
    def work(self) -> Work:
        """The work so far."""
        touched, scored = self._nbytes
        return Work(self.products, touched / TOKENS, self._scores * scored / TOKENS**2)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, torch.Tensor) and kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does on its local part comes here again
        result = func(*args, **(kwargs or {}))
        if any(kind.__name__ == "FakeTensor" for kind in types):
            return result  # of a DTensor's whole, for its shape alone
        name = func._schema.name.rpartition("::")[2]
        if func.namespace == "aten":
            if (sizes := sizes_of_product(func, args)) is not None:
                self.products[sizes] += 1
            elif not _is_view(func) and name != "_unsafe_view" and "empty" not in name:
                for each in (*args, result):
                    self._touch(each)
        return result

    def _touch(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for each in value:
                self._touch(each)
        elif isinstance(value, torch.Tensor) and 0 < (rows := list(value.shape).count(TOKENS)) < 3:
            self._nbytes[rows - 1] += value.numel() * value.itemsize


def _is_view(func: Any) -> bool:
    """Tells whether an operation only shows its argument in another form."""
    aliases = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
