"""Configurations of other tools are read, or refused by the tool's name, wherever one is given.

Method: `other_tools.yaml` has some ninety of them, each with what is right for it; each is given as
a table and as a file, and what comes of it is compared.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import Config, ConfigError
from infinity.choices import DTYPES
from infinity.ext.migrate import other_tools
from infinity.untrusted import read_table

yaml = pytest.importorskip("yaml")
FILE = Path(__file__).with_name("other_tools.yaml")
CASES = yaml.safe_load(FILE.read_text())
DEFAULT = Config()


def chosen(config: Config) -> dict[str, Any]:
    """The fields that are not the defaults, in the file's words."""
    fields = {key: value for key, value in vars(config).items() if value != getattr(DEFAULT, key)}
    if expected := fields.pop("expects_optimizer", None):
        fields["expects"] = dict(expected)["type"]
    names = {dtype: name for name, dtype in DTYPES.items() if len(name) == 4}
    return {
        key: names[value] if isinstance(value, torch.dtype) else value
        for key, value in fields.items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"].replace(" ", "-"))
def test_each_is_read_or_refused_by_name(case, tmp_path, caplog):
    """As a table, as JSON and as YAML."""
    case = json.loads(json.dumps(case).replace("{tmp}", str(tmp_path)))
    (tmp_path / "ds.json").write_text(json.dumps(case.get("names", {})))
    (tmp_path / "c.json").write_text(json.dumps(case["config"]))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(case["config"]))
    for source in (case["config"], tmp_path / "c.json", str(tmp_path / "c.yaml")):
        if "refused" in case:
            with pytest.raises(ConfigError) as caught:
                Config.make(source, loop=case.get("loop"))
            assert case["refused"] in str(caught.value) and "share_homes?" not in str(caught.value)
        else:
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                found = chosen(Config.make(source, loop=case.get("loop")))
            fields = case["fields"]
            assert {**found, "nvme_paths": list(found.get("nvme_paths", ()))} == {
                "nvme_paths": [],
                **fields,
            }
            assert case.get("told", "") in caplog.text
            assert all(Path(path).is_dir() for path in found.get("nvme_paths", ()))


def test_a_tool_is_known_by_its_keys_alone(monkeypatch):
    """The twin: without the table of tools, axolotl's file is one with unknown keys."""
    source = {"base_model": "a", "optimizer": "adamw_torch"}
    with pytest.raises(ConfigError, match="a configuration of axolotl"):
        Config.make(source)
    monkeypatch.setattr(other_tools, "TOOLS", {})
    with pytest.raises(ConfigError, match="unknown config key 'base_model'"):
        Config.make(source)


def test_no_key_of_infinity_is_another_tools_mark():
    """Each field of Config alone is Infinity's, with a value of text."""
    for name in vars(DEFAULT):
        assert other_tools.whose({name: "x"}, list(vars(DEFAULT))) is None


def test_toml_of_another_tool_is_refused_by_name(tmp_path):
    """torchtitan's and diffusion-pipe's, whose tables have Infinity's words."""
    for text, tool in (
        ('[job]\nname = "a"\n[training]\nsteps = 1\n[compile]\nenable = true\n', "torchtitan"),
        ('pipeline_stages = 1\n[optimizer]\ntype = "adamw"\nlr = 1e-5\n', "diffusion-pipe"),
    ):
        (tmp_path / "c.toml").write_text(text)
        assert read_table(tmp_path / "c.toml")
        with pytest.raises(ConfigError, match=f"c.toml: this is a configuration of {tool}"):
            Config.make(tmp_path / "c.toml")


def test_json_is_read_with_its_remarks(tmp_path):
    """DeepSpeed reads Hjson: comments of three kinds and commas at ends, and what an editor on
    Windows puts first. Twin: in a text they are the text, and a missing comma stays an error."""
    told = '"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, /* all */}}, // end'
    for number, text in enumerate(
        (
            '{// of the run\n"zero_optimization": {"stage": 2, # shards\n},\n}',
            '\ufeff{"zero_optimization":\r\n {"stage": 2}}\r\n',
            '/* one\ntwo */ {"zero_optimization": {"stage": 2}, ' + told + "\n}",
        )
    ):
        (path := tmp_path / f"{number}.json").write_text(text)
        assert Config.make(path).shard == "gradients"
    texts = {
        "nvme_paths": [
            "/a//b,]",
            "/a/*b",
            "/# \\",
        ],
        "params": "nvme",
    }
    (tmp_path / "own.json").write_text(json.dumps(texts))
    assert read_table(tmp_path / "own.json") == texts
    (tmp_path / "bad.json").write_text('{// x\n"params": "host"\n "optimizer": "host"}')
    with pytest.raises(ConfigError, match="line 3 column 2"):
        read_table(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("source", "key", "tool"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed", "DeepSpeed"),
        ({"ds_config": {"bf16": {"enabled": True}}, "seed": 1}, "ds_config", "DeepSpeed"),
        ({"run": {"fsdp_offload_params": True}, "params": "host"}, "run", "Accelerate"),
    ],
)
def test_a_table_inside_of_another_one_is_named(source, key, tool):
    """Twin: the table itself is read."""
    with pytest.raises(ConfigError, match=f"{key} holds a configuration of {tool}.*read alone"):
        Config.make(source)
    assert Config.make(source[key])


def test_remarks_and_what_is_left_to_the_loop_are_told(caplog):
    """Keys of a DeepSpeed JSON that begin with _, at each level, and Accelerate's autocast. Twin: a
    key without it is unknown."""
    caplog.set_level("INFO")
    zero = {"stage": 2, "_why": "small"}
    assert Config.make({"_comment": "a", "zero_optimization": zero}).shard == "gradients"
    assert "_comment off: a remark" in caplog.text and "zero_optimization._why off" in caplog.text
    Config.make({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"})
    assert "mixed_precision='fp16' left to the loop: autocast" in caplog.text
    Config.make({"distributed_type": "NO"})
    assert "no key changes anything" in caplog.text
    with pytest.raises(ConfigError, match="DeepSpeed note is unknown"):
        Config.make({"note": "a", "zero_optimization": {"stage": 2}})
    with pytest.raises(ConfigError, match="Accelerate foo is unknown[.] Correct it"):
        Config.make({"foo": 1, "distributed_type": "FSDP"})
