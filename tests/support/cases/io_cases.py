"""What the tests of io share.

Every test of the engine runs on both backends; io_uring is skipped, with the reason, where it
cannot be had.
"""

from __future__ import annotations

import pytest
from native_arrays import (
    ENGINES,
)

from infinity import native

BLOCK = native.BLOCK_NBYTES
CHECKED = (
    native.CHECKSUM_NBYTES
)  # bytes covered by one checksum; transfers start at multiples of it


@pytest.fixture(params=ENGINES)
def kind(request) -> str:
    return request.param
