"""Export: writes the weights of a checkpoint, or of a folder of safetensors, as a folder that
``transformers`` loads. Needs no model, GPU or other ranks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ... import native
from ...core.units.flat_param_spec import MASTER_DTYPES
from ...errors import ConfigError, CorruptionError, InfinityError, UsageError
from ...files.boxes import Box
from ...files.kept_dtypes import keeps_fp32
from ...files.module_names import Incoming
from ...files.outputs import identity_of, replacing
from ...files.source import Source
from ...files.weight_files import FILE_DTYPES, WeightFiles
from ...ranks.collectives import Collectives
from ..foreign.foreign import foreign_sources, is_foreign
from ..packed.unpacked import FP8, without_packing
from .described import described_model, model_described_by
from .folder import OF_READERS
from .hub_names import (
    SHARD_SIZE,
    flat_param_size_of,
    hub_sources,
    left_out,
    may_lack,
    names_to_write,
)
from .load import NOT_A_CHECKPOINT, checkpoint_of
from .manifest import MANIFEST, OTHERS, check_files, what_it_is
from .model_files import write_sources
from .parts import read_tensors
from .pretrained import write_configs
from .saved_tensors import SavedTensors

KINDS = {str(kind).removeprefix("torch."): kind for kind in FILE_DTYPES.values()}
MASTERS = {kind.name: dtype for kind, dtype in MASTER_DTYPES.items()}
OF_TOKENIZER = (
    "tokenizer*",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
BESIDE = (
    "config.json",
    "generation_config.json",
    "chat_template*",
    "*processor*.json",
    *OF_TOKENIZER,
)


ELSEWHERE = "elsewhere.json"  # in it: the folder of tensors that its class has no place for
OF_MODEL = "model"  # a folder in a checkpoint of `infinity train`: what belongs to its model
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OF_ADAPTER = re.compile(r"(\.lora_\w+|\.modules_to_save)\.\w+(?=\.|$)")  # with PEFT's own name
Change = Callable[[dict[str, Source]], dict[str, Source]]
Write = Callable[[dict[str, Source], nn.Module | None, Path | None, Path | None], object]


def export(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    model: Path | None = None,
    change: Change | None = None,
    write: Write | None = None,
    tokenizer: Path | None = None,
) -> dict[str, int]:
    """Writes the weights of ``checkpoint``, of any number of ranks, to ``folder`` as safetensors.
    Also accepts checkpoints of DeepSpeed, torch.distributed.checkpoint (FSDP), ``torch.save``.

    checkpoint
        A folder of save_checkpoint, or a file or folder of safetensors.
    dtype
        None: the dtype in which the model computed. ``torch.float32`` takes the masters, if any.
    model
        A folder whose configuration and tokenizer are copied. None: a checkpoint of a transformers
        model has its own configuration, and one of `infinity train` its tokenizer.
    change
        Maps the tensors that are read to others, for example to merge an adapter.
    write
        Writes the tensors in another form: gets them by the names in a folder of transformers, the
        model on meta, if there is one, and the folders of its configuration and of its tokenizer.
        None: safetensors.
    tokenizer
        A folder whose tokenizer, if it has one, is taken in place of that of ``model``.

    A transformers ``model`` gets the names, shapes and ``config.json`` of
    :func:`infinity.save_pretrained`; its configuration names the dtype. Tensors that it keeps in
    fp32 stay so. Replaces the content of ``folder``; `infinity export` checks for that first. One
    tensor is in memory at a time, or those converted together. Returns counts of parameters and
    bytes. Raises UsageError without a checkpoint, CorruptionError if damaged, StorageError.
    """
    _check_folders(checkpoint, folder, model)
    if tokenizer is not None and not (tokenizer / "tokenizer_config.json").is_file():
        tokenizer = None
    target = _Target(folder, dtype, model, described_model(model), change, write, tokenizer)
    if not (checkpoint / MANIFEST).exists():
        if is_foreign(checkpoint):
            if change is not None:
                raise ConfigError(
                    f"{checkpoint} is a checkpoint of another tool: export it first, then merge the"
                    " adapter into what was written"
                )
            with foreign_sources(checkpoint) as sources:
                return target.write(target.rest() | sources)
        if checkpoint.is_file() or list(checkpoint.glob("*.safetensors")):
            return target.write(without_packing(WeightFiles(checkpoint).sources(), checkpoint))
        _refuse_others(checkpoint)
    with checkpoint_of(checkpoint, Collectives()) as (manifest, data):
        try:
            return _export(manifest, data, target)
        except InfinityError:
            raise
        except (*NOT_A_CHECKPOINT, RuntimeError) as error:
            raise CorruptionError(
                f"{checkpoint / MANIFEST} does not describe a checkpoint: {error!r}"
            ) from error


def _refuse_others(checkpoint: Path) -> None:
    """Raises UsageError if it is another program's, without the files that were looked for."""
    if any((checkpoint / name).exists() for name in OTHERS):
        kind = what_it_is(checkpoint).partition(":")[0]
        raise UsageError(f"{kind}, and the files of its weights are not in it")


