"""Any `transformers` model trains wrapped as it trains by torch alone, and where its state lives
changes no bit.

Words used here: **architecture**, **batch**, **quirk** as in `zoo.py`; **run**, **plain**,
**wrapped**, **same bits**, **yardstick** as in `runs.py`. **home**: the tier where parameters or
optimizer state rest between uses.

The models are tiny, so a budget of 64 MiB holds several of them: what these tests watch is the
order of things (which module runs when, what it touches, what is shared, what gets no gradient),
not the pressure on memory.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import every
from torch import nn

pytest.importorskip("transformers", reason="the zoo is made of transformers models")

from runs import (
    Run,
    Yardstick,
    adamw,
    check_moved,
    check_same_bits,
    collect,
    copied,
    plain_run,
    same_bits,
    train,
    ulp,
    wrapped_run,
)
from zoo import ZOO, Architecture, make_batch, make_model, seed_everything

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

SEED = 7
LR = 1e-3
STEPS = (0, 1, 0)  # the batch of each step, so that the third sees what the first saw
CLIP_STEPS = (0, 2)
# Quantised: an ulp of a weight can become a whole step of an integer, so most of its gradients are
# noise.
LEAST_SHARE = {
    "ibert": 0.25,
    "wav2vec2": 0.7,
}  # the rest is where a processor's own rounding decides
MIXED_HOMES = [("host", "host"), ("device", "nvme"), ("nvme", "host"), ("auto", "auto")]

every_architecture = pytest.mark.parametrize("name", every(ZOO, 4))
# A tied decoder, one block used three times, encoder and decoder with one embedding, experts, batch
# norm.
some_architectures = pytest.mark.parametrize("name", ["gpt2", "albert", "t5", "mixtral", "resnet"])


def architecture(name: str) -> Architecture:
    entry = ZOO[name]
    if missing := entry.missing():
        pytest.skip(f"{name} needs {', '.join(missing)}, which this machine lacks")
    return entry


def fresh(entry: Architecture) -> tuple[nn.Module, list[dict[str, Any]]]:
    return make_model(entry, SEED), [make_batch(entry, SEED + which) for which in STEPS]


def at_home(params: str, optimizer: str, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {"params": params, "optimizer": optimizer}
    if "nvme" in (params, optimizer):
        config["nvme_paths"] = [str(folder)]
    if "device" not in (params, optimizer):
        config["host_memory"] = "64MiB"
    return config


def loop() -> dict[str, Any]:
    """What every run here shares, besides model and batches."""
    return {"lr": LR, "clip_steps": CLIP_STEPS, "before_forward": seed_noise}


def seed_noise(step: int) -> None:
    """Pin the noise that an architecture cannot do without: a batch meets the same noise each
    time."""
    seed_everything(STEPS[step % len(STEPS)])


def yardstick_for(model: nn.Module, batches: list[dict[str, Any]]) -> Yardstick:
    plain = plain_run(copy.deepcopy(model), batches, **loop())
    nudged = plain_run(copy.deepcopy(model), batches, nudged=True, **loop())
    return Yardstick.measure(plain, nudged, lr=LR)


# --------------------------------------------------------------------------------------------------
# The promises
# --------------------------------------------------------------------------------------------------


@every_architecture
def test_trains_equal_to_plain_torch(name: str, tmp_path: Path) -> None:
    """Method: train one copy by torch's AdamW and one wrapped with all state at home on NVMe, three
    steps, two of them clipped; hold losses to 1e-5 and each weight to the distance that 4 ulps of
    rounding a step explain.
    """
    print(f"seed {SEED}")
    model, batches = fresh(architecture(name))
    yardstick = yardstick_for(model, batches)
    share = yardstick.share_within(1e-2 * LR)
    assert share >= LEAST_SHARE.get(name, 0.8), (
        f"only {share:.0%} of the elements are held to 1e-2 lr or less"
    )

    wrapped = wrapped_run(
        copy.deepcopy(model), batches, config=at_home("nvme", "nvme", tmp_path), **loop()
    )

    assert all(torch.isfinite(loss) for loss in wrapped.losses)
    assert wrapped.losses[2] < wrapped.losses[0], "the loss of the same batch did not fall"
    yardstick.check(wrapped)
    check_moved(wrapped, yardstick.plain)


@every_architecture
def test_where_state_lives_changes_no_bit(name: str, tmp_path: Path) -> None:
    """Method: train two copies wrapped, one with all state at home on NVMe and one with all on the
    device; losses, norms, weights, buffers and moments have the same bits."""
    print(f"seed {SEED}")
    model, batches = fresh(architecture(name))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    seen: list[tuple[int, int]] = []

    def look(wrapped: nn.Module) -> None:
        import infinity

        resting = sum(parameter.untyped_storage().nbytes() for parameter in wrapped.parameters())
        seen.append((resting, infinity.stats(wrapped).tiers["nvme"].peak_nbytes))

    device, nvme = (at_home(home, home, tmp_path) for home in ("device", "nvme"))
    on_device = wrapped_run(copy.deepcopy(model), batches, config=device, look=look, **loop())
    on_nvme = wrapped_run(copy.deepcopy(model), batches, config=nvme, look=look, **loop())

    check_same_bits(on_device, on_nvme)
    # The twin: two runs that both stayed on the device would have the same bits too.
    (_, device_peak), (nvme_resting, nvme_peak) = seen
    assert device_peak == 0 and nvme_peak >= nbytes, (
        f"not at home where asked: {device_peak}, {nvme_peak} of {nbytes}"
    )
    assert nvme_resting == 0, (
        f"{nvme_resting} of {nbytes} bytes of weights are in memory between steps"
    )


@some_architectures
@pytest.mark.parametrize("homes", MIXED_HOMES, ids="-".join)
def test_mixed_homes_change_no_bit(name: str, homes: tuple[str, str], tmp_path: Path) -> None:
    """Method: as above, for homes that differ between parameters and optimizer."""
    print(f"seed {SEED}")
    model, batches = fresh(architecture(name))
    config = {**at_home(*homes, tmp_path), "nvme_paths": [str(tmp_path)]}

    on_device = wrapped_run(
        copy.deepcopy(model), batches, config=at_home("device", "device", tmp_path), **loop()
    )
    elsewhere = wrapped_run(copy.deepcopy(model), batches, config=config, **loop())

    check_same_bits(on_device, elsewhere)


@some_architectures
def test_unwrapped_model_is_plain_torch_and_trains_on(name: str, tmp_path: Path) -> None:
    """Method: train three steps wrapped, unwrap, look at every object, and take a fourth step by
    torch alone; hold the result against four plain steps."""
    import infinity

    print(f"seed {SEED}")
    model, batches = fresh(architecture(name))
    longer = [*batches, batches[1]]
    yardstick = yardstick_for(model, longer)

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = [
        (name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    run = Run(before=copied(model.named_parameters()))
    ours = adamw(model, LR)
    wrapped, optimizer = infinity.wrap_model(model, ours, at_home("nvme", "nvme", tmp_path))
    train(run, wrapped, optimizer, batches, clip_steps=CLIP_STEPS, before_forward=seed_noise)
    plain, optimizer = infinity.unwrap_model(wrapped, optimizer)

    assert plain is model
    assert type(optimizer) is torch.optim.AdamW
    assert [
        (name, id(parameter)) for name, parameter in plain.named_parameters(remove_duplicate=False)
    ] == aliases
    for parameter in plain.parameters():
        assert type(parameter) is nn.Parameter, names[id(parameter)]
        assert parameter.untyped_storage().nbytes() >= parameter.nbytes, names[id(parameter)]
    train(run, plain, optimizer, longer[3:], before_forward=lambda step: seed_noise(3))
    yardstick.check(collect(run, plain, optimizer))


# --------------------------------------------------------------------------------------------------
# Their failing twins: what the comparisons must see
# --------------------------------------------------------------------------------------------------


def plain_pair(name: str) -> tuple[Run, Run]:
    model, batches = fresh(architecture(name))
    return tuple(plain_run(copy.deepcopy(model), batches, **loop()) for _ in range(2))


@some_architectures
def test_two_plain_runs_have_the_same_bits(name: str) -> None:
    """Method: train two copies by torch alone; if they differed, no test here could say
    anything."""
    check_same_bits(*plain_pair(name))


@some_architectures
@pytest.mark.parametrize("kind", ["parameters", "moments"])
def test_one_ulp_is_seen(name: str, kind: str) -> None:
    """Method: of two equal runs move one element of one tensor by one ulp; the comparison of bits
    raises."""
    one, other = plain_pair(name)
    state = getattr(other, kind)
    victim = max(state, key=lambda key: state[key].numel())
    element = state[victim].view(-1)[-1:]
    element += ulp(element)
    with pytest.raises(AssertionError, match=f"1 of {len(state)} {kind} differ in bits"):
        check_same_bits(one, other)


def test_one_ulp_of_a_loss_and_the_sign_of_zero_are_seen() -> None:
    """Method: of two equal runs change one loss by an ulp, one buffer from 0.0 to -0.0; each
    raises."""
    one, other = plain_pair("resnet")
    other.losses[1] = other.losses[1] + ulp(other.losses[1])
    with pytest.raises(AssertionError, match=r"losses\[1\]"):
        check_same_bits(one, other)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


class Broken(torch.optim.AdamW):
    """AdamW with one fault, for the yardstick to find."""

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__(
            adamw(model, LR, weight_decay=0.0 if fault == "no weight decay" else 0.01).param_groups
        )
        largest = max(
            model.parameters(), key=lambda parameter: parameter.numel() * parameter.requires_grad
        )
        self.fault, self.victim, self.steps, self.stale = (
            fault,
            largest,
            0,
            largest.detach().clone(),
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        before = self.victim.detach().clone()
        if self.fault == "a stale gradient" and self.steps > 1:
            self.victim.grad, self.stale = self.stale, self.victim.grad.clone()
        elif self.fault == "a lost gradient" and self.steps == 2:
            self.victim.grad.zero_()
        super().step(closure)
        if self.fault == "a skipped parameter":
            self.victim.copy_(before)
        elif self.fault == "one stale element" and self.steps == 3:
            self.victim.view(-1)[-1] = before.view(-1)[-1]
        elif self.fault == "weights of half the width":
            self.victim.copy_(self.victim.bfloat16())


FAULTS = [
    "a skipped parameter",
    "one stale element",
    "a stale gradient",
    "a lost gradient",
    "no weight decay",
    "weights of half the width",
]


@some_architectures
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_optimizer_is_seen(name: str, fault: str) -> None:
    """Method: train a copy with one fault in its optimizer; the yardstick raises, by a wide
    margin."""
    model, batches = fresh(architecture(name))
    yardstick = yardstick_for(model, batches)
    run = Run(before=copied(model.named_parameters()))
    optimizer = Broken(model, fault)
    train(run, model, optimizer, batches, clip_steps=CLIP_STEPS, before_forward=seed_noise)
    with pytest.raises(AssertionError):
        yardstick.check(collect(run, model, optimizer))
    # The weights alone give it away: the fault need not reach a loss.
    run.losses, run.norms = yardstick.plain.losses, yardstick.plain.norms
    with pytest.raises(AssertionError, match="further from plain torch than rounding explains"):
        yardstick.check(run)


@some_architectures
def test_a_forgotten_clip_is_seen(name: str) -> None:
    """Method: train a copy whose gradients are never clipped; the yardstick raises, because Adam's
    memory of the first step then has another weight against the second's."""
    model, batches = fresh(architecture(name))
    yardstick = yardstick_for(model, batches)
    assert max(yardstick.plain.norms) > 1.0, "clipping had nothing to do"
    run = Run(before=copied(model.named_parameters()))
    optimizer = adamw(model, LR)
    train(run, model, optimizer, batches, before_forward=seed_noise)
    run.norms = yardstick.plain.norms
    with pytest.raises(AssertionError):
        yardstick.check(collect(run, model, optimizer))


@some_architectures
def test_a_parameter_that_stays_is_seen(name: str) -> None:
    """Method: put one trained parameter back to where it began; `check_moved` names it."""
    run, plain = plain_pair(name)
    check_moved(run, plain)
    victim = next(iter(plain.gradients[0]))
    run.parameters[victim] = run.before[victim].clone()
    with pytest.raises(AssertionError, match="did not move"):
        check_moved(run, plain)


@some_architectures
def test_another_adamw_of_torch_passes(name: str) -> None:
    """Method: train a copy by torch's fused AdamW, which rounds differently; the yardstick accepts
    it, so it asks of an engine no more than torch asks of itself."""
    model, batches = fresh(architecture(name))
    yardstick = yardstick_for(model, batches)
    run = Run(before=copied(model.named_parameters()))
    optimizer = adamw(model, LR, foreach=None, fused=True)
    train(run, model, optimizer, batches, clip_steps=CLIP_STEPS, before_forward=seed_noise)
    yardstick.check(collect(run, model, optimizer))
