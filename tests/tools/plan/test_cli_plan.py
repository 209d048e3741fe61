"""`infinity plan`, through `infinity.tools.cli.main` in this process: a tiny config, and budgets of
machines that are not here.

Words used here:

**good input**: what another program may have written. **refused**: exit status 2, one message on
stderr that begins with "infinity plan:", no traceback, nothing on stdout, nothing written.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import prepared
import pytest
import torch
from marks import few

transformers = pytest.importorskip("transformers")

import infinity.tools.cli
from infinity.tools.plan import machine_file, plan_view, saved
from infinity.tools.plan.plan_next import faster_lines
from infinity.tools.plan.saved import SAVED
from infinity.tools.train import compute

TINY = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
}
KEYS = {
    "checkpoint",
    "save_seconds",
    "load_seconds",
    "activations",
    "budgets",
    "fits",
    "device_memory",
    "micro_batch",
    "micro_batches",
    "parameters",
    "trained",
    "lora_rank",
    "quantize",
    "units",
    "tiers",
    "edges",
    "seconds",
    "compute",
    "compute_line",
    "processors_share",
    "rates",
    "step_seconds",
    "tokens_per_step",
    "tokens_per_second",
    "bottleneck",
    "format",  # of a profile for `infinity cost`
    "gpus",
    "checkpoint_nbytes",
    "median_step_seconds",
}
SVG = "{http://www.w3.org/2000/svg}"
FIXED = {
    "--device-memory": "8MiB",
    "--host-memory": "64MiB",
}  # nothing depends on this machine then


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a config and a disk, which is the current one; the cache of disks' rates is
    here too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "cache"))
    Path("model.json").write_text(json.dumps(TINY))
    Path("nvme").mkdir()
    return tmp_path


@pytest.fixture
def run(place, capsys):
    """Status, stdout and stderr of ``infinity plan`` with the tiny model."""

    def run(*words: str, model: str | None = "model.json", budgets: dict = FIXED):
        capsys.readouterr()
        given = ["--model", model] if model else []
        pairs = [word for pair in budgets.items() if pair[0] not in words for word in pair]
        status = infinity.tools.cli.main(["plan", *given, *pairs, *map(str, words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def planned(run):
    """The JSON of a plan that must succeed."""

    def planned(*words: str, **more):
        status, out, err = run("--json", *words, **more)
        assert status == 0, err
        return json.loads(out)

    return planned


def check_refused(answer: tuple[int, str, str], *patterns: str) -> None:
    status, out, err = answer
    assert status == 2, (status, out, err)
    assert out == ""
    assert err.startswith(("infinity plan:", "usage:")), err
    assert "Traceback" not in err
    assert err.count("infinity plan:") == 1
    for pattern in patterns:
        assert re.search(pattern, err), f"{pattern!r} is not in {err!r}"


# --- disks ---


def test_a_plan_that_does_not_fit_names_the_disk_that_it_needs(run):
    """Method: the size that is told is planned with, and fits. Twin: a little less does not."""
    Path("model.json").write_text(json.dumps(TINY | {"n_embd": 256, "n_layer": 8}))
    small = ("--device-memory", "16MiB", "--host-memory", "48MiB")
    status, _, err = run(*small)
    told = re.search(r" or plan with a disk: --nvme-capacity (\d+GiB)$", err.strip())
    assert status == 2 and told, err
    assert run(*small, "--nvme-capacity", told[1])[0] == 0
    status, _, err = run(*small, "--nvme-capacity", "1MiB")
    assert status == 2 and "the disk is full" in err and "--nvme-capacity 1GiB" in err


# --- what it prints ---


def test_a_cluster_is_planned_on_paper(run):
    """Four machines of eight devices: one of 32 ranks is shown, with what was assumed and where the
    figures are from."""
    status, out, err = run("--machine", "dgx-h100", "--nodes", 4, "--json", budgets={})
    found = json.loads(out)
    assert (
        (status, err) == (0, "")
        and found["ranks"] == 32
        and found["assumptions"]
        and found["sources"]
    )
    assert found["tokens_per_step"] == 32 * run_tokens(run) and found["edges"]["all-gather"] > 0
    status, out, _ = run("--machine", "dgx-h100", "--nodes", 4, budgets={})
    assert (
        status == 0
        and "4 x DGX H100, 32 ranks" in out
        and "assumptions:" in out
        and "sources:" in out
    )


def test_a_plan_says_first_whether_it_fits_and_in_what(run, monkeypatch):
    """Method: budgets of a machine, given ones and what is free here; with a mesh, the first
    line is of the best. Twin: forwards that save more than is left do not fit."""
    words = ("--machine", "rtx4090", "--host-memory", "2GiB")
    for more in ((), ("--mesh", "dp=1")):
        first = run(*words, *more, budgets={})[1].splitlines()[0]
        device = r"It fits: device \d.* of 20.1 GiB \(90% of the machine's\), "
        assert re.match(device + r"host \S+ \S+ of 2.0 GiB \(given\), nvme ", first), first
    words = ("--machine", "two-rtx3090", "--mesh", "auto")
    assert run(*words, budgets={})[1].startswith(
        "Each rank of the best mesh fits in what is 90% of"
    )
    out = run("--params", "host", "--optimizer", "host", budgets={})[1]
    assert out.startswith("It fits: ") and "(free here, in one memory with the device)" in out
    monkeypatch.setattr(saved.limits, "memory_left", lambda: 8 << 20)
    small, out, _ = run("--batch-size", 64, budgets={"--host-memory": "64MiB"})
    assert small == 0 and out.startswith("It does not fit: forwards save")


@pytest.mark.parametrize("tier", few(["device", "host"], 1))
def test_no_remedy_names_more_memory_than_the_machine_has(run, tier):
    """Method: the bytes in the remedies. Twin: a budget that the machine has is named."""
    Path("model.json").write_text(json.dumps(TINY | {"n_embd": 8192, "n_layer": 8}))
    words = ("--machine", "laptop", "--params", tier, "--optimizer", tier)
    status, out, err = run(*words, "--nvme-capacity", "1GiB", budgets={})
    assert status == 2 and not re.search(r"--(device|host)-memory \d", err), err
    assert "free" not in err.partition("works here")[2]
    Path("model.json").write_text(json.dumps(TINY | {"n_embd": 512, "n_layer": 4}))
    status, out, err = run(*words, f"--{tier}-memory", "8MiB", budgets={})
    assert status == 2 and re.search(rf"--{tier}-memory \d", err), err


def test_one_device_has_a_timeline(run):
    """By a known model's name, in tokens: every unit of it, with what its queues do, and what
    decides."""
    words = ("--machine", "h200", "--batch-tokens", "32K", "--params", "host")
    words += ("--optimizer", "host", "--sequence-length", "2048")
    found = json.loads(run(*words, "--json", model="llama-1b", budgets={})[1])
    assert found["tokens_per_step"] == 32 * 1024 and len(found["timeline"]) == 18
    block = found["timeline"]["model.layers.7"]
    assert set(block) == {"copy", "forward", "backward", "landing", "step"}
    assert block["copy"][1] <= block["forward"][0] < block["backward"][0] <= block["landing"][0]
    assert found["seconds"][found["bottleneck"]] <= found["step_seconds"] * (1 + 1e-9)
    text = run(*words, "--timetable", model="llama-1b", budgets={})[1]
    assert "model.layers.15" in text and "more (--json has all)" in text
    assert re.search(r"bound by .*, at work for \d+% of it", text.splitlines()[2])
    assert "(--json has all)" not in run(*words, model="llama-1b", budgets={})[1]


@pytest.mark.parametrize("machine, ranks", [("h200", 1), ("two-rtx3090", 2), ("dgx-a100", 8)])
def test_a_step_has_the_tokens_that_were_given_on_any_number_of_ranks(run, machine, ranks):
    """The tokens of the job, with and without a mesh. Twins: samples that do not divide by the
    ranks, and a line that no run has checked plans of several."""
    words = ("--machine", machine, "--batch-tokens", "1K", "--sequence-length", "64", "--json")
    for more in ((), ("--mesh", f"dp={ranks}")):
        found = json.loads(run(*words, *more, budgets={})[1])
        assert found["tokens_per_step"] == 1024 and found["ranks"] == ranks
        unchecked = "no run on several GPUs has checked this" in found["assumptions"]
        assert unchecked == (ranks > 1)
    if ranks > 1:
        answer = run("--machine", machine, "--batch-size", ranks + 1, budgets={})
        check_refused(
            answer, f"{ranks + 1} samples", f"the {ranks} ranks: give --batch-size {ranks}"
        )


@pytest.mark.parametrize("tokens", ["33K", "0", "many", "-64", "1.5K"])
def test_tokens_that_are_no_samples_are_refused(run, tokens):
    words = ("--machine", "h200", "--sequence-length")
    answer = run(*words, "50", f"--batch-tokens={tokens}", budgets={})
    check_refused(answer, "--batch-tokens", "multiple of --sequence-length 50")


def test_tokens_that_are_samples_are_planned_and_size_a_step_alone(run):
    words = ("--machine", "h200", "--sequence-length")
    assert run(*words, "64", "--batch-tokens", "2K", budgets={})[0] == 0
    answer = run(*words, "64", "--batch-tokens", "2K", "--batch-size", 4, budgets={})
    check_refused(answer, "both size a step")


def test_another_machines_plan_does_not_depend_on_this_one(run):
    """Its device is no processor: what a GPU needs for gradients on their way is planned, and too
    little is refused."""
    words = ("--machine", "h200", "--params", "host", "--optimizer", "host")
    found = json.loads(run(*words, "--json", model="llama-8b", budgets={})[1])
    assert found["tiers"]["device"]["parts"]["gradients on their way"] > 2 << 30
    answer = run(*words, "--device-memory", "1GiB", model="llama-8b", budgets={})
    check_refused(answer, "gradients on their way")


def test_a_plan_that_fits_with_recomputation_says_so(run):
    """Twin: one that does not fit then either."""
    words = ("--machine", "two-rtx3090", "--batch-tokens", "64K", "--sequence-length", "4096")
    answer = run(*words, model="llama-8b", budgets={})
    check_refused(answer, "fits with --gradient-checkpointing")
    assert answer[2].endswith(" Add --gradient-checkpointing\n")
    assert "Raise" not in answer[2] and "--device-memory" in answer[2]
    answer = run(*words, "--device-memory", "64MiB", model="llama-1b", budgets={})
    assert answer[0] == 2 and "--gradient-checkpointing" not in answer[2]


def test_a_fused_loss_saves_no_logits(planned, run):
    """Claim: of each token the scores in fp32 less, and the script asks for it. Twin: a plan
    without it."""
    words = ("--machine", "rtx4090", "--batch-size", 1, "--sequence-length", 2048)
    given = {"model": "llama-1b", "budgets": {}}
    whole, parts = (
        planned(*words, *more, **given)["activations"]["nbytes"] for more in ((), ("--fused-loss",))
    )
    assert whole - parts == 2048 * 128_256 * 4
    scripts = [run(*words, "--script", *more, **given)[1] for more in ((), ("--fused-loss",))]
    assert ["fused_loss = true" in script for script in scripts] == [False, True]


def test_a_plan_with_muon_says_what_it_costs(run):
    """Method: the tiny model's matrices, counted here again. The twin: AdamW has no such line."""
    words = ("--machine", "dgx-h100", "--params", "host", "--optimizer", "host")
    found = json.loads(run(*words, "--optim", "muon", "--json", budgets={})[1])
    shapes = [(32, 96), (32, 32), (32, 128), (32, 128)] * 3
    flops = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in shapes)
    assert found["muon"]["matrices"] == len(shapes)
    assert found["muon"]["flops"] == pytest.approx(flops / 8)
    elements = sum(m * n for m, n in shapes)
    assert found["muon"]["nbytes"] == pytest.approx(20 * elements * 7 / 64)
    assert "Newton-Schulz of 12 matrices" in run(*words, "--optim", "muon", budgets={})[1]
    plain = run(*words, budgets={})[1]
    assert "Newton-Schulz" not in plain
    factored = json.loads(run(*words, "--optim", "adafactor", "--json", budgets={})[1])
    state = [each["tiers"]["host"]["parts"]["optimizer state"] for each in (found, factored)]
    assert state[1] < state[0]


