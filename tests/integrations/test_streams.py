"""A `Cursor` over a stream of Hugging Face, and with torchdata's loader."""

from collections import Counter
from itertools import islice

import pytest
import torch
import torch.distributed as dist

import manyhands as mh
from helpers.ranks import run_ranks

datasets = pytest.importorskip("datasets", reason="datasets is missing: make test-integrations")
SAMPLES = 103


def new_stream():
    numbers = datasets.Dataset.from_dict({"x": list(range(SAMPLES))})
    stream = numbers.to_iterable_dataset(num_shards=5)
    return stream.map(lambda sample: {"y": 2 * sample["x"]}).with_format("torch")


def take(state, steps, options):
    """Continue from a state for so many steps; return what all ranks had, and the state then."""
    cursor = mh.Cursor(new_stream(), 6, **options)
    if state is not None:
        cursor.load_state_dict(state)
    found = []
    for batch in islice(cursor, steps):
        assert torch.equal(batch["y"], 2 * batch["x"])
        found += batch["x"].tolist() if cursor.samples else []
        cursor.mean(torch.zeros(()))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return [x for part in gathered for x in part], cursor.state_dict()


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"buffer_size": 4, "num_workers": 2}], ids=str
)
def test_each_sample_of_a_hugging_face_stream_comes_once(options):
    found, state, number = [], None, 0
    while state is None or state["epoch"] == 0:
        ranks, number = (2, 1, 3)[number % 3], number + 1
        taken, state = run_ranks(ranks, take, state, 4, options)[0]
        found += taken
    assert Counter(found) == Counter(range(SAMPLES)) and number > 3


def test_a_resumed_hugging_face_stream_is_not_read_from_its_beginning():
    read = []

    def note(sample):
        read.append(int(sample["x"]))
        return sample

    numbers = datasets.Dataset.from_dict({"x": list(range(1000))})
    stream = numbers.to_iterable_dataset(num_shards=1).map(note)
    cursor = mh.Cursor(stream, 10)
    for _ in islice(cursor, 80):
        pass
    state = cursor.state_dict()
    read.clear()
    cursor = mh.Cursor(stream, 10)
    cursor.load_state_dict(state)
    assert next(iter(cursor))["x"].tolist() == list(range(800, 810))
    assert min(read) > 700


def test_a_shuffle_buffer_that_resuming_would_lose_is_refused():
    with pytest.raises(ValueError, match="buffer_size="):
        mh.Cursor(new_stream().shuffle(seed=0, buffer_size=10), 8)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torch says so of torchdata
def test_the_loader_may_be_torchdatas():
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is missing")
    loader = loading.StatefulDataLoader
    cursor = mh.Cursor(new_stream(), 10, loader=loader, num_workers=2)
    found = [x for batch in cursor for x in batch["x"].tolist()]
    assert Counter(found) == Counter(range(SAMPLES))
