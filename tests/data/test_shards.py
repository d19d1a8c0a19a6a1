"""`DataShards`: each sample once, and each shard read from its beginning on, once."""

import hypothesis
import hypothesis.strategies as st
import pytest

import manyhands as mh
from manyhands.data._order import ShardOrder
from manyhands.data._plan import divide_step

pytestmark = pytest.mark.quick


class Files:
    """Shards of (shard, number), and a count of how often each was opened."""

    def __init__(self, sizes, missing=0):
        self.sizes, self.opened, self.missing = sizes, [], missing

    def read(self, shard, start):
        self.opened.append((shard, start))
        return iter([(shard, number) for number in range(start, self.sizes[shard] - self.missing)])

    def data(self, **options):
        return mh.DataShards(range(len(self.sizes)), self.sizes, self.read, **options)


@hypothesis.given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any), st.integers(1, 5), st.data()
)
def test_an_order_has_each_sample_once_and_each_shard_in_order(sizes, lanes, data):
    order = Files(sizes).data(lanes=lanes).order(seed=1, epoch=2, shuffle=True)
    whole = order.indices(((0, sum(sizes)),))
    assert sorted(whole) == list(range(sum(sizes)))
    start = 0
    for size in sizes:
        own = [index for index in whole if start <= index < start + size]
        assert own == sorted(own)
        start += size
    a, b = sorted(data.draw(st.integers(0, sum(sizes))) for _ in range(2))
    assert order.indices(((a, b),)) == whole[a:b]


def test_lanes_take_turns_and_the_longer_goes_on_alone():
    order = ShardOrder([[2, 0], [1]], [2, 2, 3])
    assert order.indices(((0, 7),)) == [4, 2, 5, 3, 6, 0, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cursor_reads_each_shard_once(workers):
    files = Files([5, 9, 2, 7, 7])
    cursor = mh.Cursor(files.data(lanes=2), 4, num_workers=workers, collate_fn=list)
    seen = [sample for batch in cursor for sample in batch]
    assert sorted(seen) == [(s, n) for s, size in enumerate(files.sizes) for n in range(size)]
    if not workers:
        assert sorted(files.opened) == [(shard, 0) for shard in range(5)]
    again = [sample for batch in cursor for sample in batch]
    assert sorted(again) == sorted(seen) and again != seen


def test_ranks_read_lanes_of_their_own():
    order = Files([6] * 8).data(lanes=4).order(0, 0, True)
    for rank in range(2):
        own = [
            divide_step(((8 * step, 8 * step + 8),), rank, 2, None, in_turns=True)[0][1]
            for step in range(6)
        ]
        shards = {index // 6 for spans in own for index in order.indices(spans)}
        assert len(shards) == 4
        others = divide_step(((0, 8),), 1 - rank, 2, None, in_turns=True)[0][1]
        assert shards.isdisjoint(index // 6 for index in order.indices(others))


def test_a_run_goes_on_inside_of_a_shard():
    files = Files([500, 500])
    cursor = mh.Cursor(files.data(), 10, collate_fn=list)
    seen = []
    for batch in cursor:
        seen += batch
        if cursor.position == 400:
            break
    state, files = cursor.state_dict(), Files([500, 500])
    cursor = mh.Cursor(files.data(), 25, collate_fn=list)
    cursor.load_state_dict(state)
    seen += [sample for batch in cursor for sample in batch]
    assert sorted(seen) == [(s, n) for s in range(2) for n in range(500)]
    assert sorted(files.opened) == [(0, 200), (1, 200)]


def test_a_shard_that_has_shrunk_is_told():
    cursor = mh.Cursor(Files([5], missing=2).data(), 5, collate_fn=list)
    with pytest.raises(RuntimeError, match="shard 0 must have 5 samples, but ended after 3"):
        next(iter(cursor))


def test_a_position_in_other_shards_is_refused():
    state = mh.Cursor(Files([5, 3]).data(), 2).state_dict()
    other = mh.Cursor(Files([3, 5]).data(), 2)
    with pytest.raises(
        ValueError, match=r"saved position has shards=.*Create the Cursor as in the saved run"
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"shards": [], "sizes": []}, "at least one shard"),
        ({"sizes": [1, 2]}, "got 1 shard.s. and 2 size"),
        ({"sizes": [-1]}, "each size must be"),
        ({"lanes": 0}, "lanes must be a whole number of at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        mh.DataShards(**{"shards": ["a"], "sizes": [1], "open": None, **arguments})
