"""`infinity verify RECEIPT`: repeats a stretch of a job of `infinity train`, and says whether its
losses and weights have the same bits.

It begins at a kept copy of a checkpoint, or at the first step, and ends at a save of the receipt.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError, UsageError
from ..cli.amounts import format_count
from ..cli.answers import print_object
from ..cli.options import FLAG, FOLDER, TEXT, Parser, takes
from ..cli.values import a_count, a_path

OTHER_BITS_STATUS = 1


OPTIONS = (
    ("receipt", takes("RECEIPT", a_path), "file of train --receipt"),
    (
        "--checkpoint",
        FOLDER,
        "begin at this checkpoint of the job, which is only read (default: at step 0)",
    ),
    (
        "--to",
        takes("STEP", a_count),
        "end at the save after this step (default: the first one that follows)",
    ),
    ("--json", FLAG, "the result as one JSON object"),
    (
        "--options",
        TEXT | {"default": ""},
        "options of `infinity train` that override the receipt's, as one word:"
        " --options='--params nvme'",
    ),
)


def run(args: argparse.Namespace) -> int:
    """Makes the steps of the stretch again. Returns 0 for the same bits, 1 for others. Every rank
    calls this."""
    from ..train import options as of_train
    from ..train import train
    from ..train.places import has_checkpoint, saved_extra
    from .reading import read_receipt

    receipt = read_receipt(args.receipt)
    if args.checkpoint is not None and not has_checkpoint(args.checkpoint):
        raise ConfigError(f"--checkpoint {args.checkpoint} has no checkpoint")
    first_step = saved_extra(args.checkpoint).get("step", 0)
    saves = _stretch(receipt["saves"], first_step, args.to)
    parser = Parser("infinity verify --options", of_train.OPTIONS)
    try:
        more_options = shlex.split(args.options)
    except ValueError as error:
        raise ConfigError(f"--options {args.options!r}: {error}") from None
    options = parser.parse_args([*map(str, saves[-1]["options"]), *more_options])
    if options.out or options.checkpoint or options.receipt:
        raise ConfigError("verify writes no model, checkpoint or receipt: leave these options out")
    options.checkpoint, options.resume = args.checkpoint, args.checkpoint is not None
    options.json, options.sample_bytes = args.json, 0
    options.repeats = Repeat(receipt, first_step, saves)
    if status := train.run(options):
        return status
    return options.repeats.tell(as_json=args.json)


def _stretch(saves: list[dict[str, Any]], first_step: int, to: int | None) -> list[dict[str, Any]]:
    """Lists the saves after ``first_step``, up to that at step ``to`` (None: the first). Raises
    UsageError if there are none, or the job went on with other options between them."""
    steps = [save["step"] for save in saves]
    if first_step not in (0, *steps):
        raise UsageError(
            f"the checkpoint is at step {first_step}, and the receipt has saves at {steps}: give a"
            " checkpoint of one of these steps"
        )
    ends = [step for step in steps if step > first_step]
    if not ends or (to is not None and to not in ends):
        raise UsageError(
            f"the receipt has no save after step {first_step}"
            + (f" at step {to}: give --to one of {ends}" if ends else "")
        )
    stretch = [save for save in saves if first_step < save["step"] <= (to or ends[0])]
    ways = [(save["options"], save["ranks"]) for save in stretch]
    if before := [save["step"] for save, way in zip(stretch, ways) if way != ways[-1]]:
        raise UsageError(
            f"the job went on with other options, or ranks, after step {before[-1]}: give"
            f" --to {before[-1]} at most, or a --checkpoint of that step"
        )
    return stretch


@dataclass
class Repeat:
    """A stretch that is trained again. ``saves``: those of the receipt after its first step."""

    receipt: dict[str, Any]
    first_step: int
    saves: list[dict[str, Any]]
    is_first: bool = True  # of the ranks
    other_losses: list[str] = field(default_factory=list)
    other_weights: list[str] = field(default_factory=list)
    other_facts: list[str] = field(default_factory=list)
    count: int = 0  # of the weights

    @property
    def to(self) -> int:
        """The step to stop at."""
        return self.saves[-1]["step"]

    def begin(self, job: Any) -> None:
        """Checks the job at its first step. Every rank calls this. Raises UsageError for another
        job, or a checkpoint with other weights than the receipt's."""
        from ..train.places import differences
        from .receipts import digests

        if other := differences(self.receipt["fixed_values"], job.fixed_values):
            ranks = self.saves[-1]["ranks"]
            raise UsageError(
                f"The job of the receipt had {other}, on {format_count(ranks, 'rank')}. Give the"
                " same options and data."
            )
        here = [
            save["weights"] for save in self.receipt["saves"] if save["step"] == self.first_step > 0
        ]
        if here and (wrong := _different(here[0], digests(job.model))):
            raise UsageError(
                f"the checkpoint at step {self.first_step} is not the job's:"
                f" {format_count(len(wrong), 'weight')} ({wrong[0]}, ...) have other bits than in"
                " the receipt"
            )

    def end(self, job: Any) -> None:
        """Compares the losses and the weights at the end. Every rank calls this."""
        from ..bench.facts import differences
        from .receipts import digests, facts

        known = {
            step: loss
            for save in self.saves
            for step, loss in enumerate(save["losses"], save["step"] - len(save["losses"]))
        }
        self.other_losses = [
            f"step {step}: {loss!r}, in the receipt {known[step]!r}"
            for step, loss in enumerate(job.losses, self.first_step)
            if known.get(step, loss) != loss
        ]
        weights = digests(job.model)
        self.count = len(weights)
        self.other_weights = _different(self.saves[-1]["weights"], weights)
        self.other_facts = differences(self.receipt, facts())
        self.is_first = job.ranks.is_first

    def tell(self, *, as_json: bool) -> int:
        """Prints the result on the first rank, and returns the exit status."""
        is_same = not (self.other_losses or self.other_weights)
        if as_json and self.is_first:
            print_object(
                {
                    "same": is_same,
                    "from": self.first_step,
                    "to": self.to,
                    "weights": self.count,
                    "other_losses": self.other_losses,
                    "other_weights": self.other_weights,
                    "differences": self.other_facts,
                }
            )
        elif self.is_first:
            where = f"from step {self.first_step} to {self.to}"
            if is_same:
                steps = format_count(self.to - self.first_step, "step")
                print(f"The same bits {where}: {steps}, {format_count(self.count, 'weight')}")
            else:
                print(f"Other bits {where}: {len(self.other_weights)} of {self.count} weights")
                for line in (*self.other_losses[:1], *self.other_weights[:4]):
                    print(f"  {line}")
            for line in self.other_facts if not is_same else ():
                print(f"  receipt | here: {line}")
        return 0 if is_same else OTHER_BITS_STATUS


def _different(saved: dict[str, str], found: dict[str, str]) -> list[str]:
    """Lists the weights whose digests are not the same, or that one side lacks."""
    return [name for name in {**saved, **found} if saved.get(name) != found.get(name)]
