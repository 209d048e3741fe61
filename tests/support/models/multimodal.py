"""Tiny models of images and text: their configurations, and folders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 320
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
OF_IMAGES = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302}
# Type -> what differs in the text's part, in the vision's, and in the whole.
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
                "mrope_interleaved": True,
            },
        },
        {"depth": 1, "num_heads": 4, "out_hidden_size": 32, "num_position_embeddings": 16},
        OF_IMAGES,
    ),
    "qwen2_vl": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}},
        {"depth": 1, "embed_dim": 32, "num_heads": 4},
        OF_IMAGES,
    ),
    "mllama": (  # layers that read images lie between those of text
        {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_scaling": None},
        {
            "num_global_layers": 1,
            "attention_heads": 4,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
        {"image_token_index": 300},
    ),
    "gemma3": (  # the head is tied
        {"model_type": "gemma3_text", "sliding_window": 16},
        {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "image_token_index": 300},
    ),
    "llava": (
        {"model_type": "llama"},
        {"model_type": "clip_vision_model"},
        {"image_token_index": 300},
    ),
    "llava_next": (
        {"model_type": "llama"},
        {"model_type": "clip_vision_model"},
        {"image_token_index": 300, "image_grid_pinpoints": [[28, 56], [56, 28]]},
    ),
    "mistral3": (
        {"model_type": "mistral"},
        {"model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 300, "vision_feature_layer": -1},
    ),
    "aya_vision": (
        {"model_type": "cohere2", "layer_types": ["full_attention"] * 2},
        {"model_type": "siglip_vision_model"},
        {"image_token_index": 300, "vision_feature_layer": -1},
    ),
    "qwen2_5_vl": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}},
        {"depth": 1, "num_heads": 4, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
        OF_IMAGES,
    ),
    "qwen3_vl": (
        {
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
        },
        {"depth": 1, "num_heads": 4, "out_hidden_size": 32, "num_position_embeddings": 16}
        | {"deepstack_visual_indexes": [0]},
        OF_IMAGES,
    ),
    "smolvlm": ({"model_type": "llama"}, {}, {"image_token_id": 300, "scale_factor": 2}),
    "internvl": (
        {"model_type": "qwen2"},
        {"image_size": [28, 28], "patch_size": [7, 7]},
        {"image_token_id": 300, "image_seq_length": 4},
    ),
    "gemma4": (
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 8,
            "sliding_window": 16,
        },
        {"num_key_value_heads": 4, "head_dim": 8, "patch_size": 14, "pooling_kernel_size": 2}
        | {"position_embedding_size": 64},
        {"image_token_id": 300, "audio_config": None},
    ),
    "llava_onevision": (
        {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model"},
        {"image_token_index": 300, "image_grid_pinpoints": [[28, 56], [56, 28]]},
    ),
    "idefics3": ({"model_type": "llama"}, {}, {"image_token_id": 300, "scale_factor": 2}),
    "paligemma": (
        {"model_type": "gemma"},
        {"model_type": "siglip_vision_model", "projection_dim": 32},
        {"image_token_index": 300, "projection_dim": 32},
    ),
}


def config_of(kind: str) -> Any:
    """Makes the configuration of a tiny model of a type."""
    text, vision, whole = CONFIGS[kind]
    return transformers.AutoConfig.for_model(
        kind, text_config=TEXT | text, vision_config=VISION | vision, **whole
    )


def build(kind: str) -> Any:
    """Builds a tiny model of a type, with fresh weights."""
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config_of(kind))


def save(kind: str, folder: Path) -> Path:
    """Saves a tiny model of a type, with a file of its processor."""
    build(kind).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder
