"""Answers: with --json, standard output has one object, whatever libraries print."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# A command whose library prints while it works, in an object's midst, and as the process ends.
SCRIPT = """
import argparse, atexit, contextlib, sys
from infinity.tools import cli
from infinity.tools.cli.answers import print_object

def run(args):
    atexit.register(lambda: print("farewell"))
    print("a library speaks")
    print_object({"done": 1})
    print("and again")
    return 3

if "twin" in sys.argv:
    cli.others_aside = contextlib.nullcontext
sys.exit(cli.answer("infinity x", run, argparse.Namespace(json="json" in sys.argv)))
"""
SAID = ["a library speaks", "and again", "farewell"]


def outcome(*words: str) -> tuple[int, list[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("words", [("json",), (), ("json", "twin")])
def test_with_json_standard_output_has_the_object_alone(words):
    """Twins: without --json, and without the redirection, what libraries print is there."""
    status, printed, told = outcome(*words)
    assert status == 3
    if words == ("json",):
        assert [json.loads(line) for line in printed] == [{"done": 1}] and told == SAID
    else:
        assert sorted(printed) == sorted([*SAID, '{"done": 1}']) and not told
