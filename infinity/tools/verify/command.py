"""`infinity verify RECEIPT`: repeats a stretch of a job of `infinity train`, and says whether its
losses and weights have the same bits.

It begins at a kept copy of a checkpoint, or at the first step, and ends at a save of the receipt.
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from ...core.machine.sizes import format_count
from ...errors import ConfigError, UsageError
from ..cli.values import a_count, a_path

OTHER_BITS_STATUS = 1


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers the command."""
    parser = subparsers.add_parser(
        "verify", help="repeat a stretch of a job from its receipt, and compare the bits"
    )
    parser.add_argument("receipt", type=a_path, metavar="RECEIPT", help="file of train --receipt")
    parser.add_argument(
        "--checkpoint",
        type=a_path,
        metavar="FOLDER",
        help="begin at this checkpoint of the job, which is only read (default: at step 0)",
    )
    parser.add_argument(
        "--to",
        type=a_count,
        metavar="STEP",
        help="end at the save after this step (default: the first one that follows)",
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument(
        "--options",
        default="",
        metavar="TEXT",
        help='options of `infinity train` that go over those of the receipt: "--params nvme"',
    )


def run(args: argparse.Namespace) -> int:
    """Makes the steps of the stretch again. Returns 0 for the same bits, 1 for others. Every rank
    calls this."""
    from ..cli import Parser
    from ..train import train
    from ..train.options import add_options
    from ..train.places import has_checkpoint
    from .receipts import read_receipt

    found = read_receipt(args.receipt)
    parser = Parser(prog="infinity verify --options")
    add_options(parser)
    options = parser.parse_args([*found["options"], *shlex.split(args.options)])
    if options.out or options.checkpoint or options.receipt:
        raise ConfigError("verify writes no model, checkpoint or receipt: leave these options out")
    if args.checkpoint is not None and not has_checkpoint(args.checkpoint):
        raise ConfigError(f"--checkpoint {args.checkpoint} has no checkpoint")
    options.checkpoint, options.resume = args.checkpoint, args.checkpoint is not None
    options.json, options.sample_bytes, options.steps = args.json, 0, found["steps"]
    options.repeats = Repeat(found, args.to)
    if status := train.run(options):
        return status
    return options.repeats.tell(as_json=args.json)


@dataclass
class Repeat:
    """A stretch that is trained again. ``to``: the step of the save at its end; None: of the first
    save after its start."""

    receipt: dict[str, Any]
    to: int | None = None
    first_step: int = 0
    is_first: bool = True  # of the ranks
    other_losses: list[str] = field(default_factory=list)
    other_weights: list[str] = field(default_factory=list)
    other_facts: list[str] = field(default_factory=list)
    count: int = 0  # of the weights

    def begin(self, job: Any) -> int:
        """Checks the job at its first step. Returns the step to stop at. Every rank calls this.

        Raises UsageError for another job, a checkpoint that the receipt does not know, or a receipt
        without a save after it.
        """
        from ..train.places import differences
        from .receipts import digests

        if told := differences(self.receipt["fixed_values"], job.fixed_values):
            raise UsageError(f"The job of the receipt had {told}. Give the same options and data.")
        self.first_step, saves = job.first_step, self.receipt["saves"]
        ends = [save["step"] for save in saves if save["step"] > self.first_step]
        if not ends or (self.to is not None and self.to not in ends):
            raise UsageError(
                f"the receipt has no save after step {self.first_step}"
                + (f" at step {self.to}: give --to one of {ends}" if ends else "")
            )
        self.to = self.to or ends[0]
        here = [save["weights"] for save in saves if save["step"] == self.first_step > 0]
        if here and (wrong := _different(here[0], digests(job.model))):
            raise UsageError(
                f"the checkpoint at step {self.first_step} is not the job's: {wrong[0]} and"
                f" {len(wrong) - 1} more have other bits than the receipt"
            )
        return self.to

    def end(self, job: Any) -> None:
        """Compares the losses and the weights at the end. Every rank calls this."""
        from ..bench.facts import differences
        from .receipts import digests, facts

        saves = [s for s in self.receipt["saves"] if self.first_step < s["step"] <= self.to]
        known = {
            step: loss
            for save in saves
            for step, loss in enumerate(save["losses"], save["step"] - len(save["losses"]))
        }
        self.other_losses = [
            f"step {step}: {loss!r}, in the receipt {known[step]!r}"
            for step, loss in enumerate(job.losses, self.first_step)
            if known.get(step, loss) != loss
        ]
        found = digests(job.model)
        self.count = len(found)
        self.other_weights = _different(saves[-1]["weights"], found)
        self.other_facts = differences(self.receipt, facts())
        self.is_first = job.ranks.is_first

    def tell(self, *, as_json: bool) -> int:
        """Prints the result on the first rank, and returns the exit status."""
        is_same = not (self.other_losses or self.other_weights)
        if as_json and self.is_first:
            print(
                json.dumps(
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
