"""Unmoved: counts and reports what stays with a model's modules: buffers, and weights that the
engine does not move. The plan counts them together, as buffers."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from ..machine.sizes import format_nbytes
from ..units.added import always_rests
from ..units.forms import local_of
from ..units.inner import has_inner, inner_tensors, nbytes_of
from .described_model import UNMOVED, DescribedModel

logger = logging.getLogger(__name__)


def unmoved_nbytes(model: DescribedModel) -> int:
    """Counts the bytes that stay with the modules of ``model``, each storage once; on meta, the
    future ones. Views of parameters that move are not counted here."""
    managed = set(model.managed.values())
    moved = {
        local_of(param).untyped_storage()._cdata
        for param in model.users
        if param in managed and has_storage(param)
    }
    sizes: dict[tuple[str, int], int] = {}
    rest = [p for p in model.unmanaged.values() if not has_inner(p)]
    for tensor in (*model.buffers.values(), *rest, *(place.tensor for _, place in model.unlisted)):
        if always_rests(tensor):
            continue
        if has_storage(tensor):
            storage = local_of(tensor).untyped_storage()
            sizes["storage", storage._cdata] = 0 if storage._cdata in moved else storage.nbytes()
        else:
            sizes["other", id(tensor)] = nbytes_of(tensor)
    return sum(sizes.values())


def has_storage(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` has a storage with its own bytes."""
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
        trained = sum(hasattr(param, UNMOVED) for param in rest)
        logger.warning(
            "%s of this model's weights (%s) stay where they are, %s: the engine does not move"
            " them, and plans them with the model's buffers",
            format_nbytes(sum(map(nbytes_of, rest))),
            kinds,
            f"{trained} of them trained by torch's own optimizer" if trained else "frozen",
        )
