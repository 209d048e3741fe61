"""Programs of users on the late device (see `late_jobs`): what plain torch allows beside a training
loop, each compared with the same run on a punctual device."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path += [str(folder) for folder in Path(__file__).resolve().parents[1].glob("*/")]

import late_jobs
import torch
from late_jobs import (
    BLOCKS,
    HOST,
    JOBS,
    SEED,
    STEPS,
    VOCABULARY,
    WHERE,
    WIDTH,
    batches,
    loss_of,
    plain,
    step,
)
from torch import nn

import infinity

OTHER = "late:1"
PROGRAMS: dict[str, Any] = {}


def program(train: Any) -> Any:
    PROGRAMS[train.__name__] = train
    return train


def with_hooks(model: nn.Module, optimizer: Any, *hooks: Any) -> list[torch.Tensor]:
    """A plain run with these hooks, which are removed again."""
    told = plain(model, optimizer)
    for hook in hooks:
        hook.remove()
    return told


@program
def branches_by_values(model, optimizer):
    """Blocks are left out or run twice, as a value that is read decides."""

    def chosen(ids):
        x = model.embed(ids)
        for block in model.blocks:
            for _ in range(int(x.float().abs().sum().item() * 1000) % 3):
                x = block(x)
        return model.head(x)

    told = []
    for ids in batches(2 * STEPS):
        ids = ids.to(WHERE)
        real, model.forward = model.forward, chosen
        try:
            loss = loss_of(model, ids)
            loss.backward()
        finally:
            model.forward = real
        step(optimizer)
        told.append(loss.detach())
    return told


@program
def own_double_buffers(model, optimizer):
    """Batches come through pinned buffers and a stream of the user's; logits go out unawaited."""
    copies, told = torch.Stream(device=WHERE), []
    pinned = [torch.empty(16, 32, dtype=torch.int64).pin_memory() for _ in range(2)]
    logits = [torch.empty(16, 32, VOCABULARY, dtype=torch.bfloat16).pin_memory() for _ in range(2)]
    ends = [torch.Event(device=WHERE) for _ in range(2)]
    for turn, ids in enumerate(batches(2 * STEPS)):
        at = turn % 2
        if turn > 1:
            ends[at].synchronize()
            told.append(logits[at].float().sum())
        pinned[at].copy_(ids)
        with copies:
            there = pinned[at].to(WHERE, non_blocking=True)
        here = torch.accelerator.current_stream(WHERE)
        here.wait_stream(copies)
        there.record_stream(here)
        out = model(there)
        logits[at].copy_(out.detach(), non_blocking=True)
        nn.functional.cross_entropy(out.float().flatten(0, 1), there.flatten()).backward()
        ends[at].record(here)
        step(optimizer)
    return told


@program
def exceptions(model, optimizer):
    """In the forward and at three places of the backward; each step is repeated."""

    def raises(*_: Any) -> None:
        raise ValueError("the user's own")

    told = []
    for ids in batches(STEPS):
        for place in (None, *model.blocks[:: BLOCKS // 2], model.head):
            module = model.blocks[1] if place is None else place
            hook = (
                module.register_forward_pre_hook(raises)
                if place is None
                else module.register_full_backward_hook(raises)
            )
            try:
                loss_of(model, ids).backward()
                raise AssertionError("nothing was raised")
            except ValueError:
                optimizer.zero_grad()
            finally:
                hook.remove()
        loss = loss_of(model, ids)
        loss.backward()
        step(optimizer)
        told.append(loss.detach())
    return told


@program
def generation_between_steps(model, optimizer):
    told = []
    for ids in batches(STEPS):
        told += plain(model, optimizer, 1)
        with torch.inference_mode():
            text = ids[:2, :4].to(WHERE)
            for _ in range(3):
                text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
        told.append(text.clone())
    return told


def _second(where: str = WHERE) -> tuple[nn.Module, Any]:
    torch.manual_seed(SEED + 1)
    model = late_jobs.Model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return infinity.wrap_model(model, optimizer, {"device": where, **HOST})


@program
def two_models(model, optimizer):
    """Each learns what the other says."""
    other, its_optimizer = _second()
    told = []
    for ids in batches(STEPS):
        ids = ids.to(WHERE)
        one, two = model(ids).float(), other(ids).float()
        (one - two.detach()).square().mean().backward()
        (two - one.detach()).square().mean().backward()
        step(optimizer)
        step(its_optimizer)
        told += [one.detach().sum(), two.detach().sum()]
    infinity.unwrap_model(other, its_optimizer)
    return told


@program
def teacher_on_another_device(model, optimizer):
    teacher, its_optimizer = _second(OTHER)
    told = []
    for ids in batches(STEPS):
        with torch.no_grad():
            said = teacher(ids.to(OTHER)).to(WHERE)
        # CUDA orders a copy between two devices on both; this one only where it comes from
        torch.accelerator.synchronize(OTHER)
        loss = (model(ids.to(WHERE)) - said).float().square().mean()
        loss.backward()
        step(optimizer)
        told.append(loss.detach())
    infinity.unwrap_model(teacher, its_optimizer)
    return told


@program
def two_forwards_one_backward(model, optimizer):
    told = []
    for ids in batches(STEPS):
        loss = loss_of(model, ids[:8]) + loss_of(model, ids[8:])
        loss.backward()
        step(optimizer)
        told.append(loss.detach())
    return told


@program
def a_busy_thread(model, optimizer):
    """Another thread computes on the device all the time."""
    ends, other = threading.Event(), torch.ones(64, 64, device=WHERE)

    def compute() -> None:
        while not ends.is_set():
            (other @ other).sum().item()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return [value.cpu() for value in plain(model, optimizer)]
    finally:
        ends.set()
        thread.join()


@program
def a_sort_on_the_processor(model, optimizer):
    """In the middle of the forward."""

    def sort(block, args):
        order = args[0].detach().float().mean(-1).cpu().argsort(1)
        there = order.to(WHERE).unsqueeze(-1).expand(-1, -1, WIDTH)
        return (args[0].gather(1, there),)

    hook = model.blocks[BLOCKS // 2].register_forward_pre_hook(sort)
    return with_hooks(model, optimizer, hook)


@program
def frozen_and_thawed(model, optimizer):
    """Another block in each step, with a scheduler."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    told = []
    for turn in range(2 * STEPS):
        model.blocks[turn % BLOCKS].requires_grad_(False)
        told += plain(model, optimizer, 1)
        model.blocks[turn % BLOCKS].requires_grad_(True)
        scheduler.step()
    return told


@program
def hooks_everywhere(model, optimizer):
    """On parameters, modules, outputs and gradients."""
    block = model.blocks[1]
    return with_hooks(
        model,
        optimizer,
        model.head.weight.register_hook(lambda grad: grad * 0.5),
        block.register_forward_hook(lambda _, __, out: out * 1.5),
        block.register_full_backward_hook(lambda _, grads, __: (grads[0] * 2,)),
        model.blocks[2].register_forward_pre_hook(lambda _, args: (args[0] + 0.125,)),
    )


@program
def compiled_blocks(model, optimizer):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return plain(model, optimizer)


ACTIVATIONS = late_jobs.ACTIVATIONS
for _name, _train in PROGRAMS.items():
    late_jobs.add(f"{_name}:host", _train, HOST)
    late_jobs.add(f"{_name}:activations", _train, ACTIVATIONS)
    JOBS[f"{_name}:kernels"] = late_jobs.with_kernels({}, train=_train)

if __name__ == "__main__":
    late_jobs.main(sys.argv[1], sys.argv[2:])
