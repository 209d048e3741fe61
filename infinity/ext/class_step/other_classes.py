"""OtherClasses: recognises the optimizers of classes that are not torch's, or have no kernel.

Those of other libraries are known by their paths. A class Lion is tried on a tensor of our own,
against the formula of https://arxiv.org/abs/2302.06675, Algorithm 2. Any other class steps by its
own code, if it can do that one parameter at a time.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch

from ... import native
from ...core.step.known import KNOWN, Known, path_of
from ...core.step.rules import (
    TORCHS,
    Recogniser,
    check_groups,
    check_torchs,
    is_torchs,
    other_step,
    plain_step,
    supported,
)
from ...errors import ConfigError
from .class_code import class_step
from .class_trial import with_moments
from .entries import BY_CLASS, Elsewhere
from .known_elsewhere import ALIASES, as_it_is, refuse_overrides
from .own_class import by_own_code, instead

logger = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LIBRARIES = ", ".join(sorted({path.partition(".")[0] for path in ALIASES}))
TRIED = {"lr": 0.1, "betas": (0.6, 0.8), "weight_decay": 0.3}  # a Lion's settings in its test
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


class OtherClasses(Recogniser):
    """Recognises all classes but torch's that a kernel steps."""

    supported = (
        f"{', '.join(known.kind.__name__ for known in BY_CLASS)}, Lion (lr, betas, weight_decay),"
        f" and classes of {LIBRARIES} (docs/optimizers.md)"
    )

    @classmethod
    def recognise(cls, optimizer: torch.optim.Optimizer) -> Known | None:
        name = path_of(type(optimizer))
        if (alias := ALIASES.get(name)) is not None:
            return _of_alias(optimizer, alias)
        for known in BY_CLASS:
            if isinstance(optimizer, known.kind):
                check_torchs(optimizer, known.kind, known.step)
                check_groups(known, optimizer.param_groups, optimizer.defaults)  # before a trial
                return with_moments(known, optimizer, optimizer.param_groups)
        if type(optimizer).__name__ != "Lion":
            return None
        # Without a step its name and hyperparameters decide
        if not is_torchs(plain_step(type(optimizer).step), "Optimizer.step"):
            _try_lion(optimizer)
        return KNOWN[native.Rule.LION]

    @classmethod
    def try_unknown(cls, optimizer: torch.optim.Optimizer) -> Known:
        """Raises ConfigError with the reason, and with what to do, if the class's own code cannot
        step one parameter at a time."""
        name = path_of(type(optimizer))
        try:
            known = by_own_code(optimizer)
        except ConfigError as error:
            raise ConfigError(
                f"optimizer {name} is not supported. {_instead(type(optimizer))}Supported are"
                f" {supported()}, and classes whose step of a parameter depends on no other one."
                f" {error}{instead(optimizer)}"
            ) from None
        logger.info("%s steps by its own code, one parameter at a time", name)
        return known


def _of_alias(optimizer: torch.optim.Optimizer, known: Elsewhere) -> Elsewhere:
    """Returns how an optimizer of another library steps. Raises ConfigError for what the kernels do
    not do as it does."""
    name = str(known.kind)
    runs = plain_step(type(optimizer).step)
    if runs.__code__.co_qualname != known.step:
        raise other_step(name, "is not its library's", runs)
    known = as_it_is(known, optimizer)
    check_groups(known, optimizer.param_groups, optimizer.defaults)  # before a trial
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


def _instead(kind: type) -> str:
    """Returns why class ``kind`` is not supported, if that is known, and a hint to the nearest
    optimizer that is; or ""."""
    name, why = kind.__name__.lower(), ""
    of_torch = (*TORCHS, *(known.kind for known in BY_CLASS))
    same = (f"torch.optim.{each.__name__}" for each in of_torch if each.__name__.lower() == name)
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


def _try_lion(optimizer: torch.optim.Optimizer) -> None:
    """Runs three steps of the optimizer's class on a tensor of our own. Raises ConfigError if they
    are not Lion's."""
    kind = type(optimizer)
    for i, group in enumerate(optimizer.param_groups):
        if missing := {"lr", "betas"} - set(group):
            raise ConfigError(
                f"optimizer Lion: group {i} has no {', '.join(sorted(missing))}. Supported are"
                f" {supported()}."
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
                f" Supported are {supported()}."
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
                f" kernels. Supported are {supported()}."
            )
