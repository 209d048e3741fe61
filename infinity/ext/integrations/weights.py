"""load_weights: copies the tensors of safetensors files to a model, one after the other."""

from __future__ import annotations

import os

import torch
from torch import nn

from ...errors import UsageError
from ...files.module_names import Incoming
from ...files.weight_files import WeightFiles


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | os.PathLike) -> None:
    """Sets the parameters and buffers of ``model``, wrapped or not, from a safetensors file or
    folder, as load_state_dict with strict=False does.

    Only one tensor is in memory at a time, or those that transformers converts together. Raises
    UsageError, before anything is changed, if a tensor has another shape.
    """
    files = WeightFiles(folder)
    tensors = {
        name: tensor
        for kind in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in kind
    }
    incoming = Incoming(model, files.sources(), tensors).sources
    for name, source in incoming.items():
        if tensors[name].shape != source.shape:
            raise UsageError(
                f"{name} has shape {tuple(source.shape)} in {folder}, and"
                f" {tuple(tensors[name].shape)} in the model"
            )
    for name, source in incoming.items():
        tensors[name].copy_(source.read())
