"""A campaign: an exception at every point of every public operation, and what a user who goes on
then finds.

    python tests/support/campaigns/campaign.py [--operations step,backward] [--homes nvme] [--exceptions KeyboardInterrupt] [--points 400] [--json out.json]

**point**: a place inside the package where an exception can strike: before any line (``line``), or
only where CPython runs signal handlers, so where a real Ctrl-C strikes (``signal``). For ``user``:
each time that one of the user's own hooks or modules runs. **case**: one operation of a user with
an exception at one point, and how he goes on: zero_grad, forward, backward, step. **outcome**:
``same`` bits as in a run that was not disturbed; ``typed``: an InfinityError said what is lost;
anything else is bad.

Every (operation, home, exception) is a process of its own, so that a crash or a hang is an outcome
like others.
"""  # noqa: E501

from __future__ import annotations

import argparse
import collections
import dis
import faulthandler
import gc
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import prepared
import torch

import infinity

PACKAGE = str(Path(infinity.__file__).parent) + os.sep
MARK = "struck by the campaign"
STEPS_OF_ONE_MODEL = 12  # cases on one wrapped model, then another
EXCEPTIONS = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
    "user": ValueError,
}
HOMES: dict[str, dict[str, Any]] = {
    "device": {"params": "device", "optimizer": "device"},
    "host": {"params": "host", "optimizer": "host"},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
    "weights on nvme": {"params": "nvme", "optimizer": "host"},
    "state on nvme": {"params": "host", "optimizer": "nvme"},
    "activations on host": {"params": "nvme", "optimizer": "nvme", "activations": "host"},
    "activations on nvme": {"params": "host", "optimizer": "host", "activations": "nvme"},
    "recomputed": {
        "params": "host",
        "optimizer": "host",
        "device_memory": "600KiB",
        "recompute": True,
    },
    "micro-batches": {"params": "nvme", "optimizer": "nvme", "micro_batch": 1},
    "ahead": {"params": "nvme", "optimizer": "nvme", "speculate": True},
    "bf16": {"params": "nvme", "optimizer": "nvme", "param_dtype": "bf16"},
    "int8": {"params": "nvme", "optimizer": "nvme", "moments": "int8"},
    "clipped": {"params": "nvme", "optimizer": "nvme", "max_grad_norm": 0.01},
}


# --- striking ---


class _Points(dict):
    """Of each code object: offsets after which a signal handler may run, and those where a ``with``
    is being left."""

    def __missing__(self, code: Any) -> tuple[set[int], set[int]]:
        instructions = list(dis.get_instructions(code))
        table = [(each.start, each.end, each.target) for each in dis._parse_exception_table(code)]

        def handler(offset: int) -> int | None:
            return next((target for begin, end, target in table if begin <= offset < end), None)

        handled, leaving = set(), set()
        for number, each in enumerate(instructions):
            following = instructions[number + 1] if number + 1 < len(instructions) else None
            if each.opname.startswith("JUMP_BACKWARD"):
                handled.add(each.offset)
            # It runs inside the call: what comes behind the end of a ``try`` is not struck outside
            # of it.
            if (
                each.opname.startswith("CALL")
                and following is not None
                and handler(each.offset) == handler(following.offset)
            ):
                handled.add(following.offset)
            after = instructions[number + (each.opname == "SWAP") :][
                :3
            ]  # with what is returned out of the block beneath
            if len(after) == 3 and all(
                i.opname == "LOAD_CONST" and i.argval is None for i in after
            ):
                leaving.add(each.offset)  # the call of __exit__, without an exception
        self[code] = handled, leaving
        return self[code]


