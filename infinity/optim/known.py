"""Known: the classes of optimizers whose formula the kernels have.

A rule has one entry here, a formula (``csrc/optim/rules``) and a row in the tests
(``tests/optim/test_known.py``). Classes of other libraries that step by the same rule have an entry
of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from .. import native
from ..config.choices import MOMENT_DTYPES
from ..config.config import Config
from ..errors import ConfigError

FIRST, SECOND = "exp_avg", "exp_avg_sq"  # arrays at home; the second one has no sign
BETAS = "beta1", "beta2"
EACH_DTYPE = ("fp32", "bf16", "int8")
Group = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """How the optimizers of one class step.

    rule
        The formula.
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
    momentum
        The moment that there is only if a group has ``momentum``.
    counts_steps
        The class keeps a step count in the state.
    dtypes
        The dtypes that the moments may have at rest.
    dtype
        The dtype that they have unless the configuration names one.
    inside
        The key of a parameter's state, in the class's state dict, under which the moments are.
    """

    rule: native.Rule
    kind: type | str | None
    step: str
    settings: Mapping[str, str | tuple[str, ...]]
    moments: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=lambda: {"maximize": "maximize"})
    momentum: str | None = None
    counts_steps: bool = True
    dtypes: tuple[str, ...] = EACH_DTYPE
    dtype: str = "fp32"
    inside: str | None = None

    @property
    def keys(self) -> set[str]:
        """The keys of a group that the kernels use."""
        return {*self.settings, *self.flags}

    def moments_of(self, groups: Iterable[Group]) -> dict[str, str]:
        """Returns the moments of an optimizer with ``groups``: torch's name -> array."""
        moving = self.momentum is None or any(group.get("momentum", 0) for group in groups)
        return {k: array for k, array in self.moments.items() if moving or k != self.momentum}

    def arrays_of(self, moments: Mapping[str, str], config: Config) -> dict[str, torch.dtype]:
        """Returns the arrays of ``moments``, and their dtype: the configuration's, or the class's
        if that has its default. Raises ConfigError if the rule cannot be stepped in that dtype."""
        name = self.dtype if config.moments == Config.moments else config.moments
        if name not in self.dtypes:
            raise ConfigError(
                f"moments={name!r} is not for {self.rule.name}: choose {' or '.join(self.dtypes)}"
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


ADAM = {"lr": "lr", "betas": BETAS, "eps": "eps", "weight_decay": "weight_decay"}
BOTH = {"exp_avg": FIRST, "exp_avg_sq": SECOND}
MAXIMIZE = {"maximize": "maximize"}
# Adam's flag says which of the two rules it is, and is no hyperparameter.
DECOUPLED = MAXIMIZE | {"decoupled_weight_decay": "decoupled"}

OF_TORCH = (
    Known(native.Rule.ADAMW, torch.optim.AdamW, "Adam.step", ADAM, BOTH, DECOUPLED),
    Known(native.Rule.ADAM, torch.optim.Adam, "Adam.step", ADAM, BOTH, DECOUPLED),
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
        momentum="momentum_buffer",
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
        {"square_avg": SECOND, "momentum_buffer": FIRST},
        momentum="momentum_buffer",
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


def _of_bitsandbytes() -> Iterator[Known]:
    """Yields those of bitsandbytes. Its Adam decays weights as AdamW does. Homes do what its paging
    does. ``optim_bits=8`` becomes moments in our 8 bits."""
    of_adam = {"state1": FIRST, "state2": SECOND}
    lion = {"lr": "lr", "betas": BETAS, "weight_decay": "weight_decay"}
    families = {
        "adamw.%sAdamW%s": (native.Rule.ADAMW, "Optimizer8bit.step", ADAM, of_adam),
        "adam.%sAdam%s": (native.Rule.ADAMW, "Optimizer8bit.step", ADAM, of_adam),
        "lion.%sLion%s": (native.Rule.LION, "Optimizer8bit.step", lion, {"state1": FIRST}),
    }
    for path, (rule, *rest) in families.items():
        for words in product(("", "Paged"), ("", "32bit", "8bit")):
            kind = "bitsandbytes.optim." + path % words
            yield Known(rule, kind, *rest, flags={}, inside="__bnb_optimizer_quant_state__")


def _of_torchao() -> Iterator[Known]:
    """Yields those of torchao that keep moments in 8 bits."""
    for name, rule in (("AdamW", native.Rule.ADAMW), ("Adam", native.Rule.ADAM)):
        path = f"torchao.optim.adam.{name}8bit"
        yield Known(rule, path, "_AdamBase.step", ADAM, BOTH, flags={}, dtype="int8")


# Path of a class of another library -> how it steps
ALIASES: dict[str, Known] = {
    str(known.kind): known for known in (*_of_bitsandbytes(), *_of_torchao())
}
