"""AdEMAMix's schedules: the library's, to the bit, and refused where they have no number."""

import pytest

from infinity.ext.class_step.mixture import Mixture


@pytest.mark.parametrize("steps_of_schedule", [None, 4, 1000.0])
@pytest.mark.parametrize("betas", [(0.9, 0.999, 0.9999), (0.99, 0.9, 0.5)])
def test_the_schedules_are_the_librarys(steps_of_schedule, betas):
    """Claim: of every step, to the bit. The twin: of another rate of the slow average."""
    kind = pytest.importorskip("pytorch_optimizer").AdEMAMix
    group = {"betas": betas, "alpha": 5.0, "t_alpha_beta3": steps_of_schedule}
    for step in range(1, 12):
        found, numbers = Mixture.step(group, step, {})
        assert not numbers
        assert found["alpha"] == kind.schedule_alpha(steps_of_schedule, step, 5.0)
        assert found["beta3"] == kind.schedule_beta3(steps_of_schedule, step, betas[0], betas[2])
    other, _ = Mixture.step(group | {"betas": (*betas[:2], 0.95)}, 11, {})
    assert other != found


def test_a_schedule_that_ends_in_no_number_goes_on_with_its_last_rate():
    """The library raises there, long after the end, if the slow average is the faster one."""
    kind = pytest.importorskip("pytorch_optimizer").AdEMAMix
    with pytest.raises(ZeroDivisionError):
        kind.schedule_beta3(1, 2, 0.5, 0.25)
    group = {"betas": (0.5, 0.9, 0.25), "alpha": 5.0, "t_alpha_beta3": 1}
    assert Mixture.step(group, 2, {})[0]["beta3"] == 0.25


@pytest.mark.parametrize("changed", [{"t_alpha_beta3": 0}, {"betas": (0.0, 0.9, 0.99)}])
def test_settings_without_a_schedule_are_refused(changed):
    """Twin: without a schedule they are taken."""
    group = {"betas": (0.9, 0.99, 0.999), "alpha": 5.0, "t_alpha_beta3": 4}
    assert not Mixture.unusable(group)
    assert "Set numbers above 0, or None" in Mixture.unusable(group | changed)
    assert not Mixture.unusable(group | changed | {"t_alpha_beta3": None})