def _check_folders(checkpoint: Path, folder: Path, model: Path | None) -> None:
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json: give the folder that the model came from")
    for read in (checkpoint, model):
        if read is not None and identity_of(folder) == identity_of(read):
            raise ConfigError(f"{folder} is what is read: give another folder to write")


@dataclass(frozen=True)
class _Target:
    """The folder to write, and the form of its tensors."""

    folder: Path
    dtype: torch.dtype | None
    beside: Path | None  # the folder with configuration and tokenizer
    model: nn.Module | None  # built from the configuration, on meta
    change: Change | None
    writes: Write | None = None
    tokenizer: Path | None = None  # the folder with another tokenizer

    def dtypes(self) -> Callable[[str], torch.dtype | None]:
        """Returns a function from a tensor's name to its target dtype. None: its own dtype, also if
        the model keeps it in fp32."""
        keeps = keeps_fp32(self.model, self.dtype) if self.model is not None else lambda name: False
        return lambda name: None if keeps(name) else self.dtype

    def write(self, sources: dict[str, Source]) -> dict[str, int]:
        """Writes ``sources``. Returns the numbers of elements and of bytes."""
        dtype_of = self.dtypes()
        sources = {name: source.to(dtype_of(name)) for name, source in sources.items()}
        dtype = self._main_dtype(sources)
        sources = self._as_saved(sources)
        if self.writes is not None:
            self.writes(sources, self.model, self.beside, self.tokenizer or self.beside)
        else:
            numel = self.model.num_parameters() if self.model is not None else None
            size = SHARD_SIZE if self.model is None else flat_param_size_of(self.model)
            write_sources(self.folder, sources, numel=numel, max_shard_size=size)
            self._write_beside(dtype)
        return {
            "parameters": sum(source.shape.numel() for source in sources.values()),
            "nbytes": sum(source.nbytes for source in sources.values()),
        }

    def rest(self, noted: Path | None = None) -> dict[str, Source]:
        """Returns the tensors for which the model's class has no place, from its folder: a
        checkpoint does not have them. ``noted``: their names, and the folder that they were in.
        Raises ConfigError if one is not to be found."""
        noted_rest = {"tensors": []}
        beside = self.beside
        if noted is not None and noted.is_file():
            noted_rest = json.loads(noted.read_text())
            beside = Path(noted_rest["folder"]) if beside in (None, noted.parent) else beside
        sources = {}
        if self.model is not None and beside is not None and any(beside.glob("*.safetensors")):
            unpacked = without_packing(WeightFiles(beside).sources(), beside)
            sources = left_out(self.model, unpacked)
        if missing := [name for name in noted_rest["tensors"] if name not in sources]:
            raise ConfigError(
                f"{beside} has not {len(missing)} tensors that the model's class has no place for"
                f" ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}): give the folder"
                " of the model that was trained, --model DIR"
            )
        return sources

    def _as_saved(self, sources: dict[str, Source]) -> dict[str, Source]:
        """Applies the change to the tensors, and gives them the names of the model's own
        ``save_pretrained``, unless they have them already."""
        own = dict(self.model.state_dict(keep_vars=True)) if self.model is not None else {}
        if (
            self.model is not None
            and self.change is not None
            and not _has_all(self.model, own, sources)
        ):
            incoming = Incoming(self.model, sources, own).sources
            sources = incoming if _has_all(self.model, own, incoming) else sources
        if self.change is not None:
            sources = self.change(sources)
        if self.model is None or not _has_all(self.model, own, sources):
            return sources
        of_tensor: dict[int, Source] = {}
        names: dict[int, str] = {}
        for name in sources.keys() & own.keys():
            tied, source = id(own[name]), sources[name]
            if tied in names and not torch.equal(of_tensor[tied].read(), source.read()):
                raise ConfigError(
                    f"{names[tied]} and {name} are tied by the configuration, and their values"
                    " differ, so that transformers does not tie them. Set tie_word_embeddings to"
                    " false in config.json"
                )
            of_tensor[tied], names[tied] = source, name
        named = {
            name: sources.get(name, of_tensor[id(own[name])])
            for name in names_to_write(self.model, own)
            if id(own[name]) in of_tensor
        }
        return hub_sources(self.model, named) | {
            name: source for name, source in sources.items() if name not in own
        }

    def _main_dtype(self, sources: dict[str, Source]) -> torch.dtype | None:
        """Returns the dtype of the model's first parameter, which its configuration names."""
        first = (
            [name for name, param in self.model.named_parameters() if param.is_floating_point()]
            if self.model is not None
            else []
        )
        dtypes = [source.dtype for source in sources.values() if source.dtype.is_floating_point]
        return next(
            (sources[name].dtype for name in first if name in sources),
            dtypes[0] if dtypes else None,
        )

    def _write_beside(self, dtype: torch.dtype | None) -> None:
        if self.model is not None:
            write_configs(self.model, self.folder, dtype=dtype)
        files = _matching(self.beside, BESIDE)
        if self.tokenizer is not None:  # whole: a template of the one is not for the other
            files -= _matching(self.beside, OF_TOKENIZER)
            files |= _matching(self.tokenizer, OF_TOKENIZER)
        if not files:
            return
        with replacing(self.folder) as made:
            for path in files:
                if self.model is None or path.name != "config.json":
                    shutil.copy(path, made / path.name)


