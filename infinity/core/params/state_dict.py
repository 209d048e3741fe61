"""State dicts: fills ``state_dict()`` from the homes, and writes ``load_state_dict()``, and edits
of the former, to them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from ...errors import InfinityError, UsageError
from ..run.engine import Engine
from ..run.operations import Operation
from ..run.replaced_forward import ReplacedForward
from ..units.added import ADDED, own_tensors
from ..units.forms import like
from ..units.handle import ParamHandle, handle_of
from ..units.inner import filled


def install_state_dict(engine: Engine, roots: Sequence[nn.Module]) -> list:
    """Installs hooks on ``roots`` that put full tensors into state dicts, and refuse a load that
    would replace the parameters. Returns their removers."""
    job = engine.job
    removers = []

    def fill(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
        with job.lents.filling(state):
            # As in torch, the values can be changed, even if the caller is in inference mode.
            with (
                torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
            ):
                fill_here(module, state, prefix)

    def fill_here(module: nn.Module, state: dict, prefix: str) -> None:
        with job.uses.operation(Operation.STATE_DICT):
            for name, param in module._parameters.items():
                value = state.get(prefix + name)
                # With keep_vars the value is the Parameter itself, and stays so.
                if (
                    value is not None
                    and (handle := handle_of(param)) is not None
                    and not isinstance(value, nn.Parameter)
                ):
                    state[prefix + name] = _full_value(engine, handle, state)
            if ADDED in module.__dict__:
                for name, value in state.items():
                    if name.startswith(prefix) and not isinstance(value, nn.Parameter):
                        # An inner tensor at rest may have been detached past its own rules.
                        param = module._parameters.get(name.removeprefix(prefix))
                        state[name] = filled(value if param is None else param)

    def before_load(module, state, prefix, metadata, strict, missing, unexpected, errors) -> None:
        job.uses.check(Operation.LOAD_STATE_DICT)
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would replace managed parameters: load without assign"
            )

    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        is_owner = any(handle_of(param) is not None for param in own_tensors(module))
        own_dicts = [  # of modules whose class makes its state dict itself, and calls no hook (HQQ)
            path
            for path, inner in (module.named_modules() if module in roots else ())
            if ADDED in inner.__dict__ and type(inner).state_dict is not nn.Module.state_dict
        ]
        if is_owner:
            removers.append(module._register_state_dict_hook(fill))
            removers.append(_raise_as_they_are(module))
        if own_dicts:
            removers.append(module._register_state_dict_hook(partial(_fill_own, own_dicts)))
        if is_owner or module in roots:  # before any buffer is loaded
            removers.append(module.register_load_state_dict_pre_hook(before_load))
    return removers


class _Messages(list):
    """The messages of a ``load_state_dict``, to which torch adds one for each exception of a copy.
    Raises one of ours instead, as it is: the rest is not loaded."""

    def append(self, message: str) -> None:
        if isinstance(error := sys.exception(), InfinityError):
            raise error
        super().append(message)


def _raise_as_they_are(module: nn.Module) -> ReplacedForward:
    """Lets our errors pass through torch's ``load_state_dict`` of ``module``."""
    original, reference = module.__dict__.get("_load_from_state_dict"), weakref.ref(module)

    def load(*args: Any) -> None:
        here = cast("nn.Module", reference())
        messages = _Messages()
        try:
            (original or MethodType(type(here)._load_from_state_dict, here))(*args[:-1], messages)
        finally:
            args[-1].extend(messages)

    return ReplacedForward(module, load, "_load_from_state_dict")


def _fill_own(paths: list[str], _module: nn.Module, state: dict, prefix: str, _: dict) -> None:
    """Fills the entries of the modules at ``paths``."""
    for name, value in state.items():
        if any(name.startswith(f"{prefix}{path}.") for path in paths):
            state[name] = filled(value)


def _full_value(engine: Engine, handle: ParamHandle, state: dict) -> torch.Tensor:
    """Returns the value of a parameter. A tied one is one tensor under all its names in a state
    dict, as in torch."""
    job = engine.job
    for tensor in job.lents.tensors(job.edits, handle) if len(handle.names) > 1 else ():
        if any(value is tensor for value in state.values()):
            return tensor
    value = like(handle.param, handle.flat_param.read_value(job.store, handle.index))
    job.lents.lend(job.edits, handle, value)
    return value
