"""Stats, budgets, and what is left behind when a model goes."""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path

import prepared
import pytest
import torch
from contract_cases import LR, MIB, SEED, held, step, wrapped
from models import (
    TIERS,
    ChildRaised,
    at_home,
    differing,
    environment,
    in_child,
    least_host_memory,
    leftovers,
    loss_of,
    swap_files,
    tokens,
    transformer,
    with_least,
)
from runs import adamw
from torch import nn

import infinity


def test_stats_has_the_fields_that_were_promised(tmp_path):
    """Method: train from disk; every field is there, has moved in the right direction, and
    as_dict() is JSON."""
    model, optimizer = wrapped("nvme", tmp_path)
    fresh = infinity.stats(model)
    assert fresh.steps == 0 and isinstance(fresh, infinity.Stats)
    for at in range(3):
        step(model, optimizer, at)
    stats = infinity.stats(model)
    assert set(stats.edges) == {"nvme->host", "host->nvme", "host->device", "device->host"}
    for name, edge in stats.edges.items():
        assert (
            edge.nbytes > fresh.edges[name].nbytes
            and edge.busy_seconds > 0
            and edge.stall_seconds >= 0
        ), name
    assert set(stats.tiers) == set(TIERS)
    for tier in stats.tiers.values():
        assert 0 <= tier.peak_nbytes <= tier.planned_nbytes
    assert stats.tiers["host"].budget_nbytes > 0 and stats.tiers["device"].budget_nbytes is None
    assert stats.steps == 3 and stats.step_seconds > 0 and stats.bound_seconds > 0
    assert isinstance(stats.bottleneck, str) and stats.bottleneck.count(".") >= 1
    plain = json.loads(json.dumps(stats.as_dict()))
    assert plain["tiers"]["nvme"]["peak_nbytes"] == stats.tiers["nvme"].peak_nbytes
    assert set(plain) >= {"edges", "tiers", "steps", "step_seconds", "bound_seconds", "bottleneck"}
    parameters = sum(p.nbytes for p in transformer(SEED).parameters())
    moved = stats.edges["nvme->host"].nbytes - fresh.edges["nvme->host"].nbytes
    assert moved >= 3 * 3 * parameters, (
        "three steps read weights and both moments at least once each"
    )
    with pytest.raises(infinity.UsageError):
        infinity.stats(nn.Linear(2, 2))


def test_counts_of_bytes_are_exact_where_the_design_gives_them(tmp_path):
    """Method: the split master's table of bytes per parameter (14 read, 12 written with one pass
    over the weights) against what steps really move, up to padding."""
    model, optimizer = infinity.wrap_model(
        *(lambda m: (m, adamw(m, LR)))(transformer(SEED)),
        at_home("nvme", "nvme", tmp_path, param_dtype="bf16"),
    )
    for at in range(2):
        step(model, optimizer, at)
    infinity.save_checkpoint  # settle below without moving more than a step's bytes
    before = infinity.stats(model).edges
    for at in range(4):
        step(model, optimizer, at)
    with torch.no_grad():
        model(tokens(1))
    after = infinity.stats(model).edges
    elements = sum(p.numel() for p in model.parameters())
    read = (after["nvme->host"].nbytes - before["nvme->host"].nbytes) / 4 / elements
    written = (after["host->nvme"].nbytes - before["host->nvme"].nbytes) / 4 / elements
    assert 10 <= read <= 1.35 * (2 + 2 + 2 + 2 + 8), f"{read:.1f} bytes read per parameter and step"
    assert 10 <= written <= 1.35 * 12, f"{written:.1f} bytes written per parameter and step"


