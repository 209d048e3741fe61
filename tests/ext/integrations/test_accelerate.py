"""InfinityAccelerator equals Accelerator, to the bit, and its states load to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from models import differing
from trainer_cases import SEED, llama, on_disk, rows

import infinity
from infinity import integrations

accelerate = Lazily("accelerate")


pytestmark = pytest.mark.filterwarnings("ignore")


class Loop:
    """A training loop as accelerate's documents have it; ``steps`` may be called again."""

    def __init__(
        self, accelerator: Any, dtype: torch.dtype = torch.float32, attention_dropout: float = 0.1
    ) -> None:
        model = llama(dtype, attention_dropout=attention_dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = torch.utils.data.DataLoader(rows(16), batch_size=2)
        self.accelerator, self.seen = accelerator, []
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def epoch(self) -> None:
        torch.manual_seed(SEED)
        self.model.train()
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.seen.append(
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5).item()
                    )
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.seen.append(loss.item())

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {
            name: value.clone()
            for name, value in self.accelerator.unwrap_model(self.model).state_dict().items()
        }


def ours(folder: Path, **more: Any) -> integrations.InfinityAccelerator:
    return integrations.InfinityAccelerator(
        cpu=True, gradient_accumulation_steps=2, infinity=on_disk(folder), **more
    )


DEEPSPEED = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": "auto"},
}


def test_a_deepspeed_json_takes_its_values_from_the_loop(tmp_path, caplog):
    """Claim: the loop's own clipping and scheduler are the ones, and what the JSON has otherwise is
    told. Accelerate's YAML that names the JSON is the same. Twin: wrap_model has no loop."""
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    named = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    yaml = {"distributed_type": "DEEPSPEED", "deepspeed_config": named}
    theirs = Loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2))
    theirs.epoch()
    for source in (str(tmp_path / "ds.json"), yaml):
        mine = Loop(
            integrations.InfinityAccelerator(
                cpu=True, gradient_accumulation_steps=2, infinity=source
            )
        )
        mine.epoch()
        assert mine.seen == theirs.seen and differing(mine.values, theirs.values) == []
        assert "gradient_accumulation_steps=4 left to the loop, which has 2" in caplog.text
        caplog.clear()
    with pytest.raises(infinity.ConfigError, match="gradient_clipping='auto'"):
        infinity.Config.make(DEEPSPEED)


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_loop_is_the_same(precision, tmp_path):
    """Also: accelerate's save_model writes what from_pretrained loads."""
    mine = Loop(ours(tmp_path, mixed_precision=precision))
    theirs = Loop(
        accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    )
    mine.epoch(), theirs.epoch()
    assert mine.seen == theirs.seen and len(mine.seen) == 12
    assert differing(mine.values, theirs.values) == []
    mine.accelerator.save_model(mine.model, tmp_path / "saved")
    loaded = type(mine.model).from_pretrained(tmp_path / "saved")
    assert differing(loaded.state_dict(), theirs.values) == []


def test_a_state_in_bf16_loads_to_the_bit(tmp_path):
    """Method: an epoch, save_state, an epoch; then load_state into the same loop and into a new
    one: each ends with the same bits. Accelerate's own files hold neither weights nor moments."""
    loop = Loop(ours(tmp_path), torch.bfloat16)
    loop.epoch()
    loop.accelerator.save_state(str(tmp_path / "state"))
    assert not list((tmp_path / "state").glob("*.safetensors")) and not list(
        (tmp_path / "state").glob("optimizer*")
    )
    loop.epoch()
    expected, states = loop.values, loop.optimizer.state_dict()["state"]
    other = Loop(ours(tmp_path), torch.bfloat16)
    for again in (loop, other):
        again.accelerator.load_state(str(tmp_path / "state"))
        again.epoch()
        assert differing(again.values, expected) == []
        for index, state in again.optimizer.state_dict()["state"].items():
            assert differing(state, states[index]) == []


def test_a_state_of_a_plain_accelerator_loads(tmp_path):
    theirs = Loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2))
    theirs.epoch()
    theirs.accelerator.save_state(str(tmp_path / "state"))
    theirs.epoch()
    mine = Loop(ours(tmp_path))
    mine.accelerator.load_state(str(tmp_path / "state"))
    mine.epoch()
    assert differing(mine.values, theirs.values) == []


def test_a_model_without_an_optimizer_streams_and_may_get_one_later(tmp_path):
    accelerator, plain = ours(tmp_path), llama().eval()
    batch = torch.utils.data.default_collate(rows(2))
    model = accelerator.prepare(llama()).eval()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
    optimizer = torch.optim.AdamW(llama().parameters())
    with pytest.raises(infinity.ConfigError, match="prepared without its model"):
        accelerator.prepare(optimizer)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    assert not torch.equal(model.state_dict()["lm_head.weight"], plain.lm_head.weight)


def test_two_optimizers_of_one_model_are_refused(tmp_path):
    model = llama()
    with pytest.raises(infinity.ConfigError, match="2 optimizers"):
        ours(tmp_path).prepare(
            model, *(torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        )


def test_a_model_offloaded_by_accelerate_is_refused_by_name(tmp_path):
    model = accelerate.cpu_offload(llama(), execution_device=torch.device("cpu"))
    with pytest.raises(infinity.ConfigError, match="AlignDevicesHook"):
        ours(tmp_path).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("given", [(), ({"strict": False},), (None,)], ids=str)
def test_arguments_of_another_accelerate_are_handed_on(given, tmp_path, monkeypatch):
    """Method: Accelerator's own load_state notes what it gets for a plain folder. Twin: one that
    takes no more than a folder raises, if there is more."""
    accelerator, got = integrations.InfinityAccelerator(cpu=True, infinity={}), []
    parent = type(accelerator).__mro__[1]
    monkeypatch.setattr(parent, "load_state", lambda self, *args: got.append(args))
    accelerator.load_state(str(tmp_path), *given)
    assert got == [(str(tmp_path), *given)]
    monkeypatch.setattr(parent, "load_state", lambda self, folder: got.append(folder))
    if given:
        with pytest.raises(TypeError, match="positional argument"):
            accelerator.load_state(str(tmp_path), *given)
    else:
        accelerator.load_state(str(tmp_path))
        assert got[-1] == str(tmp_path)
