"""The sample of `infinity train`: text that the trained model generates from its homes, within the
limits that it trained in.

job           of :mod:`.job`: model, data, tokenizer and ranks
prompt        the text the model is given
continuation  the text it generates
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from .model import at_model, max_positions

if TYPE_CHECKING:
    import torch

PROMPT_NTOKENS = 32  # of the held-out part, if no prompt is given
TEMPERATURE = 0.8
MOST_SECONDS = 60.0  # weights on a disk are read once for each token


def sample(job: Any, *, prompt: str | None, ntokens: int) -> tuple[str, str]:
    """Continues a prompt by at most ``ntokens`` tokens, and for at most a minute. Returns (prompt,
    continuation). Every rank calls this."""
    import torch

    model, tokenizer = job.model.eval(), job.tokenizer
    limit = max_positions(model.config)
    count = min(ntokens, limit // 2)  # leaves at least half of the positions to the prompt
    inputs = _prompt(prompt, tokenizer, job.batches)
    if len(inputs) == 1:
        inputs["input_ids"] = inputs["input_ids"][:, -(limit - count) :]
    else:  # none of its pictures is cut
        count = min(count, limit - inputs["input_ids"].shape[1])
    inputs = at_model(model, inputs)
    tokens = inputs["input_ids"]
    options = {"do_sample": True, "temperature": TEMPERATURE, "max_new_tokens": count}
    if model.generation_config.pad_token_id is None:
        options["pad_token_id"] = 0  # unused with one sequence, but transformers asks for it
    torch.manual_seed(job.args.seed)
    with torch.no_grad():
        result = model.generate(
            **{"attention_mask": torch.ones_like(tokens)} | inputs,
            stopping_criteria=[_limit(job)],
            **options,
        )[0]
    shown = without_repeats(tokens[0].tolist(), getattr(job.batches.corpus, "image_tokens", ()))
    return _decode(tokens[0, shown], tokenizer), _decode(result[tokens.shape[1] :], tokenizer)


def _limit(job: Any) -> Any:
    """Makes what ends all ranks' generation after the same token, when the time is over on one."""
    import torch

    end, ranks = time.monotonic() + MOST_SECONDS, job.ranks

    def is_over(tokens: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        over = bool(ranks.largest(int(time.monotonic() > end)))
        return torch.full((tokens.shape[0],), over, device=tokens.device)

    return is_over


def _prompt(prompt: str | None, tokenizer: Any, batches: Any) -> dict[str, Any]:
    import torch

    from .examples import ExampleBatches

    if not prompt:
        return batches.prompt(PROMPT_NTOKENS)
    if tokenizer is None:
        return {"input_ids": torch.tensor([list(prompt.encode())])}
    if isinstance(batches, ExampleBatches) and tokenizer.chat_template:
        return {"input_ids": prompt_of(tokenizer, [{"role": "user", "content": prompt}])}
    return {"input_ids": torch.tensor([tokenizer(prompt)["input_ids"]])}


def without_repeats(tokens: list[int], image_tokens: Container[int]) -> list[int]:
    """Returns the places of tokens, of the tokens of a picture only the first of a run."""
    return [
        at
        for at, token in enumerate(tokens)
        if token not in image_tokens or not at or tokens[at - 1] != token
    ]


def prompt_of(tokenizer: Any, messages: list[dict[str, str]]) -> torch.Tensor:
    """Makes the tokens of a conversation that the model is to answer: int64 [1, tokens]."""
    rendered = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return rendered["input_ids"]


def _decode(tokens: torch.Tensor, tokenizer: Any) -> str:
    if tokenizer is not None:
        return tokenizer.decode(tokens)
    return bytes(token for token in tokens.tolist() if 0 < token < 256).decode(errors="replace")


def printable(text: str) -> str:
    """Replaces control characters, which a terminal would interpret, in generated text."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
