"""`infinity top` and `infinity report` over a run that was, read as anybody's files."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import infinity
from infinity.cli import main
from infinity.machine import run_files

VOID = {"meta", "br", "rect", "polyline"}


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A run of three steps with a timeline, in a cache of its own."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "swap").mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
    config = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(tmp_path / "swap")], "trace": str(tmp_path / "t.json")}
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
    """Method: this process is the job. Its tiers, edges with their limits, step and loss are on the screen, and in the object."""
    assert main(["top", "--once"]) == 0
    screen = capsys.readouterr().out
    for text in ("running", "step 3 of 3", "loss 0.", "tokens/s", "nvme ", "nvme->host", "GB/s"):
        assert text in screen, screen
    assert main(["top", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["running"] and found["folder"] == str(watched) and found["ranks"][0]["step"] == 3


def test_top_shows_every_rank(watched, capsys):
    status = next(run_files.read(watched, run_files.STATUS))
    run_files.write(watched, run_files.STATUS, 1, status | {"rank": 1, "step": 2})
    main(["top", "--once"])
    screen = capsys.readouterr().out
    assert "rank 0  step 3" in screen and "rank 1  step 2" in screen


def test_without_a_job_top_says_what_tells(tmp_path, monkeypatch, capsys):
    """The twin, and a folder that is no run."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    assert main(["top", "--once"]) == 0 and "infinity.Watch" in capsys.readouterr().out
    assert main(["top", str(tmp_path)]) == 2 and "no status" in capsys.readouterr().err


@pytest.mark.parametrize(
    "status",
    [{"rank": "x", "tiers": [1], "edges": {"a": 3}}, {"tiers": {"\x1b[2J": {"charged_nbytes": 1, "planned_nbytes": 0, "budget_nbytes": 0}}},
     {"step": True, "loss": "<b>", "remaining_seconds": -1, "unit": "\x1b]0;x\x07", "at": "now"}, {},
     {"step": 10**400, "at": -(10**400), "edges": {"a": {"rate": 10**400, "nbytes": 1}, "b": {"rate": 1.0, "nbytes": 1, "limit": 10**400}},
      "tiers": {"a": {"charged_nbytes": -1, "planned_nbytes": 0}, "b": {"charged_nbytes": 10**400, "planned_nbytes": 1}}}],
)  # fmt: skip
def test_top_shows_what_it_can_of_a_strange_status(status, tmp_path, capsys):
    """Method: files of other kinds and with control characters: no traceback, and nothing that a terminal obeys."""
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
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")]
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
    """Method: no browser is here; the page is parsed as HTML: every tag is closed, nothing is loaded, and the pictures are there."""
    out = tmp_path / "page.html"
    assert main(["report", "--out", str(out)]) == 0 and capsys.readouterr().out.strip() == str(out)
    page = Page(out.read_text())
    assert not page.open and not page.references and "script" not in page.tags
    assert page.tags.count("svg") == 3 and "polyline" in page.tags and page.tags.count("rect") > 10
    for text in ("Memory map", "Timeline", "Loss", "optimizer state", "nvme->host", "forward", "step 3 of 3"):
        assert text in page.text, text


def test_the_report_of_nothing_is_an_error(tmp_path, monkeypatch, capsys):
    """The twin; and a timeline that was named and is not there."""
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "none"))
    assert main(["report", "--out", str(tmp_path / "page.html")]) == 2
    assert "has no run" in capsys.readouterr().err and not (tmp_path / "page.html").exists()


def test_names_in_a_run_are_text_on_the_page(watched, tmp_path):
    """Method: a plan whose parts and tiers are markup."""
    evil = "<script>alert(1)</script>"
    plan = next(run_files.read(watched, run_files.PLAN))
    run_files.write(watched, run_files.PLAN, 0, plan | {"tiers": {evil: {"nbytes": 5, "parts": {f"'{evil}": 5}}}})
    assert main(["report", "--out", str(tmp_path / "page.html")]) == 0
    assert "script" not in Page((tmp_path / "page.html").read_text()).tags


def test_a_run_of_another_kind_is_refused(tmp_path, capsys):
    for kind in (run_files.STATUS, run_files.PLAN):
        run_files.write(tmp_path, kind, 0, {"tiers": 3})
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "is not a run" in capsys.readouterr().err
