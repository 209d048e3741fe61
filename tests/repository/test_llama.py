"""The model of the GPU's benchmarks: what is kept of a block changes no bit, and its operations are
counted by one definition."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.llama import PRODUCTS, SHAPES, Llama, fill

SHAPE = SHAPES["tiny"]


class Counts(TorchDispatchMode):
    """Counts the matrix products and attentions that run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation in PRODUCTS
        return operation(*args, **(kwargs or {}))


def trained(recomputes: bool, kept: int) -> tuple[list[torch.Tensor], int]:
    """Loss and gradients, and how many products ran."""
    torch.manual_seed(0)
    model = Llama(SHAPE).to(torch.bfloat16)
    model.recomputes, model.products_kept = recomputes, kept
    ids = torch.randint(0, SHAPE.vocabulary, (2, 32), generator=torch.Generator().manual_seed(1))
    with Counts() as counted:
        loss = model(ids)
        loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())], counted.count


def test_blocks_that_keep_their_products_have_the_bits_of_the_plain_forward():
    """Method: no block is computed again, then all, one or both of them keep their products. What
    keeps more computes fewer products again."""
    plain, fewest = trained(False, 0)
    counts = []
    for kept in range(SHAPE.layers + 1):
        found, count = trained(True, kept)
        assert all(a.equal(b) for a, b in zip(found, plain, strict=True)), kept
        counts.append(count)
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == len(counts)
    assert counts[-1] < counts[0] and fewest <= counts[-1]


def test_weights_are_the_same_in_each_way_to_make_them():
    """Method: made in bf16, in fp32 and cast, and on meta and filled later. Twin: with another seed
    of the table they differ."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        first = Llama(SHAPE)
    finally:
        torch.set_default_dtype(torch.float32)
    second = Llama(SHAPE).to(torch.bfloat16)
    with torch.device("meta"):
        third = Llama(SHAPE).to(torch.bfloat16)
    third.to_empty(device="cpu")
    for module in third.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for a, b, c in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
        assert a.equal(b) and a.equal(c)
    other = torch.zeros_like(first.head.weight)[:-1]
    fill(other)
    assert not other.equal(first.head.weight[:-1])


def test_operations_are_counted_without_the_embedding():
    """By hand, at 8 B and a length of 2,048: 6 x (8.03 - 0.525) G + 6 x 32 x 2048 x 4096. Of 9,280
    tokens a second these are 433 TFLOPS; 447 with the embedding and without attention."""
    shape = SHAPES["8B"]
    assert shape.flops(2048) == 6 * (shape.parameters - 128256 * 4096) + 6 * 32 * 2048 * 4096
    assert round(9280 * shape.flops(2048) / 1e12) == 433
    assert round(9280 * 6 * shape.parameters / 1e12) == 447
    assert round(9280 * 6 * (shape.parameters - 128256 * 4096) / 1e12) == 418
