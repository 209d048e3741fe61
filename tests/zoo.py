"""Tiny models of many architectures, for tests that must hold for any `transformers` model.

Words used here:

**architecture**: one entry of `ZOO`: a name, a family, a function that builds a tiny model with random weights and
a function that makes a batch.
**batch**: the keyword arguments of one forward, labels included, so that `model(**batch).loss` is a scalar. A batch
depends on its seed alone.
**quirk**: what an engine that moves parameters about should know of the architecture: a weight used while its
owner is not running, a block that runs several times, a parameter that no gradient reaches. Seen by running the
model; "" where nothing was seen.

Dropout, layer drop, jitter and spectrogram masking are off; `seed_everything` before each forward pins the noise
that cannot be switched off (ViTMAE's mask, Reformer's hashes), so two runs see the same numbers.
"""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import transformers
from torch import nn

Batch = dict[str, Any]
Sizes = dict[str, Any]  # keyword arguments of a config class

VOCAB = 96
HIDDEN = 32
LAYERS = 2
HEADS = 4
BATCH = 2
LENGTH = 12
IMAGE = 32
LABELS = 5

transformers.logging.set_verbosity_error()  # models with odd sizes or unused heads say so at every build


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    needs: tuple[str, ...]  # the `transformers` classes it is made of
    packages: tuple[str, ...] = ()  # what it needs besides `transformers`
    quirk: str = ""

    def missing(self) -> list[str]:
        """The classes and packages that this machine lacks."""
        classes = [name for name in self.needs if not hasattr(transformers, name)]
        return classes + [name for name in self.packages if importlib.util.find_spec(name) is None]


ZOO: dict[str, Architecture] = {}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def make_model(architecture: Architecture, seed: int, device: str = "cpu") -> nn.Module:
    """The architecture with the weights that `seed` gives: fp32, in training mode."""
    seed_everything(seed)
    with warnings.catch_warnings():
        # MobileBERT has a weight of no elements when its embedding is as wide as its hidden states.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = architecture.build()
    return model.float().train().to(device)


def make_batch(architecture: Architecture, seed: int, device: str = "cpu") -> Batch:
    batch = architecture.batch(seed)
    return {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    # Ids below 4 are padding, start, end and mask (or image).
    return torch.randint(4, VOCAB, (BATCH, length), generator=generator)


def _classes(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, LABELS, (BATCH,), generator=generator)


def _pixels(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)


def causal_batch(seed: int) -> Batch:
    tokens = _tokens(_generator(seed))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def masked_batch(seed: int) -> Batch:
    """One sequence whole, one padded; every token but the padding is a target."""
    generator = _generator(seed)
    tokens, labels = _tokens(generator), _tokens(generator)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def text_class_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {"input_ids": _tokens(generator), "labels": _classes(generator)}


def seq2seq_batch(seed: int) -> Batch:
    generator = _generator(seed)
    source, target = _tokens(generator), _tokens(generator, length=LENGTH - 3)
    mask = torch.ones_like(source)
    mask[1, -3:] = 0
    return {"input_ids": source, "attention_mask": mask, "labels": target, "use_cache": False}


def seq2seq_batch_unshifted(seed: int) -> Batch:
    """For FSMT, which does not make the decoder's input from the labels."""
    batch = seq2seq_batch(seed)
    return {**batch, "decoder_input_ids": batch["labels"].roll(shifts=1, dims=1)}


def image_class_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {"pixel_values": _pixels(generator), "labels": _classes(generator)}


def image_batch(seed: int) -> Batch:
    return {"pixel_values": _pixels(_generator(seed))}


def segmentation_batch(seed: int) -> Batch:
    generator = _generator(seed)
    labels = torch.randint(0, LABELS, (BATCH, IMAGE, IMAGE), generator=generator)
    return {"pixel_values": _pixels(generator), "labels": labels}


def image_text_pair_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {"input_ids": _tokens(generator), "pixel_values": _pixels(generator), "return_loss": True}


def caption_batch(seed: int) -> Batch:
    generator = _generator(seed)
    tokens = _tokens(generator)
    return {"input_ids": tokens, "pixel_values": _pixels(generator), "labels": tokens}


def image_in_text_batch(seed: int) -> Batch:
    """For Llava: 16 places for image features (id 3), then text."""
    generator = _generator(seed)
    tokens = torch.cat([torch.full((BATCH, 16), 3), _tokens(generator)], dim=1)
    labels = tokens.masked_fill(tokens == 3, -100)
    return {"input_ids": tokens, "pixel_values": _pixels(generator), "labels": labels, "use_cache": False}


def image_question_batch(seed: int) -> Batch:
    generator = _generator(seed)
    answers = torch.rand(BATCH, LABELS, generator=generator)
    return {"input_ids": _tokens(generator), "pixel_values": _pixels(generator), "labels": answers}


def wave_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {"input_values": torch.randn(BATCH, 800, generator=generator), "labels": _tokens(generator, length=4)}


def mel_batch(seed: int) -> Batch:
    """For Whisper: samples x mel bins x frames."""
    generator = _generator(seed)
    features = torch.randn(BATCH, 16, 40, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, length=6), "use_cache": False}


