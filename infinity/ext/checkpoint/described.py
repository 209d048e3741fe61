"""Described: builds the model of a config.json, without values, to learn its tensors' names; and
makes such a text of a model."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...files.module_names import is_transformers

logger = logging.getLogger(__name__)

# Upper bounds: ten times the sizes of the largest models.
MOST = {
    "num_hidden_layers": 10_000,
    "depth": 10_000,
    "hidden_size": 1_000_000,
    "num_attention_heads": 100_000,
    "vocab_size": 100_000_000,
    "intermediate_size": 100_000_000,
    "num_experts": 100_000,
    "num_local_experts": 100_000,
    "n_routed_experts": 100_000,
}


def check_sizes(path: Path, config: Any) -> None:
    """Raises ConfigError for sizes of a model that no machine can build, even without values."""
    text = config.get_text_config()
    for part in {id(part): part for part in (text, *_parts_of(config))}.values():
        for name, most in MOST.items():
            value = getattr(part, name, None)
            # Some configurations have one value for each layer.
            values = value if isinstance(value, (list, tuple)) else [value]
            for each in values if len(values) <= MOST["num_hidden_layers"] else [value]:
                is_number = isinstance(each, (int, float)) and not isinstance(each, bool)
                if (is_number and each > most) or (
                    part is text and each is not None and not (is_number and each >= 0)
                ):
                    raise ConfigError(
                        f"{path}: {name} is {str(each)[:40]}, which is not a number from 0 to"
                        f" {most:,}"
                    )


def _parts_of(config: Any) -> Iterator[Any]:
    """Yields the configuration, and the nested ones for text, vision, and so on."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _parts_of(value)


def described_model(folder: Path | None) -> nn.Module | None:
    """Builds the transformers model of a folder's ``config.json`` on meta. Returns None without a
    folder, and if transformers cannot build it, which is logged. Runs no code from the folder.
    Raises ConfigError for implausible sizes."""
    if folder is None:
        return None
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        check_sizes(folder, config)
        config.__dict__.pop("quantization_config", None)  # what is written is unpacked
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            kind = transformers.AutoModelForCausalLM.from_config
        with torch.device("meta"):
            return kind(config)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a config may be wrong in every way
        first = (str(error).strip().splitlines() or [""])[0][:200]
        logger.warning(
            "transformers cannot build the model that %s describes (%s: %s): tensors keep the names"
            " that they have",
            folder,
            type(error).__name__,
            first,
        )
        return None


def description_of(model: nn.Module) -> str | None:
    """Returns the ``config.json`` text of a transformers model, to keep in a checkpoint. Returns
    None for any other model, and if the configuration cannot be written: a checkpoint must not fail
    for that."""
    if not is_transformers(model):
        return None
    try:
        config = json.loads(model.config.to_json_string(use_diff=True))
        return json.dumps(config | {"architectures": [type(model).__name__]})
    except Exception as error:  # noqa: BLE001 - a configuration is any code
        logger.warning(
            "the configuration of %s cannot be written as JSON: %s", type(model).__name__, error
        )
        return None


def model_described_by(text: str) -> nn.Module | None:
    """Builds the model of a ``config.json``'s ``text`` as :func:`described_model` does."""
    with tempfile.TemporaryDirectory(prefix="infinity-") as folder:
        (Path(folder) / "config.json").write_text(text, encoding="utf-8")
        return described_model(Path(folder))
