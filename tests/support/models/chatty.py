"""A model of 2 layers with a tokenizer of bytes and a chat template, as a folder, and data in every
form that the command line reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
PAIRS = [(f"What is {a}+{b}?", f"{a + b}.") for a in range(6) for b in range(6)]


def save_base(
    folder: Path, *, template: str | None = TEMPLATE, positions: int = 96, width: int = 32
) -> Path:
    """Saves the model, with fresh weights, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def chat_of(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ROWS: dict[str, Callable[[str, str], dict[str, Any]]] = {  # of one sample
    "messages": lambda q, a: {"messages": chat_of(q, a), "id": 7},
    "sharegpt": lambda q, a: {
        "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
    },
    "chat prompt": lambda q, a: {"prompt": chat_of(q, a)[:1], "completion": chat_of(q, a)[1:]},
    "prompt": lambda q, a: {"prompt": q, "completion": a},
    "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
    "question": lambda q, a: {"question": q, "answer": a, "source": "book"},
    "text": lambda q, a: {"text": f"{q} {a}"},
}


def save_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes rows as the name of ``path`` says; without a suffix a folder of `save_to_disk`."""
    import datasets

    data = datasets.Dataset.from_list(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        data.to_parquet(path)
    elif path.suffix == ".csv":
        data.to_csv(path)
    else:
        data.save_to_disk(path)
    return path
