"""Experts apart: whatever is done between two steps, the bits are those of moving all experts.

Method: a tiny mixture of transformers whose experts have 64 KiB and more, a few tokens a step, so
that a third of the experts is hit; once with its experts apart and once whole, with the same units.
Twins: whole moves more; a replay that is left out shows in the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import parts_of
from models import at_home

import infinity
from infinity.core.units.arrival import Arrival
from infinity.ext.rows.expert_rows import ExpertRows

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=64, moe_intermediate_size=128, num_experts=12,
        num_experts_per_tok=2,
    ),  # fmt: skip
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, intermediate_size=128, num_local_experts=12, num_experts_per_tok=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES, intermediate_size=64, moe_intermediate_size=128, n_routed_experts=12,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=0, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    ),  # fmt: skip
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, intermediate_size=128, num_local_experts=12, num_experts_per_tok=2, head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
    ),  # fmt: skip
}  # fmt: skip
STEPS = 8


def make(family: str = "qwen3_moe", implementation: str = "eager", dtype=torch.float32):
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config._experts_implementation = implementation
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


OPTIMIZERS: dict[str, Callable] = {
    "adamw": adamw,
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


class Loop:
    """A training loop, of which a test changes what happens in a step."""

    def __init__(self, model, optimizer, folder, home="host", **config):
        given = at_home(home, home, folder) | config
        self.model, self.optimizer = infinity.wrap_model(model, optimizer, given)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.generator = torch.Generator().manual_seed(3)
        self.losses: list[float] = []

    def loss(self) -> torch.Tensor:
        tokens = torch.randint(0, 128, (1, 3), generator=self.generator)
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def step(self, **_) -> None:
        loss = self.loss()
        loss.backward()
        self.update(loss)

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def found(self) -> tuple:
        state = self.optimizer.state_dict()["state"]
        return (
            self.losses,
            {name: value.clone() for name, value in self.model.state_dict().items()},
            copy.deepcopy(state),
        )


def differing(one: tuple, other: tuple) -> list:
    """Lists the losses, weights and optimizer state that differ between two runs."""
    found = [] if one[0] == other[0] else ["losses"]
    found += [name for name in one[1] if not torch.equal(one[1][name], other[1][name])]
    for index, state in one[2].items():
        found += [
            (index, key)
            for key, value in state.items()
            if not torch.equal(torch.as_tensor(value), torch.as_tensor(other[2][index][key]))
        ]
    return found


def whole(monkeypatch) -> None:
    monkeypatch.setattr(Arrival, "bring_rows", lambda self, choose: None)


def both(run: Callable[[], tuple], monkeypatch) -> list:
    """Lists what differs between a run with experts apart and the same with whole ones."""
    apart = run()
    with monkeypatch.context() as patched:
        whole(patched)
        return differing(apart, run())


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_have_the_same_bits(family, implementation, tmp_path, monkeypatch):
    def run() -> tuple:
        model = make(family, implementation)
        loop = Loop(model, adamw(model.parameters()), tmp_path, "hostile")
        for _ in range(20):
            loop.step()
        return loop.found()

    assert both(run, monkeypatch) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype, moments", [("bf16", "fp32"), ("bf16", "int8"), ("fp32", "bf16")])
def test_optimizers_and_formats(optimizer, dtype, moments, tmp_path, monkeypatch):
    """Claim: the replay has the formats' own rounding in each step that it makes up for."""

    def run() -> tuple:
        model = make(dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
        made = OPTIMIZERS[optimizer](model.parameters())
        loop = Loop(model, made, tmp_path, "nvme", moments=moments)
        for _ in range(STEPS):
            loop.step()
        return loop.found()

    assert both(run, monkeypatch) == []


@pytest.mark.parametrize("name", ["AdEMAMix", "Adan"])
def test_classes_that_count_in_their_groups(name, tmp_path, monkeypatch):
    """Claim: the replay makes the steps that they count, the first among them."""
    kind = getattr(pytest.importorskip("pytorch_optimizer"), name)

    def run() -> tuple:
        model = make()
        made = kind(model.parameters(), lr=1e-3, weight_decay=0.1, maximize=True)
        loop = Loop(model, made, tmp_path, "nvme")
        for _ in range(STEPS):
            loop.step()
        return loop.found()

    assert both(run, monkeypatch) == []


def a_clipped_step(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.update(loss)


def several_backwards(loop: Loop) -> None:
    for _ in range(3):
        (loss := loop.loss()).backward()
    loop.update(loss)


def two_forwards_then_a_backward(loop: Loop) -> None:
    loss = loop.loss() + loop.loss()
    loss.backward()
    loop.update(loss)


def a_graph_that_is_kept(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    loop.update(loss)


def an_evaluation_between(loop: Loop) -> None:
    with torch.no_grad():
        loop.loss()
    loop.step()


def weights_that_are_read(loop: Loop) -> None:
    loop.step()
    loop.losses += [value.sum().item() for value in loop.model.state_dict().values()]


def state_that_is_read(loop: Loop) -> None:
    loop.step()
    loop.losses += [
        state["exp_avg"].sum().item() for state in loop.optimizer.state_dict()["state"].values()
    ]


def gradients_that_are_read_and_scaled(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    for param in loop.model.parameters():
        if param.grad is not None:
            loop.losses.append(param.grad.abs().sum().item())
            param.grad.mul_(0.5)
    loop.update(loss)


def gradients_that_are_assigned(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    for name, param in loop.model.named_parameters():
        if "experts" in name:
            param.grad = param.grad.clone() + 0.01
    loop.update(loss)


def gradients_that_stay(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.losses.append(loss.item())


def a_regulariser_over_all_experts(loop: Loop) -> None:
    experts = loop.model.model.layers[0].mlp.experts
    tokens = torch.randint(0, 128, (1, 3), generator=loop.generator)

    def more(module, args, output):
        return output + 1e-3 * experts.down_proj.square().mean()

    handle = loop.model.model.norm.register_forward_hook(more)
    loss = loop.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    handle.remove()
    loop.update(loss)


def a_step_that_fails_first(loop: Loop) -> None:
    def fail(module, args):
        raise ValueError("stop")

    handle = loop.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        loop.loss()
    handle.remove()
    loop.step()


def recomputed_blocks(loop: Loop) -> None:
    loop.model.gradient_checkpointing_enable({"use_reentrant": False})
    loop.step()


WAYS = [
    a_clipped_step,
    several_backwards,
    two_forwards_then_a_backward,
    a_graph_that_is_kept,
    an_evaluation_between,
    weights_that_are_read,
    state_that_is_read,
    gradients_that_are_read_and_scaled,
    gradients_that_are_assigned,
    gradients_that_stay,
    a_regulariser_over_all_experts,
    a_step_that_fails_first,
    recomputed_blocks,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whatever_happens_in_a_step(way, tmp_path, monkeypatch):
    def run() -> tuple:
        model = make()
        loop = Loop(model, adamw(model.parameters()), tmp_path, "hostile")
        for number in range(STEPS):
            way(loop) if number % 3 == 2 else loop.step()
        return loop.found()

    assert both(run, monkeypatch) == []


def test_a_job_resumes_from_any_step(tmp_path, monkeypatch):
    """Claim: a checkpoint has experts that are up to date, and another home goes on from there."""

    def run() -> tuple:
        model = make()
        loop = Loop(model, adamw(model.parameters()), tmp_path, "host")
        for _ in range(5):
            loop.step()
        saved = tmp_path / "saved"
        infinity.save_checkpoint(saved, loop.model, loop.optimizer, overwrite=True)
        model = make()
        after = Loop(model, adamw(model.parameters()), tmp_path, "nvme")
        infinity.load_checkpoint(saved, after.model, after.optimizer)
        for one in (loop, after):
            one.generator = torch.Generator().manual_seed(9)
            one.losses = []
            for _ in range(4):
                one.loss().backward()
                one.optimizer.step()
                one.optimizer.zero_grad()
        assert differing(loop.found(), after.found()) == []
        return loop.found()

    assert both(run, monkeypatch) == []


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_frozen_experts_and_their_bytes(home, tmp_path, monkeypatch):
    """Claim: of frozen experts those that are hit go to the device, twice a step, within 5 %. Twin:
    whole ones are many times that."""

    def moved() -> tuple[int, int]:
        model = make()
        hits: list[int] = []
        for layer in model.model.layers:
            layer.mlp.experts.requires_grad_(False)
            layer.mlp.experts.register_forward_pre_hook(
                lambda module, args, kwargs: hits.append(
                    len(torch.unique(args[1] if len(args) > 1 else kwargs["top_k_index"]))
                ),
                with_kwargs=True,
            )
        loop = Loop(
            model, adamw([p for p in model.parameters() if p.requires_grad]), tmp_path, home
        )
        units = [unit for unit in parts_of(loop.model.__dict__["_infinity"]).units]
        names = [unit.name for unit in units if unit.name.endswith("experts")]
        nbytes: list[int] = []
        seen = Arrival._nbytes

        def count(self, spans):
            if self._name in names:
                nbytes.append(seen(self, spans))
            return seen(self, spans)

        with monkeypatch.context() as patched:
            patched.setattr(Arrival, "_nbytes", count)
            for _ in range(STEPS):
                loop.step()
        each = sum(param[0].nbytes for param in model.model.layers[0].mlp.experts.parameters())
        return sum(nbytes), 2 * sum(hits) * each

    apart, bound = moved()
    assert 0.5 * bound <= apart <= 1.05 * bound, "some stay from a forward to its backward"
    whole(monkeypatch)
    assert moved()[0] > 2 * apart


def test_a_replay_that_is_left_out_shows(tmp_path, monkeypatch):
    """The twin of all."""

    def run() -> tuple:
        model = make()
        loop = Loop(model, adamw(model.parameters()), tmp_path)
        for _ in range(STEPS):
            loop.step()
        return loop.found()

    expected = run()
    monkeypatch.setattr(ExpertRows, "catch_up", lambda self, rows: self.wait_running())
    assert differing(run(), expected)


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_device_for_two_blocks_is_enough(home, tmp_path, monkeypatch):
    """Claim: under the smallest budget of the device that is planned, the bits are the same."""

    def run(device_memory: int | None = None) -> tuple:
        model = make()
        loop = Loop(model, adamw(model.parameters()), tmp_path, home, device_memory=device_memory)
        for _ in range(STEPS):
            loop.step()
        stats = infinity.stats(loop.model)
        assert device_memory is None or stats.tiers["device"].peak_nbytes <= device_memory
        return loop.found()

    model = make()
    window = infinity.stats(Loop(model, adamw(model.parameters()), tmp_path, home).model)
    least = window.tiers["device"].planned_nbytes + window.buffers_nbytes + 4 * 2**20
    assert differing(run(), run(least)) == []
