"""Config: everything a user can choose is checked once, and every refusal names the key, the value
and the way out."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from deleted import needs

from infinity.config import Config
from infinity.core import seams
from infinity.errors import ConfigError, InfinityError

KEYS = [field.name for field in dataclasses.fields(Config)]


# --- values ---


def test_the_defaults_are_valid_and_leave_everything_to_the_engine():
    """Makes a Config from nothing, in each of the ways that mean nothing."""
    assert Config() == Config.make(None) == Config.make({})
    assert (Config().params, Config().optimizer, Config().activations) == ("auto", "auto", "auto")
    assert Config().host_memory is None and Config().nvme_paths == () and Config().master == "split"


def test_a_config_is_frozen_and_keyword_only():
    """Tries to assign to a field, and to give one by position."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().params = "host"
    with pytest.raises(TypeError):
        Config("host")
    assert hash(Config(nvme_paths=["/a"])) == hash(Config(nvme_paths=("/a",)))


@pytest.mark.parametrize(
    "key, given, kept",
    [
        ("host_memory", "48GiB", 48 * 1024**3),
        ("device_memory", 1000, 1000),
        ("nvme_capacity", "1.5 TB", 15 * 10**11),
        ("nvme_paths", "/a", ("/a",)),
        ("nvme_paths", Path("/a"), ("/a",)),
        ("nvme_paths", ["/a", Path("/b")], ("/a", "/b")),
        ("nvme_paths", None, ()),
        ("param_dtype", "bf16", torch.bfloat16),
        ("param_dtype", "torch.float16", torch.float16),
        ("grad_dtype", torch.float32, torch.float32),
        ("units", "Block", ("Block",)),
        ("units", ["A", "B"], ("A", "B")),
        ("units", "auto", "auto"),
        ("max_grad_norm", 1, 1),
        ("micro_batch", 4, 4),
        ("update_threads", 3, 3),
        ("moments", "bf16", "bf16"),
    ],
)
def test_values_are_kept_in_one_form(key, given, kept):
    """Gives the ways to write one value and compares what is kept."""
    assert getattr(Config(**{key: given}), key) == kept


