"""Jobs of pipelines that every rank of a launch runs (see `ranks`).

**twin**: the same schedule without the engine, with torch's own optimizer.
**chunk**: one stage; a rank has one, or several (interleaved, or in a V).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import parallel_jobs
from parallel_jobs import VOCABULARY, Decoder, adamw, whole
from ranks import serve

import infinity
from infinity.distributed.channel import Channel
from infinity.distributed.meeting import Meeting
from infinity.runtime.registry import wrapped
from infinity.state.unit import ParamUnit

SINGLE = ("GPipe", "1F1B")
IN_A_V = ("ZBVZeroBubble", "DualPipeV")
LAYERS, MICRO = 4, 8


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
    return torch.randint(0, VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(100 * step + data_rank))


def chunks_of(kind: str, rank: int, ranks: int) -> tuple[list[int], int]:
    """The numbers of the chunks that a rank of the pipeline has, and how many there are."""
    if kind in SINGLE:
        return [rank], ranks
    if kind in IN_A_V:
        return [rank, 2 * ranks - 1 - rank], 2 * ranks
    return [rank, rank + ranks], 2 * ranks


def build(kind: str, mesh: Any, *, layers: int = LAYERS, seed: int = 5) -> tuple[list[Chunk], list[int], int]:
    model = parallel_jobs.Decoder(layers) if seed is None else seeded(layers, seed)
    numbers, count = chunks_of(kind, mesh.get_local_rank("pp"), mesh["pp"].size())
    each = layers // count
    return [Chunk(model, list(range(n * each, (n + 1) * each))) for n in numbers], numbers, count


def seeded(layers: int, seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(layers)


def schedule_of(kind: str, chunks: list[Chunk], numbers: list[int], count: int, mesh: Any, micro: int = MICRO) -> Any:
    group = mesh["pp"].get_group()
    stages = [PipelineStage(chunk, n, count, torch.device("cpu"), group=group) for chunk, n in zip(chunks, numbers)]
    made = getattr(schedules, f"Schedule{kind}")
    return made(stages[0] if kind in SINGLE else stages, micro, loss_fn=loss_of)


def step(schedule: Any, numbers: list[int], count: int, number: int, data_rank: int = 0) -> float | None:
    """One step of the schedule; the mean loss where this rank has the last chunk."""
    tokens, losses = batch(number, data_rank), []
    arguments = {"target": tokens, "losses": losses} if count - 1 in numbers else {}
    schedule.step(*((tokens,) if 0 in numbers else ()), **arguments)
    return sum(loss.item() for loss in losses) / len(losses) if losses else None


def mesh_of(pp: int = 2) -> Any:
    return init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))


def trained(kind: str, config: dict | None, *, pp: int = 2, steps: int = 3, by: str = "step") -> dict[str, Any]:
    """Losses, norms and weights of some steps; ``config`` None: the twin. ``by``: "config" clips by Config(max_grad_norm)."""
    mesh = mesh_of(pp)
    chunks, numbers, count = build(kind, mesh)
    optimizer: Any = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-2, fused=True)
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
    found = {"losses": losses, "norms": norms, "weights": {n: v for chunk in chunks for n, v in whole(chunk.state_dict()).items()}}
    if config is not None:
        # torch's own eval of schedules in a V fails: "can't steal_bwd_input if this stage doesn't have backward".
        found["evaluates"] = kind in IN_A_V or evaluates(schedule, chunks, numbers, count)
        infinity.unwrap_model(chunks, optimizer)
        found["unwrapped"] = all(type(p) is nn.Parameter for chunk in chunks for p in chunk.parameters())
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
                *((tokens,) if 0 in numbers else ()), **({"target": tokens, "losses": losses} if count - 1 in numbers else {})
            )
        found.append([loss.item() for loss in losses])
    at_home = [unit for unit in wrapped(chunks).engine.units if not unit.stays]
    return found[0] == found[1] and not any(flat.untyped_storage().nbytes() for unit in at_home for flat in unit.flats)


def counted(kind: str, config: dict) -> dict[str, Any]:
    """Two chunks in one process, two data ranks: bytes and meetings of a step, in parts of the weights' bytes of the others."""
    mesh = mesh_of(1)
    chunks, numbers, count = build(kind, mesh)
    optimizer: Any = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-2, fused=True)
    chunks, optimizer = infinity.wrap_model(chunks, optimizer, config, mesh=mesh)
    schedule = infinity.parallel.attach(schedule_of(kind, chunks, numbers, count, mesh))
    engine, meetings = wrapped(chunks).engine, []
    announce = Channel.announce

    def counting(self: Channel, what: str, *how: Any, **more: Any) -> Meeting:
        meetings.append(what)
        return announce(self, what, *how, **more)

    Channel.announce = counting
    weights, found = sum(unit.weight_nbytes for unit in engine.units), []
    for number in range(4):
        edges = {name: engine.traffic.collectives[name].nbytes for name in ("all-gather", "reduce-scatter")}
        misses = engine.prefetcher.misses
        meetings.clear()
        step(schedule, numbers, count, number, mesh.get_local_rank("dp"))
        told = {name: (engine.traffic.collectives[name].nbytes - before) / (weights / 2) for name, before in edges.items()}
        found.append(told | {"meetings": len(meetings), "misses": engine.prefetcher.misses - misses, "units": len(engine.units)})
        optimizer.step()
        optimizer.zero_grad()
    Channel.announce = announce
    infinity.unwrap_model(chunks, optimizer)
    return {"steps": found}


