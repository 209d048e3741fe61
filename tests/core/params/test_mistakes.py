"""What people do by mistake with a wrapped model is named, with what to do instead, and leaves the
model as it was."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path

import pytest
import torch
from models import differing
from torch import nn

import infinity

HOST = {"params": "host", "optimizer": "host"}


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 8)).square().sum()
    loss.backward()
    return loss


def old_optimizer(model, given, folder):
    backward(model)
    given.step()


def another_optimizer(model, given, folder):
    optimizer = torch.optim.RMSprop(model.parameters())
    backward(model)
    optimizer.step()


def data_parallel(model, given, folder):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()


def dcp(model, given, folder):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))


MISTAKES = {
    "the old optimizer": (old_optimizer, "not the optimizer that wrap_model returned"),
    "another optimizer": (another_optimizer, "not the optimizer that wrap_model returned"),
    "DistributedDataParallel": (data_parallel, "averages gradients over the ranks itself"),
    "get_state_dict": (dcp, "model.state_dict()"),
    "half": (lambda model, *_: model.half(), "param_dtype"),
    "to another dtype": (lambda model, *_: model.to(torch.bfloat16), "param_dtype"),
    "share_memory": (lambda model, *_: model.share_memory(), "fixed while it is wrapped"),
    "deepcopy": (lambda model, *_: copy.deepcopy(model), "unwrap_model"),
    "an average by torch": (
        lambda model, *_: torch.optim.swa_utils.AveragedModel(model),
        "infinity.ema",
    ),
    "torch.save": (lambda model, *_: torch.save(model, io.BytesIO()), "save_checkpoint"),
    "torch.save of a part": (
        lambda model, *_: torch.save(model[0], io.BytesIO()),
        "save_checkpoint",
    ),
    "export": (
        lambda model, *_: torch.export.export(model, (torch.ones(2, 8),)),
        "cannot be exported",
    ),
    "parametrise": (
        lambda model, *_: torch.nn.utils.parametrizations.weight_norm(model[0]),
        "Parametrise before wrap_model",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(what, tmp_path: Path):
    mistake, said = MISTAKES[what]
    model, given = make()
    model, optimizer = infinity.wrap_model(model, given, HOST)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(infinity.UsageError) as error:
        mistake(model, given, tmp_path)
    assert said in str(error.value), str(error.value)
    assert differing(dict(model.state_dict()), before) == []
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_in_ones_own_closure_the_optimizer_is_not_blamed():
    """The twin: a parameter at rest is read by the closure of the right optimizer."""
    model, optimizer = infinity.wrap_model(*make(), HOST)
    expected = model.state_dict()["0.weight"].sum()
    assert optimizer.step(lambda: model[0].weight.sum()) == expected


def test_sizes_and_adapters_are_changed_on_a_plain_model():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model, _ = infinity.wrap_model(transformers.GPT2LMHeadModel(config), None, {"params": "host"})
    with pytest.raises(infinity.UsageError, match="embeddings' size is fixed"):
        model.resize_token_embeddings(70)
    adapted = peft.get_peft_model(
        transformers.GPT2LMHeadModel(config),
        peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
    )
    adapted, _ = infinity.wrap_model(adapted, None, {"params": "host"})
    with pytest.raises(infinity.UsageError, match="merge_adapters"):
        adapted.merge_and_unload()


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_autograd_grad_of_parameters_is_torchs(home, tmp_path):
    def grads(config: dict | None) -> list[torch.Tensor]:
        model, optimizer = make()
        if config is not None:
            model, optimizer = infinity.wrap_model(model, optimizer, config)
        loss = model(torch.ones(2, 8)).square().sum()
        return [grad.clone() for grad in torch.autograd.grad(loss, list(model.parameters()))]

    config = {"params": home, "optimizer": home, "nvme_paths": [os.fspath(tmp_path)]}
    assert all(map(torch.equal, grads(config), grads(None)))


def test_an_unwrapped_model_is_copied_and_saved_again():
    model, optimizer = infinity.unwrap_model(*infinity.wrap_model(*make(), HOST))
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for other in (copied, loaded):
        assert differing(dict(other.state_dict()), dict(model.state_dict())) == []


def test_autograd_grad_recomputes_checkpoints_with_weights_used_outside_their_module(tmp_path):
    """Method: a checkpointed function multiplies by a parameter of the model; its recomputation
    runs inside autograd.grad."""
    from torch.utils.checkpoint import checkpoint

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.extra = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(
                lambda x: nn.functional.linear(self.first(x), self.extra.weight * 2),
                x,
                use_reentrant=False,
            )

    def grads(wrapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Odd()
        if wrapped:
            model, _ = infinity.wrap_model(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                {"params": "nvme", "optimizer": "nvme", "nvme_paths": [os.fspath(tmp_path)]},
            )
        loss = model(torch.ones(2, 8)).square().sum()
        return [
            grad.clone()
            for grad in torch.autograd.grad(loss, [model.first.weight, model.extra.weight])
        ]

    assert all(map(torch.equal, grads(True), grads(False)))
