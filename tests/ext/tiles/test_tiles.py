"""Layers in tiles have the numbers of whole ones."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from inside import parts_of
from models import leftovers, seeded, swap_files
from tiling_cases import (
    BUILDERS,
    KIB,
    ROWS,
    SEED,
    WIDTH,
    batch_for,
    build,
    check_close,
    check_grads,
    check_peak,
    config,
    device,
    steps,
    tiled_units,
    wrap,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.machine.tiers import Tier
from infinity.errors import CapacityError, UsageError

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_tiled_layer_computes_and_learns_as_the_whole_one(swap, name):
    """A pair: output, input gradient, parameter gradients close; after 4 SGD steps the weights too
    (SGD passes on what the gradient was; Adam would turn rounding of a zero into a whole step)."""
    model, plain = build(name), build(name)
    sgd = lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9)
    model, optimizer = wrap(model, swap, "hostile", optimizer=sgd)
    other = sgd(plain, 1e-2)
    assert tiled_units(model)
    for step in range(4):
        x = batch_for(plain, SEED + step)
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
        out, expected = model(inputs[0]), plain(inputs[1])
        check_close(out, expected, "output")
        out.square().mean().backward()
        expected.square().mean().backward()
        check_grads(model, plain)
        if x.is_floating_point():
            check_close(inputs[0].grad, inputs[1].grad, "input")
        assert device(model).charged_nbytes <= device(model).planned_nbytes
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    check_peak(model)
    model, optimizer = infinity.unwrap_model(model, optimizer)
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        check_close(ours, theirs, key)


@pytest.mark.parametrize("name", ["linear", "linear without bias", "conv1d"])
def test_gradients_agree_with_float64(name):
    """The same layer in float64 is the truth: a tiled fp32 gradient is within 1e-5 of it, relative
    in norm."""
    model, truth = build(name), build(name).double()
    model, _ = wrap(model)
    x = batch_for(truth, SEED)
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    model(ours).sin().sum().backward()
    truth(theirs).sin().sum().backward()
    pairs = [("input", ours.grad, theirs.grad)]
    pairs += [
        (n, p.grad.clone(), q.grad)
        for (n, p), q in zip(model.named_parameters(), truth.parameters())
    ]
    for what, found, expected in pairs:
        assert ((found.double() - expected).norm() <= 1e-5 * expected.norm()).item(), what
    assert not (truth.layer.weight.grad == 0).all()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 3, 2), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("name", ["linear", "conv1d", "embedding"])
def test_inputs_of_every_rank_and_of_no_samples(name, shape):
    """Shapes in front of the width: none (1-D), empty, several. A pair, output and gradients."""
    model, plain = build(name), build(name)
    model, _ = wrap(model)
    x = batch_for(plain, SEED, shape)
    out, expected = model(x), plain(x)
    check_close(out, expected, "output")
    out.sum().backward()
    expected.sum().backward()
    check_grads(model, plain)


@pytest.mark.parametrize("frozen", ["layer.weight", "layer.bias", "both"])
@pytest.mark.parametrize("input_grad", [True, False])
def test_frozen_weight_or_bias_gets_no_gradient(frozen, input_grad):
    """Freezes one or both, with and without an input that wants a gradient. A pair; what is frozen
    does not move."""
    models = [
        seeded(SEED, lambda: nn.ModuleDict({"layer": nn.Linear(WIDTH, ROWS)})) for _ in range(2)
    ]
    for each in models:
        for key, param in each.named_parameters():
            param.requires_grad_(frozen not in (key, "both"))
        each.extra = nn.Parameter(torch.ones(()))
        each.forward = lambda x, m=each: m.layer(x) * m.extra
    model, plain = models
    model, optimizer = wrap(model)
    assert tiled_units(model)
    before = model.state_dict()
    inputs = [batch_for(plain, SEED).requires_grad_(input_grad) for _ in models]
    for each, x in zip(models, inputs):
        each(x).square().mean().backward()
    check_grads(model, plain)
    if input_grad:
        check_close(inputs[0].grad, inputs[1].grad, "input")
    optimizer.step()
    for key, param in plain.named_parameters():
        assert torch.equal(before[key], model.state_dict()[key]) == (param.grad is None), key


def test_strided_and_expanded_inputs():
    """Inputs that are transposed, sliced or expanded views: a pair, with input gradients."""
    model, plain = build("linear down"), build("linear down")
    model, _ = wrap(model)
    base = torch.randn(WIDTH, 6, generator=torch.Generator().manual_seed(SEED))
    views = {
        "transposed": lambda b: b.t(),
        "3-D transposed": lambda b: b.t().unflatten(0, (2, 3)),
        "sliced": lambda b: b.t()[::2],
        "permuted": lambda b: b.t().unflatten(0, (2, 3)).transpose(0, 1),
        "expanded": lambda b: b[:, 0].expand(4, WIDTH),
    }
    for what, view in views.items():
        inputs = [base.clone().requires_grad_() for _ in range(2)]
        model(view(inputs[0])).square().mean().backward()
        plain(view(inputs[1])).square().mean().backward()
        check_close(inputs[0].grad, inputs[1].grad, what)
        check_grads(model, plain)


def test_bf16_with_split_master_follows_the_untiled_model(swap):
    """bf16 weights, fp32 master in two halves, 3 AdamW steps against the same engine with room for
    the whole layer. In bf16 dx of 2100 outputs is summed in another order: outputs within 2 %,
    weights within the steps' own size.
    """
    models = [build("linear down").bfloat16() for _ in range(2)]
    wraps = [
        wrap(models[0], swap, "hostile"),
        wrap(models[1], swap, "hostile", device_memory="64MiB"),
    ]
    assert tiled_units(models[0]) and not tiled_units(models[1])
    for model, optimizer in wraps:
        for step in range(3):
            model(batch_for(model, SEED + step).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    x = batch_for(models[0], SEED).bfloat16()
    check_close(models[0](x), models[1](x), "output", tolerance=0.02)
    states = [m.state_dict() for m in models]
    for key in states[0]:
        assert states[0][key].dtype == torch.bfloat16
        assert (states[0][key].float() - states[1][key].float()).abs().max() <= 2 * 3 * 1e-2, key


def test_many_tiles_round_no_more_than_a_few_times_what_one_product_does():
    """bf16, an input gradient summed over 128 tiles: its error against float64 is at most 4 times
    the whole layer's."""
    torch.manual_seed(SEED)
    layer = nn.Linear(WIDTH, 65536, bias=False).bfloat16()
    model = nn.ModuleDict({"layer": layer})
    model.forward = lambda x: model.layer(x)
    x, dy = torch.randn(8, WIDTH).bfloat16().requires_grad_(), torch.randn(8, 65536).bfloat16()
    truth = dy.double() @ layer.weight.detach().double()

    def error() -> float:
        x.grad = None
        model(x).backward(dy)
        return ((x.grad.double() - truth).norm() / truth.norm()).item()

    whole = error()
    model, _ = infinity.wrap_model(model, None, config())
    tiles = error()
    print(f"relative error: whole {whole:.2e}, in tiles {tiles:.2e}")
    assert tiles <= 4 * whole


