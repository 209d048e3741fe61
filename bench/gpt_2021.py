"""gpt_2021: a GPT with the kernels that Megatron-LM had for attention in 2021. A folder with a
copy of this file is a model of `--trust-remote-code`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, Starcoder2ForCausalLM

NAME, DROPOUT = "megatron_2021", 0.1  # Megatron-LM's default


class GPT2021(Starcoder2ForCausalLM):
    """A Starcoder2: LayerNorm, GELU and an MLP four times as wide, as GPT has them."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention by two products, between them one kernel that scales, masks and takes the
    softmax, and one that drops. For plans on meta: its kernels mask nothing."""
    samples, heads, length, width = query.shape
    q, k, v = (each.reshape(-1, length, width) for each in (query, key, value))
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0.0, alpha=scaling)
    kept = torch.native_dropout(torch.softmax(scores, -1), DROPOUT, True)[0]
    found = torch.bmm(kept, v).view(samples, heads, length, width)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
