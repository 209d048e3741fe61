"""Choices: the values that fields of a Config accept, and the dtypes they name."""

from __future__ import annotations

import torch

AUTO = "auto"  # chosen by what the machine has


class Unset(str):
    """A default, told apart from the same word given by a user. Saved as plain text: str(value)."""


HOMES = ("auto", "device", "host", "nvme")
SHARDED = ("optimizer", "gradients", "parameters")
SAMPLED = "sampled"  # checksums of a part, if a device cannot compute them

MASTERS = ("split", "fp32", "none")
QUANTIZED = [None, "nf4", "int8", "fp8"]  # formats that a wrap can pack weights in
# -> dtype at rest
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
# Of torch.compile, for blocks that are compiled
COMPILE_OPTIONS = ("dynamic", "backend", "mode", "options")
