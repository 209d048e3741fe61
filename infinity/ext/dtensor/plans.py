"""Plans: map each layer of a model to its style of tensor parallelism, derived from the layers'
shapes if the model has no plan.

plan       name of a module, with ``*`` for the number of a block -> style
style      one of STYLES, which are those of transformers' plans
pair       layers from the model's width to another one, then one back. The first are sharded by
           columns and the last by rows, so that no communication is needed between them, and one
           all-reduce follows the last (Shoeybi et al., Megatron-LM, 2019, section 3)
width      features of the tensors between blocks
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...errors import ConfigError

SUMMED = "replicated_with_grad_allreduce"  # of norms of a rank's own heads
STYLES = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "embedding_rowwise",
    "replicate",
    SUMMED,
)
COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
ATTENTION_LAYERS = 3  # minimum of layers from width to width before one counts as the way back
SUMS_OF_HEADS = ("inner_dim", "all_head_size")  # features of all heads together
HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
)


def find_plan(model: nn.Module) -> dict[str, str]:
    """Finds a plan for ``model``: its own, as transformers models have, or by the shapes of its
    layers.

    The result can be changed and given to :func:`tensor_parallel`. Raises ConfigError if no layer
    can be sharded.
    """
    if own := own_plan(model):
        return own
    plan: dict[str, str] = {}
    width = _width(model)
    blocks = list(_blocks(model))
    inside = {module for _, block in blocks for module in block.modules()}
    for name, block in blocks:
        for layer, style in _styles_of_block(name, block, width):
            plan.setdefault(general(layer), style)
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks of linear layers that could be cut:"
            f" give tensor_parallel a plan, {{module name: style}} with styles {', '.join(STYLES)}"
        )
    for name, module in model.named_modules():
        if module in inside or not hasattr(module, "weight"):
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings == _vocabulary(model):
            plan[name] = "embedding_rowwise"
        elif (
            isinstance(module, nn.Linear)
            and module.out_features == _vocabulary(model)
            and module.in_features == width
        ):
            plan[name] = "colwise_gather_output"
    return plan


def own_plan(model: nn.Module) -> dict[str, str]:
    """Reads the plan of a transformers model; empty if there is none."""
    plan = getattr(model, "tp_plan", None)
    return dict(plan) if isinstance(plan, dict) else {}


def general(name: str) -> str:
    """Replaces the numbers in a module's name by ``*``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def expand(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Applies a plan to the modules of ``model``: full name -> style. Raises ConfigError for an
    unknown style or name."""
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ConfigError(f"plan: {pattern} has style {style!r}; there are {', '.join(STYLES)}")
    expanded = {
        name: plan[general(name)]
        for name, _ in model.named_modules()
        if name not in plan and general(name) in plan
    }
    expanded |= {name: plan[name] for name, _ in model.named_modules() if name in plan}
    used = {general(name) for name in expanded} | expanded.keys()
    if missing := [pattern for pattern in plan if pattern not in used]:
        raise ConfigError(f"plan: {missing[0]} is not a module of {type(model).__name__}")
    return expanded


def shape_of(layer: nn.Module) -> tuple[int, int] | None:
    """Returns the input and output features of a linear layer; None for any other module."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if is_conv1d(layer):
        return tuple(layer.weight.shape)
    return None


def is_conv1d(layer: nn.Module) -> bool:
    """Returns whether ``layer`` is GPT-2's linear layer, whose weight has shape [in, out]."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost children of a ModuleList or Sequential with a sibling of the same
    class."""
    seen: set[nn.Module] = set()
    for name, parent in model.named_modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)) and parent not in seen:
            counts = Counter(type(child) for child in parent.children())
            for key, child in parent.named_children():
                if counts[type(child)] > 1 and child not in seen and shape_of(child) is None:
                    seen.update(child.modules())
                    yield f"{name}.{key}" if name else key, child


def _width(model: nn.Module) -> int:
    """Returns the input features of most linear layers of the blocks."""
    counts = Counter(
        shape[0]
        for _, block in _blocks(model)
        for layer in block.modules()
        if (shape := shape_of(layer)) is not None
    )
    return counts.most_common(1)[0][0] if counts else 0


def _vocabulary(model: nn.Module) -> int:
    """Returns the rows of the model's input embedding, else of the largest embedding."""
    # A model without input embeddings.
    with contextlib.suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings().num_embeddings
    return max(
        (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)),
        default=0,
    )


