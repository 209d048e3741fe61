"""The model of `infinity train` before it is wrapped: configuration, tokenizer, weights.

positions        the most tokens of one sequence
byte-level text  the input of a model without a tokenizer: a token is a byte
cache            keys and values of past tokens, which only generation uses
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import infinity

from ...errors import ConfigError
from ...library_versions import refuse_older
from ..cli.amounts import format_count
from .classes import auto_class, pattern_of, untouched_parts
from .corpus import BYTE_VOCABULARY, SEPARATOR_BYTE
from .folders import is_streamed, misfit, rest_of
from .options import DEFAULT_SEQUENCE_LENGTH
from .wording import first_line

if TYPE_CHECKING:
    import torch
    from torch import nn

ADAPTER_CONFIG = "adapter_config.json"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG_PATTERNS = ["config.json", "*.py"]
MODEL_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


def find_model(
    given: Path,
    *,
    option: str = "--model ",
    weights: bool = True,
    adapters: bool = False,
    patterns: Sequence[str] = MODEL_PATTERNS,
    known: Iterable[str] = (),
) -> Path:
    """Returns the folder or file of a model. The files of a name on the Hugging Face hub that have
    the ``patterns`` are downloaded to its cache. Raises ConfigError if there is neither; it names
    the nearest model beside ``given``, or of the ``known`` names, and the ``option``. ``weights``:
    also raises it for a folder without them. ``adapters``: takes a folder of PEFT's, too."""
    if given.exists():
        if not (adapters and (given / ADAPTER_CONFIG).is_file()):
            _check_model(given, option, weights=weights)
        return given
    name = str(given)
    beside = given.parent.iterdir() if given.parent.is_dir() else ()
    names = {str(given.parent / each.name): None for each in beside if _may_be_model(each)}
    near = difflib.get_close_matches(name, [*names, *known], n=1)
    if near or not HUB_NAME.fullmatch(name):
        hint = f": did you mean {near[0]}?" if near else "."
        raise ConfigError(
            f"No such model: {name}{hint} Give {option}a folder with config.json and safetensors, a"
            " config.json, or a name on the Hugging Face hub, as Qwen/Qwen3-0.6B."
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # noqa: BLE001 - no network, no such name, no library, no leave
        raise ConfigError(
            f"No such folder: {name}; and as a name on the Hugging Face hub it cannot be fetched:"
            f" {first_line(error).rstrip('.')}. With a network, run `hf download {name}"
            f" --local-dir {given.name}` first, then give {option}{given.name}"
        ) from None


def _check_model(path: Path, option: str, *, weights: bool) -> None:
    """Raises ConfigError for what is not a model of transformers, by what it is."""
    from ...ext.coded.gguf_file import gguf_path

    file = gguf_path(path)
    if file is not None and not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is a model in GGUF without its configuration: give {option}a folder with the"
            " file, its config.json and its tokenizer. transformers makes them:"
            f" AutoConfig.from_pretrained(folder, gguf_file={file.name!r}).save_pretrained(folder),"
            " and AutoTokenizer the same."
        )
    if path.is_file():
        if path.suffix != ".json":
            raise ConfigError(
                f"{path} is not a model. Give {option}a folder, or a config.json for fresh weights."
                f" `infinity export {path} OUT --model FOLDER` makes a folder of weights that"
                " torch.save wrote; FOLDER has their config.json."
            )
        return
    if (path / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{path} is an adapter: give {option}the folder of its base, or merge both with"
            f" `infinity export BASE OUT --merge {path}`."
        )
    if (path / "manifest.json").is_file():
        raise ConfigError(
            f"{path} is a checkpoint: make a model of it with `infinity export {path} OUT`, or"
            f" continue it with `infinity train --resume --checkpoint {path}`."
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"No config.json in {path}: not a folder that transformers saved. Give {option}one that"
            " has config.json and safetensors."
        )
    if weights and file is None and not any(path.glob("*.safetensors")):
        how = f"For fresh weights give {option}{path / 'config.json'}."
        if any(path.glob("*.bin")):
            how = f"Make them of its .bin files: `infinity export {path} OUT --model {path}`."
        raise ConfigError(f"No safetensors in {path}. {how}")


def _may_be_model(path: Path) -> bool:
    return path.suffix == ".json" or (path / "config.json").is_file()


