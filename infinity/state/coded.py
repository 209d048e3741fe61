"""Coded: a weight that keeps the codes of its file, and is dense where it is used.

codes    the numbers in few bits, as the file has them
scales   what they are multiplied by, one for each block
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # the numbers of MXFP4 (OCP 2023); then negative
aten = torch.ops.aten


@dataclass(frozen=True)
class Fp8:
    """FP8 with a scale for each block of rows and columns, or one for the whole weight.

    block
        Rows and columns of a block.
    """

    block: tuple[int, int]

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Makes the dense weight, in fp32, with the bits of transformers."""
        dense, each = codes.float(), scales.float()
        if each.numel() == 1:
            return dense.mul_(each.reshape(()))
        rows, columns = codes.shape[-2:]
        if rows % self.block[0] == 0 and columns % self.block[1] == 0:
            blocks = dense.unflatten(-1, (-1, self.block[1])).unflatten(-3, (-1, self.block[0]))
            blocks.mul_(each[..., :, None, :, None])
            return dense
        each = each.repeat_interleave(self.block[0], -2)[..., :rows, :]
        return dense.mul_(each.repeat_interleave(self.block[1], -1)[..., :columns])

    def shape(self, codes: torch.Size) -> torch.Size:
        """Returns the shape of the dense weight."""
        return codes


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 as gpt-oss has its experts: ``[experts, outputs, groups, bytes]`` of two numbers each,
    with an exponent for each group, for a weight ``[experts, inputs, outputs]``."""

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Makes the dense weight, in bf16, with the bits of transformers."""
        table = torch.tensor([*FP4, *(-number for number in FP4)], device=codes.device)
        dense = torch.empty(self.shape(codes.shape), dtype=torch.bfloat16, device=codes.device)
        for to, of_one, powers in zip(dense, codes, scales):
            halves = torch.stack([of_one & 15, of_one >> 4], dim=-1).flatten(-2)
            numbers = torch.ldexp(table[halves.int()], powers.int().unsqueeze(-1) - 127)
            to.copy_(numbers.flatten(1).T)
        return dense

    def shape(self, codes: torch.Size) -> torch.Size:
        """Returns the shape of the dense weight."""
        experts, outputs, groups, width = codes
        return torch.Size([experts, 2 * groups * width, outputs])


@dataclass(frozen=True)
class Gguf:
    """A type of GGUF's: rows of blocks, each with its scales among its codes.

    kind
        Name of the type, such as "Q4_K".
    """

    kind: str

    @staticmethod
    def kinds() -> set[str]:
        """Returns the types that diffusers unpacks, with the bits of gguf."""
        library = importlib.import_module("diffusers.quantizers.gguf.utils")
        return {each.name for each in library.dequantize_functions}

    def unpack(self, codes: torch.Tensor) -> torch.Tensor:
        """Makes the dense weight, in fp32, with the bits of gguf."""
        library = importlib.import_module("diffusers.quantizers.gguf.utils")
        (kind,) = (each for each in library.dequantize_functions if each.name == self.kind)
        numel, nbytes = library.GGML_QUANT_SIZES[kind]
        blocks = codes.reshape(-1, nbytes)
        dense = library.dequantize_functions[kind](blocks, numel, nbytes, torch.float32)
        return dense.reshape(self.shape(codes.shape))

    def shape(self, codes: torch.Size) -> torch.Size:
        """Returns the shape of the dense weight."""
        library = importlib.import_module("gguf")
        numel, nbytes = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[self.kind]]
        return torch.Size([*codes[:-1], codes[-1] // nbytes * numel])


Scheme = Fp8 | Mxfp4 | Gguf


class Coded(torch.Tensor):
    """A frozen weight of codes and scales: a plain tensor of ``dtype`` to whoever computes with
    it. One expert of several is unpacked alone."""

    codes: torch.Tensor
    scales: torch.Tensor | None  # None: among the codes
    scheme: Scheme

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scales: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> Coded:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, scheme.shape(codes.shape), dtype=dtype, device=codes.device
        )

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype
    ):
        self.codes, self.scales, self.scheme = codes, scales, scheme

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["codes"] if self.scales is None else ["codes", "scales"]
        return names, (self.scheme, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, context: Any, _size: Any, _stride: Any) -> Coded:
        return cls(inner["codes"], inner.get("scales"), *context)

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """Returns the dense weight."""
        return self.unpacked(None)

    def unpacked(self, at: list | torch.Tensor | None) -> torch.Tensor:
        """Returns the dense weight, or that of the experts ``at``."""
        parts = [each.detach() for each in (self.codes, self.scales) if each is not None]
        parts = parts if at is None else [each[at] for each in parts]
        dense = self.scheme.unpack(*parts).to(self.dtype)
        if (made := getattr(_noted, "made", None)) is not None:
            made.append(Unpacked(self, at, dense))
        return dense

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Coded({tuple(self.shape)}, {self.dtype}, {self.scheme})"

    def of_experts(self, at: Any) -> torch.Tensor | None:
        """Returns the dense weight of the experts ``at``, one or several; None if this is not a
        weight of experts, or ``at`` chooses otherwise."""
        alone = isinstance(at, int) or (isinstance(at, torch.Tensor) and at.dim() == 0)
        several = isinstance(at, torch.Tensor) and at.dim() == 1
        by_expert = self.scales is None or self.scales.dim() >= 3
        if self.dim() < 3 or not by_expert or not (alone or several):
            return None
        if isinstance(at, torch.Tensor) and at.dtype not in (torch.int32, torch.int64):
            return None
        if alone:
            return self.unpacked(at.reshape(1) if isinstance(at, torch.Tensor) else [at])[0]
        return self.unpacked(at)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes with the dense weight, so that torch chooses the kernels that it has for it."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.__getitem__ and (some := args[0].of_experts(args[1])) is not None:
            return some
        return func(*_dense(args), **_dense(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if func in (aten.detach.default, aten.alias.default):
            return _made_of(first, func)
        if func is aten.clone.default:
            return _made_of(first, torch.clone)
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, first.dtype):
            where = {key: kwargs[key] for key in ("device", "non_blocking") if key in kwargs}
            return _made_of(first, lambda inner: inner.to(copy=True, **where))
        return func(*_dense(args), **_dense(kwargs))


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A dense tensor that was made of ``weight``, or of its experts ``at``."""

    weight: Coded
    at: list | torch.Tensor | None
    dense: torch.Tensor


_noted = threading.local()  # made: what is unpacked on this thread now


@contextlib.contextmanager
def noting_unpacked() -> Iterator[list[Unpacked]]:
    """Collects what is unpacked on this thread."""
    before, _noted.made = getattr(_noted, "made", None), []
    try:
        yield _noted.made
    finally:
        _noted.made = before


# Functions that ask about a tensor, or make one of the same codes
ABOUT = {
    *("__get__", "__set__", "__hash__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__"),
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "__len__"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_shared", "is_pinned", "is_signed"),
    *("detach", "requires_grad_", "clone", "to", "cpu", "cuda", "data_ptr", "untyped_storage"),
    *("storage_offset", "register_hook", "retain_grad", "get_device", "_is_view", "dequantize"),
    *("__tensor_flatten__", "of_experts"),
}


def _dense(values: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Coded, Coded.dequantize, values)


def _made_of(weight: Coded, change: Callable[[torch.Tensor], torch.Tensor]) -> Coded:
    scales = None if weight.scales is None else change(weight.scales)
    return Coded(change(weight.codes), scales, weight.scheme, weight.dtype)
