"""`infinity plan --lora --quantize`: adapters on a packed base, as of `infinity train`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

import infinity
import infinity.tools.cli
from infinity.tools.train.compute import forward_share, step_flops
from infinity.tools.train.model import adapted

SIZES = {
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
HOMES = {"params": "host", "optimizer": "nvme", "nvme_paths": ["."], "host_memory": "16MiB"}
RANK = 4
TABLE = 64  # bytes of the rotary table, which on meta is not seen to be in memory once


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a config, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    transformers.LlamaConfig(**SIZES).save_pretrained(tmp_path)
    return tmp_path


def planned(capsys, *words: str) -> dict:
    given = ["--model", "config.json", "--json", "--params", "host", "--optimizer", "nvme"]
    given += ["--nvme-path", ".", "--host-memory", HOMES["host_memory"], *words]
    capsys.readouterr()
    assert infinity.tools.cli.main(["plan", *given]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def made(*, rank: int | None, quantize: str | None) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()
    return adapted(model, rank=rank, quantize=quantize, text=None)


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_adapters_have_the_planned_bytes_in_each_tier(place, capsys, quantize):
    """Method: a plan of adapters, and a wrap of a model that has them, with equal homes. Twin:
    the plan of the whole model has other bytes."""
    if quantize is not None:
        pytest.importorskip({"nf4": "bitsandbytes", "int8": "torchao"}[quantize])
    words = ["--quantize", quantize] if quantize else []
    plan = planned(capsys, "--lora", str(RANK), *words)
    whole = planned(capsys)
    model = made(rank=RANK, quantize=quantize)
    trained = [param for param in model.parameters() if param.requires_grad]
    model, _ = infinity.wrap_model(model, torch.optim.AdamW(trained), HOMES)
    tiers = {tier: each.planned_nbytes for tier, each in infinity.stats(model).tiers.items()}
    for tier, each in plan["tiers"].items():
        assert each["nbytes"] == pytest.approx(tiers[tier], abs=TABLE)
    assert any(each["nbytes"] > tiers[tier] + TABLE for tier, each in whole["tiers"].items())
    assert plan["trained"] == sum(param.numel() for param in trained)
    assert plan["parameters"] == whole["parameters"] + plan["trained"]
    assert whole["trained"] == whole["parameters"]


def test_frozen_weights_cost_no_products_for_their_gradients():
    """Method: a base whose adapters are tiny beside it computes two thirds of a trained one, half
    of that in the forward, packed or not. Twin: a third of the trained one's is its forward."""
    batch = {"batch": 1, "length": 1, "checkpointing": False}
    whole, config = made(rank=None, quantize=None), transformers.LlamaConfig(**SIZES)
    trained = step_flops(whole, config, **batch)
    assert forward_share(whole, config, **batch) == pytest.approx(1 / 3)
    base = made(rank=1, quantize=None)
    assert step_flops(base, config, **batch) == pytest.approx(2 / 3 * trained, rel=0.05)
    assert forward_share(base, config, **batch) == pytest.approx(1 / 2, rel=0.05)
    pytest.importorskip("bitsandbytes")
    packed = made(rank=1, quantize="nf4")
    assert step_flops(packed, config, **batch) == step_flops(base, config, **batch)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quantize", "nf4"], "add --lora"),
        (["--lora", "--machine", "two-rtx3090", "--mesh", "tp=2"], "--mesh dp=2"),
        (["--lora", "--machine", "rtx4090", "--script"], "give --model a folder"),
    ],
)
def test_adapters_that_train_would_refuse_are_refused(place, capsys, words, said):
    """Method: words that `infinity train` takes no more. Twin: the first with --lora is planned."""
    assert infinity.tools.cli.main(["plan", "--model", "config.json", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_adapters_have_one_plan_with_a_mesh_and_without(place, capsys, quantize):
    """Method: two data ranks, by both ways; all meshes are that one. Twin: the whole model has
    another step."""
    words = ["--machine", "two-rtx3090", "--batch-size", "8"]
    whole = planned(capsys, *words)
    words += ["--lora", str(RANK)]
    if quantize is not None:
        pytest.importorskip("torchao")
        words += ["--quantize", quantize]
    alone = planned(capsys, *words)
    for axes in ("dp=2", "auto"):
        found = planned(capsys, *words, "--mesh", axes)
        (plan,) = found["meshes"]
        assert plan["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
        assert plan["step_seconds"] == pytest.approx(alone["step_seconds"])
        assert found["parameters"] == alone["parameters"]
        for tier in ("host", "nvme"):
            assert plan["ranks"][0]["tiers"][tier] == alone["tiers"][tier]["nbytes"]
    assert whole["step_seconds"] > alone["step_seconds"]


def test_a_script_starts_the_planned_adapters(place, capsys):
    """Method: a folder with weights. Twin: without --lora the file has no rank."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(place)
    given = ["plan", "--model", ".", "--machine", "rtx4090", "--script"]
    assert infinity.tools.cli.main([*given, "--lora", str(RANK)]) == 0
    assert f"lora_rank = {RANK}\n" in capsys.readouterr().out
    assert infinity.tools.cli.main(given) == 0
    assert "lora_rank" not in capsys.readouterr().out
