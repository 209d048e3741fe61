"""Unmoved: counts and reports what stays with a model's modules: buffers, and weights that the
engine does not move. The plan counts them together, as buffers."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import nn

from ...errors import ConfigError
from ..machine.sizes import format_nbytes
from ..units.added import always_rests
from ..units.forms import is_plain, local_of
from ..units.inner import has_inner, inner_tensors, nbytes_of
from .described_model import STAYS, DescribedModel, is_managed

logger = logging.getLogger(__name__)


def unmoved_nbytes(model: DescribedModel) -> int:
    """Counts the bytes that stay with the modules of ``model``, each storage once; on meta, the
    future ones. Views of parameters that move are not counted here."""
    moved = {
        local_of(param).untyped_storage()._cdata
        for param in model.users
        if is_managed(param) and _has_storage(param)
    }
    found: dict[tuple[str, int], int] = {}
    rest = [p for p in model.unmanaged.values() if not has_inner(p)]
    for tensor in (*model.buffers.values(), *rest, *(place.tensor for _, place in model.unlisted)):
        if always_rests(tensor):
            continue
        if _has_storage(tensor):
            storage = local_of(tensor).untyped_storage()
            found["storage", storage._cdata] = 0 if storage._cdata in moved else storage.nbytes()
        else:
            found["other", id(tensor)] = nbytes_of(tensor)
    return sum(found.values())


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not has_inner(tensor)


def report_unmoved(model: DescribedModel) -> None:
    """Warns of the weights that the engine does not move, with their bytes."""
    rest = [
        param
        for param in model.unmanaged.values()
        if not (has_inner(param) and any(map(always_rests, inner_tensors(param))))
    ]
    if rest:
        kinds = ", ".join(
            f"{count} {name}"
            for name, count in Counter(type(param).__name__ for param in rest).items()
        )
        trained = sum(hasattr(param, STAYS) for param in rest)
        logger.warning(
            "%s of this model's weights (%s) stay where they are, %s: the engine does not move"
            " them, and plans them with the model's buffers",
            format_nbytes(sum(map(nbytes_of, rest))),
            kinds,
            f"{trained} of them trained by torch's own optimizer" if trained else "frozen",
        )


# Libraries whose packed weights are objects around memory of their own -> what works
ELSEWHERE = {
    "triton_kernels": "load the model with transformers.Mxfp4Config(dequantize=True)",
    "transformer_engine": "give the model plain parameters, and compute in fp8 by autocast",
}


def refuse_elsewhere(model: DescribedModel) -> None:
    """Raises ConfigError for a weight whose bytes lie elsewhere than in its own memory: nothing
    that is done to it would reach them."""
    for module, path in model.modules.items():
        own = {**vars(module), **module._parameters, **module._buffers}
        for key, value in own.items():
            kind, name = type(value), f"{path}.{key}" if path else key
            library = kind.__module__.partition(".")[0]
            holds = isinstance(value, torch.Tensor) or library == "triton_kernels"
            if library in ELSEWHERE and holds:
                raise ConfigError(
                    f"{name} is a {kind.__name__} of {library}, whose bytes lie elsewhere, so that"
                    f" nothing can move them: {ELSEWHERE[library]}"
                )
            if isinstance(value, nn.Parameter) and _is_hollow(value):
                raise ConfigError(
                    f"{name} is a {kind.__name__} ({kind.__module__}) of {value.numel()} elements"
                    " without memory of its own: its bytes lie elsewhere, and nothing can move"
                    " them. Load the model unpacked, or packed by bitsandbytes or torchao"
                )


def _is_hollow(param: torch.Tensor) -> bool:
    """Tells whether a parameter says that it has elements and has no memory."""
    if type(param) is nn.Parameter or not _has_storage(param) or not is_plain(param):
        return False
    try:
        return param.numel() > 0 and param.untyped_storage().data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        return True
