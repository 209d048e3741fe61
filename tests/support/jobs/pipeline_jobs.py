"""Jobs of pipelines that every rank of a launch runs (see `ranks`).

**twin**: the same schedule without the engine, with torch's own optimizer.
**chunk**: one stage; a rank has one, or several (interleaved, or in a V).
"""

from __future__ import annotations

import gc
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
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import doubles
import parallel_jobs
from decoder import VOCABULARY, WIDTH, Decoder
from parallel_jobs import adamw, whole
from passed import passed
from ranks import serve, told

import infinity
from infinity.core.run.engine import Engine
from infinity.core.units.unit import ParamUnit
from infinity.core.wrap import agreement
from infinity.ranks.channel import Channel, SyncPoint

SINGLE = ("GPipe", "1F1B")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
LAYERS, MICRO = 4, 8
FIRST_PIECE = 160  # of the transfers of a rank that falls: after its checkpoint


class Chunk(nn.Module):
    """Some of a Decoder's layers, under their names in it."""

    def __init__(self, model: Decoder, layers: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        if 0 in layers:
            self.embedding = model.embedding
        if len(model.blocks) - 1 in layers:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if hasattr(self, "embedding") else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int, data_rank: int = 0) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(100 * step + data_rank)
    )


def chunks_of(kind: str, rank: int, ranks: int) -> tuple[list[int], int]:
    """The numbers of the chunks that a rank of the pipeline has, and how many there are."""
    if kind in SINGLE:
        return [rank], ranks
    if kind in IN_A_V:
        return [rank, 2 * ranks - 1 - rank], 2 * ranks
    return [rank, rank + ranks], 2 * ranks


def build(
    kind: str, mesh: Any, *, layers: int = LAYERS, seed: int = 5
) -> tuple[list[Chunk], list[int], int]:
    model = Decoder(layers) if seed is None else seeded(layers, seed)
    numbers, count = chunks_of(kind, mesh.get_local_rank("pp"), mesh["pp"].size())
    each = layers // count
    return [Chunk(model, list(range(n * each, (n + 1) * each))) for n in numbers], numbers, count


def seeded(layers: int, seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(layers)


def schedule_of(
    kind: str, chunks: list[Chunk], numbers: list[int], count: int, mesh: Any, micro: int = MICRO
) -> Any:
    group = mesh["pp"].get_group()
    stages = [
        PipelineStage(chunk, n, count, torch.device("cpu"), group=group)
        for chunk, n in zip(chunks, numbers)
    ]
    made = getattr(schedules, f"Schedule{kind}")
    return made(stages[0] if kind in SINGLE else stages, micro, loss_fn=loss_of)


def step(
    schedule: Any, numbers: list[int], count: int, number: int, data_rank: int = 0
) -> float | None:
    """One step of the schedule; the mean loss where this rank has the last chunk."""
    tokens, losses = batch(number, data_rank), []
    arguments = {"target": tokens, "losses": losses} if count - 1 in numbers else {}
    schedule.step(*((tokens,) if 0 in numbers else ()), **arguments)
    return sum(loss.item() for loss in losses) / len(losses) if losses else None


def mesh_of(pp: int = 2) -> Any:
    return init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))


def forgotten(config: dict) -> int:
    """How many engines there are of pipelines that have gone."""
    trained(kind="GPipe", config=config)
    gc.collect()
    return sum(isinstance(found, Engine) for found in gc.get_objects())