@pytest.mark.parametrize("name", ["linear", "conv1d", "embedding"])
def test_autocast(name):
    """Forward under CPU autocast: dtypes as torch's, numbers within 2 % (bf16), gradients fp32."""
    model, plain = build(name), build(name)
    model, _ = wrap(model)
    x = batch_for(plain, SEED)
    outs = []
    for each in (model, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs.append(each(x))
            loss = outs[-1].float().square().mean()
        loss.backward()
    assert outs[0].dtype == outs[1].dtype
    check_close(outs[0], outs[1], "output", tolerance=0.02)
    check_grads(model, plain, tolerance=0.02)


@pytest.mark.parametrize("bad", [ROWS, -1, ROWS + 70])
def test_ids_out_of_range_are_an_index_error(bad):
    """One id outside: IndexError, nothing stays charged, and the next forward works (the twin)."""
    model, _ = wrap(build("embedding"))
    model(torch.tensor([[0, 1]]))
    rest = device(model).charged_nbytes
    with pytest.raises(IndexError, match=str(ROWS)):
        model(torch.tensor([[0, bad]]))
    assert device(model).charged_nbytes == rest
    check_close(
        model(torch.tensor([[0, ROWS - 1]])), build("embedding")(torch.tensor([[0, ROWS - 1]]))
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_both_integer_dtypes(dtype):
    """torch takes int32 and int64 ids; so do tiles. Twin: it refuses others, and so must tiles, by
    an error."""
    model, plain = build("embedding"), build("embedding")
    model, _ = wrap(model)
    ids = batch_for(plain, SEED).to(dtype)
    for each in (model, plain):
        each(ids).square().mean().backward()
    check_grads(model, plain)
    for wrong in (torch.float32, torch.uint8, torch.bool):
        with pytest.raises((RuntimeError, IndexError)):
            plain(torch.zeros(64, dtype=wrong))
        with pytest.raises((RuntimeError, IndexError)):
            model(torch.zeros(64, dtype=wrong))


def test_padding_gets_no_gradient():
    """Every id is the padding: its gradient is zero. Twin: without padding_idx it is not."""
    for name, zero in (("embedding with padding", True), ("embedding", False)):
        model, _ = wrap(build(name))
        model(torch.full((4,), ROWS - 3)).sum().backward()
        assert (model.layer.weight.grad.clone().abs().sum().item() == 0) == zero


def gpt2(**more):
    sizes = dict(
        vocab_size=1500,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return seeded(
        SEED, lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | more))
    )


@pytest.mark.parametrize(
    "recompute", [None, True, False], ids=["kept", "reentrant", "non-reentrant"]
)
def test_gpt2_with_tied_head(swap, recompute):
    """The embedding is the head: both run in tiles of one weight, and its gradient is the sum.
    Gradients of one step against the plain model, checkpointed either way; then generation agrees
    too."""
    model, plain = gpt2(), gpt2()
    for each in (model, plain):
        if recompute is not None:
            each.gradient_checkpointing_enable({"use_reentrant": recompute})
            each.enable_input_require_grads() if recompute else None
    model, optimizer = wrap(model, swap, "hostile", device_memory=640 * KIB)
    assert tiled_units(model) == ["transformer.wte.weight"]
    ids = torch.randint(1500, (2, 16), generator=torch.Generator().manual_seed(SEED))
    losses = [each.train()(input_ids=ids, labels=ids).loss for each in (model, plain)]
    check_close(losses[0], losses[1], "loss")
    for loss in losses:
        loss.backward()
    check_grads(model, plain, tolerance=1e-4)
    check_peak(model)
    with torch.no_grad():
        check_close(model.eval()(ids).logits, plain.eval()(ids).logits, "logits")
    prompt = ids[:, :4]
    found = [
        each.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        for each in (model, plain)
    ]
    assert torch.equal(*found)
    check_peak(model)
    infinity.unwrap_model(model, optimizer)


@pytest.mark.parametrize("name", ["linear", "embedding", "conv1d"])
def test_accumulation_clipping_and_kept_zeros(swap, name):
    """3 micro-batches, clip by norm, step, zero_grad(set_to_none=False), twice. Gradients close
    after each, norms too."""
    model, plain = build(name), build(name)
    model, optimizer = wrap(
        model, swap, "hostile", optimizer=lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr)
    )
    other = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for step in range(2):
        norms = []
        for each, opt in ((model, optimizer), (plain, other)):
            for micro in range(3):
                (each(batch_for(plain, SEED + 3 * step + micro)).square().mean() / 3).backward()
            norms.append(nn.utils.clip_grad_norm_(each.parameters(), 1e-3))
        check_close(norms[0].reshape(1), norms[1].reshape(1), "norm")
        check_grads(model, plain)
        for opt in (optimizer, other):
            opt.step()
            opt.zero_grad(set_to_none=False)
    assert not model.layer.weight.grad.clone().any()
    infinity.unwrap_model(model, optimizer)
    check_close(model.layer.weight, plain.layer.weight)


