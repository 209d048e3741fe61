"""save_pretrained: a folder that ``transformers`` loads, written a few parameters at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import StorageError
from ..machine.progress import progress
from ..runtime.engine import Engine
from ..runtime.registry import engine_of, whole_of
from ..state.dtensors import global_of, local_of
from ..state.handle import handle_of
from ..state.parts import parts_of
from .weight_files import save_file

NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")  # of those that are written here
PARTIAL = re.compile(r"model(-\d{5}-of-\d{5}|\.safetensors\.index)?\.partial")  # and before they have it
FILE_NBYTES = 256 * 1024 * 1024  # of one safetensors file; what is in memory at once


def save_pretrained(model: nn.Module | Sequence[nn.Module], folder: str | os.PathLike) -> None:
    """Writes the wrapped ``model`` as safetensors in the dtypes it was wrapped with, and its config where it has one. Of a PEFT model
    its adapters are written, as PEFT does.

    Tied parameters are written once. Files get their names when all are whole, and no index ever names files of two saves: the folder is
    the old model, the new one, or, for a moment between, none. Of several ranks all call, and the first one writes; of a pipeline (whose
    chunks are given as a list) the first one of each stage, into one folder. Raises StorageError.
    """
    engine = engine_of(model)
    engine.refuse_alike("save_pretrained")
    with engine.using(), engine.collectives.together("save_pretrained"):
        _save_model(whole_of(model), parts_of(whole_of(model))[0], engine, Path(folder))


def is_adapted(model: nn.Module) -> bool:
    """Tells whether ``model`` is one of PEFT's, of which its adapters are saved."""
    return hasattr(model, "peft_config") and type(model).__module__.partition(".")[0] == "peft"


def _save_model(model: nn.Module, first: nn.Module, engine: Engine, folder: Path) -> None:
    """``first``: the model, or the first of its parts, which has the configuration."""
    engine.wait_idle()
    ranks = engine.ranks
    writes = ranks.is_first
    if is_adapted(model):
        _save_adapters(model, folder, writes=writes)
        return
    files = _files(sources_of(model))
    stages = [] if ranks.stages is None else [ranks.stages]
    mine = [[(name, nbytes) for name, (nbytes, _) in entries.items()] for entries in files]
    everyones = engine.collectives.collect(mine, "the files of the stages", stages)
    names = _name_files(everyones)
    is_writer = ranks.rank == 0 and ranks.writes and ranks.part == 0
    with _removed_on_error([_partial(folder / name) for name in names[ranks.stage]] if is_writer else []):
        _write_files(folder, files, names[ranks.stage], writes=is_writer)
        engine.collectives.rendezvous("the files of all stages")  # where one that failed raises on all
    of_all = zip((name for of_one in names for name in of_one), (entries for of_one in everyones for entries in of_one))
    if writes:
        with _storing(folder):
            _name_written(folder, dict(of_all))
        write_configs(first, folder)


def write_configs(model: nn.Module, folder: Path) -> None:
    """Writes the configurations of a transformers model, of another one none."""
    for part in ("config", "generation_config"):
        if hasattr(config := getattr(model, part, None), "save_pretrained"):
            config.save_pretrained(folder)


def _save_adapters(model: nn.Module, folder: Path, *, writes: bool) -> None:
    own = adapter_tensors(model)
    if writes:
        try:
            model.save_pretrained(folder, state_dict=own, save_embedding_layers=False)
        except OSError as error:
            raise StorageError(error.errno or 0, f"cannot write the adapters to {folder}: {error}", str(folder)) from error