def filterbank_batch(seed: int) -> Batch:
    """For Speech2Text: samples x frames x bins."""
    generator = _generator(seed)
    features = torch.randn(BATCH, 40, 8, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, length=6), "use_cache": False}


def spectrogram_class_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {"input_values": torch.randn(BATCH, 32, 16, generator=generator), "labels": _classes(generator)}


def channels_batch(seed: int) -> Batch:
    """For PatchTST: samples x times x channels."""
    generator = _generator(seed)
    past, future = torch.randn(BATCH, 16, 2, generator=generator), torch.randn(BATCH, 4, 2, generator=generator)
    return {"past_values": past, "future_values": future}


def series_batch(seed: int) -> Batch:
    generator = _generator(seed)
    return {
        "past_values": torch.rand(BATCH, 15, generator=generator) + 0.5,
        "past_time_features": torch.randn(BATCH, 15, 1, generator=generator),
        "past_observed_mask": torch.ones(BATCH, 15),
        "future_values": torch.rand(BATCH, 4, generator=generator) + 0.5,
        "future_time_features": torch.randn(BATCH, 4, 1, generator=generator),
        "static_categorical_features": torch.randint(0, 4, (BATCH, 1), generator=generator),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Entering an architecture
# ---------------------------------------------------------------------------------------------------------------------


def add(
    name: str,
    family: str,
    classes: tuple[str, str],
    batch: Callable[[int], Batch],
    *sizes: Sizes,
    packages: tuple[str, ...] = (),
    quirk: str = "",
    then: Callable[[nn.Module], nn.Module] = lambda model: model,
    **more: Any,
) -> None:
    """Enter `then(model_class(config_class(**sizes, **more)))`; `classes` are the two by name, config first."""
    settings: Sizes = {}
    for part in (*sizes, more):
        settings.update(part)
    config_name, model_name = classes

    def build() -> nn.Module:
        config = getattr(transformers, config_name)(**settings)
        return then(getattr(transformers, model_name)(config))

    if name in ZOO:
        raise ValueError(f"the zoo has {name} already")
    ZOO[name] = Architecture(name=name, family=family, build=build, batch=batch, needs=classes, packages=packages, quirk=quirk)


def causal(name: str, stem: str, *sizes: Sizes, family: str = "decoder", **more: Any) -> None:
    add(name, family, (f"{stem}Config", f"{stem}ForCausalLM"), causal_batch, TOKENS, *sizes, **more)


def experts(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    causal(name, stem, *sizes, family="mixture of experts", **more)


def recurrent(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    causal(name, stem, *sizes, family="state space", **more)


def masked(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    add(name, "encoder", (f"{stem}Config", f"{stem}ForMaskedLM"), masked_batch, TOKENS, *sizes, **more)


def seq2seq(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    classes = (f"{stem}Config", f"{stem}ForConditionalGeneration")
    add(name, "encoder-decoder", classes, seq2seq_batch, TOKENS, *sizes, **more)


def image(name: str, stem: str, *sizes: Sizes, **more: Any) -> None:
    add(name, "vision", (f"{stem}Config", f"{stem}ForImageClassification"), image_class_batch, *sizes, **more)


def without(sizes: Sizes, *names: str) -> Sizes:
    return {key: value for key, value in sizes.items() if key not in names}


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 64,
}
TWO_KEY_HEADS = {"num_key_value_heads": 2}
HEAD_DIM = {"num_key_value_heads": 2, "head_dim": HIDDEN // HEADS}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QUIET_GPT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT_SIZES = {
    **QUIET_GPT,
    "attn_pdrop": 0.0,
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
}

# ---------------------------------------------------------------------------------------------------------------------
# Decoders
# ---------------------------------------------------------------------------------------------------------------------

add(
    "gpt2",
    "decoder",
    ("GPT2Config", "GPT2LMHeadModel"),
    causal_batch,
    TOKENS,
    GPT_SIZES,
    quirk="Conv1D keeps its weight transposed, in x out",
)
add("openai_gpt", "decoder", ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel"), causal_batch, TOKENS, GPT_SIZES)
causal("llama", "Llama", SIZES, HEAD_DIM)
causal("llama_tied", "Llama", SIZES, HEAD_DIM, tie_word_embeddings=True)
causal("mistral", "Mistral", SIZES, HEAD_DIM, sliding_window=8)
causal("qwen2", "Qwen2", SIZES, HEAD_DIM)
causal("qwen3", "Qwen3", SIZES, HEAD_DIM)
causal("gemma", "Gemma", SIZES, HEAD_DIM)
causal("gemma2", "Gemma2", SIZES, HEAD_DIM, sliding_window=8)
add(
    "gemma3",
    "decoder",
    ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    causal_batch,
    TOKENS,
    SIZES,
    HEAD_DIM,
    sliding_window=8,
)
GEMMA3N = {
    **SIZES,
    **HEAD_DIM,
    "sliding_window": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "activation_sparsity_pattern": [0.5, 0.0],
    "altup_num_inputs": 2,
}
add(
    "gemma3n",
    "decoder",
    ("Gemma3nTextConfig", "Gemma3nForCausalLM"),
    causal_batch,
    TOKENS,
    GEMMA3N,
    quirk="AltUp is never called: the block uses its predict() and correct(), which read and clamp weights",
)
add(
    "gemma3n_clipped",
    "decoder",
    ("Gemma3nTextConfig", "Gemma3nForCausalLM"),
    causal_batch,
    TOKENS,
    GEMMA3N,
    altup_coef_clip=0.01,
    quirk="as gemma3n, and the forward changes prediction_coefs.weight in place, through .data",
)
causal("phi", "Phi", SIZES, QUIET_GPT, partial_rotary_factor=0.5)
causal("phi3", "Phi3", SIZES, QUIET_GPT, TWO_KEY_HEADS)
causal(
    "opt",
    "OPT",
    SIZES,
    ffn_dim=2 * HIDDEN,
    word_embed_proj_dim=16,
    dropout=0.0,
    quirk="embedding narrower than the model, tied",
)
causal("bloom", "Bloom", vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS)
causal("gpt_neox", "GPTNeoX", SIZES)
causal("gptj", "GPTJ", GPT_SIZES, rotary_dim=4)
causal(
    "gpt_neo",
    "GPTNeo",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_layers=2,
    num_heads=HEADS,
    attention_types=[[["global", "local"], 1]],
    window_size=8,
    max_position_embeddings=64,
)
causal("falcon", "Falcon", SIZES)
causal("stablelm", "StableLm", SIZES, TWO_KEY_HEADS, use_qkv_bias=True, partial_rotary_factor=0.5)
causal("olmo", "Olmo", SIZES, TWO_KEY_HEADS)
causal("olmo2", "Olmo2", SIZES, TWO_KEY_HEADS)
causal("granite", "Granite", SIZES, TWO_KEY_HEADS)
causal("cohere", "Cohere", SIZES, TWO_KEY_HEADS, use_qk_norm=True)
causal("starcoder2", "Starcoder2", SIZES, TWO_KEY_HEADS, residual_dropout=0.0, embedding_dropout=0.0)
causal("gpt_bigcode", "GPTBigCode", GPT_SIZES, multi_query=True)
causal(
    "xglm",
    "XGLM",
    vocab_size=VOCAB,
    d_model=HIDDEN,
    ffn_dim=2 * HIDDEN,
    num_layers=LAYERS,
    attention_heads=HEADS,
    max_position_embeddings=64,
    dropout=0.0,
    attention_dropout=0.0,
    layerdrop=0.0,
)
causal("biogpt", "BioGpt", SIZES, QUIET)
causal("nemotron", "Nemotron", SIZES, HEAD_DIM)
causal("diffllama", "DiffLlama", SIZES, TWO_KEY_HEADS)
causal("doge", "Doge", SIZES, TWO_KEY_HEADS)
causal("mpt", "Mpt", vocab_size=VOCAB, d_model=HIDDEN, n_heads=HEADS, n_layers=LAYERS, expansion_ratio=2)
add(
    "xlnet",
    "decoder",
    ("XLNetConfig", "XLNetLMHeadModel"),
    causal_batch,
    TOKENS,
    vocab_size=VOCAB,
    d_model=HIDDEN,
    d_inner=2 * HIDDEN,
    n_layer=LAYERS,
    n_head=HEADS,
    dropout=0.0,
    quirk="the segment and mask parameters get no gradient",
)
causal(
    "modernbert_decoder",
    "ModernBertDecoder",
    SIZES,
    local_attention=8,
    cls_token_id=1,
    sep_token_id=2,
)
add(
    "reformer",
    "decoder",
    ("ReformerConfig", "ReformerModelWithLMHead"),
    causal_batch,
    TOKENS,
    without(QUIET, "attention_probs_dropout_prob"),
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_attention_heads=2,
    attention_head_size=16,
    feed_forward_size=2 * HIDDEN,
    attn_layers=["local", "lsh"],
    axial_pos_shape=[3, 4],
    axial_pos_embds_dim=[16, 16],
    local_attn_chunk_length=4,
    lsh_attn_chunk_length=4,
    local_attention_probs_dropout_prob=0.0,
    lsh_attention_probs_dropout_prob=0.0,
    num_buckets=2,
    hash_seed=1,
    is_decoder=True,
    max_position_embeddings=LENGTH,
    quirk="reversible: forward without autograd, blocks run again inside a custom backward; outputs are namedtuples",
)

# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of experts
# ---------------------------------------------------------------------------------------------------------------------

ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
ROUTED_LOCALLY = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
LATENT_ATTENTION = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}

experts("mixtral", "Mixtral", SIZES, HEAD_DIM, ROUTED_LOCALLY)
experts(
    "qwen2_moe",
    "Qwen2Moe",
    SIZES,
    TWO_KEY_HEADS,
    ROUTED,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=HIDDEN,
)
experts("qwen3_moe", "Qwen3Moe", SIZES, HEAD_DIM, ROUTED, moe_intermediate_size=16)
experts("gpt_oss", "GptOss", SIZES, HEAD_DIM, ROUTED_LOCALLY, sliding_window=8)
experts("deepseek_v3", "DeepseekV3", SIZES, LATENT_ATTENTION, DEEPSEEK, n_group=2)
experts(
    "jetmoe",
    "JetMoe",
    without(SIZES, "num_attention_heads"),
    TWO_KEY_HEADS,
    ROUTED_LOCALLY,
    kv_channels=8,
    quirk="the attention experts are never called: the attention uses their methods and adds their bias",
)
experts(
    "dbrx",
    "Dbrx",
    vocab_size=VOCAB,
    d_model=HIDDEN,
    n_heads=HEADS,
    n_layers=LAYERS,
    max_seq_len=64,
    attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    ffn_config={
        "hidden_size": HIDDEN,
        "ffn_hidden_size": HIDDEN,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "ffn_act_fn": {"name": "silu"},
    },
    output_router_logits=True,
    quirk="experts' weights are sliced by the module above their owner, once per expert",
)
add(
    "llama4",
    "mixture of experts",
    ("Llama4TextConfig", "Llama4ForCausalLM"),
    causal_batch,
    TOKENS,
    SIZES,
    HEAD_DIM,
    num_local_experts=4,
    intermediate_size_mlp=2 * HIDDEN,
    interleave_moe_layer_step=2,
    attention_chunk_size=8,
)
experts(
    "minimax",
    "MiniMax",
    SIZES,
    TWO_KEY_HEADS,
    ROUTED_LOCALLY,
    block_size=4,
    layer_types=["linear_attention", "full_attention"],
)

# ---------------------------------------------------------------------------------------------------------------------
# State spaces and recurrences
# ---------------------------------------------------------------------------------------------------------------------

DEPTH = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}

recurrent(
    "mamba",
    "Mamba",
    DEPTH,
    state_size=4,
    quirk="conv1d and dt_proj are never called: the mixer uses their weights",
)
recurrent(
    "mamba2",
    "Mamba2",
    DEPTH,
    state_size=8,
    num_heads=8,
    head_dim=8,
    n_groups=2,
    chunk_size=4,
    quirk="conv1d is never called: the mixer uses its weight",
)
recurrent(
    "falcon_mamba",
    "FalconMamba",
    DEPTH,
    state_size=4,
    quirk="conv1d and dt_proj are never called: the mixer uses their weights",
)
recurrent(
    "rwkv",
    "Rwkv",
    DEPTH,
    context_length=64,
    quirk="in eval mode the model divides every block's weights in place before the first block runs",
)
recurrent(
    "recurrent_gemma",
    "RecurrentGemma",
    SIZES,
    TWO_KEY_HEADS,
    num_hidden_layers=3,
    lru_width=HIDDEN,
    attention_window_size=8,
)
recurrent(
    "falcon_h1",
    "FalconH1",
    SIZES,
    TWO_KEY_HEADS,
    mamba_d_ssm=HIDDEN,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=4,
    quirk="conv1d is never called: the mixer uses its weight",
)
recurrent(
    "bamba",
    "Bamba",
    SIZES,
    TWO_KEY_HEADS,
    attn_layer_indices=[1],
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_chunk_size=4,
    quirk="conv1d is never called: the mixer uses its weight",
)
recurrent(
    "zamba2",
    "Zamba2",
    SIZES,
    num_hidden_layers=3,
    layers_block_type=["hybrid", "mamba", "hybrid"],
    num_mem_blocks=1,
    n_mamba_heads=8,
    mamba_headdim=8,
    mamba_ngroups=1,
    mamba_d_state=8,
    chunk_size=4,
    num_key_value_heads=HEADS,
    attention_head_dim=16,
    quirk="two layers share one transformer block with unshared adapters; conv1d is never called",
)
recurrent(
    "jamba",
    "Jamba",
    SIZES,
    TWO_KEY_HEADS,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=2,
    num_experts_per_tok=1,
    mamba_d_state=4,
    mamba_dt_rank=4,
    use_mamba_kernels=False,
    quirk="conv1d and dt_proj are never called: the mixer uses their weights",
)
recurrent(
    "lfm2",
    "Lfm2",
    SIZES,
    TWO_KEY_HEADS,
    layer_types=["conv", "full_attention"],
    block_auto_adjust_ff_dim=False,
    quirk="conv is never called: the short convolution uses its weight",
)
recurrent(
    "qwen3_next",
    "Qwen3Next",
    SIZES,
    HEAD_DIM,
    ROUTED,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    quirk="conv1d is never called: the mixer uses its weight",
)
recurrent(
    "nemotron_h",
    "NemotronH",
    SIZES,
    HEAD_DIM,
    hybrid_override_pattern="M*",
    mamba_num_heads=8,
    mamba_head_dim=8,
    n_groups=1,
    ssm_state_size=8,
    chunk_size=4,
    quirk="conv1d is never called: the mixer uses its weight",
)
recurrent(
    "kimi_linear",
    "KimiLinear",
    SIZES,
    without(LATENT_ATTENTION, "q_lora_rank"),
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    linear_head_dim=8,
    linear_num_heads=HEADS,
    quirk="conv1d is never called: the mixer uses its weight",
)

# ---------------------------------------------------------------------------------------------------------------------
# Encoders
# ---------------------------------------------------------------------------------------------------------------------

masked("bert", "Bert", SIZES, QUIET)
masked("roberta", "Roberta", SIZES, QUIET)
masked(
    "distilbert",
    "DistilBert",
    vocab_size=VOCAB,
    dim=HIDDEN,
    hidden_dim=2 * HIDDEN,
    n_layers=LAYERS,
    n_heads=HEADS,
    max_position_embeddings=64,
    dropout=0.0,
    attention_dropout=0.0,
)
masked(
    "albert",
    "Albert",
    SIZES,
    QUIET,
    embedding_size=16,
    num_hidden_groups=1,
    num_hidden_layers=3,
    quirk="one block runs three times",
)
masked("electra", "Electra", SIZES, QUIET, embedding_size=16)
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
masked(
    "deberta",
    "Deberta",
    SIZES,
    QUIET,
    DISENTANGLED,
    quirk="the encoder passes rel_embeddings.weight itself to every block",
)
masked(
    "deberta_v2",
    "DebertaV2",
    SIZES,
    QUIET,
    DISENTANGLED,
    position_buckets=8,
    share_att_key=True,
    norm_rel_ebd="layer_norm",
    conv_kernel_size=3,
    conv_act="gelu",
    position_biased_input=False,
    quirk="as deberta, through a LayerNorm first; query and key projections run twice",
)
masked("mpnet", "MPNet", SIZES, QUIET)
masked("modernbert", "ModernBert", SIZES, local_attention=8, cls_token_id=1, sep_token_id=2)
add(
    "fnet",
    "encoder",
    ("FNetConfig", "FNetForSequenceClassification"),
    text_class_batch,
    TOKENS,
    without(SIZES, "num_attention_heads"),
    hidden_dropout_prob=0.0,
    num_labels=LABELS,
)
masked(
    "funnel",
    "Funnel",
    vocab_size=VOCAB,
    block_sizes=[1, 1],
    num_decoder_layers=1,
    d_model=HIDDEN,
    d_inner=2 * HIDDEN,
    n_head=HEADS,
    d_head=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
masked("convbert", "ConvBert", SIZES, QUIET, embedding_size=HIDDEN, conv_kernel_size=3, head_ratio=2)
masked(
    "squeezebert",
    "SqueezeBert",
    SIZES,
    QUIET,
    embedding_size=HIDDEN,
    quirk="the pooler gets no gradient; blocks return dicts",
)
masked(
    "mobilebert",
    "MobileBert",
    SIZES,
    QUIET,
    embedding_size=HIDDEN,
    intra_bottleneck_size=HIDDEN,
    num_feedforward_networks=2,
    quirk="a weight of no elements; the head concatenates two weights and calls neither owner",
)
masked("roformer", "RoFormer", SIZES, QUIET, embedding_size=HIDDEN, quirk="frozen sinusoidal positions")
masked("longformer", "Longformer", SIZES, QUIET, attention_window=4, quirk="the global projections get no gradient")
masked(
    "esm",
    "Esm",
    SIZES,
    QUIET,
    mask_token_id=3,
    position_embedding_type="rotary",
    token_dropout=False,
    quirk="the contact head gets no gradient",
)
masked(
    "ibert",
    "IBert",
    SIZES,
    QUIET,
    quant_mode=True,
    quirk="quantised: weights are read through .data, buffers hold statistics; some LayerNorm biases get no gradient",
)
masked(
    "xmod",
    "Xmod",
    SIZES,
    QUIET,
    languages=["en_XX", "de_DE"],
    default_language="en_XX",
    quirk="the other language's adapter runs over no tokens: its gradients are zeros, not None",
)
masked(
    "perceiver",
    "Perceiver",
    vocab_size=VOCAB,
    num_latents=6,
    d_latents=16,
    d_model=HIDDEN,
    num_blocks=2,
    num_self_attends_per_block=1,
    num_self_attention_heads=2,
    num_cross_attention_heads=2,
    qk_channels=16,
    v_channels=16,
    max_position_embeddings=LENGTH,
    attention_probs_dropout_prob=0.0,
    quirk="one stack of blocks runs twice; the head reads the embedding's weight",
)
add(
    "canine",
    "encoder",
    ("CanineConfig", "CanineForSequenceClassification"),
    text_class_batch,
    TOKENS,
    SIZES,
    QUIET,
    num_hash_functions=2,
    num_hash_buckets=32,
    downsampling_rate=4,
    local_transformer_stride=4,
    num_labels=LABELS,
    quirk="the last encoder gets no gradient from a classifier; the first runs its projections several times",
)
add(
    "bert_classifier",
    "encoder",
    ("BertConfig", "BertForSequenceClassification"),
    text_class_batch,
    TOKENS,
    SIZES,
    QUIET,
    num_labels=LABELS,
)

# ---------------------------------------------------------------------------------------------------------------------
# Encoder-decoders
# ---------------------------------------------------------------------------------------------------------------------

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
    quirk="the router calls .to(dtype) on its classifier in every forward; an idle expert has no gradient that step",
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
    quirk="the decoder reads ngram_embeddings.weight and calls the positions' _forward, which no hook sees",
)

# ---------------------------------------------------------------------------------------------------------------------
# Vision, and vision with text
# ---------------------------------------------------------------------------------------------------------------------

TOWER = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "image_size": IMAGE,
    "patch_size": 8,
}
# Class tokens and positions begin at zero, and a norm over zeros divides by the root of its epsilon: with the
# usual 1e-12 the first gradients are a million times too large to say anything.
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
        loss = nn.functional.cross_entropy(found.logits.flatten(0, 1), classes) + found.pred_boxes.square().mean()
        return SimpleNamespace(loss=loss, found=found)


add(
    "detr",
    "vision",
    ("DetrConfig", "DetrForObjectDetection"),
    image_class_batch,
    without(BART_SIZES, "vocab_size", "max_position_embeddings", "decoder_start_token_id"),
    backbone_config={"model_type": "resnet", **STAGES, "embedding_size": 8, "out_features": ["stage2"]},
    num_queries=5,
    num_labels=LABELS,
    then=Detector,
    quirk="the model reads query_position_embeddings.weight; frozen backbone and batch norm; returns a SimpleNamespace",
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

# ---------------------------------------------------------------------------------------------------------------------
# Audio and time series
# ---------------------------------------------------------------------------------------------------------------------

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
    quirk="weight norm as a parametrization: the convolution's weight is computed from two parameters",
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

# ---------------------------------------------------------------------------------------------------------------------
# The same models as users change them
# ---------------------------------------------------------------------------------------------------------------------


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

    settings = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings)


def two_berts() -> nn.Module:
    """Two BERTs joined by cross-attention: each half is a model in its own right."""
    half = {**TOKENS, **SIZES, **QUIET}
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**half), transformers.BertConfig(**half)
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.EncoderDecoderModel(config)


causal("llama_checkpointed", "Llama", SIZES, HEAD_DIM, family="changed", then=checkpointed(use_reentrant=False))
causal("llama_checkpointed_reentrant", "Llama", SIZES, HEAD_DIM, family="changed", then=checkpointed(True))
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
causal("llama_lora", "Llama", SIZES, HEAD_DIM, family="changed", packages=("peft",), then=with_adapters)
ZOO["encoder_decoder"] = Architecture(
    name="encoder_decoder",
    family="encoder-decoder",
    build=two_berts,
    batch=seq2seq_batch,
    needs=("EncoderDecoderConfig", "EncoderDecoderModel"),
    quirk="two models in one; the encoder's pooler gets no gradient",
)
