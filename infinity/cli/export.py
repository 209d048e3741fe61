"""`infinity export`: writes a checkpoint's weights as a folder that transformers loads, optionally
with an adapter merged. Needs no GPU, no other ranks, and little memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Registers the command."""
    parser = subparsers.add_parser("export", help="write a checkpoint's weights as safetensors")
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a folder that save_checkpoint, or `infinity train`, wrote; or one of safetensors",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="default: what the model computed in; fp32 takes the masters",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="copy configuration and tokenizer from this folder",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        metavar="ADAPTER",
        help="merge an adapter of peft, a layer at a time; a checkpoint needs --model too",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in OUT")
    parser.add_argument(
        "--json", action="store_true", help="print what was written as one JSON object"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Writes the folder and prints the number of parameters and bytes."""
    from ..checkpoint.export import export
    from ..config.choices import DTYPES
    from ..machine.outputs import MODEL_NAMES, Output, check_outputs
    from ..machine.sizes import format_nbytes

    model = (
        args.model
        if args.model or not (args.checkpoint / "config.json").is_file()
        else args.checkpoint
    )
    read = {"CHECKPOINT": args.checkpoint, "--model": model, "--merge": args.merge}
    check_outputs(
        [Output("OUT", args.out, replaces=MODEL_NAMES)], read.items(), overwrite=args.overwrite
    )
    change = None if args.merge is None else _merging(model, args.merge)
    written = export(
        args.checkpoint,
        args.out,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        model=model,
        change=change,
    )
    if args.json:
        print(json.dumps({"out": str(args.out)} | written))
    else:
        print(
            f"{written['parameters']:,} parameters ({format_nbytes(written['nbytes'])}) written to"
            f" {args.out}"
        )
    return 0


def _merging(model: Path | None, adapter: Path) -> Callable:
    """Returns a function that merges ``adapter`` into a model's tensors. ``model``: the folder of
    the model's config.json. Raises ConfigError without it."""
    from functools import partial

    from ..errors import ConfigError
    from ..integrations.peft import adapted_twin, merged

    if model is None:
        raise ConfigError(
            "--merge needs the model's config.json: give the folder that has it, --model DIR"
        )
    return partial(merged, twin=adapted_twin(model, adapter))
