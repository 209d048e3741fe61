"""Jobs of pipelines without flush that keep several versions of the weights (see `ranks`, and
`unflushed_jobs` for the words).

**oracle**: one process with the whole model that keeps every version of every stage, and computes
each micro-batch, stage by stage, with the version that the rule gives it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inside import parts_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

from made_pipeline_jobs import causal, labelled
from ouroboros import ouroboros
from parallel_jobs import whole
from pipeline_jobs import Chunk, batch, build, loss_of, mesh_of, seeded
from ranks import serve, told
from unflushed_jobs import RULES, on_another_device, pairs, weights_of

import infinity
from infinity.core.machine.tiers import Tier
from infinity.ext.versions_2bw.stale_weights import StaleWeights

LAYERS = 6  # of which two or three stages have as many each

# The version that micro-batch k computes with on stage s of n, for m micro-batches an update, as
# the papers have it.
VERSIONS: dict[str, Callable[[int, int, int, int], int]] = {
    "two": lambda k, s, n, m: max(k // m - 1, 0),
    "stash": lambda k, s, n, m: max(k - (n - 1 - s), 0) // m,
    "vertical": lambda k, s, n, m: max(k - (n - 1), 0) // m,
    "newest": lambda k, s, n, m: k // m,  # a twin: with a flush
}
# The updates that the weights of a gradient lack, on average.
LATE: dict[str, Callable[[int, int, int], float]] = {
    "two": lambda s, n, m: 1.0,
    "stash": lambda s, n, m: (n - 1 - s) / m,
    "vertical": lambda s, n, m: (n - 1) / m,
}


def schedule_for(chunk: Chunk, stage: int, stages: int, mesh: Any, micro: int) -> Any:
    """1F1B; GPipe where torch makes no 1F1B."""
    kind = schedules.Schedule1F1B if micro >= stages else schedules.ScheduleGPipe
    group = mesh["pp"].get_group()
    made = PipelineStage(chunk, stage, stages, torch.device("cpu"), group=group)
    return kind(made, micro, loss_fn=loss_of)


def built(rule: str, config: dict, micro: int, seed: int = 5) -> tuple:
    """This rank's stage of a Decoder, its optimizer and its schedule."""
    stages = dist.get_world_size()
    mesh = mesh_of(stages)
    chunks, numbers, count = build("1F1B", mesh, layers=LAYERS, seed=seed)
    optimizer = RULES[rule](chunks[0].parameters())
    chunks, optimizer = infinity.wrap_model(chunks, optimizer, config, mesh=mesh)
    return chunks, optimizer, schedule_for(chunks[0], numbers[0], count, mesh, micro)


def trained(
    rule: str,
    config: dict,
    micro: int,
    runs: Sequence[tuple[str, Sequence[int]]],
    *,
    corrects: bool = False,
) -> dict[str, Any]:
    """Weights, losses, and what was charged for versions, after ``runs``: of each the rule of its
    versions and the numbers of its batches. ``corrects``: with error feedback."""
    chunks, optimizer, schedule = built(rule, config, micro)
    job = parts_of(chunks).job
    accounts = [job.ledger.accounts[tier] for tier in Tier]
    before = sum(account.charged_nbytes for account in accounts)
    planned = sum(account.planned_nbytes for account in accounts)
    found: dict[str, Any] = {"losses": [], "used": []}
    for versions, numbers in runs:
        unflushed = infinity.parallel.without_flush(
            schedule, optimizer, weights=versions, error_feedback=corrects, quiet=True
        )
        found["taken"] = sum(account.charged_nbytes for account in accounts) - before
        found["planned"] = sum(account.planned_nbytes for account in accounts) - planned
        losses = unflushed.run(pairs(numbers)) or []
        found["losses"] += [each.item() for of_batch in losses for each in of_batch]
    found |= {
        "weights": weights_of(chunks),
        "shards": sum(flat.shard_nbytes for unit in job.units for flat in unit.flat_params),
        "state": {
            f"{key}/{index}": value
            for index, of_one in optimizer.state_dict()["state"].items()
            for key, value in whole(of_one).items()
        },
    }
    infinity.unwrap_model(chunks, optimizer)
    return found


