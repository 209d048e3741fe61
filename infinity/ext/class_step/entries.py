"""Entries: classes that torch does not have, or that step by their own code, and what they need of
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from ...config import Config
from ...core.machine.device import Device
from ...core.machine.tiers import Tier
from ...core.plan.unit_sizes import FlatParamSize, UnitSize
from ...core.seams import Extension, Term
from ...core.step.known import NEVER_HONOURED, NO_NAMES, Known, Names, ParamGroup, path_of
from ...core.step.optimizer_step import OptimizerStep
from ...core.units.forms import is_plain
from ...errors import ConfigError, UsageError
from .class_step import ClassStepper
from .class_trial import check_again, switches, with_moments
from .matrices import check_split
from .segments import EVERY, PIECE

STEP, SUMS = "a parameter's step", "sums of the optimizer's class"  # the names of bytes in plans


@dataclass(frozen=True)
class Elsewhere(Known):
    """How the optimizers of a class that is not torch's, or has no rule, step.

    of_object
        Attributes of the optimizer itself -> switches; "": the configuration has it, and it is off.
    own_code_with
        Settings of a group with which the class steps by its own code.
    dtype_of
        The dtype that the class gives the moments of one parameter, found by the optimizer and the
        numbers of its group and of the parameter in it; None: ``dtype`` for all.
    by_param
        What that found for each parameter at the wrap.
    inside
        The key of a parameter's state, in the class's state dict, under which the moments are.
    """

    of_object: Mapping[str, str] = field(default_factory=dict)
    own_code_with: tuple[str, ...] = ()
    dtype_of: Callable[[Any, int, int], str] | None = None
    by_param: Mapping[torch.Tensor, str] = field(default_factory=dict)
    inside: str | None = None

    @property
    def name(self) -> str:
        """The rule's name, or the path of the class, also if it may step by its own code."""
        return str(self.kind) if self.own_code_with else super().name

    def refused(self, settings: Iterable[str]) -> list[str]:
        return [each for each in super().refused(settings) if each not in self.own_code_with]

    def dtypes_by_class(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
        """Returns the dtype that the class gives the moments of each parameter; empty if it gives
        all of them one."""
        if self.dtype_of is None:
            return {}
        return {
            param: self.dtype_of(optimizer, index, place)
            for index, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
        }

    def dtype_at_wrap(self, param: torch.Tensor) -> str | None:
        return self.by_param.get(param)

    def added_arrays(
        self, group: ParamGroup, moments: Mapping[str, str], config: Config
    ) -> dict[str, torch.dtype]:
        """Returns the arrays as :meth:`.Known.added_arrays`, in fp32 if the class chooses a dtype
        for each parameter."""
        return self.arrays_of(moments, config, None if self.dtype_of is None else "fp32")

    def flat(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.inside is None:
            return state_dict
        state = {
            index: {key: each for key, each in of.items() if key != self.inside}
            | of.get(self.inside, {})
            for index, of in state_dict["state"].items()
        }
        return state_dict | {"state": state}

    def check_dtype(
        self,
        optimizer: torch.optim.Optimizer,
        group: ParamGroup,
        dtype: torch.dtype,
        config: Config,
    ) -> None:
        """Raises ConfigError if a parameter of ``dtype`` in ``group`` has a master by ``config``
        that the class does not have, or the class rounds it in a way that is not done here."""
        name = type(optimizer).__name__
        if dtype == torch.float32:
            return
        if config.master != "none" and group.get("master_bytewidth") == 0:
            raise ConfigError(
                f"optimizer {name} has master_weight_bits=None, so that {dtype} weights have no"
                " master: Config(master='none') does that; or leave master_weight_bits out"
            )
        if config.master == "none" and {**vars(optimizer), **group}.get("stochastic_rounding"):
            raise ConfigError(
                f"optimizer {name} has stochastic_rounding=True, and Config(master='none') rounds"
                f" {dtype} weights to the nearest: set it to False, or leave master out, and"
                " nothing is rounded away"
            )

    def checked(self, ours: Any, given: Any, groups: Sequence[ParamGroup], where: str) -> Known:
        """Raises UsageError for settings with which the class steps by its own code, for a switch
        of ``ours`` or ``given`` that is not as it was at the wrap, and for another dtype of a
        parameter's moments."""
        for index, group in enumerate(groups):
            for key in self.own_code_with:
                if group.get(key):
                    raise UsageError(
                        f"{where}: the optimizer's group {index} has {key}={group[key]}, with which"
                        f" {self.name} steps by its own code, and it was wrapped without {key}."
                        f" unwrap_model first, set {key}, and wrap again."
                    )
        for (name, switch), owner in product(self.of_object.items(), (ours, given)):
            if bool(value := getattr(owner, name)) != (switch in self.always):
                raise UsageError(
                    f"{where}: {name}={value} of the optimizer has changed since the wrap:"
                    " unwrap_model first, set it, and wrap again"
                )
        for param, dtype in self.dtypes_by_class(given).items():
            if (before := self.by_param.get(param, dtype)) != dtype:
                raise UsageError(
                    f"{where}: the moments of a parameter of shape {tuple(param.shape)} are in"
                    f" {dtype} by the optimizer's class, and were in {before} at the wrap:"
                    " unwrap_model first, and wrap again"
                )
        return self


@dataclass(frozen=True)
class OwnCode(Elsewhere):
    """How the optimizers of a class step that has no rule: by their own code. It rounds moments to
    the nearest, so that small changes of narrow ones would be lost; and it counts the steps.

    whole
        The class steps whole parameters, and not any part of their elements.
    splits
        A group's ``split`` says which matrices its parameters are (:mod:`.matrices`).
    measured
        The sums over all parameters that a step needs.
    tried
        The switches of groups that the trial of a class had -> the moments of such a group.
    kept
        The dtype in which the class has each moment of an fp32 parameter. The array at home is not
        narrower.
    costs
        What the trial has found that it makes and keeps.
    """

    whole: bool = False
    splits: bool = False
    measured: Any = None
    tried: Mapping[tuple, tuple[str, ...]] = field(default_factory=dict)
    kept: Mapping[str, torch.dtype] = field(default_factory=dict)
    costs: Any = None

    @property
    def needs(self) -> Any:
        return self.costs._replace(numel=EVERY if self.whole else PIECE)

    def has_moment(self, name: str, group: ParamGroup) -> bool:
        return name in self.tried.get(switches(group), self.moments)

    def refused(self, settings: Iterable[str]) -> list[str]:
        return list(NEVER_HONOURED)

    def added_arrays(
        self, group: ParamGroup, moments: Mapping[str, str], config: Config
    ) -> dict[str, torch.dtype]:
        return super().added_arrays(group, self.moments_of([group]), config)

    def check_shapes(
        self,
        groups: Sequence[ParamGroup],
        is_moved: Callable[[torch.Tensor], bool],
        names: Names = NO_NAMES,
    ) -> None:
        """Raises ConfigError for parameters that are not matrices, if the class steps these, and
        for parts of parameters, if it steps whole ones."""
        check_split(self, groups, is_moved, names)
        params = [p for group in groups for p in group["params"] if isinstance(p, torch.Tensor)]
        if self.whole and not all(map(is_plain, filter(is_moved, params))):
            raise ConfigError(
                f"{self.name} steps whole parameters, and tensor or expert parallelism has divided"
                " some of these. Give the divided ones another optimizer:"
                " wrap_model(model, [first, second])."
            )

    def check_stream(self, ranks: int) -> None:
        if self.measured is not None:
            raise UsageError(
                f"step_in_backward with {self.name}: its step needs a number of all"
                " gradients before the first unit is stepped. Call step() after the backward."
            )
        if self.whole and ranks > 1:
            raise UsageError(
                f"step_in_backward with {self.name} over several ranks: its step needs whole"
                " parameters, for which the ranks meet after the backward. Call step() after it."
            )

    def checked(self, ours: Any, given: Any, groups: Sequence[ParamGroup], where: str) -> Known:
        """Returns this with the trial of settings that are switched on or off since the last one.
        Raises UsageError as :func:`.class_trial.check_again` does."""
        super().checked(ours, given, groups, where)
        return check_again(self, given, groups, where)

    def stepper(self, step: OptimizerStep, groups: Any, method: str) -> ClassStepper:
        parts = step.context, self, groups, step.members.group_index_of
        return ClassStepper(*parts, step.optimizer, step.books, step.changed, method)


def class_entry(kind: type | str, step: str = "", **others: Any) -> OwnCode:
    """Makes the entry of a class that steps by its own code. Its moments are found by a trial."""
    name = kind if isinstance(kind, str) else kind.__name__
    step = step or name.rpartition(".")[2] + ".step"
    others = {"counts_steps": False, "dtypes": ("fp32",)} | others
    return OwnCode(None, kind, step, {}, {}, {}, **others)


def entry_of(optimizer: torch.optim.Optimizer, **others: Any) -> Known:
    """Makes the entry of an optimizer whose class steps by its own code: in pieces of a parameter,
    if a trial finds that they give what the whole gives. ``others``: fields of :class:`OwnCode`.
    Raises ConfigError as :func:`.class_trial.with_moments`."""
    entry = class_entry(path_of(type(optimizer)), **others)
    return with_moments(entry, optimizer, optimizer.param_groups)


# Those of torch that step by their own code. In torch, too, Muon's moment has the gradient's dtype.
BY_CLASS = (
    class_entry(torch.optim.Adafactor, whole=True),
    class_entry(torch.optim.Muon, whole=True, splits=True, dtypes=("fp32", "bf16")),
)


class ClassSteps(Extension):
    """The values of parameters that are stepped by their class, where they are read and where they
    are computed with. A step charges them."""

    @classmethod
    def terms(cls, config: Any, units: Sequence[UnitSize], device: Device) -> Iterator[Term]:
        """Yields the bytes of the largest step, and those that the classes keep on every rank."""
        flat_params = [flat for unit in units for flat in unit.flat_params]
        own = [flat for flat in flat_params if flat.spec.stepped and flat.spec.needs is not None]
        if not own:
            return
        nbytes = max(map(_step_nbytes, own))
        yield Term(Tier.HOST, STEP, nbytes)
        kept = (flat.spec.needs.kept_nbytes(shape) for flat in own for shape in flat.shapes)
        yield Term(Tier.HOST, SUMS, sum(kept))
        if not device.is_host:
            yield Term(Tier.DEVICE, STEP, nbytes)


def _step_nbytes(flat: FlatParamSize) -> int:
    """Counts the bytes, in fp32, of pieces of parameters that are stepped by their class: one is
    read, one stepped, with the temporaries of the class, and one written. A stepping rank also
    receives one."""
    arrays = 2 + len(flat.spec.moments)  # elements and gradient
    copies = 3 if flat.shards == 1 else 4
    largest = max((torch.Size(shape).numel() for shape in flat.shapes), default=flat.numel)
    piece = min(largest or flat.numel, flat.spec.needs.numel)
    return 4 * piece * (copies * arrays + flat.spec.needs.temporaries)
