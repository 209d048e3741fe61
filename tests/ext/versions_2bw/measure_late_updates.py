"""late_updates: what updates by gradients of older weights cost in loss, and what error feedback
gives back, over 200 updates of a small language model cut into stages, over gloo.

Every way of a round begins with the same weights and has the same batches of bytes of this
repository's documents. Times are not measured.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.launch import ROOT, launch_each, run_as_rank
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import tell
from infinity.tools.bench.settings import Settings

RANKS = (2, 4)
UPDATES, LAST = 200, 20  # the loss is the mean over the last ones
SAMPLES, LENGTH, WIDTH, LAYERS, BYTES = 16, 48, 64, 4, 256


class _Way(NamedTuple):
    """One way to train: the versions of the weights, or a flush, and micro-batches in a batch."""

    name: str
    weights: str | None
    micro: int
    corrects: bool = False


WAYS = (
    _Way("flush", None, 4),
    _Way("two", "two", 4),
    _Way("two.feedback", "two", 4, True),
    _Way("stash", "stash", 1),
    _Way("stash.feedback", "stash", 1, True),
    _Way("vertical", "vertical", 1),
    _Way("vertical.feedback", "vertical", 1, True),
)


def measure(settings: Settings) -> Measured:
    """Measures rows ``late.<stages>.<optimizer>.<way>``: the loss after 200 updates, in nats a
    byte, of each round's weights and batches. Notes the ways that diverged."""
    found = Measured([])
    for ranks, told in launch_each(found, "late_updates", __file__, RANKS, settings):
        for name, losses in told.items():
            if all(map(math.isfinite, losses)):
                found.rows.append(row(f"late.{ranks}.{name}", "nats", losses))
            else:
                found.notes.append(f"late.{ranks}.{name}: diverged")
    return found


class _Block(nn.Module):
    """Causal attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, src_mask=mask, is_causal=True)


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bytes(x) + self.places(torch.arange(x.shape[1]))


def _stage(stage: int, stages: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    whole = [_Embedding(), *(_Block() for _ in range(LAYERS))]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES))
    each = LAYERS // stages
    own = range(1 + stage * each, 1 + (stage + 1) * each)
    parts = {str(n): whole[n] for n in ([0] if stage == 0 else []) + [*own]}
    if stage == stages - 1:
        parts["head"] = head
    chunk = nn.Sequential()
    for name, part in parts.items():
        chunk.add_module(name, part)
    return chunk


def _batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    text = b"".join(path.read_bytes() for path in sorted(Path(ROOT, "docs").glob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    drawn = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(UPDATES):
        starts = torch.randint(0, len(data) - LENGTH - 1, (SAMPLES,), generator=drawn).tolist()
        rows = torch.stack([data[at : at + LENGTH + 1] for at in starts])
        found.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return found


def _loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=3e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for seed in range(rounds):
        batches = _batches(seed)[: max(LAST, int(UPDATES * min(1.0, scale)))]
        for name in OPTIMIZERS:
            for way in WAYS:
                tell(f"late_updates: {name}, {way.name}, seed {seed}")
                losses = _train(name, way, seed, batches)
                found.setdefault(f"{name}.{way.name}", []).append(losses)
    return found


def _train(name: str, way: _Way, seed: int, batches: list[Any]) -> float:
    """Returns the mean loss of the last updates, on the last stage, which tells the others."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    import infinity

    rank, stages = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (stages,), mesh_dim_names=("pp",))
    chunk = _stage(rank, stages, seed)
    homes = {"params": "host", "optimizer": "host"}
    optimizer: Any = OPTIMIZERS[name](chunk.parameters())
    (chunk,), optimizer = infinity.wrap_model([chunk], optimizer, homes, mesh=mesh)
    stage = PipelineStage(chunk, rank, stages, torch.device("cpu"), group=mesh["pp"].get_group())
    kind = Schedule1F1B if way.micro >= stages else ScheduleGPipe
    schedule: Any = kind(stage, way.micro, loss_fn=_loss)
    if way.weights is None:
        infinity.parallel.attach(schedule)
        losses: list[torch.Tensor] = []
        for inputs, target in batches:
            of_batch: list[torch.Tensor] = []
            given = {"target": target, "losses": of_batch} if stage.is_last else {}
            schedule.step(*((inputs,) if stage.is_first else ()), **given)
            optimizer.step()
            optimizer.zero_grad()
            losses += [torch.stack(of_batch)] if of_batch else []
    else:
        run = infinity.parallel.without_flush(
            schedule, optimizer, weights=way.weights, error_feedback=way.corrects, quiet=True
        ).run
        losses = run(batches) or []
    infinity.unwrap_model([chunk], optimizer)
    mean = torch.stack(losses[-LAST:]).mean() if losses else torch.zeros(())
    mean = mean.detach().float()
    dist.broadcast(mean, stages - 1)
    return mean.item()


if __name__ == "__main__":
    run_as_rank(_run_rank)
