"""What the tests of the integrations share: a model of two layers and width 32, rows of tokens, and
one run of a Trainer.

Words used here: **ours** is a run with the integration, **theirs** the same run of the library
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import differing, seeded
from torch import nn

SEED = 18
VOCABULARY = 67
TIMES = ("runtime", "per_second", "preparation_time", "step_time")  # which no two runs share

pytestmark_quiet = pytest.mark.filterwarnings("ignore")


def sizes(**changes: Any) -> dict[str, Any]:
    named = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    return {**named, **changes}


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**sizes(**{"attention_dropout": 0.1, **changes}))
    return seeded(SEED, lambda: transformers.LlamaForCausalLM(config)).to(dtype)


def rows(count: int, length: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: Path, kind: type | None = None, **changes: Any) -> Any:
    """Arguments with accumulation, clipping, a schedule and weight decay; on the CPU, and quiet."""
    import transformers

    given = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": SEED,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "gradient_accumulation_steps": 2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
    }
    return (kind or transformers.TrainingArguments)(**{**given, **changes})


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    """A configuration with everything on disk."""
    return {"params": "nvme", "optimizer": "nvme", "nvme_paths": [str(folder)], **more}


def logged(trainer: Any) -> list[dict[str, Any]]:
    """A Trainer's log without its times."""
    return [
        {key: value for key, value in entry.items() if not any(time in key for time in TIMES)}
        for entry in trainer.state.log_history
    ]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(ours: Any, theirs: Any) -> None:
    """Compares two runs of a Trainer: everything that was logged, and every bit of the weights."""
    assert logged(ours) == logged(theirs)
    assert differing(values(ours.model), values(theirs.model)) == []


def need_fused_experts(model: nn.Module) -> None:
    """Skips if the experts of ``model`` are modules (transformers 4), or PEFT adapts no parameters
    (before 0.17)."""
    peft = pytest.importorskip("peft")
    fused = any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())
    if not fused or "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip("this transformers or PEFT has no adapters of fused experts")