def read_model_config(path: Path | None, *, trust: bool = False) -> Any:
    """Reads the `transformers` configuration of a folder or a config.json; None: the built-in one.
    Runs Python code in the folder only with ``trust``, without a prompt. Raises ConfigError."""
    refuse_older("transformers")
    import transformers

    from ...ext.checkpoint.described import check_sizes

    if path is None:
        return built_in_model_config()
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust
        )
    except Exception as error:  # noqa: BLE001 - a config may be wrong in every way
        if not trust and "trust_remote_code" in str(error):
            raise ConfigError(
                f"{path} brings code of its own to run. If you trust it: --trust-remote-code"
            ) from None
        raise ConfigError(f"transformers cannot read {path}: {first_line(error)}") from None
    check_sizes(path, config)
    auto_class(config, path)  # refuses what does not continue text
    return config


def is_trusted(model_config: Any) -> bool:
    """Returns whether the configuration's class is code from the model's folder, which was then
    trusted."""
    return type(model_config).__module__.partition(".")[0] == "transformers_modules"


def built_in_model_config() -> Any:
    """Makes the configuration of a GPT-2 of 50.8 M parameters. Uses the fused GELU: GPT-2's
    original form takes a sixth longer per step."""
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
    """Returns the longest sequence that the model accepts; `sys.maxsize` if it has no positions."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def choose_sequence_length(
    wanted: int | None, model_config: Any, default: int = DEFAULT_SEQUENCE_LENGTH
) -> int:
    limit = max_positions(model_config)
    if wanted is None:
        return min(default, limit)
    if wanted > limit:
        raise ConfigError(
            f"--sequence-length {wanted} exceeds the model's {limit} positions. Give {limit} or"
            " less."
        )
    return wanted


def read_tokenizer(path: Path | None, *, trust: bool = False) -> Any:
    """Reads the folder's tokenizer; None if it has none: then a token is a byte. Raises
    ConfigError."""
    import transformers

    if path is None or not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot read the tokenizer in {path}: its files are damaged, or of a kind"
            f" that is not installed ({type(error).__name__}: {first_line(error)})"
        ) from None


def read_for(args: argparse.Namespace) -> tuple[Any, Any]:
    """Reads the configuration and the tokenizer of ``--model``. Raises ConfigError if one of them
    is not for the other."""
    model_config = read_model_config(args.model, trust=args.trust_remote_code)
    tokenizer = read_tokenizer(args.model, trust=args.trust_remote_code)
    check_vocabulary(model_config, tokenizer)
    return model_config, tokenizer


def check_vocabulary(model_config: Any, tokenizer: Any) -> None:
    needed = BYTE_VOCABULARY if tokenizer is None else len(tokenizer)
    what = "byte-level text" if tokenizer is None else "its tokenizer"
    size = getattr(model_config.get_text_config(), "vocab_size", None)
    if size is None:
        raise ConfigError(
            "The model's configuration has no vocab_size: it is not of a language model. Give"
            " another model."
        )
    if size < needed:
        raise ConfigError(
            f"The model's vocabulary has {size} entries but {what} needs {needed}. Give another"
            " model."
        )


def build_model(
    path: Path | None,
    model_config: Any,
    *,
    dtype: str,
    seed: int,
    say: Callable[[str], None],
    trust: bool = False,
    whole: bool = False,
    complete: bool = False,
) -> nn.Module:
    """Builds the model with the folder's weights. Weights that are not there are initialised from
    the seed. Raises ConfigError if transformers cannot build it.

    If the folder has every weight under the model's own names, the model stays on meta. The engine
    then streams them (:func:`.folders.is_streamed`), so they are never all in memory. ``whole``:
    loads them here, because an adapter's files are to be loaded into it. ``complete``: raises
    ConfigError for weights that are not there.
    """
    import torch
    from transformers import GenerationConfig

    auto = auto_class(model_config, path)
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    options = {"dtype": kind, "trust_remote_code": trust}
    torch.manual_seed(seed)
    model = None
    try:
        if path is None or path.is_file():
            return auto.from_config(model_config, **options)
        with torch.device("meta"):
            model = auto.from_config(model_config, **options)
        keep_in_fp32(model, kind)
        if not whole and is_streamed(model, path):
            if (path / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(path)
            _carry_rest(path, model, say)
            return model
        model, loading = auto.from_pretrained(
            path,
            config=model_config,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        why = f"transformers cannot build the model of {path}: {first_line(error)}"
        raise ConfigError(misfit(path, model) or why) from None
    if missing := sorted(loading["missing_keys"]):
        names = ", ".join(missing[:4])
        sentence = f"{len(missing)} weights are not in {path} and start from the seed: {names}"
        if complete:
            raise ConfigError(
                f"{sentence}. That is not a trained model: give a folder that has all weights."
            )
        say(sentence)
    _carry_rest(path, model, say)
    return model


def _carry_rest(path: Path, model: nn.Module, say: Callable[[str], None]) -> None:
    """Keeps the tensors of a folder that the model has no place for, for the folders saved of it,
    and says which."""
    from ...ext.checkpoint.pretrained import carry

    if rest := rest_of(path, model):
        carry(model, rest)
        names = ", ".join([*rest][:4]) + (", ..." if len(rest) > 4 else "")
        say(
            f"{type(model).__name__} has no place for {format_count(len(rest), 'tensor')} of"
            f" {path}, which go into a saved model as they are: {names}"
        )


def keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Converts the tensors of a model on meta, built in ``dtype``, that ``from_pretrained`` would
    keep in fp32."""
    import torch

    from ...files.kept_dtypes import keeps_fp32

    keeps = keeps_fp32(model, dtype)
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        if param.is_meta and param.is_floating_point() and keeps(name):
            param.data = param.data.to(torch.float32)


