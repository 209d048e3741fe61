"""What micro_batch refuses, what it moves, and how it comes and goes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inside import parts_of
from microbatch_cases import (  # noqa: F401
    CLOSE,
    DEVICE,
    LENGTH,
    LR,
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
    gradients_of,
    mean_square,
    no_hooks_left,
    quiet,
    rows_of,
    sgd,
    stack,
)
from models import at_home, differing, loss_of, seeded, tokens, transformer
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO, make_batch, make_model, seed_everything

import infinity

pytestmark = pytest.mark.timeout(120)


class BatchNormalised(nn.Module):
    """What people write who need batch norm for a shape that torch has none for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = x.mean((0, 1))
            self.mean.lerp_(mean.detach(), 0.1)
        else:
            mean = self.mean
        return (x - mean) * self.scale


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda h: h - h.mean(0, keepdim=True),
    "softmax": lambda h: h.softmax(0),
    "norm": lambda h: h / h.norm(),
    "neighbour": lambda h: h + h.roll(1, 0),
    "those before": lambda h: h.cumsum(0),
    "the first": lambda h: h + h[:1],
    "position in the batch": lambda h: h * torch.arange(1.0, len(h) + 1).view(-1, 1, 1),
    "size of the batch": lambda h: h / len(h),
    "attention over the batch": lambda h: attend(h.transpose(0, 1)).transpose(0, 1),
}


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_a_block_that_mixes_samples_is_refused(mix):
    """Method: functions of several samples inside a block; a UsageError that names the block, and
    after it the model is in training mode as before and runs batches of a chunk."""
    wrapped = Wrapped(stack(mix), micro_batch=2, **DEVICE)
    with pytest.raises(infinity.UsageError, match=r"blocks\.0"):
        mean_square()(wrapped.model)
    assert all(module.training for module in wrapped.model.modules())
    whole = differentiated(seeded(SEED, stack(mix)), mean_square(2))
    torch.testing.assert_close(differentiated(wrapped.model, mean_square(2)), whole, **CLOSE)


def test_a_block_that_mixes_samples_in_training_only_is_refused():
    """Method: a batch norm of the user's own, which torch's classes do not tell."""
    wrapped = Wrapped(lambda: Stack(BatchNormalised), micro_batch=2, **DEVICE)
    with pytest.raises(infinity.UsageError, match="depends on the whole batch"):
        mean_square()(wrapped.model)


def attribute(**values: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        block = Simple(lambda h: h)
        for name, value in values.items():
            setattr(block, name, value)
        return block

    return make


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)),
    "SyncBatchNorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(LENGTH)),
    "LazyBatchNorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d()),
    "batch norm in eval mode": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)).eval()
    ),
    "attention with the sequence first": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0),
    "LSTM with the sequence first": lambda: nn.LSTM(WIDTH, WIDTH),
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_a_block_that_needs_the_whole_batch_is_refused_at_the_wrap(make, tmp_path):
    """Method: a ConfigError that names the module; model and optimizer are as they were, nothing is
    left on disk, and the same pair wraps without micro_batch."""
    model = seeded(SEED, lambda: Stack(make))
    lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters())
    optimizer = torch.optim.SGD(model.first.parameters(), lr=LR)
    before = {name: value.clone() for name, value in model.first.state_dict().items()}
    config = {**at_home("nvme", "nvme", tmp_path), "micro_batch": 2}
    with pytest.raises(infinity.ConfigError) as refused:
        infinity.wrap_model(model, optimizer, config)
    assert lazy or "blocks.0" in str(refused.value)
    assert all(
        type(p) in (nn.Parameter, nn.parameter.UninitializedParameter) for p in model.parameters()
    )
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules() if not lazy
    )
    assert differing(dict(model.first.state_dict()), before) == []
    assert list(tmp_path.iterdir()) == []
    if not lazy:
        infinity.wrap_model(model, optimizer, {**config, "micro_batch": None})


