"""Batch shapes: the parts of the batches that a pipeline runs without flush, and their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UsageError

# Names, shapes and dtypes of a batch's tensors.
Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def shapes_of(batches: list[Any], schedule: Any) -> Shapes:
    """Returns the shapes of each of ``batches``, as far as this stage has them. Raises UsageError
    if torch's buffers, which are shared by all, would not fit every micro-batch."""
    stage, count = schedule._stage, schedule._n_microbatches
    shapes: set[Shapes] = set()
    for number, batch in enumerate(batches):
        if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
            raise UsageError(
                f"run() takes batches (inputs, target) or (inputs, target, kwargs): batch {number}"
                f" is a {type(batch).__name__}"
            )
        args, kwargs, target = parts_of(batch)
        tensors = [("inputs", each) for each in (args if stage.is_first else ())] + [
            ("target", target)
        ] * stage.is_last
        for name, value in tensors:
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"run(): the {name} of batch {number} are a {type(value).__name__}, not a"
                    " tensor, on a stage that needs them"
                )
            if len(value) % count:
                raise UsageError(
                    f"run(): batch {number} of {len(value)} does not divide into {count}"
                    " micro-batches: give a multiple"
                )
        tensors += [
            (name, value) for name, value in kwargs.items() if isinstance(value, torch.Tensor)
        ]
        shapes.add(tuple((name, tuple(value.shape), value.dtype) for name, value in tensors))
    if len(shapes) > 1:
        raise UsageError(
            f"run() takes batches of one shape, these have {len(shapes)}: run those of each shape"
            " by themselves"
        )
    shape_of_batch = next(iter(shapes), ())
    _check_declared(
        stage,
        [(shape[0] // count, *shape[1:]) for name, shape, _ in shape_of_batch if name == "inputs"],
    )
    return shape_of_batch


def _check_declared(stage: Any, shapes: list[tuple[int, ...]]) -> None:
    """Raises UsageError if a first ``stage`` was built for inputs of other ``shapes``: torch does
    not ask the stages then."""
    declared = getattr(stage, "_user_meta", None)
    if not shapes or declared is None or not declared.inputs or not declared.outputs:
        return
    fixed = [tuple(each.shape) for each in declared.inputs]
    if fixed != shapes:
        raise UsageError(
            f"run(): micro-batches of shapes {shapes} for a stage that was built for {fixed}: build"
            " PipelineStage without input_args and output_args, and batches may have any shape"
        )


def parts_of(batch: Sequence[Any]) -> tuple[tuple, dict[str, Any], Any]:
    """Returns the inputs, the keyword arguments and the target of ``batch``."""
    inputs, target, *rest = batch
    return inputs if isinstance(inputs, tuple) else (inputs,), dict(rest[0]) if rest else {}, target
