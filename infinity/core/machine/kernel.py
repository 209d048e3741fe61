"""Kernel: names the running kernel, as this process sees it."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_space() -> str:
    """Returns a name for the kernel's boot and the process namespace. A process id means the same
    to all processes with one name, whatever the host is called. "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def running_kernel() -> str:
    """Returns a name for host, boot and process namespace. Processes with one name see each other
    and share one file cache. "" if unknown."""
    space = process_space()
    return f"{socket.gethostname()} {space}" if space else ""
