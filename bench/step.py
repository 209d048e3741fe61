"""step: tokens per second of a GPT-2 style model at every home, beside plain torch with an fp32
master copy.

The models take turns of a few steps. A turn ends when its last update is at home: what a step
leaves for later, the same system pays for. NVMe runs under a host budget of a quarter of the
training state.
"""

from __future__ import annotations

import tempfile

import torch

import infinity
from infinity.core.run.registry import wrapped
from infinity.tools.bench.results import Measured, row
from infinity.tools.bench.rounds import paired
from infinity.tools.bench.settings import Settings

TOKENS = (4, 256)
STEPS = 3  # of a turn
HOMES = ("device", "host", "nvme")


def make_model(layers: int) -> torch.nn.Module:
    """Makes a GPT-2 in bf16, of 50 M parameters at 16 layers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_layer=layers,
        n_embd=512,
        n_head=8,
        n_positions=512,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config).to(torch.bfloat16)


class Plain:
    """torch.optim.AdamW(fused=True) over fp32 copies of bf16 weights."""

    def __init__(self, layers: int):
        self.model = make_model(layers)
        self.masters = [
            param.detach().float().requires_grad_() for param in self.model.parameters()
        ]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3, fused=True)

    def update(self) -> None:
        for master, param in zip(self.masters, self.model.parameters()):
            master.grad, param.grad = param.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters()):
                param.copy_(master)

    def finish(self) -> None:
        """Does nothing: nothing is left for later."""


class Ours:
    """The same model with everything at one home."""

    def __init__(self, home: str, layers: int, folder: str):
        model = make_model(layers)
        state_nbytes = 12 * sum(param.numel() for param in model.parameters())
        config = {"params": home, "optimizer": home}
        if home == "nvme":
            config |= {
                "nvme_paths": [folder],
                "host_memory": max(state_nbytes // 4, 48 * 1024 * 1024),
            }
        self.model, self.optimizer = infinity.wrap_model(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3), config
        )

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Waits for the last step's updates."""
        wrapped(self.model).engine.wait_idle()


def measure(settings: Settings) -> Measured:
    """Measures rows step.plain, step.device, step.host, step.nvme (tokens/s). The homes' losses
    must be the same bits."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        return Measured([], ["step: transformers is not installed (pip install transformers rich)"])
    layers = max(2, round(16 * settings.scale))
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(0, 256, TOKENS, generator=generator)
        for _ in range(STEPS * (1 + settings.rounds))
    ]
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=settings.folder) as folder:
        systems = {"plain": Plain(layers)} | {home: Ours(home, layers, folder) for home in HOMES}

        def turn(name: str) -> None:
            seen = losses.setdefault(name, [])
            for _ in range(STEPS):
                loss = (
                    systems[name]
                    .model(input_ids=batches[len(seen)], labels=batches[len(seen)])
                    .loss
                )
                loss.backward()
                systems[name].update()
                seen.append(loss.item())
            systems[name].finish()

        jobs = {name: lambda name=name: turn(name) for name in systems}
        times = settings.alternate(jobs)
        systems.clear()
    if len({tuple(losses[home]) for home in HOMES}) != 1:
        raise AssertionError(f"the homes' losses differ: {losses}")
    tokens = STEPS * TOKENS[0] * TOKENS[1]
    rows = [
        row(
            f"step.{name}",
            "tokens/s",
            [tokens / seconds for seconds in of_one.wall],
            ratios=(
                {}
                if name == "plain"
                else {"torch_fp32_master": paired(of_one.wall, times["plain"].wall)}
            ),
        )
        for name, of_one in times.items()
    ]
    return Measured(rows)
