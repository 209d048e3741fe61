"""`infinity completion`: a script for shell completion of subcommands, options and choices."""

from __future__ import annotations

import argparse
import shlex

from .answers import print_object
from .options import FLAG, HIDDEN, one_of

OPTIONS = (
    ("shell", one_of("bash", "zsh", nargs="?", default="bash"), "default bash"),
    ("--json", FLAG, "what is completed as one JSON object on stdout"),
)


def run(args: argparse.Namespace) -> int:
    """Prints the script, or its words as JSON."""
    tree = words()
    if args.json:
        print_object(tree)
    else:
        print(script(tree, args.shell), end="")
    return 0


def words() -> dict[str, dict[str, list[str]]]:
    """Lists the options of every subcommand, each with its choices."""
    from . import SUBCOMMANDS, parser_of

    return {
        name: {
            option: [str(choice) for choice in action.choices or ()]
            for action in parser_of(name)._actions
            for option in action.option_strings or ("",)
            if action.help != HIDDEN and (option or action.choices)
        }
        for name in SUBCOMMANDS
    }


def script(found: dict[str, dict[str, list[str]]], shell: str) -> str:
    """Writes the script. It completes choices after an option that has some, else options after a
    dash, else files."""
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    lines += [
        "_infinity() {",
        "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=",
    ]
    lines += [
        "  if [ $COMP_CWORD -eq 1 ]; then",
        f"    words={shlex.quote(' '.join(found))}",
        '  else case "${COMP_WORDS[1]} $before" in',
    ]
    for name, options in found.items():
        lines += [
            f"    {shlex.quote(f'{name} {option}')}) words={shlex.quote(' '.join(choices))};;"
            for option, choices in options.items()
            if choices and option
        ]
        candidates = " ".join([option for option in options if option] + options.get("", []))
        lines.append(
            f"    {shlex.quote(name)}\\ *) case $word in -*) words={shlex.quote(candidates)};; *)"
            f" words={shlex.quote(' '.join(options.get('', [])))};; esac;;"
        )
    lines += [
        "  esac; fi",
        '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _infinity infinity",
    ]
    return "\n".join(lines) + "\n"
