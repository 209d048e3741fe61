"""What a process with the late device runs: each job trains, and tells what came out.

``python late_jobs.py FOLDER JOB...`` writes one line of JSON for each job: its name and its answer,
or the error that it raised.

Words used here:

**way**: a way of training; **homes**: where state is; **punctual**: a run whose launches wait for
their jobs, with which the others are compared.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path += [str(folder) for folder in Path(__file__).resolve().parents[1].glob("*/")]

import late_device
import torch
import torch.utils.checkpoint
from inside import parts_of
from torch import nn

import infinity
from infinity.core.machine import accelerator, in_flight, storage_guard
from infinity.core.machine import device as devices
from infinity.core.machine.card_memory import CardMemory
from infinity.core.run import activation_home, one_thread
from infinity.core.step.device_fraction import DeviceFraction
from infinity.errors import InfinityError
from infinity.ext.aside import aside
from infinity.ext.aside.aside import Aside
from infinity.ext.blocks import recompute
from infinity.ext.blocks.activation_choice import ActivationChoice
from infinity.ext.blocks.checkpointed import Held
from infinity.ext.blocks.recompute import ActivationPlanner, PlannedBlock
from infinity.ext.card.launches import Launches
from infinity.ext.tables import tables

LATE = late_device.install()
WHERE = "late:0"
SEED = 20261126
STEPS = 3
WIDTH, VOCABULARY, BLOCKS = 64, 96, 4
LATE_RUNS = 2  # of each case
HOST = {"params": "host", "optimizer": "host"}
NVME = {"params": "nvme", "optimizer": "nvme"}
ACTIVATIONS = {**HOST, "activations": "host"}
WINDOW = {**HOST, "device_memory": "320KiB"}


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, checkpoints: str = "", tied: bool = False):
        super().__init__()
        self.checkpoints = checkpoints
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpoints:
                is_reentrant = self.checkpoints == "reentrant"
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=is_reentrant)
            else:
                x = block(x)
        return self.head(x)


def made(
    dtype: torch.dtype = torch.bfloat16, **form: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = Model(**form).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(count):
        yield torch.randint(0, VOCABULARY, (16, 32), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    where = model.head.weight.device
    ids = ids.to(where)
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def step(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


# --- ways of training: each returns what it read on the way ---

WAYS: dict[str, Callable[[nn.Module, Any], list[torch.Tensor]]] = {}


def way(train: Callable) -> Callable:
    WAYS[train.__name__] = train
    return train


@way
def plain(model, optimizer, steps=STEPS):
    told = []
    for ids in batches(steps):
        loss = loss_of(model, ids)
        loss.backward()
        step(optimizer)
        told.append(loss.detach())
    return told


def longer(model, optimizer):
    """Two passes are measured before blocks are kept, sent or recomputed."""
    return plain(model, optimizer, 2 * STEPS)


@way
def clipped_micro_batches(model, optimizer):
    told = []
    for ids in batches(STEPS):
        for part in ids.chunk(2):
            loss = loss_of(model, part)
            loss.backward()
            told.append(loss.detach())
        told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        step(optimizer)
    return told


@way
def accumulated(model, optimizer):
    told = []
    for ids in batches(STEPS):
        with infinity.accumulate(model):
            for part in ids.chunk(2):
                loss = loss_of(model, part)
                loss.backward()
                told.append(loss.detach())
        step(optimizer)
    return told


@way
def stepped_in_the_backward(model, optimizer):
    told = []
    for ids in batches(STEPS):
        loss = loss_of(model, ids)
        with optimizer.step_in_backward():
            loss.backward()
        step(optimizer)
        told.append(loss.detach())
    return told


@way
def scaled(model, optimizer):
    """The first scales overflow."""
    scaler, told = torch.amp.GradScaler("late", init_scale=2.0**126, growth_interval=2), []
    for ids in batches(2 * STEPS):
        loss = loss_of(model, ids)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append(loss.detach())
    return told


@way
def evaluated_and_edited(model, optimizer):
    told = []
    for ids in batches(STEPS):
        told += plain(model, optimizer, 1)
        with torch.no_grad():
            told.append(loss_of(model, ids))
            model.head.weight.mul_(0.99)
        with infinity.full_params(model, ["head.weight"], writeback=True) as params:
            params["head.weight"].mul_(0.99)
    return told


@way
def resumed(model, optimizer):
    told = plain(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        infinity.save_checkpoint(f"{folder}/saved", model, optimizer)
        told += plain(model, optimizer, 1)
        infinity.load_checkpoint(f"{folder}/saved", model, optimizer)
    return told + plain(model, optimizer, 1)


@way
def gradients_edited(model, optimizer):
    told = []
    for ids in batches(STEPS):
        loss = loss_of(model, ids)
        loss.backward()
        for param in model.parameters():
            param.grad.mul_(0.5)
            param.grad.add_(0.001)
        told += [param.grad.float().norm() for param in model.parameters()]
        step(optimizer)
    return told


@way
def two_backwards(model, optimizer):
    told = []
    for ids in batches(STEPS):
        loss = loss_of(model, ids)
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, [model.head.weight], retain_graph=True)
        loss.backward()
        step(optimizer)
        told += [loss.detach(), grad.float().norm()]
    return told


@way
def averaged(model, optimizer):
    average = infinity.ema(model, 0.9)
    told = []
    for _ in range(STEPS):
        told += plain(model, optimizer, 1)
        average.update()
    with average.applied():
        told += [value.clone() for value in model.state_dict().values()]
    return told


@way
def parked(model, optimizer):
    told = plain(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        infinity.park(model, folder)
        return told + plain(model, optimizer)


@way
def on_a_side_stream(model, optimizer):
    with torch.Stream(device=WHERE):
        return [value.cpu() for value in plain(model, optimizer)]


@way
def on_side_streams(model, optimizer):
    """Each block runs on another stream than the one before, and on another one in each step, as a
    user orders them for plain torch."""
    streams = itertools.cycle([torch.Stream(device=WHERE) for _ in range(BLOCKS - 1)])

    def enter(block, args):
        block.here = torch.accelerator.current_stream(WHERE)
        block.stream = next(streams)
        block.stream.wait_stream(block.here)
        args[0].record_stream(block.stream)
        torch.accelerator.set_stream(block.stream)

    def leave(block, args, output):
        if block is model.blocks[1]:
            output.register_hook(fall_behind)
        block.here.wait_stream(block.stream)
        output.record_stream(block.here)
        torch.accelerator.set_stream(block.here)

    def fall_behind(grad):
        """The other streams are idle, so that what they get back is overwritten at once."""
        torch.accelerator.synchronize()
        LATE.put(0, lambda: time.sleep(0.01))

    hooks = [block.register_forward_pre_hook(enter) for block in model.blocks]
    hooks += [block.register_forward_hook(leave) for block in model.blocks]
    # Little is brought ahead, so that it is used soon after it was fetched
    activations = parts_of(model).activations
    copies = activations.home._copies if activations is not None else SimpleNamespace()
    with mock.patch.object(copies, "_most_nbytes", 0, create=activations is None):
        told = plain(model, optimizer) + clipped_micro_batches(model, optimizer)
    for hook in hooks:
        hook.remove()
    return told


# --- runs that are compared ---


def trained(train: Callable, config: dict[str, Any], **form: Any) -> list[torch.Tensor]:
    """Returns what a run read, its weights and its moments."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"device": WHERE, "nvme_paths": [folder], **config}
        model, optimizer = infinity.wrap_model(*made(**form), config)
        try:
            values = [value.cpu() for value in train(model, optimizer)]
            values += [value.cpu().clone() for value in model.state_dict().values()]
            values += [
                value.clone()
                for entry in optimizer.state_dict()["state"].values()
                for value in entry.values()
            ]
        finally:
            infinity.unwrap_model(model, optimizer)
    return values


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def compared(train: Callable, config: dict[str, Any], **form: Any) -> list[bool]:
    """Tells which late runs have the bits of the punctual one."""
    with late_device.never_late(LATE):
        expected = trained(train, config, **form)
    with late_device.delayed(LATE):
        return [same(trained(train, config, **form), expected) for _ in range(LATE_RUNS)]


