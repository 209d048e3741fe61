"""`infinity cost`: what a job costs on machines for rent, how many of them it is expected to lose,
and whether it pays to move.

profile   what one GPU trains a second, and what a checkpoint takes: a report of `infinity train`
offer     a machine of the price file in one zone and market
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...ext.checkpoint.interval import steps_between
from ...files.outputs import Output, check_outputs
from ...untrusted import check_number, parse_json, printable, read_text
from ..cli.amounts import format_count, format_seconds
from ..cli.answers import print_object
from ..cli.options import FILE, FLAG, NUMBER, TEXT, either, takes
from ..cli.values import a_number_of_tokens, columns, parse_seconds, positive_real
from ..plan import sky
from .cost import DAY, FORMAT, HOUR, START_SECONDS, Bill, Move, Profile, Rental, Saves
from .prices import Offer, parse_time, read_lifetimes, read_prices

SHOWN_OFFERS = 10
OFFER_KEYS = ("name", "cloud", "zone", "instance", "gpu", "count", "market")
SAVING_SHARE = 0.02  # of the time, as `infinity train` saves


DURATION = takes("S")
OPTIONS = (
    ("--profile", FILE | {"required": True}, "report of `infinity train`"),
    ("--prices", FILE | {"required": True}, "a CSV file of offers"),
    either(
        ("--tokens", takes("N", a_number_of_tokens), "to train, as 2B"),
        (
            "--hours",
            takes("H", positive_real),
            "to train: what the profile's first GPU does in so many hours, without a loss",
        ),
        required=True,
    ),
    (
        "--nodes",
        NUMBER,
        "machines of an offer that train together; each loss is one of the job",
        1,
    ),
    ("--start", takes("TIME"), "of the job (default: the first time of the prices)"),
    ("--move", TEXT, "plan moves, of 'seconds=auto dollars=9' each"),
    either(
        ("--between-failures", DURATION, "mean life of a spot machine, as 6h"),
        ("--lifetimes", FILE, "a CSV file of such lives"),
    ),
    (
        "--on-demand-failures",
        DURATION,
        "mean time between failures of an on-demand machine, as 60d (default: it has none)",
    ),
    (
        "--restart",
        DURATION,
        "seconds from a loss until the job trains again, as 5m (default: restart_seconds of"
        f" the profile, else {START_SECONDS:.0f} s until its processes run, and a load)",
    ),
    (
        "--notice",
        DURATION | {"default": "0"},
        "seconds of warning before a spot machine is taken away, as 30s",
    ),
    ("--sky", FILE, "write a task of SkyPilot for the best offers"),
    ("--overwrite", FLAG, "replace a file of --sky that is no task of ours"),
    ("--json", FLAG, "all offers and the plan as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the offers, cheapest first, and the plan; writes the task."""
    if args.sky is not None:
        read = [("--profile", args.profile), ("--prices", args.prices)]
        output = Output("--sky", args.sky, made=sky.HEAD.encode())
        check_outputs([output], [*read, ("--lifetimes", args.lifetimes)], overwrite=args.overwrite)
    profile, offers = read_profile(args.profile), read_prices(args.prices)
    if args.restart is not None:
        restart = parse_seconds(args.restart, "--restart")
        profile = dataclasses.replace(profile, restart_seconds=restart)
    if args.hours is not None:
        args.tokens = args.hours * HOUR * next(iter(profile.gpus.values()))
    move = None if args.move is None else parse_move(args.move, profile)
    rental = report(*_rental(args, profile, offers), move)
    if args.sky is not None:
        args.sky.write_text(sky.task(rental))
    if args.json:
        print_object(rental)
    else:
        print(printable("\n".join(_lines(rental))))
    return 0


