"""`infinity train --mesh` beside one process: a tiny Llama with weights, on text that it can learn.

Words used here:

**mesh**: the words of ``--mesh``, and the micro-batches of a step for which its data ranks read
what one process reads in two.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")

from chatty import save_base, save_rows
from ranks import run_ranks

import infinity.tools.cli
from infinity.errors import ConfigError, UsageError
from infinity.tools.train.corpus import Batches
from infinity.tools.train.examples import ExampleBatches
from infinity.tools.train.mesh import check_batches, joined, mesh_sizes

STEPS = 3
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
OF_TWO = {"dp=2": 1, "tp=2": 2, "pp=2": 2, "cp=2": 2}
OF_FOUR = {"tp=2,dp=2": 1, "pp=2,dp=2": 1, "pp=2,tp=2": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and a text."""
    folder = tmp_path_factory.mktemp("mesh")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return folder


def words_of(name: str, *more: object, steps: int = STEPS, model: object = "llama") -> list[str]:
    """The words of a job that writes to the folders ``ck-name`` and ``out-name``."""
    words = f"train --model {model} --dtype fp32 --batch-size 2 --sequence-length 16 --lr 0.01"
    words += " --warmup-steps 0 --params host --optimizer host --eval-batches 3 --sample-bytes 0"
    words += f" --threads 1 --json --steps {steps} --checkpoint ck-{name} --out out-{name}"
    return [*words.split(), *map(str, more)]


@pytest.fixture(scope="module")
def run(place):
    """Runs a job on ranks, in the folder of the model, and returns its report."""

    def run(ranks: int, words: list[str]) -> dict:
        at = os.getcwd()
        os.chdir(place)
        try:
            if ranks > 1:
                done = run_ranks(ranks, ["-m", "infinity", *words], seconds=240)
                assert done.returncode == 0, done.stderr[-3000:]
                return json.loads(done.stdout.splitlines()[-1])
            import contextlib
            import io

            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert infinity.tools.cli.main(words) == 0
            return json.loads(out.getvalue().splitlines()[-1])
        finally:
            os.chdir(at)

    return run


@pytest.fixture(scope="module")
def alone(run):
    """What one process reports: of some steps, and of those that a resumed job adds."""
    data = ("--data", "text.txt", "--accumulate", 2)
    first = run(1, words_of("alone", *data))
    words = words_of("alone", *data, "--resume", "--out", "out-resumed", steps=STEPS + 2)
    return first, run(1, words)


def is_as_alone(found: dict, expected: dict, mesh: str) -> None:
    """Asserts that a job's losses are those of one process: to the bit over data ranks alone."""
    exact = mesh == "dp=2"
    for name in ("losses", "held_out_loss_before", "held_out_loss_after"):
        near = expected[name] if exact else pytest.approx(expected[name], rel=2e-6)
        assert found[name] == near, (mesh, name)
    assert found["options"] == expected["options"]


def is_whole(folder: Path, other: Path) -> None:
    """Asserts that transformers loads a folder with every tensor, and all near another's."""
    found, expected = (
        transformers.LlamaForCausalLM.from_pretrained(each, output_loading_info=True)
        for each in (folder, other)
    )
    assert not found[1]["missing_keys"] and not found[1]["unexpected_keys"]
    theirs = expected[0].state_dict()
    for name, tensor in found[0].state_dict().items():
        # AdamW steps as far by a gradient that is rounding alone as by any other
        assert (tensor - theirs[name]).norm() < 1e-2 * theirs[name].norm(), name


@pytest.fixture(scope="module")
def trained(run):
    """Runs a mesh once, and returns its report."""
    kept: dict[str, dict] = {}

    def trained(mesh: str, *more: object) -> dict:
        if mesh not in kept:
            ranks = 4 if mesh in OF_FOUR else 2
            count = (OF_TWO | OF_FOUR)[mesh]
            words = ("--data", "text.txt", "--mesh", mesh, "--accumulate", count, *more)
            kept[mesh] = run(ranks, words_of(mesh, *words))
        return kept[mesh]

    return trained


@pytest.mark.parametrize(
    "mesh",
    [each if each == "pp=2" else pytest.param(each, marks=pytest.mark.slow) for each in OF_TWO],
)
def test_a_mesh_of_two_trains_what_one_process_trains(mesh, alone, trained, place):
    """Compares losses, and the saved folder's tensors, with those of one process."""
    more = ("--gradient-checkpointing",) if mesh == "tp=2" else ()
    is_as_alone(trained(mesh, *more), alone[0], mesh)
    is_whole(place / f"out-{mesh}", place / "out-alone")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", OF_FOUR)
