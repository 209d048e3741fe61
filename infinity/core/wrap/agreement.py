"""Agreement: compares wrap_model's inputs over the ranks, and divides a machine's memory, disks and
processors among its ranks.

declared   what one rank has been given, as far as the others must know it. The model is read for it
           once; then ranks exchange what they declared
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from ...choices import AUTO
from ...config import Config
from ...errors import ConfigError
from ...ranks.collectives import Collectives
from ...ranks.parallel_dims import ParallelDims
from ..machine import numa, processors
from ..machine.device import Device
from ..machine.tiers import Tier
from ..params.tensors import overwrite
from ..plan.budgets import measured_free
from ..plan.plan import check_folders
from ..units.added import always_rests
from ..units.forms import division_of, is_common, local_of
from ..units.handle import raw_grad
from ..units.inner import has_inner
from .described_model import DescribedModel, is_managed
from .module_settings import describe_modules, describe_orders

logger = logging.getLogger(__name__)


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
    digests: dict[str, str]  # of each table of :class:`Declared`


@dataclass(frozen=True)
class Declared:
    """What one rank has been given, in tables: told if digests differ. Empty if nobody compares
    it."""

    inputs: dict[str, str] = field(default_factory=dict)  # of the ranks of a stage
    built: dict[str, str] = field(default_factory=dict)  # of data ranks
    settings: dict[str, str] = field(default_factory=dict)  # of all ranks
    values: dict[str, bytes] = field(default_factory=dict)  # digests, of data ranks
    common: dict[str, bytes] = field(default_factory=dict)  # digests, of tp ranks
    names: set[str] = field(default_factory=set)  # of this stage's parameters
    nbytes: int = 0

    def summary(self, ranks: ParallelDims) -> Summary:
        """Returns what every rank is told."""
        tables = {name: told for name, told in vars(self).items() if isinstance(told, dict)}
        digests = {
            name: hashlib.blake2b(repr(sorted(told.items())).encode(), digest_size=16).hexdigest()
            for name, told in tables.items()
        }
        return Summary(ranks.world_rank, ranks.local_size, self.nbytes, digests)


def declare(
    model: DescribedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    config: Config,
    ranks: ParallelDims,
) -> Declared:
    """Describes the inputs of wrap_model for the other ranks. Raises ConfigError for a trained
    parameter that the optimizers lack."""
    if ranks.alone:
        return Declared()
    inputs = _inputs(model, optimizers, config)
    parts = {name: local_of(param) for name, param in model.managed.items()}
    built, values, common = {}, {}, {}
    if ranks.data_size > 1:
        around = (m for m, its in model.children.items() if any(c in model.divided for _, c in its))
        built = describe_orders(model.managed.items())
        built |= describe_modules(model.modules, unlike=[*model.divided, *around])
        divided = {name for name, param in model.params.items() if param in model.divided_params}
        values = samples_of({name: part for name, part in parts.items() if name not in divided})
    if ranks.tp_group is not None:
        managed = model.managed.items()
        common = samples_of({name: parts[name] for name, param in managed if is_common(param)})
    return Declared(
        inputs,
        built,
        {k: v for k, v in inputs.items() if k.startswith("Config(") or k == "the optimizer"},
        values,
        common,
        {name for name, param in model.named if param not in model.alone},
        model.nbytes,
    )


def _inputs(
    model: DescribedModel, optimizers: Sequence[torch.optim.Optimizer], config: Config
) -> dict[str, str]:
    """Describes the inputs that must be the same on every rank."""
    inputs = describe_config(config)
    inputs["the model"] = type(model.module).__name__
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    given = {param for group in groups for param in group["params"]}
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
        if optimizers and param.requires_grad and param not in given and is_managed(param):
            raise ConfigError(
                f"parameter {name} requires a gradient but is not in the optimizer: with several"
                " ranks nobody would average it. Give it to the optimizer, or set"
                " requires_grad=False."
            )
    inputs["the optimizer"] = ", ".join(type(each).__name__ for each in optimizers) or "None"
    for i, group in enumerate(groups):
        names = [model.names.get(param, ["another"])[0] for param in group["params"]]
        inputs[f"the optimizer's group {i}"] = (
            f"{len(names)} parameters, {', '.join(names[:3])}, ..."
        )
        inputs[f"all names of the optimizer's group {i}"] = hashlib.blake2b(
            "\n".join(names).encode(), digest_size=8
        ).hexdigest()
    return inputs


def agree(mine: Declared, collectives: Collectives) -> tuple[int, Fraction]:
    """Compares what the ranks declared. Returns how many ranks a machine has at most, and this
    rank's fraction of its machine. Raises ConfigError for what must be equal, and warns of values
    that look like a mistake. Every rank calls this."""
    ranks = collectives.ranks
    if ranks.alone:
        return ranks.local_size, Fraction(1, ranks.local_size)
    with collectives.together("comparing what wrap_model was given"):
        everyones = collectives.collect(mine.summary(ranks), "wrap_model")
        of_stage = ranks.data_size * ranks.tp_size
        stage = everyones[ranks.pp_rank * of_stage :][:of_stage]
        data = stage[ranks.tp_rank * ranks.data_size :][: ranks.data_size]
        # Other stages do not see a difference here.
        if _differ("inputs", stage):
            collectives.compare(mine.inputs, "wrap_model")
        if _differ("built", data):
            collectives.compare(
                mine.built, "wrap_model", among=ranks.data_channels, remedy=OTHER_BUILDS
            )
        if _differ("settings", everyones):
            collectives.compare(mine.settings, "wrap_model", over_stages=True)
        if _differ("values", data):
            theirs = collectives.collect(mine.values, "samples of the values", ranks.data_channels)
            if (others := _other_names(theirs)) and ranks.is_first:
                logger.warning(OTHER_VALUES, len(others), len(mine.values), others[0])
        if _differ("common", stage):
            theirs = collectives.collect(
                mine.common, "samples of what the tp ranks have in common", ranks.unit_channels
            )
            if others := _other_names(theirs[ranks.data_rank :: ranks.data_size]):
                raise ConfigError(OTHER_COMMON.format(len(others), len(mine.common), others[0]))
    local_size = max(each.local_size for each in everyones)
    return local_size, _share_of_machine(everyones, stage, ranks, local_size)


def _differ(table: str, summaries: Sequence[Summary]) -> bool:
    return len({each.digests[table] for each in summaries}) > 1


def _other_names(everyones: Sequence[dict[str, bytes]]) -> list[str]:
    """Lists the names whose digests differ from the first rank's."""
    first = everyones[0]
    return sorted({n for each in everyones for n, digest in each.items() if digest != first.get(n)})


