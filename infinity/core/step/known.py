"""Known: the classes of optimizers that are stepped at home, and how.

rule         a formula of the kernels. It has one entry here, the formula (``csrc/optim/rules``) and
             a row in ``tests/core/step/test_known.py``. Classes of other libraries are in
             :mod:`infinity.ext.class_step.known_elsewhere`
class step   a class without a rule steps by its own code, on one parameter at a time
             (:mod:`infinity.ext.class_step`). It has an entry there, and a row in the tests
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ... import native
from ...choices import MOMENT_DTYPES
from ...config import Config
from ...errors import ConfigError
from ..units.flat_param_spec import EVERY_MOMENT
from .counters import Counters, Mixture, MuProduct, StepSize

# Arrays at home; the second one has no sign
FIRST, SECOND, THIRD, FOURTH = EVERY_MOMENT
BETAS = "beta1", "beta2"
EACH_DTYPE = ("fp32", "bf16", "int8")
PIECE, EVERY = 4 * 1024 * 1024, 2**62  # elements of a class step: of a part, of any parameter
Group = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """How the optimizers of one class step.

    rule
        The formula; None: the class steps by its own code.
    kind
        The class of torch, or the path of another library's; None: one of the rule's name, which is
        tried.
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
    of_object
        Attributes of the optimizer itself -> switches; "": the configuration has it, and it is off.
    exact
        Moments with which all are in fp32 -> why.
    counters
        The numbers that the rule keeps for each parameter beside its moments.
    ignored
        Keys of a group that say nothing of the step.
    needs_whole
        A class step needs the whole parameter, not any part of its elements.
    splits
        A group's ``split`` says which matrices its parameters are (:mod:`.matrices`).
    measured
        The sums over all parameters that a class step needs.
    tried
        The switches of groups that the trial of a class had -> the moments of such a group.
    kept
        The dtype in which a class has each moment of an fp32 parameter. The array at home is not
        narrower.
    counts_steps
        The engine shows its step count in the state.
    counts_in_groups
        The class counts steps in each group, under ``step``, and none in a parameter's state.
    own_code_with
        Settings of a group with which the class steps by its own code.
    dtypes
        The dtypes that the moments may have at rest.
    dtype
        The dtype that they have unless the configuration names one.
    dtype_of
        The dtype that the class gives the moments of one parameter, found by the optimizer and the
        numbers of its group and of the parameter in it; None: ``dtype`` for all.
    by_param
        What that found for each parameter at the wrap.
    costs
        What the trial of a class has found that it makes and keeps.
    inside
        The key of a parameter's state, in the class's state dict, under which the moments are.
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
    of_object: Mapping[str, str] = field(default_factory=dict)
    exact: Mapping[str, str] = field(default_factory=dict)
    counters: type[Counters] | None = None
    ignored: tuple[str, ...] = ()
    needs_whole: bool = False
    splits: bool = False
    measured: Any = None
    tried: Mapping[tuple, tuple[str, ...]] = field(default_factory=dict)
    kept: Mapping[str, torch.dtype] = field(default_factory=dict)
    counts_steps: bool = True
    counts_in_groups: bool = False
    own_code_with: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = EACH_DTYPE
    dtype: str = "fp32"
    dtype_of: Callable[[Any, int, int], str] | None = None
    by_param: Mapping[torch.Tensor, str] = field(default_factory=dict)
    costs: Any = None
    inside: str | None = None

    @property
    def name(self) -> str:
        """The rule's name, or the path of the class."""
        if self.rule == native.Rule.AMSGRAD:
            return f"{self.kind.__name__} with amsgrad"
        if self.rule is not None and not self.own_code_with:  # else it has one name in both ways
            return self.rule.name
        kind = self.kind
        return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"

    def for_groups(self, groups: Iterable[Group]) -> Known:
        """Returns how the class steps ``groups``: by another rule if one of them has a setting
        that the rule does not have."""
        groups = list(groups)
        for name, rule in self.instead.items():
            if any(group.get(name) for group in groups):
                # Which of the two Adams it is, is said by the class, and is the same in all groups
                flags = {key: of for key, of in self.flags.items() if of != "decoupled"}
                always = ("decoupled",) if self.kind is torch.optim.AdamW else ()
                flags |= {name: name}
                found = replace(self, rule=rule, flags=flags, always=always, instead={})
                return replace(found, ignored=(*self.ignored, "decoupled_weight_decay"))
        return self

    @property
    def needs(self) -> Any:
        """The memory of a class step; None if a kernel steps."""
        if self.rule is not None:
            return None
        return self.costs._replace(numel=EVERY if self.needs_whole else PIECE)

    @property
    def keys(self) -> set[str]:
        """The keys of a group that the kernels use."""
        of_counters = self.counters.settings if self.counters is not None else ()
        return {*self.settings, *self.flags, *of_counters}

    def moments_of(self, groups: Iterable[Group]) -> dict[str, str]:
        """Returns the moments of parameters in ``groups``: torch's name -> array."""
        groups = list(groups)
        return {
            name: array
            for name, array in self.moments.items()
            if any(self._has_moment(name, group) for group in groups)
        }

    def added_arrays(
        self, group: Group, moments: Mapping[str, str], config: Config
    ) -> dict[str, torch.dtype]:
        """Returns the arrays that an added ``group`` gets, and their dtype: of a rule those of all
        ``moments`` of the optimizer, as parameters of groups that come later may share them. They
        are in fp32 if the class chooses for each parameter. Raises ConfigError as
        :meth:`arrays_of`."""
        added = moments if self.rule is not None else self.moments_of([group])
        return self.arrays_of(added, config, None if self.dtype_of is None else "fp32")

    def _has_moment(self, name: str, group: Group) -> bool:
        if self.rule is None:
            return name in self.tried.get(switches(group), self.moments)
        return (key := self.only_with.get(name)) is None or bool(group.get(key))

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

    def arrays_of(
        self, moments: Mapping[str, str], config: Config, by_class: str | None = None
    ) -> dict[str, torch.dtype]:
        """Returns the arrays of ``moments``, and their dtype: the configuration's, or if that has
        its default the class's (``by_class`` for one parameter). What a class of 8 bits keeps in
        fp32 stays so. Raises ConfigError if it cannot be stepped in that dtype."""
        name = config.moments
        if name == Config.moments or (by_class == "fp32" and self.dtype != by_class):
            name = by_class or self.dtype
        dtypes, of_what = self.dtypes, self.name
        if needed := [each for each in self.exact if each in moments]:
            dtypes, of_what = (
                ("fp32",),
                f"{of_what} with {needed[0]}, which {self.exact[needed[0]]}",
            )
        elif self.rule is not None and THIRD in moments.values():
            dtypes = tuple(each for each in dtypes if each != "int8")
            of_what += ", which has a third moment"
        if name not in dtypes:
            raise ConfigError(
                f"moments={name!r} is not for {of_what}: choose {' or '.join(dtypes)}"
            )
        return dict.fromkeys(moments.values(), MOMENT_DTYPES[name])

    def flat(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the class's ``state_dict`` with the moments beside a parameter's other state."""
        if self.inside is None:
            return state_dict
        state = {
            index: {key: each for key, each in of.items() if key != self.inside}
            | of.get(self.inside, {})
            for index, of in state_dict["state"].items()
        }
        return state_dict | {"state": state}

    def set_on(self, hyper: native.Hyperparameters, group: Group) -> None:
        """Sets the hyperparameters of ``group``."""
        for key, names in self.settings.items():
            if isinstance(names, str):
                setattr(hyper, names, float(group.get(key, 0)))
            else:
                for name, value in zip(names, group[key]):
                    setattr(hyper, name, float(value))
        for key, name in self.flags.items():
            setattr(hyper, name, bool(group.get(key, False)))
        for name in self.always:
            setattr(hyper, name, True)


def switches(group: Group) -> tuple[tuple[str, Any], ...]:
    """Returns the settings of ``group`` that are on, and its words: what may change how it is
    stepped."""
    found = []
    for key, value in group.items():
        if key in ("params", "lr") or isinstance(value, torch.Tensor):
            continue
        found.append((key, value if isinstance(value, str) else value is not None and bool(value)))
    return tuple(sorted(found))


ADAM = {"lr": "lr", "betas": BETAS, "eps": "eps", "weight_decay": "weight_decay"}
BOTH = {"exp_avg": FIRST, "exp_avg_sq": SECOND}
LARGEST = {"max_exp_avg_sq": THIRD}
AMSGRAD = {
    "only_with": {"max_exp_avg_sq": "amsgrad"},
    "instead": {"amsgrad": native.Rule.AMSGRAD},
}
MAXIMIZE = {"maximize": "maximize"}
# Adam's flag says which of the two rules it is, and is no hyperparameter.
DECOUPLED = MAXIMIZE | {"decoupled_weight_decay": "decoupled"}


def by_class(known: Known) -> Known:
    """Returns ``known`` with what a class step is. It rounds moments to the nearest, so that small
    changes of narrow ones would be lost; and its class counts the steps."""
    dtypes = ("fp32",) if known.dtypes == EACH_DTYPE else known.dtypes
    return replace(known, rule=None, counts_steps=False, dtypes=dtypes)


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
# Of other libraries, by the path of the class
OF_PATHS = (
    Known(
        native.Rule.ADEMAMIX,
        "pytorch_optimizer.optimizer.ademamix.AdEMAMix",
        "AdEMAMix.step",
        ADAM | {"betas": (*BETAS, "beta3")},
        BOTH | {"exp_avg_slow": THIRD},
        {"weight_decouple": "decoupled", "fixed_decay": "fixed_decay"},
        of_object={"maximize": "maximize"},
        exact={"exp_avg_slow": "moves by less in a step than narrow numbers round"},
        counters=Mixture,
        counts_steps=False,
        counts_in_groups=True,
        own_code_with=("cautious", "stable_adamw"),
    ),
    Known(
        native.Rule.ADAN,
        "pytorch_optimizer.optimizer.adan.Adan",
        "Adan.step",
        ADAM | {"betas": (*BETAS, "beta3")},
        BOTH | {"exp_avg_diff": THIRD, "previous_grad": FOURTH},
        {"weight_decouple": "decoupled"},
        of_object={"maximize": "maximize", "max_grad_norm": ""},
        counts_steps=False,
        counts_in_groups=True,
        own_code_with=("use_gc", "adanorm"),
    ),
)
KNOWN: dict[native.Rule, Known] = {known.rule: known for known in (*OF_TORCH, *OF_PATHS)}
KNOWN[native.Rule.AMSGRAD] = KNOWN[native.Rule.ADAMW].for_groups([{"amsgrad": True}])
