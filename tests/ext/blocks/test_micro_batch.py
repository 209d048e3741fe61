"""Blocks that run in parts of a batch have its numbers."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from microbatch_cases import (  # noqa: F401
    CLOSE,
    DEVICE,
    LENGTH,
    MASK,
    SEED,
    WIDTH,
    Simple,
    Stack,
    State,
    Wrapped,
    assert_like_whole,
    assert_right_or_refused,
    attend,
    differentiated,
    mean_square,
    no_hooks_left,
    quiet,
    sgd,
    stack,
)
from models import Block, TinyTransformer, at_home, differing, loss_of, tokens, transformer
from torch import nn

pytestmark = pytest.mark.timeout(120)

ROWS_AND_CHUNKS = [(8, 2), (7, 3), (5, 1), (3, 2), (2, 3), (4, 4), (1, 1)]


@pytest.mark.parametrize("rows, chunk", ROWS_AND_CHUNKS, ids=lambda value: str(value))
@pytest.mark.parametrize("home", ["device", "hostile"])
def test_steps_equal_those_of_the_whole_batch_and_of_accumulation(home, rows, chunk, tmp_path):
    """Method: three steps with SGD of a model that runs chunks, of the plain one, and of the plain
    one that accumulates gradients over chunks (the last of which may be smaller); losses and
    weights are close. Batches of a chunk and less run as they are."""

    def accumulate(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for part in ids.split(chunk):
            loss = loss_of(model, part) * len(part) / len(ids)
            loss.backward()
            total += loss.detach()
        return total

    def at_once(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        return loss.detach()

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable) -> State:
        found = {}
        for step in range(3):
            found[f"loss {step}"] = backward(model, tokens(SEED + step, rows))
            optimizer.step()
            optimizer.zero_grad()
        return found | {name: value.clone() for name, value in model.state_dict().items()}

    whole, accumulated = quiet(), quiet()
    whole, accumulated = (
        run(whole, sgd(whole), at_once),
        run(accumulated, sgd(accumulated), accumulate),
    )
    wrapped = Wrapped(quiet, micro_batch=chunk, **at_home(home, home, tmp_path))
    found = run(wrapped.model, wrapped.optimizer, at_once)
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, **CLOSE)
        torch.testing.assert_close(found[name], accumulated[name], **CLOSE)


def test_a_sample_left_out_is_seen():
    """Method: the twin; the same comparison with one sample of eight repeated raises."""
    whole = differentiated(quiet(), lambda model: loss_of(model, tokens(SEED, 8)))
    wrong = tokens(SEED, 8)
    wrong[7] = wrong[6]
    found = differentiated(
        Wrapped(quiet, micro_batch=2, **DEVICE).model, lambda model: loss_of(model, wrong)
    )
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, whole, **CLOSE)


def test_large_sums_stay_close():
    """Method: 64 samples in chunks of one, where rounding adds up most."""
    assert_like_whole(quiet, lambda model: loss_of(model, tokens(SEED, 64)), micro_batch=1)


def by_hand(model: TinyTransformer, chunk: int) -> TinyTransformer:
    for block in model.blocks:
        own = block.forward
        block.forward = lambda x, own=own: torch.cat([own(part) for part in x.split(chunk)])
    return model


def test_dropout_is_that_of_the_chunks_run_by_hand():
    """Method: with dropout, against blocks that plain torch runs on chunk after chunk from the same
    seed: the loss has the same bits, so the same noise was drawn; the gradients are close, so the
    recomputation drew it again.
    """
    build = lambda: transformer(SEED, blocks=3, dropout=0.2)
    compute = lambda model: loss_of(model, tokens(SEED, 7))
    right = differentiated(by_hand(build(), 3), compute)
    found = differentiated(Wrapped(build, micro_batch=3, **DEVICE).model, compute)
    assert differing({"loss": found.pop("loss")}, {"loss": right.pop("loss")}) == []
    torch.testing.assert_close(found, right, **CLOSE)


HOMES = {
    "hostile": ("hostile", {}),
    "activations on the host": ("device", {"activations": "host"}),
    "activations on nvme": ("host", {"activations": "nvme"}),
    "everything on nvme": ("hostile", {"activations": "nvme"}),
}


@pytest.mark.parametrize("home, more", HOMES.values(), ids=HOMES)
def test_homes_change_no_bit_and_a_run_can_be_repeated(home, more, tmp_path):
    """Method: three steps with dropout from one seed, everything on the device, twice, and
    elsewhere; the same bits. The twin: another seed gives others."""

    def run(seed: int, **config: Any) -> State:
        wrapped = Wrapped(lambda: transformer(SEED, blocks=3), micro_batch=8, **config)
        torch.manual_seed(seed)
        found = {}
        for step in range(3):
            loss = loss_of(wrapped.model, tokens(SEED + step, 30))
            loss.backward()
            found[f"loss {step}"] = loss.detach()
            wrapped.optimizer.step()
            wrapped.optimizer.zero_grad()
        return found | {name: value.clone() for name, value in wrapped.model.state_dict().items()}

    homes = {"nvme_paths": [str(tmp_path)], **more} | at_home(home, home, tmp_path)
    right = run(1, **DEVICE)
    assert differing(run(1, **DEVICE), right) == []
    assert differing(run(1, **homes), right) == []
    assert "loss 0" in differing(run(2, **homes), right)


@pytest.mark.parametrize("clip", ["call", "config"])
def test_clipping(clip):
    """Method: clip_grad_norm_ and max_grad_norm, both at a quarter of the norm; the weights are
    close to the whole's."""
    ids = tokens(SEED, 7)
    plain = quiet()
    optimizer = sgd(plain)
    loss_of(plain, ids).backward()
    limit = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf")).item() / 4
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
    optimizer.step()
    more = {"max_grad_norm": limit} if clip == "config" else {}
    wrapped = Wrapped(quiet, micro_batch=2, params="host", optimizer="host", **more)
    loss_of(wrapped.model, ids).backward()
    if clip == "call":
        found = torch.nn.utils.clip_grad_norm_(wrapped.model.parameters(), limit)
        torch.testing.assert_close(found, norm, **CLOSE)
    wrapped.optimizer.step()
    torch.testing.assert_close(dict(wrapped.model.state_dict()), dict(plain.state_dict()), **CLOSE)


