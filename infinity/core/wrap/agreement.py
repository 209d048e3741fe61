"""Agreement: compares wrap_model's inputs over the ranks, and divides a machine's memory and disks
among its ranks.

table   a part of what one rank was given, by names. Ranks exchange the digests of their tables, and
        those that differ, to tell how
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from ...choices import AUTO
from ...config import Config
from ...errors import ConfigError
from ...ranks.collectives import Collectives
from ...ranks.parallel_dims import ParallelDims
from ..machine.device import Device
from ..machine.tiers import Tier
from ..params.tensors import overwrite
from ..plan.budgets import measured_free
from ..plan.plan import check_folders
from ..units.added import always_rests
from ..units.forms import division_of, is_common, local_of
from ..units.handle import raw_grad
from ..units.inner import has_inner
from .described_model import DescribedModel
from .module_settings import describe_modules, describe_orders

logger = logging.getLogger(__name__)

OPTIMIZER = "the optimizer"


def describe_config(config: Config) -> dict[str, str]:
    """Describes the configuration fields that must be the same on every rank."""
    found = {
        f"Config({field.name})": repr(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in ("nvme_paths", "trace", "device")
    }
    return found | {
        "Config(nvme_paths)": "found where needed" if config.nvme_paths == AUTO else "given"
    }


class Summary(NamedTuple):
    """What every rank tells every other one."""

    rank: int
    local_size: int
    nbytes: int  # of its parts of the managed parameters
    digests: dict[str, str]  # of its tables


def declare(
    model: DescribedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    config: Config,
    ranks: ParallelDims,
) -> dict[str, dict[str, Any]]:
    """Describes what wrap_model was given for the other ranks, in tables: the inputs, of a stage's
    ranks; settings, of all; what was built and its values, of data ranks; values that tp ranks have
    in common; names. Raises ConfigError for a trained parameter that the optimizers lack."""
    if ranks.alone:
        return {}
    inputs, managed = _inputs(model, optimizers, config), model.managed.items()
    common = {n: local_of(param) for n, param in managed if ranks.tp_size > 1 and is_common(param)}
    values, built = {}, {}
    if ranks.data_size > 1:
        values = {n: local_of(param) for n, param in managed if param not in model.divided_params}
        around = (m for m, its in model.children.items() if any(c in model.divided for _, c in its))
        built = describe_orders(managed)
        built |= describe_modules(model.modules, unlike=[*model.divided, *around])
    return {
        "inputs": inputs,
        "settings": {k: v for k, v in inputs.items() if k.startswith("Config(") or k == OPTIMIZER},
        "built": built,
        "values": samples_of(values),
        "common": samples_of(common),
        "names": {name: None for name, param in model.named if param not in model.alone},
    }


def _inputs(
    model: DescribedModel, optimizers: Sequence[torch.optim.Optimizer], config: Config
) -> dict[str, str]:
    """Describes the inputs that must be the same on every rank."""
    inputs = describe_config(config)
    inputs["the model"] = type(model.module).__name__
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    given = {param for group in groups for param in group["params"]}
    managed = model.managed
    for name, param in model.named:
        inputs[f"parameter {name}"] = (
            f"{tuple(param.shape)}{division_of(param).told} {param.dtype}"
            f" {'trained' if param.requires_grad else 'frozen'}"
        )
        if raw_grad(param) is not None:
            inputs[f"the gradient of {name}"] = "present"
        for optimizer in optimizers:
            if state := optimizer.state.get(param):
                inputs[f"the optimizer's state of {name}"] = ", ".join(sorted(state))
        if optimizers and param.requires_grad and param not in given and name in managed:
            raise ConfigError(
                f"parameter {name} requires a gradient but is not in the optimizer: with several"
                " ranks nobody would average it. Give it to the optimizer, or set"
                " requires_grad=False."
            )
    inputs[OPTIMIZER] = ", ".join(type(each).__name__ for each in optimizers) or "None"
    for i, group in enumerate(groups):
        names = [model.names.get(param, ["another"])[0] for param in group["params"]]
        inputs[f"the optimizer's group {i}"] = (
            f"{len(names)} parameters, {', '.join(names[:3])}, ..."
        )
        inputs[f"all names of the optimizer's group {i}"] = hashlib.blake2b(
            "\n".join(names).encode(), digest_size=8
        ).hexdigest()
    return inputs


def agree(
    tables: dict[str, dict[str, Any]], nbytes: int, collectives: Collectives
) -> tuple[int, Fraction, str]:
    """Compares the ranks' tables. Returns how many ranks a machine has at most, this rank's
    fraction of its machine, by the bytes of its parameters, and the prefix of its names. Raises
    ConfigError for what must be equal, and warns of values that look like a mistake. Every rank
    calls this."""
    ranks = collectives.ranks
    if ranks.alone:
        return ranks.local_size, Fraction(1, ranks.local_size), ""
    digests = {
        name: hashlib.blake2b(repr(sorted(table.items())).encode(), digest_size=16).hexdigest()
        for name, table in tables.items()
    }
    with collectives.together("comparing what wrap_model was given"):
        mine = Summary(ranks.world_rank, ranks.local_size, nbytes, digests)
        everyones = collectives.collect(mine, "wrap_model")
        of_stage = ranks.data_size * ranks.tp_size
        stage = everyones[ranks.pp_rank * of_stage :][:of_stage]
        data = stage[ranks.tp_rank * ranks.data_size :][: ranks.data_size]
        among = {"settings": everyones, "built": data, "values": data}
        unlike = {
            name
            for name in tables
            if len({each.digests[name] for each in among.get(name, stage)}) > 1
        }
        # Other stages do not see a difference here.
        if "inputs" in unlike:
            compare(collectives, tables["inputs"], "wrap_model", ranks.unit_channels)
        if "built" in unlike:
            compare(collectives, tables["built"], "wrap_model", ranks.data_channels, OTHER_BUILDS)
        if "settings" in unlike:
            compare(collectives, tables["settings"], "wrap_model")
        values, common = [], []
        if "values" in unlike:
            values = collectives.collect(tables["values"], "samples", ranks.data_channels)
        if "common" in unlike:
            common = collectives.collect(tables["common"], "samples", ranks.unit_channels)
        if (others := _other_names(values)) and ranks.is_first:
            logger.warning(OTHER_VALUES, len(others), len(tables["values"]), others[0])
        if others := _other_names(common[ranks.data_rank :: ranks.data_size]):
            raise ConfigError(OTHER_COMMON.format(len(others), len(tables["common"]), others[0]))
    local_size = max(each.local_size for each in everyones)
    share = _share_of_machine(everyones, stage, ranks, local_size)
    return local_size, share, prefix_of_stage(tables["names"], collectives)


def compare(
    collectives: Collectives,
    mine: dict[str, str],
    what: str,
    among: Sequence[Any] | None = None,
    remedy: str = "All ranks must be given the same.",
) -> None:
    """Raises ConfigError with the first difference, and ``remedy``, if a rank's description differs
    from the first rank's. ``among``: the channels over which they are compared; None: all."""
    everyones = collectives.collect((collectives.ranks.world_rank, mine), what, among)
    first_rank, firsts = everyones[0]
    for peer, theirs in everyones:
        for key in dict.fromkeys([*firsts, *theirs]):
            first, other = firsts.get(key, "absent"), theirs.get(key, "absent")
            if first != other:
                raise ConfigError(
                    f"{what}: {key} is {first} on rank {first_rank} and {other} on rank {peer}."
                    f" {remedy}"
                )


