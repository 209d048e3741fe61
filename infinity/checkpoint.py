"""Checkpoints: everything needed to go on bit for bit, in safetensors and JSON, replaced atomically.

A checkpoint folder holds ``manifest.json`` and one folder ``infinity-<random>`` of data files, new at every save. A save writes its
data, syncs it, and then replaces the manifest in one rename; until then the old manifest names the old data, which
is removed afterwards. So whatever happens, the manifest names data that is whole. Who may write, and what is read while
others write: :mod:`infinity.checkpoint_folder`.

Tensors are stored per parameter, under its name:  ``weight/<name>`` in the dtype the model computes in,
``master/<name>`` (low halves or fp32) where there is one, ``exp_avg/<name>`` and ``exp_avg_sq/<name>``.

Of several ranks each writes what it has at home, in files of its own; a file's header says which elements of a tensor
its part is. Any number of ranks reads them: each what its own homes need. The header's form is that of
torch.distributed.checkpoint, whose ``HuggingFaceStorageReader`` loads the data folder too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from . import native
from .checkpoint_folder import DATA_NAME, OF_READERS, reading, remove_data, writing
from .collectives import Peers
from .engine import Engine
from .errors import CorruptionError, InfinityError, PeerError, StorageError, UsageError
from .gradients import GradState
from .materialize import overwrite
from .optimizer import InfinityOptimizer
from .parameter import ParamHandle, handle_of
from .shard import ARRAYS, MOMENTS
from .unit import ParamUnit
from .untrusted import is_regular, parse_json, read_text
from .weights import DTYPES, save_file
from .wrap import engine_of

FORMAT = 2
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"unit-\d{5}(-rank-\d{5})?\.safetensors|other\.safetensors")
MOST_STEPS = 1 << 53
PARTS = "DCP_SHARDING_INFO"  # in a file's header: tensor -> {"saved_offsets": [its first element]}
SAVED = [name for name in ARRAYS if name != "grad"]


# --- saving ---


def save_checkpoint(
    path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, extra: Any = None
) -> None:
    """Writes model, optimizer, random number generators and ``extra`` to the folder ``path``, replacing what was there.

    extra
        Anything of dicts, lists, numbers, strings, None and tensors; :func:`load_checkpoint` returns it.

    One unit at a time is in memory. Returns when everything is on the disk. Raises StorageError with the old
    checkpoint as it was, UsageError while another process saves to that folder.
    """
    engine = _engine_of(model, optimizer)
    with engine.using(), engine.peers.together("save_checkpoint"):
        _save(Path(path), engine, model, optimizer, extra)


def _save(root: Path, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> None:
    peers = engine.peers
    engine.settle()
    if landed := [handle.name for handle in engine.group_of if handle.grad.state is GradState.LANDED]:
        raise UsageError(
            f"save_checkpoint between backward and step: the gradients of {len(landed)} parameters ({landed[0]}, ...) "
            "would be lost. Save after step(), or call zero_grad() first."
        )
    tensors: dict[str, torch.Tensor] = {}
    content = {
        "format": FORMAT,
        "data": f"infinity-{_token(peers)}",
        "parameters": {handle.name: _describe(handle) for unit in engine.units for handle in unit.handles},
        "optimizer": optimizer.rule_name if optimizer is not None else None,
        "groups": _encode(_groups(optimizer), tensors, "groups"),
        "random": peers.collect(_random_state(), "random state"),
        "step_index": engine.step_index,
        "extra": _encode(extra, tensors, "extra"),
        "persistent_buffers": _persistent_buffers(model),
    }
    buffers = {name: buffer.detach().clone() for name, buffer in _buffers(model).items()}
    tensors |= {f"buffer/{name}": buffer for name, buffer in buffers.items()} | _buffers_of_others(buffers, peers)
    tensors |= {f"unmanaged/{name}": param.detach().clone() for name, param in _unmanaged(model).items()}
    for rank, states in enumerate(peers.collect(_random_state_tensors(), "random state")):
        tensors |= {f"random/{rank}/{name}": state for name, state in states.items()}
    published = False
    try:
        with writing(root) if peers.is_first else nullcontext():
            peers.meet(f"writing to {content['data']}, which the first rank may")  # before anybody makes a folder
            _write_data(root / content["data"], engine, content, tensors)
            if peers.is_first:
                os.replace(root / content["data"] / MANIFEST, root / MANIFEST)
                published = True  # from here on the new data is the checkpoint, whatever fails
                _sync_folder(root)
                remove_data(root, keep=content["data"])
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        state = "is written, but may not be on the disk yet" if published else "was not written; the old one stands"
        raise StorageError(
            error.errno, f"checkpoint {root} {state}: {os.strerror(error.errno or 0)}", str(error.filename or root)
        ) from error


def _write_data(data: Path, engine: Engine, content: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes everything of a checkpoint, and its manifest beside the data. Of ranks the first one removes what a failed save has
    written, when all of them have stopped writing."""
    peers = engine.peers
    try:
        failure, files = None, {}
        try:
            data.mkdir(parents=True, exist_ok=not peers.alone)
            files = _write_units(engine, data) if peers.writes else {}
        except Exception as error:  # noqa: BLE001 - the others are told of it, and it is raised below
            if peers.alone:
                raise
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        everyones = peers.collect((peers.world_rank, files, told), "the files of a checkpoint")
        if failure is not None:
            raise failure
        for rank, _, why in everyones:
            if why is not None:
                raise PeerError(f"rank {rank} could not write its part of the checkpoint {data.parent}: {why}. The old one stands.")
        if peers.is_first:
            content["files"] = {name: entry for _, of_one, _ in everyones for name, entry in of_one.items()}
            content["files"][OF_READERS] = _write_tensors(data / OF_READERS, tensors)
            if missing := [name for name in content["files"] if not (data / name).exists()]:
                raise StorageError(
                    errno.ENOENT, f"{missing[0]}, which another rank wrote, is not there: all ranks must see the same folder",
                    str(data / missing[0]),
                )  # fmt: skip
            _write_synced(data / MANIFEST, _seal(content))
            _sync_folder(data)
    except BaseException:
        if peers.is_first:
            shutil.rmtree(data, ignore_errors=True)
        raise


