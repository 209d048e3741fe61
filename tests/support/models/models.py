"""Tiny models, the small budgets they are given, and a place to crash in, shared by the tests of
the contract.

Words used here: **home** as in `test_architectures.py`; **plain** and **wrapped** as in `runs.py`.
**least**: the smallest `host_memory` that a model works with, which is what the CapacityError
names. Where optimizer state is on disk it also forces the gradients there. **child**: a forked
process, for what may crash, hang or be killed.

Nothing here draws a random number at import, and every builder is given its seed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import re
import select
import signal
import time
import traceback
import unittest
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TIERS = ("device", "host", "nvme")
VOCABULARY = 67
WIDTH = 64  # a block is then 50 000 parameters: more than one chunk of the smallest plan
LENGTH = 12


class Fail(torch.autograd.Function):
    """Passes its input on; its backward raises ValueError."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("stop")


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """``recompute``: None, "block" or "inside" (only the feed-forward), and which kind of
    checkpoint."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)
        self.inside: dict[str, Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        if self.inside is None:
            return x + self.dropout(self.feed(self.norm2(x)))
        return x + checkpoint(lambda y: self.dropout(self.feed(self.norm2(y))), x, **self.inside)


class TinyTransformer(nn.Module):
    """A causal language model: token ids in, logits out; the head is the embedding."""

    def __init__(self, *, width: int = WIDTH, blocks: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight
        self.around: dict[str, Any] | None = (
            None  # checkpoint() arguments: every block is recomputed
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(ids) + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x) if self.around is None else checkpoint(block, x, **self.around)
        return self.head(self.norm(x))


class Prescribed(nn.Module):
    """Parameters whose gradients the caller gives: repeated blocks, and shapes that are awkward to
    lay out.

    ``forward(given)`` takes ``{name: gradient}``; a parameter that is not in it gets none.
    """

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(130, 70))
            self.vector = nn.Parameter(torch.randn(71))

        def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
            own = {name: given[name] for name in ("matrix", "vector") if name in given}
            return sum(
                ((getattr(self, name) * grad).sum() for name, grad in own.items()), torch.zeros(())
            )

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(self.Pair() for _ in range(8))
        self.scalar = nn.Parameter(torch.randn(()))
        self.transposed = nn.Parameter(torch.randn(17, 33).t())
        self.channels_last = nn.Parameter(
            torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
        )
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for i, pair in enumerate(self.pairs):
            prefix = f"pairs.{i}."
            total = total + pair(
                {n.removeprefix(prefix): g for n, g in given.items() if n.startswith(prefix)}
            )
        for name in ("scalar", "transposed", "channels_last", "empty"):
            if name in given:
                total = total + (getattr(self, name) * given[name]).sum()
        return total


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """``build()`` under its own seed; torch's generator is left as it was found."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def transformer(seed: int, **sizes: Any) -> TinyTransformer:
    return seeded(seed, lambda: TinyTransformer(**sizes))


def prescribed(seed: int) -> Prescribed:
    return seeded(seed, Prescribed)


def tokens(seed: int, rows: int = 3) -> torch.Tensor:
    """Ids of shape (rows, LENGTH)."""
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def gradients(
    model: nn.Module, seed: int, *, without: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """A gradient for every parameter of a Prescribed, except for those named in ``without``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()
    }
    return {name: grad for name, grad in drawn.items() if name not in without}


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss in fp32, whatever the model computes in."""
    logits = model(ids)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


# --------------------------------------------------------------------------------------------------
# Homes and budgets
# --------------------------------------------------------------------------------------------------


def at_home(params: str, optimizer: str, folder: Path, **more: Any) -> dict[str, Any]:
    """A config with these homes. Folders are named only where something may go to disk. Both
    "hostile": the home of `hostile_home`, for what relies on no home."""
    if "hostile" in (params, optimizer):
        from hostile_home import hostile_folder

        assert {params, optimizer} <= {"hostile", "auto"}, "all of the state is there"
        params, optimizer, folder = "nvme", "nvme", hostile_folder(folder)
    config: dict[str, Any] = {"params": params, "optimizer": optimizer, **more}
    if "nvme" in (params, optimizer):
        config["nvme_paths"] = [str(folder)]
    return config


def least_host_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]
) -> int:
    """The least ``host_memory`` that works, as the CapacityError says it."""
    import infinity

    try:
        infinity.wrap_model(model, optimizer, {**config, "host_memory": 1})
    except infinity.CapacityError as error:
        found = re.search(r"the least that works here is [^()]*\((\d+) bytes\)", str(error))
        assert found, f"the message does not name the least workable budget: {error}"
        return int(found[1])
    raise AssertionError("one byte of host memory was enough")


def with_least(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]
) -> dict[str, Any]:
    return {**config, "host_memory": least_host_memory(model, optimizer, config)}


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables for the length of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def ties_away(master: torch.Tensor) -> torch.Tensor:
    """The nearest bf16 of finite fp32 values, ties away from zero."""
    return (
        ((master.detach().contiguous().view(torch.int32) + 0x8000) >> 16)
        .to(torch.int16)
        .view(torch.bfloat16)
    )


