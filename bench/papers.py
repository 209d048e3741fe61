"""papers: headlines of the papers again, by what a user types.

planned  by `infinity plan`, of the papers' models on their machines. Models have the papers' sizes
         and the kernels of their time: attention keeps its scores, and a tenth is dropped
run      on this machine: stages that sleep, groups of small models, saves beside steps

`python -m bench.papers FOLDER` writes the models and the machines of the plans there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.tools.bench.results import Measured, Row, row
from infinity.tools.bench.rounds import tell
from infinity.tools.bench.settings import Settings

from .launch import ROOT, environment, launch_each, run_as_rank

VOCABULARY, A100_FLOPS = 51200, 312e12
MACHINES = ROOT / "infinity" / "tools" / "plan" / "machines"


@dataclass(frozen=True)
class GPT:
    """A model of a paper. ``attention``: as its config names it."""

    layers: int
    width: int
    heads: int
    length: int = 2048
    attention: str = "megatron_2021"

    def write(self, folder: Path) -> None:
        """Writes it as a folder that transformers reads."""
        folder.mkdir(parents=True, exist_ok=True)
        dropped = dict.fromkeys(("residual_dropout", "embedding_dropout", "attention_dropout"), 0.1)
        sizes = {
            "model_type": "starcoder2",
            "architectures": ["Starcoder2ForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "gpt_2021.GPT2021"},
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "intermediate_size": 4 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.length,
            "attn_implementation": self.attention,
        }
        (folder / "config.json").write_text(json.dumps(sizes | dropped, indent=1))
        shutil.copy(Path(__file__).with_name("gpt_2021.py"), folder)

    def flops(self, samples: int) -> float:
        """Counts the operations of a step with recomputation (PTD-P, equation 3)."""
        blocks = self.layers * self.width**2 * (1 + self.length / (6 * self.width))
        tokens = samples * self.length
        return 96 * tokens * blocks + 6 * tokens * self.width * VOCABULARY


@dataclass(frozen=True)
class Planned:
    """One plan: ``samples`` of a step on ``gpus``. ``theirs``: the paper's figure, of ``unit``."""

    model: GPT
    machine: str
    nodes: int
    gpus: int
    samples: int
    mesh: str
    theirs: float
    unit: str
    more: tuple[str, ...] = ()

    def command(self, name: str) -> list[str]:
        """Returns the words after `infinity`, in the folder that :func:`write` made."""
        words = ["plan", "--model", name, "--trust-remote-code", "--machine", self.machine]
        words += ["--nodes", str(self.nodes), "--mesh", self.mesh, "--gradient-checkpointing"]
        words += ["--batch-size", str(self.samples), "--sequence-length", str(self.model.length)]
        return [*words, *self.more]


TERA, SHARE = "TFLOP/s", "% of the peak"
ONE_F = ("--schedule", "1F1B")
# PTD-P, table 1: layers, width, heads, tp, pp, GPUs, samples, and the share of the peak in percent
TABLE_1 = [
    (24, 2304, 24, 1, 1, 32, 512, 44),
    (30, 3072, 32, 2, 1, 64, 512, 44),
    (36, 4096, 32, 4, 1, 128, 512, 46),
    (40, 6144, 48, 8, 1, 256, 1024, 43),
    (48, 8192, 64, 8, 2, 512, 1536, 44),
    (60, 10240, 80, 8, 4, 1024, 1792, 45),
    (80, 12288, 96, 8, 8, 1536, 2304, 47),
    (96, 16384, 128, 8, 16, 1920, 2160, 50),
    (105, 20480, 128, 8, 35, 2520, 2520, 52),
    (128, 25600, 160, 8, 64, 3072, 3072, 52),
]
BATCHES_OF_12 = (12, 24, 36, 48, 60)  # PTD-P, figure 12: samples, of 175 B on 96 GPUs
# ZeRO-Infinity, figure 5a: T parameters, layers, width, heads, samples a GPU, TFLOP/s in its text
FIGURE_5 = [
    ("0.5", 100, 20480, 160, 7),
    ("1", 128, 25600, 256, 5),
    ("5", 174, 49152, 384, 3),
    ("10", 195, 65536, 512, 2),
    ("20", 205, 90112, 704, 1),
]
AT_HOME = ("--params", "nvme", "--optimizer", "nvme", "--activations", "host")


