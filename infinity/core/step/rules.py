"""Rules: recognises which optimizer's formula the kernels run, and which settings they support.

rule   the formula, an entry of :mod:`.known`

An optimizer is accepted only if the ``step`` that would run is a known one. torch's are recognised
by their code, so a subclass with its own step is refused, and so is a step patched on the instance
or the class. Other classes are an extension's to recognise (:class:`Recogniser`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ... import native
from ...errors import ConfigError
from .. import seams
from ..units.handle import handle_of
from .known import KNOWN, OF_TORCH, Known, path_of

ADAMS = (native.Rule.ADAM, native.Rule.ADAMW, native.Rule.AMSGRAD)
# Class of torch -> how it steps; AdamW is an Adam, so it comes first
TORCHS = {known.kind: known for known in OF_TORCH if known.kind is not None}
# Keys that a group may lack: they have a default
OPTIONAL = ("eps", "weight_decay")
OPTIM = os.path.dirname(torch.optim.__file__) + os.sep
NO_GRAD = torch.no_grad()(lambda: None).__code__.co_filename  # of functions that it decorates
WAITS = "_infinity_waits"  # attribute of a step that calls the one it wraps


class Recogniser:
    """Recognises classes of optimizers that the engine does not know. :data:`.seams.RULES` has the
    paths of the derived classes."""

    supported = ""  # the classes, in an error

    @classmethod
    def recognise(cls, optimizer: torch.optim.Optimizer) -> Known | None:
        """Returns how ``optimizer`` steps, or None for a class that this does not know. Raises
        ConfigError for a step that cannot be made as its class makes it."""
        return None

    @classmethod
    def try_unknown(cls, optimizer: torch.optim.Optimizer) -> Known | None:
        """Returns how ``optimizer``, of a class that nothing knows, steps, or None. Raises
        ConfigError with the reason."""
        return None


def recognise(optimizer: torch.optim.Optimizer) -> Known:
    """Recognises how ``optimizer`` steps. Raises ConfigError if its step is not exactly a known
    one."""
    refuse_wrapper(optimizer)
    name, step = path_of(kind := type(optimizer)), vars(optimizer).get("step")
    if step is not None and (replaced := plain_step(step)) is not plain_step(kind.step):
        raise other_step(name, "was replaced on the object", replaced)
    others = [*_recognisers()]
    ways = [way.recognise for way in others] + [_of_torch] + [way.try_unknown for way in others]
    known = next(filter(None, (way(optimizer) for way in ways)), None)
    if known is None:
        raise ConfigError(f"optimizer {name} is not supported. Supported are {supported()}.")
    check_groups(known, optimizer.param_groups, optimizer.defaults)
    return known


def _of_torch(optimizer: torch.optim.Optimizer) -> Known | None:
    for base, known in TORCHS.items():
        if isinstance(optimizer, base):
            check_torchs(optimizer, base, known.step)
            if issubclass(base, torch.optim.Adam):
                known = KNOWN[_adams(optimizer.param_groups, base)]
            return known.for_groups(optimizer.param_groups)
    return None


def _recognisers() -> Iterator[type[Recogniser]]:
    return seams.classes_of(seams.RULES)


def supported() -> str:
    """Lists the classes that are supported, for an error."""
    of_torch = "torch.optim." + ", ".join(kind.__name__ for kind in TORCHS)
    return ", ".join([of_torch, *(recogniser.supported for recogniser in _recognisers())])


def check_torchs(optimizer: torch.optim.Optimizer, base: type, step: str) -> None:
    """Raises ConfigError if an optimizer of class ``base`` of torch, or of one above it, steps in
    another way than ``base``, by its ``step``."""
    name = path_of(kind := type(optimizer))
    if not is_torchs(runs := plain_step(kind.step), step):
        raise other_step(name, "is not torch's", runs)
    between = kind.__mro__[: kind.__mro__.index(base)]
    names = ("_init_group", "__getattribute__", "__setattr__")
    if other := next((name for name in names for owner in between if name in vars(owner)), ""):
        raise ConfigError(
            f"optimizer {name} has a {other}() of its own, which would not run: its update runs"
            f" in the engine's kernels. Use torch.optim.{base.__name__}, or keep this model"
            " unwrapped."
        )


def plain_step(step: Callable) -> Callable:
    """Returns ``step`` without torch's own wrappers (profiler, ``differentiable``, ``no_grad``, a
    scheduler's counter), and without one that only waits for a wrap."""
    step = getattr(step, "__func__", step)
    while (inner := getattr(step, "__wrapped__", None)) is not None and (
        file_of(step) in ("optimizer.py", "lr_scheduler.py")
        or step.__code__.co_filename == NO_GRAD
        or hasattr(step, WAITS)
    ):
        step = inner  # functools.wraps copies names and attributes, but not the code
    return step


