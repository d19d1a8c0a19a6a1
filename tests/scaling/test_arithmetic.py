"""Estimator, averages and formulas: floats only, by properties and by cases worked on paper."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands._optimizers.state_parts import SavedEntries
from manyhands.scaling import _noise
from manyhands.scaling._noise import (
    DebiasedAverage,
    NoiseAverage,
    NormSums,
    PaperAverage,
    apply_floor,
    estimate,
    gain,
    load_average,
)
from manyhands.scaling._rules import legw_factor, sde_beta

pytestmark = pytest.mark.quick

norms = st.floats(0.0, 1e6)
scales = st.floats(1.0, 1e4)
smoothings = st.floats(0.0, 0.999)


@given(norms, norms, scales)
def test_the_gain_lies_between_1_and_the_scale(sqr, var, scale):
    value = gain(sqr, max(var, 1e-6), scale)
    assert 1.0 <= value <= scale


@given(norms, norms, scales, scales)
def test_the_gain_grows_with_the_scale(sqr, var, one, other):
    small, large = sorted((one, other))
    assert gain(sqr, var + 1e-6, small) <= gain(sqr, var + 1e-6, large) * (1.0 + 1e-9)


@given(norms, norms)
def test_at_scale_1_the_gain_is_exactly_1(sqr, var):
    assert gain(sqr, var, 1.0) == 1.0


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), scales)
def test_the_estimate_is_the_sample_variance_and_the_rest_of_the_squared_mean(values, scale):
    """Gradients with one element: what statistics calls s^2, and mean^2 - s^2 / n."""
    n = len(values)
    mean = sum(values) / n
    s2 = sum((v - mean) ** 2 for v in values) / (n - 1)
    result = estimate(NormSums((sum(v * v for v in values),), (mean * mean,), n, scale))
    assert result.var[0] / scale * n == pytest.approx(s2 * 1.0, rel=1e-6, abs=1e-6)
    assert result.sqr[0] == pytest.approx(mean * mean - s2 / n, rel=1e-6, abs=1e-6)


def test_the_estimate_is_unbiased():
    """Over many steps of known signal (|g|^2 = 1) and noise (trace 32 at scale 1)."""
    generator = torch.Generator().manual_seed(0)
    steps, n, size, scale = 4000, 4, 16, 8.0
    signal = torch.full((size,), 0.25, dtype=torch.float64)
    noise = torch.randn(steps, n, size, generator=generator, dtype=torch.float64)
    small = signal + noise * math.sqrt(32.0 / size * n / scale)  # a small batch has scale 2
    squares = small.square().sum(dim=(1, 2))
    means = small.mean(dim=1).square().sum(dim=1)
    average = NoiseAverage(1)
    for s, m in zip(squares.tolist(), means.tolist(), strict=True):
        sums = NormSums((s,), (m,), n, scale)
        average = average.add(sums, 0.9995)
    assert average.sqr_of() == pytest.approx(1.0, abs=0.1)
    assert average.var_of() == pytest.approx(32.0, rel=0.01)
    assert average.gain(8.0) == pytest.approx(33.0 / 5.0, rel=0.02)


def test_identical_gradients_have_no_noise_and_opposite_ones_have_no_signal():
    same = estimate(NormSums((8.0,), (4.0,), 2, 2.0))
    assert (same.sqr, same.var) == ((4.0,), (0.0,))
    opposite = estimate(NormSums((8.0,), (0.0,), 2, 2.0))
    assert (opposite.sqr, opposite.var) == ((-4.0,), (8.0,))
    assert apply_floor(opposite.sqr, 0.0) == (0.0,)


def test_one_gradient_alone_is_an_error():
    with pytest.raises(ValueError, match="at least 2 gradients"):
        estimate(NormSums((1.0,), (1.0,), 1, 1.0))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), smoothings)
def test_a_debiased_average_lies_among_its_values(values, smoothing):
    average = DebiasedAverage()
    for value in values:
        average = average.add((value,), smoothing)
    (result,) = average.value(0.0, 1)
    assert min(values) - 1e-6 <= result <= max(values) + 1e-6
    assert load_average(DebiasedAverage, SavedEntries(average.to_state(), "it"), 1) == average


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), smoothings)
def test_the_papers_average_is_the_plain_mean_at_first(values, smoothing):
    average = PaperAverage()
    for value in values:
        average = average.add((value,), smoothing)
    if len(values) < 1 / (1 - smoothing) - 1e-6:
        assert average.value(0.0, 1)[0] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert load_average(PaperAverage, SavedEntries(average.to_state(), "it"), 1) == average


@pytest.mark.parametrize("kind", [DebiasedAverage, PaperAverage])
def test_a_constant_is_its_own_average_from_the_first_step(kind):
    average = kind()
    for smoothing in (0.9, 0.5, 0.99, 0.0):  # it may change from step to step
        average = average.add((3.0, -1.0), smoothing)
        assert average.value(0.0, 3) == (pytest.approx(3.0), pytest.approx(-1.0), 0.0)


@given(norms, norms)
def test_the_estimate_survives_a_change_of_scale(sqr, var):
    """fairscale's rescaling gives 2.00 where 2.50 is true; nothing is rescaled here."""
    average = NoiseAverage(1, DebiasedAverage((1.0,), (1.0,)), DebiasedAverage((4.0,), (1.0,)))
    assert average.gain(2.0) == pytest.approx(5.0 / 3.0)
    assert average.gain(4.0) == 2.5


