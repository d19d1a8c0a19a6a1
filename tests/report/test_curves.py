"""Fewer points, running means and vertical scales of curves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.tools.report._curves import choose_scale, running_mean, thin

pytestmark = pytest.mark.quick

VALUES = st.lists(st.none() | st.floats(width=32), max_size=300)


@given(VALUES, st.integers(2, 100))
def test_thinning_keeps_both_ends_and_the_extremes(values, most):
    kept = thin(values, most)
    there = [index for index, value in enumerate(values) if value is not None]
    assert kept == sorted(set(kept))
    assert set(kept) <= set(there)
    assert len(kept) <= 1.5 * most + 2  # a gap in each piece, and both ends
    if there:
        assert (kept[0], kept[-1]) == (there[0], there[-1])
    finite = [values[index] for index in there if math.isfinite(values[index])]
    if finite:
        drawn = [values[index] for index in kept if math.isfinite(values[index])]
        assert (min(drawn), max(drawn)) == (min(finite), max(finite))


def test_a_short_curve_is_not_thinned():
    assert thin([1.0, None, 2.0, math.nan], most=3) == [0, 2, 3]


def test_thinning_keeps_a_value_that_is_not_finite_as_a_gap():
    values = [float(index) for index in range(10_000)]
    values[1234] = math.nan
    assert 1234 in thin(values, most=100)


@given(VALUES, st.floats(0, 1))
def test_a_running_mean_lies_between_the_extremes(values, window):
    means = running_mean(values, window)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    assert len(means) == len(values)
    assert sum(mean is not None for mean in means) == len(finite)
    for mean in filter(lambda mean: mean is not None, means):
        slack = 1e-12 * sum(map(abs, finite))
        assert min(finite) - slack <= mean <= max(finite) + slack


@given(st.integers(0, 200), st.floats(0, 1))
def test_the_running_mean_of_a_straight_line_is_the_line(length, window):
    line = [3.0 * index for index in range(length)]
    assert running_mean(line, window) == line


FLAT = [2.0 - 0.015 * step for step in range(100)]  # a loss from 2 to 0.5
DIVERGED = [2.0 + step for step in range(100)]


@pytest.mark.parametrize("others", [1, 3])
def test_a_run_that_diverges_for_long_is_drawn_on_a_log_scale(others):
    assert choose_scale([FLAT] * others + [DIVERGED]) == (True, None)


@pytest.mark.parametrize(
    "curves",
    [[], [[]], [[math.nan]], [FLAT], [FLAT, DIVERGED[:9]], [[2.0] * 99, [3.0]], [[1.0, 90.0]]],
)
def test_curves_that_can_be_told_apart_are_drawn_whole_on_a_linear_scale(curves):
    assert choose_scale(curves) == (False, None)


def test_values_below_zero_are_never_on_a_log_scale():
    assert choose_scale([FLAT, [-value for value in FLAT], DIVERGED])[0] is False


@given(st.lists(VALUES.map(lambda values: [v for v in values if v is not None]), max_size=5))
def test_a_range_lies_within_the_values_and_shows_most_of_them(curves):
    logarithmic, shown = choose_scale(curves)
    finite = [value for curve in curves for value in curve if math.isfinite(value)]
    assert not (logarithmic and min(finite) <= 0)
    if shown is not None:
        bottom, top = shown
        slack = 1e-5 * max(map(abs, finite))
        assert min(finite) - slack <= bottom < top <= max(finite) + slack
        hidden = sum(not bottom - slack <= value <= top + slack for value in finite)
        assert hidden <= 0.04 * len(finite) + 2 * len(curves)