def run_tokens(run) -> int:
    return json.loads(run("--json")[1])["tokens_per_step"]


def test_a_cluster_with_all_state_on_its_devices_charges_them(run):
    """Method: a tiny model fits the devices: the host's optimizer needs nothing, and the text has
    no time in powers of ten."""
    words = ("--machine", "dgx-h100", "--params", "device", "--optimizer", "device")
    found = json.loads(run(*words, "--json", budgets={})[1])
    assert found["seconds"]["optimizer"] == 0 < found["seconds"]["optimizer on device"]
    text = run(*words, budgets={})[1]
    assert "e-0" not in text.partition("assumptions:")[0] and " us" in text, text


@pytest.mark.parametrize(
    "words", [("--machine", "none"), ("--machine", "dgx-h100", "--nodes", "0")]
)
def test_a_cluster_that_cannot_be_is_refused(run, words):
    status, out, err = run(*words)
    assert status == 2 and out == "" and err.startswith("infinity plan:")


def test_the_next_parts_gain_is_that_of_the_machine_with_it(run, place):
    """Twin: with nothing on disk, a disk is not offered."""
    words = ("--machine", "rtx4090", "--params", "nvme", "--optimizer", "nvme")
    found = json.loads(run(*words, "--json", budgets={})[1])
    assert found["next"].keys() == {"disk", "memory"} and found["next"]["disk"]["times"] > 1
    assert found["explanation"].startswith("the GPU waits for the disk: it computes ")
    text = (Path(machine_file.MACHINES) / "rtx4090.toml").read_text()
    wider = re.sub(r"(disks = \{count = |\[disks\]\ncount = )1", r"\g<1>2", text)
    assert wider != text
    (place / "wider.toml").write_text(wider)
    other = json.loads(run("--machine", "wider.toml", *words[2:], "--json", budgets={})[1])
    assert found["next"]["disk"]["step_seconds"] == other["step_seconds"]
    assert found["next"]["disk"]["times"] == pytest.approx(
        found["step_seconds"] / other["step_seconds"]
    )
    assert " x with one more disk (" in run(*words, budgets={})[1]
    words = ("--machine", "rtx4090", "--params", "host", "--optimizer", "host")
    assert json.loads(run(*words, "--json", budgets={})[1])["next"] == {}


