"""sequence_parallel: divides the tokens of a language model's batch over the ranks of a mesh axis.

part       a rank's neighbouring tokens of every sequence, as many as each other rank's
exchange   an all-to-all that turns a part's tokens with all heads into all tokens with a part of
           the heads, or back

All layers but attention compute each token by itself, so they run on the part. Attention runs on
all tokens, with a part of the heads (Jacobs et al. 2023, DeepSpeed Ulysses): it is the one that the
model would have had, over a window or over all tokens.

Modules that only turn positions into embeddings get all positions, since some choose their
frequencies by the largest one, and a part of what they return is used. Every other module is tried
once for each length: what it computes for the part must be the same if more tokens precede it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...core.params.tensors import digest_of
from ...errors import ConfigError, UsageError
from ..attention.neighborhood_backends import neighborhood_attention
from ..dtensor.agreement import agree_over, check_axis, collect, describe_model
from .token_wise import computes_positions, depends_on_others, is_like

NAME = "infinity_sequence_parts"  # of an attention, for transformers
IGNORED = -100  # transformers' label of a token that has no loss
HEADS, TOKENS = 1, 2  # dims of queries, keys and values: batch x heads x tokens x width
OF_TOKENS = ("input_ids", "inputs_embeds", "labels", "shift_labels")  # arguments that are divided
PLAIN = (type(None), bool, int, str)  # arguments that all parts may have
MIXES = (nn.modules.conv._ConvNd, nn.RNNBase)  # layers that mix tokens outside of attention
KINDS = {"full_attention", "sliding_attention"}
OWN_TERMS = ("softcap", "s_aux", "position_bias")  # of an attention, that sdpa does not have


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divides the tokens of each batch over ``mesh``, before :func:`infinity.wrap_model`. Every
    rank calls this. Returns the same object.

    model
        A causal language model of transformers. Its attention is the one that it was made with.
    mesh
        The one-dimensional ``cp`` axis of the job's mesh.

    Every rank of the axis calls the model as one process would, with the whole batch, and computes
    its part: rank r of n has tokens r T/n to (r+1) T/n of T. ``loss`` is that of the whole batch,
    equal on all of them; ``logits`` are the part's. Gradients are those of one process once
    :func:`infinity.wrap_model` has averaged them. Attention sends a rank's queries, keys, values
    and outputs to the others in each forward, and their gradients in each backward.

    Raises ConfigError on every rank, with the model unchanged: for other models, for layers that
    mix tokens outside of attention, for heads that do not divide by the ranks, or if the ranks'
    models differ. A forward raises ConfigError if ranks have other batches; UsageError for tokens
    that do not divide by the ranks, padding, packed samples, caches, and arguments that it does not
    know.
    """
    check_axis("sequence_parallel", mesh, "cp")

    def describe() -> tuple[dict[str, str], None]:
        _check(model, mesh.size())
        return describe_model(model), None

    agree_over("sequence_parallel", mesh, describe)
    if mesh.size() > 1:
        _Parts(mesh, model.config._attn_implementation).install(model)
    return model


def _check(model: nn.Module, size: int) -> None:
    """Raises ConfigError for a model whose sequences cannot be divided."""
    name, config = type(model).__name__, getattr(model, "config", None)
    takes = inspect.signature(model.forward).parameters
    is_causal = getattr(model, "loss_type", "") in (None, "ForCausalLM") and "labels" in takes
    takes_more = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    if not (is_causal and takes_more and getattr(model, "_supports_attention_backend", False)):
        raise ConfigError(
            f"sequence_parallel: {name} is not a causal language model of transformers whose"
            " attention can be chosen (attn_implementation). Give one, or divide its sequences by"
            " hand."
        )
    if "position_ids" not in takes:
        raise ConfigError(
            f"sequence_parallel: the forward of {name} takes no position_ids, so a part of a"
            " sequence would begin at position 0. Give a model that does."
        )
    mixing = [name for name, each in model.named_modules() if isinstance(each, MIXES)]
    kinds = {*(getattr(config, "layer_types", None) or ())} - KINDS
    if mixing or kinds:
        raise ConfigError(
            f"sequence_parallel: {name} has layers that mix tokens outside of attention"
            f" ({', '.join(mixing[:1] or sorted(kinds))}), which would see a part alone"
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "sequence_parallel: the loss that balances experts is not a mean over tokens: set"
            " config.output_router_logits=False"
        )
    if config._attn_implementation == "flex_attention":
        raise ConfigError(
            "sequence_parallel: flex_attention needs masks, which the parts have not: load the"
            ' model with attn_implementation="sdpa"'
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, None)) is not None:
            _check_heads(heads, size, f"{key}={heads}")


def _check_heads(heads: int, size: int, what: str) -> None:
    if heads % size:
        raise ConfigError(
            f"sequence_parallel: {what} cannot be divided among {size} ranks: give the cp axis a"
            f" size that divides {heads}"
        )