def elsewhere(kernels: str | None = None, **arguments: Any) -> dict[str, Any]:
    """The same on a device whose memory the processor does not use (see `unflushed_jobs`)."""
    with on_another_device(kernels):
        return trained(**arguments)


class _Whole:
    """The whole model in one process, whose updates the engine makes; each rank for itself."""

    def __init__(self, rule: str):
        self.newest, self.computing = seeded(LAYERS, 5), seeded(LAYERS, 5)
        optimizer = RULES[rule](self.newest.parameters())
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "tp"))
        self.newest, self.optimizer = infinity.wrap_model(
            self.newest, optimizer, {"params": "host", "optimizer": "host"}, mesh=mesh
        )
        stages, model = dist.get_world_size(), seeded(LAYERS, 5)
        each = LAYERS // stages
        self.names = [
            list(Chunk(model, [*range(s * each, (s + 1) * each)]).state_dict())
            for s in range(stages)
        ]

    def values(self) -> dict[str, torch.Tensor]:
        return whole(self.newest.state_dict())

    def update(self, gradients: Sequence[torch.Tensor], micro: int) -> None:
        """One update by the sums ``gradients`` over ``micro`` micro-batches."""
        for param, grad in zip(self.newest.parameters(), gradients):
            param.grad = grad.div(micro)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def unwrap(self) -> None:
        infinity.unwrap_model(self.newest, self.optimizer)


def oracle(
    rule: str,
    micro: int,
    runs: Sequence[tuple[str, Sequence[int]]],
    *,
    corrects: bool = False,
) -> dict[str, Any]:
    """What the rule makes of ``runs`` if every version is kept. ``corrects``: each is computed with
    as it is expected to be when its gradient is applied, by its last update."""
    model, losses = _Whole(rule), []
    stages, computing = len(model.names), model.computing
    for versions, numbers in runs:
        kept = [model.values()]
        for update, number in enumerate(numbers):
            computing.zero_grad()
            for part, tokens in enumerate(batch(number).tensor_split(micro)):
                for s, names in enumerate(model.names):
                    at = VERSIONS[versions](update * micro + part, s, stages, micro)
                    ahead = LATE[versions](s, stages, micro) if corrects and at else 0.0
                    of_stage, before = kept[at], kept[max(at - 1, 0)]
                    expected = {n: (of_stage[n] - before[n]) * ahead + of_stage[n] for n in names}
                    found = expected if ahead else {n: of_stage[n] for n in names}
                    computing.load_state_dict(found, strict=False)
                losses.append(loss_of(computing(tokens), tokens))
                losses[-1].backward()
            model.update([param.grad for param in computing.parameters()], micro)
            kept.append(model.values())
    found = {"weights": model.values(), "losses": [loss.item() for loss in losses]}
    model.unwrap()
    return found


def by_correction(numbers: Sequence[int]) -> dict[str, Any]:
    """What error feedback makes of batches by its published form, with SGD and two versions: an
    update u is applied as u + (u - the one before), to weights that gradients are computed with.
    Those at home lack the last update's correction."""
    rate, model = 0.1, seeded(LAYERS, 5)
    params, corrected = dict(model.named_parameters()), [whole(model.state_dict())]
    last = {name: torch.zeros(()) for name in params}
    for number, of_batch in enumerate(numbers):
        model.load_state_dict(corrected[max(number - 1, 0)])
        model.zero_grad()
        loss_of(model(batch(of_batch)), batch(of_batch)).backward()
        updates = {name: rate * param.grad for name, param in params.items()}
        now = corrected[-1]
        corrected.append({n: now[n] - updates[n] - (updates[n] - last[n]) for n in params})
        last = updates
    return {"weights": {name: corrected[-1][name] + last[name] for name in params}}


