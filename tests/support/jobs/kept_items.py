"""Two ranks read 32 items, each the half of them, and then all of them. argv: a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from infinity.data import NeverEvict
from infinity.ext.data.arena import kept_data_nbytes


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, reads = dist.get_rank(), []

    def read(number: int) -> bytes:
        reads.append(number)
        return bytes([number]) * 100

    data = NeverEvict(range(32), read=read, memory=3200)
    for item in range(rank, 32, 2):
        data[item]
    dist.barrier()
    right = all(data[item] == bytes([item]) * 100 for item in range(32))
    told = {"kept": data.kept, "right": right, "charged": kept_data_nbytes()}
    (folder / f"told.{rank}.json").write_text(json.dumps(told))
    (folder / f"reads.{rank}.json").write_text(json.dumps(reads))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
