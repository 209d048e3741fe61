"""The optimizer of a DeepSpeed JSON: its class and hyperparameters in torch's terms.

DeepSpeed builds the optimizer from the JSON; here the caller builds it. The JSON's optimizer is
kept in ``Config.expects_optimizer``, and :func:`infinity.wrap_model` refuses a different one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError

AUTO = "auto"
NUMBERS = {  # hyperparameters of each class that an update uses
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Lion": ("lr", "betas", "weight_decay"),
}
FIXED = {"bias_correction": True, "amsgrad": False, "maximize": False}  # as in the engine's kernels
NOT_NEEDED = (
    "torch_adam",
    "adam_w_mode",
    "fp32_optimizer_states",
    "foreach",
    "fused",
    "set_grad_none",
)


def read_optimizer(
    kind: Any, params: Mapping, *, unknown: Callable[[str, str, list[str]], None]
) -> dict[str, Any]:
    """Reads ``optimizer.type`` and ``optimizer.params``. Calls ``unknown`` for an unknown
    hyperparameter. Raises ConfigError for a class or value that is not supported."""
    names = {name.lower(): name for name in NUMBERS}
    if not isinstance(kind, str) or kind.lower() not in names:
        raise ConfigError(
            f"DeepSpeed optimizer.type={kind!r} is not to be had here: {', '.join(NUMBERS)} are."
            " Leave it out."
        )
    name = names[kind.lower()]
    is_adam = name in ("Adam", "AdamW")
    if name == "Adam" and params.get("adam_w_mode", True) is True:
        name = "AdamW"  # DeepSpeed's Adam decouples weight decay unless adam_w_mode is false
    expected: dict[str, Any] = {"type": name}
    if is_adam and params.get("torch_adam") is not True:
        expected["weight_decay"] = 0.0  # DeepSpeed's default, which is not torch's
    for key, value in params.items():
        if key in NUMBERS[name]:
            expected.pop(key, None)
            if value != AUTO:
                expected[key] = _number(key, value)
        elif key in FIXED:
            if value not in (FIXED[key], AUTO, None):
                raise ConfigError(
                    f"DeepSpeed optimizer.params.{key}={value!r} is not to be had here. Leave it"
                    " out."
                )
        elif key == "max_grad_norm":
            raise ConfigError(
                "DeepSpeed optimizer.params.max_grad_norm is not taken by DeepSpeed either: give"
                " gradient_clipping"
            )
        elif key not in NOT_NEEDED:
            unknown("optimizer.params.", key, [*NUMBERS[name], *FIXED, *NOT_NEEDED])
    return expected


def _number(key: str, value: Any) -> Any:
    if key == "nesterov" and isinstance(value, bool):
        return value
    values = value if key == "betas" else [value]
    if not isinstance(values, (list, tuple)) or not all(
        isinstance(n, (int, float)) and not isinstance(n, bool) for n in values
    ):
        raise ConfigError(f"DeepSpeed optimizer.params.{key}={value!r} is not a number")
    return tuple(map(float, values)) if key == "betas" else float(value)
