"""Shapes: configurations of known models by name, for plans without a file."""

from __future__ import annotations

from typing import Any

LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
QWEN = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "head_dim": 128,
}
SHAPES: dict[str, dict[str, Any]] = {  # the models' own config.json, as their makers publish them
    "llama-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-70b": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-14b": QWEN
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "qwen3-32b": QWEN
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def config_of(name: str) -> Any | None:
    """Returns the `transformers` configuration of a known model, None if the name is unknown."""
    if name not in SHAPES:
        return None
    import transformers

    fields = dict(SHAPES[name])
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
