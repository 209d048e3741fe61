"""A file's format is read by its number; another one is refused by name, with what reads it."""

from __future__ import annotations

import pytest

import infinity
from infinity.untrusted import Format

FORMAT = Format("list", number=4, oldest=2, readers={1: "The first version reads it."})


@pytest.mark.parametrize("number", [2, 3, 4])
def test_formats_from_the_oldest_to_the_own_are_read(number):
    assert FORMAT.check("a.json", {"format": number}) == number


@pytest.mark.parametrize(
    "number, told",
    [
        (1, "format 1, this version reads 2 to 4. The first version reads it"),
        (5, "format 5, .* a newer version wrote it.* pip install --upgrade"),
        (10**30, "a newer version wrote it"),
        (0, "no version of Infinity wrote it"),
        (-3, "no version of Infinity wrote it"),
        (None, "format None, .* no version of Infinity wrote it"),
        ("4", "format '4', .* no version of Infinity wrote it"),
        (True, "no version of Infinity wrote it"),
        (4.0, "no version of Infinity wrote it"),
    ],
)
def test_other_numbers_are_refused_with_what_reads_the_file(number, told):
    with pytest.raises(infinity.UsageError, match=f"a.json is a list of .*{told}"):
        FORMAT.check("a.json", {"format": number})


def test_a_file_without_a_number_has_that_of_its_kind():
    """Method: files of before there were numbers. Twin: a kind that always had them refuses."""
    assert Format("list", number=2, unnumbered=1).check("a.json", {}) == 1
    with pytest.raises(infinity.UsageError, match="format None"):
        FORMAT.check("a.json", {})


def test_what_is_written_is_read():
    assert FORMAT.check("a.json", FORMAT.numbered({"a": 1})) == FORMAT.number
