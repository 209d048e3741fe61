"""`infinity attention`: its table, and the same as JSON."""

from __future__ import annotations

import json

import pytest

from infinity.tools.cli import main

HUNYUAN = "attention 30x48x80 --window 18,24,24 --q-tile 4,8,8 --kv-tile 2,8,8"
TABLE = """\
stride           tiles of keys    bound  own tiles   end to end
1x1x1               275 of 900    3.27x      6.92x        1.73x
2x1x1               250 of 900    3.60x      7.01x        1.78x
1x1x8               165 of 900    5.45x      8.34x        1.98x
2x1x8               150 of 900    6.00x      8.45x        2.02x
1x8x8                99 of 900    9.09x      9.55x        2.18x
2x8x8                90 of 900   10.00x      9.68x        2.20x
16x8x8               81 of 900   11.11x     11.11x        2.23x   block-sparse
By operations, windows gain at most 11.11x.
The least block-sparse stride, with which no tile needs a mask: 16x8x8.
"""


@pytest.fixture
def said(capsys):
    """Runs a command that succeeds, and returns what it prints."""

    def run(line: str) -> str:
        assert main(line.split()) == 0
        return capsys.readouterr().out

    return run


def test_the_table_of_the_paper_is_printed(said):
    """Method: HunyuanVideo (Hassani et al. 2025), by the command that the documents show. Twin:
    without a share nothing is said of the whole job."""
    assert said(f"{HUNYUAN} --share 60.7%") == TABLE == said(f"{HUNYUAN} --share 0.607")
    assert "end to end" not in said(HUNYUAN)


def test_json_has_what_the_table_has(said):
    """Method: the numbers of each row. Twin: another stride has a row of its own."""
    found = json.loads(said(f"{HUNYUAN} --share 0.607 --json"))
    rows = found["rows"]
    assert [f"{row['tiles']} of {row['all_tiles']}" for row in rows] == [
        f"{tiles} of 900" for tiles in (275, 250, 165, 150, 99, 90, 81)
    ]
    assert rows[-1]["bound"] == pytest.approx(found["bound_by_operations"])
    assert rows[-1]["end_to_end"] == pytest.approx(2.234, abs=1e-3)
    assert found["least_block_sparse"] == rows[-1]["stride"] == [16, 8, 8]
    one = json.loads(said(f"{HUNYUAN} --stride 1,8,1 --json"))
    assert [row["stride"] for row in one["rows"]] == [[1, 8, 1]]
    assert one["rows"][0]["tiles"] == 165 and one["rows"][0]["end_to_end"] is None


def test_a_causal_axis_is_never_block_sparse(said):
    """Method: its last tile of keys has a mask. Twin: the same axis, not causal."""
    line = "attention 32768 --window 2048 --q-tile 128 --kv-tile 128"
    assert "No stride is block-sparse" in said(f"{line} --causal 1")
    assert said(line).endswith("mask: 256.\n")


def test_dilation_leaves_a_window_its_keys_and_dense_attention_all_tiles(said):
    """Method: in groups of 64 tokens a window of 16 has two tiles of 8 at least; dense attention
    reads 32. Twin: without dilation strides gain the same, of the same tiles."""
    line = "attention 256 --window 16 --q-tile 8 --kv-tile 8 --stride 16 --json"
    for dilation in (4, 1):
        (row,) = json.loads(said(f"{line} --dilation {dilation}"))["rows"]
        assert (row["tiles"], row["all_tiles"], row["block_sparse"]) == (2, 32, True)
