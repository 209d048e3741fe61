"""A small Llama whose frozen linear layers are packed, with adapters of PEFT that train.

large   the three matrices of each block's MLP: 262,144 weights, so that codes, scales and the
        scales of scales move
small   two projections of each block: 2,048 weights, which stay dense
own     of the packing library: made by it alone
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from models import at_home
from packed_models import packed_bytes, trained
from torch import nn

import infinity

transformers = pytest.importorskip("transformers")
peft, bitsandbytes, torchao = Lazily("peft"), Lazily("bitsandbytes"), Lazily("torchao")

KINDS = ("nf4", "int8", "fp8")
WIDTH, INNER, BLOCKS, VOCABULARY = 128, 2048, 2, 128
LARGE = WIDTH * INNER
LARGE_NAMES = [
    f"model.layers.{at}.mlp.{name}_proj" for at in range(BLOCKS) for name in ("gate", "up", "down")
]
SMALL_NAMES = [f"model.layers.{at}.self_attn.{name}_proj" for at in range(BLOCKS) for name in "kv"]
MIDDLE_NAMES = [f"model.layers.{at}.self_attn.{name}_proj" for at in range(BLOCKS) for name in "qo"]
PACKED_NAMES = sorted([*LARGE_NAMES, *MIDDLE_NAMES])
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "attention_bias": True,
}


def llama(
    dtype: torch.dtype = torch.float32, *, meta: bool = False, frozen: bool = True, **changes: Any
) -> nn.Module:
    """Makes the model, in training mode."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | changes)
    with torch.device("meta" if meta else "cpu"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype)
    return model.requires_grad_(not frozen).train()


def adapted(model: nn.Module, **changes: Any) -> nn.Module:
    """Adds adapters to a model, and gives them values if they are not on meta."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**options | changes))
    _draw(model)
    return model.train()


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    draws = torch.Generator().manual_seed(1)
    for name, param in sorted(model.named_parameters()):
        if "lora_" in name and not param.is_meta:
            param.copy_(0.02 * torch.randn(param.shape, generator=draws))


def own_adapted(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Makes the adapted model with the base's layers packed, and PEFT's layers as they are over
    dense ones."""
    return in_form(infinity.quantize(adapted(llama(dtype)), kind))


def in_form(model: nn.Module) -> nn.Module:
    """Keeps bitsandbytes from packing codes anew in evaluations, as some processors have it do."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def wrap(model: nn.Module, home: str, folder: Path | None = None, **more: Any) -> tuple[Any, Any]:
    """Wraps a model with all of it at ``home``, with an optimizer if it has what trains.
    ``folder``: for swap files."""
    params = trained(model)
    optimizer = torch.optim.AdamW(params, lr=1e-2) if params else None
    swap = Path(tempfile.mkdtemp(dir=folder)) if folder is not None else Path()
    config = infinity.Config(**at_home(home, home, swap, **more))
    return infinity.wrap_model(model, optimizer, config)


def tokens(step: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2, 16), generator=draws)


def logits(model: nn.Module) -> torch.Tensor:
    """Evaluates one batch."""
    with torch.no_grad():
        return model.eval()(input_ids=tokens()).logits


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradients of one batch."""
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    named = dict(model.named_parameters())
    return {name: named[name].grad.clone() for name in named if named[name].requires_grad}


def losses(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> list[float]:
    """Trains, and returns the loss of every step."""
    found = []
    for step in steps:
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def state(model: nn.Module) -> dict[str, list[bytes]]:
    """Returns the bytes of every entry of a state dict."""
    return {name: packed_bytes(value) for name, value in model.state_dict().items()}


def differing(mine: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """Names entries that only one has, or whose bits differ."""
    return sorted(mine.keys() ^ others.keys()) + [
        name for name in mine.keys() & others.keys() if not _same(mine[name], others[name])
    ]


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def save_nf4(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    """Saves the model as transformers packs it with bitsandbytes, and returns what it packed.
    ``changes``: of the quantisation's configuration."""
    with tempfile.TemporaryDirectory() as dense:
        llama(dtype).save_pretrained(dense)
        return pack_folder(dense, folder, dtype=dtype, **changes)


def pack_folder(
    dense: Any, folder: Path, *, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> nn.Module:
    """Saves the model in the folder ``dense`` as transformers packs it, and returns that."""
    options = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
    config = transformers.BitsAndBytesConfig(**options | changes)
    made = transformers.AutoModelForCausalLM.from_pretrained(
        dense, dtype=dtype, device_map={"": "cpu"}, quantization_config=config
    )
    made.save_pretrained(folder)
    return in_form(made)


def dense_of(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight as its own library unpacks it."""
    if hasattr(weight, "quant_state"):
        functional = bitsandbytes.functional
        return functional.dequantize_4bit(weight.data, weight.quant_state)
    return weight.dequantize() if type(weight) is not nn.Parameter else weight.data


def unpacked(model: nn.Module) -> nn.Module:
    """Makes the plain model of a packed one's own weights, without adapters."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain = llama(next(base.parameters()).dtype)
    with torch.no_grad():
        for name, module in base.named_modules():
            inner = getattr(module, "base_layer", module)
            if hasattr(inner, "weight") and ".base_layer" not in name and ".lora_" not in name:
                plain.get_submodule(name).weight.copy_(dense_of(inner.weight))
    return plain
