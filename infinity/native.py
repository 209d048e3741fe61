"""The only importer of the native core: checks tensors, then passes addresses and lengths.

Everything below runs without the GIL where it waits or computes. The core keeps no Python state.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from pathlib import Path

import torch

from .errors import UsageError


def not_built(error: ImportError, package: Path = Path(__file__).parent) -> str:
    """Returns the message for a package without its core: it is not built, or it is the source
    folder and another one is installed."""
    for found in importlib.metadata.distributions(name="infinity-engine"):
        place = Path(str(found.locate_file(package.name)))
        if place.resolve() != package.resolve() and any(place.glob("_C.*")):
            return (
                f"{package} is Infinity's source, which Python imports in this folder; the"
                f" installed one is {place}. Start Python in another folder, or run `pip install"
                f" -e {package.parent}`."
            )
    return (
        "Infinity's native core is not built: run `pip install .` (or `make setup`) in the"
        f" repository. ({error})"
    )


try:
    from . import _C
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(not_built(error)) from error

BLOCK_NBYTES = 4096  # O_DIRECT's unit
CHECKSUM_NBYTES = _C.CHECKSUM_NBYTES
MAX_GRAD_FACTORS = _C.MAX_GRAD_FACTORS


OLDEST_CAPABILITY = (8, 0)  # that the kernels are built for
BUILD = "INFINITY_CUDA=1 python -m pip install -v ."
HOW_TO_BUILD_KERNELS = f"Wheels have them; in a clone, with CUDA's nvcc: {BUILD}"


def kernel_targets() -> list[str]:
    """Returns what the GPU's kernels were compiled for, as nvcc names it: machine code ("sm_90")
    and PTX ("compute_90"). Empty: they are not built."""
    try:
        from . import _cuda
    except ImportError:
        return []
    return _cuda.targets.split()


def gpu_kernels() -> tuple[object | None, str]:
    """Returns the module of the GPU's kernels, or None and why it cannot be used."""
    try:
        from . import _cuda
    except ImportError as error:
        return None, f"not built: {error}. {HOW_TO_BUILD_KERNELS}"
    found = _cuda.device()
    refusal = found.get("refusal", "")
    if "driver version" in refusal:  # in CUDA's words
        refusal += f". Update the driver, or build in a clone with an older CUDA's nvcc: {BUILD}"
    if not refusal and found["capability"] < OLDEST_CAPABILITY:
        refusal = (
            f"{found['name']} has capability {found['capability']}, the kernels need"
            f" {OLDEST_CAPABILITY}"
        )
    return (None if refusal else _cuda), refusal


Account = _C.Account
BackendLayer = _C.BackendLayer
Charge = _C.Charge
DType = _C.DType
DirectReader = _C.DirectReader
Extent = _C.Extent
Volume = _C.Volume
Shadow = _C.Shadow
SharedRow = _C.SharedRow
SumCache = _C.SumCache
Hyperparameters = _C.Hyperparameters
IoEngine = _C.IoEngine
Landing = _C.Landing
Layout = _C.Layout
Lease = _C.Lease
Master = _C.Master
Op = _C.Op
Pages = _C.Pages
PinnedPool = _C.PinnedPool
Region = _C.Region
Road = _C.Road
Rule = _C.Rule
Run = _C.Run
Scope = _C.Scope
Scopes = _C.Scopes
Task = _C.Task
Ticket = _C.Ticket
UnitUpdate = _C.UnitUpdate
Updater = _C.Updater
# what a part's sum adds to that of a whole in which bytes follow it: those of all parts, xored, are
# the whole's
crc32c_before = _C.crc32c_before
insist = _C.insist
joined = _C.joined  # one ticket that finishes with several

driver_calls = (
    _C.driver_calls
)  # the address of what threads call on a GPU without its kernels; 0 without CUDA's driver
cufile = _C.cufile  # (its version as "1.14", ""), or ("", why it cannot be used)
cuda_driver = _C.cuda_driver  # (version as 13000, ""), or (0, why it cannot be used)
make_cufile_road = _C.make_cufile_road  # (the road, ""), or (None, why not)
move_streams = _C.move_streams
simd_unit = _C.simd_unit
trim_heap = _C.trim_heap
map_large_buffers = _C.map_large_buffers
simd_units = _C.simd_units
uring_refusal = _C.uring_refusal

