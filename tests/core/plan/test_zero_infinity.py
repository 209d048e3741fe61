"""The tables of ZeRO-Infinity (Rajbhandari et al., 2021): memory of transformers, and what a link
allows of a device's rate.

**print**: the number in the paper, in TiB or GiB. A step has 1,024 tokens a sample.
"""

from __future__ import annotations

import pytest
from paper_formulas import (
    bandwidth_for,
    efficiency,
    intensity_of_activations,
    intensity_of_state,
    intensity_of_weights,
)

from infinity.errors import ConfigError
from infinity.tools.plan.efficiency import explain

# T parameters, layers, width, heads; TiB of states, of all that is saved, of checkpoints; GiB of
# the largest gathered layer, and of what is saved between checkpoints
FIGURE_2A = [
    (0.10, 80, 10240, 128, 1.83, 2.03, 0.05, 1.95, 1.63),
    (0.50, 100, 20480, 160, 9.16, 3.91, 0.12, 6.25, 2.50),
    (1.01, 128, 25600, 256, 18.31, 7.13, 0.20, 9.77, 3.56),
    (10.05, 195, 65536, 512, 182.81, 24.38, 0.76, 64.00, 8.00),
    (101.47, 315, 163840, 1024, 1845.70, 88.59, 3.08, 400.00, 18.00),
]
NODE, GPU, LENGTH = 32, 2, 1024  # samples of a node and of one of its GPUs
PEAK = 70e12  # operations per second that a V100 reaches


def memory(layers: int, width: int, heads: int) -> list[float]:
    """The columns of a row, by the paper's equations 1 to 5."""
    saved = 2 * LENGTH * (16 * width + 2 * heads * LENGTH)
    return [
        12 * layers * width**2 / 1e12,
        240 * layers * width**2 / 2**40,
        NODE * saved * layers / 2**40,
        2 * NODE * LENGTH * width * layers / 2**40,
        16 * width**2 / 2**30,
        GPU * saved / 2**30,
    ]


@pytest.mark.parametrize("row", FIGURE_2A)
def test_zero_infinity_figure_2a(row):
    """All 30 numbers but one: the gathered layer of 0.1 T is printed as 1.95 GiB and is 1.5625 by
    equation 4, with the width that fits all its other columns."""
    parameters, layers, width, heads, *printed = row
    found = memory(layers, width, heads)
    expected = [parameters, *printed]
    if width == 10240:
        assert found[4] == 1.5625 and expected[4] == 1.95
        del found[4], expected[4]
    assert found == pytest.approx(expected, abs=0.006)


def test_figure_3():
    """What the text reads from it: weights at 70 GB/s, activations, and the optimizer's state."""
    assert efficiency(intensity_of_weights(1024), 70e9, PEAK) == pytest.approx(0.506, abs=5e-4)
    assert efficiency(intensity_of_activations(2048), 2e9, PEAK) == pytest.approx(0.584, abs=5e-4)
    needed = bandwidth_for(0.5, intensity_of_activations(8192), PEAK)
    assert needed == pytest.approx(0.356e9, rel=1e-3)
    state = bandwidth_for(0.9, intensity_of_state(2 * 1024), PEAK)
    assert state == pytest.approx(1.23e12, rel=1e-3)
    assert efficiency(intensity_of_state(2 * 1024), state, PEAK) == pytest.approx(0.9)


def test_the_last_table_is_proportional():
    """Devices of 0.07, 0.7 and 7 PFLOP/s need 3, 30 and 300 GB/s to the host, and 70, 700 and 7,000
    between devices, for one efficiency."""
    for rates in ((3e9, 30e9, 300e9), (70e9, 700e9, 7000e9)):
        found = {
            round(efficiency(1024, rate, peak), 9)
            for rate, peak in zip(rates, (0.07e15, 0.7e15, 7e15))
        }
        assert len(found) == 1


def test_the_line_of_a_plan_says_what_helps():
    """71 % without overlap becomes 91 % with four times the tokens. Twins: a link that moves
    nothing, one that is good enough, and rates of 0."""
    said = explain("host's links", 71.0, 29.0)
    waits = "the GPU waits for the host's link: it computes 71\u2013100 % of the time"
    assert said == f"{waits}; a batch 4 times as large would keep it busy at least 91 %"
    assert explain("disks", 1.0, 0.0) == ""
    assert "batch" not in explain("disks", 95.0, 5.0)
    with pytest.raises(ConfigError, match="above 0"):
        efficiency(1024, 0.0, PEAK)