def least(
    collectives: Collectives, values: Sequence[int], what: str, among: Sequence[Any] | None = None
) -> list[int]:
    """Returns the minimum of each of ``values`` over the ranks of the channels ``among``; None: of
    all."""
    mine = torch.tensor(values, dtype=torch.int64, device="cpu")
    return collectives.collect(mine, what, among).amin(0).tolist()


def _other_names(everyones: Sequence[dict[str, bytes]]) -> list[str]:
    """Lists the names whose digests differ from the first rank's."""
    items = [item for each in everyones for item in each.items()]
    return sorted({name for name, digest in items if digest != everyones[0].get(name)})


OTHER_BUILDS = (
    "Build the same model on all ranks: weight.data = weight.data.contiguous() makes a parameter"
    " row-major, and an attribute whose name begins with _ is not compared."
)
OTHER_VALUES = (
    "wrap_model was given other values on other ranks, in %d of %d parameters (%s, ...): the first"
    " rank's count on all of them. If the ranks have different parts of a model, stages of a"
    " pipeline say, they are not replicas: give wrap_model a mesh that says so."
)
OTHER_COMMON = (
    "{} of {} parameters that are whole on every rank of the tp axis ({}, ...) have other values on"
    " other ranks of it. Cut them (infinity.parallel.tensor_parallel, or torch's"
    " parallelize_module), or give every rank the same values: the same seed, or the same file."
)
SAMPLED = 64  # elements of a parameter that are compared over the ranks


