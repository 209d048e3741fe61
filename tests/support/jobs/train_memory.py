"""The memory that `infinity train` takes in its steps outside of the training: a script, for a
process of its own."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
import transformers

import infinity.tools.cli
from infinity.tools.train import train

STEPS = ("_time_compute", "_begin", "_end")


def anonymous() -> int:
    """The bytes of this process that are no file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def growth_of(call: Any, *args: Any) -> tuple[Any, int]:
    """The result of a call, and the bytes that it takes at most."""
    before, most, ended = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        return call(*args), max(most[0], anonymous()) - before
    finally:
        ended.set()
        watching.join()


def measure(place: Path, budget: int) -> None:
    """Runs the job, and prints the most that one of the steps takes; then what it takes to load the
    saved model."""
    taken = []

    def counted(call: Any) -> Any:
        def counting(*args: Any) -> Any:
            result, nbytes = growth_of(call, *args)
            taken.append(nbytes)
            return result

        return counting

    for name in STEPS:
        setattr(train, name, counted(getattr(train, name)))
    words = (
        f"train --model {place}/large --data {place}/text.txt --nvme-path {place}/nvme"
        f" --params nvme --optimizer nvme --host-memory {budget} --device-memory {budget}"
        " --steps 1 --batch-size 1 --sequence-length 16 --eval-batches 1 --sample-bytes 2"
        f" --dtype fp32 --threads 1 --json --out {place}/out"
    )
    assert infinity.tools.cli.main(words.split()) == 0
    read = transformers.AutoModelForCausalLM.from_pretrained
    options = {"dtype": torch.float64}  # others are mapped from the file
    print(max(taken), growth_of(lambda: read(f"{place}/out", **options))[1])


def measure_export(place: Path, budget: int) -> None:
    """Trains an adapter and keeps a checkpoint. Prints the most that the export of it takes, and
    that with the adapter merged into its base; then what it takes to load the merged model."""
    homes = f"--params nvme --optimizer nvme --host-memory {budget} --device-memory {budget}"
    words = (
        f"train --model {place}/large --data {place}/text.txt --nvme-path {place}/nvme {homes}"
        " --steps 1 --batch-size 1 --sequence-length 16 --sample-bytes 0 --dtype fp32 --threads 1"
    )
    taken = []
    for name, more in (("adapter", " --lora 2"), ("full", f" --checkpoint {place}/checkpoint")):
        assert infinity.tools.cli.main(f"{words}{more} --out {place}/{name}".split()) == 0
    for export in (
        f"{place}/checkpoint {place}/exported --model {place}/large",
        f"{place}/large {place}/merged --merge {place}/adapter",
    ):
        status, nbytes = growth_of(infinity.tools.cli.main, f"export {export}".split())
        assert status == 0
        taken.append(nbytes)
    read = transformers.AutoModelForCausalLM.from_pretrained
    loaded = growth_of(lambda: read(f"{place}/merged", dtype=torch.float64))[1]
    print(*taken, loaded)


if __name__ == "__main__":
    kind, place, budget = sys.argv[1:]
    {"train": measure, "export": measure_export}[kind](Path(place), int(budget))
