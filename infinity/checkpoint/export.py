"""Export: the weights of a checkpoint, or of a folder of safetensors, as a folder that ``transformers`` loads, without a model, a GPU or
other ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import native
from ..distributed.collectives import Collectives
from ..errors import ConfigError, CorruptionError, InfinityError
from ..machine.outputs import identity_of, replacing
from ..state.shard_spec import MASTER_DTYPES
from .boxes import Box
from .folder import OF_READERS
from .foreign import export_foreign, is_foreign
from .load import checkpoint_of
from .manifest import MANIFEST, check_files
from .parts import read_tensors
from .pretrained import Source, write_sources
from .saved_tensors import SavedTensors
from .weight_files import FILE_DTYPES, WeightFiles

KINDS = {str(kind).removeprefix("torch."): kind for kind in FILE_DTYPES.values()}
MASTERS = {kind.name: dtype for kind, dtype in MASTER_DTYPES.items()}
BESIDE = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")


Change = Callable[[dict[str, Source]], dict[str, Source]]


def export(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    model: Path | None = None,
    change: Change | None = None,
) -> dict[str, int]:
    """Writes the weights of ``checkpoint`` (any number of ranks wrote it) to ``folder`` as safetensors. A checkpoint of DeepSpeed, of
    torch.distributed.checkpoint (FSDP) or of ``torch.save`` is one, too.

    checkpoint
        What save_checkpoint wrote, or a file or folder of safetensors.
    dtype
        None: what the model computed in. ``torch.float32`` takes the masters, where there are any.
    model
        A folder whose configuration and tokenizer are copied beside them.
    change
        Makes other tensors of those that are read: merges an adapter, say.

    One file's tensors are in memory at a time. Returns the numbers of parameters and of bytes. Raises UsageError where
    there is no checkpoint, CorruptionError where it is damaged, StorageError where it cannot be written.
    What is in ``folder`` is replaced: `infinity export` looks for that before.
    """
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json: give the folder that the model came from")
    for read in (checkpoint, model):
        if read is not None and identity_of(folder) == identity_of(read):
            raise ConfigError(f"{folder} is what is read: give another folder to write")
    if not (checkpoint / MANIFEST).exists() and is_foreign(checkpoint):
        if change is not None:
            raise ConfigError(
                f"{checkpoint} is a checkpoint of another tool: export it first, then merge the adapter into what was written"
            )
        written = export_foreign(checkpoint, folder, dtype=dtype)
        _copy_beside(model, folder)
        return written
    if not (checkpoint / MANIFEST).exists() and (checkpoint.is_file() or list(checkpoint.glob("*.safetensors"))):
        return _write(_file_sources(WeightFiles(checkpoint), dtype), folder, model, change)
    with checkpoint_of(checkpoint, Collectives()) as (manifest, data):
        try:
            return _export(manifest, data, folder, dtype=dtype, model=model, change=change)
        except InfinityError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, RecursionError) as error:
            raise CorruptionError(f"{checkpoint / MANIFEST} does not describe a checkpoint: {error!r}") from error


def _export(
    manifest: dict[str, Any], data: Path, folder: Path, *, dtype: torch.dtype | None, model: Path | None, change: Change | None
) -> dict[str, int]:
    check_files(data, manifest["files"])
    other = read_tensors(data / OF_READERS)
    for name, entry in manifest["parameters"].items():
        _check_place(name, entry)
    with SavedTensors(data, manifest) as saved:
        written = _write(_sources(saved, manifest, other, dtype), folder, model, change)
    return written | {"parameters": sum(_numel(entry) for entry in manifest["parameters"].values())}


def _write(sources: dict[str, Source], folder: Path, model: Path | None, change: Change | None) -> dict[str, int]:
    if change is not None:
        sources = change(sources)
    numel = write_sources(folder, sources)
    _copy_beside(model, folder)
    return {"parameters": numel, "nbytes": sum(nbytes for nbytes, _ in sources.values())}


def _file_sources(files: WeightFiles, dtype: torch.dtype | None) -> dict[str, Source]:
    def source(name: str) -> Source:
        stored = files.tensors[name]
        kind = dtype if dtype is not None and stored.dtype is not None and stored.dtype.is_floating_point else stored.dtype
        if kind is None:
            raise ConfigError(f"{name} in {stored.file} has a dtype that this version does not read")
        return stored.shape.numel() * kind.itemsize, lambda: files.read(name).to(kind)

    return {name: source(name) for name in files.tensors}


def _copy_beside(model: Path | None, folder: Path) -> None:
    if model is None:
        return
    with replacing(folder) as made:
        for path in (path for pattern in BESIDE for path in model.glob(pattern) if path.is_file()):
            shutil.copy(path, made / path.name)


def _sources(
    saved: SavedTensors, manifest: dict[str, Any], other: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for name, entry in manifest["parameters"].items():
        kind = dtype or KINDS[entry["dtype"]]
        saved.check("weight", name, KINDS[entry["dtype"]])
        if kind == torch.float32 and entry["master"] in MASTERS:
            saved.check("master", name, MASTERS[entry["master"]])
        sources[name] = _numel(entry) * kind.itemsize, _reader(saved, name, entry, kind)
    kept = [f"buffer/{name}" for name in manifest["persistent_buffers"]]
    kept += [key for key in other if key.startswith("unmanaged/")]
    for key in kept:
        sources[key.partition("/")[2]] = other[key].nbytes, lambda key=key: other[key]
    return sources


def _check_place(name: str, entry: dict[str, Any]) -> None:
    """Raises ValueError for a shape and strides that are not of as many elements as there are."""
    shape, stride = entry["shape"], entry["stride"]
    if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, *stride)):
        raise ValueError(f"{name} has shape {shape} and strides {stride}")
    if _numel(entry) and 1 + sum((n - 1) * step for n, step in zip(shape, stride)) > _numel(entry):
        raise ValueError(f"{name} of shape {shape} has strides {stride}")


def _numel(entry: dict[str, Any]) -> int:
    return torch.Size(entry["shape"]).numel()


def _reader(saved: SavedTensors, name: str, entry: dict[str, Any], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    whole = Box((0,) * len(entry["shape"]), tuple(entry["shape"]))

    def read() -> torch.Tensor:
        value = saved.read("weight", name, whole, KINDS[entry["dtype"]])
        if dtype == torch.float32 and entry["master"] == "SPLIT":
            low = saved.read("master", name, whole, torch.int16)
            value = native.join_master(value.view(-1), low.view(-1)).view(value.shape)
        elif dtype == torch.float32 and entry["master"] == "FLOAT32":
            value = saved.read("master", name, whole, torch.float32)
        return value.to(dtype)

    return read
