"""`infinity eval`: the scores of a trained model on tasks of lm-eval, or its held-out loss and
perplexity on data of one's own. The weights may be at home on the host or on NVMe.

held out  data that the model was not trained on: all of --data, or what `infinity train` holds out
          of it
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from ...amounts import MOST_NBYTES
from ...errors import ConfigError, InfinityError
from ..cli.answers import print_object
from ..cli.options import (
    BYTES,
    COUNT,
    FLAG,
    FOLDER,
    LENGTH,
    NUMBER,
    PATH,
    SHARE,
    defaults,
    takes,
)
from ..cli.values import MOST, columns
from ..generate.opened import HOMES, MODEL, find, opened, quiet, with_tokenizer
from ..train.corpus import held_out_share
from ..train.examples import ExampleBatches
from ..train.inputs import find_files, read_batches, tell_skipped
from ..train.job import held_out_loss, learned_count
from ..train.model import check_vocabulary, no_cache
from ..train.options import DEFAULT_DATA_LIMIT
from ..train.progress import tell_read
from ..train.ranks import refuse_several
from .harness import find_tasks, score
from .scores import finite, rows_of

if TYPE_CHECKING:
    from rich.console import Console

OF_TASKS = {  # options by their names in the parsed ones
    "include": "--include",
    "num_fewshot": "--num-fewshot",
    "limit": "--limit",
    "apply_chat_template": "--apply-chat-template",
    "confirm_run_unsafe_code": "--confirm-run-unsafe-code",
}
OF_DATA = {
    "held_out": "--held-out",
    "eval_share": "--eval-share",
    "eval_batches": "--eval-batches",
    "sequence_length": "--sequence-length",
    "pack": "--pack",
    "data_limit": "--data-limit",
}
ABOUT = {
    "description": """\
Measures a trained model: --tasks has lm-eval score it (pip install lm-eval), --data computes loss
and perplexity as `infinity train` computes them of what it holds out."""
}


OPTIONS = (
    MODEL,
    "data",
    ("--data", PATH, "samples or text files, as `infinity train` reads them"),
    ("--held-out", FLAG, "of --data only what `infinity train` holds out of it"),
    (
        "--eval-share",
        SHARE,
        "as `infinity train` was given it, for --held-out (default 3%%)",
    ),
    ("--eval-batches", NUMBER, "no more batches (default all)"),
    (
        "--sequence-length",
        LENGTH,
        "tokens in a sample, at most (default as `infinity train`)",
    ),
    ("--pack", FLAG, "several samples of --data in one row of --sequence-length tokens"),
    (
        "--data-limit",
        BYTES,
        f"of text: no more (default all, with --held-out {DEFAULT_DATA_LIMIT})",
    ),
    "tasks",
    (
        "--tasks",
        takes("NAME,NAME"),
        'of lm-eval, as "arc_easy,mmlu_*", or YAML files of tasks of your own',
    ),
    ("--include", FOLDER, "folder with YAML files of tasks, known by name"),
    ("--num-fewshot", COUNT, "examples before each question (default: the task's)"),
    ("--limit", NUMBER, "questions of each task, no more"),
    ("--apply-chat-template", FLAG, "ask in the model's chat template"),
    ("--confirm-run-unsafe-code", FLAG, "run code that the model writes, if a task does"),
    "model and results",
    ("--batch-size", NUMBER, "samples that run at once", 4),
    *HOMES,
    ("--json", FLAG, "the results as one JSON object on stdout"),
    defaults(seed=0),
)


def run(args: argparse.Namespace) -> int:
    """Prints the results on stdout. Raises ConfigError for bad input before weights are read."""
    refuse_several("eval")
    _check(args)
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with quiet():
        measured = (_of_data if args.tasks is None else _of_tasks)(args, console)
    result = finite({"model": str(args.model)} | measured)
    if args.json:
        print_object(result)
    else:
        for line in columns(list(rows_of(result))):
            print(line)
    return 0


def _check(args: argparse.Namespace) -> None:
    if (args.data is None) == (args.tasks is None):
        both = "" if args.data is None else ", not both"
        raise ConfigError(f"give --tasks NAME,NAME or --data PATH{both}: what is to be measured")
    other, names = ("--tasks", OF_TASKS) if args.tasks is None else ("--data", OF_DATA)
    for name, option in names.items():
        value = getattr(args, name)
        if value is not None and value is not False:  # 0 is given
            raise ConfigError(f"{option} is for {other}: leave it out")
    if args.eval_share is not None:
        if not args.held_out:
            raise ConfigError("--eval-share is of what is held out: add --held-out")
        held_out_share(args)  # raises


def _of_data(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns the loss on data. Raises InfinityError for one that is not finite."""
    if args.data_limit is None:
        args.data_limit = DEFAULT_DATA_LIMIT if args.held_out else str(MOST_NBYTES)
    files = find_files(args)
    tell_skipped(files, console)
    model_files = find(args)
    check_vocabulary(model_files.model_config, model_files.tokenizer)
    batches = read_batches(
        args, files, model_files.model_config, model_files.tokenizer, whole=not args.held_out
    )
    if isinstance(batches, ExampleBatches):
        tell_read(console, batches.corpus)
    held_out = batches.held_out(args.eval_batches or MOST)
    count = sum(map(learned_count, held_out))
    if not count:
        raise ConfigError(f"--data: {args.data} has no token that is predicted from another one")
    model = opened(model_files, args)
    with no_cache(model):
        loss = held_out_loss(model, held_out)
    if not math.isfinite(loss):
        raise InfinityError(
            f"The loss is {loss}: weights of {args.model} are not finite, or too large for its"
            " dtype. --dtype fp32 tells which"
        )
    return {
        "data": str(args.data),
        "held_out_tokens": batches.corpus.held_out_ntokens,
        "predicted_tokens": count,
        "held_out_loss": loss,
        "perplexity": math.exp(loss) if loss < MOST_NATS else math.inf,
        "bits_per_byte": loss / math.log(2) if batches.corpus.byte_level else None,
    }


def _of_tasks(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Returns lm-eval's scores."""
    tasks = find_tasks(args)
    model_files = with_tokenizer(find(args))
    check_vocabulary(model_files.model_config, model_files.tokenizer)
    console.print(f"lm-eval: {', '.join(tasks.names)}")
    return score(opened(model_files, args), model_files.tokenizer, tasks, args)


MOST_NATS = 709  # whose exponential is a float
