"""GGUF: the tensors of a transformers model, and its tokenizer, as one file for llama.cpp.

Names, codes and the file itself are gguf's own. One tensor is in memory at a time.

kind    the dtype of matrices: f16, bf16 or q8_0. Vectors (norms, biases) are in fp32
row     the last axis of a matrix, in whole blocks of 32 in q8_0
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import ConfigError
from ...files.outputs import replacing
from ...files.source import Source
from ...library_versions import refuse_older
from .vocabulary import read_tokenizer, write_vocabulary

KINDS = ("f16", "bf16", "q8_0")
SUFFIX = ".gguf"
ALL_BIASES = "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"
_BLOCK = 32  # of q8_0


@dataclass(frozen=True)
class _Family:
    """Models that llama.cpp runs by the same code. ``biases``: tensors that it adds biases of.
    ``turns``: whether it rotates neighbours, for which rows of queries and keys change places."""

    arch: str
    biases: str
    turns: bool = False


FAMILIES = {  # transformers' model_type -> its family
    "llama": _Family("llama", ALL_BIASES, turns=True),
    "mistral": _Family("llama", "", turns=True),
    "qwen2": _Family("qwen2", "attn_q attn_k attn_v"),
    "qwen3": _Family("qwen3", "attn_q attn_k attn_v"),
}


def remedy_of(out: Path) -> str:
    """Returns what writes a model that this module refuses."""
    return (
        "llama.cpp's own converter writes all that it runs: export a folder, and call"
        f" `convert_hf_to_gguf.py FOLDER --outfile {out}`"
    )


def check_family(folder: Path, out: Path) -> None:
    """Raises ConfigError if the model that ``folder`` describes is of another family. Builds
    nothing."""
    try:
        config = json.loads((folder / "config.json").read_text())
        kind = config.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'} is not a model's configuration") from error
    if kind not in FAMILIES:
        raise _other_family(str(kind), remedy_of(out))


def _other_family(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"--gguf does not write a {what}: it writes causal language models of"
        f" {', '.join(FAMILIES)}. {remedy}"
    )


def write_gguf(
    sources: dict[str, Source],
    model: nn.Module | None,
    beside: Path | None,
    of_tokenizer: Path | None,
    *,
    out: Path,
    kind: str,
) -> dict[str, Any]:
    """Writes a GGUF file, whole or not at all.

    sources
        The model's tensors, under the names that transformers saves.
    model
        The transformers model on meta, for its configuration.
    beside, of_tokenizer
        The folders of the model's configuration and of the tokenizer.
    kind
        One of ``KINDS``. A tensor whose rows are not whole blocks is written in f16.

    Returns the number of ``tensors``, ``nbytes`` of the file, and ``notes``: what differs from the
    model in transformers. Raises ConfigError for a model or tokenizer that llama.cpp would run with
    other numbers.
    """
    gguf = _library()
    remedy = remedy_of(out)
    family = _family_of(model, remedy)
    assert model is not None
    rope = _Rope.of(model.config, family, remedy)
    named = _named(gguf, family, model, sources, rope, remedy)
    tokenizer = read_tokenizer(of_tokenizer, remedy)
    notes = _notes_of_window(model.config)
    with replacing(out.parent) as made:
        writer = gguf.GGUFWriter(made / out.name, family.arch)
        try:
            _write_sizes(gguf, writer, model.config, rope, kind)
            nrows = named["token_embd.weight"].shape[0]
            writer.add_vocab_size(nrows)
            notes += write_vocabulary(writer, tokenizer, nrows, remedy)
            notes += _write_other_ends(writer, model.config, beside, tokenizer)
            of_tensor = {name: _kind_of(source, kind) for name, source in named.items()}
            for name, source in named.items():
                numel, size = gguf.GGML_QUANT_SIZES[_type(gguf, of_tensor[name])]
                shape = *source.shape[:-1], source.shape[-1] // numel * size
                nbytes = int(np.prod(shape))
                code = _type(gguf, of_tensor[name])
                writer.add_tensor_info(name, shape, np.dtype(np.uint8), nbytes, code)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, source in named.items():
                writer.write_tensor_data(_codes(gguf, name, source.read(), of_tensor[name]))
        finally:
            writer.close()
        nbytes = (made / out.name).stat().st_size
    if rest := [name for name, each in of_tensor.items() if kind != "f16" == each]:
        more = ", ..." if len(rest) > 3 else ""
        notes.append(
            f"in f16, because their rows are not whole blocks of 32: {', '.join(rest[:3])}{more}"
        )
    return {"tensors": len(named), "nbytes": nbytes, "notes": notes}


def _library() -> Any:
    refuse_older("gguf")
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--gguf needs the library gguf: pip install 'infinity-engine[gguf]'"
        ) from error


def _type(gguf: Any, kind: str) -> Any:
    return gguf.GGMLQuantizationType[kind.upper()]


# --- what is written ---


def _family_of(model: nn.Module | None, remedy: str) -> _Family:
    """Returns the family of ``model``. Raises ConfigError for one that is not written."""
    if model is None:
        raise ConfigError(
            "--gguf needs the model's config.json: give the folder that has it, --model DIR"
        )
    config: Any = model.config
    family, own = FAMILIES.get(config.model_type), type(model).__name__
    if family is None or not own.endswith("ForCausalLM"):
        raise _other_family(f"{own} ({config.model_type})", remedy)
    heads, head = config.num_attention_heads, _head_of(config)
    layers = set(getattr(config, "layer_types", None) or ())
    cause = {
        f"hidden_act is {config.hidden_act!r}": config.hidden_act != "silu",
        f"its layers are of {', '.join(sorted(layers))}": (
            config.model_type != "mistral" and bool(layers - {"full_attention"})
        ),
        f"head_dim is {head}": family.arch == "qwen2" and heads * head != config.hidden_size,
    }
    if causes := [each for each, differs in cause.items() if differs]:
        raise ConfigError(
            f"llama.cpp runs a {config.model_type} differently: {'; '.join(causes)}. {remedy}"
        )
    return family


def _head_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(frozen=True)
class _Rope:
    """How positions rotate queries and keys."""

    kind: str
    base: float
    told: dict[str, Any]
    factors: torch.Tensor | None  # of llama3: by what each frequency is divided, in fp32

    @classmethod
    def of(cls, config: Any, family: _Family, remedy: str) -> _Rope:
        """Reads a configuration of transformers. Raises ConfigError for another kind, or settings
        of one, for which llama.cpp has no place."""
        theirs = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        settings = {name: value for name, value in (theirs or {}).items() if value is not None}
        kind = settings.pop("rope_type", settings.pop("type", "default"))
        settings.pop("type", None)
        base = settings.pop("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
        if settings.get("partial_rotary_factor", 1) == 1:
            settings.pop("partial_rotary_factor", None)
        known = {
            "default": set(),
            "linear": {"factor"},
            "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
        }
        if family.arch == "llama":  # the others' code has no place for factors
            known["llama3"] = {
                *("factor", "original_max_position_embeddings"),
                *("low_freq_factor", "high_freq_factor"),
            }
        if kind not in known or (more := settings.keys() - known[kind]):
            what = f"rope_type {kind!r}" if kind not in known else f"{', '.join(sorted(more))}"
            raise ConfigError(
                f"rope_parameters have {what}: written are {', '.join(known)}, with their usual"
                f" settings. {remedy}"
            )
        factors = None
        if kind == "llama3":
            library = importlib.import_module("transformers.modeling_rope_utils")
            scaled, _ = library.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
            even = torch.arange(0, _head_of(config), 2, dtype=torch.int64).float()
            factors = (1 / base ** (even / _head_of(config))) / scaled
        return cls(kind, base, settings, factors)

    def write(self, gguf: Any, writer: Any, config: Any) -> None:
        """Adds the metadata."""
        writer.add_rope_dimension_count(_head_of(config))
        writer.add_rope_freq_base(float(self.base))
        if self.kind not in ("linear", "yarn"):
            return
        writer.add_rope_scaling_type(gguf.RopeScalingType[self.kind.upper()])
        writer.add_rope_scaling_factor(float(self.told["factor"]))
        if self.kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(
                self.told.get("original_max_position_embeddings", config.max_position_embeddings)
            )
            for name in ("beta_fast", "beta_slow"):
                if name in self.told:
                    getattr(writer, f"add_rope_scaling_yarn_{name}")(float(self.told[name]))


def _context_of(config: Any) -> int:
    """Returns the positions that a file states. llama.cpp has no attention window for a Mistral: up
    to its length both are the same."""
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    return min(config.max_position_embeddings, window or config.max_position_embeddings)


def _notes_of_window(config: Any) -> list[str]:
    if (most := _context_of(config)) == config.max_position_embeddings:
        return []
    return [f"context of {most} tokens, the length of its window, for which llama.cpp has no place"]


def _write_other_ends(writer: Any, config: Any, beside: Path | None, tokenizer: Any) -> list[str]:
    """Adds a second token that ends an answer: a file has room for the tokenizer's own and one
    more. Returns what is said of others."""
    own_ends = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        own_ends = json.loads((Path(beside or "") / "generation_config.json").read_text()).get(
            "eos_token_id"
        )
    own_ends = config.eos_token_id if own_ends is None else own_ends
    all_ends = own_ends if isinstance(own_ends, list) else [own_ends]
    ends = [each for each in all_ends if each not in (None, tokenizer.eos_token_id)]
    if ends:
        writer.add_eot_token_id(ends[0])
    left = ", ".join(map(str, ends[1:]))
    return [f"without the end tokens {left}: a file has room for two"] if left else []


def _write_sizes(gguf: Any, writer: Any, config: Any, rope: _Rope, kind: str) -> None:
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(_context_of(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_of(config))
    writer.add_value_length(_head_of(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope.write(gguf, writer, config)


# --- tensors ---


def _named(
    gguf: Any,
    family: _Family,
    model: nn.Module,
    sources: dict[str, Source],
    rope: _Rope,
    remedy: str,
) -> dict[str, Source]:
    """Returns the tensors under gguf's names, in llama.cpp's order of rows. Raises ConfigError if
    one is missing, or has no place."""
    config: Any = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    wanted = dict(model.state_dict())
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
        sources = {name: each for name, each in sources.items() if name != "lm_head.weight"}
    for name in sources.keys() & wanted.keys():
        if (shape := tuple(sources[name].shape)) != tuple(wanted[name].shape):
            raise ConfigError(
                f"{name} is of shape {shape}, and config.json says {tuple(wanted[name].shape)}:"
                " give the configuration that the weights were saved with"
            )
    sources_by_name, homeless = {}, []
    for name, source in sources.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        is_bias = name.endswith(".bias")
        if name not in wanted or own is None or (is_bias and not _has_bias(family, own)):
            homeless.append(name)
            continue
        sources_by_name[own] = _in_order(config, own, source) if family.turns else source
    missing = [name for name in wanted if name not in sources]
    if missing or homeless:
        which = ", ".join((homeless or missing)[:3])
        raise ConfigError(
            f"{len(homeless)} tensors have no place in llama.cpp's {family.arch} ({which})."
            f" {remedy}"
            if homeless
            else f"{len(missing)} of the model's tensors are missing ({which}): it is not whole"
        )
    if rope.factors is not None:
        sources_by_name["rope_freqs.weight"] = Source.of(rope.factors)
    return sources_by_name


def _has_bias(family: _Family, own: str) -> bool:
    return own.split(".")[-2] in family.biases.split()


def _in_order(config: Any, own: str, source: Source) -> Source:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    nheads = heads.get(own.split(".")[-2])
    if nheads is None:
        return source
    return Source(source.shape, source.dtype, partial(_turned, source.read, nheads))


def _turned(read: Callable[[], torch.Tensor], nheads: int) -> torch.Tensor:
    """Reads a weight, or bias, and puts the rows that rotate together beside each other."""
    value = read()
    halves = value.reshape(nheads, 2, -1, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


def _kind_of(source: Source, kind: str) -> str:
    if len(source.shape) < 2:
        return "f32"
    return "f16" if kind == "q8_0" and source.shape[-1] % _BLOCK else kind


def _codes(gguf: Any, name: str, value: torch.Tensor, kind: str) -> np.ndarray:
    """Returns the bytes of a tensor: as torch casts, q8_0 as gguf quantizes. Raises ConfigError for
    values beyond f16."""
    if kind == "q8_0":
        most = value.float().abs().max().item()
        if not most / 127 <= 65504:  # NaN is not, either
            raise ConfigError(
                f"{name} has values up to {most:.3g}, and q8_0 has an f16 scale for each 32 of"
                " them: take --gguf bf16"
            )
        return gguf.quants.quantize(value.float().numpy(), _type(gguf, kind))
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    made = value.to(dtypes[kind]).contiguous()
    if kind == "f16" and bool((made.isinf() & ~value.isinf()).any()):
        raise ConfigError(
            f"{name} has values up to {value.abs().max().item():.3g}, and f16 ends at 65504: take"
            " --gguf bf16"
        )
    return made.view(torch.uint8).numpy()