def test_options_that_make_a_step_faster_are_told_with_their_factor(run):
    """Method: each is planned by itself. Twins: with both nothing is told; moments in 8 bits bring
    nothing where no state is moved."""
    words = ("--machine", "rtx4090", "--batch-tokens", "16K", "--sequence-length", "2048")

    def planned(*more):
        answer = run(*words, *more, "--json", model="llama-8b", budgets={})
        return json.loads(answer[1])

    found = planned()
    assert found["faster"].keys() == {"--gradient-checkpointing", "--moments int8"}
    for option, row in found["faster"].items():
        other = planned(*option.split())
        assert row["step_seconds"] == other["step_seconds"] and option not in other["faster"]
        assert row["times"] == pytest.approx(found["step_seconds"] / other["step_seconds"])
        assert row["times"] >= 1.05
    lines = list(faster_lines(found["faster"]))
    assert [" not exact" in line for line in lines] == ["--moments" in line for line in lines]
    assert planned("--gradient-checkpointing", "--moments", "int8")["faster"] == {}
    small = ("--machine", "h200", "--params", "device", "--optimizer", "device")
    assert json.loads(run(*small, "--json", budgets={})[1])["faster"] == {}


def test_json_has_its_keys_and_they_agree(planned):
    """One object on stdout; parts sum to tiers, units to parameters, tokens and seconds to the
    rate."""
    found = planned(budgets={"--host-memory": "64MiB"})
    assert found.keys() == KEYS
    assert found["parameters"] == sum(
        u["units"] * u["parameters"] for u in found["units"]
    ) - padding(found)
    assert {"device", "host", "nvme"} == found["tiers"].keys()
    for tier in found["tiers"].values():
        assert tier["nbytes"] == sum(tier["parts"].values())
    assert found["tiers"]["host"]["nbytes"] <= 64 << 20
    assert found["edges"].keys() == {
        "nvme->host",
        "host->nvme",
        "host->device",
        "device->host",
        "optimizer",
    }
    assert found["tokens_per_step"] == 4 * 64
    assert found["tokens_per_second"] == pytest.approx(
        found["tokens_per_step"] / found["step_seconds"]
    )
    assert found["step_seconds"] >= max(found["seconds"].values()) > 0
    assert found["bottleneck"] in found["seconds"] and found["compute"] == "measured"
    assert all(u["first"] and u["last"] and u["units"] >= 1 for u in found["units"])


