"""Jobs of ranks whose layers run in tiles of the parts that tensor parallelism leaves each (see
`ranks`), and the same by torch alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from inside import parts_of
from parallel_jobs import whole
from tile_jobs import STEPS, WIDTH, WORDS, Decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import infinity
from infinity.core.machine.tiers import Tier
from infinity.ext.tiles import sharded_layers

PLAN = {
    "table": "embedding_rowwise",
    "up": "colwise",
    "down": "rowwise",
    "head": "colwise_gather_output",
}
OF_SEQUENCES = {
    "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


def model_of(kind: str, mesh: Any) -> nn.Module:
    """A model that is sharded over ``mesh``: by a plan, by torch for sequences, by transformers'
    own plan (a vocabulary that leaves a remainder), or with transposed layers. "whole ends": only
    the layers between table and head are sharded."""
    import transformers as hf

    torch.manual_seed(1)
    if kind == "llama":
        config = hf.LlamaConfig(
            vocab_size=WORDS + 1,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = hf.LlamaForCausalLM(config)
    elif kind == "gpt2":
        # Of another vocabulary torch 2.10 remembers the shape of the first.
        config = hf.GPT2Config(
            vocab_size=WORDS + 1, n_embd=128, n_layer=2, n_head=4, n_positions=32
        )
        model = hf.GPT2LMHeadModel(config).eval()  # no dropout
    else:
        model = Decoder(tied=kind == "tied", dtype=torch.float32)
    if kind == "sequences":
        return parallelize_module(model, mesh, OF_SEQUENCES)
    plan = PLAN if isinstance(model, Decoder) else None
    if kind == "whole ends":
        plan = {name: PLAN[name] for name in ("up", "down")}
    return infinity.parallel.tensor_parallel(model, mesh, plan, quiet=True)


def loss_in(model: nn.Module, kind: str, step: int, rank: int) -> torch.Tensor:
    ids = torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(9 * step + rank))
    if not isinstance(model, Decoder):
        return model(input_ids=ids, labels=ids).loss
    with loss_parallel() if kind == "sequences" else contextlib.nullcontext():
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def value_of(loss: torch.Tensor) -> float:
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


def trained(
    kind: str,
    config: dict | None,
    *,
    tp: int = 2,
    batches: Sequence[int] | None = None,
    recomputes: bool = False,
) -> dict[str, Any]:
    """Trains over ``tp`` ranks, by torch alone without a ``config``. ``batches``: the data ranks
    whose batches this one takes; None: its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    batches = [mesh.get_local_rank("dp")] if batches is None else batches
    model = model_of(kind, mesh["tp"])
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if config is not None:
        model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
    losses, grads, sums = [], {}, None
    for step in range(STEPS):
        counted = None if step or recomputes or len(batches) > 1 else CommDebugMode()
        with counted or contextlib.nullcontext():
            for batch in batches:
                loss = loss_in(model, kind, step, batch)
                with loss_parallel() if kind == "sequences" else contextlib.nullcontext():
                    (loss / len(batches)).backward()
        losses.append(value_of(loss))
        if not step:
            grads = whole({name: p.grad for name, p in model.named_parameters()})
        if counted is not None:
            sums = sum(
                count
                for name, count in counted.get_comm_counts().items()
                if "all_reduce" in str(name)
            )
        optimizer.step()
        optimizer.zero_grad()
    withouts = [torch.no_grad] + [torch.inference_mode] * (kind != "sequences")  # torch's loss
    for without in withouts:
        with without():
            losses.append(value_of(loss_in(model, kind, STEPS, batches[-1])))
    found = {
        "losses": losses,
        "grads": grads,
        "sums": sums,
        "weights": whole(model.state_dict()),
    }
    if config is not None:
        tier = infinity.stats(model).tiers[Tier.DEVICE]
        found["within"] = tier.peak_nbytes <= tier.planned_nbytes <= tier.budget_nbytes
        found["tiled"] = {
            size.name: size.at_once_nbytes
            for size in parts_of(model).planned.sizes
            if size.at_once_nbytes
        }
        model, optimizer = infinity.unwrap_model(model, optimizer)
        found["unwrapped"] = whole(model.state_dict())
    return found


def unsummed(config: dict) -> str:
    """What a rank is told when each goes on with its part of a sum."""
    before = sharded_layers._placed
    sharded_layers._placed = lambda out, weight, placements, width: before(
        out, weight, [Replicate() if each.is_partial() else each for each in placements], width
    )
    try:
        trained("columns and rows", config)
    except infinity.UsageError as error:
        return str(error)
    finally:
        sharded_layers._placed = before
    return ""


def pair(mesh: Any, placements: Any) -> nn.Sequential:
    """Two layers whose weights are DTensors, and that nothing gives DTensors."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 6000, bias=False), nn.Linear(6000, WIDTH, bias=False))
    for layer, placement in zip(model, placements):
        cut = distribute_tensor(layer.weight.detach(), mesh, [placement])
        layer.weight = nn.Parameter(cut)
    return model


def misused(config: dict) -> dict[str, str]:
    """What a rank is told of a plain input, and of labels that other ranks do not have."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    found = {}
    for kind in ("plain input", "other labels"):
        if kind == "plain input":
            model: Any = pair(mesh["tp"], (Shard(0), Shard(1)))
        else:
            model = model_of("whole ends", mesh["tp"])
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
        try:
            if kind == "plain input":
                model(torch.randn(2, WIDTH))
            else:
                ids = torch.arange(18).view(2, 9)
                labels = ids.roll(1 + dist.get_rank()).flatten()
                nn.functional.cross_entropy(model(ids).flatten(0, 1), labels).backward()
                optimizer.step()
        except (RuntimeError, infinity.UsageError) as error:
            found[kind] = str(error)
        infinity.unwrap_model(model, optimizer)
    return found


def replicated(config: dict) -> str:
    """What a rank is told whose budget holds no whole weight, and every rank has all of it."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))["tp"]
    model = pair(mesh, (Replicate(), Replicate()))
    try:
        infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    except infinity.CapacityError as error:
        return str(error)
    return ""


def cast(config: dict) -> list[str]:
    """The dtypes of a sharded layer's output in autocast, by torch and in tiles."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    seen: list[str] = []
    for chosen in (None, config):
        model = model_of("columns and rows", mesh["tp"])
        model.down.register_forward_hook(lambda _, args, out: seen.append(str(out.dtype)))
        if chosen is not None:
            model, _ = infinity.wrap_model(model, None, chosen, mesh=mesh)
        with torch.autocast("cpu", torch.bfloat16):
            loss_in(model, "", 0, 0)
        if chosen is not None:
            infinity.unwrap_model(model)
    return seen


def returned(config: dict) -> dict[str, Any]:
    """Gradients of a weight in tiles that a hook sees, and that torch.autograd.grad returns."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}
    for name, chosen in (("torch", None), ("ours", config)):
        model, seen = model_of("columns and rows", mesh["tp"]), []
        optimizer = torch.optim.AdamW(model.parameters())
        if chosen is not None:
            model, optimizer = infinity.wrap_model(model, optimizer, chosen, mesh=mesh)
        weights = {"up": model.up.weight, "down": model.down.weight}
        grads = torch.autograd.grad(loss_in(model, "", 0, 0), list(weights.values()))
        found[name] = whole(dict(zip(weights, grads)))
        model.up.weight.register_hook(lambda grad, seen=seen: seen.append(grad.full_tensor()))
        loss_in(model, "", 0, 0).backward()
        found[name]["seen"] = seen[0].clone()
        if chosen is not None:
            infinity.unwrap_model(model, optimizer)
    return found
