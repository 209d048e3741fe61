"""The script of `infinity plan --script`: what starts a planned job, as lines for bash.

It writes the options of the job to a file and starts `infinity train` with them on every rank of a
node. Words after the script's name are options of `infinity train`: `--data`, `--out`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from ...errors import ConfigError
from ..cli.options import Parser
from ..train.options import OPTIONS, SCHEDULES

REMARKS = {
    "device_memory": "  # of each GPU: what saved activations and buffers leave to the state"
}
FILE, MODEL, PORT = "job.toml", "model.json", 29400
RETURNS = "--checkpoint SHARED_FOLDER --resume"  # what has a job go on from its last save


def script(
    found: Mapping[str, Any],
    settings: Mapping[str, Any],
    train: Mapping[str, Any],
    model: Any,
) -> Iterator[str]:
    """Yields the lines of the script of a plan, of the best mesh if there are several.

    ``settings``: of the engine, by the names of `Config`. ``train``: options of `infinity train`.
    ``model``: a path, or a configuration of transformers without a file, whose weights are fresh.
    """
    nodes = found["nodes"]
    yield "set -eu"
    if model is not None and not isinstance(model, Path):
        yield from _file(MODEL, model.to_json_string(use_diff=True).rstrip())
        model = Path(MODEL)
    options = ({} if model is None else {"model": str(model)}) | dict(train) | _mesh_options(found)
    _check_train(options, found["ranks"])
    lines = [
        f"{name} = {_value(value)}{REMARKS.get(name, '') if 'meshes' in found else ''}"
        for name, value in settings.items()
    ]
    lines += ["", "[train]", *(f"{name} = {_value(value)}" for name, value in options.items())]
    yield from _file(FILE, "\n".join(lines).strip())
    devices = found["ranks"] // nodes
    yield "# Words after the name of this script are options. To come back after a failure, give:"
    yield f"#   --data DATA {RETURNS}"
    yield (
        f"# Under Slurm, after the lines above: sbatch --nodes {nodes} --gpus-per-node {devices}"
        f" examples/slurm.sh -m infinity train --config {FILE} --data DATA {RETURNS}"
    )
    if nodes > 1:
        yield "# On each node, with NODE_RANK from 0 on, and MASTER_ADDR the first one's address:"
    yield " ".join(_torchrun(nodes, devices))


def _check_train(options: Mapping[str, Any], ranks: int) -> None:
    """Raises what `infinity train` would raise for these options on ``ranks``."""
    from ..train.mesh import mesh_sizes

    args = Parser("", OPTIONS).parse_args([])
    vars(args).update(options)
    mesh_sizes(args, ranks)


def _torchrun(nodes: int, devices: int) -> Iterator[str]:
    yield "torchrun"
    if nodes == 1:
        yield "--standalone"
    else:
        yield f'--nnodes {nodes} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'
        yield f"--master-port {PORT}"
    yield f'--nproc-per-node {devices} -m infinity train --config {FILE} "$@"'


def _mesh_options(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the planned mesh, and its parts of the batch."""
    plan = found["meshes"][0] if "meshes" in found else found
    mesh = plan.get("mesh", {"dp": found["ranks"]})
    sizes = {axis: size for axis, size in mesh.items() if size > 1} or {"dp": 1}
    options = {
        "mesh": ",".join(f"{axis}={size}" for axis, size in sizes.items()),
        "batch_size": plan["micro_batch"],
        "accumulate": plan["micro_batches"],
    }
    if plan.get("schedule") is not None:
        if plan["schedule"] not in SCHEDULES:
            raise ConfigError(
                f"--script: infinity train does not run the schedule {plan['schedule']}: plan with"
                f" one of {', '.join(SCHEDULES[1:])} by --schedule"
            )
        options["pipeline_schedule"] = plan["schedule"]
        options["pipeline_chunks"] = len(plan["layers"]) // plan["mesh"]["pp"]
    return options


def _value(value: Any) -> str:
    if isinstance(value, (str, bool, int, float)):
        return json.dumps(value)  # a string of JSON is one of TOML
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    raise ConfigError(f"--script: {value!r} has no form in TOML: give it in a file, by --config")


def _file(name: str, text: str) -> Iterator[str]:
    yield f"cat > {quote(name)} <<'END'"
    yield text
    yield "END"