class _Parts:
    """The parts of sequences over the ranks of one axis. ``inner``: the model's own attention."""

    def __init__(self, mesh: DeviceMesh, inner: str):
        self._mesh, self._inner = mesh, inner
        self._rank, self._size, self._group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        self._places = torch.arange(0)  # of the last part's tokens
        self._computing: set[nn.Module] = set()  # those that have got all positions
        self._attending: set[type] = set()  # classes of modules that call the attention
        self._tried: set[tuple] = set()  # modules by class, settings and length
        self._tries: list[tuple[str, str] | None] = []  # in this forward: those that failed
        self._seen: list[tuple] | None = None  # while one is tried: what it gives its attention

    def __deepcopy__(self, memo: dict) -> _Parts:
        return self  # the group has no copy

    def install(self, model: nn.Module) -> None:
        """Hooks the model, and gives its layers this attention."""
        theirs = importlib.import_module("transformers")
        theirs.AttentionInterface.register(NAME, _attend)
        for module in model.modules():
            if hasattr(module, "config"):  # where a layer reads which attention it is to call
                object.__setattr__(module, NAME, self)
        model.config._attn_implementation = NAME
        names = list(inspect.signature(model.forward).parameters)

        def before(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return (), self._divided(dict(zip(names, args)) | kwargs)

        def after(_: nn.Module, __: tuple, output: Any) -> Any:
            self._refuse_dependent()
            return self._joined(output)

        for name, module in model.named_modules():
            if computes_positions(module):
                module.register_forward_pre_hook(self._with_all_positions, with_kwargs=True)
                module.register_forward_hook(functools.partial(self._of_part, name))
            elif module is not model and not type(module).__module__.startswith("torch."):
                attempt = functools.partial(self._try, name, set())
                module.register_forward_hook(attempt, with_kwargs=True)
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after)

    # --- what depends on the length ---

    def _with_all_positions(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        def whole(value: Any) -> Any:
            if not is_like(value, self._places):
                return value
            self._computing.add(module)
            places = torch.arange(self._size * value.shape[-1], device=value.device)
            return places.to(value.dtype).expand(*value.shape[:-1], -1)

        return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}

    def _of_part(self, name: str, module: nn.Module, _: Any, output: Any) -> Any:
        """Takes this part of what ``module`` has computed for all positions."""
        if module not in self._computing:
            return output  # inside of another one
        self._computing.discard(module)
        count = self._size * self._places.numel()

        def part(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(map(part, value))
            if not isinstance(value, torch.Tensor):
                return value
            if value.dim() < 2 or value.shape[1] != count:
                raise ConfigError(
                    f"sequence_parallel: {name} ({type(module).__name__}, of rope type"
                    f" {getattr(module, 'rope_type', 'unknown')}) gives a tensor of"
                    f" {tuple(value.shape)} for {count} positions, which has no parts: dim 1 must"
                    " be the tokens"
                )
            return value.chunk(self._size, 1)[self._rank]

        return part(output)

    def _try(
        self, name: str, tried: set[int], module: nn.Module, args: tuple, kwargs: dict, _: Any
    ) -> None:
        """Notes whether ``module`` gives a token something else among more tokens: it would do so
        in a part. ``tried``: the lengths at which it is known."""
        count = self._places.numel()
        if count in tried or self._seen is not None or torch.compiler.is_compiling():
            return
        tried.add(count)
        own = vars(module).items()
        settings = {name: each for name, each in own if isinstance(each, (bool, float, str))}
        key = type(module), repr(settings), count
        if key in self._tried:  # one like it
            return
        self._tried.add(key)
        inner = {type(each) for each in module.modules() if each is not module}
        if inner.isdisjoint(self._attending):
            others = torch.arange(self._size * count)
            others = others[(others // count) != self._rank]
            inputs = args, kwargs
            self._tries.append(
                (name, type(module).__name__)
                if depends_on_others(module, inputs, self._places, others, self._seeing)
                else None
            )

    def _refuse_dependent(self) -> None:
        """Raises ConfigError on all ranks if a module that was tried on any depends on the tokens
        that a rank does not have. A collective, if there was one."""
        tries, self._tries = self._tries, []
        for of_rank in collect("a forward", self._group, lambda: tries) if tries else ():
            for name, kind in filter(None, of_rank):
                raise ConfigError(
                    f"sequence_parallel: what {name} ({kind}) gives a token depends on the number"
                    " of tokens, or on those before it, of which each rank has a part. Turn that"
                    " off in the model, or train it without a cp axis."
                )

    @contextmanager
    def _seeing(self) -> Iterator[list[tuple]]:
        """Notes what layers give their attention in the block, which computes none."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    # --- the batch ---

    def _divided(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of this rank's part. A collective."""
        given = {name: value for name, value in given.items() if value is not None}

        def describe() -> tuple[dict[str, str], None]:
            self._refuse(given)
            tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
            return {name: str(digest_of(value)) for name, value in tensors.items()}, None

        agree_over("a forward over parts of sequences", self._mesh, describe)
        if (labels := given.get("labels")) is not None and "shift_labels" not in given:
            given["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        if (targets := given.get("shift_labels")) is not None:
            count = given.get("num_items_in_batch", (targets != IGNORED).sum())
            given["num_items_in_batch"] = count / self._size  # the average over ranks has all
        for name in OF_TOKENS:
            if name in given:
                given[name] = given[name].chunk(self._size, 1)[self._rank].contiguous()
        given.pop("attention_mask", None)
        tokens = given["input_ids" if "input_ids" in given else "inputs_embeds"]
        begin = self._rank * tokens.shape[1]
        self._places = torch.arange(begin, begin + tokens.shape[1])
        places = self._places.to(tokens.device)
        return given | {"position_ids": places[None], "use_cache": False}

    def _refuse(self, given: dict[str, Any]) -> None:
        """Raises UsageError for a batch that cannot be divided, with the reason and the remedy."""
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(tokens, torch.Tensor):
            raise UsageError("a forward over parts of sequences needs input_ids or inputs_embeds")
        length = tokens.shape[1]
        if length % self._size:
            raise UsageError(
                f"{length} tokens cannot be divided into {self._size} equal parts: give"
                f" {length - length % self._size} or {length + self._size - length % self._size}"
            )
        mask, places = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and not bool(mask.bool().all()):
            raise UsageError("a padded batch cannot be divided: give sequences of one length")
        if places is not None and not bool((places == torch.arange(length).to(places)).all()):
            raise UsageError(
                "position_ids that are not 0, 1, 2, ... (packed samples) cannot be divided: leave"
                " them out, so that the samples of a row are one sequence"
            )
        known = (*OF_TOKENS, "attention_mask", "position_ids", "num_items_in_batch")
        for name, value in given.items():
            if name not in known and not isinstance(value, PLAIN):
                raise UsageError(
                    f"{name} has no parts: leave it out. To generate, load the saved model in one"
                    " process."
                )
        if given.get("logits_to_keep") or given.get("output_router_logits"):
            raise UsageError(
                "logits_to_keep and output_router_logits have no parts: leave both out"
            )

    def _joined(self, output: Any) -> Any:
        """Gives ``output`` the loss of the whole batch. Its gradient stays that of the part."""
        is_tuple = isinstance(output, tuple)
        loss = output[0] if is_tuple else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            return output
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=self._group)
        loss = loss + (whole / self._size - loss.detach())
        if is_tuple:
            return loss, *output[1:]
        output.loss = loss
        return output

    # --- attention ---

    def attend(self, module: nn.Module, given: tuple, window: int | None, more: dict) -> Any:
        """Computes attention of this part's queries, keys and values to all tokens."""
        self._attending.add(type(module))
        if self._seen is not None:
            self._seen.append((*given, more.get("scaling")))
            query, _, value = given
            return value.repeat_interleave(
                query.shape[HEADS] // value.shape[HEADS], HEADS
            ).transpose(HEADS, TOKENS)
        for each in given:
            _check_heads(each.shape[HEADS], self._size, f"{each.shape[HEADS]} heads of a layer")
        given = tuple(_exchange(each, HEADS, TOKENS, self._group) for each in given)
        out = self._whole_attention()(module, *given, window, more)
        return _exchange(out.transpose(1, 2), TOKENS, HEADS, self._group).transpose(1, 2)

    def _whole_attention(self) -> Callable[..., torch.Tensor]:
        """Returns the attention of all tokens; its output is batch x tokens x heads x width."""
        theirs = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        if self._inner not in ("eager", "sdpa", None):
            own = theirs[self._inner]
            return lambda module, q, k, v, window, more: own(
                module, q, k, v, None, sliding_window=window, **more
            )[0]

        def attend(module, q, k, v, window, more):
            if window is None or window >= q.shape[TOKENS]:
                return theirs["sdpa"](module, q, k, v, None, **more)[0]
            scale = more.get("scaling") or q.shape[-1] ** -0.5
            out = neighborhood_attention(
                q * (scale * q.shape[-1] ** 0.5), k, v, shape=q.shape[2], window=window, causal=True
            )
            return out.transpose(1, 2)

        return attend


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Computes a layer's attention, as transformers calls it."""
    refused = [name for name in OWN_TERMS if more.get(name) is not None]
    if attention_mask is not None or refused:
        raise UsageError(
            f"sequence_parallel: {type(module).__name__} gives its attention"
            f" {', '.join(refused) or 'a mask'}, which has no parts"
        )
    if not getattr(module, "is_causal", True) and sliding_window is not None:
        raise UsageError("sequence_parallel: a window that is not causal is not available")
    parts: _Parts = getattr(module, NAME)
    return parts.attend(module, (query, key, value), sliding_window, more), None


class _Exchanged(torch.autograd.Function):
    """Divides one dim among the ranks, and joins their parts along another."""

    @staticmethod
    def forward(ctx, tensor, divided, joined, group):
        ctx.dims, ctx.group = (divided, joined), group
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), divided))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx, grad):
        divided, joined = ctx.dims
        return _exchange(grad, joined, divided, ctx.group), None, None, None


def _exchange(
    tensor: torch.Tensor, divided: int, joined: int, group: dist.ProcessGroup
) -> torch.Tensor:
    return _Exchanged.apply(tensor, divided, joined, group)
