"""Blocks on paper: a plan chooses what they keep as the engine does by what it measures.

Words used here:

**room**: of a device, beside the state and a pass that computes every block again. **step**: of
`BlocksOnPaper.choices`, each of which has more room.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from inside import parts_of

transformers = pytest.importorskip("transformers")

import infinity
from infinity.core.run import activation_store
from infinity.core.wrap.lay_out import lay_out
from infinity.errors import CapacityError
from infinity.ext.blocks.activation_choice import SHARE_FOR_SAVED, ActivationChoice, choose
from infinity.tools.cli import main
from infinity.tools.plan.blocks import CHOSEN, UNCHOSEN, BlocksOnPaper
from infinity.tools.plan.cluster import OnPaper
from infinity.tools.plan.machine_file import Machine
from infinity.tools.plan.plan_job import Job, plan_cluster
from infinity.tools.plan.saved import saved_on_paper

SHAPE = {"hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 3, "vocab_size": 103}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SAMPLES, LENGTH = 6, 40
TOKENS = SAMPLES * LENGTH
H100 = Machine.read("h100")


def llama(device: str, **more: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(**SHAPE | more, use_cache=False)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def blocks() -> BlocksOnPaper:
    return saved_on_paper(llama("meta"))[2]


def test_blocks_on_paper_have_the_bytes_that_the_engine_measures(blocks, monkeypatch):
    """Method: two passes on a processor, where everything saved is counted, however small. Twin: of
    the products those that are kept are a part."""
    monkeypatch.setattr(activation_store, "SMALLEST_NBYTES", 1)
    model = llama("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"params": "host", "optimizer": "host", "device_memory": "64MiB", "recompute": True}
    model, optimizer = infinity.wrap_model(model, optimizer, config)
    ids = torch.randint(SHAPE["vocab_size"], (SAMPLES, LENGTH))
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = [block.measured() for block in parts_of(model).activations.planner.blocks]
    assert blocks.count == len(measured) == SHAPE["num_hidden_layers"]
    for block in measured[1:]:  # the first one's input is not an earlier one's output
        assert blocks.saved * TOKENS == pytest.approx(block.nbytes, rel=0.08)
        assert blocks.inputs * TOKENS == block.input_nbytes
        assert blocks.products * TOKENS == pytest.approx(block.product_nbytes, rel=0.01)
        assert block.splits
    assert 0 < blocks.product_work.products.total() < blocks.work.products.total()
    on_device = blocks.measured(SAMPLES, LENGTH, H100)[0]
    assert 0 < on_device.product_seconds < on_device.seconds


def test_more_room_is_for_more_of_the_blocks_as_the_engine_chooses(blocks):
    """Each step is the engine's own choice in its room, and what is kept fits the share of it that
    the engine takes. Twins: without room all is computed again, and with the most all is kept."""
    steps = list(blocks.choices(SAMPLES, LENGTH, H100))
    measured = blocks.measured(SAMPLES, LENGTH, H100)
    for step in steps:
        own = choose(
            measured,
            device_nbytes=int(SHARE_FOR_SAVED * step.room_nbytes),
            host_nbytes=0,
            send_rate=1.0,
            is_beside=True,
        )
        assert [each for each in step.counts.elements()] == sorted(own, key=own.index)
        assert step.kept_nbytes <= SHARE_FOR_SAVED * step.room_nbytes + 1
    for less, more in zip(steps, steps[1:]):
        assert less.room_nbytes < more.room_nbytes and less.kept_nbytes < more.kept_nbytes
        assert less.again_seconds > more.again_seconds and less.again_nbytes > more.again_nbytes
    count = SHAPE["num_hidden_layers"]
    assert steps[0].counts == {ActivationChoice.RECOMPUTE: count} and not steps[0].kept_nbytes
    assert steps[0].again_seconds == pytest.approx(sum(each.seconds for each in measured))
    assert steps[-1].counts == {ActivationChoice.KEEP: count} and not steps[-1].again_seconds
    assert {ActivationChoice.KEEP_PRODUCTS: count} in [step.counts for step in steps]


def job_of(device_memory: int, **config: object) -> Job:
    """A job on paper that may recompute, of six samples."""
    model = llama("meta")
    given = infinity.Config(
        params="host",
        optimizer="host",
        device_memory=device_memory,
        host_memory="64MiB",
        recompute=True,
        **config,
    )
    _, recomputed, blocks = saved_on_paper(model)
    optimizers = [torch.optim.AdamW(model.parameters())]
    batch = {"batch": SAMPLES, "length": LENGTH, "checkpointing": False}
    return Job(model, model.config, optimizers, given, batch, recomputed, blocks=blocks)


def test_a_plan_keeps_of_blocks_what_the_state_leaves_room_for():
    """Method: devices of more and more memory: none computes longer than the one before, nor has a
    longer step than a plan in which every block is computed again. The wrap fits what is left to
    it. Twin: of the least memory nothing is kept, of the most all."""
    seconds, kept = [], []
    for mebi in (4, 5, 6, 8, 10, 14, 64):
        job = job_of(mebi << 20)
        found = plan_cluster(job, H100, 1)
        again = plan_cluster(replace(job, blocks=None), H100, 1)
        assert found["step_seconds"] <= again["step_seconds"] * (1 + 1e-9)
        counts = found["blocks"]
        assert sum(counts[choice.value] for choice in ActivationChoice) == job.blocks.count
        assert any(CHOSEN in line for line in found["assumptions"])
        assert "every block recomputed" in again["activations"]["line"]
        seconds.append(found["seconds"]["compute"])
        kept.append(counts["kept"])
        config = replace(job.config, device_memory=found["device_memory"])
        lay_out(job.model, job.optimizers, config, device=OnPaper())
    assert all(more <= less * (1 + 1e-9) for less, more in zip(seconds, seconds[1:]))
    assert seconds[0] > 1.2 * seconds[-1]
    assert kept[0] == 0 and kept[-1] == SHAPE["num_hidden_layers"]
    with pytest.raises(CapacityError):
        plan_cluster(job_of(1 << 20), H100, 1)


def test_a_machine_without_rates_of_products_has_every_block_computed_again():
    """It is told, and its seconds are those of gradient checkpointing. Twin: a machine with
    them."""
    machine = replace(H100, product_flops=None)
    job = job_of(64 << 20)
    found = plan_cluster(job, machine, 1)
    checkpointed = replace(job, blocks=None, batch=job.batch | {"checkpointing": True})
    assert "blocks" not in found and UNCHOSEN in found["assumptions"]
    assert found["step_seconds"] == plan_cluster(checkpointed, machine, 1)["step_seconds"]
    assert UNCHOSEN not in plan_cluster(job, H100, 1)["assumptions"]


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(transformers.LlamaConfig(**SHAPE).to_json_string())
    return "model.json"


def test_the_command_says_what_blocks_keep(model, capsys):
    """The line, the JSON and the script of a plan. Twin: without the option."""
    words = ["plan", "--model", model, "--machine", "h100", "--sequence-length", "40"]
    found = {}
    for option in ("--recompute", "--gradient-checkpointing", ""):
        given = [*words, *filter(None, [option])]
        assert main([*given, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert main(given) == 0
        out = capsys.readouterr().out
        assert answer["activations"]["line"] in out
        assert ("3 blocks kept, 0 B made again" in out) == (option == "--recompute")
        assert main([*given, "--script"]) == 0
        assert ("recompute = true" in capsys.readouterr().out) == (option == "--recompute")
        found[option] = answer
    assert found["--recompute"]["blocks"]["kept"] == 3 and "blocks" not in found[""]
    assert not any("gradient-checkpointing" in each for each in found["--recompute"]["faster"])


@pytest.mark.parametrize("other", ["--gradient-checkpointing", "--mesh"])
def test_one_way_to_compute_again_is_planned(model, other, capsys):
    """Twin: each alone."""
    words = ["plan", "--model", model, "--machine", "h100", "--recompute", other]
    assert main([*words, *(["auto"] if other == "--mesh" else [])]) == 2
    assert f"--recompute and {other} do not go together" in capsys.readouterr().err


def test_each_of_several_ranks_chooses_what_to_compute_again(model, capsys):
    """Twin: without the option nothing is chosen."""
    for option in ("--recompute", ""):
        given = ["plan", "--model", model, "--machine", "dgx-h100", "--json"]
        assert main([*given, *filter(None, [option])]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert ("blocks" in answer) == bool(option)
        assert not option or answer["blocks"]["kept"] == 3
