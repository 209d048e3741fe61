"""Rules: recognises which optimizer's formula the kernels run, and which settings they support.

rule   the formula, an entry of :mod:`.known`

An optimizer is accepted only if the ``step`` that would run is a known one. torch's are recognised
by their code, so a subclass with its own step is refused, and so is a step patched on the instance
or the class. Lion is not torch's: a class of that name is tested on a tensor of our own, against
the formula of https://arxiv.org/abs/2302.06675, Algorithm 2.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch

from ... import native
from ...errors import ConfigError, UsageError
from ...ext.class_step.class_code import class_step, file_of, plain_step
from ...ext.class_step.class_trial import with_moments
from ...ext.class_step.entries import BY_CLASS
from ...ext.class_step.known_elsewhere import ALIASES, as_it_is, refuse_overrides
from ...ext.class_step.matrices import check_split
from ...ext.class_step.own_class import by_own_code, instead
from ..units.handle import handle_of
from .known import KNOWN, OF_TORCH, Known

logger = logging.getLogger(__name__)

ADAMS = (native.Rule.ADAM, native.Rule.ADAMW, native.Rule.AMSGRAD)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Class of torch -> how it steps; AdamW is an Adam, so it comes first
TORCHS = {known.kind: known for known in (*OF_TORCH, *BY_CLASS) if known.kind is not None}
SUPPORTED = (
    f"torch.optim.{', '.join(kind.__name__ for kind in TORCHS)}, Lion (lr, betas, weight_decay),"
    f" and classes of {', '.join(sorted({path.partition('.')[0] for path in ALIASES}))}"
    " (docs/optimizers.md)"
)
TRIED = {"lr": 0.1, "betas": (0.6, 0.8), "weight_decay": 0.3}  # a Lion's settings in its test
# Keys that a group may lack: they have a default
OPTIONAL = ("eps", "weight_decay")
HOW = ("foreach", "fused")
# Parts of the names of classes with a preconditioner for the rows and one for the columns
BY_SQUARES = "soap", "shampoo", "kron"
# Part of a class name -> the nearest supported optimizer.
NEAREST = {
    "adamw": "torch.optim.AdamW",
    "adafactor": "torch.optim.Adafactor",
    **dict.fromkeys(("muon", *BY_SQUARES), "torch.optim.Muon beside another optimizer"),
    "came": "CAME of came_pytorch",
    "ademamix": "AdEMAMix of pytorch_optimizer",
    "prodigy": "Prodigy of prodigyopt",
    "lamb": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "lion": "a class Lion (lr, betas, weight_decay)",
}
# Flags of a group: of no step, and of no rule
NEVER_HONOURED = ("differentiable", "capturable")
NOT_HONOURED = ("amsgrad", *NEVER_HONOURED, "caution", "cautious")


def recognise(optimizer: torch.optim.Optimizer) -> Known:
    """Recognises how ``optimizer`` steps. Raises ConfigError if its step is not exactly a known
    one."""
    refuse_wrapper(optimizer)
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (alias := ALIASES.get(name)) is not None:
        return _of_alias(optimizer, alias)
    base = next((torchs for torchs in TORCHS if isinstance(optimizer, torchs)), None)
    own = plain_step(vars(optimizer)["step"]) if "step" in vars(optimizer) else None
    runs = plain_step(kind.step)
    if own is not None and own is not runs:
        raise _other_step(name, "was replaced on the object", own)
    if base is None and kind.__name__ != "Lion":
        return _of_own_class(optimizer, name)
    if base is None:
        # Without a step its name and hyperparameters decide
        if not _is_torchs(runs, "Optimizer.step"):
            _try_lion(optimizer)
        known = KNOWN[native.Rule.LION]
    else:
        known = TORCHS[base]
        if not _is_torchs(runs, known.step):
            raise _other_step(name, "is not torch's", runs)
        if kind is not base and (other := _overridden(kind, base)):
            raise ConfigError(
                f"optimizer {name} has a {other}() of its own, which would not run: its update runs"
                f" in the engine's kernels. Use torch.optim.{base.__name__}, or keep this model"
                " unwrapped."
            )
        if issubclass(base, torch.optim.Adam):
            known = KNOWN[_adams(optimizer.param_groups, base)]
    known = known.for_groups(optimizer.param_groups)
    _check_all(known, optimizer)
    return (
        known if known.rule is not None else with_moments(known, optimizer, optimizer.param_groups)
    )


def _of_own_class(optimizer: torch.optim.Optimizer, name: str) -> Known:
    """Returns how an optimizer of no known class is stepped. Raises ConfigError with the reason,
    and with what to do, if its own code cannot do it one parameter at a time."""
    try:
        known = by_own_code(optimizer)
    except ConfigError as error:
        raise ConfigError(
            f"optimizer {name} is not supported. {_instead(type(optimizer))}Supported are"
            f" {SUPPORTED}, and classes whose step of a parameter depends on no other one. {error}"
            + instead(optimizer)
        ) from None
    _check_all(known, optimizer)
    logger.info("%s steps by its own code, one parameter at a time", name)
    return known


def _check_all(known: Known, optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    settings = optimizer.defaults if known.kind is not None else ()
    check_groups(known, groups, settings=settings)


def _of_alias(optimizer: torch.optim.Optimizer, known: Known) -> Known:
    """Returns how an optimizer of another library steps. Raises ConfigError for what the kernels do
    not do as it does."""
    name = str(known.kind)
    own = plain_step(vars(optimizer)["step"]) if "step" in vars(optimizer) else None
    runs = plain_step(type(optimizer).step)
    if own is not None and own is not runs:
        raise _other_step(name, "was replaced on the object", own)
    if runs.__code__.co_qualname != known.step:
        raise _other_step(name, "is not its library's", runs)
    known = as_it_is(known, optimizer)
    _check_all(known, optimizer)
    refuse_overrides(optimizer, name)
    args = getattr(optimizer, "args", None)  # of bitsandbytes
    for owner, flag, off in (
        (args, "max_unorm", 0.0),
        (args, "percentile_clipping", 100),
        (args, "skip_zeros", False),
        (optimizer, "bf16_stochastic_round", False),
        (optimizer, "_decouple_lr", False),  # of flashoptim
        (optimizer, "_gradient_release", False),
        (optimizer, "_nesterov", False),
        (SimpleNamespace(**optimizer.defaults), "gradient_release", False),  # of optimi
    ):
        if (value := getattr(owner, flag, off)) != off:
            said = flag.lstrip("_")
            raise ConfigError(f"optimizer {name}: {said}={value} is not supported: set it to {off}")
    if (size := getattr(optimizer, "block_size", native.MOMENT_BLOCK)) < native.MOMENT_BLOCK:
        raise ConfigError(
            f"optimizer {name}: block_size={size} is not supported: set it to"
            f" {native.MOMENT_BLOCK} or more, as blocks have {native.MOMENT_BLOCK} elements here"
        )
    known = replace(known, by_param=known.dtypes_by_class(optimizer))
    in_8_bits = "int8" in known.by_param.values()
    if known.rule is None and in_8_bits:
        raise ConfigError(
            f"optimizer {name}: optim_bits=8 with min_8bit_size={args.min_8bit_size} is not"
            " supported, as it steps by its own code: set optim_bits=32"
        )
    for state in optimizer.state.values():
        for moment in known.moments:
            value = state.get(moment)
            if value is not None and (type(value) is not torch.Tensor or value.dtype not in FLOATS):
                raise ConfigError(
                    f"optimizer {name} has taken steps, and has {moment} in 8 bits: give wrap_model"
                    " a fresh one"
                )
    if known.rule is None:
        return with_moments(known, optimizer, optimizer.param_groups)
    if getattr(args, "optim_bits", 32) == 8 or getattr(optimizer, "_quantize", False):
        known = replace(known, dtype="int8")
    logger.info(
        "%s steps as %s in the engine's kernels, with moments in %s",
        name,
        known.rule.name,
        "int8, and in fp32 where the class has them so" if in_8_bits else known.dtype,
    )
    return known


def refuse_wrapper(optimizer: Any) -> None:
    """Raises ConfigError for a wrapper around an optimizer, which may not even have its
    attributes."""
    if any(type(optimizer) is torchs for torchs in TORCHS):
        return
    values = getattr(optimizer, "__dict__", {})
    of_wrapper = [
        name for name, value in values.items() if isinstance(value, torch.optim.Optimizer)
    ]
    inner = values[of_wrapper[0]] if of_wrapper else optimizer
    if inner is not optimizer:
        kind, of, name = type(optimizer), type(inner).__name__, f"optimizer.{of_wrapper[0]}"
        shared = [
            key
            for key in ("param_groups", "state")
            if key in values and values[key] is vars(inner).get(key)
        ]
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is a wrapper around {of}: give wrap_model the"
            f" {of} itself, and put the wrapper around what wrap_model returns (with Accelerate:"
            " wrap_model first, then accelerator.prepare). For a wrapper that is made already:\n"
            f"    model, {name} = infinity.wrap_model(model, {name}, config)"
            + "".join(f"\n    optimizer.{key} = {name}.{key}" for key in shared)
        )
    if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"{type(optimizer).__qualname__} has no param_groups: its __init__ did not call"
            " torch.optim.Optimizer's"
        )


def _check_lr(index: int, lr: Any) -> None:
    """Raises ConfigError for a learning rate that is no number."""
    value = lr.item() if isinstance(lr, torch.Tensor) and lr.numel() == 1 else lr
    if value is not None and (not isinstance(value, (int, float)) or math.isnan(value)):
        raise ConfigError(f"the optimizer's group {index} has lr={lr!r}: set it to a number")


def check_groups(
    known: Known,
    groups: Iterable[Mapping[str, Any]],
    *,
    moments: Mapping[str, str] | None = None,
    settings: Iterable[str] = (),
) -> None:
    """Raises ConfigError if ``groups`` need what the kernels do not do for ``known``.
    ``moments``: those that the optimizer was wrapped with; None: it is wrapped now. ``settings``:
    those of the optimizer's class. Any other key that is no flag is the user's own, and is
    ignored."""
    rule = known.rule
    others = [name for name in (*NOT_HONOURED, *settings) if name not in (*known.keys, *HOW)]
    with_room = {*known.only_with.values(), *known.ignored}  # the first are checked below
    unknown = [name for name in dict.fromkeys(others) if name not in with_room]
    unknown = unknown if rule is not None else list(NEVER_HONOURED)
    needed = [name for name in known.settings if name not in OPTIONAL]
    needed += known.counters.settings if known.counters is not None else ()
    for i, group in enumerate(groups):
        if missing := [name for name in needed if name not in group]:
            raise ConfigError(f"the optimizer's group {i} lacks {', '.join(missing)}")
        _check_lr(i, group.get("lr"))
        _check_settings(known, i, group)
        for flag in unknown:
            if group.get(flag):
                raise ConfigError(
                    f"the optimizer's group {i} has {flag}={group[flag]}, which is not supported:"
                    f" set {flag}={type(group[flag])()}"
                )
        if rule in ADAMS and "decoupled_weight_decay" in group:
            if bool(group["decoupled_weight_decay"]) != (known.kind is torch.optim.AdamW):
                raise ConfigError(
                    f"the optimizer's group {i} has"
                    f" decoupled_weight_decay={group['decoupled_weight_decay']}, and it was wrapped"
                    f" as {known.name}: all groups are Adam's or all are AdamW's. unwrap_model"
                    " first, change it, and wrap again."
                )
        for moment, key in known.only_with.items() if moments is not None else ():
            if group.get(key) and not _has_room(moments, moment, group):
                raise ConfigError(
                    f"the optimizer's group {i} has {key}={group[key]}, and it was wrapped without"
                    f" {key}, so that there is no room for {moment}. unwrap_model first, set"
                    f" {key}, and wrap again."
                )


def _check_settings(known: Known, index: int, group: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings of ``group`` that have no step, or none by the rule."""
    for key, names in known.settings.items():
        if not isinstance(names, str) and len(group[key]) != len(names):
            raise ConfigError(
                f"the optimizer's group {index} has {key}={group[key]!r}: give {len(names)} numbers"
            )
    if known.counters is not None and (refused := known.counters.refusal(group)):
        raise ConfigError(f"the optimizer's group {index} has {refused}")
    for key in known.own_code_with:
        if group.get(key):
            raise ConfigError(
                f"the optimizer's group {index} has {key}={group[key]}, with which {known.name}"
                f" steps by its own code, and it was wrapped without {key}. unwrap_model first, set"
                f" {key}, and wrap again."
            )