class Keeps(nn.Linear):
    """Keeps a view of its weight until it is asked for."""

    def forward(self, x):
        self.__dict__["kept"] = self.weight.t()
        return super().forward(x)


class Reads(nn.Module):
    """Reads each view after the unit's last use, and drops it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Keeps(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            y = x = torch.tanh(layer(x))
            for _ in range(6):
                y = torch.tanh(y)
            x = x + 0.1 * (y @ layer.__dict__.pop("kept"))
        return x


def views_read() -> list[bool]:
    """Forwards that read views of weights after their unit's last use, in a window of few units."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        model = infinity.wrap_model(
            Reads(), None, {"device": WHERE, "params": "host", "device_memory": "64KiB"}
        )
        model = model[0] if isinstance(model, tuple) else model
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            told = [
                model(torch.randn(16, WIDTH, generator=generator).to(WHERE)) for _ in range(STEPS)
            ]
        found = [value.cpu() for value in told]
        infinity.unwrap_model(model)
        return found

    with late_device.never_late(LATE):
        expected = run()
    with late_device.delayed(LATE):
        return [all(map(torch.equal, run(), expected)) for _ in range(LATE_RUNS)]


def recomputed() -> list[bool]:
    """On a card that is nearly full, with a link that is not worth sending by."""
    with (
        mock.patch.object(CardMemory, "left_nbytes", lambda self, **how: 2 << 20),
        mock.patch("infinity.core.run.activation_store.SMALLEST_NBYTES", 1),
        mock.patch("infinity.ext.blocks.blocks._send_rate", lambda *_: 1.0),
        mock.patch.object(PlannedBlock, "_refuse", lambda self: sys.exit("a block was refused")),
    ):
        found = compared(longer, {**HOST, "recompute": True})
    return found


