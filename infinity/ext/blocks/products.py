"""Products: keeps what a block's matrix products and attention gave, so that a recomputation runs
elementwise operations only.

product    an operation that computes much for the bytes it gives
number     of a product among those of one call, in the order in which they run
keepable   products whose results are kept: a backward needs them, and nothing writes to them

What is kept is a hint: a result that is missing, or was written to, is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ... import native
from ...core.machine.device import Device
from ...core.run.saved_tensor import raw_bytes
from ...torch_private import top_hooks

NAMES = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
        *("_int_mm", "convolution", "_flash_attention_forward", "_efficient_attention_forward"),
    )
)
PREFIXES = ("aten::_scaled_dot_product_", "flash_attn::_flash_attn_", "flash_attn_3::fwd")
DIGEST_ELEMENTS = 1 << 20  # that a digest takes at once: eight bytes each


@functools.cache
def is_product(operation: Any) -> bool:
    """Tells whether ``operation`` computes much for its bytes, and writes to no argument."""
    schema = getattr(operation, "_schema", None)
    return (
        schema is not None
        and not schema.is_mutable
        and (schema.name in NAMES or schema.name.startswith(PREFIXES))
        and "backward" not in schema.name
    )


def draws(operation: Any, args: tuple, kwargs: dict) -> bool:
    """Tells whether this call of a product draws random numbers, as attention with dropout does.
    Without it, what is drawn after it would differ."""
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    return any(given.get(name, 0.0) > 0.0 for name in ("dropout_p", "p_dropout"))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Returns the storages of plain tensors."""
    return [
        each.untyped_storage()
        for each in _tensors(values)
        if type(each) in (torch.Tensor, torch.nn.Parameter)
        and each.layout is torch.strided
        and not each.is_nested
    ]


