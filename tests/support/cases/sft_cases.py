"""Texts for TRL's trainers, and the tokenizer of their 67 words."""

from __future__ import annotations

import random
from typing import Any

from trainer_cases import SEED


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(64))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def texts(**lengths: int) -> Any:
    """Twelve rows, each with one text of so many words for each name."""
    import datasets

    drawn = random.Random(SEED)
    return datasets.Dataset.from_list(
        [
            {
                name: "".join(f" w{drawn.randrange(64)}" for _ in range(n))
                for name, n in lengths.items()
            }
            for _ in range(12)
        ]
    )
