"""Saving: a save in the background of the next forward and backward (Mohan et al. 2021, CheckFreq).

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from ... import native
from ...core.machine.ledger import Ledger
from ...core.machine.sizes import format_nbytes, round_up
from ...core.machine.tiers import Tier
from ...core.plan.memory_terms import SAVE, SAVE_NBYTES
from ...core.run.engine import Engine
from ...core.run.job import Job
from ...errors import CapacityError, PeerError, UsageError
from ...ranks import failure_report
from ...ranks.transfer import group_timeout
from .content import Entry
from .file_writer import SLOT_NBYTES, make_slots
from .folder import writing
from .home_values import PIECE_NBYTES, HomeValues
from .manifest import write_synced
from .publish import (
    Draft,
    FileEntries,
    UnitFile,
    failed_rank,
    is_current,
    make_current,
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
MOST_SECONDS = 1800.0  # that it waits for them, if the process group has no timeout
LEFT_SECONDS = 60.0  # the same once its process is ending, or the ranks cannot meet any more


def _running_updates(job: Job) -> list[native.Ticket]:
    """Lists the last step's updates that run on the processor. Waits for others."""
    updates = []
    for unit in job.units:
        for flat_param in unit.flat_params:
            update = flat_param.homes.update
            if isinstance(update, native.Ticket) and not unit.computes_at_home:
                updates.append(update)
            else:  # on the device, or of experts, of which some may be behind
                flat_param.homes.wait()
    if not job.device.is_host:
        job.device.drain()  # the thread reads on another stream
    return updates


class SaveBuffers:
    """The memory of one save beside the training, charged to the host's budget."""

    def __init__(self, ledger: Ledger, nbytes: int, copied_nbytes: int, planned_nbytes: int):
        """Raises CapacityError if the budget has no room for the least. ``nbytes``: of the files;
        ``copied_nbytes``: of weights that are copied; ``planned_nbytes``: for this."""
        for count in SLOT_COUNTS:
            slots = min(count * SLOT_NBYTES, max(2 * SLOT_NBYTES, round_up(nbytes, SLOT_NBYTES)))
            held = slots + SERVICE_NBYTES + PIECE_NBYTES + copied_nbytes
            try:
                self._charge = ledger.reserve(Tier.HOST, held, SAVE)
            except CapacityError:
                if count == SLOT_COUNTS[-1]:
                    raise
                continue
            break
        self.more_nbytes = max(0, held - planned_nbytes)  # than was planned
        self.slots = make_slots(slots - SLOT_NBYTES)
        self.service = native.PinnedPool(native.Region(SERVICE_NBYTES))

    def free(self) -> None:
        """Frees the memory. Idempotent."""
        self._charge.release()
        self.slots, self.service = None, None


def save_in_background(draft: Draft, engine: Engine) -> Saving | None:
    """Starts to save beside the training; returns None if a rank has no room for that. Every rank
    calls this, between two steps."""
    job, buffers = engine.job, None
    updates, exposed = _running_updates(job), list(_exposed_weights(draft))
    planned = job.planned.plan.terms[Tier.HOST].get(SAVE, 0)
    with suppress(CapacityError):
        copied = sum(value.nbytes for _, _, value in exposed)
        buffers = SaveBuffers(job.ledger, draft.nbytes, copied, planned)
    try:
        if all(job.collectives.collect(buffers is not None, "room for a save beside the training")):
            for values, name, value in exposed:
                values[name] = value.copy(), values[name][1]
            saving = Saving(draft, engine, updates, buffers).start(engine)
            # From now on: the next save takes it again, and peaks are compared with the plan.
            job.planned.add(Tier.HOST, SAVE, buffers.more_nbytes)
            job.ledger.accounts[Tier.HOST].planned_nbytes += buffers.more_nbytes
            return saving
    except BaseException:
        if buffers is not None:
            buffers.free()
        raise
    if buffers is not None:
        buffers.free()
    logger.warning(
        "the training waits for this save: beside it, a save needs %s of host_memory, which is in"
        " use",
        format_nbytes(SAVE_NBYTES),
    )
    return None


def _exposed_weights(draft: Draft) -> Iterator[tuple[dict[str, Entry], str, HomeValues]]:
    """Yields the weights that are in memory which users can write to without being noticed."""
    for file in draft.files:
        weights = (
            [flat.weight for flat in file.unit.flat_params] if file.unit.computes_at_home else []
        )
        for name, (value, _) in file.values.items():
            if any(value.array is weight for weight in weights):
                yield file.values, name, value


def _most_seconds() -> float:
    """Returns the seconds in which ranks have to meet."""
    timeout = group_timeout()
    return MOST_SECONDS if timeout is None else timeout.total_seconds()