def adapter_tensors(model: nn.Module, *, embeddings: bool = False) -> dict[str, torch.Tensor]:
    """Reads what of a wrapped PEFT model is not its base, under the names that its state dict has. ``embeddings``: and the base's
    embeddings, which PEFT saves too where they are adapted or have another size than the base's."""
    prefix = getattr(model.base_model, "prefix", None) or "prompt_encoder"
    wanted = {name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
    if embeddings:
        tables = {id(module) for get in ("get_input_embeddings", "get_output_embeddings") if (module := getattr(model, get)())}
        above = [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in tables]
        wanted |= {name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(tuple(above))}
    own = {
        name: read for name, (_, read) in sources_of(model).items() if name in wanted or prefix in name or "modules_to_save" in name
    }
    return {name: read() for name, read in own.items()}


Source = tuple[int, Callable[[], torch.Tensor]]  # bytes, and how to read them


def write_sources(folder: Path, sources: dict[str, Source], *, writes: bool = True) -> int:
    """Reads the tensors and writes them, a file at a time, with an index where there are several. Without ``writes`` they are only read: other
    ranks need this one for it. Returns the number of elements. Raises StorageError."""
    files = _files(sources)
    names = _name_files([files])[0]
    with _removed_on_error([_partial(folder / name) for name in names] if writes else []):
        written = _write_files(folder, files, names, writes=writes)
    if writes:
        with _storing(folder):
            _name_written(folder, {name: [(key, nbytes) for key, nbytes, _ in of_one] for name, of_one in zip(names, written)})
    return sum(numel for of_one in written for _, _, numel in of_one)


def _name_files(of_stages: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Names the files of every stage: numbered through, one alone without a number."""
    count, number, names = sum(map(len, of_stages)), 0, []
    for files in of_stages:
        numbers = range(number + 1, number + len(files) + 1)
        names.append(["model.safetensors" if count == 1 else f"model-{n:05d}-of-{count:05d}.safetensors" for n in numbers])
        number += len(files)
    return names


def _write_files(
    folder: Path, files: list[dict[str, Source]], names: list[str], *, writes: bool
) -> list[list[tuple[str, int, int]]]:
    """Writes the files whole, not yet under their names. Returns the tensors of each: name, bytes and elements,
    which a source that converts may give other than it said. Raises StorageError."""
    written = []
    with _storing(folder):
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
        nbytes = sum(nbytes for entries in files for nbytes, _ in entries.values())
        with progress("writing weights", nbytes) as advance:
            for name, entries in zip(names, files):
                tensors = {key: read().contiguous() for key, (_, read) in entries.items()}
                if writes:
                    _write(_partial(folder / name), tensors)
                written.append([(key, tensor.nbytes, tensor.numel()) for key, tensor in tensors.items()])
                advance(sum(nbytes for nbytes, _ in entries.values()))
    return written


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Has errors of the file system tell which model could not be written."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno or 0, f"cannot write the model to {folder}: {error}", str(folder)) from error


def sources_of(model: nn.Module) -> dict[str, Source]:
    """Maps the name of every tensor of a wrapped model's state dict to how it is read, tied ones once."""
    store = engine_of(model).store
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
        handle = handle_of(tensor)
        if id(tensor) in written or (handle is not None and not handle.is_counted):  # another stage writes it
            continue
        written.add(id(tensor))
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


def _partial(path: Path) -> Path:
    return path.with_suffix(".partial")


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    _flush(path)


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def _removed_on_error(paths: Sequence[Path]) -> Iterator[None]:
    """Removes ``paths`` where the block raises: what is half a model takes a disk's room. A disk that refuses this too
    changes nothing about the error."""
    try:
        yield
    except BaseException:
        for path in paths:
            with suppress(OSError):
                path.unlink()
        raise


def _name_written(folder: Path, files: dict[str, list[tuple[str, int]]]) -> None:
    """Gives all written files their names and, where there are several, an index of their tensors' names and bytes. Files of an earlier,
    differently split save are removed."""
    index = folder / "model.safetensors.index.json"
    if len(files) > 1:
        index.unlink(missing_ok=True)  # it would name old files and new ones
    for name in files:
        os.replace(_partial(folder / name), folder / name)
    if len(files) > 1:
        total = sum(nbytes for entries in files.values() for _, nbytes in entries)
        names = {key: name for name, entries in files.items() for key, _ in entries}
        _partial(index).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2))
        _flush(_partial(index))
        os.replace(_partial(index), index)
    else:
        index.unlink(missing_ok=True)
    for old in folder.glob("model*"):
        if old.name not in files and (NAME.fullmatch(old.name) or PARTIAL.fullmatch(old.name)):
            old.unlink()
