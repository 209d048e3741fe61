"""Every key of DeepSpeed has a row that says what becomes of it, and the translation does what the row says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from infinity import Config, ConfigError
from infinity.config.choices import DTYPES
from infinity.config.deepspeed_keys import IGNORED, MAPPED, OFFLOAD, REFUSED, SECTIONS, TOP, USED, ZERO, find, table

DOCUMENT = Path(__file__).parents[2] / "docs" / "migration.md"
ON = {  # a value that switches each refused key on
    "zero_quantized_nontrainable_weights": True, "zenflow": {"topk_ratio": 0.1}, "mics_shard_size": 4, "amp": {"enabled": True},
    "tensor_parallel": {"autotp_size": 2}, "sparse_attention": {"mode": "fixed"},
    "compression_training": {"layer_reduction": {"enabled": True}}, "progressive_layer_drop": {"enabled": True, "theta": 0.5},
    "curriculum_learning": {"enabled": True}, "data_efficiency": {"enabled": True},
}  # fmt: skip
OFF = {"mics_shard_size": -1, "amp": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}, "zenflow": None,
       "zero_quantized_nontrainable_weights": False, "curriculum_learning": {"enabled": False, "min_difficulty": 8}}  # fmt: skip


def within(section: str, name: str, value: object) -> dict:
    return {name: value} if section == "" else {"zero_optimization": {name: value}}


def test_the_table_of_the_document_is_the_code_s():
    """Compares docs/migration.md with the lines that the rows make."""
    lines = "\n".join(table())
    assert lines in DOCUMENT.read_text(), f"put this into {DOCUMENT.name}:\n{lines}"


def test_no_key_has_two_rows_and_every_fate_is_one_of_four():
    for keys in SECTIONS.values():
        assert len({key.name for key in keys}) == len(keys)
        assert {key.fate for key in keys} <= {USED, MAPPED, IGNORED, REFUSED}


def test_every_key_of_zero_is_known_with_and_without_its_prefix():
    assert find("zero_optimization.", "max_live_parameters") == find("zero_optimization.", "stage3_max_live_parameters")
    assert find("zero_optimization.", "no_such_key") is None


REFUSALS = [(section, key.name) for section in ("", "zero_optimization.") for key in SECTIONS[section] if key.fate == REFUSED]


@pytest.mark.parametrize(("section", "name"), REFUSALS)
def test_a_refused_key_is_refused_by_name(section, name):
    with pytest.raises(ConfigError, match=name):
        Config.from_deepspeed(within(section, name, ON[name]))


@pytest.mark.parametrize("name", OFF)
def test_one_that_is_switched_off_is_not(name):
    """The twin."""
    section = "" if any(key.name == name for key in TOP) else "zero_optimization."
    assert Config.from_deepspeed(within(section, name, OFF[name])) == Config()


@pytest.mark.parametrize(("section", "key"), [("", key) for key in TOP if key.fate == IGNORED] + [("zero_optimization.", key) for key in ZERO if key.fate == IGNORED])  # fmt: skip
def test_an_ignored_key_changes_nothing_and_is_told(section, key, caplog):
    with caplog.at_level(logging.WARNING):
        assert Config.from_deepspeed(within(section, key.name, 7)) == Config()
    assert f"{section}{key.name} ignored" in caplog.text


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ({"zero_optimization": {"cpu_offload": True, "cpu_offload_param": True}}, {"optimizer": "host", "params": "host"}),
        ({"zero_optimization": {"zero_quantized_weights": True}}, {"compress_gathers": True}),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, {"shard_in_node": True}),
        ({"zero_optimization": {"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "cpu_offload": None}}, {}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"grad_dtype": "fp32"}),
        ({"data_types": {"grad_accum_dtype": None}}, {}),
    ],
    ids=str,
)
def test_mapped_keys_choose(source, changed):
    assert Config.from_deepspeed(source) == Config(**changed)


@pytest.mark.parametrize(
    "source",
    [{"zero_optimization": {"stage": "3"}}, {"zero_optimization": {"stage": 4}}, {"zero_optimization": {"stage": True}},
     {"zero_optimization": {"zero_quantized_weights": "true"}}, {"zero_optimization": {"cpu_offload": 1}},
     {"zero_optimization": {"zero_hpz_partition_size": "8"}}, {"bf16": {"enabled": True}, "fp16": {"enabled": True}}],
    ids=str,
)  # fmt: skip
def test_a_value_that_is_none_of_its_key_is_refused_and_not_taken_for_off(source):
    """Method: text for numbers and switches, a stage that is none, and two dtypes at once."""
    with pytest.raises(ConfigError, match=r"stage|zero_quantized_weights|cpu_offload|zero_hpz_partition_size|both true"):
        Config.from_deepspeed(source)


@pytest.mark.parametrize("stage", [0, "auto", None])
def test_a_stage_that_is_left_to_us_is_the_default(stage):
    """The twin."""
    assert Config.from_deepspeed({"zero_optimization": {"stage": stage}}) == Config()


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        Config.from_deepspeed({"data_types": {"grad_accum_dtype": "fp7"}})


def test_every_offload_key_is_known():
    known = {key.name for key in OFFLOAD}
    assert {"device", "nvme_path", "buffer_count", "pin_memory", "ratio", "max_in_cpu"} <= known


def test_the_old_name_of_bf16_is_known():
    assert Config.from_deepspeed({"bfloat16": {"enabled": True}}).param_dtype == DTYPES["bf16"]
    with pytest.raises(ConfigError, match="bf16.enabled and fp16.enabled are both true"):
        Config.from_deepspeed({"bfloat16": {"enabled": True}, "fp16": {"enabled": True}})


def test_a_table_that_its_shared_parameters_switch_off_is_off():
    """The twin: switched on it is refused."""
    table = {"shared_parameters": {"enabled": False}, "different_groups": {"wq1": {"params": {"start_bits": 8}}}}
    Config.from_deepspeed({"compression_training": {"weight_quantization": table}})
    table["shared_parameters"]["enabled"] = True
    with pytest.raises(ConfigError, match="compression_training"):
        Config.from_deepspeed({"compression_training": {"weight_quantization": table}})
