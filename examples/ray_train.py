r"""`infinity train` on Ray Train: one worker for each rank, on a Ray cluster or on this machine.

    pip install 'infinity-engine[train,ray]'
    python examples/ray_train.py 2 --model MODEL --data chat.jsonl --out tuned \
        --checkpoint saved --resume

The number of workers comes first, then the options of `infinity train`; relative folders are seen
from here, and all machines have to see them. The bits are those of torchrun. When a worker or its
machine dies, Ray starts all of them again, and they go on from the last save.
"""

import os
import sys
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(job: dict) -> None:
    """What each worker runs. Ray has made the process group."""
    from infinity.tools.cli import main

    os.chdir(job["folder"])
    if status := main(["train", *job["options"]]):
        raise RuntimeError(f"infinity train ended with status {status}")


def main() -> None:
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        sys.exit(__doc__)
    workers, options = int(sys.argv[1]), sys.argv[2:]
    ray.init()
    gpus = ray.cluster_resources().get("GPU", 0) >= workers and torch.cuda.is_available()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": os.getcwd(), "options": options},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        run_config=RunConfig(
            name="infinity",
            storage_path=str(Path("ray").resolve()),  # of Ray's own records
            failure_config=FailureConfig(max_failures=100),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
