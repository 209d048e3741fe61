"""Attempt: brings all ranks of the job to the same wrap, before they have a group to meet in.

attempt   one call of wrap_model on every rank. It is over when one rank says so: all were there,
          or an exception ended it on one. A rank that comes later makes the next one
barrier   a point of an attempt that every rank must reach before any continues

All state is in the job's store, so an exception on a rank loses none of it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, InfinityError, PeerError
from .pending import ranks_lost
from .transfer import group_timeout

BARRIERS = ("published", "read", "compared")


class Attempt:
    """This rank's part of an attempt, a context manager. An exception inside the block ends the
    attempt on all ranks. ``members``: the global ranks that take part; ``what``: what they make.
    """

    def __init__(self, members: Sequence[int], what: str = "wraps") -> None:
        self._me, self._count = dist.get_rank(), len(members)
        ranks = hashlib.blake2b(str([*members]).encode(), digest_size=6).hexdigest()
        self._of = "" if self._count == dist.get_world_size() else f" of {ranks}"
        # No key has the count of restarts: each machine's torchrun counts those of its own ranks
        self._store = dist.PrefixStore(
            f"infinity/{what}{self._of}", dist.distributed_c10d._get_default_store()
        )
        self.number = self._store.add("over", 0)
        while not self._joins():
            self.number += 1

    def _joins(self) -> bool:
        """Whether this rank can still join the attempt of its number: once, before it is over."""
        if self.total("over"):  # a rank was interrupted in _end, before it counted the attempt
            return False
        if self._store.add(self._key(f"came/{self._me}"), 1) == 1:
            return True
        self.refuse("it was interrupted in wrap_model")  # it could not report that itself
        self._end()
        return False

    @property
    def name(self) -> str:
        """The number, and the members if they are not all ranks: other members count anew."""
        return f"{self.number}{self._of}"

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        with contextlib.suppress(RuntimeError):  # if the store is gone, so is the job
            if error is not None and not self.total("refused"):
                why = f"{type(error).__name__}: {error}".rstrip(": ")
                self.refuse(why if isinstance(error, InfinityError) else f"{why}, in wrap_model")
            self._end()

    def _end(self) -> None:
        if self._store.add(self._key("over"), 1) == 1:
            self._store.add("over", 1)
        for name in BARRIERS:  # wake the ranks that wait at one
            self._store.set(self._key(f"{name}/all"), "")

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"

    def add(self, name: str, value: int) -> None:
        """Adds ``value`` to a number that all ranks share."""
        self._store.add(self._key(name), value)

    def total(self, name: str) -> int:
        """Returns the sum over all ranks so far. Complete after a barrier."""
        return self._store.add(self._key(name), 0)

    def tell(self, text: str) -> None:
        """Publishes ``text`` to the other ranks."""
        self._store.set(self._key(f"text/{self._me}"), text)

    def value_of(self, rank: int) -> str:
        """Returns the text that ``rank`` published. Call it after a barrier."""
        return self._store.get(self._key(f"text/{rank}")).decode()

    def refuse(self, why: str, *, of_all: bool = False) -> None:
        """Makes every rank raise at its next barrier. ``of_all``: the ranks' inputs do not fit
        together, which is a ConfigError."""
        self._store.set(self._key("why"), f"{'all' if of_all else self._me} {why}")
        self.add("refused", 1)

    def barrier(self, name: str) -> None:
        """Blocks until every rank has reached the barrier of this ``name``. Raises PeerError if one
        does not within the process group's timeout, or has failed; ConfigError if one refused its
        inputs."""
        if self._store.add(self._key(f"{name}/count"), 1) == self._count:
            self._store.set(self._key(f"{name}/all"), "")
        try:
            self._store.wait(
                [self._key(f"{name}/all")],
                *[limit for limit in (group_timeout(),) if limit is not None],
            )
        except RuntimeError as error:
            raise ranks_lost("wrap_model", error) from error
        if self.total("refused"):
            who, _, why = self._store.get(self._key("why")).decode().partition(" ")
            if who == "all" or why.startswith("ConfigError: "):
                raise ConfigError(
                    why if who == "all" else f"rank {who}: {why.removeprefix('ConfigError: ')}"
                )
            raise PeerError(f"rank {who} failed: {why}")
