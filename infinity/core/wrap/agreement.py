"""Agreement: compares wrap_model's inputs over the ranks, and divides a machine's memory, disks and
processors among its ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import socket
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

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


def describe(
    model: DescribedModel, optimizers: Sequence[torch.optim.Optimizer], config: Config
) -> dict[str, str]:
    """Describes the inputs of wrap_model that must be the same on every rank. Raises ConfigError
    for a trained parameter that the optimizers lack."""
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


def check_stages(description: dict[str, str], collectives: Collectives) -> None:
    """Raises ConfigError if stages of a pipeline have different configurations. Every rank calls
    this."""
    if collectives.ranks.pp_group is not None:
        settings = {
            key: value
            for key, value in description.items()
            if key.startswith("Config(") or key == "the optimizer"
        }
        collectives.compare(settings, "wrap_model", over_stages=True)


def prefix_of_stage(model: DescribedModel, collectives: Collectives) -> str:
    """Makes the prefix of this stage's names in checkpoints. It is empty if the names of all stages
    are distinct, so that checkpoints have the names of the whole model. Every rank calls this."""
    stages = collectives.ranks.pp_group
    if stages is None:
        return ""
    names = {name for name, param in model.named if param not in model.alone}
    everyones = collectives.collect(names, "names of the stages' parameters", [stages])
    return f"stage{stages.rank}." if len(set().union(*everyones)) < sum(map(len, everyones)) else ""


def compare_builds(model: DescribedModel, collectives: Collectives) -> None:
    """Raises ConfigError if data ranks have other modules, or parameters in another memory order.
    Every rank calls this."""
    if collectives.ranks.data_size == 1:
        return
    unlike = [*model.divided]
    unlike += [m for m, its in model.children.items() if any(c in model.divided for _, c in its)]
    built = describe_orders(model.managed.items())
    built |= describe_modules(model.modules, unlike=unlike)
    collectives.compare(
        built,
        "wrap_model",
        among=collectives.ranks.data_channels,
        remedy="Build the same model on all ranks: weight.data = weight.data.contiguous() makes a"
        " parameter row-major, and an attribute whose name begins with _ is not compared.",
    )


SAMPLED = 64  # elements of a parameter that are compared over the ranks


def compare_values(model: DescribedModel, collectives: Collectives) -> None:
    """Compares the ranks' initial values, and warns of values that look like a mistake. Every rank
    calls this. Raises ConfigError if values differ that must be equal."""
    warn_of_other_values(model, collectives)
    compare_common_values(model, collectives)


def warn_of_other_values(model: DescribedModel, collectives: Collectives) -> None:
    """Warns if initial values differ between data ranks, where the first rank's are used. Pipeline
    stages are not compared. Every rank calls this."""
    if collectives.ranks.data_size == 1:
        return
    with collectives.together("comparing the values"):
        common = {n: p for n, p in model.managed.items() if p not in model.divided_params}
        mine = samples_of({name: local_of(param) for name, param in common.items()})
    everyones = collectives.collect(mine, "samples of the values", collectives.ranks.data_channels)
    others = sorted(
        {
            name
            for theirs in everyones
            for name, digest in theirs.items()
            if digest != everyones[0].get(name)
        }
    )
    if others and collectives.ranks.is_first:
        logger.warning(
            "wrap_model was given other values on other ranks, in %d of %d parameters (%s, ...):"
            " the first rank's count on all of them. If the ranks have different parts of a model,"
            " stages of a pipeline say, they are no replicas: give wrap_model a mesh that says so.",
            len(others),
            len(mine),
            others[0],
        )


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


def compare_common_values(model: DescribedModel, collectives: Collectives) -> None:
    """Raises ConfigError if parameters that are whole on every tp rank have different values. Every
    rank calls this."""
    channel = collectives.ranks.tp_group
    if channel is None:
        return
    with collectives.together("comparing what the tp ranks have in common"):
        mine = samples_of({name: local_of(p) for name, p in model.managed.items() if is_common(p)})
    everyones = collectives.collect(
        mine, "samples of what the tp ranks have in common", collectives.ranks.unit_channels
    )
    each = collectives.ranks.data_size
    firsts = everyones[collectives.ranks.data_rank :: each]
    others = sorted(
        {
            name
            for theirs in firsts
            for name, digest in theirs.items()
            if digest != firsts[0].get(name)
        }
    )
    with collectives.together("having compared what the tp ranks have in common"):
        if others:
            raise ConfigError(
                f"{len(others)} of {len(mine)} parameters that are whole on every rank of the tp"
                f" axis ({others[0]}, ...) have other values on other ranks of it. Cut them"
                " (infinity.parallel.tensor_parallel, or torch's parallelize_module), or give"
                " every rank the same values: the same seed, or the same file."
            )


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


def share_of_machine(nbytes: int, collectives: Collectives, local_size: int) -> Fraction:
    """Returns this rank's fraction of its machine's memory and disks. Fractions are equal, except
    that those of pipeline stages follow the bytes of their parameters, ``nbytes`` here. Ranks with
    the same units get the least of their fractions, because their plans must not differ. Every rank
    calls this."""
    if collectives.ranks.pp_group is None or local_size == 1:
        return Fraction(1, local_size)
    me = dist.get_rank() // local_size  # torchrun numbers ranks machine by machine
    everyones = collectives.collect((me, nbytes), "the bytes of the stages")
    here = sum(its for machine, its in everyones if machine == me)
    return Fraction(
        collectives.least([nbytes * PARTS // max(1, here)], "parts of a machine")[0], PARTS
    )


def share_processors(model: DescribedModel, config: Config, collectives: Collectives) -> None:
    """Exchanges the processors that each rank may use, so that a rank starts no more threads than
    its part of the machine. A rank that computes on a GPU moves to the GPU's node first. Every rank
    calls this."""
    if collectives.ranks.alone:
        processors.share_with([])
        return
    before_binding = collectives.ranks.allowed_processors
    index = _gpu_of(model, config) if torch.cuda.is_available() else None
    if index is not None and before_binding is not None:
        numa.bind_to_gpu(pci_address(index), before_binding)
    mine = collectives.ranks.world_rank, socket.gethostname(), sorted(processors.allowed())
    everyones = collectives.collect(mine, "where the ranks may run")
    processors.share_with(
        [set(theirs) for rank, host, theirs in everyones if host == mine[1] and rank != mine[0]]
    )


def _gpu_of(model: DescribedModel, config: Config) -> int | None:
    """Returns the number of the GPU that will compute; None if the processor does."""
    named = [torch.device(config.device)] if config.device is not None else []
    places = (param.device for param in model.users if is_managed(param) and not param.is_meta)
    where = next(iter(named), None) or next(places, None)
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


def own_budgets(config: Config, ranks: ParallelDims) -> Config:
    """Returns the configuration with this rank's part of the machine's budgets."""
    shared = {name: getattr(config, name) for name in ("host_memory", "nvme_capacity")}
    own: dict[str, Any] = {
        name: int(n * ranks.machine_share) for name, n in shared.items() if n is not None
    }
    return dataclasses.replace(config, **own)


def free_everywhere(
    config: Config, collectives: Collectives, device: Device
) -> dict[Tier, int] | None:
    """Measures the minimum over the ranks of the free bytes of each tier, because plans must not
    differ between ranks. Returns None if there is one rank. Every rank calls this."""
    if collectives.ranks.alone:
        return None
    check_folders(config)
    own = collectives.ranks.machine_share
    shares = {
        tier: Fraction(1) if tier is Tier.DEVICE and not device.is_host else own for tier in Tier
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
