"""PEFT's LoRA of nn.MultiheadAttention, whose weights are other Parameters in each forward, trains
from every home with PEFT's bits.

Method: the same model, adapters and batches twice; the base's weights drift in PEFT's merging and
unmerging, and are compared, too.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from torch import nn

import infinity
from infinity import integrations

peft = Lazily("peft")
transformers = pytest.importorskip("transformers")
WIDTH = 32


class Block(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.mix = nn.MultiheadAttention(WIDTH, 2, **options)
        self.wide = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x + self.mix(x, x, x, need_weights=False)[0])


def adapted(targets: tuple[str, ...] = ("mix", "wide"), **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(**options) for _ in range(2)])
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(targets)))
    with torch.no_grad():
        for name, param in sorted(dict(model.named_parameters()).items()):
            if "lora_B" in name:
                nn.init.normal_(param, std=0.1)
    return model.train()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses, draws = [], torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(4, 6, WIDTH, generator=draws)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, fused=True)


def wrapped(model: nn.Module, home: str, folder: Path) -> tuple[nn.Module, Any]:
    homes = {"params": home, "optimizer": home, "nvme_paths": [str(folder)]}
    return infinity.wrap_model(model, adamw(model), homes)


def differing(model: nn.Module, other: nn.Module) -> list[str]:
    mine, others = model.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    return [name for name in mine if not torch.equal(mine[name], others[name])]


@pytest.mark.parametrize(
    "home, case",
    [
        ("device", {"batch_first": True}),
        ("host", {"bias": False, "targets": ("mix",)}),
        ("nvme", {"dropout": 0.1}),
    ],
)
def test_it_trains_with_the_bits_of_peft(home, case, tmp_path):
    """Claim: losses, all weights, and the adapter's file are those of the plain run; unwrapped, the
    model goes on as the plain one does. Twin: the base's weights drift, in both."""
    plain, model = adapted(**case), adapted(**case)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    torch.manual_seed(2)
    optimizer = adamw(plain)
    expected = stepped(plain, optimizer)
    model, stepping = wrapped(model, home, tmp_path)
    torch.manual_seed(2)
    assert stepped(model, stepping) == expected
    assert differing(model, plain) == []
    drifted = [name for name in before if not torch.equal(plain.state_dict()[name], before[name])]
    assert any("in_proj_weight" in name for name in drifted)
    plain.save_pretrained(tmp_path / "plain")
    infinity.save_pretrained(model, tmp_path / "saved")
    name = "adapter_model.safetensors"
    assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    model, stepping = infinity.unwrap_model(model, stepping)
    torch.manual_seed(3)
    expected = stepped(plain, optimizer, 1)
    torch.manual_seed(3)
    assert stepped(model, stepping, 1) == expected and differing(model, plain) == []


def test_adapters_are_merged_at_home_and_switched_off(tmp_path):
    """Also: without an optimizer, a forward gives the bits of the plain model's."""
    plain, model = adapted().eval(), adapted().eval()
    infinity.wrap_model(model, None, {"params": "nvme", "nvme_paths": [str(tmp_path)]})
    x = torch.randn(4, 6, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(x), plain(x))
        plain.merge_adapter(), integrations.merge_adapters(model)
        assert torch.equal(model(x), plain(x))
        plain.unmerge_adapter(), integrations.unmerge_adapters(model)
        assert torch.equal(model(x), plain(x)) and differing(model, plain) == []


def test_a_forward_that_fails_leaves_nothing_behind(tmp_path):
    """Method: the attention raises between merging and unmerging. Twin: PEFT's plain layer drifts
    in the failed forward."""
    plain, model = adapted(), adapted()
    model, optimizer = wrapped(model, "host", tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for each in (plain, model):
        with pytest.raises(AssertionError):
            each(torch.randn(4, 6, WIDTH + 1))
    assert [
        name for name in before if not torch.equal(model.state_dict()[name], before[name])
    ] == []
    assert differing(model, plain)
    stepped(model, optimizer, 1)


def test_a_wrap_that_fails_and_a_model_that_is_dropped_keep_nothing(tmp_path):
    model = adapted()
    with pytest.raises(infinity.CapacityError):
        infinity.wrap_model(model, adamw(model), {"params": "host", "host_memory": 100})
    layers = [each for each in model.modules() if hasattr(each, "_restore_weights")]
    assert len(layers) == 2 and not any("forward" in layer.__dict__ for layer in layers)
    model, optimizer = wrapped(model, "host", tmp_path)
    assert all("forward" in layer.__dict__ for layer in layers)
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, layers
        assert alive() is None
    finally:
        gc.enable()
