"""Presets, option files and checkpoints: words inserted before the command line's own, which
override them.

preset      options of `infinity train` under one name
file        TOML, JSON or YAML: the fields of Config and, in the table ``train``, options; or a
            DeepSpeed JSON, with the numbers of its loop
checkpoint  has the options of the job that saved it, with which --resume goes on
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...untrusted import read_table
from .values import value_of

TABLE = "train"
# Options that a job which goes on is given anew, or never by a file: some send data away, or run
# code.
APART = (
    *("resume", "overwrite", "checkpoint", "json", "trace", "config", "preset", "help"),
    *("trust_remote_code", "push", "log", "tensorboard"),
)
ALTERNATIVES = (
    {"--steps", "--epochs", "--minutes"},
    {"--eval-data", "--eval-share"},
    {"--scheduler", "--warmup-steps"},
    {"--lora", "--lora-rank"},
    {"--checkpoint-every", "--checkpoint-overhead"},
    {"--resume", "--overwrite"},
)
# What an option takes the place of: given later, those that were said before do not count.
INSTEAD = {option: group for group in ALTERNATIVES for option in group}
INSTEAD["--mesh"] = {"--mesh", "--pipeline-schedule", "--pipeline-chunks"}
PRESETS = {
    "full": [],
    "lora": ["--lora-rank=16", "--lr=2e-4"],
    "cpu-only": ["--device=cpu", "--gradient-checkpointing"],
}


def expanded(argv: Sequence[str]) -> list[str]:
    """Returns the words of a command, with those of its preset and its file before its own. Raises
    ConfigError for an invalid file."""
    words = list(argv)
    if words[:1] != ["train"]:
        return words
    rest = words[1:]
    file, preset = value_of("--config", rest), value_of("--preset", rest)
    of_file = words_of_table(Path(file), rest) if file is not None and Path(file).is_file() else []
    preset = preset or value_of("--preset", of_file)
    for option in ("--config", "--deepspeed"):
        if (file := value_of(option, rest)) is not None:
            from ..train.of_deepspeed import words_of_deepspeed

            of_file += words_of_deepspeed(Path(file), rest)
    words = _without(of_file, _replaced(rest)) + rest
    words = _without(PRESETS.get(preset or "", ()), _replaced(words)) + words
    if "--resume" in words and (checkpoint := value_of("--checkpoint", words)):
        words = [*_words_of_checkpoint(Path(checkpoint), words), *words]
    return ["train", *words]


def _replaced(given: Sequence[str]) -> set[str]:
    """Returns the options that those which are ``given`` take the place of."""
    options = {word.partition("=")[0] for word in given}
    return set().union(*(INSTEAD[option] for option in options & INSTEAD.keys()))


def _without(words: Sequence[str], options: set[str]) -> list[str]:
    """Returns words before the command line's, without some options and what follows them."""
    kept, keeps = [], True
    for word in words:
        keeps = word.partition("=")[0] not in options if word.startswith("--") else keeps
        kept += [word] if keeps else []
    return kept


def words_of(args: argparse.Namespace, apart: Collection[str] = APART) -> list[str]:
    """Returns the words of the options of `infinity train` that differ from their defaults, but
    those ``apart``. Paths that are there are whole: a job may go on in another folder."""
    from . import parser_of

    words = []
    for action in parser_of("train")._actions:
        value = getattr(args, action.dest, None)
        if value is None or value == action.default or action.dest in apart:
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Path) and (each.exists() or action.dest in ("out", "receipt")):
                each = os.path.abspath(each)
            option = action.option_strings[0]
            words.append(option if action.nargs == 0 else f"{option}={each}")
    return words


def _words_of_checkpoint(folder: Path, given: Sequence[str]) -> list[str]:
    """Returns the options of the job that saved a checkpoint, without those that are ``given`` anew
    or that no file may give; none if it is damaged, or a script's."""
    from ..train.places import saved_extra
    from . import parser_of

    saved = saved_extra(folder).get("words", [])
    known = set(parser_of("train").known)
    known -= {f"--{name.replace('_', '-')}" for name in APART}
    known -= {word.partition("=")[0] for word in given} | _replaced(given)
    words = saved if isinstance(saved, list) else []
    return [word for word in words if isinstance(word, str) and word.partition("=")[0] in known]


def words_of_table(path: Path, given: Sequence[str]) -> list[str]:
    """Returns the words for the table ``train`` of a file. Lists are repeatable options: values on
    the command line replace them. Raises ConfigError, with the file's key, for an unknown option or
    an invalid value."""
    from . import parser_of

    file = read_table(path)
    if table := file.get(TABLE, {}):
        from ...ext.migrate.other_tools import refuse_others  # loads torch

        refuse_others(file, f"{path}: ")  # LitGPT's has such a table, too
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {TABLE} is not a table of options")
    options = parser_of("train")
    words: list[str] = []
    for name, value in table.items():
        said = _words_of(f"{path}: {TABLE}.{name}", name, value, options)
        if not isinstance(value, list) or value_of(said[0] if said else "", given) is None:
            words += said
    return words


def _words_of(key: str, name: str, value: Any, options: argparse.ArgumentParser) -> list[str]:
    """Returns the words for one key. ``key``: its name in error messages."""
    known = options.known
    option = f"--{name.replace('_', '-')}"
    if option not in known or option in ("--help", "--config"):
        near = difflib.get_close_matches(option, known, n=1)
        hint = (
            f": did you mean {near[0][2:].replace('-', '_')}?"
            if near and option not in known
            else ""
        )
        raise ConfigError(f"{key} is not an option of `infinity train` in a file{hint}")
    is_switch = known[option].nargs == 0
    if isinstance(value, bool) and is_switch:
        words = [option] if value else []
    elif isinstance(value, list):
        words = [word for each in value for word in (option, str(each))]
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool) and not is_switch:
        words = [f"{option}={value}"]
    else:
        wanted = "true or false" if is_switch else "text, a number, or a list"
        raise ConfigError(f"{key} is a {type(value).__name__}: give {wanted}")
    options.exit_on_error = False
    try:
        options.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{key}: {error.message}") from None
    return words