def padding(found: dict) -> int:
    """Elements that units have beyond their parameters."""
    return (
        sum(u["units"] * u["parameters"] for u in found["units"])
        - 256 * 32
        - 64 * 32
        - 64
        - 3 * (12 * 32 * 32 + 13 * 32)
    )


@pytest.mark.parametrize(
    "words", [("--device-memory", "8MiB"), ("--nvme-capacity", "1GiB")], ids=" ".join
)
def test_another_machines_sizes_give_a_plan_and_no_time(run, planned, words):
    """A GPU that is not here, a disk that is not. Twin: with sizes of this machine there is a
    time."""
    found = planned(*words, budgets={})
    assert found["step_seconds"] is None and found["edges"] and words[0] in found["unknown"]
    out = run(*words, budgets={})[1]
    assert "No time is predicted" in out.splitlines()[2] and "--machine" in out.splitlines()[2]
    out = run("--host-memory", "64MiB", "--nvme-path", "nvme", budgets={})[1]
    assert " for a step of 256 tokens" in out.splitlines()[2]


def test_text_names_every_unit_tier_and_part(run, planned):
    """The text for people has the numbers of the JSON; no line of it is empty."""
    status, out, err = run()
    found = planned()
    assert (status, err) == (0, "")
    assert out.startswith("It fits in what is given: device ")
    assert f"{found['parameters']:,} parameters" in out.splitlines()[1]
    for unit in found["units"]:
        assert unit["first"] in out
    for name, tier in found["tiers"].items():
        assert re.search(rf"^{name}: ", out, re.M)
        for what, nbytes in tier["parts"].items():
            assert (what in out) or not nbytes
    assert all(line.strip() for line in out.splitlines())