def _styles_of_block(prefix: str, block: nn.Module, width: int) -> Iterator[tuple[str, str]]:
    """Finds the pairs among a block's layers, which are registered in their order of use.

    A layer with several outputs in one product (GPT-2's queries, keys and values) cannot be sharded
    by its columns. It stays whole, and so does the layer that follows.
    """
    columns: list[tuple[str, nn.Module]] = []
    for name, layer in block.named_modules():
        if (shape := shape_of(layer)) is None:
            continue
        whole = f"{prefix}.{name}" if name else prefix
        first = shape_of(columns[0][1]) if columns else None
        is_back = (
            first is not None
            and shape[1] == width
            and (shape[0] != width or len(columns) >= ATTENTION_LAYERS)
        )
        if is_back and shape[0] == first[1]:
            yield from ((column, "colwise") for column, _ in columns)
            yield whole, "rowwise"
            yield from _biases_of_heads(prefix, block, columns)
            columns = []
        elif first is not None and shape == (width, width) and first[1] in (3 * width, 2 * width):
            columns = []  # a layer with several outputs in one product, and the one after it
        elif shape[0] == width:
            columns.append((whole, layer))
        else:
            columns = []


def _biases_of_heads(
    prefix: str, block: nn.Module, columns: list[tuple[str, nn.Module]]
) -> Iterator[tuple[str, str]]:
    """Yields embeddings beside a pair's layers that have a column for each head (T5's relative
    positions)."""
    parent = columns[0][0].rpartition(".")[0]
    module = block.get_submodule(parent.removeprefix(prefix).lstrip("."))
    heads = {
        getattr(module, name) for name in HEADS if isinstance(getattr(module, name, None), int)
    }
    for name, child in module.named_children():
        if isinstance(child, nn.Embedding) and child.embedding_dim in heads:
            yield f"{parent}.{name}", "colwise"


def check_divisible(model: nn.Module, styles: dict[str, str], size: int) -> None:
    """Raises ConfigError if sharded heads or features do not divide by ``size``. A vocabulary may
    leave a remainder."""
    for name, style in styles.items():
        layer = model.get_submodule(name)
        if (shape := shape_of(layer)) is None or style not in ("colwise", "rowwise"):
            continue
        features = shape[1] if style == "colwise" else shape[0]
        if features % size:
            raise ConfigError(
                f"{name}: {features} features cannot be cut into {size} equal parts (tp={size})"
            )
        parent = model.get_submodule(name.rpartition(".")[0])
        for owner in (parent, getattr(parent, "config", None)):
            for attribute in HEADS:
                heads = getattr(owner, attribute, None)
                if (
                    isinstance(heads, int)
                    and heads % size
                    and features % heads == 0
                    and "mlp" not in name
                ):
                    raise ConfigError(
                        f"{name}: {heads} heads ({attribute}) cannot be shared out to {size} ranks"
                        f" (tp={size})"
                    )


def count_heads_here(model: nn.Module, styles: dict[str, str], size: int) -> None:
    """Sets the head counts of every sharded attention to this rank's, if the module stores them."""
    for parent in {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}:
        module = model.get_submodule(parent)
        features = {
            shape[1] for child in module.children() if (shape := shape_of(child)) is not None
        }
        if not any(isinstance(getattr(module, name, None), int) for name in HEADS):
            continue
        for name in (*HEADS, *SUMS_OF_HEADS):
            value = module.__dict__.get(name)
            if isinstance(value, int) and (name in HEADS or value in features):
                setattr(module, name, value // size)


def describe_plan(plan: dict[str, str], model: nn.Module) -> str:
    """Describes a plan as lines of a table, with the fraction of parameters that each rank keeps
    whole."""
    width = max(map(len, plan), default=0)
    cut = {
        param
        for name in expand_known(model, plan)
        for param in model.get_submodule(name).parameters()
    }
    whole = sum(param.numel() for param in model.parameters() if param not in cut)
    total = sum(param.numel() for param in model.parameters())
    lines = [f"  {name:<{width}}  {style}" for name, style in plan.items()]
    return "\n".join(
        [
            f"tensor parallel: {type(model).__name__}",
            *lines,
            f"  {whole / max(1, total):.1%} of the parameters stay whole",
        ]
    )


def expand_known(model: nn.Module, plan: dict[str, str]) -> list[str]:
    """Lists the modules whose parameters ``plan`` shards."""
    return [
        name
        for name, _ in model.named_modules()
        if plan.get(name, plan.get(general(name), "replicate")) != "replicate"
    ]


def styles_of_transformers(model: nn.Module, instead: str) -> Any:
    """Imports the module that applies plans of transformers. Raises ConfigError, which says what
    to do ``instead``, if the version that is installed cannot."""
    try:
        theirs = importlib.import_module("transformers.distributed.tensor_parallel")
        if "tp_plan" in inspect.signature(theirs.apply_tensor_parallelism).parameters:
            return theirs
    except ModuleNotFoundError:
        pass
    version = importlib.import_module("transformers").__version__
    raise ConfigError(
        f"{type(model).__name__} is cut by a plan of transformers, which needs transformers >="
        f" 5.23, and {version} is installed. {instead}"
    )
