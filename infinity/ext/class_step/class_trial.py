"""ClassTrial: tries on small matrices how a class may be stepped.

A class step (:mod:`.class_step`) equals the class's own step only if the step of one parameter does
not depend on another one, and if all that it keeps beside an array at home is small. If the step of
an element depends on others of its parameter, the parameter is stepped whole. All of it depends on
the settings, so the optimizer's own are tried, and tried again if one is switched on or off.

"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...core.step.known import Known
from ...core.units.flat_param_spec import EVERY_MOMENT
from ...core.units.handle import handle_of
from ...errors import ConfigError, UsageError
from .class_code import class_step, is_equal, step_as
from .class_costs import ClassPiece, costs_of

logger = logging.getLogger(__name__)

SHAPES = (4, 6), (5, 3)
STEPS, RATE = 3, 0.01
LEAST = 6  # of a dimension, in a trial
State = dict[str, Any]
NUMBERS = int, float, torch.Tensor


def switches(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the settings of ``group`` that are on, and its words: what may change how it is
    stepped."""
    switched = []
    for key, value in group.items():
        if key in ("params", "lr") or isinstance(value, torch.Tensor):
            continue
        switched.append(
            (key, value if isinstance(value, str) else value is not None and bool(value))
        )
    return tuple(sorted(switched))


def with_moments(
    known: Known, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> Known:
    """Returns ``known`` with the moments that the class keeps for each element with the settings of
    ``groups``, and whether it needs whole parameters. Raises ConfigError if it cannot be stepped
    one parameter at a time, or keeps more than there is room for."""
    bound = [
        name
        for name, value in vars(optimizer).items()
        if not isinstance(value, torch.optim.lr_scheduler.LRScheduler)  # a user's own
        and any(each is optimizer for each in getattr(value, "__dict__", {}).values())
    ]
    if bound:
        raise ConfigError(
            f"optimizer {known.name} has a helper in {bound[0]} that is bound to it, and it would"
            " not see the parameters that are stepped here. Switch that off."
            + _settings_of(optimizer)
        )
    moments: list[str] = []
    tried: dict[tuple, tuple[str, ...]] = {}
    kept: dict[str, torch.dtype] = {}
    costs, whole = [ClassPiece(0)], known.whole
    for group in groups:
        state, is_of_elements = _tried(known, optimizer, group)
        whole |= not is_of_elements
        numel = torch.Size(SHAPES[0]).numel()
        own = {name: value for name, value in state.items() if _shape(value) != SHAPES[0]}
        large = [name for name, value in own.items() if _numel(value) >= numel]
        if large and known.measured is not None:
            logger.info("%s keeps %s in host memory", known.name, " and ".join(large))
        elif large:
            raise ConfigError(
                f"optimizer {known.name} keeps {', '.join(large)}, which are as large as a"
                " parameter and have another shape, so that there is no home for them. Choose"
                " another optimizer or other settings (docs/optimizers.md)."
                + _settings_of(optimizer)
            )
        tried[switches(group)] = tuple(name for name in state if name not in own)
        kept |= {name: state[name].dtype for name in tried[switches(group)]}
        moments += [name for name in tried[switches(group)] if name not in moments]
        costs.append(_costs(optimizer, group, tried[switches(group)]))
    if len(moments) > len(EVERY_MOMENT):
        raise ConfigError(
            f"optimizer {known.name} keeps {', '.join(moments)} for each element of a parameter:"
            f" there is room for {len(EVERY_MOMENT)}. Choose another one (docs/optimizers.md)."
        )
    others = iter([name for name in EVERY_MOMENT if name not in moments])
    at_home = {name: name if name in EVERY_MOMENT else next(others) for name in moments}
    most = ClassPiece(*map(max, zip(*costs[len(groups) > 0 :])))
    return replace(known, moments=at_home, whole=whole, tried=tried, kept=kept, costs=most)


def check_again(
    known: Known, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], where: str
) -> Known:
    """Checks ``groups``: those with other switches than before are tried. Returns ``known`` with
    them. Raises UsageError, from ``where``, if their parameters cannot be stepped as they were
    wrapped."""
    for index, group in enumerate(groups):
        tried_again = known
        if switches(group) not in known.tried:
            try:
                tried_again = with_moments(replace(known, whole=False), optimizer, [group])
            except ConfigError as error:
                raise UsageError(f"{where}: group {index}: {error}") from None
            known = replace(
                known,
                tried={**known.tried, **tried_again.tried},
                kept={**tried_again.kept, **known.kept},
            )
        missing = _without_home(known, group)
        if missing or (tried_again.whole and not known.whole):
            what = f"keeps {', '.join(missing)}" if missing else "needs whole parameters"
            raise UsageError(
                f"{where}: with its present settings {known.name} {what} in group {index}, for"
                " which it was not wrapped. unwrap_model first, set them, and wrap again."
            )
    return known


