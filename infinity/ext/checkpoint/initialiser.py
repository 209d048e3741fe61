"""Initialiser: runs modules' own initialisation for meta tensors, one module at a time, and sends
the values home.

empty      a managed parameter that was made real without storage: its value is or will be at home
borrowed   an empty parameter with storage while an initialisation runs
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ...core.machine import storage_guard
from ...errors import ConfigError
from ...files.module_names import is_transformers
from .hub_names import of_transformers

PIECE_ELEMENTS = 4 * 1024 * 1024  # elements of one send
ADAPTER_RESET = "reset_lora_parameters"  # the method of PEFT's layers that sets adapters


class Home(Protocol):
    """Sends values of managed parameters to their homes."""

    def send(self, param: nn.Parameter, begin: int, values: torch.Tensor, *, drawn: bool) -> None:
        """Sends flat ``values``, in row-major order from element ``begin``. ``drawn``: by an
        initialisation, not from a file."""

    def span(self, param: nn.Parameter) -> tuple[int, int]:
        """Returns the elements that this rank reads from a file: the first, and the one after the
        last."""

    def recall(self, param: nn.Parameter) -> torch.Tensor:
        """Returns the value that was sent. With several ranks, every rank calls this."""


class Initialiser:
    """Runs the modules' own initialisation, children before their parent, and sends the values
    home."""

    def __init__(
        self,
        model: nn.Module,
        unfilled: set[torch.Tensor],
        empty: set[nn.Parameter],
        home: Home,
        sent: set[nn.Parameter],
        overwritten: list[tuple[torch.Tensor, torch.Tensor]],
    ):
        self._model, self._home = model, home
        self._unfilled, self._empty, self._sent = unfilled, empty, sent
        self._overwritten = overwritten  # restored if the wrap fails
        self._names = {
            id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        self._seen: set[nn.Module] = set()
        # Buffers that their own module does not set.
        self._left: list[tuple[torch.Tensor, int, nn.Module]] = []

    @torch.no_grad()
    def run(self) -> None:
        self._module(self._model, None)
        if left := self._unset():
            _construct(self._model, {tensor for tensor, _ in left})
            _refuse([(self._names[id(tensor)], module) for tensor, module in self._unset()])

    def _unset(self) -> list[tuple[torch.Tensor, nn.Module]]:
        """Lists buffers that no initialisation has set, with their modules."""
        return [
            (tensor, module)
            for tensor, version, module in self._left
            if _is_spoiled(tensor, version)
        ]

    def _module(self, module: nn.Module, init: Callable[[nn.Module], Any] | None) -> bool:
        """Initialises ``module`` and all below it. Returns whether there was anything to
        initialise."""
        if module in self._seen:
            return False
        self._seen.add(module)
        init = _init_weights_of(module) or init
        own = [
            tensor
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        waiting = [
            tensor for tensor in own if tensor in self._unfilled and tensor not in self._sent
        ]
        drawn_below = False
        for child in module.children():
            drawn_below |= self._module(child, init)
        resets = _resets_of(module)
        if waiting or (drawn_below and (resets or init is not None)):
            self._initialise(module, waiting, resets, init)
        # A module above sets no adapters, and perhaps weights of the base that a file has.
        return (bool(waiting) or drawn_below) and not hasattr(module, ADAPTER_RESET)

    def _initialise(
        self, module: nn.Module, waiting: list[torch.Tensor], resets: list[Callable], init
    ) -> None:
        """Runs the initialisation of ``module`` itself. It may overwrite values that its children
        have set."""
        reach = list(module.modules()) if resets else [module, *module.children()]
        # The same order on all ranks: each send and read is a collective.
        params = dict.fromkeys(param for each in reach for param in each.parameters(recurse=False))
        borrowed = [param for param in params if param in self._empty]
        for param in borrowed:
            give_storage(param)
            if param in self._sent:
                param.copy_(self._home.recall(param))
        buffers = {tensor for each in reach for tensor in each.buffers(recurse=False)}
        real = {
            tensor: tensor.clone()
            for tensor in (*buffers, *(params.keys() - set(borrowed)))
            if tensor not in self._unfilled and not tensor.is_meta
        }
        self._overwritten += real.items()
        before = [(tensor, _spoil(tensor)) for tensor in waiting]
        try:
            for reset in resets:
                reset()
            if init is not None:
                init(module)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"{type(module).__name__} cannot be initialised by itself ({error}): give"
                " Config(weights='model.safetensors')"
            ) from error
        for tensor, value in real.items():  # tensors that were real already keep their values
            tensor.copy_(value)
        del self._overwritten[len(self._overwritten) - len(real) :]
        left = [(tensor, version) for tensor, version in before if _is_spoiled(tensor, version)]
        # A module further up may set the buffers of modules deep inside it. Parameters go home now.
        self._left += [
            (tensor, version, module) for tensor, version in left if tensor not in params
        ]
        _refuse([(self._names[id(tensor)], module) for tensor, _ in left if tensor in params])
        for param in borrowed:
            if param in self._sent or any(param is tensor for tensor in waiting):
                for begin in range(0, param.numel(), PIECE_ELEMENTS):
                    piece = param.data.reshape(-1)[begin : begin + PIECE_ELEMENTS]
                    self._home.send(param, begin, piece, drawn=True)
                self._sent.add(param)
            take_storage(param)


def _refuse(left: list[tuple[str, nn.Module]]) -> None:
    """Raises ConfigError for a tensor that no initialisation sets, with its name and its module."""
    if left:
        _, module = min(left, key=lambda pair: pair[0])
        raise ConfigError(
            f"{', '.join(sorted(name for name, _ in left))} is on meta, and {type(module).__name__}"
            " does not set it (in reset_parameters(), or the model's _init_weights): give"
            " Config(weights='model.safetensors')"
        )


def _construct(model: nn.Module, wanted: set[torch.Tensor]) -> None:
    """Sets buffers that transformers 4 computes in constructors alone: to those of a second model,
    whose parameters are on meta, as its ``from_pretrained`` makes it."""
    if (params_on_meta := of_transformers("init_empty_weights")) is None:
        return
    for part in filter(is_transformers, model.modules()):
        own = {name: buffer for name, buffer in part.named_buffers() if buffer in wanted}
        if own:
            with torch.random.fork_rng(devices=[]), params_on_meta():
                second = dict(type(part)(part.config).named_buffers())
            for name in own.keys() & second.keys():
                own[name].copy_(second[name])
                wanted = wanted - {own[name]}


def _init_weights_of(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Returns a ``transformers`` model's initialisation of one of its modules."""
    init = getattr(module, "_init_weights", None)
    if not callable(init):
        return None
    required = [
        p
        for p in inspect.signature(init).parameters.values()
        if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD
    ]
    return init if len(required) == 1 else None


