"""tensor_parallel: cuts a model's layers over the ranks of a mesh axis, so that each has a part of every large weight."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..errors import ConfigError
from .plans import check_divisible, count_heads_here, describe_plan, expand, find_plan, general, is_conv1d, own_plan, shape_of
from .regions import install_regions


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str] | None = None, *, quiet: bool = False) -> nn.Module:
    """Cuts ``model`` over ``mesh`` by torch's DTensor, before :func:`infinity.wrap_model`. The same object comes back.

    model
        With the same values on every rank, or on ``meta``.
    mesh
        The ``tp`` axis of the job's mesh: of one dimension.
    plan
        {module name, with ``*`` for the number of a block: style}. None: :func:`find_plan`. Styles: ``colwise`` and ``rowwise`` for linear
        layers, ``embedding_rowwise`` for the vocabulary, ``colwise_gather_output`` for a head whose logits are to be whole, ``replicate``.
    quiet
        Does not print the plan.

    Tied parameters stay tied. Dropout between a layer that is cut by columns and the one that is cut by rows draws another mask on
    every rank, elsewhere the same one. peft's LoRA comes afterwards, and cuts its adapters as the layers are cut. Raises ConfigError,
    with the model as it was, for a plan that does not fit: unknown names or styles, heads or features that do not divide by the ranks.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError(f"tensor_parallel takes the tp axis of a mesh (mesh['tp']), of one dimension, not {mesh!r}")
    is_own = plan is None and bool(own_plan(model))
    plan = dict(plan) if plan is not None else find_plan(model)
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise ConfigError("this model is cut already: some of its parameters are DTensors")
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "this model has adapters of peft: cut the base model first, then call get_peft_model, which cuts adapters as layers are"
        )
    ties = _ties(model)
    if is_own:
        known = {
            name: plan[general(name)] for name, _ in model.named_modules() if plan.get(general(name)) in ("colwise", "rowwise")
        }
        check_divisible(model, known, mesh.size())
    else:
        styles = expand(model, plan)
        check_divisible(model, styles, mesh.size())
        _check_ties(model, styles, ties)
    if not quiet and mesh.get_rank() == 0:
        print(describe_plan(plan, model), flush=True)
    if mesh.size() == 1:
        return model
    if is_own:
        apply_own_plan(model, mesh, plan)
    else:
        _apply(model, mesh, styles)
        count_heads_here(model, styles, mesh.size())
    _tie_again(model, ties)
    install_regions(model, plan, mesh)
    _tell_adapters(model, plan, mesh)
    return model


