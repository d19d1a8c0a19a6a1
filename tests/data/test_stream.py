"""A `Cursor` over streams: each sample once, on any number of ranks, wherever a run is stopped."""

import contextlib
import json
import os
import random
import signal
from collections import Counter
from itertools import islice
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, default_collate

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from manyhands.data import StreamCursor

SIZES = [17, 3, 0, 40, 9, 1, 26]
ALL = Counter((shard, sample) for shard, size in enumerate(SIZES) for sample in range(size))


class Counted:
    """Shards without a state: what was taken is read again, and dropped."""

    num_shards = len(SIZES)

    def shard(self, num_shards, index):
        assert num_shards == self.num_shards
        return ((index, sample) for sample in range(SIZES[index]))


class Lines:
    """A shard that can say where it is."""

    def __init__(self, shard, opened):
        self.shard, self.at, self.opened = shard, 0, opened

    def __iter__(self):
        while self.at < SIZES[self.shard]:
            self.at += 1
            self.opened.append((self.shard, self.at - 1))
            yield self.shard, self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Stated(Counted, IterableDataset):
    """Shards with a state."""

    def __init__(self):
        self.opened = []

    def shard(self, num_shards, index):
        return Lines(index, self.opened)

    def __iter__(self):
        raise AssertionError("only its shards are read")


KINDS = {"counted": Counted, "stated": Stated}
pairs = lambda batch: [tuple(map(int, pair)) for pair in batch]  # noqa: E731


