"""Receipts: what a job ran with, its losses, and digests of its weights at each save. With one,
another machine repeats a stretch of the job and compares the bits.

digest   of one weight: of its elements, which no home changes
stretch  the steps between two saves
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import Config
from ...core.params.tensors import digest_of
from ...core.run.registry import engine_of
from ...core.units.forms import gathered
from ...core.wrap.named_weights import named_weights
from ...errors import ConfigError
from ...ext.audit.audit import audited
from ...files.outputs import replacing
from ..bench.facts import commit, machine, versions
from ..cli.presets import words_of
from .reading import FORMAT, read_receipt

# Options of `infinity train` that change no bit of what it trains, and are of one run.
OF_ONE_RUN = {
    *("help", "epochs", "minutes", "timeout", "stalls", "json", "trace"),
    *("out", "checkpoint", "checkpoint_overhead", "checkpoint_every", "resume", "overwrite"),
    *("prompt", "sample_bytes", "tensorboard", "log", "push", "receipt", "preset", "audit"),
}


def receipt(model: nn.Module) -> dict[str, Any]:
    """Returns what a wrapped ``model`` trains with now, as values for JSON.

    ``versions``, ``commit`` and ``machine``; ``config``: the fields that differ from the defaults;
    ``ranks``; ``step``: optimizer steps since the wrap or since the first one of the checkpoint
    that was loaded; ``audited``: as :attr:`infinity.Stats.audited`; ``weights``: 16 hex digits of
    BLAKE2b over the elements of each weight, by its name. Reads all weights, one at a time. Every
    rank calls this, and all get the same digests.
    Raises UsageError for a model that is not wrapped.
    """
    job = engine_of(model).job
    return facts() | {
        "config": _changed(job.config),
        "ranks": job.ranks.size,
        "step": job.steps.index,
        "weights": digests(model),
        "audited": audited(job),
    }


def facts() -> dict[str, Any]:
    """Returns versions and machine, which do not change while a job runs."""
    here = machine() | {"threads": torch.get_num_threads()}  # sums are divided among them
    return {"versions": versions(), "commit": commit(), "machine": here}


def _changed(config: Config) -> dict[str, str]:
    default = Config()
    names = (field.name for field in dataclasses.fields(config))
    values = {name: getattr(config, name) for name in names}
    return {name: str(each) for name, each in values.items() if each != getattr(default, name)}


def digests(model: nn.Module) -> dict[str, str]:
    """Returns the digest of each weight of a wrapped ``model``, by name. Every rank calls this."""
    return {name: digest_of(gathered(value))[2].hex() for name, value in named_weights(model)}


class ReceiptFile:
    """The file of ``--receipt``, which the first rank writes anew at each save."""

    def __init__(self, path: Path, args: argparse.Namespace, job: Any):
        """Goes on with the file of the job that this one resumes. Raises ConfigError if the file is
        another job's."""
        self._path, self._losses_told = path, 0
        self._content = facts() | {
            "receipt": FORMAT,
            "fixed_values": job.fixed_values,
            "config": _changed(engine_of(job.model).job.config),
            "saves": [],
        }
        # A resumed job may have others.
        threads = {"threads": torch.get_num_threads()}
        options = words_of(argparse.Namespace(**vars(args) | threads), OF_ONE_RUN)
        self._run = {"options": options, "ranks": job.ranks.count}
        if job.first_step and path.is_file():
            before = read_receipt(path)
            if before["fixed_values"] != self._content["fixed_values"]:
                raise ConfigError(f"--receipt {path} is of another job: give another file")
            # A save that the checkpoint does not have is repeated.
            self._content["saves"] = [s for s in before["saves"] if s["step"] <= job.first_step]

    def note(self, job: Any) -> None:
        """Adds the weights as they are now, and the losses since the last save. Every rank calls
        this."""
        saves = self._content["saves"]
        if saves and saves[-1]["step"] == job.next_step:
            return  # the same on all ranks
        weights = digests(job.model)
        losses, self._losses_told = job.losses[self._losses_told :], len(job.losses)
        weights_and_audits = {"weights": weights, "audited": audited(engine_of(job.model).job)}
        saves.append({"step": job.next_step, "losses": losses} | weights_and_audits | self._run)
        if job.ranks.is_first:
            with replacing(self._path.parent) as made:
                (made / self._path.name).write_text(json.dumps(self._content, indent=1))