@pytest.mark.parametrize(
    "key, value, tells",
    [
        ("params", "disk", "'auto', 'device', 'host', 'nvme'"),
        ("optimizer", "hots", "did you mean 'host'"),
        ("activations", None, "'auto'"),
        ("params", ["host"], "'host'"),
        ("master", "fp16", "'split', 'fp32', 'none'"),
        ("moments", "fp8", "'fp32', 'bf16', 'int8'"),
        ("host_memory", "lots", "48GiB"),
        ("device_memory", -1, "48GiB"),
        ("nvme_capacity", 1.5, "whole number"),
        ("param_dtype", "fp8", "fp32, bf16, fp16"),
        ("param_dtype", 16, "fp32"),
        ("grad_dtype", torch.int8, "fp32"),
        ("micro_batch", 0, "positive"),
        ("micro_batch", 1.5, "positive"),
        ("micro_batch", True, "positive"),
        ("update_threads", 0, "positive"),
        ("update_threads", "2", "positive"),
        ("max_grad_norm", 0, "positive"),
        ("max_grad_norm", -1.0, "positive"),
        ("max_grad_norm", float("nan"), "positive"),
        ("max_grad_norm", "1.0", "positive"),
        ("max_grad_norm", True, "positive"),
        ("checksums", 1, "True, False or 'sampled'"),
        ("checksums", "sample", "True, False or 'sampled'"),
        ("nvme_paths", 5, "nvme_paths"),
        ("nvme_paths", [5], "nvme_paths"),
        ("units", 5, "units"),
        ("units", [5], "units"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_value_that_cannot_be_is_refused_by_name(key, value, tells):
    """Gives nonsense for every key, through the constructor and through a dict."""
    for make in (lambda: Config(**{key: value}), lambda: Config.make({key: value})):
        with pytest.raises(ConfigError) as caught:
            make()
        assert key in str(caught.value) and tells in str(caught.value)
        assert isinstance(caught.value, (InfinityError, ValueError))


@pytest.mark.parametrize("home", ["params", "optimizer", "activations"])
def test_an_nvme_home_needs_a_folder(home):
    """Puts each kind of state on NVMe without and with a folder."""
    with pytest.raises(ConfigError, match=f"{home}='nvme'.*nvme_paths"):
        Config(**{home: "nvme"})
    assert getattr(Config(**{home: "nvme"}, nvme_paths=["/scratch"]), home) == "nvme"


# --- sources ---


@needs("ext/migrate")
@pytest.mark.parametrize("key", KEYS)
def test_an_unknown_key_is_refused_with_the_nearest(key):
    """Drops a letter from the middle of every key: the message names the whole one."""
    wrong = key[: len(key) // 2] + key[len(key) // 2 + 1 :]
    with pytest.raises(ConfigError, match=f"unknown config key '{wrong}'.*did you mean '{key}'"):
        Config.make({wrong: None})


@needs("ext/migrate")
def test_a_key_like_no_other_is_refused_with_all_of_them():
    """Gives a key that resembles none, and one that is not text."""
    with pytest.raises(ConfigError, match="unknown config key 'zzz'.*the keys are") as caught:
        Config.make({"zzz": 1})
    assert all(key in str(caught.value) for key in KEYS)
    with pytest.raises(ConfigError, match="unknown config key 7"):
        Config.make({7: 1})


def test_toml_json_dict_and_config_say_the_same(tmp_path):
    """Writes one configuration in every form, and names files by str and by Path."""
    values = {
        "params": "nvme",
        "nvme_paths": ["/a", "/b"],
        "host_memory": "2GiB",
        "checksums": False,
    }
    expected = Config(**values)
    toml, as_json, other = tmp_path / "c.toml", tmp_path / "c.json", tmp_path / "c.conf"
    toml.write_text(
        'params = "nvme"\nnvme_paths = ["/a", "/b"]\nhost_memory = "2GiB"\nchecksums = false\n'
    )
    as_json.write_text(json.dumps(values))
    other.write_text(json.dumps(values))
    for source in (values, expected, toml, str(toml), as_json, str(as_json), other):
        assert Config.make(source) == expected
    assert Config.make(expected) is expected


@needs("ext/migrate")
@pytest.mark.parametrize(
    "name, content, tells",
    [
        ("c.toml", b"params = ", "neither valid TOML"),
        ("c.json", b"{params: 1}", "neither valid TOML"),
        ("c.json", b"[1, 2]", "holds a list"),
        ("c.json", b"", "is empty"),
        ("c.toml", b"parms = 'host'", "did you mean 'params'"),
        ("c.json", b'{"params": "disk"}', "params='disk'"),
        ("c.json", b"\xff\xfe{}", "c.json"),
        ("c.toml", b"\xff\xfe", "c.toml"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_reason(tmp_path, name, content, tells):
    """Reads broken, mistyped and binary files."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=tells):
        Config.make(path)


def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path):
    """Names a missing file and a folder."""
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            Config.make(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("source", [5, [("params", "host")], {"params", "host"}, 1.5])
def test_anything_else_is_not_a_config(source):
    """Gives objects that are no configuration at all."""
    with pytest.raises(ConfigError, match=type(source).__name__):
        Config.make(source)


# --- DeepSpeed ---


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True, "immediate_grad_update": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/scratch",
            "pin_memory": True,
            "buffer_count": 5,
        },
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "aio": {"block_size": 1048576, "queue_depth": 8},
    "wall_clock_breakdown": False,
}


def report_of(source, caplog) -> tuple[Config, str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="infinity"):
        config = Config.from_deepspeed(source)
    return config, "\n".join(record.getMessage() for record in caplog.records)


def test_a_deepspeed_config_keeps_its_meaning(tmp_path, caplog):
    """Translates a ZeRO-3 JSON with both kinds of offload, from a dict and from its file."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    expected = Config(
        params="nvme",
        optimizer="host",
        nvme_paths=["/scratch"],
        param_dtype="bf16",
        max_grad_norm=0.5,
    )
    for source in (DEEPSPEED, path, str(path)):
        config, _ = report_of(source, caplog)
        assert config == expected


@pytest.mark.parametrize(
    "source, changed",
    [
        ({}, {}),
        ({"zero_optimization": {"stage": 2}}, {"shard": "gradients"}),
        ({"zero_optimization": {"stage": 0}}, {}),
        ({"zero_optimization": {"offload_param": {"device": "none"}}}, {"params": "device"}),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {"optimizer": "host"}),
        ({"fp16": {"enabled": True}}, {"param_dtype": "fp16"}),
        ({"bf16": {"enabled": "auto"}}, {}),
        ({"gradient_clipping": 0}, {}),
        (
            {
                "zero_optimization": {
                    "offload_param": {"device": "nvme", "nvme_path": "/a"},
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
                }
            },
            {"params": "nvme", "optimizer": "nvme", "nvme_paths": ["/a", "/b"]},
        ),
    ],
    ids=str,
)
def test_each_deepspeed_setting_is_mapped_alone(source, changed, caplog):
    """Translates one setting at a time."""
    assert report_of(source, caplog)[0] == Config(**changed)


def leaves(mapping: dict, depth: int = 0, prefix: str = "") -> list[str]:
    """Dotted names of all settings, down to the level that DeepSpeed documents."""
    found = []
    for key, value in mapping.items():
        known = key in ("zero_optimization", "offload_param", "offload_optimizer", "bf16", "fp16")
        found += (
            leaves(value, depth + 1, f"{prefix}{key}.")
            if known and isinstance(value, dict)
            else [prefix + key]
        )
    return found


@pytest.mark.parametrize(
    "source",
    [
        DEEPSPEED,
        {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}},
        {"bf16": {"enabled": False}, "gradient_clipping": 0.0},
        {
            "zero_optimization": {
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
            }
        },
    ],
    ids=["zero3", "auto", "off", "one path twice"],
)
def test_every_deepspeed_key_is_accounted_for(source, caplog):
    """Looks for every key's dotted name in the log: mapped, not needed or off, none is dropped
    without a word."""
    _, report = report_of(source, caplog)
    missing = [name for name in leaves(source) if name not in report]
    assert not missing


def test_a_deepspeed_json_is_recognised_where_a_configuration_is_given(tmp_path):
    """As a dict and as a file. Twin: beside a key of our own it is a mistake."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    expected = Config.from_deepspeed(DEEPSPEED)
    assert Config.make(DEEPSPEED) == Config.make(path) == expected != Config()
    with pytest.raises(ConfigError, match="unknown config key 'zero_optimization'"):
        Config.make({"params": "host", "zero_optimization": {}})


def test_the_deepspeed_report_is_folded_to_what_changes(caplog):
    """The rest is counted; the optimizer is a line to paste."""
    source = DEEPSPEED | {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}
    with caplog.at_level(logging.WARNING, "infinity"):
        Config.from_deepspeed(source)
    (record,) = caplog.records
    lines = [line.strip() for line in record.getMessage().splitlines()]
    assert any("mapped to params='nvme'" in line for line in lines)
    assert not any("buffer_count" in line for line in lines)
    assert any(line.endswith("not needed, or off") for line in lines)
    assert lines[-1] == (
        "its optimizer: optimizer = torch.optim.AdamW(model.parameters(), lr=3e-05,"
        " weight_decay=0.0)"
    )


def test_the_deepspeed_report_says_what_became_of_a_key(caplog):
    """Reads the lines of two mapped keys and two that are not needed."""
    _, report = report_of(DEEPSPEED, caplog)
    lines = {line.strip() for line in report.splitlines()}
    assert any("offload_param.device='nvme' mapped to params='nvme'" in line for line in lines)
    assert any("offload_param.nvme_path mapped to nvme_paths" in line for line in lines)
    assert any("offload_param.buffer_count not needed" in line for line in lines)
    assert any(line.startswith("wall_clock_breakdown not needed: ") for line in lines)


@pytest.mark.parametrize(
    "source",
    [
        {"zero_optimization": {"offload_param": {"device": "tape"}}},
        {"zero_optimization": {"offload_param": {"device": "nvme"}}},
        {"zero_optimization": {"offload_param": "cpu"}},
        {"zero_optimization": True},
        {"gradient_clipping": "much"},
        {"bf16": True},
    ],
    ids=str,
)
def test_a_deepspeed_config_that_makes_no_sense_is_a_config_error(source):
    """Translates settings of the wrong kind: the error is ours, not Python's."""
    with pytest.raises(ConfigError):
        Config.from_deepspeed(source)


def test_a_null_deepspeed_section_is_no_section(caplog):
    """DeepSpeed reads null as absent."""
    for key in ("zero_optimization", "bf16", "fp16", "gradient_clipping"):
        assert report_of({key: None}, caplog)[0] == Config()


def test_a_misspelt_setting_is_refused_without_readers_of_other_tools(monkeypatch):
    """Twin: one that is there is taken."""
    monkeypatch.setattr(seams, "is_there", lambda module: False)
    with pytest.raises(ConfigError, match="there is no setting 'parms'"):
        Config.make({"parms": "host"})
    assert Config.make({"params": "host"}).params == "host"
