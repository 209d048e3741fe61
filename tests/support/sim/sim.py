"""Plays programs that seeds draw: users, disks and exceptions, beside plain torch.

    make sim MINUTES=10            programs of seeds 1, 2, 3, ... for ten minutes
    make sim SEED=4711             the program of this seed
    make sim ARGS=--ranks          programs of several ranks, for a minute
    make sim ARGS=--late           programs on the late device, for a minute
    make sim PROGRAM='{...}'       a program as a failure prints it, or one a line

A failure prints the line that replays it, and the shortest program that fails in the same way. The
status is 1 then.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(each) for each in Path(__file__).parents[1].glob("*/")]
    sys.path.insert(0, str(Path(__file__).parents[3]))

from sim_apart import Outcome, outcomes, prepare
from sim_late import draw_late
from sim_plants import PLANTS
from sim_program import Program, draw
from sim_ranks import draw_ranks
from sim_shrink import MOST, shrink


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, help="of the only program, or of the first one")
    parser.add_argument("--programs", type=int, help="how many to play")
    parser.add_argument("--minutes", type=float, help="how long to play")
    parser.add_argument("--tries", type=int, default=MOST, help="to shrink a failure; 0: as it is")
    parser.add_argument("--ranks", action="store_true", help="programs of two ranks")
    parser.add_argument("--late", action="store_true", help="programs on the late device")
    parser.add_argument("--plant", choices=PLANTS, help="a fault of the engine, to be found")
    parser.add_argument("--json", type=Path, help="write what was counted to this file")
    args = parser.parse_args()
    prepare()
    counts: collections.Counter[str] = collections.Counter()
    failed: list[dict] = []
    began = time.monotonic()
    try:
        for seed, outcome in numbered(args):
            counts += collections.Counter(outcome.counts)
            counts["programs"] += 1
            if outcome.kind:
                counts[f"failed: {outcome.kind}"] += 1
                short = tell(seed, outcome, args)
                failed.append({"seed": seed, "kind": outcome.kind, "text": outcome.text})
                failed[-1]["actions"] = [name for name, _ in short.actions]
                if args.plant:
                    break
    except KeyboardInterrupt:
        pass  # what was played until then is told
    seconds = time.monotonic() - began
    print(f"{counts['programs']} programs in {seconds:.0f} s, {len(failed)} failed", flush=True)
    for name, count in sorted(counts.items()):
        print(f"  {name:40} {count}")
    if args.json:
        args.json.write_text(json.dumps({"counts": counts, "failed": failed}, indent=1))
    return int(bool(failed))


def numbered(args: argparse.Namespace) -> Iterator[tuple[int | None, Outcome]]:
    """Plays what was asked for, and yields each seed with its outcome."""
    if given := os.environ.get("PROGRAM"):
        programs = [Program.read(line) for line in given.splitlines()]
        yield from ((None, each) for each in outcomes(programs, PLANTS.get(args.plant)))
        return
    first = args.seed if args.seed is not None else 1
    one = args.seed is not None and args.minutes is None and args.programs is None
    count = 1 if one else args.programs
    ends = time.monotonic() + 60 * args.minutes if args.minutes else None

    make = draw_ranks if args.ranks else draw_late if args.late else draw

    def drawn() -> Iterable[Program]:
        for seed in itertools.count(first) if count is None else range(first, first + count):
            if ends is not None and time.monotonic() > ends:
                return
            yield make(seed)

    yield from zip(itertools.count(first), outcomes(drawn(), PLANTS.get(args.plant)))


def tell(seed: int | None, outcome: Outcome, args: argparse.Namespace) -> Program:
    """Prints a failure and the shortest program found that fails alike, which it returns."""

    def fails(program: Program) -> bool:
        played = outcomes([program], PLANTS.get(args.plant))
        return next(played).kind == outcome.kind

    print(f"{outcome.kind}: {outcome.text}")
    if seed is not None:
        kind = " ARGS=--ranks" * args.ranks + " ARGS=--late" * args.late
        print(f"replay: make sim SEED={seed}{kind}")
    print(f"whole:  make sim PROGRAM='{outcome.program.text()}'", flush=True)
    if not args.tries:
        return outcome.program
    short = shrink(outcome.program, fails, args.tries)
    print(f"short:  make sim PROGRAM='{short.text()}'", flush=True)
    return short


if __name__ == "__main__":
    sys.exit(main())
