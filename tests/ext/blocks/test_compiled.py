"""Compiled blocks: `Config(compile=...)` has the bits of torch's own `block.compile()`, one graph
for each class, and leaves nothing behind.

Words used here: **plain**: torch alone, each block compiled by the same options.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import few
from models import at_home, differing, seeded
from runs import adamw
from test_products import Model, rows
from torch import nn

import infinity

SEED, STEPS = 79, 4
EAGER = {"backend": "aot_eager"}
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for step in range(STEPS):
        loss = model(rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach().clone()
    return found


def wrapped(swap: Any = None, **config: Any) -> tuple[dict[str, torch.Tensor], nn.Module]:
    config = {key: [swap] if key == "nvme_paths" else value for key, value in config.items()}
    model, optimizer = infinity.wrap_model(*made(), config)
    found = trained(model, optimizer)
    model, _ = infinity.unwrap_model(model, optimizer)
    return found | model.state_dict(), model


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(SEED, Model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)  # our bits


def plain(options: dict) -> dict[str, torch.Tensor]:
    model, optimizer = made()
    for block in model.blocks:
        block.compile(**options)
    return trained(model, optimizer) | model.state_dict()


HOMES: dict[str, dict] = {
    "device": at_home("device", "device", ""),
    "host": at_home("host", "host", ""),
    "nvme": at_home("nvme", "nvme", ""),
    "recomputed": {"recompute": True, "device_memory": "1MiB", **at_home("device", "device", "")},
    "in parts": {"micro_batch": 1, **at_home("host", "host", "")},
}


@pytest.mark.parametrize("homes", few(["recomputed", "in parts", "host", "nvme", "device"], 2))
def test_each_home_has_the_bits_of_blocks_that_torch_compiled(homes, swap):
    """Twin: one graph for all blocks, and none without the setting. Each block is eager again
    after the unwrap. In parts, the plain run is of the engine, whose sums are of parts, too."""
    config = HOMES[homes]
    right = plain(EAGER) if homes != "in parts" else wrapped(**config)[0]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found, model = wrapped(swap, compile=EAGER, **config)
    assert differing(found, right) == []
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # In parts, what checks that samples do not depend on each other runs the block, too
    assert 1 <= graphs <= (6 if homes == "in parts" else 2)
    assert all(block._compiled_call_impl is None for block in model.blocks)
    torch._dynamo.utils.counters.clear()
    wrapped(swap, **config)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_inductor_gives_the_bits_of_blocks_that_torch_compiled():
    """Twin: eager blocks give others."""
    found, _ = wrapped(compile=True, **HOMES["host"])
    torch._dynamo.reset()
    assert differing(found, plain({})) == []
    assert differing(found, wrapped(**HOMES["host"])[0])


def test_a_block_that_the_user_compiled_stays_so():
    model, optimizer = made()
    model.blocks[0].compile(backend="eager")
    mine = model.blocks[0]._compiled_call_impl
    model, optimizer = infinity.wrap_model(model, optimizer, {"compile": EAGER})
    trained(model, optimizer)
    model, _ = infinity.unwrap_model(model, optimizer)
    assert model.blocks[0]._compiled_call_impl is mine
    assert model.blocks[1]._compiled_call_impl is None


def test_a_model_without_repeated_blocks_says_that_nothing_is_compiled(caplog):
    """Twin: a model that has some says nothing."""
    for model, told in ((nn.Linear(4, 4), True), (seeded(SEED, Model), False)):
        caplog.clear()
        infinity.wrap_model(model, adamw(model, 1e-2), {"compile": EAGER})
        assert ("compile has no effect: Linear repeats no block" in caplog.text) == told


@pytest.mark.parametrize(
    "given, told",
    [
        ("yes", "must be True, False, or a table"),
        ({"speed": 9}, "speed: unknown option"),
        ({"fullgraph": True}, "weights come between operations"),
        ({"backend": "cudagraphs"}, "captures CUDA graphs"),
        ({"backend": "nobody's"}, "torch.compile refuses it"),
        ({"mode": "reduce-overhead"}, "captures CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "captures CUDA graphs"),
    ],
    ids=str,
)
def test_what_torch_cannot_compile_is_refused_before_anything_changes(given, told):
    """Twin: the same model wraps afterwards."""
    model, optimizer = made()
    with pytest.raises(infinity.ConfigError, match=told):
        infinity.wrap_model(model, optimizer, {"compile": given})
    infinity.wrap_model(model, optimizer, {"compile": False})
