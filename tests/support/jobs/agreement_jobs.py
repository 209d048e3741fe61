"""Jobs in which ranks differ in what they must have in common, which every rank of a launch runs
(see `ranks`).

**taken**: what a job says where nobody was refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import parallel_jobs
from decoder import decoder
from made_pipeline_jobs import causal, labelled
from parallel_families import mixture
from parallel_jobs import adamw, tokens, whole
from pipeline_jobs import batch, build, schedule_of, step
from pipeline_jobs import mesh_of as mesh_of_stages
from ranks import serve, told

import infinity
from infinity.ext.dtensor.in_common import InCommon

HOST = {"params": "host", "optimizer": "host"}


@contextlib.contextmanager
def without_comparing(fault: bool) -> Iterator[None]:
    """The failing twin: nobody looks at what the ranks have in common."""
    kept = InCommon.compare, InCommon.check, InCommon.agrees
    if fault:
        InCommon.compare = InCommon.check = lambda *_: None
        InCommon.agrees = lambda *_: True
    try:
        yield
    finally:
        InCommon.compare, InCommon.check, InCommon.agrees = kept


def build_cut(what: str) -> tuple[nn.Module, Any]:
    """A decoder cut by tp or, where ``what`` is of experts, a mixture with whole experts on each
    rank; with dropout where something is drawn."""
    mesh = parallel_jobs.mesh_of()
    if "experts" in what:
        model = infinity.parallel.expert_parallel(mixture("mixtral"), mesh["tp"], quiet=True)
        for layer in model.model.layers if "seeds" in what else ():
            layer.self_attn.attention_dropout = 0.3
    else:
        model = infinity.parallel.tensor_parallel(decoder(), mesh["tp"], quiet=True)
        for block in model.blocks if "drops" in what or "mode" in what else ():
            block.second = nn.Sequential(block.second, nn.Dropout(0.1))
    return infinity.wrap_model(model, adamw(model), HOST, mesh=mesh)


def differs(what: str, *, fault: bool = False) -> dict[str, Any]:
    """Two steps in which rank 1 differs in ``what``: what was said, whether weights changed, and
    whether a right step follows."""
    rank, (model, optimizer) = dist.get_rank(), build_cut(what)
    before = whole(model.state_dict())

    def train(*, apart: int) -> None:
        torch.manual_seed(3 + apart * ("seeds" in what))
        model.train(not (apart and "mode" in what))
        for number in range(2):
            inputs = tokens(number, apart * ("batch" in what))[
                :, : 16 - 4 * apart * ("length" in what)
            ]
            labels = tokens(number, apart * ("labels" in what or "batch" in what))[
                :, : inputs.size(1)
            ]
            with torch.set_grad_enabled("evaluation" not in what):
                logits = model(inputs)
            logits = getattr(logits, "logits", logits)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * (
                1 + apart * ("scale" in what)
            )
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    with without_comparing(fault):
        said = told(lambda: train(apart=rank))
    kept = all(
        torch.equal(value, before[name]) for name, value in whole(model.state_dict()).items()
    )
    optimizer.zero_grad()
    goes_on = told(lambda: train(apart=0)) if not fault else ""
    infinity.unwrap_model(model, optimizer)
    return {"said": said, "kept": kept, "goes on": goes_on}


def plainly_right() -> list[str]:
    """What ranks may differ in: seeds of which nothing is drawn; inputs of a model that takes parts
    of a sequence."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    rank, mesh = dist.get_rank(), parallel_jobs.mesh_of()
    found = [differs("seeds that nobody draws by")["said"]]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Dropout(0.1))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    model = parallelize_module(model, mesh["tp"], plan)
    model, optimizer = infinity.wrap_model(model, adamw(model), HOST, mesh=mesh)
    torch.manual_seed(rank)

    def train() -> None:
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found.append(told(train))
    infinity.unwrap_model(model, optimizer)
    return found


# --- a model that is cut together ---


