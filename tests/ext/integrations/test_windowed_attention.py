"""Neighborhood attention as an attention of transformers, as docs/attention.md shows it."""

from __future__ import annotations

import pytest
import torch

import infinity

transformers = pytest.importorskip("transformers")
WINDOW, TOKENS = 16, 80


def windowed(module, query, key, value, attention_mask, **kwargs):
    n = query.shape[2]
    out = infinity.neighborhood_attention(
        query, key, value, shape=n, window=min(WINDOW, n), causal=True
    )
    return out.transpose(1, 2), None


def loss_and_gradients(**more) -> list[torch.Tensor]:
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **more,
    )
    torch.manual_seed(5)
    model = transformers.Qwen3ForCausalLM(config)
    tokens = torch.randint(0, 64, (2, TOKENS))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


def test_a_causal_window_is_transformers_sliding_window():
    """Method: a Qwen3 of two layers, its loss and every gradient, grouped heads. Twin: without a
    window they are others."""
    transformers.AttentionInterface.register("windowed", windowed)
    found = loss_and_gradients(attn_implementation="windowed")
    sliding = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2}
    right = loss_and_gradients(attn_implementation="sdpa", use_sliding_window=True, **sliding)
    for ours, theirs in zip(found, right):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert (loss_and_gradients(attn_implementation="sdpa")[0] - found[0]).abs() > 1e-5
