"""Jobs in which ranks part in the middle of a verified pass (see `ranks`). Started by torchrun
with the folder of the launch."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from inside import parts_of
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

from lines import is_line
from passed import passed
from ranks import serve

import infinity
from infinity.core.grads.whole import WholeGradients
from infinity.core.run.staging_slots import StagingSlots
from infinity.core.run.step_counter import StepCounter
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.unit import ParamUnit
from infinity.ranks import transfer, tree
from infinity.ranks.channel import Channel, SyncPoint
from infinity.ranks.collective_trace import CollectiveTrace
from infinity.tools.plan.cluster import edges_of, gathers_of

AGREED = 4  # steps after which passes are verified


class Blocks(nn.Module):
    """Six blocks, each a unit, run in the order that is asked for, and a parameter that is used
    when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(
        self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5), scaled: bool = False
    ) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return (x * self.scale if scaled else x).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def data(step: int, of_rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + of_rank))


def wrap(shard: str, tight: bool, mesh: Any = None, **options: Any) -> tuple[Any, Any]:
    """Wraps the blocks. ``tight``: in the least device memory that works, so that the backward
    gathers, too."""
    config = {
        "params": "host",
        "optimizer": "host",
        "shard": shard,
        "units": ["Linear"],
    } | options
    if tight:
        try:
            model = build()
            infinity.wrap_model(model, adamw(model), config | {"device_memory": 1}, mesh=mesh)
        except infinity.CapacityError as error:
            config["device_memory"] = int(
                re.search(r"works here is [^()]*\((\d+) bytes", str(error))[1]
            )
    model = build()
    return infinity.wrap_model(model, adamw(model), config, mesh=mesh)


def in_turn(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: int, steps: int, **how: Any
) -> None:
    """What one process does to be equal to ``world`` ranks. ``how``: of a step and a rank, what the
    forward is given."""
    for step in range(steps):
        for rank in range(world):
            (
                model(
                    data(step, rank),
                    **{key: choose(step, rank, world) for key, choose in how.items()},
                )
                / world
            ).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Own(Exception):
    """What a user's own code raises."""


