"""Materialized: makes a model that was built on ``meta`` real: its values go home as they come.

Values come from a safetensors file or folder where one is given, else from the modules' own initialisation:
``reset_parameters``, and a ``transformers`` model's ``_init_weights``. At no time is more in memory than a few blocks
of a file, or what one module's initialisation touches.

A distributed parameter has the bits that one process would give it: its module is initialised, or its file read, for the global
tensor, of which each rank keeps its own part.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..checkpoint.weight_files import WeightFiles
from ..errors import ConfigError
from ..state.dtensors import empty_parameter_like, is_distributed
from ..state.tensors import put, take_storage
from .initialiser import Home, Initialiser


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
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}  # a global tensor -> the distributed parameter that it stands for
        self._apart: list[tuple[nn.Module, str, nn.Parameter]] = []  # where one stands, and for what
        self.sent: set[nn.Parameter] = set()

    def fill(self, home: Home) -> None:
        """Sends every value of a meta tensor home. Raises ConfigError, naming the tensor, when one is nowhere to be had."""
        self._take_apart()
        self._fill(home)
        self._put_together()

    def _take_apart(self) -> None:
        """Has a global meta tensor stand for every distributed parameter on meta."""
        wholes: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            for name, param in module._parameters.items():
                if param is not None and param.is_meta and is_distributed(param):
                    if param not in wholes:
                        wholes[param] = nn.Parameter(
                            torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad
                        )
                        self._wholes[wholes[param]] = param
                    self._apart.append((module, name, param))
                    module._parameters[name] = wholes[param]

    def _put_together(self) -> None:
        """Puts the distributed parameters back, real and without storage: their values are at home."""
        for param in self._wholes.values():
            real = empty_parameter_like(param)
            self._swapped.append((param, real))
            self._swap_contents(param, real)
            self.sent.add(param)
        for module, name, param in self._apart:
            module._parameters[name] = param
        self._wholes.clear()

    def _fill(self, home: Home) -> None:
        home = _OfWholes(home, self._wholes)
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
            Initialiser(self._model, unfilled, self._empty(), home, self.sent, self._overwritten).run()
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

    def _swap_contents(self, param: nn.Parameter, real: nn.Parameter) -> None:
        """Makes ``param`` real, and leaves it its attributes and hooks."""
        attributes, hooks = dict(param.__dict__), (param._backward_hooks, param._post_accumulate_grad_hooks)
        _swap(self._recurrent, param, real)
        param.__dict__.update(attributes)
        param._backward_hooks, param._post_accumulate_grad_hooks = hooks

    def undo(self) -> None:
        """Restores the model as it was. A second call does nothing more."""
        for module, name, param in self._apart:
            module._parameters[name] = param
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
            wanted = param in unfilled
            self._swapped.append((param, real))  # before it is so: see undo
            self._swap_contents(param, real)
            if wanted:
                real_unfilled.add(param)
            if self._managed(param):
                take_storage(param)
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
        params = {name: tensor for name in names if isinstance(tensor := targets[name], nn.Parameter)}
        managed: dict[str, nn.Parameter] = {name: param for name, param in params.items() if self._managed(param)}
        self.sent |= set(managed.values())
        for piece in files.stream(names, {name: home.span(param) for name, param in managed.items()}):
            if piece.name in managed:
                home.send(managed[piece.name], piece.begin, piece.values, drawn=False)
                continue
            tensor = targets[piece.name]
            if tensor not in made:
                made.add(tensor)
                self._overwritten.append((tensor, tensor.detach().clone()))
            put(tensor, piece.begin, piece.values)


class _OfWholes:
    """Takes values of global tensors to the homes of the distributed parameters that they stand for."""

    def __init__(self, home: Home, params: dict[nn.Parameter, nn.Parameter]):
        self._home, self._params = home, params

    def send(self, param: nn.Parameter, begin: int, values: torch.Tensor, *, drawn: bool) -> None:
        self._home.send(self._params.get(param, param), begin, values, drawn=drawn)

    def span(self, param: nn.Parameter) -> tuple[int, int]:
        return self._home.span(self._params.get(param, param))

    def recall(self, param: nn.Parameter) -> torch.Tensor:
        return self._home.recall(self._params.get(param, param))


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
