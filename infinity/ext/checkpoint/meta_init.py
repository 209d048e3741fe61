"""Materialized: makes a model that was built on ``meta`` real, and sends each value home as it is
read or initialised.

Values come from a safetensors file or folder, or a GGUF file, if one is given, else from the
modules' own initialisation: ``reset_parameters``, and a ``transformers`` model's ``_init_weights``.
Memory holds at most a few blocks of a file, the tensors that transformers converts together, or the
tensors of one module's initialisation.

A distributed parameter has the bits of a run with one process: its module is initialised, or its
file read, for the global tensor, and each rank keeps its own part.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...core.params.tensors import put
from ...core.seams import Extension, FirstValues
from ...core.units.added import always_rests, named_tensors, tensors_of
from ...core.units.forms import is_plain, like, local_of
from ...core.units.inner import has_inner
from ...core.wrap.described_model import is_managed
from ...core.wrap.parts import parts_of
from ...errors import ConfigError
from ...files.module_names import Incoming, base_of, is_of_adapter
from ...files.source import Source
from ...files.weight_files import WeightFiles
from ..coded.coded_weights import coded_parts, send_coded
from ..coded.gguf_file import GgufFile, gguf_path
from ..packed.quantize import DenseWeights
from ..packed.unpacked import FP8, without_scales
from .hub_names import may_lack
from .initialiser import PIECE_ELEMENTS, Home, Initialiser, take_storage

# Attributes of a transformers model, and of its configuration, that record the conversion of its
# folder.
NOTED = {"_weight_conversions", "quantization_config"}


class ElsewhereValues(Extension):
    """The values of a model on meta, or of a folder."""

    @classmethod
    def first_values(cls, model: Any, config: Any) -> Materialized:
        return Materialized(model.module, config.weights, is_managed)


class Materialized(FirstValues):
    """Makes meta tensors of ``model`` real. Managed parameters end empty, their values at home; all
    other tensors keep their bytes."""

    def __init__(
        self,
        model: nn.Module,
        weights: str | os.PathLike | None,
        managed: Callable[[nn.Parameter], bool],
    ):
        self._model, self._managed = model, managed
        self._weights = weights
        self._recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        self._swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Made real here, or overwritten: no old value to keep.
        self._real: set[torch.Tensor] = set()
        # A global tensor -> its distributed parameter.
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}
        # Module, name, and the distributed parameter that was there.
        self._separate: list[tuple[nn.Module, str, nn.Parameter]] = []
        # Models and configurations whose conversion is recorded, and their old record.
        self._noted: list[tuple[Any, dict]] = []
        self.sent: set[nn.Parameter] = set()

    def fill(self, writer: Home, sent: set[nn.Parameter]) -> None:
        """Sends the value of every meta tensor home. Raises ConfigError, naming the tensor, if
        there is no source for it. Every rank calls this; it reads files."""
        self._take_separate()
        self._fill(writer)
        self._put_together()
        sent |= self.sent

    def _take_separate(self) -> None:
        """Substitutes a global meta tensor for every distributed parameter on meta."""
        wholes: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            for name, param in module._parameters.items():
                if param is not None and param.is_meta and not is_plain(param):
                    if param not in wholes:
                        wholes[param] = nn.Parameter(
                            torch.empty(param.shape, dtype=param.dtype, device="meta"),
                            requires_grad=param.requires_grad,
                        )
                        self._wholes[wholes[param]] = param
                    self._separate.append((module, name, param))
                    module._parameters[name] = wholes[param]

    def _put_together(self) -> None:
        """Restores the distributed parameters, real and without storage: their values are home."""
        for param in self._wholes.values():
            real = empty_like(param)
            self._swapped.append((param, real))
            self._swap_contents(param, real)
            self.sent.add(param)
        for module, name, param in self._separate:
            module._parameters[name] = param
        self._wholes.clear()

    def _fill(self, home: Home) -> None:
        home = _OfWholes(home, self._wholes)
        files = self._files()
        dense = DenseWeights(self._model)
        targets = self._targets(dense.parts | coded_parts(self._model))
        stored = files.sources() if files else {}
        incoming = (
            Incoming(parts_of(self._model)[0], self._given(stored, targets), targets | dense.names)
            if files
            else None
        )
        dense.take(incoming.sources if incoming else {}, self._weights)
        if incoming:
            self._check(incoming.sources, targets)
        in_file = {targets[name] for name in incoming.sources} if incoming else set()
        buffers = (each for each in self._model.buffers() if not always_rests(each))
        unfilled = {each for each in (*targets.values(), *buffers) if each.is_meta} - in_file
        unfilled = self._make_real(unfilled)
        # Before the weights are loaded: initialising a module's buffers also sets its parameters.
        if unfilled:
            Initialiser(
                self._model, unfilled, self._empty(), home, self.sent, self._overwritten
            ).run()
        if incoming:
            streamed = files if isinstance(files, WeightFiles) else None
            origins = {id(source): name for name, source in stored.items()} if streamed else {}
            renamed = {
                name: origins[id(source)]
                for name, source in incoming.sources.items()
                if id(source) in origins
            }
            if streamed:
                self._load(streamed, renamed, home)
            self._convert(
                {name: source for name, source in incoming.sources.items() if name not in renamed},
                home,
            )
            for part in map(base_of, parts_of(self._model)):
                self._noted.append(
                    (part, {key: part.__dict__[key] for key in NOTED & part.__dict__.keys()})
                )
                incoming.note(part)
        dense.send(partial(self._send_whole, home))
        send_coded(self._model, partial(self._send_whole, home))

    def _files(self) -> WeightFiles | GgufFile | None:
        if self._weights is None:
            return None
        if (path := gguf_path(self._weights)) is not None:
            return GgufFile(path, base_of(parts_of(self._model)[0]))
        return WeightFiles(self._weights)

    def _given(self, files: dict[str, Source], targets: dict[str, torch.Tensor]) -> dict:
        """Returns the tensors of the folder in the model's form: dense, unless its layers have FP8
        themselves. A configuration does not say any more that they are scaled."""
        if self._weights is None or any(each.dtype in FP8 for each in targets.values()):
            return files
        sources = without_scales(files, self._weights)
        is_dense = sources.keys() != files.keys() or gguf_path(self._weights) is not None
        for part in map(base_of, parts_of(self._model)) if is_dense else ():
            config: Any = getattr(part, "config", None)
            if (packing := getattr(config, "quantization_config", None)) is not None:
                self._noted.append((config, {"quantization_config": packing}))
                del config.quantization_config
        return sources

    def _check(self, sources: dict[str, Source], targets: dict[str, torch.Tensor]) -> None:
        """Raises ConfigError if the file lacks a tensor, has another shape or a quantised dtype, or
        has two different values for one tensor of the model."""
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in targets.items():
            if tensor.is_meta or isinstance(tensor, nn.Parameter):
                names.setdefault(tensor, []).append(name)
        part = base_of(parts_of(self._model)[0])
        lacking = [of_one for of_one in names.values() if not set(of_one) & sources.keys()]
        if missing := [
            of_one[0]
            for of_one in lacking
            if not all(may_lack(part, name) or is_of_adapter(name) for name in of_one)
        ]:
            raise ConfigError(
                f"weights={str(self._weights)!r} lacks {len(missing)} of the model's parameters and"
                f" buffers: {', '.join(missing[:5])}"
            )
        for name, source in sources.items():
            if source.shape != targets[name].shape:
                raise ConfigError(
                    f"{name} in {str(self._weights)!r} has shape {tuple(source.shape)}, the model's"
                    f" {tuple(targets[name].shape)}"
                )
            if (
                source.dtype != targets[name].dtype
                and targets[name].is_floating_point()
                and not (source.dtype.is_floating_point and source.dtype.itemsize > 1)
            ):
                raise ConfigError(
                    f"{name} in {str(self._weights)!r} is of {source.dtype}, the model's of"
                    f" {targets[name].dtype}: the folder is quantised. Load it by from_pretrained,"
                    " which has the scales, and wrap that model."
                )
        for of_one in names.values():
            stored = [(name, sources[name]) for name in of_one if name in sources]
            if differing := [
                name for name, source in stored[1:] if not _have_same_bits(source, stored[0][1])
            ]:
                raise ConfigError(
                    f"{stored[0][0]} and {differing[0]} are one tensor of the model, and two"
                    f" different ones in {str(self._weights)!r}: untie them"
                    " (tie_word_embeddings=False in the model's configuration)"
                )

    def _empty(self) -> set[nn.Parameter]:
        return {param for param, _ in self._swapped if self._managed(param)}

    def _swap_contents(self, param: nn.Parameter, real: nn.Parameter) -> None:
        """Makes ``param`` real, and keeps its attributes and hooks."""
        attributes, hooks = (
            dict(param.__dict__),
            (param._backward_hooks, param._post_accumulate_grad_hooks),
        )
        _swap(self._recurrent, param, real)
        param.__dict__.update(attributes)
        param._backward_hooks, param._post_accumulate_grad_hooks = hooks

    def undo(self) -> None:
        """Restores the model. Idempotent."""
        for module, name, param in self._separate:
            module._parameters[name] = param
        for param, meta in self._swapped:
            if not param.is_meta:
                _swap(self._recurrent, param, meta)
        for module, name, buffer in self._buffers:
            module._buffers[name] = buffer
        for tensor, before in self._overwritten:
            tensor.detach().copy_(before)
        for part, noted in self._noted:
            for key in NOTED & part.__dict__.keys():
                del part.__dict__[key]
            part.__dict__.update(noted)

    def _make_real(self, unfilled: set[torch.Tensor]) -> set[torch.Tensor]:
        """Makes every meta tensor real, managed parameters without storage. Returns the real
        tensors of ``unfilled``."""
        real_unfilled: set[torch.Tensor] = set()
        # A subclass follows its inner tensors later.
        for param in [p for p in tensors_of(self._model) if p.is_meta and not has_inner(p)]:
            real = torch.empty_like(param, device="cpu").as_subclass(type(param))
            real.requires_grad_(param.requires_grad)
            wanted = param in unfilled
            self._swapped.append((param, real))  # recorded before the swap: see undo
            self._swap_contents(param, real)
            if wanted:
                real_unfilled.add(param)
            if self._managed(param):
                take_storage(param)
        real_of: dict[torch.Tensor, torch.Tensor] = {}
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta and not always_rests(buffer):
                    self._buffers.append((module, name, buffer))
                    if buffer not in real_of:
                        real_of[buffer] = torch.empty_like(buffer, device="cpu")
                    module._buffers[name] = real_of[buffer]
                    if buffer in unfilled:
                        real_unfilled.add(real_of[buffer])
        self._real = {*real_of.values(), *(param for param, _ in self._swapped)}
        return real_unfilled

    @torch.no_grad()
    def _load(self, files: WeightFiles, renamed: dict[str, str], home: Home) -> None:
        """Streams the file's tensors that need no conversion. ``renamed``: the model's names -> the
        file's."""
        targets = self._targets()
        own = {origin: targets[name] for name, origin in renamed.items()}
        managed = {
            origin: cast(nn.Parameter, tensor)
            for origin, tensor in own.items()
            if self._goes_home(tensor)
        }
        self.sent |= set(managed.values())
        for piece in files.stream(
            own, {origin: home.span(param) for origin, param in managed.items()}
        ):
            self._take(own[piece.name], piece.begin, piece.values, home)

    @torch.no_grad()
    def _convert(self, sources: dict[str, Source], home: Home) -> None:
        """Reads the tensors that transformers converts from the file's, one after the other."""
        targets = self._targets()
        self.sent |= {
            cast(nn.Parameter, targets[name]) for name in sources if self._goes_home(targets[name])
        }
        for name, source in sources.items():
            self._take_whole(targets[name], source.read(), home)

    def _send_whole(
        self, home: Home, param: nn.Parameter, value: torch.Tensor, *, drawn: bool
    ) -> None:
        self.sent.add(param)
        for begin, piece in _pieces(value):
            home.send(param, begin, piece, drawn=drawn)

    def _take_whole(self, tensor: torch.Tensor, value: torch.Tensor, home: Home) -> None:
        for begin, piece in _pieces(value):
            self._take(tensor, begin, piece, home)

    def _targets(self, without: Set[torch.Tensor] = frozenset()) -> dict[str, torch.Tensor]:
        """Returns every entry of a state dict that has a value of its own, under every name."""
        entries = dict(named_tensors(self._model))
        for path, module in self._model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    entries[f"{path}.{name}" if path else name] = buffer
        return {
            name: tensor
            for name, tensor in entries.items()
            if tensor not in without and not has_inner(tensor)
        }

    def _take(self, tensor: torch.Tensor, begin: int, values: torch.Tensor, home: Home) -> None:
        """Writes elements of ``tensor`` from ``begin`` on, to its home if it has one."""
        if tensor in self.sent:
            home.send(cast(nn.Parameter, tensor), begin, values, drawn=False)
            return
        if tensor not in self._real:
            self._real.add(tensor)
            self._overwritten.append((tensor, tensor.detach().clone()))
        put(tensor, begin, values)

    def _goes_home(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and self._managed(tensor)


def _pieces(value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    flat = value.reshape(-1)
    for begin in range(0, flat.numel(), PIECE_ELEMENTS):
        yield begin, flat[begin : begin + PIECE_ELEMENTS]


class _OfWholes:
    """Sends values of global tensors to the homes of the distributed parameters that they
    represent."""

    def __init__(self, home: Home, params: dict[nn.Parameter, nn.Parameter]):
        self._home, self._params = home, params

    def send(self, param: nn.Parameter, begin: int, values: torch.Tensor, *, drawn: bool) -> None:
        self._home.send(self._params.get(param, param), begin, values, drawn=drawn)

    def span(self, param: nn.Parameter) -> tuple[int, int]:
        return self._home.span(self._params.get(param, param))

    def recall(self, param: nn.Parameter) -> torch.Tensor:
        return self._home.recall(self._params.get(param, param))


def _have_same_bits(a: Source, b: Source) -> bool:
    if a is b or a.dtype != b.dtype:
        return a is b
    one, other = (source.read().reshape(-1).view(torch.uint8) for source in (a, b))
    return torch.equal(one, other)


def _swap(recurrent: list[nn.RNNBase], param: nn.Parameter, other: nn.Parameter) -> None:
    """Swaps the contents of ``param`` and ``other``; every reference to either stays.
    ``recurrent``: the model's RNN modules."""
    # They hold weak references to their weights, which torch refuses to swap.
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} on meta cannot be made real, for something"
            " beside its module refers to it (a view, a weak reference, a gradient): drop that"
            f" before wrap_model. torch says: {error}"
        ) from error
    finally:
        for module in recurrent:
            module._flat_weight_refs = [
                weakref.ref(weight) if weight is not None else None
                for weight in module._flat_weights
            ]


def empty_like(param: torch.Tensor) -> nn.Parameter:
    """Makes a parameter like ``param``, which is on meta, whose local part has no storage."""
    local = torch.empty_like(local_of(param), device="cpu")
    local.untyped_storage().resize_(0)
    return nn.Parameter(like(param, local), requires_grad=param.requires_grad)
