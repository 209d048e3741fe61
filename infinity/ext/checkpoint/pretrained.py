"""save_pretrained: writes a folder that ``transformers`` loads, a few tensors at a time."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ...core.run.job import Job, wait_idle
from ...core.run.registry import engine_of, whole_of
from ...core.units.forms import gathered, like
from ...core.units.handle import handle_of
from ...core.wrap.parts import parts_of
from ...errors import ConfigError, StorageError, UsageError
from ...files.module_names import PREFIX, is_transformers
from ...files.outputs import Identity, Output, check_free, folder_of, identity_of, replacing
from ...files.source import Source
from ..coded.coded import Coded
from ..packed.packed import is_code
from ..packed.unpacked import dense_source, has_packed
from .hub_names import flat_param_size_of, hub_sources, names_to_write
from .model_files import describe_files, name_files, name_written, split, storing, written
from .operations import CheckpointOperation

WEIGHT_NAMES = re.compile(r".*\.(safetensors|bin|pt|pth|gguf)|.*\.index\.json")
CARD = "README.md"


def save_pretrained(
    model: nn.Module | Sequence[nn.Module],
    folder: str | os.PathLike,
    *,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the wrapped ``model`` as safetensors in the dtypes of the wrap, and its config if it
    has one. Of a PEFT model writes the adapters, as PEFT does.

    A transformers model's folder equals that of its own ``save_pretrained``: names, dtypes, files.
    Tensors that transformers fuses or renames when it loads a model are written as on the hub; tied
    parameters once. One tensor is in memory at a time, or those that are converted together.

    max_shard_size
        Maximum bytes of one file, or text such as "5GB"; a larger tensor has a file to itself.
        None: as the model's own ``save_pretrained``, which is 50 GB in transformers 5.
    overwrite
        Replaces a model that is in ``folder``. A model of the same names and shapes, which this
        process has saved there, is replaced in any case.

    Files get their names when all are complete: the folder is the old model, the new one, or, for a
    moment between, none. Every rank calls this, and the first one writes; of a pipeline (its chunks
    are given as a list) the first rank of each stage, into one folder.

    Raises ConfigError for a quantised model, an invalid size, and a dtype that no file holds, with
    the folder unchanged; StorageError. If the folder holds another model, writes to a new folder
    beside it, and raises a ConfigError that names it.
    """
    job = engine_of(model).job
    job.uses.check(CheckpointOperation.SAVE_PRETRAINED)
    if job.prefix:
        raise UsageError(
            "save_pretrained: stages of this pipeline call parameters the same, which one folder"
            " cannot tell apart. Give them the names of the whole model (infinity.parallel.pipeline"
            " does), or use save_checkpoint, which puts the stage before the name."
        )
    with (
        job.uses.begin(),
        job.collectives.together("save_pretrained"),
        own_place(model, job, folder_of(folder, "save_pretrained's folder"), overwrite) as place,
    ):
        _save_model(whole_of(model), parts_of(whole_of(model))[0], job, place, max_shard_size)


# Folder -> names and shapes of the model that this process saved there. The same model may be
# saved there again.
_saved: dict[Identity, frozenset[tuple[str, torch.Size]]] = {}


