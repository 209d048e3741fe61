"""Choices: lists the words that fields of a Config accept, and the dtypes they stand for."""

from __future__ import annotations

import torch

AUTO = "auto"  # what is not chosen by the user, but by what is there

HOMES = ("auto", "device", "host", "nvme")
SHARDED = ("optimizer", "gradients", "parameters")
REDUCTIONS = ("ordered", "fast")
SAMPLED = "sampled"  # checksums, where a device cannot take them

MASTERS = ("split", "fp32", "none")
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}  # -> dtype at rest
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
