"""Fused losses: the same bits at every home, close to torch's, and told where there is no head.

**beside**: a model, plain if it is of fp32, whose loop calls the fused function by hand.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import at_home, differing
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.ext.tiles import fused_loss
from infinity.ext.tiles.fused_loss import FusedCrossEntropy

WORDS, WIDTH = 300, 16


class Words(nn.Module):
    """Words in, logits out; the head may be the embedding."""

    def __init__(self, dtype: torch.dtype, *, tied: bool) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.words.weight
        self.to(dtype)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mix(self.words(ids)).tanh()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids))


def of_logits(model: nn.Module, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).float().view(-1, WORDS), target)


def by_hand(model: nn.Module, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu")):
        rows = model.hidden(ids).view(-1, WIDTH)
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else rows.dtype
    with torch.autocast("cpu", enabled=False):
        return FusedCrossEntropy.apply(
            rows, model.head.weight, model.head.bias, target, -100, "mean", dtype
        )


def trained(
    dtype: torch.dtype, loss_of, config: dict | None, *, tied: bool, casts: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of three steps."""
    torch.manual_seed(5)
    model, losses = Words(dtype, tied=tied), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if config is not None:
        model, optimizer = infinity.wrap_model(model, optimizer, config)
    for _ in range(3):
        ids = torch.randint(WORDS, (3, 7))
        target = torch.randint(WORDS, (21,)).index_fill(0, torch.tensor([2, 9]), -100)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = loss_of(model, ids, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "dtype, casts",
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["fp32", "autocast", "bf16"],
)
def test_the_bits_are_those_of_the_function_called_by_hand(
    home, tied, dtype, casts, tmp_path, monkeypatch
):
    """In parts of two rows. Twin: without the choice the losses are others."""
    monkeypatch.setattr(fused_loss, "LEAST_NBYTES", 2 * 4 * WORDS)
    config = at_home(home, home, tmp_path)
    losses, weights = trained(
        dtype, of_logits, config | {"fused_loss": True}, tied=tied, casts=casts
    )
    # In bf16 the engine steps fp32 masters, which a plain loop has not.
    plain = None if dtype is torch.float32 else config
    beside = trained(dtype, by_hand, plain, tied=tied, casts=casts)
    assert losses == beside[0] and not differing(weights, beside[1])
    assert losses != trained(dtype, of_logits, config, tied=tied, casts=casts)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_as_near_to_exact_ones_as_torchs(reduction, dtype):
    """Twice the error of torch's own at most, under a loss scale without which gradients in fp16
    would be zero. Twin: labels moved by one word are far."""
    torch.manual_seed(6)
    count = 20_000
    x, weight = torch.randn(64, 32).to(dtype), torch.randn(count, 32).to(dtype) / 16
    target, scale = torch.randint(count, (64,)), torch.rand(64)

    def gradients(compute, *given, moved=0):
        given = [each.detach().requires_grad_() for each in given]
        loss = compute(*given, (target + moved) % count)
        loss = loss * scale.to(loss.dtype) if reduction == "none" else loss
        (loss.sum() * (64 if reduction == "sum" else 4096)).backward()
        return [each.grad.double() for each in given]

    def torchs(x, weight, target):
        logits = F.linear(x, weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, target, reduction=reduction)

    def ours(x, weight, target):
        return FusedCrossEntropy.apply(x, weight, None, target, -100, reduction, x.dtype)

    exact = gradients(torchs, x.double(), weight.double())
    for moved in (0, 1):
        errors = [
            [(one - two).norm() / two.norm() for one, two in zip(found, exact)]
            for found in (gradients(ours, x, weight, moved=moved), gradients(torchs, x, weight))
        ]
        assert all(mine < 2 * own for mine, own in zip(*errors)) == (not moved), errors


def at_home_with_a_head() -> tuple[Words, torch.optim.Optimizer]:
    torch.manual_seed(8)
    model = Words(torch.float32, tied=False)
    config = {"params": "host", "optimizer": "host", "fused_loss": True}
    return infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


def test_logits_without_a_graph_give_no_gradient():
    """Made under no_grad, the loss outside of it. Twin: made with a graph."""
    model, _ = at_home_with_a_head()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        logits = model(ids)
    assert not F.cross_entropy(logits[0], ids[0]).requires_grad
    assert F.cross_entropy(model(ids)[0], ids[0]).requires_grad


def test_weights_that_are_swapped_for_a_call_are_used():
    """By torch.func.functional_call. Twin: the loss of the model's own weight."""
    model, _ = at_home_with_a_head()
    ids, other = torch.arange(8)[None], torch.randn(WORDS, WIDTH)
    logits = torch.func.functional_call(model, {"head.weight": other}, (ids,))
    with torch.no_grad():
        expected = F.linear(model.hidden(ids), other, model.head.bias)
    assert torch.equal(logits, expected) and not torch.equal(model(ids).clone(), expected)


def test_hidden_states_of_another_dtype_come_back_under_autocast():
    """In bf16 over fp32 weights, by another use than a loss: the gradients are plain torch's."""
    grads = []
    for wrapped in (False, True):
        torch.manual_seed(8)
        model = at_home_with_a_head()[0] if wrapped else Words(torch.float32, tied=False)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.arange(8)[None]).float().logsumexp(-1).sum().backward()
        grads.append({name: param.grad.clone() for name, param in model.named_parameters()})
    assert not differing(grads[0], grads[1])


def test_a_model_of_transformers_computes_no_logits_for_its_loss(monkeypatch):
    """A Llama with labels: equal to 1e-5, in one call of the function. Twin: its logits are there
    when they are asked for."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 64}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    calls, own = [], FusedCrossEntropy.forward

    def forward(*args):
        calls.append(args)
        return own(*args)

    monkeypatch.setattr(FusedCrossEntropy, "forward", staticmethod(forward))
    ids, found = torch.arange(30).view(2, 15), []
    for config in (None, {"params": "host", "optimizer": "host", "fused_loss": True}):
        torch.manual_seed(7)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
        if config is not None:
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer = infinity.wrap_model(model, optimizer, config)
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        found.append((out.loss.detach(), model.lm_head.weight.grad.clone(), out.logits.detach()))
    assert len(calls) == 1
    assert torch.equal(found[0][2], found[1][2].clone())
    for mine, plain in zip(found[1][:2], found[0][:2]):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-7)


def test_it_is_told_where_no_layer_is_an_output(caplog):
    """Twin: with a head nothing is logged."""
    config = {"params": "host", "optimizer": "host", "fused_loss": True}
    for model in (nn.Linear(4, 4), Words(torch.float32, tied=False)):
        caplog.clear()
        infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        told = "fused_loss has no effect" in caplog.text
        assert told == isinstance(model, nn.Linear)
    with pytest.raises(ConfigError, match="fused_loss='yes' must be True or False"):
        infinity.Config(fused_loss="yes")