@contextmanager
def own_place(model: nn.Module, job: Job, folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yields ``folder``, or a new one beside it if another model is there; then raises ConfigError
    after the block, so that neither model is lost. Every rank calls this."""
    tensors = frozenset(
        (name, param.shape)
        for name, param in whole_of(model).named_parameters(remove_duplicate=False)
    )
    refusal, beside = "", ""
    if job.ranks.is_first and not overwrite and _saved.get(identity_of(folder)) != tensors:
        try:
            check_free(Output("the folder", folder, replaces=WEIGHT_NAMES), way="overwrite=True")
        except ConfigError as error:
            refusal, beside = str(error), str(_new_beside(folder))
    refusals = job.collectives.collect((refusal, beside), "the folder to write to")
    refusal, beside = max(refusals)  # of the first rank, which checked
    place = Path(beside) if beside else folder
    try:
        yield place
    finally:
        if beside and job.ranks.is_first and not os.listdir(place):
            place.rmdir()
    _saved[identity_of(place)] = tensors
    if refusal:
        raise ConfigError(f"{refusal} This model was written to {place}.")


def _new_beside(folder: Path) -> Path:
    """Creates a folder named ``folder`` and a number."""
    whole, number = Path(os.path.abspath(folder)), 1
    while os.path.lexists(place := whole.with_name(f"{whole.name}-{number}")):
        number += 1
    try:
        place.mkdir()
    except OSError as error:
        raise StorageError(
            error.errno or 0,
            f"{folder} holds another model, and {place} cannot be made",
            str(place),
        ) from error
    return place


def is_adapted(model: nn.Module) -> bool:
    """Returns whether ``model`` is a PEFT model, of which the adapters are saved."""
    return hasattr(model, "peft_config") and type(model).__module__.partition(".")[0] == "peft"


def _has_adapters(model: nn.Module) -> bool:
    """Returns whether a transformers model has added adapters, which alone are saved."""
    return is_transformers(model) and bool(getattr(model, "_hf_peft_config_loaded", False))


CARRIED = "_infinity_carried"  # an attribute of a model


def carry(model: nn.Module, sources: Mapping[str, Source]) -> None:
    """Lets each folder that is saved of ``model`` have ``sources``, too: tensors of the folder that
    it came from, for which its class has no place."""
    model.__dict__[CARRIED] = dict(sources)


def _save_model(
    model: nn.Module, first: nn.Module, job: Job, folder: Path, max_shard_size: int | str | None
) -> None:
    """Writes the model. ``first``: the model, or the first of its parts, which has the
    configuration."""
    wait_idle(job)
    ranks = job.ranks
    writes = ranks.is_first
    if is_adapted(model) or _has_adapters(model):
        _save_adapters(model, folder, writes=writes)
        return
    if getattr(first, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"{type(first).__name__} is packed, and its quantizer alone knows what a folder has to"
            " hold: infinity.unwrap_model(model), then model.save_pretrained(folder)"
        )
    if any(
        has_packed(module, name) and not isinstance(param, Coded)  # which is dense in a file
        for module in model.modules()
        for name, param in module._parameters.items()
    ):
        raise ConfigError(
            f"{type(first).__name__} is packed, which its configuration does not say, so that"
            " from_pretrained could not load it: its weights have not changed and are in the folder"
            " that they came from. infinity.save_checkpoint keeps them as they are"
        )
    files = split(
        hub_sources(first, sources_of(model)) | first.__dict__.get(CARRIED, {}),
        flat_param_size_of(first) if max_shard_size is None else max_shard_size,
    )
    stages = [] if ranks.pp_group is None else [ranks.pp_group]
    mine = describe_files(files), _numel(model)
    everyones = job.collectives.collect(mine, "the files of the stages", stages)
    names = name_files([len(files) for files, _ in everyones])
    is_writer = ranks.rank == 0 and ranks.writes and ranks.tp_rank == 0
    with written(folder, files, names[ranks.pp_rank], writes=is_writer):
        # A failed rank raises on all of them here.
        job.collectives.barrier("the files of all stages")
    of_all = dict(
        zip(
            (name for of_one in names for name in of_one),
            (file for files, _ in everyones for file in files),
        )
    )
    if writes:
        with storing(folder):
            name_written(folder, of_all, numel=sum(numel for _, numel in everyones))
            write_configs(first, folder)


def _numel(model: nn.Module) -> int:
    """Counts the elements of the parameters, without those that another stage counts."""
    handles = {param: handle_of(param) for param in model.parameters()}
    return sum(
        param.numel() for param, handle in handles.items() if handle is None or handle.is_counted
    )


def write_configs(
    model: nn.Module, folder: Path, *, dtype: torch.dtype | None = None, unpacked: bool = False
) -> None:
    """Writes the configurations of a transformers model, of another none. Sets its class and
    ``dtype`` (None: of its first parameter) in its configuration, as its own ``save_pretrained``
    does. Adds the files with its code if it is not part of transformers. ``unpacked``: leaves out
    how the weights are packed."""
    with replacing(folder) as made, contextlib.ExitStack() as back:
        if (
            unpacked
            and (packing := vars(model.config).pop("quantization_config", None)) is not None
        ):
            back.callback(setattr, model.config, "quantization_config", packing)
        if is_transformers(model):
            model.config.architectures = [type(model).__name__]
            dtypes = [
                _wrapped_dtype(param)
                for param in model.parameters()
                if param.is_floating_point() and not is_code(param)
            ]
            if dtype is not None or dtypes:
                model.config.dtype = str(dtype or dtypes[0]).removeprefix("torch.")
            if getattr(model, "_auto_class", None) is not None:
                importlib.import_module("transformers.dynamic_module_utils").custom_object_save(
                    model, made, config=model.config
                )
        generates = not is_transformers(model) or model.can_generate()
        for part in ("config", "generation_config") if generates else ("config",):
            if hasattr(config := getattr(model, part, None), "save_pretrained"):
                config.save_pretrained(made)


def _wrapped_dtype(param: torch.Tensor) -> torch.dtype:
    handle = handle_of(param)
    return param.dtype if handle is None else handle.flat_param.spec.wrapped_dtype


def _save_adapters(model: nn.Module, folder: Path, *, writes: bool) -> None:
    added = not is_adapted(model)
    own = _tensors_of_added(model) if added else adapter_tensors(model, saving=True)
    if writes:
        try:
            with replacing(folder) as made, prompts_in_memory(model, own):
                if (card := folder / CARD).is_file():  # PEFT appends to it
                    shutil.copy(card, made)
                model.save_pretrained(made, state_dict=own)
        except OSError as error:
            raise StorageError(
                error.errno or 0, f"cannot write the adapters to {folder}: {error}", str(folder)
            ) from error


def _tensors_of_added(model: nn.Module) -> dict[str, torch.Tensor]:
    """Reads the adapters that ``add_adapter`` made, and other trained tensors."""
    layers = tuple(
        f"{path}."
        for path, module in model.named_modules()
        if hasattr(module, "adapter_layer_names")
    )
    wanted = {
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if param.requires_grad
    }
    wanted |= {
        name for name in sources_of(model) if name.startswith(layers) and ".base_layer." not in name
    }
    return {name: source.read() for name, source in sources_of(model).items() if name in wanted}


def adapter_tensors(model: nn.Module, *, saving: bool = False) -> dict[str, torch.Tensor]:
    """Reads the tensors of a wrapped PEFT model that are not its base's, under all their state dict
    names. ``saving``: also the base's embeddings, if PEFT saves them: adapted or resized ones."""
    of_tuner = getattr(model.base_model, "prefix", None)
    layers = tuple(
        f"{path}."
        for path, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "adapter_layer_names")
    )
    trained = {
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if param.requires_grad
    }
    sources = sources_of(model, tied=True)
    # Also what layers share, and their tuner has: projections, say
    own = {
        name: source
        for name, source in sources.items()
        if name in trained
        or (of_tuner or "prompt_encoder") in name
        or "modules_to_save" in name
        or (name.startswith(layers) and ".base_layer." not in name)
        or (of_tuner and name.startswith("base_model.") and not name.startswith(PREFIX))
    }
    read = {id(source): source.read() for source in own.values()}
    tensors = {name: read[id(source)] for name, source in own.items()}
    if saving:
        for name in _asked_of_tables(model, sources, tensors):
            tensors[name] = sources[name].read()
    return tensors


