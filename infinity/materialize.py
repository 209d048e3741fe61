"""Materialized: values for a model that was built on ``meta``, sent home as they come, and the way back if wrapping
fails.

Values come from a safetensors file or folder where one is given, else from the modules' own initialisation:
``reset_parameters``, and a ``transformers`` model's ``_init_weights``. At no time is more in memory than a few blocks
of a file, or what one module's initialisation touches.

empty   a managed parameter that was made real without storage: its value is at home, or will be
lent    an empty parameter with storage for as long as an initialisation runs
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from . import guard
from .errors import ConfigError
from .weights import WeightFiles

PIECE = 4 * 1024 * 1024  # elements that are sent at once


class Home(Protocol):
    """Where values of managed parameters go."""

    def send(self, param: nn.Parameter, begin: int, values: torch.Tensor, *, drawn: bool) -> None:
        """Flat ``values``, counted row by row from element ``begin``; ``drawn`` by an initialisation, or from a file."""

    def span(self, param: nn.Parameter) -> tuple[int, int]:
        """Which elements are wanted of a file."""

    def recall(self, param: nn.Parameter) -> torch.Tensor:
        """The value that was sent."""


class Materialized:
    """Makes meta tensors of ``model`` real. Managed parameters end empty, their values at home, and are in :attr:`sent`;
    everything else keeps its bytes. :meth:`undo` puts everything back as it was.
    """

    def __init__(self, model: nn.Module, weights: str | os.PathLike | None, managed: Callable[[nn.Parameter], bool]):
        self._model, self._managed = model, managed
        self._weights = weights
        self._recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self._swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent: set[nn.Parameter] = set()

    def fill(self, home: Home) -> None:
        """Raises ConfigError, naming the tensor, when a value is nowhere to be had."""
        files = WeightFiles(self._weights) if self._weights is not None else None
        targets = dict(_targets(self._model))
        wanted = {name for name in targets if files and name in files.tensors}
        if files:
            self._check(files, targets)
        in_file = {targets[name] for name in wanted}
        unfilled = {tensor for tensor in _tensors(self._model) if tensor.is_meta and tensor not in in_file}
        unfilled = self._make_real(unfilled)
        # Before the weights are loaded: initialising a module for a buffer's sake also sets its parameters.
        if unfilled:
            _Initialiser(self._model, unfilled, self._empty(), home, self.sent, self._overwritten).run()
        if files:
            self._load(files, wanted, home)

    def _check(self, files: WeightFiles, targets: dict[str, torch.Tensor]) -> None:
        """Values from two sources in one model are never meant, nor are values of another shape."""
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in targets.items():
            if tensor.is_meta or isinstance(tensor, nn.Parameter):
                names.setdefault(tensor, []).append(name)
        if missing := [of_one[0] for of_one in names.values() if not set(of_one) & set(files.tensors)]:
            raise ConfigError(
                f"weights={str(self._weights)!r} lacks {len(missing)} of the model's parameters and buffers: "
                f"{', '.join(missing[:5])}"
            )
        for name, tensor in targets.items():
            if name in files.tensors and files.tensors[name].shape != tensor.shape:
                raise ConfigError(
                    f"{name} in {files.tensors[name].file} has shape {tuple(files.tensors[name].shape)}, the model's "
                    f"{tuple(tensor.shape)}"
                )

    def _empty(self) -> set[nn.Parameter]:
        return {param for param, _ in self._swapped if self._managed(param)}

    def undo(self) -> None:
        """The model as it was. A second call does nothing more."""
        for param, meta in self._swapped:
            if not param.is_meta:
                _swap(self._recurrent, param, meta)
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for tensor, before in self._overwritten:
            tensor.detach().copy_(before)

    def _make_real(self, unfilled: set[torch.Tensor]) -> set[torch.Tensor]:
        """Makes every meta tensor a real one, managed parameters without storage. Returns the real ones of ``unfilled``."""
        real_unfilled: set[torch.Tensor] = set()
        for param in [param for param in self._model.parameters() if param.is_meta]:
            real = torch.empty_like(param, device="cpu").as_subclass(type(param))
            real.requires_grad_(param.requires_grad)
            attributes, hooks = dict(param.__dict__), (param._backward_hooks, param._post_accumulate_grad_hooks)
            wanted = param in unfilled
            self._swapped.append((param, real))  # before it is so: see undo
            _swap(self._recurrent, param, real)
            param.__dict__.update(attributes)
            param._backward_hooks, param._post_accumulate_grad_hooks = hooks
            if wanted:
                real_unfilled.add(param)
            if self._managed(param):
                _take_storage(param)
        real_of: dict[torch.Tensor, torch.Tensor] = {}
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self._buffers.append((module, name, buffer))
                    if buffer not in real_of:
                        real_of[buffer] = torch.empty_like(buffer, device="cpu")
                    module._buffers[name] = real_of[buffer]
                    if buffer in unfilled:
                        real_unfilled.add(real_of[buffer])
        return real_unfilled

    @torch.no_grad()
    def _load(self, files: WeightFiles, names: set[str], home: Home) -> None:
        targets = dict(_targets(self._model))
        made = {buffer for module, name, _ in self._buffers for buffer in [module._buffers[name]]}
        made |= {param for param, _ in self._swapped}
        params = {name: targets[name] for name in names if isinstance(targets[name], nn.Parameter)}
        managed = {name: param for name, param in params.items() if self._managed(param)}
        self.sent |= set(managed.values())
        for piece in files.stream(names, {name: home.span(param) for name, param in managed.items()}):
            tensor = targets[piece.name]
            if piece.name in managed:
                home.send(tensor, piece.begin, piece.values, drawn=False)
                continue
            if tensor not in made:
                made.add(tensor)
                self._overwritten.append((tensor, tensor.detach().clone()))
            put(tensor, piece.begin, piece.values)


def _targets(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything that a state dict holds, under every name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, tensor


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _swap(recurrent: list[nn.RNNBase], param: nn.Parameter, other: nn.Parameter) -> None:
    """Gives ``param`` the contents of ``other``, and the other way round; every reference to either stays. ``recurrent``: the
    model's modules of that kind."""
    for module in recurrent:  # they refer to their weights weakly, and torch refuses that
        module._flat_weight_refs = []
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} on meta cannot be made real, for something beside its module "
            f"refers to it (a view, a weak reference, a gradient): drop that before wrap_model. torch says: {error}"
        ) from error
    finally:
        for module in recurrent:
            module._flat_weight_refs = [weakref.ref(weight) if weight is not None else None for weight in module._flat_weights]


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.copy_(value)``, also of an expanded tensor, whose repeated elements are written once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
    tensor.detach()[once].copy_(value[once])