def by_ouroboros(rule: str, numbers: Sequence[int], late: bool = True) -> dict[str, Any]:
    """What Ouroboros makes of batches, each of one micro-batch, with a stage for each module.
    ``late``: else all modules update at once, as SGD does (the twin)."""
    model = _Whole(rule)
    places = {name: index for index, (name, _) in enumerate(model.computing.named_parameters())}

    def gradients(number: int) -> dict[str, torch.Tensor]:
        model.computing.load_state_dict(model.values())
        model.computing.zero_grad()
        loss_of(model.computing(batch(number)), batch(number)).backward()
        return {name: param.grad.clone() for name, param in model.computing.named_parameters()}

    def update(made: dict[str, torch.Tensor]) -> None:
        for name, param in model.newest.named_parameters():
            param.grad = made.get(name)
        model.optimizer.step()
        model.optimizer.zero_grad()

    assert {name for names in model.names for name in names} == set(places)
    modules = model.names if late else [list(places)]
    ouroboros(modules, gradients, update, list(numbers))
    found = {"weights": model.values()}
    model.unwrap()
    return found


def executed(versions: str, micro: int, batches: int) -> dict[str, Any]:
    """Which version each forward and backward of this rank computed with, and how many were made
    then."""
    chunks, optimizer, schedule = built("SGD", {"params": "host", "optimizer": "host"}, micro)
    unflushed = infinity.parallel.without_flush(schedule, optimizer, weights=versions, quiet=True)
    engine, stage, done = parts_of(chunks).engine, schedule._stage, []
    unflushed.run(pairs([0]))  # torch has made its buffers
    seen: dict[bytes, int] = {}
    first, counts = engine.steps.index, {"forward": 0, "backward": 0}
    param = next(chunks[0].parameters())

    def version() -> int:
        """The number of the values that this stage's first parameter has in its forward."""
        return seen.setdefault(param.detach().numpy().tobytes(), len(seen))

    def noting(name: str, what: str) -> None:
        run = getattr(stage, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            made, number = engine.steps.index - first, counts[what]
            counts[what] += 1
            found = run(*arguments, **options)
            done.append((what, number, made))
            return found

        setattr(stage, name, noted)

    used: list[int] = []
    hook = chunks[0].register_forward_pre_hook(lambda *_: used.append(version()))
    noting("forward_one_chunk", "forward")
    noting("backward_one_chunk", "backward")
    unflushed.run(pairs(range(batches)))
    hook.remove()
    infinity.unwrap_model(chunks, optimizer)
    return {"done": done, "used": used}


def made(config: dict, count: int = 4) -> dict[str, Any]:
    """What ``pipeline`` makes of a causal model by vertical sync, against one process by torch; and
    what it says of a rule that is none."""
    stages, micro = dist.get_world_size(), 4
    batches, model = [labelled(number) for number in range(count)], causal("llama")
    optimizer: Any = RULES["SGD"](model.parameters())
    options: dict[str, Any] = {"schedule": "1F1B", "micro_batches": micro, "quiet": True}
    pipe, optimizer = infinity.parallel.pipeline(
        model, mesh_of(stages), optimizer, config, **options
    )
    found: dict[str, Any] = {"refused": told(lambda: pipe.run(batches, optimizer, weights="three"))}
    losses = pipe.run(batches, optimizer, weights="vertical")
    found |= {"losses": [loss.item() for loss in losses], "weights": weights_of(pipe.chunks)}
    infinity.unwrap_model(pipe.chunks, optimizer)
    newest, computing = causal("llama"), causal("llama")
    plain, kept, expected = RULES["SGD"](newest.parameters()), [whole(newest.state_dict())], []
    for update, of_batch in enumerate(batches):
        computing.zero_grad()
        total, counted = 0.0, (of_batch["labels"][:, 1:] != -100).sum()
        for part in range(micro):
            version = VERSIONS["vertical"](update * micro + part, 0, stages, micro)
            computing.load_state_dict(kept[version])
            given = {name: value.chunk(micro)[part] for name, value in of_batch.items()}
            loss = computing(**given, num_items_in_batch=counted).loss
            loss.backward()
            total += loss.item()
        for param, computed in zip(newest.parameters(), computing.parameters()):
            param.grad = computed.grad.clone()
        plain.step()
        kept.append(whole(newest.state_dict()))
        expected.append(total)
    return found | {"expected": expected, "expected weights": kept[-1]}


def resumed(path: str, config: dict, versions: str, micro: int) -> dict[str, Any]:
    """Two runs with a checkpoint between them, and the second one again from the checkpoint."""
    found = {}
    chunks, optimizer, schedule = built("momentum", config, micro)
    unflushed = infinity.parallel.without_flush(schedule, optimizer, weights=versions)
    unflushed.run(pairs(range(4)))
    infinity.save_checkpoint(path, chunks, optimizer)
    unflushed.run(pairs(range(4, 8)))
    found["after"] = weights_of(chunks)
    infinity.unwrap_model(chunks, optimizer)
    chunks, optimizer, schedule = built("momentum", config, micro, seed=6)
    infinity.load_checkpoint(path, chunks, optimizer)
    infinity.parallel.without_flush(schedule, optimizer, weights=versions).run(pairs(range(4, 8)))
    found["again"] = weights_of(chunks)
    infinity.unwrap_model(chunks, optimizer)
    return found


def cut_short(path: str, config: dict, versions: str) -> dict[str, Any]:
    """A run whose fifth forward raises on the first of two ranks, when the other's fourth does; and
    one after it: against the same run of a new pipeline that has loaded what was left."""
    found: dict[str, Any] = {}
    chunks, optimizer, schedule = built("momentum", config, 1)
    unflushed = infinity.parallel.without_flush(schedule, optimizer, weights=versions, quiet=True)
    unflushed.run(pairs([0]))  # torch has made its buffers
    calls: list[int] = []

    def fall(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 5 - dist.get_rank():
            raise ValueError("the user's own")

    layer = next(each for each in chunks[0].modules() if isinstance(each, torch.nn.Linear))
    hook = layer.register_forward_hook(fall)
    try:
        unflushed.run(pairs(range(1, 7)))
    except (ValueError, RuntimeError) as error:
        found["raised"] = f"{error!r} {error.__cause__!r}"
    hook.remove()
    optimizer.zero_grad()
    found["steps"] = parts_of(chunks).steps.index
    infinity.save_checkpoint(path, chunks, optimizer)
    for name in ("went on", "was loaded"):
        if name == "was loaded":
            infinity.unwrap_model(chunks, optimizer)
            chunks, optimizer, schedule = built("momentum", config, 1, seed=6)
            infinity.load_checkpoint(path, chunks, optimizer)
            unflushed = infinity.parallel.without_flush(schedule, optimizer, weights=versions)
        unflushed.run(pairs(range(7, 12)))
        found[name] = weights_of(chunks)
    infinity.unwrap_model(chunks, optimizer)
    return found


def refused(path: str) -> dict[str, str]:
    """What is refused with few micro-batches and more versions, and then what runs."""
    host = {"params": "host", "optimizer": "host"}
    chunks, optimizer, schedule = built("SGD", host, 1)
    without_flush = infinity.parallel.without_flush
    found = {
        "two": told(lambda: without_flush(schedule, optimizer)),
        "kind": told(lambda: without_flush(schedule, optimizer, weights="three")),
        "not a name": told(lambda: without_flush(schedule, optimizer, weights=["stash"])),
    }
    found["nothing was taken"] = str(parts_of(chunks).find(StaleWeights) is None)
    rules = ["stash", "vertical"]
    differing = without_flush(schedule, optimizer, weights=rules[dist.get_rank() % 2])
    found["ranks differ"] = told(lambda: differing.run(pairs([0])))
    run = without_flush(schedule, optimizer, weights="stash").run

    def inside() -> None:
        found["inside: save"] = told(lambda: infinity.save_checkpoint(path, chunks, optimizer))
        found["inside: step"] = told(optimizer.step)

    run(pairs(range(3)), after_update=inside)
    found["goes on"] = told(lambda: run(pairs(range(2))))
    infinity.unwrap_model(chunks, optimizer)
    return found


if __name__ == "__main__":
    serve(globals())
