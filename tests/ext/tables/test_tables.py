"""Tables: gradients of an embedding's weight land use by use, with the bits of autograd's sum."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import prepared
import pytest
import torch
import torch.nn.functional as F
from table_jobs import Alive
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.machine.tiers import Tier
from infinity.ext.tables import tables

ROWS, WIDTH = 211, 16
HOMES = ["device", "host", "nvme"]


class Scaled(nn.Embedding):
    """A subclass whose forward is its own."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


class Tied(nn.Module):
    """An embedding, a layer, and a head with the embedding's weight."""

    lookups = wholes = 1
    embedding: Callable[..., nn.Embedding] = nn.Embedding
    padding: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.table = type(self).embedding(ROWS, WIDTH, padding_idx=self.padding)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for turn in range(self.lookups - 1):
            x = x + self.table((ids * 7 + turn) % ROWS)
        x = x + self.layer(x).tanh()
        y = self.head(x)
        for turn in range(self.wholes - 1):
            y = y + self.head(x * (turn + 2))
        return y


class TwoLookups(Tied):
    lookups = 2


class TwoHeads(Tied):
    wholes = 2


class ScaledRows(Tied):
    embedding, padding = Scaled, 3


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS)


class ByHand(Tied):
    """Its head is a function of the root, which torch adds to the lookup's in autograd."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return F.linear(x + self.layer(x).tanh(), self.table.weight)


class Penalized(Tied):
    """Its weight is used by itself, too: before the lookup and after it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        before = self.table.weight.square().mean()
        return super().forward(ids) + before + self.table.weight.abs().mean()


class PenalizedRows(Penalized):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS)


class OwnRows(nn.Embedding):
    """A subclass that looks up rows of what it computes from its weight."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight * 3)


class ComputedRows(Tied):
    embedding = OwnRows


class InBlock(nn.Module):
    """A block whose forward uses its table as a layer, as rows and as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tied()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids) @ self.inner.table.weight


class Blocks(Tied):
    """Blocks that own their tables, so that no use of them comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InBlock(), InBlock()])
        self.table = self.blocks[0].inner.table
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](ids) + self.blocks[1](ids))


class Recomputed(Tied):
    """The embedding runs again in the backward: a backward of its own, inside of the outer one."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        anchor = torch.ones((), requires_grad=True)
        x = checkpoint(lambda one: self.table(ids) * one, anchor, use_reentrant=True)
        return self.head(x + self.layer(x).tanh())


class Kept(Recomputed):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.table, ids, use_reentrant=False)
        return checkpoint(self.head, x + self.layer(x).tanh(), use_reentrant=False)


KINDS = [
    *(Tied, TwoLookups, TwoHeads, ScaledRows, Untied, ByHand, Recomputed, Kept),
    *(Penalized, PenalizedRows, ComputedRows, Blocks),
]


@pytest.fixture(autouse=True)
def small_tables(monkeypatch) -> None:
    monkeypatch.setattr(tables, "WORTH_NBYTES", 1)


def made(kind: type[Tied], dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(11)
    return kind().to(dtype)


def batches(length: int = 9) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(4)
    while True:
        yield torch.randint(0, ROWS, (2, length), generator=draw)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1, 1).flatten())


