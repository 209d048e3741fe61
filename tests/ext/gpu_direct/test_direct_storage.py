"""What direct storage needs is found missing, each with its remedy: over a tree of files that
stands for a machine's.

Words used here:

**machine**: a folder with the files of /proc, /sys and /boot that are looked at; whole: nothing is
missing.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity import native
from infinity.ext.gpu_direct import direct_storage
from infinity.ext.gpu_direct.direct_storage import missing
from infinity.tools import cli

GPU, RELEASE = "0000:19:00.0", "6.8.0-45-generic"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Tue Jul  2\n"
REGISTRY = 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n'


def bars(nbytes: int) -> str:
    return (
        "0x00000000d0000000 0x00000000d0ffffff 0x40200\n"
        f"0x0000020000000000 {0x20000000000 + nbytes - 1:#018x} 0x14220c\n"
    )


class Machine:
    """A whole machine with one GPU, and one NVMe drive with ext4 where the test's folder is."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder
        number = os.stat(folder).st_dev
        self.numbers = f"{os.major(number)}:{os.minor(number)}"
        self.write("proc/sys/kernel/osrelease", RELEASE + "\n")
        self.write(f"boot/config-{RELEASE}", "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n")
        self.write("proc/driver/nvidia/version", OPEN)
        self.write("proc/driver/nvidia/params", REGISTRY)
        self.write(
            f"proc/driver/nvidia/gpus/{GPU}/information",
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 100\n",
        )
        self.write(f"sys/bus/pci/devices/{GPU}/vendor", "0x10de\n")
        self.write(f"sys/bus/pci/devices/{GPU}/class", "0x030200\n")
        self.write(f"sys/bus/pci/devices/{GPU}/resource", bars(128 << 30))
        self.write(f"sys/bus/pci/devices/{GPU}/iommu_group/type", "identity\n")
        self.write("sys/module/nvme_core/parameters/multipath", "N\n")
        self.disk("nvme0n1", partition=True)
        self.mount("ext4")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def disk(
        self,
        name: str,
        *,
        partition: bool = False,
        kind: str | None = None,
        transport: str = "pcie",
    ) -> None:
        """Has the folder be on this device."""
        device = f"sys/devices/{name}"
        self.write(f"{device}/device/transport", transport + "\n")
        if kind is not None:
            (self.root / device / kind).mkdir()
        if partition:
            device += f"/{name}p1"
            self.write(f"{device}/partition", "1\n")
        link = self.root / "sys/dev/block" / self.numbers
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(self.root / device)

    def mount(self, kind: str) -> None:
        self.write(
            "proc/self/mountinfo",
            f"29 1 {self.numbers} / {self.folder} rw,relatime shared:1 - {kind} /dev/x rw\n",
        )

    def told(self) -> list[tuple[str, str]]:
        return [(each.what, each.remedy) for each in missing([str(self.folder)], self.root)]


@pytest.fixture
def machine(tmp_path) -> Machine:
    (tmp_path / "folder").mkdir()
    return Machine(tmp_path / "root", tmp_path / "folder")


def test_a_whole_machine_lacks_nothing(machine):
    assert machine.told() == [] and direct_storage.has_gpu(machine.root)