def read_profile(path: Path) -> Profile:
    """Reads a profile: the keys of :class:`Profile` in a JSON file, which may have others. Raises
    ConfigError, UsageError for a newer format."""
    try:
        profile = parse_json(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if isinstance(profile, dict):
        FORMAT.check(path, profile)
    if (
        not isinstance(profile, dict)
        or not isinstance(profile.get("gpus"), dict)
        or not profile["gpus"]
    ):
        raise ConfigError(
            f'{path} has no "gpus": give the report of `infinity train --json`, or tokens a second'
            ' by GPU, as {"gpus": {"A100": 3000}}'
        )
    names = [field.name for field in dataclasses.fields(Profile) if field.name != "gpus"]
    return Profile(
        {
            str(name): check_number(rate, f"{path}: gpus: {name}")
            for name, rate in profile["gpus"].items()
        },
        **{
            name: None
            if profile.get(name) is None
            else check_number(profile[name], f"{path}: {name}", least=0)
            for name in names
        },
    )


def _rental(
    args: argparse.Namespace, profile: Profile, offers: list[Offer]
) -> tuple[Rental, dict[str, str]]:
    """Returns the job on the offers whose GPU the profile knows, and why others are left out."""
    nodes = args.nodes
    rated = [(each, profile.tokens_per_second(each.gpu, nodes * each.count)) for each in offers]
    left_out = {each.gpu: "is not in the profile" for each, rate in rated if rate is None}
    known, rates = [each for each, rate in rated if rate], [rate for _, rate in rated if rate]
    if not known:
        raise ConfigError(
            f"{args.prices} has no GPU of {args.profile}: it has {', '.join(sorted(left_out))};"
            f" the profile has {', '.join(profile.gpus)}"
        )
    spot = _per_second(args.between_failures, "--between-failures")
    on_demand = _per_second(args.on_demand_failures, "--on-demand-failures")
    lives = None if args.lifetimes is None else read_lifetimes(args.lifetimes)
    losses = [
        nodes * (on_demand if each.market != "spot" else lives.per_second(each) if lives else spot)
        for each in known
    ]
    saves = None
    if most := max(losses):
        save = profile.known_save("the loss of a machine")
        interval = float(steps_between(save, save, 1.0, SAVING_SHARE, 1 / most))
        saves = Saves(save, profile.restart, interval, profile.median_step_seconds or 0.0)
    job = Rental(
        tokens=args.tokens,
        start=_first_time(known) if args.start is None else parse_time(args.start, "--start"),
        offers=known,
        rates=rates,
        losses=losses,
        saves=saves,
        notice=parse_seconds(args.notice, "--notice"),
        nodes=nodes,
    )
    return job, left_out


def _per_second(given: str | None, option: str) -> float:
    """Returns how often a machine is lost; 0 for what is not given."""
    if given is None:
        return 0.0
    if not (between := parse_seconds(given, option)):
        raise ConfigError(f"{option} 0: give seconds above 0")
    return 1 / between


def _first_time(offers: list[Offer]) -> float:
    times = [each.times[0] for each in offers if each.times[0] > -math.inf]
    return min(times, default=datetime.now(UTC).timestamp())


def parse_move(text: str, profile: Profile) -> Move:
    """Parses "seconds=auto dollars=9". ``auto``: a save and a restart, of the profile.
    ``dollars=0.09/GB``: for each 10^9 bytes of the checkpoint. Raises ConfigError."""
    pairs = [word.partition("=") for word in text.replace(",", " ").split()]
    values = {key: value for key, _, value in pairs}
    if len(values) != len(pairs) or not set(values) <= {"seconds", "dollars"}:
        raise ConfigError(f"--move {text!r}: give it as 'seconds=auto dollars=9'")
    if (seconds := values.get("seconds", "auto")) == "auto":
        lasts = profile.known_save("--move seconds=auto") + profile.restart
    else:
        lasts = parse_seconds(seconds, "--move: seconds")
    if lasts >= DAY:
        raise ConfigError(f"--move: a move of {format_seconds(lasts)} must last less than a day")
    number, per, unit = values.get("dollars", "0").partition("/")
    try:
        dollars = check_number(float(number), "--move: dollars", least=0)
    except ValueError as error:
        raise ConfigError(f"--move: dollars={number!r} is not a number from 0 on") from error
    if per and (unit.upper() != "GB" or profile.checkpoint_nbytes is None):
        raise ConfigError(
            f"--move: dollars={values['dollars']!r}: give dollars, or dollars/GB with the profile's"
            " checkpoint_nbytes"
        )
    return Move(dollars * (profile.checkpoint_nbytes or 0.0) / 1e9 if per else dollars, lasts)


def report(job: Rental, left_out: dict[str, str], move: Move | None) -> dict[str, Any]:
    """Returns the bill of every offer, cheapest first, and the plan of moves. ``left_out``: why, by
    GPU. Raises ConfigError if no offer trains the job."""
    rows, left_out = [], dict(left_out)
    for offer, rate, losses, bill in zip(job.offers, job.expected_rates, job.losses, job.stays()):
        if bill is None:
            left_out[job.name_of(offer)] = (
                "has no price yet" if rate else "is lost too often to get ahead"
            )
            continue
        row = {name: getattr(offer, name) for name in OFFER_KEYS}
        row |= {"name": job.name_of(offer), "nodes": job.nodes}
        lost = bill.seconds * losses if job.saves else None  # None: no rate of losses was given
        row |= {"tokens_per_second": float(rate), "losses": lost}
        rows.append(row | {"hours": bill.seconds / 3600, "dollars": bill.dollars})
    if not rows:
        few = list(left_out.items())[:SHOWN_OFFERS]
        why = "; ".join(f"{name} {reason}" for name, reason in few)
        raise ConfigError(f"no offer trains the job from the start on: {why}")
    rows.sort(key=lambda row: (row["dollars"], row["hours"]))
    return {
        "tokens": job.tokens,
        "start": _iso(job.start),
        "saves": job.saves and dataclasses.asdict(job.saves),
        "lost_seconds": job.saves and job.saves.lost_seconds(job.notice),
        "lost_seconds_on_demand": job.saves and job.saves.lost_seconds(0.0),
        "notice_seconds": job.notice,
        "notice_suffices": job.saves and job.saves.fit(job.notice),
        "offers": rows,
        "left_out": left_out,
        "move": move and dataclasses.asdict(move),
        "plan": move and _plan(job, job.moves(move)),
    }


def _plan(job: Rental, bill: Bill) -> dict[str, Any]:
    prices = job.prices
    stays = [
        {
            "day": day,
            "time": _iso(job.start + day * DAY),
            "offer": job.name_of(job.offers[at]),
            "dollars_per_hour": float(prices[day, at]),
        }
        for day, at in enumerate(bill.path)
        if day == 0 or at != bill.path[day - 1]
    ]
    return {
        "dollars": bill.dollars,
        "hours": bill.seconds / 3600,
        "moves": bill.moves,
        "stays": stays,
    }


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _lines(found: dict[str, Any]) -> list[str]:
    rows, plan = found["offers"], found["plan"]
    table = [("offer", "hours", "dollars", "losses")]
    for row in rows[:SHOWN_OFFERS]:
        losses = "-" if row["losses"] is None else f"{row['losses']:.1f}"
        table.append((row["name"], f"{row['hours']:,.1f}", f"{row['dollars']:,.2f}", losses))
    lines = [f"{found['tokens']:,.0f} tokens from {found['start']}", "", *columns(table)]
    if len(rows) > SHOWN_OFFERS:
        lines.append(f"and {format_count(len(rows) - SHOWN_OFFERS, 'dearer offer')}")
    if saves := found["saves"]:
        how = "fits" if found["notice_suffices"] else "does not fit"
        lines += [
            "",
            f"A loss costs {format_seconds(found['lost_seconds'])}: a save of"
            f" {format_seconds(saves['save_seconds'])} {how} into the notice of"
            f" {format_seconds(found['notice_seconds'])}, and saves are"
            f" {format_seconds(saves['interval_seconds'])} apart.",
            f"Of that a restart takes {format_seconds(saves['restart_seconds'])} (--restart).",
        ]
        if any(row["market"] != "spot" and row["losses"] for row in rows):
            lost = format_seconds(found["lost_seconds_on_demand"])
            lines.append(
                f"A failure of an on-demand machine comes without notice, and costs {lost}."
            )
    if plan:
        lines += ["", *_plan_lines(plan, rows[0]["dollars"], found["move"])]
    if left_out := [f"left out: {name} {why}" for name, why in found["left_out"].items()]:
        lines += ["", *left_out[:SHOWN_OFFERS]]
        if len(left_out) > SHOWN_OFFERS:
            lines.append(f"and {len(left_out) - SHOWN_OFFERS:,} more")
    return lines


def _plan_lines(plan: dict[str, Any], dollars: float, move: dict[str, float]) -> list[str]:
    each = f"{move['dollars']:,.2f} dollars and {format_seconds(move['seconds'])} each"
    if not plan["moves"]:
        return [f"No move pays, at {each}."]
    stays = [("day", "time", "offer", "dollars/h")]
    for stay in plan["stays"]:
        price = f"{stay['dollars_per_hour']:.3f}"
        stays.append((str(stay["day"]), stay["time"], stay["offer"], price))
    return [
        f"With {format_count(plan['moves'], 'move')}, at {each}: {plan['dollars']:,.2f} dollars,"
        f" {plan['hours']:,.1f} hours (without: {dollars:,.2f} dollars)",
        *columns(stays),
    ]
