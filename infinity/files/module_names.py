"""Module names: maps the tensors of a folder that transformers saved to the names and shapes of a
model's modules."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .groups import Group, empty
from .source import Source

JOINS = {"MergeModulelist", "Concatenate"}  # transformers' conversions that change no tensor
PREFIX = "base_model.model."  # PEFT's prefix for names of the base model


def is_transformers(model: nn.Module) -> bool:
    """Returns whether ``model`` is a PreTrainedModel, whose own ``save_pretrained`` defines the
    content of a folder."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


class Incoming:
    """The tensors of a folder as those of a model's state dict: renamed, fused or split as
    ``from_pretrained`` does.

    sources
        Name in the state dict -> source. A renamed tensor keeps its given source object.
    joined
        Name in the state dict -> names in the folder of the whole tensors that are stacked or
        concatenated to it.
    taken
        Names in the folder of the tensors that the model has a place for.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Source], names: Mapping[str, Any]):
        """Matches ``given``, the folder's tensors, with ``names``, the state dict, without reading
        values. Raises ConfigError if tensors cannot be converted."""
        self.sources: dict[str, Source] = {}
        self.joined: dict[str, list[str]] = {}
        self.taken: set[str] = set()
        self._conversions: list[Any] | None = None
        base, of_base = base_of(model), {base_name(name): tensor for name, tensor in names.items()}
        if is_transformers(base) and (library := _library()) is not None:
            self._convert(library, base, given, of_base)
        else:
            own = {name: name if name in of_base else _of_version_4(base, name) for name in given}
            self.sources = {own[name]: given[name] for name in given if own[name] in of_base}
            self.taken = {name for name in given if own[name] in of_base}
        if base is not model:
            self.sources = {
                name: self.sources[plain]
                for name in names
                if (plain := base_name(name)) in self.sources
            }
            self.joined = {
                name: self.joined[plain]
                for name in names
                if (plain := base_name(name)) in self.joined
            }

    def note(self, model: nn.Module) -> None:
        """Records the conversions on the model, as ``from_pretrained`` does, so that its own
        ``save_pretrained`` undoes them."""
        if self._conversions is not None:
            model._weight_conversions = self._conversions

    def _convert(
        self, library: Any, model: nn.Module, given: Mapping[str, Source], names: Mapping[str, Any]
    ) -> None:
        mapping = importlib.import_module(
            "transformers.conversion_mapping"
        ).get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, library.WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, library.WeightConverter)]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        # First result -> patterns and names of its inputs.
        steps: dict[str, list[tuple[str, str]]] = {}
        for origin in sorted(given, key=library.dot_natural_key):
            prefix = model.base_model_prefix
            name, pattern = library.rename_source_key(origin, renamings, converters, prefix, names)
            if name not in names and origin in names:
                name, pattern = library.rename_source_key(origin, [], [], prefix, names)
            if name in names:
                self.taken.add(origin)
            if name in names and pattern is not None and name not in self.sources:
                steps.setdefault(name, []).append((pattern, origin))
            elif name in names and name not in steps:
                self.sources.setdefault(name, given[origin])
        for name, entries in steps.items():
            converter = by_pattern[entries[0][0]]
            if {type(each).__name__ for each in converter.operations} <= JOINS:
                self.joined[name] = [origin for _, origin in entries]
            convert = _conversion(model, name, entries, converter)
            self._add(name, {origin: given[origin] for _, origin in entries}, convert, names)
        self._conversions = [conversion for conversion in mapping if conversion.was_used()]

    def _add(
        self, name: str, given: dict[str, Source], convert: Callable, names: Mapping[str, Any]
    ) -> None:
        try:
            made = convert(
                {origin: empty(source.shape, source.dtype) for origin, source in given.items()}
            )
        except Exception as error:
            raise ConfigError(
                f"transformers cannot make {name} of {len(given)} tensors"
                f" ({', '.join([*given][:3])}): {type(error).__name__}: {error}"
            ) from error
        group = Group(convert, given, list(made))
        for each, tensor in made.items():
            if each in names:
                self.sources[each] = Source(
                    tensor.shape, tensor.dtype, lambda each=each: group.read(each)
                )


def renamed_in_version_4(model: nn.Module) -> Mapping[str, str]:
    """Returns patterns of a folder's names, and what transformers 4 replaces them with in the
    model."""
    return getattr(model, "_checkpoint_conversion_mapping", None) or {}


def _of_version_4(model: nn.Module, name: str) -> str:
    for pattern, own in renamed_in_version_4(model).items():
        new, count = re.subn(pattern, own, name)
        if count:
            return new
    return name


def _conversion(
    model: nn.Module, name: str, entries: list[tuple[str, str]], converter: Any
) -> Callable:
    """Returns the function that converts tensors of a folder to ``name``, and to the tensors made
    with it."""

    def convert(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        one = copy.deepcopy(converter)
        for pattern, origin in entries:
            one.add_tensor(name, origin, pattern, values.pop(origin))
        made = one.convert(name, model=model, config=model.config)
        return {
            each: value[0] if isinstance(value, list) else value for each, value in made.items()
        }

    return convert


def base_of(model: nn.Module) -> nn.Module:
    """Returns the base model of a PEFT model, else ``model``."""
    is_adapted = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_adapted else model


def base_name(name: str) -> str:
    """Returns the base model's own name of the tensor that is ``name`` in a PEFT model."""
    return ".".join(
        part
        for part in name.removeprefix(PREFIX).split(".")
        if part not in ("base_layer", "original_module")
    )


def is_of_adapter(name: str) -> bool:
    """Returns whether a tensor of a PEFT model is an adapter's, which its base's files lack."""
    return name.startswith(PREFIX) and ".lora_" in name


def _library() -> Any:
    """Returns the conversion module of transformers 5; None for an older version."""
    try:
        return importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return None
