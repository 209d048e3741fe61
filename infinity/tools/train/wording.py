"""Wording: says in a command's own options what the library's messages say in fields of Config, and
what an option that is none may have been meant as."""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

CONFIG = re.compile(r"Config\(((?:\w+=(?:'[^']*'|\[[^\]]*\]|[\w.]*)(?:, )?)+)\)")
PAIR = re.compile(r"(\w+)=('[^']*'|\[[^\]]*\]|[\w.]*)")
BUDGET = re.compile(r"(?<!['\"])\b(device_memory|host_memory|nvme_capacity)\b(?!=)")
SWITCHES = ("True", "False")
# Options of other trainers, by what they are called here.
KNOWN_AS = {
    "--output-dir": "--out",
    "--save-dir": "--out",
    "--model-name-or-path": "--model",
    "--dataset": "--data",
    "--dataset-name": "--data",
    "--train-file": "--data",
    "--load-in-4bit": "--quantize nf4",
    "--load-in-8bit": "--quantize int8",
    "--quantization": "--quantize",
    "--qlora": "--lora --quantize nf4",
    "--lora-r": "--lora-rank",
    "--gradient-accumulation-steps": "--accumulate",
    "--per-device-train-batch-size": "--batch-size",
    "--micro-batch-size": "--micro-batch",
    "--learning-rate": "--lr",
    "--num-train-epochs": "--epochs",
    "--num-epochs": "--epochs",
    "--max-steps": "--steps",
    "--max-seq-length": "--sequence-length",
    "--max-length": "--sequence-length",
    "--seq-length": "--sequence-length",
    "--seq-len": "--sequence-length",
    "--packing": "--pack",
    "--bf16": "--dtype bf16",
    "--fp32": "--dtype fp32",
    "--stage": "--deepspeed",
    "--zero-stage": "--deepspeed",
    "--offload-folder": "--nvme-path",
    "--save-steps": "--checkpoint-every",
    "--resume-from-checkpoint": "--resume",
    "--max-tokens": "--max-new-tokens",
    "--last": "--steps",
    "--stream": "",  # it always does
    "--shell": "",
    "--validation-split": "",
}
LEAST_LIKENESS = 0.7  # of a word that is meant


def option_of(field: str) -> str:
    """Returns the option that sets a field of Config."""
    return "--nvme-path" if field == "nvme_paths" else f"--{field.replace('_', '-')}"


def in_options(message: str, options: Collection[str]) -> str:
    """Returns the message with `Config(name=value)` and budgets as options, where the command has
    them: `Config(params='nvme')` becomes `--params nvme`."""

    def configured(found: re.Match[str]) -> str:
        pairs = [(option_of(name), value) for name, value in PAIR.findall(found[1])]
        if not all(option in options for option, _ in pairs):
            return found[0]
        words = [f"{option} {_value(value)}".rstrip() for option, value in pairs]
        return (" " if any(value for _, value in pairs) else ", ").join(words)

    def budget(found: re.Match[str]) -> str:
        return option if (option := option_of(found[1])) in options else found[0]

    return BUDGET.sub(budget, CONFIG.sub(configured, message))


def _value(value: str) -> str:
    if value.startswith("["):
        return value.strip("[]'") if "'" in value else "FOLDER"
    return "" if value in SWITCHES else value.strip("'")


class _Formatter(logging.Formatter):
    def __init__(self, options: Collection[str]):
        super().__init__()
        self._options = options

    def format(self, record: logging.LogRecord) -> str:
        return in_options(super().format(record), self._options)


@contextmanager
def logging_in_options(options: Collection[str]) -> Iterator[None]:
    """Prints the library's warnings on stderr in the command's options inside the block."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Formatter(options))
    logger = logging.getLogger("infinity")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def meant(word: str, names: Collection[str], without: Collection[str]) -> str:
    """Returns what an unknown word of a command may have been meant as, in parentheses. ``names``:
    of its options. ``without``: of its arguments that have none."""
    if not word.startswith("-"):
        if "--model" in names and "--data" in names:
            return " (did you mean --model MODEL --data DATA?)"
        return ""
    option = word.partition("=")[0].lower().replace("_", "-")
    if option in KNOWN_AS:
        known = KNOWN_AS[option]
        near = [known] if known.partition(" ")[0] in names else []
    else:
        near = difflib.get_close_matches(option, names, n=1, cutoff=LEAST_LIKENESS)
    if not near and (name := option[2:].upper()) in (*without, "MODEL", "SHELL") and without:
        return f" ({name} comes without an option)"
    if not near and "SCRIPT" in without:
        return " (options of the script come after its name)"
    return f" (did you mean {near[0]}?)" if near else ""


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
