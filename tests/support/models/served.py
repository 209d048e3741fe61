"""Tiny models of the families that are written as GGUF, with tokenizers trained on a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TEXT = [
    "The quick brown fox doesn't jump over 1234 lazy dogs; they'll sleep.",
    "Numbers: 3.14159, 42 and 1000000.\n\n\tIndented naïve café text!",
    "def function(argument): return argument + 1  # comment",
] * 4
SPECIAL = ["<|start|>", "<|end|>", "<|pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
# Name -> its class of transformers, settings, and the pre-tokenizer
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "gpt-2"),
    "llama, tied, biases, llama3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
        },
        "llama-bpe",
    ),
    "mistral, head_dim": ("Mistral", {"head_dim": 32, "sliding_window": 64}, "smollm"),
    "qwen2": ("Qwen2", {}, "qwen2"),
    "qwen3, tied, head_dim": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}, "qwen2"),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}, "qwen2"),
    "llama of letters": ("Llama", {}, "letters"),
}


def splits(pre: str) -> Any:
    """The pre-tokenizer that llama.cpp knows by this name."""
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as parts

    from infinity.tools.export.vocabulary import PRES

    if pre == "letters":
        return parts.Metaspace(prepend_scheme="first", split=False)
    key = next(steps for (steps, _), name in PRES.items() if name == pre)
    whole = {"ByteLevel": parts.ByteLevel(add_prefix_space=False), "Digits": parts.Digits(True)}
    if key[0] in whole:
        return parts.Sequence([whole[step] for step in key])
    split = parts.Split(Regex(key[0]), "isolated")
    return parts.Sequence([split, parts.ByteLevel(add_prefix_space=False, use_regex=False)])


def save_tokenizer(folder: Path, pre: str) -> Any:
    """Trains a tokenizer and saves it."""
    from tokenizers import Tokenizer, decoders, models, processors, trainers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers.tokenization_utils_base import generate_merges

    letters = pre == "letters"
    made = Tokenizer(models.BPE(byte_fallback=letters, ignore_merges=pre == "llama-bpe"))
    made.pre_tokenizer = splits(pre)
    made.decoder = decoders.ByteLevel()
    alphabet = [] if letters else ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[f"<0x{n:02X}>" for n in range(256)] if letters else [],
        initial_alphabet=alphabet,
    )
    made.train_from_iterator(TEXT, trainer)
    if letters:
        # As SentencePiece's: all pairs that make a token, and not only those that were seen
        tokens = {token: at + 1 for token, at in made.get_vocab().items()}
        tokens |= {"<unk>": 0}
        merges = generate_merges(tokens)
        model = models.BPE(tokens, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        made = Tokenizer(model)
        made.pre_tokenizer = splits(pre)
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[2],
        unk_token="<unk>" if letters else None,
    )
    tokenizer.add_tokens(["[ENTITY]"])
    if pre in ("llama-bpe", "letters"):
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A",
            special_tokens=[(SPECIAL[0], tokenizer.bos_token_id)],
        )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_served(folder: Path, name: str, *, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a model of ``MODELS``, whose vocabulary has three rows without a token."""
    kind, settings, pre = MODELS[name]
    tokenizer = save_tokenizer(folder, pre)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer) + 3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES | {"rope_parameters": None} | settings,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():  # norms and biases start at one and zero
            param.add_(torch.randn_like(param), alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    return folder