def test_batch_norm_outside_the_blocks_sees_the_whole_batch():
    """Method: batch norm between blocks that run chunks; numbers and statistics are the whole
    batch's."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Simple(lambda h: h) for _ in range(2))
            self.norm = nn.BatchNorm1d(LENGTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.norm(self.blocks[0](x)))

    assert_like_whole(Between, mean_square())
    plain, wrapped = seeded(SEED, Between), Wrapped(Between, micro_batch=2, **DEVICE)
    plain(rows_of(7)), wrapped.model(rows_of(7))
    torch.testing.assert_close(wrapped.model.norm.running_mean, plain.norm.running_mean, **CLOSE)
    torch.testing.assert_close(wrapped.model.norm.running_var, plain.norm.running_var, **CLOSE)


AMBIGUOUS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "mask over the sequence": lambda block, x: block(x, mask=MASK[0, 0]),
    "bias over the sequence": lambda block, x: block(
        x, bias=torch.arange(float(LENGTH)).view(-1, 1)
    ),
}


@pytest.mark.parametrize("call", AMBIGUOUS.values(), ids=AMBIGUOUS)
@pytest.mark.parametrize("chunk", [1, 2])
def test_a_batch_as_long_as_the_sequence_is_refused_where_it_matters(call, chunk):
    """Method: as many samples as positions, and an argument that could be of either; a UsageError
    that says so. Without such an argument, and with one sample more, it is right."""
    build = stack(attend, call)
    wrapped = Wrapped(build, micro_batch=chunk, **DEVICE)
    with pytest.raises(infinity.UsageError, match=f"batch of {LENGTH}"):
        mean_square(LENGTH)(wrapped.model)
    assert_like_whole(build, mean_square(LENGTH + 1), micro_batch=chunk)
    assert_like_whole(stack(attend), mean_square(LENGTH), micro_batch=chunk)


def per_head(h: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    return h * slopes.repeat_interleave(WIDTH // len(slopes)).view(-1)


LOOKS_CUT: dict[
    str, tuple[int, Callable[..., torch.Tensor], Callable[[nn.Module, torch.Tensor], torch.Tensor]]
] = {
    "as many heads as samples": (
        4,
        per_head,
        lambda block, x: block(x, torch.arange(4.0)),
    ),
    "as many heads as samples, broadcast": (
        2,
        lambda h, bias: attend(h, None, bias),
        lambda block, x: block(x, torch.tensor([1.0, -3.0]).view(2, 1, 1) * MASK[0, 0]),
    ),
    "a table as long as the batch": (
        6,
        lambda h, table: h + table[h.detach().argmax(-1).sum(-1) % 6].unsqueeze(1),
        lambda block, x: block(x, rows_of(6, WIDTH)),
    ),
    "positions first": (
        3,
        lambda h, x: h.mean(0) * x,
        lambda block, x: block(rows_of(LENGTH, WIDTH), x),
    ),
    "positions first, one sample": (
        1,
        lambda h, x: (h.unsqueeze(0) * x).sum(1, keepdim=True).expand(-1, LENGTH, -1),
        lambda block, x: block(rows_of(LENGTH, WIDTH), x),
    ),
}


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("rows, function, call", LOOKS_CUT.values(), ids=LOOKS_CUT)
def test_arguments_that_only_look_like_samples_are_right_or_refused(rows, function, call, chunk):
    """Method: arguments whose first dimension happens to be as long as the batch, and a first
    argument without samples. The numbers of the whole batch, or an InfinityError that names
    micro_batch: no error from inside the block.
    """
    assert_right_or_refused(stack(function, call), mean_square(rows), micro_batch=chunk)


class ChangesItsInput(nn.Module):
    """As residual networks with ReLU(inplace=True) at the head of a block do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5).add_(1)
        return self.layer(x) + x


