"""Classes: the class that a folder's model has and keeps, and what a text trains of it.

named     the class in ``architectures`` of config.json
touched   parameters that get a gradient if the model is given text alone
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ..cli.amounts import format_count
from .wording import first_line

if TYPE_CHECKING:
    from torch import nn

LENGTH = 8  # tokens of the text that shows what is touched
OWN_LOOP = "Train it in a loop of your own, with infinity.wrap_model."
TABLES = {  # Auto classes of models that continue text -> their classes, by configuration
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING",  # of later versions
}


def auto_class(config: Any, path: Path | None) -> Any:
    """Returns the Auto class of transformers that builds the ``named`` class of a configuration; if
    none is named, that of all its parts. Raises ConfigError for a class that does not continue
    text, before anything is built."""
    import transformers

    named = name_of(config)
    choices = [
        (getattr(transformers, auto), _names(getattr(transformers, table).get(type(config), ())))
        for auto, table in TABLES.items()
        if hasattr(transformers, auto)
    ]
    if _text_of(config) is not config:
        choices = [*choices[1:], choices[0]]  # with its parts for images or sound
    there = [(auto, names) for auto, names in choices if names]
    own = [(auto, names) for auto, names in there if named in names]
    pairs = getattr(config, "is_encoder_decoder", False)
    if own and (not pairs or own[0][0] is transformers.AutoModelForCausalLM):
        return own[0][0]  # a decoder alone has no encoder, whatever its configuration has
    if not hasattr(transformers, named or "") and not pairs:
        if there or _is_folders_own(config):
            return there[0][0] if there else transformers.AutoModelForCausalLM
    what = "an encoder with a decoder" if pairs else "no head for that"
    raise ConfigError(
        f"{path} is of {named or type(config).__name__}, which has {what}: only models that"
        f" continue text are taken (...ForCausalLM, and those of images and text). {OWN_LOOP}"
    )


def name_of(config: Any) -> str | None:
    """Returns the class that a configuration names."""
    return (getattr(config, "architectures", None) or [None])[0]


def _is_folders_own(config: Any) -> bool:
    return not type(config).__module__.startswith("transformers.")


def _names(kinds: Any) -> list[str]:
    return [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]


def _text_of(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def touched(config: Any, path: Path | None, *, trust: bool) -> set[str] | None:
    """Returns the names of the parameters that a text trains, of a model with parts for images or
    sound; None for a model of text, and if that cannot be found without values. Runs a step on
    tensors without values. Raises ConfigError if the model takes no text alone."""
    import torch

    from ...torch_private import NOT_FAKED, FakeTensorMode

    if _text_of(config) is config:
        return None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
            model = auto_class(config, path).from_config(config, trust_remote_code=trust).train()
            tokens = torch.ones(1, LENGTH, dtype=torch.long)
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    except NOT_FAKED:
        return None
    except Exception as error:  # noqa: BLE001 - a forward is any code
        raise ConfigError(
            f"{path}: {name_of(config) or type(config).__name__} cannot be trained on text"
            f" alone ({type(error).__name__}: {first_line(error)}). {OWN_LOOP}"
        ) from None
    return {name for name, param in model.named_parameters() if param.grad is not None}


def freeze_untouched(model: nn.Module, names: set[str] | None, say: Callable[[str], None]) -> None:
    """Sets ``requires_grad`` of the parameters ``names`` alone, and says which parts stay as they
    are."""
    if names is None:
        return
    for name, param in model.named_parameters():
        param.requires_grad_(name in names)
    if parts := untouched_parts(model, names):
        count = format_count(sum(1 for _ in model.parameters()), "parameter")
        say(
            f"{type(model).__name__}: text trains {len(names)} of {count}; these stay as they are:"
            f" {', '.join(parts)}"
        )


def untouched_parts(model: nn.Module, names: set[str]) -> list[str]:
    """Returns the outermost modules and parameters of which text touches nothing."""
    trained = {param for name, param in model.named_parameters() if name in names}
    parts: list[str] = []
    for path, module in model.named_modules():
        own = set(module.parameters())
        if own and not own & trained and not _is_within(path, parts):
            parts.append(path)
    for name, param in model.named_parameters():
        if param not in trained and not _is_within(name, parts):
            parts.append(name)
    return parts


def _is_within(name: str, modules: list[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def pattern_of(parts: list[str]) -> str | None:
    """Returns a pattern of the names of all modules in ``parts``; None without parts."""
    within = "|".join(map(re.escape, parts))
    return rf"({within})(\..+)?" if parts else None
