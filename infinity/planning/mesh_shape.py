"""Mesh shape: the axes of a mesh of ranks, and the links that each of them uses.

stride   ranks between two neighbours of an axis; tp is the innermost axis, pp the outermost
inside   of an axis: all of its groups are within a node
ring     the ranks of one group, each of which sends to the next one
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ConfigError
from .machine_file import Machine

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True, order=True)
class MeshShape:
    """The ranks of each axis."""

    pp: int
    dp: int
    tp: int

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in AXES)

    def paste(self, device: str = "cuda") -> str:
        """Returns the line of a program that makes this mesh."""
        sizes = ", ".join(str(getattr(self, name)) for name in AXES)
        names = ", ".join(f'"{name}"' for name in AXES)
        return f'mesh = init_device_mesh("{device}", ({sizes}), mesh_dim_names=({names}))'

    def axis(self, name: str, machine: Machine) -> Axis:
        """Returns the links of an axis on nodes of ``machine``."""
        stride = {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp}[name]
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

    def network_seconds(self, received: float, messages: float) -> float:
        """Computes the seconds that a node's network needs for collectives. ``received``: bytes of
        one rank."""
        if self.is_inside:
            return 0.0
        nodes = math.ceil(self.size / self.members)
        of_ring = received * self.size / (self.size - 1) * (nodes - 1) / nodes
        return self.rings * of_ring / self.machine.network + messages * self.machine.latency

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


def meshes_of(ranks: int) -> Iterator[MeshShape]:
    """Yields every mesh of so many ranks."""
    for pp in _divisors(ranks):
        for tp in _divisors(ranks // pp):
            yield MeshShape(pp, ranks // pp // tp, tp)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def parse_mesh(text: str, ranks: int) -> MeshShape:
    """Parses a mesh as "pp=4,tp=8": axes that are left out have one rank, and dp has the rest.
    Raises ConfigError, with all degrees, for one that does not have ``ranks``."""
    given: dict[str, int] = {}
    for part in text.split(","):
        name, sign, value = (each.strip() for each in part.partition("="))
        if name not in AXES:
            raise ConfigError(
                f"--mesh {text}: there is no axis {name!r} here; axes are {', '.join(AXES)}, as"
                " --mesh pp=4,tp=8. The planner lays experts out with the axis that they share"
            )
        if not sign or not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"--mesh {text}: {name} needs a number of ranks, as {name}=4")
        if name in given:
            raise ConfigError(f"--mesh {text}: {name} is given twice")
        given[name] = int(value)
    others = given.get("pp", 1) * given.get("tp", 1)
    mesh = MeshShape(
        given.get("pp", 1), given.get("dp", max(1, ranks // others)), given.get("tp", 1)
    )
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
            abs(math.log(getattr(mesh, name) / getattr(other, name))) for name in ("pp", "tp")
        )

    return min(meshes_of(ranks), key=distance)
