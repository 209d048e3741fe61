"""Checks: validates wrap_model's inputs before any change.

[Note: why other owners are refused] If another library already moves, shards or fills the model,
one weight has two owners, and training would be silently wrong. So such a model is refused, and the
error names the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ... import native, torch_private
from ...config import Config
from ...errors import ConfigError, UsageError
from ..params import mistakes
from ..seams import kinds
from ..step.optimizer import InfinityOptimizer
from ..step.recognised import check_together
from ..step.rules import refuse_wrapper
from ..units.forms import form_of, is_plain, local_of
from ..units.handle import handle_of
from .described_model import DescribedModel, can_step
from .unmoved import has_storage

# Module of a class -> its effect on a model, and the remedy.
OWNERS = {
    "torch.nn.parallel.distributed": (
        "averages its gradients",
        "give wrap_model the model inside (.module): the engine averages over the ranks itself",
    ),
    "torch.nn.parallel.data_parallel": (
        "copies it to several devices",
        "give wrap_model the model inside (.module), one process per device",
    ),
    "torch.distributed.fsdp": (
        "shards its parameters",
        "give wrap_model the model as it was before: the engine shards it over the ranks itself",
    ),
    "torch.distributed._composable": (
        "manages its parameters",
        "give wrap_model the model as it was before",
    ),
    "deepspeed.runtime": (
        "manages its parameters",
        "give wrap_model the model that deepspeed.initialize was given (and no zero.Init)",
    ),
    "accelerate.utils.other": (
        "manages its parameters",
        "give wrap_model the model that accelerator.prepare was given",
    ),
}

# Libraries whose packed weights are objects around memory of their own -> what works
ELSEWHERE = {
    "triton_kernels": "load the model with transformers.Mxfp4Config(dequantize=True)",
    "transformer_engine": "give the model plain parameters, and compute in fp8 by autocast",
}


def check(
    model: DescribedModel, optimizers: Sequence[torch.optim.Optimizer], config: Config
) -> None:
    """Raises ConfigError or UsageError for inputs that cannot be wrapped as they are."""
    for optimizer in optimizers:
        check_kind(optimizer)
    native.simd_unit()  # raises for an unknown INFINITY_SIMD
    torch_private.check()
    _check_owners(model)
    names = model.names
    _check_lasting(model)
    for param, param_names in names.items():
        if handle_of(param) is not None:
            raise UsageError(
                f"a model with parameter {param_names[0]} is wrapped already: unwrap_model it"
                " first, or wrap modules that share parameters as one,"
                " wrap_model(torch.nn.ModuleList([first, second]), ...)"
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f"parameter {param_names[0]} is not initialised yet: run one forward before"
                " wrap_model"
            )
        if param.is_inference():
            raise ConfigError(
                f"parameter {param_names[0]} was made under torch.inference_mode(): torch lets"
                " nothing train or change it outside. Build or load the model outside of that"
                " block (torch.no_grad() is enough)"
            )
        form_of(param).check(param_names[0], param)
        if hasattr(param, "ds_id"):
            raise ConfigError(
                f"parameter {param_names[0]} is a placeholder that DeepSpeed fills: build the model"
                " outside zero.Init"
            )
    _refuse_elsewhere(model)
    _check_storages(model)
    for kind in kinds():
        kind.check_optimizers(optimizers, config)
    for optimizer in optimizers:
        _check_optimizer(optimizer, names, config, is_only=len(optimizers) == 1)
    check_together(optimizers, names, config)


def _check_owners(model: DescribedModel) -> None:
    """Raises ConfigError for a module whose weights another library moves."""
    for module, name in model.modules.items():
        where = f"module {name}" if name else "the model"
        for kind in type(module).__mro__:
            for owner, (does, instead) in OWNERS.items():
                if kind.__module__ == owner or kind.__module__.startswith(owner + "."):
                    raise ConfigError(
                        f"{where} is a {kind.__name__} ({kind.__module__}), which {does}:"
                        f" {instead}."
                    )
        if (hook := module.__dict__.get("_hf_hook")) is not None:
            raise ConfigError(
                f"{where} has accelerate's {type(hook).__name__} (of device_map, cpu_offload or"
                " disk_offload), which moves its weights in and out itself. Load the model without"
                " device_map, or take the hooks off:"
                " accelerate.hooks.remove_hook_from_submodules(model)."
            )


def _check_lasting(model: DescribedModel) -> None:
    """Raises ConfigError for parameters that are new objects at each access."""
    again = {param for _, param in model.module.named_parameters()}
    made = [its[0] for param, its in model.names.items() if param not in again]
    if not made:
        return
    around = [
        module
        for module, name in model.modules.items()
        if f"{made[0]}.".startswith(f"{name}." if name else "")
    ]
    walks = (
        "named_modules",
        "named_parameters",
        "parameters",
        "named_children",
        "children",
        "_named_members",
    )
    own = [
        module
        for module in around
        if any(getattr(type(module), walk) is not getattr(nn.Module, walk) for walk in walks)
    ]
    kind = type((own or around)[-1])
    raise ConfigError(
        f"{len(made)} of the model's {len(model.names)} parameters"
        f" ({', '.join(made[:3])}{', ...' if len(made) > 3 else ''}) are other Parameters each"
        f" time the model is asked for them: {kind.__module__}.{kind.__name__} makes them anew,"
        " and what is at home would not be theirs. Leave such modules out, or keep this model"
        " unwrapped."
    )


def _refuse_elsewhere(model: DescribedModel) -> None:
    """Raises ConfigError for a weight whose bytes lie elsewhere than in its own memory: nothing
    that is done to it would reach them."""
    for module, path in model.modules.items():
        own = {**vars(module), **module._parameters, **module._buffers}
        for key, value in own.items():
            kind, name = type(value), f"{path}.{key}" if path else key
            library = kind.__module__.partition(".")[0]
            holds = isinstance(value, torch.Tensor) or library == "triton_kernels"
            if library in ELSEWHERE and holds:
                raise ConfigError(
                    f"{name} is a {kind.__name__} of {library}, whose bytes lie elsewhere, so that"
                    f" nothing can move them: {ELSEWHERE[library]}"
                )
            if isinstance(value, nn.Parameter) and _is_hollow(value):
                raise ConfigError(
                    f"{name} is a {kind.__name__} ({kind.__module__}) of {value.numel()} elements"
                    " without memory of its own: its bytes lie elsewhere, and nothing can move"
                    " them. Load the model unpacked, or packed by bitsandbytes or torchao"
                )


def _is_hollow(param: torch.Tensor) -> bool:
    """Tells whether a parameter says that it has elements and has no memory."""
    if type(param) is nn.Parameter or not has_storage(param) or not is_plain(param):
        return False
    try:
        return param.numel() > 0 and param.untyped_storage().data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        return True


def _check_storages(model: DescribedModel) -> None:
    """Raises ConfigError if two Parameters share bytes: with a home each they would diverge."""
    managed = [
        (local_of(param), name) for name, param in model.managed.items()
    ]  # unmanaged tensor subclasses may share storage
    on_meta: dict[int, str] = {}
    for local, name in managed:
        if (
            local.is_meta
            and (other := on_meta.setdefault(local.untyped_storage()._cdata, name)) != name
        ):
            raise _share_memory(other, name)
    spans = sorted(
        (
            local.data_ptr(),
            (
                local.data_ptr()
                + local.untyped_storage().nbytes()
                - local.storage_offset() * local.itemsize
                if not local.is_contiguous()
                else local.data_ptr() + local.nbytes
            ),
            name,
        )
        for local, name in managed
        if not local.is_meta and local.numel()
    )
    for (_, end, name), (begin, _, other) in zip(spans, spans[1:]):
        if begin < end:
            raise _share_memory(name, other)


def _share_memory(name: str, other: str) -> ConfigError:
    return ConfigError(
        f"parameters {name} and {other} share memory without being one Parameter. Tie them properly"
        " (module.weight = other.weight), or give one of them a copy."
    )


def check_kind(optimizer: Any) -> None:
    """Raises UsageError or ConfigError for what is not a plain optimizer."""
    if isinstance(optimizer, InfinityOptimizer):
        raise UsageError(
            "this optimizer is wrapped already: give wrap_model the plain one, or unwrap_model"
            " first"
        )
    refuse_wrapper(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer:"
            f" {mistakes.instead_of_optimizer(optimizer)}"
        )


def _check_optimizer(
    optimizer: torch.optim.Optimizer, names: dict, config: Config, *, is_only: bool
) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if is_only and params and not any(param in names for param in params):
        raise ConfigError(
            f"the optimizer has {len(params)} parameters (the first of shape"
            f" {tuple(params[0].shape)}), and none is one of the model's {len(names)}: build the"
            " optimizer from model.parameters() of this very model. One optimizer over several"
            " models: wrap_model(torch.nn.ModuleList([first, second]), optimizer)"
        )
    for param in params:
        if (handle := handle_of(param)) is not None:
            raise ConfigError(
                f"the optimizer has {handle.name} of a model that is wrapped already:"
                " wrap both as one, wrap_model(torch.nn.ModuleList([first, second]), optimizer)"
            )
        if any(
            isinstance(value, torch.Tensor) and value.is_meta
            for value in optimizer.state.get(param, {}).values()
        ):
            raise ConfigError(
                f"the optimizer's state of {names.get(param, ['a parameter'])[0]} is on meta: build"
                " it anew, without steps"
            )
        if param not in names or not can_step(param, config):
            continue
        grad, dtype = config.grad_dtype, config.param_dtype or param.dtype
        if grad is not None and grad not in (torch.float32, dtype):
            raise ConfigError(
                f"grad_dtype={grad} with {dtype} parameters: use {dtype} or torch.float32"
            )
