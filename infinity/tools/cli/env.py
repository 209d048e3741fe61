"""``infinity env``: reports what was found and chosen on this machine, with remedies."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ... import __version__
from ...errors import InfinityError
from .answers import print_object
from .options import FLAG, REPEATED

KIB = 1024
TRIED_NBYTES = 64 * KIB**2  # of buffers
ENOUGH_MEMLOCK = (
    TRIED_NBYTES + 2 * KIB**2  # rings of io_uring, which some kernels count
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` is empty if nothing could be better."""

    name: str
    value: str
    remedy: str = ""


OPTIONS = (
    ("--nvme-path", REPEATED | {"metavar": "DIR", "default": []}, "folder to look at (repeatable)"),
    ("--json", FLAG, "one JSON object on stdout"),
    ("--check", FLAG, "exit with status 2 if anything could be better"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the findings."""
    findings = find(args.nvme_path or [os.getcwd()])
    status = 2 if args.check and any(finding.remedy for finding in findings) else 0
    if args.json:
        print_object({finding.name: asdict(finding) for finding in findings})
        return status
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.value}")
        if finding.remedy:
            print(f"{'':<{width}}  -> {finding.remedy}")
    if not any(finding.remedy for finding in findings):
        print("There is nothing to change.")
    return status


def find(folders: list[str]) -> list[Finding]:
    """Examines the CPU, the kernel, the memory, the GPU and the disks of ``folders``. Writes a
    probe file to each folder."""
    import torch

    findings = [
        Finding("infinity", f"{__version__} (infinity-engine) in {Path(__file__).parents[2]}"),
        Finding("python", f"{platform.python_version()}, torch {torch.__version__}"),
        _simd(),
        _io(),
        _memlock(),
        _huge_pages(),
        _shared_huge_pages(),
        *_gpu(torch, folders),
        _memory(),
        _private(torch),
        *_status(),
    ]
    for folder in folders:
        findings += _disk(folder)
    return findings


def _status() -> list[Finding]:
    """Reports on the folder of jobs' status, if nothing can be written there."""
    from ...core.machine.disk_profile import cache_folder

    folder = cache_folder() / "runs"
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if os.path.isdir(there) and os.access(there, os.W_OK):
        return []
    remedy = "`infinity top` and `report` see no job: set INFINITY_CACHE to a folder of yours"
    return [Finding("status of jobs", f"{there} cannot be written to", remedy)]


def _simd() -> Finding:
    from infinity import native

    units, chosen = native.simd_units(), native.simd_unit()
    if chosen != units[0]:
        return Finding(
            "simd", f"{chosen} (of {', '.join(units)})", "unset INFINITY_SIMD to use the best one"
        )
    remedy = "" if chosen == "avx512" else "the optimizer runs faster on a processor with AVX-512"
    return Finding("simd", f"{chosen} (of {', '.join(units)})", remedy)


def _io() -> Finding:
    from infinity import native

    engine = native.make_io_engine()
    if engine.backend == "uring":
        return Finding("io", "io_uring, registered files")
    reason = native.uring_refusal()
    if not reason:
        return Finding(
            "io", "threads (INFINITY_IO=threads)", "unset INFINITY_IO: io_uring works here"
        )
    return Finding("io", "threads", _with_number(reason))


def _with_number(reason: str) -> str:
    """Returns a remedy, with the memlock limit that is enough if it is that which is too low."""
    if "memlock" not in reason:
        return reason
    return (
        f"{reason}. {ENOUGH_MEMLOCK // KIB} KiB are enough here, which all processes of a user"
        " share; for jobs set it to unlimited"
    )


def _memlock() -> Finding:
    """Registers a buffer of 64 MiB, which the usual memlock limit does not allow."""
    from infinity import native

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // KIB} KiB"
    if os.geteuid() == 0:
        text += ", which root is exempt from: look as a user, too"
    engine = native.make_io_engine()
    if engine.backend != "uring":
        return Finding("fixed buffers", "none: they need io_uring", "see io")
    region = native.Region(TRIED_NBYTES, True, 1)
    engine.register([region])
    refusals = [note for note in engine.notes if "buffers" in note]
    if refusals:
        return Finding(
            "fixed buffers", f"refused (memlock limit {text})", _with_number(refusals[0])
        )
    return Finding("fixed buffers", f"registered with the kernel (memlock limit {text})")


def _huge_pages() -> Finding:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    setting = path.read_text().strip() if path.exists() else "not offered by this kernel"
    chosen = setting[setting.find("[") + 1 : setting.find("]")] if "[" in setting else setting
    if chosen in ("always", "madvise"):
        return Finding("huge pages", f"{chosen}: used for staging and homes in memory")
    return Finding(
        "huge pages", chosen, f"echo madvise > {path} (as root) makes large copies cheaper"
    )


def _shared_huge_pages() -> Finding:
    """Reports whether memory shared by ranks gets huge pages. It has its own setting for them and,
    since Linux 6.1, a system call."""
    from infinity import native

    name = "huge pages, shared"
    try:
        is_huge = native.SharedRow(1).allocate(4 * 1024 * 1024).huge_pages
    except InfinityError as error:
        return Finding(
            name, f"none: {error}", "several ranks on the processor send each other their weights"
        )
    if is_huge:
        return Finding(name, "used for weights that several ranks of this machine read in memory")
    remedy = (
        "Linux 6.1 or newer, with huge pages not off, has several ranks on the processor read each"
        " other's weights faster"
    )
    return Finding(name, "none", remedy)


def _gpu(torch, folders: list[str]) -> list[Finding]:
    """Reports on the GPU: one line if there is none."""
    from infinity import native

    from ...ext.gpu_direct import direct_storage

    # A driver that is too old is told, too: torch does not see its GPU.
    has_driver = not native.cuda_driver()[1].startswith("no CUDA driver")
    if torch.cuda.is_available() or direct_storage.has_gpu() or has_driver:
        return [_cuda(torch), _driver(), _kernels(), *_direct_storage(folders)]
    targets = native.kernel_targets()
    inside = f"; cuda kernels are inside, for {_told(targets)}" if targets else ""
    return [Finding("cuda", f"no GPU: the processor computes{inside}")]


def _cuda(torch) -> Finding:
    if not torch.cuda.is_available():
        return Finding("cuda", f"torch {torch.__version__} finds none", "check nvidia-smi")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    capability = torch.cuda.get_device_capability(0)
    text = (
        f"{len(names)} x {names[0]}, capability {capability[0]}.{capability[1]}: models on it are"
        " computed there"
    )
    if torch.cuda.get_device_properties(0).is_integrated:
        text += "; its memory is the host's: homes on both are one, and nothing is copied"
    remedy = (
        ""
        if capability >= (8, 0)
        else "the optimizer's kernels need capability 8.0: state stays on the host or on disk"
    )
    return Finding("cuda", text, remedy)


def _driver() -> Finding:
    """Reports whether host memory can be registered for DMA by the GPU."""
    from infinity import native

    version, refusal = native.cuda_driver()
    if refusal:
        return Finding("cuda driver", refusal)
    text = f"CUDA {version // 1000}.{version % 1000 // 10}"
    region = native.Region(64 * 1024 * 1024, True, 1)
    try:
        region.pin()
    except OSError as error:
        return Finding("cuda driver", f"{text}, does not register host memory", str(error))
    return Finding("cuda driver", f"{text}, registers host memory")


def _kernels() -> Finding:
    from infinity import native

    module, refusal = native.gpu_kernels()
    if not (targets := native.kernel_targets()):
        reason, _, remedy = refusal.partition(". ")
        return Finding("cuda kernels", reason, remedy)
    place = f"inside, for {_told(targets)}"
    return Finding("cuda kernels", place if module else f"{place}; not used: {refusal}")


def _told(targets: list[str]) -> str:
    """Returns the GPUs that kernels were compiled for, in words."""
    machines = [target for target in targets if target.startswith("sm_")]
    ptx = [target for target in targets if target not in machines]
    return ", ".join([*machines, *(f"{each} and newer (PTX)" for each in ptx)])


def _direct_storage(folders: list[str]) -> list[Finding]:
    """Reports on GPUDirect Storage: disk to GPU, bypassing host memory. If there is a GPU, lists
    the missing parts."""
    from ...ext.gpu_direct import direct_storage

    name = "gpudirect storage"
    found = direct_storage.missing(folders)
    findings = [Finding(f"{name}, {each.part}", each.what, each.remedy) for each in found]
    if refusal := direct_storage.refusal(folders):
        return [
            Finding(
                name, f"not used ({refusal}); bytes from disk pass through registered host memory"
            ),
            *findings,
        ]
    from infinity import native

    found, (kernels, why) = f"cuFile {native.cufile()[0]}", native.gpu_kernels()
    if kernels is None:
        remedy = (
            "build infinity._cuda with nvcc; or verify each byte in one read of 16 only:"
            " Config(checksums='sampled')"
        )
        return [
            Finding(
                name,
                f"not used: {found} is there, but nothing that verifies bytes on the GPU ({why})",
                remedy,
            )
        ]
    return [
        Finding(
            name, f"{found}: weights on disk come past the host's memory, verified on the device"
        )
    ]


def _memory() -> Finding:
    import psutil

    from ...core.machine import processors
    from ...core.machine.limits import for_the_engine, memory_left
    from ...core.machine.sizes import format_nbytes

    memory, left = psutil.virtual_memory(), memory_left()
    text = (
        f"{format_nbytes(memory.available)} free of {format_nbytes(memory.total)}, {os.cpu_count()}"
        " processors"
    )
    if left < 0.9 * memory.available:
        text += f"; control groups and ulimits leave this process {format_nbytes(left)}"
    if (count := processors.available()) < (os.cpu_count() or 1):
        text += f", and {count} processors"
    return Finding(
        "memory", f"{text}; without a limit of yours {format_nbytes(for_the_engine(left))} are used"
    )


def _private(torch) -> Finding:
    from ... import torch_private

    off = [each for each in torch_private.REACHES if each.found is None]
    if not off:
        return Finding("inside torch", "all that the engine reaches is as it was tried")
    costs = "; ".join(f"{each.name}: {each.cost}" for each in off)
    if all(each.is_turned_off for each in off):
        return Finding(
            "inside torch", f"off: {costs}", f"unset {torch_private.VARIABLE} to try them"
        )
    return Finding(
        "inside torch",
        f"torch {torch.__version__} differs: equal bits, but without {costs}",
        f"torch {torch_private.NEWEST} is the newest that was tried",
    )


def _disk(folder: str) -> list[Finding]:
    from infinity import native
    from infinity.errors import InfinityError

    from ...core.machine import disk_profile
    from ...core.machine.sizes import format_nbytes

    name = f"disk {folder}"
    try:
        usage = shutil.disk_usage(folder)
        with tempfile.TemporaryDirectory(prefix="infinity-probe-", dir=folder) as probe:
            engine = native.make_io_engine()
            file = engine.create_file(os.path.join(probe, "probe"), native.BLOCK_NBYTES)
            direct = engine.is_direct(file)
    except (OSError, InfinityError) as error:
        return [
            Finding(name, f"cannot be used: {error}", "name a folder that exists and is writable")
        ]
    free = f"{format_nbytes(usage.free)} free of {format_nbytes(usage.total)}"
    if (kind := disk_profile.file_system(folder)) in disk_profile.IN_MEMORY:
        remedy = "what has its home there takes memory: name a folder on a disk"
        return [Finding(name, f"{free}, but {kind} is memory", remedy)]
    if direct:
        return [Finding(name, f"{free}, O_DIRECT")]
    return [
        Finding(
            name,
            f"{free}, no O_DIRECT: transfers go through the page cache",
            "a folder on ext4 or xfs avoids the extra copy",
        )
    ]