def _asked_of_tables(
    model: nn.Module, sources: Mapping[str, Source], tensors: dict[str, torch.Tensor]
) -> list[str]:
    """Lists the base's embeddings that PEFT saves with the adapters ``tensors``."""
    tables = {
        id(module)
        for get in ("get_input_embeddings", "get_output_embeddings")
        if (module := getattr(model, get, lambda: None)()) is not None
    }
    above = tuple(
        f"{name}."
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in tables
    )
    asked = {
        name: torch.empty(source.shape, dtype=source.dtype, device="meta")
        for name, source in sources.items()
        if name.startswith(above) and name not in tensors
    }
    select = importlib.import_module("peft").get_peft_model_state_dict
    chosen = {
        id(value)
        for adapter in (model.peft_config if asked else ())
        for value in select(model, {**tensors, **asked}, adapter).values()
    }
    return [name for name, value in asked.items() if id(value) in chosen]


@contextmanager
def prompts_in_memory(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Gives the prompt encoders of a wrapped PEFT model their values of ``tensors``: PEFT saves
    some of their Parameters as they are."""
    modules = dict(model.named_modules())
    own = {path: module for path, module in modules.items() if path.startswith("prompt_encoder.")}
    before = [(module, module._parameters) for module in own.values()]
    try:
        for path, module in own.items():
            module._parameters = {
                name: nn.Parameter(tensors[f"{path}.{name}"], requires_grad=False)
                for name in module._parameters
                if f"{path}.{name}" in tensors
            }
        yield
    finally:
        for module, params in before:
            module._parameters = params


def sources_of(model: nn.Module, *, tied: bool = False) -> dict[str, Source]:
    """Maps the name of every tensor of a wrapped model's state dict to its source, packed ones
    unpacked. ``tied``: one tensor has all its names, and one source, or else the first."""
    store = engine_of(model).job.store
    places = {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in (*module._parameters, *module._buffers)
        if getattr(module, name) is not None and name not in module._non_persistent_buffers_set
    }
    tensors = {key: getattr(module, name) for key, (module, name) in places.items()}
    sources: dict[str, Source] = {}
    known: dict[int, Source] = {}
    for name in tensors if tied else names_to_write(model, tensors):
        tensor = tensors[name]
        handle = handle_of(tensor)
        if id(tensor) in known:
            sources[name] = known[id(tensor)]
        elif has_packed(*places[name]):
            sources[name] = dense_source(*places[name])
        elif handle is None:
            sources[name] = Source(
                tensor.shape,
                tensor.dtype,
                lambda tensor=tensor: gathered(tensor.detach()).clone(),
            )
        elif handle.is_counted:  # else another stage writes it
            sources[name] = Source(
                tensor.shape,
                handle.flat_param.spec.wrapped_dtype,
                lambda handle=handle: gathered(
                    like(handle.param, handle.flat_param.read_value(store, handle.index))
                ),
            )
        if name in sources:
            known[id(tensor)] = sources[name]
    return sources
