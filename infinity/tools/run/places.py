"""Places: where a script has asked its models to be, while their weights stay where they are.

asked  a module of which `.to(device)` was called, and whose parameters did not move for it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...core.run.registry import is_wrapped
from ...core.units.handle import handle_of
from .meeting import TOGETHER


class Placed(nn.Parameter):
    """A parameter that names the device that was asked for, as scripts read it for their inputs."""

    asked_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which its values will be used."""
        return vars(self).get("asked_device", _here(self))

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether that device is a GPU."""
        return self.device.type == "cuda"


class Places:
    """The devices that were asked for. ``stays``: whether the weights of a module stay. ``noted``
    is called after one was asked for."""

    def __init__(self, stays: Callable[[nn.Module], bool], noted: Callable[[], None]):
        self._stays, self._noted = stays, noted
        self._asked: weakref.WeakKeyDictionary[nn.Module, torch.device] = (
            weakref.WeakKeyDictionary()
        )

    def __bool__(self) -> bool:
        return len(self._asked) > 0

    def replace(self, replace: Callable[[type, str, Callable[..., Any]], None]) -> None:
        """Replaces the methods of torch.nn.Module that move parameters."""
        replace(nn.Module, "to", self._to)
        for name in ("cuda", "cpu"):
            replace(nn.Module, name, self._of_kind)

    def _to(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            device, args, kwargs = _without_device(args, kwargs)
            if device is None or not self._ask(module, device):
                return own(module, *((device,) if device is not None else ()), *args, **kwargs)
            rest = args or kwargs.keys() & {"dtype", "memory_format"}
            return own(module, *args, **kwargs) if rest else module

        return to

    def _of_kind(self, own: Callable[..., Any]) -> Callable[..., Any]:
        kind = own.__name__

        def move(module: nn.Module, device: int | torch.device | None = None) -> Any:
            index = torch.device(kind, device) if isinstance(device, int) else device
            where = torch.device(index) if index is not None else torch.device(kind)
            if self._ask(module, where):
                return module
            return own(module) if device is None else own(module, device)

        return move

    def _ask(self, module: nn.Module, device: torch.device) -> bool:
        """Notes the device, and tells whether the parameters stay."""
        params = list(module.parameters())
        if any(handle_of(param) is not None for param in params):
            _move_rest(module, device)
            return True
        self._forget(module)
        moves = any(_other(_here(param), device) for param in params)
        trains = any(param.requires_grad for param in params)
        # Other classes may change as they move: a packed weight is packed then
        plain = all(type(param) is nn.Parameter and not param.is_meta for param in params)
        to_device = device.type not in ("cpu", "meta")
        if not (to_device and moves and trains and plain and self._stays(module)):
            return False
        self._asked[module] = device
        self._noted()
        for param in params:
            param.__class__ = Placed
            param.asked_device = _full(device)  # type: ignore[attr-defined]
        return True

    def _forget(self, module: nn.Module) -> None:
        """Lets the parameters name the device on which they are."""
        self._asked.pop(module, None)
        release(module)

    def device_for(self, root: nn.Module) -> torch.device | None:
        """Returns the device that was asked for ``root``, or for what contains it."""
        own = set(root.parameters())
        for module, device in self._asked.items():
            if not own.isdisjoint(module.parameters()):
                return device
        return None

    def move(self, chosen: Callable[[set[torch.Tensor]], bool]) -> None:
        """Moves what was asked for, as far as the engine has not taken it, if ``chosen`` is true of
        its parameters."""
        for module, device in list(self._asked.items()):
            if chosen(set(module.parameters())):
                self._forget(module)
                _move_rest(module, device)


def release(module: nn.Module) -> None:
    """Lets the parameters of ``module`` name the device on which they are."""
    for param in module.parameters():
        if type(param) is Placed:
            vars(param).pop("asked_device", None)
            param.__class__ = nn.Parameter


def _here(tensor: torch.Tensor) -> torch.device:
    return torch.Tensor.device.__get__(tensor)  # type: ignore[attr-defined]


def _full(device: torch.device) -> torch.device:
    """Returns the device with its index, as tensors name it."""
    if device.index is not None or device.type == "cpu":
        return device
    return torch.empty(0, device=device).device


def _without_device(args: tuple, kwargs: dict) -> tuple[torch.device | None, tuple, dict]:
    """Divides the arguments of Module.to into the device and the rest."""
    kwargs = dict(kwargs)
    if (device := kwargs.pop("device", None)) is not None:
        return torch.device(device), args, kwargs
    if args and isinstance(args[0], (str, int, torch.device)):
        return torch.device(args[0]), args[1:], kwargs
    if args and torch.is_tensor(args[0]):
        return args[0].device, (args[0].dtype, *args[1:]), kwargs
    return None, args, kwargs


def _other(here: torch.device, there: torch.device) -> bool:
    return here.type != there.type or None is not here.index != there.index is not None


def _move_rest(module: nn.Module, device: torch.device) -> None:
    """Moves parameters and buffers that are not at home."""
    params = list(module.parameters())
    if params and all(handle_of(param) is not None for param in params):
        return
    wrapped = [each for each in module.modules() if is_wrapped(each) or TOGETHER in vars(each)]
    at_home = {each for root in wrapped for each in root.modules()}
    with torch.no_grad():
        for each in set(module.modules()) - at_home:
            for param in each.parameters(recurse=False):
                if handle_of(param) is None and _other(param.device, device):
                    param.data = param.data.to(device)
                    if param.grad is not None:
                        param.grad.data = param.grad.data.to(device)
            for name, buffer in each.named_buffers(recurse=False):
                each._buffers[name] = buffer.to(device)
