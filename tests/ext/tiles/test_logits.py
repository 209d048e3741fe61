"""Logits of a head in tiles, or of one whose loss is fused: the tensor a plain head gives, but
never whole for a cross-entropy.

**way**: in tiles, as within `DEVICE` bytes, or by `fused_loss`.
**pair**: two equal models, one whose head computes in a way, one plain.
Both are used alike, and what came out, the input's gradient and every parameter's are close: within
1e-5, relative. **fused**, **whole**: counts of cross-entropies computed without logits, and of
logits computed; no test passes in vain.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from inside import parts_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")

from logits_cases import (  # noqa: F401
    DEVICE,
    SEED,
    VOCAB,
    WIDTH,
    Model,
    ce,
    check_close,
    check_pair,
    counts,
    inference,
    inputs,
    labels,
    no_grad,
    pair,
    same,
    sgd,
    way,
    wrap,
)
from models import leftovers, seeded, swap_files

import infinity
from infinity.core.machine.tiers import Tier
from infinity.errors import UsageError
from infinity.ext.tiles import fused_loss, tiled_layers
from infinity.ext.tiles.lazy_logits import Logits

# --- never whole ---

FUSED = {
    "mean": ce,
    "sum": lambda z, y: ce(z, y, reduction="sum") / 7,
    "twice": lambda z, y: (ce(z, y), ce(z, (y + 1) % VOCAB)),
    "none": lambda z, y: ce(z, y, reduction="none") * (torch.arange(15) - 7).relu(),
    "module": lambda z, y: nn.CrossEntropyLoss()(z.flatten(0, 1), y.flatten()),
    "keywords": lambda z, y: F.cross_entropy(input=z.flatten(0, 1), target=y.flatten()),
    "cast and views": lambda z, y: ce(z.float().contiguous().to(torch.float32).view(5, 3, -1), y),
    "rows": lambda z, y: ce(z[:, :-1], y[:, 1:]),
    "one sample": lambda z, y: F.cross_entropy(z[1], y[1]),
    "every second row": lambda z, y: ce(z[..., ::2, :], y[:, ::2]),
    "last": lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "ignored": lambda z, y: ce(z, labels(ignored=-100)),
    "ignored class": lambda z, y: ce(z, labels(ignored=7), ignore_index=7, reduction="sum"),
    "ignored, none": lambda z, y: ce(z, labels(ignored=-100), reduction="none"),
    "all ignored": lambda z, y: (lambda loss: (loss.backward(), loss.detach()))(
        ce(z, torch.full_like(y, -100))
    ),
    "all ignored, sum": lambda z, y: ce(z, torch.full_like(y, -100), reduction="sum"),
    "no_grad": lambda z, y: torch.no_grad()(ce)(z, y),
    "checkpoint": lambda z, y: checkpoint(ce, z, y, use_reentrant=False),
}


@pytest.mark.parametrize("parts", [False, True], ids=["at once", "row by row"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", FUSED)
def test_cross_entropy_without_the_logits(monkeypatch, counts, name, bias, parts):
    """Pairs whose logits are never whole; with parts of a tile that are one row, too."""
    if parts:
        monkeypatch.setattr(tiled_layers, "LOGITS_NBYTES", 1)
        monkeypatch.setattr(fused_loss, "LEAST_NBYTES", 1)
    same(pair(lambda: Model(bias)), lambda m, x: FUSED[name](m(x), labels()))
    assert counts == {"fused": 2 if name in ("twice", "checkpoint") else 1, "whole": 0}


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_metadata_needs_no_logits(counts):
    """Attributes are the untiled output's, and nothing is computed for them. Twin: a value is."""
    ours, theirs = (m(inputs()) for m in pair())
    names = (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "layout",
        "is_cuda",
        "grad",
        "is_leaf",
    )
    for get in [lambda z, name=name: getattr(z, name) for name in names] + [
        len,
        torch.Tensor.size,
        torch.Tensor.stride,
    ]:
        assert get(ours) == get(theirs)
    assert (
        isinstance(ours, torch.Tensor)
        and ours.numel() == theirs.numel()
        and ours.is_contiguous()
        and counts["whole"] == 0
    )
    assert ours[0, 0, 0].item() == pytest.approx(theirs[0, 0, 0].item(), rel=1e-5)
    assert counts["whole"] == 1 and ours.grad_fn is not None


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.nbytes = max(
            [
                self.nbytes,
                *(t.numel() * t.itemsize for t in tree_leaves(out) if type(t) is torch.Tensor),
            ]
        )
        return out


