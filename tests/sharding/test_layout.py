"""Who owns what, in integers: every element has one owner, and shares are fair."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.sharding.zero._layout import ALIGN, even_layout, whole_layout

pytestmark = pytest.mark.quick

SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=30)
WORKERS = st.integers(1, 9)
LARGEST = st.integers(1, 700)


def laid_out(layout, sizes, workers, largest):
    numbered = [(2 * i + 3, size) for i, size in enumerate(sizes)]  # indices are names, no places
    if layout == "even":
        return dict(numbered), even_layout(numbered, workers, largest)
    return dict(numbered), whole_layout(numbered, workers, largest, [0] * workers)


@pytest.mark.parametrize("layout", ["even", "whole"])
@given(sizes=SIZES, workers=WORKERS, largest=LARGEST)
def test_every_element_of_every_parameter_has_one_owner(layout, sizes, workers, largest):
    numbered, buffers = laid_out(layout, sizes, workers, largest)
    owners = {index: [0] * size for index, size in numbered.items()}
    for buffer in buffers:
        for bucket in buffer.buckets:
            for rank in range(workers):
                for each in bucket.owned(rank):
                    assert 0 <= each.start < each.stop <= numbered[each.param]
                    for element in range(each.start, each.stop):
                        owners[each.param][element] += 1
    assert all(count == 1 for counts in owners.values() for count in counts)


@pytest.mark.parametrize("layout", ["even", "whole"])
@given(sizes=SIZES, workers=WORKERS, largest=LARGEST)
def test_an_owned_range_lies_where_its_parameter_does(layout, sizes, workers, largest):
    """Elements of the flat memory, written through `starts`, read back through the ranges."""
    numbered, buffers = laid_out(layout, sizes, workers, largest)
    assert sorted(i for buffer in buffers for i in buffer.starts) == sorted(numbered)
    for buffer in buffers:
        memory = [None] * buffer.size
        for index, place in buffer.starts.items():
            for element in range(numbered[index]):
                assert memory[place + element] is None, "two parameters in one place"
                memory[place + element] = (index, element)
        start = 0
        for bucket in buffer.buckets:
            assert bucket.start == start
            part = memory[start : start + bucket.size]
            start += bucket.size
            for each in bucket.ranges:
                expected = [(each.param, e) for e in range(each.start, each.stop)]
                assert part[each.offset : each.offset + each.size] == expected
            for rank in range(workers):
                own = part[bucket.cuts[rank] : bucket.cuts[rank + 1]]
                for each in bucket.owned(rank):
                    expected = [(each.param, e) for e in range(each.start, each.stop)]
                    assert own[each.offset : each.offset + each.size] == expected
        assert start == buffer.size


@pytest.mark.parametrize("layout", ["even", "whole"])
@given(sizes=SIZES, workers=WORKERS, largest=LARGEST)
def test_parameters_and_buckets_begin_at_aligned_elements(layout, sizes, workers, largest):
    _, buffers = laid_out(layout, sizes, workers, largest)
    for buffer in buffers:
        assert all(place % ALIGN == 0 for place in buffer.starts.values())
        assert all(bucket.start % ALIGN == 0 for bucket in buffer.buckets)
        assert all(cut % ALIGN == 0 for bucket in buffer.buckets for cut in bucket.cuts)


@given(sizes=SIZES, workers=WORKERS, largest=LARGEST)
def test_even_slices_are_all_equal(sizes, workers, largest):
    _, buffers = laid_out("even", sizes, workers, largest)
    for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
        assert len({b - a for a, b in pairwise(bucket.cuts)}) == 1
        assert isinstance(bucket.cuts, range)
        assert len(bucket.cuts) == workers + 1


@given(sizes=SIZES, workers=WORKERS, largest=LARGEST)
def test_even_buckets_are_about_as_large_as_asked_and_pad_little(sizes, workers, largest):
    _, buffers = laid_out("even", sizes, workers, largest)
    unit = workers * ALIGN
    for buffer in buffers:
        placed = sum(-(-size // ALIGN) * ALIGN for size in _sizes_of(buffer, sizes))
        assert buffer.size - placed <= len(buffer.buckets) * unit
        for bucket in buffer.buckets:
            # a parameter more than fits is cut; a bucket is at most half as large again
            assert bucket.size <= 1.5 * largest + ALIGN * len(buffer.starts) + unit


@given(sizes=SIZES, workers=WORKERS, largest=LARGEST)
def test_whole_never_cuts_a_parameter(sizes, workers, largest):
    numbered, buffers = laid_out("whole", sizes, workers, largest)
    for buffer in buffers:
        for bucket in buffer.buckets:
            for rank in range(workers):
                for each in bucket.owned(rank):
                    assert (each.start, each.stop) == (0, numbered[each.param])


@given(sizes=SIZES, more=SIZES, workers=WORKERS, largest=LARGEST)
def test_whole_is_balanced_within_the_largest_parameter(sizes, more, workers, largest):
    load = [0] * workers
    buffers = whole_layout(list(enumerate(sizes)), workers, largest, load)
    first = [0] * workers
    for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
        for rank in range(workers):
            first[rank] += sum(each.size for each in bucket.owned(rank))
    assert first == load
    assert max(load) - min(load) <= max(sizes)
    whole_layout(list(enumerate(more)), workers, largest, load)  # as add_param_group does
    assert sum(load) == sum(sizes) + sum(more)
    assert max(load) - min(load) <= max(*sizes, *more)


def test_a_layout_worked_out_on_paper():
    """20, 150 and 10 elements for two workers, in buckets of about 64, slices of 16, 32, 48, ...

    The second is 160 elements with padding: three buckets of 54, rounded up to 64, slices of 32."""
    first, second, third = even_layout([(0, 20), (1, 150), (2, 10)], 2, 64)
    assert [buffer.size for buffer in (first, second, third)] == [32, 192, 32]
    assert [each.size for each in first.buckets[0].owned(1)] == [4]
    owned = [[(r.start, r.stop) for r in b.owned(w)] for b in second.buckets for w in (0, 1)]
    assert owned == [[(0, 32)], [(32, 64)], [(64, 96)], [(96, 128)], [(128, 150)], []]
    (bucket,) = whole_layout([(0, 20), (1, 150), (2, 10)], 2, 999, [0, 0])[0].buckets
    assert [(r.param, r.offset) for r in bucket.ranges] == [(1, 0), (0, 160), (2, 192)]
    assert bucket.cuts == (0, 160, 208)


def _sizes_of(buffer, sizes):
    return [sizes[(index - 3) // 2] for index in buffer.starts]
