"""Jobs of ranks that write to the tensors of state dicts (see `ranks`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import models
import rank_jobs
import torch
import torch.distributed as dist
from ranks import serve, told
from torch import nn

import infinity


def write(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes what every rank does, and one process too."""
    for value in model.state_dict().values():
        value.mul_(0.5)
    state = optimizer.state_dict()["state"]
    state[0]["exp_avg"].zero_()
    state[1]["step"].zero_()


def written(shard: str, home: str, folder: str) -> dict[str, Any]:
    """All ranks write to state dicts, then to one that is older than a step."""
    config = models.at_home(home, home, Path(folder)) | {"shard": shard}
    model = rank_jobs.build()
    model, optimizer = infinity.wrap_model(model, rank_jobs.adamw(model), config)
    rank_jobs.train(model, optimizer, steps=1)
    kept = model.state_dict()
    write(model, optimizer)
    rank_jobs.train(model, optimizer, steps=2, first=1)
    kept["positions"].zero_()
    found = {"refused": told(lambda: models.loss_of(model, rank_jobs.batch(3, 0, 0)))}
    found["weights"] = rank_jobs.cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return found


def average(model: nn.Module) -> dict[str, torch.Tensor]:
    """Writes to an average and blends it with the weights once more; returns it."""
    kept = infinity.ema(model, 0.5)
    kept.update()
    for value in kept.state_dict().values():
        value.mul_(0.5)
    kept.update()
    return rank_jobs.cloned(kept.state_dict())


def averaged(shard: str) -> dict[str, Any]:
    """All ranks write to the tensors of an average's state dict."""
    model = rank_jobs.build()
    config = {"params": "host", "optimizer": "host", "shard": shard}
    model, optimizer = infinity.wrap_model(model, rank_jobs.adamw(model), config)
    found = {"average": average(model)}
    infinity.unwrap_model(model, optimizer)
    return found


def cut(home: str, folder: str) -> dict[str, Any]:
    """The same of a layer that tensor parallelism has cut."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = infinity.wrap_model(
        model, optimizer, models.at_home(home, home, Path(folder)), mesh=mesh
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for value in model.state_dict().values():
                value.mul_(0.5)
            for entry in optimizer.state_dict()["state"].values():
                entry["exp_avg"].zero_()
    model(x).square().sum().backward()
    optimizer.step()
    weights = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    infinity.unwrap_model(model, optimizer)
    return {"weights": weights}


def apart(how: str) -> dict[str, str]:
    """One rank writes, and the others do not."""
    model = rank_jobs.build()
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host"}
    )
    rank_jobs.train(model, optimizer, steps=1)
    values, state = model.state_dict(), optimizer.state_dict()["state"]
    average = infinity.ema(model, 0.5)
    average.update()
    averages = average.state_dict()
    if dist.get_rank() == 0:
        of = {"values": values, "averages": averages, "moments": {"positions": state[0]["exp_avg"]}}
        of[how]["positions"].zero_()
    return {"said": told(lambda: rank_jobs.train(model, optimizer, steps=1))}


if __name__ == "__main__":
    serve(globals())