def _tell_adapters(model: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> None:
    """Tells peft, by the names it looks for, how a layer is cut: its LoRA cuts one of a layer's two adapters in the same way."""
    for name, module in model.named_modules():
        if (style := plan.get(general(name))) in ("colwise", "rowwise") and isinstance(module, nn.Linear):
            module._hf_tp_plan, module._hf_device_mesh = style, mesh


def _apply(model: nn.Module, mesh: DeviceMesh, styles: dict[str, str]) -> None:
    shared = _SharedInput()
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style == "replicate":
            continue
        parallelize_module(module, mesh, _style(module, style, shared))
        if style == "rowwise":
            module.register_forward_pre_hook(shared.forget)
            shared = _SharedInput()


class _SharedInput:
    """Makes one DTensor of what several column layers are given, so that their gradients are added before ranks add them up: one
    all-reduce in the backward of an attention, and not three (the g of Megatron-LM's section 3)."""

    def __init__(self) -> None:
        self._given: tuple[torch.Tensor, Any, DTensor] | None = (
            None  # the tensor, its count of changes and grad mode, and the DTensor
        )

    def prepare(self, style: ColwiseParallel, module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> Any:
        """Prepares a layer's input as ``style`` does, or returns the one that was prepared of the same tensor."""
        given = inputs[0]
        known = (given._version, torch.is_grad_enabled()) if isinstance(given, torch.Tensor) else None
        if self._given is None or self._given[0] is not given or self._given[1] != known:
            prepared = style._prepare_input_fn(style.input_layouts, style.desired_input_layouts, module, inputs, mesh)
            self._given = given, known, prepared
        return self._given[2]

    def forget(self, *_: Any) -> None:
        """Lets go of the input: the row layer is next."""
        self._given = None


def apply_own_plan(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Has transformers apply its own plan, whose styles are more than ours."""
    theirs = importlib.import_module("transformers.distributed.tensor_parallel")
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    styles = {name: plan[general(name)] for name in names if general(name) in plan}
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in styles.keys() - params:  # whose parameters transformers cuts as it loads them; these are there already
        module, style = model.get_submodule(name), theirs.ALL_PARALLEL_STYLES[styles[name]]
        for key, _ in list(module.named_parameters(recurse=False)):
            style.validate_param(module, key, mesh, parameter_name=f"{name}.{key}")
            style.shard_param(module, key, mesh)
    theirs.apply_tensor_parallelism(model, mesh, styles)
    # As transformers leaves a model that it has cut itself: its save_pretrained puts the parts together then.
    configured = importlib.import_module("transformers.distributed.configuration_utils").DistributedConfig
    model.config.distributed_config, model._device_mesh = configured(tp_size=mesh.size(), tp_plan=plan), mesh


def _style(module: nn.Module, style: str, shared: _SharedInput) -> Any:
    if is_conv1d(module):
        return _Columns(shared, {"weight": Shard(1), "bias": Shard(0)}) if style == "colwise" else _Conv1DRows()
    if style == "colwise" and isinstance(module, nn.Linear):
        return _Columns(shared, {"weight": Shard(0), "bias": Shard(0)})
    if style == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    if style == "colwise_gather_output":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if style == "colwise" else RowwiseParallel()


class _Columns(ColwiseParallel):
    """Cuts a linear layer by its outputs, also GPT-2's, whose weight lies as [in, out]."""

    def __init__(self, shared: _SharedInput, placements: dict[str, Any]):
        super().__init__()
        self._shared, self._placements = shared, placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distribute(self, module, device_mesh, self._placements, partial(self._shared.prepare, self))


class _Conv1DRows(RowwiseParallel):
    """Cuts GPT-2's linear layer by its inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        prepare = partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts)
        return _distribute(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()}, prepare)


def _distribute(style: Any, module: nn.Module, mesh: DeviceMesh, placements: dict[str, Any], prepare: Callable) -> nn.Module:
    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(param, mesh, [placements[key]], src_data_rank=style.src_data_rank)
            module.register_parameter(key, nn.Parameter(cut, requires_grad=param.requires_grad))

    def prepare_output(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return style._prepare_output_fn(style.output_layouts, style.use_local_output, module, outputs, mesh)

    return distribute_module(module, mesh, partition, prepare, prepare_output)


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of the parameters that are one."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _check_ties(model: nn.Module, styles: dict[str, str], ties: list[list[str]]) -> None:
    """Raises ConfigError, before anything is cut, for a parameter whose layers would cut it in different ways."""
    for names in ties:
        layers = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        cuts = {}
        for name, layer in layers.items():
            style = styles.get(name.rpartition(".")[0], "replicate")
            if shape_of(layer) is None and not isinstance(layer, nn.Embedding):
                continue  # it only keeps the parameter for a layer
            by_rows = (
                style in ("colwise", "colwise_gather_output") if isinstance(layer, nn.Linear) else style == "embedding_rowwise"
            )
            cuts[name] = "whole" if style == "replicate" else "rows" if by_rows else "columns"
        if len(set(cuts.values())) > 1:
            told = ", ".join(f"{name}: {cut}" for name, cut in cuts.items())
            raise ConfigError(
                f"one parameter would be cut in different ways by the plan ({told}): give its layers styles that cut it alike"
            )


def _tie_again(model: nn.Module, ties: list[list[str]]) -> None:
    """Makes parameters one again of which torch has cut each copy for itself. Raises ConfigError where they were cut in different ways.

    A module that only keeps a parameter for a layer (BERT's head keeps its decoder's bias) takes the layer's.
    """
    for names in ties:
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        used = [n for n in names if shape_of(owners[n]) is not None or isinstance(owners[n], nn.Embedding)] or names
        first, param = used[0], model.get_parameter(used[0])
        for name in used[1:]:
            other = model.get_parameter(name)
            if getattr(other, "placements", None) != getattr(param, "placements", None):
                raise ConfigError(
                    f"{first} and {name} are one parameter, but the plan cuts them in different ways "
                    f"({getattr(param, 'placements', 'whole')} and {getattr(other, 'placements', 'whole')}): give both the same style"
                )
        for name in names:
            owners[name].register_parameter(name.rpartition(".")[2], param)
