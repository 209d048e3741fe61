"""`infinity generate`: continues a prompt with a model, or chats with it, word by word. The weights
may be at home on the host or on NVMe, and are then streamed for every token."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ...errors import ConfigError
from ..cli.answers import print_object
from ..cli.options import FLAG, NUMBER, SEED, TEXT, takes
from ..cli.values import real_from_zero
from ..train.model import check_vocabulary, max_positions
from ..train.ranks import refuse_several
from ..train.sample import printable, prompt_of
from .opened import HOMES, MODEL, find, opened, quiet, with_tokenizer

ABOUT = {
    "description": """\
Continues a prompt, or chats (--chat): one line is one message, an empty line or Ctrl-D ends it, and
Ctrl-C ends an answer. A tokenizer with a chat template answers the prompt as a message."""
}


OPTIONS = (
    MODEL,
    ("--prompt", TEXT, 'what to continue or to answer; "-" reads it from stdin'),
    ("--chat", FLAG, "a conversation: each line is a message"),
    ("--system", TEXT, "the first message of a conversation: how to answer"),
    ("--raw", FLAG, "continue the prompt as it is, without the chat template"),
    ("--max-new-tokens", NUMBER, "of one answer", 256),
    (
        "--temperature",
        takes("T", real_from_zero),
        "0: the likeliest token (default: model's)",
    ),
    ("--top-p", takes("P", float), "draw from the likeliest tokens of this share"),
    ("--seed", SEED, "of what is drawn", 0),
    *HOMES,
    ("--json", FLAG, "prompt and answer as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Writes the answers to stdout. Raises ConfigError for bad input before the model is read."""
    refuse_several("generate")
    _check(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty: give the text that is to be continued")
    with quiet():
        speaker = Speaker(args)
        if args.chat:
            return _chat(speaker, args)
        return _one_answer(speaker, args, prompt)


def _one_answer(speaker: Speaker, args: argparse.Namespace, prompt: str) -> int:
    messages = [{"role": "user", "content": prompt}]
    if args.system:
        messages.insert(0, {"role": "system", "content": args.system})
    answer = speaker.answer(messages, raw=args.raw, show=not args.json)
    if args.json:
        print_object({"prompt": prompt, "answer": answer})
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.chat == (args.prompt is not None):
        which = ", not both" if args.chat else ""
        raise ConfigError(f'give --prompt TEXT or --chat{which}; --prompt "-" reads from stdin')
    if args.chat and (args.raw or args.json):
        raise ConfigError("--raw and --json are for --prompt: a chat has many answers")
    if args.raw and args.system:
        raise ConfigError("--system is a message of a conversation, which --raw leaves out")
    if args.temperature is not None and args.temperature <= COLDEST:
        args.temperature = 0.0
        if args.top_p is not None:
            raise ConfigError("--temperature 0 takes the likeliest token: leave --top-p out")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p {args.top_p}: give more than 0 and at most 1")


def _chat(speaker: Speaker, args: argparse.Namespace) -> int:
    if not speaker.tokenizer.chat_template:
        raise ConfigError(
            f"{args.model} has no chat template: it was not trained on conversations. Continue text"
            " with --prompt"
        )
    messages = [{"role": "system", "content": args.system}] if args.system else []
    asks = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if asks else "")
        except EOFError:
            return 0
        if not line.strip():
            return 0
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _answer(speaker, messages)})
        except KeyboardInterrupt:  # ends this answer; the question is taken back
            print("\n(interrupted)", file=sys.stderr)
            messages.pop()


def _answer(speaker: Speaker, messages: list[dict[str, str]]) -> str:
    """Returns the answer; forgets the oldest turns of a conversation that has become too long."""
    while True:
        try:
            return speaker.answer(messages)
        except TooLong:
            first = 1 if messages[0]["role"] == "system" else 0
            if len(messages) - first < 3:  # the last message alone is too long
                raise
            del messages[first : first + 2]
            print("(the oldest turn is forgotten: the model takes no more)", file=sys.stderr)


COLDEST = 1e-4  # temperatures below draw the likeliest token, or overflow


class TooLong(ConfigError):
    """A prompt that leaves no room for an answer."""


class Speaker:
    """A wrapped model with its tokenizer."""

    def __init__(self, args: argparse.Namespace):
        """Reads the model. Raises ConfigError if it cannot be read."""
        model_files = with_tokenizer(find(args))
        self.tokenizer = model_files.tokenizer
        check_vocabulary(model_files.model_config, self.tokenizer)
        self.model = opened(model_files, args, seed=args.seed)
        self._limit = max_positions(model_files.model_config)
        self._given = {"max_new_tokens": args.max_new_tokens} | _drawing(args)
        self._seed = args.seed

    def answer(
        self, messages: list[dict[str, str]], *, raw: bool = False, show: bool = True
    ) -> str:
        """Returns the answer to a conversation; without a chat template, or ``raw``, what follows
        its last message. ``show``: also writes it to stdout while it comes."""
        import torch

        if raw or not self.tokenizer.chat_template:
            tokens = self.tokenizer(messages[-1]["content"], return_tensors="pt")["input_ids"]
        else:
            tokens = prompt_of(self.tokenizer, messages)
        if tokens.shape[1] >= self._limit:
            raise TooLong(
                f"the prompt has {tokens.shape[1]} tokens, and the model takes {self._limit} with"
                " the answer: give a shorter prompt"
            )
        options = dict(self._given)
        options["max_new_tokens"] = min(options["max_new_tokens"], self._limit - tokens.shape[1])
        if show:
            options["streamer"] = _streamer(self.tokenizer)
        pad = self.tokenizer.pad_token_id
        options["pad_token_id"] = self.tokenizer.eos_token_id if pad is None else pad
        if self.tokenizer.eos_token_id is not None:
            options["eos_token_id"] = self._ends()
        where = next(self.model.parameters()).device
        torch.manual_seed(self._seed)
        tokens = tokens.to(where)
        with torch.no_grad():
            output = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return self.tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)

    def _ends(self) -> list[int]:
        """Returns the tokens that end an answer: the tokenizer's, and the model's own."""
        known = self.model.generation_config.eos_token_id
        own = known if isinstance(known, list) else [] if known is None else [known]
        return list(dict.fromkeys([self.tokenizer.eos_token_id, *own]))


def _streamer(tokenizer: Any) -> Any:
    """Makes what writes an answer to stdout, word by word."""
    from transformers import TextStreamer

    class Printing(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(printable(text), end="\n" if stream_end else "", flush=True)

    return Printing(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _drawing(args: argparse.Namespace) -> dict[str, Any]:
    """Returns how tokens are drawn; what was not given is the model's own."""
    if args.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    options = {"temperature": args.temperature, "top_p": args.top_p}
    options = {name: value for name, value in options.items() if value is not None}
    return options | ({"do_sample": True} if options else {})