@pytest.mark.parametrize("homes", [(p, o) for p in TIERS for o in TIERS], ids="-".join)
def test_steady_state_takes_nothing_more(homes, tmp_path):
    """Method: after the second step the tiers' peaks and the open descriptors stay what they are,
    over training, eval, clipping and state dicts."""
    model = transformer(SEED)
    optimizer = adamw(model, LR)
    config = at_home(*homes, tmp_path)
    if "nvme" in homes:
        config = with_least(model, optimizer, config)
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    seen = []
    for at in range(6):
        torch.manual_seed(at)
        loss_of(model, tokens(SEED + at)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens(0))
        if at >= 2:
            model.state_dict(), optimizer.state_dict()
        tiers = infinity.stats(model).tiers
        seen.append(
            (
                {name: tier.peak_nbytes for name, tier in tiers.items()},
                len(os.listdir("/proc/self/fd")),
            )
        )
    assert seen[1:] == [seen[1]] * 5


GROWTH = """
import os, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from torch import nn
import infinity

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def build(width, blocks):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))

def run(model, optimizer, width):
    for step in range(3):
        dtype = next(model.parameters()).dtype
        model(torch.ones(1, width, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

small = build(64, 3)
run(*infinity.wrap_model(small, torch.optim.AdamW(small.parameters()), {config!r}), 64)  # what torch loads once
del small
model = build({width}, {blocks})
before = rss()
model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), {config!r} | {{"host_memory": {budget}}})
wrapped = rss()
run(model, optimizer, {width})
after = rss()
stats = infinity.stats(model)
print(after - before, stats.tiers["host"].peak_nbytes, stats.tiers["device"].peak_nbytes, wrapped - before)
"""  # noqa: E501


@pytest.mark.parametrize("dtype", ["bf16", pytest.param(None, marks=pytest.mark.slow)])
def test_the_process_grows_by_no_more_than_its_budget(dtype, tmp_path):
    """Method: in a process of its own, wrap a model of 96 MB (fp32) on meta, with everything on
    disk and a host budget of 24 MiB more than the least; resident memory after three steps has
    grown by no more than the budget, the gathered weights, one unit's gradients and activations of
    torch's own, and 32 MiB."""

    width, blocks = 1024, 24
    config = at_home("nvme", "nvme", tmp_path, param_dtype=dtype)
    with torch.device("meta"):
        probe = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        )
    budget = least_host_memory(probe, torch.optim.AdamW(probe.parameters()), config) + 24 * MIB
    paths = [
        str(Path(infinity.__file__).parents[1]),
        *map(str, Path(__file__).parents[2].glob("support/*/")),
    ]
    script = GROWTH.format(paths=paths, config=config, width=width, blocks=blocks, budget=budget)
    done = prepared.run("-c", prepared.GIVES_BACK + script)
    assert done.returncode == 0, done.stderr
    grown, host, device, wrapping = map(int, done.stdout.split())
    assert host <= budget
    unit = 4 * (width * width + width)
    allowed = budget + device + 2 * unit + 32 * MIB
    assert grown <= allowed, (
        f"grew by {grown / MIB:.0f} MiB, {wrapping / MIB:.0f} in the wrap; {allowed / MIB:.0f}"
        " allowed"
    )
    assert leftovers(tmp_path) == []


def test_the_optimizer_alone_keeps_the_engine_alive(tmp_path):
    """Method: drop the model and keep the optimizer, then the other way round; what is left still
    works."""
    model, optimizer = wrapped("nvme", tmp_path)
    step(model, optimizer)
    del model
    gc.collect()
    state = optimizer.state_dict()
    assert len(state["state"]) > 10 and torch.isfinite(state["state"][0]["exp_avg"]).all()
    del optimizer
    assert leftovers(tmp_path) == []
    model, optimizer = wrapped("nvme", tmp_path)
    step(model, optimizer)
    del optimizer
    gc.collect()
    assert torch.isfinite(step(model))
    assert len(model.state_dict()) > 10


