"""svg: draws the pictures: memory map, timeline, loss curve, and plots of the benchmarks.

mark      one element of a picture, as text; positions are in pixels from the upper left corner
chart     axes with marks by value: x evenly by position, y from 0 to the top

Callers pass unescaped text: all text is escaped here. A page can style the classes paper, part,
axis, curve, pace and inside.
"""

from __future__ import annotations

import colorsys
import html
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...files.outputs import PICTURE

# In their order; white text is readable on them. `colours` goes on where they end.
COLOURS = (
    *("#1f6fb2", "#c4511d", "#277f45", "#7a4fb0", "#8a6d1b", "#a8443c", "#2f7f86", "#6b6b6b"),
    *("#b0457f", "#4d5fc4", "#5f7a1f", "#8c5a3c", "#166b5b", "#3d5a73", "#7d4a94", "#a12f2f"),
)
STYLE = "<style>text { font: 12px system-ui, sans-serif; fill: #444; }</style>"
PAPER = "<rect class='paper' width='100%' height='100%' fill='#fff'/>"
EDGED = "class='part' stroke='#fff' "
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Point = tuple[float, float]


def colours() -> Iterator[str]:
    """Yields colours without end, each once."""
    yield from COLOURS
    seen = set(COLOURS)
    for number in itertools.count():
        hue, turn = 0.618034 * number % 1.0, number % 7  # the golden section: far from the others
        channels = colorsys.hls_to_rgb(hue, 0.18 + 0.015 * turn, 0.45 + 0.05 * turn)
        colour = "#" + "".join(f"{round(255 * each):02x}" for each in channels)
        if colour not in seen:
            seen.add(colour)
            yield colour


def colours_of(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Gives each of ``names`` a colour that no other one has: that of ``known``, if it is there."""
    free = (each for each in colours() if each not in known.values())
    return {name: known.get(name) or next(free) for name in dict.fromkeys(names)}


def picture(width: int, height: int, marks: Iterable[str]) -> str:
    """Draws a whole picture, for a page or a file of its own."""
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    return f"{PICTURE.decode()} {size}>{STYLE}{PAPER}{''.join(marks)}</svg>"


def text(
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "",
    colour: str = "",
    bold: bool = False,
    inside: bool = False,
) -> str:
    """Draws text that starts at ``x``, or has its middle or end there, by ``anchor``. ``inside``: a
    page may leave it out where the picture is small."""
    more = (
        (" class='inside'" if inside else "")
        + (f" text-anchor='{anchor}'" if anchor else "")
        + (f" style='fill:{colour}'" if colour else "")
        + (" font-weight='bold'" if bold else "")
    )
    return f"<text x='{_short(x)}' y='{_short(y)}'{more}>{_escaped(content)}</text>"


def bar(
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    *,
    title: str = "",
    edged: bool = False,
    opacity: float = 1.0,
) -> str:
    """Draws a rectangle. ``title``: its tooltip. ``edged``: draws an edge, to separate it from its
    neighbours."""
    more = f" fill-opacity='{opacity:g}'" if opacity < 1.0 else ""
    inside = f"<title>{_escaped(title)}</title>" if title else ""
    place = f"x='{_short(x)}' y='{_short(y)}' width='{_short(width)}' height='{_short(height)}'"
    return f"<rect {EDGED if edged else ''}{place} fill='{colour}'{more}>{inside}</rect>"


def line(
    points: Iterable[Point],
    colour: str,
    *,
    width: float = 2.0,
    kind: str = "curve",
    dashed: bool = False,
    dots: bool = False,
) -> str:
    """Draws straight lines from point to point, with a dot on each if ``dots``. ``kind``: its
    class."""
    points = list(points)
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = " stroke-dasharray='5 4'" if dashed else ""
    marks = (
        "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in points)
        if dots
        else ""
    )
    return (
        f"<polyline class='{kind}' points='{places}' fill='none' stroke='{colour}'"
        f" stroke-width='{width:g}'{style}/>{marks}"
    )


def axes(left: float, top: float, right: float, bottom: float) -> str:
    """Draws both axes, which meet at the lower left corner."""
    path = f"M{_short(left)} {_short(top)}V{_short(bottom)}H{_short(right)}"
    return f"<path class='axis' d='{path}' fill='none' stroke='#bbb'/>"


@dataclass(frozen=True)
class Chart:
    """Maps values to positions in a picture: x evenly by tick, y from 0 to ``top``."""

    title: str
    x_name: str
    y_name: str
    ticks: Sequence[str]
    top: float

    width, height, margin = 560, 300, 56

    def x(self, position: float) -> float:
        """Returns the x coordinate of a position among the ticks."""
        return self.margin + (self.width - 2 * self.margin) * (position + 0.5) / len(self.ticks)

    def y(self, value: float) -> float:
        """Returns the y coordinate of a value."""
        return self.height - self.margin - (self.height - 2 * self.margin) * value / self.top

    def draw(self, marks: Iterable[str]) -> str:
        """Draws the whole picture: the axes with their names and numbers, and ``marks``."""
        bottom, left, right = self.height - self.margin, self.margin, self.width - self.margin
        parts = [
            text(left, 22, self.title, bold=True),
            axes(left, self.margin - 10, right + 10, bottom),
            text(self.width / 2, self.height - 12, self.x_name, anchor="middle"),
            text(left - 6, self.margin - 16, self.y_name),
        ]
        for value in (0.0, self.top / 2, self.top):
            parts.append(text(left - 6, self.y(value) + 4, f"{value:.3g}", anchor="end"))
        for position, tick in enumerate(self.ticks):
            parts.append(text(self.x(position), bottom + 16, tick, anchor="middle"))
        return picture(self.width, self.height, [*parts, *marks])

    def line(self, values: Sequence[float], name: str, order: int, *, dashed: bool = False) -> str:
        """Draws a line through ``values``, with its name in the corner, in colour ``order``."""
        colour = next(itertools.islice(colours(), order, None))
        points = [(self.x(position), self.y(value)) for position, value in enumerate(values)]
        name = text(
            self.width - self.margin, self.margin + 16 * order, name, anchor="end", colour=colour
        )
        return line(points, colour, dashed=dashed, dots=True) + name


def _escaped(content: str) -> str:
    return html.escape(NOT_IN_XML.sub("", content))


def _short(place: float) -> str:
    """Formats pixels with one decimal, or none if it is 0."""
    return f"{place:.1f}".removesuffix(".0")
