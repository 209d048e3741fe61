"""Tensors: writes into parameters and buffers, computes digests, and frees and restores storage."""

from __future__ import annotations

import hashlib

import torch

from ... import native

SUMMED_AT_ONCE = 1024 * 1024  # elements: products of their bits take eight bytes each


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Does ``tensor.copy_(value)``; repeated elements of an expanded tensor are written once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
    tensor.detach()[once].copy_(value[once])


def digest_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, bytes]:
    """Returns the shape, the dtype and a digest of the elements: equal if tensors have the same
    bits."""
    # A copy: after NumPy has had a storage, torch cannot resize it.
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
    return (
        tuple(tensor.shape),
        str(tensor.dtype),
        hashlib.blake2b(flat.view(torch.uint8).numpy(), digest_size=8).digest(),
    )


def checksum_of(tensor: torch.Tensor, seed: int = 0) -> int:
    """Computes the CRC-32C of a plain tensor's elements in row-major order; ``seed`` continues a
    call."""
    return native.crc32c(tensor.detach().cpu().contiguous(), seed) if tensor.numel() else seed


def fingerprint(tensor: torch.Tensor) -> int:
    """Computes a number of a resident tensor's bits and their order, where it is. Other bits, or
    the same in another order, have the same number once in 2**32 times, and never if one 32-bit
    word differs. Valid on one device, in one process."""
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(dims).reshape(-1)  # in storage order: a copy only if there are gaps
    if flat.device.type == "cpu":
        return native.crc32c(flat.contiguous()) if flat.numel() else 0
    return _sum_of_places(flat)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a view of the elements' bits, as integers."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.dtype.itemsize])


def _sum_of_places(flat: torch.Tensor) -> int:
    """Sums the elements' bits, as integers, times odd numbers that count their places."""
    if flat.dtype.itemsize > 8:
        flat = torch.view_as_real(flat).reshape(-1)
    bits = as_integers(flat)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, bits.numel(), SUMMED_AT_ONCE):
        end = min(begin + SUMMED_AT_ONCE, bits.numel())
        total += (
            bits[begin:end] * torch.arange(2 * begin + 1, 2 * end, 2, device=flat.device)
        ).sum()
    return int(total)


def put(tensor: torch.Tensor, begin: int, values: torch.Tensor) -> None:
    """Sets the elements of ``tensor`` from ``begin`` on, in row-major order for any strides."""
    if tensor.is_contiguous():
        tensor.view(-1)[begin : begin + values.numel()] = values.to(tensor.dtype)
    else:
        places = torch.unravel_index(
            torch.arange(begin, begin + values.numel(), device="cpu"), tensor.shape
        )
        tensor[places] = values.to(tensor.dtype)
