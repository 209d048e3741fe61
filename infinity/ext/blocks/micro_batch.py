"""Micro-batches inside units: a block runs its batch in chunks while its weights are gathered.

batch   the size of the first dimension of the block's first tensor argument
chunk   ``micro_batch`` samples. The forward keeps only a chunk's input; the backward recomputes it,
        unless a planner chooses otherwise for chunks of its number

Weights are loaded once in the forward and once in the backward, for any number of chunks. Only one
chunk's intermediate activations exist at a time. Gradients are summed over samples as in gradient
accumulation, in torch's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...core.run.context import ForwardContext
from ...core.run.journal import Journal
from ...core.run.replaced_forward import ReplacedForward
from ...core.units.unit import ParamUnit
from ...errors import ConfigError, InfinityError, UsageError
from .around import around_own
from .checkpointed import Checkpointed, random_states, set_random_states
from .recompute import ActivationPlanner, PlannedBlock
from .value_snapshot import SCALARS

# Relative tolerance between two samples run together and each alone: kernels sum in another order.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
OTHER_TOLERANCE = 5e-2


def check_block(name: str, block: nn.Module) -> None:
    """Raises ConfigError if ``block`` has batch norm, or takes the sequence dimension first."""
    refuse_batch_norm("micro_batch", name, block, "Leave micro_batch at None, or use")
    for path, module in block.named_modules():
        where = f"{name}.{path}" if path else name
        if getattr(module, "batch_first", True) is False:
            raise ConfigError(
                f"micro_batch: {where} takes the sequence first; build it with batch_first=True"
            )


def refuse_batch_norm(option: str, name: str, module: nn.Module, remedy: str = "Use") -> None:
    """Raises ConfigError, which names ``option`` and what to do first, if ``module`` has batch
    norm."""
    for path, inner in module.named_modules(prefix=name):
        if isinstance(inner, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"{option}: {path or 'the model'} is a {type(inner).__name__}, whose result depends"
                f" on the whole batch. {remedy} GroupNorm or LayerNorm in its place."
            )


def install_chunks(
    find: Callable[[], ForwardContext],
    name: str,
    block: nn.Module,
    units: Sequence[ParamUnit],
    samples: int,
    planner: ActivationPlanner | None,
) -> ReplacedForward:
    """Replaces the forward of ``block``, which uses ``units``, with one that runs in chunks of
    ``samples``. ``planner``: chooses for each chunk; None: the backward recomputes all."""
    planned = None if planner is None else partial(planner.plan, block, units)
    chunked = Chunked(name, block, samples, Checkpointed(find, units), planned)
    return ReplacedForward(block, around_own(block, chunked.run))


class Chunked:
    """The forward of a block, in chunks."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        samples: int,
        checkpointed: Checkpointed,
        plan: Callable[..., PlannedBlock] | None,
    ):
        """``plan``: makes what runs the chunks of one number, or a batch that is no larger than a
        chunk, if they are chosen for."""
        self._name, self._samples = name, samples
        self._block = weakref.ref(block)
        self._checkpointed, self._checked = checkpointed, False
        self._plan, self._planned = plan, list[PlannedBlock]()
        self._whole: PlannedBlock | None = None

    def run(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs ``forward``, the block's own, on each part of the batch."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        batch = tensors[0].size(0) if tensors else 0
        if batch <= self._samples:
            if self._plan is None:
                return forward(*args, **kwargs)
            self._whole = self._whole or self._plan(is_part=False)
            return self._whole.run(forward, args, kwargs)
        leaves = [self._without_cache(leaf) for leaf in leaves]
        split = self._split(leaves, tensors[0])
        if not self._checked:
            self._check_independence(forward, leaves, spec, split)
            self._checked = True
        outputs = []
        for number, begin in enumerate(range(0, batch, self._samples)):
            chunk = self._chunk(leaves, split, begin, min(begin + self._samples, batch))
            outputs.append(self._run_chunk(number, chunk, spec, forward))
        return self._join(outputs, batch)

    def _run_chunk(self, number: int, chunk: list, spec: Any, forward: Callable) -> Any:
        if self._plan is None:
            return self._checkpointed.run(chunk, spec, forward=forward)
        if number == len(self._planned):
            self._planned.append(self._plan(is_part=True))
        args, kwargs = tree_unflatten(chunk, spec)
        return self._planned[number].run(forward, args, kwargs)

    def _without_cache(self, leaf: Any) -> Any:
        """Replaces an empty key-value cache by None: chunks would mix in it; training needs none.

        Raises UsageError if the cache has content, or grad mode is off.
        """
        if leaf is None or isinstance(
            leaf, (torch.Tensor, bool, int, float, str, torch.dtype, torch.device)
        ):
            return leaf
        if hasattr(leaf, "get_seq_length"):  # transformers' caches
            if not torch.is_grad_enabled() or leaf.get_seq_length():
                raise UsageError(
                    f"micro_batch: {self._name} was called with a {type(leaf).__name__}, which does"
                    " not come in chunks. Pass use_cache=False, or a batch of no more than"
                    " micro_batch samples."
                )
            return None
        return leaf

    def _split(self, leaves: list, first: torch.Tensor) -> list[bool]:
        """Returns which leaves are cut: tensors whose first dimension is the batch. Raises
        UsageError if that is ambiguous."""
        batch = first.size(0)
        split = [
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == batch
            for leaf in leaves
        ]
        others = [leaf for leaf, cut in zip(leaves, split) if cut and leaf is not first]
        if batch in first.shape[1:] and any(other.shape != first.shape for other in others):
            raise UsageError(
                f"micro_batch: {self._name} was called with a batch of {batch}, which is also"
                f" another dimension of its input {tuple(first.shape)}: which of its arguments to"
                " cut cannot be told. Use another batch size."
            )
        return split

    @staticmethod
    def _chunk(leaves: list, split: list[bool], begin: int, end: int) -> list:
        return [leaf[begin:end] if cut else leaf for leaf, cut in zip(leaves, split)]

    def _join(self, outputs: list, batch: int) -> Any:
        flattened = [tree_flatten(output) for output in outputs]
        spec = flattened[0][1]
        sizes = [min(self._samples, batch - begin) for begin in range(0, batch, self._samples)]
        joined = []
        for parts in zip(*(leaves for leaves, _ in flattened)):
            if all(isinstance(part, torch.Tensor) for part in parts):
                joined.append(self._join_tensors(parts, sizes))
            elif all(
                part is None or (isinstance(part, SCALARS) and part == parts[0]) for part in parts
            ):
                joined.append(parts[0])
            else:
                raise self._not_per_sample(f"{type(parts[0]).__name__} {parts[0]!r:.80}")
        return tree_unflatten(joined, spec)

    def _join_tensors(self, parts: tuple[torch.Tensor, ...], sizes: list[int]) -> torch.Tensor:
        if all(part.dim() and part.size(0) == size for part, size in zip(parts, sizes)):
            return torch.cat(parts)
        if all(torch.equal(part, parts[0]) for part in parts[1:]):
            return parts[0]  # independent of the samples, such as a table of positions
        raise self._not_per_sample(
            f"a tensor of shape {tuple(parts[0].shape)} for {sizes[0]} samples"
        )

    def _not_per_sample(self, what: str) -> UsageError:
        return UsageError(
            f"micro_batch: {self._name} returned {what}: what does not come per sample cannot be"
            " put together. Leave micro_batch at None."
        )

    @torch.no_grad()
    def _check_independence(
        self, forward: Callable, leaves: list, spec: Any, split: list[bool]
    ) -> None:
        """Raises UsageError if a sample's result depends on its neighbours, or the block cannot run
        on parts of a batch."""
        try:
            with _unheard(self._block(), self._checkpointed.journal):
                together, first, second = self._try(forward, leaves, spec, split)
        except (
            RuntimeError,
            ValueError,
            IndexError,
            TypeError,
            AssertionError,
            AttributeError,
        ) as error:
            if isinstance(error, InfinityError):
                raise
            raise UsageError(
                f"micro_batch: {self._name} cannot run on parts of its batch ({error}). Leave"
                " micro_batch at None."
            ) from error
        for both, *alone in zip(*(tree_flatten(output)[0] for output in (together, first, second))):
            if (
                not isinstance(both, torch.Tensor)
                or not both.is_floating_point()
                or not both.dim()
                or both.size(0) != 2
            ):
                continue
            for index, one in enumerate(alone):
                scale = both.abs().max().item() if both.numel() else 0.0
                same = both.shape[1:] == one.shape[1:] and one.size(0) == 1
                away = (
                    (both[index : index + 1] - one).abs().max().item()
                    if same and both.numel()
                    else float("inf")
                )
                if both.numel() and not away <= TOLERANCES.get(both.dtype, OTHER_TOLERANCE) * max(
                    scale, 1e-6
                ):
                    raise UsageError(
                        f"micro_batch: the result of {self._name} for a sample changes by"
                        f" {away:.3g} (of {scale:.3g}) with the samples beside it: it depends on"
                        " the whole batch. Leave micro_batch at None."
                    )

    def _try(self, forward: Callable, leaves: list, spec: Any, split: list[bool]) -> list:
        """Runs two samples together and each alone. If that draws random numbers, runs them again
        in evaluation mode and restores the generators."""
        spans = ((0, 2), (0, 1), (1, 2))
        places = {
            leaf.device
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
        }
        before = random_states(places)

        def run_each() -> list:
            return [
                self._checkpointed.compute(
                    spec, *self._chunk(leaves, split, *span), forward=forward
                )
                for span in spans
            ]

        outputs = run_each()
        if all(
            torch.equal(now, then)
            for now, then in zip(random_states(places).values(), before.values())
        ):
            return outputs
        modes = {module: module.training for module in self._block().modules()}
        try:
            for module in modes:
                module.training = False
            return run_each()
        finally:
            set_random_states(before)
            for module, training in modes.items():
                module.training = training


@contextmanager
def _unheard(block: nn.Module, journal: Journal) -> Iterator[None]:
    """Disables the hooks of users and libraries inside. Afterwards restores them, and the block's
    buffers, modes and random generators, even after an exception."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    modes = [(module, module.training) for module in block.modules()]
    places = {buffer.device for buffer, _ in buffers if buffer.device.type != "cpu"}
    generators = random_states(places)
    silenced = [
        (hooks, dict(hooks))
        for module in block.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]

    def put_back() -> None:
        for hooks, all_of_them in silenced:
            hooks.clear()
            hooks.update(all_of_them)
        for buffer, value in buffers:
            buffer.copy_(value)
        for module, training in modes:
            module.training = training
        set_random_states(generators)

    journal.begin(put_back)
    for hooks, all_of_them in silenced:
        for key, hook in all_of_them.items():
            if not getattr(hook, "is_infinity", False):
                del hooks[key]
    try:
        yield
    finally:
        journal.end(put_back)
