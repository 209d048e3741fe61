"""io: as in `infinity bench`, beside fio and DeepSpeed's async I/O."""

from __future__ import annotations

from infinity.tools.bench import io
from infinity.tools.bench.results import Measured
from infinity.tools.bench.settings import Settings

from . import rivals


def measure(settings: Settings) -> Measured:
    """Measures the rows of :func:`infinity.tools.bench.io.measure`. Notes name absent rivals."""
    return io.measure(settings, rivals=rivals.DISK_RIVALS if settings.rivals else ())
