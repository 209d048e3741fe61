"""tensor_parallel: shards a model's layers over the ranks of a mesh axis, so that each has a part
of every large weight."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ...core.units.forms import form_of
from ...errors import ConfigError
from .agreement import agree_over, check_axis, describe_model
from .input_sums import share_inputs
from .plans import (
    COLUMNS,
    SUMMED,
    check_divisible,
    count_heads_here,
    describe_plan,
    expand,
    find_plan,
    general,
    is_conv1d,
    own_plan,
    shape_of,
    styles_of_transformers,
)
from .regions import install_regions


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: dict[str, str] | None = None, *, quiet: bool = False
) -> nn.Module:
    """Shards ``model`` over ``mesh`` by torch's DTensor, before :func:`infinity.wrap_model`. Every
    rank calls this. Returns the same object.

    model
        With the same values on every rank, or on ``meta``.
    mesh
        The one-dimensional ``tp`` axis of the job's mesh.
    plan
        {module name, with ``*`` for the number of a block: style}. None: :func:`find_plan`. Styles:
        ``colwise`` and ``rowwise`` for linear layers, ``embedding_rowwise`` for the vocabulary,
        ``colwise_gather_output`` for a head with whole logits, ``replicate``.
    quiet
        Does not print the plan.

    Tied parameters stay tied. Dropout between a column layer and its row layer draws a different
    mask on every rank, elsewhere the same one. peft's LoRA comes afterwards, and shards its
    adapters like the layers. Raises ConfigError on every rank, with the model unchanged: for a plan
    that does not fit (unknown names or styles, heads or features that do not divide by the ranks,
    parts that cannot be trained), or if the ranks' models or plans differ.
    """
    check_axis("tensor_parallel", mesh, "tp")
    is_own = plan is None and bool(own_plan(model))

    def describe() -> tuple[dict[str, str], dict[str, str]]:
        styles = dict(plan) if plan is not None else find_plan(model)
        _check(model, mesh, styles, is_own=is_own)
        return describe_cut(model, styles), styles

    plan = agree_over("tensor_parallel", mesh, describe)
    if not quiet and mesh.get_rank() == 0:
        print(describe_plan(plan, model), flush=True)
    if mesh.size() == 1:
        return model
    if is_own:
        cut_by_own_plan(model, mesh, plan)
    else:
        _cut(model, mesh, plan)
    return model


def describe_cut(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Describes the inputs that all ranks must share to shard ``model`` together."""
    return describe_model(model) | {f"the plan for {name}": style for name, style in plan.items()}


def _check(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str], *, is_own: bool) -> None:
    """Raises ConfigError for a model that cannot be sharded like this."""
    if any(isinstance(param, DTensor) for param in model.parameters()):
        raise ConfigError("this model is already sharded: some of its parameters are DTensors")
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "this model has adapters of peft: cut the base model first, then call get_peft_model,"
            " which cuts adapters as layers are"
        )
    if is_own:
        check_own_plan(model, mesh, plan)
    else:
        styles = expand(model, plan)
        check_divisible(model, styles, mesh.size())
        _check_ties(model, styles, _ties(model))


