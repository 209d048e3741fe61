"""Storage guards: make access to a storage without bytes raise, instead of reading address zero.

[Note: why a flag in the C++ object] Some code bypasses ``__torch_function__``: ``torch.func``,
``torch.tensor(p)``, DLPack, a view kept from a forward, a C++ extension. It reaches a parameter's
storage directly, and torch's kernels do not check for bytes. A StorageImpl has a flag that makes
every access to its data pointer raise RuntimeError; CUDA graphs use it. Python can set its two
neighbours but not this one. So their offsets are found first, by setting them on a storage of our
own.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_NBYTES = 80  # prefix of a StorageImpl with the flags, in all supported torches


def is_available() -> bool:
    """Returns whether this torch's storages can be guarded."""
    return _flags() is not None


def is_refusal(error: BaseException) -> bool:
    """Returns whether ``error`` is torch's for access to a storage without bytes."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        said in text
        for said in ("data pointer of Storage that is invalid", "for storage of size 0")
    )


def close(storage: torch.UntypedStorage) -> None:
    """Makes every access to the bytes of ``storage`` raise RuntimeError, until :func:`open`."""
    _let_be_asked()
    _set(storage, 1)


def open(storage: torch.UntypedStorage) -> None:
    """Makes the bytes of ``storage`` accessible again."""
    _set(storage, 0)


def identity(tensor: torch.Tensor) -> int:
    """Returns an id of the storage of ``tensor``, unique among live storages."""
    # torch's own: a subclass may refuse to give its memory away, which this does not.
    return torch.Tensor.untyped_storage(tensor)._cdata


def references(tensor: torch.Tensor) -> int:
    """Counts the tensors and exports that refer to the storage of ``tensor``."""
    return torch._C._storage_Use_Count(identity(tensor)) - _counting()


@cache
def _counting() -> int:
    """Counts the references that torch has to a storage only to count them."""
    probe = torch.empty(1, device="cpu")
    return torch._C._storage_Use_Count(identity(probe)) - 1


def is_fixed(storage: torch.UntypedStorage) -> bool:
    """Returns whether accessible ``storage`` cannot be resized: NumPy has had its memory, or it was
    moved to shared memory."""
    return not storage.resizable() or is_moved(storage)


def is_moved(storage: torch.UntypedStorage) -> bool:
    """Returns whether accessible ``storage`` was moved to memory that processes share. Only host
    memory can be."""
    return storage.device.type == "cpu" and torch._C.StorageBase.is_shared(storage)


def _is_shared(storage: torch.UntypedStorage) -> bool:
    if (
        storage.device.type == "cpu"
        and (flags := _flags()) is not None
        and _image(storage)[flags[1]]
    ):
        return False
    return torch._C.StorageBase.is_shared(storage)


@cache
def _let_be_asked() -> None:
    """Replaces torch's ``is_shared``, which would end the process on a guarded storage: it must not
    raise."""
    torch.UntypedStorage.is_shared = _is_shared


def _set(storage: torch.UntypedStorage, value: int) -> None:
    if (flags := _flags()) is not None:
        for flag in flags:  # the flag for writing, between them, stays as it is
            ctypes.memset(storage._cdata + flag, value, 1)


def _image(storage: torch.UntypedStorage) -> ctypes.Array:
    """Returns the first bytes of the C++ object."""
    return (ctypes.c_ubyte * _NBYTES).from_address(storage._cdata)


@cache
def _flags() -> tuple[int, int] | None:
    """Returns the offsets of "there is something to check" and "reading raises"; None if this torch
    differs.

    The object has, in this order: any check, throw when writing, throw when reading, warn when
    writing.
    """
    probe = torch.empty(1, device="cpu")
    image = _image(probe.untyped_storage())
    states = [bytes(image)]
    for set_flag in (
        torch._C._set_throw_on_mutable_data_ptr,
        torch._C._set_warn_deprecated_on_mutable_data_ptr,
    ):
        set_flag(probe)
        states.append(bytes(image))
    (*throws,), (*warns,) = (
        [i for i, (before, after) in enumerate(zip(old, new)) if (before, after) == (0, 1)]
        for old, new in zip(states, states[1:])
    )
    if len(throws) != 2 or throws[1] != throws[0] + 1 or warns != [throws[1] + 2]:
        return None
    flags = throws[0], throws[1] + 1
    return flags if _works(flags) else None


def _works(flags: tuple[int, int]) -> bool:
    probe = torch.ones(1, device="cpu")
    image = _image(probe.untyped_storage())
    if any(image[flag] for flag in flags):
        return False
    for flag in flags:
        image[flag] = 1
    try:
        probe.clone()
        refused = False
    except RuntimeError:
        refused = True
    for flag in flags:
        image[flag] = 0
    return refused and probe.item() == 1
