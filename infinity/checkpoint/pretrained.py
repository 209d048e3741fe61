"""save_pretrained: a folder that ``transformers`` loads, written a few parameters at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..errors import StorageError
from ..machine.progress import progress
from ..runtime.engine import Engine
from ..runtime.registry import engine_of
from ..state.dtensors import global_of, local_of
from ..state.handle import handle_of
from .weight_files import save_file

FILE_NBYTES = 256 * 1024 * 1024  # of one safetensors file; what is in memory at once


def save_pretrained(model: nn.Module, folder: str | os.PathLike) -> None:
    """Writes the wrapped ``model`` as safetensors in the dtypes it was wrapped with, and its config where it has one. Of a PEFT model
    its adapters are written, as PEFT does.

    Tied parameters are written once. Every file appears under its name only when it is whole. Of several ranks all call,
    and the first one writes. Raises StorageError.
    """
    engine = engine_of(model)
    with engine.using(), engine.collectives.together("save_pretrained"):
        _save_model(model, engine, Path(folder))


def _save_model(model: nn.Module, engine: Engine, folder: Path) -> None:
    engine.wait_idle()
    writes = engine.ranks.is_first
    if hasattr(model, "peft_config") and type(model).__module__.partition(".")[0] == "peft":
        _save_adapters(model, engine, folder, writes=writes)
        return
    write_sources(folder, _sources(model, engine.store), writes=writes)
    for part in ("config", "generation_config"):
        if writes and hasattr(config := getattr(model, part, None), "save_pretrained"):
            config.save_pretrained(folder)


def _save_adapters(model: nn.Module, engine: Engine, folder: Path, *, writes: bool) -> None:
    """Lists what of a PEFT model is not its base, under the names that PEFT gives it."""
    prefix = getattr(model.base_model, "prefix", None) or "prompt_encoder"
    trained = {name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
    sources = _sources(model, engine.store)
    own = {name: read() for name, (_, read) in sources.items() if name in trained or prefix in name or "modules_to_save" in name}
    if writes:
        try:
            model.save_pretrained(folder, state_dict=own, save_embedding_layers=False)
        except OSError as error:
            raise StorageError(error.errno or 0, f"cannot write the adapters to {folder}: {error}", str(folder)) from error


Source = tuple[int, Callable[[], torch.Tensor]]  # bytes, and how to read them


def write_sources(folder: Path, sources: dict[str, Source], *, writes: bool = True) -> None:
    """Reads the tensors and writes them, a file at a time, with an index where there are several. Without ``writes``
    they are only read: other ranks need this one for it. Raises StorageError."""
    try:
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
        files = _files(sources)
        names, total = {}, 0
        with progress("writing weights", sum(nbytes for nbytes, _ in sources.values())) as advance:
            for number, entries in enumerate(files, start=1):
                single = len(files) == 1
                name = "model.safetensors" if single else f"model-{number:05d}-of-{len(files):05d}.safetensors"
                tensors = {key: read().contiguous() for key, (_, read) in entries.items()}
                total += sum(tensor.nbytes for tensor in tensors.values())
                if writes:
                    _write(folder / name, tensors)
                names |= dict.fromkeys(entries, name)
                advance(sum(nbytes for nbytes, _ in entries.values()))
        if writes:
            _write_index(folder, names, total)
    except OSError as error:
        raise StorageError(error.errno, f"cannot write the model to {folder}: {error}", str(folder)) from error


def _sources(model: nn.Module, store) -> dict[str, Source]:
    """Name -> source of every tensor of the model's state dict, tied ones once."""
    tied = getattr(model, "_tied_weights_keys", None) or ()
    written: set[int] = set()
    sources: dict[str, Source] = {}
    candidates = [
        (prefix + name, tensor)
        for prefix, module in ((f"{path}." if path else "", m) for path, m in model.named_modules(remove_duplicate=False))
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None and name not in module._non_persistent_buffers_set
    ]
    for name, tensor in sorted(candidates, key=lambda entry: _is_tied_copy(entry[0], tied)):
        if id(tensor) in written:
            continue
        written.add(id(tensor))
        handle = handle_of(tensor)
        if handle is None:
            sources[name] = tensor.nbytes, lambda tensor=tensor: global_of(tensor, local_of(tensor.detach())).clone()
        else:
            nbytes = tensor.numel() * handle.shard.spec.wrapped_dtype.itemsize
            sources[name] = nbytes, lambda handle=handle: global_of(handle.param, handle.shard.read_value(store, handle.index))
    return sources


def _is_tied_copy(name: str, tied) -> bool:
    """Whether ``name`` is one that transformers expects to be left out for another name of the same tensor."""
    return any(name == key or name.endswith("." + key) for key in tied)


def _files(sources: dict[str, Source]) -> list[dict[str, Source]]:
    files: list[dict[str, Source]] = [{}]
    size = 0
    for name, (nbytes, read) in sources.items():
        if size and size + nbytes > FILE_NBYTES:
            files.append({})
            size = 0
        files[-1][name] = nbytes, read
        size += nbytes
    return files


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    with open(partial, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def _write_index(folder: Path, names: dict[str, str], nbytes: int) -> None:
    """The index of several files; none for one. Files of an earlier, differently split save are removed."""
    keep = set(names.values())
    for old in folder.glob("model*.safetensors"):
        if old.name not in keep:
            old.unlink()
    index = folder / "model.safetensors.index.json"
    if len(keep) > 1:
        index.write_text(json.dumps({"metadata": {"total_size": nbytes}, "weight_map": names}, indent=2))
    else:
        index.unlink(missing_ok=True)
