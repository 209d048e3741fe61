"""Products: keeps what a block's matrix products and attention gave, so that a recomputation runs
elementwise operations only.

product    an operation that computes much for the bytes it gives
number     of a product among those of one call, in the order in which they run
keepable   products whose results are kept: a backward needs them, and nothing writes to them

What is kept is a hint: a result that is missing, or was written to, is computed again. From a
product on that has other arguments than in the forward, everything is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ... import native
from ...core.machine.device import Device
from ...core.run.saved_tensor import SavedTensor, WithinBudget, raw_bytes
from ...core.units.inner import has_inner, inner_tensors
from ...torch_private import WRITES_KEY, current_task, exclude_key, top_hooks

NAMES = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
        *("_int_mm", "convolution", "_flash_attention_forward", "_efficient_attention_forward"),
    )
)
PREFIXES = ("aten::_scaled_dot_product_", "flash_attn::_flash_attn_")
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
    If it did not run again, all that is drawn after it would differ."""
    names = [argument.name for argument in operation._schema.arguments]
    arguments = dict(zip(names, args)) | kwargs
    return any(arguments.get(name, 0.0) > 0.0 for name in ("dropout_p", "p_dropout"))


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


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Lists the storages of tensors, and of the inner tensors of subclasses."""
    storages = []
    for each in _tensors(values):
        if has_inner(each):
            storages += _storages(inner_tensors(each))
        elif each.layout is torch.strided and not each.is_nested:
            storages.append(each.untyped_storage())
    return storages


def _can_be_kept(operation: Any, args: tuple, kwargs: dict, results: Any) -> bool:
    plain = all(
        type(each) is torch.Tensor and each.layout is torch.strided and not each.is_nested
        for each in _tensors(results)
    )
    return plain and not draws(operation, args, kwargs)


def _arguments(args: tuple, kwargs: dict) -> list[Any]:
    """Describes the arguments of a product. Weights of a block differ in their offsets at least."""
    return [
        (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype)
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided
        else type(leaf)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in tree_leaves((args, kwargs))
    ]


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


class _Numbers:
    """Numbers of products by the storages of their results. An address stays taken as long as its
    number is known."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, StorageWeakRef]] = {}

    def add(self, results: Any, number: int) -> None:
        """Notes that the product ``number`` gave ``results``."""
        for storage in _storages(results):
            self._found[storage._cdata] = number, StorageWeakRef(storage)

    def pop(self, values: Any) -> list[int]:
        """Returns, and forgets, the numbers of products whose results share memory with
        ``values``."""
        keys = [storage._cdata for storage in _storages(values)]
        return [self._found.pop(key)[0] for key in keys if key in self._found]


class Counted:
    """What one measured call of a block tells of its products. ``see``: is told of each operation
    first."""

    def __init__(self, device: Device, see: Callable[[Any, tuple, dict], None] | None = None):
        self.device, self._see = device, see
        self.nbytes: dict[int, int] = {}  # of each product that can be kept
        self._seconds: dict[int, float] = {}  # noted once the device has computed it
        self._numbers = _Numbers()
        self._number = self._needed = 0

    def mode(self) -> TorchDispatchMode:
        """Makes the mode of the forward, or of a recomputation, which runs under one, too: torch
        takes some operations apart otherwise."""
        if current_task() != -1:
            return _Mode(lambda operation, args, kwargs: operation(*args, **kwargs))
        return _Mode(self._run, self.forget, self._see)

    def _run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Runs a product, and counts its bytes and seconds."""
        number, self._number = self._number, self._number + 1

        def count(start: float, end: float) -> None:
            self._seconds[number] = end - start

        with self.device.timing(count):
            results = operation(*args, **kwargs)
        if _can_be_kept(operation, args, kwargs, results):
            storages = {each._cdata: each.nbytes() for each in _storages(results)}
            self.nbytes[number] = sum(storages.values())
            self._numbers.add(results, number)
        return results

    def forget(self, values: Any) -> None:
        """Removes the products with ``values``, which are written to."""
        for number in self._numbers.pop(values):
            self.nbytes.pop(number, None)

    def note_saved(self) -> None:
        """Notes that autograd saves a tensor: products before that run in a recomputation."""
        self._needed = self._number

    def end(self, output: Any) -> None:
        """Ends the call: what it returns is the caller's, who may write to it."""
        self.forget(output)
        self.nbytes = {
            number: nbytes for number, nbytes in self.nbytes.items() if number < self._needed
        }

    def seconds(self) -> float:
        """Returns the seconds of the products that can be kept, of those that are over."""
        return sum(self._seconds.get(number, 0.0) for number in self.nbytes)


