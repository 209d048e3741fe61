"""Saving: a save that runs beside the next forward and backward (Mohan et al. 2021, CheckFreq).

Between two steps nothing changes weights, masters or moments. So a thread reads each unit at its
home and writes it, and the unit's next update waits until that is done. There is no copy of the
state: in memory are the slots of the files and one piece.

    rank-00001.writing   in the data folder: this rank still writes
    rank-00001.json      its files are written: their entries in the manifest
    rank-00001.failed    it has given up

The first rank's thread makes the checkpoint the current one when it finds what all ranks have
written. So no rank has to meet another while it trains.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from .. import native
from ..errors import CapacityError, PeerError
from ..machine.ledger import Ledger
from ..machine.sizes import format_nbytes
from ..machine.tiers import Tier
from ..planning.memory_terms import SAVE, SAVE_NBYTES
from ..runtime.engine import Engine
from ..runtime.job import Job
from .file_writer import SLOT_NBYTES, make_slots
from .folder import writing
from .home_values import PIECE_NBYTES
from .manifest import write_synced
from .publish import (
    Draft,
    FileEntries,
    UnitFile,
    make_current,
    refuse_failed,
    saying_what_stands,
    write_files,
    write_manifest,
)
from .removal import wait_for_space

logger = logging.getLogger(__name__)

# Of the buffer for reads from disks: all beside two slots and a piece
SERVICE_NBYTES = SAVE_NBYTES - 2 * SLOT_NBYTES - PIECE_NBYTES
SLOT_COUNTS = (16, 8, 4, 2)  # as many as the budget has room for
LOOK_SECONDS = 0.05  # how often the first rank looks at what the others have written
LEFT_SECONDS = 60.0  # it waits so long for them when its own process is ending


def _running_updates(job: Job) -> list[native.Ticket]:
    """Lists the last step's updates that run on the processor. Waits for others."""
    found = []
    for flat_param in (flat for unit in job.units for flat in unit.flat_params):
        update = flat_param.homes.update
        if isinstance(update, native.Ticket):
            found.append(update)
        else:  # on the device, or of experts, of which some may be behind
            flat_param.homes.wait()
    return found


class SaveBuffers:
    """The memory of one save beside the training, charged to the host's budget."""

    def __init__(self, ledger: Ledger, nbytes: int, planned_nbytes: int):
        """Raises CapacityError if the budget has no room for the least. ``nbytes``: of the files;
        ``planned_nbytes``: for this."""
        for count in SLOT_COUNTS:
            slots = min(count * SLOT_NBYTES, max(2 * SLOT_NBYTES, nbytes))
            held = slots + SERVICE_NBYTES + PIECE_NBYTES
            try:
                self._charge = ledger.reserve(Tier.HOST, held, SAVE)
            except CapacityError:
                if count == SLOT_COUNTS[-1]:
                    raise
                continue
            break
        self._account, self._more = ledger.accounts[Tier.HOST], max(0, held - planned_nbytes)
        self._account.planned_nbytes += self._more
        self.slots = make_slots(slots - SLOT_NBYTES)
        self.service = native.PinnedPool(native.Region(SERVICE_NBYTES))

    def free(self) -> None:
        """Frees the memory. Idempotent."""
        self._charge.release()
        self._account.planned_nbytes -= self._more
        self._more, self.slots, self.service = 0, None, None


def make_buffers(engine: Engine) -> SaveBuffers | None:
    """Makes the memory of a save beside the training; None if a rank has no room for it. Every rank
    calls this."""
    job, buffers = engine.job, None
    flat_params = [flat_param for unit in job.units for flat_param in unit.flat_params]
    nbytes = sum(a.nbytes for flat_param in flat_params for a in flat_param.arrays.values())
    planned = job.planned.plan.terms[Tier.HOST].get(SAVE, 0)
    with suppress(CapacityError):
        buffers = SaveBuffers(job.ledger, nbytes, planned)
    have = job.collectives.collect(buffers is not None, "room for a save beside the training")
    if all(have):
        return buffers
    if buffers is not None:
        buffers.free()
    logger.warning(
        "save_checkpoint(wait=False) waits: a save beside the training needs %s of host_memory,"
        " which is in use",
        format_nbytes(SAVE_NBYTES),
    )
    return None


