"""Places: checks the files and folders that a job writes before it begins, not after hours."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from ...core.machine.sizes import format_nbytes
from ...errors import CapacityError, ConfigError, InfinityError, UsageError
from ...files.outputs import MODEL_NAMES, Output, check_free, check_outputs, existing
from ..verify.reading import read_receipt
from ..watch.timeline import BEGIN
from .corpus import HELD_OUT_SHARE

TENSORBOARD = "tensorboard"
OF_TRAINER = "infinity-train.json"  # in a folder of checkpoints that a trainer of TRL saves
NOTED = "FixedValues"  # the name of what the job says of itself, in their states
CHECKPOINT_NAMES = re.compile(r"manifest\.json")


def has_checkpoint(folder: Path | None) -> bool:
    """Returns whether a save was ever completed in ``folder``: a killed one leaves no manifest."""
    return folder is not None and (
        (folder / "manifest.json").is_file() or trainer_checkpoint(folder) is not None
    )


def trainer_checkpoint(folder: Path | None) -> Path | None:
    """Returns the newest whole checkpoint of a job with --method: its state is written last."""
    if folder is None or not (folder / OF_TRAINER).is_file():
        return None
    states = folder.glob("checkpoint-*/trainer_state.json")
    newest = max(states, key=lambda path: path.stat().st_mtime_ns, default=None)
    return newest and newest.parent


def check_places(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Raises ConfigError if an output is also an input of the job, or has content that must not be
    replaced; StorageError if it cannot be written."""
    outputs = {
        "out": args.out and Output("--out", args.out, replaces=MODEL_NAMES),
        "checkpoint": (
            args.checkpoint and Output("--checkpoint", args.checkpoint, replaces=CHECKPOINT_NAMES)
        ),
        "trace": args.trace and Output("--trace", args.trace, made=BEGIN),
        "tensorboard": args.tensorboard and Output("--tensorboard", args.tensorboard),
        # No file of this kind is replaced without being asked for.
        "receipt": args.receipt and Output("--receipt", args.receipt, made=b"\0"),
    }
    if args.checkpoint is not None and args.checkpoint.is_file():
        raise ConfigError(
            f"--checkpoint {args.checkpoint} is a file. Give a folder, existing or new. Weights in"
            f" a file become a folder for --model: `infinity export {args.checkpoint} OUT --model"
            " MODEL`"
        )
    written = [output for output in outputs.values() if output is not None]
    weights = settings.get("weights")
    inputs = {"--model": args.model, "--data": args.data, "--config": args.config}
    inputs["--deepspeed"] = args.deepspeed
    check_outputs(
        written, [*inputs.items(), ("weights", weights and Path(weights))], overwrite=True
    )
    if args.checkpoint is not None:
        _check_kind(args.checkpoint, args.method)
        if not has_checkpoint(args.checkpoint):
            _check_not_anothers(args.checkpoint)
    if args.overwrite:
        return
    if has_checkpoint(args.checkpoint) and not args.resume:
        raise ConfigError(
            f"{args.checkpoint} holds a checkpoint already. Continue it with --resume or replace it"
            " with --overwrite or give --checkpoint another folder."
        )
    for output in written:
        if output is outputs["checkpoint"] and args.resume:
            continue
        if output is outputs["receipt"] and args.resume and has_checkpoint(args.checkpoint):
            if output.path.is_file():
                read_receipt(output.path)
            continue
        if (
            output is outputs["out"]
            and args.resume
            and _out_of(args.checkpoint) == os.path.realpath(output.path)
        ):
            continue  # written by this job, which ended and was restarted
        check_free(output)


def _check_kind(folder: Path, method: str | None) -> None:
    """Raises UsageError if a folder has checkpoints of a job with another loop, which this one can
    neither continue nor replace."""
    of_trainer = (folder / OF_TRAINER).is_file()
    if method is None and of_trainer:
        raise UsageError(
            f"--checkpoint {folder} is of a job with a --method that this one lacks. Give another"
            " folder, or the method."
        )
    others = not of_trainer and any(folder.glob("checkpoint-*"))
    if method is not None and (others or (folder / "manifest.json").is_file()):
        raise UsageError(
            f"--checkpoint {folder} has checkpoints of another kind: they are not by a trainer of"
            " TRL that `infinity train` ran. Give another folder."
        )


