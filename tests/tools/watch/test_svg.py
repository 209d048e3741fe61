"""Pictures: one module draws them, well-formed whatever the names are."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import infinity
from infinity.tools.plan.plan_view import draw
from infinity.tools.watch import svg, trace
from infinity.tools.watch.timeline import LANES

SVG = "{http://www.w3.org/2000/svg}"
ODD = "<b> & 'c' \"d\" \x00\x1b\ud800"
SHOWN = "<b> & 'c' \"d\" "  # without what XML has no place for


@pytest.mark.parametrize("name", ["plain", ODD])
def test_names_come_back_as_they_were_given(name):
    """Method: a text, a title and a chart's own words are read back by an XML parser."""
    chart = svg.Chart(name, name, name, [name, "2"], 10.0)
    drawn = chart.draw(
        [
            chart.line([1.0, 10.0], name, 0),
            svg.bar(1, 2, 3.25, 4, "#123", title=name),
            svg.text(0, 0, name),
        ]
    )
    root = ET.fromstring(drawn)
    shown = SHOWN if name == ODD else name
    assert [each.text for each in root.iter(f"{SVG}text")].count(shown) == 6
    assert [each.text for each in root.iter(f"{SVG}title")] == [shown]


def test_a_chart_places_its_values_between_its_axes():
    """Method: a line from nothing to the top; its ends are at the axes, its dots at its points."""
    chart = svg.Chart("", "", "", ["1", "2"], 4.0)
    root = ET.fromstring(chart.draw([chart.line([0.0, 4.0], "up", 0, dashed=True)]))
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("points") == "168.0,244.0 392.0,56.0" and line.get("stroke-dasharray")
    assert [(each.get("cx"), each.get("cy")) for each in root.iter(f"{SVG}circle")] == [
        ("168.0", "244.0"),
        ("392.0", "56.0"),
    ]


def test_one_module_draws():
    """Looks for elements of SVG in all sources: `watch/svg.py` has them, and no other file."""
    root = Path(infinity.__file__).parents[1]
    sources = {
        path: path.read_text()
        for folder in ("infinity", "bench")
        for path in (root / folder).rglob("*.py")
    }
    found = {
        path.relative_to(root).as_posix()
        for path, text in sources.items()
        if any(element in text for element in ("<rect", "<text", "<polyline", "<circle", "</svg>"))
    }
    assert found == {"infinity/tools/watch/svg.py"}


def luminance(colour: str) -> float:
    """That of WCAG 2, section 1.4.3."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    )
    return sum(share * each for share, each in zip((0.2126, 0.7152, 0.0722), linear))


def test_no_two_names_share_a_colour():
    """However many there are, and white text is readable on each. Twin: a name that comes twice has
    one colour, and a known colour is no other name's."""
    names = [f"part {number}" for number in range(200)]
    known = {"part 7": svg.COLOURS[0], "part 9": "#123456"}
    found = svg.colours_of([*names, *names], known)
    assert list(found) == names and len(set(found.values())) == 200
    assert found["part 7"] == svg.COLOURS[0] and found["part 9"] == "#123456"
    assert found == svg.colours_of(names, known)
    for colour in found.values():
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5, colour


TERMS = ("gathered weights", "gradients in the backward", "staged weights", "service buffer")
OTHERS = ("checksums", "average", "gradients of other ranks", "a tile", "taken since the wrap")


@pytest.mark.parametrize("whole", ["weights", "gradients", "optimizer state"])
def test_a_part_of_the_memory_map_has_one_colour_on_all_tiers_and_no_other_has_it(whole):
    """Method: the bars of a map are read back: their titles name the parts."""
    parts = {name: 1 << number for number, name in enumerate((whole, *TERMS, *OTHERS))}
    tiers = {
        "device": {"nbytes": sum(parts.values()), "parts": parts},
        "host": {"nbytes": 3, "parts": {"checksums": 1, whole: 2, "another": 3}},
    }
    root = ET.fromstring(draw(tiers))
    seen: dict[str, set[str]] = {}
    for bar in root.iter(f"{SVG}rect"):
        for title in bar.iter(f"{SVG}title"):
            seen.setdefault(title.text.rpartition(",")[0], set()).add(bar.get("fill"))
    assert len(seen) == len(parts) + 1 and all(len(each) == 1 for each in seen.values())
    assert len(set.union(*seen.values())) == len(seen)


def test_lanes_of_a_timeline_have_colours_of_their_own():
    """Of all lanes that the engine has, and of an extension's."""
    lanes = [*LANES, "a lane of mine", "another"]
    events = [{"lane": lane, "name": lane, "start": 0.0, "end": 1.0} for lane in lanes]
    root = ET.fromstring(trace.draw(events))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert len(bars) == len(lanes) == len({bar.get("fill") for bar in bars})
