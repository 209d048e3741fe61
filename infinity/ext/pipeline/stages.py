"""Stages: splits a model into chunks of its layers. Each chunk's input is the previous one's
output.

chunk   a part of the model with some of its layers, under their names in the model
chain   the layers in the order of a forward; modules before the first layer belong to it, modules
        after the last to that
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError


@dataclass(frozen=True)
class Chain:
    """A model as a chain of layers."""

    model: nn.Module
    layers: list[nn.Module]
    before: list[nn.Module]  # modules with parameters that run before the first layer
    after: list[nn.Module]  # modules with parameters that run after the last layer
    make_chunk: Callable[[range], nn.Module]  # makes the chunk of the layers with these numbers

    def costs(self) -> list[float]:
        """Estimates the cost of each layer by its parameters that every token is multiplied by; a
        lookup table costs nothing."""
        costs = [float(_weighing(layer)) for layer in self.layers]
        costs[0] += sum(_weighing(module) for module in self.before)
        costs[-1] += sum(_weighing(module) for module in self.after)
        return costs


def chain_of(model: nn.Module) -> Chain:
    """Finds the chain of a Sequential, of a causal language model of transformers, or of a model
    with torchtitan's parts.

    Raises ConfigError for any other model, naming the requirements.
    """
    if isinstance(model, nn.Sequential):
        return Chain(model, list(model), [], [], lambda numbers: _cut_sequential(model, numbers))
    if type(model).__module__.startswith("transformers.") or hasattr(model, "base_model_prefix"):
        return _chain_of_causal_model(model)
    if all(hasattr(model, name) for name in ("tok_embeddings", "layers", "norm", "output")):
        before, after = [model.tok_embeddings], [model.norm, model.output]
        return Chain(
            model,
            list(model.layers.children()),
            before,
            after,
            lambda numbers: _cut_titan(model, numbers),
        )
    raise ConfigError(
        f"{type(model).__name__} is not a known chain of layers: pipeline cuts nn.Sequential,"
        " causal language models of transformers, and models with tok_embeddings, layers, norm and"
        " output as torchtitan's have. Build the stages yourself, give wrap_model their list, and"
        " attach the schedule."
    )


def _weighing(module: nn.Module) -> int:
    tables = {
        param
        for each in module.modules()
        if isinstance(each, nn.Embedding)
        for param in each.parameters()
    }
    used = {
        p
        for each in module.modules()
        if not isinstance(each, nn.Embedding)
        for p in each.parameters(recurse=False)
    }
    return sum(
        param.numel() for param in {*module.parameters()} if param in used or param not in tables
    )


def _shallow(module: nn.Module) -> nn.Module:
    """Returns a module with the same children, parameters and buffers, each of which can be
    replaced."""
    made = copy.copy(module)
    for name, value in module.__dict__.items():
        if isinstance(value, (dict, set)):  # children, parameters, buffers, and its hooks
            made.__dict__[name] = copy.copy(value)
    return made


def _some(container: nn.Module, numbers: range) -> nn.Module:
    """Returns ``container`` with only the children of these numbers, under their names."""
    made, children = _shallow(container), list(container._modules.items())
    made._modules = {name: child for name, child in (children[number] for number in numbers)}
    return made


def _cut_sequential(model: nn.Sequential, numbers: range) -> nn.Module:
    return _some(model, numbers)


def _cut_titan(model: nn.Module, numbers: range) -> nn.Module:
    """Returns a chunk; torchtitan's forwards skip parts that are None."""
    made = _shallow(model)
    made._modules["layers"] = _some(model.layers, numbers)
    for name in () if numbers.start == 0 else ("tok_embeddings",):
        made._modules[name] = None
    for name in () if numbers.stop == len(model.layers) else ("norm", "output"):
        made._modules[name] = None
    return made


# --- causal language models of transformers ---