def at_home(model: Tied, home: str, swap) -> tuple[Tied, torch.optim.Optimizer]:
    config = {"params": home, "optimizer": home, "master": "none"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return infinity.wrap_model(model, optimizer, config | {"nvme_paths": [str(swap)]})


def gradient_after(model: Tied, backwards: int) -> torch.Tensor:
    for ids, _ in zip(batches(), range(backwards)):
        loss_of(model, ids).backward()
    return model.table.weight.grad.clone()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, home", [(k, HOMES[i % 3]) for i, k in enumerate(KINDS)])
def test_a_tables_gradient_has_the_bits_of_autograds_sum(kind, home, dtype, swap):
    """Compares the gradient after one and after three backwards with plain torch's: the second adds
    to what is at home. Twin: below, rows that are added in another order."""
    for backwards in (1, 3):
        right = gradient_after(made(kind, dtype), backwards)
        model, _ = at_home(made(kind, dtype), home, swap)
        assert torch.equal(bits(gradient_after(model, backwards)), bits(right))


def test_rows_that_were_added_one_by_one_would_have_other_bits(swap, monkeypatch):
    """The twin: nothing of the head's gradient waits for the lookup's."""
    monkeypatch.setattr(
        "infinity.core.grads.meeting.Meeting.keep_rows", lambda self, grad: grad.add_(0.0)
    )
    right = gradient_after(made(Tied), 3)
    model, _ = at_home(made(Tied), "host", swap)
    found = gradient_after(model, 3)
    assert torch.allclose(found, right) and not torch.equal(bits(found), bits(right))


@pytest.mark.parametrize("kind", [Tied, Untied])
def test_no_whole_gradient_is_made_for_a_lookup(kind, swap, monkeypatch):
    """Records the rows of each lookup's gradient. Twin: a hook on the weight, which has to see a
    whole one."""
    made_rows: list[int] = []
    compute = tables.lookup_gradient

    def recorded(dy, ids, rows, padding_idx):
        made_rows.append(rows)
        return compute(dy, ids, rows, padding_idx)

    monkeypatch.setattr(tables, "lookup_gradient", recorded)
    monkeypatch.setattr("infinity.core.grads.meeting.lookup_gradient", recorded)
    model, _ = at_home(made(kind), "host", swap)
    gradient_after(model, 1)
    cast_gradient_after(model, 1)
    assert made_rows == [18, 18]
    model.zero_grad()
    seen: list[torch.Tensor] = []
    model.table.weight.register_hook(lambda grad: seen.append(grad.clone()))
    gradient_after(model, 1)
    assert made_rows[2:] == [ROWS]
    right = made(kind)
    assert torch.equal(seen[0], gradient_after(right, 1))


def test_uses_without_a_gradient_of_their_own_are_added_by_autograd(swap, monkeypatch):
    """The twin: without the count of what leads to the weight the sum has other bits."""
    monkeypatch.setattr(
        "infinity.ext.tables.tables.node_references",
        lambda node: 2,  # the uses of a Tied
    )
    right = gradient_after(made(Penalized), 3)
    model, _ = at_home(made(Penalized), "host", swap)
    found = gradient_after(model, 3)
    assert torch.allclose(found, right) and not torch.equal(bits(found), bits(right))


@pytest.mark.parametrize("home", HOMES)
def test_a_lookup_of_no_rows_gives_a_gradient_of_zeros(home, swap):
    """Looks up no ids, ids without a batch, and the padding alone. Twin: without a lookup there is
    no gradient."""
    for ids in (torch.zeros(0), torch.zeros(3, 0), torch.full((2,), 3)):
        model, _ = at_home(made(ScaledRows), home, swap)
        assert model.table.weight.grad is None
        model.table(ids.long()).sum().backward()
        assert torch.equal(model.table.weight.grad, torch.zeros(ROWS, WIDTH))


@pytest.mark.parametrize("home", HOMES)
def test_a_part_of_a_gradient_is_not_shown_in_the_middle_of_a_backward(home, swap):
    """Reads `grad` in a hook of another parameter, when the head's has landed: None as in torch, or
    an error if there was one before. Twin: after the backward it has all."""
    right, (model, _) = made(Tied), at_home(made(Tied), home, swap)
    seen: list[list] = [[], []]
    for each, found in zip((right, model), seen):
        each.layer.weight.register_post_accumulate_grad_hook(
            lambda _, each=each, found=found: found.append(each.table.weight.grad)
        )
        gradient_after(each, 1)
    assert seen == [[None], [None]]
    assert torch.equal(model.table.weight.grad, right.table.weight.grad)
    with pytest.raises(infinity.UsageError, match="table.weight.grad in the middle of a backward"):
        gradient_after(model, 1)


def test_a_gradient_that_is_asked_for_is_whole(swap):
    """Asks by `torch.autograd.grad`, with a graph of its own, and by `inputs=` without the table.
    Twin: `backward()`, whose gradient is at home."""
    plain, (model, _) = made(Tied), at_home(made(Tied), "host", swap)
    ids = next(batches())
    for each in (plain, model):
        loss = loss_of(each, ids)
        (each.got,) = torch.autograd.grad(loss, [each.table.weight], retain_graph=True)
        loss.backward(inputs=[each.layer.weight], retain_graph=True)
        assert each.table.weight.grad is None
        (graph,) = torch.autograd.grad(loss, [each.table.weight], create_graph=True)
        (each.second,) = torch.autograd.grad(graph.square().sum(), [each.layer.weight])
    assert torch.equal(model.got, plain.got)
    assert torch.equal(model.second, plain.second)
    loss_of(model, ids).backward()
    assert torch.equal(model.table.weight.grad, plain.got)


@pytest.mark.parametrize("where", ["between the uses", "forward of the head"])
def test_after_an_exception_the_next_step_has_its_own_gradient(where, swap):
    """Raises when the head's gradient is at home and the lookup's is not, or before both. Twin: the
    next backward of a model in which nothing was raised."""
    model, _ = at_home(made(Tied), "nvme", swap)
    ids = next(batches())

    def fail(*_: object) -> None:
        raise ValueError("here")

    hook = (
        model.layer.register_full_backward_hook(fail)
        if where == "between the uses"
        else model.head.register_forward_hook(fail)
    )
    with pytest.raises(ValueError, match="here"):
        loss_of(model, ids).backward()
    hook.remove()
    model.zero_grad()
    loss_of(model, ids).backward()
    assert torch.equal(model.table.weight.grad, gradient_after(made(Tied), 1))


def cast_gradient_after(model: Tied, backwards: int) -> torch.Tensor:
    for ids, _ in zip(batches(), range(backwards)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids)
        loss.backward()
    return model.table.weight.grad.clone()


@pytest.mark.parametrize("kind, home", [(k, HOMES[i % 3]) for i, k in enumerate(KINDS)])
def test_autocast_adds_the_uses_as_torch_does(kind, home, swap):
    """Compares gradients under autocast, which adds those of two heads in bf16, after one and after
    three backwards. Twin: below, heads whose gradients land apart."""
    for backwards in (1, 3):
        right = cast_gradient_after(made(kind), backwards)
        model, _ = at_home(made(kind), home, swap)
        assert torch.equal(bits(cast_gradient_after(model, backwards)), bits(right))


def test_two_heads_that_landed_apart_under_autocast_would_have_other_bits(swap, monkeypatch):
    """The twin: both are uses of their own."""
    monkeypatch.setattr(tables.Table, "is_cast", False)
    right = cast_gradient_after(made(TwoHeads), 3)
    model, _ = at_home(made(TwoHeads), "host", swap)
    found = cast_gradient_after(model, 3)
    assert torch.allclose(found, right, rtol=0.05, atol=1e-3)
    assert not torch.equal(bits(found), bits(right))


def test_a_table_of_fewer_rows_than_tokens_has_each_row_once(swap):
    """Looks up more tokens than the table has rows. Twin: fewer, in every other test."""
    right, (model, _) = made(Tied), at_home(made(Tied), "host", swap)
    for each in (right, model):
        loss_of(each, next(batches(length=300))).backward()
    assert torch.equal(bits(model.table.weight.grad), bits(right.table.weight.grad))


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", [Tied, Untied])
def test_the_gradients_of_a_model_that_is_mostly_its_table_are_planned(kind, home, swap):
    """Counts the largest storages that are alive in each operation of a backward. Twin: the same
    count with tables left to autograd is above the plan."""
    whole = ROWS * WIDTH * 4
    for apart in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "WORTH_NBYTES", 1 if apart else 1 << 60)
            model, optimizer = at_home(made(kind), home, swap)
            loss = loss_of(model, next(batches()))
            alive = Alive(whole)
            with alive:
                loss.backward()
            optimizer.step()
            tier = infinity.stats(model).tiers[Tier.DEVICE]
            assert tier.peak_nbytes <= tier.planned_nbytes
            most = 1 if apart else (3 if kind is Tied else 1)
            assert alive.most <= most
            if not apart and kind is Tied:
                assert alive.most > 1
            infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("home", HOMES)
