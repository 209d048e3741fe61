"""A task of SkyPilot for the best offers of `infinity cost`. SkyPilot rents the machine, and starts
the job again on another one when it is lost."""

from __future__ import annotations

import json
import re
from typing import Any

from ...errors import ConfigError

HEAD = "# A task of SkyPilot, written by `infinity cost`"
OFFERS = 3  # in their order: the next one if the first cannot be had
# Names in SkyPilot 0.14.1, of its CLOUD_REGISTRY
CLOUDS = frozenset(
    "aws azure cudo do fluidstack gcp hyperbolic ibm k8s kubernetes lambda mithril nebius oci"
    " paperspace primeintellect runpod scp seeweb shadeform slurm ssh vast verda vsphere"
    " yotta".split()
)


def task(found: dict[str, Any]) -> str:
    """Writes the task, for a report of the command. If moves are planned, its first offer is the
    plan's; each move is another launch, with the offer of its day. Offers of clouds that SkyPilot
    does not have are left out. Raises ConfigError if none has one."""
    rows, plan = [row for row in found["offers"] if _is_known(row)], found["plan"]
    others = dict.fromkeys(row["cloud"] for row in found["offers"] if not _is_known(row))
    if not rows:
        raise ConfigError(
            f"SkyPilot has no cloud of the name {', '.join(others)}. Give the price file's clouds"
            f" their names there, or leave out --sky: {', '.join(sorted(CLOUDS))}"
        )
    if plan:
        rows = sorted(rows, key=lambda row: row["name"] != plan["stays"][0]["offer"])
    lines = [f"{HEAD}: `sky jobs launch` takes it."]
    lines += [f"# Left out, for SkyPilot has no cloud {_quoted(cloud)}." for cloud in others]
    for stay in plan["stays"][1:] if plan else ():
        lines.append(f"# On day {stay['day']} ({stay['time']}) move to {stay['offer']}.")
    nodes = rows[0].get("nodes", 1)
    lines += ["name: infinity", *([f"num_nodes: {nodes}"] if nodes > 1 else [])]
    lines += ["resources:", "  ordered:"]
    for row in rows[:OFFERS]:
        accelerators = f"{row['gpu']}:{row['count']}"
        lines += [
            f"    - infra: {_quoted(_infra(row['cloud'], row['zone']))}",
            f"      accelerators: {_quoted(accelerators)}",
            f"      use_spot: {'true' if row['market'] == 'spot' else 'false'}",
        ]
        if row["instance"]:
            lines.append(f"      instance_type: {_quoted(row['instance'])}")
    lines += [
        "file_mounts:",
        "  /checkpoints:",
        "    name: infinity-checkpoints  # a bucket of your own",
        "    mode: MOUNT_CACHED",  # MOUNT takes no writes in the middle of a file
        "setup: pip install 'infinity-engine[train]'",
        *_run(nodes),
    ]
    return "\n".join(lines) + "\n"


def _run(nodes: int) -> list[str]:
    """Writes the job's line: of several machines, torchrun's."""
    job = "infinity train --config job.toml --checkpoint /checkpoints/job --resume"
    if nodes == 1:
        return [f"run: {job}"]
    return [
        "run: |",
        "  torchrun --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK \\",
        "    --nproc-per-node $SKYPILOT_NUM_GPUS_PER_NODE --master-port 29400 \\",
        '    --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" \\',
        f"    -m {job}",
    ]


def _is_known(row: dict[str, Any]) -> bool:
    return row["cloud"].lower() in CLOUDS


def _quoted(text: str) -> str:
    return json.dumps(text)  # a string of JSON is one of YAML


def _infra(cloud: str, zone: str) -> str:
    """Returns cloud/region/zone, or cloud/region for a zone that is a whole region."""
    region = re.fullmatch(r"(.*\d)-?[a-z]", zone)
    return "/".join((cloud.lower(), *([region[1]] if region else []), zone))
