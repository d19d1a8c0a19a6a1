"""The order of an epoch: a permutation, the same everywhere, and random enough."""

from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest

from helpers.data_oracle import permutation
from manyhands.data._order import Order

pytestmark = pytest.mark.quick

SAMPLES = st.integers(1, 400)


@hypothesis.given(SAMPLES, st.integers(0, 2**40), st.integers(0, 1000))
def test_it_is_the_permutation_computed_plainly(samples, seed, epoch):
    order = Order(samples, seed, epoch).indices(((0, samples),))
    assert order == permutation(samples, seed, epoch)
    assert sorted(order) == list(range(samples))


@hypothesis.given(SAMPLES, st.data())
def test_any_ranges_of_it_can_be_computed_alone(samples, data):
    cut = sorted(data.draw(st.lists(st.integers(0, samples), min_size=4, max_size=4)))
    order = Order(samples, 3, 1)
    whole = order.indices(((0, samples),))
    spans = ((cut[2], cut[3]), (cut[0], cut[1]))
    assert order.indices(spans) == whole[cut[2] : cut[3]] + whole[cut[0] : cut[1]]


def test_it_never_changes_because_saved_positions_refer_to_it():
    assert Order(10, 0, 0).indices(((0, 10),)) == [1, 6, 2, 9, 0, 3, 7, 4, 5, 8]
    far = Order(10**12, 7, 3).indices(((10**12 - 3, 10**12),))
    assert far == [650402824736, 294187937478, 282849678108]


def test_without_shuffling_it_is_the_dataset_s_own():
    assert Order(10, 0, 0, shuffle=False).indices(((7, 9), (0, 2))) == [7, 8, 0, 1]


@pytest.mark.parametrize("samples", [5, 12, 97])
def test_every_sample_comes_equally_often_at_every_position(samples):
    """A chi-square test of positions, and one of the differences of neighbours."""
    epochs = min(200 * samples, 1000)
    places = [[0] * samples for _ in range(samples)]
    steps = [0] * samples
    for epoch in range(epochs):
        order = Order(samples, 0, epoch).indices(((0, samples),))
        for position, sample in enumerate(order):
            places[position][sample] += 1
        for here, there in pairwise(order):
            steps[(there - here) % samples] += 1
    expected = epochs / samples
    chi = sum((n - expected) ** 2 / expected for row in places for n in row)
    degrees = (samples - 1) ** 2
    assert abs(chi - degrees) < 5 * (2 * degrees) ** 0.5
    assert steps[0] == 0
    expected = sum(steps) / (samples - 1)
    chi = sum((n - expected) ** 2 / expected for n in steps[1:])
    assert abs(chi - (samples - 2)) < 5 * (2 * (samples - 2)) ** 0.5
