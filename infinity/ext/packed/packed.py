"""Packed: finds the tensors of packed weights, so that they move with the parameters of a module.

A packed weight is several frozen tensors: codes, scales, zero points. A module reaches them in one
of three ways, whatever the format:

subclass    as inner tensors of a Parameter that is a tensor subclass (torchao)
attribute   of the Parameter, of the module, or of an object of theirs (bitsandbytes, HQQ)
buffer      of the module (GPTQ, AWQ, NVFP4)

part        one of these tensors
place       where a part is: an attribute of an object, or an item of a dict
carrier     the frozen Parameter over a part's memory that takes its places while the model is
            wrapped
alias       a tensor over the memory of a packed Parameter, beside it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.machine import storage_guard
from ...core.seams import Change, Extension
from ...core.units.added import ADDED, RESTS, always_rests, own_tensors
from ...core.units.forms import PLAIN_CLASS
from ...core.units.handle import handle_of
from ...core.units.inner import has_inner, inner_places, inner_tensors, rebuilt

SMALL_NBYTES = 4096  # parts below, such as tables of 16 codes, stay with their modules
CODES = "_infinity_codes"  # attribute of a plain Parameter whose bytes only look like floats


@dataclass(frozen=True, eq=False)
class Place:
    """One place of a tensor that may be a part: of the packed weight ``param``, if of any."""

    name: str
    holder: Any
    key: str
    param: Any = None

    @property
    def tensor(self) -> Any:
        """What is there."""
        return self.holder.get(self.key) if self._is_item else getattr(self.holder, self.key, None)

    @property
    def is_alias(self) -> bool:
        """Whether the tensor there has the memory of ``param`` itself."""
        there = self.tensor
        return (
            isinstance(there, torch.Tensor)
            and self.param is not None
            and not always_rests(there)
            and storage_guard.identity(there) == storage_guard.identity(self.param)
        )

    @property
    def is_copy(self) -> bool:
        """Whether the tensor there has the values of ``param`` in memory of its own."""
        there, param = self.tensor, self.param
        return (
            _moves(there)
            and param is not None
            and not self.is_alias
            and (there.shape, there.dtype, there.device) == (param.shape, param.dtype, param.device)
            and not there.is_meta
            and torch.equal(there, param.detach())
        )

    @property
    def _is_item(self) -> bool:
        return isinstance(self.holder, dict)

    def replace(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor."""
        if self._is_item:
            self.holder[self.key] = tensor
        else:
            setattr(self.holder, self.key, tensor)


Send = Callable[[nn.Parameter, torch.Tensor], None]  # sends the value of a parameter home
Found = Iterator[tuple[str, Any, str]]  # name, holder and key of each place


def _of_quant_state(name: str, state: Any) -> Found:
    yield f"{name}.absmax", state, "absmax"
    yield f"{name}.quant_map", state, "code"
    yield f"{name}.nested_offset", state, "offset"
    if state.state2 is not None:
        yield f"{name}.nested_absmax", state.state2, "absmax"
        yield f"{name}.nested_quant_map", state.state2, "code"


def _of_params_4bit(module: nn.Module, name: str, param: Any) -> Found:
    for state in (param.quant_state, getattr(module, "quant_state", None)):
        if state is not None:
            yield from _of_quant_state(name, state)


def _of_int8_params(module: nn.Module, name: str, param: Any) -> Found:
    for holder in (param, getattr(module, "state", None)):
        if holder is not None:
            yield f"{name}.CB", holder, "CB"
            yield f"{name}.SCB", holder, "SCB"


def _of_nothing(_module: nn.Module, _name: str, _param: Any) -> Found:
    return iter(())


def _of_meta(module: nn.Module) -> Found:
    for name, value in (getattr(module, "meta", None) or {}).items():
        if isinstance(value, torch.Tensor):
            yield f"meta.{name}", module.meta, name  # type: ignore[union-attr]


# Classes of Parameters -> where their other tensors are. Exact classes: what a subclass of one of
# them keeps, and where, is unknown.
PARAMETERS: dict[str, Callable[[nn.Module, str, Any], Found]] = {
    "bitsandbytes.nn.modules.Params4bit": _of_params_4bit,
    "bitsandbytes.nn.modules.Int8Params": _of_int8_params,
    "diffusers.quantizers.gguf.utils.GGUFParameter": _of_nothing,
}
# Classes of modules with parts beside their parameters
MODULES: dict[str, Callable[[nn.Module], Found]] = {"hqq.core.quantize.HQQLinear": _of_meta}


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_name(param: torch.Tensor) -> str:
    """Returns the name of the class of ``param`` when it is not managed."""
    return _class_name(getattr(type(param), PLAIN_CLASS, type(param)))