def test_a_table_that_is_used_by_hand_raises_before_it_takes_what_is_not_planned(home, swap):
    """Trains with the planned bytes as the budget, in which autograd's sum has no room, and with
    those that the error asks for. Twin: the same budget is enough for a Tied."""
    ids = next(batches())

    def trained(kind: type[Tied], **budget: int) -> int:
        config = {"params": home, "optimizer": home, "nvme_paths": [str(swap)], **budget}
        model, optimizer = infinity.wrap_model(
            model := made(kind), torch.optim.SGD(model.parameters(), lr=0.5), config
        )
        try:
            loss_of(model, ids).backward()
            optimizer.step()
            tier = infinity.stats(model).tiers[Tier.DEVICE]
            assert tier.peak_nbytes <= tier.planned_nbytes
            return tier.planned_nbytes
        finally:
            infinity.unwrap_model(model, optimizer)

    least = trained(Tied)
    assert trained(Tied, device_memory=least) == least
    with pytest.raises(infinity.CapacityError, match="unit rest:table .* does not fit") as told:
        trained(Penalized, device_memory=least)
    asked = int(str(told.value).rpartition("Config(device_memory=")[2][:-1])
    assert least < trained(Penalized, device_memory=asked) <= asked
    assert least < trained(Penalized) <= least + 2 * ROWS * WIDTH * 4 + 4096
    assert trained(Penalized, device_memory=trained(Penalized)) <= trained(Penalized)


