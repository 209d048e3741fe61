"""Jobs of pipelines that run without flush, which every rank of a launch runs (see `ranks`, and
`pipeline_jobs` for the words).

**alone**: one process with the whole model that keeps two versions of the weights and does the rule
by hand.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inside import parts_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import pipeline_jobs
import rank_jobs
from gpu_stand_in import load_stand_in
from made_pipeline_jobs import causal, labelled
from parallel_jobs import whole
from pipeline_jobs import LAYERS, batch, build, loss_of, mesh_of, schedule_of, seeded
from ranks import serve, told

import infinity
from infinity.core.machine import accelerator, device
from infinity.core.machine.tiers import Tier
from infinity.core.run.engine import Engine
from infinity.core.units.residency import Residency
from infinity.core.units.unit import ParamUnit
from infinity.errors import CapacityError
from infinity.ext.versions_2bw.stale_weights import StaleWeights

MICRO, BATCHES = 4, 4

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


def pairs(numbers: Sequence[int], data_rank: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(batch(number, data_rank), batch(number, data_rank)) for number in numbers]


def built(
    rule: str,
    config: dict,
    mesh: Any = None,
    seed: int = 5,
    micro: int = MICRO,
    *,
    named: bool = False,
) -> tuple:
    """This rank's chunk of a Decoder, its optimizer, which has the parameters' names if they are
    ``named``, and what runs it without flush."""
    mesh = mesh or mesh_of(2)
    chunks, numbers, count = build("1F1B", mesh, seed=seed)
    params = chunks[0].named_parameters() if named else chunks[0].parameters()
    chunks, optimizer = infinity.wrap_model(chunks, RULES[rule]([*params]), config, mesh=mesh)
    schedule = schedule_of("1F1B", chunks, numbers, count, mesh, micro)
    return chunks, optimizer, infinity.parallel.without_flush(schedule, optimizer, quiet=True)


def weights_of(chunks: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {name: value for chunk in chunks for name, value in whole(chunk.state_dict()).items()}


def trained(
    rule: str,
    config: dict,
    runs: Sequence[Sequence[int]] = (range(BATCHES),),
    *,
    flushes: bool = False,
    pp: int = 2,
) -> dict[str, Any]:
    """Weights, moments and losses after ``runs``, each the numbers of its batches. ``flushes``: the
    twin, a step for each batch."""
    mesh = mesh_of(pp)
    chunks, optimizer, unflushed = built(rule, config, mesh)
    losses: list[torch.Tensor] = []
    for numbers in runs:
        given = pairs(numbers, mesh.get_local_rank("dp"))
        if not flushes:
            losses += unflushed.run(given) or []
            continue
        for inputs, target in given:
            first, last = unflushed._schedule._stage.is_first, unflushed._schedule._stage.is_last
            unflushed._schedule.step(
                *((inputs,) if first else ()), **({"target": target} if last else {})
            )
            optimizer.step()
            optimizer.zero_grad()
    state = {
        f"{key}/{index}": value
        for index, of_one in optimizer.state_dict()["state"].items()
        for key, value in whole(of_one).items()
    }
    found = {
        "weights": weights_of(chunks),
        "state": state,
        "losses": losses,
        "steps": parts_of(chunks).steps.index,
    }
    at_rest = [unit for unit in parts_of(chunks).prefetcher.units if not unit.computes_at_home]
    found["empty"] = not any(
        flat.untyped_storage().nbytes() for unit in at_rest for flat in unit.buffers.flats
    )
    infinity.unwrap_model(chunks, optimizer)
    found["plain"] = all(
        type(p) is nn.Parameter and torch.equal(p, found["weights"][n])
        for chunk in chunks
        for n, p in chunk.named_parameters()
    )
    return found


@contextmanager
def on_another_device(kernels: str | None) -> Iterator[None]:
    """Computes inside the block on a device whose memory the processor does not use, with late
    copies; with ``kernels`` (a file) it makes updates, too."""
    accelerator.KINDS["cpu"] = rank_jobs._Elsewhere
    rank_jobs._Elsewhere.loaded = load_stand_in(Path(kernels)) if kernels else None
    try:
        yield
    finally:
        accelerator.KINDS["cpu"] = device.Device


def elsewhere(kernels: str | None = None, **arguments: Any) -> dict[str, Any]:
    """The same on another device."""
    with on_another_device(kernels):
        return trained(**arguments)


def alone(
    rule: str, *, delay: int = 1, count: int = BATCHES, by: str = "engine", data_ranks: int = 1
) -> dict[str, Any]:
    """What one process makes of the batches: batch t is computed with the weights after max(t -
    delay, 0) updates. ``by``: whose formula makes the updates, the "engine"'s or "torch"'s."""
    newest, computing = seeded(LAYERS, 5), seeded(LAYERS, 5)
    optimizer = RULES[rule](newest.parameters())
    if by == "engine":  # each rank for itself
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "tp"))
        newest, optimizer = infinity.wrap_model(
            newest, optimizer, {"params": "host", "optimizer": "host"}, mesh=mesh
        )
    versions, losses = [whole(newest.state_dict())], []
    for number in range(count):
        computing.load_state_dict(versions[max(number - delay, 0)])
        computing.zero_grad()
        of_batch = []
        for data_rank in range(data_ranks):
            for tokens in batch(number, data_rank).tensor_split(MICRO):
                of_batch.append(loss_of(computing(tokens), tokens))
                of_batch[-1].backward()
        for param, computed in zip(newest.parameters(), computing.parameters()):
            param.grad = computed.grad.div(data_ranks).div(MICRO)
        optimizer.step()
        optimizer.zero_grad()
        versions.append(whole(newest.state_dict()))
        losses.append(torch.stack([loss.detach() for loss in of_batch]))
    if by == "engine":
        infinity.unwrap_model(newest, optimizer)
    return {"weights": versions[-1], "losses": losses}


def executed(config: dict, *, flushes: bool = False, batches: int = 3) -> dict[str, Any]:
    """What this rank did, in order, and after how many updates the weights were that each forward
    and backward computed with."""
    chunks, optimizer, unflushed = built("SGD", config)
    engine, schedule = parts_of(chunks).engine, unflushed._schedule
    stage, done, versions = schedule._stage, [], []
    unflushed.run(pairs([0]))  # torch has made its buffers
    first, counts = engine.steps.index, {"forward": 0, "backward": 0}

    def noting(name: str, what: str) -> None:
        run = getattr(stage, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            done.append((what, stage.stage_index, counts[what]))
            versions.append(
                engine.steps.index
                - first
                - any(unit.in_use is not None for unit in parts_of(engine).units)
            )
            counts[what] += 1
            return run(*arguments, **options)

        setattr(stage, name, noted)

    noting("forward_one_chunk", "forward")
    noting("backward_one_chunk", "backward")
    for numbers in [range(batches)] if not flushes else [[number] for number in range(batches)]:
        unflushed.run(pairs(numbers))
    infinity.unwrap_model(chunks, optimizer)
    return {"done": done, "versions": versions, "chunks": stage.num_stages}


def room(config: dict, rule: str = "AdamW") -> dict[str, int]:
    """Bytes that a second version takes at home, and those of the weights; in a wide window and a
    narrow one, the most of weights on the device."""
    chunks, optimizer = build("1F1B", mesh_of(2))[0], None
    chunks, optimizer = infinity.wrap_model(
        chunks, RULES[rule]([*chunks[0].parameters()]), config, mesh=mesh_of(2)
    )
    engine = parts_of(chunks).engine
    before = {tier: parts_of(engine).ledger.accounts[tier].charged_nbytes for tier in Tier}
    schedule = schedule_of("1F1B", chunks, [dist.get_rank()], 2, mesh_of(2), MICRO)
    unflushed = infinity.parallel.without_flush(schedule, optimizer, quiet=True)
    taken = {
        tier: parts_of(engine).ledger.accounts[tier].charged_nbytes - before[tier] for tier in Tier
    }
    most, loads = 0, 0
    start = ParamUnit.start_gather

    def counting(self: ParamUnit, *arguments: Any, **options: Any) -> Any:
        nonlocal most, loads
        found = start(self, *arguments, **options)
        loads += 1
        most = max(
            most,
            sum(
                u.weight_nbytes
                for u in parts_of(engine).prefetcher.units
                if u.residency is not Residency.STORED and not u.computes_at_home
            ),
        )
        return found

    ParamUnit.start_gather = counting
    unflushed.run(pairs(range(3)))
    ParamUnit.start_gather = start
    weights, window = weights_of(chunks), parts_of(engine).prefetcher._window.planned_nbytes
    shards = sum(flat.shard_nbytes for unit in parts_of(engine).units for flat in unit.flat_params)
    infinity.unwrap_model(chunks, optimizer)
    return {
        "taken": sum(taken.values()),
        "shards": shards,
        "most": most,
        "loads": loads / len(parts_of(engine).units),
        "window": window,
        "weights": weights,
    }


def resumed(path: str, config: dict) -> dict[str, Any]:
    """Two runs with a checkpoint between them, and the second one again from the checkpoint."""
    chunks, optimizer, unflushed = built("AdamW", config, named=True)
    unflushed.run(pairs(range(3)))
    infinity.save_checkpoint(path, chunks, optimizer, extra=3)
    unflushed.run(pairs(range(3, 6)))
    after = weights_of(chunks)
    infinity.unwrap_model(chunks, optimizer)
    chunks, optimizer, unflushed = built("AdamW", config, seed=6, named=True)
    assert infinity.load_checkpoint(path, chunks, optimizer) == 3
    names = optimizer.param_groups[0]["param_names"]
    unflushed.run(pairs(range(3, 6)))
    again = weights_of(chunks)
    infinity.unwrap_model(chunks, optimizer)
    return {"after": after, "again": again, "names": names}


def made(config: dict) -> dict[str, Any]:
    """What ``pipeline`` makes of a causal model, whose batches have other numbers of labels;
    against one process by torch."""
    mesh, batches = mesh_of(2), [labelled(number) for number in range(BATCHES)]
    for batch_of in batches[1::2]:
        batch_of["labels"][1, 3:] = -100
    model = causal("llama")
    pipe, optimizer = infinity.parallel.pipeline(
        model,
        mesh,
        RULES["SGD"](model.parameters()),
        config,
        schedule="1F1B",
        micro_batches=MICRO,
        quiet=True,
    )
    updates: list[int] = []
    found_first = {
        "numbers": told(lambda: pipe.run(batches[: dist.get_rank()], optimizer)),
        "names": told(lambda: pipe.run([batches[0]] if dist.get_rank() else [(1, 2)], optimizer)),
        "lengths": told(
            lambda: pipe.run([batches[0], {k: v[:, :6] for k, v in batches[1].items()}], optimizer)
        ),
        "none": str(pipe.run([], optimizer)),
    }
    losses = pipe.run(batches, optimizer, after_update=lambda: updates.append(1))
    found = found_first | {
        "losses": [loss.item() for loss in losses],
        "weights": weights_of(pipe.chunks),
        "updates": len(updates),
    }
    found["evaluates"] = pipe.eval(**batches[0]).item() < losses[0].item()
    infinity.unwrap_model(pipe.chunks, optimizer)
    newest, computing = causal("llama"), causal("llama")
    plain = RULES["SGD"](newest.parameters())
    versions, expected = [whole(newest.state_dict())], []
    for number, batch_of in enumerate(batches):
        computing.load_state_dict(versions[max(number - 1, 0)])
        computing.zero_grad()
        expected.append(computing(**batch_of).loss)
        expected[-1].backward()
        for param, computed in zip(newest.parameters(), computing.parameters()):
            param.grad = computed.grad
        plain.step()
        versions.append(whole(newest.state_dict()))
    return found | {
        "expected": [loss.item() for loss in expected],
        "expected weights": versions[-1],
    }


def shapes(config: dict, *, anew: bool) -> dict[str, Any]:
    """Runs of batches of other shapes, with a step between two. ``anew``: the twin, each with a
    schedule of its own."""
    mesh, losses = mesh_of(2), []
    chunks, optimizer, unflushed = built("momentum", config, mesh)
    _, numbers, count = build("1F1B", mesh)
    first = dist.get_rank() == 0
    kinds = (16, 8, False), (8, 5, False), (8, 5, True), (8, 5, False), (16, 5, False)
    for number, (samples, length, flushes) in enumerate(kinds):
        given = [(batch(2 * number + n)[:samples, :length],) * 2 for n in range(2)]
        if anew:
            schedule = schedule_of("1F1B", chunks, numbers, count, mesh, MICRO)
            unflushed = infinity.parallel.without_flush(schedule, optimizer, quiet=True)
        if not flushes:
            losses += unflushed.run(given) or []
            continue
        unflushed._schedule.step(
            *((given[0][0],) if first else ()), **({} if first else {"target": given[0][1]})
        )
        optimizer.step()
        optimizer.zero_grad()
    found = {"weights": weights_of(chunks), "losses": [loss.tolist() for loss in losses]}
    infinity.unwrap_model(chunks, optimizer)
    return found


def made_refused() -> dict[str, str]:
    """Made pipelines that do not run without flush."""
    found = {}
    for what, name, options in (
        ("schedule", "llama", {"schedule": "LoopedBFS"}),
        ("tied", "gpt2", {"schedule": "1F1B"}),
    ):
        model = causal(name)
        optimizer: Any = RULES["SGD"](model.parameters())
        host = {"params": "host", "optimizer": "host"}
        pipe, optimizer = infinity.parallel.pipeline(
            model, mesh_of(2), optimizer, host, micro_batches=MICRO, quiet=True, **options
        )
        found[what] = told(
            lambda pipe=pipe, optimizer=optimizer: pipe.run([labelled(0)], optimizer)
        )
        found[f"{what} goes on"] = str(pipe.step(**labelled(0)).item() > 0)
        optimizer.zero_grad()
        infinity.unwrap_model(pipe.chunks, optimizer)
    return found


def refused(path: str) -> dict[str, str]:
    """What cannot be run without flush, and then what can."""
    mesh, host, found = mesh_of(2), {"params": "host", "optimizer": "host"}, {}
    without_flush = infinity.parallel.without_flush
    chunks, numbers, count = build("1F1B", mesh)
    params = [*chunks[0].parameters()]
    plain = torch.optim.SGD(params, lr=0.1)
    clipped, managed = infinity.wrap_model(chunks, plain, host | {"max_grad_norm": 1.0}, mesh=mesh)
    found["max_grad_norm"] = told(
        lambda: without_flush(schedule_of("1F1B", clipped, numbers, count, mesh, MICRO), managed)
    )
    infinity.unwrap_model(clipped, managed)
    chunks, optimizer = infinity.wrap_model(chunks, plain, host, mesh=mesh)
    planned = parts_of(chunks).ledger.accounts[Tier.HOST].planned_nbytes
    infinity.unwrap_model(chunks, optimizer)
    least = [0, 0]
    dist.all_gather_object(least, planned)  # which both ranks divide
    chunks, optimizer = infinity.wrap_model(
        chunks, plain, host | {"host_memory": sum(least) + 300_000}, mesh=mesh
    )
    schedule = schedule_of("1F1B", chunks, numbers, count, mesh, MICRO)
    found["no room"] = told(lambda: without_flush(schedule, optimizer))
    pipeline_jobs.step(infinity.parallel.attach(schedule), numbers, count, 0)
    optimizer.step()
    optimizer.zero_grad()
    found["no room goes on"] = str(parts_of(chunks).find(StaleWeights) is None)
    infinity.unwrap_model(chunks, optimizer)
    chunks, optimizer = infinity.wrap_model(chunks, plain, host, mesh=mesh)
    group = mesh["pp"].get_group()
    stage = PipelineStage(chunks[0], numbers[0], count, torch.device("cpu"), group=group)
    found["GPipe"] = told(
        lambda: without_flush(schedules.ScheduleGPipe(stage, MICRO, loss_fn=loss_of), optimizer)
    )
    found["no loss"] = told(lambda: without_flush(schedules.Schedule1F1B(stage, MICRO), optimizer))
    schedule = schedules.Schedule1F1B(stage, MICRO, loss_fn=loss_of)
    schedule._n_microbatches = 1  # torch itself makes no such schedule
    found["few"] = told(lambda: without_flush(schedule, optimizer))
    schedule._n_microbatches = MICRO
    found["plain optimizer"] = told(lambda: without_flush(schedule, plain))
    found["nothing was taken"] = str(parts_of(chunks).find(StaleWeights) is None)
    run = without_flush(schedule, optimizer).run
    found["not a batch"] = told(lambda: run([batch(0)]))
    found["does not divide"] = told(lambda: run([(batch(0)[:6], batch(0)[:6])]))
    found["shapes"] = told(lambda: run([*pairs([0]), (batch(1)[:8], batch(1)[:8])]))
    found["numbers"] = told(lambda: run(pairs(range(1 + dist.get_rank()))))
    declared = torch.zeros(MICRO, 8, dtype=torch.int64), torch.zeros(MICRO, 8, 64)
    fixed = PipelineStage(chunks[0], numbers[0], count, torch.device("cpu"), *declared, group=group)
    fixed_run = without_flush(
        schedules.Schedule1F1B(fixed, MICRO, loss_fn=loss_of), optimizer, quiet=True
    ).run
    found["built for another shape"] = told(lambda: fixed_run([(batch(1)[:8], batch(1)[:8])]))
    with torch.no_grad():
        found["no grad"] = told(lambda: run(pairs([0])))
    params[0].grad = torch.zeros(params[0].shape)
    found["gradients"] = told(lambda: run(pairs([0])))
    optimizer.zero_grad()
    with optimizer.step_in_backward():
        found["step_in_backward"] = told(lambda: run(pairs([0])))
    optimizer.step()
    inside = {
        "save": lambda: infinity.save_checkpoint(path, chunks, optimizer),
        "state_dict": chunks[0].state_dict,
        "optimizer's": optimizer.state_dict,
        "full_params": lambda: infinity.full_params(chunks).__enter__(),
        "unwrap": lambda: infinity.unwrap_model(chunks, optimizer),
        "run": lambda: run(pairs([0])),
        "step": lambda: schedule.step(*step_of(9)[0], **step_of(9)[1]),
        "eval": lambda: schedule.eval(*step_of(9)[0], **step_of(9)[1]),
        "accumulate": lambda: infinity.accumulate(chunks).__enter__(),
        "optimizer's step": optimizer.step,
        "add_param_group": lambda: optimizer.add_param_group({"params": []}),
    }

    def ask() -> None:
        found.update({f"inside: {name}": told(ask) for name, ask in inside.items()})

    run(pairs(range(2)), after_update=ask)
    found["goes on"] = told(lambda: run(pairs(range(2))))
    infinity.unwrap_model(chunks, optimizer)
    return found


def step_of(number: int) -> tuple[tuple, dict[str, torch.Tensor]]:
    """What this rank, one stage of two, gives its schedule for a batch."""
    return ((batch(number),), {}) if dist.get_rank() == 0 else ((), {"target": batch(number)})


def one_lacks_room() -> dict[str, Any]:
    """What both ranks are told, and what is taken, where one has no room for a second version."""
    mesh = mesh_of(2)
    chunks, numbers, count = build("1F1B", mesh)
    chunks, optimizer = infinity.wrap_model(
        chunks, RULES["SGD"]([*chunks[0].parameters()]), {"params": "host"}, mesh=mesh
    )
    engine, schedule = (
        parts_of(chunks).engine,
        schedule_of("1F1B", chunks, numbers, count, mesh, MICRO),
    )
    account, allocate = (
        parts_of(engine).ledger.accounts[Tier.HOST],
        parts_of(engine).store.allocator.allocate_later,
    )
    before, calls = account.charged_nbytes, []

    def refusing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise CapacityError("nothing is left")
        return allocate(*arguments)

    parts_of(engine).store.allocator.allocate_later = refusing
    found: dict[str, Any] = {
        "said": told(lambda: infinity.parallel.without_flush(schedule, optimizer))
    }
    del parts_of(engine).store.allocator.allocate_later
    found["taken"] = account.charged_nbytes - before
    found["keeps"] = parts_of(engine).find(StaleWeights) is not None
    found["goes on"] = told(
        lambda: infinity.parallel.without_flush(schedule, optimizer).run(pairs(range(2)))
    )
    infinity.unwrap_model(chunks, optimizer)
    return found


def forward_inside() -> dict[str, Any]:
    """A forward of the model's own between two batches of a run, refused and caught; and then a
    step with a flush."""
    chunks, optimizer, unflushed = built("SGD", {"params": "host", "optimizer": "host"})
    found = {}
    inputs = batch(0) if dist.get_rank() == 0 else torch.zeros(2, 8, 64)

    def forward() -> None:
        found["forward"] = told(lambda: chunks[0](inputs))

    found["run"] = told(lambda: unflushed.run(pairs(range(3)), after_update=forward))
    found["steps"] = parts_of(chunks).steps.index
    optimizer.zero_grad()
    loss = pipeline_jobs.step(unflushed._schedule, [dist.get_rank()], 2, 1)
    optimizer.step()
    optimizer.zero_grad()
    infinity.unwrap_model(chunks, optimizer)
    return found | {"loss": loss}


def forgotten(config: dict) -> int:
    """How many engines there are of pipelines that have gone."""
    trained(rule="SGD", config=config)
    gc.collect()
    return sum(isinstance(found, Engine) for found in gc.get_objects())


def warned() -> dict[str, list[str]]:
    """What is warned of, by rule."""
    found = {}
    for rule in RULES:
        chunks, numbers, count = build("1F1B", mesh_of(2))
        chunks, optimizer = infinity.wrap_model(
            chunks, RULES[rule]([*chunks[0].parameters()]), {"params": "host"}, mesh=mesh_of(2)
        )
        schedule = schedule_of("1F1B", chunks, numbers, count, mesh_of(2), MICRO)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            infinity.parallel.without_flush(schedule, optimizer)
        found[rule] = [str(each.message) for each in caught if "without_flush" in str(each.message)]
        infinity.unwrap_model(chunks, optimizer)
    return found


def cut_short(config: dict, at: int) -> dict[str, Any]:
    """A run that a forward ends in its batch ``at``, and a step after it; against a run up to there
    and the same step. One stage a rank."""
    mesh, found = mesh_of(1), {}
    for falls in (True, False):
        chunks, optimizer, unflushed = built("momentum", config, mesh)
        calls = []

        def fall(*_: Any, calls: list = calls) -> None:
            calls.append(1)
            if len(calls) > at * MICRO + 2:
                raise ValueError("the user's own")

        if falls:
            hook = chunks[0].norm.register_forward_hook(fall)
            unflushed.run(pairs([])), calls.clear()
            try:
                unflushed.run(pairs(range(at + 1)))
            except (ValueError, RuntimeError) as error:
                found["raised"] = f"{error!r} {error.__cause__!r}"
            hook.remove()
            optimizer.zero_grad()
        else:
            unflushed.run(pairs(range(at)))
        found[f"steps {falls}"] = parts_of(chunks).steps.index
        unflushed._schedule.step(batch(9), target=batch(9))
        optimizer.step()
        optimizer.zero_grad()
        unflushed.run(pairs([10, 11, 12]))
        found[f"weights {falls}"] = weights_of(chunks)
        infinity.unwrap_model(chunks, optimizer)
    return found


if __name__ == "__main__":
    serve(globals())
