"""One thread uses an engine at a time: another one waits at its forward, where nothing has changed
yet."""

from __future__ import annotations

import _thread
import threading
from pathlib import Path
from types import SimpleNamespace

import prepared
import pytest
import torch
from inside import parts_of
from models import TIERS, at_home, differing, in_child, seeded
from runs import adamw
from torch import nn

import infinity
from infinity import native
from infinity.core.run import one_thread

SEED = 7


class Stack(nn.Sequential):
    """Blocks; ``look`` is called in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.look = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.look()
        return x


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> None:
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with torch.no_grad():
        assert model(batch(0)).isfinite().all()


def read(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    for param in model.parameters():
        if (grad := param.grad) is not None:
            grad.norm()
    model.state_dict()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    infinity.save_checkpoint(folder / "saved", model, optimizer)


@pytest.mark.parametrize(
    ("use", "home"), [*((evaluate, home) for home in TIERS), (read, "host"), (save, "host")]
)
def test_a_use_in_a_thread_beside_training_changes_no_bit(use, home, tmp_path):
    """Twin: the same training alone. The thread goes on from before the first step until behind the
    last one; all that it is told is typed, a save between a backward and its step, say."""
    found = []
    for beside in (True, False):
        model = seeded(SEED, Stack)
        model, optimizer = infinity.wrap_model(
            model, adamw(model, 1e-2), at_home(home, home, tmp_path)
        )
        begun, over = threading.Event(), threading.Event()
        foreign: list[BaseException] = []

        def go_on(
            model=model, optimizer=optimizer, begun=begun, over=over, foreign=foreign
        ) -> None:
            while not over.wait(0.02):
                try:
                    use(model, optimizer, tmp_path)
                except infinity.InfinityError:
                    pass
                except Exception as error:  # noqa: BLE001 - the thread has nobody to raise it to
                    foreign.append(error)
                begun.set()

        thread = threading.Thread(target=go_on)
        if beside:
            thread.start()
            assert begun.wait(60)
        train(model, optimizer)
        over.set()
        if beside:
            thread.join(60)
            assert not thread.is_alive() and foreign == []
        found.append(infinity.unwrap_model(model, optimizer)[0].state_dict())
    assert differing(*found) == []


def test_threads_that_would_wait_for_each_other_get_an_error(monkeypatch):
    """Method: a forward waits for a thread that calls the same model; that one is refused, the
    forward goes on. Twin: the same call when the forward has returned."""
    monkeypatch.setattr(one_thread, "PATIENCE", 0.1)
    # A worker of pytest's may run tests outside of the main thread; a child's is this one.
    in_child(_threads_that_would_wait)


def _threads_that_would_wait() -> None:
    model, plain = seeded(SEED, Stack), seeded(SEED, Stack)
    model, optimizer = infinity.wrap_model(
        model, adamw(model, 1e-2), {"params": "host", "optimizer": "host"}
    )
    errors: list[Exception] = []

    def call() -> None:
        try:
            with torch.no_grad():
                model(batch(1))
        except infinity.UsageError as error:
            errors.append(error)

    def in_a_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)

    model.look = in_a_thread
    out = model(batch(0))
    assert len(errors) == 1 and "one thread uses a wrapped model at a time" in str(errors[0])
    model.look = lambda: None
    in_a_thread()
    assert len(errors) == 1
    assert torch.equal(out, plain(batch(0)))
    out.sum().backward()
    optimizer.step()
    assert not parts_of(model).scopes.is_used_elsewhere


AT_THE_END = """
import sys, threading, torch, infinity
from torch import nn

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [sys.argv[1]]}
model, optimizer = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
begun = threading.Event()

def evaluate():
    while True:
        with torch.no_grad():
            model(torch.ones(2, 64))
        begun.set()

threading.Thread(target=evaluate, daemon=True).start()
assert begun.wait(60)
"""
BEYOND_MAIN = """
import sys, threading, torch, infinity
from torch import nn

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [sys.argv[1]]}
model, optimizer = infinity.wrap_model(model, torch.optim.SGD(model.parameters(), lr=0.1), config)

def train():
    main = threading.main_thread()
    while main.is_alive():
        main.join(0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    print("steps made:", infinity.stats(model).steps)

threading.Thread(target=train).start()
"""


def test_a_thread_that_evaluates_as_the_process_ends_does_not_abort_it(tmp_path: Path):
    """In a child. The thread's next forward is refused, by name, and nothing is left in the
    folder."""
    done = prepared.run("-c", AT_THE_END, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_the_process_waits_for_trains_on_when_the_main_thread_is_over(tmp_path: Path):
    """In a child. The twin is the test above: nobody waits for that thread."""
    done = prepared.run("-c", BEYOND_MAIN, tmp_path)
    assert done.returncode == 0 and "steps made: 3" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_named", [True, False])
def test_a_foreign_thread_waits_for_a_forward_and_not_for_its_caller(is_named, monkeypatch):
    """Autograd has a thread of its own for each accelerator, in which Python has a name for it once
    something logs. Method: such a thread begins a task while the main thread is in a scope: in its
    own backward, and outside of one. Twin: Python's own thread waits for others before it
    counts."""
    monkeypatch.setattr(one_thread, "PATIENCE", 0.1)
    scopes, answers = native.Scopes(lambda: None, lambda: None), []

    def begin(*_: torch.Tensor) -> None:
        over = threading.Event()

        def run() -> None:
            if is_named:
                threading.current_thread()  # as logging does
            try:
                answers.append(one_thread.begin_task(scopes) is None)
            except infinity.UsageError as error:
                answers.append("one thread uses a wrapped model at a time" in str(error))
            over.set()

        _thread.start_new_thread(run, ())
        assert over.wait(30)

    with scopes.scope():
        begin()
        x = torch.ones(1, requires_grad=True)
        x.register_hook(begin)
        x.sum().backward()
    assert answers == [True, False] and not scopes.is_used_elsewhere
    waits: list = []
    one_thread.begin_task(SimpleNamespace(task=waits.append))
    assert waits[0] is not None