class Waves(nn.Module):
    """Saves eight tensors of the size of its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x
        for _ in range(7):
            y = torch.sin(y)
        return x + self.linear(y)


class Wide(nn.Module):
    """Saves two tensors of eight times the size of its input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Attending(nn.Module):
    """Saves the weights that each 64 rows have for each other."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.inner(self.norm(x)).view(-1, 64, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1)
        return x + torch.matmul(y, v).transpose(1, 2).reshape(x.shape)


class Deep(nn.Module):
    def __init__(self, *, checkpoints: bool, block: type[nn.Module] = Waves, count: int = 24):
        super().__init__()
        self.blocks, self.checkpoints = nn.ModuleList(block() for _ in range(count)), checkpoints

    def forward(self, x):
        for block in self.blocks:
            x = (
                torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                if self.checkpoints
                else block(x)
            )
        return x.square().mean()


TENSOR_NBYTES = 512 * WIDTH * 4  # of Deep's


def in_little_room(
    config: dict[str, Any], *, tensors: int = 76, longer: int = 1, checkpoints: bool = False
) -> dict[str, Any]:
    """Trains Deep, which saves 192 tensors, with room for ``tensors`` of them on the card. Returns
    the losses, and what was done with the blocks. ``longer``: the inputs of the first steps have as
    many times fewer rows."""
    torch.manual_seed(SEED)
    model = Deep(checkpoints=checkpoints)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    told, generator = [], torch.Generator().manual_seed(SEED)
    with (
        mock.patch("infinity.core.machine.card_memory.LIBRARIES_NBYTES", 0),
        late_device.with_room(LATE, (tensors + 16) * TENSOR_NBYTES),
    ):
        config = {"device": WHERE, **HOST, "device_memory": 16 * TENSOR_NBYTES, **config}
        model, optimizer = infinity.wrap_model(model, optimizer, config)
        for index in range(2 * STEPS):
            rows = 512 if index >= STEPS else 512 // longer
            loss = model(torch.randn(rows, WIDTH, generator=generator).to(WHERE))
            loss.backward()
            step(optimizer)
            told.append(loss.item())
        stats = infinity.stats(model)
        infinity.unwrap_model(model, optimizer)
    return {"losses": told, "blocks": stats.blocks, "host": stats.tiers["host"].peak_nbytes}


def recomputed_in_little_room(*, longer: int = 1, **config: Any) -> list[Any]:
    """Tells whether it has the losses of torch's checkpoint, and whether blocks were recomputed."""
    right = in_little_room({"activations": "device"}, longer=longer, checkpoints=True)
    found = in_little_room({"recompute": True, **config}, longer=longer)
    return [found["losses"] == right["losses"], found["blocks"]["recomputed_nbytes"] > 0]