def test_a_mesh_of_four_trains_what_one_process_trains(mesh, alone, trained, place):
    """Compares losses, and the saved folder's tensors, with those of one process."""
    is_as_alone(trained(mesh), alone[0], mesh)
    is_whole(place / f"out-{mesh}", place / "out-alone")


@pytest.mark.parametrize(
    "mesh, other", [("pp=2", "tp=2"), pytest.param("tp=2", "dp=2", marks=pytest.mark.slow)]
)
def test_a_checkpoint_of_a_mesh_goes_on_on_another(mesh, other, alone, trained, run, place):
    """Resumes a mesh's checkpoint on another mesh: losses are those of one process, resumed. Twin:
    with other micro-batches, which another job has, it is refused."""
    trained(mesh)
    count = OF_TWO[other]
    words = ("--data", "text.txt", "--mesh", other, "--checkpoint", f"ck-{mesh}", "--resume")
    name, more = f"{mesh}-on-{other}", {"steps": STEPS + 2}
    found = run(2, words_of(name, *words, "--accumulate", count, **more))
    assert found["first_step"] == STEPS and len(found["losses"]) == 2
    assert found["losses"] == pytest.approx(alone[1]["losses"], rel=2e-6)
    is_whole(place / f"out-{name}", place / "out-resumed")
    if mesh == "pp=2":  # other data ranks would divide the same samples
        with pytest.raises(AssertionError, match="accumulate"):
            run(2, words_of("no", *words, "--accumulate", 3 * count, **more))


@pytest.mark.slow
def test_stages_weigh_every_learned_token_of_samples_alike(run, place):
    """Answers of unlike lengths on two stages, each beside two data ranks: the same losses as one
    process's, but for the order of sums."""
    base = save_base(place / "base")
    pairs = [(f"{at}?", "x" * (1 + 7 * at % 31)) for at in range(33)]
    rows = [{"prompt": question, "completion": answer} for question, answer in pairs]
    save_rows(place / "a.jsonl", rows)
    data = ("--data", "a.jsonl")
    expected = run(1, words_of("s1", *data, "--accumulate", 4, model=base))
    mesh = ("--mesh", "pp=2,dp=2", "--accumulate", 2)
    found = run(4, words_of("s4", *data, *mesh, model=base))
    for name in ("losses", "held_out_loss_before", "held_out_loss_after"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)


# --- what a mesh cannot do ---

UNFIT = {  # the words -> a part of the message
    "--mesh tp=3": "tp=3 is 3 ranks, and 4 were started: torchrun --standalone --nproc-per-node 3",
    "--mesh tp=2,pp=4": "pp=4, tp=2 is 8 ranks, and 4 were started",
    "--mesh xp=2": "there is no axis 'xp'",
    "--mesh tp=2,tp=2": "tp is given twice",
    "--mesh tp=": "tp needs a number of ranks",
    "--mesh tp=2 --lora 4": "--lora-rank does not go with --mesh tp=2: give dp alone",
    "--mesh dp=4 --method dpo --data a.jsonl": "leave out --mesh",
    "--mesh pp=2 --optim muon": "it comes with a second optimizer",
    "--mesh tp=2 --optim adafactor": "--optim adafactor does not go with --mesh tp=2",
    "--mesh pp=2 --stalls 3": "--stalls does not go with --mesh pp=2",
    "--mesh tp=2,cp=2": "cp goes with dp alone here",
    "--mesh tp=2,ep=2": "leave one of both out",
    "--mesh pp=2 --pack": "--pack does not go with --mesh pp=2",
    "--mesh tp=4 --pipeline-chunks 2": "--pipeline-chunks is of stages: --mesh tp=4 has no pp",
    "--pipeline-schedule 1F1B": "--pipeline-schedule is of stages: add --mesh pp=2",
}


def parsed(words: str) -> argparse.Namespace:
    """The options, as `infinity train` has them once it begins."""
    args = infinity.tools.cli.parse(["train", *words.split()])
    args.lora_rank = args.lora_rank or args.lora
    return args