def _has_room(moments: Mapping[str, str], moment: str, group: Mapping[str, Any]) -> bool:
    """Tells whether all parameters of ``group`` that are stepped have an array for ``moment``."""
    handles = [handle for handle in map(handle_of, group["params"]) if handle is not None]
    flat_params = {handle.flat_param for handle in handles if handle.flat_param.spec.stepped}
    return moment in moments and all(moments[moment] in flat.arrays for flat in flat_params)


def saved_step(state: Mapping[str, Any], moments: Iterable[str]) -> int:
    """Returns the step count in torch's state of one parameter. SGD has none: with one of its
    ``moments`` (or ``master``), by their names in the state, its first step is past."""
    return int(state.get("step", any(state.get(name) is not None for name in moments)))


def refuse_flags(
    known: Known,
    groups: Sequence[Mapping[str, Any]],
    *,
    moments: Mapping[str, str],
    settings: Iterable[str],
    where: str,
) -> None:
    """Runs :func:`check_groups` after the wrap. Raises UsageError that names the origin
    ``where``."""
    try:
        check_groups(known, groups, moments=moments, settings=settings)
        check_split(known, groups, lambda param: handle_of(param) is not None)
    except ConfigError as error:
        raise UsageError(f"{where}: {error}") from None


def _is_torchs(step: Callable, name: str) -> bool:
    return bool(file_of(step)) and step.__code__.co_qualname == name