KINDS: dict[str, tuple[type[nn.Module], int]] = {
    "waves": (Waves, 40),
    "wide": (Wide, 8),
    "attention": (Attending, 8),
}


def in_tight_room(
    kind: str, config: dict[str, Any], room: int, *, checkpoints: bool = False, **how: Any
) -> tuple[list[float], int, dict[str, int]]:
    """Trains blocks of a ``kind`` with ``room`` bytes of the card (0: all). Returns the losses, the
    most that was taken of the card, and what was done with the blocks. ``shorter``: the first two
    steps have half of the rows; ``micro``: batches of a step; ``compiles``: each block."""
    torch.manual_seed(SEED)
    block, count = KINDS[kind]
    model = Deep(checkpoints=checkpoints, block=block, count=count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    told, generator = [], torch.Generator().manual_seed(SEED)
    with (
        mock.patch("infinity.core.machine.card_memory.LIBRARIES_NBYTES", 0),
        late_device.with_room(LATE, room),
    ):
        LATE.reset_peak()
        before = LATE.live_nbytes()
        model, optimizer = infinity.wrap_model(model, optimizer, {"device": WHERE, **config})
        if how.get("compiles"):
            for each in model.blocks:
                each.compile(backend="eager")
        for index in range(4):
            for _ in range(how.get("micro", 1)):
                rows = 512 if how.get("shorter") and index < 2 else 1024
                loss = model(torch.randn(rows, WIDTH, generator=generator).to(WHERE))
                loss.backward()
                told.append(loss.detach())
            step(optimizer)
        torch.accelerator.synchronize()
        taken, blocks = LATE.peak_nbytes() - before, infinity.stats(model).blocks
        infinity.unwrap_model(model, optimizer)
    return [loss.item() for loss in told], taken, blocks


def in_the_room_of_a_checkpoint(
    kind: str, homes: dict[str, Any], *, most: float = 1.03, **how: Any
) -> list[bool]:
    """Tells whether blocks that may be recomputed have the losses of those inside torch's
    checkpoint, or of a ``micro_batch`` that ``homes`` may have, and are recomputed, with ``most``
    times the room that those take on the card."""
    checkpoints = "micro_batch" not in homes
    right, taken, _ = max(
        (in_tight_room(kind, homes, 0, checkpoints=checkpoints, **how) for _ in range(2)),
        key=lambda found: found[1],
    )
    config = {**homes, "activations": "auto", "recompute": True}
    found, peak, blocks = in_tight_room(kind, config, int(most * taken), **how)
    return [found == right, peak <= most * taken, blocks["recomputed_nbytes"] > 0]


JOBS: dict[str, Callable[[], Any]] = {}


def add(name: str, *given: Any, **form: Any) -> None:
    JOBS[name] = lambda: compared(*given, **form)


for _name, _train in WAYS.items():
    for _homes, _config in {
        "host": HOST,
        "nvme": NVME,
        "window": WINDOW,
        "activations": ACTIVATIONS,
    }.items():
        add(f"{_name}:{_homes}", _train, _config)
for _homes in ("host-nvme", "nvme-host"):
    _params, _optimizer = _homes.split("-")
    add(f"plain:{_homes}", plain, {"params": _params, "optimizer": _optimizer})
add("plain:activations on disk", plain, {**HOST, "activations": "nvme"})
add("plain:another device", plain, {**HOST, "device": "late:1"})
JOBS["plain:views read after a use"] = views_read
JOBS["plain:blocks recomputed"] = lambda: recomputed()
PLANNED_NBYTES = (3 << 20) + 4096  # of the host, for the state of Deep
for _name, _more in {
    "a small host": {"host_memory": PLANNED_NBYTES + 20 * TENSOR_NBYTES},
    "no host": {"host_memory": PLANNED_NBYTES},
    "inputs that grow": {"host_memory": PLANNED_NBYTES, "longer": 128},
}.items():
    JOBS[f"room:{_name}"] = partial(recomputed_in_little_room, **_more)


TIGHT = {**HOST, "activations": "device", "device_memory": "1MiB"}
for _name, _how in {
    "waves": {},
    "wide, inputs that grow": {"shorter": True},
    "waves, two batches a step": {"micro": 2},
    "attention, compiled": {"compiles": True},
    "wide, more room": {"most": 1.6},
}.items():
    _kind = _name.split(",")[0]
    JOBS[f"tight:{_name}"] = partial(in_the_room_of_a_checkpoint, _kind, TIGHT, **_how)


for _name, _most in {"wide, in parts": 1.03, "wide, in parts, more room": 1.6}.items():
    _homes = TIGHT | {"micro_batch": 256}
    JOBS[f"tight:{_name}"] = partial(in_the_room_of_a_checkpoint, "wide", _homes, most=_most)


def kept_at_first() -> list[bool]:
    with mock.patch.object(ActivationPlanner, "first_choice", ActivationChoice.KEEP):
        return in_the_room_of_a_checkpoint("wide", TIGHT)


JOBS["tight:kept at first"] = kept_at_first


def products_kept(choice: ActivationChoice, *, micro: int = 1) -> list[bool]:
    """Tells whether blocks of which only elementwise operations run again have the losses of those
    in torch's checkpoint, late as well, and whether that was done."""
    right, _, _ = in_tight_room("attention", TIGHT, 0, checkpoints=True, micro=micro)
    config = {**HOST, "activations": "auto", "recompute": True}
    choose = lambda blocks, **how: [choice] * len(blocks)
    with mock.patch.object(recompute, "choose", choose), late_device.delayed(LATE):
        found, _, blocks = in_tight_room("attention", config, 0, micro=micro)
    return [found == right, blocks[choice.value] > 0]


for _choice in (ActivationChoice.KEEP_PRODUCTS, ActivationChoice.SEND_PRODUCTS):
    JOBS[f"products:{_choice.value}"] = partial(products_kept, _choice)
    JOBS[f"products:{_choice.value}, two batches"] = partial(products_kept, _choice, micro=2)


def use_by_use(config: dict[str, Any]) -> list[bool]:
    """Tells whether late runs whose tied table's gradients land use by use have the bits of those
    that autograd adds."""
    train = WAYS["clipped_micro_batches"]
    expected = trained(train, config, tied=True)
    with mock.patch.object(tables, "WORTH_NBYTES", 1), late_device.delayed(LATE):
        return [same(trained(train, config, tied=True), expected) for _ in range(LATE_RUNS)]


for _homes, _config in {"host": HOST, "nvme": NVME, "window": WINDOW}.items():
    JOBS[f"tables:{_homes}"] = partial(use_by_use, _config)


class MostlyTable(nn.Module):
    """A table of 2 MiB, and a head that has it or one of its own."""

    rows = 8192

    def __init__(self, *, tied: bool):
        super().__init__()
        self.table, self.layer = nn.Embedding(self.rows, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, self.rows, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.layer(self.table(ids)))


TOKENS = 4
OWN_NBYTES = 6 * TOKENS * MostlyTable.rows * 4  # of the user: logits, their gradients, the loss


def over_the_plan(config: dict[str, Any], *, tied: bool) -> int:
    """Trains MostlyTable in a room of the planned bytes and the user's own. Returns the bytes that
    the allocator gave beyond these, at most."""
    torch.manual_seed(SEED)
    model = MostlyTable(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with tempfile.TemporaryDirectory() as folder, late_device.delayed(LATE):
        torch.accelerator.synchronize()
        before = LATE.live_nbytes()
        LATE.reset_peak()
        config = {"device": WHERE, "nvme_paths": [folder], **config}
        model, optimizer = infinity.wrap_model(model, optimizer, config)
        planned = infinity.stats(model).tiers["device"].planned_nbytes
        with late_device.with_room(LATE, before + planned + OWN_NBYTES - LATE.live_nbytes()):
            for _ in range(STEPS):
                for _ in range(2):
                    ids = torch.randint(0, model.table.num_embeddings, (TOKENS,)).to(WHERE)
                    nn.functional.cross_entropy(model(ids), ids).backward()
                step(optimizer)
            over = LATE.peak_nbytes() - before - planned - OWN_NBYTES
            infinity.unwrap_model(model, optimizer)
    return over


PLANNED = {
    "host": HOST,
    "nvme": NVME,
    "window": {**HOST, "device_memory": "10400KiB"},
    "tiles": {**NVME, "device_memory": "7400KiB", "host_memory": "12MiB"},
}
for _homes, _config in PLANNED.items():
    for _tied in (True, False):
        JOBS[f"planned:{_homes} {'tied' if _tied else 'untied'}"] = partial(
            over_the_plan, _config, tied=_tied
        )


def gradients_are_not_planned() -> int:
    with mock.patch("infinity.core.plan.memory_terms.GRADS_IN_FLIGHT", 0):
        return over_the_plan(HOST, tied=True)


JOBS["planned:without gradients"] = gradients_are_not_planned


def on_a_full_host(**config: Any) -> list[Any]:
    """No budget is given, and the machine has 4 MiB for the engine."""
    with mock.patch("infinity.core.machine.limits.memory_left", lambda: 6 << 20):
        right = in_little_room({"activations": "device"}, checkpoints=True)
        found = in_little_room({"recompute": True, **config})
    recomputed = found["blocks"]["recomputed_nbytes"] > 0
    return [found["losses"] == right["losses"], recomputed, found["host"] <= 4 << 20]


def nothing_is_dropped() -> list[Any]:
    with mock.patch.object(Held, "drop", lambda self: None):
        return recomputed_in_little_room(host_memory=PLANNED_NBYTES)


JOBS["room:a full host"] = on_a_full_host
JOBS["room:nothing is dropped"] = nothing_is_dropped
for _kind in ("reentrant", "not reentrant"):
    add(f"plain:checkpoints, {_kind}", plain, WINDOW, checkpoints=_kind)


def parked_on_the_host(model, optimizer):
    """In turns: brought back by the next forward, by resume, and by parts."""
    told = []
    for number in range(STEPS):
        told += plain(model, optimizer, 1)
        infinity.park(model, to="host", what="optimizer" if number == 2 else "all")
        if number == 1:
            infinity.resume(model)
    return told


def with_kernels(
    config: dict[str, Any], share: float | None = None, train: Callable = clipped_micro_batches
) -> Callable[[], list[bool]]:
    def run() -> list[bool]:
        with contextlib.ExitStack() as held:
            held.enter_context(late_device.kernels(LATE))
            if share is not None:

                def give(own: DeviceFraction, *of_step: Any) -> None:
                    own.value = share

                held.enter_context(mock.patch.object(DeviceFraction, "note", give))
            return compared(train, config)

    return run


for _homes in ("device-device", "device-host", "host-device", "auto-auto"):
    _params, _optimizer = _homes.split("-")
    for _moments in ("fp32", "int8"):
        _config = {"params": _params, "optimizer": _optimizer, "moments": _moments}
        JOBS[f"kernels:{_homes} {_moments}"] = with_kernels(_config)
JOBS["kernels:parked on the host"] = with_kernels(
    {"params": "device", "optimizer": "device"}, train=parked_on_the_host
)
JOBS["kernels:a step that is split"] = with_kernels(HOST, share=0.5)


def plain_torch_between_steps() -> list[bool]:
    """A late run in which the engine stands aside after the first step, beside a punctual one in
    which it does not."""
    config, of = {"params": "device", "optimizer": "device"}, {"dtype": torch.float32}
    began = mock.Mock(side_effect=Aside._stand_aside, autospec=True)
    with late_device.kernels(LATE):
        with late_device.never_late(LATE):
            expected = trained(clipped_micro_batches, config, **of)
        with (
            late_device.delayed(LATE),
            mock.patch.multiple(aside, SKIPPED=0, MEASURED=1, SLOWER=math.inf),
            mock.patch.object(Aside, "_stand_aside", lambda self, job: began(self, job)),
        ):
            found = [
                same(trained(clipped_micro_batches, config, **of), expected)
                for _ in range(LATE_RUNS)
            ]
    return [all(found), began.called]


JOBS["kernels:plain torch between steps"] = plain_torch_between_steps


# --- registered memory ---


def with_quota(share: float, config: dict[str, Any]) -> Callable[[], list[Any]]:
    """A job whose driver registers a ``share`` of what it registers without a quota: whether its
    losses are those without one, how often it was refused, and whether a warning tells that."""

    def run() -> list[Any]:
        with late_device.refusing(LATE, 1 << 40), late_device.never_late(LATE):
            expected = trained(clipped_micro_batches, config)
            quota = int(share * sum(late_device.registered.values()))
        with (
            late_device.refusing(LATE, quota) as refused,
            late_device.delayed(LATE),
            mock.patch.object(accelerator.logger, "warning") as warned,
        ):
            late = trained(clipped_micro_batches, config)
        return [same(late, expected), len(refused), warned.call_count]

    return run


for _name, _config in {"host": HOST, "nvme": NVME, "activations": ACTIVATIONS}.items():
    for _share in (0.0, 0.5, 1.0):
        JOBS[f"quota:{_share} of what is registered, {_name}"] = with_quota(_share, _config)


def registered_in_turn() -> list[bool]:
    """Whether the state is registered only once a part of it passes the device."""

    def train(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found.append(sum(late_device.registered.values()))
        return plain(model, optimizer)

    found: list[int] = []
    with late_device.refusing(LATE, 1 << 40), late_device.kernels(LATE):
        trained(train, HOST)
        found.append(sum(late_device.registered.values()))
    with late_device.refusing(LATE, 1 << 40):
        with_kernels(HOST, share=0.5, train=train)()
        found.append(sum(late_device.registered.values()))
    return [found[1] == found[0], found[-1] > 2 * found[0]]


JOBS["quota:state is registered as it passes"] = registered_in_turn


# --- what the device waits for ---


def waits_for_launches() -> list[Any]:
    """Whether a punctual device is told to wait for launches, by its share and in words, and
    whether one that is behind during a whole forward is."""
    model, optimizer = infinity.wrap_model(*made(), {"device": WHERE, **HOST})
    with late_device.never_late(LATE):
        plain(model, optimizer)
        share = infinity.stats(model).shares["launches"]
    gate = threading.Event()
    extensions = parts_of(model).engine.job.extensions
    counter = next(each for each in extensions if isinstance(each, Launches))
    counter.seconds += 1e6  # more than anything else takes on a busy machine
    said = infinity.stats(model).bottleneck
    before, ids = counter.seconds, next(batches(1)).to(WHERE)
    LATE.put(0, gate.wait)
    opens = threading.Timer(60, gate.set)  # if the forward should wait for the device
    opens.start()
    loss = loss_of(model, ids)
    behind = counter.seconds - before
    opens.cancel()
    gate.set()
    loss.backward()
    step(optimizer)
    infinity.unwrap_model(model, optimizer)
    return [share > 0, "launching" in said, behind == 0]


JOBS["launches:punctual, and behind"] = waits_for_launches


# --- planted faults ---


def with_fault(owner: Any, name: str, fault: Any, train: Callable, config: dict) -> Callable:
    """A job that trains until a run differs or raises, four times at most."""

    def run() -> list[bool]:
        with late_device.never_late(LATE):
            expected = trained(train, config)
        found = []
        with late_device.delayed(LATE), mock.patch.object(owner, name, fault):
            for _ in range(4):
                try:
                    found.append(same(trained(train, config), expected))
                except (InfinityError, RuntimeError):
                    found.append(False)
                if not found[-1]:
                    break
        return found

    return run


def _free_at_once(self, storage, nbytes, *, after=()):
    storage_guard.open(storage)
    storage.resize_(nbytes)
    if not nbytes:
        storage_guard.close(storage)


FAULTS = {
    "none": (in_flight.InFlight, "keep", in_flight.InFlight.keep, plain, HOST),
    "gradients are freed while they are sent": (
        in_flight.InFlight,
        "keep",
        lambda self, *given, **more: None,
        plain,
        HOST,
    ),
    "gradients are sent before they are computed": (
        accelerator.Accelerator,
        "now",
        lambda self: devices.PAST,
        plain,
        HOST,
    ),
    "weights are freed while they are used": (
        accelerator.Accelerator,
        "resize",
        _free_at_once,
        plain,
        WINDOW,
    ),
    "weights are used before they came": (
        accelerator._DeviceEvent,
        "precede",
        lambda self: None,
        plain,
        HOST,
    ),
    "gradients are freed to the stream that made them": (
        in_flight,
        "note_used",
        lambda *tensors: None,
        on_side_streams,
        HOST,
    ),
    "activations are freed to the stream that fetched them": (
        activation_home.ActivationHome,
        "bring",
        activation_home.ActivationHome._load,
        on_side_streams,
        ACTIVATIONS,
    ),
    "updates do not wait for gradients": (
        accelerator.Accelerator,
        "ticket",
        lambda self, events: None,
        plain,
        HOST,
    ),
}
for _name, _fault in FAULTS.items():
    JOBS[f"fault:{_name}"] = with_fault(*_fault)


# --- out of memory ---


def out_of_memory(config: dict[str, Any], samples: int) -> Callable[[], dict[str, int]]:
    """Makes one allocation of the second step fail, each time another one; the step is repeated.
    Counts how it ended."""

    def run() -> dict[str, int]:
        expected, asked = _with_failing(config, None)
        ends = collections.Counter()
        for number in range(0, asked, max(1, asked // samples)):
            found, _ = _with_failing(config, number)
            is_same = not isinstance(found, str) and same(found, expected)
            ends["the same bits" if is_same else found if isinstance(found, str) else "others"] += 1
        return dict(ends)

    return run


def _with_failing(config: dict[str, Any], number: int | None) -> tuple[Any, int]:
    asked = 0

    def train(model, optimizer):
        nonlocal asked
        told = []
        for index, ids in enumerate(batches(STEPS)):
            before = LATE.counts()["allocations"]
            if index == 1 and number is not None:
                LATE.fail_in(number)
            try:
                told.append(_one(model, optimizer, ids))
            except (torch.OutOfMemoryError, InfinityError):
                LATE.fail_in(-1)
                optimizer.zero_grad()
                told.append(_one(model, optimizer, ids))
            LATE.fail_in(-1)
            asked = LATE.counts()["allocations"] - before if index == 1 else asked
        return told

    try:
        return trained(train, config), asked
    except (torch.OutOfMemoryError, InfinityError) as error:
        return type(error).__name__, asked


def _one(model: nn.Module, optimizer: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    step(optimizer)
    return loss.detach()


JOBS["memory:host"] = out_of_memory({**WINDOW, "activations": "host"}, 40)
JOBS["memory:nvme"] = out_of_memory(NVME, 20)


def evaluated_beside_a_backward() -> bool:
    """Calls backward in one thread while another is in the middle of a forward. Tells whether a
    gradient landed before that forward was over."""
    model, optimizer = infinity.wrap_model(*made(), {**HOST, "device": WHERE})
    inside, landed, found = threading.Event(), threading.Event(), []

    def note(param: torch.Tensor) -> None:
        landed.set()

    def look(*_: Any) -> None:
        inside.set()
        found.append(landed.wait(1))

    def evaluate() -> None:
        with torch.no_grad(), model.blocks[1].register_forward_hook(look):
            model(ids.to(WHERE))

    ids, thread = next(batches(1)), threading.Thread(target=evaluate)
    loss = loss_of(model, ids)
    model.blocks[-1].down.weight.register_post_accumulate_grad_hook(note)
    thread.start()
    assert inside.wait(60)
    loss.backward()
    thread.join()
    assert landed.is_set()
    return found[0]


def not_waiting() -> bool:
    with mock.patch.object(one_thread, "wait_for_others"):
        return evaluated_beside_a_backward()


JOBS["threads:a forward beside a backward"] = evaluated_beside_a_backward
JOBS["threads:nobody waits"] = not_waiting


def main(out: str, names: list[str]) -> None:
    with open(out, "w") as file:
        for name in names:
            try:
                answer = JOBS[name]()
            except Exception as error:  # noqa: BLE001 - the test tells
                answer = f"{type(error).__name__}: {error}"
            file.write(json.dumps([name, answer]) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(JOBS))
