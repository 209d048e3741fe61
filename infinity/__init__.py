"""Infinity: trains PyTorch models that do not fit, with the same bits.

    config = {"params": "nvme", "optimizer": "nvme", ...}
    model, optimizer = infinity.wrap_model(model, optimizer, config)

and the training loop stays as it is. See :class:`Config` for everything that can be chosen.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from .core import seams
from .errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    InfinityError,
    InternalError,
    PeerError,
    StorageError,
    UsageError,
)
from .library_versions import refuse_older

if TYPE_CHECKING:
    from . import data, parallel
    from .config import Config
    from .core.run.accumulate import accumulate
    from .core.step.clipping import clip_grad_norm_
    from .core.wrap.full_params import full_params
    from .core.wrap.named_weights import named_weights
    from .core.wrap.unwrap import unwrap_model
    from .core.wrap.wrap import wrap_model
    from .ext.attention.neighborhood_backends import neighborhood_attention
    from .ext.averages.average import ema, swa
    from .ext.checkpoint.checkpoints import Checkpoints
    from .ext.checkpoint.load import load_checkpoint
    from .ext.checkpoint.pretrained import save_pretrained
    from .ext.checkpoint.save import save_checkpoint
    from .ext.coded.coded_weights import dequantize
    from .ext.local_steps.local_steps import LocalSteps
    from .ext.packed.quantize import quantize
    from .ext.park.park import park, resume
    from .ext.shares.shares import Shares
    from .tools.run.auto import auto
    from .tools.watch.stats import Stats, stats
    from .tools.watch.watch import Watch

__version__ = "0.1.0"

# What this package's folder has. Another distribution with the same import name adds its own.
_OWN = frozenset(
    "_C _cuda __init__ __main__ __pycache__ amounts choices config core data errors ext files"
    " integrations library_versions native parallel progress py ranks tools torch_private untrusted"
    "".split()
)


def _has_code(entry: os.DirEntry) -> bool:
    """Whether ``entry`` is a module or a folder of some. An older version of this package leaves
    folders of compiled files alone."""
    if not entry.is_dir():
        return entry.name.endswith(".py")
    return any(name.endswith(".py") for _, _, names in os.walk(entry.path) for name in names)


def _refuse_others(folder: str) -> None:
    """Raises ImportError if another distribution has put its files into ``folder``."""
    others = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.name.partition(".")[0] not in _OWN and _has_code(entry)
    )
    if others:
        raise ImportError(
            f"{folder} also has {', '.join(others[:3])} of another distribution, whose import name"
            " is infinity, too. Use an environment of its own: python -m venv ENV &&"
            " ENV/bin/python -m pip install infinity-engine"
        )


_refuse_others(__path__[0])

__all__ = [
    "CapacityError",
    "Checkpoints",
    "Config",
    "ConfigError",
    "CorruptionError",
    "InfinityError",
    "InternalError",
    "LocalSteps",
    "PeerError",
    "Shares",
    "Stats",
    "StorageError",
    "UsageError",
    "Watch",
    "accumulate",
    "auto",
    "clip_grad_norm_",
    "data",
    "dequantize",
    "ema",
    "full_params",
    "load_checkpoint",
    "named_weights",
    "neighborhood_attention",
    "parallel",
    "park",
    "quantize",
    "resume",
    "save_checkpoint",
    "save_pretrained",
    "stats",
    "swa",
    "unwrap_model",
    "wrap_model",
]

# Imported when first asked for, so that `infinity --help` does not wait for torch.
_HOMES = {
    "Checkpoints": "ext.checkpoint.checkpoints",
    "Config": "config",
    "LocalSteps": "ext.local_steps.local_steps",
    "Shares": "ext.shares.shares",
    "Stats": "tools.watch.stats",
    "Watch": "tools.watch.watch",
    "accumulate": "core.run.accumulate",
    "auto": "tools.run.auto",
    "clip_grad_norm_": "core.step.clipping",
    "ema": "ext.averages.average",
    "full_params": "core.wrap.full_params",
    "load_checkpoint": "ext.checkpoint.load",
    "named_weights": "core.wrap.named_weights",
    "neighborhood_attention": "ext.attention.neighborhood_backends",
    "park": "ext.park.park",
    "dequantize": "ext.coded.coded_weights",
    "quantize": "ext.packed.quantize",
    "receipt": "tools.verify.receipts",
    "resume": "ext.park.park",
    "save_checkpoint": "ext.checkpoint.save",
    "save_pretrained": "ext.checkpoint.pretrained",
    "stats": "tools.watch.stats",
    "swa": "ext.averages.average",
    "unwrap_model": "core.wrap.unwrap",
    "wrap_model": "core.wrap.wrap",
}
seams.EXTENSIONS[:] = (
    "ext.class_step.entries.ClassSteps",
    "ext.class_step.companion.Outside",
    "ext.class_step.join.LaterOptimizers",
    "ext.migrate.expected.ExpectedOptimizer",
    "ext.shared_homes.own_processors.OwnProcessors",
    "ext.tables.tables.Tables",
    "ext.packed.packed_forward.PackedForwards",
    "ext.rows.chosen_forward.ChosenForwards",
    "ext.tiles.layout.TiledLayers",  # before those that run what is there in their own way
    "ext.blocks.blocks.Blocks",
    "ext.packed.packed.PackedWeights",
    "ext.checkpoint.meta_init.ElsewhereValues",
    "ext.pipeline.shared.Shared",
    "ext.rows.chosen_experts.RowReaders",
    "ext.dtensor.in_common.InCommon",
    "ext.sequence.sequences.Sequences",
    "ext.data.kept_data.KeptData",
    "ext.audit.audit.Audit",
    "ext.aside.aside.Aside",
    "ext.card.launches.Launches",
    "ext.card.allocator.AllocatorSettings",
    "ext.shared_homes.node_shards.SecondShards",
    "ext.shared_homes.quantize.CompressedGathers",
    "ext.shared_homes.share_homes.ShareHomes",
    "tools.watch.timeline.Timeline",
    "tools.plan.saved.SavedOnPaper",
)
seams.LIMITS[:] = ("ext.card.lent.without_gpus",)
seams.RULES[:] = ("ext.class_step.other_classes.OtherClasses",)
seams.STAGING_BACKENDS[:] = ("ext.gpu_direct.gpu_direct.GpuDirect",)
seams.CHANGES[:] = (
    "ext.integrations.lasting.Lasting",  # undone last: the others list the modules
    "ext.dtensor.retie.Ties",
    "ext.packed.quantize.Quantized",
    "ext.coded.coded_weights.CodedWeights",
    "ext.packed.packed.Packed",
)
seams.FORMS[:] = ("ext.dtensor.dtensors.DTensorForm",)
_ROOMS = ("data", "integrations", "parallel")  # whose functions are called by their room's name


def __dir__() -> list[str]:
    """Lists what is loaded when it is asked for, too."""
    return [*__all__, "__version__"]


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refuse_older("torch")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
