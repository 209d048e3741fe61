"""Materialized: values for a model that was built on ``meta``, sent home as they come, and the way back if wrapping
fails.

Values come from a safetensors file or folder where one is given, else from the modules' own initialisation:
``reset_parameters``, and a ``transformers`` model's ``_init_weights``. At no time is more in memory than a few blocks
of a file, or the parameters of one module and of its direct children.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from . import guard
from .errors import ConfigError
from .weights import WeightFiles

# (parameter, first element, flat values): takes a part of a managed parameter's value home.
Send = Callable[[nn.Parameter, int, torch.Tensor], None]
PIECE = 4 * 1024 * 1024  # elements that are sent at once


class Materialized:
    """Makes meta tensors of ``model`` real. Managed parameters end without storage, their values at home, and are in
    :attr:`sent`; everything else keeps its bytes. :meth:`undo` puts the meta tensors back.
    """

    def __init__(self, model: nn.Module, weights: str | os.PathLike | None, managed: Callable[[nn.Parameter], bool]):
        self._model, self._managed = model, managed
        self._weights = weights
        self._swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.sent: set[nn.Parameter] = set()

    def fill(self, send: Send) -> None:
        """Raises ConfigError, naming the tensor, when a value is nowhere to be had."""
        files = WeightFiles(self._weights) if self._weights is not None else None
        known = set(files.tensors) if files else set()
        if files:
            self._check(files)
        unfilled = self._make_real() - known
        # Before the weights are loaded: initialising a module for a buffer's sake also sets its parameters.
        if unfilled:
            _Initialiser(self._model, unfilled, self._empty(), send, self.sent).run()
        if files:
            self._load(files, send)

    def _check(self, files: WeightFiles) -> None:
        """Values from two sources in one model are never meant, nor are values of another shape."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        if missing := [of_one[0] for of_one in names.values() if not set(of_one) & set(files.tensors)]:
            raise ConfigError(
                f"weights={str(self._weights)!r} lacks {len(missing)} of the model's parameters: {', '.join(missing[:5])}"
            )
        for name, tensor in self._tensors().items():
            if name in files.tensors and files.tensors[name].shape != tensor.shape:
                raise ConfigError(
                    f"{name} in {files.tensors[name].file} has shape {tuple(files.tensors[name].shape)}, the model's "
                    f"{tuple(tensor.shape)}"
                )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_parameters(remove_duplicate=False)) | dict(self._model.named_buffers())

    def _empty(self) -> set[nn.Parameter]:
        """The parameters that were made real without storage."""
        return {param for param, _ in self._swapped if self._managed(param)}

    def undo(self) -> None:
        """The model as it was."""
        for param, meta in self._swapped:
            torch.utils.swap_tensors(param, meta)
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer

    def _make_real(self) -> set[str]:
        """Makes every meta tensor a real one, managed parameters without storage; the names that need a value."""
        names, done = set(), set()
        for name, param in self._model.named_parameters(remove_duplicate=False):
            if id(param) in done:
                names.add(name)
            elif param.is_meta:
                done.add(id(param))
                real = nn.Parameter(torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, real)
                self._swapped.append((param, real))
                names.add(name)
                if self._managed(param):
                    _take_storage(param)
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self._buffers.append((module, name, buffer))
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
                    names.add(f"{prefix}.{name}" if prefix else name)
        return names

    @torch.no_grad()
    def _load(self, files: WeightFiles, send: Send) -> None:
        tensors = self._tensors()
        for piece in files.stream(set(tensors) & set(files.tensors)):
            tensor = tensors[piece.name]
            if isinstance(tensor, nn.Parameter) and self._managed(tensor):
                send(tensor, piece.begin, piece.values)
                self.sent.add(tensor)
            else:
                put(tensor, piece.begin, piece.values)


class _Initialiser:
    """Runs the modules' own initialisation, children before their parent, and sends home what is done."""

    def __init__(self, model: nn.Module, unfilled: set[str], empty: set[nn.Parameter], send: Send, sent: set[nn.Parameter]):
        self._model, self._unfilled, self._empty, self._send, self._sent = model, unfilled, empty, send, sent
        init = getattr(model, "_init_weights", None)
        self._init = init if callable(init) else None

    @torch.no_grad()
    def run(self) -> None:
        for param in self._module("", self._model):
            self._finish(param)

    def _module(self, prefix: str, module: nn.Module) -> list[nn.Parameter]:
        """Initialises ``module`` and all below it. Returns its own parameters, which its parent may set anew."""
        of_children: list[nn.Parameter] = []
        for name, child in module.named_children():
            of_children += self._module(f"{prefix}{name}.", child)
        own = [*module._parameters.items(), *module._buffers.items()]
        waiting = {name: tensor for name, tensor in own if prefix + name in self._unfilled and tensor not in self._sent}
        if waiting or (of_children and self._init is not None):
            done = [tensor for tensor in waiting.values() if tensor in self._empty]
            # Initialising touches all of them, also those whose values are in a file.
            for_now = {param for each in (module, *module.children()) for param in each.parameters(recurse=False)}
            for_now = (for_now & self._empty) - set(of_children)
            for param in for_now:
                _give_storage(param)
            self._initialise(prefix, module, waiting)
            for param in for_now - set(done):
                _take_storage(param)
        else:
            done = []
        for param in of_children:
            self._finish(param)
        return done

    def _initialise(self, prefix: str, module: nn.Module, waiting: dict[str, torch.Tensor]) -> None:
        for tensor in waiting.values():
            _spoil(tensor)
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        try:
            if waiting and callable(reset):
                reset()
            if self._init is not None:
                self._init(module)
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"{type(module).__name__} {prefix.rstrip('.')!r} cannot be initialised by itself ({error}): give "
                "Config(weights='model.safetensors')"
            ) from error
        if left := sorted(prefix + name for name, tensor in waiting.items() if _is_spoiled(tensor)):
            raise ConfigError(
                f"{', '.join(left)} is on meta, and {type(module).__name__} does not set it (in reset_parameters(), or "
                "the model's _init_weights): give Config(weights='model.safetensors')"
            )

    def _finish(self, param: nn.Parameter) -> None:
        if param in self._sent:
            return
        for begin in range(0, param.numel(), PIECE):
            self._send(param, begin, param.data.reshape(-1)[begin : begin + PIECE])
        _take_storage(param)
        self._sent.add(param)


def put(tensor: torch.Tensor, begin: int, values: torch.Tensor) -> None:
    """Sets the elements of ``tensor`` from ``begin`` on, counted row by row whatever its strides."""
    if tensor.is_contiguous():
        tensor.view(-1)[begin : begin + values.numel()] = values.to(tensor.dtype)
    else:
        places = torch.unravel_index(torch.arange(begin, begin + values.numel()), tensor.shape)
        tensor[places] = values.to(tensor.dtype)


def _take_storage(param: nn.Parameter) -> None:
    storage = param.untyped_storage()
    storage.resize_(0)
    guard.close(storage)


def _give_storage(param: nn.Parameter) -> None:
    storage = param.untyped_storage()
    guard.open(storage)
    storage.resize_(param.numel() * param.itemsize)


def _spoil(tensor: torch.Tensor) -> None:
    """Fills ``tensor`` with a value that no initialisation leaves everywhere."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_spoiled(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is as :func:`_spoil` left it."""
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())
