"""When a fragment is sent, how long a block is, and what the drift of its workers was."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.blocks._schedule import Every, Schedule, Seconds
from manyhands.blocks.averaging._round import Drift

pytestmark = pytest.mark.quick

vectors = st.lists(
    st.tuples(*[st.floats(-1e3, 1e3)] * 3), min_size=2, max_size=6
)  # how far each worker moved, in three dimensions


@given(length=st.integers(1, 60), fragments=st.integers(1, 8), start=st.integers(0, 1000))
def test_every_fragment_is_sent_once_a_block_in_order(length, fragments, start):
    schedule = Schedule(Every(length), fragments)
    schedule.begin(start, length)
    sent = [schedule.due(step) for step in range(start + 1, start + length + 1)]
    if fragments <= length:
        assert list(itertools.chain(*sent)) == list(range(fragments))
    assert fragments - 1 in sent[-1]  # the last fragment goes as the block ends
    assert [schedule.ends(start + 1 + i) for i in range(length)] == [False] * (length - 1) + [True]


def test_the_table_of_the_docstring():
    schedule = Schedule(Every(6), fragments=2)
    sent = {}
    for step in range(1, 14):
        sent[step] = schedule.due(step)
        if schedule.ends(step):
            schedule.begin(step, 6)
    assert {step: due for step, due in sent.items() if due} == {3: [0], 6: [1], 9: [0], 12: [1]}


def test_blocks_of_a_fixed_length_begin_at_its_multiples():
    every = Every(50)
    assert [every.first_start(step) for step in (0, 49, 50, 149)] == [0, 0, 50, 100]
    assert every.next(50, seconds=9.0) == 50


def test_a_block_of_seconds_has_as_many_steps_as_fit():
    every = Seconds(60, first=100, least=4)
    assert every.next(100, seconds=0.5) == 120
    assert every.next(100, seconds=100.0) == 4
    assert every.next(100, seconds=0.0) == 100  # nothing was timed


@given(moved=vectors)
def test_the_drift_is_that_of_the_vectors(moved):
    n = len(moved)
    mean = [sum(column) / n for column in zip(*moved, strict=True)]
    squares = [sum(x * x for x in vector) for vector in moved]
    drift = Drift.of(squares, sum(x * x for x in mean))
    spread = math.sqrt(
        sum(sum((x - m) ** 2 for x, m in zip(v, mean, strict=True)) for v in moved) / n
    )
    largest = max(math.sqrt(square) for square in squares)
    assert drift.distance == pytest.approx(math.sqrt(sum(x * x for x in mean)))
    assert drift.spread == pytest.approx(spread, abs=1e-6 * (1 + largest))
    pairs = list(itertools.combinations(moved, 2))
    dots = [sum(a * b for a, b in zip(u, v, strict=True)) for u, v in pairs]
    if sum(squares) > 1e-6:
        cosine = (sum(dots) / len(pairs)) / (sum(squares) / n)
        assert drift.cosine == pytest.approx(max(-1.0, min(1.0, cosine)), abs=1e-6)


def test_a_drift_that_cannot_be_known_is_nan():
    assert math.isnan(Drift.of([], 0.0).distance)  # no worker was in the mean
    assert math.isnan(Drift.of([math.inf, 1.0], 1.0).distance)  # a square that overflowed
    assert math.isnan(Drift.of([4.0], 4.0).cosine)  # one worker alone
    assert Drift.of([4.0], 4.0).distance == 2.0
