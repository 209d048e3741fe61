"""The plan of `infinity plan` as lines for a terminal, and its memory map as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.machine.sizes import format_nbytes
from ..cli.amounts import format_count, format_seconds
from ..watch import svg
from .budgets import fits_line
from .plan_next import faster_lines, next_line
from .saved import SAVED

BAR = 48  # characters of the memory map
WIDTH, ROW, LEFT = 900, 70, 100
SHOWN = 5  # units at each end of a timeline
KINDS = (
    "read",
    "copy",
    "forward",
    "copy again",
    "backward",
    "landing",
    "load",
    "step",
    "save",
)
COLOURS = {"weights": "#1f6fb2", "optimizer state": "#8a6d1b", "gradients": "#7a4fb0"}


def text(found: dict[str, Any], *, timetable: bool = False) -> Iterator[str]:
    """Yields the plan's lines for a terminal: the answer, then where everything lives."""
    held = {tier: of_tier["nbytes"] for tier, of_tier in found["tiers"].items()}
    if found["fits"]:
        yield fits_line(held, found["budgets"], "It" if found.get("ranks", 1) == 1 else "Each rank")
    else:
        yield f"It does not fit: {found['activations']['line']}"
    yield from _answer(found)
    yield from _homes(found["units"], "elements" if found.get("quantize") else "parameters")
    yield from _memory_map(found["tiers"])
    yield found["activations"]["line"]
    yield from _needs(found)
    yield from filter(None, (found.get("explanation"),))
    if found.get("next"):
        yield next_line(found["next"], found["nodes"])
    yield from faster_lines(found.get("faster", {}))
    if "checkpoint" in found:
        yield found["checkpoint"]["line"]
    if "endurance" in found:
        yield found["endurance"]["line"]
    if "muon" in found:
        yield _muon(found["muon"], found.get("ranks", 1))
    if timetable and "timeline" in found:
        yield from _timeline(found["timeline"])
    if "deepspeed" in found:
        yield from _beside_deepspeed(found)
    for name in ("assumptions", "sources"):
        yield from [f"{name}:", *(f"  {line}" for line in found[name])] if name in found else []


def _answer(found: dict[str, Any]) -> Iterator[str]:
    where = ", on this machine"
    if "ranks" in found:
        ranks = format_count(found["ranks"], "rank")
        where = f", on {found['nodes']} x {found['machine']}, {ranks}; below is one of them"
        where = where if found["ranks"] > 1 else f", on {found['machine']}"
    trained = f", {found['trained']:,} of them trained"
    if found["trained"] == found["parameters"]:
        trained = ""
    yield f"{found['parameters']:,} parameters{trained}{where}"
    if "unknown" in found:
        yield f"No time is predicted ({found['unknown']}): name a machine, --machine rtx4090"
        return
    yield (
        f"{format_seconds(found['step_seconds'])} for a step of {found['tokens_per_step']:,} tokens"
        f" ({_rate(found['tokens_per_second'])} tokens/s), {_bound(found)}"
    )


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _bound(found: dict[str, Any]) -> str:
    what = found["bottleneck"]
    if "timeline" not in found:
        return f"bound by {what}"
    return (
        f"bound by {what}, at work for {found['seconds'][what] / found['step_seconds']:.0%} of it"
    )


def _homes(units: list[dict[str, Any]], counted: str) -> Iterator[str]:
    yield f"{'unit':<42}{counted:>15}  {'weights':<22}{'optimizer':<22}gradients"
    for row in units:
        name = row["first"]
        if row["units"] > 1:
            name += f" .. {row['last'].rsplit('.', 1)[-1]}"
        tile = f" in tiles of {format_nbytes(row['tile_nbytes'])}" if row["tile_nbytes"] else ""
        count = f"{row['parameters']:,}"
        if row["units"] > 1:
            count = f"{row['units']} x {count}"
        yield (
            f"{name:<42}{count:>15}"
            f"  {row['weights'] + tile:<21} {row['optimizer']:<21} {row['gradients']}"
        )


def _memory_map(tiers: dict[str, Any]) -> Iterator[str]:
    for tier, of_tier in tiers.items():
        yield f"{tier}: {format_nbytes(of_tier['nbytes'])}"
        for what, nbytes in parts_of(of_tier):
            if nbytes:
                filled = max(1, round(BAR * nbytes / of_tier["nbytes"]))
                yield f"  {what:<28}{format_nbytes(nbytes):>11}  {'#' * filled}"


