"""Storage guards: a storage without bytes that says so instead of reading address zero.

What goes around ``__torch_function__`` (``torch.func``, ``torch.tensor(p)``, DLPack, a view kept from a forward, a C++
extension) reaches a parameter's storage directly, and torch's kernels do not check whether anything is there. A
StorageImpl has a flag that makes every access to its data pointer raise RuntimeError; CUDA graphs use it. Python can
set its two neighbours but not this one, so their positions are found first, by setting them on a storage of our own.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_NBYTES = 80  # of a StorageImpl, up to the flags in every torch that is supported; the object is larger than that


def is_available() -> bool:
    """Tells whether this torch's storages can be guarded."""
    return _flags() is not None


def is_refusal(error: BaseException) -> bool:
    """Tells whether torch refused to look at a storage without bytes."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        said in text for said in ("data pointer of Storage that is invalid", "for storage of size 0")
    )


def close(storage: torch.UntypedStorage) -> None:
    """Makes every access to the bytes of ``storage`` raise RuntimeError, until :func:`open`."""
    _let_be_asked()
    _set(storage, 1)


def open(storage: torch.UntypedStorage) -> None:
    """Makes the bytes of ``storage`` accessible again."""
    _set(storage, 0)


def identity(tensor: torch.Tensor) -> int:
    """Returns what tells the storage of ``tensor`` from every other that is alive."""
    return tensor.untyped_storage()._cdata


def references(tensor: torch.Tensor) -> int:
    """Counts the tensors and exports that refer to the storage of ``tensor``."""
    return torch._C._storage_Use_Count(identity(tensor)) - _counting()


@cache
def _counting() -> int:
    """Counts the references that torch has to a storage only to count them."""
    probe = torch.empty(1, device="cpu")
    return torch._C._storage_Use_Count(identity(probe)) - 1


def is_fixed(storage: torch.UntypedStorage) -> bool:
    """Tells whether accessible ``storage`` cannot be resized: NumPy had its memory, or it was moved to memory that processes share."""
    return not storage.resizable() or is_moved(storage)


def is_moved(storage: torch.UntypedStorage) -> bool:
    """Tells whether accessible ``storage`` was moved to memory that processes share, which only the host's is."""
    return storage.device.type == "cpu" and torch._C.StorageBase.is_shared(storage)


def _is_shared(storage: torch.UntypedStorage) -> bool:
    if storage.device.type == "cpu" and (flags := _flags()) is not None and _image(storage)[flags[1]]:
        return False
    return torch._C.StorageBase.is_shared(storage)


@cache
def _let_be_asked() -> None:
    """Has torch say that a guarded storage is not shared: its own function may not raise, and ends the process."""
    torch.UntypedStorage.is_shared = _is_shared


def _set(storage: torch.UntypedStorage, value: int) -> None:
    if (flags := _flags()) is not None:
        for flag in flags:  # between them is that for writing, which stays as it is
            ctypes.memset(storage._cdata + flag, value, 1)


def _image(storage: torch.UntypedStorage) -> ctypes.Array:
    """The first bytes of the C++ object."""
    return (ctypes.c_ubyte * _NBYTES).from_address(storage._cdata)


@cache
def _flags() -> tuple[int, int] | None:
    """Positions of "there is something to check" and of "reading raises"; None where torch has neither as expected.

    The object has, in this order: any check, throw when writing, throw when reading, warn when writing.
    """
    probe = torch.empty(1, device="cpu")
    image = _image(probe.untyped_storage())
    states = [bytes(image)]
    for set_flag in (torch._C._set_throw_on_mutable_data_ptr, torch._C._set_warn_deprecated_on_mutable_data_ptr):
        set_flag(probe)
        states.append(bytes(image))
    (*throws,), (*warns,) = (
        [i for i, (before, after) in enumerate(zip(old, new)) if (before, after) == (0, 1)] for old, new in zip(states, states[1:])
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
