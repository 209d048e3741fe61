"""Machine file: one node of a machine that is not here, as a TOML file describes it: its devices,
memory, disks and links (see ``machines/``)."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...amounts import parse_nbytes
from ...errors import ConfigError
from ...untrusted import Format, check_number, read_text

MACHINES = Path(__file__).parent / "machines"
FIELDS = {  # part and key of a file -> the field of Machine
    "devices.count": "devices",
    "devices.memory": "device_memory",
    "devices.flops": "device_flops",
    "devices.efficiency": "efficiency",
    "host.memory": "host_memory",
    "host.bandwidth": "host_bandwidth",
    "host.checksum": "checksum_rate",
    "disks.count": "disks",
    "disks.capacity": "disk_capacity",
    "disks.read": "disk_read",
    "disks.write": "disk_write",
    "links.device": "device_link",
    "links.host": "host_link",
    "links.network": "network",
    "links.latency": "latency",
}
OPTIONAL = {
    "devices.bandwidth": "device_bandwidth",
    "devices.products": "product_flops",
    "devices.inputs": "of_inputs",
    "devices.weights": "of_weights",
    "disks.rating": "drive_rating",
}
WHOLE = ("count", "memory", "capacity")
# Parts of a whole backward, by torch's functions for both on blocks of Llama: medians on one
# processor.
OF_INPUTS, OF_WEIGHTS = 0.58, 0.46


FORMAT = Format("machine file", number=1, unnumbered=1)


@dataclass(frozen=True)
class Machine:
    """One node. Units: bytes, bytes per second in one direction, operations per second, seconds."""

    name: str
    devices: int
    device_memory: int
    device_flops: float  # achieved by blocks: the peak times the efficiency
    host_memory: int
    host_bandwidth: float
    checksum_rate: float
    disks: int
    disk_capacity: int
    disk_read: float
    disk_write: float
    device_link: float
    host_link: float
    network: float
    latency: float
    sources: tuple[str, ...] = ()
    device_bandwidth: float | None = None  # of its memory; None: unknown, its time is not counted
    product_flops: float | None = None  # of large matrix products; None: as of blocks, of any size
    device: str = "cuda"  # its kind, as torch calls it
    drive_rating: float | None = None  # bytes that one drive may be written, as its maker says
    # Parts of a whole backward, if gradients of inputs and of weights are computed apart
    of_inputs: float = OF_INPUTS
    of_weights: float = OF_WEIGHTS

    @property
    def is_measured(self) -> bool:
        """Whether its rates are of a run on such a machine, not of its maker's tables."""
        return any(each.startswith("measured") for each in self.sources)

    @classmethod
    def read(cls, given: str) -> Machine:
        """Reads the file ``given``, or the package's machine file of that name. Raises ConfigError
        if there is none, or it lacks a field, UsageError for a newer format."""
        path = Path(given)
        if not path.exists():
            path = MACHINES / path.with_suffix(".toml").name.lower()
        try:
            table = tomllib.loads(read_text(path))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            known = known_machines()
            near = sorted((name for name in known if given.lower() in name), key=len)
            near += difflib.get_close_matches(given, known, n=1)
            why = f"there is no file {given}" if isinstance(error, FileNotFoundError) else error
            hint = f": did you mean {near[0]}?" if near else f": {why}."
            raise ConfigError(
                f"--machine {given}{hint} Give a TOML file, or one of {', '.join(known)}"
            ) from None
        FORMAT.check(path, table)
        values: dict[str, Any] = {}
        for place, field in (FIELDS | OPTIONAL).items():
            part, _, key = place.partition(".")
            if place in FIELDS or key in table[part]:
                values[field] = _value(table, part, key, given)
        peak = values["device_flops"]
        values["device_flops"] = peak * values.pop("efficiency")
        if "product_flops" in values:
            values["product_flops"] *= peak
        sources = tuple(map(str, table.get("sources", ())))
        return cls(name=str(table.get("name", given)), sources=sources, **values)


def known_machines() -> list[str]:
    """Lists the names of the package's machine files."""
    return sorted(each.stem for each in MACHINES.glob("*.toml"))


def _value(found: dict[str, Any], part: str, key: str, given: str) -> float:
    value = found.get(part, {}).get(key) if isinstance(found.get(part, {}), dict) else None
    name = f"--machine {given}: [{part}] {key}"
    if isinstance(value, str):
        value = parse_nbytes(value, name)
    number = check_number(value, name, whole=key == "count")
    return int(number) if key in WHOLE else number
