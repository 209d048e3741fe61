"""PEFT's adapters over models at home: they train, save, resume and merge as PEFT's own do.

Words used here: **adapted** is a model of PEFT's; **values of an adapter** are drawn, not zeros as
PEFT begins with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from models import differing, seeded
from safetensors.torch import load_file
from torch import nn
from trainer_cases import (
    SEED,
    arguments,
    assert_same,
    llama,
    need_fused_experts,
    on_disk,
    rows,
    values,
)

import infinity
from infinity import integrations
from infinity.library_versions import TESTED
from infinity.tools.cli import main

peft = Lazily("peft")
adapters = Lazily("infinity.ext.integrations.peft", "peft")
transformers = pytest.importorskip("transformers")


pytestmark = pytest.mark.filterwarnings("ignore")

LM = {"task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "down_proj"],
        lora_dropout=0.1,
        rank_pattern={"q_proj": 2},
        **LM,
    ),
    "dora": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], use_dora=True, use_rslora=True, **LM
    ),
    "embeddings": lambda: peft.LoraConfig(
        r=4, target_modules=["v_proj", "embed_tokens"], modules_to_save=["lm_head"], **LM
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], **LM
    ),
    "prompts": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **LM),
}
MERGED = [name for name in ADAPTERS if name != "prompts"]


def adapted(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    def build() -> nn.Module:
        model = peft.get_peft_model(llama(dtype, attention_dropout=0.0), ADAPTERS[name]())
        for param in model.parameters():
            if param.requires_grad:
                nn.init.normal_(param, mean=float(name == "ia3"), std=0.1)
        return model

    return seeded(SEED, build)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("dora", "prompts") else pytest.param(name, marks=pytest.mark.slow)
        for name in ADAPTERS
    ],
)
def test_a_trainer_trains_saves_and_resumes_adapters(name, tmp_path):
    """Method: the same run with and without us; from_pretrained loads what was saved; a new Trainer
    resumes to the bit."""

    def run(folder: Path, ours: bool, start: Path | None = None) -> Any:
        kind, more = (
            (integrations.InfinityTrainer, {"infinity": on_disk(tmp_path)})
            if ours
            else (transformers.Trainer, {})
        )
        best = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": name != "prompts",
        }  # PEFT refuses it for prompts
        args = arguments(folder, save_strategy="steps", save_steps=2, **best)
        trainer = kind(
            model=adapted(name), args=args, train_dataset=rows(20), eval_dataset=rows(4), **more
        )
        trainer.train(resume_from_checkpoint=start and str(start))
        return trainer

    ours, theirs = run(tmp_path / "ours", True), run(tmp_path / "theirs", False)
    assert_same(ours, theirs)
    ours.save_model(str(tmp_path / "saved"))
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "saved")
    assert (
        differing(
            peft.get_peft_model_state_dict(loaded), peft.get_peft_model_state_dict(theirs.model)
        )
        == []
    )
    resumed = run(tmp_path / "resumed", True, tmp_path / "ours" / "checkpoint-2")
    assert differing(values(resumed.model), values(ours.model)) == []


def wrapped(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = adapted(name, dtype).eval()
    infinity.wrap_model(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        on_disk(folder),
    )
    return model


@pytest.mark.parametrize("name", MERGED)
def test_merging_at_home_equals_merging_in_memory(name, tmp_path):
    """Also: PEFT's own merge of a model at home is refused by name, and works in full_params;
    unmerging comes back but for rounding; unwrapped, PEFT merges and unloads."""
    plain, model = adapted(name).eval(), wrapped(name, tmp_path)
    before, batch = values(model), torch.utils.data.default_collate(rows(2))
    with pytest.raises(infinity.UsageError, match="merge_adapters"):
        model.merge_adapter()
    for merge in (lambda: integrations.merge_adapters(model), lambda: _merge_in_full_params(model)):
        if name == "embeddings":
            plain.merge_adapter(), merge()
        else:
            plain.merge_adapter(), merge()
        assert differing(values(model), values(plain)) == []
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, plain(**batch).logits)
        plain.unmerge_adapter(), integrations.unmerge_adapters(model)
        assert differing(values(model), values(plain)) == []
        torch.testing.assert_close(values(model), before, rtol=1e-5, atol=1e-6)
    infinity.unwrap_model(model)
    assert (
        differing(model.merge_and_unload().state_dict(), plain.merge_and_unload().state_dict())
        == []
    )


def _merge_in_full_params(model: nn.Module) -> None:
    with infinity.full_params(model, writeback=True), torch.no_grad():
        model.merge_adapter()


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_model_is_saved_without_changing_the_one_at_home(name, tmp_path):
    model = wrapped(name, tmp_path, torch.bfloat16)
    before = values(model)
    integrations.save_merged(model, tmp_path / "merged")
    assert differing(values(model), before) == []
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.bfloat16
    )
    assert (
        differing(
            loaded.state_dict(), adapted(name, torch.bfloat16).merge_and_unload().state_dict()
        )
        == []
    )


def _lora(*targets: str, **more: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=list(targets), **LM, **more)


OTHERS: dict[str, Callable[[nn.Module], Any]] = {
    "another": lambda base: _second(base, "b"),
    "both": lambda base: _second(base, ["default", "b"]),
    "renamed": lambda base: peft.get_peft_model(base, _lora("q_proj"), adapter_name="mine"),
    "16 bit": lambda base: peft.get_peft_model(base, _lora("q_proj"), autocast_adapter_dtype=False),
    "biases": lambda base: peft.get_peft_model(base, _lora("q_proj", bias="all")),
}


def _second(base: nn.Module, active: str | list[str]) -> nn.Module:
    model = peft.get_peft_model(base, _lora("q_proj"))
    model.add_adapter("b", _lora("q_proj", "v_proj"))
    model.base_model.set_adapter(active)
    return model


def test_every_adapted_parameter_of_a_module_is_merged(tmp_path):
    """Claim: of two `target_parameters` of the same experts, both, as PEFT merges them."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 32, "moe_intermediate_size": 32,
        "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip

    def base():
        torch.manual_seed(0)
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))

    def adapted():
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        options = {"r": 2, "target_modules": ["q_proj"], "target_parameters": names}
        return peft.get_peft_model(base(), peft.LoraConfig(**options, init_lora_weights=False))

    need_fused_experts(base())
    model, _ = infinity.wrap_model(adapted(), None, {"params": "host"})
    torch.manual_seed(0)
    try:
        integrations.save_merged(model, tmp_path / "merged")
    except infinity.ConfigError as error:
        assert f"peft {peft.__version__} cannot load the adapter" in str(error)
        with pytest.raises(TypeError):  # nor does PEFT without the engine
            adapters = peft.get_peft_model_state_dict(adapted())
            peft.set_peft_model_state_dict(adapted(), adapters)
        return
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    expected, before = adapted().merge_and_unload().state_dict(), base().state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    adapted_names = [name for name in before if not torch.equal(before[name], expected[name])]
    assert len(adapted_names) == 3  # the twin: the base has others