class Striker:
    """Raises an exception at the n-th point of what :meth:`run` runs in this thread."""

    def __init__(self, kind: type[BaseException], events: str):
        self._kind, self._events, self._points = kind, events, _Points()
        self._left, self._armed, self._thread = 0, False, 0
        self.place = ""

    def run(self, n: int, work: Callable[[], Any]) -> tuple[BaseException | None, Any]:
        """What came out of ``work``, struck at its n-th point: the exception, and the result."""
        self._left, self.place, self._thread, self._armed = n, "", threading.get_ident(), True
        try:
            if self._events != "user":
                sys.settrace(self._trace)
            return None, work()
        except BaseException as error:  # noqa: BLE001 - it is what this is about
            return error, None
        finally:
            sys.settrace(None)
            self._armed = False

    @property
    def counted(self) -> int:
        """Points since the last :meth:`run` began, when none was reached."""
        return -self._left

    def count(self, place: str) -> None:
        """A point is passed."""
        if self._armed:
            self._left -= 1
            if self._left == 0:
                self._armed, self.place = False, place
                raise self._kind(MARK)

    def users(self, place: str) -> None:
        """A piece of the user's own code runs."""
        if self._events == "user":
            self.count(place)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if (
            not self._armed
            or threading.get_ident() != self._thread
            or not frame.f_code.co_filename.startswith(PACKAGE)
        ):
            return None
        if self._events == "signal":
            frame.f_trace_opcodes = True
            self.count(_place(frame))
        return self._inside

    def _inside(self, frame: Any, event: str, _: Any) -> Any:
        handled, leaving = self._points[frame.f_code]
        if event == "line" and self._events == "line" and frame.f_lasti not in leaving:
            self.count(_place(frame))
        elif event == "opcode" and frame.f_lasti in handled:
            self.count(_place(frame))
        return self._inside


def _place(frame: Any) -> str:
    return (
        f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
    )


