"""Soak: random models, homes, budgets, options and faults, one after the other in one process,
against device homes.

Every round is decided by its seed. ``INFINITY_SOAK_STEPS`` sets how many optimizer steps the long
test takes (2,000).

**round**: one model trained twice by the same script, with everything on the device, and by a
random configuration. **script**: what happens in each step: micro-batches, clipping, an evaluation,
a checkpoint taken and loaded, ... **mild fault**: one that a transfer survives; **hard fault**: one
that must end in a typed error, never in other numbers. **strike**: a real signal whose handler
raises KeyboardInterrupt at a random moment of a forward or backward, after which the script goes on
with zero_grad; **fork**: a child like a data loader's worker, which drops what it has and ends.
Neither changes a bit.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from inside import parts_of

pytest.importorskip("transformers", reason="the zoo is made of transformers models")

from models import differing, environment, leftovers
from zoo import ZOO, make_batch, make_model, seed_everything

import infinity

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

HOMES = ("auto", "device", "host", "nvme")
MILD_FAULTS = (
    "",
    "",
    "short_transfer=0.3",
    "delay=0.3,delay_seconds=0.0005",
    "reorder=0.4",
    "short_transfer=0.2,reorder=0.2",
)
HARD_FAULTS = ("eio=0.05", "bit_flip=0.05", "lost_write=0.05", "enospc=0.05")
LEAK_NBYTES = 16 * 1024 * 1024  # what the allocator may still move about


def random_config(rng: random.Random, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {
        "params": rng.choice(HOMES),
        "optimizer": rng.choice(HOMES),
        "nvme_paths": [str(folder)],
    }
    config["activations"] = rng.choice(["auto", "device", "host", "nvme"])
    config["checksums"] = rng.random() < 0.8
    if rng.random() < 0.5:
        config["host_memory"] = rng.choice([8, 16, 64]) * 2**20
    if rng.random() < 0.3:
        config["device_memory"] = rng.choice([1, 4, 64]) * 2**20
    if rng.random() < 0.3:
        config["trace"] = str(folder.parent / "trace.json")
    return config


def random_script(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "seed": rng.randrange(4),
            "micro": rng.choice([1, 1, 2]),
            "clip": rng.choice([None, 0.5, 1e6]),
            "eval": rng.random() < 0.2,
            "reload": rng.random() < 0.15,
            "keep": rng.random() < 0.2,
            "look": rng.random() < 0.2,
            "strike": rng.uniform(1e-4, 0.08) if rng.random() < 0.3 else None,
            "fork": rng.random() < 0.1,
        }
        for _ in range(rng.randrange(2, 7))
    ]


def strike(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    seconds: float,
    work: Callable[[], None],
) -> None:
    """Has a signal end ``work`` after so many seconds, or at its end; then goes on as people do."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)
    for name, buffer in model.named_buffers():  # a forward changes them, in plain torch too
        buffer.copy_(buffers[name])
    optimizer.zero_grad()


def fork() -> None:
    """A child that drops what it has."""
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def play(
    name: str,
    script: list[dict[str, Any]],
    config: dict[str, Any],
    folder: Path,
    *,
    disturbed: bool = False,
) -> tuple[list, dict, dict]:
    """Trains one model by the script, ``disturbed`` by strikes and forks. Returns losses and norms,
    the state dict, the moments."""
    entry = ZOO[name]
    model = make_model(entry, 5).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1
    )
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    seen: list[torch.Tensor] = []
    for number, step in enumerate(script):
        if step["eval"]:
            with torch.no_grad():
                seed_everything(77)
                seen.append(model.eval()(**make_batch(entry, 9)).loss.clone())
            model.train()
        if disturbed and step["strike"] and not (number and script[number - 1]["keep"]):
            strike(
                model,
                optimizer,
                step["strike"],
                lambda: model(**make_batch(entry, 3)).loss.backward(),
            )
        if disturbed and step["fork"]:
            fork()
        for micro in range(step["micro"]):
            seed_everything(100 * number + micro)
            loss = model(**make_batch(entry, step["seed"] + micro)).loss / step["micro"]
            loss.backward()
            seen.append(loss.detach().clone())
        if step["clip"]:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), step["clip"]).clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=not step["keep"])
        if step["look"]:
            first = next(iter(dict(model.named_parameters())))
            with infinity.full_params(model, [first]) as params:
                seen.append(params[first].detach().clone())
        if step["reload"]:
            optimizer.zero_grad()
            infinity.save_checkpoint(
                folder / "checkpoint", model, optimizer, extra={"number": number}, overwrite=True
            )
            assert infinity.load_checkpoint(folder / "checkpoint", model, optimizer) == {
                "number": number
            }
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {
        f"{i}.{key}": value.clone()
        for i, of_one in optimizer.state_dict()["state"].items()
        for key, value in of_one.items()
        if isinstance(value, torch.Tensor)
    }
    looked = any(
        step["look"] for step in script
    )  # what a user gathers is charged, but in nobody's plan
    at_home = sum(
        array.nbytes
        for unit in parts_of(model).units
        for flat in unit.flat_params
        for array in flat.arrays.values()
    )
    for tier_name, tier in infinity.stats(model).tiers.items():
        kept = at_home if tier_name == "host" else 0  # at most, by a load, for a moment
        assert tier.peak_nbytes <= tier.planned_nbytes + kept or (looked and tier_name == "device")
        assert tier.budget_nbytes is None or tier.peak_nbytes <= tier.budget_nbytes
    return seen, state, moments


