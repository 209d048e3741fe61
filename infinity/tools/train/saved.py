"""Saved: the folder that a job wrote, compared with the model that its files describe. Reads the
headers of the files alone: a model that did not fit while it trained does not fit now."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CorruptionError
from .classes import auto_class
from .model import read_model_config

if TYPE_CHECKING:
    import torch

# What a model of images, video or sound has beside its tokenizer.
PROCESSORS = ("*processor*.json", "chat_template*")


def copy_processors(model: Path | None, folder: Path) -> None:
    """Copies the files of a model's processor to ``folder``, unless they are there."""
    for path in (path for pattern in PROCESSORS for path in _files(model, pattern)):
        if not (folder / path.name).exists():
            shutil.copy(path, folder / path.name)


def _files(model: Path | None, pattern: str) -> list[Path]:
    if model is None or not model.is_dir():
        return []
    return [path for path in model.glob(pattern) if path.is_file()]


def check_saved(folder: Path, model: Any, *, trust: bool = False) -> int:
    """Compares the names, shapes and dtypes of the tensors in ``folder`` with those of the model
    that its config.json describes; of adapters, with the trained ``model``'s. Returns their count.
    Raises CorruptionError for tensors that transformers, or PEFT, would not find there."""
    from ...ext.checkpoint.export import ADAPTER, OF_ADAPTER
    from ...files.weight_files import WeightFiles

    if (folder / ADAPTER).is_file():
        stored = WeightFiles(folder / ADAPTER).sources()
        wanted = {
            OF_ADAPTER.sub(r"\1", name).replace(".modules_to_save", ""): param
            for name, param in model.named_parameters()
            if param.requires_grad
        }
    else:
        wanted, stored = _described(folder, trust=trust)
    wrong = [
        name
        for name, tensor in wanted.items()
        if name not in stored
        or stored[name].shape != tensor.shape
        or (tensor.is_floating_point() and not stored[name].dtype.is_floating_point)
    ]
    if wrong:
        raise CorruptionError(
            f"{folder} lacks {len(wrong)} of {len(wanted)} tensors of its model, or has them in"
            f" another shape: {', '.join(wrong[:4])}"
        )
    return len(set(map(id, wanted.values())))


def _described(
    folder: Path, *, trust: bool
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """Returns the tensors of the model of a folder's config.json, without values, and those of its
    files, by the model's names."""
    import torch

    from ...ext.checkpoint.hub_names import may_lack
    from ...files.module_names import Incoming
    from ...files.weight_files import WeightFiles

    config = read_model_config(folder, trust=trust)
    with torch.device("meta"):
        model = auto_class(config, folder).from_config(config, trust_remote_code=trust)
    kept = model.state_dict(keep_vars=True)
    incoming = Incoming(model, WeightFiles(folder).sources(), kept).sources
    by_tensor = {id(kept[name]): source for name, source in incoming.items()}
    wanted = {name: tensor for name, tensor in kept.items() if not may_lack(model, name)}
    there = {
        name: by_tensor[id(tensor)] for name, tensor in wanted.items() if id(tensor) in by_tensor
    }
    return wanted, there