@pytest.mark.parametrize("homes", [("device", "device"), ("host", "host"), ("nvme", "nvme")])
def test_the_picture_is_xml_whose_parts_are_the_tiers(run, place, homes):
    """--svg: well-formed; one <title> per part that has bytes; a tier's rectangles are as long as
    its share of the largest tier, and lie inside the picture side by side."""
    words = [
        "--params",
        homes[0],
        "--optimizer",
        homes[1],
        "--svg",
        "map.svg",
        "--nvme-path",
        "nvme",
    ]
    status, out, err = run("--json", *words)
    assert status == 0, err
    found = json.loads(out)
    root = ElementTree.parse("map.svg").getroot()
    assert root.tag == SVG + "svg"
    rows: dict[str, list] = {}
    for rect in root.iter(SVG + "rect"):
        if rect.find(SVG + "title") is not None:
            rows.setdefault(rect.get("y"), []).append(rect)
    tiers = [tier for tier in found["tiers"].values() if tier["nbytes"]]
    largest = max(tier["nbytes"] for tier in tiers)
    assert len(rows) == len(tiers)
    for tier, (_, rects) in zip(tiers, sorted(rows.items(), key=lambda row: float(row[0]))):
        assert len(rects) == len([nbytes for nbytes in tier["parts"].values() if nbytes])
        widths = [float(rect.get("width")) for rect in rects]
        whole = plan_view.WIDTH - plan_view.LEFT - 20
        assert sum(widths) == pytest.approx(whole * tier["nbytes"] / largest, abs=0.6 * len(widths))
        places = [
            (float(rect.get("x")), float(rect.get("x")) + float(rect.get("width")))
            for rect in rects
        ]
        assert all(begin >= end - 0.6 for (_, end), (begin, _) in zip(places, places[1:]))
        assert places[0][0] == plan_view.LEFT and places[-1][1] <= plan_view.WIDTH
        names = " ".join(rect.find(SVG + "title").text for rect in rects)
        assert all(what in names for what, nbytes in tier["parts"].items() if nbytes)


def test_a_picture_of_nothing():
    """Tiers without bytes: a picture, not a division by zero."""
    ElementTree.fromstring(
        plan_view.draw({tier: {"nbytes": 0, "parts": {}} for tier in ("device", "host", "nvme")})
    )


# --- what it takes ---


@pytest.mark.parametrize("params", ["device", "host", "nvme"])
@pytest.mark.parametrize("optimizer", ["device", "host", "nvme"])
def test_homes_that_are_named_are_used(planned, params, optimizer):
    """Every unit lies where it was sent, and edges without a tier behind them are empty."""
    words = ("--params", params, "--optimizer", optimizer, "--nvme-path", "nvme")
    found = planned(*words, budgets={"--host-memory": "64MiB"})
    for unit in found["units"]:
        assert (
            unit["weights"].split(" ")[0] == params and unit["optimizer"].split(" ")[0] == optimizer
        )
    disk = "nvme" in (params, optimizer)
    assert (found["tiers"]["nvme"]["nbytes"] > 0) == disk == ("disk" in found["seconds"])
    assert (found["edges"]["host->device"] > 0) == (params != "device")
    assert disk or found["edges"]["nvme->host"] == found["edges"]["host->nvme"] == 0


def test_a_config_file_and_options_over_it(planned, run, place):
    """TOML and JSON are read; the command line goes over them. Twins: no such file, no table, an
    unknown key."""
    Path("c.toml").write_text('params = "host"\noptimizer = "host"\nmoments = "int8"\n')
    Path("c.json").write_text(json.dumps({"params": "host", "optimizer": "host"}))
    small, large = planned("--config", "c.toml"), planned("--config", "c.json")
    assert (
        small["tiers"]["host"]["parts"]["optimizer state"]
        < large["tiers"]["host"]["parts"]["optimizer state"]
    )
    assert planned("--config", "c.toml", "--params", "device")["units"][0]["weights"] == "device"
    check_refused(run("--config", "none.toml"), "none.toml")
    Path("bad.toml").write_text("params = ")
    check_refused(run("--config", "bad.toml"), "bad.toml")
    Path("list.json").write_text("[1]")
    check_refused(run("--config", "list.json"))
    Path("key.json").write_text('{"parms": "host"}')
    check_refused(run("--config", "key.json"), "parms", "params")


def test_host_memory_in_percent(planned, run):
    """A share of weights, master and moments: with 200 % all is on the host; with 60 % part goes to
    disk, within that many bytes. Twins: shares that are none."""
    state = planned()["parameters"] * (2 + 2 + 8)
    homes = (
        "--nvme-path",
        "nvme",
        "--nvme-capacity",
        "1GiB",
        "--params",
        "host",
        "--optimizer",
        "auto",
    )
    for share, most in (("200%", 2 * state), ("150%", 1.5 * state)):
        tiers = planned("--host-memory", share, *homes, budgets={})["tiers"]
        assert tiers["host"]["nbytes"] <= most and (share != "200%" or not tiers["nvme"]["nbytes"])
    check_refused(
        run("--host-memory", "1%", "--params", "host", "--optimizer", "host"),
        r"--host-memory is .* bytes",
        "Raise --host-memory by",
    )
    for wrong in ("0%", "-5%", "x%", "nan%", "inf%", "%"):
        check_refused(run(f"--host-memory={wrong}"), "share")