def _cut(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    styles, ties = expand(model, plan), _ties(model)
    _apply(model, mesh, styles)
    count_heads_here(model, styles, mesh.size())
    _finish(model, mesh, plan, ties)


def _finish(
    model: nn.Module, mesh: DeviceMesh, plan: dict[str, str], ties: list[list[str]]
) -> None:
    """Completes sharded layers: ties, dropout regions, and attributes for peft."""
    _tie_again(model, ties)
    install_regions(model, plan, mesh)
    _tell_adapters(model, plan, mesh)


def _tell_adapters(model: nn.Module, plan: dict[str, str], mesh: DeviceMesh) -> None:
    """Sets the attributes by which peft detects a layer's sharding: its LoRA shards one of a
    layer's two adapters in the same way."""
    for name, module in model.named_modules():
        if (style := plan.get(general(name))) in ("colwise", "rowwise") and isinstance(
            module, nn.Linear
        ):
            module._hf_tp_plan, module._hf_device_mesh = style, mesh


def _apply(model: nn.Module, mesh: DeviceMesh, styles: dict[str, str]) -> None:
    share_inputs(model, mesh, *_sharing(model, styles))  # before torch's hooks, which make DTensors
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style not in ("replicate", SUMMED):
            parallelize_module(module, mesh, _style(module, style))


def _sharing(model: nn.Module, styles: dict[str, str]) -> tuple[list[str], list[str]]:
    """Lists the linear layers that ``styles`` shard by columns, and the norms beside them whose
    gradients are partial."""
    columns = [
        name
        for name, style in styles.items()
        if style in COLUMNS and shape_of(model.get_submodule(name)) is not None
    ]
    parents = {name.rpartition(".")[0] for name in columns}
    return columns, [
        name
        for name, style in styles.items()
        if style == SUMMED and name.rpartition(".")[0] in parents
    ]


def check_own_plan(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Raises ConfigError, with ``model`` unchanged, if its own ``plan`` does not fit the ranks or
    leaves parts that cannot be trained. Shards each parameter on meta to find out."""
    styles, modules = _own_styles(model, plan), dict(model.named_modules())
    known = {
        name: style
        for name, style in styles.items()
        if name in modules and style in ("colwise", "rowwise")
    }
    check_divisible(model, known, mesh.size())
    if mesh.size() == 1:
        return
    placements: dict[str, Any] = {}
    for owner, key, style in _own_cuts(model, styles):
        module, name = model.get_submodule(owner), f"{owner}.{key}".lstrip(".")
        trial = copy.copy(module)
        trial.__dict__["_parameters"] = {
            key: nn.Parameter(module._parameters[key].detach().to("meta"), requires_grad=False)
        }
        try:
            style.validate_param(trial, key, mesh, parameter_name=name)
            style.shard_param(trial, key, mesh)
        except ValueError as error:
            raise ConfigError(
                f"{name} cannot be cut into {mesh.size()} parts by the model's plan: {error}"
            ) from error
        try:
            sharded = trial._parameters[key]
            form_of(sharded).check(name, sharded)
        except ConfigError as error:
            styled = next(each for each in (name, owner) if each in styles)
            raise ConfigError(
                f"the model's plan cuts {name} as {styles[styled]!r}, in stripes that cannot be"
                f" trained. {_another_way(model)}"
            ) from error
        placements[name] = getattr(trial._parameters[key], "placements", None)
    for names in _ties(model):
        if (
            len(cuts := {name: placements.get(name) for name in _used(model, names)}) > 1
            and len(set(cuts.values())) > 1
        ):
            ways = ", ".join(f"{name}: {cut or 'whole'}" for name, cut in cuts.items())
            raise ConfigError(
                f"one parameter would be cut in different ways by the model's plan ({ways}): give"
                " tensor_parallel a plan"
            )


def _another_way(model: nn.Module) -> str:
    if getattr(model, "ep_plan", None):
        return (
            "Give each rank whole experts instead: infinity.parallel.expert_parallel(model, mesh,"
            " cut_rest=True)."
        )
    return "Give tensor_parallel a plan that leaves that layer whole."


def _own_styles(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Applies a plan of transformers to the modules and parameters of ``model``: full name ->
    style."""
    names = [
        name
        for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))
    ]
    return {name: plan[general(name)] for name in names if general(name) in plan}


