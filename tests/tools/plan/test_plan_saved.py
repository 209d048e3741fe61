"""What forwards save beside the state: as passes that run do, and the room that engines get."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers")

import infinity
from infinity.core.machine.tiers import Tier
from infinity.core.wrap.lay_out import lay_out
from infinity.errors import CapacityError
from infinity.tools.plan import plan_job
from infinity.tools.plan.cluster import OnPaper
from infinity.tools.plan.machine_file import Machine
from infinity.tools.plan.plan_job import Job, plan_cluster
from infinity.tools.plan.saved import SAVED, saved_on_paper, ways_on_paper
from infinity.tools.train.model import checkpoint_activations

SHAPE = {"hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 3, "vocab_size": 1031}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SAMPLES, LENGTH = 6, 40


def llama(device: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(**SHAPE, use_cache=False)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


def saved_by(model: torch.nn.Module, samples: int) -> int:
    """Bytes of the storages that a forward saves, but weights and buffers."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    seen = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(SHAPE["vocab_size"], (samples, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(ids, labels=ids).loss
        return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("recomputes", [False, True])
def test_planned_bytes_are_those_that_a_forward_saves(recomputes):
    """Method: every storage that autograd is given on a processor, with and without checkpointing.
    Twin: of twice the samples."""
    found = saved_on_paper(llama("meta"))[recomputes]
    assert found.is_counted and (found.at_once > 0) == recomputes
    real = llama("cpu").train()
    if recomputes:
        checkpoint_activations(real)
    one, two = (saved_by(real, samples) for samples in (SAMPLES, 2 * SAMPLES))
    planned = found.kept * SAMPLES * LENGTH
    assert planned == pytest.approx(one, rel=0.08)
    assert planned != pytest.approx(two, rel=0.3)


@pytest.fixture
def job() -> Job:
    """A job on paper, of six samples, whose state has three places to be."""
    model = llama("meta")
    config = infinity.Config(device_memory="64MiB", host_memory="64MiB", nvme_capacity="1GiB")
    config = replace(config, nvme_paths=["."])
    optimizers = [torch.optim.AdamW(model.parameters())]
    batch = {"batch": SAMPLES, "length": LENGTH, "checkpointing": False}
    saved = saved_on_paper(model)[0]
    return Job(model, model.config, optimizers, config, batch, saved)


def with_memory(job: Job, nbytes: int) -> Job:
    return replace(job, config=replace(job.config, device_memory=nbytes))


def test_the_engine_has_the_planned_homes_in_what_they_leave(job):
    """Method: the wrap's own plan with the budget that a plan leaves, at many memories: the same
    homes and bytes. What is the least of one is that of the other. Twin: with the memory whole it
    has more at home on the device."""
    more = 0
    for mebi in (7, 8, 10, 12, 16, 24):
        here = with_memory(job, mebi << 20)
        for passes, plan, _ in ways_on_paper(here, partial(plan_job._lay_out, here, None)):
            saved = passes.saved_nbytes
            assert plan.terms[Tier.DEVICE][SAVED] == saved and passes.left_nbytes > 0
            assert passes.samples * passes.count == SAMPLES

            def of_engine(nbytes: int):
                config = replace(here.config, device_memory=nbytes)
                return lay_out(here.model, here.optimizers, config, device=OnPaper())[0]

            left, whole = of_engine(passes.left_nbytes), of_engine(mebi << 20)
            assert left.tiers == plan.tiers
            assert left.planned_nbytes(Tier.DEVICE) == plan.planned_nbytes(Tier.DEVICE) - saved
            assert left.planned_nbytes(Tier.HOST) == plan.planned_nbytes(Tier.HOST)
            more += whole.planned_nbytes(Tier.DEVICE) > left.planned_nbytes(Tier.DEVICE)
    assert more
    small = with_memory(job, 1 << 20)
    with pytest.raises(CapacityError, match=SAVED) as refused:
        next(ways_on_paper(small, partial(plan_job._lay_out, small, None)))
    least = refused.value.needed["device_memory"]
    for given, fits in ((least, True), (least - 1, False)):
        tried = with_memory(job, given)
        config = replace(tried.config, device_memory=given - job.saved.nbytes(LENGTH))
        for attempt in (
            lambda: next(ways_on_paper(tried, partial(plan_job._lay_out, tried, None))),
            lambda: lay_out(job.model, job.optimizers, config, device=OnPaper()),
        ):
            if fits:
                attempt()
            else:
                with pytest.raises(CapacityError):
                    attempt()


def test_a_smaller_device_takes_more_passes(job):
    """Method: the passes of a step on devices of less and less memory; all samples at once on one
    that is large."""
    machine = Machine.read("rtx4090")
    counts = [
        plan_cluster(with_memory(job, mebi << 20), machine, 1)["micro_batches"]
        for mebi in (200, 16, 9)
    ]
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] > 1
    found = plan_cluster(with_memory(job, 9 << 20), machine, 1)
    assert f"--accumulate {counts[-1]}" in found["activations"]["line"]
    assert found["device_memory"] == (9 << 20) - found["activations"]["nbytes"]