IO_KINDS = ("auto", "uring", "threads")
MOMENTS = _C.MOMENTS  # the arrays of moments that a kernel takes
SCALED_MOMENTS = _C.SCALED_MOMENTS  # those that may be 8-bit
MOMENT_BLOCK = _C.MOMENT_BLOCK  # elements with one scale, where moments are 8-bit
DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
}
MOMENT_DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.bfloat16: DType.BFLOAT16,
    torch.uint8: DType.INT8,
}


def io_kind() -> str:
    """Returns the kind of I/O engine that ``INFINITY_IO`` names: auto, uring or threads."""
    kind = os.environ.get("INFINITY_IO") or "auto"
    if kind not in IO_KINDS:
        raise UsageError(f"INFINITY_IO={kind} is not one of {', '.join(IO_KINDS)}")
    return kind


class Disks:
    """The disks that I/O engines use: the machine's own. Test doubles put an object of another
    class in place of :data:`disks`."""

    def layer(self) -> BackendLayer | None:
        """Returns what chooses the backend of every engine that is made. None: the engine does."""
        return None

    def state_layer(self) -> BackendLayer | None:
        """Returns the same for the engine that moves the training state."""
        return self.layer()

    def modelled(self, folder: str) -> str | None:
        """Returns the folder of the modelled disk that ``folder`` is on. None: it is on a real
        disk."""
        return None


disks = Disks()


def io_timeout() -> float:
    """Returns the seconds after which a device that does not answer is taken for hung:
    ``INFINITY_IO_TIMEOUT`` (120)."""
    text = os.environ.get("INFINITY_IO_TIMEOUT") or "120"
    try:
        timeout = float(text)
    except ValueError:
        timeout = 0.0
    if not 0 < timeout < float("inf"):
        raise UsageError(f"INFINITY_IO_TIMEOUT={text} is not a number of seconds above 0")
    return timeout


def make_io_engine(
    *,
    kind: str | None = None,
    block_nbytes: int = 1 << 20,
    depth: int = 64,
    threads: int = 8,
    work_threads: int = 1,
    layer: BackendLayer | None = None,
) -> IoEngine:
    """Makes an I/O engine of ``kind`` (None: the one ``INFINITY_IO`` names), which takes checksums
    in at most ``work_threads`` threads. ``threads``: of kind "threads", a block in each.
    ``layer``: of test doubles (None: that of :data:`disks`). A device that does not answer for
    ``INFINITY_IO_TIMEOUT`` seconds (120) is an error."""
    return IoEngine(
        kind=kind or io_kind(),
        block_nbytes=block_nbytes,
        depth=depth,
        threads=threads,
        timeout_seconds=io_timeout(),
        work_threads=work_threads,
        layer=layer or disks.layer(),
    )


