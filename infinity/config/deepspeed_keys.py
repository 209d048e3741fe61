"""DeepSpeed's keys: a row for each that DeepSpeed's documents name, with what becomes of it here.

used      its value is taken as it is
mapped    it chooses something here
ignored   nothing here needs it, or the loop decides it: training is what it was
refused   where it is switched on: what it asks for changes what is trained, and is not here
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

USED, MAPPED, IGNORED, REFUSED = "used", "mapped", "ignored", "refused"


@dataclass(frozen=True)
class Key:
    """One key. ``why``: what it becomes, or the reason why not."""

    name: str
    fate: str
    why: str = ""


BUFFERS = "buffers follow from the budgets"
BUCKETS = "a unit is what moves and is averaged at once: `units`"
LOOP = "the loop decides it"

ZERO = (
    Key("stage", MAPPED, "`shard`: 1 `optimizer`, 2 `gradients`, 3 `parameters`; 0 leaves the default"),
    Key("offload_param", MAPPED, "`params` and `nvme_paths`"),
    Key("offload_optimizer", MAPPED, "`optimizer` and `nvme_paths`"),
    Key("cpu_offload", MAPPED, "`optimizer='host'`"),
    Key("cpu_offload_param", MAPPED, "`params='host'`"),
    Key("zero_hpz_partition_size", MAPPED, "above 1: `shard_in_node=True`, over the ranks of a machine"),
    Key("zero_quantized_weights", MAPPED, "`compress_gathers=True`"),
    Key("zero_quantized_gradients", IGNORED, "gradients are averaged exactly"),
    Key("zero_quantized_nontrainable_weights", REFUSED, "weights at rest are kept as they are"),
    Key("zeropp_loco_param", IGNORED, "gradients are averaged exactly"),
    Key("zenflow", REFUSED, "its updates are late ones: here every step has the result of the whole gradient"),
    Key("mics_shard_size", REFUSED, "give wrap_model a mesh with the axes dp_replicate and dp_shard"),
    Key("mics_hierarchical_params_gather", IGNORED, "see `shard_in_node`"),
    Key("contiguous_gradients", IGNORED, BUCKETS),
    Key("reduce_scatter", IGNORED, "always so"),
    Key("reduce_bucket_size", IGNORED, BUCKETS),
    Key("use_multi_rank_bucket_allreduce", IGNORED, BUCKETS),
    Key("allgather_partitions", IGNORED, BUCKETS),
    Key("allgather_bucket_size", IGNORED, BUCKETS),
    Key("overlap_comm", IGNORED, "always so"),
    Key("load_from_fp32_weights", IGNORED, "masters come from the values the model had"),
    Key("elastic_checkpoint", IGNORED, "checkpoints load at any number of ranks"),
    Key("sub_group_size", IGNORED, "the optimizer steps chunks of the slots that the budgets leave room for"),
    Key("cpu_offload_use_pin_memory", IGNORED, "always so, with a GPU"),
    Key("stage3_prefetch_bucket_size", IGNORED, "as far ahead as the budgets leave room for"),
    Key("stage3_param_persistence_threshold", IGNORED, "small parameters are part of a unit"),
    Key("stage3_model_persistence_threshold", IGNORED, "what stays on the device follows from `device_memory`"),
    Key("stage3_max_live_parameters", IGNORED, "`device_memory` bounds what is gathered, in bytes"),
    Key("stage3_max_reuse_distance", IGNORED, "the order of use is known, and decides"),
    Key("stage3_gather_16bit_weights_on_model_save", IGNORED, "`save_pretrained` and `state_dict()` have all weights"),
    Key("stage3_gather_fp16_weights_on_model_save", IGNORED, "`save_pretrained` and `state_dict()` have all weights"),
    Key("stage3_module_granularity_threshold", IGNORED, BUCKETS),
    Key("stage3_use_all_reduce_for_fetch_params", IGNORED, BUCKETS),
    Key("stage3_allgather_sequential", IGNORED, BUCKETS),
    Key("stage3_partition_stream_chunk_size", IGNORED, "a model on meta is filled as its file is read"),
    Key("ignore_unused_parameters", IGNORED, "always so: a parameter without a gradient is not stepped"),
    Key("legacy_stage1", IGNORED),
    Key("round_robin_gradients", IGNORED, BUCKETS),
    Key("memory_efficient_linear", IGNORED, "the model's own layers run"),
    Key("pipeline_loading_checkpoint", IGNORED, "checkpoints are streamed"),
    Key("override_module_apply", IGNORED, "build the model on meta, and `apply` before wrap_model"),
    Key("log_trace_cache_warnings", IGNORED),
    Key("enable_sanity_checks", IGNORED, "always so"),
    Key("save_muon_momentum_buffer_in_memory", IGNORED),
    Key("leaf_module", IGNORED, "name the classes that move as one: `units`"),
)
# DeepSpeed takes these with and without their prefix.
PREFIX = "stage3_"

OFFLOAD = (
    Key("device", MAPPED, "`cpu` is `host`, `none` is `device`"),
    Key("nvme_path", USED, "as one of `nvme_paths`"),
    Key("buffer_count", IGNORED, BUFFERS),
    Key("buffer_size", IGNORED, BUFFERS),
    Key("max_in_cpu", IGNORED, "`host_memory` says in bytes how much of a disk's state is kept"),
    Key("pin_memory", IGNORED, "always so, with a GPU"),
    Key("pipeline_read", IGNORED, "always so"),
    Key("pipeline_write", IGNORED, "always so"),
    Key("fast_init", IGNORED),
    Key("ratio", IGNORED, "`optimizer='auto'` shares the state out over the tiers"),
    Key("super_offload", IGNORED, "`speculate=True` updates in the backward, with the same bits"),
    Key("convert_grad_on_cpu", IGNORED),
    Key("cpuadam_cores_perc", IGNORED, "`update_threads`"),
)

TOP = (
    Key("zero_optimization", MAPPED, "see its keys"),
    Key("bf16", MAPPED, "`enabled`: `param_dtype='bf16'`"),
    Key("bfloat16", MAPPED, "`bf16` by its old name"),
    Key("fp16", MAPPED, "`enabled`: `param_dtype='fp16'`; scale the loss with torch's GradScaler"),
    Key("gradient_clipping", MAPPED, "`max_grad_norm`"),
    Key("data_types", MAPPED, "`grad_accum_dtype`: `grad_dtype`"),
    Key("optimizer", IGNORED, "give wrap_model the torch optimizer"),
    Key("scheduler", IGNORED, "torch's schedulers work on what wrap_model returns"),
    Key("train_batch_size", IGNORED, LOOP),
    Key("train_micro_batch_size_per_gpu", IGNORED, LOOP),
    Key("gradient_accumulation_steps", IGNORED, LOOP),
    Key(
        "activation_checkpointing",
        IGNORED,
        "torch's and transformers' checkpointing works; `activations='host'` or `'nvme'` sends what is saved",
    ),
    Key("aio", IGNORED, "the disk is measured"),
    Key("amp", REFUSED, "use torch.autocast and GradScaler, or `param_dtype`"),
    Key("tensor_parallel", REFUSED, "cut the model with infinity.parallel.tensor_parallel"),
    Key("pipeline", IGNORED, "cut the model with infinity.parallel.pipeline"),
    Key("sparse_attention", REFUSED, "it replaces the model's attention"),
    Key("compression_training", REFUSED, "it changes what is trained"),
    Key("progressive_layer_drop", REFUSED, "it changes what is trained"),
    Key("curriculum_learning", REFUSED, "it changes what is trained: order the data in the loader"),
    Key("data_efficiency", REFUSED, "it changes what is trained: order the data in the loader"),
    Key("prescale_gradients", IGNORED, "gradients are averaged as DDP does"),
    Key("gradient_predivide_factor", IGNORED, "gradients are averaged as DDP does"),
    Key("sparse_gradients", IGNORED, "sparse gradients are added as dense ones"),
    Key("communication_data_type", IGNORED, "bytes travel in the dtype they have"),
    Key("seq_parallel_communication_data_type", IGNORED),
    Key("zero_allow_untested_optimizer", IGNORED, "an optimizer that is not supported is refused"),
    Key("zero_force_ds_cpu_optimizer", IGNORED),
    Key("steps_per_print", IGNORED),
    Key("wall_clock_breakdown", IGNORED),
    Key("dump_state", IGNORED),
    Key("memory_breakdown", IGNORED),
    Key("flops_profiler", IGNORED),
    Key("comms_logger", IGNORED),
    Key("tensorboard", IGNORED, "`infinity train --tensorboard`"),
    Key("wandb", IGNORED, LOOP),
    Key("csv_monitor", IGNORED, LOOP),
    Key("comet", IGNORED, LOOP),
    Key("checkpoint", IGNORED, "`save_checkpoint` and `load_checkpoint`"),
    Key("elasticity", IGNORED, "checkpoints load at any number of ranks"),
    Key("autotuning", IGNORED, "`infinity plan`"),
    Key("compile", IGNORED, "torch.compile works"),
    Key("dataloader_drop_last", IGNORED, LOOP),
    Key("disable_allgather", IGNORED),
    Key("nebula", IGNORED),
)

SECTIONS = {
    "": TOP,
    "zero_optimization.": ZERO,
    "zero_optimization.offload_param.": OFFLOAD,
    "zero_optimization.offload_optimizer.": OFFLOAD,
}


def find(section: str, name: str) -> Key | None:
    """Finds the row of a key; None for one that is not known."""
    rows = {key.name: key for key in SECTIONS[section]}
    return rows.get(name) or (rows.get(PREFIX + name) if section == "zero_optimization." else None)


def table() -> Iterator[str]:
    """Yields the lines of docs/migration.md's table."""
    yield "| key | what becomes of it | |"
    yield "|---|---|---|"
    for section, keys in (("", TOP), ("zero_optimization.", ZERO), ("zero_optimization.offload_*.", OFFLOAD)):
        for key in keys:
            yield f"| `{section}{key.name}` | {key.fate} | {key.why} |"