def _buffers_of_others(mine: dict[str, torch.Tensor], peers: Peers) -> dict[str, torch.Tensor]:
    """Buffers of the other ranks that are not the first one's: running statistics, of other batches."""
    if peers.alone:
        return {}
    digests = {name: hashlib.blake2b(_flat_bytes(buffer), digest_size=16).digest() for name, buffer in mine.items()}
    first = peers.collect(digests, "digests of the buffers")[0]
    others = peers.collect({name: mine[name].cpu() for name in mine if digests[name] != first.get(name)}, "buffers that differ")
    return {f"buffer-of-rank/{rank}/{name}": buffer for rank, of_one in enumerate(others) for name, buffer in of_one.items()}


def _flat_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _token(peers: Peers) -> str:
    """A name nobody had before, the same on all ranks."""
    return bytes(peers.broadcast(torch.tensor(list(secrets.token_bytes(6)), dtype=torch.uint8), "a name").tolist()).hex()


def _write_units(engine: Engine, data: Path) -> dict[str, dict[str, Any]]:
    """Writes what this rank has at home. Returns the manifest's entries."""
    entries = {}
    for unit in engine.units:
        rank = "" if engine.peers.size == 1 else f"-rank-{engine.peers.rank:05d}"
        name = f"unit-{unit.index:05d}{rank}.safetensors"
        entries[name] = _write_tensors(data / name, *_unit_tensors(engine, unit))
    return entries


def _seal(content: dict[str, Any]) -> bytes:
    """The manifest: the content, and the checksum of it."""
    return json.dumps(content | {"crc32c": _content_checksum(content)}, allow_nan=False).encode()


