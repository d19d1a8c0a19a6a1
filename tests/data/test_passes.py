"""A step divided among ranks and passes: nothing twice, nothing left, and equal passes."""

import hypothesis
import hypothesis.strategies as st
import pytest

from manyhands.data._ledger import count
from manyhands.data._plan import divide_step

pytestmark = pytest.mark.quick


@hypothesis.given(
    st.integers(0, 60), st.integers(1, 8), st.none() | st.integers(1, 7), st.booleans()
)
def test_ranks_and_passes_have_each_sample_once(samples, ranks, most, in_turns):
    step = ((100, 100 + samples // 3), (7, 7 + samples - samples // 3))
    divided = [divide_step(step, rank, ranks, most, in_turns=in_turns) for rank in range(ranks)]
    found = [[p for _, spans in own for a, b in spans for p in range(a, b)] for own in divided]
    whole = [p for a, b in step for p in range(a, b)]
    if in_turns:
        assert found == [whole[rank::ranks] for rank in range(ranks)]
    else:
        assert [position for own in found for position in own] == whole
    assert len({len(own) for own in divided}) == 1, "ranks have different numbers of passes"
    sizes = [each.samples for own in divided for each, _ in own]
    assert sizes == [count(spans) for own in divided for _, spans in own]
    assert max(sizes) <= (most or samples)
    totals = [sum(each.samples for each, _ in own) for own in divided]
    assert max(totals) - min(totals) <= 1
    for own in divided:
        for index, (each, _) in enumerate(own):
            assert (each.index, each.last) == (index, index == len(own) - 1)
            assert each.counts == tuple(other.samples for other, _ in own)
            assert (each.step_samples, each.ranks) == (samples, ranks)
            assert each.not_empty == sum(size > 0 for size in sizes)


@hypothesis.given(st.integers(1, 60), st.integers(1, 8), st.none() | st.integers(1, 7))
def test_a_step_is_uneven_on_some_pass_unless_all_are_equal(samples, ranks, most):
    passes = [e for r in range(ranks) for e, _ in divide_step(((0, samples),), r, ranks, most)]
    assert any(each.uneven for each in passes) == (len({e.samples for e in passes}) > 1)


@hypothesis.given(
    st.integers(0, 60), st.integers(1, 8), st.integers(1, 8), st.none() | st.integers(1, 7)
)
def test_fewer_ranks_take_the_micro_batches_of_all_ranks(samples, ranks, parts, most):
    step = ((0, samples),)
    full = [own for part in range(parts) for own in divide_step(step, part, parts, most)]
    divided = [divide_step(step, rank, ranks, most, parts=parts) for rank in range(ranks)]
    found = [own for rank in divided for own in rank]
    assert sorted(spans for _, spans in found if spans) == sorted(s for _, s in full if s)
    assert {len(rank) for rank in divided} == {len(full) // parts * -(-parts // ranks)}
    assert {each.not_empty for each, _ in found} == {each.not_empty for each, _ in full}
    assert {each.ranks for each, _ in found} == {ranks}
