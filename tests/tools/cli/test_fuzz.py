"""Every parser, given what nobody wrote on purpose: it ends in a typed error or in sense, writes
nothing, and does not grow.

**seed text**: what the program itself writes. **mutation**: bytes flipped, cut, doubled, swapped,
or a value of it replaced by a hostile one; a manifest is sealed anew afterwards, since a checksum
alone would refuse all of it.

``INFINITY_FUZZ_SECONDS`` (600) is how long each parser is fuzzed in ``make test-all``; ``make
test`` gives each a second.
"""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from bench import report
from infinity.errors import InfinityError
from infinity.ext.checkpoint import manifest as manifests
from infinity.files.weight_files import INDEX, WeightFiles
from infinity.tools.watch import trace

LONG = float(os.environ.get("INFINITY_FUZZ_SECONDS", "600"))
HOSTILE = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    1e308,
    "",
    "x",
    "../../etc/passwd",
    "/dev/zero",
    "\x00",
    "\x1b[2J",
    [],
    {},
    [[]],
    {"a": 1},
    "9" * 5000,
    [0] * 50,
    "torch.float32",
    "F32",
    -(2**63),
    2**64,
]
GROWTH_NBYTES = 96 * 1024 * 1024


def mutated_bytes(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + rng.randrange(1, 40)]
            case 3:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
            case 4:
                data[at:at] = rng.choice(
                    [b"[" * 2000, b"9" * 5000, b'"', b"{", b"NaN", b"\xff", b"\n", b"=", b"1e999"]
                )
            case 5:
                del data[at:]
    return bytes(data)


def mutated_value(rng: random.Random, value):
    """``value`` with something in it replaced, removed or doubled."""
    if rng.random() < 0.15:
        return rng.choice(HOSTILE)
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(5):
            case 0:
                del changed[key]
            case 1:
                changed[
                    rng.choice(["", "x", "../x", "unit-99999.safetensors", "$tensor", "$dict"])
                ] = changed[key]
            case _:
                changed[key] = mutated_value(rng, changed[key])
        return changed
    if isinstance(value, list) and value:
        at, changed = rng.randrange(len(value)), list(value)
        match rng.randrange(5):
            case 0:
                del changed[at]
            case 1:
                changed.append(changed[at])
            case _:
                changed[at] = mutated_value(rng, changed[at])
        return changed
    return rng.choice(HOSTILE)


