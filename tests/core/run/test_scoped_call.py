"""ScopedCall: every call of a module is a use of the engine, and its errors say what to do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import infinity
from infinity import native
from infinity.core.run.operations import State
from infinity.core.run.scoped_call import ScopedCall, refuse_compiled_autograd
from infinity.core.run.uses import Uses
from infinity.core.seams import Events
from infinity.errors import PeerError, UsageError
from infinity.ranks.parallel_dims import ParallelDims

HOST = {"params": "host", "optimizer": "host"}


class Calls(nn.Module):
    """Does what it is given."""

    def forward(self, what: Callable[[], object]) -> object:
        return what()


def job_of(ranks: ParallelDims | None = None) -> tuple[SimpleNamespace, list[str]]:
    """What a scoped call needs of a job, and the outermost uses that have begun."""
    begun: list[str] = []
    autograd = torch._C._autograd
    uses = Uses(
        native.Scopes(
            autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks
        ),
        check_process=lambda: None,
        wait=lambda: None,
        prepare=lambda repairing: begun.append("use"),
        settle=lambda: None,
    )
    return SimpleNamespace(uses=uses, ranks=ranks or ParallelDims(), events=Events()), begun


def test_a_call_runs_in_a_scope_and_gives_what_the_module_gives():
    """Twin: a module beside it runs in none."""
    job, begun = job_of()
    module, beside = Calls(), Calls()
    ScopedCall(job, module)
    look = lambda: job.uses.scopes.running_here
    assert module(look) == 1 and beside(look) == 0
    assert job.uses.scopes.running_here == 0 and begun == ["use"]


def test_a_call_inside_a_call_is_of_one_use():
    job, begun = job_of()
    outer, inner = Calls(), Calls()
    ScopedCall(job, outer), ScopedCall(job, inner)
    assert outer(lambda: inner(lambda: job.uses.scopes.running_here)) == 2
    assert begun == ["use"]
    inner(lambda: None)
    assert begun == ["use"] * 2


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("cut_short", [True, False])
def test_a_call_that_an_exception_leaves_is_recorded(cut_short):
    """Claim: the scope ends, and takes off the hooks that were pushed inside it."""
    job, _ = job_of()
    module, scopes = Calls(), job.uses.scopes
    ScopedCall(job, module)

    def push() -> None:
        scopes.push_hooks(lambda tensor: tensor, lambda tensor: tensor)
        if cut_short:
            interrupt()

    before = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if cut_short:
        with pytest.raises(KeyboardInterrupt):
            module(push)
    else:
        module(push)
    assert scopes.interrupted == cut_short and scopes.running_here == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) == before


def test_a_call_of_an_unwrapped_job_is_no_use_of_it():
    """Method: a module that was compiled while wrapped keeps the call."""
    job, begun = job_of()
    module = Calls()
    ScopedCall(job, module)
    job.uses.define({State.UNWRAPPED: lambda: True})
    assert module(lambda: job.uses.scopes.running_here) == 0 and begun == []


def test_what_is_removed_is_as_it_was():
    """Claim: a removal may be repeated, and leaves a call that was set since. Twin: a call that the
    module had of its own comes back."""
    job, _ = job_of()
    plain, own, later = Calls(), Calls(), Calls()
    own._call_impl = lambda *args: "its own"
    calls = [ScopedCall(job, module) for module in (plain, own, later)]
    assert own(print) == "its own"
    later._call_impl = lambda *args: "later"
    for _ in range(2):
        for call in calls:
            call.remove()
    assert "_call_impl" not in vars(plain) and own(print) == "its own" and later(print) == "later"
    assert plain(lambda: job.uses.scopes.running_here) == 0


def test_a_compiled_call_runs_in_a_scope_too():
    job, _ = job_of()
    module = Calls()
    module._compiled_call_impl = compiled = lambda what: ("compiled", what())
    call = ScopedCall(job, module)
    assert module(lambda: job.uses.scopes.running_here) == ("compiled", 1)
    call.remove()
    assert module._compiled_call_impl is compiled


def test_a_weight_used_outside_its_module_is_named():
    """Twins: another RuntimeError stays as it is, and so does an error of ours."""
    model = nn.Sequential(nn.Linear(4, 4), Calls())
    wrapped, _ = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), HOST)
    weight = model[0].weight

    class Outside(nn.Module):
        def forward(self, raise_it: Callable[[torch.Tensor], object]) -> object:
            at_rest = weight  # found by this frame
            return raise_it()

    job, _ = job_of()
    module = Outside()
    ScopedCall(job, module)

    text = "Attempted to access the data pointer of Storage that is invalid"

    def refused() -> None:
        raise RuntimeError(text)

    with pytest.raises(UsageError, match=r"a weight at home \(0\.weight\) was used outside"):
        module(refused)
    for error in (RuntimeError("for another reason"), infinity.InternalError(text)):

        def other(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as found:
            module(other)
        assert found.value is error


@pytest.mark.parametrize(
    ("text", "several", "meant"),
    [
        ("Connection closed by peer [127.0.0.1]", True, PeerError),
        ("Connection closed by peer [127.0.0.1]", False, RuntimeError),
        ("mat1 and mat2 shapes cannot be multiplied", True, RuntimeError),
    ],
)
def test_a_lost_connection_means_lost_ranks(text, several, meant, monkeypatch):
    """Claim: in a job of several ranks; nothing else means that."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    job, _ = job_of(ParallelDims(tp_group=SimpleNamespace(rank=0, size=2)) if several else None)
    module = Calls()
    ScopedCall(job, module)

    def lost() -> None:
        raise RuntimeError(text)

    with pytest.raises(meant) as found:
        module(lost)
    assert type(found.value) is meant and text in str(found.value)


def test_compiled_autograd_is_refused_where_a_graph_is_made():
    import torch._dynamo.config as dynamo

    job, begun = job_of()
    module = Calls()
    ScopedCall(job, module)
    refuse_compiled_autograd()
    with dynamo.patch(compiled_autograd=True):
        with pytest.raises(UsageError, match="compiled autograd"):
            module(lambda: None)
        with torch.no_grad():
            module(lambda: None)
    assert begun == ["use"]
