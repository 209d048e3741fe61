"""Share homes: lets ranks of one machine read each other's weights from shared memory, if the
configuration and the machine allow it."""

from __future__ import annotations

import logging
from functools import partial

from ...config import Config
from ...core.machine.device import Device
from ...core.run.job import Job
from ...core.seams import Events, Extension
from ...errors import ConfigError, StorageError
from ...ranks.channel import Channel
from ...ranks.collectives import Collectives
from ...ranks.transfer import patience_seconds
from .shared_homes import SharedHomes, agree_to_share, why_not

logger = logging.getLogger(__name__)


class ShareHomes(Extension):
    """Lets the ranks of this rank's row read each other's weights, if that is possible."""

    def __init__(self, config: Config, row: Channel, homes: SharedHomes):
        self._config, self._row, self._homes = config, row, homes

    @classmethod
    def begin(
        cls, config: Config, device: Device, collectives: Collectives, events: Events
    ) -> ShareHomes | None:
        """Allocates later weights in memory that the other ranks of this rank's row can read.
        Returns None if that is not possible. Raises ConfigError if ``share_homes=True`` and it is
        not."""
        row = collectives.ranks.shard_group
        if config.share_homes is False or row is None:  # the same on all ranks
            return None
        homes = None
        refusal = why_not(computes_on_host=device.is_host, compresses=config.compress_gathers)
        if not refusal:
            try:
                homes = SharedHomes(patience_seconds())
            except StorageError as error:
                refusal = str(error)
        refusal = agree_to_share(partial(collectives.collect, among=[row]), refusal)
        if refusal or homes is None:
            if homes is not None:
                homes.close()
            _tell(config, refusal)
            return None
        row.share(homes)
        shared = cls(config, row, homes)
        events.allocated.append(shared.connect)
        return shared

    def connect(self, job: Job) -> None:
        """Maps the other ranks' weights, which are allocated. Raises ConfigError if
        ``share_homes=True`` and it is not possible."""
        flat_params = [
            flat
            for unit in job.units
            for flat in unit.flat_params
            if flat.collectives is job.collectives
        ]
        refusal = self._homes.connect(
            partial(job.collectives.collect, among=[self._row]),
            job.ranks.rank,
            [flat.homes.weight_regions for flat in flat_params],
        )
        if refusal:
            self._row.share(None)
            _tell(self._config, refusal)


def _tell(config: Config, refusal: str) -> None:
    if config.share_homes:
        raise ConfigError(f"share_homes=True: {refusal}. Leave it out: then weights are gathered.")
    logger.info("weights are not shared between ranks: %s", refusal)
