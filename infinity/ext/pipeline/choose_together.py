"""choose_together: chooses a pipeline's schedule and split points on every rank, from equal
inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...config import Config
from ...core.wrap.agreement import describe_config
from ...errors import ConfigError
from ...ext.rates.rates import Rates
from ..dtensor.agreement import agree, collect, describe_model
from .choice import Choice, choose
from .stages import Chain, chain_of


def choose_together(
    model: nn.Module,
    mesh: DeviceMesh,
    optimizer: torch.optim.Optimizer | None,
    config: Config | Mapping[str, Any] | str | os.PathLike | None,
    loss_fn: Callable | None,
    *,
    costs: Sequence[float] | None,
    **asked: Any,
) -> tuple[Chain, Config, Choice]:
    """Returns the model as a chain, the configuration, and the choice. ``asked``: schedule,
    micro_batches and chunks, as given to :func:`pipeline`. Every rank calls this. Raises
    ConfigError on every rank, before any change, if one has other inputs, or if they do not fit."""

    def describe() -> tuple[dict[str, str], tuple[Chain, Config]]:
        chain, checked = _check(model, mesh, config, loss_fn)
        inputs = {key: str(value) for key, value in asked.items()} | {
            "loss_fn": "given" if loss_fn is not None else "none"
        }
        inputs |= {"mesh": str(mesh), "the optimizer": type(optimizer).__name__} | describe_config(
            checked
        )
        return inputs | {"the number of layers": str(len(chain.layers))} | describe_model(model), (
            chain,
            checked,
        )

    chain, checked = agree("pipeline", None, describe)
    measured, load_rate = _first_ranks(costs, checked)

    def choose_here() -> tuple[dict[str, str], Choice]:
        choice = choose(
            chain, checked, mesh["pp"].size(), **asked, costs=measured, load_rate=load_rate
        )
        return {"the cut": choice.describe(chain)}, choice

    return chain, checked, agree("pipeline", None, choose_here)


def _check(
    model: nn.Module, mesh: Any, config: Any, loss_fn: Callable | None
) -> tuple[Chain, Config]:
    if not isinstance(mesh, DeviceMesh) or "pp" not in (mesh.mesh_dim_names or ()):
        raise ConfigError(
            f"pipeline takes the mesh of the whole job, with an axis pp: this is {mesh!r}"
        )
    config, chain = Config.make(config), chain_of(model)
    if loss_fn is None and not hasattr(model, "loss_function"):
        raise ConfigError(
            f"{type(model).__name__} has no loss of its own: give pipeline a loss_fn of outputs and"
            " targets"
        )
    return chain, config


def _first_ranks(
    costs: Sequence[float] | None, config: Config
) -> tuple[list[float] | None, float | None]:
    """Returns the first rank's costs, and its measured rate of the weights' home: split points must
    not differ between ranks."""

    def measure() -> tuple[list[float] | None, float | None]:
        if dist.get_rank() or costs is None:
            return None, None
        rates = Rates.measure(config.nvme_paths if config.params == "nvme" else ())
        return list(costs), min(rates.memory, rates.disk_read or rates.memory)

    return collect("pipeline", None, measure)[0]