def plans() -> dict[str, Planned]:
    """Returns all plans by the names of their rows."""
    found: dict[str, Planned] = {}
    for number, (layers, width, heads, tp, pp, gpus, samples, share) in enumerate(TABLE_1, 1):
        mesh = f"pp={pp},dp={gpus // tp // pp},tp={tp}"
        given = (GPT(layers, width, heads), "dgx-a100", gpus // 8, gpus, samples, mesh)
        found[f"ptd_p.{number}"] = Planned(*given, share, SHARE, ONE_F * (pp > 1))
    for samples in BATCHES_OF_12:
        for name in ("1F1B", "Interleaved1F1B"):
            given = (GPT(96, 12288, 96), "dgx-a100", 12, 96, samples, "pp=12,tp=8")
            found[f"interleaving.{name}.{samples}"] = Planned(
                *given, 0.0, TERA, ("--schedule", name)
            )
    one, eight = (GPT(*sizes, 1024, "eager") for sizes in ((40, 1536, 16), (72, 3072, 32)))
    found["megatron.1"] = Planned(one, "v100x1.toml", 1, 1, 8, "dp=1", 39, TERA)
    found["megatron.8"] = Planned(eight, "v100x8.toml", 1, 8, 8, "tp=8", 30, TERA)
    found["megatron.512"] = Planned(eight, "dgx2", 32, 512, 512, "dp=64,tp=8", 29.5, TERA)
    for name, layers, width, heads, samples in FIGURE_5:
        model = GPT(layers, width, heads, 1024, "eager")
        given = (model, "dgx2", 32, 512, 512 * samples, "dp=512")
        found[f"zero_infinity.{name}"] = Planned(*given, 49, TERA, AT_HOME)
    return found


def write(folder: Path) -> None:
    """Writes the models of all plans into ``folder``, and machines with fewer GPUs than a DGX-2."""
    for name, plan in plans().items():
        plan.model.write(folder / name)
    text = (MACHINES / "dgx2.toml").read_text()
    for count in (1, 8):
        there = text.replace("count = 16", f"count = {count}", 1)
        (folder / f"v100x{count}.toml").write_text(there)


def _planned(wanted: Callable[[str], bool], folder: Path, found: Measured) -> None:
    write(folder)
    seconds: dict[str, float] = {}
    for name, plan in plans().items():
        if not wanted(f"papers.{name}"):
            continue
        command = [sys.executable, "-P", "-m", "infinity", *plan.command(name), "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=environment()
        )
        if done.returncode:
            found.notes.append(f"papers.{name}: {done.stderr.strip().splitlines()[-1][:200]}")
            continue
        seconds[name] = json.loads(done.stdout)["median_step_seconds"]
        rate = plan.model.flops(plan.samples) / seconds[name] / plan.gpus
        value = 100 * rate / A100_FLOPS if plan.unit == SHARE else rate / 1e12
        tell(f"papers.{name}: {value:.1f} {plan.unit}")
        if plan.theirs:
            found.rows.append(row(f"papers.{name}", plan.unit, [value]))
    for samples in BATCHES_OF_12:
        ours, flushed = (
            seconds.get(f"interleaving.{name}.{samples}") for name in ("Interleaved1F1B", "1F1B")
        )
        if ours and flushed:
            faster = 100 * (flushed / ours - 1)
            found.rows.append(row(f"papers.interleaving.{samples}", "% faster", [faster]))


FORWARD, BACKWARD, WIDTH, STAGES = 0.06, 0.12, 64, 4


class Sleep(torch.autograd.Function):
    """Computes nothing for as long as a stage would compute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        time.sleep(scale * FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.scale * BACKWARD)
        return grads[0], None


class Stage(nn.Module):
    """A layer whose forward and backward sleep, each for as long for any micro-batch."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self._scale = nn.Linear(WIDTH, WIDTH), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(self.layer(x), self._scale)


def _pipeline(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    """Takes batches of one micro-batch and more: by PipeDream's stash and without a pipeline, by
    2BW and with a flush. Returns the seconds of a batch."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    import infinity

    rank = dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (STAGES,), mesh_dim_names=("pp",))
    found: dict[str, Any] = {}
    for micro, weights in ((1, "stash"), (STAGES, "two"), (2 * STAGES, "two")):
        for late in (True, False):
            torch.manual_seed(0)
            whole = nn.Sequential()
            whole.add_module(f"stage{rank}", Stage(scale))
            optimizer: Any = torch.optim.SGD(whole.parameters(), lr=1e-3)
            (part,), optimizer = infinity.wrap_model(
                [whole], optimizer, {"params": "host", "optimizer": "host"}, mesh=mesh
            )
            make = ScheduleGPipe if micro == 1 else Schedule1F1B
            schedule = make(
                PipelineStage(part, rank, STAGES, torch.device("cpu")),
                micro,
                loss_fn=nn.functional.mse_loss,
            )
            count = 8 * rounds
            batches = [(x, x) for x in torch.randn(count, 2 * micro, WIDTH)]
            if late:
                run = infinity.parallel.without_flush(
                    schedule, optimizer, weights=weights, quiet=True
                ).run
                run(batches[:4])
                dist.barrier()
                start = time.perf_counter()
                run(batches)
            else:
                infinity.parallel.attach(schedule)
                _stepped(schedule, optimizer, batches[:2], rank)
                dist.barrier()
                start = time.perf_counter()
                _stepped(schedule, optimizer, batches, rank)
            dist.barrier()
            found[f"{micro}.{'late' if late else 'flush'}"] = (time.perf_counter() - start) / count
    return found


def _stepped(schedule: Any, optimizer: Any, batches: Sequence[tuple], rank: int) -> None:
    for x, target in batches:
        given = {"target": target} if rank == STAGES - 1 else {}
        schedule.step(*((x,) if rank == 0 else ()), **given)
        optimizer.step()
        optimizer.zero_grad()


CLASSES, SAMPLES, BATCH, STEPS, HELD = 10, 8000, 20, 4000, 4000
SHARES = (0.0, 0.6, 1.0)  # of the samples, dealt out by label


def _skew(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    """Trains groups whose samples are dealt out by label in part: by SkewScout's period, and with
    an average in every step. Returns their averages, bytes and accuracies."""
    import infinity

    groups, mine = dist.get_world_size(), dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (groups, 1), mesh_dim_names=("slow", "dp"))
    random = torch.Generator().manual_seed(0)
    means = 0.6 * torch.randn(CLASSES, 20, generator=random)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(CLASSES, (count,), generator=random)
        return means[y] + torch.randn(count, 20, generator=random), y

    (x, y), held = draw(SAMPLES), draw(HELD)
    found: dict[str, Any] = {}
    for share in SHARES:
        dealt = int(share * SAMPLES)
        order = torch.cat([y[:dealt].argsort(stable=True), torch.arange(dealt, SAMPLES)])
        parts = [order[:dealt].chunk(groups), order[dealt:].chunk(groups)]
        own = [torch.cat([part[n] for part in parts if len(part) == groups]) for n in range(groups)]
        for every in ("skew", 1)[: 2 - bool(share)]:
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, CLASSES))
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
            model, optimizer = infinity.wrap_model(
                model, optimizer, {"params": "host", "optimizer": "host"}, mesh=mesh["dp"]
            )

            def accuracy(x: torch.Tensor, y: torch.Tensor, model: Any = model) -> float:
                with torch.no_grad():
                    return float((model(x).argmax(-1) == y).float().mean())

            drawn = torch.Generator().manual_seed(mine)

            def probe(
                group: int, own: Any = own, drawn: Any = drawn, accuracy: Any = accuracy
            ) -> float:
                at = own[group][torch.randint(len(own[group]), (500,), generator=drawn)]
                return accuracy(x[at], y[at])

            options = {"probe": probe} if every == "skew" else {}
            local = infinity.LocalSteps(
                model, mesh["slow"], every, lr=1, momentum=0, stream=False, **options
            )
            steps, averages = max(1, int(scale * STEPS)), 0
            for _ in range(steps):
                at = own[mine][torch.randint(len(own[mine]), (BATCH,), generator=drawn)]
                nn.functional.cross_entropy(model(x[at]), y[at]).backward()
                optimizer.step()
                optimizer.zero_grad()
                averages += local.after_step()
            found[f"{share:.0%}.{every}"] = {
                "steps": steps,
                "averages": averages,
                "period": local.period,
                "accuracy": accuracy(*held),
            }
    return found


ASKED, SAVED_WIDTH = 0.035, 1024
FIRST, LATER = 220, 300  # steps until there has been a save, and after them
NEAREST = 4  # steps without a save with which one beside a save is compared


def _saves(settings: Settings) -> tuple[float, float, int]:
    """Takes steps that sleep, with saves beside some. Returns the share of the time that saves
    added, the share that the loop waited for them, and their number."""
    import infinity

    first, later = (max(8, round(settings.scale * each)) for each in (FIRST, LATER))
    torch.manual_seed(0)
    layers = (nn.Linear(SAVED_WIDTH, SAVED_WIDTH) for _ in range(16))
    model: Any = nn.Sequential(*(nn.Sequential(each, Rest(0.1)) for each in layers))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = infinity.wrap_model(
        model, optimizer, {"params": "host", "optimizer": "host"}
    )
    x, steps, waits, saves = torch.randn(4, SAVED_WIDTH), [], 0.0, 0
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        saver = infinity.Checkpoints(f"{folder}/saved", model, optimizer, overhead=ASKED)
        for step in range(first + later):
            is_beside, start = saver._saving is not None, time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stepped = time.perf_counter()
            saved = saver.after_step()
            if step >= first:
                steps.append((stepped - start, is_beside))
                waits += time.perf_counter() - stepped
                saves += bool(saved)
    total = sum(seconds for seconds, _ in steps) + waits
    return (waits + _slower_beside(steps)) / total, waits / total, saves


def _slower_beside(steps: Sequence[tuple[float, bool]]) -> float:
    """Sums what steps beside a save took longer than the nearest others, which other work on the
    machine slows down as much. ``steps``: seconds of each, and whether a save was beside it."""
    slower = 0.0
    for at, (seconds, is_beside) in enumerate(steps):
        if is_beside:
            others = [(abs(at - n), each) for n, (each, beside) in enumerate(steps) if not beside]
            nearest = [each for _, each in sorted(others)[:NEAREST]]
            slower += seconds - sum(nearest) / len(nearest) if nearest else 0.0
    return slower


class Rest(nn.Module):
    """Passes its input on after as long as a layer would compute."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self._scale)


JOBS = {"pipeline": _pipeline, "skew": _skew}


def measure(settings: Settings) -> Measured:
    """Measures rows ``papers.<system>.<what>``: planned ones in TFLOP/s of a GPU, or percent of its
    peak; PipeDream's and 2BW's in times a pipeline with a flush, or none; SkewScout's in steps for
    each average, with accuracies, also of an average in every step; CheckFreq's in percent of the
    time, of 3.5 asked for."""
    found = Measured([])

    def wanted(name: str) -> bool:
        return not settings.only or name.startswith(settings.only)

    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        _planned(wanted, Path(folder), found)
    if wanted("papers.checkfreq"):
        added, waited, saves = _saves(settings)
        found.rows.append(row("papers.checkfreq", "%", [100 * added]))
        found.rows.append(row("papers.checkfreq.waited", "%", [100 * waited]))
        found.notes.append(f"papers.checkfreq: {saves} saves")
    if any(map(wanted, ("papers.pipedream", "papers.2bw", "papers.skewscout"))):
        for _, told in launch_each(found, "papers", "bench.papers", [STAGES], settings):
            found.rows += _of_ranks(told)
    return found


def _of_ranks(told: Mapping[str, Any]) -> list[Row]:
    found = []
    seconds = told["pipeline"]
    for name, micro in (("pipedream.stash", 1), ("2bw.4", STAGES), ("2bw.8", 2 * STAGES)):
        times = seconds[f"{micro}.flush"] / seconds[f"{micro}.late"]
        found.append(row(f"papers.{name}", "times as fast", [times]))
    for name, each in told["skew"].items():
        name = f"papers.skewscout.{name}"
        if each["averages"]:
            times = each["steps"] / each["averages"]
            found.append(row(name, "steps an average", [times]))
        found.append(row(f"{name}.period", "steps", [each["period"]]))
        found.append(row(f"{name}.accuracy", "of 1", [each["accuracy"]]))
    return found


def _run_rank(folder: str, rounds: int, scale: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: job(folder, rounds, scale) for name, job in JOBS.items()}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write(Path(sys.argv[1]))
    else:
        run_as_rank(_run_rank)
