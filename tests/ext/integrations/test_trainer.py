"""InfinityTrainer equals transformers' Trainer, to the bit, and its checkpoints resume to the bit.

Method: the same run twice, ours with everything on disk; the logs (losses, norms, learning rates)
and the weights are compared. The Trainer's default optimizer, torch's fused AdamW, rounds as the
engine's kernels do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from models import differing
from ranks import run_torchrun
from torch import nn
from trainer_cases import SEED, arguments, assert_same, llama, logged, on_disk, rows, sizes, values

import infinity
from infinity import integrations
from infinity.core.run.registry import wrapped
from infinity.ext.checkpoint import interval
from infinity.ext.integrations.plain_loops import is_unset

transformers = pytest.importorskip("transformers")
Lazily("accelerate")


pytestmark = pytest.mark.filterwarnings("ignore")


def trained(
    folder: Path,
    model: nn.Module,
    *,
    ours: bool,
    home: dict[str, Any] | None = None,
    runs: int = 1,
    **changes: Any,
) -> Any:
    """Trains ``model``, ``runs`` times, and returns the Trainer."""
    given = {
        "model": model,
        "args": arguments(folder, **changes),
        "train_dataset": rows(20),
        "eval_dataset": rows(4),
    }
    if ours:
        (folder / "swap").mkdir(parents=True, exist_ok=True)
        trainer = integrations.InfinityTrainer(**given, infinity=home or on_disk(folder / "swap"))
    else:
        trainer = transformers.Trainer(**given)
    for _ in range(runs):
        trainer.train()
    return trainer


def both(tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    return tuple(
        trained(tmp_path / str(ours), llama(), ours=ours, **changes) for ours in (True, False)
    )


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
}


def test_a_run_with_evaluation_and_the_best_model_is_the_same(tmp_path):
    """Method: accumulation, clipping, a cosine schedule, evaluation at every step, and the best
    model, which is not the last one, loaded at the end; what was saved is loaded by
    from_pretrained."""
    ours, theirs = both(tmp_path, learning_rate=0.3, **BEST)
    assert_same(ours, theirs)
    best = Path(ours.state.best_model_checkpoint).name
    assert best == Path(theirs.state.best_model_checkpoint).name != "checkpoint-4", (
        "the best one should not be the last one"
    )
    ours.save_model(str(tmp_path / "saved"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert differing(values(loaded), values(theirs.model)) == []
    assert loaded.config.architectures == ["LlamaForCausalLM"]


def test_another_weight_decay_is_seen(tmp_path):
    """The twin: the comparison of two runs fails when one of them differs in one setting."""
    ours = trained(tmp_path / "a", llama(), ours=True, max_steps=2)
    theirs = trained(tmp_path / "b", llama(), ours=False, max_steps=2, weight_decay=0.2)
    with pytest.raises(AssertionError):
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True, "label_smoothing_factor": 0.1, "max_steps": 3},
        {"runs": 2, "max_steps": 2},
        pytest.param(
            {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "linear"},
            marks=pytest.mark.slow,
        ),
        {"optim": "adafactor", "max_steps": 3},
        pytest.param({"optim": "schedule_free_adamw", "max_steps": 3}, marks=pytest.mark.slow),
        pytest.param({"optim": "stable_adamw", "max_steps": 3}, marks=pytest.mark.slow),
        pytest.param({"bf16": True, "max_grad_norm": 0.0}, marks=pytest.mark.slow),
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "checkpointing and smoothing",
        "trained twice",
        "SGD",
        "Adafactor",
        "Schedule-Free",
        "StableAdamW",
        "autocast",
        "compiled",
    ],
)
def test_settings_of_the_trainer_give_the_same_run(changes, tmp_path):
    ours, theirs = both(tmp_path, **changes)
    assert_same(ours, theirs)


def test_weights_in_bf16_are_stepped_as_torch_steps_them(tmp_path, caplog):
    """Method: a model in bf16, and a configuration without a precision; one line says so, and where
    the state is. Twins: a master that is given, as a dict, a Config and a DeepSpeed JSON, is kept,
    and gives other weights."""
    ours, theirs = (
        trained(tmp_path / str(ours), llama(torch.bfloat16), ours=ours) for ours in (True, False)
    )
    assert_same(ours, theirs)
    (line,) = [each for each in caplog.messages if each.startswith("at home now: Llama")]
    assert "on NVMe" in line and "stepped as torch steps them" in line and "master=" in line
    given = on_disk(tmp_path) | {"master": "split"}
    for home in (given, infinity.Config(**given)):
        kept = trained(tmp_path / "kept", llama(torch.bfloat16), ours=True, home=home)
        assert wrapped(kept.model).engine.job.config.master == "split"
        assert differing(values(kept.model), values(theirs.model)) != []
    assert "masters" not in caplog.text.partition(line)[2]
    stage = {"zero_optimization": {"stage": 0}}
    assert not is_unset(infinity.Config.make(stage)) and is_unset(infinity.Config())


@pytest.mark.parametrize("home", ["dict", "Config"])
def test_weights_of_several_dtypes_keep_masters_and_the_line_says_so(home, tmp_path, caplog):
    """Method: norms in fp32, whose moments torch keeps in fp32, as it would not those of the
    others. Twin: a model in fp32 is told nothing of its precision."""
    mixed = llama(torch.bfloat16)
    mixed.model.norm.float()
    mixed.model.norm.register_forward_hook(lambda module, given, made: made.bfloat16())
    chosen = on_disk(tmp_path) if home == "dict" else infinity.Config(**on_disk(tmp_path))
    made = trained(tmp_path / "mixed", mixed, ours=True, home=chosen, max_steps=1)
    assert wrapped(made.model).engine.job.config.master == "split"
    assert "16-bit weights have fp32 masters" in caplog.text
    caplog.clear()
    trained(tmp_path / "fp32", llama(), ours=True, max_steps=1)
    assert "at home now: " in caplog.text and "bit weights" not in caplog.text


def test_a_run_in_bf16_resumes_to_the_bit(tmp_path):
    """Method: bf16 weights with split masters; four steps, and again from the checkpoint of step 2
    by a new Trainer over a new model, built on meta: logs, weights and the checkpoint of the last
    step, masters and moments included, are the same.
    """
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(
        tmp_path,
        llama(torch.bfloat16),
        ours=True,
        home=on_disk(tmp_path, master="split"),
        **saving,
    )
    half = tmp_path / "checkpoint-2"
    assert not (half / "optimizer.pt").exists() and (half / "infinity" / "manifest.json").exists()
    with torch.device("meta"):
        again = llama(torch.bfloat16)
    resumed = integrations.InfinityTrainer(
        model=again,
        args=arguments(tmp_path / "again", **saving),
        train_dataset=rows(20),
        infinity=on_disk(tmp_path / "swap", master="split"),
    )
    resumed.train(resume_from_checkpoint=str(half))
    assert logged(resumed)[:-1] == logged(whole)[:-1]
    assert differing(values(resumed.model), values(whole.model)) == []
    states = [trainer.optimizer.state_dict()["state"] for trainer in (whole, resumed)]
    assert "master" in states[0][0]
    for index, state in states[0].items():
        assert differing(state, states[1][index]) == []


def test_it_saves_as_often_as_a_share_of_the_time_allows(tmp_path, monkeypatch):
    """Claim: not at `save_steps`; and a run goes on from such a checkpoint. The twin: without a
    share no step is saved."""
    monkeypatch.setattr(interval, "FIRST_STEPS", 2)
    monkeypatch.setattr(interval, "FIRST_SECONDS", 0.0)

    def run(folder, **more):
        trainer = integrations.InfinityTrainer(
            model=llama(),
            args=arguments(folder, save_strategy="steps", save_steps=1000),
            train_dataset=rows(20),
            infinity={"params": "host", "optimizer": "host"},
            **more,
        )
        trainer.train()
        return trainer

    whole = run(tmp_path / "whole", infinity_overhead="90%")
    saved = sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))
    assert "checkpoint-2" in saved
    plain = run(tmp_path / "plain")
    assert not (tmp_path / "plain" / "checkpoint-2").exists()
    assert differing(values(whole.model), values(plain.model)) == []
    with pytest.raises(infinity.ConfigError, match="infinity_overhead: 2 is not a share"):
        run(tmp_path / "wrong", infinity_overhead=2)


def test_a_plain_checkpoint_is_resumed(tmp_path):
    """Method: transformers' Trainer saves after two steps; ours goes on from there, and ends as the
    plain one does."""
    theirs = trained(tmp_path, llama(), ours=False, save_strategy="steps", save_steps=2)
    ours = integrations.InfinityTrainer(
        model=llama(),
        args=arguments(tmp_path / "ours"),
        train_dataset=rows(20),
        infinity=on_disk(tmp_path),
    )
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert differing(values(ours.model), values(theirs.model)) == []


def test_a_model_on_meta_is_evaluated_and_trained_without_being_whole(tmp_path):
    """Method: a saved folder, its model built on meta; evaluation before training, then training,
    equal the plain run of the model read whole; the weights of the evaluation are those that are
    trained, wrapped once."""
    source = tmp_path / "source"
    llama().save_pretrained(source)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes(attention_dropout=0.1))
        )
    found = []
    for ours in (True, False):
        kind, more = (
            (integrations.InfinityTrainer, {"infinity": on_disk(tmp_path, weights=str(source))})
            if ours
            else (transformers.Trainer, {})
        )
        trainer = kind(
            model=model if ours else llama(),
            args=arguments(tmp_path / "out", max_steps=2),
            train_dataset=rows(20),
            eval_dataset=rows(4),
            **more,
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        found.append((before, logged(trainer), values(trainer.model)))
    assert found[0][:2] == found[1][:2]
    assert differing(found[0][2], found[1][2]) == []


def test_predict_with_generate_gives_the_same_tokens(tmp_path):
    """Method: Seq2SeqTrainer, made ours by the mixin, over a small T5; training, then predict with
    generate."""
    config = transformers.T5Config(
        vocab_size=67,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        pad_token_id=2,
        eos_token_id=1,
        decoder_start_token_id=2,
    )

    class Ours(integrations.InfinityMixin, transformers.Seq2SeqTrainer):
        pass

    found = []
    for kind, more in ((Ours, {"infinity": on_disk(tmp_path)}), (transformers.Seq2SeqTrainer, {})):
        torch.manual_seed(SEED)
        args = arguments(
            tmp_path / "out",
            transformers.Seq2SeqTrainingArguments,
            max_steps=2,
            predict_with_generate=True,
            generation_max_length=8,
        )
        trainer = kind(
            model=transformers.T5ForConditionalGeneration(config),
            args=args,
            train_dataset=rows(20),
            **more,
        )
        trainer.train()
        predicted = trainer.predict(rows(4))
        found.append(
            (predicted.predictions.tolist(), predicted.metrics["test_loss"], values(trainer.model))
        )
    assert found[0][:2] == found[1][:2]
    assert differing(found[0][2], found[1][2]) == []


@pytest.mark.parametrize(
    "changes",
    [{"bf16_full_eval": True}, {"fp16_full_eval": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_casts_the_model_is_refused(changes, tmp_path):
    with pytest.raises(infinity.ConfigError, match=next(iter(changes))):
        integrations.InfinityTrainer(
            model=llama(), args=arguments(tmp_path, **changes), train_dataset=rows(4)
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_as_with_data_parallelism(tmp_path):
    """Method: torchrun with two ranks over gloo; losses and weights are those of transformers'
    Trainer with DistributedDataParallel, but for the order of sums, and a checkpoint resumes to the
    bit."""
    script = Path(__file__).parents[2] / "support" / "jobs" / "trainer_ranks.py"
    done = run_torchrun(2, [str(script), str(tmp_path)], seconds=540)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["resumed"]
    assert told["furthest"] < 1e-5
    assert (
        told["losses"][0] == pytest.approx(told["losses"][1], rel=1e-5)
        and len(told["losses"][0]) == 3
    )
    assert (
        told["evaluated"][0] == pytest.approx(told["evaluated"][1], rel=1e-5)
        and told["evaluated"][0]
    )


DEEPSPEED = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
}
NUMBERS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_max_lr": 1e-2},
    },
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.parametrize("source", [DEEPSPEED, NUMBERS], ids=["auto", "the same numbers"])
def test_a_deepspeed_json_takes_its_values_from_the_arguments(source, tmp_path):
    """Method: the run without the engine is the reference, to the bit: the norm is clipped once,
    the schedule and the rates are the Trainer's. The JSON is given as a file."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(source))
    ours = trained(tmp_path / "a", llama(), ours=True, home=path)
    assert_same(ours, trained(tmp_path / "b", llama(), ours=False))


