"""ParamHandle: links a parameter to its unit, flat param and engine.

Owner: the interface that a parameter needs of its engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch

from ...errors import InternalError, UsageError
from ...torch_private import DisableTorchDispatch, DisableTorchFunction
from ..machine.device import Device
from ..params.tensors import checksum_of
from ..run.step_counter import StepCounter
from ..run.uses import Uses
from .flat_param import FlatParam
from .forms import local_of

DisableTorchFunction = DisableTorchFunction
HANDLE = "_infinity"  # attribute of a managed parameter and its aliases: their handle
# Attribute of a parameter with a copy on another rank that makes the same steps: whether norms and
# checkpoints include this copy.
COUNTS = "_infinity_counts"


class Owner(Protocol):
    """The engine, as a parameter sees it."""

    gradients: Any  # the GradientBank, which gets and sets ``p.grad``
    touch: Callable[[ParamHandle, str], None]  # gathers in a forward or backward, or raises
    touching: Callable[..., AbstractContextManager]  # uses parameters outside of a pass
    put_to_rest: Callable[[ParamHandle], None]  # releases it from the device, if it is not in use
    device: Device  # the device that computes
    uses: Uses
    steps: StepCounter

    @property
    def computing(self) -> bool:
        """Whether a forward or backward of the model is running."""

    def refusal(self, handle: ParamHandle, operation: str) -> UsageError:
        """Returns the error for ``operation`` on a parameter at home."""

    def write_value(self, handle: ParamHandle, value: torch.Tensor) -> None:
        """Writes ``value`` home."""

    def read_value(self, handle: ParamHandle) -> torch.Tensor:
        """Returns the value at home."""

    def saving_tensors(self) -> AbstractContextManager[Any]:
        """Returns a block in which autograd saves weights as references."""


class ParamHandle:
    """Links a parameter to its unit, flat param and engine. All three are weak references. A
    parameter must not keep them alive, nor itself through its unit."""

    __slots__ = (
        "names",
        "index",
        "grad",
        "step",
        "keeps_moments",
        "version",
        "forward_edits",
        "replaced",
        "changed_at",
        "_views",
        "has_loaded_master",
        "borrowed",
        "is_counted",
        "is_tied",
        "edits",
        "has_raw_grad",
        "_unit",
        "_flat_param",
        "_engine",
    )

    def __init__(
        self, names: list[str], unit: Any, flat_param: FlatParam, index: int, engine: Owner
    ):
        self.names, self.index = names, index
        self._unit, self._flat_param = weakref.ref(unit), weakref.ref(flat_param)
        # The GradientBank's record; None if the optimizer does not step this parameter.
        self.grad: Any = None
        self.step = 0  # optimizer steps applied
        self.keeps_moments = False  # although ``step`` is 0: the user reset the count
        self.version = 0  # counts changes of the value at home, without those of forwards
        self.forward_edits = 0  # counts those
        self.replaced = 0  # counts assignments of ``param.data``
        self.changed_at = 0  # the unit's version after the last change
        self._views: weakref.WeakSet[torch.Tensor] | None = None  # tensors at rest
        # Since the last step: loading the value that it belongs to keeps its bits.
        self.has_loaded_master = False
        # The borrowed view that replaces the parameter inside a block of full_params, with the
        # version of its value.
        self.borrowed: weakref.ref[Any] | None = None
        self.is_tied = hasattr(self.param, COUNTS)  # to another rank's copy
        self.is_counted = getattr(self.param, COUNTS, True)  # in norms and checkpoints
        # Of a tied one: digest of the values that users set since the wrap or a load.
        self.edits = 0
        # ``p.grad`` is what autograd accumulated: users' hooks run before it lands, or the engine
        # stands aside.
        self.has_raw_grad = False
        self._engine = weakref.ref(engine)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def unit(self) -> Any:
        """The ParamUnit. Raises UsageError if the engine is gone."""
        return self._unit() or self._refuse()

    @property
    def flat_param(self) -> FlatParam:
        """The flat param. Raises UsageError if the engine is gone."""
        return self._flat_param() or self._refuse()

    @property
    def param(self) -> torch.nn.Parameter:
        """The parameter itself."""
        return (self._flat_param() or self._refuse()).params[self.index]

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has state of the parameter."""
        return self.step > 0 or self.keeps_moments

    def note_edit(self, value: torch.Tensor) -> None:
        """Notes a value set by a user. Another stage with a copy has to set it, too."""
        if self.is_tied:
            self.edits = checksum_of(local_of(value), self.edits)

    def changed(self, *, by_load: bool = False) -> None:
        """Notes that the value at home is about to change; ``by_load``: to the same on all
        ranks."""
        self.edits = 0 if by_load else self.edits
        self.version += 1
        unit = self._unit() or self._refuse()
        unit.version += 1
        self.changed_at = unit.version
        self.has_loaded_master = False
        for view in self._views or ():
            torch.autograd.graph.increment_version(view)
        if unit.computes_at_home:  # a graph may have saved the parameter itself
            unit.exposure.edits.count(self.param)

    def add_view(self, view: torch.Tensor) -> None:
        """Adds a tensor at rest that shows the value, and with it the changes to come."""
        if self._views is None:
            self._views = weakref.WeakSet()
        self._views.add(view)

    @property
    def engine(self) -> Owner:
        """The engine that has the bytes. Raises UsageError if it is gone."""
        return self._engine() or self._refuse()

    @property
    def is_alive(self) -> bool:
        """Whether the engine exists."""
        return self._engine() is not None

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"parameter {self.name}: its engine is gone, and with it the bytes at home. Keep the"
            " model that wrap_model returned for as long as its parameters are used."
        )


