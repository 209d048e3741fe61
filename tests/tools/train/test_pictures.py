"""`infinity train` of pictures: models of images and text, by their processors and TRL's collator.

Method: tiny folders of each kind are trained by the command, and by a plain loop of torch over what
TRL's collator makes of the same pictures. Losses and saved tensors are equal to the bit.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily, need

need("trl", "datasets", "PIL")

import transformers
from pictured import TEMPLATE, VIDEOS, picture, save_pictured
from ranks import run_torchrun
from safetensors.torch import load_file

import infinity.tools.cli
from infinity.errors import ConfigError
from infinity.library_versions import is_at_least
from infinity.tools.train import job
from infinity.tools.train.example_files import find_examples
from infinity.tools.train.model import no_cache
from infinity.tools.train.optimizers import make_optimizers
from infinity.tools.train.pictures import read_pictures, read_processor
from infinity.tools.train.schedules import lr_share

PIL = Lazily("PIL", "PIL.Image")
datasets = Lazily("datasets")
sft = Lazily("trl.trainer.sft_trainer", "trl")

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, LR, LENGTH = 3, 0.01, 128
KINDS = ["llava", "llava_next", "gemma3", "idefics3", "mistral3"]
KINDS += ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4", "internvl", "smolvlm"]
KINDS += ["llava_onevision", "paligemma", "mllama"]
TEXTS = {"paligemma": "<image>", "mllama": "<|image|>"}  # TRL takes no answers alone for these
QUICK = ["llava", "gemma3"]
HOMES = ["host", "nvme", "device"]
NO_TORCHVISION = "its processor needs torchvision"


def chat_of(question: Any, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a kind, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind in VIDEOS or kind == "mistral3":
            try:
                import torchvision  # noqa: F401
            except (ImportError, RuntimeError):
                pytest.skip(NO_TORCHVISION)
        if kind not in made:
            made[kind] = save_pictured(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture
def marks() -> None:
    """Skips a test of templates that mark answers, with libraries that cannot beside pictures."""
    fields = sft.DataCollatorForVisionLanguageModeling.__dataclass_fields__
    if "chat_template" not in fields or not is_at_least("transformers", "5.18"):
        pytest.skip("this TRL or transformers marks no answers beside pictures")


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Status, stdout and stderr of `infinity train`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swap").mkdir()

    def run(model: Path, *words: Any, home: str = "host") -> tuple[int, str, str]:
        capsys.readouterr()
        given = ["--model", model, "--params", home, "--optimizer", home, "--dtype", "fp32"]
        given += ["--nvme-path", "swap", "--data", "data.jsonl", "--sequence-length", LENGTH]
        status = infinity.tools.cli.main(["train", *map(str, (*given, *words))])
        return status, *capsys.readouterr()

    return run


def save_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_pictures(folder: Path, count: int) -> list[str]:
    (folder / "pics").mkdir(exist_ok=True)
    names = [f"pics/{at}.png" for at in range(count)]
    for at, name in enumerate(names):
        picture(at, width=30 + 8 * at).save(folder / name)
    return names


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def stepping(model: Any) -> tuple[Any, Any]:
    """Returns the optimizer and the schedule of `infinity train`, by torch alone."""
    (optimizer,) = make_optimizers(model, "adamw", lr=LR, weight_decay=0.1)
    for group in optimizer.param_groups:
        group["fused"] = True
    share = partial(lr_share, steps=STEPS, warmup_steps=0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def plain_loop(model: Any, batch_of: Any) -> list[float]:
    """Trains a model as `infinity train` does, by torch alone. Returns the losses."""
    optimizer, schedule = stepping(model)
    losses = []
    model.train()
    for _ in range(STEPS):
        with no_cache(model):
            loss = model(**batch_of()).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


def row_of(kind: str, at: int) -> dict[str, Any]:
    if kind in TEXTS:
        return {"text": f"{TEXTS[kind]}It is {at}."}
    return {"messages": chat_of("What is it?", f"It is {at}.")}


@pytest.mark.parametrize(
    "kind",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in KINDS],
)
def test_pictures_train_with_the_bits_of_a_plain_loop(kind, folder_of, train, tmp_path):
    """Three steps of two samples at a home, against torch and TRL's collator; every tensor is
    saved, and transformers loads the folder. Twin: another picture has another loss."""
    base = folder_of(kind)
    names = save_pictures(tmp_path, 3)
    save_rows(
        tmp_path,
        [row_of(kind, at) | {"images": [name]} for at, name in enumerate(names)],
    )
    home = HOMES[KINDS.index(kind) % 3]
    words = ("--steps", STEPS, "--batch-size", 2, "--lr", LR, "--warmup-steps", 0, "--out", "out")
    status, out, err = train(base, *words, "--json", "--sample-bytes", 4, home=home)
    assert status == 0, err
    assert ("each text is a row" if kind in TEXTS else "each answer is a row") in err

    def batch(first: int) -> dict[str, Any]:
        made = sft.DataCollatorForVisionLanguageModeling(
            transformers.AutoProcessor.from_pretrained(base),
            max_length=LENGTH,
            completion_only_loss=kind not in TEXTS,
        )
        shown = datasets.Image().decode_example
        given = []
        for at in (first, first + 1):
            row = row_of(kind, at)
            if chat := row.pop("messages", None):
                row = {"prompt": chat[:1], "completion": chat[1:]}
            given.append(row | {"images": [shown({"path": names[at], "bytes": None})]})
        return dict(made(given))

    model = transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    first, other = batch(0), batch(1)
    with torch.no_grad():
        assert model.train()(**first).loss != model(**other).loss
    assert json.loads(out.splitlines()[-1])["losses"] == plain_loop(model, lambda: batch(0))
    loaded, info = transformers.AutoModelForImageTextToText.from_pretrained(
        "out", output_loading_info=True
    )
    assert type(loaded) is type(model) and not info["missing_keys"]
    assert not info["unexpected_keys"] and equal(loaded.state_dict(), model.state_dict())
    kept = transformers.AutoProcessor.from_pretrained("out")
    assert type(kept).__name__ in err and kept.chat_template


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = all(torch.equal(value, other[name]) for name, value in one.items())
    return one.keys() == other.keys() and same


def read(path: Path, base: Path, length: int = LENGTH, **given: Any) -> Any:
    return read_pictures(
        find_examples(path),
        transformers.AutoConfig.from_pretrained(base),
        partial(read_processor, base),
        **{"sequence_length": length, "batch_size": 2} | given,
    )


def png(at: int) -> bytes:
    written = io.BytesIO()
    picture(at).save(written, "png")
    return written.getvalue()


IMAGE = {"type": "image"}
ASKED = {"type": "text", "text": "What?"}
FORMS: dict[str, Any] = {  # how a picture is brought -> the sample, by its number
    "a column of paths": lambda at: {"images": [f"{at}.png"], "messages": chat_of("What?", "A.")},
    "one path": lambda at: {"image": f"{at}.png", "prompt": "What?", "completion": "A."},
    "base64": lambda at: {
        "images": [base64.b64encode(png(at)).decode()],
        "messages": chat_of([IMAGE, ASKED], "A."),
    },
    "a data URL": lambda at: {
        "messages": chat_of(
            [
                {
                    "type": "image_url",
                    "image_url": {
                        "url": "data:image/png;base64," + base64.b64encode(png(at)).decode()
                    },
                },
                ASKED,
            ],
            "A.",
        )
    },
    "a part with a path": lambda at: {
        "messages": chat_of([{**IMAGE, "image": f"{at}.png"}, ASKED], "A.")
    },
    "an object": lambda at: {"images": {"path": f"{at}.png"}, "question": "What?", "answer": "A."},
    "a word": lambda at: {
        "images": [f"{at}.png"],
        "conversations": [
            {"from": "human", "value": "<image>What?"},
            {"from": "gpt", "value": "A."},
        ],
    },
}


def test_a_picture_is_the_same_in_every_form_of_samples(folder_of, tmp_path):
    """Seven forms of JSON lines, an Image column in Parquet and in a folder of `save_to_disk`: the
    batches are equal. Twin: a place behind the question is another row."""
    base = folder_of("llava")
    for at in range(3):
        picture(at).save(tmp_path / f"{at}.png")
    plain = read(save_rows(tmp_path, list(map(FORMS["a column of paths"], range(3)))), base)
    wanted = plain.batch([0, 1, 2])
    for form in FORMS.values():
        found = read(save_rows(tmp_path, list(map(form, range(3)))), base)
        assert equal(found.batch([0, 1, 2]), wanted)
    stored = datasets.Dataset.from_list(
        [
            {"images": [{"bytes": png(at), "path": None}], "messages": chat_of("What?", "A.")}
            for at in range(3)
        ]
    ).cast_column("images", datasets.List(datasets.Image()))
    stored.to_parquet(tmp_path / "data.parquet")
    stored.save_to_disk(tmp_path / "stored")
    for name in ("data.parquet", "stored"):
        assert equal(read(tmp_path / name, base).batch([0, 1, 2]), wanted)
    behind = [
        {"images": [f"{at}.png"], "messages": chat_of([ASKED, IMAGE], "A.")} for at in range(3)
    ]
    found = read(save_rows(tmp_path, behind), base).batch([0, 1, 2])
    assert not torch.equal(found["input_ids"], wanted["input_ids"])


MARKED = TEMPLATE.replace(
    "<|{{ m.role }}|>",
    "<|{{ m.role }}|>{%% if m.role == 'assistant' %%}{%% generation %%}{{ m.content[0].text }}"
    "<|end|>{%% endgeneration %%}{%% else %%}",
).replace("<|end|>{%% endfor %%}{%% if add", "<|end|>{%% endif %%}{%% endfor %%}{%% if add")


def test_rows_are_those_of_trls_trainer(marks, folder_of, tmp_path):
    """Conversations by a template that marks answers, answers alone, and texts, against the batches
    of TRL's own SFTTrainer. Twin: answers that are marked and those that are not differ."""
    base = folder_of("llava")
    marked = save_pictured("llava", tmp_path / "marked")
    (marked / "chat_template.jinja").write_text(MARKED % "<image>")
    names = save_pictures(tmp_path, 3)
    two = [*chat_of("What?", "A."), *chat_of("Sure?", "Yes.")]
    pictures = [picture(at, width=30 + 8 * at) for at in range(3)]
    cases = {
        "messages": (marked, {"messages": two}, {"assistant_only_loss": True}),
        "prompt": (base, {"prompt": "What?", "completion": "A."}, {}),
        "text": (base, {"text": "<image>What? A."}, {}),
    }
    made = {}
    for kind, (folder, row, how) in cases.items():
        found = read(save_rows(tmp_path, [row | {"images": [name]} for name in names]), folder)
        chat = {"prompt": two[:1], "completion": two[1:2]} if kind == "prompt" else row
        rows = [{**chat, "images": [shown]} for shown in pictures]
        theirs = trainer_of(folder, rows, tmp_path, **how).data_collator(rows)
        made[kind] = found.batch([0, 1, 2])
        assert equal(made[kind], dict(theirs)), kind
        assert (
            found.first(transformers.AutoTokenizer.from_pretrained(folder))[0][0].count("<image>")
            == 1
        )
    assert (made["messages"]["labels"] != -100).sum() > (made["prompt"]["labels"] != -100).sum()


