"""Jobs of tensor parallelism that every rank of a launch runs (see `ranks`).

**twin**: the same training without the engine: torch's own tensor parallelism, or one process with
the whole model.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inside import parts_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import models
from decoder import LENGTH, VOCABULARY, WIDTH, Block, Decoder, decoder
from ranks import serve

import infinity


def parallel(model: Decoder, mesh: Any, kind: str) -> Decoder:
    """``model`` cut over ``mesh``, by torch. ``kind``: "columns and rows", or "sequences" (with
    loss_parallel's logits)."""
    if kind == "sequences":
        whole = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        }
        block = {
            "first": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "second": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    else:
        whole = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        block = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        block |= {
            "attention.o": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
    parallelize_module(model, mesh, whole)
    for each in model.blocks:
        parallelize_module(each, mesh, block)
    return model


def tokens(step: int, data_rank: int = 0) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + data_rank)
    )


def loss_of(model: nn.Module, batch: torch.Tensor, kind: str) -> torch.Tensor:
    logits = model(batch)
    if kind == "sequences" and isinstance(logits, DTensor):
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten())
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


def train(
    model: nn.Module,
    optimizer,
    kind: str,
    *,
    steps: int = 3,
    micro: int = 1,
    clip=None,
    data_rank: int = 0,
) -> dict:
    """Losses and norms of some steps. ``clip``: takes the optimizer and the model; returns the
    norm."""
    losses, norms = [], []
    for step in range(steps):
        for part in range(micro):
            with loss_parallel() if kind == "sequences" else contextlib.nullcontext():
                loss = loss_of(model, tokens(10 * step + part, data_rank), kind) / micro
                loss.backward()
        if clip is not None:
            norm = clip(optimizer, model)
            norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of global tensors."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in state.items()
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def mesh_of(dp: int = 1) -> Any:
    return init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "tp"))


CLIPS = {
    "ours": lambda optimizer, model: infinity.clip_grad_norm_(optimizer, 0.5),
    "torch's": lambda optimizer, model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
}


def twins(
    kind: str, dp: int = 1, *, clip: bool = False, micro: int = 1, checkpoints: bool = False
) -> dict[str, Any]:
    """Torch's own tensor parallelism, where every rank has the whole batch, and one process."""
    found = {}
    for name in ("torch", "one process"):
        model = decoder()
        if name == "torch" and dp == 1:
            model = parallel(model, mesh_of(dp)["tp"], kind)
        elif name == "torch":
            continue
        model.checkpoints = checkpoints
        # Torch's own refuses gradients of which some are DTensors, and some not.
        optimizer, torch_clip = (
            adamw(model),
            CLIPS["torch's"] if clip and (kind == "sequences" or name != "torch") else None,
        )
        if dp == 1:
            told = train(
                model, optimizer, kind if name == "torch" else "plain", micro=micro, clip=torch_clip
            )
        else:
            told = {"losses": [], "norms": []}
            for step in range(3):
                for data_rank in range(dp):
                    (loss_of(model, tokens(10 * step, data_rank), "plain") / dp).backward()
                if torch_clip is not None:
                    told["norms"].append(torch_clip(optimizer, model).item())
                optimizer.step()
                optimizer.zero_grad()
        found[name] = told | {"weights": whole(model.state_dict())}
    return found


