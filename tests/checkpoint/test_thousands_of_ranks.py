"""A save among thousands of ranks: what each of them asks, waits for and holds.

One rank is real, in torch's fake group of N; the store counts its requests. The receipts of the
other ranks are made up from the real one's.
"""

import json
import time
import tracemalloc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401 (the backend "fake")

import manyhands as mh
from helpers.ranks import run_ranks
from manyhands.checkpoint import _folder, _format, _reader, _writing
from manyhands.checkpoint import _tensor_parts as tensor_parts

SIZES = [8, 128, 1024, 16_384]
KEYS = 300  # tensors of the model
ROWS = 4  # of each tensor on each rank


class Counting:
    """A store that counts the requests of this process."""

    def __init__(self):
        self.inner, self.requests = dist.HashStore(), []

    def clone(self):
        return self

    def __getattr__(self, name):
        if name != "set_timeout":
            self.requests.append(name)
        return getattr(self.inner, name)


@pytest.fixture
def fake_rank():
    """Make this process one of many ranks; gives the store that it uses."""

    def join(rank, size):
        store = Counting()
        dist.init_process_group("fake", rank=rank, world_size=size, store=dist.HashStore())
        patch.setattr(_writing, "_get_default_store", lambda: store)
        return store

    with pytest.MonkeyPatch.context() as patch:
        yield join
        dist.destroy_process_group()


def sharded(size):
    """A model whose parameters are cut among all ranks."""
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Module()
    for number in range(KEYS):
        local = torch.full((ROWS, 2), float(number))
        shape = {"shape": torch.Size((ROWS * size, 2)), "stride": (2, 1)}
        param = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **shape)
        model.register_parameter(f"p{number}", nn.Parameter(param))
    return model


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_saves_waits_for_no_other_whatever_their_number(size, fake_rank, tmp_path):
    store = fake_rank(size - 1, size)
    model = sharded(size)
    seconds = []
    for number in range(1, 6):  # the first save of a run asks for the name of the folder as well
        post = _writing.SaveMessages.of(_writing.RankGroup.of())
        prefix, token = post._all.prefix.rstrip("/"), f"token-{number}"
        if number == 1:
            store.inner.set(f"{prefix}/first", token)
            store.inner.set(f"{prefix}/{token}/begun", json.dumps({"number": 1}))
        store.inner.set(f"{prefix}/{token}/end", json.dumps([[], f"token-{number + 1}"]))
        store.requests.clear()
        if number == 2:
            tracemalloc.start()
        began = time.thread_time()  # of this rank's own: the machine may be busy with others
        saving = mh.save(tmp_path, model=model, wait=False)
        if number == 2:
            assert tracemalloc.get_traced_memory()[1] < 5e6
            tracemalloc.stop()
        elif number > 2:
            seconds.append(time.thread_time() - began)
        saving.wait()
        assert store.requests == ["get", "get"] * (number == 1) + ["set", "get"]
    assert min(seconds) < 0.1
    receipt = store.inner.get(f"{prefix}/token-5/receipt/{size - 1}")
    assert len(receipt) < 1000
    ((count, piece, _),) = json.loads(receipt)["table"]["grids"]
    assert (count, piece) == (size, size - 1)


def all_receipts(size):
    """The receipts of all ranks, as rank 0 gets them: each has one piece of a grid."""
    members = {f"model/p{n}": [[ROWS * size, 2], "float32", 0] for n in range(KEYS)}
    checksum = tensor_parts.checksum(members)
    for rank in range(size):
        grid = [size, rank, checksum if rank else members]
        table = {"grids": [grid], "slices": {}}
        yield {"facts": {"step": 1}, "file": [10_000, 5_000, 1], "table": table}


@pytest.mark.parametrize("size", SIZES)
def test_what_rank_0_does_with_receipts_is_linear_and_the_commit_small(size, tmp_path):
    texts = [json.dumps(each) for each in all_receipts(size)]
    began = time.thread_time()
    receipts = [json.loads(text) for text in texts]
    table = _writing.merge_tables([tensor_parts.Table(**each["table"]) for each in receipts])
    tensors = tensor_parts.find_tensors(table, size)
    seconds = time.thread_time() - began
    assert seconds < 0.1 + size * 200e-6
    files = [each["file"] for each in receipts]
    versions = {"manyhands": "0", "torch": "0"}
    commit = _format.Commit(1, "a-b", versions, 0.0, files, table, None, [], [], {})
    text = commit.to_text().encode()
    assert len(text) < 100 * KEYS + 40 * size
    again, found = _reader.parse(text, "commit")
    assert found.keys() == tensors.keys() and again.workers == size
    assert found["model/p7"].slice_count == size
    (first, last) = found["model/p7"].overlapping((ROWS - 1, 0), (2, 2))
    assert (first.file, last.file) == (0, 1)


@pytest.mark.parametrize(("there", "way"), [(2, "fully_shard"), (3, "fully_shard"), (4, "OSS")])
def test_a_load_needs_little_more_than_its_part_and_reads_it_twice(there, way, tmp_path):
    """First to compare it with its checksums, then, out of the system's memory, to load it."""

    def build(way):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
        if way == "fully_shard":
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
        else:
            optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def save():
        mh.save(tmp_path, **build("fully_shard"))

    def load():
        given, read, pages = build(way), [], set()
        reads = _folder.OpenFile.read_into

        def count(file, start, view):
            read.append(len(view))
            pages.update((file, page) for page in range(start // 512, (start + len(view)) // 512))
            return reads(file, start, view)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_folder.OpenFile, "read_into", count)
            mh.load(tmp_path, **given)
        params = sum(held(p).nbytes for p in given["model"].parameters())
        states = sum(t.nbytes for t in local_states(given["optimizer"]))
        return 512 * len(pages) / (params + states), sum(read) / (params + states)

    def local_states(optimizer):
        inner = optimizer.optim if way == "OSS" else optimizer
        for state in inner.state.values():
            yield from map(held, state.values())

    def held(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    run_ranks(2, save)
    for different, all_of_it in run_ranks(there, load):
        assert different < 1.05 and all_of_it < 2.1
