"""GgufFile: the tensors of a GGUF file as those of a transformers model, dense or in its codes.

Names and conversions are transformers' own, numbers those of gguf. A weight keeps its codes where
the conversion only reorders its rows, or joins the rows of experts.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import ConfigError, CorruptionError
from ...files.module_names import base_name, is_transformers
from ...files.source import Source
from ...library_versions import refuse_older
from ..packed.unpacked import CodedSource
from .schemes import Gguf

SUFFIX = ".gguf"
FUSED = "_exps.weight"  # ends the names of all experts of a layer together


def gguf_path(path: str | os.PathLike) -> Path | None:
    """Returns the GGUF file that ``path`` is, or holds without safetensors; None if there is none.
    Raises ConfigError for several."""
    path = Path(path)
    if not path.is_dir():
        if path.suffix == SUFFIX and not path.exists():
            raise ConfigError(f"weights={str(path)!r}: no GGUF file there")
        return path if path.suffix == SUFFIX else None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise ConfigError(
            f"weights={str(path)!r} has {len(files)} GGUF files: give one of them. The parts of a"
            " split file are joined by llama-gguf-split --merge"
        )
    return files[0]


class _Parsed:
    """What a GGUF file says of itself. Parsing takes seconds for a large vocabulary, so all that
    read the same file have the same object."""

    _alive: weakref.WeakValueDictionary[tuple, _Parsed] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, path: Path) -> _Parsed:
        """Parses the file, unless somebody has it as it is now."""
        status = os.stat(path)
        key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if (parsed := cls._alive.get(key)) is None:
            parsed = cls._alive[key] = cls(path)
        return parsed

    def __init__(self, path: Path):
        theirs = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        reader = library_of_gguf().GGUFReader(path)
        self.tensors = reader.tensors
        self.config = theirs.load_gguf_checkpoint(path)["config"]
        self.kind = theirs.read_field(reader, "general.architecture")[0]


class GgufFile:
    """Reads a GGUF file for ``model``. Raises ConfigError or CorruptionError."""

    def __init__(self, path: Path, model: nn.Module):
        if not is_transformers(model):
            raise ConfigError(
                f"weights={str(path)!r}: GGUF files have the names of llama.cpp, and"
                f" {type(model).__name__} is not a model of transformers, which maps them"
            )
        self._path = path
        self._library = library_of_gguf()
        theirs = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        with self._reading():
            self._parsed = _Parsed.of(path)
        processor = theirs.TENSOR_PROCESSORS.get(self._parsed.kind, theirs.TensorProcessor)
        self._processor = processor(config=self._parsed.config)
        plain = _WithoutAdapters(model)
        self._names = theirs.get_gguf_hf_weights_map(plain, self._processor)
        self._models = {name: value.shape for name, value in plain.state_dict().items()}
        # Name in the model -> the file's tensors for it, gate before up
        self._tensors: dict[str, list[Any]] = {}
        for tensor in sorted(self._parsed.tensors, key=lambda each: "_up_" in each.name):
            if (name := self._name_of(tensor.name)) is not None:
                self._tensors.setdefault(name, []).append(tensor)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise CorruptionError(
                f"{self._path} is not read as a GGUF file: {type(error).__name__}: {error}"
            ) from error

    def _name_of(self, own: str) -> str | None:
        fused = own.removesuffix(".weight") if own.endswith(FUSED) else own
        return self._names.get(own, self._names.get(fused))

    def sources(self) -> dict[str, Source]:
        """Returns the dense tensors in fp32, by their names in the model."""
        return {
            name: Source(self._shape(name), torch.float32, lambda name=name: self._read(name))
            for name in self._tensors
            if name in self._models
        }

    def _shape(self, name: str) -> torch.Size:
        """Returns the shape of a tensor: the model's, unless its layer is packed or of another
        size."""
        shapes = [[int(size) for size in reversed(each.shape)] for each in self._tensors[name]]
        shape = shapes[0]
        if len(shapes) > 1:
            shape[-2] = sum(each[-2] for each in shapes)
        of_model = self._models[name]
        return of_model if of_model.numel() == math.prod(shape) else torch.Size(shape)

    def _read(self, name: str) -> torch.Tensor:
        parsed: dict[str, dict] = {"tensors": {}}
        with self._reading():
            for tensor in self._tensors[name]:
                dense = self._library.quants.dequantize(tensor.data, tensor.tensor_type)
                made = self._processed(tensor.name, dense, parsed)
        stored = parsed["tensors"].get(name)
        value = torch.from_numpy(np.copy(made.weights)) if stored is None else stored
        if value.shape != self._shape(name):
            raise CorruptionError(
                f"{name} in {self._path} has shape {tuple(value.shape)}, the model's"
                f" {tuple(self._models[name])}"
            )
        return value

    def _processed(self, name: str, weights: np.ndarray, parsed: dict) -> Any:
        mapped = {"tensor_key_mapping": self._names, "parsed_parameters": parsed}
        return self._processor.process(weights=weights, name=name, **mapped)

    def coded(self) -> dict[str, CodedSource]:
        """Returns the weights that can keep their codes, by their names in the model."""
        sources = {}
        for name, tensors in self._tensors.items():
            kinds = {tensor.tensor_type.name for tensor in tensors}
            if len(kinds) > 1 or not kinds <= Gguf.kinds():
                continue
            is_fused = tensors[0].name.endswith(FUSED)
            read = self._fused(name, tensors) if is_fused else self._rows(*tensors)
            if read is not None:
                shape = list(tensors[0].data.shape)
                shape[-2] = sum(tensor.data.shape[-2] for tensor in tensors)
                codes = Source(torch.Size(shape), torch.uint8, read)
                sources[name] = CodedSource(codes, None, Gguf(*kinds))
        return sources

    def _rows(self, tensor: Any) -> Callable[[], torch.Tensor] | None:
        """Returns what reads the codes of a matrix, whose rows the conversion may reorder; None
        if it does anything else."""
        if tensor.data.ndim != 2:
            return None
        rows = np.arange(len(tensor.data), dtype=np.float32)[:, None]
        made = self._tried([tensor], [rows])
        if made is None or made.name != tensor.name or made.weights.shape != rows.shape:
            return None
        order = made.weights[:, 0].astype(np.int64)
        if not np.array_equal(np.sort(order), np.arange(len(rows))):
            return None
        return partial(self._codes, [tensor], order)

    def _fused(self, name: str, tensors: list[Any]) -> Callable[[], torch.Tensor] | None:
        """Returns what reads the codes of all experts of a layer; None if the conversion does more
        than to put the rows of gate before those of up."""
        parts = [np.full((1, 2, 1), place, dtype=np.float32) for place in range(len(tensors))]
        parsed: dict[str, dict] = {"tensors": {}}
        if self._tried(tensors, parts, parsed) is None or name not in parsed["tensors"]:
            return None
        if not np.array_equal(parsed["tensors"][name].numpy(), np.concatenate(parts, axis=-2)):
            return None
        return partial(self._codes, tensors)

    def _codes(self, tensors: list[Any], order: np.ndarray | None = None) -> torch.Tensor:
        with self._reading():
            if order is None:
                codes = np.concatenate([each.data for each in tensors], axis=-2)
            else:
                codes = np.asarray(tensors[0].data)[order]
        return torch.from_numpy(codes)

    def _tried(
        self, tensors: list[Any], values: list[np.ndarray], parsed: dict | None = None
    ) -> Any:
        """Returns what the conversion makes of ``values`` in the place of ``tensors``; None if it
        needs whole ones."""
        parsed = {"tensors": {}} if parsed is None else parsed
        try:
            made = [
                self._processed(each.name, of_it, parsed) for each, of_it in zip(tensors, values)
            ]
        except (ValueError, TypeError, IndexError, KeyError):
            return None
        return made[-1]


class _WithoutAdapters:
    """A model with the names that it has without adapters, as transformers maps them."""

    def __init__(self, model: nn.Module):
        self._model, self.config = model, getattr(model, "config", None)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the model's tensors by their own names."""
        finders = self._model.named_parameters, self._model.named_buffers
        tensors = chain.from_iterable(find(remove_duplicate=False) for find in finders)
        return {base_name(name): value for name, value in tensors if "lora_" not in name}

    def named_children(self) -> list[tuple[str, _WithoutAdapters]]:
        """Lists the children of the model."""
        return [(name, _WithoutAdapters(each)) for name, each in self._model.named_children()]


def library_of_gguf() -> Any:
    """Imports gguf. Raises ConfigError without it, or without diffusers, which unpacks, and for one
    that is too old."""
    refuse_older("gguf"), refuse_older("diffusers")
    try:
        importlib.import_module("diffusers.quantizers.gguf.utils")
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "weights in GGUF need gguf and diffusers: pip install 'infinity-engine[gguf]'"
        ) from error