def put(tensor: torch.Tensor, begin: int, values: torch.Tensor) -> None:
    """Sets the elements of ``tensor`` from ``begin`` on, counted row by row whatever its strides."""
    if tensor.is_contiguous():
        tensor.view(-1)[begin : begin + values.numel()] = values.to(tensor.dtype)
    else:
        places = torch.unravel_index(torch.arange(begin, begin + values.numel(), device="cpu"), tensor.shape)
        tensor[places] = values.to(tensor.dtype)


class _Initialiser:
    """Runs the modules' own initialisation, children before their parent, and sends home what it sets."""

    def __init__(
        self,
        model: nn.Module,
        unfilled: set[torch.Tensor],
        empty: set[nn.Parameter],
        home: Home,
        sent: set[nn.Parameter],
        overwritten: list[tuple[torch.Tensor, torch.Tensor]],
    ):
        self._model, self._unfilled, self._empty, self._home, self._sent = model, unfilled, empty, home, sent
        self._overwritten = overwritten  # what is to be put back should anything fail
        self._names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self._seen: set[nn.Module] = set()

    @torch.no_grad()
    def run(self) -> None:
        self._module(self._model, None)

    def _module(self, module: nn.Module, init: Callable[[nn.Module], Any] | None) -> bool:
        """Initialises ``module`` and all below it. Returns whether there was anything to initialise."""
        if module in self._seen:
            return False
        self._seen.add(module)
        init = _init_weights_of(module) or init
        own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
        waiting = [tensor for tensor in own if tensor in self._unfilled and tensor not in self._sent]
        drawn_below = False
        for child in module.children():
            drawn_below |= self._module(child, init)
        resets = _resets_of(module)
        if waiting or (drawn_below and (resets or init is not None)):
            self._initialise(module, waiting, resets, init)
        return bool(waiting) or drawn_below

    def _initialise(self, module: nn.Module, waiting: list[torch.Tensor], resets: list[Callable], init) -> None:
        """Runs the initialisation of ``module`` itself. It may set what its children have set before."""
        reach = list(module.modules()) if resets else [module, *module.children()]
        params = {param for each in reach for param in each.parameters(recurse=False)}
        lent = [param for param in params if param in self._empty]
        for param in lent:
            _give_storage(param)
            if param in self._sent:
                param.copy_(self._home.recall(param))
        given = {tensor for each in reach for tensor in each.buffers(recurse=False)} | (params - set(lent))
        given = {tensor: tensor.clone() for tensor in given if tensor not in self._unfilled and not tensor.is_meta}
        self._overwritten += given.items()
        before = [(tensor, _spoil(tensor)) for tensor in waiting]
        try:
            for reset in resets:
                reset()
            if init is not None:
                init(module)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"{type(module).__name__} cannot be initialised by itself ({error}): give "
                "Config(weights='model.safetensors')"
            ) from error
        for tensor, value in given.items():  # what was real already has its value
            tensor.copy_(value)
        del self._overwritten[len(self._overwritten) - len(given) :]
        if left := sorted(self._names[id(tensor)] for tensor, version in before if _is_spoiled(tensor, version)):
            raise ConfigError(
                f"{', '.join(left)} is on meta, and {type(module).__name__} does not set it (in reset_parameters(), or "
                "the model's _init_weights): give Config(weights='model.safetensors')"
            )
        for param in lent:
            if param in self._sent or any(param is tensor for tensor in waiting):
                for begin in range(0, param.numel(), PIECE):
                    self._home.send(param, begin, param.data.reshape(-1)[begin : begin + PIECE], drawn=True)
                self._sent.add(param)
            _take_storage(param)


