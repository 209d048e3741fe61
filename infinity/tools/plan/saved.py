"""Saved: the bytes that the forwards of a rank save for its backwards, beside the state.

They are counted by running layers on meta (:mod:`.on_paper`), and are a term of a plan for a device
on paper. The engine counts them in no budget of an accelerator: its budget is what they leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.machine import limits
from ...core.machine.sizes import format_nbytes
from ...core.machine.tiers import Tier
from ...core.seams import Extension, Term
from ...errors import CapacityError
from ..cli.amounts import format_count
from .blocks import BlocksOnPaper, Choice

SAVED = "saved for the backward"

ROUNDING = 1e-6
ASSUMED = "attention saves no scores; what forwards save stays on the device"
ESTIMATED = (
    "this model cannot be tried on meta: what a layer saves and sends is estimated by its width"
)
# Lays out beside so many saved bytes, with a plan and its units. True: an error has remedies.
LayOut = Callable[[int, bool], tuple[Any, list[Any]]]


@dataclass(frozen=True)
class SavedByForwards:
    """Bytes a token: those that wait for the backward, and those of a layer that it recomputes.
    ``is_counted``: not estimated. ``works``: of a forward, and of its gradients; None: not counted
    by operation."""

    kept: float
    at_once: float
    is_counted: bool
    works: tuple[Any, Any] | None = None

    def compute_seconds(
        self, samples: int, length: int, machine: Any, *, recomputes: bool
    ) -> tuple[float, float] | None:
        """Computes the seconds of a pass on a device of ``machine``, and of its forward; None: by
        sizes they are not known."""
        from .work import has_sizes

        if self.works is None or not has_sizes(machine):
            return None
        forward, backward = (work.seconds(samples, length, machine) for work in self.works)
        return forward * (1 + recomputes) + backward, forward

    @property
    def recomputes(self) -> bool:
        """Whether the backward computes every layer again."""
        return self.at_once > 0

    def nbytes(self, tokens: int) -> int:
        """Counts the bytes of a forward over so many tokens."""
        return int((self.kept + self.at_once) * tokens)


@dataclass(frozen=True)
class Passes:
    """The forwards and backwards of a rank's step, of ``samples`` each. ``left_nbytes``: of the
    device, beside what they save on paper; None: that is in no budget."""

    samples: int
    count: int
    length: int
    recomputes: bool
    saved_nbytes: int
    choice: Choice | None = None  # by operation, of a job with ``recompute``
    left_nbytes: int | None = None
    room_nbytes: int | None = None  # of this machine, beside the state; None: unknown

    @property
    def said(self) -> str:
        """What is saved, and of which tokens."""
        how = "every block recomputed" if self.recomputes else "nothing recomputed"
        how = how if self.choice is None else self.choice.said
        return (
            f"{format_nbytes(self.saved_nbytes)} for the backward of"
            f" {format_count(self.samples, 'sample')} of {self.length:,} tokens, {how}"
        )

    @property
    def fits(self) -> bool:
        """Whether what is saved has room beside the state, as far as that is known."""
        return self.room_nbytes is None or self.saved_nbytes <= self.room_nbytes

    @property
    def line(self) -> str:
        """The line of a plan."""
        said = f"forwards save {self.said}"
        if self.left_nbytes is not None:
            said += f", which leave {format_nbytes(self.left_nbytes)} of a device to the state"
        if self.count > 1:
            said += f"; a step has {self.count} of them, --accumulate {self.count}"
        if self.room_nbytes is None:
            return said
        said += f", beside the state, which leaves {format_nbytes(max(0, self.room_nbytes))}"
        if self.fits:
            return said
        less = "" if self.recomputes else ", --gradient-checkpointing"
        return f"{said}. They do not fit: use fewer samples{less} or a smaller budget for the state"

    def described(self) -> dict[str, Any]:
        """Returns all of it as plain data."""
        return {
            "micro_batch": self.samples,
            "micro_batches": self.count,
            "device_memory": self.left_nbytes,
            "fits": self.fits,
            "activations": {"nbytes": self.saved_nbytes, "line": self.line},
        } | ({} if self.choice is None else {"blocks": self.choice.described()})


def saved_on_paper(
    model: Any,
    *,
    fused_loss: bool = False,
    adapt: Callable[[Any], Any] = lambda model: model,
) -> tuple[SavedByForwards, SavedByForwards, BlocksOnPaper | None]:
    """Counts what the forwards of a whole model on meta save, as it is and if the backward computes
    it again, in a child, where ``adapt`` changes the model first. Also what its blocks save, by
    operation, if it has some that run on meta."""
    from .on_paper import in_children, shard_on_paper

    def work() -> tuple[Any, ...]:
        adapt(model)
        paper = shard_on_paper(model, 1, fused_loss=fused_loss)
        layers = range(len(paper.chain.layers))
        whole = paper.trial_of(layers)
        works = (whole.forward_work, whole.backward_work) if whole.is_counted else None
        plain, again = (
            SavedByForwards(
                *paper.saved_of(layers, recomputes=recomputes), paper.layer.is_counted, works
            )
            for recomputes in (False, True)
        )
        return plain, again, None if paper.uncut or works is None else _blocks_of(paper)

    return in_children([work], 1)[0]


def _blocks_of(paper: Any) -> BlocksOnPaper:
    layer = paper.layer
    return BlocksOnPaper(
        len(paper.chain.layers),
        saved=layer.saved,
        inputs=paper.input_nbytes,
        products=layer.products,
        work=layer.forward_work,
        product_work=layer.product_work,
    )


def pass_of(job: Any) -> Passes:
    """Returns a step of one pass."""
    batch = job.batch
    return Passes(
        batch["batch"],
        1,
        batch["length"],
        job.saved.recomputes,
        job.saved.nbytes(batch["batch"] * batch["length"]),
    )


def pass_here(job: Any, plan: Any) -> Passes:
    """Returns the one pass of a step on this machine, whose state is as in ``plan``."""
    import torch

    from ...core.machine.card_memory import CardMemory

    where = torch.device(job.config.device or "cpu")
    state = plan.planned_nbytes(Tier.DEVICE)
    if where.type == "cpu":
        left: int | None = limits.memory_left()
        state += plan.planned_nbytes(Tier.HOST)
    else:
        left = CardMemory(where).free_nbytes()
    is_there = job.config.activations in ("auto", "device") and left is not None
    return dataclasses.replace(pass_of(job), room_nbytes=left - state if is_there else None)


def sizes_of(samples: int) -> list[int]:
    """Lists the micro-batches that ``samples`` divide into, smallest first."""
    return [each for each in range(1, samples + 1) if samples % each == 0]


def is_faster(seconds: float, others: float) -> bool:
    """Tells whether a step is faster than another, by more than rounding."""
    return seconds < others * (1 - ROUNDING)


def by_least(seconds: float, samples: int) -> tuple[float, int]:
    """Returns the place of a way in the order of its ``seconds`` of compute, rounded: of equal ones
    fewer passes come first."""
    return float(f"{seconds:.6g}"), -samples


def ways_on_paper(
    job: Any,
    lay_out: LayOut,
    least: Callable[[Passes], float] = lambda passes: 0.0,
    choices: Callable[[int], Iterable[Choice | None]] = lambda samples: (None,),
) -> Iterator[tuple[Passes, Any, list[Any]]]:
    """Yields the ways to divide a rank's step into passes after which the state fits: the passes,
    the plan and its units. Those of the ``least`` seconds come first, of equal ones the fewest
    passes. ``choices``: for blocks of passes of so many samples, beside what forwards save that
    keep none. Raises CapacityError if there is none."""
    whole, is_traced, ways = pass_of(job), False, list[Passes]()
    for samples in sizes_of(whole.samples):
        passes = dataclasses.replace(whole, samples=samples, count=whole.samples // samples)
        for choice in choices(samples):
            saved = job.saved.nbytes(samples * whole.length)
            saved += 0 if choice is None else choice.room_nbytes
            left = int(job.config.device_memory) - saved
            how = {"saved_nbytes": saved, "left_nbytes": left, "choice": choice}
            ways.append(dataclasses.replace(passes, **how))
    for passes in sorted(ways, key=lambda passes: by_least(least(passes), passes.samples)):
        if passes.left_nbytes <= 0:
            continue
        try:
            with quietly():
                plan, units = lay_out(passes.saved_nbytes, False)
        except CapacityError:
            continue
        is_traced = True
        yield passes, plan, units
    if not is_traced:
        with quietly():
            lay_out(ways[0].saved_nbytes, True)  # of one sample, which says why not


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Runs the block without warnings of what is only tried."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class SavedOnPaper(Extension):
    """Counts in a plan on paper what the forwards save."""

    @classmethod
    def terms(cls, config: Any, units: Sequence[Any], device: Any) -> Iterator[Term]:
        """Yields the bytes that a device on paper has for them."""
        yield Term(Tier.DEVICE, SAVED, getattr(device, "saved_nbytes", 0))