def is_code(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` has codes of packed weights: by its dtype, in which nothing is
    trained, or by what a library says of the bytes, which may look like floats."""
    return (
        tensor.dtype in (torch.int16, torch.int32)
        or (tensor.itemsize == 1 and tensor.dtype != torch.bool)
        or getattr(tensor, "quant_state", None) is not None
        or CODES in tensor.__dict__
    )


def moved_tensors(module: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters of ``module`` itself that may move, and its carriers: of a packed weight
    that is a subclass, these alone."""
    return [each for each in own_tensors(module) if not has_inner(each)]


class PackedWeights(Extension):
    """What is known of a model's packed weights before it is laid out."""

    @classmethod
    def describe_model(cls, model: Any) -> None:
        """Names the codes, and the tensors that keep their dtypes."""
        model.codes.update(p for _, p in model.named if not p.requires_grad and is_code(p))
        model.own_dtype.update(param for _, param in model.named if always_rests(param))
        for module in model.modules:
            own = {name: p for name, p in module._parameters.items() if p is not None}
            if not model.codes.isdisjoint(own.values()):
                # Codes in one Parameter, and their scales in others
                model.own_dtype.update(param for name, param in own.items() if name != "bias")

    @classmethod
    def unlisted(cls, model: nn.Module) -> list[tuple[str, Place]]:
        return small_places(model)


class Packed(Change):
    """The packed weights of one model, in the form in which the engine moves them."""

    def __init__(self) -> None:
        # Carriers, and the tensors that they replace until the values are at home
        self._carriers: dict[nn.Parameter, torch.Tensor | None] = {}
        self._aliases: list[Place] = []
        # Packed Parameters that are parts themselves, and those that look like floats
        self._own: list[nn.Parameter] = []
        self._modules: list[nn.Module] = []
        self._attributes: list[tuple[Any, str, Any]] = []

    def make(self, model: nn.Module, optimizers: Sequence[Any], config: Any) -> None:
        """Puts carriers in the places of the parts. The model computes as before. With
        ``config.weights`` buffers on meta are parts, too, whose values come from a file."""
        read = config.weights is not None
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            own: dict[str, nn.Parameter] = {}
            for param in filter(_is_own_part, module._parameters.values()):
                self._take(module, param)
            for param in _seen_as_floats(module):
                setattr(param, CODES, True)
                self._own.append(param)
            for place in _places(module, read=read):
                if place.is_copy:  # after Module.to, which moves each of them
                    place.replace(place.param.data)
                tensor = place.tensor
                if place.is_alias:
                    self._aliases.append(place)
                if place.is_alias or not _moves(tensor):
                    continue
                carrier = tensor if always_rests(tensor) else made.get(id(tensor))
                if carrier is None:
                    carrier = made[id(tensor)] = nn.Parameter(tensor.detach(), False)
                    setattr(carrier, RESTS, True)
                    self._carriers[carrier] = tensor
                own.setdefault(place.name, carrier)
                place.replace(carrier)
            if own:
                module.__dict__[ADDED] = own
            if own or any(
                _is_own_part(each) or has_inner(each) for each in module._parameters.values()
            ):
                self._modules.append(module)

    def _take(self, module: nn.Module, param: nn.Parameter) -> None:
        if RESTS not in param.__dict__:
            setattr(param, RESTS, True)
            self._own.append(param)
        if getattr(module, "support_avx512bf16_for_cpu", False):
            # bitsandbytes would pack the codes anew for its kernel, in each evaluation on a CPU.
            self._attributes.append((module, "support_avx512bf16_for_cpu", True))
            module.support_avx512bf16_for_cpu = False

    def settle(self) -> None:
        """Lets go of the memory of before, once the values are at home and the parameters at
        rest."""
        self._carriers = dict.fromkeys(self._carriers)
        for place in self._aliases:
            place.replace(place.param.data)
        for module in self._modules:
            _follow_inner(module)

    def release(self) -> None:
        """Makes the model's tensors plain ones again: those of before, unless these are settled.
        Idempotent."""
        for module in self._modules:
            module.__dict__.pop(ADDED, None)
            for place in _places(module):  # a forward may have moved them
                if handle_of(place.tensor) is not None and not always_rests(place.tensor):
                    place.replace(place.param.data)
                elif place.tensor in self._carriers:
                    original = self._carriers[place.tensor]
                    place.replace(place.tensor.detach() if original is None else original)
            _follow_inner(module)
        for param in self._own:
            param.__dict__.pop(RESTS, None)
            param.__dict__.pop(CODES, None)
        for holder, key, value in self._attributes:
            setattr(holder, key, value)

    undo = release


def _is_own_part(param: nn.Parameter | None) -> bool:
    """Tells whether ``param`` is a Parameter of a known class whose own memory has the codes."""
    return (
        param is not None
        and not param.requires_grad
        and plain_name(param) in PARAMETERS
        and is_code(param)
    )


def _seen_as_floats(module: nn.Module) -> list[nn.Parameter]:
    """Lists the plain Parameters of ``module`` whose codes HQQ keeps under a dtype of floats."""
    is_known = _class_name(type(module)) in MODULES
    as_floats = is_known and (getattr(module, "meta", None) or {}).get("view_as_float")
    return [param for param in [module._parameters.get("W_q")] if as_floats and param is not None]


def _moves(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.nbytes >= SMALL_NBYTES
    )


def _places(module: nn.Module, *, read: bool = True) -> Iterator[Place]:
    """Yields the places where ``module`` may have parts. ``read``: also buffers on meta."""
    for name, param in module._parameters.items():
        if _is_own_part(param):
            for place in PARAMETERS[plain_name(param)](module, name, param):
                yield Place(*place, param)
        elif has_inner(param) and not param.requires_grad:
            yield from (Place(*place) for place in inner_places(name, param))
    if (attributes := MODULES.get(_class_name(type(module)))) is not None:
        yield from (Place(*place) for place in attributes(module))
    buffers = [each for each in module._buffers.values() if each is not None]
    # Codes, and all that is beside them. Other buffers may be changed in a forward, and stay.
    if any(
        always_rests(each) or (_moves(each) and is_code(each) and (read or not each.is_meta))
        for each in buffers
    ):
        yield from (Place(name, module._buffers, name) for name in module._buffers)


def send_parts(layer: nn.Module, made: nn.Module, send: Send) -> None:
    """Sends the parts of ``made`` home as those of ``layer``, which has them on meta. Parts that do
    not move are put into ``layer``."""
    for name, param in layer._parameters.items():
        if _is_own_part(param):
            send(param, made._parameters[name].data)
    for place, of_made in zip(_places(layer), _places(made), strict=True):
        if (there := place.tensor) is None:
            continue
        if always_rests(there):
            send(there, of_made.tensor)
        else:
            place.replace(of_made.tensor)


def dense_numel(param: torch.Tensor) -> int:
    """Counts the elements of a parameter, for a packed one those before it was packed."""
    state = getattr(param, "quant_state", None)
    return param.numel() if state is None else math.prod(state.shape)


def _follow_inner(module: nn.Module) -> None:
    """Makes subclasses whose inner tensors are on another device than they say anew."""
    for param in module._parameters.values():
        if has_inner(param) and any(each.device != param.device for each in inner_tensors(param)):
            made = rebuilt(param, _followed)  # not by nn.Parameter, which detaches inner tensors
            made.__dict__ = param.__dict__ | made.__dict__
            torch.utils.swap_tensors(param, made)


def _followed(inner: Any) -> Any:
    return rebuilt(inner, _followed) if has_inner(inner) else inner


def named_places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Yields the places of parts beside parameters and buffers, by their names."""
    for path, module in model.named_modules():
        for place in _places(module):
            if place.holder is not module._buffers:
                yield f"{path}.{place.name}" if path else place.name, place


def small_places(model: nn.Module) -> list[tuple[str, Place]]:
    """Lists those of :func:`named_places` whose parts are too small to move."""
    return [
        (name, place)
        for name, place in named_places(model)
        if isinstance(there := place.tensor, torch.Tensor)
        and handle_of(there) is None
        and not (always_rests(there) or place.is_alias)
    ]


def small_parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors of :func:`small_places`."""
    return {name: place.tensor for name, place in small_places(model)}
