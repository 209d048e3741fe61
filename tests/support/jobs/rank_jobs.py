"""Jobs that every rank of a launch runs (see `ranks`). Started by torchrun with the folder of the
launch."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))
import models
import threaded_device
from fake_cufile import FakeCuFile
from gpu_stand_in import load_stand_in
from inside import parts_of
from ranks import serve, told

import infinity
from infinity.core.machine import accelerator, device
from infinity.core.step.device_fraction import DeviceFraction
from infinity.ext.gpu_direct import direct_storage


def home_nbytes(model: torch.nn.Module) -> int:
    """Counts the bytes of this rank's arrays at home."""
    flat_params = [flat for unit in parts_of(model).units for flat in unit.flat_params]
    return sum(array.nbytes for flat in flat_params for array in flat.arrays.values())


def build(seed: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    return models.transformer(seed, dropout=0.0).to(dtype)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return models.tokens(1000 * step + 100 * micro + rank)


def in_turn(
    model: nn.Module,
    optimizer,
    world: int,
    *,
    steps: int,
    clip: float | None = None,
    first: int = 0,
) -> list[float]:
    """What one process does to be equal to ``world`` ranks: everyone's batch, one after the
    other."""
    norms = []
    for step in range(first, first + steps):
        for rank in range(world):
            (models.loss_of(model, batch(step, 0, rank)) / world).backward()
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train(
    model: nn.Module,
    optimizer,
    *,
    steps: int = 3,
    micro: int = 1,
    clip: float | None = None,
    first: int = 0,
) -> tuple[list[float], list[float]]:
    """This rank's losses, and the norms."""
    losses, norms = [], []
    for step in range(first, first + steps):
        for turn in range(micro):
            loss = models.loss_of(model, batch(step, turn, dist.get_rank()))
            (loss / micro).backward()
            losses.append(loss.item())
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def mesh_of(shape: tuple[int, ...] | list[int] | None, names: tuple[str, ...] | None):
    """A mesh of a shape, or of ranks in an order of one's own."""
    if isinstance(shape, list):
        return dist.device_mesh.DeviceMesh("cpu", shape, mesh_dim_names=names)
    return (
        None
        if shape is None
        else dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    )


def cloned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def moments(state: dict) -> dict[str, torch.Tensor]:
    """The moments in an optimizer's state dict, by parameter and name."""
    return {
        f"{i}.{name}": value for i, entry in state["state"].items() for name, value in entry.items()
    }


# --- jobs ---


def parity(
    config: dict,
    dtype=torch.float32,
    micro: int = 1,
    clip=None,
    shape=None,
    names=None,
    steps: int = 3,
) -> dict[str, Any]:
    """Trains; every rank but the first starts from other weights, which must not matter."""
    model = build(3 if dist.get_rank() == 0 else 4, dtype)
    model, optimizer = infinity.wrap_model(model, adamw(model), config, mesh=mesh_of(shape, names))
    losses, norms = train(model, optimizer, steps=steps, micro=micro, clip=clip)
    stats = infinity.stats(model)
    found = {
        "losses": losses,
        "norms": norms,
        "weights": cloned(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "stats": stats.as_dict(),
        "home": home_nbytes(model),
        "swap": models.leftovers(Path(config["nvme_paths"][0])) if config.get("nvme_paths") else [],
    }
    plain, plain_optimizer = infinity.unwrap_model(model, optimizer)
    found["unwrapped"] = cloned(plain.state_dict())
    return found


def elsewhere(
    nodes: bool = False,
    kernels: str | None = None,
    share: float = 0.0,
    cufile: str | None = None,
    **arguments,
) -> dict[str, Any]:
    """On a device whose memory the processor does not use, with late copies and groups of its own
    for bulk bytes; with ``kernels`` (a file) and a share of the host's state to step; with a way
    past the host's memory (``cufile``: a file).
    """
    if cufile is not None:
        library, direct_storage.missing = FakeCuFile(Path(cufile)), lambda folders: []
        library.reset()
        library.set(short=2)
    accelerator.KINDS["cpu"] = _Elsewhere
    _Elsewhere.loaded = load_stand_in(Path(kernels)) if kernels else None
    DeviceFraction.note = lambda self, *of_step: setattr(self, "value", share)
    try:
        return in_nodes(**arguments) if nodes else parity(**arguments)
    finally:
        if cufile is not None:
            library.set(driver=5001)
        accelerator.KINDS["cpu"] = device.Device


class _Elsewhere(threaded_device.ThreadedDevice):
    """Copies in run at once, since they start collectives; what leaves is late at random."""

    is_host, backend = False, "gloo"
    loaded = None

    def __init__(self, where, traffic):
        super().__init__(where, traffic)
        self.kernels = self.loaded

    def put(self, queue, work, **more):
        if queue == "in":
            for moment in more.get("behind", ()):
                moment.wait()
            return device.Device.put(self, queue, work, transfer=more.get("transfer"))

        def late() -> None:
            time.sleep(random.choice([0, 0.0005, 0.002]))
            work()

        return super().put(queue, late, **more)


def in_nodes(config: dict) -> dict[str, Any]:
    """As if torchrun had started two ranks on each of two machines."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return parity(config)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())


def restless_in_nodes(config: dict, path: str) -> dict[str, Any]:
    """The same on what seem to be two machines."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return restless(config, path)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())


def gradients(shard: str, home: str, folder: str) -> dict[str, Any]:
    """Everything that torch lets one do with ``p.grad``, after one backward."""
    config = models.at_home(home, home, Path(folder)) | {"shard": shard}
    model = build()
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    found: dict[str, Any] = {}
    models.loss_of(model, batch(0, 0, dist.get_rank())).backward()
    params = dict(model.named_parameters())
    found["values"] = {name: p.grad.clone() for name, p in params.items()}
    found["norm"] = [
        torch.nn.utils.get_total_norm([p.grad for p in params.values()], order).item()
        for order in (2.0, 1.0, float("inf"))
    ]
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    found["clipped"] = {name: p.grad.clone() for name, p in params.items()}
    params["blocks.0.norm1.weight"].grad.mul_(2.0).add_(1.0)
    found["changed"] = params["blocks.0.norm1.weight"].grad.clone()
    params["blocks.1.norm1.weight"].grad = torch.full_like(
        found["values"]["blocks.1.norm1.weight"], 7.0
    )
    found["set"] = params["blocks.1.norm1.weight"].grad.clone()
    optimizer.zero_grad(set_to_none=False)
    found["zeros"] = sum(p.grad.abs().sum().item() for p in params.values())
    optimizer.zero_grad()
    found["none"] = [p.grad for p in params.values()]
    models.loss_of(model, batch(0, 0, dist.get_rank())).backward()
    found["view"] = params["positions"].grad.view(-1).clone()
    optimizer.zero_grad()
    infinity.unwrap_model(model, optimizer)
    return found


def overflow() -> list[bool]:
    """GradScaler with an infinite gradient on one rank: every rank skips the step."""
    model = build()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = cloned(model.state_dict())
    loss = models.loss_of(model, batch(0, 0, dist.get_rank()))
    scaler.scale(loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    skipped = not models.differing(cloned(model.state_dict()), before)
    scale = scaler.get_scale()
    optimizer.zero_grad()
    infinity.unwrap_model(model, optimizer)
    return [skipped, scale == 2.0]


class Branching(nn.Module):
    """Ranks use parameters that others do not: ``extra`` after all blocks, so that units still come
    in one order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.scale, self.unused = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor, scaled: bool) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.scale if scaled else x).square().mean()


def unused(shard: str) -> dict[str, Any]:
    """A parameter with a gradient on the first rank only, and one with none on any."""
    torch.manual_seed(0)
    model = Branching()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host", "shard": shard}
    )
    found = []
    for step in range(3):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x, dist.get_rank() == 0).backward()
        found.append({"scale": model.scale.grad.clone(), "unused": model.unused.grad})
        optimizer.step()
        optimizer.zero_grad()
    weights = cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return {"grads": found, "weights": weights}


def diverging() -> str:
    """Rank 0 runs a block that the others skip: an error that names both, on every rank, and the
    job can go on."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    root = nn.Module()
    root.blocks = model
    root.forward = lambda x, skipped: [
        x := block(x) for i, block in enumerate(model) if i != skipped
    ][-1].sum()
    root, optimizer = infinity.wrap_model(
        root, adamw(root), {"params": "host", "optimizer": "host"}
    )
    try:
        root(torch.ones(2, 64), None if dist.get_rank() == 0 else 1)
    except infinity.InfinityError as error:
        said = f"{type(error).__name__}: {error}"
    root(torch.ones(2, 64), None).backward()
    optimizer.step()
    infinity.unwrap_model(root, optimizer)
    return said


def left_out(shard: str, at: int) -> dict[str, Any]:
    """Rank 1 leaves a block out in step ``at``, whose every block is a unit; one process beside it,
    given both batches."""
    world = dist.get_world_size()

    def make() -> nn.Module:
        torch.manual_seed(0)
        root = nn.Module()
        root.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        root.forward = lambda x, skipped: (
            [x := block(x) for i, block in enumerate(root.blocks) if i != skipped][-1]
            .square()
            .sum()
        )
        return root

    def loss(model: nn.Module, step: int, of_rank: int) -> torch.Tensor:
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * step + of_rank))
        return model(x, 1 if step == at and of_rank == 1 else None) / world

    model = make()
    config = {"params": "host", "optimizer": "host", "shard": shard, "units": ["Linear"]}
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.01), config
    )
    plain = make()
    single = torch.optim.SGD(plain.parameters(), lr=0.01)
    said = []
    for step in range(5):
        try:
            (loss(model, step, dist.get_rank()) * world).backward()
        except infinity.UsageError as error:
            said.append((step, str(error)))
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        for of_rank in range(world):
            loss(plain, step, of_rank).backward()
        single.step()
        single.zero_grad()
    weights = cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    expected = cloned(plain.state_dict())
    return {
        "said": said,
        "off": max(float((weights[n] - expected[n]).abs().max()) for n in expected),
    }


