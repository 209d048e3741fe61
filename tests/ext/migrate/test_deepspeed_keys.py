"""Every key of DeepSpeed has a row that says what becomes of it, and the translation does what the
row says."""

from __future__ import annotations

import dataclasses
import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from infinity import Config, ConfigError, wrap_model
from infinity.choices import DTYPES
from infinity.core.wrap.lay_out import lay_out
from infinity.ext.migrate.deepspeed import SECTIONS, ZERO
from infinity.ext.migrate.keys import MAPPED, NOT_NEEDED, REFUSED, VERSION, Key

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "migration.md"
FILE = ROOT / "infinity" / "ext" / "migrate" / "keys.toml"
ON = {  # a value that switches each refused key on
    "zero_quantized_nontrainable_weights": True,
    "zenflow": {"topk_ratio": 0.1},
    "mics_shard_size": 4,
    "amp": {"enabled": True},
    "tensor_parallel": {"autotp_size": 2},
    "sparse_attention": {"mode": "fixed"},
    "compression_training": {"layer_reduction": {"enabled": True}},
    "progressive_layer_drop": {"enabled": True, "theta": 0.5},
    "curriculum_learning": {"enabled": True},
    "data_efficiency": {"enabled": True},
    "quantize_training": {"enabled": True},
    "eigenvalue": {"enabled": True},
    "weight_quantization": {"post_init_quant": {"fc": {"num_bits": 4}}},
    "hybrid_engine": {"enabled": True},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "expert_parallel": {"enabled": True},
    "sequence_parallel_size": 2,
    "gradient_allreduce_op": "sum",
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}
OFF = {
    "mics_shard_size": -1,
    "amp": {"enabled": False},
    "tensor_parallel": {"autotp_size": 1},
    "zenflow": None,
    "gradient_allreduce_op": "mean",
    "sequence_parallel_size": 1,
    "quantize_training": {"enabled": False},
    "eigenvalue": None,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "torch_autocast": {"enabled": False},
    "zero_quantized_nontrainable_weights": False,
    "curriculum_learning": {"enabled": False, "min_difficulty": 8},
}


def within(section: str, name: str, value: object) -> dict:
    return {name: value} if section == "" else {"zero_optimization": {name: value}}


def table() -> Iterator[str]:
    """The lines of the document's table."""
    yield "| key | what becomes of it | |"
    yield "|---|---|---|"
    shown = {"bfloat16.": None, f"{ZERO}offload_optimizer.": None}  # as the table before them
    for path, keys in SECTIONS.items():
        path = shown.get(path, path.replace("offload_param", "offload_*"))
        for key in keys.values() if path is not None else ():
            removed = f" (DeepSpeed {VERSION} has it no more)" if key.removed else ""
            yield f"| `{path}{key.name}` | {key.fate} | {key.why}{removed} |"


def test_the_table_of_the_document_is_the_code_s():
    """Compares docs/migration.md with the lines that the rows make."""
    lines = "\n".join(table())
    assert lines in DOCUMENT.read_text(), f"put this into {DOCUMENT.name}:\n{lines}"


def test_no_key_has_two_rows_and_every_fate_is_one_of_three():
    """Method: the file's own lists. Twin: a key twice in one of them."""
    tables = tomllib.loads(FILE.read_text())["deepspeed"]
    names = lambda fates: [name for rows in fates.values() for of in rows.values() for name in of]
    for paths, fates in tables.items():
        if paths not in ("off", "removed"):
            assert len({*names(fates)}) == len(names(fates)), paths
            assert fates.keys() <= {MAPPED, NOT_NEEDED, REFUSED} and all(map(all, fates.values()))
    assert len(names({MAPPED: {"a": ["x"], "b": ["x"]}})) == 2
    known = {name for keys in SECTIONS.values() for name in keys}
    assert {*tables["off"], *tables["removed"]} <= known


def known(path: str, fate: str) -> list[Key]:
    return [key for key in SECTIONS[path].values() if key.fate == fate]


def test_every_key_of_zero_is_known_with_and_without_its_prefix():
    """Twin: with a prefix and no such key, it is unknown."""
    for name in ("max_live_parameters", "stage3_max_live_parameters"):
        assert Config.from_deepspeed({"zero_optimization": {name: 7}}) == Config()
    with pytest.raises(ConfigError, match="stage3_no_such_key is unknown"):
        Config.from_deepspeed({"zero_optimization": {"stage3_no_such_key": 7}})


REFUSALS = [(path, key.name) for path in ("", ZERO) for key in known(path, REFUSED)]