def loads(window: int, chunks: int, config: dict) -> dict[str, Any]:
    """LoopedBFS of one rank: how often a unit comes to the device in a step, in a window of so many chunks."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 1024, bias=False), nn.Linear(1024, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(self.first(x).relu())

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "tp"))  # every rank runs the same
    torch.manual_seed(0)
    parts = [nn.Sequential(Pair(), Pair()) for _ in range(chunks)]
    params = [p for part in parts for p in part.parameters()]
    each = sum(p.nbytes for p in parts[0].parameters()) // 2
    limit = {"device_memory": int(each * (2 * window + 0.5)), "units": ["Pair"]}
    parts, optimizer = infinity.wrap_model(parts, torch.optim.AdamW(params, fused=True), config | limit, mesh=mesh)
    stages = [PipelineStage(part, n, chunks, torch.device("cpu"), group=mesh["pp"].get_group()) for n, part in enumerate(parts)]
    schedule = infinity.parallel.attach(schedules.ScheduleLoopedBFS(stages, 4, loss_fn=F.mse_loss))
    engine, gathered = wrapped(parts).engine, []
    start = ParamUnit.start_gather

    def counting(self: ParamUnit, *arguments: Any, **options: Any) -> Any:
        gathered.append(self.index)
        return start(self, *arguments, **options)

    ParamUnit.start_gather = counting
    found = []
    for _ in range(4):
        gathered.clear()
        misses = engine.prefetcher.misses
        schedule.step(torch.randn(8, 64, requires_grad=True), target=torch.randn(8, 64))
        found.append({"loads": len(gathered) / 2, "misses": engine.prefetcher.misses - misses})
        optimizer.step()
        optimizer.zero_grad()
    ParamUnit.start_gather = start
    infinity.unwrap_model(parts, optimizer)
    return {"steps": found, "window": engine.plan.device_window_nbytes / (2 * each)}


def executed(kind: str) -> dict[str, Any]:
    """What each rank computes in one step, in order: (what, chunk, micro-batch); and the bytes that it sends for a micro-batch."""
    mesh = mesh_of(2)
    chunks, numbers, count = build(kind, mesh)
    params = [p for chunk in chunks for p in chunk.parameters()]
    chunks, optimizer = infinity.wrap_model(chunks, torch.optim.AdamW(params), {"params": "host", "optimizer": "host"}, mesh=mesh)
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
        noting(stage, "backward_one_chunk", lambda full_backward=True, **_: "backward" if full_backward else "inputs")
        noting(stage, "backward_weight_one_chunk", lambda **_: "weights")
        counting(stage, "get_fwd_send_ops", "forward")
        counting(stage, "get_bwd_send_ops", "backward")
    step(schedule, numbers, count, 1)
    infinity.unwrap_model(chunks, optimizer)
    return {"done": done, "sent": sent, "chunks": count, "boundary": 16 // MICRO * 8 * parallel_jobs.WIDTH * 4}


# --- checkpoints ---


def wrapped_on(what: str, config: dict, seed: int) -> tuple:
    """A Decoder on a mesh of two ranks: "pp2", "dp2" or "tp2"; how to train a step; and a list of its modules."""
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
    schedule = infinity.parallel.attach(schedule_of("Interleaved1F1B", chunks, numbers, count, mesh))

    def train_stages(number: int) -> None:
        step(schedule, numbers, count, number)
        optimizer.step()
        optimizer.zero_grad()

    return chunks, optimizer, train_stages


def values_of(models: list[nn.Module], optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights and moments of all ranks, by name."""
    found = {f"weight/{name}": value for model in models for name, value in whole(model.state_dict()).items()}
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


# --- models that are cut here ---


