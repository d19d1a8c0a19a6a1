"""Where the decisions lead, on simulated runs whose best batch is known by trying all of them."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.ramp._decision import (
    GROWTH,
    PRICE_OF_A_STEP,
    Limits,
    Noise,
    StepTime,
    decide,
    efficiency,
    goodput,
)
from manyhands.ramp._observed import StepTimes
from manyhands.scaling._noise import gain

pytestmark = pytest.mark.quick

positive = st.floats(1e-3, 1e3)


def simulate(noise, time, limits, *, steps=400, every=5, jitter=0.0, start=1, scale_per_pass=1.0):
    """Return the passes of every step of a run whose noise does not change."""
    generator, times, passes, seen = random.Random(0), StepTimes(), start, []
    for step in range(1, steps + 1):
        seen.append(passes)
        times.add(passes, time.seconds(passes) * (1 + jitter * generator.uniform(-1, 1)))
        if step % every == 0:
            passes = decide(
                passes,
                noise,
                times.fit(),
                scale_per_pass,
                limits,
                timed_here=passes in times.seconds_by_passes(),
            ).passes
    return seen


@given(positive, positive, st.floats(0.0, 100), st.integers(1, 64))
def test_a_run_reaches_the_fastest_batch_and_stays(sqr, var, fixed, most):
    noise, time = Noise(sqr, var), StepTime(fixed, 1.0)
    last = simulate(noise, time, Limits(most=most))[-1]
    best = max(goodput(noise, time, 1.0, p) for p in range(1, most + 1))
    # within the margin, and within one step of exploration at the very end
    assert goodput(noise, time, 1.0, last) >= best * 0.9


def test_the_batch_does_not_flutter():
    """With 10 % of noise in every step's time it moves to the best batch, and hardly ever again."""
    seen = simulate(Noise(1.0, 256.0), StepTime(4.0, 1.0), Limits(most=128), jitter=0.1)
    changes = sum(a != b for a, b in pairwise(seen[100:]))
    assert changes <= 6
    assert 24 <= seen[-1] <= 43  # the best is 32


def test_a_decision_changes_the_batch_by_a_limited_factor():
    seen = simulate(Noise(1.0, 1e6), StepTime(4.0, 1.0), Limits(most=64))
    assert seen[-1] == 64
    assert seen[5] == 3  # to measure the time of a pass
    assert all(b <= GROWTH * a for a, b in pairwise(seen[5:]))


@given(positive, positive, st.floats(0.05, 1.0))
def test_samples_keep_the_stated_worth(sqr, var, least):
    noise = Noise(sqr, var)
    limits = Limits("samples", least, most=64)
    last = simulate(noise, StepTime(1.0, 1.0), limits)[-1]
    assert last == 1 or efficiency(noise, last) >= least * (1 - 1e-6)
    assert last == 64 or efficiency(noise, last + 1) < least * (1 + 1e-6)


@given(positive, positive)
def test_few_steps_for_few_samples(sqr, var):
    """A step costs 0.8 small batches more than it has: that has nearly the lowest price."""
    noise = Noise(sqr, var)
    last = simulate(noise, StepTime(100.0, 1.0), Limits("samples", most=64))[-1]

    def price(passes):
        return (PRICE_OF_A_STEP + passes) / gain(sqr, var, passes)

    assert price(last) <= min(map(price, range(1, 65))) * 1.01 * (1 + 1e-6)  # within the margin
    assert efficiency(noise, last) >= 0.66  # 0.85, but for whole numbers and the margin


def test_the_price_of_a_step_keeps_a_sample_worth_85_percent():
    """Whatever the noise, at the batch that is best for it: so says the module's first page."""
    worth = [
        efficiency(Noise(1.0, var), math.sqrt(PRICE_OF_A_STEP * var))
        for var in (0.8 + 0.01 * k for k in range(10_000))
    ]
    assert min(worth) == pytest.approx(0.8541, abs=1e-4)


def test_fewest_steps_is_the_largest_batch():
    assert simulate(Noise(1.0, 1.0), StepTime(1.0, 1.0), Limits("steps", most=48))[-1] == 48


def test_another_number_of_passes_is_tried_while_the_noise_is_unknown():
    assert decide(1, None, StepTime(4.0, 1.0), 1.0, Limits(most=64)).passes == 2
    assert decide(1, None, StepTime(4.0, 1.0), 1.0, Limits(most=1)).reason == "stay"


def test_a_lower_limit_holds_at_once():
    """A run that continues with less room for its batch."""
    decision = decide(32, Noise(1.0, 1e6), StepTime(4.0, 1.0), 1.0, Limits(most=8))
    assert decision.passes == 8


@given(st.integers(1, 64), st.integers(2, 64))
def test_exploring_always_finds_another_number_of_passes(passes, most):
    passes = min(passes, most)
    decision = decide(passes, Noise(1.0, 1.0), None, 1.0, Limits(most=most))
    assert decision.reason == "explore"
    assert 1 <= decision.passes <= most and decision.passes != passes
