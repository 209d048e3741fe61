"""Pickled weights: reads files of ``torch.save`` as data: tensors, numbers, text and containers,
never code that runs.

stand-in   an inert class in place of a library's own class, whose data is not needed
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError, CorruptionError, StorageError
from ...files.source import Source
from ...untrusted import is_regular, parse_json, printable, read_text

INDEX = "pytorch_model.bin.index.json"
SINGLE = ("pytorch_model.bin", "pytorch_model_fsdp.bin", "model.pt", "model.pth")
# Keys under which jobs keep a model's state dict.
INSIDE = ("state_dict", "model_state_dict", "model", "module")
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module")  # in names, of torch.compile and FSDP only
WRAPPED = "module"  # of DDP and AveragedModel, where it has no siblings
BESIDE = "n_averaged"  # except this one


def load_pickled(path: Path, *, stand_ins: Sequence[tuple[type, str]] = ()) -> Any:
    """Loads a file of ``torch.save`` with ``weights_only=True``, its tensors memory-mapped if the
    format allows. ``stand_ins``: (class, full name) of further allowed classes. Raises ConfigError
    if it names another class, CorruptionError if it is no such file."""
    if not is_regular(path):
        raise ConfigError(f"{path} is not a regular file")
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # The format before torch 1.6.
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = printable(str(error)).strip().split("\n")[0][:300]
        raise ConfigError(
            f"{path} holds more than weights, and is not read: it could run code. Write its weights"
            f" alone, as a state dict or safetensors. torch says: {why}"
        ) from None
    except OSError as error:
        raise StorageError(error.errno or 0, f"cannot read {path}: {error}", str(path)) from error
    except Exception as error:
        raise CorruptionError(
            f"{path} is not a readable file of torch.save: {printable(repr(error))[:300]}"
        ) from error


def stand_in(name: str, base: type = object) -> tuple[type, str]:
    """Makes an inert class for the full ``name``: it accepts any arguments and state, and ignores
    them."""
    accept = (
        {"__init__": lambda self, *args, **kwargs: None, "__setstate__": lambda self, state: None}
        if base is object
        else {}
    )
    return type(name.rpartition(".")[2], (base,), accept), name


def is_pickled(path: Path) -> bool:
    """Returns whether ``path`` is a file of ``torch.save``, or a folder with ``pytorch_model.bin``,
    whole or in parts."""
    if path.is_dir():
        return (path / INDEX).exists() or any((path / name).exists() for name in SINGLE)
    return path.suffix in (".bin", ".pt", ".pth")


@contextlib.contextmanager
def pickled_sources(path: Path) -> Iterator[dict[str, Source]]:
    """Yields name -> source of the tensors of a pickled state dict."""
    yield sources_of_tensors(
        tensors for file in _files(path) for tensors in [state_dict_of(load_pickled(file), file)]
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if not (path / INDEX).exists():
        return [next(path / name for name in SINGLE if (path / name).exists())]
    try:
        names = set(parse_json(read_text(path / INDEX))["weight_map"].values())
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ValueError("it names a file outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(
            f"{path / INDEX} is not an index of weight files: {error!r}"
        ) from error
    return [path / name for name in sorted(names)]


def state_dict_of(value: Any, path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model in a file's content: a state dict, or one under a customary
    key."""
    if isinstance(value, Mapping):
        for key in INSIDE:
            if isinstance(value.get(key), Mapping):
                value = value[key]
        tensors = {
            name: tensor for name, tensor in value.items() if isinstance(tensor, torch.Tensor)
        }
        if tensors and all(isinstance(name, str) for name in tensors):
            return tensors
    raise ConfigError(
        f"{path} holds no state dict of a model: its tensors are under none of {', '.join(INSIDE)}"
    )


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Maps the names of a state dict to the names without prefixes of DDP, FSDP and torch.compile.
    A ``module`` with siblings is the model's own. The results are distinct."""
    paths = {
        name: tuple(part for part in name.split(".") if part not in WRAPPERS) for name in names
    }
    inside: dict[tuple, set[str]] = {}
    for path in paths.values():
        for at, part in enumerate(path):
            inside.setdefault(path[:at], set()).add(part)
    wrappers = {path for path, parts in inside.items() if parts - {BESIDE} == {WRAPPED}}

    def stripped(path: tuple) -> str:
        last = len(path) - 1
        return ".".join(
            part
            for at, part in enumerate(path)
            if part != WRAPPED or at == last or path[:at] not in wrappers
        )

    return {name: stripped(path) for name, path in paths.items()}


def sources_of_tensors(groups: Iterator[dict[str, torch.Tensor]]) -> dict[str, Source]:
    """Makes sources of tensors, under the model's own names. Of tied tensors (the same elements
    under several names) the first is kept."""
    sources: dict[str, Source] = {}
    names: list[str] = []
    written: set[tuple] = set()
    for tensors in groups:
        names += tensors
        for name, tensor in tensors.items():
            place = (
                tensor.untyped_storage().data_ptr(),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            if tensor.numel() and place in written:
                continue
            written.add(place)
            sources[name] = Source.of(tensor)
    own = without_wrappers(names)
    return {own[name]: source for name, source in sources.items()}
