"""optimizers: the main job from NVMe under AdamW, AdamW with 8-bit moments, Adafactor and
Muon: tokens per second, bytes of the disk, and the loss after some steps.

The model is :mod:`.step`'s, in bf16 with split masters, on bytes of this repository's documents.
Beside each stands the same optimizer of its library over fp32 masters in memory. The systems take
turns; a turn ends when its last update is at home.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import infinity
from infinity import native
from infinity.core.run.registry import wrapped
from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.rounds import paired, tell
from infinity.tools.bench.settings import Settings

from .step import make_model

TOKENS = (4, 256)
STEPS = 3  # of a turn
LOSS_STEPS = 200
Made = list[torch.optim.Optimizer]


def _muon(params: list[torch.Tensor]) -> Made:
    matrices = [param for param in params if param.ndim == 2 and param.shape[0] != 256]
    others = [param for param in params if all(param is not each for each in matrices)]
    return [
        torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-3),
    ]


def _adafactor(params: list[torch.Tensor]) -> Made:
    from transformers.optimization import Adafactor

    return [Adafactor(params, lr=1e-3, scale_parameter=False, relative_step=False)]


OPTIMIZERS: dict[str, tuple[Callable[[list[torch.Tensor]], Made], dict]] = {
    "AdamW": (lambda params: [torch.optim.AdamW(params, lr=1e-3)], {}),
    "AdamW int8": (lambda params: [torch.optim.AdamW(params, lr=1e-3)], {"moments": "int8"}),
    "Adafactor": (_adafactor, {}),
    "Muon": (_muon, {}),
}


class Plain:
    """The library's optimizer over fp32 masters of bf16 weights, in memory."""

    def __init__(self, make: Callable, layers: int):
        self.model = make_model(layers)
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.optimizers = make(self.masters)

    def update(self) -> None:
        for master, param in zip(self.masters, self.model.parameters()):
            master.grad, param.grad = param.grad.float(), None
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters()):
                param.copy_(master)

    def finish(self) -> None:
        """Does nothing: nothing is left for later."""


class Ours:
    """The same model with all state on a disk."""

    def __init__(self, make: Callable, config: dict, layers: int, folder: str):
        model = make_model(layers)
        given = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [folder]} | config
        optimizers = make(list(model.parameters()))
        self.model, self.optimizers = infinity.wrap_model(model, optimizers, given)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def finish(self) -> None:
        """Waits for the last step's updates."""
        wrapped(self.model).engine.wait_idle()

    def disk_nbytes(self) -> dict[str, int]:
        """Returns the bytes that the disk has read and written."""
        io = wrapped(self.model).engine.job.store.io
        return {"read": io.nbytes(native.Op.READ), "written": io.nbytes(native.Op.WRITE)}


def _batches() -> torch.Tensor:
    """Returns the bytes of this repository's documents, as tokens."""
    folder = Path(__file__).parents[1]
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("docs/*.md")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Batches:
    """Random parts of the repository's documents."""

    def __init__(self) -> None:
        self._corpus = _batches()
        self.generator = torch.Generator().manual_seed(1)

    def train(self, system: Plain | Ours, steps: int) -> float:
        """Takes ``steps``, and returns the last loss."""
        last = 0.0
        for _ in range(steps):
            begins = torch.randint(
                0, len(self._corpus) - TOKENS[1], (TOKENS[0],), generator=self.generator
            )
            tokens = torch.stack([self._corpus[begin : begin + TOKENS[1]] for begin in begins])
            loss = system.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            system.update()
            last = loss.item()
        system.finish()
        return last


def measure(settings: Settings) -> Measured:
    """Measures rows optimizers.<name>: tokens/s from a disk, and beside its library's in memory."""
    found = Measured([])
    for name, (make, config) in OPTIMIZERS.items():
        tell(f"optimizers.{name}")
        with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
            rows = _rows(name, make, config, folder, settings)
        settings.show(rows)
        found.add(Measured(rows))
    return found


def _rows(name: str, make: Callable, config: dict, folder: str, settings: Settings) -> list[Row]:
    layers, batches = max(2, round(16 * settings.scale)), Batches()
    ours, plain = Ours(make, config, layers, folder), Plain(make, layers)
    batches.train(ours, 1)
    before = ours.disk_nbytes()
    jobs = {
        "ours": lambda: batches.train(ours, STEPS),
        "plain": lambda: batches.train(plain, STEPS),
    }
    times = settings.alternate(jobs)
    moved = ours.disk_nbytes()
    steps = STEPS * (settings.rounds + 1)
    numel = sum(param.numel() for param in plain.model.parameters())
    batches.generator.manual_seed(2)
    count = max(3, round(LOSS_STEPS * settings.scale))
    loss = batches.train(ours, count)
    tokens = STEPS * TOKENS[0] * TOKENS[1]
    rates = [tokens / seconds for seconds in times["ours"].wall]
    ratios = {"in_memory": paired(times["ours"].wall, times["plain"].wall)}
    rows = [row(f"optimizers.{name}", "tokens/s", rates, ratios=ratios)]
    for way, nbytes in moved.items():
        each = (nbytes - before[way]) / steps / numel
        rows.append(row(f"optimizers.{name}, {way}", "B/parameter and step", [each]))
    rows.append(row(f"optimizers.{name}, loss", f"after {count} steps", [loss]))
    return rows
