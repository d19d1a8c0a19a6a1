"""The time of a step, fitted to times with pauses in them."""

import random
from statistics import fmean

import pytest

from manyhands.ramp._decision import Noise, StepTime
from manyhands.ramp._observed import ERROR, MEMORIES, WINDOW, Evidence, StepTimes, memory_for

pytestmark = pytest.mark.quick


def filled(steps, time, noise=0.0, pauses=0.0, seed=0):
    """Return the times of steps of these numbers of passes; some come with a long pause."""
    generator = random.Random(seed)
    times = StepTimes()
    for passes in steps:
        seconds = time.seconds(passes) * (1 + noise * generator.uniform(-1, 1))
        times.add(passes, seconds + (30.0 if generator.random() < pauses else 0.0))
    return times


def test_exact_times_give_the_exact_line():
    fit = filled([1, 2, 5] * 3, StepTime(0.4, 0.1)).fit()
    assert (fit.fixed, fit.per_pass) == pytest.approx((0.4, 0.1))


def test_one_number_of_passes_says_nothing_about_the_two_parts():
    assert filled([4] * 50, StepTime(0.4, 0.1)).fit() is None
    assert filled([4] * 50 + [5, 5], StepTime(0.4, 0.1)).fit() is None
    assert filled([4] * 50 + [5] * 3, StepTime(0.4, 0.1)).fit() is not None


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_pauses_hardly_move_the_fit(seed):
    steps = [1] * 20 + [2] * 20 + [3] * 20 + [8] * 40
    fit = filled(steps, StepTime(0.4, 0.1), noise=0.1, pauses=0.1, seed=seed).fit()
    for passes in (1, 4, 8):
        assert fit.seconds(passes) == pytest.approx(0.4 + 0.1 * passes, rel=0.1)


def test_neither_part_is_ever_negative():
    falling, steep = StepTimes(), StepTimes()
    for _ in range(5):
        falling.add(1, 1.0), falling.add(2, 0.5)
        steep.add(1, 0.1), steep.add(2, 1.0)
    for times in (falling, steep):
        fit = times.fit()
        assert fit.fixed >= 0.0 and fit.per_pass > 0.0


@pytest.mark.parametrize("seed", range(3))
def test_times_with_a_tail_are_predicted_in_the_mean(seed):
    """Most steps are faster than the mean: a median would be 9 % too low."""
    generator, times = random.Random(seed), StepTimes()
    for passes in [2] * 40 + [6] * 40 + [9] * 160:
        times.add(passes, (6.0 + passes) * generator.gammavariate(4, 1 / 4))
    assert times.fit().seconds(9) == pytest.approx(15.0, rel=0.07)


def test_ranks_that_are_late_in_turns_are_no_slower_than_a_step():
    """Each comes to the end of a step at a moment of its own, and then waits for the others."""
    generator, times = random.Random(0), StepTimes()
    late = [0.0] * 4
    for passes in [1] * 10 + [3] * 30 + [6] * 60:
        before, late = late, [generator.expovariate(1 / 2.0) for _ in range(4)]
        seconds = [6.0 + passes + now - then for now, then in zip(late, before, strict=True)]
        times.add(passes, fmean(seconds))
    assert times.fit().seconds(6) == pytest.approx(12.0, rel=0.05)


def test_a_machine_that_became_slower_is_noticed():
    times = filled([1, 2] * WINDOW, StepTime(0.4, 0.1))
    for passes in [1, 2] * (WINDOW // 2):
        times.add(passes, 2.0 + 0.1 * passes)
    assert times.fit().fixed == pytest.approx(2.0)


@pytest.mark.parametrize(("gradients", "scale"), [(8, 8.0), (8, 10.0), (10, 9.0)])
def test_averages_look_back_until_their_error_is_half_of_the_signal(gradients, scale):
    noise = Noise(sqr=1.0, var=20.0)
    memory = memory_for(noise, gradients, scale)
    assert MEMORIES[0] < memory < MEMORIES[1]
    evidence = Evidence()
    for _ in range(round(memory / gradients)):
        evidence.add(gradients, scale, 1.0 - 1e-9)
    assert evidence.error * noise.var == pytest.approx(ERROR * noise.sqr, rel=0.1)


def test_averages_never_look_back_further_than_without_a_ramp():
    assert memory_for(Noise(0.0, 1.0), 8, 8.0) == memory_for(Noise(1e-9, 1.0), 8, 8.0) == 1000.0
    assert memory_for(Noise(1.0, 0.0), 8, 8.0) == 50.0


@pytest.mark.parametrize("directions", [1, 4, 50])
def test_the_error_is_that_of_noise_in_as_many_directions_as_there_are(directions):
    """Against the scatter of estimates from Gaussian gradients around zero, 8 in each step."""
    generator = random.Random(0)

    def one(directions):
        """A step's estimate of the squared true gradient, which is 0, at a noise of 1."""
        size = directions**-0.5
        gradients = [[generator.gauss(0.0, size) for _ in range(directions)] for _ in range(8)]
        small = sum(x * x for g in gradients for x in g) / 8
        mean = sum((sum(x) / 8) ** 2 for x in zip(*gradients, strict=True))
        return (8 * mean - small) / 7

    evidence, average = Evidence(), 0.0
    for step in range(300):
        new = one(directions)
        if step:
            evidence.add_deviation(8, 8.0, new - average / step)
        evidence.add(8, 8.0, smoothing=0.9)
        average += new
    expected = (2 / (directions * 8 * 7) * (1 - 0.9) / (1 + 0.9)) ** 0.5
    assert evidence.error == pytest.approx(expected, rel=0.4)


def test_a_few_steps_do_not_make_the_error_small():
    evidence = Evidence()
    for _ in range(3):
        evidence.add_deviation(2, 2.0, 0.0)
        evidence.add(2, 2.0, smoothing=0.0)
    assert evidence.error == pytest.approx(0.5**0.5, rel=0.02)