def _resets_of(module: nn.Module) -> list[Callable[[], Any]]:
    """Lists the functions that reset the module's own tensors."""
    # An adapter's B must be zero.
    if callable(reset := getattr(module, ADAPTER_RESET, None)):
        return [partial(reset, adapter, True) for adapter in getattr(module, "lora_A", {})]
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return [reset] if callable(reset) else []


def _spoil(tensor: torch.Tensor) -> int:
    """Fills ``tensor`` with values that no initialisation leaves. Returns torch's version counter
    of it."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        (
            tensor.zero_()
            if tensor.dtype == torch.bool
            else tensor.fill_(torch.iinfo(tensor.dtype).max)
        )
    return tensor._version


def _is_spoiled(tensor: torch.Tensor, version: int) -> bool:
    """Returns whether part of ``tensor`` is as :func:`_spoil` left it. Torch does not count writes
    through ``.data``; if it counted none, the values decide."""
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor._version != version:
        return False
    return (
        not tensor.any()
        if tensor.dtype == torch.bool
        else bool((tensor == torch.iinfo(tensor.dtype).max).all())
    )


def take_storage(param: nn.Parameter) -> None:
    # Fixed if an initialisation used it as a NumPy array, for example.
    if storage_guard.is_fixed(param.untyped_storage()):
        param.data = torch.empty_strided(
            param.size(), param.stride(), dtype=param.dtype, device=param.device
        )
    storage = param.untyped_storage()
    storage.resize_(0)
    storage_guard.close(storage)


def give_storage(param: nn.Parameter) -> None:
    storage = param.untyped_storage()
    storage_guard.open(storage)
    storage.resize_(param.numel() * param.itemsize)
