"""PEFT's adapters over a model at home: merged in place or into files, one layer in memory at a
time.

LoRA, DoRA and PEFT's other adapters train in a wrapped model unchanged.
``infinity.save_pretrained(model, folder)`` saves them.

hollow    of a parameter: one element, expanded to its shape. It takes no memory, but has a device
          on which PEFT can create adapters
twin      the same model, hollow, with the adapters' own values; PEFT merges its layers one by one
target    a module that PEFT has put in place of one of the base model's
source    how to read one tensor of the merged model (see :mod:`infinity.files.source`)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.run.registry import engine_of
from ...core.wrap.full_params import full_params
from ...errors import ConfigError, UsageError
from ...files.module_names import PREFIX, base_name
from ...files.source import Source
from ...library_versions import require
from ..checkpoint.hub_names import flat_param_size_of, hub_sources
from ..checkpoint.model_files import write_sources
from ..checkpoint.operations import CheckpointOperation
from ..checkpoint.pretrained import (
    adapter_tensors,
    is_adapted,
    own_place,
    sources_of,
    write_configs,
)
from ..packed.unpacked import has_packed

peft = require("peft")

from peft.tuners.tuners_utils import (  # noqa: E402
    BaseTuner,
    BaseTunerLayer,
)
from peft.utils.other import AuxiliaryTrainingWrapper  # noqa: E402

COMPUTED = ("FROD", "OSF", "PSOFT")  # PEFT's types with parts computed from the base's weights
# First values of LoRA that are computed from the base's weights, and taken off them
TAKEN_OFF = ("pissa", "olora", "corda", "loftq", "lora_ga")

# --- in place ---


def merge_adapters(model: nn.Module) -> None:
    """Merges the active adapters of a wrapped PEFT model into its weights at home, as PEFT's
    ``merge_adapter`` does.

    Raises UsageError if the model is not PEFT's, or not wrapped.
    """
    _for_each_layer(model, lambda layer: layer.merge())


def unmerge_adapters(model: nn.Module) -> None:
    """Removes merged adapters from a wrapped PEFT model's weights, up to rounding, as PEFT's
    ``unmerge_adapter`` does. Raises UsageError as :func:`merge_adapters` does."""
    _for_each_layer(model, lambda layer: layer.unmerge())


@torch.no_grad()
def _for_each_layer(model: nn.Module, change: Callable[[BaseTunerLayer], None]) -> None:
    engine_of(model)
    if not is_adapted(model):
        raise UsageError(
            f"{type(model).__name__} has no adapters of peft: give the model that"
            " peft.get_peft_model returned"
        )
    packed = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
        and has_packed(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
    ]
    if packed:
        raise UsageError(
            f"{packed[0]} has a packed weight, into which nothing is merged:"
            " infinity.integrations.save_merged(model, folder) writes unpacked weights with the"
            " adapters merged"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            with (
                full_params(model, [name], writeback=True) as whole,
                _in_memory(layer, name, whole),
            ):
                change(layer)


@contextmanager
def _in_memory(layer: nn.Module, path: str, whole: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Gives the modules of ``layer`` plain Parameters in the memory of ``whole``, and takes over
    what they are replaced by: some functions of torch take plain ones alone."""
    own = dict(layer.named_modules(prefix=path))
    before = [(at, module, module._parameters) for at, module in own.items()]
    try:
        for at, module, params in before:
            module._parameters = {
                name: nn.Parameter(value.detach(), requires_grad=False)
                if (value := whole.get(f"{at}.{name}")) is not None
                else param
                for name, param in params.items()
            }
        yield
        for at, module, params in before:
            for name in params:
                if (value := whole.get(f"{at}.{name}")) is not None:
                    value.copy_(module._parameters[name].detach())
    finally:
        for _, module, params in before:
            module._parameters = params


# --- into files ---


