"""Layers in tiles: state, planning, and other features."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from inside import parts_of
from models import seeded
from runs import adamw
from tiling_cases import (
    DEVICE,
    KIB,
    ROWS,
    SEED,
    WIDTH,
    batch_for,
    build,
    check_close,
    check_grads,
    check_peak,
    device,
    steps,
    tiled_units,
    wrap,
)
from torch import nn

import infinity
from infinity.core.machine.tiers import Tier
from infinity.core.plan import memory_terms
from infinity.core.wrap.lay_out import lay_out
from infinity.errors import CapacityError


def test_unwrap_gives_plain_torch_back():
    """No forward of ours stays on a module, one of the user's comes back, and a plain step works
    and is plain torch's."""
    model, plain = build("linear down"), build("linear down")
    model, optimizer = wrap(model)
    assert all("forward" in m.__dict__ for m in model.modules() if isinstance(m, nn.Linear))
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    other = adamw(plain, 1e-2)
    for each, opt in ((model, optimizer), (plain, other)):
        steps(each, opt, 2, seed=SEED)
    for (key, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(ours, theirs), key


def test_state_dicts_and_checkpoints(swap, tmp_path):
    """A tiled model's state_dict loads into a plain one and back; a checkpoint resumes bit for bit.
    Twin: another seed's model differs before it loads."""
    model, optimizer = wrap(build("linear down"), swap, "hostile")
    steps(model, optimizer, 2, seed=SEED)
    state = model.state_dict()
    plain = build("linear down", SEED + 1)
    assert not torch.equal(plain.state_dict()["0.weight"], state["0.weight"])
    plain.load_state_dict(state)
    x = batch_for(plain, SEED)
    with torch.no_grad():
        check_close(model(x), plain(x))
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer, extra={"step": 2})
    steps(model, optimizer, 2, seed=SEED + 10)
    expected = model.state_dict()
    again, other = wrap(build("linear down", SEED + 2), swap, "hostile")
    assert infinity.load_checkpoint(tmp_path / "saved", again, other) == {"step": 2}
    steps(again, other, 2, seed=SEED + 10)
    for key, value in again.state_dict().items():
        assert torch.equal(value, expected[key]), key
    again.load_state_dict(state)
    for key, value in again.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_a_checkpoint_crosses_between_tiled_and_whole(tmp_path):
    """Saved tiled, loaded where the budget holds the model, and the other way: the same bits."""
    for first, second in ((DEVICE, "64MiB"), ("64MiB", DEVICE)):
        model, optimizer = wrap(build("linear"), device_memory=first)
        steps(model, optimizer, 2, seed=SEED)
        infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
        again, other = wrap(build("linear", SEED + 1), device_memory=second)
        infinity.load_checkpoint(tmp_path / "saved", again, other)
        assert bool(tiled_units(model)) != bool(tiled_units(again))
        for key, value in again.state_dict().items():
            assert torch.equal(value, model.state_dict()[key]), key


def test_full_params_of_a_tiled_weight():
    """Larger than the device's budget: CapacityError with the number, and everything still
    works. Of the same model in a budget that holds one such weight but not the moment's, it can
    be edited."""
    model, _ = wrap(build("linear"))
    with pytest.raises(CapacityError, match=r"KiB"):
        with infinity.full_params(model, "layer.weight"):
            pass
    assert device(model).charged_nbytes == 0
    with infinity.full_params(model, "layer.bias", writeback=True) as found:
        found["layer.bias"].zero_()
    model, _ = wrap(build("linear down"), device_memory=600 * KIB)
    assert tiled_units(model)
    with infinity.full_params(model, "0.weight", writeback=True) as found:
        found["0.weight"].fill_(0.5)
    plain = build("linear down")
    plain[0].weight.data.fill_(0.5)
    x = batch_for(plain, SEED)
    with torch.no_grad():
        check_close(model(x), plain(x))


def test_without_a_device_budget_nothing_is_tiled():
    """device_memory=None, or enough of it: forwards are the modules' own. Twin: DEVICE tiles."""
    for budget, tiles in ((None, False), ("64MiB", False), (DEVICE, True)):
        model, _ = wrap(build("linear"), device_memory=budget)
        assert bool(tiled_units(model)) == tiles
        assert ("forward" in model.layer.__dict__) == tiles


def test_one_row_more_than_a_tile_should_have():
    """A row of 80 000 bytes where a tile should have 64 KiB: the tile is one row, and still within
    the budget."""
    model, plain = [
        seeded(SEED, lambda: nn.Sequential(nn.Linear(20000, 16), nn.Linear(16, 3)))
        for _ in range(2)
    ]
    model, _ = wrap(model)
    assert [u.at_once_nbytes for u in parts_of(model).planned.sizes if u.at_once_nbytes] == [80000]
    x = torch.randn(2, 20000, generator=torch.Generator().manual_seed(SEED))
    for each in (model, plain):
        each(x).square().mean().backward()
    check_grads(model, plain)
    check_peak(model)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, ROWS)

    def forward(self, x):
        return F.linear(x, self.inner.weight, self.inner.bias)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x):
        return F.linear(x, self.weight)


