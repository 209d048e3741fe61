"""machine: what limits training here: products, memory, disk, link and messages, each at its best.

products    of square matrices, by dtype, large enough to last a moment
memory      a copy (read and written bytes), and a triad, a = b + c * s (two read, one written)
disk        large transfers as the engine makes them; one small read; one small write that is synced
link        between pinned host memory and the GPU, if there is one
messages    an all-reduce between two processes of this machine, over gloo
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ...core.machine.limits import memory_left
from ...core.machine.rates import checksum_rate
from . import io
from .results import READ_NBYTES, WRITTEN_NBYTES, Measured, Row, is_wide, row, span
from .rounds import Times, alternate, tell
from .settings import Settings

MIB = 1024 * 1024
DTYPES = ("float32", "bfloat16", "float16")
PRODUCT_SECONDS = 0.05  # the least time of a product
SIZES = (256, 512, 1024, 2048, 4096, 8192)
COPIED = 256 * MIB
FILE_NBYTES = 512 * MIB
SMALL, SMALL_READS, SMALL_WRITES = 4096, 200, 10
SENT = 32 * MIB
RANKS = 2
RANK_SECONDS = 120
PASSES = 8  # operations of a parameter and token: forward 2, again 2, backward 4
UPDATE_NBYTES = 26  # of a parameter, with split masters and fp32 moments: 14 read, 12 written
BEGIN = "# Measured by `infinity bench machine`"


def measure(settings: Settings) -> Measured:
    """Measures rows machine.products.<dtype> (GFLOP/s), machine.memory.copy and .triad (GB/s),
    machine.disk.read, .write and .both (GB/s), .latency and .sync (us), machine.link.in and .out
    (GB/s), and machine.messages (GB/s of an all-reduce's bytes)."""
    where = str(torch.accelerator.current_accelerator()) if torch.cuda.is_available() else "cpu"
    found = Measured([])
    for part in (_products, _memory, _disk, _link, _messages):
        tell(part.__name__.strip("_"))
        rows = part(settings, where)
        settings.show([each for each in rows if isinstance(each, Row)])
        found.rows += [each for each in rows if isinstance(each, Row)]
        found.notes += [each for each in rows if isinstance(each, str)]
    return found


def _synced(work: Callable[[], object], where: str) -> Callable[[], None]:
    def run() -> None:
        work()
        if where != "cpu":
            torch.accelerator.synchronize()

    return run


def _products(settings: Settings, where: str) -> list[Row | str]:
    jobs, operations = {}, {}
    for name in DTYPES:
        for size in SIZES:
            a, b = (torch.ones(size, size, dtype=getattr(torch, name), device=where),) * 2
            job = _synced(partial(torch.matmul, a, b), where)
            job()  # the first is slower
            seconds = alternate({name: job}, 1, warm_up=0)[name].wall[0]
            if seconds >= PRODUCT_SECONDS * settings.scale:
                break
        jobs[name], operations[name] = job, 2 * size**3
    times = alternate(jobs, settings.rounds, seconds=settings.seconds)
    return [
        row(f"machine.products.{name}", "GFLOP/s", [operations[name] / s / 1e9 for s in each.wall])
        for name, each in times.items()
    ]


def _memory(settings: Settings, where: str) -> list[Row | str]:
    count = settings.scaled(COPIED, MIB) // 4
    a, b, c = (torch.zeros(count) for _ in range(3))
    jobs = {"copy": partial(a.copy_, b), "triad": partial(torch.add, b, c, alpha=0.5, out=a)}
    streams = {"copy": 2, "triad": 3}
    times = alternate(jobs, settings.rounds, seconds=settings.seconds)
    return [
        row(f"machine.memory.{name}", "GB/s", [streams[name] * 4 * count / s / 1e9 for s in t.wall])
        for name, t in times.items()
    ]


def _disk(settings: Settings, where: str) -> list[Row | str]:
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        file = io.make_file(folder, settings.scaled(FILE_NBYTES, io.RAW_THREADS * io.RAW_BLOCK))
        ours = io.as_used(file, "auto", settings.folder)
        raw = io.Raw(file)
        try:
            jobs: dict[str, Callable[[], object]] = {
                way: partial(ours.run, way) for way in io.DIRECTIONS
            }
            jobs["latency"], jobs["sync"] = partial(_small_reads, raw), partial(_small_writes, raw)
            times = alternate(jobs, settings.rounds, seconds=settings.seconds)
        finally:
            raw.close()
    each = {"latency": SMALL_READS, "sync": SMALL_WRITES}
    rows = [
        row(f"machine.disk.{way}", "us", [s / each[way] * 1e6 for s in found.wall])
        if way in each
        else row(
            f"machine.disk.{'both' if way == 'mixed' else way}",
            "GB/s",
            [file.nbytes / s / 1e9 for s in found.wall],
        )
        for way, found in times.items()
    ]
    return list(rows)


def _small_reads(raw: io.Raw) -> None:
    block = memoryview(raw.memory)[:SMALL]
    chance = random.Random(0)
    for _ in range(SMALL_READS):
        os.preadv(raw.descriptor, [block], chance.randrange(raw.file.nbytes // SMALL) * SMALL)


def _small_writes(raw: io.Raw) -> None:
    block = memoryview(raw.memory)[:SMALL]
    for place in range(SMALL_WRITES):
        os.pwritev(raw.descriptor, [block], place * SMALL)
        os.fdatasync(raw.descriptor)


def _link(settings: Settings, where: str) -> list[Row | str]:
    if where == "cpu":
        return ["machine: no GPU, so no link to one"]
    nbytes = settings.scaled(COPIED, MIB)
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=where)
    ways = {"in": (device, host), "out": (host, device)}
    jobs = {
        way: _synced(lambda to=to, of=of: to.copy_(of, non_blocking=True), where)
        for way, (to, of) in ways.items()
    }
    times = alternate(jobs, settings.rounds, seconds=settings.seconds)
    return [
        row(f"machine.link.{way}", "GB/s", [nbytes / s / 1e9 for s in each.wall])
        for way, each in times.items()
    ]


def _messages(settings: Settings, where: str) -> list[Row | str]:
    nbytes = settings.scaled(SENT, MIB)
    with tempfile.TemporaryDirectory(prefix="infinity-bench-") as folder:
        given = [f"{folder}/meeting", str(settings.rounds), str(nbytes)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(rank), *given],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(RANKS)
        ]
        try:
            told, _ = ranks[0].communicate(timeout=RANK_SECONDS)
            wall = json.loads(told)
        except (subprocess.TimeoutExpired, ValueError):
            return [f"machine: {RANKS} processes did not meet over gloo"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    return [row("machine.messages", "GB/s", [nbytes / s / 1e9 for s in wall])]


def _run_rank(rank: int, meeting: str, rounds: int, nbytes: int) -> Times:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    values = torch.zeros(nbytes // 4)

    def job() -> None:
        dist.barrier()
        dist.all_reduce(values)

    times = alternate({"x": job}, rounds)["x"]
    dist.barrier()
    dist.destroy_process_group()
    return times


def limit_of(rows: Sequence[Row], parameters: float, tokens: float) -> str:
    """Returns what limits a step of full fine-tuning of so many ``parameters`` on so many
    ``tokens``, with AdamW and all state on the disk, and which dtype has the fastest products: from
    the best rounds to the medians. "" without this theme's rows, or if the rounds of one differ
    much."""
    found = {each.name: each for each in rows}
    products = {name: found.get(f"machine.products.{name}") for name in DTYPES}
    rates = {name: each.median for name, each in products.items() if each is not None}
    fastest = max(rates, key=lambda name: rates[name], default="")
    names = [f"machine.{each}" for each in ("disk.read", "disk.write", "disk.both", "memory.copy")]
    used = [found.get(name) for name in (f"machine.products.{fastest}", *names)]
    if any(each is None or not each.median or is_wide(each) for each in used):
        return ""
    seconds: dict[str, list[float]] = {"products": [], "memory": [], "disk": []}
    for which in ("high", "median"):
        product, read, write, mixed, copy = (getattr(each, which) for each in used)
        both = (READ_NBYTES + WRITTEN_NBYTES) / mixed
        seconds["products"].append(PASSES * tokens / product)
        seconds["memory"].append(UPDATE_NBYTES / copy)
        seconds["disk"].append(max(READ_NBYTES / read, WRITTEN_NBYTES / write, both))
    limit = max(seconds, key=lambda part: seconds[part][-1])
    billions = parameters / 1e9
    told = ", ".join(f"{span(each, billions)} of {part}" for part, each in seconds.items())
    text = (
        f"A step of a {parameters / 1e9:g} B model on {tokens:g} tokens (AdamW, all state on disk)"
        f" needs about {told} ({fastest}): the limit is {limit}."
    )
    if rates.get("float32", 0.0) > 2 * rates.get("bfloat16", math.inf):
        ratio = rates["float32"] / rates["bfloat16"]
        text += f" Products of float32 are {ratio:.0f} times as fast as of bfloat16 here."
    return text


def machine_file(rows: Sequence[Row], folder: str, date: str) -> str:
    """Returns a machine file for `infinity plan --machine`, of what was measured: medians, with the
    spread of the rounds beside them. Without a GPU the processor is a device with half of the
    memory. Links between devices and the network are assumed."""
    found = {each.name: each for each in rows}
    products = max((f"machine.products.{name}" for name in DTYPES), key=lambda n: found[n].median)
    has_gpu = "machine.link.in" in found
    memory = memory_left()
    free = os.statvfs(folder)

    def rate(name: str, unit: float = 1e9) -> str:
        each = found[name]
        ends = f"{each.low * unit:.3g} to {each.high * unit:.3g}"
        return f"{each.median * unit:.4g}  # of {len(each.rounds)} rounds: {ends}"

    host = f"{found['machine.memory.copy'].median * 1e9 / 2:.4g}"
    link = rate("machine.link.in") if has_gpu else f"{host}  # the processor is the device"
    count = torch.accelerator.device_count() if has_gpu else 1
    of_device = torch.accelerator.get_memory_info()[1] if has_gpu else memory // 2
    return f"""{BEGIN}, {date}
name = "this machine"
sources = ["measured {date}; assumed: 10 Gb/s and 30 us between nodes"]

[devices]
count = {count}
memory = {of_device}
flops = {rate(products)}
efficiency = 1.0

[host]
memory = {memory if has_gpu else memory // 2}
bandwidth = {rate("machine.memory.copy")}
checksum = {checksum_rate():.4g}

[disks]
count = 1
capacity = {free.f_bavail * free.f_frsize}
read = {rate("machine.disk.read")}
write = {rate("machine.disk.write")}

[links]
device = {link}
host = {link}
network = 1.25e9
latency = 30e-6
"""


def write_machine_file(rows: Sequence[Row], folder: str, date: str, path: Path) -> None:
    """Writes :func:`machine_file` to ``path``."""
    path.write_text(machine_file(rows, folder, date))


if __name__ == "__main__":
    times = _run_rank(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if sys.argv[1] == "0":
        print(json.dumps(times.wall), flush=True)