OTHER_BUILDS = (
    "Build the same model on all ranks: weight.data = weight.data.contiguous() makes a parameter"
    " row-major, and an attribute whose name begins with _ is not compared."
)
OTHER_VALUES = (
    "wrap_model was given other values on other ranks, in %d of %d parameters (%s, ...): the first"
    " rank's count on all of them. If the ranks have different parts of a model, stages of a"
    " pipeline say, they are no replicas: give wrap_model a mesh that says so."
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


def prefix_of_stage(mine: Declared, collectives: Collectives) -> str:
    """Makes the prefix of this stage's names in checkpoints. It is empty if the names of all stages
    are distinct, so that checkpoints have the names of the whole model. Every rank calls this."""
    stages = collectives.ranks.pp_group
    if stages is None:
        return ""
    everyones = collectives.collect(mine.names, "names of the stages' parameters", [stages])
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
                collectives.broadcast(
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


def share_processors(model: DescribedModel, config: Config, collectives: Collectives) -> None:
    """Exchanges the processors that each rank may use, so that a rank starts no more threads than
    its part of the machine. A rank that computes on a GPU moves to the GPU's node first. Every rank
    calls this."""
    if collectives.ranks.alone:
        processors.share_with([])
        return
    before_binding = collectives.ranks.allowed_processors
    index = _gpu_of(model.places, config) if torch.cuda.is_available() else None
    if index is not None and before_binding is not None:
        numa.bind_to_gpu(pci_address(index), before_binding)
    here = collectives.ranks.world_rank, socket.gethostname(), sorted(processors.allowed())
    everyones = collectives.collect(here, "where the ranks may run")
    processors.share_with(
        [set(theirs) for rank, host, theirs in everyones if host == here[1] and rank != here[0]]
    )


def _gpu_of(places: list[torch.device], config: Config) -> int | None:
    """Returns the number of the GPU that will compute; None if the processor does."""
    named = [torch.device(config.device)] if config.device is not None else []
    where = next(iter([*named, *places]), None)
    if where is None or where.type != "cuda":
        return None
    if where.index is not None:
        return where.index
    return int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()


def pci_address(index: int) -> str:
    """Returns the PCI address of CUDA's device ``index``, as the kernel writes it; "" if torch does
    not tell."""
    gpu: Any = torch.cuda.get_device_properties(index)
    if not hasattr(gpu, "pci_domain_id"):
        return ""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


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
    return dict(zip(Tier, collectives.least(mine, "free memory")))
