"""Harness: lm-eval (EleutherAI's lm-evaluation-harness) over a wrapped model."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, InfinityError
from ...library_versions import refuse_older
from ..train.wording import first_line

FILES = (".yaml", ".yml")
GROUP = re.compile(r"^group\s*:", re.M)  # in a task's file: it may name any other task


@dataclass(frozen=True)
class Tasks:
    """Tasks that lm-eval has loaded. ``names``: of tasks, groups and tags, and files."""

    names: list[str]
    manager: Any


def find_tasks(args: argparse.Namespace) -> Tasks:
    """Finds the tasks that ``args.tasks`` names, and loads their questions, which lm-eval may
    download. Raises ConfigError for names that are unknown and tasks that cannot be loaded."""
    asked = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not asked:
        raise ConfigError("--tasks names no task: give as many as you like, as arc_easy,hellaswag")
    files = [name for name in asked if name.endswith(FILES)]
    for name in files:
        if not Path(name).is_file():
            raise ConfigError(
                f"--tasks: there is no file {name}: give the path of one, or the name of a task"
            )
    if args.include is not None and not args.include.is_dir():
        raise ConfigError(f"--include {args.include} is no folder: give one with files of tasks")
    refuse_older("lm-eval")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"--tasks needs lm-eval ({error}): pip install lm-eval") from None
    # It warns of any model that is not named by a text
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    try:
        manager = TaskManager(
            include_path=args.include and str(args.include), include_defaults=False
        )
        single = all(name in manager.all_subtasks or name in files for name in asked)
        if not single or any(GROUP.search(Path(name).read_text()) for name in files):
            # Its own thousands of tasks take seconds to list
            manager = TaskManager(include_path=args.include and str(args.include))
    except Exception as error:  # noqa: BLE001 - a file of a task may be wrong in every way
        raise ConfigError(
            f"lm-eval cannot read the tasks of --include: {first_line(error)}"
        ) from None
    names: list[str] = []
    for name in asked:
        matches = [name] if name in files else manager.match_tasks([name])
        if not matches:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f": did you mean {' or '.join(near)}?" if near else "."
            raise ConfigError(
                f"--tasks: lm-eval knows no task {name}{hint} `lm-eval ls tasks` lists all; a task"
                " of your own is a YAML file, given by its path or in the folder of --include"
            )
        names += [each for each in matches if each not in names]
    _load(manager, names, allowed=args.confirm_run_unsafe_code)
    return Tasks(names, manager)


def _load(manager: Any, names: list[str], *, allowed: bool) -> None:
    """Loads the tasks. lm-eval does so again when it scores them, and finds them in the cache."""
    for name in names:
        try:
            loaded = manager.load([name])["tasks"]
        except InfinityError:
            raise
        except Exception as error:  # noqa: BLE001 - no network, no such file, a wrong one
            raise ConfigError(
                f"--tasks: lm-eval cannot load {name}: {first_line(error).rstrip('.')}. Questions"
                " of its own tasks are downloaded once, with a network"
            ) from None
        unsafe = [each for each, task in loaded.items() if getattr(task, "UNSAFE_CODE", False)]
        if unsafe and not allowed:
            raise ConfigError(
                f"--tasks: {unsafe[0]} runs code that the model writes. If you accept that:"
                " --confirm-run-unsafe-code"
            )


def score(model: Any, tokenizer: Any, tasks: Tasks, args: argparse.Namespace) -> dict[str, Any]:
    """Returns lm-eval's scores of ``model``, with its own seeds."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    asked = HFLM(
        pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=args.batch_size
    )
    scores = simple_evaluate(
        asked,
        tasks=tasks.names,
        task_manager=tasks.manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=args.apply_chat_template,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
        log_samples=False,
    )
    return {
        "tasks": scores["results"],
        "fewshot": scores["n-shot"],
        "samples": scores.get("n-samples", {}),
        "versions": scores["versions"],
    }