def handle_of(param: torch.Tensor | None) -> ParamHandle | None:
    """Returns the handle of a managed parameter (or of its alias), None for any other tensor."""
    return param.__dict__.get(HANDLE) if isinstance(param, torch.Tensor) else None


def managed(param: torch.Tensor) -> ParamHandle:
    """Returns the handle of a parameter that is known to be managed. Raises InternalError for any
    other tensor."""
    handle = param.__dict__.get(HANDLE)
    if handle is None:
        raise InternalError(f"a tensor of shape {tuple(param.shape)} is not managed")
    return handle


def own_bytes(param: torch.Tensor) -> torch.Tensor:
    """Returns a detached tensor of a parameter's device bytes, whatever its class. Valid while it
    is resident."""
    with DisableTorchFunction(), DisableTorchDispatch():
        return torch.Tensor.detach(local_of(param))


def raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Returns the value that autograd accumulated into ``param.grad`` itself."""
    with DisableTorchFunction():
        return torch.Tensor.grad.__get__(param)


def set_raw_grad(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Replaces the tensor that autograd accumulates into."""
    with DisableTorchFunction():
        torch.Tensor.grad.__set__(param, value)


def take_raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Returns the value that autograd accumulated into ``param.grad``, and takes it from there."""
    with DisableTorchFunction():
        if (value := torch.Tensor.grad.__get__(param)) is not None:
            torch.Tensor.grad.__set__(param, None)
    return value


def drop_raw_grads(params: Iterable[torch.Tensor]) -> None:
    """Drops the values that autograd accumulated into ``param.grad``."""
    with DisableTorchFunction():
        for param in params:
            torch.Tensor.grad.__set__(param, None)


def raw_hooks(param: torch.Tensor) -> dict[Any, Callable] | None:
    """Returns the hooks that autograd calls when it has accumulated a gradient in ``param``."""
    with DisableTorchFunction():
        return torch.Tensor._post_accumulate_grad_hooks.__get__(param)


def set_raw_hooks(param: torch.Tensor, hooks: dict[Any, Callable] | None) -> None:
    """Replaces the hooks that autograd calls when it has accumulated a gradient in ``param``."""
    with DisableTorchFunction():
        torch.Tensor._post_accumulate_grad_hooks.__set__(param, hooks)
