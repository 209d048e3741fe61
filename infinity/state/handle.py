"""ParamHandle: says to which unit, shard and engine a parameter belongs.

Owner, Unit and Loan are those of which it says so, as a parameter sees them.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..errors import InternalError, UsageError
from ..machine.device import Device
from .dtensors import local_of
from .shard import ParamShard
from .shared import is_counted, is_shared
from .step_counter import StepCounter
from .tensors import checksum_of
from .uses import Uses

DisableTorchFunction = torch._C.DisableTorchFunctionSubclass


class GradStandIns(Protocol):
    """Gives and takes ``p.grad`` of a parameter at home."""

    def get(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns what stands for the gradient, None where there is none."""

    def set(self, handle: ParamHandle, value: torch.Tensor | None) -> None:
        """Makes ``value`` the gradient."""


class Owner(Protocol):
    """The engine, as a parameter sees it."""

    gradients: GradStandIns
    device: Device  # what computes
    uses: Uses
    steps: StepCounter

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""

    def touch(self, handle: ParamHandle, operation: str) -> None:
        """Gathers the parameter inside a forward or backward, and raises UsageError elsewhere."""

    def refusal(self, handle: ParamHandle, operation: str) -> UsageError:
        """Returns the error for ``operation`` on a parameter at home."""

    def write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Sends ``value`` home."""

    def read_value(self, handle: ParamHandle) -> torch.Tensor:
        """Returns the value at home."""

    def saving_tensors(self) -> AbstractContextManager[Any]:
        """Has weights that autograd saves inside saved as references."""


class Unit(Protocol):
    """The unit of a parameter."""

    name: str
    version: int  # counts changes of the values at home

    def watch(self, param: torch.nn.Parameter, data: torch.Tensor) -> None:
        """Watches for changes through ``data``, which was handed out: torch does not count them."""


class Loan(Protocol):
    """What a parameter stands for in a block of full_params."""

    tensor: torch.Tensor
    version: int  # of the parameter's value


class ParamHandle:
    """Links a parameter to its unit, shard and engine. All three are held weakly: a parameter must not keep them alive, nor, through the
    unit that has it, itself."""

    __slots__ = (
        "names",
        "index",
        "grad",
        "step",
        "keeps_moments",
        "version",
        "forward_edits",
        "has_loaded_master",
        "lent",
        "is_counted",
        "is_tied",
        "edits",
        "_unit",
        "_shard",
        "_engine",
    )

    def __init__(self, names: list[str], unit: Unit, shard: ParamShard, index: int, engine: Owner):
        self.names, self.index = names, index
        self._unit, self._shard = weakref.ref(unit), weakref.ref(shard)
        self.grad: Any = None  # the GradientBank's record; None when the optimizer does not step this parameter
        self.step = 0  # optimizer steps applied
        self.keeps_moments = False  # though ``step`` is 0: the user set the count back
        self.version = 0  # counts changes of the value at home, but those that forwards make themselves
        self.forward_edits = 0  # counts these
        self.has_loaded_master = False  # since the last step: a load of the value it belongs to leaves its bits
        self.lent: weakref.ref[Loan] | None = None  # what the parameter stands for in a block of full_params
        self.is_counted = is_counted(self.param)  # in norms and checkpoints: not, where another stage's copy is
        self.is_tied = is_shared(self.param)  # with another stage's copy
        self.edits = 0  # of a tied one: a digest of the values that users have set since the wrap, or a load
        self._engine = weakref.ref(engine)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def unit(self) -> Unit:
        """The unit. Raises UsageError when the engine is gone."""
        return self._there(self._unit)

    @property
    def shard(self) -> ParamShard:
        """The shard. Raises UsageError when the engine is gone."""
        return self._there(self._shard)

    @property
    def param(self) -> torch.nn.Parameter:
        """The parameter itself."""
        return self.shard.params[self.index]

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has state of the parameter."""
        return self.step > 0 or self.keeps_moments

    def note_edit(self, value: torch.Tensor) -> None:
        """Notes that a user sets the value, which another stage has to do, too, where it has a copy."""
        if self.is_tied:
            self.edits = checksum_of(local_of(value), self.edits)

    def changed(self, *, by_load: bool = False) -> None:
        """Notes that the value at home is about to be another one; ``by_load``: the same on all ranks."""
        self.edits = 0 if by_load else self.edits
        self.version += 1
        self.unit.version += 1
        self.has_loaded_master = False

    @property
    def engine(self) -> Owner:
        """The engine that has the bytes. Raises UsageError when it is gone."""
        return self._there(self._engine)

    @property
    def is_alive(self) -> bool:
        """Whether the engine is there."""
        return self._engine() is not None

    def _there(self, reference: weakref.ref[Any]) -> Any:
        if (found := reference()) is None:
            raise UsageError(
                f"parameter {self.name}: its engine is gone, and with it the bytes at home. Keep the model that wrap_model returned for as "
                "long as its parameters are used."
            )
        return found


def handle_of(param: torch.Tensor | None) -> ParamHandle | None:
    """Returns the handle of a managed parameter (or of its alias), None for any other tensor."""
    return param.__dict__.get("_infinity") if isinstance(param, torch.Tensor) else None


def managed(param: torch.Tensor) -> ParamHandle:
    """Returns the handle of a parameter that is known to be managed. Raises InternalError for any other tensor."""
    handle = handle_of(param)
    if handle is None:
        raise InternalError(f"a tensor of shape {tuple(param.shape)} is not managed")
    return handle


def own_bytes(param: torch.Tensor) -> torch.Tensor:
    """Returns the detached tensor over a parameter's device bytes, whatever its class is just now. Valid while it is resident."""
    with DisableTorchFunction():
        return torch.Tensor.detach(local_of(param))


def raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Returns what autograd accumulated into ``param.grad`` itself."""
    with DisableTorchFunction():
        return torch.Tensor.grad.__get__(param)


def set_raw_grad(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Replaces what autograd accumulates into."""
    with DisableTorchFunction():
        torch.Tensor.grad.__set__(param, value)
