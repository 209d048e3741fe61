"""The sample of `infinity train`: what a saved folder's model writes after a prompt, without the engine.

prompt        the text it is given
continuation  the text it writes after it
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.corpus import Batches
from .model import max_positions

if TYPE_CHECKING:
    import torch

PROMPT_NTOKENS = 32  # of the held-out part, when no prompt is given
TEMPERATURE = 0.8


def sample(
    folder: Path, *, prompt: str | None, ntokens: int, seed: int, tokenizer: Any, batches: Batches, trust: bool = False
) -> tuple[str, str]:
    """Loads the folder as anyone would, without the engine, and continues a prompt. Returns (prompt, continuation)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True, trust_remote_code=trust).eval()
    limit = max_positions(model.config)
    count = min(ntokens, limit // 2)  # the prompt keeps half of the positions at least
    tokens = _prompt_tokens(prompt, tokenizer, batches)[:, -(limit - count) :]
    options = {"do_sample": True, "temperature": TEMPERATURE, "max_new_tokens": count}
    if model.generation_config.pad_token_id is None:
        options["pad_token_id"] = 0  # one sequence: nothing is padded, transformers only wants to know
    torch.manual_seed(seed)
    with torch.no_grad():
        result = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0]
    return _decode(tokens[0], tokenizer), _decode(result[tokens.shape[1] :], tokenizer)


def _prompt_tokens(prompt: str | None, tokenizer: Any, batches: Batches) -> torch.Tensor:
    import torch

    if not prompt:
        return batches.held_out(1)[0][:1, :PROMPT_NTOKENS]
    tokens = list(prompt.encode()) if tokenizer is None else tokenizer(prompt)["input_ids"]
    return torch.tensor([tokens])


def _decode(tokens: torch.Tensor, tokenizer: Any) -> str:
    if tokenizer is not None:
        return tokenizer.decode(tokens)
    return bytes(token for token in tokens.tolist() if 0 < token < 256).decode(errors="replace")


def printable(text: str) -> str:
    """Replaces control characters in what a model wrote, which a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
