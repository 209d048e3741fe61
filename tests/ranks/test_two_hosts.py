"""Two hosts: network namespaces with addresses of their own, a rank in each, gloo over the wire
between them.

Words used here:

**host**: a namespace, with a machine's end of the cable in it. Making one needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import models
import prepared
import pytest
import rank_jobs
from prepared import Child
from ranks import JOBS, Failed, rank_variables

import infinity

SECONDS = 120


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces and the cable between them."""

    def __init__(self) -> None:
        tag = f"inf{os.getpid() % 100000}"
        self.names = [f"{tag}a", f"{tag}b"]
        self.addresses = ["10.177.0.1", "10.177.0.2"]
        self.cables = [f"{tag}va", f"{tag}vb"]
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> Hosts:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def prepare(self, folder: Path, jobs: dict[str, dict]) -> None:
        """Writes what the ranks shall do."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "jobs").write_bytes(pickle.dumps(jobs))

    def variables(self, host: int, seconds: str) -> dict[str, str]:
        return {
            "GLOO_SOCKET_IFNAME": self.cables[host],
            "OMP_NUM_THREADS": "1",
            "RANK_TIMEOUT": seconds,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }

    def start_rank(self, host: int, folder: Path, *, seconds: str) -> Child:
        """The rank of ``host``, without torchrun."""
        variables = rank_variables(
            host, 2, f"{self.addresses[0]}:29400", of_host=host
        ) | self.variables(host, seconds)
        network = Path("/run/netns", self.names[host])
        return prepared.start(JOBS / "rank_jobs.py", folder, variables=variables, network=network)

    def start(self, host: int, folder: Path, *, seconds: str) -> None:
        """One torchrun with one rank on ``host``."""
        command = [
            "ip",
            "netns",
            "exec",
            self.names[host],
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            str(host),
            "--nproc-per-node",
            "1",
            "--master-addr",
            self.addresses[0],
            "--master-port",
            "29400",
            str(JOBS / "rank_jobs.py"),
            str(folder),
        ]
        self.processes.append(
            subprocess.Popen(
                command,
                env=os.environ | self.variables(host, seconds),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )

    def cut(self) -> None:
        """Pulls the cable out."""
        ip("-n", self.names[1], "link", "set", self.cables[1], "down")

    def __exit__(self, *_) -> None:
        for name in (
            self.names
        ):  # ranks too, which outlive a torchrun that is killed, and keep its pipe open
            pids = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True
            ).stdout.split()
            for pid in [*map(int, pids), *(process.pid for process in self.processes)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("two hosts need iproute2")
    made = Hosts()
    try:
        made.__enter__()
    except subprocess.CalledProcessError as error:
        made.__exit__()
        pytest.skip(
            f"two hosts need network namespaces, which are refused here: {error.stderr.strip()}"
        )
    try:
        yield made
    finally:
        made.__exit__()


@pytest.mark.parametrize("launcher", ["none", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_hosts_train_with_the_bits_of_one_process(hosts, tmp_path, launcher):
    """One rank on each host; weights as one process has them that is given both batches."""
    (tmp_path / "swap").mkdir()
    folder = tmp_path / "launch"
    hosts.prepare(folder, {"parity": {"config": models.at_home("nvme", "nvme", tmp_path / "swap")}})
    if launcher == "none":
        ranks = [hosts.start_rank(host, folder, seconds="60") for host in range(2)]
        for rank in ranks:
            rank.wait(SECONDS)
            assert rank.returncode == 0, rank.stderr[-3000:]
    else:
        for host in range(2):
            hosts.start(host, folder, seconds="60")
        for process in hosts.processes:
            out, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, out[-3000:]
    model = rank_jobs.build(3)
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "device", "optimizer": "device"}
    )
    rank_jobs.in_turn(model, optimizer, 2, steps=3)
    for host in range(2):
        found = pickle.loads((folder / f"parity.{host}").read_bytes())
        assert not models.differing(found["weights"], rank_jobs.cloned(model.state_dict()))
    infinity.unwrap_model(model, optimizer)


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_job_on_the_other(hosts, tmp_path):
    """The cable is pulled while they train: both end within the process group's timeout and some,
    with a PeerError that tells, and the last checkpoint is whole."""
    hosts.prepare(
        tmp_path, {"one_falls": {"how": "cut off", "folder": str(tmp_path), "steps": 100_000}}
    )
    for host in range(2):
        hosts.start(host, tmp_path, seconds="8")
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "saved").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "saved").exists(), "the job did not come to its checkpoint"
    time.sleep(1)
    hosts.cut()
    cut_at = time.monotonic()
    while not (tmp_path / "one_falls.0").exists() and time.monotonic() < cut_at + 60:
        time.sleep(0.1)
    failed = pickle.loads((tmp_path / "one_falls.0").read_bytes())
    assert (
        isinstance(failed, Failed)
        and failed.kind == "PeerError"
        and "lost its peers" in failed.text
    ), failed
    model = rank_jobs.build(9)
    model, optimizer = infinity.wrap_model(
        model, rank_jobs.adamw(model), {"params": "host", "optimizer": "host"}
    )
    assert infinity.load_checkpoint(tmp_path / "checkpoint", model, optimizer) == {"step": 2}
    infinity.unwrap_model(model, optimizer)
