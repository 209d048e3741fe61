"""The zoo: one small model of each architecture of transformers."""

from __future__ import annotations

import zoo_more  # noqa: F401 - enters its models
import zoo_text  # noqa: F401
from zoo_base import ZOO, Architecture, make_batch, make_model, seed_everything

__all__ = ["ZOO", "Architecture", "make_batch", "make_model", "seed_everything"]