def _check_not_anothers(folder: Path) -> None:
    """Raises ConfigError if ``folder`` is another program's checkpoint, or a model."""
    from ...ext.checkpoint.manifest import OTHERS, what_it_is

    if any((folder / name).exists() for name in OTHERS):
        raise ConfigError(f"--checkpoint: {what_it_is(folder)}. Give another folder.")


def make_way(args: argparse.Namespace) -> None:
    """Removes the file at --trace if --overwrite is given; only timelines are replaced without."""
    for path in (
        Output("--trace", args.trace, made=BEGIN).taken() if args.overwrite and args.trace else ()
    ):
        path.unlink()


def _out_of(checkpoint: Path | None) -> str | None:
    """Returns the --out of the job that saved a checkpoint; None if unknown."""
    return saved_extra(checkpoint).get("out")


def saved_extra(checkpoint: Path | None) -> dict[str, Any]:
    """Returns what the job that saved a checkpoint said of itself; empty if unknown."""
    from ...ext.checkpoint.manifest import read_manifest
    from ...files.values import decode_value

    if not has_checkpoint(checkpoint):
        return {}
    try:
        if state := trainer_checkpoint(checkpoint):
            state_of_trainer = json.loads((state / "trainer_state.json").read_text())
            return state_of_trainer["stateful_callbacks"][NOTED]["attributes"] | {
                "step": state_of_trainer["global_step"]
            }
        extra = decode_value(read_manifest(checkpoint)["extra"], {})
        return extra if isinstance(extra, dict) else {}
    except (InfinityError, LookupError, TypeError, AttributeError, ValueError):
        return {}  # damaged, or not of `infinity train`: loading it raises


def check_room(option: str, folder: Path, nbytes: int, what: str, why: str = "") -> None:
    """Raises CapacityError if the disk of ``folder`` has less than ``nbytes`` free. ``why``: so
    much is needed."""
    free = shutil.disk_usage(existing(folder)).free
    if nbytes > free:
        raise CapacityError(
            f"{option} {folder}: {what} needs {format_nbytes(nbytes)}{why and f': {why}'}, and"
            f" {format_nbytes(free)} is free there. Free {format_nbytes(nbytes - free)}, or give a"
            " folder on another disk."
        )


# What jobs did before there was an option
BEFORE = {"optim": "adamw", "eval_share": HELD_OUT_SHARE}


def check_fixed_values(checkpoint: Path, now: dict[str, Any], extra: dict[str, Any]) -> None:
    """Raises UsageError if options of a job are not those of its checkpoint."""
    saved = extra.get("fixed_values")
    if not isinstance(saved, dict):
        return  # of a script, whose values are its own
    if different := differences(saved, now):
        raise UsageError(
            f"The checkpoint {checkpoint} was made with {different}.\n"
            "Give the same options and data to continue it, or --overwrite instead of --resume to"
            " start fresh."
        )


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns what a job was made with that is not as it is ``now``; "" if all of it is."""
    saved = BEFORE | saved
    different = [name for name, value in now.items() if saved.get(name) != value]
    return ", ".join(_difference(name, saved.get(name), now[name]) for name in different)


def check_not_past(checkpoint: Path, step: int, steps: int) -> None:
    """Raises UsageError if a checkpoint is past the job's last step."""
    if step > steps:
        raise UsageError(
            f"The checkpoint {checkpoint} is at step {step}, past --steps {steps} (or as many"
            " epochs).\nGive more, or --overwrite instead of --resume to start fresh."
        )


def _difference(name: str, saved: Any, now: Any) -> str:
    if name == "data":
        return "other data, or another tokenizer or chat template"
    if name == "eval_share":
        said = [f"--eval-share {each:g}" if each else "--eval-data" for each in (saved, now)]
        return f"{said[0]} (now {said[1]})"
    if name == "base":
        return "a --model of other weights"
    if name == "parameters":
        return f"a model of {saved:,} parameters (now {now:,})" if saved else "another model"
    option = f"--{name.replace('_', '-')}"
    before = f"without {option}" if saved is None else f"{option} {saved}"
    return f"{before} (now {'without' if now is None else now})"
