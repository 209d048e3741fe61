"""Docstrings of public functions open with what the function does: a verb in the third person
("Returns", "Counts").

Words used here:

**public**: a function or method whose name begins with no underscore, inside classes and functions
too; properties are attributes. **opening**: a docstring's first word, without punctuation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import infinity

PACKAGE = Path(infinity.__file__).parent
BENCH = PACKAGE.parent / "bench"

Function = ast.FunctionDef | ast.AsyncFunctionDef

PROPERTIES = {"property", "cached_property", "setter", "getter", "deleter"}

# A new verb is added here, in its place in the alphabet; a noun or a clause is not.
SORTED_VERBS = """
Accumulates Adds Advances Allocates Appends Applies Arranges Asks Assembles Attaches Averages Begins
Binds Blocks Borrows Brings Broadcasts Builds Caches Calls Cancels Changes Charges Checks Chooses
Classifies Clips Closes Collects Comes Compares Completes Compresses Computes Concatenates
Configures Connects Continues Converts Copies Counts Creates Cuts Decides Decodes Defines Describes
Destroys Detects Discards Discovers Divides Does Draws Drops Encodes Ends Enlarges Enqueues Ensures
Enters Estimates Evaluates Evicts Examines Exchanges Exposes Fetches Fills Finds Finishes Forgets
Formats Frees Gathers Gives Goes Guards Has Holds Hooks Imports Initialises Installs Joins Keeps
Lands Launches Lays Leaves Lets Lists Loads Locks Looks Makes Maps Marks Matches Measures Meets
Merges Moves Multiplies Names Notes Opens Orders Overwrites Packs Parses Passes Plans Predicts
Prepares Prints Publishes Puts Queues Raises Re-raises Reads Rebinds Receives Recognises Records
Recovers Redistributes Reduces Refers Refuses Registers Releases Removes Replaces Reports Requests
Reserves Resets Restarts Restores Returns Rounds Runs Saves Says Scales Selects Sends Sets Settles
Shards Simulates Skips Sorts Spends Splits Starts Steps Stops Stores Streams Strikes Submits
Summarises Sums Surrounds Swaps Synchronises Takes Tells Ties Times Traces Tracks Translates Treats
Turns Undoes Unregisters Verifies Waits Warns Watches Wraps Writes Yields Zeroes
""".split()
VERBS = frozenset(SORTED_VERBS)


def is_property(function: Function) -> bool:
    """Tells whether a decorator makes ``function`` an attribute."""
    found = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    return any(
        (each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "")) in PROPERTIES
        for each in found
    )


def documented(source: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, words of the docstring) of every public function in ``source`` that has one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function) and not node.name.startswith("_") and not is_property(node):
            if words := (ast.get_docstring(node) or "").split():
                yield node.name, words


def opening(words: list[str]) -> str:
    return words[0].strip(".,:;!?`'\"()")


def violations(sources: dict[str, str]) -> list[str]:
    """Lists "file:function: first words" of every docstring in ``sources`` (path -> text) that
    opens with no verb."""
    return [
        f"{path}:{name}: {' '.join(words[:5])}"
        for path, source in sorted(sources.items())
        for name, words in documented(source)
        if opening(words) not in VERBS
    ]


def sources() -> dict[str, str]:
    return {
        str(path.relative_to(PACKAGE.parent)): path.read_text()
        for folder in (PACKAGE, BENCH)
        for path in folder.rglob("*.py")
    }


def test_docstrings_of_public_functions_open_with_a_verb():
    """Reads every docstring of the package and of the benchmarks."""
    assert not violations(sources())


def test_the_verbs_are_sorted():
    """Compares the list with its alphabet: each verb stands there once."""
    assert sorted(VERBS) == SORTED_VERBS


def test_a_noun_is_found():
    """The twin: nouns and clauses are reported wherever the function stands; verbs, properties and
    private names are not."""
    wrong = """
def nbytes():
    '''Bytes of a parameter.'''

class Shard:
    async def fetch(self):
        '''STORED -> FETCHING: starts reading.'''
        def inside():
            '''Whether it is there.'''

    @staticmethod
    def value():
        '''``value`` that was sent.'''
"""
    assert sorted(violations({"core/units/flat_param.py": wrong})) == [
        "core/units/flat_param.py:fetch: STORED -> FETCHING: starts reading.",
        "core/units/flat_param.py:inside: Whether it is there.",
        "core/units/flat_param.py:nbytes: Bytes of a parameter.",
        "core/units/flat_param.py:value: ``value`` that was sent.",
    ]
    right = """
def nbytes():
    '''Returns: bytes of a parameter.'''

def undocumented():
    pass

def _private():
    '''Bytes.'''

class Shard:
    @property
    def size(self):
        '''The size.'''

    @functools.cached_property
    def whole(self):
        '''The whole.'''

    @size.setter
    def size(self, value):
        '''The size.'''
"""
    assert not violations({"core/units/flat_param.py": right})