class Restless(nn.Module):
    """Blocks that change or look at their own weights in the forward, and a parameter that is used
    first and last."""

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _ = self.bias.data.abs().max()
            with torch.no_grad():
                self.weight.data.clamp_(-0.1, 0.1)
            return torch.tanh(super().forward(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(64, 64) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[4].bias * self.scale
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).square().mean()


def restless(config: dict, path: str) -> dict[str, Any]:
    """Two micro-batches, the second with its step inside; a checkpoint loaded over a forward; one
    process beside it."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def data(step: int, micro: int, of_rank: int) -> torch.Tensor:
        return torch.randn(
            4, 64, generator=torch.Generator().manual_seed(100 * step + 10 * micro + of_rank)
        )

    def run(model: nn.Module, optimizer, ranks: list[int], steps: range) -> None:
        for step in steps:
            for micro in range(2):
                with (
                    optimizer.step_in_backward()
                    if micro and len(ranks) == 1
                    else contextlib.nullcontext()
                ):
                    for of_rank in ranks:
                        (model(data(step, micro, of_rank)) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = Restless()
    plain = copy.deepcopy(model)
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    run(model, optimizer, [rank], range(2))
    infinity.save_checkpoint(path, model, optimizer)
    run(model, optimizer, [rank], range(2, 3))
    with torch.no_grad():
        model(data(9, 0, 0))
    infinity.load_checkpoint(path, model, optimizer)
    run(model, optimizer, [rank], range(2, 4))
    weights = cloned(model.state_dict())
    counts = {state["step"].item() for state in optimizer.state_dict()["state"].values()}
    infinity.unwrap_model(model, optimizer)
    run(plain, adamw(plain), list(range(world)), range(4))
    off = max(
        (weights[name] - value).abs().max().item() for name, value in plain.state_dict().items()
    )
    return {"weights": weights, "off": off, "counts": counts}


class Uneven(nn.Module):
    """Blocks with a part that some ranks skip, and a parameter that nobody uses."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)
            self.never = nn.Parameter(torch.ones(512))

        def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
            x = torch.tanh(self.always(x))
            return x if skips else x + self.sometimes(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))

    def forward(self, x: torch.Tensor, skipped: int | None) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, i == skipped)
        return x.square().mean()


