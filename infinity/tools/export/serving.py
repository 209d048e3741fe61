"""Serving: the command that comes after a folder was saved."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from .gguf_model import FAMILIES, SUFFIX


def next_command(folder: Path, base: Path | None) -> str:
    """Returns what to run to serve the model, or the adapter over ``base``, that ``folder`` has."""
    own = shlex.quote(str(folder))
    if (folder / "adapter_config.json").is_file():
        source, merged = shlex.quote(str(base)), shlex.quote(f"{folder}-merged")
        return f"infinity export {source} {merged} --merge {own} && vllm serve {merged}"
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if kind not in FAMILIES:
        return f"vllm serve {own}"
    file = shlex.quote(f"{folder}{SUFFIX}")
    return f"vllm serve {own}, or for llama.cpp: infinity export {own} {file} --gguf q8_0"