def test_several_wraps_live_side_by_side(tmp_path):
    """Method: three models wrapped on one folder, trained in turns; each has the bits of training
    alone."""
    alone = []
    for seed in range(3):
        model, optimizer = wrapped("nvme", tmp_path, transformer(seed))
        for at in range(2):
            step(model, optimizer, at)
        alone.append(model.state_dict())
        del model, optimizer
    pairs = [wrapped("nvme", tmp_path, transformer(seed)) for seed in range(3)]
    gc.collect()  # after other tests one of the models that are gone has waited for it
    assert len(swap_files(tmp_path)) == 3 and os.listdir(tmp_path) == []
    for at in range(2):
        for model, optimizer in pairs:
            step(model, optimizer, at)
    for (model, _), state in zip(pairs, alone):
        assert differing(model.state_dict(), state) == []
    del pairs, model, optimizer, _
    assert leftovers(tmp_path) == []


def test_a_forked_child_cannot_use_the_model(tmp_path):
    """Method: run a forward in a forked child of the job; the child gets a typed error or right
    numbers, and the parent, whose I/O engine it is, trains on."""

    def work():
        model, optimizer = wrapped("nvme", tmp_path)
        with torch.no_grad():
            expected = loss_of(model.eval(), tokens(1)).item()

        def child():
            with torch.no_grad():
                return loss_of(model, tokens(1)).item()

        try:
            assert in_child(child, seconds=5) == expected
        except ChildRaised as error:
            assert error.kind in ("UsageError", "StorageError", "InfinityError"), error.kind
        step(model.train(), optimizer)
        with torch.no_grad():
            loss_of(model, tokens(1))

    in_child(work, seconds=15)


def test_a_model_runs_in_another_thread(tmp_path):
    """Method: train one step in a second thread, as a notebook or a streamer does; bits of the
    first thread's."""
    states = []
    for threaded in (False, True):
        model, optimizer = wrapped("nvme", tmp_path)
        step(model, optimizer, 0)
        if threaded:
            failed: list[BaseException] = []

            def run(model=model, optimizer=optimizer, failed=failed):
                try:
                    torch.set_num_threads(1)
                    step(model, optimizer, 1)
                except BaseException as error:  # noqa: BLE001 - the test raises it
                    failed.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            assert not failed, failed
        else:
            step(model, optimizer, 1)
        step(model, optimizer, 2)
        states.append(model.state_dict())
        del model, optimizer
    assert differing(*states) == []


@pytest.mark.parametrize("io_engine", ["uring", pytest.param("threads", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "after",
    [
        "wrap",
        "forward",
        "backward",
        "step",
        "exception",
        "generate graph",
        "optimizer first",
        "unwrap",
    ],
)
def test_dropping_model_and_optimizer_frees_everything(after, io_engine, tmp_path):
    """Method: wrap, go on to a given moment, drop every reference and collect; descriptors, threads
    and swap folders are those of before, and so is the memory that the engine held."""
    from infinity import native

    if io_engine == "uring" and native.uring_refusal():
        pytest.skip(native.uring_refusal())

    def work():
        inherited = held(tmp_path)[
            2
            # of the tests before it: conftest keeps the collector from what was there at a module's
            # start
        ]
        with environment(INFINITY_IO=io_engine):
            model, optimizer = wrapped("nvme", tmp_path)  # what a process allocates once
            step(model, optimizer)
            del model, optimizer
            gc.collect()
            before = held(tmp_path)
            assert before[2] == inherited
            model, optimizer = wrapped("nvme", tmp_path)
            assert len(swap_files(tmp_path)) == 1 and swap_files(tmp_path)[0].stat().st_size
            loss = None
            if after == "forward":
                loss = loss_of(model, tokens(SEED))
            elif after == "backward":
                step(model)
            elif after in ("step", "optimizer first"):
                step(model, optimizer)
            elif after == "exception":
                try:
                    model("nonsense")
                except TypeError:
                    pass
            elif after == "generate graph":
                loss = loss_of(model, tokens(SEED))
                step(model, optimizer)
            elif after == "unwrap":
                step(model, optimizer)
                model, optimizer = infinity.unwrap_model(model, optimizer)
            if after == "optimizer first":
                del optimizer
                gc.collect()
                optimizer = None
                with torch.no_grad():
                    model(tokens(1))
            del model, optimizer, loss
            gc.collect()
            assert held(tmp_path) == before
            assert leftovers(tmp_path) == []

    in_child(work)