def test_a_block_that_changes_its_input_is_right_or_refused():
    """Method: a block that begins with operations in place, which plain torch trains; two batches,
    as the first is looked at more closely."""

    def compute(model: nn.Module) -> torch.Tensor:
        return mean_square()(model) + (model(rows_of(7, LENGTH, WIDTH, seed=2) * 1)).square().mean()

    plain = differentiated(seeded(SEED, lambda: Stack(ChangesItsInput)), compute)
    try:
        found = differentiated(
            Wrapped(lambda: Stack(ChangesItsInput), micro_batch=2, **DEVICE).model, compute
        )
    except (
        infinity.InfinityError,
        RuntimeError,
    ) as refused:  # torch's own refusal of recomputing a changed input
        assert "micro_batch" in str(refused) or "inplace" in str(refused)
        return
    for name, value in plain.items():
        torch.testing.assert_close(
            found[name], value, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_failed_chunk_leaves_no_trace():
    """Method: an exception in the second chunk of the second block, in the forward and in the
    recomputation; then the gradients are close to the whole's, and no noise of the check is
    left."""

    class Fault(Exception):
        pass

    compute = lambda model: loss_of(model, tokens(SEED, 7))
    whole = differentiated(quiet(), compute)
    for in_backward in (False, True):
        wrapped = Wrapped(quiet, micro_batch=2, params="host", optimizer="host")
        compute(wrapped.model)
        calls = []

        def fail(*_: Any, in_backward=in_backward, calls=calls) -> None:
            if (torch._C._current_graph_task_id() != -1) is in_backward:
                calls.append(1)
                if len(calls) == 2:
                    raise Fault

        handle = wrapped.model.blocks[1].feed[1].register_forward_pre_hook(fail)
        with pytest.raises(Fault):
            compute(wrapped.model).backward()
        handle.remove()
        gc.collect()
        wrapped.optimizer.zero_grad()
        found = differentiated(wrapped.model, compute)
        torch.testing.assert_close(found, whole, **CLOSE)


def test_the_check_draws_no_noise():
    """Method: torch's random state after the first forward, whose blocks are checked, and after
    a second one from the same seed, whose are not; with dropout both as a module and as a
    function."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.dropout(self.layer(x)), 0.2, self.training)

    wrapped = Wrapped(lambda: Stack(Noisy), micro_batch=2, **DEVICE)
    found = []
    for _ in range(2):
        torch.manual_seed(SEED)
        loss = mean_square()(wrapped.model)
        found.append({"loss": loss.detach(), "state": torch.random.get_rng_state()})
    assert differing(found[0], found[1]) == []


def test_the_check_is_not_seen_from_outside():
    """Method: a hook on a layer inside a block and a counter in a buffer; the first forward, whose
    blocks are checked, shows them what the second does. Routers' losses and running statistics are
    collected that way.
    """

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("samples", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.samples += len(x)
            return self.layer(x)

    wrapped = Wrapped(lambda: Stack(Counting), micro_batch=2, **DEVICE)
    block, seen = wrapped.model.blocks[1], []
    block.layer.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    found = []
    for _ in range(2):
        seen.clear()
        block.samples.zero_()
        with torch.no_grad():
            mean_square()(wrapped.model)
        found.append((list(seen), block.samples.item()))
    assert found[1] == ([2, 2, 2, 1], 7)
    assert found[0] == found[1]


def weight_traffic(
    home: str, folder: Any, rows: int, chunk: int | None, backwards: int = 1
) -> dict[str, int]:
    """The least that one of three steps moves towards the device: reading ahead in vain depends on
    the moment."""
    config = at_home(home, home, folder)
    wrapped = Wrapped(quiet, micro_batch=chunk, **config)
    edges = ("nvme->host", "host->device")
    found = []
    for _ in range(4):
        parts_of(wrapped.model).wait_idle()
        before = {edge: wrapped.moved(edge) for edge in edges}
        for part in tokens(SEED, rows).chunk(backwards):
            loss_of(wrapped.model, part).backward()
        wrapped.optimizer.step()
        parts_of(wrapped.model).wait_idle()
        found.append({edge: wrapped.moved(edge) - before[edge] for edge in edges})
        wrapped.optimizer.zero_grad()
    return {edge: min(step[edge] for step in found[1:]) for edge in edges}


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_weights_are_loaded_once_a_pass_however_many_chunks(home, tmp_path):
    """Method: what a step moves towards the device for 16 samples at once, in chunks of 4, 2 and 1:
    the same bytes, but for a unit or two that were read ahead in vain. The twin: accumulation over
    4 backwards moves more than twice as much.
    """
    once = weight_traffic(home, tmp_path, 16, None)
    for chunk in (4, 2, 1):
        found = weight_traffic(home, tmp_path, 16, chunk)
        assert found["host->device"] == once["host->device"]
        assert found["nvme->host"] <= 1.5 * once["nvme->host"]
    assert (
        weight_traffic(home, tmp_path, 16, None, backwards=4)["host->device"]
        > 2 * once["host->device"]
    )


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made inside had at one moment."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_nbytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak_nbytes = max(self.peak_nbytes, sum(nbytes for _, nbytes in self._alive.values()))
        return result


def peak_of_a_step(chunk: int | None, **config: Any) -> int:
    wrapped = Wrapped(
        lambda: transformer(SEED, blocks=4, dropout=0.0), micro_batch=chunk, **{**DEVICE, **config}
    )
    ids = tokens(SEED, 32)
    loss_of(wrapped.model, ids).backward()
    wrapped.optimizer.zero_grad()
    with PeakMemory() as memory:
        loss_of(wrapped.model, ids).backward()
    return memory.peak_nbytes


def test_activations_of_chunks_take_a_fraction_of_the_whole_batchs():
    """Method: the most bytes of living tensors in a forward and backward, by a dispatch mode that
    sees them all. Chunks of 2 of 32 samples keep the blocks' inputs, and of one chunk what a block
    saves: less than half."""
    whole, chunked = peak_of_a_step(None), peak_of_a_step(2)
    print(f"whole {whole}, chunked {chunked}")
    assert chunked < whole / 2


@pytest.mark.parametrize("chunk", [16, 8])
def test_inputs_of_chunks_go_home_too(chunk, tmp_path):
    """Method: what is saved on the device by forwards in chunks with activations at home on the
    host, through hooks around the model, which get what does not go home: no block's input of 98
    KiB stays, whatever the chunk.
    """
    wrapped = Wrapped(
        lambda: transformer(SEED, blocks=4, dropout=0.0),
        micro_batch=chunk,
        activations="host",
        **DEVICE,
    )
    stayed = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        stayed[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = wrapped.model(tokens(SEED, 32))
    inputs = [nbytes for nbytes in stayed.values() if nbytes == 32 * 12 * 64 * 4]
    assert inputs == [], f"{len(inputs)} of 98304 bytes stayed"
    logits.square().mean().backward()


def test_unwrapping_gives_the_forward_back():
    """Method: unwrap; no module has a forward of its own but the one that the user had given it,
    and the model trains on as plain torch, batch norm's refusal and all being gone."""
    model = seeded(SEED, quiet)
    calls = []
    own = model.blocks[1].forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return own(x)

    model.blocks[1].forward = counted
    model, optimizer = infinity.wrap_model(model, sgd(model), {"micro_batch": 2, **DEVICE})
    found = differentiated(model, lambda model: loss_of(model, tokens(SEED, 7)))
    whole = differentiated(quiet(), lambda model: loss_of(model, tokens(SEED, 7)))
    torch.testing.assert_close(found, whole, **CLOSE)
    assert set(calls) <= {1, 2}
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == [
        "blocks.1"
    ]
    assert model.blocks[1].forward is counted
    calls.clear()
    optimizer.zero_grad()
    assert (
        differing(differentiated(model, lambda model: loss_of(model, tokens(SEED, 7))), whole) == []
    )
    assert calls == [7]


def test_a_wrapped_model_is_freed():
    """Method: a weak reference to the engine; it goes with model and optimizer, though blocks have
    a forward that knows of it."""
    import weakref

    wrapped = Wrapped(quiet, micro_batch=2, **DEVICE)
    loss_of(wrapped.model, tokens(SEED, 7)).backward()
    engine = weakref.ref(parts_of(wrapped.model).engine)
    block = weakref.ref(wrapped.model.blocks[0])
    del wrapped
    gc.collect()
    assert engine() is None and block() is None


def test_hooks_of_the_user_on_a_block_see_the_whole_batch():
    """Method: forward hooks and backward hooks on a block are called once, with the whole batch;
    those on a layer inside are called for every chunk."""
    seen: dict[str, list] = {"block": [], "grad": [], "layer": []}
    wrapped = Wrapped(quiet, micro_batch=2, **DEVICE)
    loss_of(wrapped.model, tokens(SEED, 7))  # the check of the first batch
    block = wrapped.model.blocks[1]
    block.register_forward_hook(
        lambda module, args, out: seen["block"].append((len(args[0]), len(out)))
    )
    block.register_full_backward_hook(
        lambda module, given, got: seen["grad"].append((len(given[0]), len(got[0])))
    )
    block.norm2.register_forward_hook(lambda module, args, out: seen["layer"].append(len(out)))
    logits = wrapped.model(tokens(SEED, 7))
    assert seen["layer"] == [2, 2, 2, 1]
    logits.square().mean().backward()
    assert seen["block"] == [(7, 7)] and seen["grad"] == [(7, 7)]


def test_a_copy_of_a_wrapped_model_does_not_share_its_blocks():
    """Method: deepcopy of a wrapped model is refused, or computes with its own weights."""
    wrapped = Wrapped(quiet, micro_batch=2, **DEVICE)
    try:
        copied = copy.deepcopy(wrapped.model)
    except Exception:  # noqa: BLE001 - whatever it says, nothing wrong was computed
        return
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert not copied(tokens(SEED, 7)).any()


def larger_batch(name: str, rows: int = 6) -> dict[str, Any]:
    """Three batches of the zoo in one, with use_cache at its default."""
    parts = [make_batch(ZOO[name], seed) for seed in range(rows // 2)]
    joined = {
        key: (
            torch.cat([part[key] for part in parts])
            if torch.is_tensor(value) and value.dim()
            else value
        )
        for key, value in parts[0].items()
    }
    joined.pop("use_cache", None)
    return joined


def zoo_gradients(name: str, config: dict[str, Any] | None) -> State:
    model = make_model(ZOO[name], SEED)
    if config is not None:
        model, _ = infinity.wrap_model(model, sgd(model), config)
    batch = larger_batch(name)
    seed_everything(SEED)
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | gradients_of(model)


def assert_zoo_close(found: State, whole: State) -> None:
    """Gradients within 2e-3 of the largest of their tensor, or of a thousandth of the model's
    largest: those of attention's key biases are zero but for rounding."""
    torch.testing.assert_close(found["loss"], whole["loss"], rtol=1e-5, atol=0)
    assert found.keys() == whole.keys()
    largest = max(
        value.abs().max() for name, value in whole.items() if name != "loss" and value.numel()
    )
    for name, value in whole.items():
        if value.numel() and name != "loss":
            away = (found[name] - value).abs().max()
            assert away <= 2e-3 * max(value.abs().max(), 1e-3 * largest), (
                f"{name}: {away} of {value.abs().max()}"
            )


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        "llama_checkpointed",
        "llama_checkpointed_reentrant",
        "bert",
        "vit",
        "llama_lora",
    ],
)
def test_transformers_models_train_with_chunks(name, chunk):
    """Method: models as users build them, use_cache at its default, gradient checkpointing of
    either kind, masks of every sample, adapters."""
    if missing := ZOO[name].missing():
        pytest.skip(f"no {missing}")
    config = {"micro_batch": chunk, "params": "host", "optimizer": "host"}
    assert_zoo_close(zoo_gradients(name, config), zoo_gradients(name, None))


ODD_ONES = [
    "bloom",
    "fsmt",
    "gemma3n",
    "ibert",
    "informer",
    "mamba",
    "mixtral",
    "mt5",
    "qwen2_moe",
    "reformer",
    "resnet",
    "vilt",
    "wavlm",
    "whisper",
    "xlnet",
]


@pytest.mark.parametrize("name", ODD_ONES)
def test_odd_architectures_are_right_or_refused(name):
    """Method: architectures with the sequence first, with biases for all samples at once, with
    routers whose losses are collected beside the output, with single layers in lists; the numbers
    of the whole batch or an InfinityError.
    """
    if missing := ZOO[name].missing():
        pytest.skip(f"no {missing}")
    whole = zoo_gradients(name, None)
    try:
        found = zoo_gradients(name, {"micro_batch": 1})
    except infinity.InfinityError as refused:
        assert "micro_batch" in str(refused)
        return
    assert_zoo_close(found, whole)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_and_evaluation_after_training(name):
    """Method: train a step, then generate: a batch of a chunk with the cache, a larger one without,
    both as plain torch does with the same weights. A larger one with the cache, and an evaluation
    with use_cache at its default, are right or refused with what to do."""
    model = make_model(ZOO[name], SEED)
    model, optimizer = infinity.wrap_model(
        model, sgd(model), {"micro_batch": 2, "params": "host", "optimizer": "host"}
    )
    model(**larger_batch(name)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    plain = make_model(ZOO[name], SEED)
    plain.load_state_dict(model.state_dict())
    model.eval(), plain.eval()
    ids = larger_batch(name)["input_ids"]

    def generate(which: nn.Module, rows: int, use_cache: bool) -> torch.Tensor:
        settings = {
            "max_new_tokens": 4,
            "do_sample": False,
            "use_cache": use_cache,
            "pad_token_id": 0,
        }
        return which.generate(ids[:rows], attention_mask=torch.ones_like(ids[:rows]), **settings)

    for rows, use_cache in ((2, True), (1, True), (6, False)):
        assert torch.equal(generate(model, rows, use_cache), generate(plain, rows, use_cache))
    with torch.no_grad():
        right = plain(**larger_batch(name)).loss
        torch.testing.assert_close(
            model(**larger_batch(name), use_cache=False).loss, right, rtol=1e-5, atol=0
        )
        for attempt, answer in (
            (lambda: generate(model, 6, True), generate(plain, 6, True)),
            (lambda: model(**larger_batch(name)).loss, right),
        ):
            try:
                torch.testing.assert_close(attempt(), answer, rtol=1e-5, atol=0)
            except infinity.UsageError as refused:
                assert "use_cache=False" in str(refused)
    model.train()
    model(**larger_batch(name)).loss.backward()