def test_nothing_is_left_in_the_folder_of_the_disk(run, place):
    """A plan with everything on NVMe leaves the folder and the current one as they were."""
    before = sorted(os.listdir(place))
    status, out, err = run(
        "--params", "nvme", "--optimizer", "nvme", "--nvme-path", "nvme", "--nvme-capacity", "1GiB"
    )
    assert status == 0, err
    assert os.listdir("nvme") == []
    assert set(os.listdir(place)) - {"cache"} == set(before)


def test_a_capacity_without_a_folder_is_another_machines_disk(planned, run, place):
    """--nvme-capacity alone: state goes to a disk that is not here. Twin: too small a one is
    refused."""
    Path("wider.json").write_text(json.dumps(TINY | {"n_embd": 128}))
    words = ("--device-memory", "3MiB", "--host-memory", "5MiB")
    found = planned("--nvme-capacity", "1GiB", *words, model="wider.json")
    assert found["tiers"]["nvme"]["nbytes"] > 0
    check_refused(
        run("--nvme-capacity", "1", *words, model="wider.json"), "the disk is full: .* 1 B to plan"
    )
    assert set(os.listdir(place)) == {"model.json", "wider.json", "nvme"}


def test_a_capacity_without_a_folder_serves_named_homes_too(planned):
    """The same with homes that are named: the disk is as well known as it is to "auto"."""
    found = planned("--nvme-capacity", "1GiB", "--params", "nvme", "--optimizer", "nvme")
    assert found["units"][0]["weights"].startswith("nvme")


def test_int8_and_masters_change_the_state(planned):
    """Bytes of the optimizer's state per parameter, by hand: split 2 + 8, fp32 4 + 8, none 8, int8
    moments 2 + 2."""
    sizes = {}
    Path("wider.json").write_text(json.dumps(TINY | {"n_embd": 128}))  # or whole pages would show
    for master, moments in (
        ("split", "fp32"),
        ("fp32", "fp32"),
        ("none", "fp32"),
        ("split", "int8"),
        ("split", "bf16"),
    ):
        found = planned(
            "--master",
            master,
            "--moments",
            moments,
            "--params",
            "host",
            "--optimizer",
            "host",
            model="wider.json",
            budgets={"--device-memory": "64MiB", "--host-memory": "64MiB"},
        )
        elements = sum(u["units"] * u["parameters"] for u in found["units"])
        sizes[master, moments] = found["tiers"]["host"]["parts"]["optimizer state"] / elements
    expected = {
        ("split", "fp32"): 10,
        ("fp32", "fp32"): 12,
        ("none", "fp32"): 8,
        ("split", "int8"): 4 + 1 / 32,
        ("split", "bf16"): 6,
    }
    for key, nbytes in expected.items():
        assert sizes[key] == pytest.approx(nbytes, rel=0.02), key


def test_the_built_in_model_is_the_default(planned):
    """Without --model it is that of `infinity train`: 50.8 M parameters."""
    found = planned(
        model=None,
        budgets={
            "--host-memory": "4GiB",
            "--device-memory": "4GiB",
            "--batch-size": "1",
            "--sequence-length": "8",
        },
    )
    assert round(found["parameters"] / 1e6, 1) == 50.8


def test_batch_and_length_scale_the_tokens_only(planned):
    """Tokens follow --batch-size and --sequence-length; the plan of the state does not."""
    one, two = (
        planned("--batch-size", "1", "--sequence-length", "16"),
        planned("--batch-size", "3", "--gradient-checkpointing"),
    )
    assert (one["tokens_per_step"], two["tokens_per_step"]) == (16, 3 * 64)
    saved = [each["tiers"]["device"]["parts"].pop(SAVED) for each in (one, two)]
    assert saved == [each["activations"]["nbytes"] for each in (one, two)]
    for each, nbytes in zip((one, two), saved):
        each["tiers"]["device"]["nbytes"] -= nbytes
    assert one["tiers"] == two["tiers"] and one["units"] == two["units"]


def test_tiles_are_named(planned, run):
    """A device budget below the largest layer: its unit says the size of its tiles, within the
    budget."""
    Path("wide.json").write_text(json.dumps(TINY | {"vocab_size": 20000}))
    words = ("--device-memory", "10MiB", "--params", "host", "--optimizer", "host")
    found = planned(*words, model="wide.json")
    tiles = [u["tile_nbytes"] for u in found["units"] if u["tile_nbytes"]]
    assert tiles and max(tiles) <= 1 << 20 and found["tiers"]["device"]["nbytes"] <= 10 << 20
    status, out, _ = run(*words, model="wide.json")
    assert status == 0 and "in tiles of" in out