def soak(steps: int, folder: Path, *, replayed: int = 10) -> None:
    swap = folder / "swap"
    swap.mkdir(parents=True)
    names = [name for name, entry in ZOO.items() if not entry.missing()]
    process, taken, seed, settled = psutil.Process(), 0, 0, None
    outcomes = {"same bits": 0, "refused": 0, "typed error": 0}
    while taken < steps:
        rng = random.Random(seed)
        name, script, config = rng.choice(names), random_script(rng), random_config(rng, swap)
        hard = rng.random() < 0.15 and config["checksums"]
        faults = rng.choice(HARD_FAULTS if hard else MILD_FAULTS)
        io = rng.choice(["auto", "threads"])
        what = f"seed {seed}: {name}, {config}, faults {faults!r}, {io}"
        expected = play(name, script, {"params": "device", "optimizer": "device"}, folder)
        try:
            with environment(INFINITY_FAULTS=faults and f"seed={seed},{faults}", INFINITY_IO=io):
                found = play(name, script, config, folder, disturbed=not hard)
        except infinity.CapacityError:
            outcomes["refused"] += 1  # the budget is too small, and says so before anything changed
        except (infinity.StorageError, infinity.CorruptionError):
            assert hard, what
            outcomes["typed error"] += 1
        else:
            assert all(torch.equal(a, b) for a, b in zip(expected[0], found[0], strict=True)), what
            assert (
                differing(found[1], expected[1]) == [] and differing(found[2], expected[2]) == []
            ), what
            outcomes["same bits"] += 1
        taken += len(script)
        seed += 1
        gc.collect()
        assert leftovers(swap) == [], what
        if seed == 20:
            settled = process.num_fds(), process.num_threads()
        if settled and seed > 20:
            assert process.num_fds() <= settled[0] + 2, what
    print(outcomes)
    assert outcomes["same bits"] > seed / 3
    held = []
    for _ in range(3):  # models that were all seen before: nothing is imported or cached any more
        for seed in range(replayed):
            rng = random.Random(seed)
            play(
                rng.choice(names),
                random_script(rng),
                {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(swap)]},
                folder,
            )
        gc.collect()
        held.append(process.memory_info().rss)
    assert held[2] - held[1] < LEAK_NBYTES, held


@pytest.mark.slow
def test_short_soak(tmp_path):
    """Method: 30 steps of random rounds; same bits or the right error each time, and nothing is
    left behind."""
    soak(30, tmp_path / "soak", replayed=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_soak(tmp_path):
    """Method: the same, 2,000 steps."""
    soak(int(os.environ.get("INFINITY_SOAK_STEPS", "2000")), tmp_path / "soak")


def test_a_soak_tells_other_numbers(tmp_path, monkeypatch):
    """The twin: an engine whose gradients lose one bit is found out in a few rounds."""
    from infinity.core.grads.bank import GradientBank

    land = GradientBank.land

    def careless(self, handle, grad):
        if parts_of(handle).config.params != "device":
            grad = grad * (1 + 2**-7)
        land(self, handle, grad)

    monkeypatch.setattr(GradientBank, "land", careless)
    with pytest.raises(AssertionError):
        soak(30, tmp_path / "soak")
