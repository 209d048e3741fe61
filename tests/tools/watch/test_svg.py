"""Pictures: one module draws them, well-formed whatever the names are."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import infinity
from infinity.tools.watch import svg

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
