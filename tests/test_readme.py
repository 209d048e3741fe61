"""The README's Python blocks run as printed, and what it says of the command line is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_torchrun

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
ALL_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
OF_RANKS = [block for block in ALL_BLOCKS if block.startswith("# job.py")]
BLOCKS = [block for block in ALL_BLOCKS if block not in OF_RANKS]


def test_the_blocks_run_one_after_the_other_as_printed(tmp_path):
    # Method: the blocks form one script, run in an empty folder.
    script = tmp_path / "readme.py"
    script.write_text("\n".join(BLOCKS))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bottleneck" in done.stdout
    assert not list(tmp_path.glob(".infinity-*")), "swap files were left behind"


@pytest.mark.slow
def test_the_job_of_many_ranks_runs_as_printed(tmp_path, monkeypatch):
    # Method: the command in its first line, in an empty folder.
    (job,) = OF_RANKS
    (tmp_path / "job.py").write_text(job)
    words = job.splitlines()[0].split()
    assert words[2:4] == ["torchrun", "--standalone"] and words[-1] == "job.py"
    monkeypatch.chdir(tmp_path)
    done = run_torchrun(2, ["job.py"])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoint" / "manifest.json").exists()
    assert not list(tmp_path.glob(".infinity-*")), "swap files were left behind"


def test_the_loop_has_about_ten_lines():
    loop = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(loop) <= 12


def test_the_two_commands_stand_at_the_top_and_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for command in ("train", "test"):
        assert f"make {command}" in README[:800]
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)
