"""What people put around an optimizer: Lookahead and SAM around the wrapped one, and groups that
come later.

Method: the same loop beside the library's optimizer. What steps by its own code has its bits; a
kernel is within some ulps. Twins: the loop without the wrapper differs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from deleted import needs
from lazily import Lazily
from own_optimizers import Sharpness
from small_net import furthest, model, stepped_by_class
from torch import nn, optim

import infinity
from infinity.errors import ConfigError

pytorch_optimizer = Lazily("pytorch_optimizer")
pytestmark = pytest.mark.filterwarnings("ignore")
MADE = {
    "by a rule": (lambda p: optim.AdamW(p, lr=1e-2), 2e-6),
    "by its class": (stepped_by_class, 0.0),
}


def batches(count: int, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(16, 64, generator=generator)
        yield x, torch.randint(0, 7, (16,), generator=generator)


def backward(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()


class Sam(optim.Optimizer):
    """Sharpness-aware minimization, as scripts have it (https://arxiv.org/abs/2010.01412)."""

    def __init__(self, params, base: optim.Optimizer, radius: float = 0.05):
        super().__init__(params, {"radius": radius})
        self.base, self.param_groups = base, base.param_groups

    @property
    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([param.grad.norm() for param in self._params]).norm()
        for param in self._params:
            self.state[param]["before"] = param.data.clone()
            param.add_(param.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for param in self._params:
            param.data = self.state[param]["before"]
        self.base.step()
        self.zero_grad()


def with_sam(net: nn.Module, optimizer: optim.Optimizer) -> None:
    around = Sam(list(net.parameters()), optimizer)
    for batch in batches(6):
        backward(net, batch)
        around.climb()
        backward(net, batch)
        around.descend()


def with_lookahead(net: nn.Module, optimizer: optim.Optimizer) -> None:
    around = pytest.importorskip("pytorch_optimizer").Lookahead(optimizer, k=3)
    for batch in batches(8):
        backward(net, batch)
        around.step()
        around.zero_grad()


def plainly(net: nn.Module, optimizer: optim.Optimizer) -> None:
    for batch in batches(8):
        backward(net, batch)
        optimizer.step()
        optimizer.zero_grad()


def trained(make: Callable, loop: Callable, home: str | None, folder) -> dict:
    net = model()
    optimizer = make(list(net.parameters()))
    if home is not None:
        config = {"params": home, "optimizer": home, "nvme_paths": [str(folder)]}
        net, optimizer = infinity.wrap_model(net, optimizer, config)
    loop(net, optimizer)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


@needs("ext/class_step")
@pytest.mark.parametrize("way", MADE)
@pytest.mark.parametrize("loop", [with_sam, with_lookahead])
def test_a_wrapper_around_the_wrapped_optimizer_has_the_librarys_numbers(loop, way, tmp_path):
    make, near = MADE[way]
    expected = trained(make, loop, None, tmp_path)
    assert furthest(trained(make, loop, "host", tmp_path), expected) <= near
    assert furthest(trained(make, plainly, "host", tmp_path), expected) > 1e-4


WRAPPERS = {
    "of a script": lambda p: Sharpness(p, optim.SGD, lr=0.1, momentum=0.9),
    "SAM": lambda p: pytorch_optimizer.SAM(p, optim.AdamW, lr=1e-2, adaptive=True),
    "LookSAM": lambda p: pytorch_optimizer.LookSAM(p, optim.AdamW, lr=1e-2),
    "Lookahead": lambda p: pytorch_optimizer.Lookahead(optim.AdamW(p, lr=1e-2), k=3),
    "OrthoGrad": lambda p: pytorch_optimizer.OrthoGrad(optim.AdamW(p, lr=1e-2)),
    "ScheduleFreeWrapper": lambda p: pytorch_optimizer.ScheduleFreeWrapper(optim.SGD(p, lr=1e-2)),
}


def with_closures(net: nn.Module, optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    if hasattr(optimizer, "train"):
        optimizer.train()
    for batch in batches(6):
        backward(net, batch)
        optimizer.step(partial(backward, net, batch))
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_lines_of_the_message_keep_a_wrapper(name, home, tmp_path):
    """Method: a wrapper, which may have made its optimizer itself, is refused; the lines of the
    message are run as they are. Twin: without the wrapper the weights are others."""
    plain, net = model(), model()
    expected = with_closures(plain, WRAPPERS[name](list(plain.parameters())))
    optimizer = WRAPPERS[name](list(net.parameters()))
    with pytest.raises(ConfigError, match="is a wrapper around") as error:
        infinity.wrap_model(net, optimizer)
    lines = [line for line in str(error.value).splitlines() if line.startswith("    ")]
    assert 1 <= len(lines) <= 3
    config = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)]}
    names = {"model": net, "optimizer": optimizer, "infinity": infinity, "config": config}
    exec(textwrap.dedent("\n".join(lines)), names)
    assert names["model"][0][0].weight._infinity is not None
    assert furthest(with_closures(names["model"], optimizer), expected) < 2e-6
    for kind, rate in ((optim.SGD, 0.1), (optim.AdamW, 1e-2), (optim.SGD, 1e-2)):
        bare = model()
        assert furthest(with_closures(bare, kind(bare.parameters(), lr=rate)), expected) > 1e-4


@needs("ext/class_step")
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_group_that_comes_later_is_stepped(home, tmp_path):
    """Claim: parameters that were frozen at the wrap are stepped by their class, with the bits."""

    def grown(home):
        net = model()
        late = list(net[2].parameters())
        for param in late:
            param.requires_grad_(False)
        optimizer = stepped_by_class([p for p in net.parameters() if p.requires_grad])
        if home is not None:
            config = {"params": home, "optimizer": home, "nvme_paths": [str(tmp_path)]}
            net, optimizer = infinity.wrap_model(net, optimizer, config)
        plainly(net, optimizer)
        for param in late:
            param.requires_grad_(True)
        optimizer.add_param_group({"params": late, "lr": 3e-3})
        plainly(net, optimizer)
        return {name: value.detach().clone() for name, value in net.state_dict().items()}

    assert furthest(grown(home), grown(None)) == 0.0