@pytest.mark.parametrize("nbytes", [32 * 1024 * 1024, 64 * 1024], ids=["tile", "part of a tile"])
def test_no_tensor_is_as_large_as_the_logits(monkeypatch, nbytes):
    """3000 tokens of 1200 words, forward and backward: nothing is larger than a tile's logits, nor
    than LOGITS_NBYTES (or the hidden states). Twin: the plain model's logits."""
    monkeypatch.setattr(tiled_layers, "LOGITS_NBYTES", nbytes)
    monkeypatch.setattr(fused_loss, "LEAST_NBYTES", min(nbytes, 64 * 1024))
    models, found = pair(lambda: Model(vocab=1200)), []
    for model in models:
        with Largest() as largest:
            F.cross_entropy(
                model(inputs((3000,)).detach()).float(), labels((3000,), 1200)
            ).backward()
        found.append(largest.nbytes)
    check_pair(models, ([], []))
    assert found[1] >= 3000 * 1200 * 4 and found[0] <= max(
        min(nbytes, 3000 * 256 * 4), 3000 * WIDTH * 4
    ), found


# --- everything else ---


def edit(change):
    """Changes logits in place before the loss. What was made of them before shares the change or
    keeps its values."""

    def use(z, y):
        flat, copied = z.view(-1, VOCAB), z * 1
        changed = change(z)
        return F.cross_entropy(flat, y.flatten()), ce(z, y), changed.sum() / 99, copied

    return use


def set_item(z):
    z[..., 3] = -50.0
    return z


def divide(z):
    z /= 2
    return z


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, factor):
        ctx.save_for_backward(z, factor)
        return z * factor

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[1], (dy * ctx.saved_tensors[0]).sum()


def saved(z):
    torch.save(z, buffer := io.BytesIO())
    return torch.load(io.BytesIO(buffer.getvalue())).detach()


def gradient(early=lambda z: None, late=lambda z: None):
    def use(z, y):
        early(z)
        loss, seen = ce(z, y), []
        late(z) if late is not hook else z.register_hook(lambda g: seen.append(g.clone()))
        loss.backward()
        return seen[0] if late is hook else z.grad.clone()

    return use