LACKS: dict[str, tuple[Callable[[Machine], None], str, str]] = {
    "an old kernel": (
        lambda m: m.write("proc/sys/kernel/osrelease", "5.15.0-91\n"),
        "kernel 5.15.0-91 is older than 6.2",
        "CONFIG_PCI_P2PDMA",
    ),
    "a kernel built without": (
        lambda m: m.write(f"boot/config-{RELEASE}", "# CONFIG_PCI_P2PDMA is not set\n"),
        "has no CONFIG_PCI_P2PDMA",
        "boot a kernel",
    ),
    "the proprietary driver": (
        lambda m: m.write("proc/driver/nvidia/version", PROPRIETARY),
        "(580.65) is the proprietary one",
        "nvidia-open",
    ),
    "an old driver": (
        lambda m: m.write("proc/driver/nvidia/version", OPEN.replace("580.65.06", "550.54.15")),
        "the driver is 550.54",
        "565 or newer",
    ),
    "no driver": (
        lambda m: (m.root / "proc/driver/nvidia/version").unlink(),
        "not loaded",
        "nvidia-open",
    ),
    "a small BAR1": (
        lambda m: m.write(f"sys/bus/pci/devices/{GPU}/resource", bars(256 << 20)),
        "BAR1 of 256.0 MiB",
        "Resizable BAR",
    ),
    "an IOMMU": (
        lambda m: m.write(f"sys/bus/pci/devices/{GPU}/iommu_group/type", "DMA-FQ\n"),
        "an IOMMU translates",
        "iommu=pt",
    ),
    "multipath": (
        lambda m: m.write("sys/module/nvme_core/parameters/multipath", "Y\n"),
        "NVMe multipath is on",
        "multipath=N",
    ),
    "md": (
        lambda m: m.disk("md0", kind="md"),
        "on md0, a RAID of the kernel's (md)",
        "each folder in nvme_paths",
    ),
    "dm": (
        lambda m: m.disk("dm-3", kind="dm"),
        "on dm-3, a volume of the device mapper's",
        "each folder in nvme_paths",
    ),
    "another disk": (
        lambda m: m.disk("sda", partition=True),
        "is not on an NVMe drive",
        "local NVMe",
    ),
    "fabrics": (lambda m: m.disk("nvme7n1", transport="tcp"), "NVMe over tcp", "local NVMe"),
    "another file system": (lambda m: m.mount("btrfs"), "is on btrfs", "ext4 or xfs"),
    "a GeForce": (
        lambda m: m.write(
            f"proc/driver/nvidia/gpus/{GPU}/information", "Model: NVIDIA GeForce RTX 4090\n"
        ),
        "GeForce RTX 4090 is a GeForce",
        "data-centre GPU",
    ),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_is_missing_is_told_alone_with_its_remedy(what, machine):
    take_away, said, remedy = LACKS[what]
    take_away(machine)
    [(told, to_do)] = machine.told()
    assert said in told and remedy in to_do, (told, to_do)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asked for on x86-64 alone")
def test_a_driver_without_static_bar1_is_told_the_line_to_write(machine):
    machine.write("proc/driver/nvidia/params", 'RegistryDwords: ""\n')
    [(told, remedy)] = machine.told()
    assert (
        "RMForceStaticBar1=1 and RmForceDisableIomapWC=1" in told
        and "NVreg_RegistryDwords" in remedy
    )


def test_the_kernel_is_asked_wherever_it_says_so(machine):
    """Its own configuration, else the one in /boot, else its symbols; where nothing says so,
    nothing is claimed."""
    (machine.root / f"boot/config-{RELEASE}").unlink()
    assert machine.told() == []
    machine.write("proc/kallsyms", "0000000000000000 d nothing\n")
    assert [told for told, _ in machine.told()] == [f"kernel {RELEASE} has no CONFIG_PCI_P2PDMA"]
    machine.write("proc/kallsyms", "0000000000000000 d p2pdma_pgmap_ops\n")
    assert machine.told() == []
    (machine.root / "proc/config.gz").write_bytes(
        gzip.compress(b"# CONFIG_PCI_P2PDMA is not set\n")
    )
    assert len(machine.told()) == 1


def test_nothing_that_cannot_be_read_is_taken_to_be_missing(tmp_path):
    """An empty tree lacks a driver and a GPU, and says no more."""
    (tmp_path / "folder").mkdir()
    found = missing([str(tmp_path / "absent")], tmp_path / "root")
    assert [each.part for each in found] == ["driver"] and not direct_storage.has_gpu(
        tmp_path / "root"
    )


@pytest.mark.parametrize("case", ["whole", "no kernels", "RAID"])
def test_env_tells_what_is_missing(case, machine, monkeypatch, capsys):
    """Claim: `infinity env` has a line for each thing that is missing, with its remedy, and one
    that says what is done."""
    if case == "RAID":
        machine.disk("md0", kind="md")
        machine.write("proc/driver/nvidia/version", PROPRIETARY)
    real = direct_storage.missing
    monkeypatch.setattr(direct_storage, "missing", lambda folders: real(folders, machine.root))
    monkeypatch.setattr(direct_storage, "has_gpu", lambda: True)
    monkeypatch.setattr(native, "cufile", lambda: ("1.14", ""))
    monkeypatch.setattr(
        native,
        "gpu_kernels",
        lambda: (None, "not built") if case == "no kernels" else (object(), ""),
    )
    assert cli.main(["env", "--json", "--nvme-path", str(machine.folder)]) == 0
    found = {
        name: each
        for name, each in json.loads(capsys.readouterr().out).items()
        if name.startswith("gpudirect")
    }
    if case != "RAID":
        [(name, told)] = found.items()
        assert name == "gpudirect storage"
        if case == "whole":
            assert "cuFile 1.14: weights on disk come past" in told["value"]
        else:
            assert (
                "not used: cuFile 1.14 is there" in told["value"]
                and "checksums='sampled'" in told["remedy"]
            )
        return
    assert "not used" in found["gpudirect storage"]["value"]
    assert "nvidia-open" in found["gpudirect storage, driver"]["remedy"]
    assert "md0" in found[f"gpudirect storage, disk of {machine.folder}"]["value"]


def test_cufile_is_told_to_take_p2pdma_and_to_copy_nothing_by_itself(monkeypatch):
    """Claim: the library gets a configuration of ours, unless the user named one."""
    direct_storage.configure.cache_clear()
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/mine.json")
    assert direct_storage.configure() is None and os.environ["CUFILE_ENV_PATH_JSON"] == "/mine.json"
    direct_storage.configure.cache_clear()
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON")
    folder = direct_storage.configure()
    told = json.loads(Path(os.environ["CUFILE_ENV_PATH_JSON"]).read_text())
    assert told["properties"] == {"use_pci_p2pdma": True, "allow_compat_mode": False}
    assert told["block"]["nvme"]["use_pci_p2pdma"] and told["logging"]["dir"] == folder.name
    direct_storage.configure.cache_clear()
    folder.cleanup()