def pipe_of(
    layers: int = 4, name: str = "llama", *, micro_batches: int = 4, **options: Any
) -> tuple:
    model = causal(name, layers)
    if options.pop("untied", False):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    config, mesh = HOST | options.pop("config", {}), mesh_of_stages(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return infinity.parallel.pipeline(
        model, mesh, optimizer, config, micro_batches=micro_batches, quiet=True, **options
    )


CUTS: dict[str, Callable[[int], Any]] = {  # given the rank
    "depth": lambda rank: pipe_of(4 + 2 * rank),
    "schedule": lambda rank: pipe_of(schedule=("1F1B", "GPipe")[rank]),
    "micro-batches": lambda rank: pipe_of(micro_batches=4 + 4 * rank),
    "chunks": lambda rank: pipe_of(chunks=1 + rank),
    "ties": lambda rank: pipe_of(name="qwen3", untied=bool(rank)),
    "a configuration": lambda rank: pipe_of(config={"max_grad_norm": 1.0 + rank}),
    "one that does not fit": lambda rank: pipe_of(schedule="2F2B" if rank else "auto"),
    "a plan": lambda rank: tensors_of(
        {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if rank else None
    ),
    "a plan that does not fit": lambda rank: tensors_of(
        {"blocks.*.upper": "colwise"} if rank else None
    ),
    "an exchange": lambda rank: experts_of(exchange=("outputs", "tokens")[rank]),
}


def tensors_of(plan: dict[str, str] | None) -> Any:
    return infinity.parallel.tensor_parallel(
        decoder(), parallel_jobs.mesh_of()["tp"], plan, quiet=True
    )


def experts_of(**options: Any) -> Any:
    return infinity.parallel.expert_parallel(
        mixture("mixtral"), parallel_jobs.mesh_of()["tp"], quiet=True, **options
    )


def cuts(what: str) -> str:
    return told(lambda: CUTS[what](dist.get_rank()))


def calls(what: str) -> dict[str, str]:
    """Ranks of a pipeline that make other calls, and a right one after them."""
    rank, mesh = dist.get_rank(), mesh_of_stages(2)
    if what == "pipe":
        pipe, optimizer = pipe_of()
        said = told(lambda: (pipe.step, pipe.eval)[rank](**labelled(0)))
        goes_on = told(lambda: pipe.step(**labelled(0)))
        infinity.unwrap_model(pipe.chunks, optimizer)
        return {"said": said, "goes on": goes_on}
    chunks, numbers, count = build("1F1B", mesh)
    optimizer = torch.optim.AdamW([param for chunk in chunks for param in chunk.parameters()])
    chunks, optimizer = infinity.wrap_model(chunks, optimizer, HOST, mesh=mesh)
    kind, micro = (
        ("GPipe" if what == "schedule" and rank else "1F1B"),
        (4 if what == "micro-batches" and rank else 8),
    )
    schedule = infinity.parallel.attach(
        schedule_of(kind, chunks, numbers, count, mesh, micro=micro)
    )

    def evaluate() -> None:
        target = {"target": batch(0), "losses": []} if count - 1 in numbers else {}
        with torch.no_grad():
            schedule.eval(*((batch(0),) if 0 in numbers else ()), **target)

    said = told(evaluate if what == "eval" and rank else lambda: step(schedule, numbers, count, 0))
    right = infinity.parallel.attach(schedule_of("1F1B", chunks, numbers, count, mesh))
    goes_on = told(lambda: step(right, numbers, count, 0))
    infinity.unwrap_model(chunks, optimizer)
    return {"said": said, "goes on": goes_on}


# --- one function for tensor_parallel and cut_rest ---


def cut_rest(what: str) -> Any:
    """A mixture whose rest is cut, where it is tied, has one key head, or drops; and mixtures that
    tensor_parallel cannot cut."""
    import transformers as hf

    mesh, options = parallel_jobs.mesh_of(), {}
    small = {
        "vocab_size": 98,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    options = {
        "tied": {"tie_word_embeddings": True},
        "one key head": {"num_key_value_heads": 1},
        "drops": {"attention_dropout": 0.5},
    }.get(what, {})
    config = hf.MixtralConfig(
        **{
            **small,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **options,
        }
    )

    def make() -> nn.Module:
        torch.manual_seed(3)
        return hf.MixtralForCausalLM._from_config(config, attn_implementation="eager").train()

    def run(model: nn.Module) -> None:
        ids = torch.randint(0, 98, (2, 12), generator=torch.Generator().manual_seed(0))
        model(input_ids=ids, labels=ids).loss.backward()

    if what == "tensor_parallel":
        model = make()
        said = told(lambda: infinity.parallel.tensor_parallel(model, mesh["tp"], quiet=True))
        return said, any(isinstance(param, DTensor) for param in model.parameters())
    if what == "one key head":
        return told(
            lambda: infinity.parallel.expert_parallel(make(), mesh["tp"], cut_rest=True, quiet=True)
        )
    model = infinity.parallel.expert_parallel(make(), mesh["tp"], cut_rest=True, quiet=True)
    if what == "drops":
        masks, dropout = [], F.dropout

        def noting(
            x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> torch.Tensor:
            found = dropout(x, p, training)
            if p and training:
                masks.append((found != 0).flatten()[:64].tolist())
            return found

        F.dropout = noting
        torch.manual_seed(1)
        run(model)
        F.dropout = dropout
        everyones: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, masks)
        return everyones
    whole_model = make()
    run(whole_model)
    expected = nn.utils.clip_grad_norm_(whole_model.parameters(), 1e9).item()
    model, optimizer = infinity.wrap_model(model, adamw(model), HOST, mesh=mesh)
    run(model)
    found = infinity.clip_grad_norm_(optimizer, 1e9).item()
    infinity.unwrap_model(model, optimizer)
    return found, expected


if __name__ == "__main__":
    serve(globals())
