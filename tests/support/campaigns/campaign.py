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
import faulthandler
import gc
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import prepared
import torch
from campaign_user import (
    ENDS_THE_MODEL,
    HOMES,
    OF_THE_USERS,
    OPERATIONS,
    STEPS_OF_ONE_MODEL,
    Known,
    Operation,
    User,
    charged,
)
from striker import Striker

import infinity

EXCEPTIONS = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
    "user": ValueError,
}


# --- cases ---


class Leak(Exception):
    """The bits are right, but something was left."""


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
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
