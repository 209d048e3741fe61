"""Forwards and backwards as ordinary loops run them: modes, checkpoints, accumulation, hooks,
closures."""

from __future__ import annotations

import contextlib
import copy
from functools import partial

import pytest
import torch
from models import (
    TIERS,
    Block,
    at_home,
    differing,
    in_child,
    loss_of,
    seeded,
    tokens,
    transformer,
)
from runs import adamw, same_bits
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from training_cases import (
    DTYPES,
    LR,
    SEED,
    a_model,
    assert_trains_alike,
    both_ends,
    hardest,
    simple_step,
    well_conditioned,
)

import infinity


class Normed(nn.Module):
    """Convolution, batch norm, a module that is called twice, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.shared = nn.Conv2d(8, 8, 1)
        self.again = self.shared
        self.linear = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.again(torch.relu(self.shared(self.norm(self.first(x))))).mean((2, 3))
        return self.out(self.linear(torch.tanh(self.linear(x))))


def image(step: int) -> torch.Tensor:
    return torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(step))


@both_ends
def test_buffers_shared_modules_and_modules_called_twice(home, tmp_path):
    """Method: batch norm's running statistics, a counter, a module under two names, a module used
    twice a forward."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss = model(image(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen += [loss.detach(), model(image(9))]
            model.train()
        return seen

    model, _ = assert_trains_alike(loop, seeded(SEED, Normed), home, tmp_path)
    assert model.again is model.shared and int(model.calls) == 6
    assert "hidden" not in model.state_dict()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_ends