@pytest.mark.parametrize("name", OTHERS)
def test_the_adapters_that_are_active_are_merged_in_their_own_dtype(name, tmp_path):
    """Method: another adapter than the first, two at once, one of another name, one in bf16, and
    trained biases: each beside PEFT's own merge. Those that train biases are merged by `infinity
    export`, too."""

    def build() -> nn.Module:
        model = OTHERS[name](llama(torch.bfloat16, attention_bias=True, attention_dropout=0.0))
        for key, param in model.named_parameters():
            if "lora" in key or param.requires_grad:
                nn.init.normal_(param, std=0.1)
        return model

    expected = seeded(SEED, build).merge_and_unload().state_dict()
    model = seeded(SEED, build)
    if name == "biases":
        llama(torch.bfloat16, attention_bias=True).save_pretrained(tmp_path / "base")
        model.save_pretrained(tmp_path / "adapter")
        words = [
            str(tmp_path / "base"),
            str(tmp_path / "exported"),
            "--merge",
            str(tmp_path / "adapter"),
        ]
        assert main(["export", *words]) == 0
        loaded = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "exported", dtype=torch.bfloat16
        )
        assert differing(loaded.state_dict(), expected) == []
    infinity.wrap_model(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        on_disk(tmp_path),
    )
    integrations.save_merged(model, tmp_path / "merged")
    loaded = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.bfloat16
    )
    assert differing(loaded.state_dict(), expected) == []


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("source", ["folder", "checkpoint"])
def test_export_merges_an_adapter_into_files(name, source, tmp_path, capsys):
    """Method: a base model saved, and an adapter; `infinity export --merge`, from a folder and from
    a checkpoint of ours, gives what PEFT merges in memory from the same files."""
    base = llama(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    adapted(name, torch.bfloat16).save_pretrained(tmp_path / "adapter")
    words = [
        str(tmp_path / "base"),
        str(tmp_path / "out"),
        "--merge",
        str(tmp_path / "adapter"),
        "--json",
    ]
    if source == "checkpoint":
        infinity.wrap_model(base, None, on_disk(tmp_path))
        infinity.save_checkpoint(tmp_path / "saved", base)
        words = [str(tmp_path / "saved"), *words[1:], "--model", str(tmp_path / "base")]
    assert main(["export", *words]) == 0
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    expected = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert differing(loaded.state_dict(), expected.state_dict()) == []
    assert json.loads(capsys.readouterr().out)["parameters"] == sum(
        param.numel() for param in expected.parameters()
    )


def test_what_cannot_be_merged_is_refused(tmp_path, capsys):
    """Method: prompts, which have no weights; an adapter of a larger model; a folder without a
    configuration."""
    llama().save_pretrained(tmp_path / "base")
    for name, model in (
        ("prompts", adapted("prompts")),
        ("other", peft.get_peft_model(llama(num_hidden_layers=3), ADAPTERS["lora"]())),
    ):
        model.save_pretrained(tmp_path / name)
        assert (
            main(
                [
                    "export",
                    str(tmp_path / "base"),
                    str(tmp_path / "out"),
                    "--merge",
                    str(tmp_path / name),
                ]
            )
            == 2
        )
    infinity.wrap_model(base := llama(), None, on_disk(tmp_path))
    infinity.save_checkpoint(tmp_path / "saved", base)
    assert (
        main(
            [
                "export",
                str(tmp_path / "saved"),
                str(tmp_path / "out"),
                "--merge",
                str(tmp_path / "prompts"),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert "keep it beside the model" in said and "another model" in said and "--model DIR" in said
    assert not (tmp_path / "out").exists()


QV = ["q_proj", "v_proj"]
FORMS: dict[str, Callable[[], Any]] = {  # what PEFT saves of them beside what is trained, or shares
    "projections in buffers": lambda: peft.VeraConfig(r=4, target_modules=QV, **LM),
    "projections of layers": lambda: peft.RandLoraConfig(r=4, target_modules=QV, **LM),
    "shared by layers": lambda: peft.LilyConfig(r=4, target_modules=QV, **LM),
    "computed from the base": lambda: peft.FrodConfig(target_modules=QV, progressbar=False, **LM),
    "an embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens"], **LM),
    "prompts of tasks": lambda: peft.MultitaskPromptTuningConfig(
        num_virtual_tokens=3, num_tasks=2, num_transformer_submodules=1, **LM
    ),
    "taken off the base": lambda: peft.LoraConfig(
        r=4, target_modules=QV, init_lora_weights="pissa", **LM
    ),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **LM),
}


def of_form(name: str) -> nn.Module:
    def build() -> nn.Module:
        try:
            config = FORMS[name]()
        except AttributeError as missing:
            if metadata.version("peft").startswith(TESTED["peft"]):
                raise
            pytest.skip(str(missing))  # the form is younger than this PEFT
        model = peft.get_peft_model(llama(attention_dropout=0.0), config)
        for param in model.parameters():
            if param.requires_grad:
                param.data += 0.02 * torch.randn(param.shape)
        return model

    return seeded(SEED, build)


def stepped(model: nn.Module, optimizer: Any, name: str) -> list[float]:
    batch = torch.utils.data.default_collate(rows(2))
    tasks = {"task_ids": torch.tensor([0, 1])} if "tasks" in name else {}
    losses = []
    for _ in range(2):
        loss = model(**batch, **tasks).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("name", FORMS)
def test_adapters_of_every_form_train_and_are_saved_as_peft_saves_them(name, tmp_path):
    """Also: an adapter's file has the names and bits of PEFT's own. Twin: another step makes
    another file."""
    plain, model = of_form(name), of_form(name)
    model, optimizer = infinity.wrap_model(model, sgd(model), on_disk(tmp_path))
    own = sgd(plain)
    assert stepped(model, optimizer, name) == stepped(plain, own, name)
    plain.save_pretrained(tmp_path / "plain")
    infinity.save_pretrained(model, tmp_path / "saved")
    files = [tmp_path / each / "adapter_model.safetensors" for each in ("plain", "saved")]
    assert differing(*map(load_file, files)) == []
    stepped(plain, own, name)
    plain.save_pretrained(tmp_path / "plain")
    assert differing(*map(load_file, files))


@pytest.mark.parametrize(
    "name", ["computed from the base", "taken off the base", "norms", "projections in buffers"]
)
def test_what_is_merged_into_files_is_what_peft_merges(name, tmp_path):
    """Method: save_merged beside merge_and_unload. Twin: a folder's merge, which has no base in
    memory, equals that too, or is refused."""
    plain, model = of_form(name).eval(), of_form(name).eval()
    llama(attention_dropout=0.0).save_pretrained(tmp_path / "base")
    plain.save_pretrained(tmp_path / "adapter")
    infinity.wrap_model(model, None, {"params": "host"})
    integrations.save_merged(model, tmp_path / "merged")
    expected = plain.merge_and_unload().state_dict()
    kind = transformers.LlamaForCausalLM
    assert differing(kind.from_pretrained(tmp_path / "merged").state_dict(), expected) == []
    command = ["export", str(tmp_path / "base"), str(tmp_path / "out"), "--merge"]
    if name in ("computed from the base", "taken off the base"):
        with pytest.raises(infinity.ConfigError, match="computed from the base's weights"):
            adapters.adapted_twin(tmp_path / "base", tmp_path / "adapter")
    else:
        assert main([*command, str(tmp_path / "adapter")]) == 0
        assert (tmp_path / "out").is_dir()
