"""Known: the classes of optimizers that are stepped at home, and how.

rule   a formula of the kernels. That of a class of torch has one entry here, the formula
       (``csrc/optim/rules``) and a row in ``tests/core/step/test_known.py``. An extension derives
       from :class:`Known` for other classes (:mod:`.rules`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ... import native
from ...choices import MOMENT_DTYPES
from ...config import Config
from ...errors import ConfigError
from ..units.flat_param_spec import EVERY_MOMENT
from .counters import Counters, MuProduct, StepSize

# Arrays at home; the second one has no sign
FIRST, SECOND, THIRD, FOURTH = EVERY_MOMENT
BETAS = "beta1", "beta2"
EACH_DTYPE = ("fp32", "bf16", "int8")
HOW = ("foreach", "fused")
# Flags of a group: of no step, and of no rule
NEVER_HONOURED = ("differentiable", "capturable")
NOT_HONOURED = ("amsgrad", *NEVER_HONOURED, "caution", "cautious")
ParamGroup = Mapping[str, Any]
Names = Mapping[torch.Tensor, Sequence[str]]
NO_NAMES: Names = {}


def path_of(kind: type) -> str:
    """Returns the module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True)
class Known:
    """How the optimizers of one class step.

    rule
        The formula; None: :meth:`stepper` steps.
    kind
        The class of torch, or the path of another library's; None: any class Lion.
    step
        The qualified name of the class's step.
    settings
        Key of a group -> the kernels' hyperparameters: numbers, or several of one tuple.
    flags
        The same of switches.
    moments
        torch's name of each moment -> the array at home.
    only_with
        A moment -> the setting of a group without which there is none.
    instead
        A setting of a group -> the rule that has it.
    always
        Switches that are on in every group.
    exact
        Moments with which all are in fp32 -> why.
    counters
        The numbers that the rule keeps for each parameter beside its moments.
    ignored
        Keys of a group that say nothing of the step.
    counts_steps
        The engine shows its step count in the state.
    counts_in_groups
        The class counts steps in each group, under ``step``, and none in a parameter's state.
    dtypes
        The dtypes that the moments may have at rest.
    dtype
        The dtype that they have unless the configuration names one.
    """

    rule: native.Rule | None
    kind: type | str | None
    step: str
    settings: Mapping[str, str | tuple[str, ...]]
    moments: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=lambda: {"maximize": "maximize"})
    only_with: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, native.Rule] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    exact: Mapping[str, str] = field(default_factory=dict)
    counters: type[Counters] | None = None
    ignored: tuple[str, ...] = ()
    counts_steps: bool = True
    counts_in_groups: bool = False
    dtypes: tuple[str, ...] = EACH_DTYPE
    dtype: str = "fp32"

    @property
    def name(self) -> str:
        """The rule's name; the path of a class without a rule."""
        if self.rule == native.Rule.AMSGRAD:
            return f"{self.kind.__name__} with amsgrad"
        if self.rule is not None:
            return self.rule.name
        return self.kind if isinstance(self.kind, str) else path_of(self.kind)

    def for_groups(self, param_groups: Iterable[ParamGroup]) -> Known:
        """Returns how the class steps ``param_groups``: by another rule if one of them has a
        setting that the rule does not have."""
        param_groups = list(param_groups)
        for name, rule in self.instead.items():
            if any(param_group.get(name) for param_group in param_groups):
                # Which of the two Adams it is, is said by the class, and is the same in all groups
                flags = {key: of for key, of in self.flags.items() if of != "decoupled"}
                always = ("decoupled",) if self.kind is torch.optim.AdamW else ()
                flags |= {name: name}
                optimizer_class = replace(self, rule=rule, flags=flags, always=always, instead={})
                return replace(optimizer_class, ignored=(*self.ignored, "decoupled_weight_decay"))
        return self

    @property
    def keys(self) -> set[str]:
        """The keys of a group that the kernels use."""
        of_counters = self.counters.settings if self.counters is not None else ()
        return {*self.settings, *self.flags, *of_counters}

    def moments_of(self, param_groups: Iterable[ParamGroup]) -> dict[str, str]:
        """Returns the moments of parameters in ``param_groups``: torch's name -> array."""
        param_groups = list(param_groups)
        return {
            name: array
            for name, array in self.moments.items()
            if any(self.has_moment(name, param_group) for param_group in param_groups)
        }

    def added_arrays(
        self, param_group: ParamGroup, moments: Mapping[str, str], config: Config
    ) -> dict[str, torch.dtype]:
        """Returns the arrays that an added ``param_group`` gets, and their dtype: of all
        ``moments`` of the optimizer, as parameters of groups that come later may share them. Raises
        ConfigError as :meth:`arrays_of`."""
        return self.arrays_of(moments, config)

    def has_moment(self, name: str, param_group: ParamGroup) -> bool:
        """Tells whether parameters of ``param_group`` have the moment of torch's ``name``."""
        return (key := self.only_with.get(name)) is None or bool(param_group.get(key))

    def arrays_of(
        self, moments: Mapping[str, str], config: Config, by_class: str | None = None
    ) -> dict[str, torch.dtype]:
        """Returns the arrays of ``moments``, and their dtype: the configuration's, or if that has
        its default the class's (``by_class`` for one parameter). What a class of 8 bits keeps in
        fp32 stays so. Raises ConfigError if it cannot be stepped in that dtype."""
        name = config.moments
        if name == Config.moments or (by_class == "fp32" and self.dtype != by_class):
            name = by_class or self.dtype
        dtypes, subject = self.dtypes, self.name
        if needed := [moment for moment in self.exact if moment in moments]:
            dtypes, subject = (
                ("fp32",),
                f"{subject} with {needed[0]}, which {self.exact[needed[0]]}",
            )
        elif self.rule is not None and THIRD in moments.values():
            dtypes = tuple(dtype for dtype in dtypes if dtype != "int8")
            subject += ", which has a third moment"
        if name not in dtypes:
            raise ConfigError(
                f"moments={name!r} is not for {subject}: choose {' or '.join(dtypes)}"
            )
        return dict.fromkeys(moments.values(), MOMENT_DTYPES[name])

    def flat(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the class's ``state_dict`` with the moments beside a parameter's other state."""
        return state_dict

    def set_on(self, hyper: native.Hyperparameters, param_group: ParamGroup) -> None:
        """Sets the hyperparameters of ``param_group``."""
        for key, names in self.settings.items():
            if isinstance(names, str):
                setattr(hyper, names, float(param_group.get(key, 0)))
            else:
                for name, value in zip(names, param_group[key]):
                    setattr(hyper, name, float(value))
        for key, name in self.flags.items():
            setattr(hyper, name, bool(param_group.get(key, False)))
        for name in self.always:
            setattr(hyper, name, True)

    # --- what another class's entry may say of itself ---

    @property
    def needs(self) -> Any:
        """What a step that no kernel makes needs of memory beside the arrays, for the terms of the
        extension that makes it; None: a kernel makes it."""
        return None

    def refused(self, settings: Iterable[str]) -> list[str]:
        """Lists the settings of a group that may not be on. ``settings``: those of the class."""
        others = [name for name in (*NOT_HONOURED, *settings) if name not in (*self.keys, *HOW)]
        with_room = {*self.only_with.values(), *self.ignored}
        return [name for name in dict.fromkeys(others) if name not in with_room]

    def dtype_at_wrap(self, param: torch.Tensor) -> str | None:
        """Returns the dtype that the class gave the moments of ``param`` at the wrap, if it gives
        parameters unlike ones."""
        return None

    def check_shapes(
        self,
        param_groups: Sequence[ParamGroup],
        is_moved: Callable[[torch.Tensor], bool],
        names: Names = NO_NAMES,
    ) -> None:
        """Raises ConfigError for parameters, by their ``names``, of shapes that it cannot step.
        ``is_moved``: whether the engine moves a parameter."""

    def check_dtype(
        self, optimizer: Any, param_group: ParamGroup, dtype: torch.dtype, config: Config
    ) -> None:
        """Raises ConfigError if parameters of ``dtype`` would be rounded as the class of
        ``optimizer`` does not."""

    def check_stream(self, ranks: int) -> None:
        """Raises UsageError if a unit cannot be stepped before all gradients are there."""

    def checked(
        self, ours: Any, optimizer: Any, param_groups: Sequence[ParamGroup], where: str
    ) -> Known:
        """Returns how ``param_groups``, whose settings may have changed since the wrap, are
        stepped. Raises UsageError, from ``where``, for what the parameters have no room for.
        ``ours`` stands for the ``optimizer`` that was given."""
        return self

    def stepper(self, step: Any, param_groups: Sequence[ParamGroup], method: str) -> Any:
        """Makes what steps in place of a :class:`.stepper.Stepper`, with its interface, or runs a
        ``method`` of the class in place of ``step``; None: a kernel steps. ``step``: an
        :class:`.optimizer_step.OptimizerStep`."""
        return None


ADAM = {"lr": "lr", "betas": BETAS, "eps": "eps", "weight_decay": "weight_decay"}
BOTH = {"exp_avg": FIRST, "exp_avg_sq": SECOND}
LARGEST = {"max_exp_avg_sq": THIRD}
AMSGRAD = {
    "only_with": {"max_exp_avg_sq": "amsgrad"},
    "instead": {"amsgrad": native.Rule.AMSGRAD},
}
MAXIMIZE = {"maximize": "maximize"}
# Adam's flag says which of the two rules it is, and is not a hyperparameter.
DECOUPLED = MAXIMIZE | {"decoupled_weight_decay": "decoupled"}
OF_TORCH = (
    Known(
        native.Rule.ADAMW,
        torch.optim.AdamW,
        "Adam.step",
        ADAM,
        BOTH | LARGEST,
        DECOUPLED,
        **AMSGRAD,
    ),
    Known(
        native.Rule.ADAM, torch.optim.Adam, "Adam.step", ADAM, BOTH | LARGEST, DECOUPLED, **AMSGRAD
    ),
    Known(
        native.Rule.SGD,
        torch.optim.SGD,
        "SGD.step",
        {
            "lr": "lr",
            "momentum": "momentum",
            "dampening": "dampening",
            "weight_decay": "weight_decay",
        },
        {"momentum_buffer": FIRST},
        MAXIMIZE | {"nesterov": "nesterov"},
        only_with={"momentum_buffer": "momentum"},
        counts_steps=False,
    ),
    Known(
        native.Rule.LION,
        None,
        "",
        {"lr": "lr", "betas": BETAS, "weight_decay": "weight_decay"},
        {"exp_avg": FIRST},
        counts_steps=False,
    ),
    Known(
        native.Rule.ADADELTA,
        torch.optim.Adadelta,
        "Adadelta.step",
        {"lr": "lr", "rho": "beta2", "eps": "eps", "weight_decay": "weight_decay"},
        {"square_avg": SECOND, "acc_delta": FIRST},
    ),
    Known(
        native.Rule.ADAGRAD,
        torch.optim.Adagrad,
        "Adagrad.step",
        {"lr": "lr", "lr_decay": "lr_decay", "eps": "eps", "weight_decay": "weight_decay"},
        {"sum": SECOND},
    ),
    Known(
        native.Rule.ADAMAX,
        torch.optim.Adamax,
        "Adamax.step",
        ADAM,
        {"exp_avg": FIRST, "exp_inf": SECOND},
    ),
    Known(
        native.Rule.ASGD,
        torch.optim.ASGD,
        "ASGD.step",
        {"lr": "lr", "lambd": "lambd", "weight_decay": "weight_decay"},
        {"ax": FIRST},
        counters=StepSize,
        dtypes=("fp32",),  # late steps change an average of weights by very little
    ),
    Known(
        native.Rule.NADAM,
        torch.optim.NAdam,
        "NAdam.step",
        ADAM | {"momentum_decay": "momentum_decay"},
        BOTH,
        DECOUPLED,
        counters=MuProduct,
    ),
    Known(native.Rule.RADAM, torch.optim.RAdam, "RAdam.step", ADAM, BOTH, DECOUPLED),
    Known(
        native.Rule.RMSPROP,
        torch.optim.RMSprop,
        "RMSprop.step",
        {
            "lr": "lr",
            "alpha": "beta2",
            "eps": "eps",
            "weight_decay": "weight_decay",
            "momentum": "momentum",
        },
        {"square_avg": SECOND, "momentum_buffer": FIRST, "grad_avg": THIRD},
        MAXIMIZE | {"centered": "centered"},
        only_with={"momentum_buffer": "momentum", "grad_avg": "centered"},
        # else the variance falls below zero
        exact={"grad_avg": "is subtracted from another"},
    ),
    Known(
        native.Rule.RPROP,
        torch.optim.Rprop,
        "Rprop.step",
        {"lr": "lr", "etas": BETAS, "step_sizes": ("smallest", "largest")},
        {"prev": FIRST, "step_size": SECOND},
        # A step grows by a fifth at a time: less than the distance of two 8-bit codes.
        dtypes=("fp32", "bf16"),
    ),
)
KNOWN: dict[native.Rule, Known] = {known.rule: known for known in OF_TORCH}
KNOWN[native.Rule.AMSGRAD] = KNOWN[native.Rule.ADAMW].for_groups([{"amsgrad": True}])