def uneven(
    shard: str,
    home: str,
    folder: str,
    shape: tuple[int, ...] | None = None,
    names: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Another part is skipped on every rank and step, in the least device memory that works; one
    process beside it."""
    import re

    rank, world, mesh = dist.get_rank(), dist.get_world_size(), mesh_of(shape, names)
    config = models.at_home(home, home, Path(folder)) | {"shard": shard}

    def data(step: int, of_rank: int) -> tuple[torch.Tensor, int | None]:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + of_rank))
        return x, (step + 3 * of_rank) % 6 if step else None

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Uneven()

    model = make()
    try:
        infinity.wrap_model(model, adamw(model), config | {"device_memory": 1}, mesh=mesh)
    except infinity.CapacityError as error:
        least = int(re.search(r"works here is [^()]*\((\d+) bytes", str(error))[1])
    model, optimizer = infinity.wrap_model(
        model, adamw(model), config | {"device_memory": least}, mesh=mesh
    )
    for step in range(6):
        model(*data(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    tier = infinity.stats(model).as_dict()["tiers"]["device"]
    weights = cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    plain = make()
    single = adamw(plain)
    for step in range(6):
        for of_rank in range(world):
            (plain(*data(step, of_rank)) / world).backward()
        single.step()
        single.zero_grad()
    off = max(
        (weights[name] - value).abs().max().item() for name, value in plain.state_dict().items()
    )
    return {"weights": weights, "off": off, "within": tier["peak_nbytes"] <= tier["planned_nbytes"]}


def too_large_a_layer(
    shape: tuple[int, ...] | None = None,
    names: tuple[str, ...] | None = None,
    shard: str = "parameters",
) -> str:
    """Wraps a model with a layer that alone would run in tiles, in half of the device memory that
    it needs. Returns what is raised."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096))
    config = {"params": "host", "optimizer": "host", "device_memory": "1MiB", "shard": shard}
    return told(
        lambda: infinity.wrap_model(model, adamw(model), config, mesh=mesh_of(shape, names))
    )


def apart(how: str) -> dict[str, str]:
    """Ranks that do not do the same: what each is told. Nothing here may end in a hang, or in no
    word at all."""
    model = build()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    first = dist.get_rank() == 0
    train(model, optimizer, steps=1)
    said = "nothing"
    try:
        if how == "a rank skips a step":
            models.loss_of(model, batch(1, 0, 0)).backward()
            if first:
                optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, steps=1)
        elif how == "learning rates differ":
            optimizer.param_groups[0]["lr"] = 0.1 if first else 0.2
            train(model, optimizer, steps=1)
        elif how == "a rank has another micro-batch":
            train(model, optimizer, steps=1, micro=3 if first else 2)
        elif how == "other parameters are read":
            with infinity.full_params(model, f"blocks.{0 if first else 1}.feed.0.weight"):
                pass
        elif how == "one rank edits":
            with infinity.full_params(model, "positions", writeback=True) as params:
                if first:
                    params["positions"].zero_()
        elif how == "other values are loaded":
            state = build(3 if first else 4).state_dict()
            model.load_state_dict(state)
        elif how == "other gradients are set":
            models.loss_of(model, batch(1, 0, 0)).backward()
            model.positions.grad = torch.full_like(model.positions.grad, float(dist.get_rank()))
        elif how == "one rank saves":
            if first:
                infinity.save_checkpoint("/nowhere/at/all", model, optimizer)
            train(model, optimizer, steps=1)
    except (
        infinity.InfinityError,
        RuntimeError,
    ) as error:  # load_state_dict puts what went wrong into one of torch's
        said = f"{type(error).__name__}: {error}"
    return {"said": said}


