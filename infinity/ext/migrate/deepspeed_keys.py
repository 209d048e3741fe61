"""DeepSpeed's keys: a row for each that DeepSpeed has or had (up to 0.19.8), and its fate here.

mapped       it sets a field of Config
not needed   nothing here needs it, or the loop decides it: training is unchanged
refused      if it is on: it changes the training, and is not supported. If off, it has no effect

A key without a row is unknown: misspelt, or newer than this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

VERSION = "0.19.8"
MAPPED, NOT_NEEDED, REFUSED = "mapped", "not needed", "refused"


@dataclass(frozen=True)
class Key:
    """One key. ``why``: the field it maps to, or the reason for its fate. ``off``: further values
    that switch it off. ``removed``: only older versions of DeepSpeed have it."""

    name: str
    fate: str
    why: str = ""
    off: tuple[Any, ...] = ()
    removed: bool = False


BUFFERS = "buffers follow from the budgets"
BUCKETS = "a unit is what moves and is averaged at once: `units`"
LOOP = "the loop decides it"
LOGS = "it shows something, and trains nothing"
RANKS = "the mesh that wrap_model gets says it"
MOQ = "it changes what is trained, by quantizing it"

ZERO = (
    Key(
        "stage",
        MAPPED,
        "`shard`: 1 `optimizer`, 2 `gradients`, 3 `parameters`; 0 leaves the default",
    ),
    Key("offload_param", MAPPED, "`params` and `nvme_paths`"),
    Key("offload_optimizer", MAPPED, "`optimizer` and `nvme_paths`"),
    Key("cpu_offload", MAPPED, "`optimizer='host'`"),
    Key("cpu_offload_param", MAPPED, "`params='host'`"),
    Key(
        "zero_hpz_partition_size",
        MAPPED,
        "above 1: `shard_in_node=True`, over the ranks of a machine",
    ),
    Key("zero_quantized_weights", MAPPED, "`compress_gathers=True`"),
    Key("zero_quantized_gradients", NOT_NEEDED, "gradients are averaged exactly"),
    Key("zero_quantized_nontrainable_weights", REFUSED, "weights at rest are kept as they are"),
    Key("zeropp_loco_param", NOT_NEEDED, "gradients are averaged exactly", removed=True),
    Key(
        "zenflow",
        REFUSED,
        "its updates are late ones: here every step has the result of the whole gradient",
    ),
    Key(
        "mics_shard_size",
        REFUSED,
        "give wrap_model a mesh with the axes dp_replicate and dp_shard",
        removed=True,
    ),
    Key("mics_hierarchical_params_gather", NOT_NEEDED, "see `shard_in_node`", removed=True),
    Key("contiguous_gradients", NOT_NEEDED, BUCKETS),
    Key("reduce_scatter", NOT_NEEDED, "always so"),
    Key("reduce_bucket_size", NOT_NEEDED, BUCKETS),
    Key("use_multi_rank_bucket_allreduce", NOT_NEEDED, BUCKETS),
    Key("allgather_partitions", NOT_NEEDED, BUCKETS),
    Key("allgather_bucket_size", NOT_NEEDED, BUCKETS),
    Key("overlap_comm", NOT_NEEDED, "always so"),
    Key("load_from_fp32_weights", NOT_NEEDED, "masters come from the values the model had"),
    Key("elastic_checkpoint", NOT_NEEDED, "checkpoints load at any number of ranks"),
    Key(
        "sub_group_size",
        NOT_NEEDED,
        "the optimizer steps chunks of the slots that the budgets leave room for",
    ),
    Key("cpu_offload_use_pin_memory", NOT_NEEDED, "always so, with a GPU"),
    Key("stage3_prefetch_bucket_size", NOT_NEEDED, "as far ahead as the budgets leave room for"),
    Key("stage3_param_persistence_threshold", NOT_NEEDED, "small parameters are part of a unit"),
    Key(
        "stage3_model_persistence_threshold",
        NOT_NEEDED,
        "what stays on the device follows from `device_memory`",
    ),
    Key(
        "stage3_max_live_parameters",
        NOT_NEEDED,
        "`device_memory` bounds what is gathered, in bytes",
    ),
    Key("stage3_max_reuse_distance", NOT_NEEDED, "the order of use is known, and decides"),
    Key(
        "stage3_gather_16bit_weights_on_model_save",
        NOT_NEEDED,
        "`save_pretrained` and `state_dict()` have all weights",
    ),
    Key(
        "stage3_gather_fp16_weights_on_model_save",
        NOT_NEEDED,
        "`save_pretrained` and `state_dict()` have all weights",
    ),
    Key("stage3_module_granularity_threshold", NOT_NEEDED, BUCKETS),
    Key("stage3_use_all_reduce_for_fetch_params", NOT_NEEDED, BUCKETS),
    Key("stage3_allgather_sequential", NOT_NEEDED, BUCKETS),
    Key(
        "stage3_partition_stream_chunk_size",
        NOT_NEEDED,
        "a model on meta is filled as its file is read",
    ),
    Key("compute_grad_norm", NOT_NEEDED, "a norm is computed where something asks for it"),
    Key("parameter_alignment", NOT_NEEDED, "arrays are aligned"),
    Key(
        "ignore_unused_parameters",
        NOT_NEEDED,
        "always so: a parameter without a gradient is not stepped",
    ),
    Key("legacy_stage1", NOT_NEEDED, "there is one stage 1", removed=True),
    Key("round_robin_gradients", NOT_NEEDED, BUCKETS),
    Key("memory_efficient_linear", NOT_NEEDED, "the model's own layers run"),
    Key("pipeline_loading_checkpoint", NOT_NEEDED, "checkpoints are streamed"),
    Key(
        "override_module_apply",
        NOT_NEEDED,
        "build the model on meta, and `apply` before wrap_model",
    ),
    Key("log_trace_cache_warnings", NOT_NEEDED, LOGS),
    Key("enable_sanity_checks", NOT_NEEDED, "always so"),
    Key(
        "save_muon_momentum_buffer_in_memory",
        NOT_NEEDED,
        "`optimizer` chooses the home of momentum, too",
    ),
    Key("leaf_module", NOT_NEEDED, "name the classes that move as one: `units`"),
)
# DeepSpeed accepts these keys with and without the prefix.
PREFIX = "stage3_"

OFFLOAD = (
    Key("device", MAPPED, "`cpu` is `host`, `none` is `device`"),
    Key("nvme_path", MAPPED, "as one of `nvme_paths`"),
    Key("buffer_count", NOT_NEEDED, BUFFERS),
    Key("buffer_size", NOT_NEEDED, BUFFERS),
    Key("max_in_cpu", MAPPED, "of parameters on NVMe: `weights_on_host`, in elements"),
    Key("pin_memory", NOT_NEEDED, "always so, with a GPU"),
    Key("pipeline_read", NOT_NEEDED, "always so"),
    Key("pipeline_write", NOT_NEEDED, "always so"),
    Key("fast_init", NOT_NEEDED, "state is written as it is made"),
    Key("ratio", NOT_NEEDED, "`optimizer='auto'` shares the state out over the tiers"),
    Key("super_offload", NOT_NEEDED, "updates run under the next forward, with the same bits"),
    Key(
        "convert_grad_on_cpu",
        NOT_NEEDED,
        "`grad_dtype` says what gradients are summed in",
        removed=True,
    ),
    Key("cpuadam_cores_perc", NOT_NEEDED, "`update_threads`"),
)

TOP = (
    Key("zero_optimization", MAPPED, "see its keys"),
    Key("bf16", MAPPED, "`enabled`: `param_dtype='bf16'`"),
    Key("bfloat16", MAPPED, "`bf16` by its old name"),
    Key("fp16", MAPPED, "`enabled`: `param_dtype='fp16'`; scale the loss with torch's GradScaler"),
    Key(
        "gradient_clipping",
        MAPPED,
        '`max_grad_norm`; "auto" is refused: it is a number that the Trainer has',
    ),
    Key("data_types", MAPPED, "`grad_accum_dtype`: `grad_dtype`"),
    Key(
        "optimizer",
        MAPPED,
        "`expects_optimizer`: wrap_model refuses another class or other hyperparameters than its"
        " `type` and `params` say",
    ),
    Key(
        "scheduler",
        REFUSED,
        'make one of torch\'s over the optimizer that wrap_model returns; with every value "auto"'
        " it is the loop's",
    ),
    Key("train_batch_size", NOT_NEEDED, LOOP),
    Key("train_micro_batch_size_per_gpu", NOT_NEEDED, LOOP),
    Key("gradient_accumulation_steps", NOT_NEEDED, LOOP),
    Key(
        "activation_checkpointing",
        NOT_NEEDED,
        "torch's and transformers' checkpointing works; `activations='host'` or `'nvme'` sends what"
        " is saved",
    ),
    Key("aio", NOT_NEEDED, "the disk is measured"),
    Key("torch_autocast", REFUSED, "use torch.autocast in the loop, or `param_dtype`"),
    Key("amp", REFUSED, "use torch.autocast and GradScaler, or `param_dtype`", removed=True),
    Key("tensor_parallel", REFUSED, "cut the model with infinity.parallel.tensor_parallel"),
    Key("expert_parallel", REFUSED, "cut the model with infinity.parallel.expert_parallel"),
    Key(
        "sequence_parallel_size",
        REFUSED,
        "divide its sequences with infinity.parallel.sequence_parallel",
    ),
    Key("data_parallel_size", NOT_NEEDED, RANKS),
    Key("use_data_before_expert_parallelism", NOT_NEEDED, RANKS),
    Key("pipeline", NOT_NEEDED, "cut the model with infinity.parallel.pipeline"),
    Key("sparse_attention", REFUSED, "it replaces the model's attention", removed=True),
    Key("compression_training", REFUSED, "it changes what is trained", removed=True),
    Key("progressive_layer_drop", REFUSED, "it changes what is trained", removed=True),
    Key(
        "curriculum_learning",
        REFUSED,
        "it changes what is trained: order the data in the loader",
        removed=True,
    ),
    Key("quantize_training", REFUSED, MOQ, removed=True),
    Key("eigenvalue", REFUSED, MOQ, removed=True),
    Key("weight_quantization", REFUSED, MOQ),
    Key(
        "hybrid_engine",
        REFUSED,
        "its generation is not here: model.generate works on what wrap_model returns",
    ),
    Key("data_efficiency", REFUSED, "it changes what is trained: order the data in the loader"),
    Key("prescale_gradients", NOT_NEEDED, "gradients are averaged as DDP does"),
    Key("gradient_predivide_factor", NOT_NEEDED, "gradients are averaged as DDP does"),
    Key(
        "gradient_allreduce_op",
        REFUSED,
        "gradients are averaged, not added up: scale the loss",
        off=("mean",),
    ),
    Key(
        "sparse_gradients",
        NOT_NEEDED,
        "an embedding with sparse=True trains in one process, its table where it is",
        removed=True,
    ),
    Key("communication_data_type", NOT_NEEDED, "bytes travel in the dtype they have"),
    Key("seq_parallel_communication_data_type", NOT_NEEDED, "bytes travel in the dtype they have"),
    Key(
        "zero_allow_untested_optimizer", NOT_NEEDED, "an optimizer that is not supported is refused"
    ),
    Key(
        "zero_force_ds_cpu_optimizer",
        NOT_NEEDED,
        "torch's optimizers are stepped by the engine's kernels, at any home",
    ),
    Key("steps_per_print", NOT_NEEDED, LOGS),
    Key("wall_clock_breakdown", NOT_NEEDED, LOGS),
    Key("dump_state", NOT_NEEDED, LOGS),
    Key("memory_breakdown", NOT_NEEDED, LOGS),
    Key("flops_profiler", NOT_NEEDED, LOGS),
    Key("comms_logger", NOT_NEEDED, LOGS),
    Key("timers", NOT_NEEDED, LOGS),
    Key("log_level", NOT_NEEDED, LOGS),
    Key("tensorboard", NOT_NEEDED, "`infinity train --tensorboard`"),
    Key("wandb", NOT_NEEDED, "`infinity train --log wandb`"),
    Key("csv_monitor", NOT_NEEDED, LOOP),
    Key("comet", NOT_NEEDED, LOOP),
    Key("checkpoint", NOT_NEEDED, "`save_checkpoint` and `load_checkpoint`"),
    Key("elasticity", NOT_NEEDED, "checkpoints load at any number of ranks", removed=True),
    Key("autotuning", NOT_NEEDED, "`infinity plan`"),
    Key("compile", NOT_NEEDED, "Config(compile=True) compiles blocks"),
    Key(
        "graph_harvesting",
        NOT_NEEDED,
        "Config(compile=True) compiles blocks",
        removed=True,
    ),
    Key("dataloader_drop_last", NOT_NEEDED, LOOP),
    Key("disable_allgather", NOT_NEEDED, BUCKETS),
    Key("disable_python_gc", NOT_NEEDED, LOOP),
    Key("managed_gradient_accumulation", NOT_NEEDED, LOOP),
    Key("vocabulary_size", NOT_NEEDED, LOGS),
    Key("allgather_size", NOT_NEEDED, BUCKETS, removed=True),
    Key("nebula", NOT_NEEDED, "`save_checkpoint` and `load_checkpoint`", removed=True),
    Key("datastates_ckpt", NOT_NEEDED, "`save_checkpoint` and `load_checkpoint`"),
)

BF16 = (
    Key("enabled", MAPPED, "`param_dtype='bf16'`"),
    Key("bf16_master_weights_and_grads", MAPPED, "`master='none'`, `grad_dtype='bf16'`"),
    Key("bf16_optimizer_states", MAPPED, "`moments='bf16'`"),
    Key("immediate_grad_update", NOT_NEEDED, "gradients are added as they land"),
    Key(
        "check_grad_overflow", NOT_NEEDED, "a step is taken as torch takes it: skip it in the loop"
    ),
    Key(
        "check_overflow",
        NOT_NEEDED,
        "a step is taken as torch takes it: skip it in the loop",
        removed=True,
    ),
    Key("ddp_bf16", NOT_NEEDED, "gradients are summed in `grad_dtype`", removed=True),
)
SCALER = "scale the loss with torch's GradScaler, in the loop"
FP16 = (
    Key("enabled", MAPPED, "`param_dtype='fp16'`"),
    Key("fp16_master_weights_and_grads", MAPPED, "`master='none'`, `grad_dtype='fp16'`"),
    Key("auto_cast", REFUSED, "cast what the model gets, in the loop"),
    Key("loss_scale", NOT_NEEDED, SCALER),
    Key("initial_scale_power", NOT_NEEDED, SCALER),
    Key("loss_scale_window", NOT_NEEDED, SCALER),
    Key("hysteresis", NOT_NEEDED, SCALER),
    Key("consecutive_hysteresis", NOT_NEEDED, SCALER),
    Key("min_loss_scale", NOT_NEEDED, SCALER),
)
DATA_TYPES = (
    Key("grad_accum_dtype", MAPPED, "`grad_dtype`"),
    Key("param_dtype", MAPPED, "`param_dtype`"),
    Key("buffer_dtype", REFUSED, "buffers keep their dtypes: convert them before wrap_model"),
    Key(
        "keep_in_fp32_modules",
        REFUSED,
        "convert the model before wrap_model, and leave `param_dtype` out",
    ),
)
OPTIMIZER = (
    Key(
        "type",
        MAPPED,
        "`AdamW`, `Adam` (which is AdamW there, unless `adam_w_mode` is false), `SGD`, `Lion`",
    ),
    Key("params", MAPPED, 'its hyperparameters; those that are "auto" are left to the loop'),
    Key("legacy_fusion", NOT_NEEDED, "the engine's kernels step"),
)

SECTIONS = {
    "": TOP,
    "bf16.": BF16,
    "bfloat16.": BF16,
    "fp16.": FP16,
    "data_types.": DATA_TYPES,
    "optimizer.": OPTIMIZER,
    "zero_optimization.": ZERO,
    "zero_optimization.offload_param.": OFFLOAD,
    "zero_optimization.offload_optimizer.": OFFLOAD,
}


def find(section: str, name: str) -> Key | None:
    """Finds the row of a key; None if it is unknown."""
    rows = {key.name: key for key in SECTIONS[section]}
    return rows.get(name) or (rows.get(PREFIX + name) if section == "zero_optimization." else None)


def table() -> Iterator[str]:
    """Yields the lines of docs/migration.md's table."""
    yield "| key | what becomes of it | |"
    yield "|---|---|---|"
    parts = {
        "zero_optimization.offload_*.": OFFLOAD,
        "bf16.": BF16,
        "fp16.": FP16,
        "data_types.": DATA_TYPES,
        "optimizer.": OPTIMIZER,
    }
    for section, keys in ({"": TOP, "zero_optimization.": ZERO} | parts).items():
        for key in keys:
            removed = f" (DeepSpeed {VERSION} has it no more)" if key.removed else ""
            yield f"| `{section}{key.name}` | {key.fate} | {key.why}{removed} |"
