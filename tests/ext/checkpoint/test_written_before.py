"""What earlier versions wrote is read, and goes on with the bits that they gave themselves.

**version**: a folder of `written`, which `tools/fixtures.py` of that version wrote.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import written_jobs
from ranks import Jobs
from safetensors.torch import load_file
from written_jobs import (
    ADAPTERS,
    ONE,
    SAVER,
    TRAIN,
    TWO,
    WRITTEN,
    go_on,
    go_on_with_loops,
    read,
    saved_in,
)

import infinity
from bench import report as bench_report
from infinity.ext.checkpoint.manifest import read_manifest, seal_manifest
from infinity.tools.cost.command import read_profile
from infinity.tools.plan.machine_file import Machine
from infinity.tools.watch import report, top, trace

VERSIONS = sorted(path for path in WRITTEN.iterdir())
OF_MODULES = re.compile(rb"infinity\.(core|ext|files|ranks|tools|[a-z]+\.[a-z])")
of_each = pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)


@of_each
@pytest.mark.parametrize("case", ONE)
def test_a_checkpoint_goes_on_with_the_bits_of_its_version(version, case):
    """Method: weights, two losses, weights and average after them, as the version noted them."""
    assert go_on(version, case) == read(version)[case]


@pytest.mark.parametrize("case", ["fp32 on the device", "8-bit moments on nvme", ADAPTERS])
def test_another_random_state_has_other_bits(case):
    """The twin: the same steps on other batches."""
    expected = read(VERSIONS[-1])[case]
    found = go_on(VERSIONS[-1], case, spoil=True)
    assert found["weights"] == expected["weights"] and found["losses"] != expected["losses"]


@pytest.fixture(scope="module")
def two(standing_ranks) -> Mapping[str, list[Any]]:
    jobs = {
        f"two_ranks:{version.name}-{number}": {
            "folder": str(version),
            "case": case,
            "writes": False,
        }
        for version in VERSIONS
        for number, case in enumerate(TWO)
    }
    return Jobs(standing_ranks(2), "written_jobs", jobs)


@of_each
@pytest.mark.parametrize("case", TWO)
def test_checkpoints_of_two_ranks_go_on_with_the_bits_of_their_version(two, version, case):
    assert two[f"two_ranks:{version.name}-{TWO.index(case)}"] == read(version)[case]


@of_each
def test_whole_loops_go_on(version):
    """Method: a loop of Checkpoints and Order, with its next batches, and `infinity train`, whose
    matrix products round otherwise on other processors: its weights are those bits, its losses
    within 64 ulps of fp32. Twin: another loss is not within them."""
    found, expected = go_on_with_loops(version), read(version)
    assert found[SAVER] == expected[SAVER]
    assert found[TRAIN]["weights"] == expected[TRAIN]["weights"]
    near = pytest.approx(expected[TRAIN]["losses"], rel=64 * 2.0**-23)
    assert found[TRAIN]["losses"] == near
    assert [loss * 1.0001 for loss in found[TRAIN]["losses"]] != near


@of_each
def test_one_rank_reads_what_two_have_written(version):
    model, optimizer = ONE["fp32 in host memory"]()
    with pytest.raises(infinity.UsageError, match="optimizer is ADAMW"):
        infinity.load_checkpoint(saved_in(version, TWO[0]), model, optimizer)
    infinity.unwrap_model(model, optimizer)
    model, optimizer = ONE["fp32 on the device"]()
    infinity.load_checkpoint(saved_in(version, TWO[0]), model, optimizer)
    found = written_jobs._digest(model.state_dict())
    assert found == read(version)[TWO[0]][0]["weights"]
    infinity.unwrap_model(model, optimizer)


@of_each
def test_no_file_names_a_module_of_the_package(version):
    """Modules move; files stay. Twin: the names that are looked for are found in a text."""
    paths = [path for path in version.rglob("*") if path.is_file()]
    assert len(paths) > 40
    assert not [path for path in paths if OF_MODULES.search(path.read_bytes())]
    assert OF_MODULES.search(b"an infinity.core.step.optimizer.InfinityOptimizer")
    assert OF_MODULES.search(b"an infinity.optim.context.Context")


@of_each
def test_adapters_are_read_by_peft(version):
    """Method: the names, shapes and values of an adapter, and PEFT's configuration."""
    import peft

    tensors = load_file(version / "adapter/adapter_model.safetensors")
    assert {tuple(tensor.shape) for tensor in tensors.values()} == {(1, 64), (64, 1)}
    assert peft.PeftConfig.from_pretrained(version / "adapter").r == 1


