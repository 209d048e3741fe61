"""Reader: makes a Config of another tool's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...config import Config
from ...untrusted import read_table
from .accelerate import translate_accelerate
from .deepspeed import differences, folded, torch_line, translate_deepspeed
from .other_tools import ACCELERATE, DEEPSPEED, refuse_others, whose

logger = logging.getLogger(__name__)

Source = Mapping | str | os.PathLike
TRANSLATORS = {DEEPSPEED: translate_deepspeed, ACCELERATE: translate_accelerate}
WITH_MASTERS = {"master": "split", "moments": "fp32"}  # as these tools keep them, with or without


def read(
    kind: type[Config], mapping: Mapping, where: str, loop: Mapping[str, Any] | None
) -> Config:
    """Makes a Config of its own fields, or of DeepSpeed's or Accelerate's keys. Raises ConfigError,
    which names the tool if it is another one. ``where``: the file, for messages."""
    names = [field.name for field in dataclasses.fields(kind)]
    if (tool := whose(mapping, names, where)) is None:
        return kind(**mapping)
    return (kind.from_deepspeed if tool == DEEPSPEED else kind.from_accelerate)(mapping, loop=loop)


def _from_tool(
    tool: str,
    kind: type[Config],
    source: Source,
    *,
    strict: bool,
    loop: Mapping[str, Any] | None,
    makes_folders: bool = True,
    tells_loop: bool = True,
) -> Config:
    """Makes a Config as :meth:`infinity.Config.from_deepspeed` says. ``makes_folders``: its folder
    for NVMe, too. ``tells_loop``: warns of what its loop does otherwise."""
    mapping = dict(source) if isinstance(source, Mapping) else read_table(Path(source))
    refuse_others(mapping)
    fields, report = TRANSLATORS[tool](mapping, strict=strict, loop=loop)
    config = kind(**WITH_MASTERS | fields)
    for path in config.nvme_paths if makes_folders else ():
        with contextlib.suppress(OSError):  # then the wrap says that there is no folder
            os.makedirs(path, exist_ok=True)
    lines = folded(report) or ["no key changes anything"]
    if config.expects_optimizer is not None:
        lines.append(f"its optimizer: {torch_line(dict(config.expects_optimizer))}")
    logger.warning("%s config read:\n  %s", tool, "\n  ".join(lines))
    for line in differences(report) if tells_loop else ():
        logger.warning("%s", line)
    logger.info("every key of it:\n  %s", "\n  ".join(report))
    return config


from_deepspeed = partial(_from_tool, DEEPSPEED)
from_accelerate = partial(_from_tool, ACCELERATE)