def swap_files(folder: Path, pid: int | str = "self") -> list[Path]:
    """Files without a name in ``folder`` that the process ``pid`` has open: paths by which they can
    be read and written."""
    found = []
    for descriptor in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith(f"{folder}/") and target.endswith(" (deleted)"):
                found.append(descriptor)
    return found


def leftovers(folder: Path) -> list[str]:
    """What a job has left in a folder of nvme_paths: names, and files without one that are still
    open."""
    while gc.collect():  # what only a graph holds is found after the graph is gone
        pass
    inner = folder / "hostile"
    names = set(os.listdir(folder)) - {inner.name}
    names |= set(os.listdir(inner)) if inner.is_dir() else set()
    return sorted(names) + [str(path) for path in swap_files(folder)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparisons that see NaN and the sign of zero."""
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors differ in dtype, shape or any bit, or that only one side has."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or (one[name].dtype, one[name].shape) != (other[name].dtype, other[name].shape)
        or not torch.equal(bits(one[name]), bits(other[name]))
    )


# --------------------------------------------------------------------------------------------------
# Children
# --------------------------------------------------------------------------------------------------


class ChildDied(AssertionError):
    """A child was killed by a signal (a crash), or had to be (a hang)."""


class ChildRaised(AssertionError):
    """A child ended with an exception. ``kind`` is its class name, ``text`` its message."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


def fork() -> int:
    """``os.fork()``, for a child that may run a backward. With an accelerator torch refuses that:
    the test is left out."""
    if torch.accelerator.is_available():
        raise unittest.SkipTest("autograd's threads of an accelerator do not survive a fork")
    return os.fork()


def start_child(work: Callable[[], Any]) -> tuple[int, int]:
    """Forks; the child runs ``work`` and sends what it returns. Its process id, and the pipe to
    read from."""
    # or the child would find garbage of the parent's, and clean up what is not its own
    gc.collect()
    reader, writer = os.pipe()
    child = fork()
    if child:
        os.close(writer)
        return child, reader
    try:
        gc.freeze()
        faulthandler.disable()  # a crash is the parent's to report, in one line
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        torch.set_num_threads(1)
        os.close(reader)
        try:
            answer = ("returned", work())
        except BaseException as error:  # noqa: BLE001 - the parent tells
            answer = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
    finally:
        os._exit(0)


def in_child(work: Callable[[], Any], *, seconds: float = 60) -> Any:
    """What ``work()`` returns in a child. Raises ChildDied after a crash or a hang, ChildRaised
    after an exception."""
    child, reader = start_child(work)
    received, deadline, hung = b"", time.monotonic() + seconds, False
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = True
                os.kill(child, signal.SIGKILL)
                break
            if not (part := pipe.read(1 << 16)):
                break
            received += part
    _, status = os.waitpid(child, 0)
    if hung:
        raise ChildDied(f"no answer within {seconds} s: it hangs")
    if os.WIFSIGNALED(status):
        raise ChildDied(f"killed by {signal.Signals(os.WTERMSIG(status)).name}")
    kind, value = pickle.loads(received)
    if kind == "raised":
        raise ChildRaised(*value)
    return value


def survey(
    cases: Iterable[str], check: Callable[[str], None], *, seconds: float = 60
) -> dict[str, str]:
    """Runs ``check(case)`` for every case, in as few children as there are crashes and hangs. What
    went wrong, by case; a case that passed is not in it."""
    waiting, complaints = list(cases), {}
    while waiting:
        reached = None

        def work(waiting: tuple[str, ...] = tuple(waiting)) -> None:
            for case in waiting:
                yield_to_parent((case, None))
                try:
                    check(case)
                except BaseException as error:  # noqa: BLE001 - the parent tells
                    yield_to_parent((case, f"{type(error).__name__}: {error}"))

        gc.collect()
        reader, writer = os.pipe()
        child = fork()
        if not child:
            try:
                os.close(reader)
                gc.freeze()
                faulthandler.disable()
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                torch.set_num_threads(1)
                with os.fdopen(writer, "wb") as pipe:

                    def yield_to_parent(message: tuple[str, str | None]) -> None:
                        pickle.dump(message, pipe)
                        pipe.flush()

                    work()
                    yield_to_parent(("", None))
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            received, ended = b"", False
            while not ended and select.select([pipe], [], [], seconds)[0]:
                part = pipe.read(1 << 16)
                ended = not part
                received += part
        if not ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        stream = io.BytesIO(received)
        with contextlib.suppress(EOFError):
            while True:
                case, complaint = pickle.load(stream)
                reached = case
                if complaint is not None:
                    complaints[case] = complaint
        if reached == "":
            return complaints
        assert reached is not None, "a child said nothing at all"
        crash = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "nothing"
        complaints[reached] = (
            "it hangs" if not ended else f"it crashes: the process was killed by {crash}"
        )
        waiting = waiting[waiting.index(reached) + 1 :]
    return complaints
