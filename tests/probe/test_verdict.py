"""The test that calls a branch level: its quantiles, and its verdicts on given losses."""

import doctest
import math

import pytest

from manyhands.probe import _branches, _probe, _verdict
from manyhands.probe._verdict import (
    chi_square,
    compare,
    largest_level,
    student_t,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("module", [_verdict, _branches, _probe])
def test_the_examples_run(module):
    assert doctest.testmod(module).failed == 0


def test_the_quantiles_are_those_of_printed_tables():
    assert [round(student_t(0.95, n), 3) for n in (1, 2, 5, 15)] == [6.314, 2.920, 2.015, 1.753]
    assert [round(chi_square(0.95, n), 2) for n in (1, 2, 5, 15)] == [3.84, 5.99, 11.07, 25.0]


def test_losses_that_are_not_finite_are_no_exception():
    good, bad = [[1.0, 2.0], [1.5, 2.5]], [[1.0, math.nan], [1.5, 2.5]]
    assert compare(bad, good, 0.95).verdict == "diverged"
    assert compare(good, bad, 0.95).verdict == "undecided"
    assert compare([[math.inf] * 2] * 2, good, 0.95).verdict == "diverged"


def test_equal_losses_without_any_spread_are_undecided():
    """Nothing was shown: margin and difference are both zero."""
    same = [[1.0, 2.0], [1.0, 2.0]]
    assert compare(same, same, 0.95).verdict == "undecided"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["reference", "level", "level", "level"], (8, math.inf)),
        (["reference", "level", "undecided", "level"], (2, math.inf)),
        (["reference", "undecided", "worse", "level"], (1, 4)),
        (["reference", "worse", "level", "worse"], (1, 2)),
        (["reference", "level", "level", "diverged"], (4, 8)),
        (["diverged", "undecided", "undecided", "undecided"], (1, math.inf)),
    ],
)
def test_the_first_that_is_not_level_ends_the_sequence(verdicts, expected):
    assert largest_level([1, 2, 4, 8], verdicts) == expected