def _told(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


class Saving:
    """A save beside the training. Every rank has one. ``is_saved``, after :meth:`wait`: whether it
    is the current checkpoint, the same on all ranks."""

    def __init__(
        self, draft: Draft, engine: Engine, updates: list[native.Ticket], buffers: SaveBuffers
    ):
        """``updates``: running ones of the values. Starts nothing yet."""
        self._draft, self._collectives = draft, engine.job.collectives
        self._updates, self._buffers = updates, buffers
        # Until all is read: else the thread could free the homes that it reads
        self._engine: Engine | None = engine
        self._left = Counter(file.unit for file in draft.files)
        self._held = {unit: native.Ticket(1) for unit in self._left}
        self._lock = ExitStack()  # of the folder, on the first rank
        self._error: BaseException | None = None
        self._failed: list[tuple[int, str]] = []  # other ranks, and why
        self._is_met = self.is_saved = False
        self.seconds: float | None = None  # from its begin until it could be loaded
        self._go, self._is_given_up = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="infinity save")
        ranks = self._collectives.ranks
        self._me, self._writers = ranks.world_rank, [ranks.world_rank]
        self._processes: dict[int, int] = {}  # of other ranks, where they can be seen
        self._end: float | None = None  # of all that the thread waits for; of time.monotonic()

    def start(self, engine: Engine) -> Saving:
        """Makes the folder and starts the thread."""
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
                # Here: another thread's wait for the store would block the thread of the save
                self._processes = failure_report.processes()
                draft.data.mkdir(parents=True, exist_ok=not collectives.ranks.alone)
                if self._me in self._writers and not collectives.ranks.alone:
                    self._mark(self._me, "writing").touch()
            self._begun = time.monotonic()
            self._thread.start()
            collectives.barrier("the begin of a save")
            engine.job.events.finishing.append(self.finish)
            self._events = engine.job.events
            for unit, ticket in self._held.items():
                for flat_param in unit.flat_params:
                    flat_param.homes.read_until("save", ticket)
        except BaseException:
            self._is_given_up = True
            if self._thread.ident is None:
                self._end_early()
            raise
        finally:
            self._go.set()
        return self

    @property
    def done(self) -> bool:
        """Whether this rank's part is over: on the first rank, whether the checkpoint is."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Blocks until the checkpoint is the current one. Every rank calls this; again it returns
        at once. Raises StorageError, CorruptionError or PeerError: the old checkpoint stands."""
        if self._is_met:
            return
        error = self._meet()
        self.is_saved = error is None
        self._is_met = True
        if error is not None:
            raise error

    def finish(self) -> None:
        """Waits as :meth:`wait` does, once: the job asks at its next save, load, park or end."""
        self._events.forget(self)
        self.wait()

    def _meet(self) -> BaseException | None:
        """Waits for all ranks. Returns this rank's error, or one that tells of another's."""
        collectives, is_first = self._collectives, self._collectives.ranks.is_first
        if collectives.ranks.alone or not is_first:
            self._thread.join()
        if collectives.ranks.alone:
            return self._error
        # The first rank comes before its thread ends, which may wait for one that has failed
        failure = None if is_first else _told(self._error)
        everyones = collectives.collect((self._me, failure), "the end of a save")
        self._failed = [(rank, why) for rank, why in everyones if why is not None]
        self._thread.join()
        first = collectives.collect((self._me, _told(self._error)), "the outcome of a save")[0]
        if self._error is not None and not isinstance(self._error, PeerError):
            return self._error
        for rank, why in (*self._failed, first):
            if why is not None:
                return failed_rank(self._draft, rank, why)
        return None

    # --- the thread ---

    def _run(self) -> None:
        self._go.wait()
        try:
            with saying_what_stands(self._draft):
                try:
                    self._write()
                except BaseException:
                    if not is_current(self._draft):
                        self._remove()
                    raise
            self.seconds = time.monotonic() - self._begun
        except BaseException as error:  # noqa: BLE001  raised where the training can meet it
            self._error = error
            logger.warning("the save beside the training has failed: %s", error)
        finally:
            self._let_go()

    def _write(self) -> None:
        if self._is_given_up:
            raise UsageError("the save was interrupted as it began")
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
            write_manifest(draft, everyones, buffers.slots)
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

    def _end_early(self) -> None:
        """Ends a save whose thread was not started."""
        if self._collectives.ranks.is_first:
            shutil.rmtree(self._draft.data, ignore_errors=True)
        self._let_go()

    def _remove(self) -> None:
        """Removes what a failed save has written, once no rank writes any more."""
        self._release_all()  # the training goes on meanwhile
        with suppress(OSError):  # of a disk to which nothing can be written
            if (mark := self._mark(self._me, "writing")).exists():
                mark.rename(self._mark(self._me, "failed"))  # needs no space
        if self._collectives.ranks.is_first:
            with suppress(PeerError):
                self._await(
                    lambda rank: (
                        not self._mark(rank, "writing").exists() or not self._is_running(rank)
                    )
                )
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
        files = []
        for rank in self._writers:
            if self._mark(rank, "failed").exists():
                raise failed_rank(self._draft, rank, "its own output says why")
            files.append(json.loads(self._mark(rank, "json").read_text()))
            self._mark(rank, "json").unlink()
        return files

    def _await(self, is_over: Callable[[int], bool]) -> None:
        """Waits until ``is_over`` for every rank that writes. Raises PeerError if one has said that
        it failed, if its process has ended, or if it does not come in the time in which ranks have
        to meet: once for a save, not for each wait."""
        left = [rank for rank in self._writers if rank != self._me]
        ranks, can_meet = self._collectives.ranks, True
        while True:
            gone = {rank for rank in left if not self._is_running(rank)}  # before its files
            if not (left := [rank for rank in left if not is_over(rank)]):
                return
            now = time.monotonic()
            self._end = self._end or now + _most_seconds()
            if can_meet and (
                not threading.main_thread().is_alive()
                or any(channel.has_lost for channel in ranks.sync_channels)
            ):
                can_meet, self._end = False, min(self._end, now + LEFT_SECONDS)
            lost = [(rank, "its process has ended") for rank in left if rank in gone]
            if self._failed or lost or now > self._end:
                rank, why = (*self._failed, *lost, (left[0], "nothing was heard of it"))[0]
                raise failed_rank(self._draft, rank, why)
            time.sleep(LOOK_SECONDS)

    def _is_running(self, rank: int) -> bool:
        """Returns whether the process of another rank may still write."""
        pid = self._processes.get(rank)
        return pid is None or failure_report.runs(pid)
