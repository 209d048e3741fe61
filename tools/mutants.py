"""Runs a sample of mutants of the engine's rooms, each against the tests beside it, and says which
survive.

    python tools/mutants.py [--count 12] [--seed 1] [--json bench/results/mutants/<date>.json] [room
    ...]

cosmic-ray makes the mutants, in a copy of the tree below build/; ``--count`` of each file's are
drawn. A mutant that no test notices is a survivor: it is equivalent, or a test is missing.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPY = ROOT / "build" / "mutants"
TIMEOUT_SECONDS = 300  # of one mutant's tests, at least: many hang instead of failing

# of a mutant in a session of cosmic-ray
PLACE = (
    "module_path",
    "start_pos_row",
    "start_pos_col",
    "end_pos_row",
    "end_pos_col",
    "operator_name",
    "operator_args",
    "occurrence",
)

# file below infinity/ -> the tests beside it, below tests/
TARGETS = {
    "core/plan/memory_terms.py": "core/plan/test_memory_terms.py core/plan/test_plan.py",
    "core/plan/budgets.py": (
        "core/plan/test_memory_terms.py core/plan/test_plan.py core/plan/test_placement.py"
    ),
    "core/plan/placement.py": "core/plan/test_placement.py",
    "core/plan/step_traffic.py": "core/plan/test_memory_terms.py core/plan/test_placement.py",
    "core/run/lookahead.py": "core/run/test_lookahead.py",
    "core/run/schedule.py": "core/run/test_schedule.py",
    "config.py": "core/test_config.py",
    "core/machine/sizes.py": "core/machine/test_tiers.py",
    "core/machine/limits.py": "core/machine/test_limits.py",
    "core/machine/cgroups.py": "core/machine/test_limits.py",
    "core/units/flat_param.py": "core/wrap/test_round_trips.py core/training/test_split_master.py",
    "core/units/home_arrays.py": (
        "core/units/test_home_arrays.py core/units/test_unit.py ranks/test_ranks.py"
    ),
    "core/units/unit.py": "core/units/test_unit.py core/machine/test_device.py",
    "core/params/forward_edits.py": "core/params/test_forward_edits.py core/params/test_at_rest.py",
    "core/wrap/partition.py": (
        "core/plan/test_memory_terms.py core/plan/test_plan.py core/training/test_unusual_models.py"
    ),
    "core/grads/record.py": "core/grads/test_grad_stand_ins.py core/grads/test_moves.py",
    "core/grads/bank.py": (
        "core/grads/test_grad_stand_ins.py core/training/test_steps_and_gradients.py"
        " ext/tiles/test_tiles.py"
    ),
    "core/grads/values.py": (
        "core/grads/test_grad_stand_ins.py core/grads/test_norms.py core/machine/test_device.py"
    ),
    "core/grads/changes.py": "core/grads/test_grad_stand_ins.py core/grads/test_norms.py",
    "core/grads/homes.py": "core/grads/test_norms.py core/grads/test_grad_stand_ins.py",
    "core/grads/lander.py": (
        "core/grads/test_norms.py core/grads/test_grad_stand_ins.py core/plan/test_placement.py"
    ),
    "core/grads/landing.py": "core/machine/test_device.py",
    "core/grads/opened.py": "core/grads/test_norms.py core/grads/test_grad_stand_ins.py",
    "core/grads/reducer.py": "core/grads/test_reducer.py",
    "ranks/collectives.py": "ranks/test_collectives.py",
    "core/step/stepper.py": (
        "core/step/test_stepper.py core/training/test_equals_torch.py core/machine/test_device.py"
    ),
    "core/step/rules.py": "core/step/test_rules.py",
    "core/run/prefetch.py": (
        "core/run/test_prefetch.py core/training/test_homes_change_no_bit.py"
        " core/units/test_unit.py"
    ),
    "core/grads/backward.py": (
        "core/grads/test_backward.py core/run/test_accumulate.py core/step/test_step_in_backward.py"
    ),
    "core/run/passes.py": (
        "core/run/test_passes.py core/grads/test_backward.py"
        " core/training/test_ordinary_loops.py core/training/test_unusual_models.py"
        " ext/blocks/test_recompute.py core/grads/test_grad_stand_ins.py"
        " core/run/test_activations.py core/training/test_later_groups.py"
    ),
    "core/run/tasks.py": "core/run/test_tasks.py core/training/test_ordinary_loops.py",
}


def copy_tree() -> None:
    """Makes the tree in which files are mutated."""
    shutil.rmtree(COPY, ignore_errors=True)
    for folder in ("infinity", "bench", "tests", "csrc"):
        shutil.copytree(ROOT / folder, COPY / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", COPY)


def draw(session: Path, count: int, seed: int) -> int:
    """Leaves ``count`` of the session's mutants, drawn by ``seed``: of one file, the same whenever
    it is done. Returns how many there were."""
    with sqlite3.connect(session) as database:
        # By place, for their numbers are other ones in every session.
        found = database.execute(
            f"SELECT job_id, operator_name FROM mutation_specs ORDER BY {', '.join(PLACE)}"
        ).fetchall()
        jobs = [job for job, _ in found]
        real = [
            job for job, operator in found if "BitOr_" not in operator
        ]  # those are nearly all in annotations
        drawn = set(random.Random(seed).sample(real, min(count, len(real))))
        for job in jobs:
            if job not in drawn:
                database.execute("DELETE FROM mutation_specs WHERE job_id = ?", (job,))
                database.execute("DELETE FROM work_items WHERE job_id = ?", (job,))
    return len(jobs)


def cosmic_ray(*words: str | Path) -> str:
    """Runs cosmic-ray in the copy. Returns what it prints."""
    command = [sys.executable, "-m", "cosmic_ray.cli", *map(str, words)]
    return subprocess.run(command, cwd=COPY, capture_output=True, text=True, check=True).stdout


def mutate(path: str, tests: str, count: int, seed: int) -> Iterator[dict]:
    """Tries mutants of one file. Yields what became of each."""
    session, config = COPY / "session.sqlite", COPY / "session.toml"
    session.unlink(missing_ok=True)
    paths = " ".join(f"tests/{test}" for test in tests.split())
    command = (
        f"env PYTHONPATH={COPY} OMP_NUM_THREADS=1 {sys.executable} -m pytest -q -x -m 'not slow' -p"
        f" no:cacheprovider --basetemp=pt {paths}"
    )
    began = time.monotonic()
    if (
        plain := subprocess.run(shlex.split(command), cwd=COPY, capture_output=True, text=True)
    ).returncode:
        raise SystemExit(
            f"{path}: its tests fail without a mutant, so that every one would be"
            f" found\n{plain.stdout[-2000:]}"
        )
    config.write_text(
        "[cosmic-ray]\n"
        f'module-path = "infinity/{path}"\n'
        f"timeout = {max(TIMEOUT_SECONDS, 3 * (time.monotonic() - began)):.1f}\n"
        "excluded-modules = []\n"
        f"test-command = {json.dumps(command)}\n"
        '[cosmic-ray.distributor]\nname = "local"\n'
    )
    cosmic_ray("init", config, session)
    total = draw(session, count, seed)
    cosmic_ray("exec", config, session)
    for line in cosmic_ray("dump", session).splitlines():
        item, result = json.loads(line)
        mutation = item["mutations"][0]
        yield {
            "file": path,
            "of": total,
            "line": mutation["start_pos"][0],
            "operator": mutation["operator_name"].removeprefix("core/"),
            "outcome": (
                (result or {}).get("test_outcome") or (result or {}).get("worker_outcome") or "none"
            ),
            "diff": (result or {}).get("diff") or "",
        }


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", help="files whose path begins like this (default: all)")
    parser.add_argument(
        "--count", type=int, default=12, metavar="N", help="mutants of each file (default 12)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the draw (default 1)")
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "bench" / "results" / "mutants" / f"{date.today()}.json",
        metavar="FILE",
    )
    args = parser.parse_args()
    copy_tree()
    found: list[dict] = []
    for path, tests in TARGETS.items():
        if args.rooms and not path.startswith(tuple(args.rooms)):
            continue
        of_file = list(mutate(path, tests, args.count, args.seed))
        found += of_file
        killed = sum(one["outcome"] != "survived" for one in of_file)
        print(
            f"{path}: {killed} of {len(of_file)} found ({of_file[0]['of'] if of_file else 0} in"
            " all)",
            flush=True,
        )
        survivors = [one for one in found if one["outcome"] == "survived"]
        summary = {
            "mutants": len(found),
            "found": len(found) - len(survivors),
            "seed": args.seed,
            "survivors": survivors,
        }
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    for one in found:
        if one["outcome"] == "survived":
            print(
                f"\nsurvived: infinity/{one['file']}:{one['line']} {one['operator']}\n{one['diff']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