def trained(
    kind: str,
    config: dict,
    dp: int = 1,
    *,
    clip: str | None = None,
    micro: int = 1,
    checkpoints: bool = False,
    dtype=torch.float32,
) -> dict[str, Any]:
    """The same with the engine: losses, norms, weights, moments, and what lies where."""
    mesh = mesh_of(dp)
    model = parallel(decoder(dtype=dtype), mesh["tp"], kind)
    model.checkpoints = checkpoints
    model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)
    told = train(
        model,
        optimizer,
        kind,
        micro=micro,
        clip=CLIPS[clip] if clip else None,
        data_rank=mesh.get_local_rank("dp"),
    )
    engine = parts_of(model).engine
    engine.wait_idle()
    at_rest = [
        p._local_tensor.untyped_storage().nbytes()
        for p in model.parameters()
        if isinstance(p, DTensor)
    ]
    arrays: dict[str, int] = {}
    for unit in parts_of(engine).units:
        for flat_param in unit.flat_params:
            for name, array in flat_param.arrays.items():
                arrays[name] = arrays.get(name, 0) + array.numel
    padded = sum(flat.layout.numel for unit in parts_of(engine).units for flat in unit.flat_params)
    local = sum(
        (p._local_tensor if isinstance(p, DTensor) else p).numel() for p in model.parameters()
    )
    weights = whole(model.state_dict())
    states = optimizer.state_dict()["state"]
    moments = {
        f"{index} {name}": value
        for index, state in states.items()
        for name, value in whole(state).items()
    }
    common = [
        p._local_tensor if isinstance(p, DTensor) else p
        for p in model.state_dict().values()
        if not isinstance(p, DTensor) or all(isinstance(each, Replicate) for each in p.placements)
    ]
    digests: list = [None] * dist.get_world_size()
    dist.all_gather_object(
        digests, [hashlib.sha1(p.float().numpy().tobytes()).hexdigest() for p in common]
    )
    told["replicas are equal"] = len(set(map(tuple, digests))) == 1 and len(common) > 0
    plain, plain_optimizer = infinity.unwrap_model(model, optimizer)
    after = whole(plain.state_dict())
    again = train(plain, plain_optimizer, kind, steps=1, data_rank=mesh.get_local_rank("dp"))
    return told | {
        "weights": weights,
        "moments": moments,
        "at_rest": at_rest,
        "arrays": arrays,
        "padded": padded,
        "local": local,
        "unwrapped": not models.differing(weights, after),
        "again": again["losses"],
    }


def norms_without(left_out: int, config: dict) -> dict[str, float]:
    """The norm of all gradients once the first parameters were taken out of the groups."""
    mesh, one, kind = mesh_of(), decoder(), "columns and rows"
    loss_of(one, tokens(0), "plain").backward()
    gradients = [param.grad for param in one.parameters()]
    model = parallel(decoder(), mesh["tp"], kind)
    model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)
    loss_of(model, tokens(0), kind).backward()
    del optimizer.param_groups[0]["params"][:left_out]
    norms = {"ours": optimizer.total_norm(), "plain": nn.utils.get_total_norm(gradients[left_out:])}
    return {name: norm.item() for name, norm in norms.items()} | {
        "of all": nn.utils.get_total_norm(gradients).item()
    }


def round_trips(kind: str, config: dict) -> dict[str, Any]:
    """Loads, edits and reads, each against torch's own tensors."""
    mesh = mesh_of()["tp"]
    model = parallel(decoder(), mesh, kind)
    model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)
    found: dict[str, Any] = {}
    train(model, optimizer, kind, steps=2)
    weights, states = whole(model.state_dict()), optimizer.state_dict()
    found["state is of DTensors"] = all(
        isinstance(states["state"][i]["exp_avg"], DTensor) == isinstance(p, DTensor)
        for i, p in enumerate(model.parameters())
    )
    train(model, optimizer, kind, steps=1)
    after = whole(model.state_dict())
    other = parallel(decoder(seed=9), mesh, kind)
    other, other_optimizer = infinity.wrap_model(other, adamw(other), config, mesh=mesh)
    like = other.state_dict()
    other.load_state_dict(
        {n: distributed(v, like[n]) for n, v in weights.items()}
    )  # DTensors, as torch gives them
    other_optimizer.load_state_dict(states)
    found["loaded"] = not models.differing(weights, whole(other.state_dict()))
    train(other, other_optimizer, kind, steps=1)
    found["goes on"] = not models.differing(after, whole(other.state_dict()))
    other.load_state_dict(weights)  # global tensors: every rank takes its part
    found["global tensors load"] = not models.differing(weights, whole(other.state_dict()))
    with infinity.full_params(other, "blocks.0.up.weight", writeback=True) as params:
        value = params["blocks.0.up.weight"]
        found["full_params gives"] = type(value).__name__, tuple(value.shape)
        found["full_params is right"] = torch.equal(
            value.full_tensor(), weights["blocks.0.up.weight"]
        )
        with torch.no_grad():
            value.mul_(2)
    edited = whole(other.state_dict())
    found["edited"] = torch.equal(edited["blocks.0.up.weight"], 2 * weights["blocks.0.up.weight"])
    param = other.get_parameter("blocks.0.up.weight")
    for what in ("to_local", "full_tensor"):
        try:
            getattr(param, what)()
            found[what] = "was given"
        except infinity.UsageError as error:
            found[what] = str(error)
    found["shape"] = tuple(param.shape), param.placements == like["blocks.0.up.weight"].placements
    with torch.no_grad():
        found["infers"] = torch.equal(plainly(other(tokens(7))), plainly(other(tokens(7))))
    infinity.unwrap_model(other, other_optimizer)
    infinity.unwrap_model(model, optimizer)
    return found


