"""Sharded layers: a layer whose weight tensor parallelism has sharded computes in tiles of its
local part, and gives and takes DTensors as torch's own layer does.

columns  a weight sharded by its outputs: every rank has the whole input and a part of the output,
         and the gradient of the input is partial
rows     a weight sharded by its inputs: every rank has a part of the input, and the output is
         partial; so is that of a table sharded by its vocabulary, whose ids are whole
style    how transformers runs a sharded layer: a forward around the layer's own. It may give the
         layer a local part, and complete what that returns
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ...core.units.forms import division_of, is_plain, local_of

STYLES = "transformers.distributed.tensor_parallel"


def can_run_in_tiles(weight: Any) -> bool:
    """Tells whether each rank has rows of ``weight``, of one width on all, and no other rank has
    the same: a gradient of these would be partial."""
    if is_plain(weight):
        return True
    sizes, placements = weight.device_mesh.shape, weight.placements
    if not all(isinstance(placement, Shard) for placement in placements):
        return False
    ranks = [1, 1]  # that divide the rows, and their widths
    for size, placement in zip(sizes, placements):
        ranks[placement.dim] *= size
    rows, width = weight.shape
    return width % ranks[1] == 0 and -(-rows // ranks[0]) * (ranks[0] - 1) < rows


def linear(
    layer: nn.Module,
    outputs: int,
    input: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    *,
    has_style: bool,
) -> torch.Tensor:
    """Runs a linear layer, whose weight has its outputs in dimension ``outputs``, by
    ``compute(input, bias)`` of local parts. Of a layer with a style, ``input`` may be a local part:
    returns the local output then, without the bias if it is partial, which the style adds to the
    sum. Raises RuntimeError for another mixture of DTensors and plain tensors, as torch does."""
    weight, bias = layer._parameters["weight"], layer.bias
    layouts = [_of_axis(each, outputs, input.dim() - 1) for each in weight.placements]
    is_sum = any(isinstance(output, Partial) for _, output in layouts)
    if has_style and not isinstance(input, DTensor):
        return compute(input, None if is_sum or bias is None else local_of(bias))
    _refuse_plain(input, *(() if bias is None else (bias,)))
    x = _divided(input, [needed for needed, _ in layouts])
    grads = [Partial() if isinstance(output, Shard) else needed for needed, output in layouts]
    columns = None
    if bias is not None and not is_sum:
        columns = _divided(bias, [Shard(0)] * len(layouts)).to_local()
    out = compute(x.to_local(grad_placements=grads), columns)
    whole = _placed(out, weight, [output for _, output in layouts], weight.shape[outputs])
    return whole + bias.to(whole.dtype) if is_sum and bias is not None else whole


def lookup(table: nn.Embedding, ids: DTensor, compute: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Looks up ``ids`` by ``compute(ids, padding_idx)``, both of which count the rows of the local
    part. The rows of other ranks are zeros in the partial output."""
    _refuse_plain(ids)
    weight: Any = table._parameters["weight"]
    layouts = [_of_axis(each, 1, ids.dim()) for each in weight.placements]
    ids = _divided(ids, [Replicate()] * len(layouts)).to_local()
    first, rows = division_of(weight).offset[0], local_of(weight).shape[0]
    here, padding_idx = ids - first, table.padding_idx
    is_elsewhere = (here < 0) | (here >= rows)
    if padding_idx is not None:
        padding_idx -= first
    out = compute(here.masked_fill(is_elsewhere, 0), padding_idx)
    out = out.masked_fill(is_elsewhere[..., None], 0)
    return _placed(out, weight, [output for _, output in layouts], weight.shape[1])


def _refuse_plain(*tensors: torch.Tensor) -> None:
    if not all(isinstance(each, DTensor) for each in tensors):
        raise RuntimeError(
            "a layer with a weight that is a DTensor got a plain tensor: give it a DTensor, or run"
            " it by the style of its plan"
        )


def _of_axis(placement: Any, outputs: int, last: int) -> tuple[Placement, Placement]:
    """Returns the placements of input and output over an axis of the weight's mesh. ``last``: their
    last dimension."""
    return (Replicate(), Shard(last)) if placement.dim == outputs else (Shard(last), Partial())


def _divided(tensor: Any, placements: list[Placement]) -> Any:
    """Returns ``tensor`` with ``placements``; itself if it has them, for a redistribution to its
    own placements sums a partial gradient."""
    return (
        tensor
        if list(tensor.placements) == placements
        else tensor.redistribute(placements=placements)
    )


def _placed(out: torch.Tensor, weight: Any, placements: list[Placement], width: int) -> DTensor:
    """Makes the output of its local part. ``width``: of the whole, whose parts may differ."""
    shape = torch.Size((*out.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, weight.device_mesh, placements, shape=shape, stride=stride)


def style_of(layer: nn.Module) -> tuple[Any, Any] | None:
    """Returns transformers' style of ``layer``, with its mesh; None if it has no style."""
    forward = layer.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or forward.__module__ != STYLES:
        return None
    known = inspect.getclosurevars(forward).nonlocals
    own = getattr(known.get("original_forward"), "__func__", None)
    if own is not type(layer).forward or "self" not in known:
        return None
    return known["self"], known["mesh"]


def in_style(layer: nn.Module, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns ``forward`` with what transformers' style of ``layer`` does before and after it;
    ``forward`` itself if it has none."""
    if (found := style_of(layer)) is None:
        return forward
    (style, mesh), reference = found, weakref.ref(layer)

    def styled(*args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = style.transform_inputs_pre_forward(reference(), args, kwargs, mesh)
        out = forward(*args, **kwargs)
        return style.transform_output_post_forward(reference(), out, mesh)

    return styled
