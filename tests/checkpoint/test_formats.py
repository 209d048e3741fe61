"""Checkpoints of format 2 are still read.

``format2/`` was written by two ranks of the version before: a convolution in channels_last, linear layers whose slices end in the middle of a
row, and a number, in bf16 with split masters, after two steps; with fp32 and with 8-bit moments. Beside each, what that job's state
dicts had.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.checkpoint.export import export

FOLDER = Path(__file__).parent / "format2"


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def build(memory_format: torch.memory_format) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 300), nn.Linear(300, 3, bias=False), Scale()
    ).bfloat16()  # fmt: skip
    model[0].weight.data = model[0].weight.data.to(memory_format=memory_format)
    return model


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=["as written", "laid out otherwise"])
@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_format_2_is_read_with_its_bits(tmp_path, moments, home, memory_format):
    """Method: weights, masters and moments against the state dicts of the job that wrote them, into other homes and one rank."""
    torch.manual_seed(3)
    model = build(memory_format)
    config = {"params": home, "optimizer": home, "moments": moments, "nvme_paths": [str(tmp_path)] if home == "nvme" else []}
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    assert infinity.load_checkpoint(FOLDER / moments, model, optimizer) == {"step": 2}
    names = [name for name, _ in model.named_parameters()]
    found = {f"weight/{name}": value for name, value in model.state_dict().items()}
    states = optimizer.state_dict()["state"]
    found |= {f"{key}/{names[i]}": value for i, state in states.items() for key, value in state.items() if key != "step"}
    expected = load_file(FOLDER / f"{moments}.safetensors")
    assert found.keys() == expected.keys()
    blocks_differ = moments == "int8" and memory_format is torch.contiguous_format
    for name, value in expected.items():
        if blocks_differ and name.startswith("exp_avg") and name.endswith("/0.weight"):
            scale = value.abs().max()
            assert (found[name] - value).abs().max() <= scale / 8  # encoded anew
        else:
            assert torch.equal(found[name], value), name
    infinity.unwrap_model(model, optimizer)


def test_format_2_is_exported(tmp_path):
    export(FOLDER / "fp32", tmp_path / "out", dtype=torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(FOLDER / "fp32.safetensors")
    assert all(torch.equal(value, expected[f"master/{name}"]) for name, value in found.items())


def test_another_format_is_refused(tmp_path):
    """The twin: a manifest that says format 4, sealed."""
    from infinity.checkpoint.manifest import read_manifest, seal_manifest

    shutil.copytree(FOLDER / "fp32", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "manifest.json"
    path.write_bytes(seal_manifest(read_manifest(tmp_path / "checkpoint") | {"format": 4}))
    model, optimizer = infinity.wrap_model(build(torch.channels_last), None, {})
    with pytest.raises(infinity.UsageError, match="format 4, this version reads 2 and 3"):
        infinity.load_checkpoint(tmp_path / "checkpoint", model)
    infinity.unwrap_model(model)