def odd_buffers_and_empty_parameters(path: str) -> list[str]:
    """An expanded buffer does not stop a wrap; a parameter without elements is saved and loaded."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.register_buffer("expanded", torch.ones(1).expand(4))
    model.empty = nn.Parameter(torch.empty(0, 3))
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = cloned(model.state_dict())
    infinity.save_checkpoint(path, model, optimizer)
    infinity.load_checkpoint(path, model, optimizer)
    different = models.differing(weights, cloned(model.state_dict()))
    infinity.unwrap_model(model, optimizer)
    return different


def retried(shard: str) -> dict[str, Any]:
    """A backward that raises half-way on all ranks, again and again, then a whole one: the same
    bits, and no charge left."""
    found = []
    for failures in (0, 4):
        model = build()
        model, optimizer = infinity.wrap_model(
            model, adamw(model), {"params": "host", "optimizer": "host", "shard": shard}
        )
        fails = [False]

        def fail(grad: torch.Tensor, fails=fails) -> None:
            if fails[0]:
                raise ValueError("the user's own")

        model.blocks[2].register_forward_hook(
            lambda module, args, output, fail=fail: output.register_hook(fail) and None
        )
        charges = []
        for step in range(3):
            for _ in range(failures):
                fails[0] = True
                try:
                    models.loss_of(model, batch(step, 0, dist.get_rank())).backward()
                except ValueError:
                    optimizer.zero_grad()
                fails[0] = False
            train(model, optimizer, steps=1, first=step)
            charges.append(parts_of(model).ledger.accounts["device"].charged_nbytes)
        found.append((cloned(model.state_dict()), charges))
        infinity.unwrap_model(model, optimizer)
    return {
        "different": models.differing(found[0][0], found[1][0]),
        "charges": [charges for _, charges in found],
    }


def other_values(same: bool) -> list[str]:
    """What the engine says of models that have the same values on all ranks, or values of each
    rank's own."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener()
    logging.getLogger("infinity").addHandler(listener)
    model = build(3 if same else 3 + dist.get_rank())
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    logging.getLogger("infinity").removeHandler(listener)
    infinity.unwrap_model(model, optimizer)
    return [text for text in said if "other values on other ranks" in text]