@pytest.mark.parametrize("name", ["linear", "embedding", "conv1d"])
def test_retain_graph_backs_twice(name):
    """Two backwards through one graph double the gradient. Twin: without retain_graph the second is
    torch's error."""
    model, plain = build(name), build(name)
    model, _ = wrap(model)
    for each in (model, plain):
        loss = each(batch_for(plain, SEED)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    check_grads(model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["linear", "conv1d"])
def test_checkpointed_layers(name, reentrant):
    """checkpoint() around a tiled layer, inside the model and around all of it: pairs. (Around all
    of it with use_reentrant=False fails in untiled models too, wherever device_memory is given.)"""
    model, plain = build(name), build(name)
    model, _ = wrap(model)
    for inside in (True, False):
        for each in (model, plain):
            each.zero_grad()
            each.around = {"use_reentrant": reentrant} if inside else None
            x = batch_for(plain, SEED).requires_grad_()
            y = each(x) if inside else checkpoint(each, x, use_reentrant=reentrant)
            y.square().mean().backward()
        check_grads(model, plain)
        check_peak(model)


@pytest.mark.parametrize("name", ["linear", "conv1d"])
def test_a_step_between_forward_and_backward_is_refused(name):
    """The weight is another one by then: UsageError that says so. Twin: backward first works."""
    model, optimizer = wrap(build(name))
    loss = model(batch_for(model, SEED)).sum()
    loss.backward()
    late = model(batch_for(model, SEED)).sum()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="changed since"):
        late.backward()
    optimizer.zero_grad()
    model(batch_for(model, SEED)).sum().backward()


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("name", ["linear", "embedding", "conv1d"])
def test_a_failed_backward_can_be_tried_again(swap, monkeypatch, name, home):
    """Fails while the third part of the weight's gradient is landed; with the error still held,
    nothing stays charged and a retry gives the gradient of a single backward."""
    model, plain = build(name), build(name)
    model, optimizer = wrap(model, swap, home)
    x = batch_for(plain, SEED)
    model(x).sum().backward()
    optimizer.zero_grad()
    rest, calls = device(model).charged_nbytes, []
    homes = parts_of(model).gradients.homes
    pieces = homes.pieces

    def failing(handle, *span, **more):
        calls.append(handle)
        if handle.name == "layer.weight" and len([h for h in calls if h is handle]) == 3:
            raise RuntimeError("injected")
        return pieces(handle, *span, **more)

    monkeypatch.setattr(homes, "pieces", failing)
    with pytest.raises(RuntimeError, match="injected") as kept:
        model(x).square().mean().backward()
    monkeypatch.undo()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    check_grads(model, plain)
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    assert device(model).charged_nbytes <= rest
    assert kept.value is not None
    check_peak(model)


