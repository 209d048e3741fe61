"""Device slots: sizes the device memory for state at home on the host that the device steps."""

from __future__ import annotations

DEVICE_SLOTS = 3
DEVICE_CHUNK = 4 * 1024 * 1024  # elements of one slot
SLOT_ALIGNMENT = 256  # bytes, of each array in a slot


def device_slot_nbytes(nbytes_per_element: float, numel: int) -> int:
    """Counts the bytes of a slot for one chunk of all arrays of a flat param.

    ``nbytes_per_element``: of all arrays together. ``numel``: elements of the largest flat param.
    """
    return int(nbytes_per_element * min(DEVICE_CHUNK, numel)) + 8 * SLOT_ALIGNMENT
