"""Hub names: the names that a transformers model's own save_pretrained gives its tensors, which can
differ from its modules' names.

transformers 5 renames, splits and fuses tensors when it loads a folder, and undoes that when it
saves one. Both directions use its own functions here. They first get tensors without bytes, to
learn the results.

group    tensors that are converted together, and their results
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...errors import ConfigError
from ...files.groups import Group, empty
from ...files.module_names import Incoming, is_transformers, renamed_in_version_4
from ...files.source import Source, Storage

# Of older versions of transformers, whose files have what is computed.
MADE = re.compile(r"(inv_freq|masked_bias|attn\.bias|position_ids)$")
SHARD_SIZE = "50GB"  # the default of transformers 5, for models of other libraries


def flat_param_size_of(model: nn.Module) -> int | str:
    """Returns the default maximum file size of the model's own ``save_pretrained``."""
    for kind in type(model).__mro__ if is_transformers(model) else ():
        if "save_pretrained" in kind.__dict__:
            parameter = inspect.signature(kind.__dict__["save_pretrained"]).parameters.get(
                "max_shard_size"
            )
            if parameter is not None:
                return parameter.default
    return SHARD_SIZE


def of_transformers(name: str, module: str = "modeling_utils") -> Any:
    """Returns what transformers has under ``name``; None if its version has none."""
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name, None)
    except ModuleNotFoundError:  # core_model_loading is of version 5
        return None


# --- which tensors a folder lacks, or has besides ---


def left_out(model: nn.Module, given: Mapping[str, Source]) -> dict[str, Source]:
    """Returns the tensors of ``given``, a folder's, for which ``model`` has no place. Leaves out
    those that it makes itself."""
    taken = Incoming(model, given, model.state_dict(keep_vars=True)).taken
    return {
        name: source
        for name, source in given.items()
        if name not in taken and not MADE.search(name)
    }


def may_lack(model: nn.Module, name: str) -> bool:
    """Returns whether a transformers model sets ``name`` itself if a folder lacks it, without a
    warning."""
    ignored = [
        *(re.escape(key) + "$" for key in getattr(model, "_keys_to_ignore_on_save", None) or ()),
        *(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()),
    ]
    return is_transformers(model) and any(re.search(pattern, name) for pattern in ignored)


# --- which of the model's tensors are written ---


def names_to_write(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Lists the names under which the tensors of the model's state dict are written: each once, if
    the model will tie it again on loading.

    Tensors with ties that a transformers model does not know are written under each name.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names = [name for name in tensors if name not in ignored]
    without_ties = (
        of_transformers("remove_tied_weights_from_state_dict") if is_transformers(model) else None
    )
    if without_ties is None:
        return _one_of_each(names, tensors, getattr(model, "_tied_weights_keys", None) or ())
    try:
        return list(
            without_ties(
                {name: empty(tensors[name].shape, tensors[name].dtype) for name in names}, model
            )
        )
    except RuntimeError:  # its own save_pretrained fails here, and the values would be lost
        return names


def _one_of_each(
    names: Iterable[str], tensors: Mapping[str, torch.Tensor], tied: Iterable[str]
) -> list[str]:
    """Returns one name of each tensor: the first that the model does not tie to another."""

    def is_tied(name: str) -> bool:
        return any(name == key or name.endswith("." + key) for key in tied)

    return list(
        {
            id(tensors[name]): name for name in sorted(names, key=lambda name: not is_tied(name))
        }.values()
    )


# --- their converted form ---


def hub_sources(model: nn.Module, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Returns the results of the model's own ``save_pretrained`` for ``sources``, named as in its
    state dict; for a model of another library, ``sources``.

    A group is in memory from the first read of its tensors until the last.
    """
    if not is_transformers(model):
        return dict(sources)
    convert = of_transformers("revert_weight_conversion", "core_model_loading")
    if convert is None:
        return {_name_in_version_4(model, name): source for name, source in sources.items()}
    traced = {name: _Traced.make(name, source) for name, source in sources.items()}
    try:
        made: dict[str, torch.Tensor] = convert(model, dict(traced))
    except Exception as error:
        raise ConfigError(
            f"transformers cannot undo its conversions of {type(model).__name__}"
            f" ({type(error).__name__}: {error}): nothing is written"
        ) from error
    groups: dict[str, Group] = {}  # given tensor -> its group
    storages: dict[int, Storage] = {}
    of_hub: dict[str, Source] = {}
    for name, tensor in made.items():
        origins = sorted(_origins(tensor))
        if len(origins) == 1 and traced[origins[0]] is tensor:
            of_hub[name] = sources[origins[0]]
            continue
        if not origins:
            raise ConfigError(
                f"{name} cannot be written: transformers makes it of none of the {len(sources)}"
                " tensors of the model"
            )
        group = _merged(
            [groups[origin] for origin in origins if origin in groups],
            lambda values: convert(model, values),
        )
        group.given.update({origin: sources[origin] for origin in origins})
        group.made.append(name)
        groups.update(dict.fromkeys(group.given, group))
        memory = tensor.untyped_storage()
        storage = storages.setdefault(memory._cdata, Storage(memory.nbytes()))
        of_hub[name] = Source(
            tensor.shape,
            tensor.dtype,
            lambda name=name, of=origins[0]: groups[of].read(name),
            storage,
        )
    return of_hub


def _name_in_version_4(model: nn.Module, name: str) -> str:
    """Returns the name in a folder that transformers 4 writes: another one in some models of
    images and text."""
    kinds = [kind.__name__.lower() for kind in type(model).__mro__[:-1]]
    if any(renamed in kind for kind in kinds for renamed in of_transformers("VLMS") or ()):
        back = {own: theirs for theirs, own in renamed_in_version_4(model).items()}
        for own, theirs in back.items():
            new, count = re.subn(own, re.sub(r"\(.*\)", "", theirs.lstrip("^")), name)
            if count:
                return new
    return name


def _merged(groups: list[Group], convert: Callable) -> Group:
    """Merges groups that have a tensor in common into one."""
    first, *others = dict.fromkeys(groups) or [Group(convert)]
    for other in others:
        first.take_in(other)
    return first


class _Traced(torch.Tensor):
    """A tensor without bytes that records the tensors from which it was made."""

    origins: frozenset[str]

    @staticmethod
    def make(name: str, source: Source) -> _Traced:
        traced = empty(source.shape, source.dtype).as_subclass(_Traced)
        traced.origins = frozenset([name])
        return traced

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        origins = frozenset().union(*map(_origins, tree_leaves((args, kwargs))))
        for made in tree_leaves(result):
            if isinstance(made, _Traced):
                made.origins = origins
        return result


def _origins(value: Any) -> frozenset[str]:
    return getattr(value, "origins", frozenset()) if isinstance(value, _Traced) else frozenset()
