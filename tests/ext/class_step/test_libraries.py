"""transformers, accelerate and peft train wrapped models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    at_home,
    differing,
    loss_of,
    seeded,
    tokens,
    transformer,
)
from torch import nn
from training_cases import LR, SEED, assert_trains_alike, both_ends, hardest, well_conditioned

import infinity


def gpt2(**changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 67,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    config = transformers.GPT2Config(**{**sizes, **changes})
    return seeded(SEED, lambda: transformers.GPT2LMHeadModel(config))


@both_ends
def test_generate_between_steps(home, tmp_path):
    """Method: greedy and sampled generation between steps gives the tokens that plain torch's
    does."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss = model(tokens(SEED + step), labels=tokens(SEED + step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            prompt = {
                "input_ids": tokens(SEED)[:, :4],
                "attention_mask": torch.ones(3, 4, dtype=torch.long),
            }
            seen.append(model.generate(**prompt, max_new_tokens=5, do_sample=False))
            seen.append(model.generate(**prompt, max_new_tokens=5, num_beams=2, do_sample=False))
            model.train()
        return [tensor.clone() for tensor in seen]

    assert_trains_alike(loop, gpt2(), home, tmp_path)


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(i, 1)[0], "labels": tokens(i, 1)[0]} for i in range(count)]


def trainer(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **changes: Any
) -> Any:
    import transformers

    arguments = {
        "output_dir": str(folder),
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": SEED,
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2,
    }
    arguments = transformers.TrainingArguments(**{**arguments, **changes})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(40),
        eval_dataset=rows(4),
        optimizers=(optimizer, scheduler),
    )


@pytest.mark.filterwarnings("ignore")
@both_ends
def test_trainer_of_transformers(home, tmp_path):
    """Method: Trainer for five steps with accumulation, clipping and a schedule, once with the
    plain pair and once with the wrapped one; the logged losses and norms and the weights agree, and
    evaluation runs."""
    pytest.importorskip("accelerate")
    plain, model = gpt2(), gpt2()
    optimizer = well_conditioned(model)
    (tmp_path / "swap").mkdir()
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path / "swap")
    )
    logs = []
    for one, its in ((plain, well_conditioned(plain)), (model, optimizer)):
        job = trainer(one, its, tmp_path / "out")
        job.train()
        logs.append(
            [
                {k: entry[k] for k in ("loss", "grad_norm", "learning_rate")}
                for entry in job.state.log_history[:5]
            ]
        )
        logs[-1].append({"eval_loss": job.evaluate()["eval_loss"]})
    for ours, theirs in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_trainer_saves_a_wrapped_model_that_transformers_loads(tmp_path):
    """Method: Trainer.save_model on a wrapped model; from_pretrained gives its weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = gpt2()
    (tmp_path / "swap").mkdir()
    model, optimizer = infinity.wrap_model(
        model, well_conditioned(model), at_home("nvme", "nvme", tmp_path / "swap")
    )
    job = trainer(model, optimizer, tmp_path / "out", max_steps=2)
    job.train()
    job.save_model(str(tmp_path / "saved"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert differing(loaded.state_dict(), model.state_dict()) == []


@pytest.mark.filterwarnings("ignore")
def test_trainer_resumes_from_its_own_checkpoint(tmp_path):
    """Method: Trainer with save_steps=2 over a wrapped pair; another Trainer over a fresh pair
    resumes from it and ends as the one that was not interrupted."""
    pytest.importorskip("accelerate")
    ends = []
    for resume in (False, True):
        swap = tmp_path / f"swap{resume}"
        swap.mkdir()
        model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        optimizer = well_conditioned(model)
        model, optimizer = infinity.wrap_model(
            model, optimizer, hardest("nvme", model, optimizer, swap)
        )
        job = trainer(
            model, optimizer, tmp_path / "out", save_strategy="steps", save_steps=2, max_steps=4
        )
        job.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2") if resume else None)
        ends.append(model.state_dict())
        del model, optimizer, job
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@both_ends
def test_prepare_of_accelerate(home, tmp_path):
    """Method: Accelerator.prepare on the wrapped pair, a loader and a scheduler; its loop equals
    the plain one."""
    accelerate = pytest.importorskip("accelerate")

    def run(model, optimizer):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader([tokens(i, 1)[0] for i in range(12)], batch_size=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        seen = []
        for ids in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, ids)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(loss.detach())
        return [torch.as_tensor(item) for item in seen], accelerator.unwrap_model(model)

    plain, model = transformer(SEED), transformer(SEED)
    optimizer = well_conditioned(model)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )
    torch.manual_seed(SEED)
    expected, _ = run(plain, well_conditioned(plain))
    torch.manual_seed(SEED)
    found, inner = run(model, optimizer)
    assert inner is model
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore")
@both_ends
def test_adapters_of_peft(home, tmp_path):
    """Method: LoRA over a wrapped GPT-2; adapters train as in plain torch, merging and disabling
    them works or says why not, and the peak stays within the plan."""
    peft = pytest.importorskip("peft")

    def build():
        settings = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.0
        )
        return peft.get_peft_model(
            gpt2(n_layer=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), settings
        )

    def loop(model, optimizer):
        losses = []
        for step in range(3):
            loss = model(input_ids=tokens(SEED + step), labels=tokens(SEED + step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    plain, model = seeded(SEED, build), seeded(SEED, build)

    def make(m):
        return torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=LR, eps=1e-3)

    expected = loop(plain, make(plain))
    optimizer = make(model)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )
    torch.testing.assert_close(loop(model, optimizer), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes
    adapters = peft.get_peft_model_state_dict(model)
    assert (
        differing(
            adapters, {name: value for name, value in peft.get_peft_model_state_dict(model).items()}
        )
        == []
    )
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model(input_ids=tokens(1)).logits, plain(input_ids=tokens(1)).logits)


class Rescaled(nn.Module):
    """Halves its blocks' weights in the first forward of an evaluation, from outside the blocks (as
    RWKV does)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.halved = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and not self.halved:
            with torch.no_grad():
                for block in self.blocks:
                    block.weight.div_(2)
            self.halved = True
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("home", ["device", "hostile"])
def test_weights_changed_in_place_from_outside_their_block(home, tmp_path):
    """Method: a model that rescales its blocks inside its own forward; outputs and the state dict
    are plain torch's."""
    plain = seeded(SEED, Rescaled).eval()
    model, _ = infinity.wrap_model(
        seeded(SEED, Rescaled).eval(), None, at_home(home, "auto", tmp_path)
    )
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(torch.ones(2, 16)), plain(torch.ones(2, 16)))
    assert differing(model.state_dict(), plain.state_dict()) == []