def file_of(function: Callable) -> str:
    """Returns the file of torch.optim that defines ``function``, or ""."""
    path = getattr(getattr(function, "__code__", None), "co_filename", "")
    return path.removeprefix(OPTIM) if path.startswith(OPTIM) else ""


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
        keys = [
            key
            for key in ("param_groups", "state")
            if key in values and values[key] is vars(inner).get(key)
        ]
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is a wrapper around {of}: give wrap_model the"
            f" {of} itself, and put the wrapper around what wrap_model returns (with Accelerate:"
            " wrap_model first, then accelerator.prepare). For a wrapper that is made already:\n"
            f"    model, {name} = infinity.wrap_model(model, {name}, config)"
            + "".join(f"\n    optimizer.{key} = {name}.{key}" for key in keys)
        )
    if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            f"{type(optimizer).__qualname__} has no param_groups: its __init__ did not call"
            " torch.optim.Optimizer's"
        )


def check_groups(
    known: Known,
    param_groups: Iterable[Mapping[str, Any]],
    defaults: Iterable[str],
    moments: Mapping[str, str] | None = None,
) -> None:
    """Raises ConfigError if ``param_groups`` need what the kernels do not do for ``known``.
    ``moments``: those that the optimizer was wrapped with; None: it is wrapped now. ``defaults``:
    the settings of the optimizer's class. Any other key that is not a flag is the user's own, and
    is ignored."""
    rule = known.rule
    unknown = known.refused(defaults if known.kind is not None else ())
    needed = [name for name in known.settings if name not in OPTIONAL]
    needed += known.counters.settings if known.counters is not None else ()
    for i, group in enumerate(param_groups):
        if missing := [name for name in needed if name not in group]:
            raise ConfigError(f"the optimizer's group {i} lacks {', '.join(missing)}")
        value = lr = group.get("lr")
        if isinstance(lr, torch.Tensor) and lr.numel() == 1:
            value = lr.item()
        if value is not None and (not isinstance(value, (int, float)) or math.isnan(value)):
            raise ConfigError(f"the optimizer's group {i} has lr={lr!r}: set it to a number")
        for key, names in known.settings.items():
            if not isinstance(names, str) and len(group[key]) != len(names):
                raise ConfigError(
                    f"the optimizer's group {i} has {key}={group[key]!r}: give {len(names)} numbers"
                )
        if known.counters is not None and (unusable := known.counters.unusable(group)):
            raise ConfigError(f"the optimizer's group {i} has {unusable}")
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
            if not group.get(key):
                continue
            handles = [handle for handle in map(handle_of, group["params"]) if handle is not None]
            flats = {handle.flat_param for handle in handles if handle.flat_param.spec.stepped}
            if moment not in moments or any(moments[moment] not in flat.arrays for flat in flats):
                raise ConfigError(
                    f"the optimizer's group {i} has {key}={group[key]}, and it was wrapped without"
                    f" {key}, so that there is no room for {moment}. unwrap_model first, set"
                    f" {key}, and wrap again."
                )


def saved_step(state: Mapping[str, Any], moments: Iterable[str]) -> int:
    """Returns the step count in torch's state of one parameter. SGD has none: with one of its
    ``moments`` (or ``master``), by their names in the state, its first step is past."""
    return int(state.get("step", any(state.get(name) is not None for name in moments)))


def is_torchs(step: Callable, name: str) -> bool:
    """Tells whether ``step`` is torch's function of that ``name``."""
    return bool(file_of(step)) and step.__code__.co_qualname == name


def other_step(name: str, how: str, step: Callable) -> ConfigError:
    """Makes the error for a ``step`` that would not run."""
    code = getattr(step, "__code__", None)
    where = (
        f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
    )
    return ConfigError(
        f"optimizer {name}: its step(){where} {how}, and would not run: the update runs in the"
        f" engine's kernels. Supported are {supported()}. For more at each step use"
        " optimizer.register_step_pre_hook() and register_step_post_hook()."
    )


def _adams(param_groups: Iterable[Mapping[str, Any]], base: type) -> native.Rule:
    decoupled = {
        bool(group.get("decoupled_weight_decay", base is torch.optim.AdamW))
        for group in param_groups
    }
    if len(decoupled) > 1:
        raise ConfigError(
            "the optimizer's groups mix Adam and AdamW (decoupled_weight_decay): use one of them"
        )
    return native.Rule.ADAMW if decoupled == {True} else native.Rule.ADAM