def parts(
    how: str,
    shard: str = "parameters",
    children: int = 32,
    deaf: bool = False,
    replicas: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains until passes are verified; then the last rank does something else, once. Every rank
    tries its step again until it succeeds."""
    tree.CHILDREN = children
    if deaf:
        Channel.sees_alarm = lambda self: False
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = (
        dist.device_mesh.init_device_mesh(
            "cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        if replicas
        else None
    )
    model, optimizer = wrap(shard, tight=True, mesh=mesh, **options)
    collective_trace = parts_of(model).ranks.dp_group.collective_trace
    said, verified, todo = [], [], how if rank == world - 1 else ""

    def attempt(step: int) -> None:
        nonlocal todo
        doing, todo = (todo, "") if step == AGREED else ("", todo)
        order = {
            "another order": (0, 1, 3, 2, 4, 5),
            "leaves out": (0, 1, 3, 4, 5),
            "fewer": (0, 1),
        }.get(doing, (0, 1, 2, 3, 4, 5))
        if doing == "evaluates":
            with torch.no_grad():
                model(data(step, rank))
        if doing == "reads":
            with infinity.full_params(model, ["blocks.4"]):
                pass
        hooks = []
        if doing == "raises in a forward":
            hooks = [model.blocks[3].register_forward_pre_hook(fail)]
        if doing == "raises in a backward":
            hooks = [
                model.blocks[3].register_forward_hook(
                    lambda module, args, output: output.register_hook(fail) and None
                )
            ]
        try:
            loss = model(data(step, rank), order)
            verified.append(collective_trace.is_verified)
            if doing == "skips a backward":
                raise Own("skipped")
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        if doing == "skips a step":
            raise Own("skipped")
        optimizer.step()
        optimizer.zero_grad()

    for step in range(AGREED + 4):
        for _ in range(4):
            try:
                attempt(step)
                break
            except (Own, infinity.UsageError) as error:
                said.append((step, type(error).__name__, str(error)))
                optimizer.zero_grad()
    weights = state_of(model)
    infinity.unwrap_model(model, optimizer)
    single = build()
    in_turn(single, adamw(single), world, AGREED + 4)
    plain = state_of(single)
    off = max(float((weights[name] - plain[name]).abs().max()) for name in plain)
    return {"said": said, "off": off, "agreed": verified}


def measured(tight: bool, shard: str | None = None) -> dict[str, Any]:
    """The first rank measures alone, before steps, between two micro-batches and after the last
    step, as scripts do that keep all weights on each rank. ``shard``: the twin, in which it has
    not all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    names = ("dp_replicate", "dp_shard")
    mesh = dist.init_device_mesh("cpu", (world, 1), mesh_dim_names=names) if not shard else None
    model, optimizer = wrap(shard or "parameters", tight=tight, mesh=mesh)
    single = build()
    stepping = adamw(single)
    losses, expected = [], []

    def measure(step: int) -> None:
        if rank == 0:
            with torch.no_grad():
                losses.extend(model.eval()(data(step, 7)).item() for _ in range(2))
            model.train()

    try:
        for step in range(AGREED + 4):
            for micro in range(2):
                if (step + micro) % 3 == 1:
                    measure(step)
                    with torch.no_grad():
                        expected += [single(data(step, 7)).item()] * 2
                (model(data(step, 2 * rank + micro)) / 2).backward()
            for of_rank in range(2 * world):
                (single(data(step, of_rank)) / (2 * world)).backward()
            for each in (optimizer, stepping):
                each.step()
                each.zero_grad()
    except infinity.UsageError as error:
        return {"said": str(error)}
    measure(AGREED)
    expected += [single(data(AGREED, 7)).item()] * 2
    weights, plain = state_of(model), state_of(single)
    off = max(float((weights[name] - plain[name]).abs().max()) for name in plain)
    apart = max((abs(one - other) for one, other in zip(losses, expected)), default=0.0)
    return {"off": max(off, apart), "count": len(losses)}


def left_in_a_backward() -> list[str]:
    """The last rank leaves without a word in a backward; what the others are told, then and of all
    they do next."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = wrap("gradients", tight=True)
    for step in range(2):
        model(data(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == world - 1:
        model.blocks[3].register_forward_hook(
            lambda module, args, output: output.register_hook(lambda grad: os._exit(3)) and None
        )
    said = []
    for use in (
        lambda: model(data(2, rank)).backward(),
        optimizer.zero_grad,
        lambda: model(data(2, rank)),
        optimizer.zero_grad,
    ):
        try:
            use()
            said.append("done")
        except infinity.InfinityError as error:
            said.append(type(error).__name__)
    return said


def goes_back(how: str, zeros: bool = False, counts_on: bool = False) -> dict[str, Any]:
    """With shard="optimizer", where a backward meets nobody: the last rank leaves out a backward
    that the others run. Everybody clears the gradients and makes the step again. ``counts_on``: the
    twin, which only a step sets back."""
    with (
        mock.patch.object(StepCounter, "forget_backwards", lambda self: None)
        if counts_on
        else nullcontext()
    ):
        rank, world = dist.get_rank(), dist.get_world_size()
        model, optimizer = wrap("optimizer", tight=False)
        said: list[str] = []

        def clear() -> None:
            if how == "by the model":
                model.zero_grad(set_to_none=not zeros)
            else:
                optimizer.zero_grad(set_to_none=not zeros)

        def attempt(step: int, fails: bool) -> None:
            loss = model(data(step, rank))
            if not fails or rank < world - 1:
                loss.backward()
            if not fails:
                optimizer.step()

        for step in range(5):
            for fails in (True, False) if step in (1, 3) else (False,):
                try:
                    attempt(step, fails)
                except infinity.UsageError as error:
                    said.append(str(error))
                clear()
        if counts_on:
            return {"said": said}
        weights = state_of(model)
        infinity.unwrap_model(model, optimizer)
    single = build()
    in_turn(single, adamw(single), world, 5)
    plain = state_of(single)
    return {
        "said": said,
        "off": max(float((weights[name] - plain[name]).abs().max()) for name in plain),
    }


STRUCK = {  # what lies between a meeting and the collectives that it is for
    "bulk": {"_gather", "_go_on_with", "reduce"},
    "pass_agreement": {"is_next", "_meet_for"},
    "kinds": {"begin", "count_begun", "describe", "bytes_of", "_group_of"},
    "channel": {"wait", "_flags_of"},
    "collective_trace": {"expect", "start", "_note"},
    "reducer": {"_start_before", "_start", "_average", "_reduce"},
}
# Values pass through it, too, for which everybody waits without hearing of anything.
OF_EXCHANGES = {"bytes_of"}
ERRORS = (KeyboardInterrupt, MemoryError, Own)


class Lines:
    """Notes the lines of STRUCK that run, each with the collective that it is run for, or raises at
    one of them."""

    def __init__(self, target: tuple | None = None, error: type[BaseException] = Own):
        self.seen: dict[tuple, None] = {}
        self._target, self._error = target, error

    def run(self, work: Callable[[], None]) -> None:
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(None)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        return (
            self._line
            if frame.f_code.co_name in STRUCK.get(Path(frame.f_code.co_filename).stem, ())
            else None
        )

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if is_line(frame, event) and not (
            frame.f_code.co_name in OF_EXCHANGES and not _purpose(frame)
        ):
            place = Path(frame.f_code.co_filename).stem, frame.f_lineno, _purpose(frame)
            self.seen[place] = None
            if place == self._target:
                self._target = None
                raise self._error("struck")
        return self._line


def _purpose(frame: Any) -> str:
    while frame is not None and frame.f_code.co_name not in (
        "_gather",
        "reduce",
        "offer",
    ):
        frame = frame.f_back
    return frame.f_code.co_name if frame is not None else ""


def struck(shard: str, every: int = 1, numb: bool = False, **options: Any) -> dict[str, Any]:
    """Steps of which none is verified; in each an exception strikes the last rank at another line
    between a meeting and a collective, of ``every`` so many at one. Every rank tries its step again
    until it succeeds. ``numb``: the twin, where that rank's next meeting does not say so.
    """
    with ExitStack() as changed:
        changed.enter_context(
            mock.patch.object(transfer, "HEARING_INTERVAL", timedelta(milliseconds=20))
        )
        changed.enter_context(mock.patch.object(CollectiveTrace, "digest_of", lambda self, key: 0))
        if numb:
            changed.enter_context(
                mock.patch.object(
                    CollectiveTrace, "has_diverged", property(lambda self: self.is_open)
                )
            )
        return _struck(shard, every, options)


def _struck(shard: str, every: int, options: dict[str, Any]) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = wrap(shard, tight=True, **options)
    said: list[tuple] = []

    def attempt(step: int) -> None:
        model(data(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    lines = Lines()
    attempt(0)  # which agrees on what later steps do not ask again
    lines.run(lambda: attempt(1))
    places: list = [list(lines.seen)[::every]]
    dist.broadcast_object_list(places, world - 1)
    for step, place in enumerate(places[0], 2):
        striker = Lines(place if rank == world - 1 else None, ERRORS[step % len(ERRORS)])
        for number in range(6):
            try:
                (
                    striker.run(partial(attempt, step))
                    if number == 0 and rank == world - 1
                    else attempt(step)
                )
                break
            except (*ERRORS, infinity.UsageError) as error:
                said.append((step, place, type(error).__name__, str(error)))
                optimizer.zero_grad()
        else:
            raise AssertionError(f"no way on behind {place}: {said[-6:]}")
    weights = state_of(model)
    infinity.unwrap_model(model, optimizer)
    single = build()
    in_turn(single, adamw(single), world, len(places[0]) + 2)
    plain = state_of(single)
    off = max(float((weights[name] - plain[name]).abs().max()) for name in plain)
    return {"said": said, "off": off, "places": places[0]}


def fail(*_: Any) -> None:
    raise Own("the user's own")


def changing_order(step: int, rank: int, world: int) -> tuple[int, ...]:
    """All ranks leave a block out in some steps."""
    return (0, 1, 3, 4, 5) if step in (4, 5, 8) else (0, 1, 2, 3, 4, 5)


def changing_use(step: int, rank: int, world: int) -> bool:
    """The last rank, or none, uses a parameter."""
    return step % 3 == 1 and rank == world - 1


def changes(shard: str) -> dict[str, Any]:
    """Steps that change on all ranks together, and an evaluation between a backward and its
    step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = wrap(shard, tight=True)
    grads = []
    for step in range(10):
        model(
            data(step, rank), changing_order(step, rank, world), changing_use(step, rank, world)
        ).backward()
        grads.append(model.scale.grad is not None)
        if step == 6:
            with torch.no_grad():
                model(data(step, rank))
        optimizer.step()
        optimizer.zero_grad()
    weights = state_of(model)
    infinity.unwrap_model(model, optimizer)
    return {"weights": weights, "grads": grads}


def kept(count: list[int]) -> Callable[[WholeGradients, ParamUnit, FlatParam], torch.Tensor]:
    """Counts how many flat params have a whole gradient on the device at once: the most, in
    ``count``."""
    take = WholeGradients.take

    def counting(self: WholeGradients, unit: ParamUnit, flat_param: FlatParam) -> torch.Tensor:
        whole = take(self, unit, flat_param)
        count[0] = max(count[0], len(self._memory))
        return whole

    return counting


def interrupted() -> dict[str, Any]:
    """Steps, and before two of them all ranks read parameters: of each the most whole gradients at
    once, its meetings in forward and backward, and whether it went as it was verified."""
    rank, most, met, found = dist.get_rank(), [0], [0], []
    take, begin = WholeGradients.take, SyncPoint.begin
    WholeGradients.take = kept(most)
    model, optimizer = wrap("parameters", tight=True)
    collective_trace = parts_of(model).ranks.dp_group.collective_trace

    def counting(self: SyncPoint) -> None:
        met[0] += 1
        begin(self)

    SyncPoint.begin = counting
    try:
        for step in range(8):
            if step in (4, 5):
                with infinity.full_params(model, ["blocks.4"]):
                    pass
            most[0] = met[0] = 0
            model(data(step, rank)).backward()
            found.append((most[0], met[0], collective_trace.was_followed))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        WholeGradients.take, SyncPoint.begin = take, begin
    infinity.unwrap_model(model, optimizer)
    return {"found": found}


def unlike_the_last(parts: bool) -> dict[str, Any]:
    """A pass that was verified as one without a backward, and has one; ``parts``: of the last rank
    it reaches the last blocks only, at first."""
    rank, most, at_once, told, verified = dist.get_rank(), [0], [], [], []
    take, WholeGradients.take = WholeGradients.take, kept(most)
    model, optimizer = wrap("parameters", tight=True)
    collective_trace = parts_of(model).ranks.dp_group.collective_trace

    def attempt(step: int, is_first: bool) -> None:
        cut = parts and is_first and step == 3 and rank == dist.get_world_size() - 1
        hook = model.blocks[3].register_forward_hook(
            lambda module, args, output: output.detach() if cut else None
        )
        loss = model(data(step, rank))
        hook.remove()
        if is_first:
            verified.append(collective_trace.is_verified and not collective_trace.is_open)
        if step != 1:  # which goes as the fourth is expected to
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        for step in range(5):
            most[0] = 0
            for number in range(2):
                try:
                    attempt(step, number == 0)
                    break
                except infinity.UsageError as error:
                    told.append((step, str(error)))
                    optimizer.zero_grad()
            at_once.append(most[0])
    finally:
        WholeGradients.take = take
    infinity.unwrap_model(model, optimizer)
    return {"told": told, "agreed without a backward": verified, "kept": at_once}


def counted(blocks: int, micro: int = 1, streams: bool = False, **options: Any) -> dict[str, Any]:
    """Meetings of every step of a model of so many blocks, with so many micro-batches.
    ``streams``: units are stepped in the backward."""
    met, begin = 0, SyncPoint.begin

    def counting(self: SyncPoint) -> None:
        nonlocal met
        met += 1
        begin(self)

    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(blocks)))
    config = {"params": "host", "optimizer": "host", "units": ["Linear"]} | options
    model, optimizer = infinity.wrap_model(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config
    )
    SyncPoint.begin, found = counting, []
    try:
        for _ in range(6):
            met = 0
            for _ in range(micro):
                with optimizer.step_in_backward() if streams else contextlib.nullcontext():
                    model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(met)
    finally:
        SyncPoint.begin = begin
    infinity.unwrap_model(model, optimizer)
    return {"met": found}


