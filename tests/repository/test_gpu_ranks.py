"""Two ranks on one device: each kind has an outcome in words, and what is not promised is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_ranks

ROOT = Path(__file__).parents[2]
AS_GPU = ROOT / "tests" / "support" / "late_device" / "everywhere"
ENDED = "ended with status 0"
TOLD = {"weights": "a", "said": ["PeerError after 1.0 s"]}


@pytest.mark.parametrize(
    "kind, ranks, why",
    [
        ("sums", [{"weights": "a"}, {"weights": "b"}], "not the bits"),
        ("sums", [{"weights": "a"}, {}], "not the bits"),
        ("raises", [{"weights": "a"}, {"weights": "b"}], "not both went on"),
        ("raises", [{"weights": "a"}, {}], "not both went on"),
        ("killed", [{}, {"end": gpu_ranks.KILLED}], "was not told"),
        ("killed", [{}, TOLD], "was not told"),
        ("killed", [TOLD, TOLD], "was not told"),  # nothing was killed
    ],
)
def test_what_is_not_promised_is_no_outcome(kind, ranks, why, monkeypatch):
    """Twin: equal weights, and a rank that was told, are outcomes."""

    def launched(kind, device, world, cards, seconds):
        return [{"said": [], "end": ENDED} | each for each in ranks[:world]]

    monkeypatch.setattr(gpu_ranks, "_launch", launched)
    with pytest.raises(RuntimeError, match=why):
        gpu_ranks.run(kind, "cuda")
    ranks = [TOLD, TOLD | ({"end": gpu_ranks.KILLED} if kind == "killed" else {})]
    assert gpu_ranks.run(kind, "cuda")["outcome"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", gpu_ranks.KINDS)
@pytest.mark.parametrize("device", ["cpu", "late"])
def test_two_ranks_without_a_gpu(device, kind):
    """Method: on the processor over gloo, and on the late device over its own backend."""
    paths = [AS_GPU, ROOT] if device == "late" else [ROOT]
    script = "import sys; from bench import gpu_ranks; k, d = sys.argv[1:];"
    script += "print(gpu_ranks.run(k, d, seconds=150)['outcome'])"
    done = subprocess.run(
        [sys.executable, "-c", script, kind, device],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-3000:]