def _of_bench(path: Path) -> Any:
    page = path.parent / "report.html"
    bench_report.write(path.parent, page)
    return page.read_text()


def _more(path: Path, text: str, number: int) -> str:
    """The text of a file with another number of its format."""
    if path.name == "manifest.json":
        return seal_manifest(read_manifest(path.parent) | {"format": number}).decode()
    return re.sub(r'("format": |^format = )\d+', rf"\g<1>{number}", text, count=1, flags=re.M)


# File -> what reads it, and a text that it finds there.
READ: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fp32-on-the-device/manifest.json": (lambda path: read_manifest(path.parent), "ADAMW"),
    "result.json": (_of_bench, "io.read"),
    "run/status-rank0.json": (lambda path: top.look(path.parent), "'loss': 1.5"),
    "run/plan-rank0.json": (lambda path: report.collect(path.parent), "'model': 'Net'"),
    "run/history-rank0.json": (lambda path: report.collect(path.parent), "points"),
    "timeline.json": (trace.read, "'lane': 'backward'"),
    "machine.toml": (lambda path: Machine.read(str(path)), "H100"),
    "profile.json": (read_profile, "cpu:1"),
}


@of_each
@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_and_a_newer_one_refused_by_name(version, name, tmp_path):
    """Method: a copy is read; with the number of a later format it is refused, which names the
    file, its format and what to do."""
    path = tmp_path / Path(name).relative_to(Path(name).parts[0] if "/" in name else ".")
    if "/" in name:
        shutil.copytree(version / Path(name).parent, path.parent, dirs_exist_ok=True)
    else:
        shutil.copy(version / name, path)
    reads, found = READ[name]
    assert found in str(reads(path))
    path.write_text(_more(path, path.read_text(), 99))
    with pytest.raises(infinity.UsageError) as refused:
        reads(path)
    told = f"{re.escape(str(path))} is a .* of format 99, this version reads .*: a newer version"
    assert re.match(told, str(refused.value)) and "pip install --upgrade" in str(refused.value)


def test_a_job_of_a_newer_version_stands_beside_others(tmp_path, monkeypatch):
    """Method: `infinity top` of all jobs, one of which has a later format. Twin: asked for alone
    it is refused."""
    run = tmp_path / "runs/newer"
    shutil.copytree(VERSIONS[-1] / "run", run)
    path = run / "status-rank0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    shown = "\n".join(top.lines(top.look(None)))
    # Lines are cut where the folder's name has them end.
    assert "status-rank0.json is a file of a run of format 99" in " ".join(shown.split())
    with pytest.raises(infinity.UsageError, match="format 99"):
        top.look(run)


def test_the_page_has_each_format_of_the_package():
    """Method: every Format that a module makes is a row of docs/compatibility.md, with its numbers.
    Twin: a number that is not there is not found."""
    package = Path(infinity.__file__).parent
    found = [
        value
        for path in package.rglob("*.py")
        if re.search(r"^FORMAT = Format\(", path.read_text(), re.M)
        for value in [
            importlib.import_module(
                ".".join(["infinity", *path.relative_to(package).with_suffix("").parts])
            ).FORMAT
        ]
    ]
    page = (package.parent / "docs/compatibility.md").read_text()
    assert len(found) == 6
    for each in found:
        row = rf"^\| {each.what}\b.* \| {{}} \| {each.oldest} \|$"
        assert re.search(row.format(each.number), page, re.M), each.what
        assert not re.search(row.format(each.number + 1), page, re.M)


def test_the_present_version_has_written_everything():
    """A new version number, or a new case, needs `tools/fixtures.py`. Twin: a case that no version
    wrote."""
    cases = {*ONE, *TWO, SAVER, TRAIN}
    assert cases == read(WRITTEN / infinity.__version__).keys() != cases | {"another"}
    assert sum(path.stat().st_size for path in WRITTEN.rglob("*") if path.is_file()) < 1_500_000