class Special(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


UNTILEABLE = {
    "functional": Functional,
    "own parameter": Own,
    "subclass": lambda: Special(WIDTH, ROWS),
    "lstm": lambda: nn.LSTM(WIDTH, 256, batch_first=True),
    "renormalised embedding": lambda: nn.Embedding(ROWS, WIDTH, max_norm=1.0),
    "tied to a parent": lambda: _tied_to_a_parent(),
}


def _tied_to_a_parent() -> nn.Module:
    model = Own()
    model.layer = nn.Linear(WIDTH, ROWS, bias=False)
    model.layer.weight = model.weight
    return model


@pytest.mark.parametrize("what", UNTILEABLE)
def test_what_cannot_be_tiled_is_a_capacity_error_with_numbers(what):
    """At wrap time, or (where only the forward tells) in the forward; and with enough memory it
    works (the twin)."""
    x = torch.arange(5) if "embedding" in what else torch.randn(2, 3, WIDTH)
    with pytest.raises(CapacityError, match=r"Raise (Config\()?device_memory.* by \d") as told:
        model, _ = wrap(seeded(SEED, UNTILEABLE[what]))
        model(x)
    assert "KiB" in str(told.value)
    model, _ = wrap(seeded(SEED, UNTILEABLE[what]), device_memory="64MiB")
    assert not tiled_units(model)
    model(x)


def test_raising_device_memory_by_what_a_forward_asks_for_works():
    """A weight used functionally is met in the forward only. What the error then says to add is
    enough."""
    import re

    model, _ = wrap(seeded(SEED, Functional))
    with pytest.raises(CapacityError) as told:
        model(torch.randn(2, WIDTH))
    more = re.search(r"by (\d+(?:\.\d+)?) MiB", str(told.value))
    model, _ = wrap(
        seeded(SEED, Functional), device_memory=DEVICE + int(float(more[1]) * 1024 * KIB) + KIB
    )
    model(torch.randn(2, WIDTH))


def largest_width(budget: int, *, tiled: bool) -> int:
    """The widest feed-forward (in steps of 32) that wraps within ``budget`` bytes of device
    memory."""
    found = 0
    for width in range(32, 1100, 32):
        with torch.device("meta"):
            model = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
        settings = infinity.Config(
            params="host", optimizer="host", device_memory=budget, host_memory="1TiB"
        )
        try:
            plan, units = lay_out(model, None, settings)
        except CapacityError:
            break
        if not tiled and any(unit.at_once_nbytes for unit in units):
            break
        assert plan.planned_nbytes(Tier.DEVICE) <= budget
        found = width
    return found


@pytest.mark.parametrize("budget", [512 * KIB, 2048 * KIB])
def test_the_widest_layer_within_a_budget_grows_with_tiles(budget):
    """Counts: within one budget of device memory a tiled feed-forward can be at least four times as
    wide."""
    whole, tiles = largest_width(budget, tiled=False), largest_width(budget, tiled=True)
    print(f"{budget // KIB} KiB: {whole} wide whole, {tiles} in tiles")
    assert tiles >= min(4 * whole, 1088) > whole > 0


def test_the_least_device_memory_that_an_error_names_is_the_least():
    """The error for too little names a budget that works; a page less than it does not."""
    import re

    with pytest.raises(CapacityError) as told:
        wrap(build("linear"), device_memory=100)
    least = int(re.search(r"\((\d+) bytes\): ", str(told.value))[1])
    wrap(build("linear"), device_memory=least)
    with pytest.raises(CapacityError):
        wrap(build("linear"), device_memory=least - 4096)


@pytest.mark.parametrize("activations", ["host", "nvme"])
@pytest.mark.parametrize("name", ["linear", "embedding", "conv1d"])
def test_with_activations_at_home(swap, name, activations):
    """activations='host' and 'nvme' with tiles: a pair; nothing stays charged between steps."""
    model, plain = build(name), build(name)
    model, optimizer = wrap(model, activations=activations, nvme_paths=[str(swap)])
    x = batch_for(plain, SEED)
    charged = []
    for _ in range(3):
        model(x).square().mean().backward()
        charged.append(device(model).charged_nbytes)
    for _ in range(3):
        plain(x).square().mean().backward()
    check_grads(model, plain)
    assert charged[1] == charged[2]
    infinity.unwrap_model(model, optimizer)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


@pytest.mark.parametrize("kind", ["blocks of layers", "blocks that are layers"])
def test_with_micro_batches(kind):
    """micro_batch=2 of 5 samples, with tiles inside the blocks, or blocks that are tiled layers
    themselves. A pair; then unwrap takes both forwards off."""
    make = Feed if kind == "blocks of layers" else lambda: nn.Linear(256, 256)
    models = [seeded(SEED, lambda: nn.Sequential(make(), make(), make())) for _ in range(2)]
    model, plain = models
    model, optimizer = wrap(model, micro_batch=2)
    assert tiled_units(model)
    x = torch.randn(
        5, 7, WIDTH if make is Feed else 256, generator=torch.Generator().manual_seed(SEED)
    )
    for each in models:
        each(x).square().mean().backward()
    check_grads(model, plain)
    check_peak(model)
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert not any("forward" in m.__dict__ for m in model.modules())
    with torch.no_grad():
        check_close(model(x), plain(x))


@pytest.mark.parametrize("optimizer_home", ["auto", "host"])
def test_auto_homes_never_put_a_tiled_weight_on_the_device(optimizer_home):
    """params='auto' within a budget that is too small: tiled units stay below, the small ones may
    lie on the device."""
    model, plain = build("linear"), build("linear")
    model, optimizer = infinity.wrap_model(
        model,
        adamw(model, 1e-2),
        {"params": "auto", "optimizer": optimizer_home, "device_memory": DEVICE},
    )
    engine = parts_of(model).engine
    assert tiled_units(model)
    for index, size in enumerate(parts_of(engine).planned.sizes):
        if size.at_once_nbytes:
            assert parts_of(engine).planned.plan.tiers_of(index)["weight"] is not Tier.DEVICE
    x = batch_for(plain, SEED)
    for each in (model, plain):
        each(x).square().mean().backward()
    check_grads(model, plain)
    check_peak(model)


def test_param_dtype_narrows_tiles_too():
    """param_dtype='bf16' of an fp32 model: tiles are of bf16 rows, so twice as many, and state_dict
    is fp32 still."""
    model, optimizer = wrap(build("linear down").float(), param_dtype="bf16")
    (rows,) = {
        u.at_once_nbytes // (2 * WIDTH)
        for u in parts_of(model).planned.sizes
        if u.name == "0.weight"
    }
    assert rows == 64 * KIB // (2 * WIDTH)
    x = batch_for(model, SEED)
    model(x.bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert {v.dtype for v in model.state_dict().values()} == {torch.float32}
    check_peak(model)


USES_BY_HAND = {
    "a function": lambda model, x: F.linear(x, model[0].weight),
    "a product": lambda model, x: x @ model[0].weight.t(),
    "a penalty": lambda model, x: model[0].weight.square(),
}


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("use", USES_BY_HAND)
def test_a_tiled_weight_that_is_used_by_hand_is_refused_by_its_need(use, home, swap):
    """Uses the whole weight outside of its layer's forward, which nothing has room for: read from
    disk, staging memory holds a tile of it. Twin: the layer itself goes on with the same loss."""
    model, _ = wrap(build("linear down"), swap, home)
    x = batch_for(model, SEED)
    right = model(x).sum().item()
    with pytest.raises(
        CapacityError, match=r"unit 0.* does not fit the device window .* \(\)\. Raise"
    ):
        USES_BY_HAND[use](model, x)
    assert model(x).sum().item() == right


def test_a_405_b_shape_is_planned_within_256_mib_of_host_and_of_device(swap, monkeypatch):
    """A Llama of 126 layers and a vocabulary of 256 K, on meta: its 85 million checksums lie on the
    disk, beside 16 KiB of digests for each 128 GiB. Twin: with all of them in memory it is
    refused."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16384,
                intermediate_size=53248,
                num_hidden_layers=126,
                num_attention_heads=128,
                num_key_value_heads=8,
                vocab_size=262144,
            )
        ).bfloat16()
    settings = infinity.Config(
        params="nvme",
        optimizer="nvme",
        nvme_paths=[str(swap)],
        nvme_capacity="6TiB",
        host_memory="256MiB",
        device_memory="256MiB",
    )
    optimizer = torch.optim.AdamW(model.parameters())
    plan, _ = lay_out(model, optimizer, settings)
    assert plan.planned_nbytes(Tier.NVME) > 5 * 1024**4
    assert plan.terms[Tier.HOST]["checksums"] < 5 * 1024**2
    monkeypatch.setattr(memory_terms, "SUMS_NBYTES", 1024**3)
    with pytest.raises(CapacityError, match=r"checksums 33\d\.\d MiB"):
        lay_out(model, optimizer, settings)
