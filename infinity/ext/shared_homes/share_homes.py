"""Share homes: lets ranks of one machine read each other's weights from shared memory, if the
configuration and the machine allow it."""

from __future__ import annotations

import logging
from functools import partial

from ...config import Config
from ...core.machine.device import Device
from ...core.run.job import Job
from ...errors import ConfigError, StorageError
from ...ranks.collectives import Collectives
from ...ranks.transfer import patience_seconds
from .shared_homes import SharedHomes, agree_to_share, why_not

logger = logging.getLogger(__name__)


def share_homes(config: Config, device: Device, collectives: Collectives) -> SharedHomes | None:
    """Allocates later weights in memory that the other ranks of this rank's row can read. Returns
    None if that is not possible. Every rank calls this. Raises ConfigError if ``share_homes=True``
    and it is not possible."""
    ranks = collectives.ranks
    if config.share_homes is False or ranks.shard_group is None:  # the same on all ranks
        return None
    homes, refusal = None, why_not(computes_on_host=device.is_host, compresses=ranks.compresses)
    if not refusal:
        try:
            homes = SharedHomes(patience_seconds())
        except StorageError as error:
            refusal = str(error)
    refusal = agree_to_share(partial(collectives.collect, among=[ranks.shard_group]), refusal)
    if refusal:
        if homes is not None:
            homes.close()
        _tell(config, refusal)
        return None
    ranks.shard_group.share(homes)
    return homes


def connect_homes(config: Config, homes: SharedHomes | None, job: Job) -> None:
    """Maps the other ranks' weights in ``homes``, which are allocated. Every rank calls this.
    Raises ConfigError if ``share_homes=True`` and it is not possible."""
    row = job.ranks.shard_group
    if homes is not None and row is not None:
        flat_params = [
            flat
            for unit in job.units
            for flat in unit.flat_params
            if flat.collectives is job.collectives
        ]
        collect = partial(job.collectives.collect, among=[row])
        refusal = homes.connect(
            collect, job.ranks.rank, [flat.homes.weight_regions for flat in flat_params]
        )
        if refusal:
            row.share(None)
            _tell(config, refusal)


def _tell(config: Config, refusal: str) -> None:
    if config.share_homes:
        raise ConfigError(f"share_homes=True: {refusal}. Leave it out: then weights are gathered.")
    logger.info("weights are not shared between ranks: %s", refusal)