def test_eval_between_steps_and_between_forward_and_backward(home, mode, tmp_path):
    """Method: look at another batch between steps, and between a forward and its backward."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            loss = loss_of(model, tokens(SEED + step))
            model.eval()
            with mode():
                seen.append(model(tokens(99)).clone().detach())
            model.train()
            loss.backward()
            with mode():
                seen.append(loss_of(model.eval(), tokens(98)).clone().detach())
            model.train()
            optimizer.step()
            with mode():
                seen.append(loss_of(model.eval(), tokens(97)).clone().detach())
            model.train()
            optimizer.zero_grad()
        return [torch.tensor(t.tolist()) for t in seen]

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


def test_first_forward_in_inference_mode_does_not_spoil_training(tmp_path):
    """Method: the very first forward is under inference_mode; what the engine allocates then must
    still be good for autograd."""

    def loop(model, optimizer):
        with torch.inference_mode():
            model(tokens(1))
        return [simple_step(model, optimizer, step) for step in range(2)]

    for home in ("host", "nvme"):
        assert_trains_alike(loop, transformer(SEED), home, tmp_path)


# Of dispatched operations, which torch counts: one of the engine's own would be found missing.
SELECTIVE = partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
)
RECOMPUTE = {
    "reentrant": {"use_reentrant": True},
    "saved": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}


@pytest.mark.parametrize("kind", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("where", ["around", "inside", "inside, to a product", "both"])
@both_ends
def test_recomputed_activations(home, where, kind, tmp_path):
    """Method: torch.utils.checkpoint of each kind around every block, inside every block, and
    nested; with dropout, whose noise the recomputation must meet again, and without, where torch
    ends the recomputation by an exception inside of a product with a weight."""
    model = transformer(SEED)
    if where in ("around", "both"):
        model.around = kind
    if where != "around":
        for block in model.blocks:
            block.inside = kind
            block.dropout.p *= "product" not in where

    def loop(model, optimizer):
        return [simple_step(model, optimizer, step) for step in range(3)]

    model, _ = assert_trains_alike(loop, model, home, tmp_path)
    device = infinity.stats(model).tiers["device"]
    assert device.peak_nbytes <= device.planned_nbytes


@pytest.mark.parametrize("kind", RECOMPUTE.values(), ids=RECOMPUTE)
def test_several_blocks_in_one_checkpoint(kind, tmp_path):
    """Method: one checkpoint over all three blocks, and one over each of them inside it."""
    from torch.utils.checkpoint import checkpoint

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(64, 2, 0.1) for _ in range(3))

        def run(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, **kind)
            return x

        def forward(self, x):
            return checkpoint(self.run, x, **kind)

    def loop(model, optimizer):
        for step in range(2):
            x = torch.randn(
                2, 5, 64, generator=torch.Generator().manual_seed(step), requires_grad=True
            )
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_alike(loop, seeded(SEED, Nested), "nvme", tmp_path)


@both_ends
def test_hooks_of_the_user_on_saved_tensors(home, tmp_path):
    """Method: save_on_cpu and a pair of counting hooks around the forward; no weight at home
    reaches them empty."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.untyped_storage().nbytes() >= tensor.nbytes)
        return tensor.clone()

    def loop(model, optimizer):
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(model, tokens(SEED))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = loss_of(model, tokens(SEED + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)
    assert sizes and all(sizes)


@both_ends
def test_gradient_accumulation(home, tmp_path):
    """Method: three micro-batches a step, the last through a graph that is kept and run backward
    twice."""

    def loop(model, optimizer):
        norms = []
        for step in range(2):
            for micro in range(3):
                loss = loss_of(model, tokens(SEED + 3 * step + micro)) / 3
                loss.backward(retain_graph=micro == 2)
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


@both_ends
def test_several_losses_and_several_forwards_before_one_backward(home, tmp_path):
    """Method: two losses of one forward, and two forwards, each backward on its own and as a sum,
    in either order."""

    def loop(model, optimizer):
        a, b = loss_of(model, tokens(SEED)), loss_of(model, tokens(SEED + 1))
        (a + 0.5 * b).backward()
        optimizer.step()
        optimizer.zero_grad()
        logits = model(tokens(SEED + 2))
        logits.square().mean().backward(retain_graph=True)
        logits.logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        a, b = loss_of(model, tokens(SEED + 3)), loss_of(model, tokens(SEED + 4))
        a.backward()
        b.backward()
        optimizer.step()
        optimizer.zero_grad()
        unused = loss_of(model, tokens(SEED + 5))  # never run backward
        c = loss_of(model, tokens(SEED + 6))
        del unused
        c.backward()
        optimizer.step()

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


@both_ends
def test_gradient_penalty_of_second_order(home, tmp_path):
    """Method: a penalty on the gradient with respect to the input (twice differentiable), as in
    WGAN-GP; equal to plain torch, or a typed error."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
            )

        def forward(self, x):
            return self.layers(x)

    def loop(model, optimizer):
        seen = []
        for step in range(3):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
            score = model(x).sum()
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (score + 10 * penalty).backward()
            seen.append(penalty.detach())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def work():
        with contextlib.suppress(infinity.UsageError):
            assert_trains_alike(loop, seeded(SEED, Critic), home, tmp_path)

    in_child(work)


@both_ends
def test_gradients_of_parameters_by_autograd_grad(home, tmp_path):
    """Method: torch.autograd.grad with respect to parameters, and backward(inputs=...); plain
    torch's, or a typed error; other gradients are not disturbed."""

    def loop(model, optimizer):
        loss = loss_of(model, tokens(SEED))
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return [grad.clone() for grad in found]

    def with_inputs(model, optimizer):
        loss = loss_of(model, tokens(SEED))
        loss.backward(inputs=[model.blocks[1].norm1.weight])
        seen = torch.tensor([p.grad is None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        return seen

    def work():
        for one in (loop, with_inputs):
            with contextlib.suppress(infinity.UsageError):
                assert_trains_alike(one, transformer(SEED), home, tmp_path)

    in_child(work)


@both_ends
def test_backward_through_a_graph_from_before_the_step(home, tmp_path):
    """Method: run backward through a graph whose weights a step has changed since; torch refuses,
    because the gradient would be of other weights than the loss, and so must the engine."""
    plain = transformer(SEED)
    plain_optimizer = well_conditioned(plain)
    model = transformer(SEED)
    optimizer = well_conditioned(model)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )

    def stale(model, optimizer):
        one, other = loss_of(model, tokens(SEED)), loss_of(model, tokens(SEED + 1))
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
        other.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale(plain, plain_optimizer)
    with pytest.raises(RuntimeError):
        stale(model, optimizer)


@both_ends
def test_closure(home, tmp_path):
    """Method: step(closure) runs it with gradients on and returns what it returned, also under
    no_grad."""

    def loop(model, optimizer):
        seen = []
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, tokens(SEED + step))
                loss.backward()
                return loss

            with torch.no_grad() if step == 1 else contextlib.nullcontext():
                seen.append(optimizer.step(closure).detach())
        return seen

    assert_trains_alike(loop, transformer(SEED), home, tmp_path)


def test_step_hooks_of_the_optimizer_run(tmp_path):
    """Method: hooks before and after the step, registered on what wrap_model returned, and on the
    plain optimizer."""
    model, optimizer = a_model()
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("plain before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("plain after"))
    model, optimizer = infinity.wrap_model(model, optimizer, at_home("host", "host", tmp_path))
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    simple_step(model, optimizer, 0)
    assert {"before", "after"} <= set(calls)
    assert {"plain before", "plain after"} <= set(calls), (
        "hooks of the optimizer that was wrapped are lost"
    )


@both_ends
def test_hooks_on_parameters_and_modules(home, tmp_path):
    """Method: tensor hooks on parameters that change the gradient, full backward hooks, forward
    hooks that read the weight, registered before and after the wrap."""
    seen = []

    def dress(model):
        model.tokens.weight.register_hook(lambda grad: grad * 2)
        model.blocks[0].norm1.weight.register_hook(lambda grad: grad + 0.1)
        model.blocks[1].register_full_backward_hook(lambda m, gi, go: seen.append(len(gi)))
        model.norm.register_forward_hook(lambda m, args, out: out * m.weight.mean())
        return model

    def loop(model, optimizer):
        losses = [simple_step(model, optimizer, 0)]
        model.norm.bias.register_hook(lambda grad: grad * 3)
        return losses + [simple_step(model, optimizer, step) for step in (1, 2)]

    plain, model = dress(transformer(SEED)), dress(transformer(SEED))
    plain_optimizer, optimizer = well_conditioned(plain), well_conditioned(model)
    model, optimizer = infinity.wrap_model(
        model, optimizer, hardest(home, model, optimizer, tmp_path)
    )
    losses = []
    for one, its in ((plain, plain_optimizer), (model, optimizer)):
        torch.manual_seed(SEED)
        losses.append(loop(one, its))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    assert len(seen) == 6


@pytest.mark.parametrize("where", ["forward", "backward", "in the loss", "in recomputation"])
@both_ends
def test_a_failed_pass_leaves_no_trace(home, where, tmp_path):
    """Method: one of three steps is first tried with an exception in its middle, then again;
    losses, weights and moments have the bits of a run without the failure."""

    class Fault(Exception):
        pass

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            raise Fault

    def try_to(model):
        handle = None
        if where == "forward":
            handle = model.blocks[1].feed[1].register_forward_pre_hook(lambda *args: raise_fault())
        elif where == "backward":
            handle = (
                model.blocks[1]
                .feed[1]
                .register_forward_hook(lambda m, args, out: Failing.apply(out))
            )
        elif where == "in recomputation":
            handle = model.blocks[1].register_forward_pre_hook(
                lambda *args: raise_fault() if torch._C._current_graph_task_id() != -1 else None
            )
        try:
            with pytest.raises(Fault):
                loss = loss_of(model, tokens(50))
                if where == "in the loss":
                    raise Fault
                loss.backward()
        finally:
            if handle:
                handle.remove()

    def raise_fault():
        raise Fault

    def run(with_failure: bool):
        model = transformer(SEED)
        if where == "in recomputation":
            model.around = {"use_reentrant": False}
        optimizer = adamw(model, LR)
        model, optimizer = infinity.wrap_model(
            model, optimizer, hardest(home, model, optimizer, tmp_path)
        )
        losses = []
        for step in range(3):
            if with_failure and step == 1:
                try_to(model)
                optimizer.zero_grad()
            torch.manual_seed(step)
            losses.append(simple_step(model, optimizer, step))
        moments = {
            f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()
        }
        return {str(i): loss for i, loss in enumerate(losses)}, model.state_dict(), moments

    for ours, theirs in zip(run(True), run(False)):
        assert differing(ours, theirs) == []


@pytest.mark.parametrize("home", TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inference_without_optimizer(home, dtype, tmp_path):
    """Method: wrap without an optimizer; None comes back for it, outputs have the bits of the plain
    model's, weights stream from their home, and the device never holds them all."""
    plain = transformer(SEED, blocks=6).eval()
    model = copy.deepcopy(plain)
    config = at_home(home, "auto", tmp_path, param_dtype=DTYPES[dtype])
    if DTYPES[dtype]:
        plain.bfloat16()
    wrapped, none = infinity.wrap_model(model, config=config)
    assert wrapped is model and none is None
    with torch.no_grad():
        for step in range(3):
            assert same_bits(model(tokens(step)), plain(tokens(step)))
    stats = infinity.stats(model)
    total = sum(p.nbytes for p in plain.parameters())
    assert stats.tiers["device"].peak_nbytes <= stats.tiers["device"].planned_nbytes
    if home != "device":
        assert stats.tiers["device"].peak_nbytes < 0.8 * total
        assert stats.edges["host->device"].nbytes >= 3 * total * 0.5
    if home == "nvme":
        assert stats.edges["nvme->host"].nbytes >= 3 * total * 0.5
    with torch.inference_mode():
        assert torch.equal(model(tokens(1)), plain(tokens(1)))


@both_ends
def test_backward_without_optimizer_gives_gradients_of_inputs(home, tmp_path):
    """Method: a frozen wrapped model passes gradients to its input, as a perceptual loss or a
    teacher does."""
    plain = seeded(
        SEED,
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)
        ),
    )
    plain.requires_grad_(False)
    model, _ = infinity.wrap_model(copy.deepcopy(plain), None, at_home(home, "auto", tmp_path))
    grads = []
    for one in (plain, model):
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        one(x).square().sum().backward()
        grads.append(x.grad)
    assert same_bits(*grads)


@both_ends
def test_two_wrapped_models_in_one_graph(home, tmp_path):
    """Method: a student learns from a wrapped teacher, both streaming; then two trained models in
    one loss."""
    plain_teacher, plain = transformer(SEED + 1), transformer(SEED)
    teacher, model = copy.deepcopy(plain_teacher), copy.deepcopy(plain)
    plain_pair = [well_conditioned(plain), well_conditioned(plain_teacher)]
    pair = [well_conditioned(model), well_conditioned(teacher)]
    model, pair[0] = infinity.wrap_model(model, pair[0], hardest(home, model, pair[0], tmp_path))
    teacher, pair[1] = infinity.wrap_model(
        teacher, pair[1], hardest(home, teacher, pair[1], tmp_path)
    )

    def loop(student, teacher, optimizers):
        losses = []
        for step in range(3):
            ids = tokens(SEED + step)
            if step:
                target = teacher(ids)
            else:
                with torch.no_grad():
                    target = teacher(ids)
            loss = F.mse_loss(student(ids), target) + loss_of(student, ids)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    torch.manual_seed(SEED)
    expected = loop(plain, plain_teacher, plain_pair)
    torch.manual_seed(SEED)
    found = loop(model, teacher, pair)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(
        teacher.state_dict(), plain_teacher.state_dict(), rtol=1e-5, atol=2e-6
    )


@both_ends
def test_autocast(home, tmp_path):
    """Method: fp32 weights under torch.autocast to bf16; its cache of cast weights must not outlive
    a step."""

    def loop(model, optimizer):
        losses = []
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, tokens(SEED + step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    assert_trains_alike(loop, transformer(SEED), home, tmp_path, rtol=1e-4, atol=1e-5)