@functools.cache
def _written(operation: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def digest(tensor: torch.Tensor, is_host: bool) -> torch.Tensor:
    """Computes a number from all bytes of ``tensor``'s storage, in their order."""
    raw = raw_bytes(tensor.untyped_storage())
    if is_host:
        return torch.tensor(native.crc32c(raw))
    words = raw.view(torch.int32) if raw.numel() % 4 == 0 else raw
    weights = torch.arange(1, DIGEST_ELEMENTS + 1, device=raw.device)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for part in words.split(DIGEST_ELEMENTS):
        total = total * 1_000_003 + (part.long() * weights[: part.numel()]).sum()
    return total


class Kept(NamedTuple):
    """The results of one product, as they are saved. ``digests``: of their storages, if checked."""

    operation: Any
    results: Any
    digests: tuple[Any, ...]


class Counted:
    """What one measured call of a block tells of its products."""

    def __init__(self, device: Device):
        self.device = device
        self.nbytes: dict[int, int] = {}  # of each product that can be kept
        self._seconds: dict[int, float] = {}  # noted once the device has computed it
        self._storages: dict[int, int] = {}
        self._number = self._needed = 0

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Makes the contexts of the forward and of a recomputation, for torch's checkpoint."""
        return _Mode(self.run, self.forget), nullcontext()

    def run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Runs a product, and counts its bytes and seconds."""
        number, self._number = self._number, self._number + 1

        def count(start: float, end: float) -> None:
            self._seconds[number] = end - start

        with self.device.timing(count):
            results = operation(*args, **kwargs)
        storages = {storage._cdata: storage.nbytes() for storage in _storages(results)}
        if len(storages) == len(_tensors(results)) and not draws(operation, args, kwargs):
            self.nbytes[number] = sum(storages.values())
            self._storages |= dict.fromkeys(storages, number)
        return results

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Forgets the product with ``storage``, which is written to."""
        self.nbytes.pop(self._storages.pop(storage._cdata, -1), None)

    def note_saved(self) -> None:
        """Notes that autograd saves a tensor: products before that run in a recomputation."""
        self._needed = self._number

    def end(self, output: Any) -> None:
        """Ends the call: what it returns is the caller's, who may write to it."""
        for storage in _storages(output):
            self.forget(storage)
        self.nbytes = {
            number: nbytes for number, nbytes in self.nbytes.items() if number < self._needed
        }

    def seconds(self) -> float:
        """Returns the seconds of the products that can be kept, of those that are over."""
        return sum(self._seconds.get(number, 0.0) for number in self.nbytes)


class Products:
    """The results of one call's products, from its forward to its recomputation."""

    def __init__(self, keepable: Collection[int], *, is_host: bool, checks: bool):
        """Outside of the checkpoint. ``checks``: finds results that operations outside of torch
        write to; on a host that is always done."""
        self._keepable, self._is_host, self._checks = keepable, is_host, checks or is_host
        self._save, self._bring = top_hooks(True)
        self._kept: dict[int, Kept] = {}
        self._storages: dict[int, int] = {}
        self._seen: list[tuple[int, torch.Tensor, Any]] = []  # during the call, if it is checked
        self._number = 0

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Makes the contexts of the forward and of a recomputation, for torch's checkpoint."""
        return _Mode(self._keep, self._forget), _Mode(self._give, lambda storage: None, self._begin)

    def end(self, output: Any) -> set[int]:
        """Ends the forward. Returns the numbers of results that were written to unseen."""
        for storage in _storages(output):
            self._forget(storage)
        written = {
            number
            for number, result, before in self._seen
            if number in self._kept and not torch.equal(digest(result, self._is_host), before)
        }
        for number in written:
            del self._kept[number]
        self._seen.clear()
        return written

    def _keep(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        number, self._number = self._number, self._number + 1
        results = operation(*args, **kwargs)
        if number in self._keepable:
            tensors = _tensors(results)
            digests = tuple(digest(each, self._is_host) for each in tensors) if self._checks else ()
            self._seen += [(number, each, before) for each, before in zip(tensors, digests)]
            self._storages |= {each.untyped_storage()._cdata: number for each in tensors}
            saved = tree_map(lambda leaf: self._saved(leaf), results)
            self._kept[number] = Kept(operation, saved, digests if self._is_host else ())
        return results

    def _saved(self, leaf: Any) -> Any:
        return _Saved(self._save(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    def _begin(self) -> None:
        self._number = 0

    def _give(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the kept results in place of running ``operation``."""
        number, self._number = self._number, self._number + 1
        kept = self._kept.pop(number, None)
        if kept is None or kept.operation is not operation:
            return operation(*args, **kwargs)
        results = tree_map(
            lambda leaf: self._bring(leaf.packed) if isinstance(leaf, _Saved) else leaf,
            kept.results,
        )
        digests = (digest(each, self._is_host) for each in _tensors(results))
        if not all(map(torch.equal, digests, kept.digests)):
            return operation(*args, **kwargs)
        return results

    def _forget(self, storage: torch.UntypedStorage) -> None:
        self._kept.pop(self._storages.pop(storage._cdata, -1), None)


class _Saved:
    """A tensor as it is saved."""

    def __init__(self, packed: Any):
        self.packed = packed


class _Mode(TorchDispatchMode):
    """Runs the products of a call by ``product``, and tells ``written`` what else is written to."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leaves what is compiled inside of the block compiled."""
        return True

    def __init__(
        self,
        product: Callable[[Any, tuple, dict], Any],
        written: Callable[[torch.UntypedStorage], None],
        begin: Callable[[], None] | None = None,
    ):
        super().__init__()
        self._product, self._written, self._begin = product, written, begin

    def __enter__(self) -> Any:
        if self._begin is not None:
            self._begin()
        return super().__enter__()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_product(operation):
            return self._product(operation, args, kwargs)
        for place, name in _written(operation):
            for storage in _storages(args[place] if place < len(args) else kwargs.get(name)):
                self._written(storage)
        return operation(*args, **kwargs)