def _own_cuts(model: nn.Module, styles: dict[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Yields the parameters that transformers' ``styles`` shard: the module's name, the parameter's
    key in it, and the style object."""
    theirs = styles_of_transformers(model, _another_way(model)).ALL_PARALLEL_STYLES
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, style in styles.items():
        owner, _, key = name.rpartition(".")
        keys = (
            [key]
            if name in params
            else [key for key, _ in model.get_submodule(name).named_parameters(recurse=False)]
        )
        yield from ((owner if name in params else name, key, theirs[style]) for key in keys)


def cut_by_own_plan(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Applies transformers' own plan, which :func:`check_own_plan` has passed and which has more
    styles than ours. Tied parameters stay tied, and dropout inside a region draws a different mask
    on every rank."""
    theirs = styles_of_transformers(model, _another_way(model))
    styles, ties = _own_styles(model, plan), _ties(model)
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    of_modules = {name: style for name, style in styles.items() if name not in params}
    # Transformers shards them while loading; these are already loaded.
    for owner, key, style in list(_own_cuts(model, of_modules)):
        module = model.get_submodule(owner)
        style.validate_param(module, key, mesh, parameter_name=f"{owner}.{key}")
        style.shard_param(module, key, mesh)
    columns, norms = _sharing(model, of_modules)
    theirs.apply_tensor_parallelism(
        model, mesh, {name: style for name, style in styles.items() if name not in norms}
    )
    share_inputs(model, mesh, columns, norms)
    mark_cut(model, mesh, tp_size=mesh.size(), tp_plan=plan)
    _finish(model, mesh, plan, ties)


def mark_cut(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Sets the attributes of a model that transformers has sharded itself: its ``save_pretrained``
    then joins the parts. ``options``: of transformers' ``DistributedConfig``."""
    theirs = importlib.import_module("transformers.distributed.configuration_utils")
    model.config.distributed_config = theirs.DistributedConfig(**options)
    model._device_mesh = mesh


def _style(module: nn.Module, style: str) -> Any:
    if is_conv1d(module):
        return _Conv1DColumns() if style == "colwise" else _Conv1DRows()
    if style == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    if style == "colwise_gather_output":
        return ColwiseParallel(output_layouts=Replicate())
    return ColwiseParallel() if style == "colwise" else RowwiseParallel()


class _Conv1DColumns(ColwiseParallel):
    """Shards GPT-2's linear layer, whose weight has shape [in, out], by its outputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distribute(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class _Conv1DRows(RowwiseParallel):
    """Shards GPT-2's linear layer by its inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.desired_input_layouts = (Shard(-1),)
        return _distribute(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()})


def _distribute(
    style: Any, module: nn.Module, mesh: DeviceMesh, placements: dict[str, Any]
) -> nn.Module:
    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(
                param, mesh, [placements[key]], src_data_rank=style.src_data_rank
            )
            module.register_parameter(key, nn.Parameter(cut, requires_grad=param.requires_grad))

    def prepare_output(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return style._prepare_output_fn(
            style.output_layouts, style.use_local_output, module, outputs, mesh
        )

    prepare = partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts)
    return distribute_module(module, mesh, partition, prepare, prepare_output)


def _ties(model: nn.Module) -> list[list[str]]:
    """Returns the names of each tied parameter."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _check_ties(model: nn.Module, styles: dict[str, str], ties: list[list[str]]) -> None:
    """Raises ConfigError, before any change, for a parameter whose layers would shard it in
    different ways."""
    for names in ties:
        layers = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        cuts = {}
        for name, layer in layers.items():
            style = styles.get(name.rpartition(".")[0], "replicate")
            if shape_of(layer) is None and not isinstance(layer, nn.Embedding):
                continue  # it only stores the parameter for a layer
            by_rows = (
                style in ("colwise", "colwise_gather_output")
                if isinstance(layer, nn.Linear)
                else style == "embedding_rowwise"
            )
            cuts[name] = "whole" if style == "replicate" else "rows" if by_rows else "columns"
        if len(set(cuts.values())) > 1:
            ways = ", ".join(f"{name}: {cut}" for name, cut in cuts.items())
            raise ConfigError(
                f"one parameter would be cut in different ways by the plan ({ways}): give its"
                " layers styles that cut it alike"
            )


def _tie_again(model: nn.Module, ties: list[list[str]]) -> None:
    """Ties parameters again that torch sharded separately. Raises ConfigError if they were sharded
    in different ways.

    A module that only stores a layer's parameter (BERT's head stores its decoder's bias) takes the
    layer's.
    """
    for names in ties:
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        used = _used(model, names)
        first, param = used[0], model.get_parameter(used[0])
        for name in used[1:]:
            other = model.get_parameter(name)
            if getattr(other, "placements", None) != getattr(param, "placements", None):
                raise ConfigError(
                    f"{first} and {name} are one parameter, but the plan cuts them in different"
                    f" ways ({getattr(param, 'placements', 'whole')} and"
                    f" {getattr(other, 'placements', 'whole')}): give both the same style"
                )
        for name in names:
            owners[name].register_parameter(name.rpartition(".")[2], param)


def _used(model: nn.Module, names: list[str]) -> list[str]:
    """Returns, of the names of one parameter, those of layers that compute with it; all names if
    there are none."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    return [
        name
        for name in names
        if shape_of(owners[name]) is not None or isinstance(owners[name], nn.Embedding)
    ] or names