def _matching(folder: Path | None, patterns: tuple[str, ...]) -> set[Path]:
    if folder is None:
        return set()
    return {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}


def _has_all(model: nn.Module, own: dict[str, torch.Tensor], sources: Mapping[str, Source]) -> bool:
    """Returns whether ``sources`` have every tensor of the state dict ``own``, under one of the
    modules' names."""
    there = {id(own[name]) for name in own if name in sources}
    return all(id(tensor) in there or may_lack(model, name) for name, tensor in own.items())


def _export(manifest: dict[str, Any], data: Path, target: _Target) -> dict[str, int]:
    check_files(data, manifest["files"])
    other = read_tensors(data / OF_READERS)
    for name, entry in manifest["parameters"].items():
        _check_place(name, entry)
    if target.beside is None and (data.parent / OF_MODEL).is_dir():
        target = replace(target, beside=data.parent / OF_MODEL)
    if target.model is None and isinstance(manifest.get("config"), str):
        target = replace(target, model=model_described_by(manifest["config"]))
    with SavedTensors(data, manifest) as saved:
        sources = _sources(saved, manifest, other, target)
        if any(map(OF_ADAPTER.search, sources)) and target.change is None:
            if target.writes is not None:
                raise ConfigError(
                    f"{data.parent} is of a model with adapters: export them to a folder first,"
                    " then merge that into their base, `infinity export BASE OUT --merge FOLDER`"
                )
            return _write_adapter(data.parent, sources, target)
        _refuse_packed(data.parent, sources)
        written = target.write(target.rest(data.parent / OF_MODEL / ELSEWHERE) | sources)
    return written | {"parameters": sum(_numel(entry) for entry in manifest["parameters"].values())}


