"""Plots: curves of a result file and its roofline, drawn by matplotlib (`pip install matplotlib`).

roofline   what the machine's rates allow for work of so many operations a byte: the lines rise with
           the bytes of memory or disk, and are flat at the rate of products

Points that keep their rounds have error bars: the 95 % interval of their median.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...files.outputs import PICTURE
from . import intervals
from .results import READ_NBYTES, WRITTEN_NBYTES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE, SMALL = (7.2, 3.8), 7  # inches; points of type
MIB = 1024 * 1024
FAINT = "#666666"
OPERATIONS, UPDATED_NBYTES = 14, 26  # of AdamW for a parameter, with split master: done and moved
PASSES = 8  # operations of a parameter and token in a step
TOKENS = (16, 1024, 64 * 1024)  # of a step
LEAST = 2.0**-5  # operations a byte, at the left end
ROOFLINE = "machine.roofline"
Points = Sequence[Mapping[str, Any]]


def require() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots are drawn by matplotlib: pip install matplotlib")


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, **style: Any) -> None:
    axes.plot(x, y, marker=style.pop("marker", "o"), label=label, **style)


def _rates(axes: Axes, points: Points, x: str, label: str, **style: Any) -> None:
    """Draws the GB/s of ``points`` against their ``x``, with intervals."""
    at = [point[x] for point in points]
    rates = [point["GB/s"] for point in points]
    _bars(axes, at, rates, [point.get("rounds", []) for point in points], label, **style)


def _bars(
    axes: Axes,
    at: Sequence[float],
    values: Sequence[float],
    rounds: Sequence[Sequence[float]],
    label: str,
    **style: Any,
) -> None:
    ends = [intervals.of_median(each) or (value,) * 2 for each, value in zip(rounds, values)]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, ends)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, ends)]
    axes.errorbar(at, values, yerr=(below, above), marker="o", capsize=3, label=label, **style)


def _powers_of_two(axes: Axes, ticks: Sequence[float], form: Callable[[float], str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [form(tick) for tick in ticks])
    axes.minorticks_off()


def _bytes(nbytes: float) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / 1024:g} KiB"


def _sweep(points: Points) -> Figure:
    figure, axes = _axes("reading", "block size", "GB/s")
    for depth in sorted({point["depth"] for point in points}):
        of_depth = [point for point in points if point["depth"] == depth]
        _rates(axes, of_depth, "block_nbytes", f"{depth} in flight")
    _powers_of_two(axes, sorted({point["block_nbytes"] for point in points}), _bytes)
    return _ended(figure, axes)


def _ended(figure: Figure, axes: Axes) -> Figure:
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=SMALL + 1)
    return figure


def _disk(points: Points) -> Figure:
    """Reads and writes beside each other, a line for each depth."""
    figure, axes = _axes("this disk", "block size", "GB/s")
    axes.remove()
    both = figure.subplots(1, 2, sharey=True)
    sizes = sorted({point["block_nbytes"] for point in points})
    depths = sorted({point["depth"] for point in points})
    for axes, way in zip(both, ("read", "write")):
        for order, depth in enumerate(depths):
            for kind, style, what in (("auto", "-", "in flight"), ("threads", ":", "threads")):
                chosen = [
                    point
                    for point in points
                    if (point["kind"], point["way"], point["depth"]) == (kind, way, depth)
                ]
                if chosen:
                    colour = f"C{order}"
                    label = f"{depth} {what}"
                    _rates(axes, chosen, "block_nbytes", label, linestyle=style, color=colour)
        axes.set(title=f"{way}s of this disk", xlabel="block size")
        axes.spines[["top", "right"]].set_visible(False)
        _powers_of_two(axes, sizes, _bytes)
    both[0].set(ylabel="GB/s", ylim=(0, 1.05 * max(point["GB/s"] for point in points)))
    both[0].legend(frameon=False, fontsize=SMALL)
    return figure


def _copies(points: Points) -> Figure:
    figure, axes = _axes("memory: a copy", "threads", "GB/s, read and written")
    _rates(axes, points, "threads", "copy")
    _powers_of_two(axes, [point["threads"] for point in points], lambda tick: f"{tick:g}")
    return _ended(figure, axes)


def _threads(points: Points) -> Figure:
    figure, axes = _axes("optimizer step, bf16 with split master", "threads", "G parameters/s")
    at = [point["threads"] for point in points]
    ours = [point.get("split", point.get("G parameters/s")) for point in points]
    _bars(axes, at, ours, [point.get("rounds", []) for point in points], "AdamW")
    moving = [point["moving"] for point in points]
    _line(axes, at, moving, "moving the same bytes", linestyle="--", color=FAINT)
    _powers_of_two(axes, at, lambda tick: f"{tick:g}")
    return _ended(figure, axes)


def _timeline(points: Points) -> Figure:
    """One lane per slot: loading, stepping, saving, from left to right."""
    figure, axes = _axes("update pipeline, one lane per slot", "milliseconds", "slot")
    for order, (kind, inset) in enumerate({"load": 0.05, "step": 0.4, "save": 0.65}.items()):
        of_kind = [point for point in points if point["kind"] == kind]
        for slot in sorted({point["slot"] for point in of_kind}):
            spans = [
                (1e3 * each["start"], 1e3 * (each["end"] - each["start"]))
                for each in of_kind
                if each["slot"] == slot
            ]
            axes.broken_barh(spans, (slot + inset, 0.25), color=f"C{order}")
        axes.plot([], [], color=f"C{order}", linewidth=5, label=kind)
    axes.set_yticks([slot + 0.5 for slot in {point["slot"] for point in points}], [])
    return _ended(figure, axes)


def _budget(title: str, budget: str, model: str) -> Callable[[Points], Figure]:
    def draw(points: Points) -> Figure:
        figure, axes = _axes(title, f"{budget}, of the training state", "tokens/s")
        shares = [100 * point["share"] for point in points]
        _line(axes, shares, [point["tokens/s"] for point in points], model)
        axes.set_xticks(shares, [f"{share:.0f} %" for share in shares])
        return _ended(figure, axes)

    return draw


def _sizes(points: Points) -> Figure:
    figure, axes = _axes("one machine", "parameters", "tokens/s")
    points = sorted(points, key=lambda point: point["parameters"])
    sizes = [point["parameters"] for point in points]
    rates = [point["tokens/s"] for point in points]
    _line(axes, sizes, rates, "homes chosen by the engine")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size / 1e9:.1f} B" for size in sizes])
    axes.minorticks_off()
    return _ended(figure, axes)


def _widths(points: Points) -> Figure:
    figure, axes = _axes("the widest layer that trains", "tiles of a weight", "width")
    factors = [point["factor"] for point in points]
    label = f"{points[0]['budget_nbytes'] / MIB:.0f} MiB of device memory"
    _line(axes, factors, [point["width"] for point in points], label)
    _powers_of_two(axes, factors, lambda tick: f"{tick:g}")
    return _ended(figure, axes)


PLOTS: dict[str, Callable[[Points], Figure]] = {
    "machine.disk": _disk,
    "machine.adam": _threads,
    "machine.memory": _copies,
    "io.sweep": _sweep,
    "adam.threads": _threads,
    "update.timeline": _timeline,
    "train.budget": _budget("everything at home on NVMe", "host budget", "50 M parameters"),
    "gpu_train.budget": _budget(
        "homes chosen by the engine", "the GPU's budget", "1.3 B parameters"
    ),
    "gpu_train.size": _sizes,
    "tiling.width": _widths,
}


def _limits(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]] | None:
    """Returns the products in GFLOP/s by dtype, and memory and disk in GB/s. None without them."""
    medians = {each["name"]: each["median"] for each in rows}
    products = {
        name.removeprefix("machine.products."): median
        for name, median in medians.items()
        if name.startswith("machine.products.")
    }
    slopes = {"host memory": "machine.memory.copy", "disk, both ways": "machine.disk.both"}
    if not products or not medians.keys() >= set(slopes.values()):
        return None
    slopes |= {"link, both ways": "machine.link.both"}
    return products, {what: medians[name] for what, name in slopes.items() if name in medians}


def _roofline(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draws the roofline of `infinity bench`'s ``rows``: products, memory and disk as limits, and
    where the update and a step of so many tokens lie."""
    products, slopes = _limits(rows)
    figure, axes = _axes("roofline of this machine", "operations a byte", "GFLOP/s")
    step = PASSES / (READ_NBYTES + WRITTEN_NBYTES)  # operations a byte of the disk, for each token
    top, ends = max(products.values()), (LEAST, 2 * step * max(TOKENS))
    for order, (name, slope) in enumerate(slopes.items()):
        at = [ends[0], top / slope, ends[1]]
        label = f"{name}: {slope:.3g} GB/s"
        axes.plot(at, [min(top, each * slope) for each in at], label=label, color=f"C{order}")
    for name, rate in products.items():
        axes.axhline(rate, linestyle="--", linewidth=1, color=FAINT)
        axes.annotate(f"products, {name}", (ends[0], rate), fontsize=SMALL, va="bottom")
    for update in (each["median"] for each in rows if each["name"] == "machine.adam.split"):
        place = (OPERATIONS / UPDATED_NBYTES, OPERATIONS * update)
        axes.plot(*place, marker="s", color="C0", linestyle="", label="AdamW's update, measured")
    disk = slopes["disk, both ways"]
    for tokens in TOKENS:
        place = (step * tokens, min(top, step * tokens * disk))
        axes.plot(*place, marker="o", color="C1")
        label = f"a step of\n{tokens:,} tokens"
        below = {"xytext": (0, -6), "textcoords": "offset points", "ha": "center", "va": "top"}
        axes.annotate(label, place, fontsize=SMALL, **below)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=SMALL + 1)
    return figure