def late_slots(config: dict, steps: int = 8) -> dict[str, Any]:
    """A rank whose staging memory is in use, when it would read ahead, at other times than the
    other's."""
    model = build()
    model, optimizer = infinity.wrap_model(model, adamw(model), config)
    chance, refused, real = random.Random(dist.get_rank()), 0, StagingSlots.try_take

    def try_slots(self: StagingSlots, unit: ParamUnit) -> Any:
        nonlocal refused
        ahead = sys._getframe(1).f_code.co_name == "fetch_ahead"
        if ahead and chance.random() < 0.3:
            refused += 1
            return None
        return real(self, unit)

    StagingSlots.try_take = try_slots
    try:
        for step in range(steps):
            model(data(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        StagingSlots.try_take = real
    weights = state_of(model)
    infinity.unwrap_model(model, optimizer)
    return {"weights": weights, "refused": refused}


def moved(config: dict, blocks: int = 8) -> dict[str, Any]:
    """Bytes of a step in the steady state, over every edge and from other ranks, and what the plan
    of the same job predicts."""
    model = nn.Sequential(
        *(nn.Linear(128, 128, bias=False) for _ in range(blocks))
    )  # each rank has half of each
    config = {"params": "host", "optimizer": "host", "units": ["Linear"]} | config
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)
    engine, counted = parts_of(model).engine, []
    for step in range(6):
        model(data(step, dist.get_rank()).repeat(1, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.wait_idle()
        stats = infinity.stats(model).as_dict()
        counted.append(
            {name: edge["nbytes"] for name, edge in stats["edges"].items()}
            | passed(stats["collectives"])
        )
    found = {name: nbytes - counted[-2].get(name, 0) for name, nbytes in counted[-1].items()}
    gathers = gathers_of(parts_of(engine).planned.plan, parts_of(engine).planned.sizes)
    predicted = edges_of(parts_of(engine).planned.plan, parts_of(engine).planned.sizes, gathers)
    infinity.unwrap_model(model, optimizer)
    return {"found": found, "predicted": predicted, "gathers": gathers}


if __name__ == "__main__":
    serve(globals())