def _refuse_packed(checkpoint: Path, sources: Mapping[str, Source]) -> None:
    """Raises ConfigError for a checkpoint of packed weights: it has their bytes, and not how to
    make numbers of them."""
    packed = [
        name
        for name, source in sources.items()
        if name.endswith((".codes", ".absmax")) or (source.dtype in FP8)
    ]
    if packed:
        raise ConfigError(
            f"{checkpoint} has packed weights ({packed[0]}), which a file of plain weights has not."
            " Load it with infinity.load_checkpoint into the same model, and write that with"
            " infinity.save_pretrained or infinity.integrations.save_merged"
        )


def _write_adapter(checkpoint: Path, sources: dict[str, Source], target: _Target) -> dict[str, int]:
    """Writes the adapters of a PEFT model as PEFT has them. Raises UsageError without their
    configuration, which only `infinity train` keeps in a checkpoint."""
    config = checkpoint / OF_MODEL / ADAPTER_CONFIG
    if not config.is_file():
        raise UsageError(
            f"{checkpoint} is of a model with adapters, whose configuration it does not have. Load"
            " it with infinity.load_checkpoint into the same model, and write that with"
            " infinity.save_pretrained."
        )
    own = {OF_ADAPTER.sub(r"\1", name): each for name, each in sources.items()}
    own = {
        name: each for name, each in own.items() if ".lora_" in name or "modules_to_save" in name
    }
    tensors = {name.replace(".modules_to_save", ""): each.read() for name, each in own.items()}
    with replacing(target.folder) as made:
        save_file(tensors, made / ADAPTER, metadata={"format": "pt"})
        shutil.copy(config, made / ADAPTER_CONFIG)
    target._write_beside(None)
    return {
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
    }


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Reads the weights and buffers of a save_checkpoint folder into memory: in fp32 if they have
    masters, each tied one under its first name. Raises as :func:`export` does."""
    with checkpoint_of(checkpoint, Collectives()) as (manifest, data):
        check_files(data, manifest["files"])
        other = read_tensors(data / OF_READERS)
        has_master = {
            name for name, entry in manifest["parameters"].items() if entry["master"] in MASTERS
        }
        with SavedTensors(data, manifest) as saved:
            targets = [_Target(data, dtype, None, None, None) for dtype in (None, torch.float32)]
            plain, in_fp32 = (_sources(saved, manifest, other, target) for target in targets)
            return {name: (in_fp32 if name in has_master else plain)[name].read() for name in plain}


def _sources(
    saved: SavedTensors, manifest: dict[str, Any], other: dict[str, torch.Tensor], target: _Target
) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    dtype_of = target.dtypes()
    for name, entry in manifest["parameters"].items():
        kind = dtype_of(name) or KINDS[entry["dtype"]]
        saved.check("weight", name, KINDS[entry["dtype"]])
        if kind == torch.float32 and entry["master"] in MASTERS:
            saved.check("master", name, MASTERS[entry["master"]])
        sources[name] = Source(torch.Size(entry["shape"]), kind, _reader(saved, name, entry, kind))
    kept = [f"buffer/{name}" for name in manifest["persistent_buffers"]]
    kept += [key for key in other if key.startswith("unmanaged/")]
    for key in kept:
        sources[key.partition("/")[2]] = Source.of(other[key])
    return sources


def _check_place(name: str, entry: dict[str, Any]) -> None:
    """Raises ValueError for a shape and strides that do not fit the number of elements."""
    shape, stride = entry["shape"], entry["stride"]
    if len(shape) != len(stride) or not all(
        type(n) is int and 0 <= n < 1 << 48 for n in (*shape, *stride)
    ):
        raise ValueError(f"{name} has shape {shape} and strides {stride}")
    if _numel(entry) and 1 + sum((n - 1) * step for n, step in zip(shape, stride)) > _numel(entry):
        raise ValueError(f"{name} of shape {shape} has strides {stride}")


def _numel(entry: dict[str, Any]) -> int:
    return torch.Size(entry["shape"]).numel()


def _reader(
    saved: SavedTensors, name: str, entry: dict[str, Any], dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
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
