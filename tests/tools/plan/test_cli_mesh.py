"""`infinity plan --mesh`, through `infinity.tools.cli.main` in this process, on machines that are
not here.

**refused**: exit status 2, one message on stderr, no traceback, nothing on stdout.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import infinity.tools.cli
from infinity.tools.plan import plan_mesh
from infinity.tools.plan.machine_file import MACHINES
from infinity.tools.plan.mesh_choice import CHAIN

SEED = 20261201
TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Status, stdout and stderr of ``infinity plan`` with the tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_mesh, "EVERY", 1e9)  # a busy machine shows no more
    (tmp_path / "model.json").write_text(json.dumps(TINY))

    def run(*words: str):
        capsys.readouterr()
        status = infinity.tools.cli.main(["plan", "--model", "model.json", *map(str, words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def planned(run):
    def planned(*words: str):
        status, out, err = run("--json", *words)
        assert status == 0, err
        return json.loads(out)

    return planned


def test_progress_and_the_best_so_far_are_shown(run, monkeypatch):
    """Shows a line for each mesh of two devices. Twins: one mesh alone shows none, and no line
    comes before some seconds have passed."""
    words = ("--machine", "two-rtx3090", "--batch-size", "8", "--mesh")
    assert "planned" not in run(*words, "auto")[2]
    monkeypatch.setattr(plan_mesh, "EVERY", 0.0)
    status, out, err = run(*words, "auto")
    lines = [line for line in err.splitlines() if "planned" in line]
    assert status == 0 and len(lines) == 3 and lines[-1].startswith("3 of 3 meshes planned; best")
    best = re.search(r"^1\. ([^:]+): ([^,]+ a step)", out, re.MULTILINE)
    assert lines[-1].endswith(f"so far: {best[1]}, {best[2]}")
    assert "planned" not in run(*words, "dp=2")[2]


def test_all_meshes_are_compared_and_the_best_is_told(run, planned):
    """The JSON has the five best, each with a reason and a line to paste, and why others are left
    out; the text has the same numbers."""
    words = ("--machine", "four-rtx4090", "--nodes", 2, "--batch-tokens", "4K", "--mesh", "auto")
    found = planned(*words)
    assert found["ranks"] == 8 and found["tokens_per_step"] == 4096
    assert found["samples_per_step"] == 32  # of 128 tokens, as many as the model takes
    plans = found["meshes"]
    assert len(plans) == 5 and len(plans) + len(found["slower"]) + len(found["refused"]) == 10
    assert all(seconds >= plans[-1]["step_seconds"] for seconds in found["slower"].values())
    assert [p["step_seconds"] for p in plans] == sorted(p["step_seconds"] for p in plans)
    for plan in plans:
        mesh = plan["mesh"]
        sizes = mesh["pp"], mesh["dp"], mesh["tp"]
        assert mesh["pp"] * mesh["dp"] * mesh["tp"] == 8 and plan["why"]
        assert str(sizes) in plan["paste"] and plan["paste"].startswith("mesh = init_device_mesh")
        assert plan["micro_batches"] * plan["micro_batch"] * mesh["dp"] == 32
        assert sum(plan["layers"]) == 4 and len(plan["layers"]) % mesh["pp"] == 0
        assert (plan["schedule"] is None) == (mesh["pp"] == 1)
        assert plan["tokens_per_second"] == pytest.approx(4096 / plan["step_seconds"])
        for rank in plan["ranks"]:
            assert rank["step_seconds"] <= plan["step_seconds"]
            assert set(rank["sent"]) == {"pp", "dp", "tp"} and rank["homes"]
            assert (rank["sent"]["tp"] > 0) == (mesh["tp"] > 1)
    assert any("heads" in why for why in found["refused"].values())  # of tp=4 and tp=8
    status, out, err = run(*words)
    assert (status, err) == (0, "") and out.count("mesh = init_device_mesh") == 5
    assert "5 meshes left out:" in out and "assumptions:" in out and "sources:" in out
    assert all(line.strip() for line in out.splitlines())
    assert "e-0" not in out.partition("assumptions:")[0]


MIXTURE = TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def test_a_mixture_is_also_planned_with_its_experts_divided(run, planned, tmp_path):
    """Bytes of ep: two experts a token, there and back, half of them on this rank, in four layers,
    forward and backward. The operations are those of the chosen experts. Twin: the dense model has
    no such mesh."""
    words = ("--machine", "two-rtx3090", "--batch-tokens", "1K", "--mesh")
    assert all("ep" not in plan["mesh"] for plan in planned(*words, "auto")["meshes"])
    (tmp_path / "model.json").write_text(json.dumps(MIXTURE))
    found = planned(*words, "auto")
    assert [plan for plan in found["meshes"] if plan["mesh"] == {"pp": 1, "dp": 1, "ep": 2}]
    (plan,) = planned(*words, "ep=2")["meshes"]
    (rank,) = plan["ranks"]
    assert rank["sent"]["ep"] == 2 * 4 * 512 * 2 * 2 * 64 * 2 // 2 and '"ep")' in plan["paste"]
    assert rank["seconds"]["expert parallel"] > 0 == rank["seconds"]["tensor parallel"]
    status, out, _ = run(*words, "ep=2")
    assert status == 0 and "all experts are chosen as often" in out
    (tmp_path / "model.json").write_text(json.dumps(MIXTURE | {"num_local_experts": 8}))
    more = planned(*words, "ep=2")["meshes"][0]["ranks"][0]
    assert more["seconds"]["compute"] < 1.1 * rank["seconds"]["compute"]  # of the router alone


def test_one_mesh_is_what_all_of_them_have_for_it(planned):
    words = ("--machine", "two-rtx3090", "--nodes", 2, "--batch-size", 8)
    together = planned(*words, "--mesh", "auto")
    best = together["meshes"][0]
    axes = ",".join(f"{name}={size}" for name, size in best["mesh"].items())
    alone = planned(*words, "--mesh", axes)
    assert alone["meshes"] == [best] and not alone["refused"]


@pytest.mark.parametrize("more", [(), ("--gradient-checkpointing",)])
def test_a_plan_computes_as_long_with_a_mesh_as_without(run, planned, more):
    """One device that has rates by sizes of products, and one that has a rate for all. Twin: by
    that rate the first takes another time."""
    for machine in ("h100", "rtx4090"):
        words = ("--machine", machine, "--batch-size", 1, "--sequence-length", 128, *more)
        alone, mesh = planned(*words), planned(*words, "--mesh", "dp=1")
        (rank,) = mesh["meshes"][0]["ranks"]
        assert mesh["meshes"][0]["micro_batches"] == alone["micro_batches"] == 1
        assert alone["seconds"]["compute"] == pytest.approx(rank["seconds"]["compute"])
        told = [found["assumptions"][0] for found in (alone, mesh)]
        assert told[0] == told[1]
    text = (MACHINES / "h100.toml").read_text()
    Path("flat.toml").write_text(re.sub(r"(?m)^products = .*$", "", text))
    words = ("--batch-size", 1, "--sequence-length", 128, *more)
    flat, sized = (planned("--machine", each, *words) for each in ("flat.toml", "h100"))
    assert flat["seconds"]["compute"] != pytest.approx(sized["seconds"]["compute"], rel=0.1)


SAME_PLAN = {
    "alone": ("rtx4090",),
    "alone, by sizes of products": ("h100",),
    "micro-batches of three": ("rtx4090", "--batch-size", 12, "--device-memory", "6MiB"),
    "state at home": ("rtx4090", "--params", "host", "--optimizer", "nvme"),
    "recomputed": ("h100", "--gradient-checkpointing", "--optimizer", "host"),
    "two data ranks": ("two-rtx3090", "--batch-size", 24, "--device-memory", "6MiB"),
    "two nodes": ("dgx-h100", "--nodes", 2, "--params", "nvme", "--optimizer", "nvme"),
}


@pytest.mark.parametrize("words", SAME_PLAN.values(), ids=SAME_PLAN)
def test_data_ranks_have_one_plan_with_a_mesh_and_without(planned, words):
    """Method: whole steps, their passes, bytes and tokens, where no length is given. Twin: other
    moments move other bytes, and have another step."""
    words = ("--machine", *words)
    alone = planned(*words)
    mesh = planned(*words, "--mesh", f"dp={alone['ranks']}")
    (plan,) = mesh["meshes"]
    (rank,) = plan["ranks"]
    assert plan["step_seconds"] == pytest.approx(alone["step_seconds"])
    for key in ("micro_batch", "micro_batches", "device_memory"):
        assert plan[key] == alone[key]
    for key in ("tokens_per_step", "samples_per_step", "parameters", "checkpoint_nbytes"):
        assert mesh[key] == alone[key]
    assert {edge: rank["edges"][edge] for edge in alone["edges"]} == alone["edges"]
    other = planned(*words, "--moments", "int8")
    assert other["edges"] != alone["edges"]
    if alone["ranks"] == 1:  # of several, what is slowest hides the optimizer
        assert other["step_seconds"] != pytest.approx(plan["step_seconds"])


def test_a_step_with_a_mesh_has_what_only_a_clock_shows(planned):
    """Method: the optimizer ends after the passes: no resource alone takes as long as the step.
    Twin: with stages the slowest resource or the chain decides, and meetings."""
    words = ("--optimizer", "host", "--params", "host", "--mesh")
    for machine, mesh in (("rtx4090", "dp=1"), ("two-rtx3090", "dp=2")):
        (plan,) = planned("--machine", machine, *words, mesh)["meshes"]
        assert plan["step_seconds"] > 1.01 * max(plan["ranks"][0]["seconds"].values())
    (plan,) = planned("--machine", "two-rtx3090", *words, "pp=2")["meshes"]
    steps = []
    for rank in plan["ranks"]:
        seconds, meetings = rank["seconds"], rank["seconds"].pop("meetings")
        steps.append(max(sum(map(seconds.get, CHAIN)), *seconds.values()) + meetings)
    assert plan["step_seconds"] == pytest.approx(max(steps))


def test_checkpointing_is_tried_for_all_meshes(run, planned):
    """Method: a device with little room beside what forwards save. Twins: a mesh that is asked for
    is planned as it is asked for, and is slower; with all memory no mesh needs it."""
    words = ("--machine", "two-rtx3090", "--batch-size", 8, "--device-memory", "2MiB")
    best = planned(*words, "--mesh", "auto")["meshes"][0]
    assert best["gradient_checkpointing"]
    axes = ",".join(f"{name}={size}" for name, size in best["mesh"].items())
    asked = (*words, "--mesh", axes)
    assert planned(*asked, "--gradient-checkpointing")["meshes"][0] == best
    plain = planned(*asked)["meshes"][0]
    assert not plain["gradient_checkpointing"] and plain["step_seconds"] > best["step_seconds"]
    assert "--gradient-checkpointing" in run(*words, "--mesh", "auto")[1]
    large = planned("--machine", "two-rtx3090", "--batch-size", 8, "--mesh", "auto")
    assert not any(mesh["gradient_checkpointing"] for mesh in large["meshes"])


def test_recomputation_saves_less_and_computes_more(planned):
    """One mesh with and without it: a forward more, which takes less than half of a backward, whose
    other operations move more bytes than its."""
    words = ("--machine", "dgx-a100", "--batch-size", 8, "--mesh", "pp=2,tp=2")
    plain, again = (
        planned(*words, *more)["meshes"][0]["ranks"][0]
        for more in ((), ("--gradient-checkpointing",))
    )
    assert again["activations"] < plain["activations"]
    assert 1.2 < again["seconds"]["compute"] / plain["seconds"]["compute"] <= 4 / 3
    assert again["sent"]["tp"] > plain["sent"]["tp"] and again["sent"]["pp"] == plain["sent"]["pp"]


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_activations_at_home_leave_the_device_and_pass_the_links(run, planned, home):
    """What forwards save goes to a home and comes back, once each. Twins: on the device; and one
    rank, whose plan has no such home."""
    words = ("--machine", "two-rtx3090", "--batch-size", 8, "--mesh", "dp=2", "--params", "host")
    words += ("--optimizer", "host")
    there = planned(*words)["meshes"][0]
    away = planned(*words, "--activations", home)["meshes"][0]
    (first,), (second,) = there["ranks"], away["ranks"]
    assert second["activations"] < first["activations"]
    assert second["homes"]["activations"] == [home] and "activations" not in first["homes"]
    assert second["tiers"][home] - first["tiers"][home] >= first["activations"] / 2
    passed = {edge: second["edges"][edge] - first["edges"][edge] for edge in second["edges"]}
    assert passed["device->host"] == passed["host->device"] > 0
    assert passed["host->nvme"] == passed["nvme->host"] == passed["device->host"] * (home == "nvme")
    status, _, err = run("--machine", "two-rtx3090", "--activations", home)
    assert status and "add --mesh auto" in err


def test_gradients_that_do_not_wait_are_averaged_with_each_micro_batch(planned):
    """A device without room for the gradients of all micro-batches sends them after each. Twin:
    with room for them they are sent once."""
    words = ("--machine", "two-rtx3090", "--batch-size", 8, "--mesh", "dp=2", "--params", "host")
    words += ("--optimizer", "host", "--gradient-checkpointing")
    plan = planned(*words)["meshes"][0]
    sent = plan["ranks"][0]["edges"]["reduce-scatter"]
    tight = planned(*words, "--device-memory", "1600KiB")["meshes"][0]
    assert tight["micro_batches"] > 1
    assert tight["ranks"][0]["edges"]["reduce-scatter"] == tight["micro_batches"] * sent


# T parameters, layers, width, heads, samples a GPU; the last has 1.25 in print, by tensor ranks
FIGURE_5 = [
    pytest.param(0.5, 100, 20480, 160, 7, marks=pytest.mark.slow),
    pytest.param(1, 128, 25600, 256, 5, marks=pytest.mark.slow),
    pytest.param(5, 174, 49152, 384, 3, marks=pytest.mark.slow),
    pytest.param(10, 195, 65536, 512, 2, marks=pytest.mark.slow),
    (20, 205, 90112, 704, 1),
]


@pytest.mark.parametrize(("trillions", "layers", "width", "heads", "samples"), FIGURE_5)
def test_zero_infinity_figure_5_fits_32_dgx_2_by_data_ranks_alone(
    run, planned, tmp_path, trillions, layers, width, heads, samples
):
    """Models of 0.5 to 20 T on 512 V100, state on NVMe and checkpoints on the host. Twin: with the
    checkpoints on the device the largest does not fit."""
    model = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 1024}
    model |= {"n_embd": width, "n_layer": layers, "n_head": heads, "dtype": "bfloat16"}
    (tmp_path / "model.json").write_text(json.dumps(model))
    words = ("--machine", "dgx2", "--nodes", 32, "--mesh", "dp=512", "--gradient-checkpointing")
    words += ("--params", "nvme", "--optimizer", "nvme", "--sequence-length", 1024)
    words += ("--batch-size", 512 * samples)
    found = planned(*words, "--activations", "host")
    (plan,), parameters = found["meshes"], found["parameters"]
    assert parameters == pytest.approx(trillions * 1e12, rel=0.02)
    (rank,) = plan["ranks"]
    assert rank["homes"]["weights"] == rank["homes"]["moments"] == ["nvme"]
    # Of a V100, of a sixteenth of a node's memory, and of half a drive
    assert rank["tiers"]["device"] + rank["activations"] < 32e9
    assert rank["tiers"]["host"] < 1536e9 / 16 and rank["tiers"]["nvme"] < 3.84e12 / 2
    if trillions == 20:
        status, _, err = run(*words)
        assert status and "--activations host" in err


def test_a_schedule_that_is_asked_for_is_planned(planned):
    """Each by the same mesh. Without flush ranks wait less than by 1F1B, and hold a second version
    of the weights: of 2 bytes each at their home. Twin: with recomputation weights' gradients are
    not computed apart."""
    words = ("--machine", "dgx-a100", "--batch-size", 16, "--mesh", "pp=2")
    homes = ("--params", "host", "--optimizer", "host")
    found = {
        name: planned(*words, *homes, "--schedule", name)["meshes"][0]
        for name in ("1F1B", "Interleaved1F1B", "without_flush", "InterleavedZeroBubble")
    }
    assert all(plan["schedule"] == name for name, plan in found.items())
    flushed, late = found["1F1B"], found["without_flush"]
    assert late["idle_share"] < flushed["idle_share"]
    assert late["step_seconds"] < flushed["step_seconds"]
    more = late["ranks"][0]["tiers"]["host"] - flushed["ranks"][0]["tiers"]["host"]
    assert (
        more > 0 and late["ranks"][0]["tiers"]["device"] == flushed["ranks"][0]["tiers"]["device"]
    )
    apart = "InterleavedZeroBubble"
    again = planned(*words, *homes, "--gradient-checkpointing")["meshes"][0]
    assert again["schedule"] not in (None, apart)


def test_state_on_nvme_wears_the_drives(run, planned):
    """With a rating that is soon used up there is a warning. Twins: one that lasts, and state in
    memory, which writes nothing."""
    words = ("--machine", "two-rtx3090", "--batch-size", 4, "--mesh", "dp=2")
    nvme = ("--params", "nvme", "--optimizer", "nvme")
    tired = planned(*words, *nvme, "--drive-rating", "1GB")["meshes"][0]["endurance"]
    assert tired["rating"] == 1e9 and tired["years"] < 1
    assert tired["daily_nbytes"] > 0 and "WARNING" in tired["line"]
    assert "WARNING" in run(*words, *nvme, "--drive-rating", "1GB")[1]
    lasting = planned(*words, *nvme, "--drive-rating", "900000TB")["meshes"][0]["endurance"]
    assert "WARNING" not in lasting["line"]
    assert "endurance" not in planned(*words)["meshes"][0]
    one = planned("--machine", "rtx4090", "--batch-size", 4, *nvme)
    assert one["endurance"]["rating"] == 1200e12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mesh", "pp=3,tp=2"), "makes 6 ranks, and the machines have 8"),
        (("--mesh", "xp=2"), "no axis 'xp'"),
        (("--mesh", "tp=8"), "heads"),
        (("--mesh", "ep=2"), "has no plan for its experts"),
        (("--mesh", "pp=8"), "4 layers cannot be cut"),
        (("--mesh", "dp=8", "--batch-size", 9), "9 samples of a step do not divide by the 8 data"),
        (("--mesh", "auto", "--svg", "a.svg"), "--svg is of one rank"),
        (("--mesh", "pp=1", "--schedule", "1F1B"), "one stage has no schedule"),
        (
            ("--mesh", "pp=2", "--gradient-checkpointing", "--schedule", "ZBVZeroBubble"),
            "computes a block again",
        ),
        (("--schedule", "1F1B"), "--schedule is of a mesh"),
        (("--mesh", "auto", "--timetable"), "--timetable is of one rank"),
        (("--mesh", "auto", "--batch-tokens", "100"), "multiple of --sequence-length"),
        (("--mesh", "auto", "--device-memory", "2KiB"), "none of the 10 meshes"),
        (("--mesh", "dp=8", "--device-memory", "2KiB"), "what forwards save"),
        (("--mesh", "auto", "--drive-rating", "much"), "--drive-rating"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_planned_is_refused(run, words, said):
    status, out, err = run("--machine", "dgx-h100", *words)
    assert status == 2 and out == "" and said in err and "Traceback" not in err, err
    assert err.startswith("infinity plan:")


def test_a_mesh_needs_a_machine(run):
    status, out, err = run("--mesh", "auto")
    assert status == 2 and out == "" and "--mesh is of a machine that is named" in err


def test_this_machine_is_planned_by_its_own_rates(run, planned, tmp_path):
    """Several of them, over Ethernet that is assumed."""
    words = ("--machine", "this", "--nvme-path", ".", "--nodes", 2, "--mesh", "dp=2")
    found = planned(*words, "--dtype", "fp32", "--device-memory", "1GiB", "--host-memory", "1GiB")
    assert found["machine"] == "this machine" and found["rates"]["host_bandwidth"] > 0
    assert any("measured now" in line for line in found["sources"])
    assert any("assumed" in line for line in found["sources"])


def random_words(draw: random.Random, path) -> list[str]:
    """Options of a random machine, mesh and batch; some cannot be."""
    text = (MACHINES / f"{draw.choice(['dgx-h100', 'two-rtx3090', 'dgx2'])}.toml").read_text()
    for key in ("flops", "bandwidth", "device", "host", "network", "read", "write", "latency"):
        rate = 10 ** draw.uniform(-7, 14) * (draw.random() < 0.98)
        text = re.sub(rf"^{key} = \S+", f"{key} = {rate:.3g}", text, flags=re.M)
    for memory in ("80GB", "24GB", "32GB", "128GB", "2048GB", "1536GB"):
        text = text.replace(f'"{memory}"', f'"{draw.choice(["20MB", "1GB", "4GB", "1MB"])}"')
    path.write_text(text)
    words = ["--machine", str(path), "--nodes", draw.choice(["1", "2", "3"])]
    meshes = ["auto", "pp=2", "tp=2", "pp=2,tp=2", "tp=3", "dp=1", "pp=1,dp=1,tp=1", "x"]
    words += ["--mesh", draw.choice(meshes)]
    words += draw.choice([[], ["--batch-size", "7"], ["--batch-tokens", "4K"]])
    words += draw.choice([[], ["--gradient-checkpointing"], ["--moments", "int8"]])
    return words + draw.choice([[], ["--params", "nvme"], ["--optimizer", "host"]])


def check_random(run, path, count: int) -> None:
    draw, taken = random.Random(SEED), 0
    for _ in range(count):
        words = random_words(draw, path)
        status, out, err = run("--json", *words)
        assert status in (0, 2) and "Traceback" not in err, (words, err)
        if status == 2:
            assert out == "" and err.startswith("infinity plan:"), err
            continue
        taken += 1
        for plan in (found := json.loads(out))["meshes"]:
            sizes = plan["mesh"]
            assert sizes["pp"] * sizes["dp"] * sizes["tp"] == found["ranks"]
            assert plan["step_seconds"] > 0
    assert taken


def test_random_machines_and_meshes_have_a_plan_or_a_reason(run, tmp_path):
    check_random(run, tmp_path / "machine.toml", 6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_random_machines_and_meshes_have_a_plan_or_a_reason(run, tmp_path):
    check_random(run, tmp_path / "machine.toml", 300)