def causal(name: str, layers: int = 4) -> nn.Module:
    """A small causal model of transformers, the same on every rank. qwen3 and gpt2 have a table that is their head, too."""
    import transformers as hf

    torch.manual_seed(11)
    small = {"vocab_size": 98, "num_hidden_layers": layers, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    grouped = {**small, "num_key_value_heads": 2}
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))
    if name == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, head_dim=16, tie_word_embeddings=True))
    if name == "gemma3":
        types = ["sliding_attention", "full_attention"] * (layers // 2)
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**grouped, head_dim=16, sliding_window=4, layer_types=types))
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2))
    rates = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=layers, n_head=4, vocab_size=98, n_positions=32, **rates))


def labelled(number: int, data_rank: int = 0) -> dict[str, torch.Tensor]:
    """A batch in which micro-batches have other numbers of labels."""
    tokens = torch.randint(0, 98, (8, 12), generator=torch.Generator().manual_seed(100 * number + data_rank))
    labels = tokens.clone()
    labels[0, 5:] = labels[3, 2:9] = -100
    return {"input_ids": tokens, "labels": labels}


def alone(name: str, data_ranks: int = 1) -> dict[str, Any]:
    """One process with the whole model, and every data rank's batch."""
    model = causal(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    told: dict[str, Any] = {"losses": [], "norms": []}
    for number in range(3):
        for data_rank in range(data_ranks):
            loss = model(**labelled(number, data_rank)).loss / data_ranks
            loss.backward()
        told["losses"].append(loss.item() * data_ranks)
        told["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return told | {"weights": whole(model.state_dict())}


def piped(
    name: str, config: dict, schedule: str, *, tp: int = 1, path: str | None = None, weights: str | None = None
) -> dict[str, Any]:
    """The same by parallel.pipeline over two stages; ``tp``: each cut over so many ranks. ``weights``: on meta, from this file."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2 // tp, tp), mesh_dim_names=("pp", "dp", "tp"))
    if weights is None:
        model = causal(name)
    else:
        with torch.device("meta"):
            model = causal(name)
        config = config | {"weights": weights}
    if tp > 1:
        model = infinity.parallel.tensor_parallel(model, mesh["tp"], quiet=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=tp == 1)
    pipe, optimizer = infinity.parallel.pipeline(model, mesh, optimizer, config, schedule=schedule, micro_batches=4, quiet=True)
    del model
    told: dict[str, Any] = {"losses": [], "norms": []}
    for number in range(3):
        told["losses"].append(pipe.step(**labelled(number, mesh.get_local_rank("dp"))).item())
        told["norms"].append(infinity.clip_grad_norm_(optimizer, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    told["weights"] = {key: value for chunk in pipe.chunks for key, value in whole(chunk.state_dict()).items()}
    if schedule != "ZBVZeroBubble":  # torch's eval of schedules in a V fails
        told["evaluated"] = pipe.eval(**labelled(9)).item()
    if path is not None:
        infinity.save_checkpoint(path, pipe.chunks, optimizer)
    infinity.unwrap_model(pipe.chunks, optimizer)
    return told


def reloaded(name: str, path: str, tp: int, onto: str | None = None) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint that another mesh has written, loaded onto two stages; saved again as ``onto``."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2 // tp, tp), mesh_dim_names=("pp", "dp", "tp"))
    model = causal(name)
    if tp > 1:
        model = infinity.parallel.tensor_parallel(model, mesh["tp"], quiet=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=tp == 1)
    host = {"params": "host", "optimizer": "host"}
    pipe, optimizer = infinity.parallel.pipeline(model, mesh, optimizer, host, schedule="1F1B", micro_batches=4, quiet=True)
    infinity.load_checkpoint(path, pipe.chunks, optimizer)
    if onto is not None:
        infinity.save_checkpoint(onto, pipe.chunks, optimizer)
    found = {key: value for chunk in pipe.chunks for key, value in whole(chunk.state_dict()).items()}
    infinity.unwrap_model(pipe.chunks, optimizer)
    return found


def piped_chains() -> dict[str, Any]:
    """An nn.Sequential, and a model with torchtitan's parts, beside one process."""

    class Titan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings = nn.Embedding(VOCABULARY, 32)
            self.layers = nn.ModuleDict({str(n): nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for n in range(4)})
            self.norm, self.output = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
            for layer in self.layers.values():
                x = x + layer(x)
            x = self.norm(x) if self.norm is not None else x
            return self.output(x) if self.output is not None else x

    kinds = {
        "titan": Titan,
        "sequential": lambda: nn.Sequential(
            nn.Embedding(VOCABULARY, 32), *(nn.Linear(32, 32) for _ in range(5)), nn.Linear(32, VOCABULARY)
        ),
    }
    found = {}
    for name, make in kinds.items():
        runs = []
        for pipelined in (False, True):
            torch.manual_seed(4)
            model = make()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            if pipelined:
                mesh = mesh_of(2)
                pipe, optimizer = infinity.parallel.pipeline(
                    model, mesh, optimizer, {"params": "host", "optimizer": "host"}, micro_batches=4, loss_fn=loss_of, quiet=True
                )
            losses = []
            for number in range(3):
                tokens = batch(number)
                if pipelined:
                    losses.append(pipe.step(tokens, tokens).item())
                else:
                    loss = loss_of(model(tokens), tokens)
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            runs.append(losses)
        found[name] = runs
    return found


def refused_pipelines() -> dict[str, str]:
    """Bad input of parallel.pipeline, each with the model as it was."""
    mesh, host = mesh_of(2), {"params": "host", "optimizer": "host"}

    def make(name: str = "llama", layers: int = 4, **options: Any) -> Callable[[], Any]:
        arguments = {"micro_batches": 4, "quiet": True, **options}
        return lambda: infinity.parallel.pipeline(causal(name, layers), options.pop("mesh", mesh), None, host, **arguments)

    import transformers as hf

    t5 = hf.T5ForConditionalGeneration(hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=98))
    found = {
        "layers": told(make(layers=3, chunks=2)), "schedule": told(make(schedule="2F2B")), "chunks": told(make(schedule="1F1B", chunks=2)),
        "micro": told(make(schedule="DualPipeV", micro_batches=2)), "costs": told(make(costs=[1.0, 2.0])),
        "chain": told(lambda: infinity.parallel.pipeline(t5, mesh, None, host, micro_batches=4)),
        "no loss": told(lambda: infinity.parallel.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, None, host, micro_batches=4)),
        "mesh": told(lambda: infinity.parallel.pipeline(t5, parallel_jobs.mesh_of()["tp"], None, host, micro_batches=4)),
    }  # fmt: skip
    pipe, _ = make()()
    found["batch"] = told(
        lambda: pipe.step(input_ids=torch.zeros(6, 4, dtype=torch.long), labels=torch.zeros(6, 4, dtype=torch.long))
    )
    found["no labels"] = told(lambda: pipe.step(input_ids=torch.zeros(8, 4, dtype=torch.long)))
    infinity.unwrap_model(pipe.chunks)
    return found


