"""PEFT's adapters on packed bases and on fused experts: gradients have the bits of the same model
in memory, and the optimizer steps.

Twin: an adapter of another value has other gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lazily import Lazily
from torch import nn
from trainer_cases import need_fused_experts

import infinity

peft = Lazily("peft")
transformers = pytest.importorskip("transformers")

LAYERS = {"q_proj", "down_proj"}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2}
TOKENS = torch.randint(0, 256, (1, 8), generator=torch.Generator().manual_seed(1))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=256, num_attention_heads=2)
    return transformers.LlamaForCausalLM(config)


def mixture() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        num_attention_heads=4,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "eager"
    return transformers.Qwen3MoeForCausalLM(config)


def adapted(base: Callable[[], nn.Module], kind: str | None, scale: float = 0.05, **options):
    """Makes the model, its base packed as ``kind``, and gives its adapters random values."""
    torch.manual_seed(0)
    model = base().requires_grad_(False)
    if kind is not None:
        pytest.importorskip("bitsandbytes" if kind == "nf4" else "torchao")
        infinity.quantize(model, kind)
        model.is_loaded_in_4bit = kind == "nf4"  # as transformers tells PEFT
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            if "lora_" in name and "magnitude" not in name:
                param.copy_(torch.randn(param.shape) * scale)
    return model.train()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return {
        name: param.grad.clone()
        for name, param in model.named_parameters()
        if param.requires_grad and param.grad is not None
    }


def wrapped(model: nn.Module, folder) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    config = {"params": "nvme", "optimizer": "host", "nvme_paths": [str(folder)]}
    return infinity.wrap_model(model, optimizer, config)


def differing(one: dict, other: dict) -> list[str]:
    assert one.keys() == other.keys() and one
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_adapters_on_a_packed_base(kind, use_dora, tmp_path):
    options = {"target_modules": LAYERS, "use_dora": use_dora}
    expected = gradients(adapted(llama, kind, **options))
    model, optimizer = wrapped(adapted(llama, kind, **options), tmp_path)
    assert differing(gradients(model), expected) == []
    optimizer.step()
    optimizer.zero_grad()
    assert differing(gradients(model), expected), "the step changed the adapters"


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_adapters_on_fused_experts(kind, tmp_path):
    """Claim: ``target_parameters`` computes with all experts, which then move whole."""
    need_fused_experts(mixture())
    options = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    expected = gradients(adapted(mixture, kind, **options))
    model, _ = wrapped(adapted(mixture, kind, **options), tmp_path)
    assert any("experts" in name for name in expected)
    assert differing(gradients(model), expected) == []
    other, _ = wrapped(adapted(mixture, kind, scale=0.06, **options), tmp_path)
    assert differing(gradients(other), expected)
