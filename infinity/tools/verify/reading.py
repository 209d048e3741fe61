"""Reads the file of `infinity train --receipt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import ConfigError

FORMAT = 1


def read_receipt(path: Path) -> dict[str, Any]:
    """Reads a receipt. Raises ConfigError for a file that is none, or of a later version."""
    try:
        read = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no such receipt: {path}") from None
    except ValueError:
        read = None
    no_receipt = ConfigError(f"{path} is no receipt: give a file that --receipt has written")
    if not isinstance(read, dict) or not isinstance(read.get("receipt"), int):
        raise no_receipt
    if read["receipt"] > FORMAT:
        raise ConfigError(
            f"{path} has format {read['receipt']}, and this version reads up to {FORMAT}: upgrade"
            " infinity-engine"
        )
    saves, fixed = read.get("saves"), read.get("fixed_values")
    kinds = {"step": int, "losses": list, "weights": dict, "options": list, "ranks": int}
    if not isinstance(fixed, dict) or not isinstance(saves, list):
        raise no_receipt
    for save in saves:
        if not isinstance(save, dict) or any(
            not isinstance(save.get(name), kind) for name, kind in kinds.items()
        ):
            raise no_receipt
    return read
