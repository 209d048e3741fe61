"""The user of a campaign: his model, and every operation in which an exception strikes."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from inside import parts_of
from striker import Striker

import infinity

STEPS_OF_ONE_MODEL = 12  # cases on one wrapped model, then another
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
    "bf16": {"params": "nvme", "optimizer": "nvme", "param_dtype": "bf16"},
    "int8": {"params": "nvme", "optimizer": "nvme", "moments": "int8"},
    "clipped": {"params": "nvme", "optimizer": "nvme", "max_grad_norm": 0.01},
    "by class": {"params": "nvme", "optimizer": "nvme", "class": "Adafactor"},
}
# Used if the late device is this machine's GPU (`late_device/everywhere`)
HOMES_ON_LATE = {
    f"late {home}": {"device": "late:0", **HOMES[home]}
    for home in ("host", "nvme", "activations on host", "micro-batches")
}
if torch.accelerator.is_available():
    HOMES |= HOMES_ON_LATE


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
        self.kind = self.config.pop("class", "AdamW")  # of the optimizer
        self.dtype = torch.bfloat16 if self.config.get("param_dtype") == "bf16" else torch.float32
        self.x = torch.randn(4, 48, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        self.x = self.x.to(self.config.get("device", "cpu"))
        (folder / "swap").mkdir(exist_ok=True)
        self.model, self.optimizer = self.build(self.kind)
        self.steps = 0

    @staticmethod
    def build(kind: str = "AdamW") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block() for _ in range(3)))
        return model, getattr(torch.optim, kind)(model.parameters(), lr=1e-2)

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


def charged(user: User) -> dict[str, int]:
    """Bytes of each tier that are charged now."""
    accounts = parts_of(user.model._infinity).ledger.accounts
    return {str(tier): account.charged_nbytes for tier, account in accounts.items()}


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
    other.model, other.optimizer = User.build(user.kind)
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
