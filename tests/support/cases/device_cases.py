"""A model on a device with queues of its own, and the runs that its tests compare.

Words used here: **elsewhere** and **kernels** as in tests/core/machine/test_device.py.
"""

from __future__ import annotations

import random
import time

import pytest
import threaded_device
import torch
from gpu_stand_in import build_stand_in
from torch import nn

import infinity
from infinity.core.machine import accelerator

SEED = 20261122
STEPS = 4
WIDTH, VOCABULARY = 64, 96
HOMES = [("host", "host"), ("nvme", "nvme"), ("host", "nvme"), ("nvme", "host")]
HOMES_WITH_KERNELS = [
    *HOMES,
    ("device", "device"),
    ("device", "host"),
    ("host", "device"),
    ("auto", "auto"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def a_model(dtype=torch.bfloat16):
    torch.manual_seed(SEED)
    model = Model().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(model, optimizer, *, steps=STEPS, micro=1, clip=False) -> list[torch.Tensor]:
    """Losses and norms of the ordinary loop."""
    generator = torch.Generator().manual_seed(SEED)
    told = []
    for _ in range(steps):
        for _ in range(micro):
            ids = torch.randint(0, VOCABULARY, (16, 32), generator=generator)
            loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
            loss.backward()
            told.append(loss.detach().clone())
        if clip:
            told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return told


def trained(config, **how):
    """What a run leaves: losses and norms, weights, moments."""
    model, optimizer = infinity.wrap_model(*a_model(), config)
    told = train(model, optimizer, **how)
    state = optimizer.state_dict()["state"]
    moments = {
        f"{index}.{name}": value
        for index, of_one in state.items()
        for name, value in of_one.items()
    }
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    stats = infinity.stats(model)
    infinity.unwrap_model(model, optimizer)
    return told, weights | moments, stats


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and all(
        torch.equal(a[1][k], b[1][k]) for k in b[1]
    )


class Delayed(threaded_device.ThreadedDevice):
    """Threads whose every piece of work comes late, by up to two milliseconds."""

    def __init__(self, where, traffic):
        self._random = random.Random(SEED)
        super().__init__(where, traffic)

    def put(self, queue, work, **more):
        delay = self._random.choice([0, 0, 0.0005, 0.002])

        def late() -> None:
            time.sleep(delay)
            work()

        return super().put(queue, late, **more)


class Elsewhere(Delayed):
    is_host = False


@pytest.fixture(scope="module")
def kernels():
    return build_stand_in()


@pytest.fixture
def compute_on(monkeypatch):
    """Has models on the processor computed by a device of this class, with these kernels."""

    def choose(kind, with_kernels=None):
        def make(where, traffic):
            device = kind(where, traffic)
            device.kernels = with_kernels
            return device

        monkeypatch.setitem(accelerator.KINDS, "cpu", make)

    return choose


def config_at(homes, tmp_path, **more):
    return {
        "params": homes[0],
        "optimizer": homes[1],
        **({"nvme_paths": [str(tmp_path)]} if "nvme" in homes else {}),
        **more,
    }
