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
from sft_cases import texts, tokenizer
from trainer_cases import SEED, arguments, assert_same, llama, on_disk

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
