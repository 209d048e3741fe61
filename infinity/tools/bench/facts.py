"""Facts of a run: the machine, the versions, the commit and the load, which its result file keeps.

name     of a machine, for file names: processor, cores, widest vector unit, memory
facts    what else can make two machines differ: kernel, governor, huge pages, disk, file system
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ... import __version__

PACKAGES = ("torch", "numpy", "transformers", "deepspeed", "accelerate")
DISTRIBUTION = "infinity-engine"


def machine(folder: str = ".") -> dict[str, Any]:
    """Returns the facts of this machine, and of the disk under ``folder``."""
    from ... import native
    from ...core.machine import disk_profile

    return {
        "processor": _processor(),
        "cores": psutil.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "simd": native.simd_unit(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "gpu": _gpu(),
        "disk": _disk(folder),
        "file_system": disk_profile.file_system(folder),
        "io": native.io_kind(),
        "kernel": platform.release(),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "huge_pages": _chosen(_first_line("/sys/kernel/mm/transparent_hugepage/enabled")),
        "memory_limit": _first_line("/sys/fs/cgroup/memory.max"),
        "processor_limit": _first_line("/sys/fs/cgroup/cpu.max"),
    }


def name_of(facts: Mapping[str, Any]) -> str:
    """Returns the name of a machine for file names."""
    parts = [facts["processor"], f"{facts['cores']} cores", facts["simd"], facts["memory"]]
    text = " ".join([*parts, facts.get("gpu") or ""])
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Names what two files say of their machines and versions that is not the same."""
    lines = []
    for part in ("machine", "versions"):
        old, new = first.get(part), second.get(part)
        if old is None or new is None:
            lines.append(f"{part}: not recorded by {'both' if old is new else 'one'}")
            continue
        lines += [
            f"{name}: {old.get(name)} | {new.get(name)}"
            for name in dict.fromkeys((*old, *new))
            if old.get(name) != new.get(name)
        ]
    if first.get("hardware") != second.get("hardware"):
        lines.insert(0, f"machine: {first.get('hardware')} | {second.get('hardware')}")
    return lines


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that are installed."""
    by_package = {"infinity": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_package


def commit() -> str:
    """Returns the commit that this package is of: its checkout's, else that of its installation, or
    that its wheel was built from. Another repository around an installed package is not asked."""
    root = Path(__file__).resolve().parents[3]
    if (root / "csrc").is_dir() and _git(root, "rev-parse", "--show-toplevel") == str(root):
        return _git(root, "describe", "--always", "--dirty", "--abbrev=7") or "unknown"
    try:
        url = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        return json.loads(url or "{}")["vcs_info"]["commit_id"][:7]
    except (importlib.metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        return _first_line(Path(__file__).with_name("commit")) or f"version {__version__}"


def load() -> float:
    """Returns the load of the last minute."""
    return round(os.getloadavg()[0], 2)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def _gpu() -> str | None:
    """The names of the GPUs, by their driver's tool: torch would take memory of them."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []
    return f"{len(names)} x {names[0].strip()}" if names else None


def _processor() -> str:
    model = re.search(r"model name\s*:\s*(.+)", _text("/proc/cpuinfo"))
    return model[1].strip() if model else platform.processor() or platform.machine()


def _disk(folder: str) -> str:
    """The disk's kernel name, model and size, without its serial number."""
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not device.exists():
        return "no block device"
    whole = device if (device / "queue").exists() else device.parent
    sectors = _first_line(whole / "size")
    size = f"{int(sectors) * 512 / 1e9:.0f} GB" if sectors.isdigit() else ""
    parts = (whole.name, _first_line(whole / "device" / "model"), size)
    return " ".join(part for part in parts if part)


def _chosen(text: str) -> str:
    bracketed = re.search(r"\[(.*)\]", text)
    return bracketed[1] if bracketed else text


def _first_line(path: str | Path) -> str:
    return (_text(path).splitlines() or [""])[0].strip()


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
