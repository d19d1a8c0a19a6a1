"""Long curves in few points."""

import math

from hypothesis import given
from hypothesis import strategies as st

from manyhands.report._panels import running_mean, thin

VALUES = st.lists(st.none() | st.floats(width=32), max_size=300)


@given(VALUES, st.integers(2, 100))
def test_few_points_are_left_with_the_ends_and_the_extremes(values, most):
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


def test_a_short_curve_is_drawn_whole():
    assert thin([1.0, None, 2.0, math.nan], most=3) == [0, 2, 3]


def test_a_value_that_is_not_finite_stays_as_a_gap():
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