@pytest.mark.parametrize(("section", "name"), REFUSALS)
def test_a_refused_key_is_refused_by_name(section, name):
    with pytest.raises(ConfigError, match=name):
        Config.from_deepspeed(within(section, name, ON[name]))


@pytest.mark.parametrize("name", OFF)
def test_one_that_is_switched_off_is_not(name):
    """The twin."""
    section = "" if name in SECTIONS[""] else ZERO
    assert Config.from_deepspeed(within(section, name, OFF[name])) == Config()


@pytest.mark.parametrize(
    ("section", "key"),
    [(path, key) for path in ("", ZERO) for key in known(path, NOT_NEEDED)],
)
def test_a_key_that_is_not_needed_changes_nothing_and_says_why(section, key, caplog):
    with caplog.at_level(logging.INFO, "infinity"):
        assert Config.from_deepspeed(within(section, key.name, 7)) == Config()
    assert f"{section}{key.name} not needed: {key.why.replace('`', '')}" in caplog.text


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        (
            {"zero_optimization": {"cpu_offload": True, "cpu_offload_param": True}},
            {"optimizer": "host", "params": "host"},
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, {"compress_gathers": True}),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, {"shard_in_node": True}),
        (
            {
                "zero_optimization": {
                    "zero_hpz_partition_size": 1,
                    "zero_quantized_weights": False,
                    "cpu_offload": None,
                }
            },
            {},
        ),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"grad_dtype": "fp32"}),
        (
            {"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": True}},
            {"param_dtype": "bf16"},
        ),
        (
            {
                "bf16": {
                    "enabled": True,
                    "bf16_master_weights_and_grads": True,
                    "bf16_optimizer_states": True,
                }
            },
            {"param_dtype": "bf16", "master": "none", "grad_dtype": "bf16", "moments": "bf16"},
        ),
        ({"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}}, {}),
        (
            {
                "zero_optimization": {
                    "offload_param": {"device": "nvme", "nvme_path": "/a", "max_in_cpu": 1e9}
                }
            },
            {"params": "nvme", "nvme_paths": "/a", "weights_on_host": 10**9},
        ),
        (
            {
                "zero_optimization": {
                    "offload_param": {"device": "cpu", "nvme_path": "/a", "max_in_cpu": 1e9}
                }
            },
            {"params": "host"},
        ),
        ({"data_types": {"grad_accum_dtype": None}}, {}),
    ],
    ids=str,
)
def test_mapped_keys_choose(source, changed):
    assert Config.from_deepspeed(source) == Config(**changed)


@pytest.mark.parametrize(
    "source",
    [
        {"zero_optimization": {"stage": "3"}},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": True}},
        {"zero_optimization": {"zero_quantized_weights": "true"}},
        {"zero_optimization": {"cpu_offload": 1}},
        {"zero_optimization": {"zero_hpz_partition_size": "8"}},
        {"bf16": {"enabled": 1}},
        {"bf16": {"enabled": 1.0}},
        {"zero_optimization": {"offload_param": {"device": "cpu", "max_in_cpu": "all"}}},
        {"fp16": {"enabled": "true"}},
        {"data_types": {"param_dtype": "fp16"}, "bf16": {"enabled": True}},
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
    ],
    ids=str,
)
def test_a_value_that_is_none_of_its_key_is_refused_and_not_taken_for_off(source):
    """Method: text for numbers and switches, a stage that is none, and two dtypes at once."""
    with pytest.raises(
        ConfigError,
        match=(
            r"stage|max_in_cpu|zero_quantized_weights|cpu_offload|zero_hpz_partition_size|both true"
            r"|true or false|another key"
        ),
    ):
        Config.from_deepspeed(source)


@pytest.mark.parametrize("stage", [0, "auto", None])
def test_a_stage_that_is_left_to_us_is_the_default(stage):
    """The twin."""
    assert Config.from_deepspeed({"zero_optimization": {"stage": stage}}) == Config()


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        Config.from_deepspeed({"data_types": {"grad_accum_dtype": "fp7"}})


def test_every_offload_key_is_known():
    keys = {"device", "nvme_path", "buffer_count", "pin_memory", "ratio", "max_in_cpu"}
    assert keys <= SECTIONS[f"{ZERO}offload_param."].keys()


def test_the_old_name_of_bf16_is_known():
    assert Config.from_deepspeed({"bfloat16": {"enabled": True}}).param_dtype == DTYPES["bf16"]
    with pytest.raises(ConfigError, match="bf16.enabled and fp16.enabled are both true"):
        Config.from_deepspeed({"bfloat16": {"enabled": True}, "fp16": {"enabled": True}})


