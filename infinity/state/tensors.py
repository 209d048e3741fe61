"""Tensors: writes into parameters and buffers, computes digests, and frees and restores storage."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from .. import native
from ..machine import storage_guard


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
    flat = tensor.detach().cpu().contiguous().view(-1)
    return native.crc32c(flat.view(torch.uint8), seed) if flat.numel() else seed


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Sums the elements of a tensor as integers of their bits."""
    size = min(tensor.itemsize, 8)
    bits = tensor.reshape(-1).view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    )
    return int(bits.sum(dtype=torch.int64))


def put(tensor: torch.Tensor, begin: int, values: torch.Tensor) -> None:
    """Sets the elements of ``tensor`` from ``begin`` on, in row-major order for any strides."""
    if tensor.is_contiguous():
        tensor.view(-1)[begin : begin + values.numel()] = values.to(tensor.dtype)
    else:
        places = torch.unravel_index(
            torch.arange(begin, begin + values.numel(), device="cpu"), tensor.shape
        )
        tensor[places] = values.to(tensor.dtype)


def take_storage(param: nn.Parameter) -> None:
    # Fixed if an initialisation used it as a NumPy array, for example.
    if storage_guard.is_fixed(param.untyped_storage()):
        param.data = torch.empty_strided(
            param.size(), param.stride(), dtype=param.dtype, device=param.device
        )
    storage = param.untyped_storage()
    storage.resize_(0)
    storage_guard.close(storage)


def give_storage(param: nn.Parameter) -> None:
    storage = param.untyped_storage()
    storage_guard.open(storage)
    storage.resize_(param.numel() * param.itemsize)
