"""Opened: a trained model that is asked, and not trained. Its weights may be at home on the host or
on NVMe, and are then streamed for every forward.

found   the folder, with its configuration and tokenizer; no weight is read
base    the folder of the weights: that of an adapter's base, else the folder itself
"""

from __future__ import annotations

import argparse
import logging as python_logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import infinity

from ...errors import ConfigError
from ...library_versions import refuse_older
from ..cli.options import BYTES, FLAG, FOLDER, HOME, PATH, QUANTIZE, REPEATED, one_of, takes
from ..train.folders import check_packed, is_streamed
from ..train.model import (
    ADAPTER_CONFIG,
    build_model,
    find_model,
    read_model_config,
    read_tokenizer,
)
from ..train.settings import AUTO, check_device, engine_config, given_settings
from ..train.wording import first_line

MODEL = ("model", PATH, "folder of a model or an adapter, or a name on the Hugging Face hub")


HOMES = (  # of :func:`opened`
    ("--params", HOME, "home of the weights (default auto)"),
    ("--nvme-path", FOLDER | REPEATED, "swap files go here"),
    ("--host-memory", BYTES, 'budget, as "8GiB"'),
    ("--device-memory", BYTES, 'budget, as "8GiB"'),
    ("--nvme-capacity", BYTES, 'budget of swap files, as "1TiB"'),
    ("--device", takes("DEVICE"), 'what computes: "cuda", "cuda:1" or "cpu"'),
    ("--dtype", one_of("auto", "bf16", "fp32", default="auto"), "of the weights"),
    ("--quantize", QUANTIZE, "pack the weights in fewer bits, as they are read"),
    ("--trust-remote-code", FLAG, "run Python code that lies in the folder"),
)


@dataclass(frozen=True)
class Found:
    """A model before its weights are read. ``tokenizer``: None if the folder has none."""

    folder: Path
    base: Path
    model_config: Any
    tokenizer: Any


def find(args: argparse.Namespace) -> Found:
    """Finds a model with its configuration and tokenizer. Raises ConfigError."""
    folder = find_model(args.model, option="", adapters=True)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file: give the folder of a model, with its weights")
    check_device(args.device)
    trust = args.trust_remote_code
    base = _base_of(folder)
    model_config = read_model_config(base, trust=trust)
    check_packed(base, model_config, args.quantize, trains_all=False)
    tokenizer = read_tokenizer(folder, trust=trust) or read_tokenizer(base, trust=trust)
    return Found(folder, base, model_config, tokenizer)


def with_tokenizer(found: Found) -> Found:
    """Returns ``found``. Raises ConfigError if it has no tokenizer."""
    if found.tokenizer is None:
        raise ConfigError(
            f"{found.folder} has no tokenizer: it cannot be given text. Copy the tokenizer files of"
            " its base into it (tokenizer.json, tokenizer_config.json)."
        )
    return found


def opened(found: Found, args: argparse.Namespace, *, seed: int = 0) -> Any:
    """Builds the model and wraps it, without an optimizer, for evaluation. Raises ConfigError if it
    cannot be built, or lacks weights."""
    import torch

    settings = {"nvme_paths": AUTO} | given_settings(args)
    stored = getattr(found.model_config, "dtype", None) or torch.float32
    dtype = {"auto": "bf16" if stored == torch.bfloat16 else "fp32"}.get(args.dtype, args.dtype)
    model = build_model(
        found.base,
        found.model_config,
        dtype=dtype,
        seed=seed,
        say=lambda line: None,  # of tensors that only a saved model has a place for
        trust=args.trust_remote_code,
        whole=found.base != found.folder,
        complete=True,
    )
    if is_streamed(model, found.base):
        settings["weights"] = str(found.base)
    if args.quantize is not None:
        infinity.quantize(model.requires_grad_(False), args.quantize)
    if found.base != found.folder:
        model = _with_adapter(model, found.folder)
    model, _ = infinity.wrap_model(model, None, engine_config(settings, model))
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what libraries tell each other, and where the weights are: nothing is trained."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    logger = python_logging.getLogger("infinity")
    level = logger.level
    logger.setLevel(python_logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


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
        base = find_model(Path(name), option="")
    except ConfigError as error:
        raise ConfigError(
            f"the adapter {folder} names its base {name}, which cannot be read here: change"
            f" base_model_name_or_path in {folder / ADAPTER_CONFIG} ({error})"
        ) from None
    return base


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
        raise ConfigError(f"peft cannot load the adapter {folder}: {first_line(error)}") from None
