"""Direct storage: what GPUDirect Storage (disk to GPU memory) requires, and what this machine
lacks.

P2PDMA    the kernel's access of one PCI device to another's memory. cuFile uses it on local NVMe
          without its own kernel module
BAR1      the window in which a GPU's memory appears on the bus. Static: all of it, always

The requirements are NVIDIA's: "GDS Support for NVMe Drives Using Linux PCI P2PDMA". Everything is
read from files below ``root``.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from ... import native
from ...core.machine.sizes import format_nbytes
from ...errors import UsageError

OLDEST_KERNEL, OLDEST_DRIVER = (6, 2), 565
SMALLEST_BAR1_NBYTES = 16 << 30  # no capable GPU has less memory
BAR1_LINE = 1  # of a PCI device's resources
REGISTRY = ("RMForceStaticBar1=1", "RmForceDisableIomapWC=1")
FILE_SYSTEMS = ("ext4", "xfs")


@dataclass(frozen=True)
class Missing:
    """One missing requirement. ``part``: of the machine."""

    part: str
    what: str
    remedy: str


def chosen() -> bool:
    """Returns whether transfers may bypass the host: ``INFINITY_DIRECT`` is "auto", the default, or
    "off". Raises UsageError for another value."""
    text = os.environ.get("INFINITY_DIRECT") or "auto"
    if text not in ("auto", "off"):
        raise UsageError(f"INFINITY_DIRECT={text} is not one of auto, off")
    return text == "auto"


def refusal(folders: Sequence[str]) -> str:
    """Returns why disks of ``folders`` cannot transfer to a GPU's memory directly, or ""."""
    if not chosen():
        return "INFINITY_DIRECT=off"
    if any(native.disks.modelled(folder) for folder in folders):
        return "disks are modelled"
    if lacks := missing(folders):
        return "; ".join(each.what for each in lacks)
    configure()
    return native.cufile()[1]


@cache
def configure() -> tempfile.TemporaryDirectory | None:
    """Configures cuFile to use P2PDMA, and to refuse if it cannot: its own copies through the host
    are slower than ours. Keeps a configuration that the user named."""
    if os.environ.get("CUFILE_ENV_PATH_JSON"):
        return None
    folder = tempfile.TemporaryDirectory(prefix="infinity-cufile-")
    path = Path(folder.name, "cufile.json")
    path.write_text(
        json.dumps(
            {
                "logging": {"dir": folder.name, "level": "ERROR"},
                "properties": {"use_pci_p2pdma": True, "allow_compat_mode": False},
                "block": {
                    kind: {"use_pci_p2pdma": kind == "nvme"} for kind in ("nvme", "nvmeof", "raid")
                },
            }
        )
    )
    os.environ["CUFILE_ENV_PATH_JSON"] = str(path)
    return folder


def has_gpu(root: Path = Path("/")) -> bool:
    """Returns whether an NVIDIA GPU is on the bus."""
    return any(_gpus(root))


def missing(folders: Sequence[str], root: Path = Path("/")) -> list[Missing]:
    """Lists the missing requirements for disks of ``folders``. Unreadable ones do not count as
    missing."""
    lacks = [*_kernel(root), *_driver(root)]
    for gpu in _gpus(root):
        lacks += _gpu(gpu)
    for folder in folders:
        lacks += _disk(folder, root)
    return lacks


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _kernel(root: Path) -> Iterator[Missing]:
    release = _text(root / "proc/sys/kernel/osrelease").strip()
    remedy = (
        "boot a kernel of 6.2 or newer that is built with CONFIG_PCI_P2PDMA (Ubuntu 24.04's is)"
    )
    if (numbers := re.match(r"(\d+)\.(\d+)", release)) and (
        int(numbers[1]),
        int(numbers[2]),
    ) < OLDEST_KERNEL:
        yield Missing(
            "kernel",
            f"kernel {release} is older than {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]}",
            remedy,
        )
    elif _p2pdma(root, release) is False:
        yield Missing("kernel", f"kernel {release} has no CONFIG_PCI_P2PDMA", remedy)


def _p2pdma(root: Path, release: str) -> bool | None:
    """Returns whether the kernel has P2PDMA; None if unknown."""
    try:
        config = gzip.decompress((root / "proc/config.gz").read_bytes()).decode()
    except (OSError, EOFError):
        config = _text(root / f"boot/config-{release}")
    if config:
        return "CONFIG_PCI_P2PDMA=y" in config
    symbols = _text(root / "proc/kallsyms")
    return "p2pdma_pgmap_ops" in symbols if symbols else None