def refused(what: str) -> dict[str, Any]:
    """Things given to one rank only: an error on every rank; afterwards a right wrap works."""
    rank = dist.get_rank()
    model = build()
    config: dict[str, Any] = {"params": "host", "optimizer": "host"}
    optimizer = adamw(model)
    arguments: dict[str, Any] = {}
    if what == "config" and rank == 1:
        config["moments"] = "bf16"
    elif what == "model" and rank == 1:
        model = models.transformer(3, dropout=0.0, blocks=3)
        optimizer = adamw(model)
    elif what == "budget" and rank == 1:
        config["host_memory"] = 1000
    elif what == "budget everywhere":
        config["host_memory"] = 1000
    elif what == "folder":
        config |= {"params": "nvme", "nvme_paths": ["/nowhere" if rank == 1 else "."]}
    elif what == "bad model" and rank == 1:
        optimizer = torch.optim.AdamW(build().parameters())
    elif what == "axis":
        arguments["mesh"] = dist.device_mesh.init_device_mesh(
            "cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "x")
        )
    try:
        infinity.wrap_model(model, optimizer, config, **arguments)
        said = None
    except infinity.InfinityError as error:
        said = f"{type(error).__name__}: {error}"
    untouched = (
        all(type(p) is nn.Parameter for p in model.parameters()) and not model._forward_hooks
    )
    model = build()
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    losses, _ = train(model, optimizer, steps=1)
    infinity.unwrap_model(model, optimizer)
    return {"said": said, "untouched": untouched, "losses": losses}


