"""`infinity cost` and `infinity fleet`, through `infinity.tools.cli.main`, on small files.

Words used here:

**refused**: exit status 2, one message on stderr that begins with the command, no traceback,
nothing on stdout, nothing written.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from infinity.tools.cli import main
from infinity.tools.cost.cost import START_SECONDS

FLEET = """
[workers.h100]
count = 2
dollars_per_hour = 3.0

[workers.old]
count = 4
dollars_per_hour = 0.5

[jobs.big]
steps = 40_000
gpus = 2
rates = { h100 = 1.3, old = 0.4 }

[jobs.small]
steps = 6_000
rates = { h100 = 0.9, old = 0.35 }
deadline = "6h"
"""
PRICES = """cloud,zone,instance,gpu,count,market,time,dollars_per_hour
aws,us-east-1a,p4,A100,8,on-demand,,32.0
aws,us-east-1b,p4,A100,8,spot,2026-03-01T00:00Z,16.0
gcp,us-central1-a,a2,A100,1,spot,2026-03-01T00:00Z,3.0
gcp,us-central1-a,a2,A100,1,spot,2026-03-02T00:00Z,0.5
lambda,us-south-1,gh,GH200,1,on-demand,,1.5
"""
PROFILE = {
    "gpus": {"NVIDIA A100-SXM4-80GB:1": 2000.0},
    "save_seconds": 20.0,
    "load_seconds": 10.0,
    "checkpoint_nbytes": 100e9,
    "losses": [3.2],
}
RESTART = START_SECONDS + PROFILE["load_seconds"]
COST = ["cost", "--profile", "run.json", "--prices", "prices.csv", "--tokens", "1B"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with a fleet, prices and a profile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.toml").write_text(FLEET)
    (tmp_path / "prices.csv").write_text(PRICES)
    (tmp_path / "run.json").write_text(json.dumps(PROFILE))
    return tmp_path


def reported(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, argv: list[str]) -> str:
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    assert said.err.startswith(f"infinity {argv[0]}: ")
    return said.err


# --- cost ---


def test_offers_are_listed_cheapest_first(place, capsys):
    """Method: by hand: 10^9 tokens at 2,000 a second and GPU are 138.9 hours of one. Twin: what the
    profile does not know is named, and not priced."""
    found = reported(capsys, *COST)
    hours = 1e9 / 2000 / 3600
    assert [row["gpu"] for row in found["offers"]] == ["A100"] * 3
    assert found["offers"][0]["dollars"] == pytest.approx(3 * 24 + 0.5 * (hours - 24))
    assert found["offers"][1]["dollars"] == pytest.approx(16 * hours / 8)
    assert found["offers"][2]["hours"] == pytest.approx(hours / 8)
    assert found["left_out"] == {"GH200": "is not in the profile"}
    assert found["plan"] is None and found["start"] == "2026-03-01T00:00Z"
    assert main(COST) == 0
    said = capsys.readouterr().out
    assert "gcp us-central1-a a2 A100:1 spot" in said and "left out: GH200" in said


def test_moves_are_planned_where_they_pay(place, capsys):
    """Method: a dear day on one GPU, then a cheap market; a long job moves, at the seconds of its
    own checkpoint and dollars for its bytes. Twin: a dearer move is not made."""
    found = reported(capsys, *COST, "--move", "seconds=auto dollars=0.01/GB")
    assert found["move"] == {"dollars": pytest.approx(1.0), "seconds": 20 + RESTART}
    assert found["plan"]["moves"] == 0
    offers = (place / "prices.csv").read_text() + "gcp,b,a2,A100,1,spot,2026-03-01T00:00Z,1.0\n"
    (place / "prices.csv").write_text(offers)
    found = reported(capsys, *COST, "--move", "seconds=auto dollars=9")
    plan = found["plan"]
    assert plan["moves"] == 1 and plan["stays"][1]["time"] == "2026-03-02T00:00Z"
    hours = 1e9 / 2000 / 3600 - 24
    assert plan["dollars"] == pytest.approx(24 + 9 + 0.5 * (hours + (20 + RESTART) / 3600))
    assert main([*COST, "--move", "dollars=9"]) == 0 and "With 1 move" in capsys.readouterr().out
    assert main([*COST, "--move", "dollars=999"]) == 0
    assert "No move pays" in capsys.readouterr().out


def test_a_file_of_very_many_offers(place, capsys):
    """Method: 20,000 offers in the file, of which the last is the cheapest; half the GPUs are not
    in the profile. Twin: the list shows ten of each, the JSON all."""
    rows = [f"aws,z,m{at},{('A100', 'T4')[at % 2]},1,spot,,{9 - at / 9e3}" for at in range(19_999)]
    rows += ["aws,z,last,A100,1,spot,,0.5"] + [
        f"aws,z,late{at},A100,1,spot,2030-01-01,9" for at in range(20)
    ]
    header = PRICES.partition("\n")[0]
    (place / "prices.csv").write_text("\n".join([header, *rows]))
    argv = [*COST, "--move", "dollars=1", "--start", "2029-12-01"]
    found = reported(capsys, *argv)
    assert found["offers"][0]["instance"] == "last" and len(found["offers"]) == 10_001
    assert len(found["left_out"]) == 21 and found["plan"]["moves"] == 0
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "and 9,991 dearer offers" in said and "and 11 more" in said


def test_spot_machines_lose_time(place, capsys):
    """Method: a notice that is long enough for a save, and one that is not; on demand nothing is
    lost. Saves are 775 s apart: sqrt(2 x 20 s x 15,000 s), less than 2 % of the time allows."""
    rows = {}
    for notice in ("25s", "15s"):
        found = reported(capsys, *COST, "--between-failures", "15000", "--notice", notice)
        rows[notice] = {row["market"]: row for row in found["offers"]}, found
    (short, of_short), (long, of_long) = rows["15s"], rows["25s"]
    assert of_long["notice_suffices"] and not of_short["notice_suffices"]
    assert of_long["lost_seconds"] == 20 + RESTART
    assert of_short["lost_seconds"] == 775 / 2 + RESTART
    share = 775 / 795 * (1 - (775 / 2 + RESTART) / 15000)
    assert short["spot"]["tokens_per_second"] == pytest.approx(
        short["spot"]["count"] * 2000 * share
    )
    assert short["spot"]["losses"] == pytest.approx(short["spot"]["hours"] * 3600 / 15000)
    assert short["on-demand"]["losses"] == 0 and short["on-demand"]["tokens_per_second"] == 16000
    assert long["spot"]["hours"] < short["spot"]["hours"]


def spot_hours(found: dict) -> float:
    return sum(row["hours"] for row in found["offers"] if row["market"] == "spot")


def test_a_restart_takes_what_the_page_of_returns_says(place, capsys):
    """Method: the row of that page, beside the bill of a loss; a profile's figure, and an option
    over it. Twin: with a restart of no time a loss costs less, and the hours are fewer."""
    page = (Path(__file__).parents[3] / "docs" / "returns.md").read_text()
    (row,) = re.findall(r"^\| a machine is lost \|.*$", page, re.M)
    assert max(map(float, re.findall(r"\d+", row))) == START_SECONDS
    lost = [*COST, "--between-failures", "15000"]
    found = {each: reported(capsys, *lost, "--restart", each) for each in ("0", "5m")}
    found[None] = reported(capsys, *lost)
    assert found[None]["saves"]["restart_seconds"] == RESTART
    assert found["5m"]["saves"]["restart_seconds"] == 300
    hours = [spot_hours(found[each]) for each in ("0", None, "5m")]
    assert hours == sorted({*hours}) and len(hours) == 3
    (place / "run.json").write_text(json.dumps(PROFILE | {"restart_seconds": 200}))
    assert reported(capsys, *lost)["saves"]["restart_seconds"] == 200
    assert main(lost) == 0
    assert "a restart takes 200 s (--restart)" in capsys.readouterr().out
    assert "--restart" in refused(capsys, [*lost, "--restart", "soon"])


def test_a_job_of_so_many_hours_is_priced(place, capsys):
    """Method: on the profile's own GPU it takes these hours; on eight, an eighth. Twins: tokens and
    hours together, and none of both."""
    words = [word for word in COST if word not in ("--tokens", "1B")]
    found = reported(capsys, *words, "--hours", "24")
    hours = {row["count"]: row["hours"] for row in found["offers"]}
    assert hours[1] == pytest.approx(24) and hours[8] == pytest.approx(3)
    for wrong in ([*COST, "--hours", "24"], words, [*words, "--hours", "0"]):
        assert main(wrong) == 2
        assert "--hours" in capsys.readouterr().err


def test_lives_of_machines_give_their_rate(place, capsys):
    (place / "lives.csv").write_text(
        "cloud,gpu,started,seen_last,end\naws,A100,2026-03-01,2026-03-02,lost\n"
        "gcp,A100,2026-03-01,2026-03-02,still running\n"
    )
    rows = reported(capsys, *COST, "--lifetimes", "lives.csv")["offers"]
    lost = {row["cloud"]: row["losses"] for row in rows if row["market"] == "spot"}
    assert lost["gcp"] == 0 and lost["aws"] > 0


def test_several_machines_cost_and_fail_together(place, capsys):
    """By hand: three machines train three times as fast, cost three times as much an hour, and one
    of them is lost three times as often. Twins: one machine, and a rate of its own for as many
    GPUs."""
    lost = ("--between-failures", "90000", "--notice", "25s")
    one = {row["market"]: row for row in reported(capsys, *COST, *lost)["offers"]}
    found = reported(capsys, *COST, *lost, "--nodes", "3")
    three = {row["market"]: row for row in found["offers"]}
    assert three["on-demand"]["tokens_per_second"] == 3 * one["on-demand"]["tokens_per_second"]
    assert three["on-demand"]["dollars"] == pytest.approx(one["on-demand"]["dollars"])
    spot = three["spot"]
    assert spot["losses"] == pytest.approx(3 * spot["hours"] * 3600 / 90000)
    assert spot["name"].startswith("3 x ") and spot["nodes"] == 3 and one["spot"]["nodes"] == 1
    own = {"NVIDIA A100-SXM4-80GB:1": 2000.0, "A100:24": 30000.0}
    (place / "run.json").write_text(json.dumps(PROFILE | {"gpus": own}))
    rows = reported(capsys, *COST, "--nodes", "3")["offers"]
    assert {row["tokens_per_second"] for row in rows if row["count"] == 8} == {30000.0}
    assert main([*COST, "--nodes", "3", "--sky", "task.yaml"]) == 0
    assert "num_nodes: 3" in (task := (place / "task.yaml").read_text()) and "torchrun" in task


def test_machines_on_demand_fail_without_notice(place, capsys):
    """By hand: a save fits the notice of a spot machine, and an on-demand one gives none: it loses
    half the time between two saves. Twins: none is given, and a mean life of 0."""
    options = ("--on-demand-failures", "15000", "--notice", "25s")
    found = reported(capsys, *COST, *options)
    rows = {row["market"]: row for row in found["offers"]}
    share = 775 / 795 * (1 - (775 / 2 + RESTART) / 15000)
    assert rows["on-demand"]["tokens_per_second"] == pytest.approx(8 * 2000 * share)
    assert rows["on-demand"]["losses"] > 0 and rows["spot"]["losses"] == 0
    assert found["lost_seconds"] == 20 + RESTART
    assert found["lost_seconds_on_demand"] == 775 / 2 + RESTART
    assert main([*COST, *options]) == 0
    assert "comes without notice, and costs" in capsys.readouterr().out
    assert {row["losses"] for row in reported(capsys, *COST)["offers"]} == {None}
    assert "above 0" in refused(capsys, [*COST, "--on-demand-failures", "0"])


def test_a_plan_is_a_profile(place, capsys):
    """The rate of a planned machine prices its GPU: of one, of two, and of a mesh. Its saves are
    those of losses and moves. Twins: a GPU that was not planned is named; without its saves no move
    is priced."""
    (place / "prices.csv").write_text(
        PRICES.partition("\n")[0] + "\nbox,home,rig,RTX3090,2,on-demand,,1.0\n"
        "box,home,pod,H100,8,on-demand,,9.0\n"
    )
    shape = ("--model", "llama-1b", "--gradient-checkpointing")
    for words in (
        ("--machine", "rtx3090"),
        ("--machine", "two-rtx3090"),
        ("--machine", "two-rtx3090", "--mesh", "dp=2", "--sequence-length", "256"),
    ):
        plan = reported(capsys, "plan", *shape, *words)
        (place / "run.json").write_text(json.dumps(plan))
        found = reported(capsys, *COST)
        (row,) = found["offers"]
        (rate,) = plan["gpus"].values()
        ranks = plan["ranks"]
        assert row["gpu"] == "RTX3090" and row["tokens_per_second"] == pytest.approx(
            rate * 2 / ranks
        )
        assert found["left_out"] == {"H100": "is not in the profile"}
        move = reported(capsys, *COST, "--move", "seconds=60 dollars=0.01/GB")["move"]
        assert move["dollars"] == pytest.approx(plan["checkpoint_nbytes"] / 1e11)
        saves = reported(capsys, *COST, "--move", "seconds=auto", "--on-demand-failures", "30d")
        assert plan["save_seconds"] == plan["checkpoint"]["save_seconds"] > 0
        assert saves["saves"]["save_seconds"] == pytest.approx(plan["save_seconds"])
        assert saves["move"]["seconds"] == pytest.approx(
            plan["save_seconds"] + START_SECONDS + plan["load_seconds"]
        )
        del plan["save_seconds"]
        (place / "run.json").write_text(json.dumps(plan))
        assert "save_seconds" in refused(capsys, [*COST, "--move", "seconds=auto"])


def test_a_task_of_skypilot(place, capsys):
    """Method: read as YAML: offers in order, the plan's first. Our own file is replaced. Twin: one
    of another kind stays."""
    yaml = pytest.importorskip("yaml")
    assert main([*COST, "--sky", "task.yaml", "--move", "dollars=0"]) == 0
    task = yaml.safe_load((place / "task.yaml").read_text())
    first, second, third = task["resources"]["ordered"]
    assert first == {
        "infra": "gcp/us-central1/us-central1-a",
        "instance_type": "a2",
        "accelerators": "A100:1",
        "use_spot": True,
    }
    assert second["infra"] == "aws/us-east-1/us-east-1b" and third["use_spot"] is False
    assert "--resume" in task["run"]
    assert main([*COST, "--sky", "task.yaml"]) == 0
    capsys.readouterr()
    (place / "task.yaml").write_text("mine: 1\n")
    assert "overwrite" in refused(capsys, [*COST, "--sky", "task.yaml"])
    assert (place / "task.yaml").read_text() == "mine: 1\n"
    assert "prices.csv" in refused(capsys, [*COST, "--sky", "prices.csv", "--overwrite"])


def test_offers_of_clouds_that_skypilot_lacks_are_left_out_of_its_task(place, capsys, monkeypatch):
    """One offer of a box at home beside others: the task says that it is left out, and SkyPilot's
    own parser takes the rest, where it is installed (its catalogues, which are on the net, are not
    asked). Twins: with the box, it refuses the task; of the box alone, no task is written."""
    yaml = pytest.importorskip("yaml")
    prices = (place / "prices.csv").read_text()
    head = prices.splitlines()[0]
    box = dict(zip(head.split(","), "box home-1 rig A100 1 on-demand  0.01".split(" ")))
    row = ",".join(box[column] for column in head.split(","))
    (place / "prices.csv").write_text(f"{prices.rstrip()}\n{row}\n")
    assert main([*COST, "--sky", "task.yaml"]) == 0
    assert "box home-1" in capsys.readouterr().out
    text = (place / "task.yaml").read_text()
    assert 'no cloud "box"' in text
    task = yaml.safe_load(text)
    infras = [each["infra"] for each in task["resources"]["ordered"]]
    assert len(infras) == 3 and not any("box" in infra for infra in infras)
    (place / "prices.csv").write_text(f"{head}\n{row}\n")
    assert "no cloud of the name box" in refused(capsys, [*COST, "--sky", "none.yaml"])
    assert not (place / "none.yaml").exists()
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.setenv("HOME", str(place))
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    resources = sky.resources.Resources
    for asks in ("canonicalize_accelerators", "validate_and_set_region_zone"):
        monkeypatch.setattr(resources, f"_try_{asks}", lambda self: None)
    for asks in ("instance_type", "cpus_mem"):
        monkeypatch.setattr(resources, f"_try_validate_{asks}", lambda self: None)
    taken = [each.infra for each in sky.Task.from_yaml("task.yaml").resources]
    assert [each.to_str() for each in taken] == infras
    (place / "twin.yaml").write_text(text.replace(infras[0], "box/home-1"))
    with pytest.raises(Exception, match="infra"):
        sky.Task.from_yaml("twin.yaml")


@pytest.mark.parametrize(
    ("profile", "options", "named"),
    [
        ("{", [], "run.json is not JSON"),
        ("[]", [], 'has no "gpus"'),
        ('{"gpus": {}}', [], 'has no "gpus"'),
        ('{"gpus": {"A100": -1}}', [], "gpus: A100 = -1 must"),
        ('{"gpus": {"A100": "fast"}}', [], "gpus: A100 = 'fast'"),
        ('{"gpus": {"B200": 5}}', [], "no GPU of run.json: it has A100, GH200"),
        ('{"gpus": {"A100": 5}}', ["--between-failures", "6h"], "no save_seconds"),
        ('{"gpus": {"A100": 5}}', ["--move", "seconds=auto"], "no save_seconds"),
        ('{"gpus": {"A100": 5}, "save_seconds": -2}', [], "save_seconds = -2"),
        (None, ["--between-failures", "0"], "give seconds above 0"),
        (None, ["--between-failures", "soon"], "--between-failures='soon'"),
        (None, ["--notice", "-3"], "--notice='-3'"),
        (None, ["--move", "fast"], "seconds=auto dollars=9"),
        (None, ["--move", "dollars=9 dollars=8"], "seconds=auto dollars=9"),
        (None, ["--move", "dollars=nan"], "--move: dollars"),
        (None, ["--move", "dollars=9/TB"], "dollars/GB"),
        (None, ["--move", "seconds=2d"], "less than a day"),
        (None, ["--start", "tomorrow"], "--start 'tomorrow'"),
        (None, ["--start", "1980-01-01"], "more than 3660"),
        (None, ["--lifetimes", "none.csv"], "none.csv cannot be read"),
        (None, ["--between-failures", "1"], None),
    ],
)
def test_bad_input_of_cost_is_refused(place, capsys, profile, options, named):
    """Twin: the last ones, with a machine that is lost too often, leave the others."""
    if profile is not None:
        (place / "run.json").write_text(profile)
    if named is None:
        found = reported(capsys, *COST, *options)
        assert [row["market"] for row in found["offers"]] == ["on-demand"]
        assert "lost too often" in str(found["left_out"])
    else:
        assert named in refused(capsys, [*COST, *options])


@pytest.mark.parametrize("tokens", ["0", "-1", "2X", "B", "", "nan", "1e30"])
def test_what_is_no_number_of_tokens(place, capsys, tokens):
    assert main([*COST[:-1], tokens]) == 2
    assert "not a number of tokens" in capsys.readouterr().err


# --- fleet ---


@pytest.mark.parametrize("policy", ["max-min", "makespan", "cheapest"])
def test_a_fleet_is_allocated(place, capsys, policy):
    """Method: shares fit the workers, deadlines are kept, and the text shows what the JSON has."""
    found = reported(capsys, "fleet", "jobs.toml", "--policy", policy)
    jobs = found["jobs"]
    assert found["policy"] == policy and found["objective"] > 0 and set(jobs) == {"big", "small"}
    used = 2 * jobs["big"]["shares"]["h100"] + jobs["small"]["shares"]["h100"]
    assert used <= 2 + 1e-6 and len(found["rounds"]) == 5
    assert jobs["small"]["finish_seconds"] <= 6 * 3600 * (1 + 1e-5)
    assert jobs["small"]["dollars"] > 0
    assert main(["fleet", "jobs.toml", "--policy", policy]) == 0
    said = capsys.readouterr().out
    assert f"{jobs['big']['finish_seconds'] / 3600:,.2f} h" in said and "round" in said


def test_the_headline_is_what_the_table_has(place, capsys):
    """Divides each job's rate of the table by its equal share: what the headline says of it, with
    GPUs and weights. Twins: a fleet of neither, and the ends of a makespan."""
    from infinity.tools.fleet.command import read_fleet

    weighted = FLEET.replace("gpus = 2", "gpus = 2\nweight = 0.5")
    for text, more in ((FLEET, ", divided by its GPUs"), (weighted, ", times its weight, divided")):
        (place / "jobs.toml").write_text(text.replace('deadline = "6h"', ""))
        fleet = read_fleet(place / "jobs.toml")
        jobs = reported(capsys, "fleet", "jobs.toml")["jobs"]
        assert main(["fleet", "jobs.toml"]) == 0
        said = capsys.readouterr().out.splitlines()[0]
        least = float(re.search(r"at least ([\d.]+) times its equal share", said)[1])
        assert more in said
        of_jobs = zip(fleet.jobs.values(), fleet.equal_shares, jobs.values())
        progress = [
            row["steps_per_second"] / share / job.weight * job.gpus for job, share, row in of_jobs
        ]
        assert min(progress) == pytest.approx(least, rel=1e-3)
    (place / "jobs.toml").write_text(FLEET.replace("gpus = 2\n", ""))
    assert main(["fleet", "jobs.toml"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("times its equal share")
    assert main(["fleet", "jobs.toml", "--policy", "makespan"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    jobs = reported(capsys, "fleet", "jobs.toml", "--policy", "makespan")["jobs"]
    last = max(row["finish_seconds"] for row in jobs.values())
    assert first.endswith(f"after {last / 3600:,.2f} h")


def test_a_baseline_that_knows_no_kinds_is_beside_the_allocation(place, capsys):
    """By hand: one job is ten times slower on the second GPU, and gets the first. With halves of
    both it makes 0.55 steps a second. Twin: GPUs that are alike, of which nothing is gained."""
    text = """[workers.a]