def _content_checksum(content: dict[str, Any]) -> int:
    text = json.dumps(content, sort_keys=True)
    return native.crc32c(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


def _engine_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Engine:
    engine = engine_of(model)
    if optimizer is not None and (not isinstance(optimizer, InfinityOptimizer) or optimizer._engine is not engine):
        raise UsageError("this optimizer is not the one that wrap_model returned with this model")
    return engine


def _unit_tensors(engine: Engine, unit: ParamUnit) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The unit's tensors, flat, as far as they are at home here, and the element that each part begins with."""
    tensors, begins = {}, {}
    for handle in unit.handles:
        shard = handle.shard
        for name in SAVED:
            # Elements in the order of their strides: what is read back is what lies at home, whatever the layout.
            if name in shard.arrays and (name in ("weight", "master") or handle.step):
                begin = shard.own_part(name, handle.index)[0] - shard.part(name, handle.index)[0]
                part = shard.read_own_part(engine.store, name, handle.index)
                empty = not shard.layout.placements[handle.index].numel
                if part.numel() or (empty and engine.peers.rank == 0):
                    tensors[f"{name}/{handle.name}"] = part
                    begins[f"{name}/{handle.name}"] = begin
    return tensors, begins


def _describe(handle: ParamHandle) -> dict[str, Any]:
    spec, place = handle.shard.spec, handle.shard.layout.placements[handle.index]
    return {
        "shape": list(place.shape),
        "stride": list(place.stride),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "master": spec.master.name if spec.stepped else None,
        "moments": str(spec.moment_dtype).removeprefix("torch."),
        "step": handle.step,
    }


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]] | None:
    if optimizer is None:
        return None
    return [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [handle_of(param).name for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}


def _persistent_buffers(model: nn.Module) -> list[str]:
    names = []
    for path, module in model.named_modules():
        there = (name for name, buffer in module._buffers.items() if buffer is not None)
        kept = [name for name in there if name not in module._non_persistent_buffers_set]
        names += [f"{path}.{name}" if path else name for name in kept]
    return [name for name in names if name in _buffers(model)]


def _unmanaged(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in model.named_parameters() if handle_of(param) is None}


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor], begins: dict[str, int] | None = None) -> dict[str, Any]:
    begins = begins or {}
    offsets = {name: [begins.get(name, 0)] + [0] * (tensor.dim() - 1) for name, tensor in tensors.items()}
    told = {name: {"saved_offsets": offset[: tensors[name].dim()]} for name, offset in offsets.items()}
    header = {"format": "pt", "DCP_VERSION": "1.0", PARTS: json.dumps(told)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=header)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return {"nbytes": path.stat().st_size, "crc32c": _file_checksum(path)}


def _file_checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            checksum = native.crc32c(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), checksum)
    return checksum


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- loading ---