def _chain_of_causal_model(model: nn.Module) -> Chain:
    base = getattr(model, model.base_model_prefix, None)
    depth = getattr(model.config, "num_hidden_layers", 0)
    lists = [
        (name, child)
        for name, child in (base.named_children() if base is not None else ())
        if isinstance(child, nn.ModuleList) and len(child) == depth
    ]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if len(lists) != 1 or head is None or not hasattr(model, "loss_function"):
        raise ConfigError(
            f"{type(model).__name__} is not cut here: it needs a"
            f" {model.base_model_prefix or 'base model'} with one list of its {depth} layers, and"
            " a head. Encoder-decoders and models with skip connections between layers have to be"
            " brought as stages."
        )
    if getattr(model.config, "output_router_logits", False) and getattr(
        model.config, "router_aux_loss_coef", 0
    ):
        raise ConfigError(
            f"{type(model).__name__} adds a loss of its routers (output_router_logits=True), of"
            " which the last stage sees only its own layers': set config.output_router_logits ="
            " False"
        )
    name, layers = lists[0]
    children = dict(base.named_children())
    early = list(children)[: list(children).index(name)]
    holding = [child for child in children if next(children[child].parameters(), None) is not None]
    before = {
        child: children[child] for child in holding if child in early and not _is_final(child)
    }
    after = {child: children[child] for child in holding if child not in before and child != name}
    dropouts = {
        child: children[child] for child in early if isinstance(children[child], nn.Dropout)
    }

    def cut(numbers: range) -> nn.Module:
        return _cut_causal_model(model, name, {**before, **dropouts}, after, numbers)

    if depth > 1:
        _check_passes_on(model, cut(range(1, 1)))
    return Chain(model, list(layers), list(before.values()), [*after.values(), head], cut)


@torch.no_grad()
def _check_passes_on(model: nn.Module, empty: nn.Module) -> None:
    """Raises ConfigError if a chunk without layers changes its input: each stage would repeat an
    operation that the model does once (Gemma scales its embeddings in the forward of the whole)."""
    base = copy.deepcopy(getattr(empty, empty.base_model_prefix))
    if any(buffer.is_meta for buffer in base.buffers()):
        base.to_empty(device="cpu")
        for buffer in base.buffers():
            buffer.zero_()
    x = torch.linspace(-1, 1, 2 * model.config.get_text_config().hidden_size).view(1, 2, -1)
    output = base.to("cpu").eval()(inputs_embeds=x, use_cache=False)
    if not torch.equal(
        output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0], x
    ):
        raise ConfigError(
            f"{type(model).__name__} changes what passes between its layers outside of them, so"
            " that every stage would do it once more: bring the stages yourself, give wrap_model"
            " their list, and attach the schedule"
        )


def _is_final(name: str) -> bool:
    """Returns whether a module's name shows that it follows the layers, although it is registered
    before them, such as OPT's norm."""
    return name.startswith(("final_", "ln_f"))


def _cut_causal_model(
    model: nn.Module, name: str, before: dict, after: dict, numbers: range
) -> nn.Module:
    made, base = _shallow(model), _shallow(getattr(model, model.base_model_prefix))
    first, last = numbers.start == 0, numbers.stop == len(base._modules[name])
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = getattr(table, "weight", None) is getattr(head, "weight", head)
    made._modules[model.base_model_prefix] = base
    base._modules[name] = _some(base._modules[name], numbers)
    base.config = copy.copy(base.config)
    if vars(base.config).get("layer_types"):  # not those that a class computes
        base.config.layer_types = base.config.layer_types[numbers.start : numbers.stop]
    for child, module in before.items() if not first else ():
        if module is table:
            # The last chunk keeps a tied table for its head, under both names of the whole model.
            base._modules[child] = table if last and is_tied else None
        else:
            base._modules[child] = _Zero() if isinstance(module, nn.Embedding) else nn.Identity()
    for child in after if not last else ():
        base._modules[child] = nn.Identity()
    if not last:
        for child in [child for child, module in made.named_children() if module is head]:
            made._modules[child] = None
    made.forward = types.MethodType(_forward_of(type(model), first, last), made)
    return made


def _forward_of(kind: type, first: bool, last: bool) -> Callable:
    def forward(self: nn.Module, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        arguments = {"input_ids" if first else "inputs_embeds": x, "use_cache": False, **kwargs}
        output = (
            kind.forward(self, **arguments)
            if last
            else getattr(self, self.base_model_prefix)(**arguments)
        )
        given_on = (
            output.logits
            if last
            else output.last_hidden_state
            if hasattr(output, "last_hidden_state")
            else output[0]
        )
        # torch's schedules detach it in place, which a view does not allow.
        return given_on.clone() if given_on._is_view() else given_on

    return forward


class _Zero(nn.Module):
    """Replaces a table of positions, which the first chunk has already added."""

    def forward(self, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        # Zero-dimensional: adding it keeps the other dtype.
        return torch.zeros((), device=positions.device)