class Saving:
    """A save beside the training. Every rank has one."""

    def __init__(self, draft: Draft, engine: Engine, buffers: SaveBuffers):
        """Starts nothing yet."""
        job = engine.job
        self._draft, self._collectives, self._buffers = draft, job.collectives, buffers
        # Until all is read: else the thread could free the homes that it reads
        self._engine: Engine | None = engine
        self._updates = _running_updates(job)
        self._left = Counter(file.unit for file in draft.files)
        self._held = {unit: native.Ticket(1) for unit in self._left}
        self._lock = ExitStack()  # of the folder, on the first rank
        self._error: BaseException | None = None
        self._is_met = False
        self.seconds: float | None = None  # from its begin until it could be loaded
        self._thread = threading.Thread(target=self._run, name="infinity save")
        ranks = job.collectives.ranks
        self._me, self._writers = ranks.world_rank, [ranks.world_rank]

    def start(self) -> Saving:
        """Makes the folder and starts the thread. Every rank calls this, between two steps."""
        collectives, draft = self._collectives, self._draft
        try:
            with saying_what_stands(draft):
                if collectives.ranks.is_first:
                    self._lock.enter_context(writing(draft.root))
                # Before any rank makes a folder
                everyones = collectives.collect(
                    (self._me, bool(draft.files)), f"writing to {draft.data.name}"
                )
                self._writers = [rank for rank, writes in everyones if writes]
                draft.data.mkdir(parents=True, exist_ok=not collectives.ranks.alone)
                if self._me in self._writers and not collectives.ranks.alone:
                    self._mark(self._me, "writing").touch()
            collectives.barrier("the begin of a save")
            for unit, ticket in self._held.items():
                for flat_param in unit.flat_params:
                    flat_param.homes.saved = ticket
            self._begun = time.monotonic()
            self._thread.start()
        except BaseException:
            if collectives.ranks.is_first:
                shutil.rmtree(draft.data, ignore_errors=True)
            self._let_go()
            raise
        return self

    @property
    def done(self) -> bool:
        """Whether this rank's part is over: on the first rank, whether the checkpoint is."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Blocks until the checkpoint is the current one. Every rank calls this; again it returns
        at once. Raises StorageError, CorruptionError or PeerError: the old checkpoint stands."""
        self._thread.join()
        if self._is_met:
            return
        error, self._is_met = self._error, True
        is_own = error is not None and not isinstance(error, PeerError)
        told = f"{type(error).__name__}: {error}" if is_own else None
        everyones = self._collectives.collect((self._me, told), "the end of a save")
        if not is_own:
            refuse_failed(self._draft, everyones)
        if error is not None:
            raise error

    # --- the thread ---

    def _run(self) -> None:
        try:
            with saying_what_stands(self._draft):
                self._write()
                self.seconds = time.monotonic() - self._begun
        except BaseException as error:  # noqa: BLE001  raised where the training can meet it
            self._error = error
            logger.warning("the save beside the training has failed: %s", error)
        finally:
            if self._error is not None:
                self._remove()
            self._let_go()

    def _write(self) -> None:
        draft, buffers, is_first = self._draft, self._buffers, self._collectives.ranks.is_first
        wait_for_space()
        for update in self._updates:
            update.wait()
        files: FileEntries = {}
        if self._me in self._writers:
            files = write_files(
                draft, buffers.slots, service=buffers.service, written=self._release
            )
        self._release_all()
        if not self._collectives.ranks.alone and self._me in self._writers:
            write_synced(self._mark(self._me, "part"), json.dumps(files).encode())
            self._mark(self._me, "part").rename(self._mark(self._me, "json"))
            self._mark(self._me, "writing").unlink()
        if is_first:
            everyones = self._files_of_all() if len(self._writers) > 1 else [files]
            write_manifest(draft, everyones)
            make_current(draft)

    def _release(self, file: UnitFile) -> None:
        """Lets the unit be updated if this was its last file."""
        self._left[file.unit] -= 1
        if not self._left[file.unit]:
            self._held.pop(file.unit).part_done()

    def _release_all(self) -> None:
        while self._held:
            self._held.popitem()[1].part_done()
        self._engine = None

    def _let_go(self) -> None:
        """Lets all units be updated, and frees the memory and the folder's lock."""
        self._release_all()
        self._buffers.free()
        self._updates.clear()
        self._draft = replace(self._draft, tensors={}, files=[])
        self._lock.close()

    def _remove(self) -> None:
        """Removes what a failed save has written, once no rank writes any more."""
        self._release_all()  # the training goes on meanwhile
        if (mark := self._mark(self._me, "writing")).exists():
            mark.rename(self._mark(self._me, "failed"))  # needs no space
        if self._collectives.ranks.is_first:
            self._await(lambda rank: not self._mark(rank, "writing").exists())
            shutil.rmtree(self._draft.data, ignore_errors=True)

    # --- what the ranks have written ---

    def _mark(self, rank: int, what: str) -> Path:
        return self._draft.data / f"rank-{rank:05d}.{what}"

    def _files_of_all(self) -> list[FileEntries]:
        """Waits for the other ranks, and takes the entries of their files. Raises PeerError if one
        has failed."""
        self._await(
            lambda rank: any(self._mark(rank, what).exists() for what in ("json", "failed"))
        )
        found = []
        for rank in self._writers:
            if self._mark(rank, "failed").exists():
                raise PeerError(
                    f"rank {rank} could not write its part of the checkpoint {self._draft.root}."
                    " The old one stands."
                )
            found.append(json.loads(self._mark(rank, "json").read_text()))
            self._mark(rank, "json").unlink()
        return found

    def _await(self, is_over: Callable[[int], bool]) -> None:
        """Waits until ``is_over`` for every rank that writes. Raises PeerError if that does not
        come while this process ends."""
        left, ending = list(self._writers), None
        while left := [rank for rank in left if not is_over(rank)]:
            if not threading.main_thread().is_alive():
                ending = ending or time.monotonic()
                if time.monotonic() - ending > LEFT_SECONDS:
                    raise PeerError(f"rank {left[0]} has not written its part of the checkpoint")
            time.sleep(LOOK_SECONDS)