MEASURED = """
import gc, json, sys, tempfile, torch, infinity
from torch import nn
ROWS, WIDTH = 12288, 512  # a table of 24 MiB
torch.set_num_threads(1)

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024

class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.table, self.layer = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.layer(self.table(ids)))

class TwoByHand(Model):
    def forward(self, ids):
        x = self.layer(self.table(ids))
        return sum(torch.nn.functional.linear(y, self.table.weight) for y in (x, x.detach()))

def grown(tied, home, budget, kind=Model, cast=False):
    model = kind(tied)
    config = {"params": home, "optimizer": home, "device_memory": budget}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config["nvme_paths"] = [sys.argv[1]]
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    device = infinity.stats(model).tiers["device"]
    there = wrapped(model).engine.job.ledger.accounts[Tier.DEVICE].charged_nbytes
    gc.collect()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = status("VmRSS")
    ids = torch.randint(0, ROWS, (1, 16))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    most = status("VmHWM") - before
    planned = infinity.stats(model).tiers["device"].planned_nbytes
    return planned, most - (planned - there)

from infinity.core.machine.tiers import Tier
from infinity.core.run.registry import wrapped
grown(True, "host", None)  # what torch allocates once
for home in ("device", "host", "nvme"):
    for tied in (True, False):
        planned, over = grown(tied, home, None)
        print(json.dumps([home, tied, "none", over]))
        if home == "host":
            print(json.dumps([home, tied, "what is planned", grown(tied, home, planned)[1]]))
        if home != "device":
            print(json.dumps([home, tied, "tiles", grown(tied, home, planned // 3)[1]]))
        print(json.dumps([home, tied, "autocast", grown(tied, home, None, cast=True)[1]]))
    print(json.dumps([home, True, "by hand", grown(True, home, None, TwoByHand)[1]]))
"""
OWN_NBYTES = 16 * 1024**2  # torch's: logits, activations, buffers of products, by the machine


def test_a_model_that_is_mostly_its_table_takes_what_is_planned(swap):
    """Reads the process's high-water mark of a step, for each home and budget, in a process that
    gives freed memory back at once. Twin: a whole gradient more is three times what is allowed,
    and autocast's is more."""
    found = prepared.run("-c", prepared.GIVES_BACK + MEASURED, str(swap))
    assert found.returncode == 0, found.stderr
    cases = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(cases) == 21
    assert not [case for case in cases if case[-1] > OWN_NBYTES]
