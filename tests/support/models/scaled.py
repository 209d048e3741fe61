"""Folders of models with weights in FP8 and a scale for each block, as published ones have them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

FP8 = torch.float8_e4m3fn
FILE = "model.safetensors"


def in_fp8(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a weight, whose last blocks may be smaller."""
    padded = nn.functional.pad(
        weight.float(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    )
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(padded.shape).to(FP8)
    return codes[: weight.shape[0], : weight.shape[1]].contiguous(), scales


def describe(folder: Path, told: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))


def scale_fp8(folder: Path, block: tuple[int, int] = (32, 32)) -> Path:
    """Scales the projections of a saved model."""
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = in_fp8(tensors[name], *block)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    told = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    describe(folder, told | {"modules_to_not_convert": ["lm_head", "gate"]})
    return folder
