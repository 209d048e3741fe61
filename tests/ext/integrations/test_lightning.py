"""Lightning's Trainer with InfinityStrategy equals the one without, to the bit.

Method: the same fit twice, ours with everything on disk: accumulation, clipping, a scheduler,
validation; losses and weights compared.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from models import differing, seeded
from trainer_cases import SEED, on_disk

import infinity
from infinity import integrations

lightning = Lazily("lightning")
lightning_cases = Lazily("lightning_cases")


pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader(shuffle: bool = True) -> torch.utils.data.DataLoader:
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(SEED))
    return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=shuffle)


def trainer(folder: Path, *, ours: bool, **changes: Any) -> Any:
    folder.mkdir(exist_ok=True)
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    }
    if ours:
        given["strategy"] = integrations.InfinityStrategy(on_disk(folder))
    return lightning.Trainer(**{**given, **changes})


def test_a_fit_is_the_same(tmp_path):
    """Also: predict and validate afterwards, a second fit, and that the order of the samples is the
    plain one's."""
    found = []
    for ours in (True, False):
        module = seeded(SEED, lightning_cases.Module)
        torch.manual_seed(SEED)
        job = trainer(tmp_path / str(ours), ours=ours)
        job.fit(module, loader(), loader(shuffle=False))
        predicted = torch.cat(job.predict(module, loader(shuffle=False)))
        trainer(tmp_path / str(ours), ours=ours).fit(
            module, loader(shuffle=False), loader(shuffle=False)
        )
        found.append(
            (
                module.seen,
                predicted,
                {name: value.clone() for name, value in module.state_dict().items()},
            )
        )
    assert found[0][0] == found[1][0] and len(found[0][0]) > 20
    assert torch.equal(found[0][1], found[1][1])
    assert differing(found[0][2], found[1][2]) == []


def test_a_checkpoint_resumes_to_the_bit(tmp_path):
    """Method: a fit of three epochs; another one of two, saved; a third one from there ends as the
    first did. The checkpoint holds no weights in Lightning's own file."""

    def fit(name: str, epochs: int, start: Path | None = None) -> Any:
        module = seeded(SEED, lightning_cases.Module)
        job = trainer(tmp_path / name, ours=True, max_epochs=epochs, limit_val_batches=0)
        job.fit(module, loader(shuffle=False), ckpt_path=start)
        return job, {name: value.clone() for name, value in module.state_dict().items()}

    _, whole = fit("whole", 3)
    job, _ = fit("half", 2)
    job.save_checkpoint(tmp_path / "saved")
    assert torch.load(tmp_path / "saved" / "lightning.ckpt", weights_only=False)["state_dict"] == {}
    _, resumed = fit("resumed", 3, tmp_path / "saved")
    assert differing(resumed, whole) == []


def test_a_checkpoint_of_weights_is_validated(tmp_path):
    """Method: save_checkpoint(weights_only=True) writes safetensors; validate with ckpt_path reads
    them into a new module."""
    module, other = seeded(SEED, lightning_cases.Module), seeded(SEED + 1, lightning_cases.Module)
    job = trainer(tmp_path, ours=True, limit_val_batches=0)
    job.fit(module, loader())
    job.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert (tmp_path / "weights" / "model.safetensors").exists()
    trainer(tmp_path, ours=True).validate(
        other, loader(shuffle=False), ckpt_path=tmp_path / "weights", verbose=False
    )
    assert differing(other.state_dict(), module.state_dict()) == []


@pytest.mark.parametrize("given", [{}, {"weights_only": True}, {"another": 3}], ids=str)
def test_arguments_of_another_lightning_are_handed_on(given, tmp_path, monkeypatch):
    """Method: Lightning's own functions note what they get for a file and for a folder. Twin: one
    that takes no more than a path raises, if there is more."""
    ours = importlib.import_module("infinity.ext.integrations.lightning")
    strategy, got = integrations.InfinityStrategy({}), []

    def note(*args, **more):
        got.append(more)
        return {"state_dict": {}}

    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / ours.OWN).touch()
    parent = ours.InfinityStrategy.__mro__[1]
    monkeypatch.setattr(parent, "load_checkpoint", note)
    monkeypatch.setattr(ours, "plain_load", note)
    for path in (tmp_path / "saved", tmp_path / "file.ckpt"):
        strategy.load_checkpoint(path, **given)
    ours.load_folder(tmp_path / "file.ckpt", **given)
    assert got == [given] * 2 + [{**given, "map_location": None}]
    monkeypatch.setattr(parent, "load_checkpoint", lambda self, path: {})
    if given:
        with pytest.raises(TypeError, match="unexpected keyword"):
            strategy.load_checkpoint(tmp_path / "saved", **given)
    else:
        assert strategy.load_checkpoint(tmp_path / "saved")


