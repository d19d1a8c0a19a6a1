"""How often the test that calls a branch level is wrong, on simulated losses."""

import math
import random
from collections import Counter

import pytest

from manyhands.probe._verdict import MEANINGFUL, chi_square, compare, spread_bounds, student_t


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 8, 15, 31])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.95, 0.999])
def test_the_quantiles_are_those_of_scipy(degrees, probability):
    stats = pytest.importorskip("scipy.stats")
    assert student_t(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees))
    for level in (probability, 1.0 - probability):
        assert chi_square(level, degrees) == pytest.approx(stats.chi2.ppf(level, degrees))


def normal():
    return random.gauss(0.0, 1.0)


def verdicts(draws, behind, likeness, repeats=6, held_out=16, paired=True, draw=normal):
    """How often a branch gets each verdict; its true loss is `behind` spreads above scale 1's.

    `likeness` is the correlation of the two branches of a repeat; `draw` draws their luck.
    """
    random.seed(0)
    counts = Counter()
    for _ in range(draws):
        hardness = [random.gauss(0.0, 3.0) for _ in range(held_out)]
        effects = [random.gauss(behind, 0.2) for _ in range(held_out)]
        small, large = [], []
        for _ in range(repeats):
            luck, other = draw(), draw()
            same = luck if paired else draw()
            own = likeness * same + math.sqrt(1.0 - likeness**2) * other
            small.append([luck + h for h in hardness])
            large.append([own + h + e for h, e in zip(hardness, effects, strict=True)])
        counts[compare(large, small, 0.95).verdict] += 1
    return {verdict: count / draws for verdict, count in counts.items()}


@pytest.mark.parametrize("likeness", [0.0, 0.7, 0.95, 0.999])
@pytest.mark.parametrize("repeats", [3, 6])
def test_a_branch_at_the_margin_is_misjudged_in_one_case_of_twenty(likeness, repeats):
    found = verdicts(1000, MEANINGFUL, likeness, repeats)
    assert found.get("level", 0.0) <= 0.07 and found.get("worse", 0.0) <= 0.07  # 0.05 and luck


@pytest.mark.parametrize("likeness", [0.0, 0.7, 0.95])
def test_luck_with_a_long_tail_misleads_in_one_case_of_eight_at_most(likeness):
    found = verdicts(
        1000, MEANINGFUL, likeness, draw=lambda: random.expovariate(1.0) - 1.0
    )  # the mean is 0, the spread 1
    assert found.get("level", 0.0) <= 0.14  # 0.12 and luck


def test_pairing_finds_level_branches_that_unpaired_ones_leave_undecided():
    paired = verdicts(500, 0.0, likeness=0.95)
    unpaired = verdicts(500, 0.0, likeness=0.95, paired=False)
    assert paired["level"] > 0.9 > 0.5 > unpaired["level"]


def test_a_branch_far_behind_is_worse_and_one_ahead_is_level():
    assert verdicts(200, 10.0, likeness=0.9)["worse"] > 0.95
    assert verdicts(200, -3.0, likeness=0.9)["level"] > 0.95


def test_few_held_out_micro_batches_leave_more_undecided():
    many, few = (verdicts(300, 0.0, 0.9, held_out=n).get("level", 0.0) for n in (16, 2))
    assert few < many


def test_the_bounds_of_the_spread_hold_it_in_nineteen_cases_of_twenty():
    random.seed(0)
    misses = Counter()
    for _ in range(2000):
        values = [random.gauss(0.0, 2.0) for _ in range(5)]
        mean = sum(values) / 5
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / 4)
        low, high = spread_bounds(spread, 5, 0.95)
        misses.update(["above"] * (low > 2.0) + ["below"] * (high < 2.0))
    assert all(0.035 < misses[side] / 2000 < 0.065 for side in ("above", "below"))