def _needs(found: dict[str, Any]) -> Iterator[str]:
    whose = "each rank" if found.get("ranks", 1) > 1 else "a step"
    moved = [f"{edge} {format_nbytes(nbytes)}" for edge, nbytes in found["edges"].items() if nbytes]
    yield f"{whose} moves {', '.join(moved)}" if moved else f"{whose} moves nothing"
    if "unknown" in found:
        return
    needs = ", ".join(
        f"{what} {format_seconds(seconds)}" for what, seconds in found["seconds"].items() if seconds
    )
    yield f"and needs {needs} (compute {found.get('compute_line', found['compute'])})"


def _muon(cost: dict[str, float], ranks: int) -> str:
    said = (
        f"Newton-Schulz of {cost['matrices']:,.0f} matrices adds {cost['flops'] / 1e12:.3g} TFLOP"
    )
    where = " on each rank" if ranks > 1 else ""
    said += f"{where}, {cost['share_of_passes']:.1%} of the forward and backward"
    if ranks > 1:
        said += f", and the ranks send {format_nbytes(round(cost['nbytes']))} to each for it"
    return f"{said} (not in the time above)"


def _timeline(units: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """Yields when each unit's jobs run; of many units, the first and the last."""
    kinds = [kind for kind in KINDS if any(kind in spans for spans in units.values())]
    longest = max((end for spans in units.values() for _, end in spans.values()), default=0.0)
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    yield f"{f'when in a step ({unit})':<28}" + "".join(f"{kind:>18}" for kind in kinds)
    if any(end < 0 or start < 0 for spans in units.values() for start, end in spans.values()):
        yield "  (0 is the start of the forward; what it needs first is copied before)"
    rows = list(units.items())
    for number, (name, spans) in enumerate(rows):
        if len(rows) > 2 * SHOWN + 1 and SHOWN <= number < len(rows) - SHOWN:
            if number == SHOWN:
                yield f"  ... {len(rows) - 2 * SHOWN} more (--json has all)"
            continue
        cells = (
            " to ".join(f"{scale * at:.3f}" for at in spans[kind]) if kind in spans else "-"
            for kind in kinds
        )
        yield f"  {name:<26}" + "".join(f"{cell:>18}" for cell in cells)


def _beside_deepspeed(found: dict[str, Any]) -> Iterator[str]:
    theirs = found["deepspeed"]
    yield f"{'beside DeepSpeed, by its own layout':<42}{'DeepSpeed':>12}{'Infinity':>12}"
    for tier, nbytes in theirs["tiers"].items():
        there = found["tiers"][tier]
        ours = format_nbytes(there["nbytes"] - there["parts"].get(SAVED, 0))
        yield f"  {'kept on ' + tier:<40}{format_nbytes(nbytes):>12}{ours:>12}"
    for edge, nbytes in theirs["edges"].items():
        ours = format_nbytes(found["edges"][edge])
        yield f"  {'moved in a step, ' + edge:<40}{format_nbytes(nbytes):>12}{ours:>12}"


def parts_of(of_tier: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns the parts of a tier and their bytes, the largest first."""
    return sorted(of_tier["parts"].items(), key=lambda part: -part[1])


def colours_of(tiers: dict[str, Any]) -> dict[str, str]:
    """Returns the colour of each part: the same on all tiers, and no other part's."""
    names = [what for of_tier in tiers.values() for what, _ in parts_of(of_tier)]
    return svg.colours_of(names, COLOURS)


def draw(tiers: dict[str, dict]) -> str:
    """Draws the memory map as an SVG picture: a bar per tier, all on one scale. Parts have their
    names if they fit."""
    largest = max((of_tier["nbytes"] for of_tier in tiers.values()), default=0) or 1
    marks, colours = [], colours_of(tiers)
    for number, (tier, of_tier) in enumerate(tiers.items()):
        y, x = 12 + number * ROW, float(LEFT)
        marks.append(svg.text(LEFT - 8, y + 20, tier, anchor="end"))
        for what, nbytes in parts_of(of_tier):
            width = (WIDTH - LEFT - 20) * nbytes / largest
            title = f"{what}, {format_nbytes(nbytes)}"
            marks.append(svg.bar(x, y, max(0.5, width), 30, colours[what], title=title, edged=True))
            if width > 7.5 * len(what):
                marks.append(svg.text(x + 5, y + 19, what, colour="#fff", inside=True))
            x += width
        marks.append(svg.text(LEFT, y + 52, format_nbytes(of_tier["nbytes"])))
    return svg.picture(WIDTH, 12 + ROW * len(tiers), marks)
