"""Tiny folders of models of images and text, with their processors, and pictures for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import multimodal
import torch
import transformers

EDGE = 28  # pixels of the edge of a picture
SQUARE = {"height": EDGE, "width": EDGE}
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>"]
# What a conversation becomes, with "%s" in the place of a picture
TEMPLATE = (
    "{%% for m in messages %%}<|{{ m.role }}|>{%% if m.content is string %%}{{ m.content }}"
    "{%% else %%}{%% for part in m.content %%}{%% if part.type == 'image' %%}%s{%% else %%}"
    "{{ part.text }}{%% endif %%}{%% endfor %%}{%% endif %%}<|end|>{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"
)
PIXTRAL = {"image_token": "[IMG]", "image_break": "[IMG_BREAK]", "image_end": "[IMG_END]"}
QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
GEMMA = {"image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default"}
# Kind -> class of its processor, of its pictures' one, their arguments, the tokenizer's tokens,
# and what the template writes for a picture.
PROCESSORS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, str], str]] = {
    "llava": (
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"size": {"shortest_edge": EDGE}, "crop_size": SQUARE},
        LLAVA | {"num_additional_image_tokens": 1},
        {"image_token": "<image>"},
        "<image>",
    ),
    "llava_next": (
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {
            "size": {"shortest_edge": EDGE},
            "crop_size": SQUARE,
            "image_grid_pinpoints": [[EDGE, 2 * EDGE], [2 * EDGE, EDGE]],
        },
        LLAVA | {"num_additional_image_tokens": 1},
        {"image_token": "<image>"},
        "<image>",
    ),
    "gemma3": (
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": SQUARE},
        {"image_seq_length": 4},
        GEMMA,
        "<boi>",
    ),
    "paligemma": (
        "PaliGemmaProcessor",
        "SiglipImageProcessor",
        {"size": SQUARE, "image_seq_length": 4},
        {},
        {"image_token": "<image>"},
        "<image>",
    ),
    "idefics3": (
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        {
            "size": {"longest_edge": EDGE},
            "max_image_size": {"longest_edge": EDGE},
            "do_image_splitting": False,
        },
        {"image_seq_len": 1},
        {"image_token": "<image>"},
        "<image>",
    ),
    "mistral3": (
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 2 * EDGE}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2},
        PIXTRAL,
        "[IMG]",
    ),
    "aya_vision": (
        "AyaVisionProcessor",
        "GotOcr2ImageProcessor",
        {"size": SQUARE, "crop_to_patches": False},
        {"patch_size": 14, "img_size": EDGE, "downsample_factor": 2},
        {
            "image_token": "<image>",
            "a": "<|START_OF_IMG|>",
            "b": "<|END_OF_IMG|>",
            "c": "<|IMG_PATCH|>",
            "d": "<|IMG_LINE_BREAK|>",
        },
        "<image>",
    ),
    "mllama": (
        "MllamaProcessor",
        "MllamaImageProcessor",
        {"size": SQUARE, "max_image_tiles": 1},
        {},
        {"image_token": "<|image|>", "python_tag": "<|python_tag|>"},
        "<|image|>",
    ),
    "smolvlm": (
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        {
            "size": {"longest_edge": EDGE},
            "max_image_size": {"longest_edge": EDGE},
            "do_image_splitting": False,
        },
        {"image_seq_len": 1},
        {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
        | {"global_image_token": "<global-img>", "video_token": "<video>"}
        | {"end_of_utterance_token": "<end_of_utterance>"},
        "<image>",
    ),
    "internvl": (
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": SQUARE, "crop_to_patches": False},
        {"image_seq_length": 4},
        {
            "image_token": "<IMG_CONTEXT>",
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
    ),
    "gemma4": (
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        {"patch_size": 14, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        {"image_seq_length": 70},
        GEMMA
        | {"image_token": "<|image|>", "audio_token": "<|audio|>"}
        | {"boa_token": "<|audio>", "eoa_token": "<audio|>"},
        "<|image|>",
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        {"size": SQUARE, "image_grid_pinpoints": [[EDGE, 2 * EDGE], [2 * EDGE, EDGE]]},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        {"image_token": "<image>", "video_token": "<video>"},
        "<image>",
    ),
    **{
        kind: (
            name,
            "Qwen2VLImageProcessor",
            {"size": {"shortest_edge": 4 * EDGE * EDGE, "longest_edge": 16 * EDGE * EDGE}}
            | {"patch_size": 14},
            {},
            QWEN,
            "<|vision_start|><|image_pad|><|vision_end|>",
        )
        for kind, name in {
            "qwen2_vl": "Qwen2VLProcessor",
            "qwen2_5_vl": "Qwen2_5_VLProcessor",
            "qwen3_vl": "Qwen3VLProcessor",
            "qwen3_5": "Qwen3VLProcessor",
        }.items()
    },
}
VIDEOS = {  # kinds whose processor is of videos, too, which needs torchvision
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "gemma4": "Gemma4VideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
}


def tokenizer_of(tokens: dict[str, str]) -> Any:
    """Makes a tokenizer of bytes that has special tokens, by their attributes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=tokens,
        additional_special_tokens=SPECIAL,
    )


def processor_of(kind: str) -> Any:
    """Makes the processor of a kind."""
    name, images, how, own, tokens, shown = PROCESSORS[kind]
    tokenizer = tokenizer_of(tokens)
    others = {"video_processor": getattr(transformers, VIDEOS[kind])()} if kind in VIDEOS else {}
    if kind == "gemma4":
        others["feature_extractor"] = transformers.Gemma4AudioFeatureExtractor()
    return getattr(transformers, name)(
        image_processor=getattr(transformers, images)(**how),
        tokenizer=tokenizer,
        chat_template=TEMPLATE % shown,
        **own,
        **others,
    )


def save_pictured(kind: str, folder: Path) -> Path:
    """Saves a tiny model of a kind with its processor."""
    processor = processor_of(kind)
    tokenizer = processor.tokenizer
    config = multimodal.config_of(kind)
    text = config.get_text_config()
    text.vocab_size = len(tokenizer) + 8  # some tokenizers add tokens when they are loaded
    for name in ("pad", "bos", "eos"):
        for each in (config, text):
            setattr(each, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    token = tokenizer.convert_tokens_to_ids(PROCESSORS[kind][4]["image_token"])
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            setattr(config, name, token)
    for name, token in PROCESSORS[kind][4].items():
        if name != "image_token" and getattr(config, f"{name}_id", None) is not None:
            setattr(config, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(seed: int = 0, width: int = 40, height: int = 30) -> Any:
    """Makes a picture of random colors."""
    import numpy as np
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)
