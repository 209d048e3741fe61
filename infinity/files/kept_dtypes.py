"""Kept dtypes: the parameters that a transformers model keeps in fp32 when the rest has a 16-bit
dtype.

Routers, correction biases and similar parameters choose experts by small differences, which 16 bits
round away. So ``from_pretrained(dtype=...)`` leaves them in fp32 for any dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def keeps_fp32(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Returns a predicate of parameter names of ``model``: true if the parameter stays in fp32 in a
    model of ``dtype``. None: the model keeps its dtypes, and no name is true."""
    found: list[tuple[str, re.Pattern[str]]] = []
    covered: list[str] = []  # a model's plan covers the models inside it
    for path, module in model.named_modules():
        plan = getattr(module, "_get_dtype_plan", None) if dtype is not None else None
        prefix = f"{path}." if path else ""
        if callable(plan) and not any(prefix.startswith(other) for other in covered):
            covered.append(prefix)
            if patterns := [
                pattern for pattern, kept in plan(dtype).items() if kept == torch.float32
            ]:
                found.append(
                    (
                        prefix,
                        re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns)),
                    )
                )

    def keeps(name: str) -> bool:
        plain = name.replace(".base_layer.", ".")  # PEFT's name for adapted layers
        return any(
            plain.startswith(prefix) and pattern.search(plain.removeprefix(prefix))
            for prefix, pattern in found
        )

    return keeps


def computing_dtypes(
    model: Any, param_dtype: torch.dtype | None
) -> Callable[[torch.Tensor], torch.dtype]:
    """Returns a function from parameters of ``model``, a
    :class:`~infinity.core.wrap.described_model.DescribedModel`, to their compute dtypes:
    ``param_dtype``, or the parameter's own. The own one applies without a ``param_dtype``, to a
    parameter that is not floating point, to one that is kept in fp32, and to those that an
    extension keeps."""
    keeps = keeps_fp32(model.parts[0], param_dtype)
    kept = model.own_dtype | {param for name, param in model.named if keeps(name)}

    def dtype_of(param: torch.Tensor) -> torch.dtype:
        return (
            param.dtype
            if param_dtype is None or param in kept or not param.is_floating_point()
            else param_dtype
        )

    return dtype_of
