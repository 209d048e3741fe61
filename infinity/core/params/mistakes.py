"""Mistakes: finds the known function that used a parameter at home, and what to do instead.

The operation alone shows little: the optimizer given to wrap_model fails in ``zeros_like``, a new
embedding size in ``mean``. The running function of a known library shows the intent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType, FrameType

import torch

UNWRAP = (
    "Call model, optimizer = infinity.unwrap_model(model, optimizer) first, do it, and wrap again."
)
USE_FULL_PARAMS = "Read or change it inside `with infinity.full_params(model, [{!r}]) as params:`."

# End of a path, names of functions there (none: any) -> the mistake, and what to do. The innermost
# frame that matches counts.
MISUSES: list[tuple[str, frozenset[str], str]] = [
    (path, frozenset(names.split()), advice)
    for path, names, advice in [
        (
            "torch/nn/parallel/distributed.py",
            "",
            (
                "DistributedDataParallel was put around a wrapped model: the engine averages"
                " gradients over the ranks itself. Call infinity.wrap_model on every rank and leave"
                " DistributedDataParallel out."
            ),
        ),
        (
            "torch/distributed/fsdp/",
            "",
            (
                "FSDP was put around a wrapped model: the engine shards over the ranks itself."
                " Leave FSDP out."
            ),
        ),
        (
            "torch/distributed/checkpoint/state_dict.py",
            "",
            (
                "Use model.state_dict() and optimizer.state_dict(), or"
                " infinity.save_checkpoint(path, model, optimizer)."
            ),
        ),
        (
            "torch/optim/swa_utils.py",
            "",
            (
                "An average of weights at home is infinity.ema(model, decay) or"
                " infinity.swa(model), whose update() follows each step; or read them step by step:"
                " with torch.no_grad(), infinity.full_params(model) as params."
            ),
        ),
        (
            "diffusers/training_utils.py",
            "",
            (
                "An average of weights at home is infinity.ema(model, decay), whose update()"
                " follows each step; EMAModel copies every weight."
            ),
        ),
        (
            "torch/optim/",
            "step _init_group",
            (
                "This is not the optimizer that wrap_model returned: it would need the weights at"
                " home. Take the result, model, optimizer = infinity.wrap_model(model, optimizer,"
                " config), and step that optimizer. A later optimizer over a wrapped model is given"
                " to wrap_model, too."
            ),
        ),
        (
            "peft/",
            (
                "merge merge_and_unload _unload_and_optionally_merge merge_adapter unmerge_adapter"
                " get_delta_weight"
            ),
            (
                "Adapters are merged into weights at home by"
                " infinity.integrations.merge_adapters(model), and into files by save_merged(model,"
                " folder)."
            ),
        ),
        (
            "transformers/modeling_utils.py",
            (
                "resize_token_embeddings _resize_token_embeddings _get_resized_embeddings"
                " resize_embeddings"
            ),
            f"The embeddings' size is fixed while the model is wrapped. {UNWRAP}",
        ),
        (
            "torch/export/",
            "",
            f"A wrapped model cannot be exported: its weights are not in memory. {UNWRAP}",
        ),
        (
            "torch/onnx/",
            "",
            f"A wrapped model cannot be exported: its weights are not in memory. {UNWRAP}",
        ),
        (
            "torch/jit/",
            "",
            (
                "A wrapped model cannot be traced or scripted: its weights are not in memory."
                f" {UNWRAP}"
            ),
        ),
        ("torch/nn/utils/prune.py", "", f"Prune before wrap_model. {UNWRAP}"),
        ("torch/nn/utils/weight_norm.py", "", f"Parametrise before wrap_model. {UNWRAP}"),
        ("torch/nn/utils/spectral_norm.py", "", f"Parametrise before wrap_model. {UNWRAP}"),
        ("torch/nn/utils/parametrizations.py", "", f"Parametrise before wrap_model. {UNWRAP}"),
        ("torch/nn/utils/parametrize.py", "", f"Parametrise before wrap_model. {UNWRAP}"),
        ("torch/ao/quantization/", "", f"Quantise a plain model. {UNWRAP}"),
        (
            "torch/nn/modules/module.py",
            "half float double bfloat16 to type cuda cpu to_empty share_memory",
            (
                "The model's dtype and device are fixed while it is wrapped. Choose them before:"
                " infinity.Config(param_dtype='bf16', device='cuda') or model.to(...) before"
                " wrap_model."
            ),
        ),
        (
            "torch/nn/parameter.py",
            "__new__",
            (
                "A Parameter of its own is made of a copy: torch.nn.Parameter(weight.clone())"
                " inside a forward, or of what infinity.full_params(model, names) gives."
            ),
        ),
    ]
]
DEEPEST = 60  # frames that are searched


# Of these only the copies are mistakes: what they read and write of parameters works.
ONLY_COPIES = ("torch/optim/swa_utils.py", "diffusers/training_utils.py")


def advice(param: torch.Tensor | None = None) -> str:
    """Returns a hint for the calling library, or for ``param`` if its module was called alone; else
    an empty string."""
    for said, _ in _running(sys._getframe(1)):
        return said
    return "" if param is None else called_alone(param)


def is_misuse() -> bool:
    """Tells whether a function is running that may not use parameters at home."""
    return any(not only_copies for _, only_copies in _running(sys._getframe(1)))


def _running(frame: FrameType | None) -> Iterator[tuple[str, bool]]:
    """Yields the hints for the known functions that are running, the innermost first, and whether
    only copies are mistakes."""
    for _ in range(DEEPEST):
        if frame is None:
            return
        if (misuse := _misuse(frame.f_code)) is not None:
            yield misuse
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _misuse(code: CodeType) -> tuple[str, bool] | None:
    path = code.co_filename.replace(os.sep, "/")
    for misuse, names, said in MISUSES:
        if f"/{misuse}" in path and (not names or code.co_name in names):
            return said, misuse in ONLY_COPIES
    return None


def is_called_from(path: str, name: str = "") -> bool:
    """Tells whether a function of the file that ends in ``path`` is running; of a ``name``, if
    given."""
    return caller(path, name) is not None


def called_alone(param: torch.Tensor) -> str:
    """Returns a hint if a module that has ``param`` was called by itself; else an empty string."""
    frame = caller("torch/nn/modules/module.py", "_call_impl")
    module = frame.f_locals.get("self") if frame is not None else None
    if module is None or all(owned is not param for owned in module.parameters()):
        return ""
    kind = type(module).__name__
    return (
        f"This {kind} was called by itself, and its weights come with a larger part of the model."
        " Call the model, or that part, and take what is inside by a forward hook"
        f" (register_forward_hook); or have every {kind} be a part of its own:"
        f" Config(units=[{kind!r}])"
    )


def caller(path: str, name: str = "") -> FrameType | None:
    """Returns the innermost frame of such a function, or None."""
    frame = sys._getframe(1)
    for _ in range(DEEPEST):
        if frame is None:
            return None
        if frame.f_code.co_filename.replace(os.sep, "/").endswith(path) and name in (
            "",
            frame.f_code.co_name,
        ):
            return frame
        frame = frame.f_back
    return None


CALL = "wrap_model(model, optimizer, config)"


def instead_of_model(argument: object) -> str:
    """Returns what to give wrap_model instead of something that is not a model."""
    if isinstance(argument, torch.optim.Optimizer):
        return f"the model comes first, {CALL}"
    if isinstance(argument, (str, os.PathLike)):
        return "build it first, as with AutoModelForCausalLM.from_pretrained"
    return f"give the model itself, {CALL}"


def instead_of_optimizer(argument: object) -> str:
    """Returns what to give wrap_model instead of something that is not an optimizer."""
    if isinstance(argument, (Mapping, str, os.PathLike)):
        return f"the configuration comes third, {CALL}"
    if isinstance(argument, type):
        return f"make one of it, {argument.__name__}(model.parameters(), lr=...)"
    return f"give the optimizer itself, or None to train nothing, {CALL}"