def _overridden(kind: type, base: type) -> str:
    """Returns the first method of a step that ``kind`` overrides from ``base``, or ""."""
    between = kind.__mro__[: kind.__mro__.index(base)]
    names = ("_init_group", "__getattribute__", "__setattr__")
    return next((name for name in names for each in between if name in vars(each)), "")


def _other_step(name: str, how: str, step: Callable) -> ConfigError:
    code = getattr(step, "__code__", None)
    place = (
        f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
    )
    return ConfigError(
        f"optimizer {name}: its step(){place} {how}, and would not run: the update runs in the"
        f" engine's kernels. Supported are {SUPPORTED}. For more at each step use"
        " optimizer.register_step_pre_hook() and register_step_post_hook()."
    )


def _instead(kind: type) -> str:
    """Returns why class ``kind`` is not supported, if that is known, and a hint to the nearest
    optimizer that is; or ""."""
    name, why = kind.__name__.lower(), ""
    same = (f"torch.optim.{each.__name__}" for each in TORCHS if each.__name__.lower() == name)
    nearest = next(chain(same, (each for key, each in NEAREST.items() if key in name)), None)
    if nearest is None:
        return ""
    if any(each in name for each in BY_SQUARES):
        why = (
            "It keeps square matrices of the rows and of the columns of a parameter, which have no"
            " home here. "
        )
    has_rule = any(each in nearest for each in ("Adam", "SGD", "Lion"))
    if has_rule and any(bits in name for bits in ("8bit", "4bit", "fp8")):
        return (
            f'Use {nearest} with Config(moments="int8") to keep moments in 8 bits; homes do'
            " what paging and offload do. "
        )
    return f"{why}Use {nearest}: it is stepped at any home. "