@pytest.mark.parametrize("words", UNFIT)
def test_options_that_a_mesh_cannot_follow_are_refused_with_a_remedy(words):
    """Of four ranks. Twin: the same ranks with a mesh that fits them."""
    with pytest.raises((ConfigError, UsageError)) as error:
        mesh_sizes(parsed(words), 4)
    assert UNFIT[words] in str(error.value)
    assert mesh_sizes(parsed("--mesh tp=2"), 4) == {"pp": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
    assert mesh_sizes(parsed(""), 4) is None


MISFIT = {  # the mesh, and the words -> a part of the message
    "tp=2 --model odd/config.json": "3 heads (num_attention_heads) cannot be shared out to 2",
    "pp=2 --pipeline-chunks 2": "2 layers cannot be cut into 4 chunks",
    "pp=2 --model mixed/config.json": "set config.output_router_logits = False",
    "cp=2 --sequence-length 15": "--sequence-length 15 does not divide by 2: give 14",
}


@pytest.mark.parametrize(
    "words",
    [each if "odd" in each else pytest.param(each, marks=pytest.mark.slow) for each in MISFIT],
)
def test_a_model_that_does_not_divide_is_refused_before_it_is_loaded(words, place, monkeypatch):
    """Two ranks of a mesh that each model does not fit: they end before a weight is read."""
    monkeypatch.chdir(place)
    odd = {**SIZES, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    transformers.LlamaConfig(**odd).save_pretrained("odd")
    mixed = {**SIZES, "num_local_experts": 2, "output_router_logits": True}
    transformers.MixtralConfig(**mixed).save_pretrained("mixed")
    mesh, *rest = words.split()
    given = words_of("misfit", "--data", "text.txt", "--mesh", mesh, *rest)
    done = run_ranks(2, ["-m", "infinity", *given], seconds=120)
    assert done.returncode == 2 and MISFIT[words] in done.stderr, done.stderr[-2000:]
    assert "parameters in" not in done.stderr and not Path("ck-misfit").exists()


class _Mesh:
    """A mesh with an axis of two ranks."""

    def __init__(self, axis: str):
        self.mesh_dim_names = ("dp", axis)

    def __getitem__(self, name: str) -> _Mesh:
        return self

    def size(self) -> int:
        return 2


def batches_of(kind: type, **more: object) -> object:
    """Batches of a kind, with a sequence length of 16 and one batch to hold out."""
    made = kind.__new__(kind)
    made.__dict__.update(sequence_length=16, held_out=lambda count: [{"input_ids": 0, **more}])
    return made


def test_batches_that_a_mesh_cannot_divide_are_refused():
    """Rows of samples are padded, which parts of sequences cannot be; a pipeline passes on text
    alone. Twins: running text, no axis, and text for a pipeline."""
    with pytest.raises(ConfigError, match="--data has samples"):
        check_batches(_Mesh("cp"), batches_of(ExampleBatches))
    with pytest.raises(ConfigError, match="have pixel_values: give dp and tp"):
        check_batches(_Mesh("pp"), batches_of(ExampleBatches, pixel_values=0))
    check_batches(_Mesh("cp"), batches_of(Batches))
    check_batches(None, batches_of(ExampleBatches))
    check_batches(_Mesh("pp"), batches_of(ExampleBatches, attention_mask=0))


# --- the batch of a pipeline ---


def test_micro_batches_become_one_batch_of_which_no_token_more_is_learned():
    """Joins rows of unlike lengths, and fills up to six rows. Twin: equal rows stay as they are."""
    made = [
        {
            "input_ids": torch.ones(2, length, dtype=torch.long),
            "labels": torch.ones(2, length, dtype=torch.long),
            "attention_mask": torch.ones(2, length, dtype=torch.long),
        }
        for length in (3, 5)
    ]
    found = joined(made, 6)
    assert {name: tuple(each.shape) for name, each in found.items()} == dict.fromkeys(
        made[0], (6, 5)
    )
    assert (found["labels"] != -100).sum() == 2 * 3 + 2 * 5
    assert not found["attention_mask"][:2, 3:].any() and (found["labels"][4:] == -100).all()
    same = joined(made[:1], 2)
    assert all(torch.equal(same[name], made[0][name]) for name in same)


# --- what a checkpoint knows of its mesh ---


def test_a_mesh_that_is_given_anew_replaces_the_checkpoints_with_its_stages(tmp_path, monkeypatch):
    """Reads the words of a checkpoint of two stages. Twin: without --mesh they are all taken."""
    from infinity.tools.cli import presets

    saved = ["--mesh=pp=2", "--pipeline-chunks=1", "--lr=0.1"]
    monkeypatch.setattr("infinity.tools.train.places.saved_extra", lambda folder: {"words": saved})
    words = ["train", "--resume", "--checkpoint", str(tmp_path)]
    assert presets.expanded(words)[1:4] == saved
    found = presets.expanded([*words, "--mesh", "tp=2"])
    assert found[1] == "--lr=0.1" and "--pipeline-chunks=1" not in found
