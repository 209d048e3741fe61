"""What the tests of logits share: pairs of models that are used alike.

Words used here: see `test_logits` (pair, fused, whole, way).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from inside import parts_of
from models import at_home, seeded
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.ext.tiles import fused_loss, tiled_layers

SEED, DEVICE = 12, 272 * 1024
WIDTH, VOCAB = 64, 2100  # 9 tiles, the last one ragged
WAYS = {"tiles": {"device_memory": DEVICE}, "fused loss": {"fused_loss": True}}
no_grad, inference = torch.no_grad(), torch.inference_mode()


class Model(nn.Module):
    def __init__(
        self,
        bias: bool = True,
        vocab: int = VOCAB,
        change=lambda model: None,
        around: dict | None = None,
    ) -> None:
        super().__init__()
        self.before, self.head, self.around = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, vocab, bias=bias),
            around,
        )
        change(self)

    def forward(self, x):
        h = self.before(x).tanh()
        return self.head(h) if self.around is None else checkpoint(self.head, h, **self.around)


@pytest.fixture(autouse=True, params=WAYS)
def way(request, monkeypatch) -> str:
    """How the heads of this test compute."""
    monkeypatch.setattr(wrap, "way", WAYS[request.param])
    return request.param


@pytest.fixture(autouse=True)
def counts(monkeypatch) -> dict[str, int]:
    found = {"fused": 0, "whole": 0}

    def count(function: type, method: str, key: str, *, bound: bool = False) -> None:
        def counted(*args, own=getattr(function, method)):
            found[key] += 1
            return own(*args)

        monkeypatch.setattr(function, method, counted if bound else staticmethod(counted))

    for function in (tiled_layers.TiledCrossEntropy, fused_loss.FusedCrossEntropy):
        count(function, "forward", "fused")
    count(tiled_layers.TiledLinear, "product", "whole")
    count(fused_loss.FusedHead, "product", "whole", bound=True)
    torch._dynamo.reset()
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer | None:
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(params, lr=1e-2) if params else None


def wrap(model: nn.Module, folder=None, home: str = "host", **more):
    paths = {"nvme_paths": [str(folder)]} if folder else {}
    settings = paths | at_home(home, home, folder, **wrap.way) | more
    return infinity.wrap_model(model, sgd(model), settings)


wrap.way = WAYS["tiles"]


def pair(build=Model, *config, **more) -> tuple[nn.Module, nn.Module]:
    ours, plain = seeded(SEED, build), seeded(SEED, build)
    ours.kept = [wrap(ours, *config, **more)[1]]  # the optimizer, as long as the model lives
    tiled = any(unit.at_once_nbytes for unit in parts_of(ours).planned.sizes)
    assert tiled == ("device_memory" in wrap.way)
    return ours, plain


def inputs(shape=(3, 5)) -> torch.Tensor:
    return torch.randn(
        *shape, WIDTH, generator=torch.Generator().manual_seed(SEED)
    ).requires_grad_()


def labels(shape=(3, 5), vocab: int = VOCAB, *, ignored: int | None = None) -> torch.Tensor:
    found = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(SEED + 1))
    found.view(-1)[0], found.view(-1)[-1] = 0, vocab - 1
    return found if ignored is None else found.index_fill(-1, torch.tensor([1, 3]), ignored)


def ce(z: torch.Tensor, y: torch.Tensor, **more) -> torch.Tensor:
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), **more)


def check_close(ours, theirs, what: str, *, tolerance: float = 1e-5, least: float = 0.0) -> None:
    assert (ours is None) == (theirs is None), (
        f"{what}: {'ours' if ours is None else 'theirs'} is None"
    )
    if not isinstance(theirs, torch.Tensor):
        assert ours == theirs, what
        return
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    finite = theirs.detach().float().nan_to_num(0, 0, 0).abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, least, 1e-30)
    torch.testing.assert_close(
        ours.clone(),
        theirs,
        rtol=0,
        atol=tolerance * scale,
        equal_nan=True,
        msg=lambda m: f"{what}: {m}",
    )


def check_pair(models, outs, given=(None, None), *, tolerance: float = 1e-5) -> None:
    """Results and gradients are close. Gradients that are rounding alone are held against the
    largest of all."""
    for index, (ours, theirs) in enumerate(zip(*map(tree_leaves, outs), strict=True)):
        check_close(ours, theirs, f"result {index}", tolerance=tolerance)
    least = 1e-2 * max(
        [p.grad.abs().max().item() for p in models[1].parameters() if p.grad is not None],
        default=0.0,
    )
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters()):
        check_close(ours.grad, theirs.grad, name, tolerance=tolerance, least=least)
    if given[0] is not None:
        check_close(given[0].grad, given[1].grad, "input", tolerance=tolerance, least=least)


def same(models, use, *, tolerance: float = 1e-5, shape=(3, 5)) -> None:
    """``use(model, x)``, and a backward through every result that has a gradient: a pair."""
    given, outs = [inputs(shape) for _ in models], []
    for model, x in zip(models, given):
        outs.append(use(model, x))
        tensors = [
            t
            for t in tree_leaves(outs[-1])
            if isinstance(t, torch.Tensor) and t.requires_grad and t.numel()
        ]
        if tensors:
            sum(t.float().square().mean() for t in tensors).backward()
    check_pair(models, outs, given, tolerance=tolerance)