# --- what it refuses ---


@pytest.mark.parametrize(
    "words",
    [
        ("--device-memory", "1", "--params", "host"),
        ("--host-memory", "1"),
        ("--device-memory", "0"),
        ("--params", "nvme", "--optimizer", "nvme", "--nvme-path", "nvme", "--nvme-capacity", "1"),
    ],
    ids=" ".join,
)
def test_impossible_budgets_say_the_numbers(run, words):
    """Refused with what there is, what is needed and what to change; given that much it works (the
    twin)."""
    answer = run(*words)
    check_refused(
        answer,
        r"(memory|capacity) is .*\(\d+ bytes\)",
        r"the least that works here is .*\(\d+ bytes\)",
        "Raise",
    )
    option, least = answer[2].split()[2], int(re.findall(r"\((\d+) bytes\)", answer[2])[1])
    words = [word for word in words]
    words[words.index(option) + 1] = str(least)
    assert run(*words)[0] == 0


GARBAGE = {
    "no json": "{{{",
    "a list": "[]",
    "null": "null",
    "a number": "3",
    "nothing": "{}",
    "bytes": "\x00\x01",
    "unknown type": {"model_type": "nope"},
    "no causal LM": {"model_type": "vit"},
    "an encoder-decoder": {"model_type": "t5"},
    "no heads": TINY | {"n_head": 0},
    "heads that do not divide": TINY | {"n_head": 3},
    "text for a number": TINY | {"n_head": "x"},
    "half a width": TINY | {"n_embd": 1.5},
    "a negative width": TINY | {"n_embd": -32},
    "no vocabulary": TINY | {"vocab_size": 0},
    "unknown activation": TINY | {"activation_function": "nope"},
    "null layers": TINY | {"n_layer": None},
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_for_a_model_is_one_message(run, what):
    """Config files that are no model: refused."""
    content = GARBAGE[what]
    Path("bad.json").write_text(content if isinstance(content, str) else json.dumps(content))
    check_refused(run(model="bad.json"), r"bad\.json")


@pytest.mark.parametrize(
    "words",
    [
        ("--batch-size", "0"),
        ("--batch-size", "-1"),
        ("--batch-size", "x"),
        ("--sequence-length", "65"),
        ("--sequence-length", "0"),
        ("--sequence-length", "-3"),
        ("--host-memory", "lots"),
        ("--device-memory", "25%"),
        ("--device-memory", "-1"),
        ("--nvme-path", "none"),
        ("--nvme-path", "model.json"),
        ("--nonsense",),
        ("--dtype", "fp8"),
    ],
    ids=" ".join,
)
def test_bad_options_are_one_message(run, words):
    """Options that mean nothing: refused."""
    status, out, err = run(*words)
    assert (status, out) == (2, ""), (status, out, err)
    assert err and "Traceback" not in err


@pytest.mark.parametrize("option", ["--params", "--optimizer", "--activations"])
def test_a_disk_is_found_if_none_is_named(run, planned, option):
    """Claim: the home nvme alone is planned. Twin: a home that is none is refused."""
    assert planned(option, "nvme")
    check_refused(run(option, "tape"), option)


@pytest.mark.parametrize("model", ["none.json", "nvme", "none/config.json"])
def test_a_model_that_is_not_there_is_one_message(run, model):
    """No such file, an empty folder: refused, naming it as a path that is missing."""
    check_refused(run(model=model), re.escape(model))


def test_a_picture_that_cannot_be_written_is_one_message(run):
    """--svg into a folder that is not there: status 2 and its path."""
    status, _, err = run("--svg", "none/map.svg")
    assert status == 2 and "none/map.svg" in err and "Traceback" not in err


# --- models of many kinds, and very large ones ---

SMALL = dict(
    vocab_size=300,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
KINDS = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "cohere2": {},
    "smollm3": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 8},
    "mixtral": {},
    "olmo2": {},
    "phi": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {},
    "mamba": {},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", few(KINDS, 4))
def test_architectures_of_two_layers(planned, kind):
    """A tiny causal LM of every kind is planned and its compute measured; transformers itself
    builds and runs it first."""
    config = {"model_type": kind} | SMALL | KINDS[kind]
    Path("kind.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained("kind.json")
    )
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids)
    found = planned("--batch-size", "1", "--sequence-length", "8", model="kind.json")
    assert found["parameters"] == sum(param.numel() for param in model.parameters())