def test_a_json_in_bf16_is_what_the_argument_says(tmp_path):
    """An "auto" is the same run as the value that the argument has. Twin: without it the run is
    another."""
    runs = []
    for number, (enabled, bf16) in enumerate((("auto", True), (True, True), ("auto", False))):
        home = {**DEEPSPEED, "bf16": {"enabled": enabled}}
        folder = tmp_path / str(number)
        runs.append(trained(folder, llama(), ours=True, home=home, max_steps=2, bf16=bf16))
    assert_same(*runs[:2])
    with pytest.raises(AssertionError):
        assert_same(runs[1], runs[2])


def test_a_trainer_whose_schedule_is_not_the_json_says_what_to_set(tmp_path, caplog):
    """Method: what is told is set. Twin: then nothing is told."""
    home = DEEPSPEED | {"scheduler": DEEPSPEED["scheduler"] | {"type": "WarmupLR"}}
    given = {"model": llama(), "train_dataset": rows(4), "infinity": home}
    decays = arguments(tmp_path, lr_scheduler_type="linear")
    integrations.InfinityTrainer(args=decays, **given)
    told = "the JSON's WarmupLR stays constant after the warm-up, this Trainer's linear"
    assert caplog.messages[-1].startswith(told)
    (kind,) = re.findall("set lr_scheduler_type='(.*)'", caplog.messages[-1])
    caplog.clear()
    integrations.InfinityTrainer(args=arguments(tmp_path, lr_scheduler_type=kind), **given)
    assert "the JSON's" not in caplog.text and "which has the same" in caplog.text


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}, "warmup_max_lr"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, "lr=0.1"),
        ({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.0}}}, "weight_decay=0.0"),
    ],
    ids=["schedule", "rate", "decay"],
)
def test_numbers_of_a_json_that_the_arguments_have_otherwise_are_refused(changes, said, tmp_path):
    """The twin of the same numbers, which train."""
    with pytest.raises(infinity.ConfigError, match=said):
        trained(tmp_path, llama(), ours=True, home=DEEPSPEED | changes)
