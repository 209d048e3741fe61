"""State dicts and unwrap_model bring everything back."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch
from contract_cases import LR, SEED, both_ends, every_home, hooks_of, save, step, wrapped
from models import (
    VOCABULARY,
    TinyTransformer,
    at_home,
    differing,
    in_child,
    leftovers,
    seeded,
    ties_away,
    tokens,
    transformer,
)
from runs import adamw
from torch import nn

import infinity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_home
def test_state_dicts_go_to_plain_torch_and_back(home, dtype, tmp_path):
    """Method: train wrapped, load both state dicts into plain torch and those into another wrap;
    all three take the next step alike, and the state dicts are equal to the bit."""
    model, optimizer = wrapped(home, tmp_path, transformer(SEED).to(dtype))
    for at in range(2):
        step(model, optimizer, at)
    plain = transformer(0).to(dtype)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0)
    state, optimizer_state = model.state_dict(), optimizer.state_dict()
    assert list(state) == list(plain.state_dict())
    assert {name: (v.dtype, v.shape) for name, v in state.items()} == {
        name: (v.dtype, v.shape) for name, v in plain.state_dict().items()
    }
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    assert plain.load_state_dict(state).missing_keys == []
    plain_optimizer.load_state_dict(optimizer_state)
    again, again_optimizer = wrapped("host", tmp_path, transformer(1).to(dtype))
    again.load_state_dict(plain.state_dict())
    again_optimizer.load_state_dict(
        plain_optimizer.state_dict() if dtype == torch.float32 else optimizer_state
    )
    assert differing(again.state_dict(), state) == []
    assert optimizer_state["param_groups"][0]["lr"] == plain_optimizer.param_groups[0]["lr"] == LR
    if (
        dtype == torch.float32
    ):  # with 16 bits the masters' low bits are not in a state dict of 16 bits
        for one, its in ((model, optimizer), (plain, plain_optimizer), (again, again_optimizer)):
            step(one, its, 5)
        assert differing(again.state_dict(), model.state_dict()) == []
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-4)


@every_home
def test_state_dict_is_a_snapshot_that_saves(home, tmp_path):
    """Method: torch.save and safetensors take the state dict; later training does not change it;
    tied keys share a tensor as torch's do; prefixes and destinations work; metadata is there."""
    model, optimizer = wrapped(home, tmp_path)
    state = model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    assert state["tokens.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state._metadata[""]["version"] == 1
    loaded = torch.load(io.BytesIO(save(state)))
    assert differing(loaded, kept) == []
    step(model, optimizer)
    assert differing(state, kept) == []
    destination = model.state_dict(prefix="model.")
    assert set(destination) == {f"model.{name}" for name in kept}
    assert (
        destination["model.tokens.weight"].data_ptr() == destination["model.head.weight"].data_ptr()
    )
    kept_vars = model.state_dict(keep_vars=True)
    assert set(kept_vars) == set(kept)
    save(optimizer.state_dict())


@every_home
def test_state_dict_of_a_submodule(home, tmp_path):
    """Method: state_dict() and load_state_dict() of a block and of a module that holds tied
    weights."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = TinyTransformer(blocks=2)
            self.extra = nn.Linear(VOCABULARY, 3)

        def forward(self, ids):
            return self.extra(self.inner(ids))

    model = seeded(SEED, Outer)
    values = copy.deepcopy(model.inner.state_dict())
    model, _ = wrapped(home, tmp_path, model)
    inner = model.inner.state_dict()
    assert differing(inner, values) == []
    assert inner["tokens.weight"].data_ptr() == inner["head.weight"].data_ptr()
    block = model.inner.blocks[1].state_dict()
    assert set(block) == set(model.inner.blocks[0].state_dict())
    model.inner.blocks[0].load_state_dict(block)
    assert differing(model.inner.blocks[0].state_dict(), block) == []


@both_ends
def test_load_state_dict_says_what_torch_says(home, tmp_path):
    """Method: strict=False with missing and unexpected keys, strict=True with them, a wrong shape,
    assign=True."""
    plain, (model, _) = transformer(SEED), wrapped(home, tmp_path)
    other = transformer(SEED + 1).state_dict()
    del other["norm.bias"]
    other["new"] = torch.ones(1)
    assert model.load_state_dict(other, strict=False) == plain.load_state_dict(other, strict=False)
    assert differing(model.state_dict(), plain.state_dict()) == []
    with pytest.raises(RuntimeError, match="Missing key.*norm.bias"):
        model.load_state_dict(other)
    wrong = transformer(SEED + 2).state_dict()
    wrong["norm.bias"] = torch.ones(5)
    with pytest.raises(RuntimeError, match="size mismatch for norm.bias"):
        model.load_state_dict(wrong)
    with pytest.raises(infinity.UsageError, match="assign"):
        model.load_state_dict(transformer(SEED).state_dict(), assign=True)


@both_ends
def test_loading_the_models_own_state_dict_changes_nothing(home, tmp_path):
    """Method: load_state_dict(state_dict()) in mid-training of an fp32 model, of one that computes
    in bf16, and of the optimizer; the run goes on with the bits of one without."""
    for dtype in (None, "bf16"):
        states = []
        for reloads in (False, True):
            model, optimizer = wrapped(home, tmp_path, param_dtype=dtype)
            for at in range(3):
                step(model, optimizer, at)
                if reloads and at == 1:
                    model.load_state_dict(model.state_dict())
                    optimizer.load_state_dict(optimizer.state_dict())
            states.append(model.state_dict())
            del model, optimizer
        assert differing(*states) == []


def test_optimizer_state_dict_is_refused_before_anything_changes(tmp_path):
    """Method: a state dict with other groups, and one with a moment of a wrong shape; UsageError,
    and state and hyperparameters are as they were."""
    model, optimizer = wrapped("nvme", tmp_path)
    step(model, optimizer)
    before = optimizer.state_dict()
    other = copy.deepcopy(before)
    other["param_groups"][0]["params"] = other["param_groups"][0]["params"][:-1]
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 5.0
    wrong["state"][3]["exp_avg"] = torch.ones(2, 3)
    for bad in (other, wrong):
        with pytest.raises((infinity.UsageError, ValueError)):
            optimizer.load_state_dict(bad)
        now = optimizer.state_dict()
        assert now["param_groups"] == before["param_groups"]
        torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_home
def test_unwrap_gives_plain_objects_back(home, dtype, tmp_path):
    """Method: wrap, train, unwrap; the same model and optimizer objects, plain parameters with
    bytes, no hook of the engine's, gradients and state where torch has them, nothing left on disk,
    and it can be wrapped again.
    """
    model = transformer(SEED).to(dtype)
    optimizer = adamw(model, LR)
    identities = {name: id(p) for name, p in model.named_parameters()}
    hooks = {name: hooks_of(module) for name, module in model.named_modules()}
    wrapped_model, managed = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    assert wrapped_model is model and isinstance(managed, torch.optim.Optimizer)
    for at in range(2):
        step(model, managed, at)
    step(model, at=3)
    values = model.state_dict()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    plain, plain_optimizer = infinity.unwrap_model(model, managed)
    assert plain is model and plain_optimizer is optimizer and type(optimizer) is torch.optim.AdamW
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    assert {name: hooks_of(module) for name, module in model.named_modules()} == hooks
    for name, param in model.named_parameters():
        assert (
            type(param) is nn.Parameter
            and param.is_leaf
            and param.requires_grad
            and param.dtype == dtype
        )
        assert param.untyped_storage().nbytes() >= param.nbytes
        assert not param._backward_hooks and not getattr(
            param, "_post_accumulate_grad_hooks", None
        ), name
        assert not [key for key in vars(param) if "infinity" in key], name
        assert torch.equal(param.grad, grads[name])
    assert model.head.weight is model.tokens.weight
    assert differing(model.state_dict(), values) == []
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    assert leftovers(tmp_path) == []
    copy.deepcopy(model), save(model.state_dict()), pickle.dumps(model.norm.weight)
    with pytest.raises(infinity.UsageError):
        infinity.unwrap_model(model, optimizer)
    with pytest.raises(infinity.UsageError):
        managed.step()
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 4)
    model, managed = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    step(model, managed, 5)


@every_home
def test_training_continues_after_unwrap_as_if_nothing_had_been(home, tmp_path):
    """Method: wrap and unwrap at once, then train by torch: the bits of a run that was never
    wrapped; and after wrapped steps, plain ones have the bits of plain ones from the same state."""
    plain, model = transformer(SEED), transformer(SEED)
    plain_optimizer, optimizer = adamw(plain, LR), adamw(model, LR)
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        step(one, its, 0)
    model, managed = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    model, optimizer = infinity.unwrap_model(model, managed)
    for at in (1, 2):
        for one, its in ((plain, plain_optimizer), (model, optimizer)):
            step(one, its, at)
    assert differing(model.state_dict(), plain.state_dict()) == []

    model, managed = infinity.wrap_model(model, optimizer, at_home(home, home, tmp_path))
    step(model, managed, 3)
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(managed.state_dict())
    model, optimizer = infinity.unwrap_model(model, managed)
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        step(one, its, 4)
    assert differing(model.state_dict(), plain.state_dict()) == []


@pytest.mark.parametrize("dtype", [None, "bf16"])
@every_home
def test_state_dict_after_a_pass_that_failed(home, dtype, tmp_path):
    """Method: an exception in the middle of a backward, then state_dict(): the values, in the
    dtypes the model was wrapped with, that stay valid when training goes on. What is saved after a
    crash must be what was trained.
    """

    def work():
        model, optimizer = wrapped(home, tmp_path, param_dtype=dtype)
        step(model, optimizer)
        expected = model.state_dict()
        for at, failing in enumerate(
            (model.blocks[1].norm1.weight, model.blocks[3].feed[0].weight, model.positions)
        ):
            hook = failing.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(model, at=at)
            hook.remove()
            state = model.state_dict()
            assert differing(state, expected) == []
            for name in ("blocks.0.norm1.weight", "blocks.3.feed.0.weight", "positions"):
                with contextlib.suppress(infinity.UsageError):
                    value = expected[name] if dtype is None else ties_away(expected[name])
                    assert torch.equal(model.get_parameter(name).detach().clone(), value)
            optimizer.zero_grad()
            with torch.no_grad():
                model(tokens(0))
            assert differing(state, expected) == []
        step(model, optimizer, 1)

    in_child(work)


@pytest.mark.parametrize("where", ["forward", "backward"])
@every_home
def test_state_dict_in_the_middle_of_a_pass(home, where, tmp_path):
    """Method: call state_dict() from a forward hook and from a gradient hook, as callbacks do; the
    values, and valid afterwards."""

    def work():
        model, optimizer = wrapped(home, tmp_path, param_dtype="bf16")
        step(model, optimizer)
        expected, seen = model.state_dict(), []

        def look(*args):
            seen.append(model.state_dict())

        if where == "forward":
            model.blocks[3].feed.register_forward_hook(look)
        else:
            model.blocks[3].norm2.weight.register_hook(look)
        step(model)
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens(0))
        assert seen and all(differing(state, expected) == [] for state in seen)

    in_child(work)


@both_ends
def test_unwrap_between_clip_and_step(home, tmp_path):
    """Method: clip, then unwrap before the step; the plain gradients are the clipped ones, and the
    plain step is that of a run that was never wrapped."""
    plain = transformer(SEED, dropout=0.0)
    plain_optimizer = adamw(plain, LR)
    model, optimizer = wrapped(home, tmp_path, transformer(SEED, dropout=0.0))
    for one in (plain, model):
        step(one)
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    model, optimizer = infinity.unwrap_model(model, optimizer)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, param.grad, rtol=1e-5, atol=1e-8)
    plain_optimizer.step()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_unwrap_without_its_optimizer(tmp_path):
    """Method: unwrap with the optimizer left out: it is found, or its absence is said; never left
    half-wrapped."""
    model = transformer(SEED)
    optimizer = adamw(model, LR)
    model, managed = infinity.wrap_model(model, optimizer, at_home("nvme", "nvme", tmp_path))
    step(model, managed)
    try:
        _, found = infinity.unwrap_model(model)
    except infinity.UsageError:
        infinity.unwrap_model(model, managed)
    else:
        assert found is optimizer
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))
