"""The best number of passes: the closed form against trying all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.ramp._decision import (
    Noise,
    StepTime,
    efficiency,
    fastest_passes,
    goodput,
    most_efficient_passes,
)

pytestmark = pytest.mark.quick

positive = st.floats(1e-6, 1e6)
noises = st.builds(Noise, positive, positive)
times = st.builds(StepTime, st.floats(0, 1e3), st.floats(1e-4, 1e3))


@given(noises, times, st.floats(0.1, 64), st.integers(1, 200))
def test_the_closed_form_is_the_best_of_all_numbers_of_passes(noise, time, scale_per_pass, most):
    chosen = fastest_passes(noise, time, scale_per_pass, most)
    best = max(goodput(noise, time, scale_per_pass, p) for p in range(1, most + 1))
    assert 1 <= chosen <= most
    assert goodput(noise, time, scale_per_pass, chosen) == pytest.approx(best, rel=1e-9)


@given(noises, st.floats(0.01, 1), st.floats(1, 64), st.integers(1, 200))
def test_the_largest_efficient_batch_is_that_of_a_search(noise, least, scale_per_pass, most):
    chosen = most_efficient_passes(noise, least, scale_per_pass, most)

    def is_efficient(passes, tolerance):
        return efficiency(noise, scale_per_pass * passes) >= least * (1 + tolerance)

    assert chosen == 1 or is_efficient(chosen, -1e-6)
    assert chosen == most or not is_efficient(chosen + 1, 1e-6)


def test_a_case_on_paper():
    """a = 4 b and noise scale 16: the batch is sqrt(4 x 16) = 8 small batches."""
    assert fastest_passes(Noise(2.0, 32.0), StepTime(0.4, 0.1), 1.0, most=64) == 8
    assert fastest_passes(Noise(2.0, 32.0), StepTime(0.4, 0.1), 1.0, most=5) == 5
    # a pass of four small batches: sqrt(4 x 16 / 4) passes
    assert fastest_passes(Noise(2.0, 32.0), StepTime(0.4, 0.1), 4.0, most=64) == 4


def test_no_noise_no_signal_and_no_overhead():
    assert fastest_passes(Noise(1.0, 0.0), StepTime(9.0, 0.1), 1.0, most=64) == 1
    assert fastest_passes(Noise(0.0, 1.0), StepTime(9.0, 0.1), 1.0, most=64) == 64
    assert fastest_passes(Noise(1.0, 9.0), StepTime(0.0, 0.1), 1.0, most=64) == 1
    assert fastest_passes(Noise(0.0, 0.0), StepTime(9.0, 0.1), 1.0, most=64) == 1
    assert most_efficient_passes(Noise(0.0, 0.0), 0.5, 1.0, most=64) == 1
    assert most_efficient_passes(Noise(0.0, 1.0), 0.5, 1.0, most=64) == 64
    assert most_efficient_passes(Noise(1.0, 9.0), 1.0, 1.0, most=64) == 1
