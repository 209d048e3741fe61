"""A Slurm of two machines on this one: its own controller and two of its node daemons.

A job that is queued again starts after ten seconds, not after two minutes (``cred_expire``).
Their names are two by which this machine finds itself, so that ranks of both meet.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
# Debian's daemons are in /usr/sbin, which not every user has on the path.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])

CONFIGURATION = """\
ClusterName=local
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=10
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=30
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 Boards=1"
    " SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=8000\n"
)


def missing() -> list[str]:
    """Commands of Slurm that are not installed."""
    return [name for name in COMMANDS if shutil.which(name, path=PATH) is None]


class Slurm:
    """A running cluster: ``nodes`` are its machines' names."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.variables = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self.nodes = (socket.gethostname().partition(".")[0], "localhost")

    def run(self, *command: object) -> str:
        """Runs a command of Slurm. Returns what it printed."""
        done = subprocess.run(
            list(map(str, command)),
            env=self.variables,
            cwd=self.folder,  # from which jobs are submitted
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol` says of a job: JobState, Restarts and others."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Runs a cluster in ``folder``. No process is left behind."""
    cluster = Slurm(folder)
    controller, *ports = free_ports(1 + len(cluster.nodes))
    (folder / "state").mkdir(parents=True)
    text = CONFIGURATION.format(
        host=cluster.nodes[0], controller=controller, user=getpass.getuser(), folder=folder
    )
    for name, port in zip(cluster.nodes, ports):
        (folder / name).mkdir()
        text += NODE.format(name=name, host=cluster.nodes[0], port=port)
    (folder / "slurm.conf").write_text(text)
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in cluster.nodes)]
    daemons = []
    with open(folder / "daemons.log", "w") as log:
        try:
            for command in commands:
                daemons.append(
                    subprocess.Popen(command, env=cluster.variables, stdout=log, stderr=log)
                )
            end = time.monotonic() + 60
            while cluster_is_not_idle(cluster):
                assert time.monotonic() < end, (folder / "daemons.log").read_text()[-3000:]
                time.sleep(0.2)
            yield cluster
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError, AssertionError):
                _cancel_all(cluster)
            for daemon in reversed(daemons):
                daemon.terminate()
                try:
                    daemon.wait(30)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def cluster_is_not_idle(cluster: Slurm) -> bool:
    """Whether a machine of the cluster is not there yet."""
    try:
        states = cluster.run("sinfo", "--noheader", "--format", "%T %D").splitlines()
    except AssertionError:
        return True
    return states != [f"idle {len(cluster.nodes)}"]


def _cancel_all(cluster: Slurm) -> None:
    """Ends every job, and waits until none is left."""
    cluster.run("scancel", "--user", getpass.getuser(), "--signal=KILL", "--full")
    cluster.run("scancel", "--user", getpass.getuser())
    end = time.monotonic() + 45
    while cluster.run("squeue", "--noheader") and time.monotonic() < end:
        time.sleep(0.2)
