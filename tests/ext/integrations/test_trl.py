"""TRL's trainers over models at home equal TRL's own, to the bit.

Method: the same run twice, ours with everything on disk, on rows of a `datasets.Dataset` and a
tokenizer of 67 words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from inside import parts_of
from lazily import Lazily
from models import differing
from sft_cases import texts, tokenizer
from trainer_cases import SEED, arguments, assert_same, llama, logged, on_disk

import infinity
from infinity import integrations
from infinity.core.run.registry import is_wrapped
from infinity.ext.park.parking import Parking

trl = Lazily("trl")
Lazily("datasets")


pytestmark = pytest.mark.filterwarnings("ignore")


def run(
    kind: type, folder: Path, arguments_of: type, data: Any, more: dict[str, Any], **changes: Any
) -> Any:
    torch.manual_seed(SEED)
    args = arguments(folder, arguments_of, max_length=16, max_steps=3, **changes)
    trainer = kind(
        model=llama(), args=args, train_dataset=data, processing_class=tokenizer(), **more
    )
    trainer.train()
    return trainer


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("packing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sft_is_the_same(packing, tmp_path):
    data = texts(text=10)
    ours = run(
        integrations.InfinitySFTTrainer,
        tmp_path,
        trl.SFTConfig,
        data,
        {"infinity": on_disk(tmp_path)},
        packing=packing,
    )
    theirs = run(trl.SFTTrainer, tmp_path, trl.SFTConfig, data, {}, packing=packing)
    assert_same(ours, theirs)


def test_dpo_with_a_reference_that_streams_is_the_same(tmp_path):
    """Also: the reference model has a home and budgets of its own, and nothing of it is stepped."""
    data = texts(prompt=4, chosen=5, rejected=5)
    homes = {
        "infinity": on_disk(tmp_path),
        "infinity_reference": on_disk(tmp_path, host_memory="64MiB"),
    }
    ours = run(
        integrations.InfinityDPOTrainer,
        tmp_path,
        trl.DPOConfig,
        data,
        {"ref_model": llama(), **homes},
    )
    theirs = run(trl.DPOTrainer, tmp_path, trl.DPOConfig, data, {"ref_model": llama()})
    assert_same(ours, theirs)
    assert is_wrapped(ours.ref_model)
    stats = infinity.stats(ours.ref_model)
    assert stats.tiers["host"].budget_nbytes == 64 * 2**20 and stats.edges["nvme->host"].nbytes > 0
    assert stats.edges["host->nvme"].nbytes <= stats.tiers["nvme"].planned_nbytes, (
        "the reference was written once"
    )


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_lora_is_the_same(kind, tmp_path):
    """Method: peft_config; DPO's reference is then the base model, its adapters off."""
    ours, theirs, args = {
        "sft": (integrations.InfinitySFTTrainer, trl.SFTTrainer, trl.SFTConfig),
        "dpo": (integrations.InfinityDPOTrainer, trl.DPOTrainer, trl.DPOConfig),
    }[kind]
    data = texts(text=10) if kind == "sft" else texts(prompt=4, chosen=5, rejected=5)
    assert_same(
        run(ours, tmp_path, args, data, {"peft_config": lora(), "infinity": on_disk(tmp_path)}),
        run(theirs, tmp_path, args, data, {"peft_config": lora()}),
    )


def test_lora_of_a_base_in_4_bits_is_the_same(tmp_path, caplog):
    """Method: BitsAndBytesConfig and peft_config, with which TRL makes adapters in bf16, under
    autocast to bf16; no configuration at all. Twin: with masters the weights differ."""
    pytest.importorskip("bitsandbytes")
    import transformers

    llama(attention_dropout=0.0).save_pretrained(tmp_path / "base")
    packed = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )

    def tuned(kind: type, **more: Any) -> Any:
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base",
            dtype=torch.bfloat16,
            device_map="cpu",
            quantization_config=packed,
        )
        trainer = kind(
            model=model,
            args=arguments(tmp_path, trl.SFTConfig, max_length=16, max_steps=3, bf16=True),
            train_dataset=texts(text=10),
            processing_class=tokenizer(),
            peft_config=lora(),
            **more,
        )
        trainer.train()
        return trainer

    def adapters(trainer: Any) -> dict[str, torch.Tensor]:
        return {n: v.clone() for n, v in trainer.model.state_dict().items() if "lora" in n}

    theirs, ours = tuned(trl.SFTTrainer), tuned(integrations.InfinitySFTTrainer)
    assert {value.dtype for value in adapters(theirs).values()} == {torch.bfloat16}
    assert logged(ours) == logged(theirs)
    assert differing(adapters(ours), adapters(theirs)) == []
    assert "at home now: Peft" in caplog.text and "stepped as torch steps them" in caplog.text
    exact = tuned(integrations.InfinitySFTTrainer, infinity={"master": "split"})
    assert differing(adapters(exact), adapters(theirs)) != []


def test_a_reference_that_follows_the_policy_is_the_same(tmp_path):
    """Method: sync_ref_model changes the reference's weights in place, outside any forward."""
    data = texts(prompt=4, chosen=5, rejected=5)
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 1}
    ours = run(
        integrations.InfinityDPOTrainer,
        tmp_path,
        trl.DPOConfig,
        data,
        {"ref_model": llama(), "infinity": on_disk(tmp_path)},
        **follows,
    )
    theirs = run(trl.DPOTrainer, tmp_path, trl.DPOConfig, data, {"ref_model": llama()}, **follows)
    assert_same(ours, theirs)
    mine, its = ours.ref_model.state_dict(), theirs.ref_model.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in its.items())


def longer(completions: list, **columns: Any) -> list[float]:
    """A reward that differs within a group."""
    return [float(len(set(each.split()))) for each in completions]


@pytest.mark.parametrize("park", [None, "nvme"])
def test_grpo_is_the_same_with_its_state_parked_while_it_samples(park, tmp_path, monkeypatch):
    """Also: what is parked while completions are generated is the optimizer's state, and no more.
    Twin: another place is refused."""
    data, parked = texts(prompt=4), []
    more = {"num_generations": 2, "max_completion_length": 6, "gradient_accumulation_steps": 1}

    def grpo(kind: type, **given: Any) -> Any:
        torch.manual_seed(SEED)
        args = arguments(tmp_path, trl.GRPOConfig, max_steps=3, **more)
        trainer = kind(
            model=llama(attention_dropout=0.0),
            args=args,
            reward_funcs=longer,
            train_dataset=data,
            processing_class=tokenizer(),
            **given,
        )
        trainer.train()
        return trainer

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        parking = parts_of(self.model).find(Parking) if is_wrapped(self.model) else None
        parked.append(parking.nbytes if parking else 0)
        return plain(self, *args, **kwargs)

    plain = trl.GRPOTrainer._generate
    home = {"params": "host", "optimizer": "host", "nvme_paths": [str(tmp_path)]}
    with monkeypatch.context() as patched:
        patched.setattr(trl.GRPOTrainer, "_generate", generate)
        ours = grpo(integrations.InfinityGRPOTrainer, infinity=home, infinity_park=park)
    assert_same(ours, grpo(trl.GRPOTrainer))
    moments = 8 * sum(param.numel() for param in ours.model.parameters())
    assert len(parked) == 3 and all((nbytes >= moments) == (park is not None) for nbytes in parked)
    assert park is not None or not any(parked)
    with pytest.raises(infinity.ConfigError, match="infinity_park='disk'"):
        grpo(integrations.InfinityGRPOTrainer, infinity=home, infinity_park="disk")
