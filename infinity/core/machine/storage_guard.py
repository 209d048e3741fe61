"""Storage guards: make access to a storage without bytes raise, instead of reading address zero."""

from __future__ import annotations

from functools import cache, partial

import torch

from ... import torch_private

references = torch_private.storage_references
# Makes the bytes of a storage accessible again.
open = partial(torch_private.set_storage_flags, value=0)
_torch_is_shared = torch.UntypedStorage.is_shared


def is_available() -> bool:
    """Returns whether this torch's storages can be guarded."""
    return torch_private.STORAGE_FLAGS.found is not None


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
    torch_private.set_storage_flags(storage, 1)


def identity(tensor: torch.Tensor) -> int:
    """Returns an id of the storage of ``tensor``, unique among live storages."""
    # torch's own: a subclass may refuse to give its memory away, which this does not.
    return torch.Tensor.untyped_storage(tensor)._cdata


def is_fixed(storage: torch.UntypedStorage) -> bool:
    """Returns whether accessible ``storage`` cannot be resized: NumPy has had its memory, or it was
    moved to shared memory."""
    return not storage.resizable() or is_moved(storage)


def is_moved(storage: torch.UntypedStorage) -> bool:
    """Returns whether accessible ``storage`` was moved to memory that processes share. Only host
    memory can be."""
    return storage.device.type == "cpu" and _torch_is_shared(storage)


def _is_shared(storage: torch.UntypedStorage) -> bool:
    if storage.device.type == "cpu" and torch_private.is_flagged(storage):
        return False
    return _torch_is_shared(storage)


@cache
def _let_be_asked() -> None:
    """Replaces torch's ``is_shared``, which would end the process on a guarded storage: it must not
    raise."""
    torch.UntypedStorage.is_shared = _is_shared
