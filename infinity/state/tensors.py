"""Tensors: writes into parameters and buffers, and gives and takes their storage."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from .. import native
from ..machine import storage_guard


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Does ``tensor.copy_(value)``, also of an expanded tensor, whose repeated elements are written once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
    tensor.detach()[once].copy_(value[once])


def digest_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, bytes]:
    """Returns the shape, the dtype and a digest of the elements: equal where tensors have the same bits."""
    # Of a copy: NumPy would make the storage one that cannot be resized any more.
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
    return tuple(tensor.shape), str(tensor.dtype), hashlib.blake2b(flat.view(torch.uint8).numpy(), digest_size=8).digest()


def checksum_of(tensor: torch.Tensor, seed: int = 0) -> int:
    """Computes the CRC-32C of the elements of a plain tensor, row by row; ``seed`` continues an
    earlier call."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return native.crc32c(flat.view(torch.uint8), seed) if flat.numel() else seed


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Adds the elements of a tensor up as integers of their bits."""
    size = min(tensor.itemsize, 8)
    bits = tensor.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    return int(bits.sum(dtype=torch.int64))


def put(tensor: torch.Tensor, begin: int, values: torch.Tensor) -> None:
    """Sets the elements of ``tensor`` from ``begin`` on, counted row by row whatever its strides."""
    if tensor.is_contiguous():
        tensor.view(-1)[begin : begin + values.numel()] = values.to(tensor.dtype)
    else:
        places = torch.unravel_index(torch.arange(begin, begin + values.numel(), device="cpu"), tensor.shape)
        tensor[places] = values.to(tensor.dtype)


def take_storage(param: nn.Parameter) -> None:
    if storage_guard.is_fixed(param.untyped_storage()):  # an initialisation had it as an array of NumPy, say
        param.data = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device=param.device)
    storage = param.untyped_storage()
    storage.resize_(0)
    storage_guard.close(storage)


def give_storage(param: nn.Parameter) -> None:
    storage = param.untyped_storage()
    storage_guard.open(storage)
    storage.resize_(param.numel() * param.itemsize)
