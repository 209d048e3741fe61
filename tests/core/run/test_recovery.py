"""After an exception, wherever it struck, going on gives the bits of a run in which the failed pass
never was, or a typed error.

The campaign itself is :mod:`campaign`; here it is played, its judgement is checked, and the parts
of recovery one by one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import campaign
import campaign_user
import pytest
import torch
from deleted import needs
from inside import parts_of
from models import ChildDied, differing, in_child
from runs import adamw
from torch import nn

import infinity
from infinity.core.grads.record import GradRecord, GradState
from infinity.core.run.engine import Engine
from infinity.core.run.journal import Journal
from infinity.core.units.flat_param import FlatParam

CAMPAIGN = Path(campaign.__file__)
SHORT = 12  # points of each operation
LONG = int(os.environ.get("INFINITY_CAMPAIGN_POINTS", "20000"))


def small(folder: Path, **config) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    (folder / "swap").mkdir(exist_ok=True)
    config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(folder / "swap")]} | config
    return infinity.wrap_model(model, adamw(model, 1e-2), config)


def backward(model: nn.Module, seed: int = 0) -> None:
    model(
        torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    ).square().mean().backward()


# --- the campaign ---


@pytest.mark.parametrize(
    "operation, exception, events",
    [
        ("forward", "KeyboardInterrupt", "signal"),
        ("backward", "KeyboardInterrupt", "line"),
        ("step_again", "MemoryError", "line"),
        pytest.param("backward", "user", "user", marks=pytest.mark.slow),
        pytest.param("load_after_forward", "KeyboardInterrupt", "signal", marks=pytest.mark.slow),
        pytest.param("unwrap", "KeyboardInterrupt", "line", marks=pytest.mark.slow),
    ],
)
def test_a_short_campaign(operation, exception, events):
    """Method: a few points of the operations that people interrupt most, from disk."""
    found = campaign.play_apart(operation, "nvme", exception, events, SHORT, seed=1)
    assert (
        found["bad"] == [] and sum(found["outcomes"].values()) == min(SHORT, found["points"]) > 0
    ), found


@pytest.mark.parametrize("exception, events", [("KeyboardInterrupt", "line")])
def test_a_short_campaign_of_a_class_step(exception, events):
    """Method: the same for an optimizer that steps by its own code, on two threads."""
    found = campaign.play_apart("step_again", "by class", exception, events, SHORT, seed=2)
    assert found["bad"] == [] and sum(found["outcomes"].values()) == SHORT, found


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_long_campaign(tmp_path):
    """Method: every operation at every home with every exception, 20,000 points in all
    (``INFINITY_CAMPAIGN_POINTS``)."""
    chosen = campaign.selection([*campaign.OPERATIONS], [*campaign.HOMES], [*campaign.EXCEPTIONS])
    points = -(-LONG // len(chosen)) + 4  # some operations have fewer
    done = subprocess.run(
        [sys.executable, CAMPAIGN, "--points", str(points), "--json", tmp_path / "found.json"]
    )
    outcomes = json.loads((tmp_path / "found.json").read_text())["outcomes"]
    print(outcomes)
    assert (
        done.returncode == 0
        and set(outcomes) <= {"same", "typed"}
        and sum(outcomes.values()) >= LONG
    )


def forgets_its_hooks(user, known):
    user.optimizer.zero_grad()

    def run():
        torch._C._autograd._push_saved_tensors_default_hooks(lambda x: x, lambda x: x)
        user.loss()

    yield run
    user.step()
    yield {user.steps + 1}


@needs("ext/blocks")
def test_the_campaign_tells_hooks_that_are_left(tmp_path):
    """The twin: an operation that leaves its hooks on the thread."""
    user = campaign.User("host", tmp_path, None)
    user.wrap()
    known = campaign.Known(user)
    user = campaign.User("host", tmp_path, None).wrap()
    try:
        outcome, said = campaign.play(
            forgets_its_hooks, user, known, campaign.Striker(KeyboardInterrupt, "line"), 100
        )
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert outcome == "leak" and "hooks" in said


@pytest.mark.parametrize("what", ["steps are not carried on", "nothing is rebuilt"])
def test_the_campaign_tells_what_is_wrong(what, tmp_path, monkeypatch):
    """The twin: engines that forget a part of their recovery are found out by at least one of many
    points."""
    operation = campaign_user.load_after_forward
    if what == "steps are not carried on":
        operation = campaign_user.step
        monkeypatch.setattr(Engine, "recover", lambda self, **how: self.job.journal.forget())
    else:
        monkeypatch.setattr(Engine, "recover", lambda self, **how: None)

    def play() -> set[str]:
        known, outcomes = campaign.Known(campaign.User("host", tmp_path, None).wrap()), set()
        for n in range(20, 2400, 60):
            user = campaign.User("host", tmp_path, None).wrap()
            striker = campaign.Striker(KeyboardInterrupt, "line")
            outcomes.add(campaign.play(operation, user, known, striker, n)[0])
        return outcomes

    try:
        outcomes = in_child(play)
    except ChildDied:
        outcomes = {"wrong"}  # an engine that is not rebuilt computes with memory that was freed
    assert outcomes & {"wrong", "leak", "untyped"}, outcomes


# --- what people do ---


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_ctrl_c_in_real_backwards_changes_no_bit(home, tmp_path):
    """Method: sixty real signals at random moments of forward and backward, each followed by the
    step that was meant; losses and weights are those of a run that was not disturbed."""
    torch.manual_seed(0)
    moments = torch.rand(60, generator=torch.Generator().manual_seed(5)).tolist()

    def interrupt(*_):
        raise KeyboardInterrupt

    def run(disturbed: bool) -> dict:
        model, optimizer = small(tmp_path, params=home, optimizer=home)
        struck = 0
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for step, moment in enumerate(moments):
                if disturbed:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 1e-4 + 6e-3 * moment)
                        optimizer.zero_grad()
                        for seed in range(50):
                            backward(model, seed)
                    except KeyboardInterrupt:
                        struck += 1
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        finally:
            signal.signal(signal.SIGALRM, before)
        # One may come while Python runs something whose exceptions it swallows, a finalizer say.
        assert struck >= 0.8 * len(moments) if disturbed else struck == 0
        return {name: value.clone() for name, value in model.state_dict().items()}

    assert differing(run(True), run(False)) == []


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("stop")


def test_gradients_of_a_failed_backward_are_refused_until_they_are_zeroed(tmp_path):
    """Method: a backward fails after two of three layers; every use of what it began is a
    UsageError that names zero_grad, other gradients are as they were, and after zero_grad the step
    is that of a run without the failure.
    """
    model, optimizer = small(tmp_path)
    expected, plain = small(tmp_path)
    backward(model)
    first = model[0].weight.grad.clone()
    model[1].register_forward_pre_hook(hook := lambda module, args: (Failing.apply(args[0]),))
    with pytest.raises(ValueError, match="stop"):
        backward(model)
    model[1]._forward_pre_hooks.popitem()
    del hook
    torn = model[2].weight
    for use in (
        optimizer.step,
        lambda: torn.grad.norm(),
        lambda: torn.grad + 1,
        lambda: torn.grad.mul_(0.5),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ):
        with pytest.raises(infinity.UsageError, match="zero_grad"):
            use()
    assert torch.equal(model[0].weight.grad.clone(), first)
    optimizer.zero_grad()
    for each, stepper in ((model, optimizer), (expected, plain)):
        backward(each, 1)
        stepper.step()
    assert differing(model.state_dict(), expected.state_dict()) == []


def test_zeros_in_place_clear_a_torn_gradient_too(tmp_path):
    """Method: the same failure, then ``zero_grad(set_to_none=False)``; the next gradient is the
    plain one."""
    model, optimizer = small(tmp_path)
    handle = model[1].register_forward_pre_hook(lambda module, args: (Failing.apply(args[0]),))
    with pytest.raises(ValueError):
        backward(model)
    handle.remove()
    optimizer.zero_grad(set_to_none=False)
    assert float(model[2].weight.grad.norm()) == 0
    backward(model, 2)
    torn = model[2].weight.grad.clone()
    optimizer.zero_grad()
    backward(model, 2)
    assert torch.equal(torn, model[2].weight.grad.clone())


def test_the_next_use_frees_the_graph_of_a_failed_backward(tmp_path):
    """Method: a backward fails while a branch waits, whose graph torch keeps; a forward that
    computes no gradient frees what that has saved. Twin: plain torch keeps it."""

    def fails(model: nn.Module) -> weakref.ref:
        x = torch.randn(4, 32)
        first, kept = model(x).square().mean(), nn.Identity()
        first.grad_fn.metadata["kept"] = kept
        handle = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
        second = model(x + 1).square().mean()
        handle.remove()
        with pytest.raises(ZeroDivisionError):
            (first + second).backward()
        return weakref.ref(kept)

    def is_kept(model: nn.Module) -> bool:
        kept = fails(model)
        with torch.no_grad():
            model(torch.randn(4, 32))
        return kept() is not None

    assert is_kept(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    assert not is_kept(small(tmp_path)[0])


def test_accumulated_gradients_outlive_a_failed_forward(tmp_path):
    """Method: a backward, a forward that fails, another backward, a step; the failed forward leaves
    nothing and takes nothing."""
    states = []
    for fails in (False, True):
        model, optimizer = small(tmp_path)
        backward(model, 1)
        if fails:

            def stop(*_):
                raise KeyboardInterrupt

            handle = model[1].register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                backward(model, 7)
            handle.remove()
        backward(model, 2)
        optimizer.step()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    assert differing(*states) == []


def test_a_step_that_is_called_again_is_made_once(tmp_path, monkeypatch):
    """Method: an exception as the books are set; ``step()`` again. Twin: a third ``step()`` is one
    more with the same gradients, as in torch."""
    model, optimizer = small(tmp_path)
    expected, plain = small(tmp_path)
    for each in (model, expected):
        backward(each)
    plain.step()
    change = infinity.core.units.handle.ParamHandle.changed
    struck = []

    def strike(handle):
        if not struck:
            struck.append(handle)
            raise KeyboardInterrupt
        change(handle)

    monkeypatch.setattr(infinity.core.units.handle.ParamHandle, "changed", strike)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    assert differing(model.state_dict(), expected.state_dict()) == [] and struck
    for each in (optimizer, plain):
        each.step()
    assert differing(model.state_dict(), expected.state_dict()) == []


def test_a_load_that_is_cut_short_stops_everything_until_it_is_done(tmp_path, monkeypatch):
    """Method: a checkpoint's loading is struck; training, reading and saving say so, loading again
    makes it good."""
    model, optimizer = small(tmp_path)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    infinity.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(
            "infinity.ext.checkpoint.home_loader.HomeLoader._restore_step", lambda *_: 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            infinity.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    for use in (
        lambda: backward(model),
        model.state_dict,
        optimizer.step,
        optimizer.zero_grad,
        lambda: infinity.save_checkpoint(tmp_path / "other", model, optimizer),
    ):
        with pytest.raises(infinity.UsageError, match="Load a checkpoint"):
            use()
    infinity.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    assert differing(model.state_dict(), expected) == []
    backward(model)
    optimizer.step()


@pytest.mark.parametrize("at", ["running", "gradients", "store"])
def test_a_recovery_that_is_cut_short_is_done_again(at, tmp_path, monkeypatch):
    """Method: an error of the user's ends a second backward half-way; the recovery that follows is
    struck in one of its parts. The gradients are half done still, and a step says so."""
    model, optimizer = small(tmp_path)
    backward(model)
    engine = model._infinity.engine
    hook = next(iter(model.parameters())).register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    hook.remove()
    with monkeypatch.context() as patch:
        patch.setattr(
            type(getattr(parts_of(engine).job, at)),
            "drop" if at == "running" else "rebuild",
            lambda self: (_ for _ in ()).throw(KeyboardInterrupt()),
        )
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with pytest.raises(infinity.UsageError, match="half done"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_a_step_in_the_backward_that_is_cut_short_asks_for_a_checkpoint(tmp_path, monkeypatch):
    """Method: struck while a unit's update enters the books; every use says what to do, and that is
    enough."""
    model, optimizer = small(tmp_path)
    infinity.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(
            "infinity.core.grads.record.GradRecord.move", struck_when_consumed(GradRecord.move)
        )
        with pytest.raises(KeyboardInterrupt):
            with optimizer.step_in_backward():
                backward(model)
    for use in (optimizer.step, optimizer.zero_grad, lambda: backward(model), model.state_dict):
        with pytest.raises(infinity.UsageError, match="Load a checkpoint"):
            use()
    infinity.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    backward(model)
    optimizer.step()


def struck_when_consumed(move):
    def struck(self, to):
        if to is GradState.CONSUMED:
            raise KeyboardInterrupt
        return move(self, to)

    return struck


def cut_after_submit(optimizer, monkeypatch) -> None:
    """Strikes a step when its updates are under way, and not yet in the books."""
    with monkeypatch.context() as patch:
        patch.setattr("infinity.core.units.home_arrays.HomeArrays.commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("then", ["a load that is refused", "a load"])
def test_a_load_after_a_step_that_was_cut_short(then, home, tmp_path, monkeypatch):
    """Method: a load is refused, so the step that was cut short is carried to its end all the same;
    or it is done, and what was under way does not come through."""
    model, optimizer = small(tmp_path, params=home, optimizer=home)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    infinity.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    backward(model, 1)
    cut_after_submit(optimizer, monkeypatch)
    if then == "a load":
        infinity.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
        assert differing(model.state_dict(), saved) == []
        return
    with pytest.raises(infinity.InfinityError):
        infinity.load_checkpoint(tmp_path / "none", model, optimizer)

    def go_on() -> dict:
        optimizer.zero_grad()
        backward(model, 2)
        optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    found = go_on()
    infinity.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    backward(model, 1)
    optimizer.step()
    assert differing(go_on(), found) == [] and differing(found, saved)


def test_edits_that_were_cut_short_are_whole_in_what_is_saved(tmp_path, monkeypatch):
    """Method: Ctrl-C between two edits of full_params; save_pretrained writes all of them."""
    from safetensors.torch import load_file

    model, _ = small(tmp_path)
    count = []

    def struck(self, *args, write=FlatParam.write_changes, **how):
        count.append(0)
        if len(count) == 2:
            raise KeyboardInterrupt
        return write(self, *args, **how)

    monkeypatch.setattr(FlatParam, "write_changes", struck)
    with pytest.raises(KeyboardInterrupt):
        with infinity.full_params(model, writeback=True) as params:
            for value in params.values():
                value.fill_(3.0)
    infinity.save_pretrained(model, tmp_path / "saved")
    assert all(
        bool((value == 3).all())
        for value in load_file(tmp_path / "saved" / "model.safetensors").values()
    )


def test_an_unwrap_that_is_cut_short_is_carried_on(tmp_path, monkeypatch):
    """Method: an exception strikes four times while the parameters are given back; every use says
    what to call, which then works."""
    model, optimizer = small(tmp_path)
    backward(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(
            "infinity.core.wrap.unwrap.InfinityOptimizer.wrapped",
            property(lambda self: 1 / 0),
            raising=False,
        )
        with pytest.raises(ZeroDivisionError):
            infinity.unwrap_model(model, optimizer)
    plain_model, plain = infinity.unwrap_model(model, optimizer)
    assert differing(plain_model.state_dict(), expected) == [] and type(plain) is torch.optim.AdamW
    plain.step()


class Aside(nn.Module):
    """A part of the model that fails, which the whole knows how to do without; and a parameter that
    is only summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(32, 32), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.part(x)  # of another width
        except RuntimeError:
            pass
        self.aside = self.scale.sum()
        return self.first(x)


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_errors_that_the_model_itself_catches_are_no_interruption(home, tmp_path):
    """Method: two steps of a model that lives with a failing part; gradients are those of plain
    torch."""
    torch.manual_seed(1)
    plain = Aside()
    model = Aside()
    model.load_state_dict(plain.state_dict())
    (tmp_path / "swap").mkdir()
    config = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path / "swap")]}
    model, optimizer = infinity.wrap_model(model, adamw(model, 1e-2), config)
    for step in range(2):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        for each in (plain, model):
            each.zero_grad()
            out = each(x)
            (each.aside * 2).backward()
            out.square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.clone(), theirs.grad, msg=name)
            else:
                assert ours.grad is None, name


