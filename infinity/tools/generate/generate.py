"""`infinity generate`: continues a prompt with a model, or chats with it, word by word. The weights
may be at home on the host or on NVMe, and are then streamed for every token."""

from __future__ import annotations

import argparse
import json
import logging as python_logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import infinity

from ...errors import ConfigError
from ...library_versions import refuse_older
from ..cli.values import a_seed, real_from_zero
from ..train.folders import check_packed, is_streamed
from ..train.model import (
    ADAPTER_CONFIG,
    build_model,
    check_vocabulary,
    find_model,
    max_positions,
    read_model_config,
    read_tokenizer,
)
from ..train.options import FLAG, FOLDER, HOME, NUMBER, PATH, QUANTIZE
from ..train.sample import printable, prompt_of
from ..train.settings import check_device, engine_config, paths_of

DESCRIPTION = """\
Continues a prompt, or chats (--chat): one line is one message, an empty line or Ctrl-D ends it, and
Ctrl-C ends an answer. A tokenizer with a chat template answers the prompt as a message."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt, or chat",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", **PATH, help="folder of a model or an adapter, or a name on the Hugging Face hub")
    add("--prompt", metavar="TEXT", help='what to continue or to answer; "-" reads it from stdin')
    add("--chat", **FLAG, help="a conversation: each line is a message")
    add("--system", metavar="TEXT", help="the first message of a conversation: how to answer")
    add("--raw", **FLAG, help="continue the prompt as it is, without the chat template")
    add("--max-new-tokens", **NUMBER, default=256, help="of one answer (default 256)")
    add(
        "--temperature",
        type=real_from_zero,
        metavar="T",
        help="0: the likeliest token (default: model's)",
    )
    add("--top-p", type=float, metavar="P", help="draw from the likeliest tokens of this share")
    add("--seed", type=a_seed, default=0, metavar="N", help="of what is drawn (default 0)")
    add("--params", **HOME, help="home of the weights (default auto)")
    add("--nvme-path", action="append", **FOLDER, help="swap files go here")
    add("--host-memory", metavar="BYTES", help='budget, as "8GiB"')
    add("--device-memory", metavar="BYTES", help='budget, as "8GiB"')
    add("--device", metavar="DEVICE", help='what computes: "cuda", "cuda:1" or "cpu"')
    add("--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="of the weights")
    add("--quantize", **QUANTIZE, help="pack the weights in fewer bits, as they are read")
    add("--trust-remote-code", **FLAG, help="run Python code that lies in the folder")
    add("--json", **FLAG, help="prompt and answer as one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Writes the answers to stdout. Raises ConfigError for bad input before the model is read."""
    _check(args)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty: give the text that is to be continued")
    with _quiet():
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
        print(json.dumps({"prompt": prompt, "answer": answer}))
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what libraries tell each other, and where the weights are: nothing is trained."""
    logger = python_logging.getLogger("infinity")
    level = logger.level
    logger.setLevel(python_logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


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


def _refuse_missing(line: str) -> None:
    raise ConfigError(f"{line}. That is not a trained model: give a folder that has all weights.")


COLDEST = 1e-4  # temperatures below draw the likeliest token, or overflow


class TooLong(ConfigError):
    """A prompt that leaves no room for an answer."""


class Speaker:
    """A wrapped model with its tokenizer."""

    def __init__(self, args: argparse.Namespace):
        """Reads the model. Raises ConfigError if it cannot be read."""
        import torch

        folder = find_model(args.model, option="", adapters=True)
        if folder.is_file():
            raise ConfigError(f"{folder} is a file: give the folder of a model, with its weights")
        check_device(args.device)
        trust = args.trust_remote_code
        base = _base_of(folder)
        settings = _settings(args)
        model_config = read_model_config(base, trust=trust)
        check_packed(base, model_config, args.quantize, trains_all=False)
        self.tokenizer = read_tokenizer(folder, trust=trust) or read_tokenizer(base, trust=trust)
        if self.tokenizer is None:
            raise ConfigError(
                f"{folder} has no tokenizer: it cannot be given text. Copy the tokenizer files of"
                " its base into it (tokenizer.json, tokenizer_config.json)."
            )
        check_vocabulary(model_config, self.tokenizer)
        stored = getattr(model_config, "dtype", None) or torch.float32
        dtype = {"auto": "bf16" if stored == torch.bfloat16 else "fp32"}.get(args.dtype, args.dtype)
        model = build_model(
            base,
            model_config,
            dtype=dtype,
            seed=args.seed,
            say=_refuse_missing,
            trust=trust,
            whole=base != folder,
        )
        if is_streamed(model, base):
            settings["weights"] = str(base)
        if args.quantize is not None:
            infinity.quantize(model.requires_grad_(False), args.quantize)
        if base != folder:
            model = _with_adapter(model, folder)
        self.model, _ = infinity.wrap_model(model, None, engine_config(settings, model))
        self.model.eval()
        self._limit = max_positions(model_config)
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
        given = dict(self._given)
        given["max_new_tokens"] = min(given["max_new_tokens"], self._limit - tokens.shape[1])
        if show:
            given["streamer"] = _streamer(self.tokenizer)
        pad = self.tokenizer.pad_token_id
        given["pad_token_id"] = self.tokenizer.eos_token_id if pad is None else pad
        if self.tokenizer.eos_token_id is not None:
            given["eos_token_id"] = self._ends()
        where = next(self.model.parameters()).device
        torch.manual_seed(self._seed)
        tokens = tokens.to(where)
        with torch.no_grad():
            found = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **given)
        return self.tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True)

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


def _base_of(folder: Path) -> Path:
    """Returns the folder of the weights: an adapter names that of its base."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return folder
    from ...untrusted import parse_json, read_text

    try:
        name = parse_json(read_text(folder / ADAPTER_CONFIG)).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder / ADAPTER_CONFIG} is not an adapter's: {error}") from None
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{folder / ADAPTER_CONFIG} does not name the model that it adapts")
    try:
        found = find_model(Path(name), option="")
    except ConfigError as error:
        raise ConfigError(
            f"the adapter {folder} names its base {name}, which cannot be read here: change"
            f" base_model_name_or_path in {folder / ADAPTER_CONFIG} ({error})"
        ) from None
    return found


def _with_adapter(model: Any, folder: Path) -> Any:
    refuse_older("peft")
    try:
        from peft import PeftModel
    except ImportError:
        raise ConfigError(f"{folder} is an adapter, which needs peft: pip install peft") from None
    if not any(folder.glob("adapter_model.*")):
        raise ConfigError(
            f"{folder} has no adapter_model.safetensors: give the folder that PEFT saved"
        )
    try:
        return PeftModel.from_pretrained(model, folder)
    except Exception as error:  # noqa: BLE001 - an adapter may be damaged in every way
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"peft cannot load the adapter {folder}: {line}") from None


def _drawing(args: argparse.Namespace) -> dict[str, Any]:
    """Returns how tokens are drawn; what was not given is the model's own."""
    if args.temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    given = {"temperature": args.temperature, "top_p": args.top_p}
    given = {name: value for name, value in given.items() if value is not None}
    return given | ({"do_sample": True} if given else {})


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the engine's options that were given. A folder for swap files is found if needed."""
    given = {
        "params": args.params,
        "nvme_paths": paths_of(args.nvme_path) or "auto",
        "host_memory": args.host_memory,
        "device_memory": args.device_memory,
        "device": args.device,
    }
    return {name: value for name, value in given.items() if value is not None}