def test_a_table_that_its_shared_parameters_switch_off_is_off():
    """The twin: switched on it is refused."""
    table = {
        "shared_parameters": {"enabled": False},
        "different_groups": {"wq1": {"params": {"start_bits": 8}}},
    }
    Config.from_deepspeed({"compression_training": {"weight_quantization": table}})
    table["shared_parameters"]["enabled"] = True
    with pytest.raises(ConfigError, match="compression_training"):
        Config.from_deepspeed({"compression_training": {"weight_quantization": table}})


# --- what is none of DeepSpeed's ---

UNKNOWN = [
    (
        {"zero_optimization": {"offload_paramm": {"device": "nvme"}}},
        "zero_optimization.offload_param",
    ),
    ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
    (
        {"zero_optimization": {"offload_param": {"devise": "cpu", "device": "cpu"}}},
        "zero_optimization.offload_param.device",
    ),
    ({"bf16": {"enabeld": True}}, "bf16.enabled"),
    ({"fp16": {"enabled": False, "los_scale": 1}}, "fp16.loss_scale"),
    ({"data_types": {"grad_accum_dtyp": "fp32"}}, "data_types.grad_accum_dtype"),
    ({"gradient_cliping": 1.0}, "gradient_clipping"),
    ({"optimizer": {"type": "AdamW", "params": {"beta": [0.9, 0.95]}}}, "optimizer.params.betas"),
    ({"optimizer": {"typ": "AdamW"}}, "optimizer.type"),
    ({"quantize_trainin": {"enabled": True}}, "quantize_training"),
]


@pytest.mark.parametrize(("source", "near"), UNKNOWN, ids=str)
def test_a_key_that_is_none_is_refused_with_the_nearest(source, near, caplog):
    """Method: slips of the pen at every level. Twin: strict=False, which has them told as unknown
    and nothing else."""
    with pytest.raises(ConfigError, match=f"unknown.*did you mean {near}[?]"):
        Config.from_deepspeed(source)
    with caplog.at_level(logging.WARNING):
        Config.from_deepspeed(source, strict=False)
    assert f"did you mean {near}?" in caplog.text and "unknown" in caplog.text


def test_a_key_at_the_wrong_level_is_told_where_it_belongs():
    with pytest.raises(ConfigError, match="it belongs to zero_optimization[.]"):
        Config.from_deepspeed({"offload_param": {"device": "nvme"}})
    with pytest.raises(ConfigError, match="it belongs to the top level"):
        Config.from_deepspeed({"zero_optimization": {"aio": {}}})


def test_what_is_not_on_disk_keeps_its_word(caplog):
    """Method: every switch that is off is told as off, and no line has two words."""
    source = {
        "zero_optimization": {
            "cpu_offload": False,
            "stage": 0,
            "zero_hpz_partition_size": 1,
            "cpu_offload_param": 0,
            "mics_shard_size": -1,
            "offload_param": None,
        },
        "bf16": {"enabled": False},
        "gradient_clipping": 0,
        "amp": {"enabled": False},
        "data_types": {"grad_accum_dtype": None},
    }
    with caplog.at_level(logging.INFO, "infinity"):
        assert Config.from_deepspeed(source) == Config()
    lines = caplog.records[-1].getMessage().splitlines()[1:]
    assert len(lines) == 10 and all(" off" in line for line in lines), lines


# --- what the loop has ---


@pytest.mark.parametrize(
    "source", [{"gradient_clipping": "auto"}, {"scheduler": ON["scheduler"]}], ids=str
)
def test_what_only_the_loop_can_do_is_refused_unless_told(source, caplog):
    (key,) = source
    with pytest.raises(ConfigError, match=f"{key}.*strict=False"):
        Config.from_deepspeed(source)
    with caplog.at_level(logging.WARNING):
        assert Config.from_deepspeed(source, strict=False) == Config()
    assert re.search(f"{key} (off: |is )left to the loop", caplog.text)


CONSTANT = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}