count = 1
[workers.b]
count = 1
[jobs.one]
steps = 100
rates = { a = 1.0, b = 0.1 }
[jobs.two]
steps = 100
rates = { a = 1.0, b = 1.0 }
"""
    for given, theirs, gain in (
        (text, 100 / 0.55, "1.82"),
        (text.replace("0.1", "1"), 100, "1.00"),
    ):
        (place / "jobs.toml").write_text(given)
        jobs = reported(capsys, "fleet", "jobs.toml")["jobs"]
        assert [row["finish_seconds"] for row in jobs.values()] == pytest.approx([100.0] * 2)
        equal = [row["equal_finish_seconds"] for row in jobs.values()]
        assert equal == pytest.approx([theirs, 100.0])
        assert main(["fleet", "jobs.toml"]) == 0
        assert (
            f"last end: 0.03 h; if every job had an equal part of each kind: {theirs / 3600:.2f} h,"
            f" {gain} times"
        ) in capsys.readouterr().out


def test_a_job_of_several_gpus_that_waits_for_them_is_named(place, capsys):
    """Method: a job holds one of two GPUs all the time, the other needs both. Twin: with one more
    GPU nobody waits."""
    text = """[workers.a]
count = 2
[jobs.pair]
steps = 100
gpus = 2
rates = { a = 1.0 }
[jobs.one]
steps = 100
rates = { a = 1.0 }
"""
    (place / "jobs.toml").write_text(text)
    assert main(["fleet", "jobs.toml"]) == 0
    assert "needs them free at the same time" in capsys.readouterr().out
    (place / "jobs.toml").write_text(text.replace("count = 2", "count = 3"))
    assert main(["fleet", "jobs.toml"]) == 0
    assert "at the same time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("count = 2", "count = 0", "workers.h100: count = 0"),
        ("count = 2", "count = 2.5", "workers.h100: count = 2.5"),
        ("count = 2", 'count = "2"', "workers.h100: count = '2' must be"),
        ("count = 2", "", "workers.h100: count is missing"),
        ("gpus = 2", "gpu = 2", "did you mean gpus?"),
        ("gpus = 2", "gpus = 5", "jobs.big runs nowhere"),
        ("steps = 40_000", "", "jobs.big: steps is missing"),
        ("steps = 40_000", "steps = inf", "jobs.big: steps = inf"),
        ("h100 = 1.3", "b200 = 1.3", "rates.b200: no such workers"),
        ("rates = { h100 = 1.3, old = 0.4 }", "rates = 3", "jobs.big: rates must be a table"),
        ("rates = { h100 = 1.3, old = 0.4 }", "rates = {}", "jobs.big runs nowhere"),
        ('deadline = "6h"', 'deadline = "soon"', "jobs.small: deadline='soon'"),
        ('deadline = "6h"', 'deadline = "1m"', "deadlines cannot be met together: jobs.small"),
        ("[workers.old]", "[worker.old]", "no such key: worker"),
        ("[workers.h100]", "[", "neither valid TOML"),
    ],
)
def test_bad_fleets_are_refused_by_name(place, capsys, old, new, named):
    assert old in FLEET
    (place / "jobs.toml").write_text(FLEET.replace(old, new))
    assert named in refused(capsys, ["fleet", "jobs.toml"])


def test_the_cheapest_needs_prices(place, capsys):
    (place / "jobs.toml").write_text(FLEET.replace("dollars_per_hour = 0.5", ""))
    message = refused(capsys, ["fleet", "jobs.toml", "--policy", "cheapest"])
    assert "workers.old has no dollars_per_hour" in message
    assert reported(capsys, "fleet", "jobs.toml")["jobs"]["big"]["dollars"] is None


def test_no_mutated_file_ends_in_a_traceback(place, capsys):
    """Method: 150 files with bytes cut, doubled or replaced; each is answered, or refused with one
    message. Twin: some of each."""
    random_, statuses = random.Random(20261127), []
    files = {"jobs.toml": ["fleet", "jobs.toml"], "prices.csv": COST, "run.json": COST}
    for name, argv in list(files.items()) * 50:
        raw = (place / name).read_bytes()
        at, to = sorted(random_.randrange(len(raw)) for _ in range(2))
        to = min(to, at + 9)
        new = random_.choice([b"", raw[at:to] * 2, b"-1", b"1e999", b"\x00", b"nan", b'"', b"\n"])
        (place / name).write_bytes(raw[:at] + new + raw[to:])
        statuses.append(main(argv))
        assert "Traceback" not in capsys.readouterr().err
        (place / name).write_bytes(raw)
    assert set(statuses) == {0, 2}


# --- the page ---

PAGE = (Path(__file__).parents[3] / "docs" / "cost.md").read_text()
FILES = {"json": "run.json", "csv": "prices.csv", "toml": "jobs.toml"}


def test_the_page_shows_what_is_printed(place, capsys):
    """Method: writes the page's files, runs its two commands, and looks for their output on it.
    Twin: other prices print something else."""
    for kind, text in re.findall(r"```(json|csv|toml)\n(.*?)```", PAGE, re.DOTALL):
        (place / FILES[kind]).write_text(text)
    joined = PAGE.replace("\\\n", "")
    # What goes into a file has no output there; `make docs` runs it.
    commands = re.findall(r"^    infinity ([^>\n]*)$", joined, re.MULTILINE)
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(commands) == len(shown) == 2
    for command, expected in zip(commands, shown):
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == expected
    (place / "prices.csv").write_text((place / "prices.csv").read_text().replace("2.10", "0.10"))
    assert main(shlex.split(commands[0])) == 0
    assert capsys.readouterr().out != shown[0]
