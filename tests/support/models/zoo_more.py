"""The zoo: encoder-decoders, vision, audio, time series, and models as users change them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import transformers
import zoo_text  # noqa: F401 - fills the zoo
from torch import nn
from zoo_base import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    IMAGE,
    LABELS,
    LAYERS,
    QUIET,
    SIZES,
    TOKENS,
    VOCAB,
    ZOO,
    Architecture,
    add,
    caption_batch,
    causal,
    channels_batch,
    filterbank_batch,
    image,
    image_batch,
    image_class_batch,
    image_in_text_batch,
    image_question_batch,
    image_text_pair_batch,
    masked_batch,
    mel_batch,
    segmentation_batch,
    seq2seq,
    seq2seq_batch,
    seq2seq_batch_unshifted,
    series_batch,
    spectrogram_class_batch,
    wave_batch,
    without,
)

# --------------------------------------------------------------------------------------------------
# Encoder-decoders
# --------------------------------------------------------------------------------------------------

T5_SIZES = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 2 * HIDDEN,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART_SIZES = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "decoder_start_token_id": 2,
}

seq2seq("t5", "T5", T5_SIZES, quirk="four names for one embedding")
seq2seq("mt5", "MT5", T5_SIZES)
seq2seq(
    "longt5",
    "LongT5",
    T5_SIZES,
    local_radius=4,
    encoder_attention_type="transient-global",
    global_block_size=4,
    quirk="key and value projections run twice in a block; four names for one embedding",
)
seq2seq(
    "switch_transformers",
    "SwitchTransformers",
    T5_SIZES,
    num_experts=8,
    expert_capacity=16,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    router_jitter_noise=0.0,
    quirk=(
        "the router calls .to(dtype) on its classifier in every forward; an idle expert has no"
        " gradient that step"
    ),
)
seq2seq("bart", "Bart", BART_SIZES)
seq2seq("mbart", "MBart", BART_SIZES)
seq2seq("pegasus", "Pegasus", BART_SIZES, quirk="frozen sinusoidal positions")
add(
    "marian",
    "encoder-decoder",
    ("MarianConfig", "MarianMTModel"),
    seq2seq_batch,
    TOKENS,
    BART_SIZES,
    quirk="frozen sinusoidal positions",
)
seq2seq("m2m_100", "M2M100", BART_SIZES)
seq2seq(
    "led",
    "LED",
    without(BART_SIZES, "max_position_embeddings"),
    attention_window=[4, 4],
    max_encoder_position_embeddings=64,
    max_decoder_position_embeddings=64,
    quirk="the global projections get no gradient",
)
add(
    "fsmt",
    "encoder-decoder",
    ("FSMTConfig", "FSMTForConditionalGeneration"),
    seq2seq_batch_unshifted,
    TOKENS,
    without(BART_SIZES, "vocab_size"),
    langs=["en", "de"],
    src_vocab_size=VOCAB,
    tgt_vocab_size=VOCAB,
)
seq2seq(
    "prophetnet",
    "ProphetNet",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_encoder_layers=LAYERS,
    num_decoder_layers=LAYERS,
    num_encoder_attention_heads=HEADS,
    num_decoder_attention_heads=HEADS,
    encoder_ffn_dim=2 * HIDDEN,
    decoder_ffn_dim=2 * HIDDEN,
    max_position_embeddings=64,
    num_buckets=8,
    relative_max_distance=16,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    decoder_start_token_id=2,
    quirk=(
        "the decoder reads ngram_embeddings.weight and calls the positions' _forward, which no hook"
        " sees"
    ),
)

# --------------------------------------------------------------------------------------------------
# Vision, and vision with text
# --------------------------------------------------------------------------------------------------

TOWER = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "image_size": IMAGE,
    "patch_size": 8,
}
# Class tokens and positions begin at zero, and a norm over zeros divides by the root of its
# epsilon: with the usual 1e-12 the first gradients are a million times too large to say anything.
IMAGE_SIZES = {**TOWER, **QUIET, "layer_norm_eps": 1e-5, "num_labels": LABELS}
WINDOWS = {
    **QUIET,
    "image_size": IMAGE,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": LABELS,
}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": LABELS}
PYRAMID = {
    **QUIET,
    **STAGES,
    "num_encoder_blocks": 2,
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "drop_path_rate": 0.0,
}

image("vit", "ViT", IMAGE_SIZES)
image("deit", "DeiT", IMAGE_SIZES)
image(
    "beit",
    "Beit",
    IMAGE_SIZES,
    drop_path_rate=0.0,
    use_relative_position_bias=True,
    use_mask_token=True,
    quirk="the mask token gets no gradient",
)
image(
    "dinov2",
    "Dinov2",
    without(IMAGE_SIZES, "intermediate_size"),
    mlp_ratio=2,
    quirk="the mask token gets no gradient",
)
image("swin", "Swin", WINDOWS, drop_path_rate=0.0)
image("swinv2", "Swinv2", WINDOWS, drop_path_rate=0.0)
image("convnext", "ConvNext", STAGES, num_stages=2, image_size=IMAGE)
image("convnextv2", "ConvNextV2", STAGES, num_stages=2, image_size=IMAGE)
image(
    "resnet",
    "ResNet",
    STAGES,
    embedding_size=8,
    layer_type="basic",
    quirk="batch norm: buffers change in every forward",
)
image(
    "poolformer",
    "PoolFormer",
    STAGES,
    num_encoder_blocks=2,
    patch_sizes=[7, 3],
    strides=[4, 2],
    padding=[2, 1],
    drop_path_rate=0.0,
)
image(
    "pvt",
    "Pvt",
    PYRAMID,
    image_size=IMAGE,
    patch_sizes=[4, 2],
    sequence_reduction_ratios=[2, 1],
)
add(
    "segformer",
    "vision",
    ("SegformerConfig", "SegformerForSemanticSegmentation"),
    segmentation_batch,
    PYRAMID,
    sr_ratios=[2, 1],
    decoder_hidden_size=16,
    classifier_dropout_prob=0.0,
    quirk="batch norm: buffers change in every forward",
)
add(
    "vit_mae",
    "vision",
    ("ViTMAEConfig", "ViTMAEForPreTraining"),
    image_batch,
    without(IMAGE_SIZES, "num_labels"),
    decoder_hidden_size=16,
    decoder_num_hidden_layers=1,
    decoder_num_attention_heads=2,
    decoder_intermediate_size=HIDDEN,
    mask_ratio=0.5,
    quirk="frozen positions; the mask is random",
)


class Detector(nn.Module):
    """DETR with a plain loss: its own needs pillow. The result is a class that no library knows."""

    def __init__(self, detr: nn.Module) -> None:
        super().__init__()
        self.detr = detr

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        found = self.detr(pixel_values=pixel_values)
        classes = labels[:, None].expand(found.logits.shape[:2]).flatten()
        loss = (
            nn.functional.cross_entropy(found.logits.flatten(0, 1), classes)
            + found.pred_boxes.square().mean()
        )
        return SimpleNamespace(loss=loss, found=found)


add(
    "detr",
    "vision",
    ("DetrConfig", "DetrForObjectDetection"),
    image_class_batch,
    without(BART_SIZES, "vocab_size", "max_position_embeddings", "decoder_start_token_id"),
    backbone_config={
        "model_type": "resnet",
        **STAGES,
        "embedding_size": 8,
        "out_features": ["stage2"],
    },
    num_queries=5,
    num_labels=LABELS,
    then=Detector,
    quirk=(
        "the model reads query_position_embeddings.weight; frozen backbone and batch norm; returns"
        " a SimpleNamespace"
    ),
)

TEXT_TOWER = {**SIZES, **TOKENS, "projection_dim": 16}
add(
    "clip",
    "vision and text",
    ("CLIPConfig", "CLIPModel"),
    image_text_pair_batch,
    text_config=TEXT_TOWER,
    vision_config={**TOWER, "projection_dim": 16},
    projection_dim=16,
    logit_scale_init_value=1.0,
    quirk="a scalar parameter on the model itself",
)
add(
    "siglip",
    "vision and text",
    ("SiglipConfig", "SiglipModel"),
    image_text_pair_batch,
    text_config={**SIZES, **TOKENS, "projection_size": HIDDEN},
    vision_config=TOWER,
    quirk="nn.MultiheadAttention reads its out_proj, which is never called",
)
add(
    "blip",
    "vision and text",
    ("BlipConfig", "BlipForConditionalGeneration"),
    caption_batch,
    text_config={**TEXT_TOWER, "encoder_hidden_size": HIDDEN, "sep_token_id": 2},
    vision_config={**TOWER, "initializer_range": 0.02},
    projection_dim=16,
    image_text_hidden_size=16,
    quirk="the last norm of the image tower runs twice",
)
add(
    "llava",
    "vision and text",
    ("LlavaConfig", "LlavaForConditionalGeneration"),
    image_in_text_batch,
    text_config={"model_type": "llama", **SIZES, **TOKENS, **HEAD_DIM},
    vision_config={"model_type": "clip_vision_model", **TOWER},
    image_token_index=3,
    image_seq_length=16,
    vision_feature_layer=-1,
    quirk="the image tower's last norm gets no gradient",
)
add(
    "vilt",
    "vision and text",
    ("ViltConfig", "ViltForQuestionAnswering"),
    image_question_batch,
    SIZES,
    IMAGE_SIZES,
    quirk="token type embeddings run twice",
)

# --------------------------------------------------------------------------------------------------
# Audio and time series
# --------------------------------------------------------------------------------------------------

WAVE_SIZES = {
    **without(SIZES, "max_position_embeddings"),
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
}
SPEECH_SIZES = {
    **without(BART_SIZES, "max_position_embeddings"),
    "max_target_positions": 16,
}
SERIES_SIZES = {
    **without(BART_SIZES, "vocab_size", "max_position_embeddings", "decoder_start_token_id"),
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
    "num_static_categorical_features": 1,
    "cardinality": [4],
    "embedding_dimension": [4],
}

add(
    "wav2vec2",
    "audio",
    ("Wav2Vec2Config", "Wav2Vec2ForCTC"),
    wave_batch,
    TOKENS,
    WAVE_SIZES,
    quirk=(
        "weight norm as a parametrization: the convolution's weight is computed from two parameters"
    ),
)
add(
    "wavlm",
    "audio",
    ("WavLMConfig", "WavLMForCTC"),
    wave_batch,
    TOKENS,
    WAVE_SIZES,
    num_buckets=8,
    max_bucket_distance=16,
    quirk="attention passes four Linears' weights to a function; weight norm as a parametrization",
)
add(
    "whisper",
    "audio",
    ("WhisperConfig", "WhisperForConditionalGeneration"),
    mel_batch,
    TOKENS,
    SPEECH_SIZES,
    num_mel_bins=16,
    max_source_positions=20,
    quirk="frozen sinusoidal positions",
)
add(
    "speech_to_text",
    "audio",
    ("Speech2TextConfig", "Speech2TextForConditionalGeneration"),
    filterbank_batch,
    TOKENS,
    SPEECH_SIZES,
    input_feat_per_channel=8,
    conv_channels=16,
    max_source_positions=40,
)
add(
    "audio_spectrogram_transformer",
    "audio",
    ("ASTConfig", "ASTForAudioClassification"),
    spectrogram_class_batch,
    without(IMAGE_SIZES, "image_size"),
    frequency_stride=4,
    time_stride=4,
    max_length=32,
    num_mel_bins=16,
)
add(
    "patchtst",
    "time series",
    ("PatchTSTConfig", "PatchTSTForPrediction"),
    channels_batch,
    num_input_channels=2,
    context_length=16,
    prediction_length=4,
    patch_length=4,
    patch_stride=4,
    d_model=HIDDEN,
    ffn_dim=2 * HIDDEN,
    num_hidden_layers=LAYERS,
    quirk="batch norm; frozen positions",
)
add(
    "time_series_transformer",
    "time series",
    ("TimeSeriesTransformerConfig", "TimeSeriesTransformerForPrediction"),
    series_batch,
    SERIES_SIZES,
    quirk="frozen sinusoidal positions",
)
add(
    "informer",
    "time series",
    ("InformerConfig", "InformerForPrediction"),
    series_batch,
    SERIES_SIZES,
    quirk="batch norm; frozen sinusoidal positions",
)

# --------------------------------------------------------------------------------------------------
# The same models as users change them
# --------------------------------------------------------------------------------------------------


def checkpointed(use_reentrant: bool) -> Callable[[nn.Module], nn.Module]:
    def then(model: nn.Module) -> nn.Module:
        settings = {"use_reentrant": use_reentrant}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
        else:  # transformers before 5.23
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        return model

    return then


def frozen_below(model: nn.Module) -> nn.Module:
    """The embeddings and the first block do not train."""
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """Low-rank adapters train, all else is frozen."""
    import peft

    settings = peft.LoraConfig(
        r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, settings)


def two_berts() -> nn.Module:
    """Two BERTs joined by cross-attention: each half is a model in its own right."""
    half = {**TOKENS, **SIZES, **QUIET}
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**half), transformers.BertConfig(**half)
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.EncoderDecoderModel(config)


causal(
    "llama_checkpointed",
    "Llama",
    SIZES,
    HEAD_DIM,
    family="changed",
    then=checkpointed(use_reentrant=False),
)
causal(
    "llama_checkpointed_reentrant",
    "Llama",
    SIZES,
    HEAD_DIM,
    family="changed",
    then=checkpointed(True),
)
add(
    "bert_frozen_below",
    "changed",
    ("BertConfig", "BertForMaskedLM"),
    masked_batch,
    TOKENS,
    SIZES,
    QUIET,
    then=frozen_below,
)
causal(
    "llama_lora", "Llama", SIZES, HEAD_DIM, family="changed", packages=("peft",), then=with_adapters
)
ZOO["encoder_decoder"] = Architecture(
    name="encoder_decoder",
    family="encoder-decoder",
    build=two_berts,
    batch=seq2seq_batch,
    needs=("EncoderDecoderConfig", "EncoderDecoderModel"),
    quirk="two models in one; the encoder's pooler gets no gradient",
)