# --- the user ---


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(48, 80), torch.nn.Linear(80, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class User:
    """A model, an optimizer, and what its user does with them."""

    def __init__(self, home: str, folder: Path, striker: Striker | None):
        self.folder, self.striker = folder, striker
        self.config = HOMES[home] | {"nvme_paths": [str(folder / "swap")]}
        self.dtype = torch.bfloat16 if self.config.get("param_dtype") == "bf16" else torch.float32
        self.x = torch.randn(4, 48, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        (folder / "swap").mkdir(exist_ok=True)
        self.model, self.optimizer = self.build()
        self.steps = 0

    @staticmethod
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block() for _ in range(3)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def wrap(self) -> User:
        self.model, self.optimizer = infinity.wrap_model(self.model, self.optimizer, self.config)
        if self.striker is not None:
            users = self.striker.users
            for name, module in self.model.named_modules():
                module.register_forward_pre_hook(lambda *_, name=name: users(f"before {name}"))
                module.register_forward_hook(lambda *_, name=name: users(f"after {name}"))
            for name, param in self.model.named_parameters():
                param.register_hook(lambda _, name=name: users(f"gradient of {name}"))
                param.register_post_accumulate_grad_hook(
                    lambda _, name=name: users(f"landed {name}")
                )
        return self

    def loss(self, rows: slice = slice(None)) -> torch.Tensor:
        x = self.x[rows].to(
            next(self.model.parameters()).dtype
        )  # an unwrapped model has the dtype it was wrapped with
        return self.model(x).float().square().mean()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> tuple[dict, dict]:
        return self.model.state_dict(), self.optimizer.state_dict()

    def load(self, state: tuple[dict, dict]) -> None:
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    def digest(self) -> str:
        return digest_of(*self.state())


def digest_of(model: dict, optimizer: dict) -> str:
    told = hashlib.blake2b(digest_size=12)
    moments = [
        (f"{i} {key}", value)
        for i, state in sorted(optimizer["state"].items())
        for key, value in sorted(state.items())
    ]
    for name, value in [*model.items(), *moments]:
        told.update(name.encode())
        told.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def copied(state: tuple[dict, dict]) -> tuple[dict, dict]:
    model, optimizer = state
    moments = {
        i: {key: value.clone() for key, value in each.items()}
        for i, each in optimizer["state"].items()
    }
    return {name: value.clone() for name, value in model.items()}, {
        "state": moments,
        "param_groups": optimizer["param_groups"],
    }


# --- operations: what is struck; then the user goes on. Each yields what is struck, is sent whether
# it failed, and yields how many steps the state may be after then.

Operation = Callable[[User, "Known"], Iterator[Any]]


class Known:
    """The states of an undisturbed run, by how many steps were taken."""

    def __init__(self, user: User):
        self.number_of: dict[str, int] = {}
        self.states: list[tuple[dict, dict]] = []
        self.charged: dict[str, int] = {}  # bytes of each tier between two steps, at most
        for number in range(2 * STEPS_OF_ONE_MODEL + 6):
            state = user.state()
            self.number_of.setdefault(digest_of(*state), number)
            if number < 4:
                self.states.append(copied(state))
            for tier, nbytes in charged(user).items():
                self.charged[tier] = max(nbytes, self.charged.get(tier, 0))
            user.step()


def forward(user, known):
    user.optimizer.zero_grad()
    yield lambda: user.loss()
    user.step()
    yield {user.steps + 1}


def backward(user, known):
    user.optimizer.zero_grad()
    loss = user.loss()
    yield loss.backward
    del loss
    user.step()
    yield {user.steps + 1}


def accumulated(user, known):
    user.optimizer.zero_grad()

    def run():
        for rows in (slice(0, 2), slice(2, 4)):
            user.loss(rows).backward()

    yield run
    user.step()
    yield {user.steps + 1}


def joined(user, known):
    user.optimizer.zero_grad()

    def run():
        with infinity.accumulate(user.model):
            for rows in (slice(0, 2), slice(2, 4)):
                user.loss(rows).backward()

    yield run
    user.step()
    yield {user.steps + 1}


def step(user, known):
    user.backward()
    yield lambda: user.optimizer.step()
    user.step()
    yield {user.steps + 1, user.steps + 2}


def step_again(user, known):
    user.backward()
    if (yield lambda: user.optimizer.step()):
        user.optimizer.step()
    user.step()
    yield {user.steps + 2}


def closure(user, known):
    def again():
        user.optimizer.zero_grad()
        loss = user.loss()
        loss.backward()
        return loss

    yield lambda: user.optimizer.step(again)
    user.step()
    yield {user.steps + 1, user.steps + 2}


def step_in_backward(user, known):
    user.optimizer.zero_grad()
    loss = user.loss()

    def run():
        with user.optimizer.step_in_backward():
            loss.backward()
        user.optimizer.step()

    yield run
    user.step()
    yield {user.steps + 1, user.steps + 2}


def zero_grad(user, known):
    user.backward()
    yield lambda: user.optimizer.zero_grad()
    user.optimizer.zero_grad()
    assert all(param.grad is None for param in user.model.parameters())
    user.step()
    yield {user.steps + 1}


def clip(user, known):
    user.backward()
    yield lambda: torch.nn.utils.clip_grad_norm_(user.model.parameters(), 1e-3)
    user.step()
    yield {user.steps + 1}


def read_gradients(user, known):
    user.backward()

    def read():
        return [param.grad.detach().clone() for param in user.model.parameters()]

    yield read
    first = read()
    user.backward()
    assert all(map(torch.equal, first, read())), "p.grad reads other values"
    user.step()
    yield {user.steps + 1}


def evaluation(user, known):
    def run():
        with torch.no_grad():
            return user.model(user.x).clone()

    yield run
    assert torch.equal(run(), run())
    user.step()
    yield {user.steps + 1}


def state_dict(user, known):
    yield user.state
    user.step()
    yield {user.steps + 1}


def load_state_dict(user, known):
    yield lambda: user.load(known.states[2])
    user.load(known.states[2])
    assert known.number_of[user.digest()] == 2
    user.step()
    yield {3}


def read_params(user, known):
    def read():
        with infinity.full_params(user.model) as params:
            return {name: param.clone() for name, param in params.items()}

    yield read
    values, state = read(), user.model.state_dict()
    assert all(torch.equal(values[name], state[name].to(user.dtype)) for name in values)
    user.step()
    yield {user.steps + 1}


def write_params(user, known):
    before = {name: value.clone() for name, value in user.model.state_dict().items()}

    def write(values=None):
        with infinity.full_params(user.model, writeback=True) as params:
            for name, param in params.items():
                param.mul_(2) if values is None else param.copy_(values[name])

    failed = yield write
    state = user.model.state_dict()
    done = [
        torch.equal(value.to(user.dtype), before[name].to(user.dtype) * 2)
        for name, value in state.items()
    ]
    assert all(done) or (failed and not any(done)), "edits are there by half"
    user.load(known.states[1])
    user.step()
    yield {2}


def save_checkpoint(user, known):
    path = user.folder / "checkpoint"
    user.load(known.states[1])
    infinity.save_checkpoint(path, user.model, user.optimizer, extra=1)
    user.step()
    yield lambda: infinity.save_checkpoint(path, user.model, user.optimizer, extra=2)
    assert known.number_of[user.digest()] == 2
    extra = infinity.load_checkpoint(path, user.model, user.optimizer)
    assert known.number_of[user.digest()] == extra
    user.step()
    yield {extra + 1}


def load_checkpoint(user, known):
    path = user.folder / "checkpoint"
    user.load(known.states[2])
    infinity.save_checkpoint(path, user.model, user.optimizer, extra=2)
    user.step()
    yield lambda: infinity.load_checkpoint(path, user.model, user.optimizer)
    infinity.load_checkpoint(path, user.model, user.optimizer)
    assert known.number_of[user.digest()] == 2
    user.step()
    yield {3}


def save_pretrained(user, known):
    folder = user.folder / "pretrained"
    yield lambda: infinity.save_pretrained(user.model, folder)
    infinity.save_pretrained(user.model, folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    user.step()
    yield {user.steps + 1}


def load_after_forward(user, known):
    user.optimizer.zero_grad()
    yield lambda: user.loss()
    user.load(known.states[2])
    assert known.number_of[user.digest()] == 2, "load_state_dict() loaded nothing"
    user.step()
    yield {3}


def load_after_backward(user, known):
    user.optimizer.zero_grad()
    loss = user.loss()
    yield loss.backward
    del loss
    user.load(known.states[2])
    assert known.number_of[user.digest()] == 2, "load_state_dict() loaded nothing"
    user.step()
    yield {3}


def wrap(user, known):
    """On a model of its own, which a failed wrap leaves as it was."""
    other = User.__new__(User)
    other.__dict__.update(user.__dict__)
    other.model, other.optimizer = User.build()
    before = picture(other)
    if (yield lambda: infinity.wrap_model(other.model, other.optimizer, other.config)):
        assert picture(other) == before, "a failed wrap changed the model"
        other.wrap()
        other.step()
        assert known.number_of[other.digest()] == 1
    user.step()
    yield {user.steps + 1}


def picture(user: User) -> list:
    """What of a plain model and its optimizer can be told."""
    told: list = [sorted(vars(user.optimizer)), len(user.optimizer.state)]
    for module in user.model.modules():
        told.append(
            (
                type(module).__name__,
                sorted(vars(module)),
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
            )
        )
    for param in user.model.parameters():
        told.append(
            (
                type(param).__name__,
                sorted(vars(param)),
                param.requires_grad,
                param.grad is None,
                len(param._post_accumulate_grad_hooks or ()),
                param.data_ptr(),
                param.detach().sum().item(),
            )
        )
    return told


def unwrap(user, known):
    user.load(known.states[1])
    failed = yield lambda: infinity.unwrap_model(user.model, user.optimizer)
    plain = user.optimizer if not failed else infinity.unwrap_model(user.model, user.optimizer)[1]
    assert type(next(user.model.parameters())) is torch.nn.Parameter
    values = {
        name: value.to(known.states[1][0][name].dtype)
        for name, value in user.model.state_dict().items()
    }
    assert all(torch.equal(value, known.states[1][0][name]) for name, value in values.items())
    assert (
        not any(
            module._forward_hooks or module._forward_pre_hooks for module in user.model.modules()
        )
        or user.striker
    )
    del plain
    yield None


def unwrap_and_go_on(user, known):
    user.load(known.states[1])
    if (yield lambda: infinity.unwrap_model(user.model, user.optimizer)):
        user.step()
        yield {2}
    yield None


def drop(user, known):
    def run():
        user.model = user.optimizer = None
        gc.collect()

    yield run
    yield None


def drop_after_backward(user, known):
    user.optimizer.zero_grad()
    loss = user.loss()
    yield loss.backward
    del loss
    user.model = user.optimizer = None
    gc.collect()
    model, optimizer = User.build()
    model(user.x.float()).square().mean().backward()
    optimizer.step()
    yield None


OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        forward,
        backward,
        accumulated,
        joined,
        step,
        step_again,
        closure,
        step_in_backward,
        zero_grad,
        clip,
        read_gradients,
        evaluation,
        state_dict,
        load_state_dict,
        read_params,
        write_params,
        save_checkpoint,
        load_checkpoint,
        save_pretrained,
        load_after_forward,
        load_after_backward,
        wrap,
        unwrap,
        unwrap_and_go_on,
        drop,
        drop_after_backward,
    )
}
ENDS_THE_MODEL = {"unwrap", "unwrap_and_go_on", "drop", "drop_after_backward"}
OF_THE_USERS = (
    "forward",
    "backward",
    "accumulated",
    "joined",
    "closure",
    "step_in_backward",
    "evaluation",
    "load_after_forward",
    "load_after_backward",
    "drop_after_backward",
)  # in which any of the user's code runs


# --- cases ---


class Leak(Exception):
    """The bits are right, but something was left."""


def charged(user: User) -> dict[str, int]:
    """Bytes of each tier that are charged now."""
    accounts = user.model._infinity.engine.ledger.accounts
    return {str(tier): account.charged_nbytes for tier, account in accounts.items()}


def left_behind(user: User, known: Known) -> list[str]:
    """What stays that an undisturbed run does not leave."""
    told = []
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        told.append("saved-tensor hooks on the user's thread")
    if not torch._C._is_torch_function_enabled() or not torch.is_grad_enabled():
        told.append("torch's modes on the user's thread")
    if user.model is None or "_infinity" not in vars(user.model):
        for _ in range(5):
            if os.listdir(user.folder / "swap"):
                gc.collect()
        told += [f"{name} on the disk" for name in os.listdir(user.folder / "swap")]
    else:
        told += [
            f"{n} bytes of {tier}" for tier, n in charged(user).items() if n > known.charged[tier]
        ]
        for name, tier in infinity.stats(user.model).tiers.items():
            if tier.budget_nbytes is not None and tier.peak_nbytes > tier.budget_nbytes:
                told.append(f"{tier.peak_nbytes} bytes of {name} charged, over its budget")
    return told


def play(
    operation: Operation, user: User, known: Known, striker: Striker, n: int
) -> tuple[str, str]:
    """One case: its outcome, and what there is to say."""
    running = operation(user, known)
    error = None
    try:
        work = next(running)
        error, result = striker.run(n, work)
        del work, result
        if not striker.place:
            return "end", ""
        typed = isinstance(error, infinity.InfinityError) and not isinstance(
            error, infinity.InternalError
        )  # ours is no answer
        failed = error is not None
        if failed:  # a user does not keep tracebacks; what they hold would be held as long
            traceback.clear_frames(error.__traceback__)
            error = error.with_traceback(None)
            error.__context__ = error.__cause__ = None
        accepted = running.send(failed)
        if accepted is not None:
            now = known.number_of.get(user.digest())
            if now not in accepted:
                return "wrong", f"the state after {now} steps, not {sorted(accepted)}"
            user.steps = now
        if left := left_behind(user, known):
            return "leak", ", ".join(left)
        return ("typed", str(error)) if typed else ("same", "")
    except infinity.InternalError as said:
        return "untyped", str(said)
    except infinity.InfinityError as said:
        return "typed", str(said)
    except AssertionError as said:
        return "wrong", str(said)
    except Exception as said:  # noqa: BLE001 - an outcome
        return "untyped", "".join(traceback.format_exception(said)[-4:])
    finally:
        running.close()
        error = None


def run_cases(
    operation: str, home: str, exception: str, events: str, points: int, folder: Path, seed: int
) -> None:
    """Plays up to ``points`` cases and prints each as a line of JSON."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is looked through at every collection otherwise
    events = "user" if exception == "user" else events
    striker = Striker(EXCEPTIONS[exception], events)
    noisy = striker if exception == "user" else None
    known = Known(User(home, folder, None).wrap())

    def fresh() -> User:
        gc.collect()
        user = User(home, folder, noisy).wrap()
        user.step()
        user.steps = 1
        return user

    user = fresh()
    play(OPERATIONS[operation], user, known, striker, 0)  # counted, and never struck
    total = striker.counted
    order = random.Random(seed).sample(range(1, total + 1), min(points, total))
    print(json.dumps({"total": total}), flush=True)
    user, cases, said = fresh(), 0, ""
    for n in order:
        if "thread" in said:
            break  # the user's thread is not as it was: what comes after shows nothing more
        outcome, said = play(OPERATIONS[operation], user, known, striker, n)
        while (
            outcome == "end" and n > 1
        ):  # fewer points than when they were counted: the disk was faster
            n, user = n - 1 - n // 50, fresh()
            outcome, said = play(OPERATIONS[operation], user, known, striker, n)
        place = striker.place
        cases += 1
        ended = operation in ENDS_THE_MODEL
        if outcome != "same" or ended or cases % STEPS_OF_ONE_MODEL == 0:
            user.model = user.optimizer = None
            if outcome == "same" and (left := left_behind(user, known)):
                outcome, said = "leak", ", ".join(left)
            user = fresh()
        print(
            json.dumps({"n": n, "outcome": outcome, "place": place, "said": said[-600:]}),
            flush=True,
        )


# --- the campaign ---


def play_apart(
    operation: str,
    home: str,
    exception: str,
    events: str,
    points: int,
    seed: int,
    *,
    forks: bool = False,
) -> dict[str, Any]:
    """The same in a process of its own: outcomes, and what was bad. ``forks``: a child of this one,
    not of the prepared process."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        given = (operation, home, exception, events)
        if forks:
            out, err = Path(folder, "out"), Path(folder, "err")
            status = _status(
                _forked(lambda: run_cases(*given, points, Path(folder), seed), out, err),
                120 + points,
            )
            told, error = out.read_text(), err.read_text()
        else:
            child = prepared.start(__file__, "--case", *given, points, seed, folder)
            try:
                child.wait(120 + points)
                status = "crash" if child.returncode else ""
            except TimeoutError:
                status = "hang"
            finally:
                child.kill()
            told, error = child.stdout, child.stderr
        told = [json.loads(line) for line in told.splitlines()]
    cases = [case for case in told if case.get("outcome", "end") != "end"]
    outcomes = collections.Counter(case["outcome"] for case in cases)
    bad = [case for case in cases if case["outcome"] not in ("same", "typed")]
    if status:
        outcomes[status] += 1
        bad.append({"outcome": status, "place": "?", "said": error[-2000:]})
    total = next((each["total"] for each in told if "total" in each), 0)
    return {
        "operation": operation,
        "home": home,
        "exception": exception,
        "events": events,
        "points": total,
        "outcomes": dict(outcomes),
        "bad": bad,
    }


def _forked(work: Callable[[], None], out: Path, err: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        faulthandler.enable()
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - told by the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _status(pid: int, seconds: float) -> str:
    """What is wrong with how a child ended: nothing, a crash or a hang."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return "crash" if status else ""
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hang"


def selection(
    operations: list[str], homes: list[str], exceptions: list[str]
) -> list[tuple[str, str, str]]:
    """What is played: of the user's own errors only operations in which his code runs."""
    chosen = itertools.product(operations, homes, exceptions)
    return [each for each in chosen if each[2] != "user" or each[0] in OF_THE_USERS]


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, among in (("operations", OPERATIONS), ("homes", HOMES), ("exceptions", EXCEPTIONS)):
        parser.add_argument(f"--{name}", default=",".join(among))
    parser.add_argument("--events", default="line,signal", help="line, signal, or both in turns")
    parser.add_argument(
        "--points", type=int, default=40, help="of each operation, home and exception"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--part",
        default="0/1",
        help="i/n: every n-th combination, so that several processes share a campaign",
    )
    parser.add_argument("--json")
    parser.add_argument("--case", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        operation, home, exception, events, points, seed, folder = args.case
        run_cases(operation, home, exception, events, int(points), Path(folder), int(seed))
        return 0
    # torch imports half of itself when the first optimizer is made: once, and not in every child
    User.build()
    for name in infinity.__all__:
        getattr(infinity, name)
    part, parts = map(int, args.part.split("/"))
    found = []
    chosen_ones = selection(
        args.operations.split(","), args.homes.split(","), args.exceptions.split(",")
    )
    for chosen in chosen_ones[part::parts]:
        events = random.Random(f"{chosen} {args.seed}").choice(args.events.split(","))
        found.append(play_apart(*chosen, events, args.points, args.seed, forks=True))
        print(*chosen, found[-1]["events"], found[-1]["outcomes"], flush=True)
        for case in found[-1]["bad"][:3]:
            print("   ", case["outcome"], case["place"], case["said"][-300:], flush=True)
    outcomes = sum((collections.Counter(each["outcomes"]) for each in found), collections.Counter())
    print(sum(outcomes.values()), "cases:", dict(outcomes))
    if args.json:
        Path(args.json).write_text(json.dumps({"outcomes": outcomes, "of": found}, indent=1))
    return int(any(kind not in ("same", "typed") for kind in outcomes))


if __name__ == "__main__":
    sys.exit(main())
