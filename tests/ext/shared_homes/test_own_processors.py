"""Own processors: a rank knows which processors the others of its machine use, and is near its
GPU."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest
import torch

from infinity.core.machine import processors
from infinity.ext.shared_homes.own_processors import OwnProcessors, pci_address


def test_a_gpu_is_named_as_the_kernel_names_it(monkeypatch):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert pci_address(3) == "0000:1b:00.0"


@pytest.mark.parametrize(
    ("device", "allowed", "bound"),
    [
        ("cuda:1", {0, 1}, ["gpu 1"]),
        ("cuda:0", {0}, ["gpu 0"]),
        ("cuda:1", None, []),
        ("cpu", {0}, []),
    ],
)
def test_a_rank_moves_to_the_node_of_its_gpu(device, allowed, bound, monkeypatch):
    """Method: what is bound, and what the ranks of this machine and of another one tell. Twins: one
    that was bound before, and one that computes on the processor."""
    found: list[str] = []
    module = "infinity.ext.shared_homes.own_processors"
    monkeypatch.setattr(f"{module}.pci_address", lambda index: f"gpu {index}")
    monkeypatch.setattr(f"{module}.bind_to_gpu", lambda address, allowed: found.append(address))
    told: list = []
    monkeypatch.setattr(processors, "share_with", told.append)
    here = socket.gethostname()
    collectives = SimpleNamespace(
        ranks=SimpleNamespace(alone=False, allowed_processors=allowed, world_rank=0),
        collect=lambda mine, what: [mine, (1, here, [5]), (2, f"not {here}", [6])],
    )
    where = SimpleNamespace(where=torch.device(device))
    assert OwnProcessors.begin(None, where, collectives, None) is None
    assert found == bound and told == [[{5}]]


def test_a_rank_alone_shares_with_nobody(monkeypatch):
    told: list = []
    monkeypatch.setattr(processors, "share_with", told.append)
    ranks = SimpleNamespace(alone=True)
    before = os.sched_getaffinity(0)
    device = SimpleNamespace(where=torch.device("cpu"))
    assert OwnProcessors.begin(None, device, SimpleNamespace(ranks=ranks), None) is None
    assert told == [[]] and os.sched_getaffinity(0) == before
