"""TRL's SFTTrainer and DPOTrainer over models at home; DPO's reference model streams.

    home = {"params": "nvme", ...}
    trainer = InfinityDPOTrainer(model=model, ref_model=reference, args=args, ..., infinity=home)

For other trainers of TRL: ``class MyTrainer(InfinityMixin, trl.RewardTrainer): ...``.
"""

from __future__ import annotations

from .trainer import InfinityMixin
from .versions import require

trl = require("trl")


class InfinitySFTTrainer(InfinityMixin, trl.SFTTrainer):
    """Fine-tunes a model at home as TRL's SFTTrainer does, with the keyword ``infinity``."""


class InfinityDPOTrainer(InfinityMixin, trl.DPOTrainer):
    """Trains a model at home as TRL's DPOTrainer does. ``infinity_reference`` configures the
    reference model, whose weights stream; it has its own budgets."""
