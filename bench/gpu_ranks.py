"""gpu ranks: two ranks whose collectives go over the backend of a device, on one card if need be.

NCCL refuses two ranks on one card by the name of their host and the card's address; NCCL_HOSTID
gives each rank another host's name. Their bytes then go over sockets: slowly, but through real
communicators.

sums     three steps of two ranks beside one process with the micro-batches of both: the same bits
raises   one rank raises in its forward while the other reads a value; both go on
killed   one rank is killed; the other hears of it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .launch import environment
from .llama import SHAPES, Llama

STEPS, FAULTY = 3, 1  # the step in which a rank fails
KINDS = ("sums", "raises", "killed")
KILLED = f"ended with status {-signal.SIGKILL}"
GROUP_SECONDS = 30  # of the process group: longer than a rank needs to say what it saw


def run(kind: str, device: str, *, cards: int = 1, seconds: float = 40) -> dict[str, Any]:
    """Runs ``kind`` on ``device``, in processes that all end within ``seconds`` each. Returns the
    ``outcome`` in words, and ``seconds``. Raises RuntimeError if it is not what is promised."""
    start = time.monotonic()
    ranks = _launch(kind, device, 2, cards, seconds)
    spent = time.monotonic() - start
    said = "; ".join(f"rank {rank} {told}" for rank, told in enumerate(map(_words, ranks)))
    digests = {each.get("weights") for each in ranks}
    if kind == "sums":
        digests |= {each.get("weights") for each in _launch(kind, device, 1, cards, seconds)}
        if None in digests or len(digests) > 1:
            raise RuntimeError(f"not the bits of one process: {said}")
        said = "the bits of one process with the micro-batches of both"
    elif kind == "raises" and (None in digests or len(digests) > 1):
        raise RuntimeError(f"not both went on with equal weights: {said}")
    elif kind == "killed":
        left, gone = ranks
        if "PeerError" not in _words(left) or gone["end"] != KILLED:
            raise RuntimeError(f"the rank that is left was not told: {said}")
    return {"outcome": said, "seconds": spent}


def _words(told: dict[str, Any]) -> str:
    return ", ".join([*told["said"], told["end"]])


def _launch(kind: str, device: str, world: int, cards: int, seconds: float) -> list[dict]:
    """Returns what each rank ``said``, its ``weights`` if it came to its end, and its ``end``."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks, deadline = [], time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="infinity-bench-") as folder:
        for rank in range(world):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank % cards),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if cards == 1:
                variables |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            with open(os.path.join(folder, f"err{rank}"), "w") as errors:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "bench.gpu_ranks", kind, device, folder],
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        env=environment(**variables),
                    )
                )
        told = []
        try:
            for rank, process in enumerate(ranks):
                try:
                    out, _ = process.communicate(timeout=max(1, deadline - time.monotonic()))
                    end = f"ended with status {process.returncode}"
                except subprocess.TimeoutExpired:
                    process.kill()
                    out, _ = process.communicate()
                    end = f"had no end within {seconds:.0f} s"
                words = [line for line in out.splitlines() if line.startswith("{")]
                found = json.loads(words[-1]) if words else {"said": []}
                with open(os.path.join(folder, f"err{rank}")) as errors:
                    wrote = errors.read()
                sys.stderr.write(wrote[-2000:])
                if not found["said"] and "PeerError" in wrote:
                    found["said"] = ["wrote of a PeerError"]
                told.append(found | {"end": end})
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return told


def main() -> None:
    """Runs one rank, and prints JSON."""
    kind, device, folder = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        told = _rank(kind, device, folder)
    print(json.dumps(told), flush=True)
    os._exit(0)  # a group that lost a rank may not end


def _rank(kind: str, device: str, folder: str) -> dict[str, Any]:
    import infinity

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group(timeout=timedelta(seconds=GROUP_SECONDS))
    torch.manual_seed(0)
    shape = SHAPES["tiny"]
    model = Llama(shape).to(torch.bfloat16)
    model.recomputes = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    home = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [folder]}
    sharded = {"shard": "parameters"} if world > 1 else {}
    model, optimizer = infinity.wrap_model(model, optimizer, {"device": device, **home, **sharded})
    ids = torch.randint(0, shape.vocabulary, (STEPS, 2, 2, 64), generator=_generator())

    def one_step(batches: torch.Tensor) -> None:
        with infinity.accumulate(model) if world == 1 else contextlib.nullcontext():
            for batch in batches:
                (model(batch.to(device)) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def raises(*_: Any) -> None:
        raise ValueError("raised in the forward")

    if kind == "raises":
        for block in model.blocks:
            block.register_forward_hook(lambda _, __, out: out.sum().item() and None)
    said, step, fails, start = [], 0, rank == 1 and kind != "sums", time.monotonic()
    while step < STEPS and len(said) < 4:
        handle = None
        if step == FAULTY and fails:
            fails = False
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            handle = model.blocks[0].register_forward_pre_hook(raises)
        try:
            one_step(ids[step, rank : rank + 1] if world > 1 else ids[step])
            step += 1
        except (infinity.InfinityError, ValueError) as error:
            words = str(error).splitlines()[0][:120]
            seconds = time.monotonic() - start
            said.append(f"{type(error).__name__} after {seconds:.1f} s: {words}")
            if isinstance(error, infinity.PeerError):
                break
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
    if step < STEPS:
        return {"said": said}
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {"said": said, "weights": digest.hexdigest()}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


if __name__ == "__main__":
    main()