KINDS = {"saved": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("where", ["around", "inside", "both"])
def test_recomputation_on_top(where, kind):
    """Method: torch.utils.checkpoint around the blocks, inside them, and both; close to the whole
    without any."""

    def recomputing() -> TinyTransformer:
        model = quiet()
        if where in ("around", "both"):
            model.around = kind
        if where in ("inside", "both"):
            for block in model.blocks:
                block.inside = kind
        return model

    assert_like_whole(
        recomputing, lambda model: loss_of(model, tokens(SEED, 7)), params="host", optimizer="host"
    )


FROZEN = {
    "first": lambda model: model.blocks[0].requires_grad_(False),
    "last": lambda model: model.blocks[2].requires_grad_(False),
    "all below": lambda model: (
        [p.requires_grad_(False) for p in (*model.tokens.parameters(), model.positions)]
        and model.blocks[:2].requires_grad_(False)
    ),
    "all blocks": lambda model: model.blocks.requires_grad_(False),
    "one norm": lambda model: model.blocks[1].norm1.requires_grad_(False),
}


@pytest.mark.parametrize("freeze", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("home", ["device", "host"])
def test_frozen_blocks(home, freeze):
    """Method: blocks without gradients of their own, below, between and above those that train."""

    def frozen() -> TinyTransformer:
        model = quiet()
        freeze(model)
        return model

    assert_like_whole(
        frozen, lambda model: loss_of(model, tokens(SEED, 7)), params=home, optimizer=home
    )


def test_gradients_of_inputs_and_two_backwards_and_two_graphs():
    """Method: the input's gradient by autograd.grad, a second backward through a kept graph, and
    two graphs at once."""

    def compute(model: nn.Module) -> torch.Tensor:
        kept = []
        handle = model.dropout.register_forward_hook(lambda module, args, out: kept.append(out))
        one, other = loss_of(model, tokens(SEED, 7)), loss_of(model, tokens(SEED + 1, 4))
        handle.remove()
        (grad,) = torch.autograd.grad(one, kept[0], retain_graph=True)
        one.backward(retain_graph=True)
        return one + 2 * other + grad.square().sum() * 1e3

    assert_like_whole(quiet, compute)


def test_evaluation_gives_the_same_results(tmp_path):
    """Method: no_grad and inference_mode, before and after training, against plain torch with the
    same weights."""
    wrapped = Wrapped(quiet, micro_batch=2, **at_home("nvme", "nvme", tmp_path))
    for _ in range(2):
        plain = quiet()
        plain.load_state_dict(wrapped.model.state_dict())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(
                    wrapped.model(tokens(1, 7)).clone(), plain(tokens(1, 7)).clone(), **CLOSE
                )
        loss_of(wrapped.model, tokens(SEED, 7)).backward()
        wrapped.optimizer.step()
        wrapped.optimizer.zero_grad()


@pytest.mark.parametrize("how", ["autocast", "param_dtype"])
def test_narrow_dtypes_are_not_taken_for_mixing(how):
    """Method: bf16 by autocast and as the parameters' dtype; the loss is within 1 % of the whole's,
    and nothing raises."""

    def compute(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return loss_of(model, tokens(SEED, 7))

    config = {"param_dtype": "bf16"} if how == "param_dtype" else {}
    found = differentiated(Wrapped(quiet, micro_batch=2, **DEVICE, **config).model, compute)
    whole = differentiated(quiet(), lambda model: loss_of(model, tokens(SEED, 7)))
    torch.testing.assert_close(found["loss"].float(), whole["loss"], rtol=1e-2, atol=0)


class Layers(nn.Module):
    """A block with a convolution over the sequence and parameters that it uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.norm(self.mix(x.transpose(1, 2))).transpose(1, 2) * self.scale).tanh()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "Linear and ReLU": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "convolution": Layers,
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True),
    "block": lambda: Block(WIDTH, 2, 0.0),
}


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_blocks(make, home):
    """Method: stacks of torch's own layers, single ones among them, with LayerNorm, GroupNorm and
    convolutions."""
    assert_like_whole(lambda: Stack(make), mean_square(), params=home, optimizer=home)


def test_a_sequential_of_convolutions():
    """Method: Conv2d beside Conv2d in a Sequential, which makes each a block."""
    build = lambda: nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)
    )
    assert_like_whole(build, mean_square(5, 3, 6, 6))


def test_one_block_used_twice():
    """Method: the same module several times in the list, as models that share layers have it."""

    def build() -> nn.Module:
        model = Stack(lambda: Simple(lambda h: h))
        model.blocks[2] = model.blocks[0]
        return model

    assert_like_whole(build, mean_square())


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "mask of every sample": lambda block, x: block(x, MASK[: len(x)]),
    "mask of every sample by name": lambda block, x: block(x=x, mask=MASK[: len(x)]),
    "mask of all": lambda block, x: block(x, MASK[:1]),
    "mask of two dimensions": lambda block, x: block(x, mask=MASK[0, 0]),
    "None": lambda block, x: block(x, None, bias=None),
    "learned bias of every sample": lambda block, x: block(
        x, bias=x.mean((1, 2)).view(-1, 1, 1, 1).expand(-1, 1, LENGTH, 1)
    ),
    "mask first, of all": lambda block, x: block(mask=MASK[:1], x=x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_are_cut_where_they_are_of_the_batch(call):
    """Method: masks and biases of one sample each (cut) and of all (not cut), by position and by
    name. A mask that went to another sample would be off by far."""
    assert_like_whole(stack(attend, call), mean_square())


NESTED_CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "tuple": lambda block, x: block(x, (MASK[: len(x)], None)),
    "dict": lambda block, x: block(x, {"mask": MASK[: len(x)], "flag": True}),
    "nested": lambda block, x: block(x, [{"masks": (None, MASK[: len(x)])}, "text"]),
}


@pytest.mark.parametrize("call", NESTED_CALLS.values(), ids=NESTED_CALLS)
def test_nested_arguments(call):
    """Method: the mask inside a tuple, a dict, and both."""

    def function(h: torch.Tensor, given: Any) -> torch.Tensor:
        (mask,) = [
            leaf
            for leaf in torch.utils._pytree.tree_leaves(given)
            if isinstance(leaf, torch.Tensor)
        ]
        return attend(h, mask)

    assert_like_whole(stack(function, call), mean_square())


@dataclass
class Output:
    x: torch.Tensor
    other: Any = None


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda h: (h, h.sin()), lambda out: out[0] + out[1]),
    "list": (lambda h: [h.sin(), None, "text"], lambda out: out[0]),
    "dict": (
        lambda h: {"x": h, "more": {"y": (h.sin(), h.argmax(-1))}},
        lambda out: out["x"] + out["more"]["y"][0],
    ),
    "without batch dimension": (
        lambda h: (h, h.mean((1, 2))),
        lambda out: out[0] * out[1].view(-1, 1, 1),
    ),
    "equal numbers": (lambda h: (h, WIDTH, 0.5), lambda out: out[0] * out[1] * out[2] / 8),
}


@pytest.mark.parametrize("function, use", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_are_put_together(function, use):
    """Method: tuples, lists and dicts of tensors with the batch first."""
    assert_like_whole(stack(function, lambda block, x: use(block(x))), mean_square())


ODD_OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (lambda h: Output(h), lambda out: out.x),
    "object": (lambda h: types.SimpleNamespace(x=h), lambda out: out.x),
    "numbers that differ": (
        lambda h: (h, h.detach().mean().item()),
        lambda out: out[0] * (1 + out[1]),
    ),
    "size of the batch": (lambda h: (h, h.size(0)), lambda out: out[0] / out[1]),
    "a loss": (lambda h: (h, h.square().mean()), lambda out: out[0] + out[1]),
    "statistics of two heads": (
        lambda h: (h, h.unflatten(-1, (2, -1)).mean((0, 1, 3))),
        lambda out: out[0] * out[1].sum(),
    ),
    "batch second": (lambda h: h.transpose(0, 1), lambda out: out.transpose(0, 1)),
    "flattened": (lambda h: h.flatten(0, 1), lambda out: out.unflatten(0, (-1, LENGTH))),
}


@pytest.mark.parametrize("function, use", ODD_OUTPUTS.values(), ids=ODD_OUTPUTS)
def test_outputs_that_do_not_come_in_samples_are_right_or_refused(function, use):
    """Method: outputs in classes that pytree does not know, numbers and statistics of the batch,
    other layouts. The numbers of the whole batch, or an InfinityError; never the first chunk's
    alone."""
    assert_right_or_refused(
        stack(function, lambda block, x: use(block(x))), mean_square(7, LENGTH, WIDTH)
    )
