"""Kernel: names the running kernel that a process sees the machine through."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_space() -> str:
    """Names the boot of the kernel that runs, and the namespace of processes: a process's number means the same to all with one name, whatever their
    host is called. Empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def running_kernel() -> str:
    """Names the kernel that runs, since when, and the namespace of processes: those with one name see each other and read files through one
    cache. Empty where the system does not tell."""
    space = process_space()
    return f"{socket.gethostname()} {space}" if space else ""
