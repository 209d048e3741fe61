"""Recomputation without products: matrix products and attention run once, elementwise operations
again, with the bits of the plain run.

Words used here: **plain**: the same model wrapped with its activations on the device. **place**:
where products wait for the backward. **repeated**: products that ran inside a backward, without
those of the backward itself. Two passes measure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import numpy
import pytest
import torch
from hypothesis import given as given_examples
from hypothesis import settings
from hypothesis import strategies as st
from marks import few
from models import differing
from test_recompute import trained
from torch import nn
from torch.nn import functional as F
from zoo import ZOO, make_batch, make_model

import infinity
from infinity.core.run import activation_store
from infinity.ext.blocks import products, recompute
from infinity.ext.blocks.activation_choice import ActivationChoice, Measured, choose

SEED = 73
WIDTH, ROWS, BLOCKS, STEPS = 16, 12, 3, 5
PLACES = {"kept": ActivationChoice.KEEP_PRODUCTS, "sent": ActivationChoice.SEND_PRODUCTS}
pytestmark = pytest.mark.timeout(120)
each_place = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def given(monkeypatch) -> Iterator[list[bool]]:
    """For each product of a recomputation: whether its result was there."""
    found, give = [], products.Products._give

    def spy(self, operation, args, kwargs):
        found.append(self._number in self._kept)
        return give(self, operation, args, kwargs)

    monkeypatch.setattr(products.Products, "_give", spy)
    monkeypatch.setattr(activation_store, "SMALLEST_NBYTES", 1)
    yield found
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture
def chosen(monkeypatch) -> Callable[[str], None]:
    """Has every block that may run again keep, or send, its products."""

    def to(place: str) -> None:
        def choose(blocks, **how):
            return [
                PLACES[place] if block.is_repeatable else ActivationChoice.SEND for block in blocks
            ]

        monkeypatch.setattr(recompute, "choose", choose)

    return to


def same_bits(build: Callable, loop: Callable) -> dict:
    """The run has the bits of the plain one. Returns what was done with the blocks."""
    right = trained(build, loop, None)[0]
    found, blocks = trained(build, loop, "kept", spare=1 << 20)
    assert differing(found, right) == []
    return blocks


def rows(step: int) -> torch.Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(SEED + step))


def simply(model, optimizer):
    for step in range(STEPS):
        loss = model(rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


class Block(nn.Module):
    """Attention and an MLP, whose up-projection gives what ``effect`` makes of it."""

    def __init__(self, effect: Callable) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dropout, self.effect = 0.0, effect

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query(self.before(x)).unflatten(-1, (3, 2, -1)).movedim(-3, 0)
        query, key, value = heads.transpose(-2, -3)
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
        x = x + self.out(found.transpose(-2, -3).flatten(-2))
        return self.effect(self, x, self.up(self.between(x)))


def plainly(block: Block, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return x + block.down(F.gelu(up))


def written(write: Callable[[torch.Tensor], object]) -> Callable:
    """A block that writes to a product's result, as ``write`` does."""

    def effect(block: Block, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        write(up)
        return plainly(block, x, up)

    return effect


def given_away(block: Block, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return block.down(F.gelu(up))  # its caller writes to the product's result itself


class Model(nn.Module):
    def __init__(
        self,
        effect: Callable = plainly,
        *,
        block: type[Block] = Block,
        dropout: float = 0.0,
        adds: bool = False,
    ):
        super().__init__()
        self.blocks, self.adds = nn.ModuleList(block(effect) for _ in range(BLOCKS)), adds
        for block in self.blocks:
            block.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).add_(x) if self.adds else block(x)
        return x.square().mean()


def through_numpy(up: torch.Tensor) -> None:
    numpy.negative(there := up.detach().numpy(), out=there)


@functools.lru_cache
def table(rows: int) -> torch.Tensor:
    return torch.ones(rows, 1) @ torch.linspace(0, 1, WIDTH)[None]


class Remembers(Block):
    """A block whose first product is computed once for each size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + table(x.size(1)))


class Tagged(torch.Tensor):
    """A subclass of a user's."""


def through_a_subclass(up: torch.Tensor) -> None:
    up.detach().as_subclass(Tagged).mul_(2)


def through_a_nested_tensor(up: torch.Tensor) -> None:
    flat = up.detach().flatten(0, 1)
    places = torch.tensor([0, 2, len(flat)])
    torch.nested.nested_tensor_from_jagged(flat, places).mul_(2)


def taken_apart(block: Block, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """torch computes this loss by other operations under a dispatch mode."""
    spoken = up.log_softmax(-1).transpose(0, 1)
    targets, lengths = torch.ones(2, 3, dtype=torch.long), torch.full((2,), ROWS)
    return plainly(block, x, up) + F.ctc_loss(spoken, targets, lengths, torch.full((2,), 3))


# The down-projection's result is not needed again: query, attention, out and up are
NEEDED = 4
EFFECTS: dict[str, tuple[Callable, int]] = {
    "nothing is written": (Model, NEEDED),
    "in place": (partial(Model, written(lambda up: F.relu_(up))), NEEDED - 1),
    "in a view": (partial(Model, written(lambda up: up[..., ::2].mul_(3))), NEEDED - 1),
    "through .data": (partial(Model, written(lambda up: up.data.mul_(3))), NEEDED - 1),
    "unseen by torch": (partial(Model, written(through_numpy)), NEEDED - 1),
    "through a subclass": (partial(Model, written(through_a_subclass)), NEEDED - 1),
    "through a nested tensor": (partial(Model, written(through_a_nested_tensor)), NEEDED - 1),
    "taken apart": (partial(Model, taken_apart), NEEDED + 1),
    "by the caller": (partial(Model, given_away, adds=True), NEEDED),
    "attention that draws": (partial(Model, dropout=0.3), NEEDED + 1),  # two products here
}


@each_place
@pytest.mark.parametrize("name", EFFECTS)
def test_only_elementwise_operations_run_again(name, place, chosen, given):
    """Method: each step after the measured two recomputes every block. A result that is written to
    is computed again; of attention with dropout, too, whose random numbers are drawn again."""
    build, needed = EFFECTS[name]
    chosen(place)
    blocks = same_bits(build, simply)
    assert blocks[f"products_{place}"] == BLOCKS and blocks["recomputed_nbytes"] > 0
    assert blocks[f"{place}_nbytes"] > 0
    calls = BLOCKS * (STEPS - 2)
    assert given.count(True) == needed * calls and len(given) == max(needed, NEEDED) * calls


def test_a_result_that_is_taken_although_it_was_written_to_gives_other_bits(chosen, monkeypatch):
    """The twin of the above: nothing forgets, nothing is checked."""
    chosen("kept")
    monkeypatch.setattr(products.Counted, "forget", lambda self, values: None)
    monkeypatch.setattr(products.Products, "_forget", lambda self, values: None)
    monkeypatch.setattr(products._Saved, "is_changed", False)
    monkeypatch.setattr(products, "digest", lambda tensor, is_host: torch.tensor(0))
    with pytest.raises((AssertionError, RuntimeError)):
        same_bits(EFFECTS["through .data"][0], simply)


def test_attention_that_draws_inside_is_not_kept():
    """Twins: without dropout, and the products of a backward."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    assert products.is_product(attention.default)
    inputs = [torch.zeros(1, 1, 1, 1)] * 3
    assert products.draws(attention.default, (*inputs, 0.1), {})
    assert products.draws(attention.default, (*inputs,), {"dropout_p": 0.1})
    assert not products.draws(attention.default, (*inputs, 0.0, True), {})
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    assert not products.is_product(backward)
    assert not products.is_product(torch.ops.aten.mm.out)


def test_a_device_finds_what_is_written_unseen_in_the_first_such_pass(chosen, monkeypatch):
    """Method: as on a device that is not the host, digests are computed by torch and for one call.
    Twin: the digest tells two orders of the same bytes apart."""
    chosen("kept")
    made = products.Products.__init__
    monkeypatch.setattr(
        products.Products,
        "__init__",
        lambda self, keepable, is_host, checks: made(self, keepable, is_host=False, checks=checks),
    )
    blocks = same_bits(EFFECTS["unseen by torch"][0], simply)
    assert blocks["products_kept"] == BLOCKS
    digest = partial(products.digest, is_host=False)
    values = torch.randn(3, 1001)
    assert torch.equal(digest(values), digest(values.clone()))
    assert not torch.equal(digest(values), digest(values.flip(1)))


def growing_and_shrinking(model, optimizer):
    table.cache_clear()
    for step in range(6):
        loss = model(rows(step)[:, : 4 if step in (3, 4) else ROWS])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_recomputation_with_other_products_takes_none_of_the_forward(chosen, given):
    """Method: a table of each size is computed once, in the forward of the fourth step, so that the
    recomputation has a product less, and all others of another number. Twin: the step after it."""
    chosen("kept")
    same_bits(partial(Model, block=Remembers), growing_and_shrinking)
    assert not all(given) and any(given)


def test_the_largest_input_tells_what_products_have(chosen):
    """Method: the second of two measured passes is smaller. Twin: the first is."""
    found = []
    chosen("kept")
    for sizes in ((ROWS, 2), (2, ROWS)):

        def loop(model, optimizer):
            for step in range(STEPS):
                loss = model(rows(step)[:, : sizes[step % 2]])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

        found.append(same_bits(Model, loop)["kept_nbytes"])
    assert found[0] == found[1] > 0


def test_a_result_that_is_written_to_after_its_block_is_computed_again(chosen, given, monkeypatch):
    """Method: a detached result, which autograd does not save, is zeroed once all blocks have run;
    as on a device, where digests are of one call. Twin: until then it is taken."""
    chosen("kept")
    made, seen = products.Products.__init__, []
    monkeypatch.setattr(
        products.Products,
        "__init__",
        lambda self, keepable, is_host, checks: made(self, keepable, is_host=False, checks=False),
    )

    def effect(block: Block, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        seen.append(up.detach())
        return plainly(block, x, up + 1)

    def loop(model, optimizer):
        for step in range(STEPS):
            seen.clear()
            loss = model(rows(step))
            for each in seen if step == STEPS - 1 else ():
                each.zero_()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    same_bits(partial(Model, effect), loop)
    assert all(given)  # taken, or found to be changed


def test_torchs_own_checks_of_checkpoints_work(chosen):
    chosen("kept")
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        same_bits(Model, simply)


def twice(model, optimizer):
    for step in range(STEPS):
        loss = model(rows(step))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def stopped(model, optimizer):
    for step in range(STEPS):
        loss = model(rows(step))
        if step == STEPS - 2:
            with pytest.raises(ZeroDivisionError):
                handle = loss.register_hook(lambda grad: 1 / 0)
                loss.backward()
            handle.remove()
            loss = model(rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def two_graphs(model, optimizer):
    for step in range(STEPS):
        losses = [model(rows(step)), model(rows(step + 1))]
        for loss in reversed(losses):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield sum(losses)


def in_parts(model, optimizer):
    for step in range(STEPS):
        with infinity.accumulate(model):
            for part in range(2):
                loss = model(rows(step + part))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def in_bf16(model, optimizer):
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("place", few(PLACES, 1))
@pytest.mark.parametrize("loop", [twice, stopped, two_graphs, in_parts, in_bf16])
def test_a_loop_has_the_bits_of_the_plain_run(loop, place, chosen, given):
    """Backwards twice, after an exception, of two graphs, accumulated, under autocast."""
    chosen(place)
    same_bits(Model, loop)
    assert any(given)


@pytest.mark.parametrize("place", few(PLACES, 1))
@pytest.mark.parametrize("how", ["a part of each block", "each block"])
def test_what_is_compiled_stays_compiled(how, place, chosen, given):
    """Method: graphs are counted. Twin: eager, which compiles none."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def build() -> nn.Module:
        if how == "a part of each block":
            return Model(torch.compile(plainly, backend=backend))
        model = Model()
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    chosen(place)
    same_bits(build, simply)
    assert graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_models_of_transformers_have_the_bits_of_the_plain_run(name, chosen, given):
    """Models of one stack, with dropout, and of two."""
    if lacking := ZOO[name].missing():
        pytest.skip(f"this machine lacks {', '.join(lacking)}")
    chosen("kept")

    def loop(model, optimizer):
        for step in range(4):
            loss = model(**make_batch(ZOO[name], step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    same_bits(lambda: make_model(ZOO[name], SEED), loop)
    assert any(given)


# --- what is chosen ---

SECONDS = st.sampled_from([0.0, 0.5, 1.0, 5.0])
MEASURED = st.builds(
    lambda nbytes, seconds, repeatable, inputs, products, part: Measured(
        nbytes, seconds, repeatable, min(inputs, nbytes), products, part * seconds
    ),
    st.integers(0, 100),
    SECONDS,
    st.booleans(),
    st.integers(0, 20),
    st.integers(0, 60),
    st.sampled_from([0.0, 0.5, 0.9]),
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given_examples(
    st.lists(MEASURED, min_size=1, max_size=6),
    st.integers(0, 400),
    st.integers(0, 200),
    st.sampled_from([0.1, 10.0, 1e9]),
    st.booleans(),
)
def test_choices_keep_within_both_budgets(blocks, device, host, rate, beside):
    """Any blocks, budgets and rates. Twin: a block that cannot run again is kept or sent whole."""
    found = choose(blocks, device_nbytes=device, host_nbytes=host, send_rate=rate, is_beside=beside)
    pairs = list(zip(blocks, found))
    kept = sum(
        (max(0, b.nbytes - b.input_nbytes) if beside else b.nbytes)
        if choice is ActivationChoice.KEEP
        else b.product_nbytes
        for b, choice in pairs
        if choice in (ActivationChoice.KEEP, ActivationChoice.KEEP_PRODUCTS)
    )
    sent = sum(
        b.product_nbytes if choice.has_products else b.nbytes
        for b, choice in pairs
        if choice.is_sent and b.is_repeatable
    )
    assert kept <= device and sent <= host
    assert all(b.is_repeatable for b, choice in pairs if choice.repeats)
    assert all(b.splits for b, choice in pairs if choice.has_products)


def test_products_are_kept_where_they_save_more_for_each_byte():
    """A block of a Llama: its products have 57 % of its bytes and 90 % of its seconds. Twins: room
    for all, room for none, and elementwise operations that cost more for each byte."""
    block = Measured(100, 10.0, True, 5, 57, 9.0)
    of = partial(choose, host_nbytes=0, send_rate=1.0, is_beside=True)
    kept, products_kept, again = (
        ActivationChoice.KEEP,
        ActivationChoice.KEEP_PRODUCTS,
        ActivationChoice.RECOMPUTE,
    )
    assert of([block] * 4, device_nbytes=57 * 4) == [products_kept] * 4
    assert of([block] * 4, device_nbytes=57 * 2) == [again] * 2 + [products_kept] * 2
    assert of([block] * 4, device_nbytes=95 * 4) == [kept] * 4
    assert of([block] * 4, device_nbytes=56) == [again] * 4
    costly = Measured(100, 10.0, True, 5, 57, 1.0)
    assert of([costly] * 2, device_nbytes=57 * 2) == [again, kept]


def test_products_are_sent_where_the_link_is_faster_than_what_they_save():
    """Twins: a link that is slower, and one that takes the whole block sooner."""
    block = Measured(100, 10.0, True, 5, 57, 9.0)
    of = lambda rate: choose([block], device_nbytes=0, host_nbytes=1000, send_rate=rate)[0]
    assert of(10.0) is ActivationChoice.SEND_PRODUCTS
    assert of(1.0) is ActivationChoice.RECOMPUTE
    assert of(1000.0) is ActivationChoice.SEND
