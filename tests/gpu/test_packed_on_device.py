"""Packed weights and experts apart on a GPU: the bits of their own library and of whole experts.

Method: small models of `packed_models` and of transformers, with the same inputs on the GPU; plain
beside wrapped, and apart beside whole. Twin: one changed byte shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path[:0] = [
    str(path)
    for pattern in ("support/*/", "ext/*/", "core/*/")
    for path in Path(__file__).parents[1].glob(pattern)
]

import test_coded_experts as in_codes
import test_experts_apart as on_processor
from packed_models import FORMATS, ROWS, WIDTH, make, packed_bytes, trained
from test_coded_experts import folders  # noqa: F401

import infinity

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU: torch sees none")
STEPS = 3
# What has operators for CUDA and processors alone, not for the late device
FOR_CUDA = ("bitsandbytes", "hqq")


def packed(kind: str) -> nn.Module:
    """Makes a model on the GPU whose codes are those that the processor made."""
    if DEVICE.type != "cuda" and kind.startswith(FOR_CUDA):
        pytest.skip(f"{kind} needs CUDA")
    model = make(kind)
    if kind == "bitsandbytes int8":  # its codes and scales follow `to` of the layer itself alone
        model(torch.zeros(1, WIDTH))
        for layer in model.modules():
            layer.to(DEVICE) if hasattr(layer, "state") else None
    if not kind.startswith("torchao"):
        return model.to(DEVICE)
    for module in model.modules():  # not every class of torchao has what Module.to asks for
        for name, param in module._parameters.items():
            if param is not None:
                moved = nn.Parameter(param.detach().to(DEVICE), param.requires_grad)
                module._parameters[name] = moved
    return model


def losses(model, optimizer) -> list[float]:
    found = []
    for step in range(STEPS):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adamw(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-2)


def wrapped(model, home: str, folder, **more):
    config = {"device": str(DEVICE), "params": home, "optimizer": home, **more}
    return infinity.wrap_model(model, adamw(model), {**config, "nvme_paths": [str(folder)]})


def gradients(model) -> dict[str, torch.Tensor]:
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    model(rows).pow(2).mean().backward()
    named = model.named_parameters()
    return {name: each.grad.clone() for name, each in named if each.requires_grad}


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("kind", FORMATS)
def test_gradients_are_those_of_the_library(kind, home, tmp_path):
    """Claim: each gradient has the bits of the plain model on the same GPU, and the engine keeps
    to its plan."""
    expected = gradients(packed(kind))
    model, _ = wrapped(packed(kind), home, tmp_path)
    found = gradients(model)
    assert expected.keys() == found.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    tier = infinity.stats(model).tiers["device"]
    assert tier.peak_nbytes <= tier.planned_nbytes


@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_on_the_processor_computes_on_the_gpu(kind, tmp_path):
    """Claim: wrapped where it was packed, a model has the same losses as one that was moved, and
    comes back to the processor."""
    expected = losses(*wrapped(packed(kind), "host", tmp_path))
    plain = make(kind)
    model, optimizer = wrapped(make(kind), "host", tmp_path)
    assert losses(model, optimizer) == expected
    infinity.unwrap_model(model, optimizer)
    assert {name: packed_bytes(value) for name, value in frozen(model).items()} == {
        name: packed_bytes(value) for name, value in frozen(plain).items()
    }


@pytest.mark.parametrize("kind", FORMATS)
def test_training_is_the_same_at_every_home(kind, tmp_path):
    """Claim: losses are equal at every home, and the packed bytes come back unchanged."""
    before = {name: packed_bytes(value.cpu()) for name, value in frozen(packed(kind)).items()}
    found = {}
    for home in ("device", "host", "nvme"):
        model, optimizer = wrapped(packed(kind), home, tmp_path)
        found[home] = losses(model, optimizer)
        infinity.unwrap_model(model, optimizer)
        after = {name: packed_bytes(value.cpu()) for name, value in frozen(model).items()}
        assert after == before
    assert found["device"] == found["host"] == found["nvme"]


def frozen(model) -> dict[str, torch.Tensor]:
    return {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor) and ".thin." not in name and ".wide." not in name
    }


def test_a_changed_byte_shows(tmp_path):
    model = packed("buffers")
    model[0].up.qweight.view(-1)[0] ^= 1
    changed = losses(*wrapped(model, "host", tmp_path))
    assert changed != losses(*wrapped(packed("buffers"), "host", tmp_path))


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_what_quantize_packs_computes_on_the_gpu(kind, tmp_path):
    """Claim: a dense model on the processor, packed on its way home, trains on the GPU with the
    same losses from every home."""
    if DEVICE.type != "cuda":
        pytest.skip("bitsandbytes has operators for CUDA and for processors")
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("torchao")

    def run(home: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        model[:3].requires_grad_(False)
        return losses(*wrapped(model, home, tmp_path, quantize=kind))

    assert run("device") == run("host") == run("nvme")


class Loop(on_processor.Loop):
    """The loop of the processor's tests, with its tokens on the GPU."""

    def __init__(self, model, optimizer, folder, home="host", **config):
        super().__init__(model, optimizer, folder, home, device=str(DEVICE), **config)

    def loss(self) -> torch.Tensor:
        tokens = torch.randint(0, 128, (1, 3), generator=self.generator).to(DEVICE)
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize(
    "implementation, dtype",
    [("eager", torch.float32), ("grouped_mm", torch.bfloat16), ("batched_mm", torch.bfloat16)],
)
@pytest.mark.parametrize("family", on_processor.FAMILIES)
def test_experts_apart_have_the_bits_of_whole_ones(
    family, implementation, dtype, home, tmp_path, monkeypatch
):
    """Claim: trained experts of which only the chosen ones move have the bits of whole ones."""

    if DEVICE.type != "cuda" and (implementation == "grouped_mm" or family == "gpt_oss"):
        pytest.skip("the late device does not compute this")

    def run() -> tuple:
        model = on_processor.make(family, implementation, dtype)
        loop = Loop(model, on_processor.adamw(model.parameters()), tmp_path, home)
        for _ in range(8):
            loop.step()
        return loop.found()

    assert on_processor.both(run, monkeypatch) == []


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("implementation", in_codes.IMPLEMENTATIONS)
@pytest.mark.parametrize("format", in_codes.FORMATS)
def test_experts_in_codes_have_the_bits_of_whole_ones(
    format,
    implementation,
    home,
    folders,
    tmp_path,
    monkeypatch,
):
    """Claim: of experts in the codes of their file those that were hit move, and give the losses of
    all."""
    if DEVICE.type != "cuda" and (implementation == "grouped_mm" or format == "mxfp4"):
        pytest.skip("the late device does not compute this")
    given = folders(format)
    apart = in_codes.Run(given, implementation, home, tmp_path, recompute=False)
    in_codes.whole(monkeypatch)
    twin = in_codes.Run(given, implementation, home, tmp_path, recompute=False)
    assert apart.losses == twin.losses and twin.nbytes > 1.4 * apart.nbytes