def generate() -> dict[str, Any]:
    """Inference: a transformers model generates on every rank with the weights in shards."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(1, 9).unsqueeze(0)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    size = sum(p.nbytes for p in model.parameters())
    model, _ = infinity.wrap_model(model, None, {"params": "host"})
    ours = model.generate(ids, max_new_tokens=12, do_sample=False)
    home = home_nbytes(model)
    infinity.unwrap_model(model)
    return {"same": torch.equal(plain, ours), "share": home / size}


def stepped_in_backward(shard: str) -> dict[str, Any]:
    """Units stepped while the last backward goes on: the same bits."""
    found = []
    for inside in (False, True):
        model = build()
        model, optimizer = infinity.wrap_model(
            model, adamw(model), {"params": "host", "optimizer": "host", "shard": shard}
        )
        for step in range(3):
            loss = models.loss_of(model, batch(step, 0, dist.get_rank()))
            if inside:
                with optimizer.step_in_backward():
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(cloned(model.state_dict()))
        infinity.unwrap_model(model, optimizer)
    return {"different": models.differing(*found)}


def one_falls(how: str, folder: str, steps: int = 50) -> None:
    """Rank 1 ends in the middle of training, in some way; what the others raise is on their
    stderr."""
    config = models.at_home("nvme", "nvme", Path(folder))
    model = build()
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    train(model, optimizer, steps=2)
    infinity.save_checkpoint(Path(folder) / "checkpoint", model, optimizer, extra={"step": 2})
    Path(folder, "saved").touch()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("the user's own")
        elif how == "raises in a forward":
            model.blocks[1].register_forward_pre_hook(lambda *_: {}["no such key"])
        elif how == "raises in a backward":
            model.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
        elif how == "is interrupted":
            raise KeyboardInterrupt
        elif how == "has no memory":
            model.blocks[1].register_forward_hook(
                lambda *_: (_ for _ in ()).throw(MemoryError("2 GiB of 1 GiB"))
            )
        elif how == "hangs":
            time.sleep(600)
        elif how == "disk":
            (path,) = models.swap_files(folder)
            with open(path, "r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
    start = time.monotonic()
    try:
        train(model, optimizer, steps=steps, first=2)
    finally:
        Path(folder, f"took.{dist.get_rank()}").write_text(str(time.monotonic() - start))


def falls_beside_a_save(who: int, how: str, folder: str) -> None:
    """Rank ``who`` ends in some way while its thread holds its files of a save."""
    from infinity.ext.checkpoint import background_save
    from infinity.ranks import failure_report

    model, write = build(), background_save.write_files
    model, optimizer = infinity.wrap_model(
        model, adamw(model), {"params": "host", "optimizer": "host"}
    )
    path = Path(folder) / "checkpoint"
    infinity.save_checkpoint(path, model, optimizer, extra="first")
    falls = dist.get_rank() == who

    def write_late(*given: Any, **more: Any) -> Any:
        time.sleep((1 if how == "raises" else 60) * falls)
        return write(*given, **more)

    background_save.write_files = write_late
    if how == "cannot be seen":  # as on another machine
        failure_report.processes, background_save.LEFT_SECONDS = dict, 1.0
    infinity.save_checkpoint(path, model, optimizer, extra="second", wait=False)
    if falls and how == "raises":
        raise SystemExit("the user's own")
    if falls:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(model, optimizer, steps=50)
    except infinity.InfinityError as error:  # as a script ends: its threads are waited for
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def restarted(folder: str) -> dict[str, Any]:
    """A job as torchrun restarts it: goes on from the checkpoint if there is one; rank 1 is killed
    the first time."""
    config = models.at_home("host", "host", Path(folder))
    model = build()
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    path, first = Path(folder) / "checkpoint", 0
    if path.exists():
        first = infinity.load_checkpoint(path, model, optimizer)["step"]
    for step in range(first, 6):
        train(model, optimizer, steps=1, first=step)
        infinity.save_checkpoint(path, model, optimizer, extra={"step": step + 1})
        if step == 2 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    weights = cloned(model.state_dict())
    infinity.unwrap_model(model, optimizer)
    return {"first": first, "weights": weights}


def counted_apart(keys: bool) -> int:
    """A step on ranks whose torchruns have counted other numbers of restarts. ``keys``: those of
    the store have the count in them."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = count = str(dist.get_rank())
    plain = dist.PrefixStore
    if keys:
        dist.PrefixStore = lambda name, store: plain(f"{count}/{name}", store)
    model = build()
    model, optimizer = infinity.wrap_model(model, adamw(model), {"params": "host"})
    train(model, optimizer, steps=1)
    infinity.unwrap_model(model, optimizer)
    return 1


if __name__ == "__main__":
    serve(globals())
