"""Pending: a running collective, and the error of one that does not complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from ..core.machine.device import Ticketed
from ..errors import InfinityError, PeerError
from . import failure_report
from .transfer import wait_for


@dataclass(eq=False)
class Pending:
    """A running collective. ``wait`` raises PeerError when a rank is gone.

    ordered   of a device's collective: later compute there waits for it, and the host has not yet
    """

    works: list
    what: str
    finish: Callable[[], None] | None = None  # called once, when what follows may use the bytes
    count: Callable[[], None] = lambda: None  # called when the bytes have arrived
    release: Callable[[], None] = lambda: None  # of its memory, once no transfer runs
    # Called while waiting: raises if the others do not come
    poll: Callable[[bool], None] = lambda settling: None
    # Called before the data is used: raises if it is not the others'
    check: Callable[[], None] = lambda: None
    # Signals that no other rank reads this one's home; None: none does
    borrowed: Ticketed | None = None
    forget: Callable[[], None] = lambda: None  # forgets completed works
    is_on_host: bool = True  # the transport's wait has a limit and can be repeated
    # Takes this one once it is ordered, and waits for it later; None: the first wait blocks
    defer: Callable[[Pending], None] | None = None

    def wait(self, *, settling: bool = False) -> None:
        """Blocks until the bytes have arrived, or orders a collective that has ``defer``: that one
        waits again, to learn whether it has failed. ``settling``: wait for completion only; the
        data is not used."""
        defer, self.defer = self.defer, None
        ordering = defer is not None and not settling
        try:
            for work in self.works:
                if ordering:
                    work.wait()
                else:
                    wait_for(work, lambda: self.poll(settling), is_on_host=self.is_on_host)
            if not settling:
                self.check()
            if not ordering:
                self._forget_works()
                self.count()
            if self.finish is not None:
                finish, self.finish = self.finish, None
                finish()
        except RuntimeError as error:
            for work in self.works:  # a failed or abandoned work may still move bytes
                with contextlib.suppress(RuntimeError):
                    wait_for(work, is_on_host=self.is_on_host)
            self._forget_works()
            raise (
                error if isinstance(error, InfinityError) else ranks_lost(self.what, error)
            ) from error
        finally:
            self.release()
        if ordering:
            defer(self)

    @property
    def is_over(self) -> bool:
        """Whether no transfer of it runs."""
        return all(work.is_completed() for work in self.works)

    def _forget_works(self) -> None:
        self.works = []
        self.forget()

    def drop(self) -> None:
        """Waits until no transfer runs, and discards the data."""
        self.finish = None
        with contextlib.suppress(PeerError):
            self.wait(settling=True)


def ranks_lost(what: str, error: BaseException) -> PeerError:
    """Makes the error for ranks that are gone or do not come, with what is known of them."""
    if why := failure_report.reasons():
        return PeerError(f"rank {dist.get_rank()} lost its peers at '{what}': {why}")
    text = str(error).strip().splitlines() or [type(error).__name__]
    silent = failure_report.silent()
    heard = f" Nothing was heard from {silent}." if silent else ""
    return PeerError(
        f"rank {dist.get_rank()} lost its peers at '{what}': {text[0]} A rank has ended, or did not"
        f" come within the process group's timeout: its own output tells why.{heard}"
    )
