"""Small models written as llama.cpp writes them: GGUF files of random codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lazily import Lazily

gguf = Lazily("gguf")

HIDDEN, INNER, HEADS, KV_HEADS, EXPERTS, VOCABULARY = 256, 512, 4, 2, 4, 320
OF_EXPERT = 768  # of every Qwen3-MoE in GGUF, to transformers
DRAWN = {"Q4_K", "Q6_K", "Q2_K"}  # gguf does not quantise to these: their codes are drawn
OF_LLAMA = {
    "attn_q.weight": (HIDDEN, HIDDEN),
    "attn_k.weight": (HIDDEN // 2, HIDDEN),
    "attn_v.weight": (HIDDEN // 2, HIDDEN),
    "attn_output.weight": (HIDDEN, HIDDEN),
}
OF_DENSE = {
    "ffn_gate.weight": (INNER, HIDDEN),
    "ffn_up.weight": (INNER, HIDDEN),
    "ffn_down.weight": (HIDDEN, INNER),
}
OF_EXPERTS = {
    "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
    "ffn_gate_exps.weight": (EXPERTS, OF_EXPERT, HIDDEN),
    "ffn_up_exps.weight": (EXPERTS, OF_EXPERT, HIDDEN),
    "ffn_down_exps.weight": (EXPERTS, HIDDEN, OF_EXPERT),
}
NORMS = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
OF_QWEN3 = {"attn_q_norm.weight": (HIDDEN // HEADS,), "attn_k_norm.weight": (HIDDEN // HEADS,)}
MODELS = {
    "llama": OF_LLAMA | OF_DENSE | NORMS,
    "qwen3moe": OF_LLAMA | OF_EXPERTS | NORMS | OF_QWEN3,
}


def codes_of(values: np.ndarray, kind: str, draws: np.random.Generator) -> np.ndarray:
    quantization = gguf.GGMLQuantizationType[kind]
    if kind not in DRAWN:
        return gguf.quants.quantize(values, quantization)
    numel, nbytes = gguf.GGML_QUANT_SIZES[quantization]
    shape = *values.shape[:-1], values.shape[-1] // numel * nbytes
    # Below 32, the two bytes of a scale are a small number
    return draws.integers(0, 32, shape, dtype=np.uint8)


def write(path: Path, arch: str, kind: str, *, tied: bool = False) -> Path:
    """Writes a model whose matrices are of ``kind``. ``tied``: the embedding is the output layer,
    too."""
    draws = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    if arch == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
    shapes = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCABULARY, HIDDEN)
    for block in range(2):
        shapes |= {f"blk.{block}.{name}": shape for name, shape in MODELS[arch].items()}
    for name, shape in shapes.items():
        values = (0.1 * draws.standard_normal(shape)).astype(np.float32)
        if len(shape) > 1 and "_inp" not in name and (tied or name != "token_embd.weight"):
            made = codes_of(values, kind, draws)
            writer.add_tensor(name, made, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
