"""`infinity export`: writes a checkpoint's weights as a folder that transformers loads, or as one
file for llama.cpp, optionally with an adapter merged. Needs no GPU, no other ranks, and little
memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..cli.answers import print_object
from ..cli.options import DIR, FLAG, one_of, takes
from ..cli.values import a_path

GGUF = b"GGUF"  # such a file begins so


OPTIONS = (
    (
        "checkpoint",
        takes("CHECKPOINT", a_path),
        "a folder that save_checkpoint, or `infinity train`, wrote; or one of safetensors",
    ),
    ("out", takes("OUT", a_path), "the folder, or .gguf, to write"),
    (
        "--dtype",
        one_of("fp32", "bf16", "fp16"),
        "default: what the model computed in; fp32 takes the masters",
    ),
    (
        "--model",
        DIR,
        "copy configuration, tokenizer, and tensors without a place in its class, from here",
    ),
    (
        "--merge",
        takes("ADAPTER", a_path),
        "merge an adapter of peft, a layer at a time, and take the tokenizer in its folder, if"
        " any; a checkpoint needs --model too",
    ),
    (
        "--gguf",
        one_of("f16", "bf16", "q8_0"),
        "write one file for llama.cpp and Ollama, with the tokenizer; its matrices so",
    ),
    ("--overwrite", FLAG, "replace what is in OUT"),
    ("--json", FLAG, "print what was written as one JSON object"),
)


def run(args: argparse.Namespace) -> int:
    """Writes the folder and prints the number of parameters and bytes."""
    from ...choices import DTYPES
    from ...core.machine.sizes import format_nbytes
    from ...errors import ConfigError
    from ...ext.checkpoint.export import export
    from ...files.outputs import MODEL_NAMES, Output, check_outputs
    from ..train.ranks import refuse_several

    refuse_several("export")
    model = (
        args.model
        if args.model or not (args.checkpoint / "config.json").is_file()
        else args.checkpoint
    )
    _check_inputs(args)
    if args.gguf and model is not None and (model / "config.json").is_file():
        from .gguf_model import check_family

        check_family(model, args.out)
    read = {"CHECKPOINT": args.checkpoint, "--model": model, "--merge": args.merge}
    output = (
        Output("OUT", args.out, replaces=MODEL_NAMES)
        if args.gguf is None
        else Output("OUT", args.out, made=GGUF)
    )
    check_outputs([output], read.items(), overwrite=args.overwrite or output.is_file)
    if output.is_file and not args.overwrite and args.out.is_file():
        raise ConfigError(
            f"OUT {args.out} is a file that is there already, and a model in GGUF is replaced only"
            " when asked to. Give another name, or --overwrite to replace it."
        )
    change = None if args.merge is None else _merging(model, args.merge)
    written_gguf: dict[str, Any] = {}
    written = export(
        args.checkpoint,
        args.out,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        model=model,
        change=change,
        write=None if args.gguf is None else partial(_write_gguf, args, written_gguf),
        tokenizer=args.merge,
    )
    written |= written_gguf
    if args.json:
        print_object({"out": str(args.out)} | written)
    else:
        print(
            f"{written['parameters']:,} parameters ({format_nbytes(written['nbytes'])}) written to"
            f" {args.out}"
        )
        for note in written_gguf.get("notes", ()):
            print(f"Differs: {note}")
    return 0


def _write_gguf(args: argparse.Namespace, told: dict[str, Any], sources: dict, *given: Any) -> None:
    from .gguf_model import write_gguf

    told |= write_gguf(sources, *given, out=args.out, kind=args.gguf)


def _check_inputs(args: argparse.Namespace) -> None:
    """Raises ConfigError or UsageError for inputs that are not there, or another thing."""

    from ...errors import ConfigError, UsageError
    from ...ext.checkpoint.manifest import what_it_is
    from ...ext.packed.unpacked import is_scaled, packing_of

    path = args.checkpoint
    if not path.exists():
        raise UsageError(f"there is no {path}: CHECKPOINT comes first, then OUT")
    if in_gguf := _in_gguf(path):
        name = in_gguf.name if in_gguf.suffix == ".gguf" else f"{in_gguf.name}.gguf"
        raise UsageError(
            f"{in_gguf} is a model in GGUF, which export does not read. llama.cpp and Ollama run"
            f" it; transformers loads it by from_pretrained({str(in_gguf.parent)!r},"
            f" gguf_file={name!r}){'' if name == in_gguf.name else ', under that name'}."
            " For another form, export the model it was made of."
        )
    if (args.gguf is not None) != (args.out.suffix == ".gguf"):
        raise UsageError(
            f"--gguf {args.gguf} writes one file: give its name, {args.out}.gguf"
            if args.gguf
            else f"{args.out} is the name of a GGUF file: add --gguf f16 (or bf16, or q8_0)"
        )
    if path.is_file() and path.suffix == ".json":
        raise UsageError(f"{path} is not a checkpoint: give its folder")
    if (path / "adapter_config.json").is_file():
        raise UsageError(
            f"{path} is an adapter already: merge it into its base with `infinity export BASE OUT"
            f" --merge {path}`"
        )
    if path.is_dir() and not any(path.iterdir()):
        raise UsageError(f"{what_it_is(path)}: give the folder that a save, or a trainer, wrote")
    if args.merge is not None and not (args.merge / "adapter_config.json").is_file():
        raise ConfigError(
            f"--merge {args.merge}: no adapter_config.json in it: give the folder that PEFT saved"
        )
    for folder in (path, args.model):
        if folder is not None and (folder / "config.json").is_file():
            packing = packing_of(folder)
            if packing and not packing.get("load_in_4bit") and not is_scaled(packing):
                raise ConfigError(
                    f"{folder} is packed in a form that is not unpacked here (quantization_config):"
                    " give the model that it was made of, or one in bitsandbytes' 4 bits, FP8 or"
                    " MXFP4"
                )


def _in_gguf(found: Path) -> Path | None:
    """Returns the GGUF file that ``found`` is, or holds without another form."""
    if found.is_file():
        with suppress(OSError), found.open("rb") as file:
            return found if file.read(len(GGUF)) == GGUF else None
    others = ("*.safetensors", "*.bin", "*.json")
    if any(each.name != "config.json" for form in others for each in found.glob(form)):
        return None
    return next(iter(sorted(found.glob("*.gguf"))), None)


def _merging(model: Path | None, adapter: Path) -> Callable:
    """Returns a function that merges ``adapter`` into a model's tensors. ``model``: the folder of
    the model's config.json. Raises ConfigError without it."""
    from functools import partial

    from ...errors import ConfigError
    from ...ext.integrations.peft import adapted_twin, merged

    if model is None:
        raise ConfigError(
            "--merge needs the model's config.json: give the folder that has it, --model DIR"
        )
    return partial(merged, twin=adapted_twin(model, adapter))