HUGE = {
    "405 B of wide layers": dict(
        hidden_size=16384,
        num_hidden_layers=126,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "104 B of many narrow layers": dict(
        hidden_size=5120,
        num_hidden_layers=330,
        intermediate_size=13824,
        num_attention_heads=40,
        num_key_value_heads=40,
        vocab_size=64000,
    ),
}


@pytest.mark.parametrize(
    "what",
    [next(iter(HUGE)), *(pytest.param(each, marks=pytest.mark.slow) for each in list(HUGE)[1:])],
)
def test_a_huge_config_is_planned_without_its_memory(place, what):
    """More than 100 B parameters for a machine with 80 GiB of device memory, in a child with 8
    tokens a step: it succeeds and its resident memory never reaches 2 GiB."""
    Path("huge.json").write_text(json.dumps({"model_type": "llama"} | HUGE[what]))
    words = [
        "plan",
        "--model",
        "huge.json",
        "--device-memory",
        "80GiB",
        "--host-memory",
        "1TiB",
        "--nvme-capacity",
        "64TiB",
        "--nvme-path",
        "nvme",
        "--batch-size",
        "1",
        "--sequence-length",
        "8",
        "--json",
    ]
    code = (
        "import sys, resource, infinity.tools.cli;"
        "resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30));"  # spares the others
        "status = infinity.tools.cli.main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr);"
        " sys.exit(status)"
    )
    done = prepared.run("-c", code, *words, imports=prepared.LANGUAGE_MODELS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["parameters"] > 100e9
    assert sum(unit["units"] for unit in found["units"]) > HUGE[what]["num_hidden_layers"]
    peak = int(done.stderr.split()[-1]) * 1024
    print(f"peak {peak / 2**30:.2f} GiB")
    assert peak < 2 << 30


@pytest.mark.parametrize(
    "vocabulary, measured", [pytest.param(32000, True, marks=pytest.mark.slow), (3_000_000, False)]
)
def test_what_is_built_to_measure_compute_has_a_limit(monkeypatch, vocabulary, measured):
    """The probe of three layers has embedding and head as well. With a vocabulary of 3 M (23 GiB of
    both, in bf16) it must be estimated; with a small one it is measured (the twin). Nothing is
    built here: the probe only counts.
    """
    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        intermediate_size=5632,
        num_attention_heads=16,
        vocab_size=vocabulary,
    )
    built = []

    def count(config, layers, batch, length, dtype, *rest):
        small = transformers.LlamaConfig(**config.to_dict() | {"num_hidden_layers": layers})
        with torch.device("meta"):
            built.append(
                sum(p.numel() for p in transformers.LlamaForCausalLM(small).parameters())
                * dtype.itemsize
            )
        return float(layers)

    monkeypatch.setattr(compute, "_measure", count)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    found = compute.compute_time(
        model,
        config,
        batch=1,
        length=8,
        dtype=torch.bfloat16,
        checkpointing=False,
        limits=infinity.Config(device_memory="64GiB"),
    )
    print(f"built {max(built, default=0) / 2**30:.1f} GiB of weights")
    assert max(built, default=0) <= compute.LARGEST_PROBE_NBYTES
    assert (found.how == "measured") == measured


@pytest.mark.parametrize(
    ("budgets", "measured"),
    [
        ({"device_memory": "200KiB"}, False),
        ({"device_memory": "100KiB", "host_memory": "100KiB"}, False),
        ({"device_memory": "2MiB"}, True),
        ({}, True),
    ],
    ids=str,
)
def test_the_time_of_compute_is_measured_within_the_budgets(monkeypatch, budgets, measured):
    """A probe takes no more than the job that it is for; else the time is estimated. Twin: without
    the limit it is measured under every budget."""
    monkeypatch.setattr(compute, "_measure", lambda *args: 1.0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)

    def how() -> str:
        return compute.compute_time(
            model,
            config,
            batch=1,
            length=8,
            dtype=torch.float32,
            checkpointing=False,
            limits=infinity.Config(**budgets),
        ).how

    assert how() == ("measured" if measured else "estimated")
    monkeypatch.setattr(compute, "_room_of", lambda config: 1 << 40)
    assert how() == "measured"


@pytest.mark.parametrize("limit", [compute.WHOLE_FLOPS, 1.0])
def test_compute_scales_with_the_layers(monkeypatch, limit):
    """A small model is measured whole. Of a larger one, one layer and three are: 1 s around and 2 s
    a layer are 1 + 2 n for n layers; never less than one layer's."""
    tried = []

    def count(config, layers, *rest):
        tried.append(layers)
        return 1.0 + 2 * layers

    monkeypatch.setattr(compute, "_measure", count)
    monkeypatch.setattr(compute, "WHOLE_FLOPS", limit)
    for layers in (1, 2, 7):
        config = transformers.GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=100)
        with torch.device("meta"):
            model = transformers.GPT2LMHeadModel(config)
        found = compute.compute_time(
            model,
            config,
            batch=1,
            length=8,
            dtype=torch.float32,
            checkpointing=False,
            limits=infinity.Config(),
        )
        assert (found.seconds, found.how) == (1.0 + 2 * layers, "measured")
    assert tried == ([1, 2, 7] if limit > 1 else [1, 3] * 3)