def test_a_failed_forward_leaves_no_tile_charged():
    """A float64 input fails inside the first product; the error is kept alive, and with it its
    frames."""
    model, _ = wrap(build("linear"))
    with torch.no_grad():
        model(batch_for(model, SEED))
    rest = device(model).charged_nbytes
    with torch.no_grad(), pytest.raises(RuntimeError) as kept:
        model.layer(batch_for(model, SEED).double())
    assert device(model).charged_nbytes == rest, kept.value


def test_nothing_of_a_tile_stays_after_a_step():
    """Charges of every tier after steps 2 to 5 are the same, and after eval the device has none."""
    model, optimizer = wrap(build("linear down"))
    accounts = parts_of(model).ledger.accounts
    seen = []
    for step in range(5):
        steps(model, optimizer, 1, seed=SEED + step)
        seen.append({tier: account.charged_nbytes for tier, account in accounts.items()})
    assert all(each == seen[1] for each in seen[1:])
    with torch.no_grad():
        model.eval()(batch_for(model, SEED))
    assert accounts[Tier.DEVICE].charged_nbytes == 0
    check_peak(model)


def test_a_dropped_model_takes_its_engine_along(swap):
    """Model and optimizer are dropped after a step: the engine is collected, and the folder is
    empty."""
    model, optimizer = wrap(build("linear"), swap, "nvme")
    steps(model, optimizer, 2, seed=SEED)
    engine = weakref.ref(parts_of(model).engine)
    assert swap_files(swap)
    del model, optimizer
    gc.collect()
    assert engine() is None
    assert leftovers(swap) == []


@pytest.mark.parametrize("name", ["linear", "embedding"])
def test_keyword_input(name):
    """nn.Linear and nn.Embedding name their argument ``input``: a call by that name works tiled
    too."""
    model, plain = build(name), build(name)
    model, _ = wrap(model)
    x = torch.arange(5) if name == "embedding" else batch_for(plain, SEED)
    with torch.no_grad():
        check_close(model.layer(input=x), plain.layer(input=x))


@pytest.mark.parametrize("name", ["linear", "conv1d", "linear down"])
def test_autograd_grad_accumulates_nothing(name):
    """torch.autograd.grad and backward(inputs=...) ask for the input's gradient alone: no
    ``p.grad`` appears, in torch as in tiles. Twin: a plain backward gives one."""
    model, _ = wrap(build(name))
    x = batch_for(model, SEED).requires_grad_()
    torch.autograd.grad(model(x).sum(), [x])
    after_grad = [n for n, p in model.named_parameters() if p.grad is not None]
    model.zero_grad()
    model(x).sum().backward(inputs=[x])
    after_inputs = [n for n, p in model.named_parameters() if p.grad is not None]
    model.zero_grad()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert (after_grad, after_inputs) == ([], [])


