"""Scratch: finds a folder on a local disk for swap files, if the user has named none.

customary  a usual folder for temporary files: from the variables below, the system's temporary
           folders, the user's cache, the current folder
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from . import disk_profile
from .sizes import format_nbytes

VARIABLE = "INFINITY_SCRATCH"  # if set, the only candidate
VARIABLES = ("SLURM_TMPDIR", "LOCAL_SCRATCH", "SCRATCH", "TMPDIR")
CUSTOMARY = ("/scratch", "/local_scratch", "/var/tmp")
NETWORKS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "ceph",
    "beegfs",
    "9p",
    "afs",
    "glusterfs",
    "pvfs2",
)

# Left to other programs, and to this job's checkpoints.
FRACTION_LEFT, MOST_LEFT_NBYTES = 1 / 10, 16 * 1024**3


@dataclass(frozen=True)
class Candidate:
    """A candidate folder. ``refusal``: why it cannot be used, or ""."""

    folder: str
    usable_nbytes: int = 0
    refusal: str = ""

    def __str__(self) -> str:
        return f"{self.folder} ({self.refusal or format_nbytes(self.usable_nbytes) + ' to use'})"


def candidates() -> list[Candidate]:
    """Lists the customary folders, one per disk: the first usable one counts."""
    if VARIABLE in os.environ:
        return [_look_at(os.path.abspath(os.environ[VARIABLE] or "."))]
    named = [os.environ[name] for name in VARIABLES if os.environ.get(name)]
    folders = [
        *named,
        tempfile.gettempdir(),
        *CUSTOMARY,
        str(disk_profile.cache_folder()),
        os.getcwd(),
    ]
    result: list[Candidate] = []
    seen: set[str] = set()
    for folder in dict.fromkeys(os.path.abspath(folder) for folder in folders):
        if os.path.isdir(folder):
            candidate, disk = _look_at(folder), disk_profile.Disk(folder).device
            if disk not in seen:
                result.append(candidate)
            if not candidate.refusal:
                seen.add(disk)
    return result


def choose(candidates: Sequence[Candidate], needed_nbytes: int) -> Candidate | None:
    """Chooses the folder on the fastest disk with room for ``needed_nbytes``, else the one with
    most room. None if none is usable. Measures disks only if there is a choice."""
    usable = [candidate for candidate in candidates if not candidate.refusal]
    roomy = [candidate for candidate in usable if candidate.usable_nbytes >= needed_nbytes]
    if len(roomy) > 1:
        return max(
            roomy, key=lambda candidate: disk_profile.disk_profile(candidate.folder).mixed_rate
        )
    return (roomy or sorted(usable, key=lambda candidate: -candidate.usable_nbytes) or [None])[0]


def _look_at(folder: str) -> Candidate:
    try:
        if not os.path.isdir(folder):
            return Candidate(folder, refusal="is no folder")
        kind = disk_profile.file_system(folder)
        if kind in disk_profile.IN_MEMORY:
            return Candidate(folder, refusal=f"is {kind}, which is memory")
        if kind in NETWORKS or kind.startswith("fuse."):
            return Candidate(folder, refusal=f"is {kind}, which other machines use too")
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Candidate(folder, refusal=f"cannot be written: {error.strerror or error}")
    return Candidate(folder, int(free - min(FRACTION_LEFT * free, MOST_LEFT_NBYTES)))
