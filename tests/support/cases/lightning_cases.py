"""The module that Lightning's Trainer trains in the tests."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn


class Module(lightning.LightningModule):
    """Two blocks, and a bias of the module's own that its steps use outside any submodule."""

    optimizers_count = 1

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        )
        self.bias = nn.Parameter(torch.zeros(32))
        self.seen: list[tuple[str, float]] = []

    def _loss(self, name: str, batch: torch.Tensor) -> torch.Tensor:
        loss = ((self.blocks(batch) + self.bias - batch.flip(1)) ** 2).mean()
        self.seen.append((name, loss.item()))
        return loss

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self._loss("train", batch)

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", self._loss("validate", batch))

    def predict_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.blocks(batch) + self.bias

    def configure_optimizers(self) -> Any:
        made = [
            torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
            for _ in range(self.optimizers_count)
        ]
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 1, gamma=0.5)]


class Finetuned(lightning.LightningModule):
    """A backbone that a callback thaws, and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, width)
        self.again = self.head  # under two names
        self.register_buffer("scale", torch.full((width,), 0.5))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return ((self.head(self.backbone(batch)) * self.scale - batch.flip(1)) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [param for param in self.parameters() if param.requires_grad], lr=1e-2, fused=True
        )