def samples_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Computes digests of a few elements of each tensor that has values."""
    found = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta and tensor.numel():
            sample = (
                tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLED)].cpu().contiguous()
            )
            found[name] = hashlib.blake2b(
                sample.view(torch.uint8).numpy().tobytes(), digest_size=8
            ).digest()
    return found


def prefix_of_stage(names: Iterable[str], collectives: Collectives) -> str:
    """Makes the prefix of this stage's names in checkpoints. It is empty if the names of all stages
    are distinct, so that checkpoints have the names of the whole model. Every rank calls this."""
    stages = collectives.ranks.pp_group
    if stages is None:
        return ""
    everyones = collectives.collect(set(names), "names of the stages' parameters", [stages])
    return f"stage{stages.rank}." if len(set().union(*everyones)) < sum(map(len, everyones)) else ""


def broadcast_rest(model: DescribedModel, collectives: Collectives) -> None:
    """Overwrites buffers and unmanaged parameters with the first rank's. Every rank calls this."""
    small = {name: place.tensor for name, place in model.unlisted}
    for name, tensor in [*model.unmanaged.items(), *model.buffers.items(), *small.items()]:
        if (
            collectives.ranks.data_size > 1
            and tensor.layout is torch.strided
            and not has_inner(tensor)
            and not always_rests(tensor)
        ):
            overwrite(
                tensor,
                collectives.assemble(
                    tensor.detach().clone(memory_format=torch.contiguous_format), name
                ),
            )


PARTS = 10**6  # parts of a machine: the denominator of a share


def _share_of_machine(
    everyones: Sequence[Summary], stage: Sequence[Summary], ranks: ParallelDims, local_size: int
) -> Fraction:
    """Returns this rank's fraction of its machine's memory and disks. Fractions are equal, except
    that those of pipeline stages follow the bytes of their parameters. Ranks of the same ``stage``
    get the least of their fractions, because their plans must not differ."""
    if ranks.pp_group is None or local_size == 1:
        return Fraction(1, local_size)
    here: Counter[int] = Counter()  # torchrun numbers ranks machine by machine
    for each in everyones:
        here[each.rank // local_size] += each.nbytes
    parts = (each.nbytes * PARTS // max(1, here[each.rank // local_size]) for each in stage)
    return Fraction(min(parts), PARTS)


def own_budgets(config: Config, share: Fraction) -> Config:
    """Returns the configuration with this rank's part of the machine's budgets."""
    shared = {name: getattr(config, name) for name in ("host_memory", "nvme_capacity")}
    own: dict[str, Any] = {name: int(n * share) for name, n in shared.items() if n is not None}
    return dataclasses.replace(config, **own)


def free_everywhere(
    config: Config, collectives: Collectives, device: Device, share: Fraction
) -> dict[Tier, int] | None:
    """Measures the minimum over the ranks of the free bytes of each tier, because plans must not
    differ between ranks. ``share``: this rank's fraction of its machine. Returns None if there is
    one rank. Every rank calls this."""
    if collectives.ranks.alone:
        return None
    check_folders(config)
    shares = {
        tier: Fraction(1) if tier is Tier.DEVICE and not device.is_host else share for tier in Tier
    }
    mine = [
        (
            int(measured_free(tier, config, device) * shares[tier])
            if tier is not Tier.NVME or config.nvme_paths
            else 0
        )
        for tier in Tier
    ]
    return dict(zip(Tier, least(collectives, mine, "free memory", collectives.ranks.unit_channels)))
