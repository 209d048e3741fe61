"""Mesh shape: the axes of a mesh of ranks, and the links that each of them uses.

stride   ranks between two neighbours of an axis; tp is the innermost axis, pp the outermost
data     the ranks of dp and ep together: each has a batch of its own
inside   of an axis: all of its groups are within a node
ring     the ranks of one group, each of which sends to the next one
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ...errors import ConfigError
from .machine_file import Machine

UNFLUSHED = "without_flush"  # PipeDream-2BW's rule, in the order of 1F1B
SCHEDULES = (  # of a pipeline, that can be asked for
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    UNFLUSHED,
)
AXES = ("pp", "dp", "ep", "tp")


@dataclass(frozen=True, order=True)
class MeshShape:
    """The ranks of each axis. Ranks of ``ep`` are data ranks that send tokens to each other's
    experts."""

    pp: int
    dp: int
    tp: int
    ep: int = 1

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.pp * self.data * self.tp

    @property
    def data(self) -> int:
        """Ranks with batches of their own."""
        return self.dp * self.ep

    @property
    def is_data_alone(self) -> bool:
        """Whether all ranks are data ranks, as without a mesh."""
        return self.dp == self.ranks

    @property
    def sizes(self) -> dict[str, int]:
        """The ranks of each axis, from the outermost, with tp or ep as the innermost."""
        left_out = "ep" if self.ep == 1 else "tp"
        return {name: getattr(self, name) for name in AXES if name != left_out}

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items())

    def paste(self, device: str = "cuda") -> str:
        """Returns the line of a program that makes this mesh."""
        sizes = ", ".join(map(str, self.sizes.values()))
        names = ", ".join(f'"{name}"' for name in self.sizes)
        return f'mesh = init_device_mesh("{device}", ({sizes}), mesh_dim_names=({names}))'

    def axis(self, name: str, machine: Machine) -> Axis:
        """Returns the links of an axis, or of "data", on nodes of ``machine``."""
        strides = {"tp": 1, "ep": self.tp, "data": self.tp, "dp": self.tp * self.ep}
        stride = strides.get(name, self.tp * self.data)
        return Axis(stride, getattr(self, name), machine)


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh on nodes of ``machine``."""

    stride: int
    size: int
    machine: Machine

    @property
    def is_inside(self) -> bool:
        """Whether no group of the axis uses the network."""
        return self.size == 1 or self.machine.devices % (self.stride * self.size) == 0

    @property
    def members(self) -> int:
        """Ranks of one group on a node that the group leaves."""
        return min(self.size, max(1, self.machine.devices // self.stride))

    @property
    def rings(self) -> float:
        """Groups that share a node's network."""
        return 0.0 if self.is_inside else self.machine.devices / self.members

    @property
    def rate(self) -> float:
        """Bytes per second that a rank sends to the next one of its ring."""
        link = self.machine.device_link
        return link if self.is_inside else min(link, self.machine.network / self.rings)

    def collective_seconds(self, nbytes: float, messages: float) -> float:
        """Computes the seconds of collectives that nothing overlaps. ``nbytes``: that a rank sends;
        ``messages``: that follow each other."""
        return nbytes / self.rate + messages * self.machine.latency * (not self.is_inside)

    def exchange_seconds(self, nbytes: float, messages: float) -> float:
        """Computes the seconds of all-to-alls that nothing overlaps. ``nbytes``: that a rank sends,
        as many to each other one."""
        network = self.exchange_network_seconds(nbytes)
        latency = messages * self.machine.latency * (not self.is_inside)
        return max(nbytes / self.machine.device_link, network) + latency

    def exchange_network_seconds(self, nbytes: float) -> float:
        """Computes the seconds that a node's network needs for what all of its ranks send."""
        if self.is_inside:
            return 0.0
        leaving = nbytes * (self.size - self.members) / (self.size - 1)
        return self.machine.devices * leaving / self.machine.network

    def network_seconds(self, received: float, messages: float) -> float:
        """Computes the seconds that a node's network needs for collectives. ``received``: bytes of
        one rank."""
        if self.is_inside:
            return 0.0
        nodes = math.ceil(self.size / self.members)
        of_ring = received * self.size / (self.size - 1) * (nodes - 1) / nodes
        return self.rings * of_ring / self.machine.network + messages * self.machine.latency

    def received_seconds(self, nbytes: float) -> float:
        """Computes the seconds in which a rank receives ``nbytes`` in one collective that runs
        beside the compute."""
        if self.size == 1:
            return 0.0
        network = self.network_seconds(nbytes, self.size - 1)
        return max(nbytes / self.machine.device_link, network)

    def hop_seconds(self, nbytes: float, rank: int, other: int) -> float:
        """Computes the seconds of ``nbytes`` from one coordinate of the axis to another."""
        if rank == other:
            return 0.0
        machine = self.machine
        first, second = (at * self.stride // machine.devices for at in (rank, other))
        if first == second:
            return nbytes / machine.device_link
        crossing = min(self.stride, machine.devices)
        rate = min(machine.device_link, machine.network / crossing)
        return nbytes / rate + machine.latency


def meshes_of(ranks: int, experts: int = 1) -> Iterator[MeshShape]:
    """Yields every mesh of so many ranks. ``experts``: that each layer has, to be divided over
    ``ep``. Ranks of ``ep`` do not share a batch, so that one of ep and tp is 1."""
    for pp in _divisors(ranks):
        for tp in _divisors(ranks // pp):
            yield MeshShape(pp, ranks // pp // tp, tp)
        for ep in _divisors(math.gcd(ranks // pp, experts))[1:]:
            yield MeshShape(pp, ranks // pp // ep, 1, ep)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def parse_axes(text: str, axes: Collection[str] = AXES) -> dict[str, int]:
    """Parses a mesh as "pp=4,tp=8": the ranks of its ``axes``. Raises ConfigError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, sign, value = (each.strip() for each in part.partition("="))
        if name not in axes:
            raise ConfigError(
                f"--mesh {text}: there is no axis {name!r} here; axes are {', '.join(axes)}, as"
                " --mesh pp=4,tp=8"
            )
        if not sign or not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"--mesh {text}: {name} needs a number of ranks, as {name}=4")
        if name in sizes:
            raise ConfigError(f"--mesh {text}: {name} is given twice")
        sizes[name] = int(value)
    return sizes


def parse_mesh(text: str, ranks: int) -> MeshShape:
    """Parses a mesh as "pp=4,tp=8": axes that are left out have one rank, and dp has the rest.
    Raises ConfigError, with all degrees, for one that does not have ``ranks``."""
    sizes = {"pp": 1, "ep": 1, "tp": 1} | parse_axes(text)
    if sizes["ep"] > 1 < sizes["tp"]:
        raise ConfigError(
            f"--mesh {text}: ranks of ep have batches of their own, and ranks of tp share one:"
            " leave one of both out"
        )
    others = sizes["pp"] * sizes["ep"] * sizes["tp"]
    mesh = MeshShape(**{"dp": max(1, ranks // others)} | sizes)
    if mesh.ranks != ranks:
        raise ConfigError(
            f"--mesh {text}: {mesh} makes {mesh.ranks} ranks, and the machines have {ranks}: choose"
            f" degrees whose product is {ranks}, as {_nearest(mesh, ranks)}"
        )
    return mesh


def _nearest(mesh: MeshShape, ranks: int) -> MeshShape:
    """Returns the mesh of ``ranks`` whose degrees are nearest, by their ratios."""

    def distance(other: MeshShape) -> float:
        return sum(
            abs(math.log(getattr(mesh, name) / getattr(other, name))) for name in ("pp", "ep", "tp")
        )

    return min(meshes_of(ranks, mesh.ep), key=distance)
