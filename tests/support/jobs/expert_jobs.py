"""Jobs of experts that are divided among data ranks, which every rank of a launch runs (see
`ranks`).

**alone**: the whole model in one process, given the batch of every data rank in turn.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inside import parts_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import models
from parallel_families import family, mixture
from parallel_jobs import adamw, off, plainly, values_of, whole
from passed import passed
from ranks import serve, told

import infinity
from infinity.ranks.channel import Channel, SyncPoint
from infinity.ranks.parallel_dims import ParallelDims

STEPS, CLIP = 4, 0.5


def batch(step: int, data_rank: int) -> torch.Tensor:
    """Ranks have batches of other lengths, and so other numbers of tokens for each expert."""
    return torch.randint(
        0,
        98,
        (2, 12 + 4 * (data_rank % 2)),
        generator=torch.Generator().manual_seed(100 * step + data_rank),
    )


def alone(name: str, data_ranks: int) -> dict[str, Any]:
    """Losses of every rank's batch, the first step's gradients, norms and weights."""
    model, losses, norms, grads = mixture(name), [], [], {}
    optimizer = adamw(model)
    for step in range(STEPS):
        of_ranks = [
            model(input_ids=batch(step, rank), labels=batch(step, rank)).loss
            for rank in range(data_ranks)
        ]
        (sum(of_ranks) / data_ranks).backward()
        grads = grads or {key: param.grad.clone() for key, param in model.named_parameters()}
        losses.append([loss.item() for loss in of_ranks])
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "grads": grads, "weights": model.state_dict()}


def mesh_of(axes: dict[str, int]) -> Any:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def build(name: str, axes: dict[str, int], config: dict, *, meta: bool = False) -> tuple:
    mesh = mesh_of(axes)
    with torch.device("meta" if meta else "cpu"):
        model = mixture(name)
    model = infinity.parallel.expert_parallel(model, mesh["ep"], exchange="tokens", quiet=True)
    return infinity.wrap_model(model, adamw(model), config, mesh=mesh)


def elements_at_home(model: nn.Module) -> dict[str, int]:
    """Elements of weights that this rank has at home, of experts and of all else."""
    found = {"experts": 0, "rest": 0}
    for unit in parts_of(model).units:
        for handle in unit.handles:
            begin, end = handle.flat_param.layout.shard_part(handle.index)
            found["experts" if ".experts." in handle.name else "rest"] += end - begin
    return found


def divided(
    name: str,
    axes: dict[str, int],
    config: dict,
    *,
    fault: str | None = None,
    clip: str = "ours",
    checkpoints: bool = False,
    meta: bool = False,
) -> dict[str, Any]:
    """Some steps, each data rank with a batch of its own. ``fault``: "divisor" averages experts
    over the ranks that have them."""
    before = ParallelDims.data_size
    if fault == "divisor":
        ParallelDims.data_size = property(lambda ranks: before.fget(ranks) // ranks.ep_size)
    rank, twin = dist.get_rank(), alone(name, dist.get_world_size())
    model, optimizer = build(name, axes, config, meta=meta)
    if checkpoints:
        model.gradient_checkpointing_enable()
    losses, norms, grads, own = [], [], {}, elements_at_home(model)
    meetings, start_sync = [], Channel.start_sync

    def counting(self: Channel, what: str, *how: Any, **more: Any) -> SyncPoint:
        meetings.append(what)
        return start_sync(self, what, *how, **more)

    Channel.start_sync = counting
    engine = parts_of(model).engine
    sharded = sum(
        u.weight_nbytes
        for u in parts_of(engine).units
        if not any(".experts." in handle.name for handle in u.handles)
    )
    for step in range(STEPS):
        meetings.clear()
        sent = passed(parts_of(engine).traffic.collectives)
        loss = model(input_ids=batch(step, rank), labels=batch(step, rank)).loss
        loss.backward()
        if not step:
            grads = {key: plainly(param.grad).clone() for key, param in model.named_parameters()}
        losses.append(loss.item())
        if clip == "ours":
            norms.append(infinity.clip_grad_norm_(optimizer, CLIP).item())
        else:
            norms.append(
                float(
                    plainly(
                        nn.utils.get_total_norm(
                            [p.grad for p in model.parameters() if isinstance(p, DTensor)]
                        )
                    )
                )
            )
        optimizer.step()
        optimizer.zero_grad()
    Channel.start_sync = start_sync
    found: dict[str, Any] = {
        "losses": losses,
        "norms": norms,
        "own": own,
        "meetings": meetings,
    }  # the last step's
    found["weights"] = whole(model.state_dict())
    found["passed"] = {
        edge: (nbytes - sent[edge]) / (sharded / 2)
        for edge, nbytes in passed(parts_of(engine).traffic.collectives).items()
    }
    of_experts = torch.stack(
        [grad.norm() for key, grad in twin["grads"].items() if ".experts." in key]
    ).norm()
    found["expected norm of experts"] = of_experts.item()
    found["expected losses"] = [of_ranks[rank] for of_ranks in twin["losses"]]
    found["expected norms"] = twin["norms"]
    found["grads off"], found["weights off"] = (
        off(twin["grads"], grads),
        off(twin["weights"], found["weights"]),
    )
    found["elements"] = {
        kind: sum(
            p.numel()
            for key, p in mixture(name).named_parameters()
            if (".experts." in key) == (kind == "experts")
        )
        for kind in ("experts", "rest")
    }
    infinity.unwrap_model(model, optimizer)
    ParallelDims.data_size = before
    return found


def moved(name: str, axes: dict[str, int], config: dict, folder: str) -> dict[str, Any]:
    """A checkpoint and a folder of weights; what a load of the checkpoint, a state dict and an edit
    leave."""
    model, optimizer = build(name, axes, config)
    rank, found = dist.get_rank(), {}

    def step(number: int) -> None:
        model(input_ids=batch(number, rank), labels=batch(number, rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    infinity.save_checkpoint(f"{folder}/checkpoint", model, optimizer)
    infinity.save_pretrained(model, f"{folder}/weights")
    found["saved"] = values_of(model, optimizer)
    step(1)
    found["after"] = values_of(model, optimizer)
    infinity.load_checkpoint(f"{folder}/checkpoint", model, optimizer)
    found["loaded"] = not models.differing(values_of(model, optimizer), found["saved"])
    step(1)
    found["goes on"] = not models.differing(values_of(model, optimizer), found["after"])
    expert = next(key for key, _ in model.named_parameters() if key.endswith("experts.down_proj"))
    with torch.no_grad(), infinity.full_params(model, [expert], writeback=True) as params:
        params[expert].mul_(2.0)
    found["edited"] = torch.equal(
        whole(model.state_dict())[expert], 2.0 * found["after"][f"weight/{expert}"]
    )
    model.load_state_dict(model.state_dict() | {expert: found["after"][f"weight/{expert}"]})
    found["put back"] = torch.equal(
        whole(model.state_dict())[expert], found["after"][f"weight/{expert}"]
    )
    infinity.unwrap_model(model, optimizer)
    return found


def loaded(name: str, axes: dict[str, int], config: dict, folder: str) -> dict[str, torch.Tensor]:
    """What ranks that divide the experts otherwise find in a checkpoint."""
    model, optimizer = build(name, axes, config)
    infinity.load_checkpoint(f"{folder}/checkpoint", model, optimizer)
    found = values_of(model, optimizer)
    infinity.unwrap_model(model, optimizer)
    return found


def given_back(name: str, axes: dict[str, int], config: dict) -> dict[str, Any]:
    """A step with gradients and state that were read and given back, beside one without; and what
    is said of values that differ."""
    rank, (model, optimizer), (other, its_optimizer) = (
        dist.get_rank(),
        build(name, axes, config),
        build(name, axes, config),
    )
    expert = next(key for key, _ in model.named_parameters() if key.endswith("experts.down_proj"))
    for number in range(2):
        for each in (model, other):
            each(input_ids=batch(number, rank), labels=batch(number, rank)).loss.backward()
        for param in other.parameters():
            param.grad = (
                plainly(param.grad).clone()
                if not isinstance(param.grad, DTensor)
                else param.grad.clone()
            )
        optimizer.step()
        its_optimizer.step()
        its_optimizer.load_state_dict(its_optimizer.state_dict())
        optimizer.zero_grad()
        its_optimizer.zero_grad()
    found: dict[str, Any] = {
        "same": not models.differing(values_of(model, optimizer), values_of(other, its_optimizer))
    }
    router = next(param for key, param in other.named_parameters() if key.endswith("gate.weight"))
    state = its_optimizer.state_dict()
    shared = next(
        index
        for index, key in enumerate(dict(other.named_parameters()))
        if key.endswith("gate.weight")
    )
    found["a gradient that all have"] = told(
        lambda: setattr(router, "grad", torch.full(router.shape, float(rank)))
    )
    state["state"][shared]["exp_avg"] = state["state"][shared]["exp_avg"] + rank
    found["state that all have"] = told(lambda: its_optimizer.load_state_dict(state))
    own = other.get_parameter(expert)
    found["an expert's gradient"] = told(lambda: setattr(own, "grad", own_part(own, 1.0 + rank)))
    infinity.unwrap_model(model, optimizer)
    infinity.unwrap_model(other, its_optimizer)
    return found


def own_part(param: torch.Tensor, value: float) -> torch.Tensor:
    """A gradient of this rank's experts that differs from every other rank's."""
    local = torch.full(param._local_tensor.shape, value)
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False)


def refused(config: dict) -> dict[str, str]:
    world = dist.get_world_size()
    mesh = mesh_of({"dp": 1, "ep": world})

    def taken(**options: Any) -> nn.Module:
        return infinity.parallel.expert_parallel(
            mixture("mixtral"), mesh["ep"], quiet=True, **options
        )

    other = mesh_of({"dp": world})
    beside = mesh_of({"tp": world, "ep": 1})
    found = {
        "exchange": told(lambda: taken(exchange="both")),
        "cut_rest": told(lambda: taken(exchange="tokens", cut_rest=True)),
        "no mixture": told(
            lambda: infinity.parallel.expert_parallel(
                family("llama"), mesh["ep"], exchange="tokens"
            )
        ),
        "another mesh": told(
            lambda: infinity.wrap_model(taken(exchange="tokens"), None, config, mesh=other)
        ),
        "micro_batch": told(
            lambda: infinity.wrap_model(
                taken(exchange="tokens"), None, config | {"micro_batch": 1}, mesh=mesh
            )
        ),
        "axis": told(
            lambda: infinity.wrap_model(taken(exchange="tokens"), None, config, mesh=beside)
        ),
    }
    model, optimizer = infinity.wrap_model(taken(exchange="tokens"), None, config, mesh=mesh)
    infinity.unwrap_model(model, optimizer)
    return found | {"goes on": "True"}


if __name__ == "__main__":
    serve(globals())
