"""The accelerator that benchmarks of a GPU run on."""

from __future__ import annotations

from typing import Any

import torch

from infinity.core.machine.accelerator import make_device
from infinity.core.machine.traffic import Traffic
from infinity.errors import ConfigError


def this_machines(theme: str) -> Any:
    """Makes the device of this machine's accelerator, for ``theme``. Raises ConfigError if there is
    none, or no kernels for it."""
    if not torch.accelerator.is_available():
        raise ConfigError(f"bench {theme} needs a GPU: torch sees none")
    device = make_device(torch.accelerator.current_accelerator(), Traffic())
    if device.kernels is None:
        device.close()
        raise ConfigError(f"bench {theme} needs a GPU: {device.kernels_refusal}")
    return device