@pytest.mark.parametrize(
    ("kind", "loop", "told"),
    [
        (
            "WarmupLR",
            "WarmupDecayLR",
            "the JSON's WarmupLR stays constant after the warm-up, this Trainer's linear schedule"
            " decays to 0 along a line: for the JSON's set"
            " lr_scheduler_type='constant_with_warmup'",
        ),
        ("WarmupLR", "WarmupLR", None),
        ("WarmupDecayLR", "polynomial", "the JSON's WarmupDecayLR .* set lr_.*='linear'"),
        ("OneCycle", "WarmupDecayLR", "OneCycle is none of transformers'.* make it of torch's"),
        ("WarmupLR", None, "is left to the loop: WarmupLR stays .* set .*'constant_with_warmup'"),
        ("OneCycle", None, "is left to the loop: OneCycle is none .* Make it of torch's"),
    ],
)
def test_another_schedule_than_the_json_is_a_warning_of_its_own(kind, loop, told, caplog):
    """Twin: a loop with the same schedule is told in the report alone."""
    known = {} if loop is None else {"scheduler.type": loop}
    with caplog.at_level(logging.WARNING):
        Config.from_deepspeed({"scheduler": CONSTANT | {"type": kind}}, loop=known)
    report, *more = [record.getMessage() for record in caplog.records]
    assert ("left to the loop, which has the same" in report) == (told is None)
    assert len(more) == (told is not None) and (told is None or re.search(told, more[0]))


def adamw(**params):
    return {"optimizer": {"type": "AdamW", "params": params}}


JSONS = [  # a JSON's optimizer, what is that one, what is not
    (
        adamw(lr=1e-3, betas=[0.8, 0.95]),
        lambda p: AdamW(p, 1e-3, (0.8, 0.95), weight_decay=0),
        lambda p: AdamW(p, 1e-3, weight_decay=0),
    ),
    (adamw(lr=1e-3), lambda p: AdamW(p, 1e-3, weight_decay=0), lambda p: AdamW(p, 1e-3)),
    (adamw(lr=1e-3, torch_adam=True), lambda p: AdamW(p, 1e-3), lambda p: AdamW(p, 1e-4)),
    (
        adamw(lr="auto", betas="auto", eps="auto", weight_decay="auto"),
        lambda p: AdamW(p, 3e-2),
        lambda p: SGD(p, 3e-2),
    ),
    (
        adamw(lr=1e-3, weight_decay=0.1),
        lambda p: AdamW([{"params": p, "weight_decay": 0.0}], 1e-3, weight_decay=0.1),
        lambda p: Adam(p, 1e-3),
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}},
        lambda p: AdamW(p, weight_decay=0.1),
        lambda p: Adam(p, weight_decay=0.1),
    ),
    ({"optimizer": {"type": "Adam"}}, lambda p: Adam(p), lambda p: Adam(p, weight_decay=0.1)),
    (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        lambda p: Adam(p, weight_decay=0.1),
        lambda p: AdamW(p, weight_decay=0.1),
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        lambda p: SGD(p, 0.1, 0.9),
        lambda p: SGD(p, 0.1),
    ),
]


@pytest.mark.parametrize(
    ("source", "right", "wrong"), JSONS, ids=[str(source) for source, _, _ in JSONS]
)
def test_the_optimizer_of_a_json_is_the_one_that_steps(source, right, wrong):
    """Method: wrap_model is given the optimizer that DeepSpeed would make, and one that differs in
    one setting, which is refused."""
    config = Config.from_deepspeed(source)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="DeepSpeed JSON"):
        wrap_model(model, wrong(list(model.parameters())), config)
    assert type(model.weight) is torch.nn.Parameter
    wrap_model(
        model, wrong(list(model.parameters())), dataclasses.replace(config, expects_optimizer=None)
    )
    model = torch.nn.Linear(2, 2)
    wrap_model(model, right(list(model.parameters())), config)


@pytest.mark.parametrize(
    "table",
    [
        {"type": "OneBitAdam"},
        {"type": "Muon"},
        {"type": 3},
        {"type": "AdamW", "params": {"bias_correction": False}},
        {"type": "AdamW", "params": {"lr": "fast"}},
        {"type": "AdamW", "params": {"max_grad_norm": 1.0}},
        {"type": "AdamW", "params": 3},
        {"type": "AdamW", "params": {"amsgrad": True}},
    ],
    ids=str,
)
def test_an_optimizer_that_is_not_to_be_had_is_refused(table):
    with pytest.raises(ConfigError, match="optimizer"):
        Config.from_deepspeed({"optimizer": table})


def test_weights_of_a_disk_stay_in_memory_as_many_as_are_asked_for(tmp_path):
    """Method: four equal layers on NVMe with room for two and a half: two are kept. Twins: none,
    and without the key none either."""
    kept = {}
    for count in (0, 5 * 64 * 64 // 2, None):
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)) for _ in range(4))
        )
        config = Config(params="nvme", nvme_paths=tmp_path, weights_on_host=count)
        plan, _ = lay_out(model, None, config)
        kept[count] = sum("weight" in plan.cached_of(index) for index in range(4))
    assert kept == {0: 0, 5 * 64 * 64 // 2: 2, None: 0}
