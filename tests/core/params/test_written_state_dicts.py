"""What is written to the tensors of state dicts is the model's and the optimizer's, as with torch,
where they are the live ones."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from inside import parts_of
from models import at_home, differing
from torch import nn

import infinity
from infinity.core.params.lent import Lents
from infinity.core.units.flat_param import FlatParam

HOMES = ("device", "host", "nvme")
WIDTH = 40  # weights are of more bytes than are looked at whole


def make(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def wrap(
    home: str, folder, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return infinity.wrap_model(*make(dtype), at_home(home, home, folder, **more))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        state |= {
            f"{index} {name}": value.clone() for name, value in entry.items() if value is not None
        }
    return state


# --- what users write ---


def halve(model, optimizer):
    for value in model.state_dict().values():
        value.mul_(0.5)


def average_into(model, optimizer):
    state = model.state_dict()
    for name, value in state.items():
        state[name].copy_(0.9 * value + 0.1)


def write_all_at_once(model, optimizer):
    torch._foreach_mul_(list(model.state_dict().values()), 0.5)


def write_through_data(model, optimizer):
    for value in model.state_dict().values():
        value.data.add_(0.25)


def write_one_element_through_numpy(model, optimizer):
    model.state_dict()["0.weight"].numpy()[17, 5] = 3.0


def write_through_dlpack(model, optimizer):
    torch.from_dlpack(model.state_dict()["0.weight"]).mul_(0.5)


def write_to_a_view_that_is_left(model, optimizer):
    row = model.state_dict()["0.weight"].detach()[3]
    gc.collect()
    row.zero_()


def write_and_use_in_turn(model, optimizer):
    state = model.state_dict()
    for _ in range(3):
        state["0.weight"].mul_(0.9)
        with torch.no_grad():
            loss_of(model, 7)


def write_through_two(model, optimizer):
    first, second = model.state_dict(), model.state_dict()
    first["2.bias"].add_(1.0)
    model.state_dict()  # a use
    second["2.bias"].mul_(2.0)
    model.state_dict()
    first["2.bias"].sub_(0.5)


def write_and_load(model, optimizer):
    state = model.state_dict()
    for _ in range(2):
        state["0.weight"].mul_(0.5)
        model.load_state_dict(state)


def write_of_a_block(model, optimizer):
    model[0].state_dict()["weight"].mul_(0.5)


def write_of_no_grad_modes(model, optimizer):
    with torch.inference_mode():
        state = model.state_dict()
    state["0.weight"].mul_(0.5)


def zero_moments(model, optimizer):
    for entry in optimizer.state_dict()["state"].values():
        entry["exp_avg"].zero_()


def reset_steps(model, optimizer):
    state = optimizer.state_dict()["state"]
    for entry in state.values():
        entry["step"].zero_()
    model.state_dict()  # a use
    for entry in state.values():
        entry["exp_avg"].zero_()
        entry["exp_avg_sq"].zero_()


def write_one_moment_through_numpy(model, optimizer):
    optimizer.state_dict()["state"][0]["exp_avg_sq"].numpy()[9, 31] = 0.5


def write_both_ways(model, optimizer):
    entry = optimizer.state[next(model.parameters())]
    before = entry["exp_avg"]
    optimizer.state_dict()["state"][0]["exp_avg"].mul_(0.5)
    optimizer.state_dict()  # a use
    before.add_(0.125)


WRITES: dict[str, Callable] = {
    each.__name__: each
    for each in (
        halve,
        average_into,
        write_all_at_once,
        write_through_data,
        write_one_element_through_numpy,
        write_through_dlpack,
        write_to_a_view_that_is_left,
        write_and_use_in_turn,
        write_through_two,
        write_and_load,
        write_of_a_block,
        write_of_no_grad_modes,
        zero_moments,
        reset_steps,
        write_one_moment_through_numpy,
        write_both_ways,
    )
}


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, write: Callable
) -> dict[str, torch.Tensor]:
    train(model, optimizer, 0)
    write(model, optimizer)
    for step in (1, 2):
        train(model, optimizer, step)
    return everything(model, optimizer)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_the_models_as_with_torch(write, home, tmp_path):
    """Method: the same writes between two steps, to plain torch's state dicts and to ours; all bits
    are equal after further steps."""
    assert differing(run(*wrap(home, tmp_path), WRITES[write]), run(*make(), WRITES[write])) == []


def by_storage(tensor: torch.Tensor) -> None:
    index = (17 * WIDTH + 5) * tensor.itemsize
    seven = torch.tensor([7.0]).view(torch.uint8)
    tensor.untyped_storage()[index : index + 4].copy_(seven.untyped_storage())


def by_view_of_data(tensor: torch.Tensor) -> None:
    tensor.view(-1).data[17 * WIDTH + 5] = 7.0


def by_data_of_a_row(tensor: torch.Tensor) -> None:
    tensor[17].data[5] = 7.0


def by_numpy_view(tensor: torch.Tensor) -> None:
    numpy.asarray(tensor)[17:18, 5] = 7.0


def by_numpys_own_function(tensor: torch.Tensor) -> None:
    numpy.copyto(tensor.numpy()[17], 7.0, where=numpy.arange(WIDTH) == 5)


def by_memory(tensor: torch.Tensor) -> None:
    memoryview(tensor.numpy()).cast("B").cast("f")[17 * WIDTH + 5] = 7.0


def by_bits(tensor: torch.Tensor) -> None:
    tensor.data.view(torch.int32)[17, 5] = torch.tensor(7.0).view(torch.int32)


def by_detached_fill(tensor: torch.Tensor) -> None:
    tensor.detach()[17, 5].fill_(7.0)


def by_out(tensor: torch.Tensor) -> None:
    torch.full((1,), 7.0, out=tensor.data[17, 5:6])


def by_lists(tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor.data[17, 5:6]], 0.0)
    torch._foreach_add_([tensor.data[17, 5:6]], 7.0)


def by_dlpack(tensor: torch.Tensor) -> None:
    torch.from_dlpack(tensor)[17, 5] = 7.0


def by_dlpack_in_numpy(tensor: torch.Tensor) -> None:
    array = numpy.from_dlpack(tensor)
    array.flags.writeable or pytest.skip("this NumPy gives no memory to write to")
    array[17, 5] = 7.0


def by_set_memory(tensor: torch.Tensor) -> None:
    torch.empty(0).set_(tensor.data.untyped_storage())[17 * WIDTH + 5] = 7.0


WAYS = [each for name, each in list(globals().items()) if name.startswith("by_")]
SOURCES: dict[str, Callable[..., torch.Tensor]] = {
    "model.state_dict": lambda model, optimizer: model.state_dict()["0.weight"],
    "a block's state_dict": lambda model, optimizer: model[0].state_dict()["weight"],
    "optimizer.state_dict": lambda _, optimizer: optimizer.state_dict()["state"][0]["exp_avg"],
    "optimizer.state": lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"],
}


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("source", SOURCES)
def test_one_element_counts_however_it_is_written(source, home, tmp_path):
    """Writes one element of a large tensor in each way, and reads the source anew; then the same to
    a tensor that a step has made a snapshot, which raises; the optimizer's own follows the
    steps, and counts. Twin: NumPy only reads it before."""
    model, optimizer = wrap(home, tmp_path)
    train(model, optimizer, 0)
    take = SOURCES[source]
    for way in WAYS:
        take(model, optimizer).zero_()
        way(take(model, optimizer))
        assert take(model, optimizer)[17, 5] == 7.0, way
        take(model, optimizer).zero_()
        kept = take(model, optimizer)
        train(model, optimizer, 1)
        kept.numpy().sum()
        loss_of(model, 1)
        way(kept)
        if source == "optimizer.state":  # which follows the steps
            assert take(model, optimizer)[17, 5] == 7.0, way
        else:
            with pytest.raises(infinity.UsageError, match="snapshot"):
                train(model, optimizer, 2)
                loss_of(model, 2)  # what NumPy has is compared once in a step
            optimizer.zero_grad()
        del kept


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("write", ["halve", "zero_moments"])
def test_without_the_watch_what_is_written_is_lost(write, home, tmp_path, monkeypatch):
    """The failing twin of the test above."""
    monkeypatch.setattr(Lents, "lend", lambda *args: None)
    assert differing(run(*wrap(home, tmp_path), WRITES[write]), run(*make(), WRITES[write])) != []


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("through", ["the model's", "the optimizer's"])
def test_a_write_to_a_snapshot_is_refused_and_changes_nothing(through, home, tmp_path):
    """Method: state dicts are kept over two steps and written to; the next use raises, once, and
    training goes on as if nothing had been written. In the twin the kept ones are only read."""

    def with_kept(write: bool) -> dict[str, torch.Tensor]:
        model, optimizer = wrap(home, tmp_path)
        train(model, optimizer, 0)
        kept = (
            model.state_dict()["0.weight"]
            if through == "the model's"
            else optimizer.state_dict()["state"][0]["exp_avg"]
        )
        train(model, optimizer, 1)
        train(model, optimizer, 2)
        if write:
            kept.mul_(0.5)
            with pytest.raises(
                infinity.UsageError, match="0.weight.*written to after 2 further steps.*snapshot"
            ):
                loss_of(model, 3)
        kept.sum()
        train(model, optimizer, 3)
        return everything(model, optimizer)

    assert differing(with_kept(True), with_kept(False)) == []


@pytest.mark.parametrize("home", HOMES)
def test_a_snapshot_that_dies_written_is_told_too(home, tmp_path):
    model, optimizer = wrap(home, tmp_path)
    kept = model.state_dict()
    train(model, optimizer, 0)
    kept["0.weight"].zero_()
    del kept
    with pytest.raises(infinity.UsageError, match="snapshot"):
        model.state_dict()
    train(model, optimizer, 1)


@pytest.mark.parametrize("home", HOMES)
def test_a_load_wins_over_what_was_handed_out_before(home, tmp_path):
    """Method: a state dict is taken, another one is loaded; reading the first does nothing, writing
    to it is refused, and the loaded values stand. A write from before the load is under it."""
    model, _ = wrap(home, tmp_path)
    kept = model.state_dict()
    kept["0.bias"].zero_()
    other = {name: torch.full_like(value, 2.0) for name, value in kept.items()}
    model.load_state_dict(other)
    assert differing(dict(model.state_dict()), other) == []
    kept["0.weight"].zero_()
    with pytest.raises(infinity.UsageError, match="a load or an edit"):
        model.state_dict()
    assert differing(dict(model.state_dict()), other) == []


@pytest.mark.parametrize("home", HOMES)
def test_an_optimizers_load_wins_too(home, tmp_path):
    model, optimizer = wrap(home, tmp_path)
    train(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    kept["state"][0]["exp_avg"].zero_()
    with pytest.raises(infinity.UsageError, match="exp_avg of 0.weight"):
        optimizer.state_dict()
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])


@pytest.mark.parametrize("home", HOMES)
def test_a_write_between_forward_and_backward_is_refused_where_torch_does(home, tmp_path):
    """Method: torch and we refuse the backward, and have the same weights afterwards; in the twin
    nothing is written."""
    values = []
    for model, optimizer in (make(), wrap(home, tmp_path)):
        state, loss = model.state_dict(), loss_of(model, 0)
        with torch.no_grad():
            state["2.weight"].mul_(0.5)
        with pytest.raises(
            RuntimeError if not values else infinity.UsageError, match="inplace|written to since"
        ):
            loss.backward()
        optimizer.zero_grad()
        train(model, optimizer, 1)
        values.append({name: value.clone() for name, value in model.state_dict().items()})
        state = model.state_dict()
        loss_of(model, 2).backward()
        optimizer.zero_grad()
    assert differing(*values) == []


@pytest.mark.parametrize("home", HOMES)
def test_writes_through_two_state_dicts_at_once_are_refused(home, tmp_path):
    model, _ = wrap(home, tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = model.state_dict(), model.state_dict()
    first["0.weight"].mul_(0.5)
    second["0.weight"].mul_(0.5)
    with pytest.raises(
        infinity.UsageError, match="0.weight was written to through two state dicts"
    ):
        model.state_dict()
    assert differing(dict(model.state_dict()), before) == []


@pytest.mark.parametrize("home", HOMES)
def test_elements_that_were_not_written_keep_their_masters(home, tmp_path):
    """Method: one row of bf16 weights is set, through the state dict and through full_params; the
    masters are the same afterwards."""
    found = []
    for through_state_dict in (True, False):
        model, optimizer = wrap(home, tmp_path, torch.bfloat16)
        train(model, optimizer, 0)
        if through_state_dict:
            model.state_dict()["0.weight"][3] = 1.0
        else:
            with (
                torch.no_grad(),
                infinity.full_params(model, ["0.weight"], writeback=True) as params,
            ):
                params["0.weight"][3] = 1.0
        train(model, optimizer, 1)
        found.append(everything(model, optimizer))
    assert any("master" in name for name in found[0]) and differing(*found) == []


@pytest.mark.parametrize("home", HOMES)
def test_fp32_values_of_a_model_that_computes_in_bf16_go_home_whole(home, tmp_path):
    """Method: what is written below bf16's precision is read back, and the other elements keep
    theirs."""
    model, optimizer = wrap(home, tmp_path, param_dtype="bf16")
    train(model, optimizer, 0)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    expected["0.weight"][3] = 1.0 + 2.0**-20
    model.state_dict()["0.weight"][3] = 1.0 + 2.0**-20
    assert differing(dict(model.state_dict()), expected) == []


@pytest.mark.parametrize("home", HOMES)
def test_masters_in_an_optimizers_state_dict_are_not_written_to(home, tmp_path):
    model, optimizer = wrap(home, tmp_path, torch.bfloat16)
    train(model, optimizer, 0)
    optimizer.state_dict()["state"][0]["master"].zero_()
    with pytest.raises(infinity.UsageError, match="master of 0.weight in optimizer.state_dict"):
        train(model, optimizer, 1)
    train(model, optimizer, 1)


@pytest.mark.parametrize("home", HOMES)
def test_moments_of_eight_bits_take_what_they_can_keep(home, tmp_path):
    model, optimizer = wrap(home, tmp_path, moments="int8")
    train(model, optimizer, 0)
    for entry in optimizer.state_dict()["state"].values():
        entry["exp_avg"].zero_()
    assert not any(entry["exp_avg"].any() for entry in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("home", HOMES)
def test_a_state_dict_that_is_only_read_leaves_nothing_behind(home, tmp_path, monkeypatch):
    """Method: state dicts are saved, copied and let go; nothing is watched any more, before any
    further use. While one is held, nothing is read or written for it at a use. In the twin NumPy
    has had a tensor, which waits for one use.
    """
    model, optimizer = wrap(home, tmp_path)
    train(model, optimizer, 0)
    engine = parts_of(model).engine
    states = model.state_dict(), optimizer.state_dict()
    torch.save(states, io.BytesIO())
    copy.deepcopy(states)
    assert len(parts_of(engine).lents._all(follow=False)) == 4 + 4 * 3
    with monkeypatch.context() as patched:
        for name in ("read", "write"):
            patched.setattr(
                type(parts_of(engine).store),
                name,
                lambda *args, **more: pytest.fail("the home was asked"),
            )
        engine.wait_idle()
    del states
    assert not parts_of(engine).lents._all(follow=False)
    model.state_dict()["0.weight"].numpy()
    assert len(parts_of(engine).lents._all(follow=False)) == 1
    with torch.no_grad():
        loss_of(model, 1)
    assert not parts_of(engine).lents._all(follow=False)


def by_full_params(model: nn.Module, optimizer: torch.optim.Optimizer, folder) -> torch.Tensor:
    with torch.no_grad(), infinity.full_params(model, ["0.weight"]) as params:
        return params["0.weight"].clone()


def by_named_weights(model: nn.Module, optimizer: torch.optim.Optimizer, folder) -> torch.Tensor:
    return dict(infinity.named_weights(model))["0.weight"]


def by_unwrapping(model: nn.Module, optimizer: torch.optim.Optimizer, folder) -> torch.Tensor:
    return infinity.unwrap_model(model, optimizer)[0].state_dict()["0.weight"]


def by_a_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder) -> torch.Tensor:
    infinity.save_checkpoint(folder / "checkpoint", model, optimizer)
    other, its = infinity.wrap_model(*make(), {"params": "host", "optimizer": "host"})
    infinity.load_checkpoint(folder / "checkpoint", other, its)
    return other.state_dict()["0.weight"]


def by_parking(model: nn.Module, optimizer: torch.optim.Optimizer, folder) -> torch.Tensor:
    infinity.park(model, folder)
    return model.state_dict()["0.weight"]


def by_an_average(model: nn.Module, optimizer: torch.optim.Optimizer, folder) -> torch.Tensor:
    average = infinity.ema(model, 0.9)
    average.update()
    return average.state_dict()["0.weight"]


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "see",
    [by_full_params, by_named_weights, by_unwrapping, by_a_checkpoint, by_parking, by_an_average],
)
def test_every_use_sees_what_was_written(see, home, tmp_path):
    """Method: the first use after a write is each of those that show weights. The twin's write is
    to a copy."""
    for copied in (False, True):
        model, optimizer = wrap(home, tmp_path)
        train(model, optimizer, 0)
        value = model.state_dict()["0.weight"]
        (value.clone() if copied else value).fill_(0.5)
        del value
        assert bool((see(model, optimizer, tmp_path) == 0.5).all()) is not copied


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("when", ["at once", "after a step"])
def test_state_that_another_optimizer_has_loaded_is_its_own(when, home, tmp_path):
    """Method: a plain optimizer loads our state dict, which it does not copy, and steps; ours goes
    on as if it had not. The twin is the same write by the user."""

    def run(write: Callable) -> dict[str, torch.Tensor]:
        model, optimizer = wrap(home, tmp_path)
        train(model, optimizer, 0)
        plain, its = make()
        plain.load_state_dict(model.state_dict())
        its.load_state_dict(optimizer.state_dict())
        if when == "after a step":
            train(model, optimizer, 1)
        write(plain, its)
        train(model, optimizer, 2)
        return everything(model, optimizer)

    def write_as_user(plain: nn.Module, its: torch.optim.Optimizer) -> None:
        held = [value for entry in its.state.values() for value in entry.values()]
        its.state.clear()
        for value in held:
            value.add_(1.0)

    def stepped(plain: nn.Module, its: torch.optim.Optimizer) -> None:
        train(plain, its, 3)

    expected = run(lambda plain, its: None)
    assert differing(run(stepped), expected) == []
    if when == "at once":
        assert differing(run(write_as_user), expected) != []
    else:
        with pytest.raises(infinity.UsageError, match="snapshot"):
            run(write_as_user)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("of", ["weights", "moments"])
def test_what_is_struck_on_its_way_home_comes_there(of, home, tmp_path, monkeypatch):
    """Method: Ctrl-C strikes the second of four values that were written; the next use has all of
    them, and a write from between."""
    model, optimizer = wrap(home, tmp_path)
    train(model, optimizer, 0)
    kind, name = (FlatParam, "write_changes") if of == "weights" else (FlatParam, "write_moment")
    real, calls = getattr(kind, name), []

    def strike(*given: Any, **more: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*given, **more)

    def values() -> list[torch.Tensor]:
        if of == "weights":
            return list(model.state_dict().values())
        return [entry["exp_avg"] for entry in optimizer.state_dict()["state"].values()]

    written = values()
    for value in written:
        value.fill_(0.5)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, strike)
        with pytest.raises(KeyboardInterrupt):
            values()
    written[1].fill_(0.25)
    assert [float(value.mean()) for value in values()] == [0.5, 0.25, 0.5, 0.5]
    assert all(bool((value == value.view(-1)[0]).all()) for value in values())


def test_a_thread_may_let_a_written_tensor_go(tmp_path):
    """Method: the last reference to what was written goes in another thread; it is the model's
    nevertheless."""
    import threading

    model, _ = wrap("host", tmp_path)
    held = [model.state_dict()]
    held[0]["0.weight"].fill_(2.0)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert bool((model.state_dict()["0.weight"] == 2.0).all())


@pytest.mark.parametrize("home", HOMES)
def test_writes_inside_accumulate_wait_for_its_end(home, tmp_path):
    model, _ = wrap(home, tmp_path)
    with pytest.raises(infinity.UsageError, match="writing to a tensor of a state dict"):
        with infinity.accumulate(model):
            loss_of(model, 0).backward()
            model.state_dict()["2.bias"].fill_(3.0)
            loss_of(model, 1).backward()
    assert bool((model.state_dict()["2.bias"] == 3.0).all())
