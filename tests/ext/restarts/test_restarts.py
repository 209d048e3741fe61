"""The process group of a script whose ranks torchrun may start again."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from local_slurm import free_ports
from ranks import JOBS, run_torchrun

import infinity


def test_a_script_meets_again_after_a_rank_died():
    """Method: rank 1 is killed, and rank 0 comes back late, beside torchrun's own store, which
    outlives them. The twin, torch's own function, is a slow case of `infinity train`'s ranks."""
    command = ["--max-restarts", "1", str(JOBS / "returning_ranks.py"), "script"]
    done = run_torchrun(2, command, environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"})
    assert done.stdout.count("start 1: 0.5") == 2, done.stderr[-3000:]
    assert done.returncode == 0


def test_without_torchrun_it_is_torchs_own_group(monkeypatch):
    """Twin: a word that torch does not know is told by torch."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_ports(1)[0]}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    infinity.parallel.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        found = torch.ones(1)
        dist.all_reduce(found)
        assert (dist.get_world_size(), found.item(), dist.get_backend()) == (1, 1.0, "gloo")
    finally:
        dist.destroy_process_group()
    with pytest.raises(TypeError, match="colour"):
        infinity.parallel.init_process_group("gloo", colour="red")