@pytest.mark.parametrize("by", ["parameters", "edges"])
@pytest.mark.parametrize("name", BUILDERS)
def test_autograd_grad_returns_the_gradient_of_a_weight(name, by):
    """A pair: autograd.grad of all parameters, or of their edges in the graph as zero-bubble
    schedules ask. Nothing is accumulated. Twin: a backward behind it accumulates the same."""
    model, plain = build(name), build(name)
    model, _ = wrap(model)
    assert tiled_units(model)
    x, asked = batch_for(plain, SEED), list(model.parameters())
    if by == "edges":
        asked = [torch.autograd.graph.get_gradient_edge(param) for param in asked]
    found = torch.autograd.grad(model(x).square().mean(), asked)
    expected = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
    for ours, theirs in zip(found, expected):
        check_close(ours, theirs)
    assert all(param.grad is None for param in model.parameters())
    for each in (model, plain):
        each(x).square().mean().backward()
    check_grads(model, plain)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_hook_on_a_tiled_weight_has_its_gradient(name, register):
    """A pair, two backwards with a hook that halves the weight's gradient. Twin: after its removal
    the gradient lands by rows again."""
    model, plain = build(name), build(name)
    model, _ = wrap(model)
    hooks, called = [], []
    for each in (model, plain):
        weight = each.get_parameter(tiled_units(model)[0])

        def halve(given, weight=weight):
            called.append(weight)
            return given * 0.5 if given is not weight else [given.grad.mul_(0.5), None][1]

        hooks.append(getattr(weight, register)(halve))
    for step in range(4):
        if step == 2:
            for hook in hooks:
                hook.remove()
        for each in (model, plain):
            each(batch_for(plain, SEED + step)).square().mean().backward()
        check_grads(model, plain)
    assert len(called) == 4


@pytest.mark.parametrize("name", BUILDERS)
def test_a_tiled_weight_that_is_not_stepped_accumulates_as_torch_does(name):
    """A pair without an optimizer, two backwards. Twin: once frozen, the layer's weight gets no
    gradient."""
    model, plain = build(name), build(name)
    model, _ = infinity.wrap_model(model, None, config())
    assert tiled_units(model)
    for frozen in (False, True):
        for each in (model, plain):
            each.zero_grad()
            each.get_parameter(tiled_units(model)[0]).requires_grad_(not frozen)
            for step in range(2):
                each(batch_for(plain, SEED + step)).square().mean().backward()
        check_grads(model, plain)


@pytest.mark.parametrize("name", ["linear", "conv1d"])
def test_second_order_gradients_are_right_or_refused(name):
    """A gradient penalty needs create_graph=True. Untiled units refuse it (UsageError); a tiled one
    may compute it, but never leave out the weight's part."""
    model, plain = build(name), build(name)
    model, _ = wrap(model)

    def penalty(each: nn.Module) -> None:
        x = batch_for(plain, SEED).requires_grad_()
        given = x.repeat(1, 1, 33)[..., :ROWS] if name == "conv1d" else x
        (slope,) = torch.autograd.grad(each.layer(given).square().sum(), [x], create_graph=True)
        each.zero_grad()
        slope.square().sum().backward()

    penalty(plain)
    try:
        penalty(model)
    except UsageError:
        return
    check_close(model.layer.weight.grad.clone(), plain.layer.weight.grad, "weight", tolerance=1e-4)


def test_a_conv1d_refuses_an_input_of_another_width():
    """One column too many or too few is an error in torch; in tiles it must not be cut off in
    silence."""
    for extra in (-1, 1, 70):
        model, plain = build("conv1d"), build("conv1d")
        model, _ = wrap(model)
        x = torch.randn(2, ROWS + extra)
        for each in (plain, model):
            with torch.no_grad(), pytest.raises(RuntimeError):
                each.layer(x)


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    """Somebody replaced the layer's forward before the wrap (as adapters do): it still runs, or the
    wrap refuses."""
    model = build("linear without bias")
    model.layer.forward = lambda x: x.new_ones(*x.shape[:-1], ROWS)
    try:
        model, _ = wrap(model)
        with torch.no_grad():
            out = model.layer(batch_for(model, SEED))
    except CapacityError:
        return
    assert (out == 1).all()


def test_a_backward_after_unwrap_is_a_clear_error_or_right():
    """A graph outlives its engine: its backward raises an InfinityError or gives torch's
    gradient."""
    model, plain = build("linear"), build("linear")
    model, optimizer = wrap(model)
    x = batch_for(plain, SEED)
    loss = model(x).sum()
    infinity.unwrap_model(model, optimizer)
    plain(x).sum().backward()
    try:
        loss.backward()
    except infinity.InfinityError:
        return
    check_grads(model, plain)


def test_forward_hooks_still_run():
    """Hooks of the user's on a tiled layer see its input and output, and may replace the output."""
    model, plain = build("linear"), build("linear")
    model, _ = wrap(model)
    for each in (model, plain):
        each.layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        each.layer.register_forward_hook(lambda m, args, out: out + args[0].sum())
        each(batch_for(plain, SEED)).square().mean().backward()
    check_grads(model, plain)