def names(found: Mapping[str, Any]) -> list[str]:
    """Lists the plots that a result file has points for."""
    series = [name for name in PLOTS if found.get("series", {}).get(name)]
    return [ROOFLINE, *series] if _limits(found.get("rows", [])) is not None else series


def drawn(found: Mapping[str, Any], chosen: Sequence[str] | None = None) -> dict[str, Figure]:
    """Draws plots of a result file: the ``chosen``, or all of :func:`names`."""
    return {
        name: _roofline(found["rows"]) if name == ROOFLINE else PLOTS[name](found["series"][name])
        for name in (names(found) if chosen is None else chosen)
    }


def as_svg(figure: Figure) -> str:
    """Returns a figure as one element of SVG, the same text for the same figure."""
    return save(figure, "svg").decode()


def save(figure: Figure, form: str, caption: str = "") -> bytes:
    """Returns a figure as a file of ``form``, svg or pdf, with a ``caption`` below it."""
    import matplotlib

    if caption:
        figure.supxlabel(caption, fontsize=SMALL, color=FAINT)
    into = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "infinity"}):
        figure.savefig(into, format=form, metadata=dates[form])
    made = into.getvalue()
    if form != "svg":
        return made
    made = made[made.index(b"<svg") :].replace(b' xmlns="http://www.w3.org/2000/svg"', b"", 1)
    return PICTURE + made.removeprefix(b"<svg").rstrip()
