"""Materialized: real values for a model that was built on ``meta``, and the way back if wrapping fails.

Values come from a safetensors file or folder where one is given, else from the modules' own initialisation:
``reset_parameters``, or a ``transformers`` model's ``_init_weights``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .errors import ConfigError, CorruptionError


class Materialized:
    """Gives meta tensors of ``model`` storage and values; :meth:`undo` puts the meta tensors back."""

    def __init__(self, model: nn.Module, weights: str | os.PathLike | None):
        self._model = model
        self._weights = Path(weights) if weights is not None else None
        self._swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []

    def fill(self) -> None:
        """Raises ConfigError, naming the tensor, when a value is nowhere to be had."""
        files = _index(self._weights) if self._weights is not None else {}
        if files:
            self._check_complete(files)
        unfilled = self._make_storage() - set(files)
        # Before the weights are loaded: initialising a module for a buffer's sake also sets its parameters.
        self._initialise(unfilled)
        self._load(files)

    def _check_complete(self, files: dict[str, Path]) -> None:
        """Values from two sources in one model are never meant."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        if missing := [of_one[0] for of_one in names.values() if not set(of_one) & set(files)]:
            raise ConfigError(
                f"weights={str(self._weights)!r} lacks {len(missing)} of the model's parameters: {', '.join(missing[:5])}"
            )

    def undo(self) -> None:
        """The model as it was."""
        for param, meta in self._swapped:
            torch.utils.swap_tensors(param, meta)
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer

    def _make_storage(self) -> set[str]:
        """Storage for every meta tensor; the names under which they need a value."""
        names, done = set(), set()
        for name, param in self._model.named_parameters(remove_duplicate=False):
            if id(param) in done:
                names.add(name)
            elif param.is_meta:
                done.add(id(param))
                real = nn.Parameter(torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, real)
                self._swapped.append((param, real))
                names.add(name)
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self._buffers.append((module, name, buffer))
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
                    names.add(f"{prefix}.{name}" if prefix else name)
        return names

    @torch.no_grad()
    def _load(self, names: dict[str, Path]) -> None:
        tensors = dict(self._model.named_parameters(remove_duplicate=False)) | dict(self._model.named_buffers())
        for file in dict.fromkeys(names.values()):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    if name not in tensors:
                        continue
                    value = opened.get_tensor(name)
                    if value.shape != tensors[name].shape:
                        raise ConfigError(
                            f"{name} in {file} has shape {tuple(value.shape)}, the model's {tuple(tensors[name].shape)}"
                        )
                    tensors[name].copy_(value)

    @torch.no_grad()
    def _initialise(self, unfilled: set[str]) -> None:
        init = getattr(self._model, "_init_weights", None)
        for prefix, module in self._model.named_modules():
            own = [*module._parameters, *module._buffers]
            waiting = {f"{prefix}.{name}" if prefix else name for name in own} & unfilled
            if not waiting:
                continue
            if callable(getattr(module, "reset_parameters", None)):
                module.reset_parameters()
            elif callable(init):
                init(module)
            else:
                raise ConfigError(
                    f"{', '.join(sorted(waiting))} is on meta, and {type(module).__name__} has no reset_parameters(): "
                    "give Config(weights='model.safetensors')"
                )


def _index(weights: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that has it."""
    files = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
    if not files or not files[0].exists():
        raise ConfigError(f"weights={str(weights)!r}: no safetensors file there")
    names = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names |= dict.fromkeys(opened.keys(), file)
        except SafetensorError as error:
            raise CorruptionError(f"{file} is not a readable safetensors file: {error}") from error
    return names
