"""TRL's SFTTrainer and DPOTrainer over models at home; DPO's reference model streams beside the policy.

    trainer = InfinityDPOTrainer(model=model, ref_model=reference, args=args, ..., infinity={"params": "nvme", ...})

Others of TRL's trainers: ``class MyTrainer(InfinityMixin, trl.RewardTrainer): ...``.
"""

from __future__ import annotations

from .trainer import InfinityMixin
from .versions import require

trl = require("trl")


class InfinitySFTTrainer(InfinityMixin, trl.SFTTrainer):
    """Fine-tunes a model at home as TRL's SFTTrainer does, with the keyword ``infinity``."""


class InfinityDPOTrainer(InfinityMixin, trl.DPOTrainer):
    """Prefers as TRL's DPOTrainer does. ``infinity_reference`` is the reference model's configuration, whose weights stream; its budgets
    are its own."""