def load_checkpoint(path: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Puts a checkpoint's values into a wrapped model, its optimizer and the random number generators; returns its
    ``extra``.

    Everything is checked before anything is changed: raises CorruptionError for damaged files, UsageError naming the
    parameters when the checkpoint is of another model.
    """
    engine = _engine_of(model, optimizer)
    with engine.using(repairing=True), engine.peers.together("load_checkpoint"):
        with checkpoint_of(Path(path), engine.peers) as (manifest, data):
            return _load(manifest, data, engine, model, optimizer)


@contextmanager
def checkpoint_of(root: Path, peers: Peers) -> Iterator[tuple[dict[str, Any], Path]]:
    """The manifest of the checkpoint in ``root`` and its data, which stays as it is until the block ends: a save may replace the
    checkpoint meanwhile. All ranks get the same one."""
    found: dict[str, Any] = {}

    def read_name() -> str:
        found.update(manifest=read_manifest(root))
        return found["manifest"]["data"]

    with reading(root, read_name) as data:
        first = peers.collect(found["manifest"], "the checkpoint to load")[0]
        if first["data"] == data.name:
            yield found["manifest"], data
            peers.meet(f"having read {data.name}, with which this rank is done")
            return
        with reading(root, lambda: first["data"]) as data:  # a save came between: the first rank holds the older one
            yield first, data
            peers.meet(f"having read {data.name}, with which this rank is done")


def _load(
    manifest: dict[str, Any], data: Path, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Any:
    rank = engine.peers.data_rank
    try:
        _check_parameters(engine, manifest["parameters"])
        for name, entry in manifest["files"].items():
            check_file(data / name, entry)
        other = {key: tensor for key, _, tensor in read_parts(data / OF_READERS)}
        groups, extra = _decode(manifest["groups"], other), _decode(manifest["extra"], other)
        _check_complete(engine, manifest, data)
        # A rank that did not exist then goes on with the generators it has.
        generators = _check_random_state(manifest["random"][rank], other, rank) if rank < len(manifest["random"]) else None
        if optimizer is not None:
            _check_optimizer(optimizer, manifest["optimizer"], groups)
        _check_shapes({f"buffer/{name}": value for name, value in _buffers(model).items()}, other)
        _check_shapes({f"buffer-of-rank/{rank}/{name}": value for name, value in _buffers(model).items()}, other)
        _check_shapes({f"unmanaged/{name}": value for name, value in _unmanaged(model).items()}, other)
    except InfinityError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        # Its checksum is right, so it was written like this: by something else, or by another version.
        raise CorruptionError(f"{data.parent / MANIFEST} does not describe a checkpoint: {error!r}") from error

    engine.peers.meet(f"loading {manifest['data']}, which every rank can")
    engine.settle()
    engine.prefetcher.release_all(engine.units)
    engine.halt("loading a checkpoint was cut short")  # until all of it is there
    engine.step_index, engine.step_begun = manifest["step_index"], False
    by_name = {handle.name: handle for unit in engine.units for handle in unit.handles}
    for handle in by_name.values():
        handle.changed()
    for name in manifest["files"]:
        if name.startswith("unit-"):
            for key, begin, tensor in read_parts(data / name):
                array, _, parameter = key.partition("/")
                handle = by_name[parameter]
                if array in handle.shard.arrays:
                    handle.shard.write_part(engine.store, array, handle.index, tensor, begin=begin, version=engine.step_index)
    for handle in by_name.values():
        _restore_step(engine, handle, manifest["parameters"][handle.name]["step"])
    if optimizer is not None:
        for group, saved in zip(optimizer.param_groups, groups):
            group.update({key: value for key, value in saved.items() if key != "params"})
    with torch.no_grad():
        for prefix, targets in (("buffer/", _buffers(model)), (f"buffer-of-rank/{rank}/", _buffers(model)), ("unmanaged/", _unmanaged(model))):
            for name, target in targets.items():
                if prefix + name in other:
                    overwrite(target, other[prefix + name])
    engine.count_backwards(0)
    if generators is not None:
        _restore_random_state(generators, other, rank)
    engine.halted = None
    return extra


def _restore_step(engine: Engine, handle: ParamHandle, step: int) -> None:
    """A parameter that had no step when saved starts with zero moments again."""
    if handle.step and not step:
        for name in MOMENTS:
            if name in handle.shard.arrays:
                zeros = torch.zeros(handle.shard.layout.placements[handle.index].shape, device="cpu")
                handle.shard.write_moment(engine.store, name, handle.index, zeros, version=engine.step_index)
    handle.step = step
    if handle.grad is not None:
        engine.gradients.clear(handle)


def read_manifest(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise UsageError(f"{root} holds no complete checkpoint: there is no {MANIFEST} in it") from error
    except (OSError, ValueError) as error:
        raise CorruptionError(f"{path} cannot be read: {error}") from error
    try:
        content = parse_json(text)
        intact = content.pop("crc32c") == _content_checksum(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{path} is not a checkpoint's manifest: {error!r}") from error
    if not intact:
        raise CorruptionError(f"{path} was changed: its checksum is not the one it was written with")
    if content.get("format") != FORMAT:
        raise UsageError(f"{path} has format {content.get('format')}, this version reads {FORMAT}")
    if not isinstance(content.get("data"), str) or not DATA_NAME.fullmatch(content["data"]):
        raise CorruptionError(f"{path} names data that is not beside it: {str(content.get('data'))[:80]!r}")
    files = content.get("files")
    odd = [name for name in files if not FILE_NAME.fullmatch(name)] if isinstance(files, dict) and files else files
    if odd or not files:
        raise CorruptionError(f"{path} names files that no save writes: {str(odd)[:80]}")
    return content


def check_file(path: Path, entry: dict[str, Any]) -> None:
    if path.exists() and not is_regular(path, links=False):
        raise CorruptionError(f"{path} is not a regular file, which a save writes")
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise CorruptionError(f"{path} is missing from the checkpoint") from error
    if nbytes != entry["nbytes"]:
        raise CorruptionError(f"{path} has {nbytes} bytes, but {entry['nbytes']} were written: it was truncated or grew")
    if (checksum := _file_checksum(path)) != entry["crc32c"]:
        raise CorruptionError(f"{path} was changed: its CRC-32C is {checksum:08x}, {entry['crc32c']:08x} was written")


def _check_parameters(engine: Engine, saved: dict[str, Any]) -> None:
    ours = {handle.name: _describe(handle) for unit in engine.units for handle in unit.handles}
    only_saved, only_ours = sorted(saved.keys() - ours.keys()), sorted(ours.keys() - saved.keys())
    if only_saved or only_ours:
        raise UsageError(
            f"the checkpoint is of another model: {len(only_saved)} of its parameters are not in this one "
            f"({', '.join(only_saved[:3])}), {len(only_ours)} of this one's are not in it ({', '.join(only_ours[:3])})"
        )
    for name, mine in ours.items():
        # A model wrapped without an optimizer takes the weights and leaves the rest.
        keys = ("shape", "stride", "dtype", "master", "moments") if mine["master"] else ("shape", "stride", "dtype")
        for key in keys:
            if saved[name][key] != mine[key]:
                raise UsageError(f"{name}: {key} is {saved[name][key]} in the checkpoint and {mine[key]} in this model")


def _check_complete(engine: Engine, manifest: dict[str, Any], data: Path) -> None:
    """The unit files together hold every array that the manifest's steps ask for, each at its length here."""
    if type(manifest["step_index"]) is not int or not 0 <= manifest["step_index"] < MOST_STEPS:
        raise TypeError(f"step_index is {manifest['step_index']!r}")
    parts: dict[str, list[tuple[int, int]]] = {}
    dtypes: dict[str, set[torch.dtype | None]] = {}
    for name in manifest["files"]:
        if name.startswith("unit-"):
            for key, begin, end, dtype in list_parts(data / name):
                parts.setdefault(key, []).append((begin, end))
                dtypes.setdefault(key, set()).add(dtype)
    if strange := parts.keys() - {f"{array}/{name}" for name in manifest["parameters"] for array in SAVED}:
        raise CorruptionError(f"{data} holds {sorted(strange)[0][:80]!r}, which is of no parameter of the checkpoint")
    lengths = {key: _covered(spans) for key, spans in parts.items()}
    for unit in engine.units:
        for handle in unit.handles:
            step = manifest["parameters"][handle.name]["step"]
            if type(step) is not int or not 0 <= step < MOST_STEPS:
                raise ValueError(f"{handle.name} has taken {step!r} steps")
            for array in handle.shard.arrays:
                begin, end = handle.shard.part(array, handle.index)
                wanted = array in ("weight", "master") or (step and array in SAVED)
                if wanted and lengths.get(f"{array}/{handle.name}") != end - begin:
                    raise CorruptionError(f"{data} holds no {array} of {handle.name} with {end - begin} elements")
                if wanted and end > begin and dtypes[f"{array}/{handle.name}"] != {handle.shard.arrays[array].dtype}:
                    raise CorruptionError(f"{data} holds {array} of {handle.name} in another dtype than {handle.shard.arrays[array].dtype}")


def _covered(spans: list[tuple[int, int]]) -> int:
    """How far from the first element on ``spans`` follow each other without a gap."""
    reached = 0
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if begin != reached:
            return -1
        reached = end
    return reached


def _check_optimizer(optimizer: InfinityOptimizer, rule_name: str | None, groups: list[dict] | None) -> None:
    if rule_name != optimizer.rule_name:
        raise UsageError(f"the checkpoint's optimizer is {rule_name}, this one is {optimizer.rule_name}")
    ours = [group["params"] for group in _groups(optimizer)]
    theirs = [group["params"] for group in groups or []]
    if ours != theirs:
        raise UsageError(
            f"the checkpoint's optimizer groups ({[len(names) for names in theirs]} parameters) are not this optimizer's "
            f"({[len(names) for names in ours]})"
        )
    optimizer.check_groups(groups or [], "this checkpoint")


def _check_shapes(ours: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    for name, mine in ours.items():
        if name in saved and saved[name].shape != mine.shape:
            raise UsageError(f"{name} has shape {tuple(saved[name].shape)} in the checkpoint, {tuple(mine.shape)} here")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise CorruptionError(f"{path} is not a readable safetensors file: {error}") from error


def _told(opened: Any) -> dict[str, Any]:
    """Which part of its tensor each entry of a file is."""
    told = parse_json((opened.metadata() or {}).get(PARTS, "{}"))
    if not isinstance(told, dict):
        raise ValueError("a header without the places of its parts")
    return told


def read_parts(path: Path) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(name, first element, values) of every tensor of which ``path`` has a part, one at a time."""
    with _opened(path) as opened:
        told = _told(opened)
        for name in opened.keys():
            begin = told.get(name, {}).get("saved_offsets") or [0]
            yield name, begin[0], opened.get_tensor(name)


def list_parts(path: Path) -> list[tuple[str, int, int, torch.dtype | None]]:
    """(name, first element, the one behind the last, dtype) of the same, without reading values."""
    with _opened(path) as opened:
        told, found = _told(opened), []
        for name in opened.keys():
            begin, entry = (told.get(name, {}).get("saved_offsets") or [0])[0], opened.get_slice(name)
            if type(begin) is not int or begin < 0:
                raise ValueError(f"{name} begins at {begin!r}")
            found.append((name, begin, begin + math.prod(entry.get_shape()), DTYPES.get(entry.get_dtype())))
        return found


# --- random number generators ---


def _random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def _random_state_tensors() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _check_random_state(state: dict[str, Any], tensors: dict[str, torch.Tensor], rank: int) -> tuple:
    """The states as the generators take them, tried on generators of our own."""
    version, internal, gauss = state["python"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    for_python = (version, tuple(internal), gauss)
    for_numpy = (kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached)
    random.Random().setstate(for_python)
    np.random.RandomState().set_state(for_numpy)
    torch.Generator().set_state(tensors[f"random/{rank}/cpu"])
    return for_python, for_numpy


def _restore_random_state(states: tuple, tensors: dict[str, torch.Tensor], rank: int) -> None:
    for_python, for_numpy = states
    random.setstate(for_python)
    np.random.set_state(for_numpy)
    torch.set_rng_state(tensors[f"random/{rank}/cpu"])
    for i in range(torch.cuda.device_count()):
        if f"random/{rank}/cuda:{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/{rank}/cuda:{i}"], i)


# --- values in JSON: tensors go to safetensors, what JSON lacks is marked ---


PLAIN_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                torch.int8, torch.uint8, torch.bool}  # fmt: skip


def _encode(value: Any, tensors: dict[str, torch.Tensor], path: str, above: tuple[int, ...] = ()) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.dtype not in PLAIN_DTYPES:
            raise UsageError(f"{path} is a {value.dtype} tensor ({value.layout}, {value.device}), which cannot be saved")
        name = f"{path.partition('.')[0]}/{len(tensors)}"
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"$tensor": name}
    if id(value) in above:
        raise UsageError(f"{path} contains itself, which a checkpoint cannot hold")
    above += (id(value),)
    if isinstance(value, (list, tuple)):
        items = [_encode(item, tensors, f"{path}.{i}", above) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {"$dict": [[_encode(key, tensors, path, above), _encode(item, tensors, f"{path}.{key}", above)]
                          for key, item in value.items()]}  # fmt: skip
    raise UsageError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: use dicts, lists, numbers, strings, tensors"
    )


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    return {_decode(key, tensors): _decode(item, tensors) for key, item in value["$dict"]}
