"""ranks: one training job on several processes of this machine, by one of several systems, over
gloo.

Tokens per second are of all ranks together, and so is the peak. The processes share the machine's
cores. `infinity_host_sent` is ours with weights sent between the ranks, which read each other's in
shared memory else.
"""

from __future__ import annotations

from infinity.tools.bench.results import Measured
from infinity.tools.bench.settings import Settings

from .endtoend import ROUNDS, turns

SYSTEMS = [
    "infinity_device",
    "infinity_host",
    "infinity_host_sent",
    "fsdp2",
    "fsdp2_cpu",
    "deepspeed_cpu",
]


def measure(settings: Settings) -> Measured:
    """Measures rows ``ranks.<processes>.<system>`` (tokens/s) and their peaks (GiB), for 1, 2 and 4
    processes."""
    found = Measured([])
    for ranks in (1, 2, 4):
        options = ["--batch", "2", "--steps", "4"]
        found.add(
            turns(
                settings,
                SYSTEMS,
                "50M",
                ROUNDS,
                options=options,
                name=f".{ranks}",
                ranks=ranks,
                theme="ranks",
            )
        )
    return found
