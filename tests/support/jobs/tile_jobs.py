"""Jobs of ranks whose layers run in tiles (see `ranks`), and the same in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import models
import rank_jobs
import torch
import torch.distributed as dist
from inside import parts_of
from torch import nn

import infinity
from infinity.core.machine import accelerator, device
from infinity.core.machine.tiers import Tier
from infinity.ext.tiles import over_ranks, tiles

WORDS, WIDTH, STEPS = 2100, 64, 3
MIB = 1024 * 1024


class Decoder(nn.Module):
    """A table, a block and a head, as ZeRO-Infinity's models have them."""

    def __init__(self, *, tied: bool, dtype: torch.dtype):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 1500), nn.Linear(1500, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        if tied:
            self.head.weight = self.table.weight
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        return self.head(hidden + self.down(torch.relu(self.up(self.norm(hidden)))))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    ids = torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(9 * step + rank))
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def config_of(home: str, folder: str | None, **more: Any) -> dict[str, Any]:
    """A budget in which tiles of ranks have the least size."""
    return models.at_home(home, home, folder) | {"device_memory": "640KiB"} | more


def train(
    config: dict,
    ranks: Iterable[int],
    *,
    tied: bool = False,
    bf16: bool = False,
    micro: int = 1,
    mesh: Any = None,
) -> dict[str, Any]:
    """Trains with the batches of ``ranks``, one after the other. Returns what came of it."""
    torch.manual_seed(1)
    model = Decoder(tied=tied, dtype=torch.bfloat16 if bf16 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = infinity.wrap_model(model, optimizer, config, mesh=mesh)
    ranks, norms, grads = list(ranks), [], {}
    for step in range(STEPS):
        for part in range(micro):
            for rank in ranks:
                (loss_of(model, step * micro + part, rank) / len(ranks)).backward()
        if not step:
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(float(infinity.clip_grad_norm_(optimizer, 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    tier = infinity.stats(model).tiers[Tier.DEVICE]
    found = {
        "tiled": {
            size.name: size.at_once_nbytes
            for size in parts_of(model).planned.sizes
            if size.at_once_nbytes
        },
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "grads": grads,
        "norms": norms,
        "collectives": infinity.stats(model).as_dict()["collectives"],
        "within": tier.peak_nbytes <= tier.planned_nbytes <= tier.budget_nbytes,
    }
    infinity.unwrap_model(model, optimizer)
    return found


def over_all(config: dict, piece: int | None = None, **more: Any) -> dict[str, Any]:
    """Trains on this rank. ``piece``: bytes of gradients that a rank receives at once."""
    before = over_ranks.PIECE_NBYTES
    over_ranks.PIECE_NBYTES = piece or before
    try:
        return train(config, [dist.get_rank()], **more)
    finally:
        over_ranks.PIECE_NBYTES = before


def in_replicas(config: dict, shards: int, **more: Any) -> dict[str, Any]:
    """Trains on two replicas of ``shards`` ranks. Two ranks have a batch each; of four, those of
    one shard have the same."""
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (2, shards), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return train(config, [dist.get_rank() % 2], mesh=mesh, **more)


def elsewhere(config: dict) -> dict[str, Any]:
    """Trains on a device whose memory the processor does not use."""
    accelerator.KINDS["cpu"] = rank_jobs._Elsewhere
    try:
        return over_all(config)
    finally:
        accelerator.KINDS["cpu"] = device.Device


def unaveraged(config: dict, **more: Any) -> dict[str, Any]:
    """The same where each rank lands its own gradient."""
    before = tiles.average
    tiles.average = lambda traffic, flat_param, begin, grad, what: grad
    try:
        return over_all(config, **more)
    finally:
        tiles.average = before


def least_device(dtype: torch.dtype = torch.bfloat16, tp: int = 1) -> int:
    """The least ``device_memory`` that is accepted for four blocks of two Linears of 8 MiB."""
    size, mesh = 2048, None
    model = nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(size, size, bias=False, dtype=dtype),
                nn.Linear(size, size, bias=False, dtype=dtype),
            )
            for _ in range(4)
        )
    )
    if tp > 1:
        over = (dist.get_world_size() // tp, tp)
        mesh = dist.device_mesh.init_device_mesh("cpu", over, mesh_dim_names=("dp", "tp"))
        plan = {f"{block}.{at}": ("colwise", "rowwise")[at] for block in range(4) for at in (0, 1)}
        infinity.parallel.tensor_parallel(model, mesh["tp"], plan, quiet=True)
    low, high = 0, 64 * MIB
    while high - low > 16 * 1024:
        middle = (low + high) // 2
        try:
            wrapped = infinity.wrap_model(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                {"params": "host", "optimizer": "host", "device_memory": middle},
                mesh=mesh,
            )
        except infinity.CapacityError:
            low = middle
            continue
        infinity.unwrap_model(*wrapped)
        high = middle
    return high


def hooked(config: dict) -> str:
    """What a rank is told that has a hook on a weight in tiles."""
    model = Decoder(tied=False, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    model.up.weight.register_hook(lambda grad: grad)
    try:
        loss_of(model, 0, 0).backward()
    except infinity.UsageError as error:
        return str(error)
    return ""


def struck(config: dict, at: str) -> dict[str, Any]:
    """The first rank raises in a ``forward`` or ``backward`` between two layers in tiles, once.
    Returns what each is told, and the weights after the same steps as :func:`over_all`."""
    torch.manual_seed(1)
    rank, said = dist.get_rank(), []
    model = Decoder(tied=False, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = infinity.wrap_model(model, optimizer, config)

    def strike(*_: Any) -> None:
        if rank == 0 and not said:
            raise ZeroDivisionError("struck")

    if at == "forward":
        model.down.register_forward_pre_hook(strike)
    else:
        model.norm.register_full_backward_hook(strike)
    for step in range(STEPS):
        for _ in range(3):
            try:
                loss_of(model, step, rank).backward()
                break
            except (ZeroDivisionError, infinity.UsageError) as error:
                said.append(f"{type(error).__name__}: {error}")
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    infinity.unwrap_model(model, optimizer)
    return {"said": said, "weights": weights}