def plainly(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distributed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``value``, global, cut as ``like`` is."""
    return (
        distribute_tensor(value, like.device_mesh, like.placements)
        if isinstance(like, DTensor)
        else value
    )


def scaled(kind: str, config: dict | None) -> dict[str, Any]:
    """A GradScaler, with an infinite gradient on rank 1's part in the second step. ``config`` None:
    one process."""
    mesh = mesh_of()["tp"]
    model = decoder() if config is None else parallel(decoder(), mesh, kind)
    optimizer = adamw(model)
    if config is not None:
        model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales, losses = [], []
    for step in range(3):
        with (
            loss_parallel()
            if kind == "sequences" and config is not None
            else contextlib.nullcontext()
        ):
            loss = loss_of(model, tokens(10 * step), kind)
            scaler.scale(loss).backward()
        if step == 1 and (config is None or dist.get_rank() == 1):
            grad = model.blocks[0].up.weight.grad
            local = grad._local_tensor if isinstance(grad, DTensor) else grad
            local.masked_fill_(torch.arange(len(local))[:, None] == len(local) - 1, float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        losses.append(plainly(loss).item())
    weights = whole(model.state_dict())
    if config is not None:
        infinity.unwrap_model(model, optimizer)
    return {"scales": scales, "losses": losses, "weights": weights}


def frozen(config: dict) -> dict[str, Any]:
    """A base of DTensors that are not trained, beside plain adapters that are."""
    mesh = mesh_of()["tp"]
    runs = []
    for engine in (False, True):
        model = parallel(decoder(), mesh, "columns and rows")
        model.requires_grad_(False)
        torch.manual_seed(1)
        for block in model.blocks:
            block.adapter = nn.Linear(WIDTH, WIDTH)
            block.forward = lambda x, block=block: Block.forward(block, x + block.adapter(x))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if engine:
            model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
        told = train(model, optimizer, "plain")
        runs.append(told | {"weights": whole(model.state_dict())})
        if engine:
            infinity.unwrap_model(model, optimizer)
    return {
        "losses": [run["losses"] for run in runs],
        "off": off(runs[0]["weights"], runs[1]["weights"]),
    }


def off(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


def values_of(model: nn.Module, optimizer) -> dict[str, torch.Tensor]:
    """Weights, masters and moments as global tensors."""
    found = {f"weight/{name}": value for name, value in whole(model.state_dict()).items()}
    names = [name for name, _ in model.named_parameters()]
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{key}/{names[index]}": value for key, value in whole(state).items()}
    return found


def wrapped_on(kind: str, config: dict, dp: int, dtype: torch.dtype, seed: int) -> tuple:
    """A model and its optimizer on a mesh of the launch: of dp x tp ranks."""
    mesh = mesh_of(dp)
    model = decoder(seed, dtype)
    if mesh["tp"].size() > 1:
        model = parallel(model, mesh["tp"], kind)
    return *infinity.wrap_model(model, adamw(model), config, mesh=mesh), mesh


def saved(path: str, kind: str, config: dict, dp: int, dtype=torch.bfloat16) -> dict[str, Any]:
    """Two steps, a checkpoint, what it has, and a step more."""
    model, optimizer, mesh = wrapped_on(kind, config, dp, dtype, 5)
    train(model, optimizer, kind, steps=2, data_rank=mesh.get_local_rank("dp"))
    infinity.save_checkpoint(path, model, optimizer, extra="two steps")
    found = values_of(model, optimizer)
    train(model, optimizer, kind, steps=1, data_rank=mesh.get_local_rank("dp"))
    after = values_of(model, optimizer)
    infinity.unwrap_model(model, optimizer)
    return {"values": found, "after": after}


def loaded(path: str, kind: str, config: dict, dp: int, dtype=torch.bfloat16) -> dict[str, Any]:
    """The same checkpoint on another mesh, and a step more."""
    model, optimizer, mesh = wrapped_on(kind, config, dp, dtype, 6)
    extra = infinity.load_checkpoint(path, model, optimizer)
    found = values_of(model, optimizer)
    train(model, optimizer, kind, steps=1, data_rank=mesh.get_local_rank("dp"))
    after = values_of(model, optimizer)
    infinity.unwrap_model(model, optimizer)
    return {"extra": extra, "values": found, "after": after}


def on_meta(config: dict, weights: str | None, dp: int = 1) -> dict[str, Any]:
    """A model that is cut before it has values, drawn or read from a file; beside one process."""
    mesh = mesh_of(dp)
    with torch.device("meta"):
        model, alone = Decoder(), Decoder()
    if mesh["tp"].size() > 1:
        infinity.parallel.tensor_parallel(model, mesh["tp"], quiet=True)
    before = {name: param for name, param in model.named_parameters()}
    optimizer = adamw(model)
    torch.manual_seed(dist.get_rank())  # the first rank's draw counts
    model, optimizer = infinity.wrap_model(
        model, optimizer, config | {"weights": weights}, mesh=mesh
    )
    found = {
        "weights": whole(model.state_dict()),
        "same objects": all(before[n] is p for n, p in model.named_parameters()),
    }
    found["losses"] = train(
        model, optimizer, "plain", steps=2, data_rank=mesh.get_local_rank("dp")
    )["losses"]
    infinity.unwrap_model(model, optimizer)
    if dist.get_rank() == 0 and weights is None:
        torch.manual_seed(0)
        alone.to_empty(device="cpu")
        for module in alone.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        found["one process"] = whole(alone.state_dict())
    return found


def refused(what: str) -> str:
    """Bad input: an error on all ranks, with the model as it was, and the next wrap works."""
    mesh = mesh_of()["tp"]
    model = decoder()
    config: dict[str, Any] = {"params": "host", "optimizer": "host"}
    given, plan = mesh, None
    cut = what not in ("values", "not cut")
    if what == "heads":
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        for block in model.blocks:
            block.up, block.down = nn.Linear(WIDTH, 27), nn.Linear(27, WIDTH)
    elif what == "style":
        plan = {"blocks.*.up": "columns"}
    elif what == "name":
        plan = {"blocks.*.upper": "colwise"}
    elif what == "two axes":
        mesh = mesh_of()
    elif what == "values":
        torch.manual_seed(dist.get_rank())
        model = Decoder()
    elif what == "degrees":
        given = mesh_of(2)
    elif what == "partial":
        placements = [Partial()]
        value = DTensor.from_local(torch.ones(WIDTH), mesh, placements, run_check=False)
        model.norm.weight = nn.Parameter(value)
        cut = False
    elif what in ("micro_batch", "recompute"):
        config[what] = 1 if what == "micro_batch" else True
    try:
        if cut:
            model = infinity.parallel.tensor_parallel(model, mesh, plan, quiet=True)
        infinity.wrap_model(model, adamw(model), config, mesh=given)
        said = "was taken"
    except infinity.InfinityError as error:
        said = f"{type(error).__name__}: {error}"
    plain = [type(p) for p in model.parameters()]
    if what in ("heads", "style", "name", "two axes"):
        said += "" if set(plan_types(plain)) == {"Parameter"} else " BUT THE MODEL WAS CHANGED"
    again, optimizer = parallel(decoder(), mesh_of()["tp"], "columns and rows"), None
    again, optimizer = infinity.wrap_model(again, adamw(again), {}, mesh=mesh_of()["tp"])
    train(again, optimizer, "plain", steps=1)
    infinity.unwrap_model(again, optimizer)
    return said


def plan_types(kinds: list[type]) -> list[str]:
    return [kind.__name__ for kind in kinds]


def without_mesh(config: dict) -> bool:
    """wrap_model finds the mesh in the model's DTensors. One rank has a group more than the
    other."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    model = parallel(decoder(), mesh_of()["tp"], "columns and rows")
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    train(model, optimizer, "plain", steps=1)
    parts = parts_of(model).ranks.tp_group.size
    infinity.unwrap_model(model, optimizer)
    return parts == dist.get_world_size()


def untied(tie_again: bool | str) -> list[str]:
    """parallelize_module makes two of an embedding and a head that were one: what is said of it."""
    model = decoder()
    model.head.weight = model.embedding.weight
    parallel(model, mesh_of()["tp"], "columns and rows")
    if tie_again is True:
        model.head.weight = model.embedding.weight
    config = {
        "params": "host",
        "tied": [("embedding.weight", "head.weight")] if tie_again == "by the config" else [],
    }
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("infinity").addHandler(handler)
    model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh_of()["tp"])
    infinity.unwrap_model(model, optimizer)
    logging.getLogger("infinity").removeHandler(handler)
    return said


