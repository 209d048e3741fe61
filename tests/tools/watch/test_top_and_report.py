"""`infinity top` and `infinity report` over a run that was, read as anybody's files."""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser

import browser
import pytest
import torch
from torch import nn

import infinity
from infinity.core.machine.kernel import process_space
from infinity.core.machine.sizes import format_nbytes
from infinity.tools.cli import main
from infinity.tools.watch import run_files

VOID = {"meta", "br", "rect", "polyline", "path"}


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A run of three steps with a timeline, in a cache of its own."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "swap").mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
    config = {
        "params": "nvme",
        "optimizer": "nvme",
        "nvme_paths": [str(tmp_path / "swap")],
        "trace": str(tmp_path / "t.json"),
    }
    model, optimizer = infinity.wrap_model(model, torch.optim.AdamW(model.parameters()), config)
    with infinity.Watch(model, steps=3, every=0.0) as watch:
        for _ in range(3):
            loss = model(torch.ones(2, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.update(loss=loss.item(), tokens=2)
        yield watch.folder
    del model, optimizer


def test_top_shows_the_job_that_runs(watched, capsys):
    """Method: this process is the job. Its tiers, edges with their limits, step and loss are on the
    screen, and in the object."""
    assert main(["top", "--once"]) == 0
    screen = capsys.readouterr().out
    for text in ("running", "step 3 of 3", "loss 0.", "tokens/s", "nvme ", "nvme->host", "GB/s"):
        assert text in screen, screen
    words = " ".join(screen.split())
    assert "compute" in words and "written a day to the drive; for its life in years" in words
    assert main(["top", "--once", "--drive-rating", "1GB"]) == 0
    assert "WARNING" in capsys.readouterr().out
    assert main(["top", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["running"] and found["folder"] == str(watched) and found["ranks"][0]["step"] == 3


def test_top_shows_every_rank(watched, capsys):
    status = next(run_files.read(watched, run_files.STATUS))
    run_files.write(watched, run_files.STATUS, 1, status | {"rank": 1, "step": 2})
    main(["top", "--once"])
    screen = capsys.readouterr().out
    assert "rank 0  step 3" in screen and "rank 1  step 2" in screen


WIDE = {
    "rank": 127,
    "step": 1_234_567,
    "steps": 12_345_678,
    "loss": 12.34567,
    "tokens_per_second": 1_234_567.0,
    "remaining_seconds": 359_999,
    "phase": "backward",
    "unit": "model.language_model.layers.117.mlp.experts.63",
    "shares": dict.fromkeys(
        ("compute", "copies", "disk", "optimizer", "other ranks", "data", "something else"), 1 / 7
    ),
    "tiers": {
        "device": {"charged_nbytes": 85_899_345_920, "planned_nbytes": 85_899_345_920},
        "host": {"charged_nbytes": 999 << 30, "planned_nbytes": 1023 << 30},
    },
    "edges": {
        "all-gather in node": {"nbytes": 1, "rate": 450e9, "limit": 900e9, "stalled": 1.0},
        "nvme->host": {"nbytes": 1, "rate": 12e9, "limit": 14.12e9, "stalled": 0.5},
    },
    "written": {"nbytes": 10**12, "seconds": 100.0, "drives": 4},
}


@pytest.mark.parametrize("refused", [False, True])
def test_top_fits_80_columns(tmp_path, monkeypatch, capsys, refused):
    """Whatever the numbers and names are, and nothing is cut: the words come one behind the other.
    Twin: the same words do not fit on a line each."""
    folder = tmp_path / ("a folder whose name is long, " * 5) / "node-with-a-long-name-12345-67890"
    status = WIDE | ({"format": 10**6} if refused else {})
    run_files.write(folder, run_files.STATUS, 0, status)
    monkeypatch.setattr(run_files, "runs", lambda root: [folder])
    monkeypatch.setattr(run_files, "is_running", lambda folder: True)
    if refused:
        path = folder / "status-rank0.json"
        path.write_text(path.read_text().replace('"format": 1,', '"format": 1000000,'))
    assert main(["top", "--once"]) == 0
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 80, screen
    words = " ".join(screen.split())
    if refused:
        assert "newer" in words
        return
    for text in (
        "step 1,234,567 of 12,345,678 loss 12.3457 1,234,567 tokens/s 99h59m left backward",
        "model.language_model.layers.117.mlp.experts.63",
        "other ranks 14%, data 14%, something else 14%",
        "node-with-a-long-name-12345-67890 running",
        "all-gather in node 450.00 GB/s stalled 100% ######...... 50% of 900.00 GB/s",
        "999.0 GiB of 1023.0 GiB",
    ):
        assert text in words, screen
    assert len(words) > 8 * 80


def test_what_is_over_has_no_time_left(tmp_path, capsys):
    """Method: a job that was interrupted, one whose process was killed, and one whose second rank
    ended. Twin: the rank that runs has its time, on the screen and in the object."""
    process = run_files.this_process()
    mine = {"pid": process.pid, "started": process.started, "space": process_space()}
    mine |= {"at": time.time(), "step": 3, "steps": 9, "remaining_seconds": 336.0}
    for name, phases, pid in (
        ("interrupted", ["ended"], 1),
        ("killed", ["backward"], 1),
        ("mixed", ["backward", "ended"], process.pid),
    ):
        for rank, phase in enumerate(phases):
            status = mine | {"rank": rank, "phase": phase, "pid": pid}
            run_files.write(tmp_path / name, run_files.STATUS, rank, status)
        runs = name == "mixed"
        assert main(["top", "--once", str(tmp_path / name)]) == 0
        screen = capsys.readouterr().out
        assert screen.count("5m36s left") == screen.count(" left") == runs, screen
        assert runs == (f"{name}  over" not in screen)
        assert main(["top", "--json", str(tmp_path / name)]) == 0
        (found,) = json.loads(capsys.readouterr().out)["runs"]
        times = [each["remaining_seconds"] for each in found["ranks"]]
        assert times == ([336.0, None] if runs else [None])


def test_without_a_job_top_says_what_tells(tmp_path, monkeypatch, capsys):
    """The twin, and a folder that is no run."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    assert main(["top", "--once"]) == 0 and "infinity.Watch" in capsys.readouterr().out
    assert main(["top", str(tmp_path)]) == 2 and "no status" in capsys.readouterr().err


@pytest.mark.parametrize(
    "status",
    [
        {"rank": "x", "tiers": [1], "edges": {"a": 3}},
        {"tiers": {"\x1b[2J": {"charged_nbytes": 1, "planned_nbytes": 0, "budget_nbytes": 0}}},
        {"step": True, "loss": "<b>", "remaining_seconds": -1, "unit": "\x1b]0;x\x07", "at": "now"},
        {},
        {
            "step": 10**400,
            "at": -(10**400),
            "edges": {
                "a": {"rate": 10**400, "nbytes": 1},
                "b": {"rate": 1.0, "nbytes": 1, "limit": 10**400},
            },
            "tiers": {
                "a": {"charged_nbytes": -1, "planned_nbytes": 0},
                "b": {"charged_nbytes": 10**400, "planned_nbytes": 1},
            },
        },
    ],
)
def test_top_shows_what_it_can_of_a_strange_status(status, tmp_path, capsys):
    """Method: files of other kinds and with control characters: no traceback, and nothing that a
    terminal obeys."""
    run_files.write(tmp_path, run_files.STATUS, 0, status)
    assert main(["top", "--once", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


class Page(HTMLParser):
    """What a page has: tags that are open, those there were, references, and text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [
            value or ""
            for name, value in attributes
            if name in ("src", "href", "xlink:href", "data", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_report_is_one_page_with_everything_in_it(watched, tmp_path, capsys):
    """Method: the page is parsed as HTML: every tag is closed, nothing is loaded, and the pictures
    are there."""
    out = tmp_path / "page.html"
    assert main(["report", "--out", str(out)]) == 0 and capsys.readouterr().out.strip() == str(out)
    page = Page(out.read_text())
    assert not page.open and not page.references and "script" not in page.tags
    assert page.tags.count("svg") == 4 and "polyline" in page.tags and page.tags.count("rect") > 10
    for text in (
        "Memory map",
        "Timeline",
        "Loss",
        "optimizer state",
        "nvme->host",
        "forward",
        "step 3 of 3",
    ):
        assert text in page.text, text


EVALUATED = {
    "loss": (
        {"data": "a<b>.txt", "held_out_loss": 1.5, "perplexity": 4.4817, "bits_per_byte": None}
        | {"predicted_tokens": 70},
        "a<b>.txt: held-out loss 1.5000 nats per token, 70 tokens predicted; perplexity 4.4817",
    ),
    "scores": ({"tasks": {"sums": {"acc,none": 0.25}}, "fewshot": {}}, "lm-eval: sums acc 0.2500"),
    "many": (
        {"tasks": {"a": {"acc,none": 1.0}, "b": {"f1,strict": 0.5}}, "fewshot": {}},
        "lm-eval: a acc 1.0000; b f1 (strict) 0.5000",
    ),
}


@pytest.mark.parametrize("kind", EVALUATED)
def test_the_report_has_a_line_of_what_was_evaluated(kind, watched, tmp_path, capsys):
    """Names are text on it, and the object has it. Twin: without the option, the page has none."""
    given, line = EVALUATED[kind]
    (tmp_path / "eval.json").write_text(json.dumps(given))
    words = ["report", "--out", str(tmp_path / "page.html"), "--json"]
    assert main([*words, "--eval", str(tmp_path / "eval.json")]) == 0
    assert json.loads(capsys.readouterr().out)["evaluated"] == line
    assert line in Page((tmp_path / "page.html").read_text()).text
    assert main(words) == 0 and "evaluated" not in json.loads(capsys.readouterr().out)
    assert line not in Page((tmp_path / "page.html").read_text()).text


def test_the_report_of_nothing_is_an_error(tmp_path, monkeypatch, capsys):
    """The twin; and a timeline that was named and is not there."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "none"))
    assert main(["report", "--out", str(tmp_path / "page.html")]) == 2
    assert "has no run" in capsys.readouterr().err and not (tmp_path / "page.html").exists()


def test_names_in_a_run_are_text_on_the_page(watched, tmp_path):
    """Method: a plan whose parts and tiers are markup."""
    evil = "<script>alert(1)</script>"
    plan = next(run_files.read(watched, run_files.PLAN))
    run_files.write(
        watched,
        run_files.PLAN,
        0,
        plan | {"tiers": {evil: {"nbytes": 5, "parts": {f"'{evil}": 5}}}},
    )
    assert main(["report", "--out", str(tmp_path / "page.html")]) == 0
    assert "script" not in Page((tmp_path / "page.html").read_text()).tags


def test_a_run_of_another_kind_is_refused(tmp_path, capsys):
    for kind in (run_files.STATUS, run_files.PLAN):
        run_files.write(tmp_path, kind, 0, {"tiers": 3})
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "is not a run" in capsys.readouterr().err


# Of every picture: what its rectangles say, where they are drawn, and the room that they are drawn
# in. Beside that, what is readable.
LOOK = """
(() => {
  const box = (element) => { const { x, y, width, height } = element.getBoundingClientRect(); return { x, y, width, height }; };
  const luminance = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const contrast = (a, b) => { const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y); return (high + 0.05) / (low + 0.05); };
  const style = (element, name) => getComputedStyle(element)[name];
  const paper = style(document.body, "backgroundColor");
  const texts = [...document.querySelectorAll("h1, h2, p, th, td")].map((each) => style(each, "color"));
  const labels = [...document.querySelectorAll("svg text:not([style])")].map((each) => style(each, "fill"));
  return {
    across: [document.documentElement.scrollWidth, document.documentElement.clientWidth],
    contrasts: [...texts, ...labels].map((colour) => contrast(colour, paper)),
    papers: [...document.querySelectorAll("svg .paper")].map((each) => contrast(style(each, "fill"), paper)),
    pictures: [...document.querySelectorAll("h2")].filter((each) => each.textContent != "Ranks").map((heading) => {
      let place = heading.nextElementSibling;
      while (!place.querySelector("svg")) place = place.nextElementSibling;
      const svg = place.querySelector("svg");
      return {
        name: heading.textContent, ...box(svg),
        texts: [...svg.querySelectorAll("text")].map((each) => ({ text: each.textContent, ...box(each) })),
        bars: [...svg.querySelectorAll("rect:has(title)")].map((each) => ({ title: each.textContent, ...box(each) })),
        line: box(svg.querySelector("polyline") ?? svg),
      };
    }),
  };
})()
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(browser.BINARY is None, reason="no chromium here: apt-get install chromium")
def test_the_report_is_drawn_by_a_browser_without_a_network(watched, tmp_path):
    """Method: the page in a headless browser, wide and narrow, light and dark: nothing is
    complained of, nothing but the page is asked for, every bar and label lies inside its picture,
    the bars of the memory map are as long as this run's plan says, the timeline has the three
    steps, pictures are no wider than the screen, text stands out from its ground, and the page
    itself needs no scrolling sideways.
    """
    page = tmp_path / "page.html"
    assert main(["report", "--out", str(page)]) == 0
    tiers = next(run_files.read(watched, run_files.PLAN))["tiers"]
    planned = {
        f"{what}, {format_nbytes(nbytes)}"
        for of_tier in tiers.values()
        for what, nbytes in of_tier["parts"].items()
    }
    largest = max(nbytes for of_tier in tiers.values() for nbytes in of_tier["parts"].values())
    with browser.browsing(tmp_path) as shown:
        for width, dark in ((1200, False), (1200, True), (420, False), (420, True)):
            shown.open(page, width=width, dark=dark)
            look = shown.evaluate(LOOK)
            assert shown.complaints == [] and shown.requests == [page.as_uri()]
            assert (
                look["across"][0] <= look["across"][1]
                and min(look["contrasts"]) >= 4.5
                and set(look["papers"]) == {1}
            )
            loss, pace, memory, timeline = look["pictures"]
            assert [each["name"] for each in look["pictures"]] == [
                *("Loss", "Tokens a second", "Memory map", "Timeline")
            ]
            for picture in look["pictures"]:  # whole, without scrolling
                assert 0 <= picture["x"] and picture["x"] + picture["width"] <= width
            for picture in look["pictures"]:
                for each in (*picture["bars"], *picture["texts"], picture["line"]):
                    right, bottom = (
                        picture["x"] + picture["width"],
                        picture["y"] + picture["height"],
                    )
                    assert (
                        picture["x"] - 1 <= each["x"] and each["x"] + each["width"] <= right + 1
                    ), (picture["name"], each)
                    assert (
                        picture["y"] - 1 <= each["y"] and each["y"] + each["height"] <= bottom + 1
                    ), (picture["name"], each)
            assert {bar["title"] for bar in memory["bars"]} == planned
            longest = max(bar["width"] for bar in memory["bars"])
            for bar in memory["bars"]:
                nbytes = next(
                    n
                    for t in tiers.values()
                    for what, n in t["parts"].items()
                    if f"{what}, {format_nbytes(n)}" == bar["title"]
                )
                assert bar["width"] == pytest.approx(longest * nbytes / largest, abs=2)
            assert {bar["title"].partition(",")[0] for bar in timeline["bars"]} >= {
                "step 1",
                "step 2",
                "step 3",
            }
            assert loss["line"]["width"] > loss["width"] / 2


@pytest.mark.slow
@pytest.mark.skipif(browser.BINARY is None, reason="no chromium here: apt-get install chromium")
def test_a_page_that_fails_and_loads_is_seen(tmp_path):
    """The twin: a page with an error, a word on the console, and a picture from elsewhere."""
    page = tmp_path / "page.html"
    page.write_text(
        "<img src='http://example.invalid/a.png'><script>console.log('here'); nowhere()</script>"
    )
    with browser.browsing(tmp_path) as shown:
        shown.open(page)
        assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown"} <= {
            kind for kind, _ in shown.complaints
        }
        assert shown.requests == [page.as_uri(), "http://example.invalid/a.png"]