def trainer_of(folder: Path, rows: list, out: Path, **how: Any) -> Any:
    given = {
        "max_length": LENGTH,
        "per_device_train_batch_size": 1,
        "max_steps": 2,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    data = datasets.Dataset.from_dict(
        columns,
        features=None,
    ).cast_column("images", datasets.List(datasets.Image()))
    return sft.SFTTrainer(
        model=transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype="float32"),
        args=sft.SFTConfig(str(out / "theirs"), **given | how),
        train_dataset=data,
        processing_class=transformers.AutoProcessor.from_pretrained(folder),
    )


def test_a_job_has_the_losses_of_trls_trainer(marks, folder_of, train, tmp_path):
    """Steps of one conversation with two pictures, of which the answers are learned. TRL sums the
    loss of a chunk of tokens in its own order, which the last bits show after a step. Twin: the
    losses differ from one another."""
    base = save_pictured("gemma3", tmp_path / "marked")
    (base / "chat_template.jinja").write_text(MARKED % "<boi>")
    names = save_pictures(tmp_path, 2)
    said = []
    for answer in ("A.", "Yes."):
        said += chat_of([IMAGE | {"text": None}, ASKED], [{"type": "text", "text": answer}])
    row = {"messages": said, "images": names}
    save_rows(tmp_path, [row, row])
    words = ("--steps", STEPS, "--lr", LR, "--warmup-steps", 0, "--batch-size", 1)
    status, out, err = train(base, *words, "--json")
    assert status == 0 and "each conversation is a row" in err, err
    shown = [row | {"images": [picture(at, width=30 + 8 * at) for at in range(2)]}]
    theirs = trainer_of(
        base,
        shown,
        tmp_path,
        assistant_only_loss=True,
        max_steps=STEPS,
    )
    theirs.optimizer, theirs.lr_scheduler = stepping(theirs.model)
    theirs.train()
    losses = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    mine = json.loads(out.splitlines()[-1])["losses"]
    assert len(set(mine)) == STEPS and mine[0] == losses[0]
    assert mine == pytest.approx(losses, rel=1e-6)


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Samples with one picture, with two, and with none."""
    names = save_pictures(tmp_path, 6)
    rows = [{"messages": chat_of("What?", f"N{at}."), "images": [names[at]]} for at in range(6)]
    rows[1] = {"messages": chat_of("<image>a<image>b", "Two."), "images": names[:2]}
    rows[2]["images"] = []
    return save_rows(tmp_path, rows)


def test_a_resumed_job_of_pictures_has_the_bits_of_an_uninterrupted_one(
    mixed, folder_of, train, tmp_path, monkeypatch
):
    """SIGTERM in the second of four steps, with weights and optimizer on NVMe. Samples without a
    picture are among them. Twin: another picture of the same name is other data."""
    base, words = folder_of("llava"), ("--batch-size", 2, "--warmup-steps", 0, "--lr", LR)
    words += ("--sample-bytes", 0, "--json", "--steps", 4)
    status, _, err = train(base, *words, "--out", "whole", home="nvme")
    assert status == 0, err
    real = job.train_step

    def step(running: Any, index: int) -> float:
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(running, index)

    words += ("--checkpoint", "kept")
    with monkeypatch.context() as patch:
        patch.setattr(job, "train_step", step)
        assert train(base, *words, home="nvme")[0] == 128 + signal.SIGTERM
    shown = (tmp_path / "pics" / "0.png").read_bytes()
    picture(9).save(tmp_path / "pics" / "0.png")
    status, _, err = train(base, *words, "--resume", home="nvme")
    assert status == 2 and "data" in err
    (tmp_path / "pics" / "0.png").write_bytes(shown)
    status, out, err = train(base, *words, "--resume", "--out", "again", home="nvme")
    assert status == 0 and json.loads(out.splitlines()[-1])["first_step"] == 2, err
    assert equal(tensors(tmp_path / "whole"), tensors(tmp_path / "again"))


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_from_two_micro_batches(mixed, folder_of, train, tmp_path):
    """Rows with a picture and rows without one: the same losses, but for the order of sums."""
    base = folder_of("llava")
    words = ["--batch-size", "1", "--steps", "4", "--lr", str(LR), "--warmup-steps", "0", "--json"]
    status, out, err = train(base, *words, "--accumulate", 2)
    assert status == 0, err
    found = read(mixed, base)
    both = [found.rows.has_pictures(at) for at in range(found.train_count)]
    assert True in both and False in both
    words += ["--model", str(base), "--dtype", "fp32", "--params", "host", "--optimizer", "host"]
    words += ["--data", "data.jsonl", "--sequence-length", str(LENGTH)]
    done = run_torchrun(2, ["-m", "infinity", "train", *words])
    assert done.returncode == 0, done.stderr
    alone, together = (json.loads(each.splitlines()[-1])["losses"] for each in (out, done.stdout))
    assert together == pytest.approx(alone, rel=1e-4) and len(set(together)) == 4


def test_batches_that_a_model_cannot_take_are_refused(marks, folder_of, train, tmp_path):
    """Of mllama TRL makes no mask for answers. Nothing is written. Twin: marked by the template,
    and in batches where one sample has no picture."""
    base = Path(shutil.copytree(folder_of("mllama"), tmp_path / "base"))
    names = save_pictures(tmp_path, 4)
    rows = [{"messages": chat_of("What?", "A."), "images": [name]} for name in names]
    rows[1]["images"] = []
    save_rows(tmp_path, rows)
    words = ("--steps", 1, "--batch-size", 2, "--out", "out")
    status, _, err = train(base, *words)
    assert status == 2 and "the model cannot take" in err and "{% generation %}" in err
    assert not (tmp_path / "out").exists()
    (base / "chat_template.jinja").write_text(MARKED % "<|image|>")
    status, _, err = train(base, *words, "--sample-bytes", 0)
    assert status == 0, err


def test_adapters_reach_what_pictures_reach(mixed, folder_of, train, tmp_path):
    """Adapters of linear layers for pictures and text are saved, and none of another part. Twin:
    text alone gives those for pictures none."""
    base = folder_of("llava")
    words = ("--lora", 2, "--steps", 2, "--batch-size", 2, "--lr", 0.1, "--sample-bytes", 0)
    status, _, err = train(base, *words, "--out", "tuned")
    assert status == 0, err
    saved = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    moved = {name for name, value in saved.items() if "lora_B" in name and value.any()}
    assert all(any(part in name for name in moved) for part in ("projector", "language_model"))
    save_rows(tmp_path, [{"messages": chat_of("What?", "A.")}] * 3)
    status, _, err = train(base, *words, "--out", "text")
    assert status == 0, err
    text = load_file(tmp_path / "text" / "adapter_model.safetensors")
    assert text and not any("projector" in name or "vision" in name for name in text)


def test_the_held_out_loss_of_a_job_is_measured_again(mixed, folder_of, train, tmp_path, capsys):
    """`infinity eval` of the saved folder and the same file has the loss that the job reported, to
    the bit, and `infinity generate` continues text. Twin: the folder before it was trained."""
    base = folder_of("gemma3")
    words = ("--steps", 2, "--batch-size", 2, "--lr", LR, "--out", "tuned", "--json")
    status, out, err = train(base, *words, "--sample-bytes", 4)
    assert status == 0, err
    told = json.loads(out.splitlines()[-1])
    losses = []
    for folder in ("tuned", str(base)):
        measured = ["eval", folder, "--data", "data.jsonl", "--held-out", "--json"]
        measured += ["--batch-size", "2", "--sequence-length", str(LENGTH), "--dtype", "fp32"]
        assert infinity.tools.cli.main(measured) == 0
        losses.append(json.loads(capsys.readouterr().out)["held_out_loss"])
    assert losses == [told["held_out_loss_after"], told["held_out_loss_before"]]
    assert losses[0] != losses[1] and "<boi>" in told["prompt"]
    assert infinity.tools.cli.main(["generate", "tuned", "--prompt", "hi", "--raw"]) == 0


def spoiled(name: str) -> Any:
    """Returns samples of which the second cannot be used."""
    good = {"images": ["0.png"], "messages": chat_of("What?", "A.")}
    bad: dict[str, dict[str, Any]] = {
        "missing": {"images": ["7.png"]},
        "damaged": {"images": ["damaged.png"]},
        "no picture": {"images": ["data.jsonl"]},
        "on the network": {"images": ["https://example.com/0.png"]},
        "no base64": {"images": ["data:image/png;base64,###"]},
        "a number": {"images": [{"bytes": None, "path": None, "url": 7}]},
        "of 16 bits": {"images": ["deep.png"]},
        "of floats": {"images": ["deep.tiff"]},
        "two for one place": {
            "images": ["0.png", "1.png"],
            "messages": chat_of([IMAGE, ASKED], "A."),
        },
        "one for two words": {"messages": chat_of("<image><image>What?", "A.")},
        "none for a place": {"images": [], "messages": chat_of([IMAGE, ASKED], "A.")},
        "none for a word": {"images": [], "messages": chat_of("<image>What?", "A.")},
        "in an answer": {
            "messages": [*chat_of("What?", "A.")[:1], {"role": "assistant", "content": [IMAGE]}]
        },
        "a video": {"messages": chat_of([{"type": "video"}, ASKED], "A.")},
        "of no question": {"messages": [{"role": "system", "content": "a"}, chat_of("", "A.")[1]]},
    }
    return [good, good | bad[name], good]


REFUSED = {
    "missing": "no picture '7.png' in",
    "damaged": "damaged.png cannot be read",
    "no picture": "data.jsonl cannot be read",
    "on the network": "download it",
    "no base64": "is no base64",
    "a number": "of type int",
    "of 16 bits": "a picture of mode I;16",
    "of floats": "a picture of mode F",
    "two for one place": "2 pictures in images and 1 place",
    "one for two words": "1 picture in images and 2 places",
    "none for a place": "0 pictures in images and 1 place",
    "none for a word": "has <image>, the place of a picture",
    "in an answer": "role assistant has a picture",
    "a video": "part of type video",
    "of no question": "no question that they belong to",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sample_that_cannot_be_used_is_refused_by_its_number(name, folder_of, train, tmp_path):
    """Before the model is built, with the way out; nothing is written. Twin: the other samples are
    read."""
    base = folder_of("llava")
    for at in range(2):
        picture(at).save(tmp_path / f"{at}.png")
    (tmp_path / "damaged.png").write_bytes(png(0)[:200])
    PIL.Image.new("I;16", (8, 8)).save(tmp_path / "deep.png")
    PIL.Image.new("F", (8, 8)).save(tmp_path / "deep.tiff")
    rows = spoiled(name)
    save_rows(tmp_path, rows)
    status, _, err = train(base, "--steps", 1, "--out", "out")
    assert status == 2 and "sample 2: " in err and REFUSED[name] in err
    assert any(way in err for way in ("emove", "eplace", "Give", "give", "Write"))
    assert not (tmp_path / "out").exists()
    assert len(read(save_rows(tmp_path, rows[::2]), base).rows) == 2


def test_pictures_of_files_in_several_folders_are_looked_for_in_that_of_data(folder_of, tmp_path):
    """A name may stand for another picture in each folder. Twins: paths from --data are read, and
    a missing one is refused."""
    base = folder_of("llava")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        picture(1).save(tmp_path / name / "x.png")
        for path, read_as in (("x.png", False), (f"{name}/x.png", True)):
            rows = [{"images": [path], "messages": chat_of("What?", "A.")}] * 2
            (tmp_path / name / f"{read_as}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="no picture 'x.png' in"):
        read(tmp_path, base)
    for name in ("a", "b"):
        (tmp_path / name / "False.jsonl").unlink()
    assert len(read(tmp_path, base).rows) == 4


def test_a_picture_of_a_later_question_is_in_its_row_alone(folder_of, tmp_path):
    """Rows of one answer each, the first without a picture. All rows of a sample are held out
    together. Twin: the picture in the first question is in both rows."""
    base = folder_of("llava")
    picture(0).save(tmp_path / "0.png")
    turns = [*chat_of("Hi", "Hello."), *chat_of("<image>What?", "A cat.")]
    later = {"images": ["0.png"], "messages": turns}
    found = read(save_rows(tmp_path, [later] * 3), base)
    counts = [len(found.rows[at]["images"]) for at in range(len(found.rows))]
    assert counts == [0, 1] * 3 and found.held_out_count == 2
    first = {"images": ["0.png"], "messages": [*chat_of("<image>Hi", "A."), *chat_of("And?", "B.")]}
    found = read(save_rows(tmp_path, [first] * 3), base)
    assert [len(found.rows[at]["images"]) for at in range(len(found.rows))] == [1] * 6


@pytest.mark.parametrize("column", ["image_path", "image_urls", "picture"])
def test_a_column_of_pictures_by_another_name_is_refused(column, folder_of, train, tmp_path):
    """Else answers about pictures would be learned without them. Twin: an empty one is not."""
    base = folder_of("llava")
    row = {"messages": chat_of("What?", "A.")}
    save_rows(tmp_path, [row | {column: "0.png"}] * 2)
    status, _, err = train(base, "--steps", 1)
    assert status == 2 and column in err and "Rename" in err
    save_rows(tmp_path, [row | {column: None}] * 4)
    assert train(base, "--steps", 1, "--eval-batches", 1, "--batch-size", 1)[0] == 0


def test_a_length_that_cuts_pictures_is_refused_with_one_that_does_not(folder_of, tmp_path):
    """The picture behind a long question: with less than what is told it is cut, with that not.
    Twin: text behind a picture is cut."""
    base = folder_of("llava")
    picture().save(tmp_path / "0.png")
    parts = [{"type": "text", "text": "a" * 40}, IMAGE]
    rows = [{"images": ["0.png"], "messages": chat_of(parts, "b" * 40)}] * 3
    path = save_rows(tmp_path, rows)
    with pytest.raises(
        ConfigError, match=r"sample 1: --sequence-length 43 cuts .* 2 further"
    ) as no:
        read(path, base, 43)
    needed = int(str(no.value).split("--sequence-length ")[2].split()[0])
    with pytest.raises(ConfigError, match="leaves 0; 3 nothing to learn within"):
        read(path, base, needed - 1)
    assert read(path, base, needed).batch([0])["input_ids"].shape == (1, needed)


def test_pictures_for_a_model_that_takes_none_are_refused(folder_of, train, tmp_path):
    """A model of text, a folder without a processor, --pack, --method, and a template that leaves
    pictures out. Twin: empty columns are text."""
    from chatty import save_base

    base, text = folder_of("llava"), save_base(tmp_path / "text", positions=LENGTH)
    names = save_pictures(tmp_path, 3)
    rows = [{"messages": chat_of("What?", "A."), "images": [name]} for name in names]
    save_rows(tmp_path, rows)
    bare, blind = (save_pictured("llava", tmp_path / name) for name in ("bare", "blind"))
    for file in bare.glob("*processor*.json"):
        file.unlink()
    (blind / "chat_template.jinja").write_text(TEMPLATE % "")
    words = ("--steps", 1, "--out", "out", "--batch-size", 1)
    for model, more, said in (
        (text, (), "--model a folder of a model of images"),
        (bare, (), "has no processor"),
        (blind, (), "sample 1: LlavaProcessor cannot take it"),
        (base, ("--pack",), "--pack is for text"),
        (base, ("--method", "dpo"), "images"),
    ):
        status, _, err = train(model, *words, *more)
        assert status == 2 and said.lower() in err.lower(), err
        assert not (tmp_path / "out").exists()
    save_rows(tmp_path, [row | {"images": []} for row in rows])
    status, out, _ = train(base, *words, "--sample-bytes", 0)
    assert status == 0 and "these stay as they are: model.vision_tower" in out
    before, after = tensors(base), tensors(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("vision" in name for name in changed)
