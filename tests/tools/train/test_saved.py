"""What `infinity train` wrote is compared with the model of its config.json, without values."""

from __future__ import annotations

from pathlib import Path

import multimodal
import pytest
import torch
from safetensors.torch import load_file, save_file

from infinity.errors import CorruptionError
from infinity.tools.train.saved import check_saved, copy_processors

FAULTS = {
    "gone": lambda name, tensors: tensors.pop(name),
    "of another shape": lambda name, tensors: tensors.update({name: tensors[name][:1].clone()}),
    "of integers": lambda name, tensors: tensors.update({name: tensors[name].to(torch.int32)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_is_not_as_described_is_found(fault, tmp_path):
    """Spoils a tensor of a saved folder, of the part for images and of that for text."""
    multimodal.save("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    assert check_saved(tmp_path, None) == len(whole)
    for name in (
        next(name for name in whole if "vision" in name and whole[name].dim() == 2),
        next(name for name in whole if "language" in name and whole[name].dim() == 2),
    ):
        tensors = dict(whole)
        FAULTS[fault](name, tensors)
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(CorruptionError, match="lacks 1 of"):
            check_saved(tmp_path, None)


def test_files_of_a_processor_go_along_and_replace_nothing(tmp_path):
    """Copies them to a folder that has one of them."""
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja"):
        (source / name).write_text("source")
    (source / "model.safetensors").write_text("weights")
    (target / "chat_template.jinja").write_text("own")
    copy_processors(source, target)
    copy_processors(None, target)
    found = {path.name: path.read_text() for path in Path(target).iterdir()}
    assert found == {
        "preprocessor_config.json": "source",
        "processor_config.json": "source",
        "chat_template.jinja": "own",
    }
