"""The typed errors. Each message says what happened, with the numbers, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping


class InfinityError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigError(InfinityError, ValueError):
    """The configuration, model or optimizer cannot be used as given; nothing was changed."""


class CapacityError(InfinityError, MemoryError):
    """A budget or a disk is too small; the message has the numbers and what to change.

    needed
        Bytes that the budgets which are short would need, by their names in Config."""

    needed: Mapping[str, int] = {}


class StorageError(InfinityError, OSError):
    """The disk or the kernel refused. Has ``errno`` and, as ``filename``, the path."""


class CorruptionError(InfinityError):
    """Bytes came back that are not the bytes that were written."""


class UsageError(InfinityError, RuntimeError):
    """A call at the wrong time or on the wrong object; the message names the right one."""


class PeerError(InfinityError, RuntimeError):
    """Another rank of the job failed, or is gone; the message has what is known of it."""


class InternalError(InfinityError, RuntimeError):
    """A check of the engine itself failed: a defect of this library. Nothing more is to be trusted;
    go on from a checkpoint."""
