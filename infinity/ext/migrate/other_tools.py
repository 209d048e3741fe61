"""Other tools: recognises by its own keys whose configuration a table is.

A tool is known by keys that Infinity has not, wherever they stand beside words that both have
(`optimizer`, `compile`, `device`). DeepSpeed's, Accelerate's and FSDP's tables are translated;
those of the others are refused by the tool's name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from .accelerate import is_accelerate
from .deepspeed import is_deepspeed

ACCELERATE, DEEPSPEED = "Accelerate", "DeepSpeed"
EXPECTED, COMPILE = "expects_optimizer", "compile"  # keys of Infinity whose value may be a table

# What to do with the file of a tool that starts a training of its own.
HOMES = "Infinity's file has the homes and budgets alone"
SCRIPT = f"{HOMES}; model, data and optimizer stay in the script that calls wrap_model"
TRAINER = f"give its settings to transformers.TrainingArguments and InfinityTrainer. {HOMES}"
TABLES = (
    "give the DeepSpeed JSON that it names, or its fsdp_config, alone;"
    " `infinity train` has options for model, data and LoRA"
)
MESH = f"ranks are a mesh of wrap_model. {HOMES}"
DIFFUSION = f"wrap its transformer or UNet in the script. {HOMES}"

# The tool, what to do, and sets of keys of which one set is there whole. "*.key": in any table
# inside; "table.key": in that table. A tool stands before those that share a set with it.
TOOLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("a sweep of Weights & Biases", SCRIPT, ("method parameters",)),
    ("mergekit", "merge with it, and train what it writes", ("merge_method",)),
    ("AutoTrain", TRAINER, ("base_model project_name", "task base_model")),
    ("torchtune", SCRIPT, ("_component_", "*._component_")),
    ("axolotl", TABLES, ("base_model", "sequence_len datasets", "base_model_config")),
    (
        "LLaMA-Factory",
        TABLES,
        (
            "model_name_or_path template",
            "finetuning_type",
            "model_name_or_path stage",
            "template dist_config",
        ),
    ),
    ("ms-swift", TABLES, ("train_type model", "tuner_type model", "swift_version")),
    ("mistral-finetune", SCRIPT, ("model_id_or_path", "run_dir seq_len")),
    ("Unsloth", TRAINER, ("max_seq_length load_in_4bit", "use_gradient_checkpointing")),
    ("a script of diffusers or kohya", DIFFUSION, ("pretrained_model_name_or_path",)),
    ("kohya's sd-scripts", DIFFUSION, ("network_module", "network_dim")),
    ("OneTrainer", DIFFUSION, ("base_model_name", "training_method")),
    ("ai-toolkit", DIFFUSION, ("job config.process",)),
    ("diffusion-pipe", DIFFUSION, ("pipeline_stages", "micro_batch_size_per_gpu")),
    ("verl", MESH, ("actor_rollout_ref",)),
    ("OpenRLHF or slime", MESH, ("pretrain zero_stage", "actor_num_nodes")),
    ("NeMo RL", MESH, ("policy cluster", "grpo policy")),
    ("GPT-NeoX", MESH, ("pipe_parallel_size", "model_parallel_size", "attention_config")),
    ("fairseq", SCRIPT, ("distributed_training", "ddp_backend")),
    (
        "fairscale",
        'sharding is always on; `{"params": "host"}` is its move_params_to_cpu',
        ("flatten_parameters", "move_params_to_cpu", "fp32_reduce_scatter", "bucket_cap_mb"),
    ),
    ("Colossal-AI", MESH, ("booster", "plugin", "gradient_handler", "parallel zero")),
    ("LLM Foundry", SCRIPT, ("train_loader", "device_train_microbatch_size max_seq_len")),
    ("OLMo", SCRIPT, ("device_train_microbatch_size", "global_train_batch_size save_folder")),
    ("Composer", SCRIPT, ("max_duration",)),
    (
        "NeMo",
        MESH,
        (
            "exp_manager",
            "step_scheduler",
            "trainer.accelerator model.optim",
            "trainer.devices name",
        ),
    ),
    (
        "Megatron-LM",
        MESH,
        (
            "tensor_model_parallel_size",
            "*.tensor_model_parallel_size",
            "language_model",
            "num_layers micro_batch_size",
            "micro_batch_size global_batch_size",
        ),
    ),
    ("Megatron Bridge", MESH, ("train.train_iters",)),
    ("nanotron", MESH, ("parallelism tokens", "checkpoints parallelism")),
    ("torchtitan", MESH, ("parallelism training", "job training", "metrics training", "job model")),
    ("MaxText", MESH, ("base_emb_dim", "per_device_batch_size", "dcn_data_parallelism")),
    ("Levanter", MESH, ("trainer.mp", "trainer.train_batch_size")),
    ("Oumi", TRAINER, ("training.trainer_type", "model.model_name data.train")),
    (
        "LitGPT",
        SCRIPT,
        ("checkpoint_dir out_dir", "model_name out_dir", "train.global_batch_size"),
    ),
    (
        "Lightning's command line",
        "give InfinityStrategy to the Trainer",
        ("seed_everything", "*.class_path", "trainer.max_epochs", "trainer.strategy"),
    ),
    (
        "OpenMMLab",
        SCRIPT,
        ("optim_wrapper", "train_cfg", "default_hooks", "optimizer_config lr_config"),
    ),
    ("Detectron2", SCRIPT, ("SOLVER",)),
    ("Ludwig", SCRIPT, ("input_features",)),
    ("ESPnet", SCRIPT, ("optim_conf", "scheduler_conf", "encoder_conf")),
    ("Ray Train", SCRIPT, ("scaling_config", "run_config")),
    ("Determined", SCRIPT, ("entrypoint searcher", "searcher hyperparameters")),
    ("SkyPilot", SCRIPT, ("resources run",)),
    ("vLLM", "it serves a model, and trains none", ("gpu_memory_utilization", "max_model_len")),
    (
        "DeepSpeed's inference",
        'weights stream without an optimizer: wrap_model(model, None, {"params": "host"})',
        (
            "replace_with_kernel_inject",
            "kernel_inject",
            "injection_policy",
            "replace_method",
            "mp_size",
            "dtype tensor_parallel.tp_size",
        ),
    ),
    ("SageMaker's model parallelism", MESH, ("pipeline_parallel_degree", "hybrid_shard_degree")),
    (
        "TRL or transformers' TrainingArguments",
        TRAINER,
        (
            "per_device_train_batch_size",
            "output_dir",
            "num_train_epochs",
            "model_name_or_path",
            "lr_scheduler_type",
            "learning_rate optim",
            "learning_rate gradient_checkpointing",
        ),
    ),
    ("Hydra", SCRIPT, ("_target_", "*._target_", "hydra")),
    (
        "PEFT's adapter",
        "load it with PeftModel.from_pretrained, then wrap",
        ("peft_type", "lora_alpha"),
    ),
    (
        "bitsandbytes",
        'load the model with it, then wrap; or `{"quantize": "nf4"}` packs frozen weights',
        ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "load_in_4bit", "load_in_8bit"),
    ),
    ("a model of diffusers", DIFFUSION, ("_class_name", "_diffusers_version")),
    (
        "a model of transformers",
        "it is the folder's config.json: build the model from it, then wrap",
        ("architectures", "model_type"),
    ),
)


def refuse_others(mapping: Mapping, where: str = "") -> None:
    """Raises ConfigError, with the tool's name and what to do, for a configuration of a tool that
    is not read here."""
    for tool, what_to_do, sets in TOOLS:
        for marks in (each.split() for each in sets):
            if all(_has(mapping, mark) for mark in marks):
                keys = ", ".join(mark.removeprefix("*.") for mark in marks)
                raise ConfigError(
                    f"{where}this is a configuration of {tool} (it has {keys}), and not one of"
                    f" Infinity. What to do: {what_to_do}."
                )


def whose(mapping: Mapping, names: Sequence[str], where: str = "", way_out: str = "") -> str | None:
    """Returns the tool, DEEPSPEED or ACCELERATE, whose configuration ``mapping`` is; None if it has
    only ``names``, the keys of Infinity. Raises ConfigError as :func:`refuse_others`, for keys of
    both, and for an unknown key, with ``way_out`` at the end."""
    refuse_others(mapping, where)
    owner = DEEPSPEED if is_deepspeed(mapping) else None
    owner = owner or (ACCELERATE if is_accelerate(mapping) else None)
    own = [key for key in mapping if key in names]
    tables = [key for key in own if isinstance(mapping[key], Mapping) and key != EXPECTED]
    if owner is not None:
        if mixed := [key for key in own if key not in tables]:
            theirs = next(key for key in mapping if key not in names)
            raise ConfigError(
                f"{where}unknown config key {theirs!r}: it is {owner}'s, and {', '.join(mixed)} is"
                f" Infinity's. Leave {mixed[0]} out, and change what is read: dataclasses.replace("
                f"Config.from_{owner.lower()}(...), {mixed[0]}=...)"
            )
        return owner
    unknown = [key for key in mapping if key not in names]
    for key in unknown:
        inside = mapping[key]
        if isinstance(inside, Mapping) and (is_deepspeed(inside) or is_accelerate(inside)):
            tool = DEEPSPEED if is_deepspeed(inside) else ACCELERATE
            raise ConfigError(
                f"{where}{key} holds a configuration of {tool}, and it is read alone: give the"
                f" table {key} itself, or a file of it{way_out}"
            )
    near = {key: difflib.get_close_matches(str(key), names, n=1, cutoff=0.7) for key in unknown}
    strange = [key for key in unknown if not near[key]]
    if tables not in ([], [COMPILE]) or len(strange) > max(1, len(mapping) // 2):
        raise ConfigError(
            f"{where}{', '.join(map(str, [*tables, *strange][:6]))}: this is not a configuration of"
            f" Infinity, nor one of DeepSpeed, Accelerate or FSDP, which are read. The keys are"
            f" {', '.join(names)}{way_out}"
        )
    for key in unknown:
        hint = (
            f"did you mean {near[key][0]!r}?" if near[key] else f"the keys are {', '.join(names)}"
        )
        raise ConfigError(f"{where}unknown config key {key!r}: {hint}{way_out}")
    return None


def _has(mapping: Mapping, mark: str) -> bool:
    table, _, key = mark.rpartition(".")
    if not table:
        return key in _plain(mapping)
    inside = mapping.values() if table == "*" else [_plain(mapping).get(table)]
    return any(isinstance(each, Mapping) and key in _plain(each) for each in inside)


def _plain(mapping: Mapping) -> dict[str, Any]:
    """Returns a table by its keys as Python would have them: without the dashes of options."""
    return {str(key).lstrip("-").replace("-", "_"): value for key, value in mapping.items()}