def make_sum_cache(nbytes: int) -> SumCache:
    """Makes ``nbytes`` of memory for checksums that lie on disk, whole blocks."""
    return SumCache(nbytes // BLOCK_NBYTES)


def sums_nbytes(nbytes: int, arrays: int = 0) -> int:
    """Returns the most bytes of memory of the checksums of ``arrays`` that have ``nbytes`` in all:
    each has one more for a part of a block."""
    return 4 * (nbytes // CHECKSUM_NBYTES + arrays) if nbytes else 0


def sum_table_nbytes(nbytes: int, arrays: int = 0) -> int:
    """Returns the most bytes on disk of the tables of ``arrays`` that have ``nbytes`` in all."""
    return _C.sum_table_nbytes(nbytes) + BLOCK_NBYTES * arrays


def digests_nbytes(tables_nbytes: int) -> int:
    """Returns the bytes of memory of the digests of tables of ``tables_nbytes``: eight a block."""
    return 8 * tables_nbytes // BLOCK_NBYTES


def extent_in(
    volume: Volume, offset: int, nbytes: int, sums: SumCache | None
) -> tuple[Extent, int]:
    """Makes an extent for ``nbytes`` in ``volume``, of whole blocks, as disks transfer them. With
    ``sums`` a table of its checksums is behind it. Returns the bytes that both take, too."""
    whole = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
    extent = Extent.in_volume(volume, offset, whole, sums)
    return extent, whole + (sum_table_nbytes(whole) if sums else 0)


def tensor_at(region: Region, address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes a flat tensor over ``count`` elements at ``address`` inside ``region``; it keeps the
    region alive."""
    return torch.frombuffer(region, dtype=dtype, count=count, offset=address - region.address)


def copy_flat(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies ``source`` to ``target``, both flat, contiguous, in host memory and of one dtype, by
    this thread alone: torch would have several do it, and then wait for each of them while others
    keep the processors busy."""
    if target.dtype != source.dtype or target.numel() != source.numel():
        raise UsageError(
            f"{source.numel()} elements of {source.dtype} for {target.numel()} of {target.dtype}"
        )
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in (target, source)):
        raise UsageError("only contiguous tensors in host memory are copied byte by byte")
    if source.nbytes:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def address_of(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Returns the address of a contiguous CPU tensor of ``dtype``. Raises UsageError otherwise."""
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(
            f"expected a contiguous CPU tensor of {dtype}, got {tensor.dtype} on {tensor.device},"
            f" strides {tuple(tensor.stride())}"
        )
    return tensor.data_ptr()


def _check_same_length(*tensors: torch.Tensor) -> None:
    if len({tensor.numel() for tensor in tensors}) > 1:
        raise UsageError(
            f"tensors of {', '.join(str(t.numel()) for t in tensors)} elements: they must be"
            " equally long"
        )


def encode_moments(values: torch.Tensor, *, sq: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes flat fp32 values as uint8 codes and uint8 scales, one per MOMENT_BLOCK, rounded to
    the nearest."""
    values = values.to(torch.float32).contiguous()
    codes = torch.empty(values.numel(), dtype=torch.uint8, device="cpu")
    scales = torch.empty(-(-values.numel() // MOMENT_BLOCK), dtype=torch.uint8, device="cpu")
    _C.encode_moments(values.data_ptr(), codes.data_ptr(), scales.data_ptr(), values.numel(), sq)
    return codes, scales


def decode_moments(codes: torch.Tensor, scales: torch.Tensor, *, sq: bool) -> torch.Tensor:
    """Decodes the fp32 values of codes and scales. Encoding them again gives the same codes and
    scales."""
    if scales.numel() != -(-codes.numel() // MOMENT_BLOCK):
        raise UsageError(
            f"{codes.numel()} codes with {scales.numel()} scales: there is one for every"
            f" {MOMENT_BLOCK}"
        )
    values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
    addresses = (address_of(codes, torch.uint8), address_of(scales, torch.uint8), values.data_ptr())
    _C.decode_moments(*addresses, codes.numel(), sq)
    return values


def split_master(master: torch.Tensor, weight: torch.Tensor, low: torch.Tensor) -> None:
    """Splits fp32 ``master`` into bf16 ``weight`` (nearest, ties away from zero) and its low 16
    bits, int16 ``low``."""
    _check_same_length(master, weight, low)
    _C.split_master(
        address_of(master, torch.float32),
        address_of(weight, torch.bfloat16),
        address_of(low, torch.int16),
        master.numel(),
    )


def join_master(
    weight: torch.Tensor, low: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Joins a bf16 ``weight`` and its low 16 bits to the exact fp32 master: a new tensor, or
    ``out``."""
    _check_same_length(weight, low)
    master = torch.empty(weight.shape, dtype=torch.float32, device="cpu") if out is None else out
    _check_same_length(weight, master)
    _C.join_master(
        address_of(weight, torch.bfloat16),
        address_of(low, torch.int16),
        master.data_ptr(),
        weight.numel(),
    )
    return master


def crc32c(tensor: torch.Tensor, seed: int = 0) -> int:
    """Computes the CRC-32C of a contiguous CPU tensor's bytes; ``seed`` continues an earlier
    call."""
    return _C.crc32c(address_of(tensor, tensor.dtype), tensor.numel() * tensor.element_size(), seed)
