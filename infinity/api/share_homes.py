"""Share homes: has ranks read each other's weights where they lie, as far as the configuration and the machine let them."""

from __future__ import annotations

import logging
from functools import partial

from ..config.config import Config
from ..distributed.collectives import Collectives
from ..distributed.shared_homes import SharedHomes, agree_to_share, why_not
from ..distributed.transfer import patience_seconds
from ..errors import ConfigError, StorageError
from ..machine.device import Device
from ..runtime.job import Job

logger = logging.getLogger(__name__)


def share_homes(config: Config, device: Device, collectives: Collectives) -> SharedHomes | None:
    """Has the weights that are allocated from now on lie where the other ranks of this one's row can read them. Every rank comes.
    Returns None where they cannot. Raises ConfigError where that is asked for."""
    ranks = collectives.ranks
    if config.share_homes is False or ranks.row is None:  # the same on all ranks
        return None
    homes, refusal = None, why_not(computes_on_host=device.is_host, compresses=ranks.compresses)
    if not refusal:
        try:
            homes = SharedHomes(patience_seconds())
        except StorageError as error:
            refusal = str(error)
    refusal = agree_to_share(partial(collectives.collect, among=[ranks.row]), refusal)
    if refusal:
        if homes is not None:
            homes.close()
        _tell(config, refusal)
        return None
    ranks.row.share(homes)
    return homes


def connect_homes(config: Config, homes: SharedHomes | None, job: Job) -> None:
    """Lets the ranks of a row read each other's weights in ``homes``, which are allocated. Every rank comes. Raises ConfigError
    where that is asked for and cannot be."""
    row = job.ranks.row
    if homes is not None and row is not None:
        shards = [shard for unit in job.units for shard in unit.shards if shard.collectives is job.collectives]
        collect = partial(job.collectives.collect, among=[row])
        refusal = homes.connect(collect, job.ranks.rank, [shard.weight_regions for shard in shards])
        if refusal:
            row.share(None)
            _tell(config, refusal)


def _tell(config: Config, refusal: str) -> None:
    if config.share_homes:
        raise ConfigError(f"share_homes=True: {refusal}. Leave it out: then weights are gathered.")
    logger.info("weights are not shared between ranks: %s", refusal)