hook, hot = object(), torch.tensor(2.0, requires_grad=True)
OTHERS = {
    "label smoothing": lambda z, y: ce(z, y, label_smoothing=0.1),
    "class weights": lambda z, y: ce(z, y, weight=torch.arange(VOCAB) / 99),
    "soft targets": lambda z, y: F.cross_entropy(z[0], F.one_hot(y[0], VOCAB) * 0.5 + 1e-4),
    "old arguments": lambda z, y: ce(z, y, reduce=False),
    "own targets": lambda z, y: ce(z, y) + F.cross_entropy(z[0], z[1]),
    "transposed": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten()),
    "softcap": lambda z, y: ce(torch.tanh(z / 30) * 30, y),
    "distillation": lambda z, y: F.kl_div((z / 2).log_softmax(-1), (z.detach() * 3).softmax(-1)),
    "temperature": lambda z, y: ce(z / 0.7, y),
    "z-loss": lambda z, y: (ce(z, y), z.logsumexp(-1).square().mean()),
    "z-loss first": lambda z, y: (z.float().logsumexp(-1), ce(z, y)),
    "argmax": lambda z, y: (ce(z, y), z.argmax(-1), (z.argmax(-1) == y).float().mean()),
    "gather": lambda z, y: z.gather(-1, y[..., None]),
    "metric under no_grad": lambda z, y: (no_grad(z.argmax)(-1), z.logsumexp(-1), ce(z, y)),
    "metric under inference_mode": lambda z, y: (
        inference(lambda: z.max().item())() > 0,
        z.logsumexp(-1),
        ce(z, y),
    ),
    "row under no_grad": lambda z, y: z[:, :1] * no_grad(lambda: z[:, 1:2])(),
    "set item": edit(set_item),
    "divide": edit(divide),
    "add_": edit(lambda z: z.add_(torch.arange(VOCAB))),
    "masked_fill_": edit(lambda z: z.masked_fill_(torch.arange(VOCAB) % 3 == 0, -9.0)),
    "in place under no_grad": edit(no_grad(set_item)),
    "in place by argument": edit(lambda z: F.relu(z, inplace=True)),
    "in place on a view": edit(lambda z: set_item(z.select(0, 1))),
    "in place on an alias": edit(lambda z: z.detach().mul_(2)),
    "transpose_": lambda z, y: (z.transpose_(0, 1).shape, z.shape, z),
    "detach": lambda z, y: (z.detach(), z.detach().requires_grad, ce(z, y)),
    "sum": lambda z, y: (
        z.sum(),
        z.mean(0),
        z.float().sum((0, 1)),
        z[0].sum(),
        z[:, :-1].max(-1),
        z[:0].sum(),
    ),
    "index": lambda z, y: (
        z[y > 99],
        z[torch.tensor([0, 2])],
        z[None],
        z[..., 3],
        z[0, 1, 2],
        z[:, [0, 1], 5:9],
        z[True],
    ),
    "iteration": lambda z, y: [row * 2 for row in z] + [*z.unbind(1), *z.split(2)],
    "sum of a list": lambda z, y: sum([z, z]),
    "stack": lambda z, y: (torch.stack([z, z]), torch.cat([z[:1], z[1:]])),
    "repr": lambda z, y: (f"{z[0, 0, 0]:.3f}", len(repr(z)) > 9),
    "lists": lambda z, y: (
        torch.tensor(z[0, 0, :9].tolist()),
        torch.as_tensor(z.detach().numpy()),
        bool(z[0, 0, 0] > 0),
    ),
    "pickle": lambda z, y: (
        pickle.loads(pickle.dumps(z)).detach(),
        saved(z),
        copy.deepcopy(z.detach()),
        ce(z, y),
    ),
    "dtypes": lambda z, y: (
        z.double(),
        z.half(),
        z.to(torch.bfloat16),
        z.type_as(z.double()),
        z.int(),
    ),
    "type": lambda z, y: z.type(torch.float64),
    "bits": lambda z, y: (
        z.view(torch.int32).dtype,
        z.view(torch.int32).shape,
        z.view(torch.bfloat16).shape,
    ),
    "shapes": lambda z, y: (
        z.view(-1),
        z.reshape(VOCAB, -1),
        z.permute(2, 0, 1),
        z.mT,
        z.unsqueeze(0),
        z[0, 0].view(-1),
    ),
    "data": lambda z, y: (
        z.data,
        z.clone(),
        z.requires_grad,
        z.new_zeros(3),
        torch.zeros_like(z),
        torch.numel(z),
    ),
    "out": lambda z, y: no_grad(lambda: torch.add(z, 1, out=torch.empty(3, 5, VOCAB)))(),
    "own function": lambda z, y: (Times.apply(z, hot), ce(z, y)),
    "compiled function": lambda z, y: torch.compile(lambda t: t.logsumexp(-1), backend="eager")(z),
    "checkpoint of a use": lambda z, y: checkpoint(lambda t: ce(t * 2, y), z, use_reentrant=False),
    "reentrant checkpoint": lambda z, y: (
        checkpoint(lambda t, f: ce(t * f, y), z, hot, use_reentrant=True),
        ce(z, y),
    ),
    "backward of logits": lambda z, y: torch.autograd.backward(z, torch.ones(z.shape)),
    "hook": lambda z, y: (z.register_hook(lambda g: g * 3) and None, ce(z, y)),
    "retain_grad": gradient(early=lambda z: z.retain_grad()),
    "retain_grad after the loss": gradient(late=lambda z: z.retain_grad()),
    "hook after the loss": gradient(late=hook),
    "gradient of logits": lambda z, y: torch.autograd.grad(ce(z * 1, y), z),
    "gradient of logits, after the loss": lambda z, y: (
        lambda loss: torch.autograd.grad(loss, z, allow_unused=True)
    )(ce(z, y)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_any_other_use_is_the_untiled_models(counts, name):
    """Pairs, computed once (in two grad modes: twice). Who asks after a fused loss for the logits'
    gradient may get a UsageError, never None."""
    try:
        same(pair(), lambda m, x: OTHERS[name](m(x), labels()))
    except UsageError:
        assert "after the loss" in name
    assert 1 <= counts["whole"] <= 2 or "after the loss" in name


ERRORS = {
    "label too large": lambda z, y: ce(z, y + 1),
    "label negative": lambda z, y: ce(z, y - 1),
    "numpy": lambda z, y: z.numpy(),
    "too few labels": lambda z, y: F.cross_entropy(z[0], y[0, 1:]),
    "int labels": lambda z, y: ce(z, y.int()),
    "index": lambda z, y: z[7],
    "unknown reduction": lambda z, y: ce(z, y, reduction="most"),
    "deepcopy": lambda z, y: copy.deepcopy(z),
    "view": lambda z, y: z.view(9, 4),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_torch_refuses_is_refused(name):
    """The same error, word for word. Twin: a right use of the same logits works afterwards."""
    models, found = pair(), []
    outs = [m(inputs()) for m in models]
    for z in outs:
        with pytest.raises(Exception) as told:
            ERRORS[name](z, labels())
        found.append((type(told.value), str(told.value)))
    assert found[0] == found[1]
    [ce(z, labels()).backward() for z in outs]
    check_pair(models, ([], []))


def test_autograd_grad_of_hidden_states_and_input(counts):
    """autograd.grad and backward(inputs=...) give no parameter a gradient; create_graph is refused;
    retain_graph backs twice."""
    models, found = pair(), []
    for m in models:
        hidden, x = [], inputs()
        m.head.register_forward_pre_hook(lambda _, args, hidden=hidden: hidden.append(args[0]))
        loss = ce(m(x), labels())
        if m is models[0]:
            with pytest.raises(UsageError, match="create_graph"):
                torch.autograd.grad(loss, x, create_graph=True)
        found.append(torch.autograd.grad(loss, [hidden[0], x], retain_graph=True))
        loss.backward(inputs=[x], retain_graph=True)
        assert all(p.grad is None for p in m.parameters())
        loss.backward(retain_graph=True)
        loss.backward()
        found[-1] += (x.grad,)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    check_pair(models, found)
    assert counts == {"fused": 1, "whole": 0}


# --- too late, and what stays ---


def step(m, h):
    m(inputs()).sum().backward()
    m.kept[0].step()


def rewrap(m, h):
    infinity.unwrap_model(m, m.kept[0])
    m.head.weight.data.mul_(2)
    m.kept = [wrap(m)[1]]


LATE = {
    "step": step,
    "unwrap": lambda m, h: infinity.unwrap_model(m, m.kept[0]),
    "another wrap": rewrap,
    "load": lambda m, h: m.load_state_dict(seeded(1, Model).state_dict()),
    "hidden states": lambda m, h: no_grad(h.mul_)(2),
}


@pytest.mark.parametrize("name", LATE)
def test_logits_of_what_is_gone_are_refused(name):
    """First asked for after weights or hidden states changed: UsageError, or what they were. Twin:
    asked for before."""
    (model, plain), hidden = pair(), []
    handle = model.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    early, late = model(inputs()), model(inputs())
    handle.remove()
    before = early.detach().clone()
    LATE[name](model, hidden[1])
    assert torch.equal(early.detach(), before)
    for use in (
        lambda z: ce(z, labels()),
        lambda z: z[:, 1:].float().sum(),
        lambda z: z.logsumexp(-1),
    ):
        try:
            found = use(late)
        except UsageError:
            continue
        check_close(found, use(plain(inputs())), name)


def test_nothing_stays_of_logits_and_their_losses():
    """Hidden states go with the last of their logits, charges are the same after every step, and
    within the plan."""
    model, _ = pair()
    hidden, charged = [], []
    model.head.register_forward_pre_hook(lambda _, args: hidden.append(weakref.ref(args[0])))
    account = parts_of(model).ledger.accounts[Tier.DEVICE]
    for _ in range(3):
        z = model(inputs())
        (ce(z, labels()) + z[0].sum()).backward()
        del z
        charged.append(account.charged_nbytes)
    assert [ref() for ref in hidden] == [None] * 3 and charged[1] == charged[2]
    assert account.peak_nbytes <= account.planned_nbytes


@pytest.mark.parametrize("used", ["lazy", "fused", "whole"])
def test_the_engine_goes_with_model_and_logits(swap, used):
    """Model, optimizer, logits and loss dropped: the engine is collected and its files are gone."""
    model, optimizer = wrap(seeded(SEED, Model), swap, "nvme")
    z = model(inputs())
    loss = {
        "lazy": lambda logits: None,
        "fused": lambda logits: ce(logits, labels()),
        "whole": torch.Tensor.sum,
    }[used](z)
    engine = weakref.ref(parts_of(model).engine)
    assert swap_files(swap) and type(z) is Logits
    del model, optimizer, z, loss
    gc.collect()
    assert engine() is None and leftovers(swap) == []
