"""load_weights: sends the tensors of safetensors files home, one after the other."""

from __future__ import annotations

import os

import torch
from torch import nn

from ..checkpoint.weight_files import WeightFiles
from ..errors import UsageError


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | os.PathLike) -> None:
    """Sets the parameters and buffers of ``model`` (wrapped or not) to those of a safetensors file or folder: as load_state_dict with
    strict=False does, but with one tensor in memory at a time.

    Raises UsageError, before anything is changed, where a tensor has another shape.
    """
    files = WeightFiles(folder)
    targets = {
        name: tensor
        for kind in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in kind
        if name in files.tensors
    }
    for name, target in targets.items():
        if target.shape != files.tensors[name].shape:
            raise UsageError(
                f"{name} has shape {tuple(files.tensors[name].shape)} in {folder}, and {tuple(target.shape)} in the model"
            )
    value, filled = torch.empty(0), 0
    for piece in files.stream(targets):
        stored = files.tensors[piece.name]
        if piece.begin == 0:
            value, filled = torch.empty(stored.shape.numel(), dtype=stored.dtype), 0
        value[piece.begin : piece.begin + piece.values.numel()] = piece.values
        filled += piece.values.numel()
        if filled == value.numel():
            targets[piece.name].copy_(value.view(stored.shape))