def adapters_config(model: nn.Module, rank: int, *, text: set[str] | None = None) -> Any:
    """Makes PEFT's configuration of low-rank adapters (Hu et al. 2021) for the linear layers.
    ``text``: parameters that a text touches (None: all of them). Raises ConfigError if peft is not
    installed, or too old."""
    refuse_older("peft")
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError("--lora-rank needs peft: pip install peft") from None
    width = getattr(model.config.get_text_config(), "hidden_size", None) or rank
    if rank > width:
        raise ConfigError(f"--lora-rank {rank} is more than the model's width {width}: give less")
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=None if text is None else pattern_of(untouched_parts(model, text)),
        task_type="CAUSAL_LM",
    )


def packed_base(model: nn.Module, format: str | None) -> nn.Module:
    """Packs the base of adapters, frozen, in ``format``; None: changes nothing."""
    if format is not None:
        infinity.quantize(model.requires_grad_(False), format)
    return model


def adapted(
    model: nn.Module, *, rank: int | None, quantize: str | None, text: set[str] | None
) -> nn.Module:
    """Packs a model and adds fresh adapters of ``rank``, as `infinity train --lora` does; None:
    changes nothing. ``text``: see :func:`adapters_config`."""
    if rank is None:
        return model
    from peft import get_peft_model

    return get_peft_model(packed_base(model, quantize), adapters_config(model, rank, text=text))


def add_adapters(model: nn.Module, config: Any, base: Path) -> nn.Module:
    """Adds the adapters of a configuration, and freezes all else. They name the folder ``base``."""
    from peft import get_peft_model

    adapted = get_peft_model(model, config)
    name_base(adapted, base)
    return adapted


def name_base(adapted: nn.Module, base: Path) -> None:
    """Has the adapters of a model name the folder of their base, so that it is found from
    anywhere."""
    for config in getattr(adapted, "peft_config", {}).values():
        config.base_model_name_or_path = str(base.resolve())


def can_recompute(model: nn.Module) -> bool:
    """Tells whether a model has gradient checkpointing."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def checkpoint_activations(model: nn.Module) -> None:
    if not can_recompute(model):
        raise ConfigError(
            f"{type(model).__name__} has no gradient checkpointing. Leave out"
            " --gradient-checkpointing"
        )
    # transformers renames it for version 6.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def at_model(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch on the device of the ``model``."""
    import torch

    device = next(model.parameters()).device
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


@contextlib.contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """Turns off the key-value cache inside the block: training does not use it, and it takes
    memory."""
    configs = {id(each): each for each in (model.config, model.config.get_text_config())}
    using = [each for each in configs.values() if getattr(each, "use_cache", None)]
    del model
    for config in using:
        config.use_cache = False
    try:
        yield
    finally:
        for config in using:
            config.use_cache = True
