"""The model of `infinity train`, as transformers has it: configuration, tokenizer, weights. The engine comes later.

positions        the tokens that one sequence may have
byte-level text  what a model without a tokenizer reads: a token is a byte
cache            keys and values of past tokens, which only generation uses
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.corpus import BYTE_VOCABULARY, SEPARATOR_BYTE
from ...errors import ConfigError
from .options import DEFAULT_SEQUENCE_LENGTH

if TYPE_CHECKING:
    import torch
    from torch import nn

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def read_model_config(path: Path | None, *, trust: bool = False) -> Any:
    """Reads the `transformers` configuration of a folder, of a config.json, or the built-in one. Code that lies there runs with
    ``trust`` only: nobody is asked."""
    import transformers

    from ...checkpoint.described import check_sizes

    if path is None:
        return built_in_model_config()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust)
    except Exception as error:  # noqa: BLE001 - a config may be wrong in every way
        if not trust and "trust_remote_code" in str(error):
            raise ConfigError(f"{path} brings code of its own to run. If you trust it: --trust-remote-code") from None
        raise ConfigError(f"transformers cannot read {path}: {_first_line(error)}") from None
    check_sizes(path, config)
    return config


def is_trusted(model_config: Any) -> bool:
    """Tells whether the configuration came of code in the model's folder, which was allowed then."""
    return type(model_config).__module__.partition(".")[0] == "transformers_modules"


def built_in_model_config() -> Any:
    """Makes the configuration of a GPT-2 of 50.8 M parameters. The fused form of GELU: the one GPT-2 was written with takes a sixth
    longer per step."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=BYTE_VOCABULARY,
        n_positions=512,
        n_embd=512,
        n_layer=16,
        n_head=8,
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=SEPARATOR_BYTE,
        eos_token_id=SEPARATOR_BYTE,
    )


def max_positions(model_config: Any) -> int:
    """Returns the longest sequence the model takes; one without positions takes any."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def choose_sequence_length(wanted: int | None, model_config: Any) -> int:
    limit = max_positions(model_config)
    if wanted is None:
        return min(DEFAULT_SEQUENCE_LENGTH, limit)
    if wanted > limit:
        raise ConfigError(f"--sequence-length {wanted} exceeds the model's {limit} positions. Give {limit} or less.")
    return wanted


def read_tokenizer(path: Path | None, *, trust: bool = False) -> Any:
    """Reads the folder's tokenizer, or returns `None`: then a token is a byte."""
    import transformers

    if path is None or not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ConfigError(f"transformers cannot read the tokenizer in {path}: {_first_line(error)}") from None


def check_vocabulary(model_config: Any, tokenizer: Any) -> None:
    needed = BYTE_VOCABULARY if tokenizer is None else len(tokenizer)
    what = "byte-level text" if tokenizer is None else "its tokenizer"
    size = getattr(model_config.get_text_config(), "vocab_size", None)
    if size is None:
        raise ConfigError("The model's configuration has no vocab_size: it is not of a language model. Give another --model.")
    if size < needed:
        raise ConfigError(f"The model's vocabulary has {size} entries but {what} needs {needed}. Give another --model.")


def build_model(
    path: Path | None,
    model_config: Any,
    *,
    dtype: str,
    seed: int,
    say: Callable[[str], None],
    trust: bool = False,
    whole: bool = False,
) -> nn.Module:
    """Builds the model with the folder's weights, or with fresh ones from the seed. A weight that the folder lacks comes from the
    seed too.

    Where the folder has every weight under the model's own names the model stays on meta: the engine then takes them
    from the folder (:func:`is_streamed`), and they are never all in memory. ``whole``: it gets its weights here, because it will change.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    torch.manual_seed(seed)
    try:
        if path is None or path.is_file():
            return AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=trust)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=trust)
        keep_in_fp32(model, dtype)
        if not whole and is_streamed(model, path):
            if (path / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(path)
            return model
        model, found = AutoModelForCausalLM.from_pretrained(
            path, config=model_config, dtype=dtype, local_files_only=True, output_loading_info=True, trust_remote_code=trust
        )
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot build a causal LM from {path}: {_first_line(error)}") from None
    if missing := sorted(found["missing_keys"]):
        say(f"{len(missing)} weights are not in {path} and start from the seed: {', '.join(missing[:4])}")
    return model


def is_streamed(model: nn.Module, path: Path | None) -> bool:
    """Tells whether ``model`` is on meta and the safetensors in ``path`` have all of it."""
    from ...checkpoint.module_names import Incoming, may_lack
    from ...checkpoint.weight_files import WeightFiles

    if path is None or not path.is_dir() or not all(param.is_meta for param in model.parameters()):
        return False
    if not any(path.glob("*.safetensors")):
        return False
    kept = model.state_dict(keep_vars=True)  # persistent buffers too
    found = Incoming(model, WeightFiles(path).sources(), kept).sources
    there = {id(kept[name]) for name in found}
    return all(id(tensor) in there or may_lack(model, name) for name, tensor in kept.items()) and all(
        source.shape == kept[name].shape and source.dtype.is_floating_point == kept[name].dtype.is_floating_point
        for name, source in found.items()
    )


def keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Has a model on meta, built in ``dtype``, keep in fp32 what ``from_pretrained`` keeps so."""
    import torch

    from ...state.kept_dtypes import keeps_fp32

    keeps = keeps_fp32(model, dtype)
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        if param.is_meta and param.is_floating_point() and keeps(name):
            param.data = param.data.to(torch.float32)


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Adds low-rank adapters (Hu et al. 2021) to the linear layers, and freezes all else. Raises ConfigError without peft."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("--lora-rank needs peft: pip install peft") from None
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def checkpoint_activations(model: nn.Module) -> None:
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f"{type(model).__name__} has no gradient checkpointing. Leave out --gradient-checkpointing.")
    # transformers renamed it on the way to version 6
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextlib.contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """Turns off the cache of keys and values inside the block: it serves generation, and in training it would only hold memory."""
    config, used = model.config, getattr(model.config, "use_cache", None)
    if used is not None:
        config.use_cache = False
    del model
    try:
        yield
    finally:
        if used is not None:
            config.use_cache = used


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