class Target:
    """A parser: what it reads, and how a mutation of that is put before it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def put(self, rng: random.Random) -> Callable[[], object]:
        """Writes a mutation. Returns what reads it."""
        raise NotImplementedError


class Manifest(Target):
    def __init__(self, folder: Path):
        super().__init__(folder)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
        self.model, self.optimizer = infinity.wrap_model(
            model, torch.optim.AdamW(model.parameters()), {"params": "host", "optimizer": "host"}
        )
        self.model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        self.optimizer.step()
        self.path = folder / "saved"
        infinity.save_checkpoint(
            self.path,
            self.model,
            self.optimizer,
            extra={"step": 3, "tensor": torch.ones(2), "list": [1, (2.5, None)]},
        )
        self.content = manifests.read_manifest(self.path)
        self.raw = (self.path / "manifest.json").read_bytes()

    def put(self, rng):
        manifest = self.path / "manifest.json"
        if rng.random() < 0.3:
            manifest.write_bytes(mutated_bytes(rng, self.raw))
        else:
            content = self.content
            for _ in range(rng.choice([1, 1, 2, 3])):
                content = mutated_value(rng, content)
            try:
                manifest.write_bytes(
                    manifests.seal_manifest(
                        content if isinstance(content, dict) else {"x": content}
                    )
                )
            except ValueError:  # what JSON cannot say
                manifest.write_bytes(b"{}")
        return lambda: infinity.load_checkpoint(self.path, self.model, self.optimizer)


class Header(Target):
    def __init__(self, folder: Path):
        super().__init__(folder)
        self.path = folder / "model.safetensors"
        save_file(
            {"a.weight": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)},
            self.path,
            metadata={"format": "pt"},
        )
        self.raw = self.path.read_bytes()

    def put(self, rng):
        length = int.from_bytes(self.raw[:8], "little")
        if rng.random() < 0.5:
            self.path.write_bytes(mutated_bytes(rng, self.raw))
        else:
            header = json.dumps(mutated_value(rng, json.loads(self.raw[8 : 8 + length]))).encode()
            self.path.write_bytes(
                len(header).to_bytes(8, "little") + header + self.raw[8 + length :]
            )

        def read() -> None:
            files = WeightFiles(self.folder)
            for piece in files.stream(files.tensors):
                piece.values.sum()

        return read


class Index(Header):
    def put(self, rng):
        self.path.write_bytes(self.raw)
        told = mutated_value(
            rng,
            {
                "metadata": {"total_size": 52},
                "weight_map": {"a.weight": self.path.name, "b": self.path.name},
            },
        )
        text = json.dumps(told).encode()
        (self.folder / INDEX).write_bytes(mutated_bytes(rng, text) if rng.random() < 0.3 else text)
        return lambda: WeightFiles(self.folder)


class ConfigFile(Target):
    SEED = {
        "params": "nvme",
        "optimizer": "host",
        "nvme_paths": ["/tmp"],
        "host_memory": "4GiB",
        "micro_batch": 2,
        "units": ["Block"],
        "param_dtype": "bf16",
        "max_grad_norm": 1.0,
        "checksums": True,
        "trace": "t.json",
        "update_threads": 2,
    }
    DEEPSPEED = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    TOML = b'params = "nvme"\nnvme_paths = ["/tmp"]\nmicro_batch = 2\n[more]\nx = 1\n'

    def put(self, rng):
        kind = rng.randrange(3)
        path = self.folder / ("config.toml" if kind == 2 else "config.json")
        text = (
            self.TOML
            if kind == 2
            else json.dumps(mutated_value(rng, self.DEEPSPEED if kind else self.SEED)).encode()
        )
        path.write_bytes(mutated_bytes(rng, text) if kind == 2 or rng.random() < 0.3 else text)
        return lambda: (
            infinity.Config.from_deepspeed(path) if kind == 1 else infinity.Config.make(path)
        )


class Trace(Target):
    def put(self, rng):
        path = self.folder / "trace.json"
        events = [
            {"ph": "X", "name": f"unit {i}", "cat": lane, "ts": i, "dur": 2.5, "pid": 1, "tid": i}
            for i, lane in enumerate(["step", "forward", "stalled"] * 3)
        ]
        lines = [
            json.dumps(mutated_value(rng, event) if rng.random() < 0.3 else event)
            for event in events
        ]
        raw = ("[\n" + ",\n".join(lines) + "\n]").encode()
        path.write_bytes(mutated_bytes(rng, raw) if rng.random() < 0.5 else raw)

        def read() -> None:
            events = trace.last_steps(trace.read(path), 2)
            trace.summary(events)
            trace.draw(events)

        return read


class Results(Target):
    def put(self, rng):
        path = self.folder / "results" / "io_a_2026-01-01.json"
        path.parent.mkdir(exist_ok=True)
        row = {
            "name": "io.read",
            "median": 1.0,
            "low": 1.0,
            "high": 2.0,
            "unit": "GiB/s",
            "ratios": {"fio": 1.0},
            "share_of_ceiling": 0.5,
            "ceiling": {"name": "fio", "value": 2.0},
        }
        timeline = [{"kind": "load", "slot": 0, "start": 0.1, "end": 0.2}]
        seed = {
            "theme": "io",
            "hardware": "a",
            "date": "2026-01-01",
            "commit": "0",
            "rows": [row],
            "notes": ["x"],
            "series": {"update.timeline": timeline},
        }
        text = json.dumps(mutated_value(rng, seed)).encode()
        path.write_bytes(mutated_bytes(rng, text) if rng.random() < 0.3 else text)
        return lambda: report.write(path.parent, Path(os.devnull))


TARGETS = {
    "manifest": Manifest,
    "safetensors header": Header,
    "index": Index,
    "config": ConfigFile,
    "trace": Trace,
    "results": Results,
}


def fuzz(target: Target, seconds: float, seed: int) -> int:
    """How many mutations were read. Fails at the first that ends in anything but sense or a typed
    error, that is slow, or writes."""
    rng, ends, count = random.Random(seed), time.monotonic() + seconds, 0
    names: list[Path] = []
    process, before = psutil.Process(), 0
    while time.monotonic() < ends or count < 20:
        number = rng.random()
        read = target.put(rng)
        names = sorted(target.folder.rglob("*")) if count % 50 == 0 else names
        state = rng.getstate()
        try:
            read()
        except InfinityError:
            pass
        except Exception as error:
            kept = [
                path.read_bytes()[:2000]
                for path in target.folder.rglob("*")
                if path.is_file() and path.stat().st_size < 100_000
            ]
            raise AssertionError(
                f"mutation {count} of seed {seed} ({number}): {type(error).__name__}:"
                f" {error}\n{kept}"
            ) from error
        rng.setstate(state)
        if count % 50 == 0:
            assert sorted(target.folder.rglob("*")) == names, "a reader wrote"
        count += 1
        if count == 200:
            gc.collect()
            before = process.memory_info().rss
    gc.collect()
    assert not before or process.memory_info().rss - before < GROWTH_NBYTES
    return count


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_for_a_moment(name, tmp_path, monkeypatch):
    monkeypatch.setattr("logging.Logger.warning", lambda *_, **__: None)
    fuzz(TARGETS[name](tmp_path), 1.0, seed=random.randrange(10**6))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_parsers_for_long(name, tmp_path, monkeypatch):
    monkeypatch.setattr("logging.Logger.warning", lambda *_, **__: None)
    count = fuzz(TARGETS[name](tmp_path), LONG, seed=1)
    print(name, count)
    assert count > 100


def test_fuzzing_finds_a_parser_that_raises(tmp_path):
    """The twin: a reader that trusts what it reads."""

    class Trusting(Trace):
        def put(self, rng):
            super().put(rng)
            return lambda: [
                event["ts"] + 1 for event in json.loads((self.folder / "trace.json").read_text())
            ]

    with pytest.raises(AssertionError, match="mutation"):
        fuzz(Trusting(tmp_path), 5.0, seed=1)
