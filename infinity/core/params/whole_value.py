"""WholeValue: compares and sets all of a parameter at home, without bringing it to the device."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UsageError
from ...torch_private import current_task
from ..units.handle import handle_of
from .view_chain import is_whole, shows_all
from .view_nodes import is_recorded


def equal(tensor: Any, other: Any) -> bool | None:
    """Compares a parameter at rest as ``torch.equal`` does: libraries search for one among others
    that way. Returns None if a forward has to gather for it."""
    if not isinstance(other, torch.Tensor) or handle_of(tensor).engine.computing:
        return None
    if not is_whole(tensor) or not is_whole(other):
        return None
    if tensor.shape != other.shape:
        return False
    # Also of one with itself: a NaN equals nothing
    values = (
        operand if (handle := handle_of(operand)) is None else handle.engine.read_value(handle)
        for operand in (tensor, other)
    )
    return torch.equal(*values)


def set_value(subject: torch.Tensor, value: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Does ``subject.copy_(value)`` at home. Raises RuntimeError as torch does for a leaf."""
    if is_recorded(subject):
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    if handle_of(value) is not None:
        with torch.no_grad():
            value = value.clone()
    engine = handle_of(subject).engine
    with engine.uses.begin():
        engine.write_value(handle_of(subject), value)
    return subject


def set_data(subject: torch.Tensor, value: torch.Tensor) -> None:
    """Does ``p.data = value`` at home, for a value of the parameter's shape and dtype."""
    if value is subject or (handle_of(value) is handle_of(subject) and shows_all(value)):
        return
    handle = handle_of(subject)
    alike = isinstance(value, torch.Tensor) and all(
        getattr(value, name) == getattr(subject, name) for name in ("shape", "dtype", "device")
    )
    if (
        current_task() != -1
        or "_chain" in subject.__dict__  # only that object would have the value
        or not alike
        or handle_of(value) is not None  # in torch both would have one memory from then on
    ):
        raise UsageError(
            f"assigning {handle.name}.data would not reach its home. Use `with"
            f" infinity.full_params(model, [{handle.name!r}], writeback=True)`, or"
            " load_state_dict()."
        )
    with torch.no_grad():
        if handle.engine.computing:  # another block's: as any change of it in a forward
            subject.detach().copy_(value)
        else:
            set_value(subject, value)
    handle.replaced += 1