def dropped(checkpoints: bool) -> dict[str, Any]:
    """Masks of dropout: inside a region, and outside; and the gradients of a block that is
    recomputed."""
    mesh = mesh_of()["tp"]

    class Dropping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.inside(1 + 0 * self.up(x))
            masks.append(((hidden != 0).flatten()[:64].tolist(), None))
            result = self.outside(self.down(hidden))
            masks[-1] = masks[-1][0], (result != 0).flatten()[:64].tolist()
            return result

    masks: list = []
    torch.manual_seed(2)
    model = nn.ModuleDict({"blocks": nn.ModuleList([Dropping(), Dropping()])})
    infinity.parallel.tensor_parallel(
        model, mesh, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, quiet=True
    )
    torch.manual_seed(3)
    x = torch.ones(2, 4, WIDTH, requires_grad=True)
    for block in model["blocks"]:
        x = checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)
    x.sum().backward()
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, masks)
    return {"masks": everyones, "state": torch.get_rng_state()[:100].tolist()}


def communication(layers: int) -> dict[str, Any]:
    """Elements of every collective of a forward, of its loss and of its backward, by torch's own
    count."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        """Notes how many elements each collective is given."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # which it makes collectives of
            if func.namespace == "_c10d_functional" and func.__name__.split(".")[0] in (
                "all_reduce",
                "all_gather_into_tensor",
                "reduce_scatter_tensor",
            ):
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    def counting(work: Callable[[], Any]) -> Any:
        sizes.clear()
        with CommDebugMode() as counted, Sizes():
            result = work()
        return result

    sizes: list[int] = []
    mesh, batch = mesh_of()["tp"], tokens(0)
    found: dict[str, Any] = {
        "bs": batch.numel(),
        "bsh": batch.numel() * WIDTH,
        "bsv": batch.numel() * VOCABULARY,
    }
    for where in ("torch", "ours"):
        model = decoder()
        plan = infinity.parallel.find_plan(model) | {"head": "replicate"}
        infinity.parallel.tensor_parallel(model, mesh, plan, quiet=True)
        parallelize_module(
            model, mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        )
        optimizer = adamw(model)
        if where == "ours":
            model, optimizer = infinity.wrap_model(
                model, optimizer, {"params": "host", "optimizer": "host"}, mesh=mesh
            )
        told: dict[str, list[int]] = {}
        with loss_parallel():
            logits = counting(lambda: model(batch))
            told["forward"] = list(sizes)
            loss = counting(lambda: F.cross_entropy(logits.flatten(0, 1), batch.flatten()))
            told["loss"] = list(sizes)
            counting(lambda: loss.backward())
            told["backward"] = list(sizes)
        found[where] = told
        if where == "ours":
            infinity.unwrap_model(model, optimizer)
    return found