def trained(
    kind: str, config: dict | None, *, pp: int = 2, steps: int = 3, by: str = "step"
) -> dict[str, Any]:
    """Losses, norms and weights of some steps; ``config`` None: the twin. ``by``: "config" clips by
    Config(max_grad_norm)."""
    mesh = mesh_of(pp)
    chunks, numbers, count = build(kind, mesh)
    optimizer: Any = torch.optim.AdamW(
        [p for chunk in chunks for p in chunk.parameters()], lr=1e-2, fused=True
    )
    if config is not None:
        chunks, optimizer = infinity.wrap_model(chunks, optimizer, config, mesh=mesh)
    schedule = schedule_of(kind, chunks, numbers, count, mesh)
    if config is not None:
        infinity.parallel.attach(schedule)
    losses, norms = [], []
    for number in range(steps):
        losses.append(step(schedule, numbers, count, number, mesh.get_local_rank("dp")))
        if config is None:
            norms.append(clip_twin(chunks, mesh))
        elif by == "step":
            norms.append(infinity.clip_grad_norm_(optimizer, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    found = {
        "losses": losses,
        "norms": norms,
        "weights": {n: v for chunk in chunks for n, v in whole(chunk.state_dict()).items()},
    }
    if config is not None:
        # torch's own eval of schedules in a V fails: "can't steal_bwd_input if this stage doesn't
        # have backward".
        found["evaluates"] = kind in IN_A_V or evaluates(schedule, chunks, numbers, count)
        infinity.unwrap_model(chunks, optimizer)
        found["unwrapped"] = all(
            type(p) is nn.Parameter for chunk in chunks for p in chunk.parameters()
        )
    return found


def clip_twin(chunks: list[Chunk], mesh: Any) -> float:
    """Clips as one process would: the data ranks' gradients averaged, one norm over the stages."""
    grads = [p.grad for chunk in chunks for p in chunk.parameters()]
    for grad in grads if mesh["dp"].size() > 1 else ():
        dist.all_reduce(grad, group=mesh["dp"].get_group())
        grad.div_(mesh["dp"].size())
    squares = sum(grad.double().square().sum() for grad in grads)
    dist.all_reduce(squares, group=mesh["pp"].get_group())
    norm = squares.sqrt().item()
    for grad in grads:
        grad.mul_(min(1.0, 0.5 / (norm + 1e-6)))
    return norm


def evaluates(schedule: Any, chunks: list[Chunk], numbers: list[int], count: int) -> bool:
    """Whether ``eval`` between steps gives the same twice, and leaves nothing on the device."""
    tokens, found = batch(99), []
    for _ in range(2):
        losses: list = []
        with torch.no_grad():
            schedule.eval(
                *((tokens,) if 0 in numbers else ()),
                **({"target": tokens, "losses": losses} if count - 1 in numbers else {}),
            )
        found.append([loss.item() for loss in losses])
    at_home = [unit for unit in parts_of(chunks).units if not unit.computes_at_home]
    return found[0] == found[1] and not any(
        flat.untyped_storage().nbytes() for unit in at_home for flat in unit.buffers.flats
    )


def counted(kind: str, config: dict) -> dict[str, Any]:
    """Two chunks in one process, two data ranks: bytes and meetings of a step, in parts of the
    weights' bytes of the others."""
    mesh = mesh_of(1)
    chunks, numbers, count = build(kind, mesh)
    optimizer: Any = torch.optim.AdamW(
        [p for chunk in chunks for p in chunk.parameters()], lr=1e-2, fused=True
    )
    chunks, optimizer = infinity.wrap_model(chunks, optimizer, config, mesh=mesh)
    schedule = infinity.parallel.attach(schedule_of(kind, chunks, numbers, count, mesh))
    engine, meetings = parts_of(chunks).engine, []
    start_sync = Channel.start_sync

    def counting(self: Channel, what: str, *how: Any, **more: Any) -> SyncPoint:
        meetings.append(what)
        return start_sync(self, what, *how, **more)

    Channel.start_sync = counting
    weights, found = sum(unit.weight_nbytes for unit in parts_of(engine).units), []
    for number in range(4):
        edges = passed(parts_of(engine).traffic.collectives)
        misses = parts_of(engine).prefetcher.misses
        meetings.clear()
        step(schedule, numbers, count, number, mesh.get_local_rank("dp"))
        told = {
            name: (nbytes - edges[name]) / (weights / 2)
            for name, nbytes in passed(parts_of(engine).traffic.collectives).items()
        }
        found.append(
            told
            | {
                "meetings": len(meetings),
                "misses": parts_of(engine).prefetcher.misses - misses,
                "units": len(parts_of(engine).units),
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    Channel.start_sync = start_sync
    infinity.unwrap_model(chunks, optimizer)
    return {"steps": found}


def loads(window: int, chunks: int, config: dict) -> dict[str, Any]:
    """LoopedBFS of one rank: how often a unit comes to the device in a step, in a window of so many
    chunks."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Linear(64, 1024, bias=False),
                nn.Linear(1024, 64, bias=False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(self.first(x).relu())

    mesh = init_device_mesh(
        "cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "tp")
    )  # every rank runs the same
    torch.manual_seed(0)
    parts = [nn.Sequential(Pair(), Pair()) for _ in range(chunks)]
    params = [p for part in parts for p in part.parameters()]
    each = sum(p.nbytes for p in parts[0].parameters()) // 2
    # And a pair's gradients.
    limit = {"device_memory": int(each * (2 * window + 1.5)), "units": ["Pair"]}
    parts, optimizer = infinity.wrap_model(
        parts, torch.optim.AdamW(params, fused=True), config | limit, mesh=mesh
    )
    stages = [
        PipelineStage(part, n, chunks, torch.device("cpu"), group=mesh["pp"].get_group())
        for n, part in enumerate(parts)
    ]
    schedule = infinity.parallel.attach(schedules.ScheduleLoopedBFS(stages, 4, loss_fn=F.mse_loss))
    engine, gathered = parts_of(parts).engine, []
    start = ParamUnit.start_gather

    def counting(self: ParamUnit, *arguments: Any, **options: Any) -> Any:
        gathered.append(self.index)
        return start(self, *arguments, **options)

    ParamUnit.start_gather = counting
    found = []
    for _ in range(4):
        gathered.clear()
        misses = parts_of(engine).prefetcher.misses
        schedule.step(torch.randn(8, 64, requires_grad=True), target=torch.randn(8, 64))
        found.append(
            {"loads": len(gathered) / 2, "misses": parts_of(engine).prefetcher.misses - misses}
        )
        optimizer.step()
        optimizer.zero_grad()
    ParamUnit.start_gather = start
    infinity.unwrap_model(parts, optimizer)
    return {
        "steps": found,
        "window": parts_of(engine).planned.plan.device_window_nbytes / (2 * each),
    }


class Unbuilt:
    """Stands for a stage where only the order of a schedule is wanted."""

    has_backward, device, submod, group = True, "cpu", nn.Identity(), None

    def __init__(self, number: int, count: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = (
            number,
            count,
            ranks,
            number % ranks,
        )
        self.is_first, self.is_last = number == 0, number == count - 1


def ordered(kind: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank computes in the order that torch's schedule has for it, as :func:`executed`
    tells it; without any process."""
    what = {
        "FORWARD": "forward",
        "FULL_BACKWARD": "backward",
        "BACKWARD_INPUT": "inputs",
        "BACKWARD_WEIGHT": "weights",
    }
    numbers, count = chunks_of(kind, 0, ranks)
    order = getattr(schedules, f"Schedule{kind}")(
        [Unbuilt(n, count, ranks) for n in numbers], MICRO
    ).pipeline_order
    return [
        {
            "chunks": count,
            "done": [
                (what[a.computation_type.name], a.stage_index, a.microbatch_index)
                for a in order[rank]
                if a
            ],
        }
        for rank in range(ranks)
    ]


def executed(kind: str, ranks: int = 2) -> dict[str, Any]:
    """What each rank computes in one step, in order: (what, chunk, micro-batch); and the bytes that
    it sends for a micro-batch."""
    mesh = mesh_of(ranks)
    chunks, numbers, count = build(kind, mesh, layers=2 * ranks)
    params = [p for chunk in chunks for p in chunk.parameters()]
    chunks, optimizer = infinity.wrap_model(
        chunks, torch.optim.AdamW(params), {"params": "host", "optimizer": "host"}, mesh=mesh
    )
    schedule = infinity.parallel.attach(schedule_of(kind, chunks, numbers, count, mesh))
    step(schedule, numbers, count, 0)
    optimizer.zero_grad()
    done: list[tuple[str, int, int]] = []
    sent: dict[str, list[int]] = {"forward": [], "backward": []}

    def noting(stage: Any, name: str, what: Callable[..., str]) -> None:
        run = getattr(stage, name)

        def noted(mb: int, *arguments: Any, **options: Any) -> Any:
            done.append((what(**options), stage.stage_index, mb))
            return run(mb, *arguments, **options)

        setattr(stage, name, noted)

    def counting(stage: Any, name: str, direction: str) -> None:
        run = getattr(stage, name)

        def counted(mb: int) -> list:
            operations = run(mb)
            sent[direction] += [each.tensor.nbytes for each in operations]
            return operations

        setattr(stage, name, counted)

    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        noting(stage, "forward_one_chunk", lambda **_: "forward")
        noting(
            stage,
            "backward_one_chunk",
            lambda full_backward=True, **_: "backward" if full_backward else "inputs",
        )
        noting(stage, "backward_weight_one_chunk", lambda **_: "weights")
        counting(stage, "get_fwd_send_ops", "forward")
        counting(stage, "get_bwd_send_ops", "backward")
    step(schedule, numbers, count, 1)
    infinity.unwrap_model(chunks, optimizer)
    return {
        "done": done,
        "sent": sent,
        "chunks": count,
        "boundary": 16 // MICRO * 8 * WIDTH * 4,
    }


# --- checkpoints ---


def wrapped_on(what: str, config: dict, seed: int) -> tuple:
    """A Decoder on a mesh of two ranks: "pp2", "dp2" or "tp2"; how to train a step; and a list of
    its modules."""
    if what != "pp2":
        mesh = parallel_jobs.mesh_of(2 if what == "dp2" else 1)
        model = seeded(LAYERS, seed)
        if what == "tp2":
            model = parallel_jobs.parallel(model, mesh["tp"], "columns and rows")
        model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh)

        def train(number: int) -> None:
            loss_of(model(batch(number)), batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return [model], optimizer, train
    mesh = mesh_of(2)
    chunks, numbers, count = build("Interleaved1F1B", mesh, seed=seed)
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-2)
    chunks, optimizer = infinity.wrap_model(chunks, optimizer, config, mesh=mesh)
    schedule = infinity.parallel.attach(
        schedule_of("Interleaved1F1B", chunks, numbers, count, mesh)
    )

    def train_stages(number: int) -> None:
        step(schedule, numbers, count, number)
        optimizer.step()
        optimizer.zero_grad()

    return chunks, optimizer, train_stages


def values_of(models: list[nn.Module], optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and moments of all ranks, by name."""
    found = {
        f"weight/{name}": value
        for model in models
        for name, value in whole(model.state_dict()).items()
    }
    names = [name for model in models for name, _ in model.named_parameters()]
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{key}/{names[index]}": value for key, value in whole(state).items()}
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    return {name: value for theirs in everyones for name, value in theirs.items()}


def saved(path: str, what: str, config: dict) -> dict[str, Any]:
    models, optimizer, train = wrapped_on(what, config, 5)
    for number in range(2):
        train(number)
    infinity.save_checkpoint(path, models, optimizer, extra="two steps")
    values = values_of(models, optimizer)
    train(2)
    after = values_of(models, optimizer)
    infinity.unwrap_model(models, optimizer)
    return {"values": values, "after": after}


def loaded(path: str, what: str, config: dict) -> dict[str, Any]:
    models, optimizer, train = wrapped_on(what, config, 6)
    extra = infinity.load_checkpoint(path, models, optimizer)
    values = values_of(models, optimizer)
    train(2)
    after = values_of(models, optimizer)
    infinity.unwrap_model(models, optimizer)
    return {"extra": extra, "values": values, "after": after}


class Layers(nn.Module):
    """A stage whose layers are counted from 0, as those of every other stage, with a buffer of its
    own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("seen", torch.full((1,), float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def alike(path: str, config: dict, *, fault: bool = False) -> dict[str, Any]:
    """Stages that call their parameters the same, beside torch's own, and what a checkpoint brings
    back. ``fault``: names stay as they are."""
    mesh, rank, found = mesh_of(2), dist.get_rank(), {}
    made = agreement.prefix_of_stage
    if fault:
        agreement.prefix_of_stage = lambda *_: ""

    def train(stage: Any, optimizer: Any, number: int, *, attached: bool) -> None:
        pipe = PipelineStage(stage, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = schedules.Schedule1F1B(pipe, 4, loss_fn=F.mse_loss)
        if attached:
            infinity.parallel.attach(schedule)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        schedule.step(x) if rank == 0 else schedule.step(target=x)
        optimizer.step()
        optimizer.zero_grad()

    twin = Layers(rank)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    (stage,), optimizer = wrapped_stage(rank, config, mesh)
    for number in range(2):
        train(twin, twin_optimizer, number, attached=False)
        train(stage, optimizer, number, attached=True)
    found["off"] = parallel_jobs.off(twin.state_dict(), stage.state_dict())
    infinity.save_checkpoint(path, [stage], optimizer)
    found["named"] = sorted(name for name, _ in infinity.named_weights(stage))
    found["advice"] = told(lambda: stage.layers[0].weight.numpy())
    found["folder"] = told(lambda: infinity.save_pretrained([stage], f"{path}-folder"))
    (other,), other_optimizer = wrapped_stage(rank + 10, config, mesh)
    found["load"] = told(lambda: infinity.load_checkpoint(path, [other], other_optimizer))
    found["loaded"] = all(
        torch.equal(value, stage.state_dict()[name]) for name, value in other.state_dict().items()
    )
    for each, its in ((stage, optimizer), (other, other_optimizer)):
        train(each, its, 2, attached=True)
    found["goes on"] = all(
        torch.equal(value, stage.state_dict()[name]) for name, value in other.state_dict().items()
    )
    infinity.unwrap_model([stage], optimizer)
    infinity.unwrap_model([other], other_optimizer)
    agreement.prefix_of_stage = made
    return found


def wrapped_stage(seed: int, config: dict, mesh: Any) -> tuple:
    stage = Layers(seed)
    return infinity.wrap_model(
        [stage], torch.optim.AdamW(stage.parameters(), lr=1e-2), config, mesh=mesh
    )


# --- refusals and failures ---


def refused() -> dict[str, str]:
    """What cannot be attached or done, each followed by a step that can."""
    mesh, found, host = mesh_of(2), {}, {"params": "host", "optimizer": "host"}
    chunks, numbers, count = build("Interleaved1F1B", mesh)
    params = [p for chunk in chunks for p in chunk.parameters()]
    found["not wrapped"] = told(
        lambda: infinity.parallel.attach(
            schedule_of("Interleaved1F1B", chunks, numbers, count, mesh)
        )
    )
    found["no schedule"] = told(lambda: infinity.parallel.attach(chunks[0]))
    settings = host | {"max_grad_norm": 1.0 + dist.get_rank()}
    found["settings"] = told(
        lambda: infinity.wrap_model(chunks, torch.optim.AdamW(params), settings, mesh=mesh)
    )
    for field in ("micro_batch", "recompute"):
        wanted = host | {field: 1 if field == "micro_batch" else True}
        found[field] = told(
            lambda wanted=wanted: infinity.wrap_model(
                chunks, torch.optim.AdamW(params), wanted, mesh=mesh
            )
        )
    apart = [
        infinity.wrap_model([chunk], None, {"params": "host"}, mesh=mesh)[0][0] for chunk in chunks
    ]
    found["apart"] = told(
        lambda: infinity.parallel.attach(
            schedule_of("Interleaved1F1B", apart, numbers, count, mesh)
        )
    )
    for chunk in apart:
        infinity.unwrap_model(chunk)
    chunks, optimizer = infinity.wrap_model(
        chunks, torch.optim.AdamW(params, fused=True), host, mesh=mesh
    )
    schedule = infinity.parallel.attach(
        schedule_of("Interleaved1F1B", chunks, numbers, count, mesh)
    )
    step(schedule, numbers, count, 0)
    found["torch's clip"] = told(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0))
    optimizer.step()
    optimizer.zero_grad()
    found["goes on"] = (
        str(step(schedule, numbers, count, 1) is not None)
        if count - 1 in numbers
        else str(step(schedule, numbers, count, 1) is None)
    )
    infinity.unwrap_model(chunks, optimizer)
    return found


def falls(how: str, folder: str, steps: int = 60) -> None:
    """The second rank falls in a step after the first one, of which there is a checkpoint."""
    mesh, config = mesh_of(2), {"params": "host", "optimizer": "host"}
    if how in ("eio", "enospc"):
        config = {
            "params": "nvme",
            "optimizer": "nvme",
            "nvme_paths": [folder],
            "host_memory": "64MB",
        }
        if dist.get_rank() == 1:
            doubles.install()
            os.environ["INFINITY_FAULTS"] = f"seed=1,{how}=1.0,first_piece={FIRST_PIECE}"
    chunks, numbers, count = build("Interleaved1F1B", mesh)
    params = [p for chunk in chunks for p in chunk.parameters()]
    chunks, optimizer = infinity.wrap_model(chunks, torch.optim.AdamW(params), config, mesh=mesh)
    schedule = infinity.parallel.attach(
        schedule_of("Interleaved1F1B", chunks, numbers, count, mesh)
    )

    def train(number: int) -> None:
        step(schedule, numbers, count, number)
        optimizer.step()
        optimizer.zero_grad()

    train(0)
    infinity.save_checkpoint(f"{folder}/checkpoint", chunks, optimizer, extra={"step": 1})

    def fall(*_: Any) -> None:
        if dist.get_rank() == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ValueError("the user's own")

    if how == "raises in a backward":
        next(iter(chunks[0].blocks.values())).register_full_backward_hook(fall)
    elif how not in ("eio", "enospc"):
        next(iter(chunks[0].blocks.values())).register_forward_hook(fall)
    for number in range(1, steps):
        train(number)


if __name__ == "__main__":
    serve(globals())