def _driver(root: Path) -> Iterator[Missing]:
    text = _text(root / "proc/driver/nvidia/version")
    version = re.search(r"\b(\d{3,})\.\d+", text)
    remedy = f"install NVIDIA's open kernel modules, {OLDEST_DRIVER} or newer (nvidia-open)"
    if not text:
        yield Missing("driver", "NVIDIA's driver is not loaded", remedy)
    elif "Open Kernel Module" not in text:
        yield Missing(
            "driver",
            f"the driver ({version[0] if version else 'of unknown version'}) is the"
            " proprietary one",
            remedy,
        )
    elif version and int(version[1]) < OLDEST_DRIVER:
        yield Missing("driver", f"the driver is {version[0]}", remedy)
    registry = _text(root / "proc/driver/nvidia/params")
    absent = [entry for entry in REGISTRY if entry.lower() not in registry.lower()]
    if registry and absent and platform.machine() == "x86_64":
        yield Missing(
            "driver's registry",
            f"the driver was loaded without {' and '.join(absent)}",
            f'options nvidia NVreg_RegistryDwords="{";".join(REGISTRY)};" in'
            " /etc/modprobe.d/nvidia-p2pdma.conf, a new initramfs, and a reboot",
        )
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"Model:\s*(.*)", _text(path))
        if model and "GeForce" in model[1]:
            yield Missing(
                f"GPU {path.parent.name}",
                f"{model[1].strip()} is a GeForce, whose driver does not offer its memory to disks",
                "a data-centre GPU (A100, L4, L40S, H100, H200 or newer)",
            )


def _gpus(root: Path) -> Iterator[Path]:
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(device / "vendor").strip() == "0x10de" and _text(device / "class").startswith(
            "0x03"
        ):
            yield device


def _gpu(device: Path) -> Iterator[Missing]:
    lines = _text(device / "resource").splitlines()
    if len(lines) > BAR1_LINE:
        first, last, *_ = (int(number, 16) for number in lines[BAR1_LINE].split())
        if (size := last - first + 1 if last else 0) < SMALLEST_BAR1_NBYTES:
            yield Missing(
                f"BAR1 of GPU {device.name}",
                f"BAR1 of {format_nbytes(size)} does not show all of GPU {device.name}'s memory",
                "switch on Above 4G Decoding and Resizable BAR in the firmware",
            )
    if _text(device / "iommu_group/type").strip() in ("DMA", "DMA-FQ"):
        yield Missing(
            f"IOMMU of GPU {device.name}",
            f"an IOMMU translates what GPU {device.name} is sent",
            "boot with iommu=pt",
        )


def _disk(folder: str, root: Path) -> Iterator[Missing]:
    lacks = partial(Missing, f"disk of {folder}")
    try:
        number = os.stat(folder).st_dev
    except OSError:
        return  # reported elsewhere
    numbers = f"{os.major(number)}:{os.minor(number)}"
    device = root / "sys/dev/block" / numbers
    device = device.resolve() if device.exists() else device
    device = device.parent if (device / "partition").exists() else device
    for kind, name in (
        ("md", "a RAID of the kernel's (md)"),
        ("dm", "a volume of the device mapper's (LVM, LUKS)"),
    ):
        if (device / kind).is_dir():
            yield lacks(
                f"{folder} is on {device.name}, {name}",
                "a file system on each NVMe drive itself, each folder in nvme_paths: Infinity"
                " stripes over them",
            )
            return
    local = "name a folder on a local NVMe drive in nvme_paths"
    if not device.name.startswith("nvme"):
        yield lacks(f"{folder} is not on an NVMe drive", local)
        return
    transport = _text(device / "device/transport").strip()
    if transport and transport != "pcie":
        yield lacks(f"{folder} is on NVMe over {transport}", local)
    if _text(root / "sys/module/nvme_core/parameters/multipath").strip() == "Y":
        yield lacks(
            "NVMe multipath is on",
            "options nvme_core multipath=N in /etc/modprobe.d/nvme.conf, a new initramfs, and a"
            " reboot",
        )
    mounts = (line.partition(" - ") for line in _text(root / "proc/self/mountinfo").splitlines())
    kinds = {
        after.split()[0] for before, _, after in mounts if numbers in before.split()[2:3] and after
    }
    if kinds and not kinds & set(FILE_SYSTEMS):
        yield lacks(
            f"{folder} is on {', '.join(sorted(kinds))}",
            f"a file system of {' or '.join(FILE_SYSTEMS)}",
        )
