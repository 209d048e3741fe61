"""Runs a script on the late device, by itself and under `infinity run`. Prints what each printed as
one JSON object, and the device's bytes after a model was moved there.

usage: script_late.py <script> <folder>
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = map(str, Path(__file__).parents[1].glob("*/"))

import late_device


def printed(path: str, words: list[str], options: list[str] | None) -> str:
    """What the script prints with ``words``; under the command, with ``options``."""
    from infinity.tools.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        if options is None:
            sys.argv = [path, *words]
            runpy.run_path(path, run_name="__main__")
        else:
            assert main(["run", *options, path, *words]) == 0
    return out.getvalue()


def moved_nbytes(late: object) -> list[int]:
    """Bytes on the device after `.to(device)`: with the model at home elsewhere, on the device, and
    without the engine."""
    import torch

    import infinity

    found = []
    for home in ("host", "device", None):
        with infinity.auto(home) if home is not None else contextlib.nullcontext():
            before = late.live_nbytes()
            model = torch.nn.Linear(512, 512, bias=False).to("late")
            assert next(model.parameters()).device == torch.device("late:0")
            found.append(late.live_nbytes() - before)
            del model
    return found


def main() -> None:
    late = late_device.install()
    script, folder = sys.argv[1:]
    home = ["--params", "nvme", "--optimizer", "host", "--nvme-path", folder]
    texts = [
        [printed(script, words, options) for options in (None, home)] for words in ([], ["early"])
    ]
    print(json.dumps({"texts": texts, "moved": moved_nbytes(late)}))


if __name__ == "__main__":
    main()
