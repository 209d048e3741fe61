"""Coded: a weight that keeps its codes, of a file or of quantize, and is dense where it is used.

codes    the numbers in few bits
scales   what they are multiplied by, one for each block
some     experts of a weight of experts, or rows of a table
read     rows whose values are used; others may not be on the device
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from ...core.units.handle import handle_of
from ...core.units.rows import Rows
from ...errors import UsageError
from ...torch_private import DisableTorchFunction
from ..rows.chosen_experts import reading
from .schemes import Gguf, Mxfp4, Nf4, Scaled, Scheme, Transposed

aten = torch.ops.aten


PIECE, PIECE_ON_DEVICE = 1 << 22, 1 << 26  # elements that are unpacked at once


Some = list[int] | torch.Tensor | None  # experts or rows; None: all


class Coded(torch.Tensor):
    """A frozen weight of codes and scales. Functions of torch compute with its dense values.

    dtypes
        What the dense weight is converted to, one after the other.
    """

    tells_rows = True  # that a forward reads of it
    codes: torch.Tensor
    scales: torch.Tensor | None  # None: among the codes
    scheme: Scheme
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def __new__(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor | None,
        scheme: Scheme,
        *dtypes: torch.dtype,
    ) -> Coded:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, scheme.shape(codes.shape), dtype=dtypes[-1], device=codes.device
        )

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor | None,
        scheme: Scheme,
        *dtypes: torch.dtype,
    ):
        self.codes, self.scales, self.scheme, self.dtypes = codes, scales, scheme, dtypes

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["codes"] if self.scales is None else ["codes", "scales"]
        return names, (self.scheme, *self.dtypes)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, context: Any, _size: Any, _stride: Any) -> Coded:
        return cls(inner["codes"], inner.get("scales"), *context)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Coded({tuple(self.shape)}, {self.dtype}, {self.scheme})"

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """Returns the dense weight."""
        return self.unpacked(None)

    def unpacked(self, some: Some, rows: Rows = None) -> torch.Tensor:
        """Returns the dense weight, or ``some`` of its experts or rows. ``rows``: those that are
        read; others have no defined values then."""
        if rows is None and isinstance(some, list):
            rows = frozenset(some)
        with reading(self.codes, rows) as rows:
            parts = [each.detach() for each in _parts(self)]
            if some is None:
                dense = self._piecewise(rows, *parts)
            else:
                dense = self._piecewise(None, *(each[some] for each in parts))
        if (made := getattr(_noted, "made", None)) is not None:
            storage = dense.untyped_storage()
            kept = StorageWeakRef(storage)
            made[storage._cdata] = Unpacked(self, some, rows, dense.shape, kept)
        return dense

    def _piecewise(
        self, rows_read: Rows, codes: torch.Tensor, scales: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Unpacks ``rows_read`` (None: all), a few at a time, so that what is in between takes
        little memory."""
        shape = self.scheme.shape(codes.shape)
        dense = torch.empty(shape, dtype=self.dtype, device=codes.device)
        one = scales is not None and scales.numel() == 1
        # Rows of codes that share a row of scales are unpacked together.
        shares = isinstance(self.scheme, Scaled) and codes.dim() == 2 and not one
        alike = self.scheme.block[0] if shares else 1
        most = PIECE if codes.device.type == "cpu" else PIECE_ON_DEVICE
        rows = max(1, most * max(1, shape[0]) // max(1, shape.numel()))
        rows = max(1, rows // alike) * alike
        order = None if rows_read is None else sorted(rows_read)
        if order is not None:
            codes = codes[order]
            scales = scales if scales is None or one else scales[order]
        for begin in range(0, len(codes), rows):
            end = min(begin + rows, len(codes))
            parts = [_rows_of(codes, begin, end)]
            if scales is not None and one:
                parts.append(scales)
            elif scales is not None:
                parts.append(_rows_of(scales, begin // alike, -(-end // alike)))
            made = self.scheme.unpack(*parts)
            for dtype in self.dtypes[:-1]:
                made = made.to(dtype)
            dense[slice(begin, end) if order is None else order[begin:end]] = made.to(self.dtype)
        return dense

    def chosen(self, index: Any) -> torch.Tensor | None:
        """Returns the dense weight of the experts ``index``, one or several; None if this is not a
        weight of experts, or ``index`` chooses otherwise."""
        count = len(self.codes)
        by_expert = self.scales is None or (self.scales.dim() >= 3 and len(self.scales) == count)
        if self.dim() < 3 or not by_expert:
            return None
        if isinstance(index, int) and not isinstance(index, bool):
            return self.unpacked([range(count)[index]])[0]
        if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int32, torch.int64):
            return None
        if index.dim() == 0:
            return self.unpacked(index.reshape(1))[0]
        return self.unpacked(index) if index.dim() == 1 else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes with the dense weight, so that torch chooses the kernels that it has for it."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__set__" and isinstance(first, Coded):
            return _set(func, first, args[1])
        if _changes(name, first, args, kwargs):
            return _copied(first, args, kwargs) if name == "copy_" else _refuse(first)
        if name in ASKING or name in COPYING:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and isinstance(first, Coded):
            if (some := first.chosen(args[1])) is not None:
                return some
        if func is torch.nn.functional.embedding and (rows := _rows(*args, **kwargs)) is not None:
            return rows
        return func(*_dense(args), **_dense(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if func._schema.is_mutable and isinstance(first, Coded):
            _refuse(first)
        if func in (aten.detach.default, aten.alias.default):
            return _made_of(first, func)
        if func is aten.clone.default:
            return _made_of(first, torch.clone)
        dtype = kwargs.get("dtype") or getattr(first, "dtype", None)
        if func is aten._to_copy.default and dtype.is_floating_point:
            where = {key: kwargs[key] for key in ("device", "non_blocking") if key in kwargs}
            made = _made_of(first, lambda inner: inner.to(copy=True, **where))
            return made if dtype == made.dtype else _made_of(made, lambda inner: inner, dtype)
        return func(*_dense(args), **_dense(kwargs))


# Functions that ask about a tensor
ASKING = {
    *("__get__", "__hash__", "__repr__", "__format__", "__reduce_ex__", "__len__"),
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_shared", "is_pinned", "is_signed"),
    *("data_ptr", "untyped_storage", "storage_offset", "_is_view", "register_hook", "retain_grad"),
    *("dequantize", "unpacked", "chosen", "__tensor_flatten__"),
}
# Functions that make a tensor of the same codes, or of the same codes in another dtype
COPYING = {
    *("detach", "clone", "__deepcopy__", "requires_grad_", "to", "cpu", "cuda"),
    *("float", "double", "half", "bfloat16"),
}


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A dense tensor that was made of ``weight``, or of ``some`` of it."""

    weight: Coded
    some: Some
    rows: Rows
    shape: torch.Size
    storage: StorageWeakRef


_noted = threading.local()  # made: what is unpacked on this thread now


@contextlib.contextmanager
def noting_unpacked() -> Iterator[dict[int, Unpacked]]:
    """Collects what is unpacked on this thread, by the address of its storage."""
    before, _noted.made = getattr(_noted, "made", None), {}
    try:
        yield _noted.made
    finally:
        _noted.made = before


def _changes(name: str, first: Any, args: tuple, kwargs: dict) -> bool:
    """Tells whether a function changes a coded weight in place."""
    if isinstance(kwargs.get("out"), Coded):
        return True
    if name == "__setitem__":
        return isinstance(first, Coded)
    if not name.endswith("_") or name.endswith("__"):
        return False
    if name == "requires_grad_":
        return args[1:2] == (True,) or kwargs.get("requires_grad", not args[1:]) is True
    return isinstance(first, Coded) or (
        isinstance(first, (list, tuple)) and any(isinstance(each, Coded) for each in first)
    )


def _refuse(weight: Any) -> Any:
    raise UsageError(
        f"{weight!r} is in codes, and is not changed or trained. Without the engine"
        " (infinity.unwrap_model), infinity.dequantize(model) makes such weights dense"
    )


def _copied(weight: Coded, args: tuple, kwargs: dict) -> Coded:
    """Copies the codes and scales of another weight of the same form."""
    other = args[1] if len(args) > 1 else kwargs.get("src")
    if not isinstance(other, Coded) or _form(other) != _form(weight):
        _refuse(weight)
    for mine, its in zip(_parts(weight), _parts(other)):
        mine.copy_(its)
    return weight


def _set(func: Any, weight: Coded, value: Any) -> None:
    """Sets an attribute of torch's: the data to those of another coded weight, others as ever."""
    if func == torch.Tensor.requires_grad.__set__ and value:  # type: ignore[attr-defined]
        _refuse(weight)
    of_data = func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
    if of_data and not (isinstance(value, Coded) and value.shape == weight.shape):
        _refuse(weight)
    with DisableTorchFunction():
        func(weight, value)
    if of_data:
        weight.codes, weight.scales = value.codes, value.scales
        weight.scheme, weight.dtypes = value.scheme, value.dtypes


def _rows(ids: Any, weight: Any, *args: Any, max_norm: Any = None, **_: Any) -> Any:
    """Looks up the rows of a table whose rows have their scales in them; None for other tables."""
    if not (isinstance(weight, Coded) and weight.dim() == 2 and weight.scales is None):
        return None
    if max_norm is not None or any(each is not None for each in args[1:2]):
        return None
    return weight.unpacked(ids.reshape(-1)).reshape(*ids.shape, -1)


def _form(weight: Coded) -> tuple:
    return weight.scheme, weight.shape, [(each.shape, each.dtype) for each in _parts(weight)]


def _parts(weight: Coded) -> list[torch.Tensor]:
    return [each for each in (weight.codes, weight.scales) if each is not None]


def _rows_of(part: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Returns rows of codes or scales. Of a tensor at rest they are a copy: each use of a view of
    it would ask the engine."""
    rows = part[begin:end]
    return rows if handle_of(part) is None else rows.clone()


def _dense(values: Any) -> Any:
    return tree_map_only(Coded, Coded.dequantize, values)


def _made_of(
    weight: Coded, change: Callable[[torch.Tensor], torch.Tensor], *dtypes: torch.dtype
) -> Coded:
    scales = None if weight.scales is None else change(weight.scales)
    return Coded(change(weight.codes), scales, weight.scheme, *weight.dtypes, *dtypes)


torch.serialization.add_safe_globals([Coded, Scaled, Mxfp4, Gguf, Nf4, Transposed])