class Kept(NamedTuple):
    """The results of one product, as they are saved. ``digests``: of their storages, on a host."""

    results: Any
    digests: tuple[torch.Tensor, ...]


class Products:
    """The results of one call's products, from its forward to its recomputation."""

    def __init__(self, keepable: Collection[int], *, is_host: bool, checks: bool):
        """Outside of the checkpoint. ``checks``: finds results that operations outside of torch
        write to; on a host that is always done."""
        self._keepable, self._is_host, self._checks = keepable, is_host, checks or is_host
        self._save, self._bring = top_hooks(True)
        self._kept: dict[int, Kept] = {}
        self._calls: list[tuple[Any, list[Any]]] = []  # each product of the forward
        self._numbers = _Numbers()
        # During the call, if it is checked: a number, its result and the digest of that
        self._seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._number = 0

    def mode(self) -> TorchDispatchMode:
        """Makes the mode of the forward, or of a recomputation."""
        if current_task() == -1:
            return _Mode(self._keep, self._forget)
        self._number = 0
        return _Mode(self._give)

    def end(self, output: Any) -> set[int]:
        """Ends the forward. Returns the numbers of results that were written to unseen."""
        self._forget(output)
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
        number = len(self._calls)
        self._calls.append((operation, _arguments(args, kwargs)))
        results = operation(*args, **kwargs)
        if number in self._keepable and _can_be_kept(operation, args, kwargs, results):
            tensors = _tensors(results)
            digests = tuple(digest(each, self._is_host) for each in tensors) if self._checks else ()
            self._seen += [(number, each, before) for each, before in zip(tensors, digests)]
            self._numbers.add(results, number)
            self._kept[number] = Kept(
                tree_map(self._saved, results), digests if self._is_host else ()
            )
        return results

    def _saved(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Else what is saved would have a version counter of its own
        with exclude_key(WRITES_KEY, False):
            return _Saved(self._save(leaf))

    def _give(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the kept results in place of running ``operation``."""
        number, self._number = self._number, self._number + 1
        if self._calls[number : number + 1] != [(operation, _arguments(args, kwargs))]:
            self._kept.clear()  # this recomputation has other products
        kept = self._kept.pop(number, None)
        if kept is None or any(
            leaf.is_changed for leaf in tree_leaves(kept.results) if isinstance(leaf, _Saved)
        ):
            return operation(*args, **kwargs)
        results = tree_map(
            lambda leaf: self._bring(leaf.packed) if isinstance(leaf, _Saved) else leaf,
            kept.results,
        )
        digests = (digest(each, self._is_host) for each in _tensors(results))
        if not all(map(torch.equal, digests, kept.digests)):
            return operation(*args, **kwargs)
        return results

    def _forget(self, values: Any) -> None:
        for number in self._numbers.pop(values):
            self._kept.pop(number, None)


class _Saved:
    """A tensor as it is saved."""

    def __init__(self, packed: Any):
        self.packed = packed

    @property
    def is_changed(self) -> bool:
        """Whether it is here, and was written to since."""
        there = self.packed.packed if isinstance(self.packed, WithinBudget) else self.packed
        return isinstance(there, SavedTensor) and there.value._version != there.version


class _Mode(TorchDispatchMode):
    """Runs the products of a call by ``product``, tells ``written`` what else is written to, and
    ``see`` of each operation before it runs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leaves what is compiled inside of the block compiled."""
        return True

    def __init__(
        self,
        product: Callable[[Any, tuple, dict], Any],
        written: Callable[[Any], None] = lambda values: None,
        see: Callable[[Any, tuple, dict], None] | None = None,
    ):
        super().__init__()
        self._product, self._tell_written, self._see = product, written, see

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._see is not None:
            self._see(operation, args, kwargs)
        if is_product(operation):
            return self._product(operation, args, kwargs)
        for place, name in _written(operation):
            self._tell_written(args[place] if place < len(args) else kwargs.get(name))
        return operation(*args, **kwargs)
