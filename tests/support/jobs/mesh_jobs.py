"""Jobs that compare what a mesh sends with what is planned for it on paper (see `ranks`, and
`made_pipeline_jobs` for the models)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inside import parts_of
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

from made_pipeline_jobs import causal, cut, data_rank_of, labelled, mesh_with
from passed import passed
from ranks import serve, told

import infinity
from infinity.config import Config
from infinity.ext.pipeline.choice import Choice
from infinity.tools.plan.machine_file import Machine
from infinity.tools.plan.mesh_candidate import Candidate, Job
from infinity.tools.plan.mesh_choice import Batch
from infinity.tools.plan.mesh_shape import MeshShape
from infinity.tools.plan.on_paper import CountingSends, in_children, shard_on_paper

MICRO, SAMPLES, LENGTH = 4, 8, 12
MODELS = {"tp": "llama", "ep": "mixtral"}  # by the innermost axis
HOMES = {"params": "host", "optimizer": "host"}


class SendsInside(CountingSends):
    """Counts the collectives of one group: a real run has others beside."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group.size())
        self._group = group

    def note(self, name: str, args: tuple, found: Any) -> None:
        if name == "all_to_all_single":
            given, _, counts, _ = args
            self.nbytes += (len(given) - counts[self._group.rank()]) * given[:1].nbytes
            return
        for each in args:
            if isinstance(each, torch.ScriptObject):
                each = dist.ProcessGroup.unbox(each).group_name
            if each == self._group.group_name:
                super().note(name, args, found)


def executed(axes: dict[str, int]) -> dict[str, Any]:
    """What a rank computes, in order, and sends over each axis in a step that is not the first."""
    mesh, inner = mesh_with(**axes), "ep" if "ep" in axes else "tp"
    exchange = "tokens" if inner == "ep" else "outputs"
    model = cut(causal(MODELS[inner]), mesh, exchange)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pipe, optimizer = infinity.parallel.pipeline(
        model, mesh, optimizer, HOMES, schedule="1F1B", micro_batches=MICRO, quiet=True
    )
    batch = labelled(0, data_rank_of(mesh, exchange))
    for _ in range(2):
        pipe.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    (schedule,) = pipe._schedules.values()
    stage, done, sent = schedule._stage, [], []

    def noting(name: str, what: str) -> None:
        run = getattr(stage, name)

        def noted(mb: int, *arguments: Any, **options: Any) -> Any:
            done.append((what, stage.stage_index, mb))
            return run(mb, *arguments, **options)

        setattr(stage, name, noted)

    def counting(name: str) -> None:
        run = getattr(stage, name)

        def counted(mb: int) -> list:
            operations = run(mb)
            sent.extend(each.tensor.nbytes for each in operations)
            return operations

        setattr(stage, name, counted)

    noting("forward_one_chunk", "forward")
    noting("backward_one_chunk", "backward")
    counting("get_fwd_send_ops")
    counting("get_bwd_send_ops")
    traffic = parts_of(pipe.chunks).traffic.collectives
    names, before = ("all-gather", "reduce-scatter"), passed(traffic)
    with SendsInside(mesh[inner].get_group()) as inside:
        pipe.step(**batch)
    found = {
        "done": done,
        "pp": sum(sent),
        inner: round(inside.nbytes),
        "dp": {name: passed(traffic)[name] - before[name] for name in names},
    }
    optimizer.zero_grad()
    infinity.unwrap_model(pipe.chunks, optimizer)
    return found


def planned(sizes: tuple[int, ...], lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """The same of a rank of each stage, on paper: no rank is there."""
    shape = MeshShape(*sizes)
    inner = "ep" if shape.ep > 1 else "tp"

    def work() -> list[dict[str, Any]]:
        candidate = candidate_of(job_of(on_meta(MODELS[inner]), shape), shape, lengths)
        orders = candidate._orders(MICRO)
        return [
            {
                "done": [tuple(op) for op in orders[rank.stage]],
                "pp": rank.sent["pp"],
                inner: rank.sent[inner],
                "dp": {name: rank.edges[name] for name in ("all-gather", "reduce-scatter")},
            }
            for rank in candidate.plan().ranks
        ]

    return in_children([work], shape.ranks)[0]


def on_meta(name: str = "llama") -> nn.Module:
    with torch.device("meta"):
        return causal(name)


def job_of(model: nn.Module, shape: MeshShape, **config: Any) -> Job:
    """A job of a small model on paper, on a machine whose node has all ranks."""
    paper = shard_on_paper(model, shape.tp, shape.ep)
    given = {"device_memory": 1 << 30, "host_memory": 1 << 30} | HOMES | config
    batch = Batch(SAMPLES * shape.data, LENGTH, 1e9, False, 64, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    machine = Machine.read("dgx-h100")
    return Job(paper, [optimizer], Config.make(given), machine, batch)


def candidate_of(job: Job, shape: MeshShape, lengths: tuple[int, ...]) -> Candidate:
    choice = Choice("1F1B", lengths, shape.pp, MICRO, "")
    return Candidate(job, shape, choice, SAMPLES // MICRO)


def wraps(axes: dict[str, int], config: dict[str, Any]) -> str:
    """Whether a pipeline of two stages can be made with these budgets, or what refuses it."""
    mesh = mesh_with(**axes)
    model = cut(causal("llama"), mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def make() -> None:
        pipe, managed = infinity.parallel.pipeline(
            model, mesh, optimizer, config, schedule="1F1B", micro_batches=MICRO, quiet=True
        )
        infinity.unwrap_model(pipe.chunks, managed)

    return told(make)


if __name__ == "__main__":
    serve(globals())
