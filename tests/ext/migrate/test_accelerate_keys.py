"""Accelerate's YAML and the ten and more keys of an `fsdp_config`: every key has a row that says
what becomes of it, and the translation does what the row says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from infinity import Config, ConfigError
from infinity.ext.migrate.accelerate import SECTIONS
from infinity.ext.migrate.keys import NOT_NEEDED, REFUSED

DOCUMENT = Path(__file__).parents[3] / "docs" / "migration.md"
DEFAULT = Config()
TOP = [*SECTIONS[""].values()]
FSDP = [*SECTIONS["fsdp_config."].values()]


def chosen(config: Config) -> dict:
    """The fields that are not the defaults."""
    return {
        name: value
        for name, value in vars(config).items()
        if value != getattr(DEFAULT, name) and name != "expects_optimizer"
    }


def test_the_table_of_the_document_is_the_code_s():
    """Compares docs/migration.md with the lines that the rows make."""
    rows = [
        f"| `{path}{key.name}` | {key.fate} | {key.why} |"
        for path, keys in SECTIONS.items()
        for key in keys.values()
    ]
    lines = "\n".join(["| key | what becomes of it | |", "|---|---|---|", *rows])
    assert lines in DOCUMENT.read_text(), f"put this into {DOCUMENT.name}:\n{lines}"


HOST = {"params": "host", "optimizer": "host"}
SHARDS = [  # sharding_strategy, by name, number and FSDP2's switch -> fields
    ("FULL_SHARD", {}),
    ("full_shard", {}),
    (1, {}),
    (True, {}),
    ("true", {}),
    ("SHARD_GRAD_OP", {"shard": "gradients"}),
    ("2", {"shard": "gradients"}),
    (False, {"shard": "gradients"}),
    ("NO_SHARD", {"shard": "optimizer"}),
    ("HYBRID_SHARD", {"shard_in_node": True}),
    ("_HYBRID_SHARD_ZERO2", {"shard": "gradients", "shard_in_node": True}),
]


@pytest.mark.parametrize("value, fields", SHARDS)
@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "reshard_after_forward"])
def test_a_strategy_says_what_is_sharded(key, value, fields):
    assert chosen(Config.make({key: value})) == fields


MAPPED = [
    ({"fsdp_offload_params": True}, HOST),
    ({"cpu_offload": "true"}, HOST),
    ({"fsdp_offload_params": False}, {}),
    ({"mixed_precision_policy": "bf16"}, {"param_dtype": torch.bfloat16}),
    ({"activation_checkpointing_offload": True}, {"activations": "host"}),
    (
        {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {}},
        {"param_dtype": torch.bfloat16},
    ),
    ({"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}, {}),  # autocast, as it was
    ({"distributed_type": "NO", "use_cpu": True}, {"device": "cpu"}),
    (
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "deepspeed_config": {
                "zero_stage": 2,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "none",
                "gradient_clipping": 0.5,
                "zero3_init_flag": False,
                "deepspeed_multinode_launcher": "standard",
            },
        },
        {
            "param_dtype": torch.bfloat16,
            "shard": "gradients",
            "params": "device",
            "optimizer": "host",
            "max_grad_norm": 0.5,
        },
    ),
]


@pytest.mark.parametrize("source, fields", MAPPED)
def test_mapped_keys_choose(source, fields):
    assert chosen(Config.from_accelerate(source)) == fields


@pytest.mark.parametrize("key", [key for key in (*TOP, *FSDP) if key.fate == NOT_NEEDED])
def test_a_key_that_is_not_needed_changes_nothing_and_says_why(key, caplog):
    caplog.set_level(logging.INFO)
    prefix = "" if key in TOP else "fsdp_"
    inner = {f"{prefix}{key.name}": "yes"}
    file = inner if key in TOP else {"fsdp_config": inner}
    assert not chosen(Config.from_accelerate({"distributed_type": "FSDP", **file}))
    assert f"{key.name} not needed: {key.why.replace('`', '')}" in caplog.text


@pytest.mark.parametrize("key", [key for key in (*TOP, *FSDP) if key.fate == REFUSED])
def test_a_refused_key_is_refused_by_name_and_not_when_it_is_off(key):
    file = {"distributed_type": "FSDP"}
    for value, refused in (({"a": True}, True), (False, False), ({}, False)):
        given = {key.name: value} if key in TOP else {"fsdp_config": {f"fsdp_{key.name}": value}}
        if refused:
            with pytest.raises(ConfigError, match=f"{key.name}=.*not to be had here"):
                Config.from_accelerate(file | given)
        else:
            Config.from_accelerate(file | given)


WRONG = [
    ({"fsdp_sharding_strategy": "FULL"}, "not one of FULL_SHARD"),
    ({"fsdp_sharding_strategy": 9}, "not one of FULL_SHARD"),
    ({"fsdp_sharding_strategy": []}, "not one of FULL_SHARD"),
    ({"fsdp_offload_params": "maybe"}, "not true or false"),
    ({"distributed_type": "FSDP", "mixed_precision": "fp8"}, "mixed_precision='fp8' is not one of"),
    ({"distributed_type": "FSDP", "fsdp_config": "full_shard"}, "not a table of keys"),
    ({"distributed_type": "FSDP", "num_proceses": 2}, "did you mean num_processes"),
    ({"fsdp_config": {"fsdp_ofload_params": True}}, "did you mean fsdp_config.offload_params"),
    (
        {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False},
        "another key for 'parameters'",
    ),
    (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stag": 3}},
        "mean deepspeed_config.zero_stage",
    ),
    ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 7}}, "stage=7"),
]


@pytest.mark.parametrize("source, said", WRONG)
def test_what_is_none_of_its_key_is_refused(source, said):
    with pytest.raises(ConfigError, match=said):
        Config.from_accelerate(source)


def test_unknown_keys_are_left_out_when_told(caplog):
    """Twin: by default they are refused."""
    source = {"fsdp_config": {"fsdp_new": 1, "fsdp_offload_params": True}}
    assert chosen(Config.from_accelerate(source, strict=False)) == HOST
    assert "fsdp_new unknown" in caplog.text


def test_a_file_of_accelerate_is_read_wherever_a_configuration_is(tmp_path, caplog):
    """Written by Accelerate itself. It names the command that starts as many ranks."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    file = config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="FSDP",
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=8,
        num_machines=2,
        machine_rank=1,
        main_process_ip="10.0.0.1",
        main_process_port=29500,
        fsdp_config={"fsdp_version": 2, "fsdp_offload_params": True},
    )
    file.to_yaml_file(str(tmp_path / "default.yaml"))
    found = Config.make(str(tmp_path / "default.yaml"))
    assert chosen(found) == HOST | {"param_dtype": torch.bfloat16}
    launch = "torchrun --nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1"
    assert f"start it with: {launch} --master-port 29500 train.py" in caplog.text


def test_a_deepspeed_json_that_it_names_is_read(tmp_path):
    """Twin: one that is not there is told by its path."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    source = {"distributed_type": "DEEPSPEED"}
    for name in ("ds.json", "none.json"):
        source["deepspeed_config"] = {"deepspeed_config_file": str(tmp_path / name)}
        if name == "ds.json":
            assert chosen(Config.from_accelerate(source)) == {"shard": "optimizer"}
        else:
            with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
                Config.from_accelerate(source)


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "!!python/object/apply:os.system [ls]", "a: &x *x"]
)
def test_yaml_that_is_no_table_is_refused_and_runs_nothing(text, tmp_path):
    """Twin: a table of the engine's own fields."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        Config.make(path)
    path.write_text("params: host\nhost_memory: 8GiB\n")
    assert Config.make(path).params == "host"