def _without_home(known: Known, group: Mapping[str, Any]) -> list[str]:
    """Lists the moments of ``group`` that a parameter in it has no array for."""
    needed = known.tried[switches(group)]
    arrays = {known.moments.get(name) for name in needed}
    for param in group["params"]:
        handle = handle_of(param)
        if handle is not None and handle.flat_param.spec.stepped:
            if arrays - {*handle.flat_param.arrays}:
                return [
                    name
                    for name in needed
                    if known.moments.get(name) not in handle.flat_param.arrays
                ]
    return [name for name in needed if name not in known.moments]


def _tried(
    known: Known, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> tuple[State, bool]:
    """Runs :func:`_try` on the processor, or on the device that the class needs. Raises ConfigError
    if it cannot step on either."""
    try:
        return _try(known, optimizer, group, torch.device("cpu"))
    except ConfigError:
        raise
    except Exception as error:
        if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
            return _try(known, optimizer, group, device)
        raise ConfigError(
            f"optimizer {known.name}: a step of it on a small tensor on the CPU raised {error!r}."
            " Try that step without wrap_model."
        ) from error


class Run:
    """Steps of some parameters: each alone, or all together."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: State,
        params: Sequence[torch.Tensor],
        *,
        together: bool,
    ):
        self._optimizer, self._settings = optimizer, dict(settings)
        self.params = [torch.nn.Parameter(param.detach().clone()) for param in params]
        self.states: list[State] = [{} for _ in params]
        self._together = together
        self._unlike: set[str] = set()  # settings to which parameters give unlike numbers

    def step(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Steps by ``grads``."""
        if not self._together:
            # As in a step here, where what a class keeps on a parameter is gone in the next one.
            self.params = [torch.nn.Parameter(param.detach()) for param in self.params]
        for param, grad in zip(self.params, grads):
            param.grad = None if grad is None else grad.clone()
        everyone = list(range(len(self.params)))
        changes: list[State] = []
        for places in [everyone] if self._together else [[place] for place in everyone]:
            params, states = ([each[at] for at in places] for each in (self.params, self.states))
            stepped, changed = step_as(self._optimizer, self._settings, params, states)
            changes.append(changed)
            for place, state in zip(places, stepped):
                self.states[place] = state
        for key in changes[-1]:
            if isinstance(changes[-1][key], NUMBERS) and not all(
                is_equal(each.get(key), changes[-1][key]) for each in changes
            ):
                self._unlike.add(key)
        self._settings |= changes[-1]

    def adds_up(self) -> bool:
        """Tells whether a setting that parameters change unlike is added to, as a sum over their
        gradients is: its new value follows the old one."""
        for key in self._unlike:
            sums = []
            for more in (0, 1):
                settings = self._settings | {key: self._settings[key] * (1 + more) + more}
                param = torch.nn.Parameter(self.params[0].detach().clone())
                param.grad = gradient_of(param, 1)
                _, changed = step_as(self._optimizer, settings, [param], [{}])
                sums.append(changed.get(key, settings[key]))
            if not is_equal(*sums):
                return True
        return False

    @property
    def values(self) -> torch.Tensor:
        """All elements, flat."""
        return torch.cat([param.detach().reshape(-1) for param in self.params])


def _try(
    known: Known,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    where: torch.device,
) -> tuple[State, bool]:
    """Steps two matrices together, one at a time, and in parts. Returns the state of the first, and
    whether parts have the same results. Raises ConfigError if one at a time they differ."""
    settings = settings_to_move(optimizer, group)
    params = [_values(shape, where) for shape in SHAPES]
    runs = [Run(optimizer, settings, params, together=each) for each in (False, True)]
    parts = Run(optimizer, settings, _parts_of(params), together=False)
    are_parts_same = not known.whole
    for number in range(STEPS):
        grads = [gradient_of(param, number) for param in params]
        for run in runs:
            run.step(grads)
        try:
            if are_parts_same:
                parts.step(_parts_of(grads))
        except Exception:  # noqa: BLE001 - it needs the shape
            are_parts_same = False
    alone, together = runs
    if known.measured is None and not (
        torch.equal(alone.values, together.values)
        and all(map(are_same, alone.states, together.states))
        and not alone.adds_up()
    ):
        raise ConfigError(
            f"optimizer {known.name}, with these settings, steps all parameters at once, as a clip"
            " by their common norm does, draws random numbers, or keeps state outside of"
            " optimizer.state, as a sum over gradients in a group: here parameters are stepped one"
            f" at a time.{_settings_of(optimizer)} Switch that off. To clip:"
            " Config(max_grad_norm=...)"
        )
    return alone.states[0], are_parts_same and torch.equal(alone.values, parts.values)


def _settings_of(optimizer: torch.optim.Optimizer) -> str:
    """Says which settings are not the defaults of the optimizer's class, for a message."""
    settings, missing = {}, inspect.Parameter.empty
    for name, parameter in inspect.signature(type(optimizer).__init__).parameters.items():
        for values in (*optimizer.param_groups, vars(optimizer)):
            if parameter.default is not missing and values.get(name, missing) is not missing:
                is_same = values[name] is parameter.default or values[name] == parameter.default
                settings |= {} if is_same else {name: values[name]}
    said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return f" It has {said}." if said else ""


def settings_to_move(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> State:
    """Returns the settings of ``group`` by which parameters move."""
    settings = {key: value for key, value in group.items() if key != "params"}
    if hasattr(optimizer, "train"):  # else it may refuse to step
        settings |= step_as(optimizer, settings, [], [], "train")[1]
    if settings.get("lr") is not None and not float(settings["lr"]):
        settings["lr"] = RATE  # of a warm-up that begins: nothing would move
    return settings


def _costs(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], moments: Sequence[str]
) -> ClassPiece:
    """Measures what the class makes and keeps; where it does not step on the processor, it is
    assumed."""
    settings = settings_to_move(optimizer, group)
    try:
        return costs_of(
            lambda param, state: class_step(optimizer, settings, param, state)[0],
            moments,
            torch.device("cpu"),
            ClassPiece(0),
        )
    except Exception:  # noqa: BLE001 - a class of kernels for a device, which was tried there
        return ClassPiece(0)


def _parts_of(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cuts each into two flat parts, in the middle of a row."""
    return [part for each in values for part in each.reshape(-1).split([7, each.numel() - 7])]


def _values(shape: tuple[int, int], where: torch.device) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    return torch.linspace(-1, 1, numel, dtype=torch.float32, device=where).view(shape)


def gradient_of(param: torch.Tensor, number: int) -> torch.Tensor:
    """Makes gradients of several sizes, also over steps: some settings clip."""
    values = torch.arange(param.numel(), dtype=torch.float32, device=param.device)
    columns = param.shape[-1] if param.ndim else 1
    rows = 1 + values // max(columns, 1)
    sizes = rows * 10.0 ** (min(columns, LEAST) - 4) * (1.0, 1e-3, 2.0)[number % 3]
    return (torch.cos(values * (number + 1)) * sizes).view(param.shape)


def are_same(one: State, other: State) -> bool:
    """Tells whether two states of a parameter have the same tensors."""
    return all(
        torch.equal(value, other[name])
        for name, value in one.items()
        if isinstance(value, torch.Tensor)
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _numel(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (list, tuple)):
        return sum(map(_numel, value))
    return 0
