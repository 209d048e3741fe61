"""Jobs of pipelines that `infinity.parallel.pipeline` makes, which every rank of a launch runs (see
`ranks`, and `pipeline_jobs` for the words)."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
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

import models
import parallel_jobs
from decoder import VOCABULARY
from parallel_jobs import whole
from pipeline_jobs import MICRO, batch, build, loss_of, mesh_of, schedule_of, step
from ranks import serve, told

import infinity
from infinity.core.machine.tiers import Tier
from infinity.errors import CapacityError
from infinity.ext.pipeline import ties


def causal(name: str, layers: int = 4) -> nn.Module:
    """A small causal model of transformers, the same on every rank. qwen3 and gpt2 have a table
    that is their head, too."""
    import transformers as hf

    torch.manual_seed(11)
    small = {
        "vocab_size": 98,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
    }
    grouped = {**small, "num_key_value_heads": 2}
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))
    if name == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, head_dim=16, tie_word_embeddings=True))
    if name == "gemma3":
        types = ["sliding_attention", "full_attention"] * (layers // 2)
        return hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**grouped, head_dim=16, sliding_window=4, layer_types=types)
        )
    if name == "mixtral":
        return hf.MixtralForCausalLM(
            hf.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2)
        )
    rates = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=64, n_layer=layers, n_head=4, vocab_size=98, n_positions=32, **rates)
    )


def labelled(number: int, data_rank: int = 0) -> dict[str, torch.Tensor]:
    """A batch in which micro-batches have other numbers of labels."""
    tokens = torch.randint(
        0, 98, (8, 12), generator=torch.Generator().manual_seed(100 * number + data_rank)
    )
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


def mesh_with(tp: int = 1, ep: int = 1, replicas: int = 0, exchange: str = "outputs") -> Any:
    """Two stages; the axes that are named, and data ranks for what is left. ``replicas``: hybrid
    sharding inside of a stage. ``exchange``: what :func:`cut` has ranks of ep exchange."""
    rest = dist.get_world_size() // 2 // tp // ep
    sizes = {
        "pp": 2,
        **({"dp_replicate": replicas, "dp_shard": rest // replicas} if replicas else {"dp": rest}),
    }
    sizes |= {"tp": tp} if ep == 1 else {"ep": ep}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_rank_of(mesh: Any, exchange: str = "outputs") -> int:
    if exchange == "tokens":
        return mesh.get_local_rank("ep") + mesh["ep"].size() * mesh.get_local_rank("dp")
    if "dp" in mesh.mesh_dim_names:
        return mesh.get_local_rank("dp")
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank(
        "dp_shard"
    )


def cut(model: nn.Module, mesh: Any, exchange: str = "outputs") -> nn.Module:
    if "ep" in mesh.mesh_dim_names:
        return infinity.parallel.expert_parallel(model, mesh["ep"], exchange=exchange, quiet=True)
    return (
        infinity.parallel.tensor_parallel(model, mesh["tp"], quiet=True)
        if mesh["tp"].size() > 1
        else model
    )


def piped(
    name: str,
    config: dict,
    schedule: str,
    *,
    axes: dict[str, Any] | None = None,
    path: str | None = None,
    weights: str | None = None,
    chunks: int | None = None,
) -> dict[str, Any]:
    """The same by parallel.pipeline over two stages; ``axes``: of :func:`mesh_with`. ``weights``:
    on meta, from this file."""
    mesh, exchange = mesh_with(**(axes or {})), (axes or {}).get("exchange", "outputs")
    if weights is None:
        model = causal(name)
    else:
        with torch.device("meta"):
            model = causal(name)
        config = config | {"weights": weights}
    model = cut(model, mesh, exchange)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=not axes)
    pipe, optimizer = infinity.parallel.pipeline(
        model,
        mesh,
        optimizer,
        config,
        schedule=schedule,
        micro_batches=4,
        chunks=chunks,
        quiet=True,
    )
    del model
    told: dict[str, Any] = {"losses": [], "norms": [], "sent": set()}
    with sending(told["sent"]):
        for number in range(3):
            told["losses"].append(
                pipe.step(**labelled(number, data_rank_of(mesh, exchange))).item()
            )
            told["norms"].append(infinity.clip_grad_norm_(optimizer, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    told["weights"] = {
        key: value for chunk in pipe.chunks for key, value in whole(chunk.state_dict()).items()
    }
    if schedule != "ZBVZeroBubble":  # torch's eval of schedules in a V fails
        told["evaluated"] = pipe.eval(**labelled(9)).item()
    if path is not None:
        infinity.save_checkpoint(path, pipe.chunks, optimizer)
    infinity.unwrap_model(pipe.chunks, optimizer)
    return told


def tied(
    config: dict, *, axes: dict[str, int] | None = None, fault: bool = False
) -> dict[str, Any]:
    """Ten steps of a model whose table is its head, too: this rank's copy, and the bytes that a
    step sends for them. ``fault``: each stage steps by its own gradient."""
    mesh, sent, steps = mesh_with(**(axes or {})), [], 10

    def counting(raw: torch.Tensor, *where: Any, **more: Any) -> Any:
        sent.append(raw.nbytes)
        return dist.isend(raw, *where, **more)

    model = cut(causal("qwen3"), mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pipe, optimizer = infinity.parallel.pipeline(
        model, mesh, optimizer, config, micro_batches=4, quiet=True
    )
    del model
    adding, ties.dist = ties.Ties.adding_up, types.SimpleNamespace(isend=counting, irecv=dist.irecv)
    if fault:
        ties.Ties.adding_up = lambda *_: contextlib.nullcontext()
    for number in range(steps):
        sent.clear()
        pipe.step(**labelled(number, data_rank_of(mesh)))
        optimizer.step()
        optimizer.zero_grad()
    ties.Ties.adding_up, ties.dist = adding, dist
    weights = {
        key: value for chunk in pipe.chunks for key, value in whole(chunk.state_dict()).items()
    }
    copy = next(
        value
        for key, value in weights.items()
        if key in ("model.embed_tokens.weight", "lm_head.weight")
    )
    infinity.unwrap_model(pipe.chunks, optimizer)
    return {"copy": copy, "sent": sum(sent)}


@contextlib.contextmanager
def sending(nbytes: set[int]) -> Iterator[None]:
    """Notes the sizes of the tensors that stages send to each other."""
    kept = {name: getattr(PipelineStage, name) for name in ("get_fwd_send_ops", "get_bwd_send_ops")}

    def counted(of: Callable[..., list]) -> Callable[..., list]:
        def count(stage: Any, mb: int) -> list:
            operations = of(stage, mb)
            nbytes.update(each.tensor.nbytes for each in operations)
            return operations

        return count

    for name, of in kept.items():
        setattr(PipelineStage, name, counted(of))
    try:
        yield
    finally:
        for name, of in kept.items():
            setattr(PipelineStage, name, of)


def shapes(config: dict, schedule: str) -> dict[str, Any]:
    """Batches of other lengths and sizes, beside one process; then one that differs between the
    stages, and a step after it."""
    mesh, losses = mesh_of(2), []
    for pipelined in (False, True):
        model: nn.Module = causal("llama")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if pipelined:
            pipe, optimizer = infinity.parallel.pipeline(
                model, mesh, optimizer, config, schedule=schedule, micro_batches=4, quiet=True
            )
        told_losses = []
        for number, (rows, length) in enumerate([(8, 12), (8, 7), (12, 20), (8, 12)]):
            tokens = torch.randint(
                0, 98, (rows, length), generator=torch.Generator().manual_seed(number)
            )
            if pipelined:
                told_losses.append(pipe.step(input_ids=tokens, labels=tokens).item())
            else:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                told_losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(told_losses)
    tokens = torch.randint(0, 98, (8, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    refused = told(lambda: pipe.step(input_ids=tokens, labels=tokens))
    rows = 6 if dist.get_rank() else 8  # which does not divide on one of them
    odd = told(
        lambda: pipe.step(input_ids=tokens[:1].repeat(rows, 1), labels=tokens[:1].repeat(rows, 1))
    )
    goes_on = pipe.step(**labelled(0)).item()
    infinity.unwrap_model(pipe.chunks, optimizer)
    pipe, optimizer = infinity.parallel.pipeline(
        causal("llama"),
        mesh,
        None,
        {"params": "host"},
        schedule=schedule,
        micro_batches=4,
        quiet=True,
    )
    first = pipe.eval(**labelled(0)).item(), pipe.step(**labelled(0)).item()
    infinity.unwrap_model(pipe.chunks)
    return {
        "losses": losses,
        "refused": refused,
        "odd": odd,
        "goes on": goes_on > 0,
        "evaluated first": first,
    }


def lengths(steps: list[tuple[int, int]], config: dict) -> dict[str, Any]:
    """Steps in which two data ranks' batches have such lengths, beside one process that is given
    both in turn. After each, batches of the first step's lengths are evaluated."""
    mesh, losses, optimizer = mesh_with(), [], None

    def tokens_of(number: int, data_rank: int) -> torch.Tensor:
        given = torch.Generator().manual_seed(10 * number + data_rank)
        return torch.randint(0, 98, (8, steps[number][data_rank]), generator=given)

    for pipelined in (False, True):
        model: Any = causal("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if pipelined:
            model, optimizer = infinity.parallel.pipeline(
                model, mesh, optimizer, config, schedule="auto", micro_batches=4, quiet=True
            )
        of_steps = []
        for number in range(len(steps)):
            mine, of_ranks = (
                data_rank_of(mesh),
                [tokens_of(number, data_rank) for data_rank in range(2)],
            )
            if pipelined:
                of_steps.append(model.step(input_ids=of_ranks[mine], labels=of_ranks[mine]).item())
            else:
                found = [model(input_ids=tokens, labels=tokens).loss for tokens in of_ranks]
                (sum(found) / 2).backward()
                of_steps.append(found[mine].item())
            optimizer.step()
            optimizer.zero_grad()
            if pipelined:
                of_first = tokens_of(0, mine)
                model.eval(input_ids=of_first, labels=of_first)
        losses.append(of_steps)
    infinity.unwrap_model(model.chunks, optimizer)
    return {"losses": losses}


def saved_whole(name: str, folder: str, config: dict, schedule: str) -> bool:
    """Whether transformers loads what save_pretrained writes of a pipeline's chunks."""
    pipe, _ = infinity.parallel.pipeline(
        causal(name), mesh_of(2), None, config, schedule=schedule, micro_batches=4, quiet=True
    )
    infinity.save_pretrained(pipe.chunks, folder)
    dist.barrier()
    found = type(causal(name)).from_pretrained(folder).state_dict()
    infinity.unwrap_model(pipe.chunks)
    return not models.differing(found, causal(name).state_dict())


def memory(config: dict) -> dict[str, Any]:
    """What ranks of one machine are given of it, where one stage is seven times the other; and what
    passes between stages."""
    mesh = mesh_of(2)

    def make(**changes: Any) -> tuple:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        options = {
            "schedule": "1F1B",
            "micro_batches": 4,
            "loss_fn": F.mse_loss,
            "costs": [7.0] + [1.0] * 7,
            "quiet": True,
        }
        return infinity.parallel.pipeline(
            model, mesh, torch.optim.AdamW(model.parameters()), config | changes, **options
        )

    def planned() -> int:
        return parts_of(pipe.chunks).planned.plan.planned_nbytes(Tier.HOST)

    pipe, optimizer = make()
    everyones: list = [None, None]
    dist.all_gather_object(everyones, planned())
    share = parts_of(pipe.chunks).ledger.fraction
    infinity.unwrap_model(pipe.chunks, optimizer)
    budget = int(sum(everyones) * 1.1)
    found: dict[str, Any] = {"planned": everyones, "share": float(share), "halves": budget // 2}
    found["fits"] = told(lambda: infinity.unwrap_model(*keep(make(host_memory=budget))))

    pipe, optimizer = make(device_memory=6 * 272 * 1024, units=["Linear"])
    engine = parts_of(pipe.chunks).engine
    before = parts_of(engine).ledger.accounts[Tier.DEVICE].charged_nbytes
    for rows in (8, 16):
        pipe.step(torch.ones(rows, 256), torch.ones(rows, 256))
        optimizer.zero_grad()
    found["between"] = parts_of(engine).ledger.accounts[Tier.DEVICE].charged_nbytes - before
    left = parts_of(engine).ledger.accounts[Tier.DEVICE].budget_nbytes - parts_of(
        engine
    ).planned.plan.planned_nbytes(Tier.DEVICE)
    window = parts_of(engine).prefetcher._window
    found["window"] = window.planned_nbytes - window.nbytes, left
    found["too much"] = told(lambda: pipe.step(torch.ones(4096, 256), torch.ones(4096, 256)))
    infinity.unwrap_model(pipe.chunks, optimizer)
    return found


def least(schedule: str) -> list[str]:
    """What is said with the most device_memory that a rank's error before names, from one that is
    too small on: by the wrap, and by the first step."""
    world, said, budget = dist.get_world_size(), [], 4096
    names = ("pp", "dp")[: 1 + (world > 2)]
    mesh = init_device_mesh("cpu", (2, world // 2)[: len(names)], mesh_dim_names=names)

    def run() -> None:
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(8)
        ]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        config = {"params": "host", "optimizer": "host", "device_memory": budget}
        if schedule == "hand-made":
            rank = dist.get_rank()
            chunks = [nn.Sequential(*layers[at : at + 2]) for at in (2 * rank, 6 - 2 * rank)]
            params = [param for chunk in chunks for param in chunk.parameters()]
            chunks, optimizer = infinity.wrap_model(
                chunks, torch.optim.AdamW(params), config, mesh=mesh
            )
            stages = [
                PipelineStage(chunk, at, 4, torch.device("cpu"), group=mesh.get_group())
                for chunk, at in zip(chunks, (rank, 3 - rank))
            ]
            made = schedules.ScheduleZBVZeroBubble(stages, 4, loss_fn=F.mse_loss)
            made = infinity.parallel.attach(made)
            inputs = () if rank else (torch.randn(64, 64),)
            target = {} if rank else {"target": torch.randn(64, 64)}

            def step() -> None:
                made.step(*inputs, **target)
        else:
            pipe, optimizer = infinity.parallel.pipeline(
                model,
                mesh,
                optimizer,
                config,
                schedule=schedule,
                micro_batches=4,
                loss_fn=F.mse_loss,
                quiet=True,
            )
            chunks = pipe.chunks

            def step() -> None:
                pipe.step(torch.randn(64, 64), torch.randn(64, 64))

        try:
            for _ in range(2):
                step()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            infinity.unwrap_model(chunks, optimizer)

    while len(said) < 4 and "was taken" not in said:
        said.append(told(run))
        if found := re.search(r"Config\(device_memory=(\d+)\)", said[-1]):
            budget = int(found[1])
        elif found := re.search(r"by ([\d.]+) KiB, or by the most", said[-1]):
            budget += math.ceil(float(found[1]) * 1024)
        everyones: list = [None] * world
        dist.all_gather_object(everyones, budget)
        budget = max(everyones)
    return said


def keep(made: tuple) -> tuple:
    pipe, optimizer = made
    return pipe.chunks, optimizer


def reloaded(name: str, path: str, tp: int, onto: str | None = None) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint that another mesh has written, loaded onto two stages; saved again as
    ``onto``."""
    mesh = mesh_with(tp)
    model = cut(causal(name), mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=tp == 1)
    host = {"params": "host", "optimizer": "host"}
    pipe, optimizer = infinity.parallel.pipeline(
        model, mesh, optimizer, host, schedule="1F1B", micro_batches=4, quiet=True
    )
    infinity.load_checkpoint(path, pipe.chunks, optimizer)
    if onto is not None:
        infinity.save_checkpoint(onto, pipe.chunks, optimizer)
    found = {
        key: value for chunk in pipe.chunks for key, value in whole(chunk.state_dict()).items()
    }
    infinity.unwrap_model(pipe.chunks, optimizer)
    return found


def piped_chains() -> dict[str, Any]:
    """An nn.Sequential, and a model with torchtitan's parts, beside one process."""

    class Titan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings = nn.Embedding(VOCABULARY, 32)
            self.layers = nn.ModuleDict(
                {str(n): nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for n in range(4)}
            )
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
            nn.Embedding(VOCABULARY, 32),
            *(nn.Linear(32, 32) for _ in range(5)),
            nn.Linear(32, VOCABULARY),
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
                    model,
                    mesh,
                    optimizer,
                    {"params": "host", "optimizer": "host"},
                    micro_batches=4,
                    loss_fn=loss_of,
                    quiet=True,
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
        return lambda: infinity.parallel.pipeline(
            causal(name, layers), options.pop("mesh", mesh), None, host, **arguments
        )

    import transformers as hf

    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=98)
    )
    found = {
        "layers": told(make(layers=3, chunks=2)),
        "schedule": told(make(schedule="2F2B")),
        "chunks": told(make(schedule="1F1B", chunks=2)),
        "micro": told(make(schedule="DualPipeV", micro_batches=2)),
        "costs": told(make(costs=[1.0, 2.0])),
        "chain": told(lambda: infinity.parallel.pipeline(t5, mesh, None, host, micro_batches=4)),
        "no loss": told(
            lambda: infinity.parallel.pipeline(
                nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, None, host, micro_batches=4
            )
        ),
        "mesh": told(
            lambda: infinity.parallel.pipeline(
                t5, parallel_jobs.mesh_of()["tp"], None, host, micro_batches=4
            )
        ),
    }
    pipe, _ = make()()
    found["batch"] = told(
        lambda: pipe.step(
            input_ids=torch.zeros(6, 4, dtype=torch.long),
            labels=torch.zeros(6, 4, dtype=torch.long),
        )
    )
    found["no labels"] = told(lambda: pipe.step(input_ids=torch.zeros(8, 4, dtype=torch.long)))
    infinity.unwrap_model(pipe.chunks)
    return found


def recomputing(schedule: str, recomputes: bool) -> list[str]:
    """What pipeline warns of."""
    model = causal("llama")
    if recomputes:
        model.gradient_checkpointing_enable()
    homes = {"params": "host", "optimizer": "host"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe, _ = infinity.parallel.pipeline(
            model, mesh_of(2), None, homes, schedule=schedule, micro_batches=4, quiet=True
        )
    dist.barrier()  # else one rank closes its groups while the other still connects
    infinity.unwrap_model(pipe.chunks)
    return [str(each.message) for each in caught if "checkpointing" in str(each.message)]


def reviewed(config: dict) -> dict[str, Any]:
    """What a review found wrong, each beside what is right."""
    mesh, found = mesh_of(2), {}

    def norms(
        name: str,
        steps: int,
        schedule: str = "auto",
        dtype: torch.dtype = torch.float32,
        trained: str = "",
    ) -> tuple[float, float]:
        """The norm after so many steps of the pipeline without an update between them, and one
        process's."""
        told = []
        for pipelined in (True, False):
            model: nn.Module = causal(name).to(dtype)
            for key, param in model.named_parameters():
                param.requires_grad_(re.search(trained, key) is not None)
            optimizer: Any = torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad], lr=1e-2
            )
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
    found["a frozen last stage"] = norms("llama", 1, "1F1B", trained="layers.[01]")
    found["a stage that begins frozen"] = norms("llama", 1, "1F1B", trained="layers.[013]")
    for schedule in (
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ):  # torch finds no weight where no input has a gradient
        found[f"a frozen first stage of {schedule}"] = norms(
            "llama", 1, schedule, trained="layers.[123]|norm|head"
        )
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

    tied = nn.Sequential(
        nn.Embedding(VOCABULARY, 16),
        nn.Linear(16, 16),
        nn.Linear(16, 16),
        nn.Linear(16, VOCABULARY, bias=False),
    )
    tied[3].weight = tied[0].weight
    found["another tie"] = told(
        lambda: infinity.parallel.pipeline(
            tied, mesh, None, config, micro_batches=4, loss_fn=loss_of, chunks=1
        )
    )
    routed = causal("mixtral")
    routed.config.output_router_logits = True
    found["routers"] = told(
        lambda: infinity.parallel.pipeline(routed, mesh, None, config, micro_batches=4, quiet=True)
    )
    model = causal("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    small = config | {"host_memory": 1000}
    found["too small"] = told(
        lambda: infinity.parallel.pipeline(
            model, mesh, optimizer, small, micro_batches=4, quiet=True
        )
    )
    found["given back"] = sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(model.parameters())
    )

    class Shifted(nn.Module):
        """A chunk with a parameter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(f"shift{dist.get_rank()}", nn.Parameter(torch.randn(4)))
            self.layers = nn.ModuleDict({str(dist.get_rank()): nn.Linear(4, 4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(iter(self.layers.values()))(x) + next(
                p for p in self.parameters(recurse=False)
            )

    chunk = Shifted()
    before = {name: value.clone() for name, value in chunk.state_dict().items()}
    chunks, optimizer = infinity.wrap_model(
        [chunk], torch.optim.AdamW(chunk.parameters()), config, mesh=mesh
    )
    after = chunk.state_dict()
    found["its own parameter"] = all(
        type(after[name]) is torch.Tensor and torch.equal(after[name], value)
        for name, value in before.items()
    )
    infinity.unwrap_model(chunks, optimizer)
    return found


def restarted(folder: str) -> dict[str, Any]:
    """A job as torchrun restarts it: goes on from the checkpoint if there is one; the second stage
    is killed the first time."""
    mesh, path = mesh_of(2), Path(folder) / "checkpoint"
    model = causal("qwen3")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pipe, optimizer = infinity.parallel.pipeline(
        model, mesh, optimizer, {"params": "host", "optimizer": "host"}, micro_batches=4, quiet=True
    )
    first = infinity.load_checkpoint(path, pipe.chunks, optimizer)["step"] if path.exists() else 0
    losses = []
    for number in range(first, 5):
        losses.append(pipe.step(**labelled(number)).item())
        optimizer.step()
        optimizer.zero_grad()
        infinity.save_checkpoint(path, pipe.chunks, optimizer, extra={"step": number + 1})
        if (
            number == 2
            and dist.get_rank() == 1
            and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            and "NOBODY_FALLS" not in os.environ
        ):
            os.kill(os.getpid(), signal.SIGKILL)
    weights = {
        key: value for chunk in pipe.chunks for key, value in whole(chunk.state_dict()).items()
    }
    infinity.unwrap_model(pipe.chunks, optimizer)
    return {
        "first": first,
        "losses": losses,
        "weights": weights,
        "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
    }


if __name__ == "__main__":
    serve(globals())


def no_room_on(at: int) -> list[str]:
    """What ranks say of a step of hand-made stages in which rank ``at`` raises CapacityError, while
    all of them live on."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), dist.get_rank()

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if rank == at and steps and x.device.type != "meta":
                raise CapacityError("no room here")
            return super().forward(x)

    torch.manual_seed(0)
    chunk, steps, said = nn.Sequential(Layer(8, 8)), 0, []
    config = {"params": "host", "optimizer": "host"}
    chunk, optimizer = infinity.wrap_model(
        chunk, torch.optim.SGD(chunk.parameters(), 0.1), config, mesh=mesh
    )
    stage = PipelineStage(chunk, rank, 2, torch.device("cpu"), group=mesh.get_group())
    made = infinity.parallel.attach(schedules.Schedule1F1B(stage, 4, loss_fn=F.mse_loss))
    given = {"target": torch.ones(8, 8)} if rank else {}
    try:
        for steps in range(2):
            said.append(told(lambda: made.step(*(() if rank else (torch.ones(8, 8),)), **given)))
            assert stage.group is mesh.get_group()
        everyones: list = [None, None]
        dist.all_gather_object(everyones, said[1])  # over the default group, which still works
        return everyones
    finally:
        infinity.unwrap_model(chunk, optimizer)