def reviewed(config: dict) -> dict[str, Any]:
    """What a review found wrong, each beside what is right."""
    mesh, found = mesh_of(2), {}

    def norms(
        name: str, steps: int, schedule: str = "auto", dtype: torch.dtype = torch.float32, trained: str = ""
    ) -> tuple[float, float]:
        """The norm after so many steps of the pipeline without an update between them, and one process's."""
        told = []
        for pipelined in (True, False):
            model: nn.Module = causal(name).to(dtype)
            for key, param in model.named_parameters():
                param.requires_grad_(trained in key)
            optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            if pipelined:
                pipe, optimizer = infinity.parallel.pipeline(
                    model, mesh, optimizer, config, schedule=schedule, micro_batches=4, quiet=True
                )
            for number in range(steps):
                if pipelined:
                    pipe.step(**labelled(number))
                else:
                    model(**labelled(number)).loss.backward()
            if pipelined:
                told.append(infinity.clip_grad_norm_(optimizer, 1e9).item())
                infinity.unwrap_model(pipe.chunks, optimizer)
            else:
                told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        return told[0], told[1]

    found["two steps of a tie"] = norms("qwen3", 2)
    found["positions in bf16"] = norms("gpt2", 1, dtype=torch.bfloat16)
    found["a frozen first stage"] = norms("llama", 1, "1F1B", trained="layers.3")
    found["a frozen tie"] = norms("qwen3", 1, trained="self_attn")

    chunks, numbers, count = build("1F1B", mesh)
    params = [p for chunk in chunks for p in chunk.parameters()]
    chunks, optimizer = infinity.wrap_model(chunks, torch.optim.AdamW(params), config, mesh=mesh)
    told_norms = []
    for _ in range(2):  # a second schedule over the same stages
        first = schedule_of("1F1B", chunks, numbers, count, mesh)
        for schedule in (first, schedules.ScheduleGPipe(first._stage, MICRO, loss_fn=loss_of)):
            infinity.parallel.attach(schedule)
            step(schedule, numbers, count, 0)
            told_norms.append(infinity.clip_grad_norm_(optimizer, 1e9).item())
            optimizer.zero_grad()
    found["several schedules"] = told_norms
    infinity.unwrap_model(chunks, optimizer)

    tied = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY, bias=False))
    tied[3].weight = tied[0].weight
    found["another tie"] = told(
        lambda: infinity.parallel.pipeline(tied, mesh, None, config, micro_batches=4, loss_fn=loss_of, chunks=1)
    )
    routed = causal("mixtral")
    routed.config.output_router_logits = True
    found["routers"] = told(lambda: infinity.parallel.pipeline(routed, mesh, None, config, micro_batches=4, quiet=True))
    model = causal("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    small = config | {"host_memory": 1000}
    found["too small"] = told(lambda: infinity.parallel.pipeline(model, mesh, optimizer, small, micro_batches=4, quiet=True))
    found["given back"] = sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))

    class Shifted(nn.Module):
        """A chunk with a parameter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(f"shift{dist.get_rank()}", nn.Parameter(torch.randn(4)))
            self.layers = nn.ModuleDict({str(dist.get_rank()): nn.Linear(4, 4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(iter(self.layers.values()))(x) + next(p for p in self.parameters(recurse=False))

    chunk = Shifted()
    before = {name: value.clone() for name, value in chunk.state_dict().items()}
    chunks, optimizer = infinity.wrap_model([chunk], torch.optim.AdamW(chunk.parameters()), config, mesh=mesh)
    after = chunk.state_dict()
    found["its own parameter"] = all(
        type(after[name]) is torch.Tensor and torch.equal(after[name], value) for name, value in before.items()
    )
    infinity.unwrap_model(chunks, optimizer)
    return found


# --- refusals and failures ---


def told(run: Callable[[], Any]) -> str:
    try:
        run()
        return "was taken"
    except infinity.InfinityError as error:
        return f"{type(error).__name__}: {error}"


def refused() -> dict[str, str]:
    """What cannot be attached or done, each followed by a step that can."""
    mesh, found, host = mesh_of(2), {}, {"params": "host", "optimizer": "host"}
    chunks, numbers, count = build("Interleaved1F1B", mesh)
    params = [p for chunk in chunks for p in chunk.parameters()]
    found["not wrapped"] = told(lambda: infinity.parallel.attach(schedule_of("Interleaved1F1B", chunks, numbers, count, mesh)))
    found["no schedule"] = told(lambda: infinity.parallel.attach(chunks[0]))
    alike = [nn.Sequential(nn.Linear(4, 4))]
    found["names"] = told(lambda: infinity.wrap_model(alike, torch.optim.AdamW(alike[0].parameters()), host, mesh=mesh))
    settings = host | {"max_grad_norm": 1.0 + dist.get_rank()}
    found["settings"] = told(lambda: infinity.wrap_model(chunks, torch.optim.AdamW(params), settings, mesh=mesh))
    for field in ("micro_batch", "speculate", "recompute"):
        wanted = host | {field: 1 if field == "micro_batch" else True}
        found[field] = told(lambda wanted=wanted: infinity.wrap_model(chunks, torch.optim.AdamW(params), wanted, mesh=mesh))
    apart = [infinity.wrap_model([chunk], None, {"params": "host"}, mesh=mesh)[0][0] for chunk in chunks]
    found["apart"] = told(lambda: infinity.parallel.attach(schedule_of("Interleaved1F1B", apart, numbers, count, mesh)))
    for chunk in apart:
        infinity.unwrap_model(chunk)
    chunks, optimizer = infinity.wrap_model(chunks, torch.optim.AdamW(params, fused=True), host, mesh=mesh)
    schedule = infinity.parallel.attach(schedule_of("Interleaved1F1B", chunks, numbers, count, mesh))
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


def falls(how: str) -> None:
    """The first rank's second chunk falls in its second step."""
    mesh = mesh_of(2)
    chunks, numbers, count = build("Interleaved1F1B", mesh)
    params = [p for chunk in chunks for p in chunk.parameters()]
    chunks, optimizer = infinity.wrap_model(chunks, torch.optim.AdamW(params), {"params": "host", "optimizer": "host"}, mesh=mesh)
    schedule = infinity.parallel.attach(schedule_of("Interleaved1F1B", chunks, numbers, count, mesh))
    step(schedule, numbers, count, 0)
    optimizer.step()
    optimizer.zero_grad()

    def fall(*_: Any) -> None:
        if dist.get_rank() == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the user's own")

    if how == "raises in a backward":
        next(iter(chunks[0].blocks.values())).register_full_backward_hook(fall)
    else:
        next(iter(chunks[0].blocks.values())).register_forward_hook(fall)
    step(schedule, numbers, count, 1)


if __name__ == "__main__":
    serve(globals())
