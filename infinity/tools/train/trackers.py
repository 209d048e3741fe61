"""Trackers: logs a job's figures to TensorBoard, Weights & Biases, MLflow and others, through the
trackers of accelerate. The first rank alone logs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import infinity

from ...errors import ConfigError
from ...library_versions import refuse_older
from .counts import EdgeCounts
from .job import Measured
from .places import TENSORBOARD
from .ranks import Ranks
from .wording import first_line

PROJECT = "infinity"
HERE = Path(".")  # of trackers with a folder that they name themselves
NOT_IN_NAMES = re.compile(r"[^-/\w.]")  # TensorBoard replaces these, and MLflow refuses them


def check_trackers(names: list[str]) -> None:
    """Raises ConfigError for a tracker that accelerate does not know, or that is not installed."""
    if not names:
        return
    refuse_older("accelerate")
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
        from accelerate.utils import LoggerType
    except ImportError as error:
        raise ConfigError(
            f"--log {names[0]} needs the package accelerate: pip install accelerate {names[0]}"
            f" ({error})"
        ) from None
    installed, own = set(map(str, get_available_trackers())), set(map(str, LoggerType))
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(
                f"--log {name} is not a tracker of accelerate. Known are"
                f" {', '.join(map(str, LOGGER_TYPE_TO_CLASS))}; give --log once for each."
            )
        if name in own and name not in installed:
            raise _not_installed(name)


def _not_installed(name: str) -> ConfigError:
    return ConfigError(f"--log {name} needs the package {name}: pip install {name}")


@contextmanager
def begin_trackers(
    args: argparse.Namespace, ranks: Ranks, say: Callable[[str], None]
) -> Iterator[Trackers]:
    """Begins the trackers of the options, and finishes them however the job ends. Raises
    ConfigError for one that cannot begin."""
    trackers = Trackers(say)
    try:
        for name in args.log if ranks.is_first else ():
            trackers.begin(name, args.tensorboard)
        yield trackers
    finally:
        trackers.finish()


class Trackers:
    """The trackers of a job. One that fails is told once and left out; the job goes on."""

    def __init__(self, say: Callable[[str], None]):
        self._open: dict[str, Any] = {}
        self._say = say

    def begin(self, name: str, folder: Path | None) -> None:
        """Begins a tracker. ``folder``: that of TensorBoard's files. Raises ConfigError."""
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind = LOGGER_TYPE_TO_CLASS[name]
        arguments: list[Any] = [PROJECT]
        if kind.requires_logging_directory:
            # Without a name, the files lie in the folder itself
            arguments = ["", str(folder)] if name == TENSORBOARD else [PROJECT, str(HERE)]
        PartialState()  # accelerate's own log needs it
        try:
            tracker = kind(*arguments)
            if hasattr(tracker, "start"):  # accelerate 1.4 starts when it is made
                tracker.start()
        except ImportError:
            raise _not_installed(name) from None
        except Exception as error:
            raise ConfigError(
                f"--log {name} cannot begin: {first_line(error).rstrip('.')}. Mend it, or leave it"
                " out."
            ) from error
        self._open[name] = tracker

    def tell_options(self, args: argparse.Namespace, job: Measured) -> None:
        """Sends the options as hyperparameters, with what was chosen for those that were not
        given."""
        options = {name: value for name, value in vars(args).items() if not callable(value)}
        strings = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in (options | job.fixed_values | {"ranks": job.ranks.count}).items()
            if value is not None
        }
        self._each(lambda tracker: tracker.store_init_configuration(strings))

    def held_out(self, job: Measured, loss: float | None) -> None:
        """Sends a held-out loss of this step."""
        if loss is not None:
            self._log({"eval/loss": loss}, job.next_step)

    def show(self, job: Measured, counts: EdgeCounts) -> None:
        """Sends a step's figures: loss, rate, gradients' norm, speed, stalls, traffic since the
        start, and each tier's peak."""
        if not self._open:
            return
        values = {f"train/{name}": value for name, value in job.figures.items()} | {
            "train/loss": job.losses[-1],
            "train/lr": job.lr,
            "speed/tokens_per_second": job.tokens_per_step / job.step_seconds[-1],
            "speed/stall_share": counts.stall_share,
        }
        for edge, moved in counts.edges.items():
            values[f"moved/{edge}_GB"] = moved["nbytes"] / 1e9
        for tier, held in infinity.stats(job.model).tiers.items():
            values[f"memory/{tier}_peak_GB"] = held.peak_nbytes / 1e9
        self._log(values, job.next_step)

    def finish(self) -> None:
        """Finishes all trackers. Idempotent."""
        self._each(lambda tracker: tracker.finish())
        self._open.clear()

    def _log(self, values: dict[str, float], step: int) -> None:
        named = {NOT_IN_NAMES.sub("_", name): value for name, value in values.items()}
        self._each(lambda tracker: tracker.log(named, step=step))

    def _each(self, do: Callable[[Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                do(tracker)
            except Exception as error:  # noqa: BLE001 - whatever a library raises, the job goes on
                del self._open[name]
                self._say(f"--log {name} failed and logs no more: {first_line(error)}")