def test_a_failure_that_is_caught_inside_step_in_backward_stops_the_job(tmp_path):
    """Method: the backward fails half-way, which the user catches inside the block; part of a step
    is made, and everything says so."""
    model, optimizer = small(tmp_path)
    backward(model)
    optimizer.zero_grad()
    handle = model[1].register_forward_pre_hook(lambda module, args: (Failing.apply(args[0]),))
    loss = model(torch.ones(2, 32)).square().mean()
    with optimizer.step_in_backward():
        with pytest.raises(ValueError):
            loss.backward()
    handle.remove()
    with pytest.raises(infinity.UsageError, match="Load a checkpoint"):
        optimizer.zero_grad()


def test_a_model_that_was_compiled_while_it_was_wrapped_runs_after_the_unwrap(tmp_path):
    """Method: wrap, compile in place, unwrap; the compiled call is that of a plain model."""
    model, optimizer = small(tmp_path)
    model.compile(backend="eager")
    expected = model(torch.ones(2, 32)).detach()
    model, optimizer = infinity.unwrap_model(model, optimizer)
    assert torch.equal(model(torch.ones(2, 32)).detach(), expected)


def test_using_a_wrapped_model_in_a_forked_child_is_a_typed_error(tmp_path):
    """Method: a child reads gradients, zeroes them in place and steps; each is a UsageError, and
    none a crash."""
    model, optimizer = small(tmp_path, params="host", optimizer="host")
    backward(model)
    grad = model[0].weight.grad
    pid = os.fork()
    if pid == 0:
        refused = 0
        uses = (
            lambda: grad.clone(),
            lambda: grad.norm(1),
            lambda: optimizer.zero_grad(set_to_none=False),
            optimizer.step,
            lambda: backward(model),
        )
        for use in uses:
            try:
                use()
            except infinity.UsageError:
                refused += 1
        os._exit(0 if refused == len(uses) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    optimizer.step()


# --- the journal ---


def test_the_journal_makes_every_change_to_its_end():
    """Method: changes that are struck at every one of their parts; each is whole after the next
    finish."""
    for strike in range(4):
        journal, done, struck = Journal(), [], []

        def change(number: int) -> None:
            for part in range(3):
                if part == strike and number not in struck:
                    struck.append(number)
                    raise KeyboardInterrupt
                done.append((number, part))

        for number in range(2):
            if strike < 3:
                with pytest.raises(KeyboardInterrupt):
                    journal.carry_out(lambda number=number: change(number))
                assert not journal.is_clear
                journal.finish()
            else:
                journal.carry_out(lambda number=number: change(number))
            assert journal.is_clear and done[-3:] == [(number, 0), (number, 1), (number, 2)]


def test_what_is_forgotten_is_not_made():
    """Method: a change is struck and forgotten."""
    journal, calls = Journal(), []

    def change() -> None:
        calls.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.carry_out(change)
    journal.forget()
    journal.finish()
    assert journal.is_clear and calls == [1]
