"""What transformers keeps in fp32 stays in fp32 under a 16-bit param_dtype: routers choose other
experts otherwise.

Words used here:

**kept**: a parameter that ``from_pretrained(dtype=...)`` leaves in fp32; **plain**: the model that
it gives.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from models import at_home
from torch import nn

transformers = pytest.importorskip("transformers")

from zoo import ZOO, make_batch, make_model

import infinity

SEED = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plain_and_wrapped(
    name: str, dtype: str, config: dict[str, Any], folder: Path
) -> tuple[nn.Module, nn.Module]:
    """Routers' rows differ by less than 16 bits tell."""
    model = make_model(ZOO[name], SEED).eval()
    for key, param in model.named_parameters():
        if key.endswith("gate.weight"):
            nn.init.normal_(param, mean=1.0, std=1e-3)
    model.save_pretrained(folder)
    plain = type(model).from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    wrapped, _ = infinity.wrap_model(model, None, config)
    return plain, wrapped


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: param.dtype for name, param in model.named_parameters()}


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("said", ["param_dtype", "deepspeed"])
def test_routers_stay_in_fp32_and_choose_the_same_experts(said, home, tmp_path):
    """Method: DeepSeek's routers; every parameter has the dtype that from_pretrained gives it, and
    logits have the bits of that model. Twin: that model with its routers cast gives others."""
    config = at_home(home, "auto", tmp_path)
    if said == "deepspeed":
        config = dataclasses.replace(
            infinity.Config.from_deepspeed({"bf16": {"enabled": True}}), **config
        )
    else:
        config["param_dtype"] = "bf16"
    plain, wrapped = plain_and_wrapped("deepseek_v3", "bf16", config, tmp_path / "saved")
    assert dtypes_of(wrapped) == dtypes_of(plain)
    kept = {name for name, dtype in dtypes_of(wrapped).items() if dtype == torch.float32}
    assert kept and all(name.endswith("gate.weight") for name in kept)
    batch = make_batch(ZOO["deepseek_v3"], SEED)
    with torch.no_grad():
        logits = wrapped(**batch).logits
        assert torch.equal(logits, plain(**batch).logits)
        for name in kept:
            plain.get_parameter(name).data = plain.get_parameter(name).data.bfloat16()
        assert not torch.equal(logits, plain(**batch).logits)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("t5", "bf16"), ("t5", "fp16"), ("llama", "bf16"), ("gpt_oss", "bf16"), ("gpt_oss", "fp16")],
)
def test_what_is_kept_depends_on_the_dtype_as_it_does_in_transformers(name, dtype, tmp_path):
    """Method: T5 keeps a projection from fp16 alone, Llama keeps nothing: the dtypes are those of
    from_pretrained."""
    config = {"params": "host", "param_dtype": dtype}
    plain, wrapped = plain_and_wrapped(name, dtype, config, tmp_path / "saved")
    assert dtypes_of(wrapped) == dtypes_of(plain)
    assert (torch.float32 in dtypes_of(wrapped).values()) == (dtype == "fp16")


@pytest.mark.parametrize("grad_dtype", [None, "fp32", "bf16"])
def test_kept_parameters_train(grad_dtype, tmp_path):
    """Method: a step of AdamW with gradients of either dtype; the routers' gradients are fp32,
    their values move, and what is saved has the dtypes that the model had."""
    model = make_model(ZOO["deepseek_v3"], SEED)
    before = {
        name: param.detach().clone()
        for name, param in model.named_parameters()
        if name.endswith("gate.weight")
    }
    config = {
        "params": "host",
        "optimizer": "host",
        "param_dtype": "bf16",
        "grad_dtype": grad_dtype,
    }
    model, optimizer = infinity.wrap_model(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), config
    )
    model(**make_batch(ZOO["deepseek_v3"], SEED)).loss.backward()
    assert all(model.get_parameter(name).grad.dtype == torch.float32 for name in before)
    optimizer.step()
    after = model.state_dict()
    assert all(
        after[name].dtype == torch.float32 and not torch.equal(after[name], value)
        for name, value in before.items()
    )


def test_adapters_do_not_hide_what_is_kept():
    """Method: PEFT adapts the routers' layers and others, which gives their weights other names;
    they stay in fp32, the rest does not."""
    peft = pytest.importorskip("peft")
    model = make_model(ZOO["deepseek_v3"], SEED)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"]))
    model, _ = infinity.wrap_model(model, None, {"params": "host", "param_dtype": "bf16"})
    kept = {name for name, dtype in dtypes_of(model).items() if dtype == torch.float32}
    assert kept and all(name.endswith("gate.weight") for name in kept)
