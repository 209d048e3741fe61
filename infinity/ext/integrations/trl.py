"""TRL's SFTTrainer, DPOTrainer and GRPOTrainer over models at home; DPO's reference model streams.

    home = {"params": "nvme", ...}
    trainer = InfinityDPOTrainer(model=model, ref_model=reference, args=args, ..., infinity=home)

For other trainers of TRL: ``class MyTrainer(InfinityMixin, trl.RewardTrainer): ...``.
"""

from __future__ import annotations

from typing import Any

from ...core.run.registry import is_wrapped
from ...errors import ConfigError
from ...library_versions import require
from ..park.park import park
from .trainer import InfinityMixin

trl = require("trl")


class InfinitySFTTrainer(InfinityMixin, trl.SFTTrainer):
    """Fine-tunes a model at home as TRL's SFTTrainer does, with the keyword ``infinity``."""


class InfinityDPOTrainer(InfinityMixin, trl.DPOTrainer):
    """Trains a model at home as TRL's DPOTrainer does. ``infinity_reference`` configures the
    reference model, whose weights stream; it has its own budgets."""


class InfinityGRPOTrainer(InfinityMixin, trl.GRPOTrainer):
    """Trains a model at home as TRL's GRPOTrainer does.

    infinity_park
        "host" or "nvme": parks the optimizer's state there while completions are generated, so that
        its memory is free for them. The next update brings it back. None: it stays.

    Raises ConfigError for another place.
    """

    def __init__(self, *args: Any, infinity_park: str | None = None, **kwargs: Any):
        if infinity_park not in (None, "host", "nvme"):
            raise ConfigError(f"infinity_park={infinity_park!r}: give 'host', 'nvme' or None")
        self._park_to = infinity_park
        super().__init__(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._park_to is not None and is_wrapped(self.model):
            park(self.model, to=self._park_to, what="optimizer")
        return super()._generate(*args, **kwargs)