def _adams(groups: Iterable[Mapping[str, Any]], base: type) -> native.Rule:
    decoupled = {
        bool(group.get("decoupled_weight_decay", base is torch.optim.AdamW)) for group in groups
    }
    if len(decoupled) > 1:
        raise ConfigError(
            "the optimizer's groups mix Adam and AdamW (decoupled_weight_decay): use one of them"
        )
    return native.Rule.ADAMW if decoupled == {True} else native.Rule.ADAM


def _try_lion(optimizer: torch.optim.Optimizer) -> None:
    """Runs three steps of the optimizer's class on a tensor of our own. Raises ConfigError if they
    are not Lion's."""
    kind = type(optimizer)
    for i, group in enumerate(optimizer.param_groups):
        if missing := {"lr", "betas"} - set(group):
            raise ConfigError(
                f"optimizer Lion: group {i} has no {', '.join(sorted(missing))}. Supported are"
                f" {SUPPORTED}."
            )
        decay = TRIED["weight_decay"] if "weight_decay" in group else 0.0
        param = torch.nn.Parameter(torch.linspace(-1, 1, 16))
        tried = group | {key: value for key, value in TRIED.items() if key in group}
        state: dict[str, Any] = {}
        expected, moment = param.detach().clone(), torch.zeros(16)
        sign = -1.0 if group.get("maximize") else 1.0
        try:
            for turn in range(3):
                grad = torch.cos(torch.arange(16.0) * (turn + 1)) * 0.1
                param.grad = grad.clone()
                state, _ = class_step(optimizer, tried, param, state)
                direction = (0.6 * moment + 0.4 * sign * grad).sign()
                expected = expected * (1 - 0.1 * decay) - 0.1 * direction
                moment = 0.8 * moment + 0.2 * sign * grad
        except Exception as error:
            raise ConfigError(
                f"optimizer Lion: a step of it on a small tensor on the CPU raised {error!r}."
                f" Supported are {SUPPORTED}."
            ) from error
        if not state and torch.equal(param, torch.linspace(-1, 1, 16)):
            continue  # a step that does nothing is accepted, like a missing one
        kept = state.get("exp_avg")
        if (
            not torch.allclose(param, expected, atol=1e-5)
            or kept is None
            or not torch.allclose(kept, moment, atol=1e-5)
        ):
            raise ConfigError(
                f"optimizer Lion of {kind.__module__} does not step as Lion does (arXiv"
                f" 2302.06675), with the settings of its group {i}: its update runs in the engine's"
                f" kernels. Supported are {SUPPORTED}."
            )
