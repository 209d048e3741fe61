"""Parts: one module made of several parts of one model, given to wrap_model as a list."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn


class Parts(nn.Module):
    """Holds several modules as one, each parameter under the name that it has in its part.

    If parts have the same names for different tensors (two Sequentials), their number is prefixed:
    ``0.weight`` of the second one is ``1.0.weight``. Never called: the parts are.
    """

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.__dict__["merged_of"] = {}
        self.__dict__["parts"] = list(parts)  # no children: their children are ours
        # Draws the values of a model on meta: a transformers model's own.
        if callable(
            draw := next(
                (part._init_weights for part in parts if hasattr(part, "_init_weights")), None
            )
        ):
            self.__dict__["_init_weights"] = draw
        tensors: dict[str, object] = {}
        named = (each for part in parts for each in part.named_parameters())
        if any(tensors.setdefault(name, param) is not param for name, param in named):
            for number, part in enumerate(parts):
                self._modules[str(number)] = part
        else:
            _merge(self, parts, self.__dict__["merged_of"])


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Lists the modules of ``model`` that are called from outside: itself, or the parts that it
    holds."""
    return model.__dict__["parts"] if isinstance(model, Parts) else [model]


def merged_in(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Returns the modules of ``model`` that others are merged into, and these."""
    return model.__dict__["merged_of"] if isinstance(model, Parts) else {}


def _merge(
    into: nn.Module, modules: Sequence[nn.Module], merged_of: dict[nn.Module, list[nn.Module]]
) -> None:
    """Merges ``modules``, the same module in several parts, into ``into``. They then share one dict
    of parameters, so that replacing a tensor there replaces it for all. If buffers have one name,
    the first keeps it."""
    merged_of[into] = list(modules)
    for module in modules:
        into._parameters.update(module._parameters)
        module._parameters = into._parameters
        renamed = [
            name
            for name, buffer in module._buffers.items()
            if into._buffers.get(name, buffer) is not buffer
        ]
        for name in renamed:
            into._buffers[_free(name, into._buffers)] = module._buffers[name]
        into._buffers.update(
            {name: buffer for name, buffer in module._buffers.items() if name not in renamed}
        )
        into._non_persistent_buffers_set |= module._non_persistent_buffers_set
        if not renamed:
            module._buffers = into._buffers
    for name in dict.fromkeys(name for module in modules for name in module._modules):
        children = dict.fromkeys(
            child for module in modules if (child := module._modules.get(name)) is not None
        )
        holding = [
            child
            for child in children
            if next(child.parameters(), None) is not None or next(child.buffers(), None) is not None
        ] or list(children)[:1]
        if len(holding) == 1:
            into._modules[name] = holding[0]
        elif holding:
            kinds = {type(child) for child in holding}
            kind = next(
                (kind for kind in (nn.ModuleList, nn.ModuleDict, nn.Sequential) if kinds == {kind}),
                nn.Module,
            )
            into._modules[name] = node = kind()
            _merge(node, holding, merged_of)


def _free(name: str, taken: Collection[str]) -> str:
    number = 1
    while f"{name}~{number}" in taken:
        number += 1
    return f"{name}~{number}"
