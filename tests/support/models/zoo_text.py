"""The zoo: decoders, mixtures of experts, state spaces, encoders."""

from __future__ import annotations

from zoo_base import (
    GPT_SIZES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LABELS,
    LAYERS,
    LENGTH,
    QUIET,
    QUIET_GPT,
    SIZES,
    TOKENS,
    TWO_KEY_HEADS,
    VOCAB,
    add,
    causal,
    causal_batch,
    experts,
    masked,
    recurrent,
    text_class_batch,
    without,
)

# --------------------------------------------------------------------------------------------------
# Decoders
# --------------------------------------------------------------------------------------------------

add(
    "gpt2",
    "decoder",
    ("GPT2Config", "GPT2LMHeadModel"),
    causal_batch,
    TOKENS,
    GPT_SIZES,
    quirk="Conv1D keeps its weight transposed, in x out",
)
add(
    "openai_gpt",
    "decoder",
    ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel"),
    causal_batch,
    TOKENS,
    GPT_SIZES,
)
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
    quirk=(
        "AltUp is never called: the block uses its predict() and correct(), which read and clamp"
        " weights"
    ),
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
causal(
    "starcoder2", "Starcoder2", SIZES, TWO_KEY_HEADS, residual_dropout=0.0, embedding_dropout=0.0
)
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
causal(
    "mpt",
    "Mpt",
    vocab_size=VOCAB,
    d_model=HIDDEN,
    n_heads=HEADS,
    n_layers=LAYERS,
    expansion_ratio=2,
)
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
    quirk=(
        "reversible: forward without autograd, blocks run again inside a custom backward; outputs"
        " are namedtuples"
    ),
)

# --------------------------------------------------------------------------------------------------
# Mixtures of experts
# --------------------------------------------------------------------------------------------------

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
    quirk=(
        "the attention experts are never called: the attention uses their methods and adds their"
        " bias"
    ),
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

# --------------------------------------------------------------------------------------------------
# State spaces and recurrences
# --------------------------------------------------------------------------------------------------

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
    quirk=(
        "in eval mode the model divides every block's weights in place before the first block runs"
    ),
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

# --------------------------------------------------------------------------------------------------
# Encoders
# --------------------------------------------------------------------------------------------------

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
DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "max_relative_positions": 16,
}
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
masked(
    "convbert", "ConvBert", SIZES, QUIET, embedding_size=HIDDEN, conv_kernel_size=3, head_ratio=2
)
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
masked(
    "roformer", "RoFormer", SIZES, QUIET, embedding_size=HIDDEN, quirk="frozen sinusoidal positions"
)
masked(
    "longformer",
    "Longformer",
    SIZES,
    QUIET,
    attention_window=4,
    quirk="the global projections get no gradient",
)
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
    quirk=(
        "quantised: weights are read through .data, buffers hold statistics; some LayerNorm biases"
        " get no gradient"
    ),
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
    quirk=(
        "the last encoder gets no gradient from a classifier; the first runs its projections"
        " several times"
    ),
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