def save_merged(model: nn.Module, folder: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Writes a wrapped PEFT model with its active adapters merged, as a folder that
    ``from_pretrained`` loads. The model is unchanged. Every rank calls this.

    Equal to ``model.merge_and_unload().save_pretrained(folder)``; a packed base is unpacked first,
    into the dtype that it computed in. Raises UsageError if the base
    model is not transformers'. If ``folder`` has another model and ``overwrite`` is false, writes
    to a new folder beside it and raises ConfigError, which names that folder.
    """
    engine = engine_of(model)
    job = engine.job
    if not is_adapted(model) or not hasattr(base := model.get_base_model(), "config"):
        raise UsageError(f"{type(model).__name__}: give a PEFT model of a transformers model")
    job.uses.check(CheckpointOperation.SAVE_MERGED)
    with (
        job.uses.begin(),
        job.collectives.together("save_merged"),
        own_place(model, job, Path(folder), overwrite) as place,
    ):
        engine.wait_idle()
        tensors = adapter_tensors(model)
        hollow = _hollow(lambda: type(base)(base.config))
        names, params = set(hollow.state_dict()), {name for name, _ in hollow.named_parameters()}
        twin = _twin_of(model, hollow, tensors)
        sources = {
            plain: source
            for name, source in sources_of(model).items()
            if (plain := base_name(name)) in names
        }
        written = hub_sources(base, merged(sources, twin))
        numel = sum(source.shape.numel() for name, source in sources.items() if name in params)
        write_sources(
            place,
            written,
            writes=job.ranks.is_first,
            max_shard_size=flat_param_size_of(base),
            numel=numel,
        )
        if job.ranks.is_first:
            write_configs(base, place, unpacked=True)


def _twin_of(model: nn.Module, hollow: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Puts the active adapters of ``model`` into a hollow model, with values and dtypes of
    ``tensors``: PEFT merges in these dtypes. Raises UsageError if none is active."""
    active = (
        model.base_model.active_adapters
        if isinstance(model.base_model, BaseTuner)
        else [model.active_adapter]
    )
    twin: nn.Module | None = None
    for name in active:
        weights = peft.get_peft_model_state_dict(
            model, state_dict=dict(tensors), adapter_name=name, save_embedding_layers=False
        )
        config = copy.copy(model.peft_config[name])
        if _made_of_base(config):
            config.init_lora_weights = True  # the base at home is what that has left
        if twin is None:
            twin = peft.PeftModel(hollow, config, adapter_name=name)
        else:
            twin.add_adapter(name, config)
        _adapt(twin, name, weights)
    if twin is None:
        raise UsageError("no adapter of this model is active: choose one by set_adapter")
    if isinstance(twin.base_model, BaseTuner):
        twin.base_model.set_adapter(active)
    for name, param in list(twin.named_parameters()):
        if name in tensors and not _is_hollow(param):
            _put(twin, name, nn.Parameter(param.data.to(tensors[name].dtype), requires_grad=False))
    # Some adapters make constants of the base's weights, which a hollow model has not.
    twins = dict(twin.named_modules())
    for name, buffer in model.named_buffers():
        path, _, own = name.rpartition(".")
        if path in twins and own in twins[path]._buffers:
            twins[path]._buffers[own] = buffer.detach().clone()
    return twin


def _made_of_base(config: Any) -> bool:
    """Tells whether LoRA's first values are made of the base's weights, as PiSSA's are, and taken
    off them."""
    return isinstance(getattr(config, "init_lora_weights", True), str)


def _hollow(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a hollow model. Its parameters are fp32, so that PEFT creates fp32 adapters, as for
    any 16-bit model."""
    with torch.device("meta"):
        model = build()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                value = torch.zeros(1, dtype=torch.float32).expand(param.shape)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
    return model


def _is_hollow(param: torch.Tensor) -> bool:
    return param.untyped_storage().nbytes() == param.itemsize and not any(param.stride())


def adapted_twin(model: Path, adapter: Path) -> nn.Module:
    """Makes the hollow twin of the model in the folder ``model`` (from its config.json), with the
    adapter in the folder ``adapter``.

    Raises ConfigError if a folder has no model or adapter, the adapter is of another model, or
    parts of it are computed from the model's weights.
    """
    transformers = require("transformers")
    try:
        peft_config = peft.PeftConfig.from_pretrained(adapter)
        first = str(getattr(peft_config, "init_lora_weights", ""))
        kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
        if kind in COMPUTED or first.startswith(TAKEN_OFF):
            raise ConfigError(
                f"{adapter}: an adapter of {kind}{f' ({first})' if kind == 'LORA' else ''} is"
                " computed from the base's weights when it is loaded. Load both by"
                " peft.PeftModel.from_pretrained, then infinity.wrap_model(model), and"
                " infinity.integrations.save_merged(model, folder)"
            )
        config = transformers.AutoConfig.from_pretrained(model)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        build = (
            (lambda: transformers.AutoModelForCausalLM.from_config(config))
            if kind is None
            else lambda: kind(config)
        )
        hollow = _hollow(build)
        names = set(hollow.state_dict())
        weights = peft.load_peft_weights(str(adapter), device="cpu")
        twin = peft.PeftModel(hollow, peft_config)
        left = _adapt(twin, "default", weights)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{adapter} is not an adapter of peft for the model in {model}: {error}"
        ) from error
    for name in [name for name in left if base_name(name) in names and name in weights]:
        _put(
            twin.get_base_model(),
            name.removeprefix(PREFIX),
            nn.Parameter(weights[name], requires_grad=False),
        )
        left.remove(name)  # the adapter's folder may include an embedding of the base model
    if left:
        raise ConfigError(
            f"{adapter} is the adapter of another model than {model}: {len(left)} of its tensors do"
            f" not fit ({left[0]}, ...)"
        )
    return twin


def _adapt(twin: nn.Module, adapter: str, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Sets an adapter of a hollow model to ``weights``. Returns the names that only one of the two
    has."""
    own = peft.get_peft_model_state_dict(twin, adapter_name=adapter, save_embedding_layers=False)
    saved = f".modules_to_save.{adapter}."
    for name, param in list(twin.named_parameters()):
        # Parameters of the base model that the adapter trains too, such as a bias.
        if _is_hollow(param) and (value := weights.get(name.replace(saved, "."))) is not None:
            _put(twin, name, nn.Parameter(torch.empty_like(value), requires_grad=False))
    known = {name: value for name, value in weights.items() if name in own}
    try:
        peft.set_peft_model_state_dict(twin, known, adapter_name=adapter)
    except TypeError as error:  # of a converter that this PEFT builds for other transformers
        raise ConfigError(
            f"peft {peft.__version__} cannot load the adapter {adapter!r} beside transformers"
            f" {version('transformers')} ({error}): python -m pip install --upgrade peft"
        ) from error
    return sorted(own.keys() ^ weights.keys())


def merged(sources: Mapping[str, Source], twin: nn.Module) -> dict[str, Source]:
    """Returns the sources of the merged model. Those under a target are merged when they are read.

    Raises ConfigError if a target's weight is not among ``sources``, the base model's tensors, or
    the adapters have nothing to merge.
    """
    targets = _targets(twin)
    if not targets:
        kind = twin.active_peft_config.peft_type
        raise ConfigError(
            f"an adapter of {getattr(kind, 'value', kind)} has no weights that can be merged: keep"
            " it beside the model"
        )
    merged_sources = dict(sources)
    for name, param in twin.get_base_model().named_parameters():
        # The adapter may include a parameter of the base model, such as a resized embedding.
        if name in sources and not _is_hollow(param):
            merged_sources[name] = Source.of(param)
    for key, target in targets.items():
        for name, param in _base_of(target).named_parameters():
            if f"{key}.{name}" not in sources:
                raise ConfigError(
                    f"the adapter changes {key}.{name}, which is not among the model's"
                    f" {len(sources)} tensors: it is the adapter of another model, or that weight"
                    " is tied to another one"
                )
            read = _merging(target, key, name, sources)
            if not isinstance(target, BaseTunerLayer):
                param = read()  # a module trained whole has its own dtype
            known = sources[f"{key}.{name}"] if _is_hollow(param) else param
            merged_sources[f"{key}.{name}"] = Source(known.shape, known.dtype, read)
    return merged_sources


def _targets(twin: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost modules that PEFT put into the model, by the names they replace."""
    targets: dict[str, nn.Module] = {}
    for name, module in twin.get_base_model().named_modules():
        inside = any(name.startswith(key + ".") for key in targets)
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not inside:
            targets[name] = module
    return targets


def _base_of(target: nn.Module) -> nn.Module:
    """Returns the base model's module that ``target`` replaced."""
    if isinstance(target, BaseTunerLayer):
        return target.get_base_layer()
    return (
        target.token_adapter.get_base_layer()
        if hasattr(target, "token_adapter")
        else target.original_module
    )


def _layers_of(target: nn.Module | None) -> list[BaseTunerLayer]:
    """Lists the adapters of ``target``, the outermost first. PEFT puts one around the other for
    each parameter of a module that it adapts."""
    layers = []
    while isinstance(target, BaseTunerLayer):
        layers.append(target)
        target = target.base_layer
    return layers


def _merging(
    target: nn.Module, key: str, name: str, sources: Mapping[str, Source]
) -> Callable[[], torch.Tensor]:
    @torch.no_grad()
    def read() -> torch.Tensor:
        base, layers = _base_of(target), _layers_of(target)
        before = dict(base.named_parameters())
        try:
            for own, param in before.items():
                value = sources[f"{key}.{own}"].read() if _is_hollow(param) else param.data
                _put(base, own, nn.Parameter(value.clone(), requires_grad=False))
            for layer in layers:
                layer.merge()
            if layers:
                own = _base_of(target)
                value = own.get_parameter(name).data
                for layer in layers if own is not base else ():
                    layer.unmerge()  # layers of LN tuning change places with the base's
                return value
            merged = target.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
            return merged.get_parameter(name).data
        finally:
            for layer in (*layers, *_layers_of(getattr(target, "token_adapter", None))):
                layer.merged_adapters.clear()
            for own, param in before.items():
                _put(base, own, param)

    return read


def _put(module: nn.Module, name: str, param: nn.Parameter) -> None:
    path, _, own = name.rpartition(".")
    module.get_submodule(path)._parameters[own] = param