def test_another_kind_of_norm_restarts_the_average():
    """AdamScale measures plain gradients at first; adaptdl averages both kinds."""
    plain = NormSums((2000.0,), (400.0,), 2, 2.0)
    divided = NormSums((3.0,), (1.0,), 2, 2.0, norm_kind="preconditioned")
    fresh = NoiseAverage(1).add(divided, 0.9)
    assert NoiseAverage(1).add(plain, 0.9).add(divided, 0.9).raw_var == fresh.raw_var
    mixed = NoiseAverage(1, mix_norm_kinds=True).add(plain, 0.9).add(divided, 0.9)
    assert mixed.raw_var[0] > 100.0
    assert mixed.add(plain, 0.9).raw_var == NoiseAverage(1).add(plain, 0.9).raw_var  # after a reset


def test_the_floor_of_the_noise_can_be_lowered():
    tiny = NormSums((4e-9,), (1e-9,), 2, 2.0)
    assert NoiseAverage(1).add(tiny, 0.0).gain(2.0) == pytest.approx(2.0, rel=1e-2)
    lower = NoiseAverage(1, var_floor=0.0).add(tiny, 0.0)
    assert lower.gain(2.0) == pytest.approx(2.0)
    assert lower.raw_var[0] == pytest.approx(2e-9)


@pytest.mark.parametrize("var", [0.0, 5e-324])
def test_a_gradient_of_zero_gains_nothing_without_a_floor(var):
    """0 / 0: nothing was seen that a larger batch would average away."""
    assert gain(0.0, var, 4.0) == 1.0
    zero = NormSums((0.0, 8.0), (0.0, 2.0), 2, 2.0)  # of the second group's batches, one was zero
    average = NoiseAverage(2, var_floor=0.0).add(zero, 0.0)
    assert average.gain(2.0, 0) == 1.0
    assert average.gain(2.0, 1) == pytest.approx(2.0)
    assert average.noise_scale(0) is None


def test_sums_with_any_infinite_number_are_not_finite():
    assert NormSums((1.0,), (1.0,), 2, 2.0).all_finite
    for bad in (math.nan, math.inf):
        assert not NormSums((bad, 1.0), (1.0, 1.0), 2, 2.0).all_finite
        assert not NormSums((1.0,), (bad,), 2, 2.0).all_finite


def test_the_loss_scale_is_divided_out_squared():
    sums = NormSums((4.0,), (16.0,), 2, 3.0).unscale(2.0)
    assert (sums.small_squares, sums.mean_square, sums.scale) == ((1.0,), (4.0,), 3.0)


@given(st.floats(1.0, 64.0), st.floats(0.0, 1e5))
def test_legw_climbs_to_the_root_of_the_scale(scale, progress):
    value = legw_factor(scale, progress, 2, 1000, 10)
    assert 0.0 <= value <= math.sqrt(scale)
    assert legw_factor(scale, 200 * scale, 2, 1000, 10) == pytest.approx(math.sqrt(scale))
    assert legw_factor(scale, 0.0, 0, 1000, 10) == math.sqrt(scale)


@given(st.floats(0.0, 0.9999), st.floats(1.0, 100.0))
def test_a_rescaled_beta_forgets_scale_times_as_fast(beta, scale):
    if scale * (1.0 - beta) < 0.999:
        assert 1.0 - sde_beta(beta, scale) == pytest.approx(scale * (1.0 - beta))
    elif scale * (1.0 - beta) > 1.001:
        with pytest.raises(ValueError, match="the scale must be below"):
            sde_beta(beta, scale)


# -- one step's influence ----------------------------------------------------------------------


def average_of(norms, small_batches, smoothing):
    average = NoiseAverage(1)
    for small, mean in norms:
        sums = NormSums((small,), (mean,), small_batches, float(small_batches))
        average = average.add(sums, smoothing)
    return average


def norms_of(steps, small_batches, directions, generator, signal=1.0):
    """The norms of gradients with |true gradient|^2 = signal and unit noise."""
    shape = (steps, small_batches, directions)
    gradients = torch.randn(shape, generator=generator, dtype=torch.float64) / directions**0.5
    gradients[:, :, 0] += signal**0.5
    small = gradients.square().sum(dim=(1, 2))
    return list(
        zip(small.tolist(), gradients.mean(dim=1).square().sum(dim=1).tolist(), strict=True)
    )


@pytest.mark.parametrize("small_batches, directions", [(2, 1), (4, 1), (2, 10), (16, 1), (64, 10)])
def test_without_outliers_the_limit_changes_the_noise_by_less_than_1_percent(
    small_batches, directions, monkeypatch
):
    norms = norms_of(4000, small_batches, directions, torch.Generator().manual_seed(0))
    limited = average_of(norms, small_batches, 0.999)
    monkeypatch.setattr(_noise, "OUTLIER_DEVIATIONS", math.inf)
    free = average_of(norms, small_batches, 0.999)
    assert limited.var_of() == pytest.approx(free.var_of(), rel=0.01)
    assert limited.sqr_of() == pytest.approx(free.sqr_of(), rel=0.01)


def test_gradients_that_grow_together_are_followed_at_once():
    norms = norms_of(60, 32, 50, torch.Generator().manual_seed(0))
    grown = [(100.0 * small, 100.0 * mean) for small, mean in norms]
    average = average_of([*norms, *grown], 32, 0.9)
    assert average.var_of() == pytest.approx(100.0 * average_of(norms, 32, 0.9).var_of(), rel=0.1)