EDITS = {
    "data": lambda weight: weight.data.clamp_(-0.05, 0.05),
    "in place": lambda weight: weight.clamp_(-0.05, 0.05),
    "detached": lambda weight: weight.detach().clamp_(-0.05, 0.05),
    "to_local": lambda weight: weight.to_local().clamp_(-0.05, 0.05),
    "data of the local part": lambda weight: weight._local_tensor.data.clamp_(-0.05, 0.05),
}


def edited(how: str, home: str) -> list[float]:
    """A forward that clamps its own weight: the largest element afterwards, by torch and with the
    engine."""
    mesh, found = mesh_of()["tp"], []
    for engine in (False, True):
        model, optimizer = parallel(decoder(), mesh, "columns and rows"), None
        forward = model.blocks[0].up.forward

        def clamping(x, model=model, forward=forward):
            with torch.no_grad():
                EDITS[how](model.blocks[0].up.weight)
            return forward(x)

        model.blocks[0].up.forward = clamping
        if engine:
            model, optimizer = infinity.wrap_model(model, None, {"params": home}, mesh=mesh)
        model(tokens(0)).sum()
        found.append(whole(model.state_dict())["blocks.0.up.weight"].abs().max().item())
        if engine:
            infinity.unwrap_model(model)
    return found


def small_things() -> dict[str, Any]:
    """What a review found, each with what is right."""
    mesh, found = mesh_of()["tp"], {}
    host = {"params": "host", "optimizer": "host"}
    rank = dist.get_rank()

    model = parallel(decoder(), mesh, "columns and rows")
    model.norm.scarce = nn.Parameter(distribute_tensor(torch.ones(1, 8), mesh, [Shard(0)]))
    model, optimizer = infinity.wrap_model(model, adamw(model), host, mesh=mesh)
    loss_of(model, tokens(0), "plain").backward()
    model.norm.scarce.grad = distribute_tensor(torch.ones(1, 8), mesh, [Shard(0)])
    found["largest"] = infinity.clip_grad_norm_(optimizer, 1e9, float("inf")).isfinite().item()
    model.norm.weight.grad.fill_(float("inf"))
    total = infinity.clip_grad_norm_(optimizer, 1.0)
    found["infinite"] = total.item(), bool((model.head.weight.grad.to_local() == 0).all())
    optimizer.zero_grad()
    try:
        with infinity.full_params(model, "norm.weight", writeback=True) as params, torch.no_grad():
            params["norm.weight"].fill_(rank + 1.0)
        found["edit apart"] = "was taken"
    except infinity.UsageError as error:
        found["edit apart"] = str(error)
    infinity.unwrap_model(model, optimizer)

    def gated(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        a = module["up"](x)
        x.mul_(2)
        return module["down"](a.sigmoid() * module["gate"](x))

    grads = []
    for cut in (False, True):
        torch.manual_seed(4)
        block = nn.ModuleDict(
            {"up": nn.Linear(8, 16), "gate": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
        ).requires_grad_(False)
        if cut:
            plan = {"up": "colwise", "gate": "colwise", "down": "rowwise"}
            infinity.parallel.tensor_parallel(block, mesh, plan, quiet=True)
        leaf = torch.ones(2, 8, requires_grad=True)
        gated(leaf * 1, block).sum().backward()
        grads.append(leaf.grad)
    found["changed between"] = (grads[0] - grads[1]).abs().max().item()

    model = decoder()
    model.blocks[0].down.weight = nn.Parameter(model.blocks[0].up.weight.detach().clone())
    model.blocks[0].down = nn.Linear(WIDTH, 4 * WIDTH)
    model.blocks[0].down.weight = model.blocks[0].up.weight
    try:
        infinity.parallel.tensor_parallel(
            model, mesh, {"blocks.0.up": "colwise", "blocks.0.down": "rowwise"}, quiet=True
        )
        found["ties"] = "was taken"
    except infinity.ConfigError as error:
        found["ties"] = str(error), any(isinstance(p, DTensor) for p in model.parameters())

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
            x = self.drop(self.up(x))
            if fails:
                raise ValueError
            return self.down(x)

    blocks = nn.ModuleDict({"block": Failing()})
    infinity.parallel.tensor_parallel(
        blocks, mesh, {"block.up": "colwise", "block.down": "rowwise"}, quiet=True
    )
    torch.manual_seed(7)
    first = blocks["block"](torch.ones(2, 8), False)
    with contextlib.suppress(ValueError):
        blocks["block"](torch.ones(2, 8), True)
    torch.manual_seed(7)
    found["seeded"] = torch.equal(first, blocks["block"](torch.ones(2, 8), False))

    try:
        infinity.wrap_model(decoder(), None, host, mesh="a mesh" if rank else mesh_of(2))
        found["another mesh"] = "was taken"
    except infinity.ConfigError as error:
        found["another mesh"] = str(error)
    try:
        infinity.wrap_model(decoder(), None, host, mesh=None if rank else mesh)
        found["other rows"] = "was taken"
    except infinity.ConfigError as error:
        found["other rows"] = str(error)
    return found


def falls(how: str) -> None:
    """Rank 1 falls in the middle of its second forward, or of its backward."""
    model = parallel(decoder(), mesh_of()["tp"], "columns and rows")
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}, mesh=mesh_of()["tp"]
    )
    train(model, optimizer, "plain", steps=1)

    def fall(*_: Any) -> None:
        if dist.get_rank() == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the user's own")

    if how == "raises in a backward":
        model.blocks[0].down.register_full_backward_hook(fall)
    else:
        model.blocks[1].register_forward_hook(fall)
    train(model, optimizer, "plain", steps=1)


if __name__ == "__main__":
    serve(globals())