def everywhere(found):
    """Return what all ranks have together."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return [each for part in gathered for each in part]


def take(state, steps, options, kind=Counted):
    """Continue from a state for so many steps; return what all ranks had, and the state then."""
    cursor = mh.Cursor(kind(), 8, collate_fn=pairs, **options)
    if state is not None:
        cursor.load_state_dict(state)
    epoch, before, found = cursor.epoch, cursor.position, []
    for batch in islice(cursor, steps):
        found += batch if cursor.samples else []
        cursor.mean(torch.zeros(()))
    taken = everywhere(found)
    ended = cursor.epoch > epoch
    assert cursor.position == (0 if ended else before + len(taken))
    return taken, cursor.state_dict(), ended


OPTIONS = {
    "in order": {"shuffle": False},
    "shuffled": {},
    "shuffled inside": {"buffer_size": 5},
    "two processes": {"num_workers": 2},
    "two processes, shuffled inside": {"num_workers": 2, "buffer_size": 7, "keep": "micro"},
}


@pytest.mark.sample(
    "in order-counted", "shuffled inside-counted", "two processes, shuffled inside-stated"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_sample_comes_once_however_often_the_ranks_change(kind, options):
    found, state, ended, number = [], None, False, 0
    while not ended:
        ranks, number = (1, 3, 2)[number % 3], number + 1
        results = run_ranks(ranks, take, state, 2, options, KINDS[kind])
        taken, state, ended = results[0]
        assert all(result[1:] == results[0][1:] for result in results)
        found += taken
    assert Counter(map(tuple, found)) == ALL
    assert number > 3 and state["epoch"] == 1 and json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", [{}, {"buffer_size": 5}], ids=["", "shuffled inside"])
@on_ranks("ranks")
def test_a_run_that_is_resumed_on_the_same_ranks_has_the_same_batches(ranks, options):
    at_once, _, _ = take(None, 5, options)
    first, state, _ = take(None, 3, options)
    then, _, _ = take(state, 2, options)
    assert Counter(at_once) == Counter(first + then)
    if ranks == 1:  # of several, each one's samples come together
        assert at_once == first + then


def test_epochs_have_orders_of_their_own():
    cursor = mh.Cursor(Counted(), 8, collate_fn=pairs, buffer_size=8)
    epochs = [[pair for batch in cursor for pair in batch] for _ in range(3)]
    assert cursor.epoch == 3 and cursor.position == 0
    assert all(Counter(epoch) == ALL for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_shard_with_a_state_is_not_read_from_its_beginning():
    cursor = mh.Cursor(Stated(), 8, shuffle=False, collate_fn=pairs)
    for _ in islice(cursor, 11):
        pass
    state = cursor.state_dict()
    stream = Stated()
    then = mh.Cursor(stream, 8, shuffle=False, collate_fn=pairs)
    then.load_state_dict(state)
    next(iter(then))
    assert cursor.position == 88 and {shard for shard, _ in stream.opened} <= {5, 6}


class Samples(Counted):
    """Numbers whose mean is to be learned."""

    def shard(self, num_shards, index):
        generator = torch.Generator().manual_seed(index)
        return iter(torch.randn(SIZES[index], 4, generator=generator, dtype=torch.float64))


def train(epochs, stops=0):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cursor = mh.Cursor(Samples(), 6, shuffle=False, optimizer=optimizer)
    module = nn.parallel.DistributedDataParallel(model)
    losses = []
    while cursor.epoch < epochs:
        for x in cursor:
            optimizer.zero_grad()
            loss = cursor.mean(module(x).square().sum())
            loss.backward()
            optimizer.step()
            losses.append((cursor.position, model.weight.detach().clone(), cursor.samples))
    return losses


def test_the_mean_is_that_over_all_samples_of_the_step_on_uneven_ranks():
    """One process takes the samples that the ranks had in each step."""
    results = run_ranks(2, train, 2)
    assert 0 in [samples for _, _, samples in results[0] + results[1]]  # a filler
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Samples()
    lists = [
        [x for place in range(rank, len(SIZES), 2) for x in data.shard(len(SIZES), place)]
        for rank in range(2)
    ]
    lists = [two * 2 for two in lists]
    queues, each = [], [len(two) // 2 for two in lists]
    for rank in range(2):
        epoch = lists[rank][: each[rank]]
        chunks = [epoch[i : i + 3] for i in range(0, len(epoch), 3)]
        queues.append(chunks)
    steps = max(map(len, queues))
    for number, (_, weight, _) in enumerate(results[0]):
        at = number % steps
        batch = torch.stack([x for chunks in queues for x in (chunks[at : at + 1] or [[]])[0]])
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), weight)
    assert len(results[0]) == 2 * steps


def test_a_run_is_saved_with_it(tmp_path):
    def first():
        model = nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cursor = mh.Cursor(Samples(), 6, optimizer=optimizer)
        for x in islice(cursor, 4):
            model(x).sum().backward()
            optimizer.step()
        mh.save(tmp_path / "run", model=model, optimizer=optimizer, cursor=cursor)
        return cursor.position

    def then():
        model = nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cursor = mh.Cursor(Samples(), 6, optimizer=optimizer)
        mh.load(tmp_path / "run", model=model, optimizer=optimizer, cursor=cursor)
        return cursor.position

    (position,) = set(run_ranks(2, first))
    assert set(run_ranks(3, then)) == {position} and 0 < position <= 24


def test_a_batch_without_a_step_comes_again():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cursor = mh.Cursor(Counted(), 8, shuffle=False, collate_fn=pairs, optimizer=optimizer)
    first = next(iter(cursor))
    assert next(iter(cursor)) == first and cursor.position == 0
    for number, batch in enumerate(cursor):
        if number == 1:
            second = batch
            break
        optimizer.step()
    assert cursor.position == 8 and next(iter(cursor)) == second


@on_ranks(2)
def test_drop_last_ends_with_the_last_step_that_is_full_on_all_ranks():
    cursor = mh.Cursor(Counted(), 8, collate_fn=pairs, drop_last=True)
    sizes = [len(batch) for batch in cursor]
    assert set(sizes) == {4}


def test_one_ranks_error_is_an_error_on_all_of_them():
    class Broken(Counted):
        def shard(self, num_shards, index):
            def read():
                yield (index, 0)
                if dist.get_rank() == 1:
                    raise OSError("file 1 is damaged")

            return read()

    def go():
        for _ in mh.Cursor(Broken(), 2, collate_fn=pairs, shuffle=False):
            pass

    errors = raises_on_ranks(2, (OSError, RuntimeError), go)
    assert "rank 1 could not read" in errors[0] and "damaged" in errors[1]


def test_mistakes_have_errors():
    with pytest.raises(TypeError, match="num_shards and a method shard"):
        mh.Cursor(iter([1, 2]), 8)
    with pytest.raises(TypeError, match="length"):
        len(mh.Cursor(Counted(), 8))
    with pytest.raises(ValueError, match="persistent_workers"):
        mh.Cursor(Counted(), 8, num_workers=1, persistent_workers=True)
    cursor = mh.Cursor(Counted(), 8, collate_fn=pairs)
    assert isinstance(cursor, StreamCursor)
    state = cursor.state_dict()
    for name, value in {"shards": 3, "seed": 1, "open": [[99]], "ended": None, "epoch": -1}.items():
        with pytest.raises(ValueError, match="the saved state"):
            cursor.load_state_dict({**state, name: value})


@on_ranks(2, raises=ValueError, match="does not support blocks")
def test_blocks_are_refused_on_every_rank():
    model = nn.Linear(1, 1)
    optimizer = mh.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    mh.Cursor(Counted(), 8, optimizer=optimizer)


# -- kills -----------------------------------------------------------------------------------------

MANY = [211, 5, 160, 0, 97, 301]
STARTS = [sum(MANY[:shard]) for shard in range(len(MANY))]


class Numbers:
    num_shards = len(MANY)

    def shard(self, num_shards, index):
        return iter(range(STARTS[index], STARTS[index] + MANY[index]))


def count_for_ever(folder, ranks, options):
    """Count how often each sample came, on all ranks, and save that with the cursor."""
    os.setpgid(0, 0)

    def go():
        counts = torch.zeros(sum(MANY), dtype=torch.int64)
        cursor = mh.Cursor(Numbers(), 7, **options)
        with contextlib.suppress(FileNotFoundError):
            counts = mh.load(folder, cursor=cursor)["counts"]
        while cursor.epoch < 1:
            for number, batch in enumerate(cursor):
                seen = torch.bincount(batch, minlength=len(counts)) * (cursor.samples > 0)
                dist.all_reduce(seen)
                counts += seen
                cursor.mean(torch.zeros(()))
                if number % 3 == 0:
                    mh.save(folder, counts=counts, cursor=cursor)
        mh.save(folder, counts=counts, cursor=cursor)

    run_ranks(ranks, go)


@pytest.mark.sample("{}")
@pytest.mark.parametrize("options", [{}, {"buffer_size": 16}, {"num_workers": 2}], ids=str)
def test_no_sample_is_lost_or_repeated_when_runs_are_killed(options, tmp_path):
    choose, folder, kills = random.Random(0), tmp_path / "run", 0
    cursor = mh.Cursor(Numbers(), 7, **options)
    while cursor.epoch == 0:
        arguments = folder, choose.choice([1, 2, 3]), options
        run = get_context("fork").Process(target=count_for_ever, args=arguments)
        run.start()
        run.join(choose.uniform(0.2, 1.2))
        if run.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            kills += 1
            run.join()
        with contextlib.suppress(FileNotFoundError):
            counts = mh.load(folder, cursor=cursor)["counts"]
            assert cursor.epoch or cursor.position == counts.sum()
    assert torch.equal(counts, torch.ones_like(counts)) and kills > 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_attributes_of_a_loader_are_those_of_the_stream(kind):
    stream = KINDS[kind]()
    cursor = mh.Cursor(stream, batch_size=4, drop_last=True, num_workers=2, collate_fn=list)
    assert isinstance(cursor, StreamCursor)
    assert cursor.dataset is stream
    assert (cursor.num_workers, cursor.drop_last, cursor.collate_fn) == (2, True, list)
    cursor = mh.Cursor(stream, batch_size=4)
    assert (cursor.num_workers, cursor.drop_last) == (0, False)
    assert cursor.collate_fn is default_collate