def test_a_plain_checkpoint_is_resumed(tmp_path):
    """Method: a plain Trainer saves a file; ours goes on from it, and ends as the plain one
    does."""
    ends = []
    for ours in (False, True):
        module = seeded(SEED, lightning_cases.Module)
        plain = trainer(tmp_path / "plain", ours=False, max_epochs=1, limit_val_batches=0)
        plain.fit(module, loader(shuffle=False))
        plain.save_checkpoint(tmp_path / "plain.ckpt")
        again = seeded(SEED + 1, lightning_cases.Module)
        job = trainer(tmp_path / str(ours), ours=ours, limit_val_batches=0)
        named = inspect.signature(job.fit).parameters.keys() & {"weights_only"}  # from 2.6 on
        more = dict.fromkeys(named, False)
        job.fit(again, loader(shuffle=False), ckpt_path=tmp_path / "plain.ckpt", **more)
        ends.append({name: value.clone() for name, value in again.state_dict().items()})
    assert differing(*ends) == []


def test_optimizing_by_hand_is_the_same(tmp_path):
    """Method: a module with automatic_optimization=False, which calls itself, manual_backward and
    step."""

    class ByHand(lightning_cases.Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self._loss("train", batch)

        def training_step(self, batch: torch.Tensor, number: int) -> None:
            loss = self(batch)
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()

    ends = []
    for ours in (True, False):
        module = seeded(SEED, ByHand)
        by_hand = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_val_batches": 0}
        trainer(tmp_path / str(ours), ours=ours, **by_hand).fit(module, loader(shuffle=False))
        ends.append(
            (module.seen, {name: value.clone() for name, value in module.state_dict().items()})
        )
    assert ends[0][0] == ends[1][0]
    assert differing(ends[0][1], ends[1][1]) == []


def test_a_module_in_bf16_is_stepped_as_torch_steps_it(tmp_path, caplog):
    """Method: precision="bf16-true", which makes all weights bf16. Twin: with masters they
    differ."""
    ends = []
    for number, home in enumerate((None, {}, {"master": "split"})):
        module = seeded(SEED, lightning_cases.Module)
        given = {} if home is None else {"strategy": integrations.InfinityStrategy(home)}
        trainer(tmp_path / str(number), ours=False, precision="bf16-true", **given).fit(
            module, loader(shuffle=False)
        )
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    assert differing(ends[1], ends[0]) == [] and differing(ends[2], ends[0]) != []
    assert "stepped as torch steps them" in caplog.text


def test_several_optimizers_are_refused(tmp_path):
    module = lightning_cases.Module()
    module.optimizers_count, module.automatic_optimization = 2, False
    with pytest.raises(infinity.ConfigError, match="gives 2 optimizers"):
        trainer(tmp_path, ours=True, gradient_clip_val=None, accumulate_grad_batches=1).fit(
            module, loader()
        )


def test_a_backbone_is_thawed_as_it_is_without_the_engine(tmp_path):
    """Method: BackboneFinetuning compares parameters by value and adds a group in the second epoch.
    Twin: the backbone has moved."""
    found = []
    for ours in (True, False):
        module = seeded(SEED, lightning_cases.Finetuned)
        before = module.backbone[0].weight.detach().clone()
        thaw = lightning.pytorch.callbacks.BackboneFinetuning(
            unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3
        )
        trainer(tmp_path / str(ours), ours=ours, callbacks=[thaw], max_epochs=3).fit(
            module, loader(shuffle=False)
        )
        found.append({name: value.clone() for name, value in module.state_dict().items()})
        assert not torch.equal(found[-1]["backbone.0.weight"], before)
    assert differing(*found) == []


@pytest.mark.parametrize("weights_only", [True, False], ids=["weights", "all"])
def test_the_best_checkpoint_loads_as_a_plain_module(weights_only, tmp_path):
    """Method: ModelCheckpoint's best_model_path, a folder, given to load_from_checkpoint. Twin: a
    plain run's file loads by the same call."""
    for ours in (True, False):
        folder, module = tmp_path / str(ours), seeded(SEED, lightning_cases.Finetuned)
        keep = lightning.pytorch.callbacks.ModelCheckpoint(
            dirpath=folder, save_weights_only=weights_only
        )
        trainer(folder, ours=ours, callbacks=[keep], enable_checkpointing=True).fit(
            module, loader(shuffle=False)
        )
        assert Path(keep.best_model_path).is_dir() == ours
        loaded = lightning_cases.Finetuned.load_from_checkpoint(keep.best_model_path)
        assert loaded.hparams["width"] == 32 and type(loaded.head.weight) is torch.nn.Parameter
        assert (
            differing(
                loaded.state_dict(),
                {name: value.clone() for name, value in module.state_dict().items()},
            )
            == []
        )


@pytest.mark.parametrize(
    "name", ["StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning"]
)
def test_a_callback_that_touches_weights_is_refused_before_the_wrap(name, tmp_path):
    """By its name, with the way that works. Twin: the module is a plain one still, and trains
    without the callback."""
    made = {
        "StochasticWeightAveraging": {"swa_lrs": 1e-2},
        "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.5},
    }
    callback = getattr(lightning.pytorch.callbacks, name)(**made.get(name, {}))
    module = seeded(SEED, lightning_cases.Finetuned)
    with pytest.raises(
        infinity.ConfigError, match=f"callback {name} .*(infinity.swa|infinity.ema|prune before)"
    ):
        trainer(tmp_path, ours=True, callbacks=[callback]).fit(module, loader())
    assert type(module.head.weight) is torch.nn.Parameter
    trainer(tmp_path, ours=True).fit(module, loader())
