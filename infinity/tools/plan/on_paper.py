"""On paper: shards, splits and lays out a model for ranks that are not there.

child   a process forked for it, with torch's process group "fake", which transfers nothing. The
        group of this process stays as it is
trial   a forward and a backward of one layer on meta: what it saves for the backward, and what it
        sends to the other ranks of tp. What layers of experts send over ep is added to it: routers
        choose by values, which meta has not
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.machine import processors
from ...core.units.forms import local_of
from ...errors import ConfigError, InfinityError, InternalError
from ...ext.blocks.products import Counted
from ...ext.dtensor.tensors import tensor_parallel
from ...ext.experts_parallel.experts import chosen_of, expert_parallel, expert_parameters
from ...ext.pipeline.boundaries import axis_that_shares
from ...ext.pipeline.stages import Chain, chain_of
from .mesh_bytes import all_gather_nbytes, all_reduce_nbytes, expert_nbytes
from .work import TOKENS, CountingWork, Work, sizes_of_product

T = TypeVar("T")
_to_parent: list[Connection] = []  # of a child
EXCHANGES = 2  # all-to-alls of a layer of experts: to them and back
ADDING = 3  # times a gradient's bytes: it is read, and its sum is read and written
FUSED = ("sdpa", "flash", "flex", "kernels")  # attention of these names keeps no scores
SAVED_WIDTHS, OF_PARTS = 10, 24  # bytes of 2 a token and width: whole, and of the parts


def in_children(
    works: Sequence[Callable[[], T]],
    ranks: int,
    heard: Callable[[Any], None] = lambda value: None,
) -> list[T]:
    """Runs each of ``works`` in a child of its own, where it is rank 0 of ``ranks``. Returns the
    results, in order. They run at the same time, as many as there are processors. ``heard`` gets
    what they :func:`tell` meanwhile.

    Raises what a child raised; InternalError if one ended.
    """
    context, results = multiprocessing.get_context("fork"), {}
    waiting = list(enumerate(works))[::-1]
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processors.available():
                number, work = waiting.pop()
                here, there = context.Pipe(duplex=False)
                child = context.Process(target=_run, args=(work, ranks, there), daemon=True)
                child.start()
                there.close()
                running[here] = number, child
            for here in multiprocessing.connection.wait(list(running)):
                number, child = running[here]  # type: ignore[index]
                is_told, value = _received(here, child)  # type: ignore[arg-type]
                if is_told:
                    heard(value)
                    continue
                del running[here]  # type: ignore[arg-type]
                child.join()
                result, error = value
                if error is not None:
                    raise error
                results[number] = result
    finally:
        for _, child in running.values():
            child.kill()
            child.join()
    return [results[number] for number in range(len(works))]


def _received(here: Connection, child: Any) -> tuple[bool, Any]:
    """Returns the next message of a child, and whether more follow."""
    try:
        return pickle.loads(here.recv_bytes())
    except EOFError:
        child.join()
        raise InternalError(
            f"a process that plans ended with status {child.exitcode} and said nothing"
        ) from None


def tell(value: Any) -> None:
    """Sends ``value`` from a child to its parent, beside what the work returns."""
    if _to_parent:
        _to_parent[-1].send_bytes(pickle.dumps((True, value)))


def _run(work: Callable[[], Any], ranks: int, there: Connection) -> None:
    """Runs in a child: begins its own process group and sends what ``work`` returns or raises."""
    _to_parent.append(there)
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        logging.disable(logging.WARNING)  # of choices that are only tried
        # A group of the parent came along with the fork; its connections are the parent's.
        dist.distributed_c10d._world = dist.distributed_c10d._World()
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        sent = work(), None
    except InfinityError as error:
        sent = None, error
    except Exception as error:  # noqa: BLE001 - told in the parent
        sent = None, InternalError(f"planning on paper: {type(error).__name__}: {error}")
    there.send_bytes(pickle.dumps((False, sent)))
    there.close()
    os._exit(0)  # nothing of the parent is to be shut down here


@dataclass(frozen=True)
class Trial:
    """What one token costs in a part of a model: bytes that its forward saves, the bytes and
    messages that a rank sends over tp, or over ep, and what it computes."""

    saved: float = 0.0
    forward_nbytes: float = 0.0
    backward_nbytes: float = 0.0
    forward_messages: int = 0  # of a micro-batch, whatever its tokens
    backward_messages: int = 0
    forward_work: Work = field(default_factory=Work)
    backward_work: Work = field(default_factory=Work)
    # Of the products that may be kept when the rest is computed again: bytes, and their work
    products: float = 0.0
    product_work: Work = field(default_factory=Work)
    is_counted: bool = True  # False: estimated, the model cannot run on meta

    def plus(self, other: Trial, times: int = 1) -> Trial:
        """Adds ``other``, ``times`` over."""
        sums: dict[str, Any] = {}
        for each in fields(self):
            a, b = getattr(self, each.name), getattr(other, each.name)
            sums[each.name] = a.plus(b, times) if isinstance(a, Work) else a + times * b
        return Trial(**sums | {"is_counted": self.is_counted and other.is_counted})


@dataclass(frozen=True)
class PaperModel:
    """A model on meta, sharded over ``tp`` ranks, or its experts over ``ep``. ``parts``: in which
    its ranks send what passes between stages. ``costs``: of each layer. ``layer``: a trial of one
    of its layers; ``before`` and ``after``: of what its first and its last chunk have beside
    layers. ``uncut``: why it has one stage; "" if it may have several."""

    chain: Chain
    tp: int
    ep: int
    parts: int
    costs: list[float]
    layer: Trial
    before: Trial = Trial()
    after: Trial = Trial()
    uncut: str = ""

    @property
    def is_tied(self) -> bool:
        """Whether the embedding table is also the head."""
        return bool(
            getattr(self.chain.model.config.get_text_config(), "tie_word_embeddings", False)
        )

    @property
    def input_nbytes(self) -> int:
        """The bytes a token that come into a layer."""
        width = self.chain.model.config.get_text_config().hidden_size
        return width * next(self.chain.model.parameters()).dtype.itemsize

    def saved_of(self, layers: range, *, recomputes: bool) -> tuple[float, float]:
        """Counts the bytes a token that forwards through a chunk save: those that wait for the
        backward, and those that one layer saves when the backward ``recomputes`` it."""
        kept = self.trial_of(layers).saved
        if not recomputes:
            return kept, 0.0
        ends = kept - len(layers) * self.layer.saved
        return len(layers) * self.input_nbytes + ends, self.layer.saved

    def trial_of(self, layers: range) -> Trial:
        """Returns what a token costs in a chunk."""
        trial = Trial().plus(self.layer, len(layers))
        if layers.start == 0:
            trial = trial.plus(self.before)
        return trial.plus(self.after) if layers.stop == len(self.chain.layers) else trial


def shard_on_paper(
    model: nn.Module, tp: int, ep: int = 1, *, fused_loss: bool = False
) -> PaperModel:
    """Shards ``model``, on meta, over ``tp`` ranks of the process group, or its experts over
    ``ep``, and tries its layers. The model is changed. ``fused_loss``: whole logits never exist,
    unless tp divides the output layer. Raises ConfigError if the model cannot be sharded."""
    ranks, inner = dist.get_world_size(), max(tp, ep)
    name = "ep" if ep > 1 else "tp"
    mesh = init_device_mesh("cpu", (ranks // inner, inner), mesh_dim_names=("dp", name))
    chain, uncut = _chain(model)
    costs = chain.costs()
    if tp > 1:
        tensor_parallel(model, mesh["tp"], quiet=True)
    parts = tp if ep == 1 and axis_that_shares(model, mesh) is not None else 1
    trials = _trials(chain, tp, fused_loss=fused_loss and tp == 1)
    if ep > 1:
        sent = _sent_to_experts(chain, ep)
        expert_parallel(model, mesh["ep"], exchange="tokens", quiet=True)
        trials = tuple(trial.plus(each) for trial, each in zip(trials, sent))
    layer, first, last = trials
    before, after = (each.plus(layer, -1) for each in (first, last))
    return PaperModel(chain, tp, ep, parts, costs, layer, before, after, uncut)


def _places(chain: Chain) -> list[range]:
    """Returns a layer that stands for all, the first and the last one."""
    count = len(chain.layers)
    middle = count // 2 if count > 2 else 0
    return [range(middle, middle + 1), range(0, 1), range(count - 1, count)]


def _trials(chain: Chain, tp: int, *, fused_loss: bool) -> tuple[Trial, ...]:
    """Tries a layer that stands for all, the first and the last one."""
    try:
        return tuple(_try(chain, place, tp, fused_loss=fused_loss) for place in _places(chain))
    except Exception:  # noqa: BLE001 - models that look at values do not run on meta
        return (_estimate(chain, tp),) * 3


def _sent_to_experts(chain: Chain, ep: int) -> tuple[Trial, ...]:
    """Counts what the same layers send over ``ep``, if all experts are chosen as often."""
    config = chain.model.config.get_text_config()
    itemsize = next(chain.model.parameters()).dtype.itemsize
    nbytes = expert_nbytes(1, config.hidden_size, itemsize, ep, chosen_of(chain.model))
    theirs, trials = {id(param) for param in expert_parameters(chain.model)}, []
    for place in _places(chain):
        has = any(id(param) in theirs for param in chain.layers[place.start].parameters())
        messages = EXCHANGES * has
        trials.append(Trial(0.0, has * nbytes, has * nbytes, messages, messages))
    return tuple(trials)


def _chain(model: nn.Module) -> tuple[Chain, str]:
    """Finds the chain of a model. One that is not cut is a chain of itself; also returns why."""
    try:
        return chain_of(model), ""
    except ConfigError as error:
        return Chain(model, [model], [], [], lambda _: model), str(error)


def _estimate(chain: Chain, tp: int) -> Trial:
    """Estimates a layer by its width (Korthikanti et al., Reducing Activation Recomputation, 2022,
    section 4, without the scores of attention; two all-reduces each way)."""
    width = chain.model.config.get_text_config().hidden_size
    itemsize = next(chain.model.parameters()).dtype.itemsize
    sent = 2 * all_reduce_nbytes(width * itemsize, tp)
    messages = 4 * (tp - 1)
    saved = width * (SAVED_WIDTHS + OF_PARTS / tp) * itemsize / 2
    return Trial(saved, sent, sent, messages, messages, is_counted=False)


def _try(chain: Chain, layers: range, tp: int, *, fused_loss: bool) -> Trial:
    """Runs a chunk forward and backward on meta."""
    chunk = chain.make_chunk(layers).train()
    weights = {id(local_of(param).untyped_storage()) for param in chunk.parameters()}
    inputs = _inputs(chain, layers)
    saved: dict[int, tuple[int, torch.Size, Any]] = {}  # bytes, last dimension, storage

    itemsize = next(chain.model.parameters()).dtype.itemsize
    products = ProductsOnPaper(itemsize) if tp == 1 else None

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if products is not None:
            products.note_saved()
        local = local_of(tensor)
        storage = local.untyped_storage()
        # A fused kernel saves no scores of attention, which the plain one on meta does.
        if local.shape[-2:] != (TOKENS, TOKENS):
            saved[id(storage)] = storage.nbytes(), local.shape[-1:], storage
        return tensor

    forward, backward = CountingSends(tp), CountingSends(tp)
    config = chain.model.config.get_text_config()
    how = getattr(config, "_attn_implementation", None) or "sdpa"
    scores = not how.startswith(FUSED)
    ahead, back = CountingWork(scores=scores), CountingWork(scores=scores)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
    counted = contextlib.nullcontext() if products is None else products.mode()
    with forward, ahead, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with counted:
            output = chunk(inputs, attention_mask=mask)
        output = output if isinstance(output, torch.Tensor) else output.logits
        if products is not None:
            products.end(output)
        whole = None
        if layers.stop == len(chain.layers):
            whole = output.shape[-1:] if fused_loss else None
            labels = torch.zeros(TOKENS, dtype=torch.long, device="meta")
            output = nn.functional.cross_entropy(output.flatten(0, 1).float(), labels)
    with backward, back:
        output.backward(torch.empty_like(output))
    added = 0
    for param in chunk.parameters():
        if param.grad is not None:
            added += ADDING * local_of(param.grad).nbytes
        param.grad = None
    kept = sum(
        nbytes for key, (nbytes, size, _) in saved.items() if key not in weights and size != whole
    )
    return Trial(
        saved=kept / TOKENS,
        forward_nbytes=forward.nbytes / TOKENS,
        backward_nbytes=backward.nbytes / TOKENS,
        forward_messages=forward.messages,
        backward_messages=backward.messages,
        forward_work=ahead.work,
        backward_work=dataclasses.replace(back.work, added=added),
        products=0.0 if products is None else sum(products.nbytes.values()) / TOKENS,
        product_work=Work() if products is None else products.work,
    )


def _inputs(chain: Chain, layers: range) -> torch.Tensor:
    if layers.start == 0:
        return torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    width = chain.model.config.get_text_config().hidden_size
    dtype = next(chain.model.parameters()).dtype
    return torch.empty(1, TOKENS, width, dtype=dtype, device="meta", requires_grad=True)


class ProductsOnPaper(Counted):
    """Counts the products of a forward on meta that the engine would keep. Scores of attention are
    none of them: a fused kernel computes them with its output."""

    def __init__(self, itemsize: int) -> None:
        """``itemsize``: bytes of an element, which a fused kernel does not cast."""
        super().__init__(_Untimed())  # type: ignore[arg-type]
        self._itemsize, self.work = itemsize, Work()
        self._sizes: dict[int, tuple[int, int, int, int]] = {}

    def _run(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        number = self._number
        results = super()._run(operation, args, kwargs)
        if (sizes := sizes_of_product(operation, args)) is not None:
            self._sizes[number] = sizes
            if number in self.nbytes:
                self.nbytes[number] = results.numel() * self._itemsize
        return results

    def end(self, output: Any) -> None:
        """Ends the forward, as :meth:`.products.Counted.end`."""
        super().end(output)
        scores = {n for n, sizes in self._sizes.items() if sizes[1:3] == (TOKENS, TOKENS)}
        kept = {number for number in self.nbytes if number not in scores}
        # Those of an attention that is kept are computed with it
        kept_with = {number for number in scores if number + 1 in kept}
        self.work = Work(Counter(self._sizes[n] for n in kept | kept_with if n in self._sizes))
        self.nbytes = {number: self.nbytes[number] for number in kept}


class _Untimed:
    """Stands for a device that computes nothing."""

    def timing(self, count: Any) -> Any:
        return contextlib.nullcontext()


class CountingSends(TorchDispatchMode):
    """Counts what a rank sends in the collectives inside the block, as rings over all its ranks."""

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks, self.nbytes, self.messages = ranks, 0.0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, torch.Tensor) and kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does on its local part comes here again
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "c10d_functional", "_c10d_functional"):
            self.note(func._schema.name.rpartition("::")[2], args, result)
        return result

    def note(self, name: str, args: tuple, found: Any) -> None:
        """Counts the collective ``name``, from its arguments and what it returned."""
        tensor = args[0]
        tensor = tensor[0] if isinstance(tensor, (list, tuple)) else tensor
        if "allreduce" in name or "all_reduce" in name:
            self.nbytes += all_reduce_nbytes(tensor.nbytes, self.ranks)
            self.messages += 2 * (self.ranks - 1)
        elif "gather" in name:
            self.nbytes += all_gather_nbytes(found.nbytes, self.ranks)
            self.messages += self.ranks - 1
        elif "scatter" in name:
            self.nbytes += all_gather_nbytes(tensor.nbytes, self.ranks)
            self.messages += self.ranks - 1
