"""The optimizer's books: what users change in ``optimizer.state`` and ``param_groups`` is what the
next step goes by."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from inside import parts_of
from torch import nn

import infinity

HOMES = ("device", "host", "nvme")
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=5e-3),
    "adam": lambda groups: torch.optim.Adam(groups, lr=5e-3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=5e-2, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=5e-2),
}


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    params = list(model.parameters())
    groups = [
        {"params": params[:2], "lr": 1e-2},
        {"params": params[2:4], "lr": 3e-2, "weight_decay": 0.1},
        {"params": params[4:]},
    ]
    return model, OPTIMIZERS[kind](groups)


def config(home: str, swap) -> dict:
    return {"params": home, "optimizer": home, "nvme_paths": [str(swap)]}


# --- what users do between two steps; `params` are the model's ---


def clear(params, optimizer):
    optimizer.state.clear()


def assign_empty(params, optimizer):
    optimizer.state = defaultdict(dict)


def delete_one(params, optimizer):
    optimizer.state.pop(params[1], None)


def delete_key_by_key(params, optimizer):
    for key in list(optimizer.state.get(params[0], {})):
        del optimizer.state[params[0]][key]


def zero_moments(params, optimizer):
    for param in params[:3]:
        for key, value in optimizer.state[param].items():
            if key != "step":
                value.zero_()


def change_view(params, optimizer):
    for key, value in optimizer.state[params[0]].items():
        if key != "step":
            value.view(-1)[3:7] = 0.25


def change_numpy(params, optimizer):
    for key, value in optimizer.state[params[0]].items():
        if key != "step":
            value.numpy()[2] = 0.5


def change_data(params, optimizer):
    for key, value in optimizer.state[params[0]].items():
        if key != "step":
            value.data.mul_(0.5)


def change_dlpack(params, optimizer):
    for key, value in optimizer.state[params[0]].items():
        if key != "step":
            torch.from_dlpack(value).mul_(0.25)


def set_step_back(params, optimizer):
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.tensor(0.0)


def zero_step_in_place(params, optimizer):
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def advance_step(params, optimizer):
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] += 5


def copy_to_device(params, optimizer):
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.to("cpu").clone() * (1 if key == "step" else 0.75)


def map_as_lightning_does(params, optimizer):
    for param, state in optimizer.state.items():
        optimizer.state[param] = type(state)(
            OrderedDict((k, v * (1 if k == "step" else 0.5)) for k, v in state.items())
        )


def assign_entries(params, optimizer):
    for param in params:
        if param in optimizer.state:
            state = optimizer.state[param]
            optimizer.state[param] = {
                k: v.clone() * (1 if k == "step" else 0.5) for k, v in state.items()
            }


def swap_entries(params, optimizer):
    a, b = params[0], params[2]
    if a in optimizer.state:
        optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]


def keep_own_values(params, optimizer):
    optimizer.state[params[0]]["mine"] = torch.ones(2)
    optimizer.state["epoch"] = 3
    optimizer.param_groups[0]["lr"] *= 0.5


def reverse_groups(params, optimizer):
    optimizer.param_groups.reverse()


def sort_groups(params, optimizer):
    optimizer.param_groups.sort(key=lambda group: -group["lr"])


def replace_groups(params, optimizer):
    optimizer.param_groups = [dict(group, lr=group["lr"] * 0.5) for group in optimizer.param_groups]


def move_between_groups(params, optimizer):
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


def delete_group(params, optimizer):
    del optimizer.param_groups[0]


def keep_part_of_a_group(params, optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]


EDITS = [
    clear,
    assign_empty,
    delete_one,
    delete_key_by_key,
    zero_moments,
    change_view,
    change_numpy,
    change_data,
    change_dlpack,
    set_step_back,
    zero_step_in_place,
    advance_step,
    copy_to_device,
    map_as_lightning_does,
    assign_entries,
    swap_entries,
    keep_own_values,
    reverse_groups,
    sort_groups,
    replace_groups,
    move_between_groups,
    delete_group,
    keep_part_of_a_group,
]
OF_STEPS = {set_step_back, zero_step_in_place, advance_step}
HARMLESS = {reverse_groups, sort_groups}


def show(model, optimizer) -> dict:
    return {
        index: {
            key: torch.as_tensor(value).clone() for key, value in optimizer.state[param].items()
        }
        for index, param in enumerate(model.parameters())
        if param in optimizer.state
    }


def train(model, optimizer, edit) -> list[dict]:
    """Five steps; before the fourth ``edit``. Returns what ``optimizer.state`` showed before
    each."""
    draws, shown = torch.Generator().manual_seed(3), []
    for step in range(5):
        if step == 3:
            edit(list(model.parameters()), optimizer)
        shown.append({"entries": show(model, optimizer), "count": len(optimizer.state)})
        model(torch.randn(4, 8, generator=draws)).pow(2).mean().backward()
        optimizer.step()
        model.zero_grad()
    return [*shown, {"entries": show(model, optimizer), "count": len(optimizer.state)}]


def assert_alike(ours, theirs, where="") -> None:
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_alike(ours[key], theirs[key], f"{where} {key}")
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(
            ours, theirs, atol=2e-6, rtol=1e-5, msg=lambda text: f"{where}: {text}"
        )
    else:
        assert ours == theirs, where


def weights_of(model) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_a_change_of_the_books_does_what_it_does_to_torch(edit, kind, swap):
    """Method: train beside torch's own class, and make the same change before the fourth step, at
    NVMe. What the books show is compared before every step. The twin: without the change torch's
    weights are others, so that one not honoured would be seen.
    """
    model, optimizer = make(kind)
    expected = train(model, optimizer, edit)
    untouched, other = make(kind)
    train(untouched, other, lambda *_: None)
    if edit not in HARMLESS | (OF_STEPS if kind == "momentum" else set()):
        assert any(not torch.equal(a, b) for a, b in zip(weights_of(model), weights_of(untouched)))
    ours, managed = infinity.wrap_model(*make(kind), config("nvme", swap))
    shown = train(ours, managed, edit)
    for step, (one, theirs) in enumerate(zip(shown, expected)):
        assert_alike(one, theirs, f"before step {step}:")
    ours, _ = infinity.unwrap_model(ours, managed)
    for mine, theirs in zip(ours.parameters(), model.parameters()):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_change_of_the_books_gives_the_same_bits_at_every_home(kind, swap):
    """Method: make several changes one after the other at each home and compare bits, of state
    dicts too."""

    def edit(params, optimizer):
        for each in (
            copy_to_device,
            zero_moments,
            move_between_groups,
            swap_entries,
            delete_one,
            replace_groups,
        ):
            each(params, optimizer)

    found = []
    for home in HOMES:
        model, optimizer = infinity.wrap_model(*make(kind), config(home, swap))
        train(model, optimizer, edit)
        state = optimizer.state_dict()["state"]
        infinity.unwrap_model(model, optimizer)
        found.append((weights_of(model), state))
    for weights, state in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, found[0][0]))
        assert state.keys() == found[0][1].keys()
        assert all(torch.equal(state[i][k], found[0][1][i][k]) for i in state for k in state[i])


@pytest.mark.parametrize("home", HOMES)
def test_a_tensor_of_the_state_that_is_kept_shows_what_torchs_does(home, swap):
    """Method: keep a moment, a view of it and a numpy array through steps, and change it between
    two; torch steps it in place."""

    def follow(model, optimizer):
        draws, seen = torch.Generator().manual_seed(3), []
        for step in range(6):
            if step == 2:
                kept = optimizer.state[model[0][0].weight]["exp_avg"]
                view, array = kept.view(-1)[5:9], kept.numpy()
            if step == 4:
                array[0, 0] = 0.125
                view.add_(1)
            model(torch.randn(4, 8, generator=draws)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                assert optimizer.state[model[0][0].weight]["exp_avg"] is kept
                seen.append((kept.clone(), view.clone(), array.copy()))
        return seen

    expected = follow(*make("adamw"))
    for ours, theirs in zip(
        follow(*infinity.wrap_model(*make("adamw"), config(home, swap))), expected
    ):
        for mine, its in zip(ours, theirs):
            np.testing.assert_allclose(mine, its, atol=2e-6, rtol=1e-5)


def test_the_state_that_was_looked_at_takes_no_memory_once_nobody_has_it(swap):
    """Method: look at every moment and count what the engine keeps, then hold one. The twin is the
    one that is held."""
    model, optimizer = infinity.wrap_model(*make("adamw"), config("nvme", swap))
    train(model, optimizer, lambda *_: None)
    lents = parts_of(model).lents
    show(model, optimizer)
    kept = optimizer.state[model[0][0].weight]["exp_avg"].view(-1)
    gc.collect()
    lents.settle_followers()
    assert len(lents._followers()) == 1 and kept.numel() == 64


def test_own_keys_come_back_from_state_dicts_and_checkpoints(swap, tmp_path):
    """Method: keep values beside torch's keys, also from before the wrap; save and load into a
    fresh job."""
    model, optimizer = make("adamw")
    optimizer.state[model[0][0].weight]["before"] = 7
    model, optimizer = infinity.wrap_model(model, optimizer, config("nvme", swap))
    train(model, optimizer, keep_own_values)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    state = optimizer.state_dict()
    assert state["state"]["epoch"] == 3 and torch.equal(state["state"][0]["mine"], torch.ones(2))

    def check(fresh, managed):
        entry = managed.state[fresh[0][0].weight]
        assert (
            list(entry) == ["step", "exp_avg", "exp_avg_sq", "before", "mine"]
            and entry["before"] == 7
        )
        assert torch.equal(entry["mine"], torch.ones(2)) and managed.state["epoch"] == 3

    fresh, managed = infinity.wrap_model(*make("adamw"), config("nvme", swap))
    infinity.load_checkpoint(tmp_path / "saved", fresh, managed)
    check(fresh, managed)
    fresh, managed = infinity.wrap_model(*make("adamw"), config("host", swap))
    managed.load_state_dict(state)
    check(fresh, managed)
    plain = make("adamw")
    infinity.unwrap_model(fresh, managed)
    plain[1].load_state_dict(managed.wrapped.state_dict())
    assert plain[1].state[plain[0][0][0].weight]["before"] == 7


def test_moments_whose_count_is_zero_are_saved_and_resumed(swap, tmp_path):
    """Method: set every count back to 0, save, load, and go on beside the job that was not
    stopped."""
    model, optimizer = infinity.wrap_model(*make("adamw"), config("nvme", swap))
    train(model, optimizer, lambda *_: None)
    set_step_back(None, optimizer)
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    fresh, managed = infinity.wrap_model(*make("adamw"), config("host", swap))
    infinity.load_checkpoint(tmp_path / "saved", fresh, managed)
    for pair in ((model, optimizer), (fresh, managed)):
        train(*pair, lambda *_: None)
    a, b = model.state_dict(), fresh.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


REFUSED = {
    "one twice": (lambda m, o: o.param_groups[0]["params"].append(m[2][0].bias), "groups 0 and 2"),
    "a frozen one": (lambda m, o: o.param_groups[0]["params"].append(m.extra), "add_param_group"),
    "a partial entry": (lambda m, o: o.state[m[0][0].weight].pop("exp_avg_sq"), "lacks exp_avg_sq"),
    "amsgrad": (lambda m, o: o.param_groups[0].update(amsgrad=True), "amsgrad"),
    "one tensor of two": (
        lambda m, o: o.state[m[0][0].weight].update(exp_avg=o.state[m[1][0].weight]["exp_avg"]),
        r"tensor\.clone\(\)",
    ),
    "no betas": (lambda m, o: o.param_groups[0].pop("betas"), "betas"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_engine_cannot_step_is_refused_before_the_step(what, swap):
    """Method: change the books so that torch, or we, cannot step them; the step raises and the
    weights are as before. The twin: without the change the step is made."""
    model, optimizer = make("adamw")
    model.extra = nn.Parameter(torch.zeros(3))
    model, optimizer = infinity.wrap_model(model, optimizer, config("host", swap))
    train(model, optimizer, lambda *_: None)
    model(torch.randn(4, 8)).pow(2).mean().backward()
    before = model.state_dict()
    change, match = REFUSED[what]
    change(model, optimizer)
    with pytest.raises(infinity.UsageError, match=match):
        optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("home", HOMES)
def test_a_copy_of_another_parameters_state_is_taken(home, swap):
    """Method: the error of a tensor that two parameters have names the copy; with it the step is
    made, and each goes its own way."""
    model, optimizer = infinity.wrap_model(*make("adamw"), config(home, swap))
    train(model, optimizer, lambda *_: None)
    mine, other = optimizer.state[model[0][0].weight], optimizer.state[model[1][0].weight]
    mine["exp_avg"] = other["exp_avg"]
    model(torch.randn(4, 8)).pow(2).mean().backward()
    with pytest.raises(infinity.UsageError, match="one tensor"):
        optimizer.step()
    mine["exp_avg"] = other["exp_avg"].clone()
    assert torch.equal(mine["exp_avg"], other["exp_avg"])
    optimizer.step()
    assert not torch.equal(mine["exp_avg"], other["exp_avg"])


@pytest.mark.parametrize(
    "value, match",
    [
        (torch.zeros(3), "must be a tensor of shape"),
        ("text", "must be a tensor"),
        (torch.zeros(8, 8, device="meta"), "meta"),
    ],
)
def test_a_value_of_another_shape_is_refused_where_it_is_set(value, match, swap):
    """Method: assign it; nothing changes."""
    model, optimizer = infinity.wrap_model(*make("adamw"), config("host", swap))
    train(model, optimizer, lambda *_: None)
    before = optimizer.state[model[0][0].weight]["exp_avg"].clone()
    with pytest.raises(infinity.UsageError, match=match):
        optimizer.state[model[0][0].weight]["exp_avg"] = value
    with pytest.raises(infinity.UsageError, match="whole number"):
        optimizer.state[model[0][0].weight]["step"] = 1.5
    assert torch.equal(optimizer.state[model[0][0].weight]["exp_avg"], before)


def test_state_of_parameters_outside_the_groups_is_in_checkpoints_and_refused_by_state_dict(
    swap, tmp_path
):
    """Method: take a group out after some steps. torch's state_dict() raises KeyError; ours says
    what it would leave out."""
    model, optimizer = infinity.wrap_model(*make("adamw"), config("nvme", swap))
    train(model, optimizer, delete_group)
    with pytest.raises(infinity.UsageError, match="in no group"):
        optimizer.state_dict()
    infinity.save_checkpoint(tmp_path / "saved", model, optimizer)
    moment = optimizer.state[model[0][0].weight]["exp_avg"].clone()
    _, plain = infinity.unwrap_model(model, optimizer)
    assert torch.equal(plain.state[model[0][0].weight]["exp_avg"], moment)


@pytest.mark.parametrize("home", ["device", "host", "nvme"])
def test_memory_that_was_put_under_a_value_is_the_state(home, swap):
    """Method: set_ and .data = on three values between two steps, beside torch. Twin: of another
    shape, refused with the state as it was."""

    def run(wraps: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if wraps:
            model, optimizer = infinity.wrap_model(
                model, optimizer, {"params": home, "optimizer": home, "nvme_paths": [str(swap)]}
            )

        def step() -> None:
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        state = optimizer.state[model[0].weight]
        state["exp_avg"].data = torch.full((16, 16), 0.5)
        state["step"].data = torch.tensor(7.0)
        state["exp_avg_sq"].set_(torch.full((16, 16), 1e-4))
        step()
        if wraps:
            state["exp_avg"].data = torch.zeros(3)
            with pytest.raises(
                infinity.UsageError, match=r"given the shape \(3,\), not \(16, 16\)"
            ):
                step()
        return model.state_dict()

    ours, plain = run(True), run(False)
    assert all(torch.equal(ours[name], value) for name, value in plain.items())