def _init_weights_of(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """A ``transformers`` model's initialisation of one of its modules."""
    init = getattr(module, "_init_weights", None)
    if not callable(init):
        return None
    required = [p for p in inspect.signature(init).parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    return init if len(required) == 1 else None


def _resets_of(module: nn.Module) -> list[Callable[[], Any]]:
    """What sets the module's own tensors anew."""
    if callable(reset := getattr(module, "reset_lora_parameters", None)):  # of an adapter: its B has to be zero
        return [lambda adapter=adapter: reset(adapter, True) for adapter in getattr(module, "lora_A", {})]
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return [reset] if callable(reset) else []


def _take_storage(param: nn.Parameter) -> None:
    storage = param.untyped_storage()
    storage.resize_(0)
    guard.close(storage)


def _give_storage(param: nn.Parameter) -> None:
    storage = param.untyped_storage()
    guard.open(storage)
    storage.resize_(param.numel() * param.itemsize)


def _spoil(tensor: torch.Tensor) -> int:
    """Fills ``tensor`` with what no initialisation leaves. Returns torch's count of its changes."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.zero_() if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor._version


def _is_spoiled(tensor: torch.Tensor, version: int) -> bool:
    """Whether some of ``tensor`` is as :func:`_spoil` left it. Writes through ``.data`` are not counted by torch: where
    it counted none, the values tell."""
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor._version != version:
        return False
    return not tensor.any() if tensor.dtype == torch.bool else bool((tensor == torch.iinfo(tensor.dtype).max).all())
