"""Fit: checks a model's parts on this rank before a wrap: that the mesh has them, and that what is
around them is in parts as well."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...config import Config
from ...core.units.forms import division_of, form_of, is_plain, local_of
from ...core.wrap.agreement import samples_of
from ...core.wrap.described_model import DescribedModel
from ...errors import ConfigError
from ...ranks.parallel_dims import ParallelDims

logger = logging.getLogger(__name__)

# Options that are not available where ranks have parts of one model or sequence -> the remedy.
INSTEAD = {
    "micro_batch": "use a smaller batch, or recompute blocks with torch's checkpoint",
    "recompute": "use torch's checkpoint, or the model's gradient_checkpointing_enable()",
}


def check_fit(model: DescribedModel, config: Config, ranks: ParallelDims) -> None:
    """Raises ConfigError if the parts of ``model`` do not fit the mesh, and for options that are
    not available with them. Warns, on the first rank, of parts that may have been tied."""
    parts = ranks.tp_group.size if ranks.tp_group is not None else 1
    distributed = model.distributed
    for name, buffer in model.buffers.items():
        form_of(buffer).check(name, buffer)
    members = ranks.tp_group.ranks if ranks.tp_group is not None else [ranks.world_rank]
    for name, param in distributed.items():
        over = division_of(param).ranks
        if param in model.divided_params:
            _check_divided(name, over, ranks)
            continue
        if len(over) == parts > 1 and sorted(over) != sorted(members):
            raise ConfigError(
                f"parameter {name} is cut over ranks {over}, but the tp axis of the mesh that"
                f" wrap_model was given has ranks {members} here: cut the model over mesh['tp']"
            )
        if len(over) != parts:
            raise ConfigError(
                f"parameter {name} is cut over {len(over)} ranks, but the mesh that wrap_model was"
                f" given has tp={parts}: give it the mesh of the whole job, whose tp axis the model"
                " was cut over"
            )
    if ranks.cp_group is not None:  # each would choose by its own seconds, and wait for the others
        _refuse_options(config, f"parts of sequences (cp={ranks.cp_group.size})", "recompute")
    if parts == 1 and not distributed and ranks.pp_group is None:
        return
    _check_adapters(model)
    is_cut = parts > 1 or bool(distributed)
    stages = ranks.pp_group.size if ranks.pp_group is not None else 1
    of = f"tensor parallelism (tp={parts})" if is_cut else f"pipeline parallelism (pp={stages})"
    if ranks.expert_group is not None:
        of = f"divided experts (ep={len(ranks.expert_group.over)})"
    _refuse_options(config, of, *INSTEAD)
    if ranks.is_first:
        _warn_of_untied(model)


def _refuse_options(config: Config, of: str, *fields: str) -> None:
    """Raises ConfigError if one of these options is set, which are not available with ``of``."""
    for field in fields:
        if getattr(config, field):
            raise ConfigError(f"{field}: not available with {of} in this version: {INSTEAD[field]}")


def _check_divided(name: str, over: Sequence[int], ranks: ParallelDims) -> None:
    """Raises ConfigError for a parameter of divided experts that is sharded ``over`` other ranks
    than the mesh says."""
    members = (
        list(ranks.expert_group.over) if ranks.expert_group is not None else [ranks.world_rank]
    )
    if sorted(over) != sorted(members):
        raise ConfigError(
            f"the experts of {name} are divided among ranks {list(over)}, but the ep axis of the"
            f" mesh that wrap_model was given has ranks {members} here: give it the mesh of the"
            " whole job, with the axis ep that expert_parallel was given"
        )


def _check_adapters(model: DescribedModel) -> None:
    """Raises ConfigError for whole peft adapters around a sharded layer: they get partial
    gradients, and would diverge between ranks.

    Sets the global feature counts of adapters that peft has sharded, as transformers' forward of a
    sharded layer reads them: peft 0.21 sets the local ones.
    """
    for module, name in model.modules.items():
        base = getattr(module, "base_layer", None)
        if base is None or not hasattr(module, "lora_A") or all(map(is_plain, base.parameters())):
            continue
        for layer in (
            adapter
            for key, adapter in module.named_modules()
            if isinstance(adapter, torch.nn.Linear) and "lora_" in key
        ):
            if not is_plain(layer.weight):
                layer.out_features, layer.in_features = layer.weight.shape
        around = [
            param for key, param in module.named_parameters() if not key.startswith("base_layer.")
        ]
        if around and all(map(is_plain, around)):
            raise ConfigError(
                f"{name} has adapters of peft that are whole, around a layer that is cut over the"
                " tp axis: each rank would train another adapter. peft cuts them itself around"
                " linear layers that infinity.parallel.tensor_parallel has cut as colwise or"
                " rowwise; give other layers 'replicate' in its plan, or do not adapt them."
            )


def _warn_of_untied(model: DescribedModel) -> None:
    """Warns if two distributed parameters look like a pair that was tied before it was sharded:
    torch's parallelize_module makes two of it."""
    managed = model.managed.items()
    cut = {name: local_of(param) for name, param in managed if not is_plain(param)}
    alike: dict[tuple, str] = {}
    for name, digest in samples_of(
        {name: local for name, local in cut.items() if local.dim() > 1}
    ).items():
        other = alike.setdefault((tuple(cut[name].shape), digest), name)
        if other != name and not bool((cut[name] == cut[name].reshape(-1)[0]).all()):
            logger.warning(
                "parameters %s and %s have the same values, but are not one: they will train apart."
                " If they were tied before they were cut, tie them again (module.weight ="
                " other.weight), or cut the model with infinity.parallel.tensor_parallel, which"
                " does.",
                other,
                name,
            )
