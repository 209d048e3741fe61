"""Shapes: configurations of known models by name, for plans without a file."""

from __future__ import annotations

from pathlib import Path
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


def find_config(model: Path | None, *, trust: bool = False) -> Any:
    """Returns the `transformers` configuration of a file or folder, of a known model, or of a name
    on the Hugging Face hub; None: of the built-in model. Raises ConfigError if there is none."""
    from ..train.model import CONFIG_PATTERNS, find_model, read_model_config

    if model is not None and not model.exists():
        if str(model) in SHAPES:
            return _config_of(dict(SHAPES[str(model)]))
    if model is not None:
        model = find_model(model, patterns=CONFIG_PATTERNS, known=SHAPES, weights=False)
    return read_model_config(model, trust=trust)


def _config_of(fields: dict[str, Any]) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
