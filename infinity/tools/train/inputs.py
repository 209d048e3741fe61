"""The inputs of `infinity train`: the model's configuration, its tokenizer, and the data as
batches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from mimetypes import guess_type
from typing import TYPE_CHECKING, Any

from ...amounts import parse_nbytes
from ...errors import ConfigError
from ..cli.amounts import format_count
from .corpus import Batches, TextFiles, find_text_files, held_out_share, read_corpus
from .example_files import ExampleFiles, find_examples
from .examples import ExampleBatches, Examples, read_examples
from .model import choose_sequence_length, read_for
from .options import DEFAULT_ROW_LENGTH, DEFAULT_STEPS, set_defaults
from .pictures import read_pictures, read_processor, takes_pictures
from .progress import show_examples
from .ranks import Ranks

if TYPE_CHECKING:
    from rich.console import Console


def find_files(args: argparse.Namespace) -> TextFiles | ExampleFiles:
    """Finds what ``--data`` has. Raises ConfigError for options that do not go with it."""
    files = find_examples(args.data) or find_text_files(args.data)
    _check_data_options(args, files)
    find_eval_files(args, files)  # raises before anything is read
    return files


def find_eval_files(
    args: argparse.Namespace, files: TextFiles | ExampleFiles
) -> TextFiles | ExampleFiles | None:
    """Finds what ``--eval-data`` has, if it is given. Raises ConfigError if that is of another kind
    than the ``files`` of ``--data``."""
    if (path := getattr(args, "eval_data", None)) is None:
        return None
    with of_eval_data():
        eval_files = find_examples(path) or find_text_files(path)
    if type(eval_files) is not type(files):
        kinds = ("samples", "running text")
        this, other = kinds if isinstance(eval_files, ExampleFiles) else kinds[::-1]
        raise ConfigError(
            f"--eval-data {path} has {this}, and --data {other}: both have to be of one kind."
        )
    return eval_files


@contextmanager
def of_eval_data() -> Iterator[None]:
    """Makes errors of the block name --eval-data."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("--data", "--eval-data")) from None


def _check_data_options(args: argparse.Namespace, files: TextFiles | ExampleFiles) -> None:
    if isinstance(files, ExampleFiles):
        return
    remedies = {"pack": "Leave it out: every row of text is full.", "epochs": "Give --steps"}
    for option, remedy in remedies.items():
        if getattr(args, option, None):
            raise ConfigError(
                f"--{option} is for samples, and {files.source} is running text. {remedy}"
            )


def tell_skipped(files: TextFiles | ExampleFiles, console: Console) -> None:
    """Prints which files of the data are left out."""
    if isinstance(files, ExampleFiles):
        skipped, why = files.left_out, "no samples in it"
        if any((guess_type(name)[0] or "").startswith("image/") for name in skipped):
            why += "; pictures are read by the paths that samples name"
    else:
        skipped, why = files.skipped, "not UTF-8 text"
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        console.print(
            f"{files.source}: {format_count(len(skipped), 'file')} left out ({why}): {names}"
        )


@dataclass(frozen=True)
class Inputs:
    """What is read for a job: the model's configuration, its tokenizer, if it has one, and the
    data."""

    model_config: Any
    tokenizer: Any
    batches: Batches | ExampleBatches


def read_inputs(
    args: argparse.Namespace, files: TextFiles | ExampleFiles, ranks: Ranks, console: Console
) -> Inputs:
    """Reads the model's configuration, its tokenizer and the data, and sets the options that depend
    on them. Shows what samples look like."""
    model_config, tokenizer = read_for(args)
    per_step = args.accumulate * ranks.data_count
    batches = read_batches(
        args, files, model_config, tokenizer, per_step=per_step, say=console.print
    )
    of_samples = isinstance(batches, ExampleBatches)
    if args.minutes is None:
        epoch = batches.steps_of(args.epochs or 1.0) if of_samples else DEFAULT_STEPS
        args.steps = args.steps or epoch
    set_defaults(args)
    if of_samples:
        show_examples(console, batches.corpus, tokenizer)
    if isinstance(batches, ExampleBatches) and batches.evaluated is not None:
        held_out = batches.held_out_corpus
        console.print(
            f"{held_out.source}: {format_count(held_out.held_out_count, 'row')} to measure"
        )
    return Inputs(model_config, tokenizer, batches)


def read_batches(
    args: argparse.Namespace,
    files: TextFiles | ExampleFiles,
    model_config: Any,
    tokenizer: Any,
    *,
    per_step: int = 1,
    whole: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Batches | ExampleBatches:
    """Reads the data, and that of ``--eval-data``. ``per_step``: batches of a step, on all ranks.
    ``whole``: all of it is held out. Raises ConfigError."""
    share = 1.0 if whole else held_out_share(args)
    read = partial(_read_batches, args, model_config, tokenizer, per_step=per_step, say=say)
    batches = read(files, share=share)
    if (held_out := find_eval_files(args, files)) is None:
        return batches
    with of_eval_data():
        return replace(batches, evaluated=read(held_out, share=1.0))


def _read_batches(
    args: argparse.Namespace,
    model_config: Any,
    tokenizer: Any,
    files: TextFiles | ExampleFiles,
    *,
    share: float,
    per_step: int,
    say: Callable[[str], None],
) -> Batches | ExampleBatches:
    if isinstance(files, ExampleFiles):
        length = choose_sequence_length(args.sequence_length, model_config, DEFAULT_ROW_LENGTH)
        how = {"sequence_length": length, "pack": args.pack, "share": share}
        corpus: Examples | None = None
        if takes_pictures(model_config, args.model):
            processor = partial(read_processor, args.model, trust=args.trust_remote_code)
            corpus = read_pictures(
                files, model_config, processor, batch_size=args.batch_size, say=say, **how
            )
        return ExampleBatches(
            corpus=corpus or read_examples(files, tokenizer, **how),
            batch_size=args.batch_size,
            sequence_length=length,
            seed=args.seed,
            per_step=per_step,
        )
    length = choose_sequence_length(args.sequence_length, model_config)
    limit_nbytes = parse_nbytes(args.data_limit, "--data-limit")
    if not limit_nbytes:
        raise ConfigError(f"--data-limit {args.data_limit}: give more than 0")
    corpus = read_corpus(
        files, sequence_length=length, limit_nbytes=limit_nbytes, tokenizer=tokenizer, share=share
    )
    return Batches(
        corpus=corpus, batch_size=args.batch_size, sequence_length=length, seed=args.seed
    )
