"""A dry run: one rank of any number, and what it sends, beside the plan and beside real ranks."""

import gc
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import manyhands as mh
from manyhands._arguments import format_bytes
from manyhands._ranks.agreement import agree
from manyhands._ranks.dry_run import names_of_torch
from manyhands._ranks.ranks import RankGroup
from manyhands.tools.plan._costs import round_cost
from manyhands.tools.plan._model import measure, planned_optimizers


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 8))


def train(model, optimizer, counted=None, steps=4):
    for _ in range(steps):
        if counted is not None:
            counted.clear()
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 128).view(2, 64)).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def sharded(level, kind=AdamW):
    def make():
        model = make_model()
        return mh.shard(model, kind(model.parameters(), lr=0.01), level=level)

    return make


def under_rule():
    model = make_model()
    return DistributedDataParallel(model), mh.AdaScale(SGD(model.parameters(), lr=0.01))


def ruled(level):
    def make():
        model, optimizer = sharded(level)()
        return model, mh.AdaScale(optimizer)

    return make


def measured():
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.01)
    optimizer.noise = mh.NoiseScale(optimizer)
    return DistributedDataParallel(model), optimizer


def in_blocks():
    model = make_model()
    return model, mh.DiLoCo(SGD(model.parameters(), lr=0.01), every=2)


@pytest.mark.parametrize("size", [2, 8])
def test_data_parallel_ranks_that_are_all_alike_train_as_one(size):
    model = make_model()
    alone = train(model, SGD(model.parameters(), lr=0.01))
    with mh.dry_run(size):
        model = make_model()
        ddp = DistributedDataParallel(model)
        torch.testing.assert_close(train(ddp, SGD(model.parameters(), lr=0.01)), alone)
        torch.testing.assert_close(train(*under_rule()), alone)  # no noise: a gain of 1
        for level in (1, 2):
            model, optimizer = sharded(level, SGD)()
            own = [p for group in optimizer.optim.param_groups for p in group["params"]]
            assert sum(p.numel() for p in own) < sum(p.numel() for p in model.parameters())
            train(model, optimizer)


@pytest.mark.sample(
    "0-8-None",
    "0-8-AdamScale",
    "0-1024-AdaScale",
    "1-8-None",
    "1-8-AdamScale",
    "1-1024-AdaScale",
    "2-8-AdaScale",
    "2-1024-None",
    "2-1024-AdamScale",
    "3-8-AdaScale",
    "3-1024-None",
    "3-1024-AdamScale",
)
@pytest.mark.parametrize("rule", [None, "AdaScale", "AdamScale"])
@pytest.mark.parametrize("size", [8, 1024])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_plan_is_what_a_step_of_any_number_of_ranks_sends(size, level, rule):
    kind = SGD if rule == "AdaScale" else AdamW
    row = mh.plan(make_model, kind, size, rule=rule).rows[level]
    with mh.dry_run(size) as counted:
        model, optimizer = sharded(level, kind)()
        train(model, getattr(mh, rule)(optimizer) if rule else optimizer, counted)
    assert row.collectives == counted.calls.total()
    assert row.sent == pytest.approx(counted.sent.total(), abs=row.collectives)  # rounded


PARTS = {
    "rule": under_rule,
    "blocks": in_blocks,
    **{f"level {level}": sharded(level) for level in (1, 2, 3)},
    **{f"level {level} under a rule": ruled(level) for level in (1, 2, 3)},
    "AdamScale": lambda: (m := make_model(), mh.AdamScale(AdamW(m.parameters(), lr=0.01))),
    "noise scale": measured,
}


@pytest.mark.sample("rule", "level 1", "level 3", "level 3 under a rule", "noise scale")
@pytest.mark.filterwarnings("ignore:in the first block all")
@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_among_a_thousand_and_as_the_last_of_them(part):
    for rank in (0, 999):
        with mh.dry_run(1000, rank) as counted:
            model, optimizer = PARTS[part]()
            few = len(counted.keys)
            train(model, optimizer, counted)
        assert few <= 10 and len(counted.keys) <= 1
    assert not dist.is_initialized()


@pytest.mark.sample("0", "3")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_save_sends_one_receipt_and_leaves_nothing(level, tmp_path):
    for rank in (0, 999):
        with mh.dry_run(1000, rank) as counted:
            model, optimizer = sharded(level)()
            train(model, optimizer)
            for number in range(1, 4):  # the first save asks for the folder's number as well
                counted.clear()
                saving = mh.save(
                    tmp_path / "new", model=model, optimizer=optimizer, wait=number == 2
                )
                assert saving.wait() == tmp_path / "new" / f"{number:06d}"
            assert not counted.calls
            mine, first = {"set": 1, "get": 1}, {"set": 2, "get": 999, "delete_key": 1000}
            shards = {"add": 1} if level == 3 else {}  # counts the calls of `state_dict`
            assert counted.requests == (mine if rank else first) | shards
            assert len(counted.keys) == counted.requests["set"] + len(shards)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_load_reads_what_any_rank_of_any_number_needs(level, tmp_path):
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    params = train(model, optimizer)
    mh.save(tmp_path, model=model, optimizer=optimizer, epoch=3)
    calls = []
    for size, rank in ((4, 0), (4, 3), (1000, 7)):
        with mh.dry_run(size, rank) as counted:
            model, optimizer = sharded(level)()
            counted.clear()
            assert mh.load(tmp_path, model=model, optimizer=optimizer)["epoch"] == 3
            calls.append((counted.calls, len(counted.keys)))
            for param, saved in zip(model.parameters(), params, strict=True):
                if level == 3:
                    rows = -(-len(saved) // size)
                    param, saved = param.to_local(), saved[rank * rows : (rank + 1) * rows]
                assert torch.equal(param, saved)
    assert calls[0] == calls[1] == calls[2]


def test_ramp_stopping_and_a_cursor_run_in_it():
    with mh.dry_run(64):
        job = mh.start()
        assert (job.world_size, job.rank) == (64, 0)
        model, optimizer = under_rule()
        cursor = mh.Cursor(torch.utils.data.TensorDataset(torch.randn(1280, 64)), batch_size=128)
        for micro_batches in mh.Ramp(optimizer, max_scale=256).over(cursor):
            for (x,) in micro_batches:
                (model(x).square().mean() / len(micro_batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not mh.stopping(optimizer)
        assert (cursor.epoch, cursor.position) == (1, 0)
    with mh.dry_run(8):
        assert mh.start().world_size == 8  # the run before has left nothing in the environment
        assert not any(mh.stopping() for _ in range(3))


def test_what_all_ranks_do_has_been_done_in_the_store():
    with mh.dry_run(16) as counted:
        store = dist.distributed_c10d._get_default_store()
        assert store.add("here", 1) == 16
        store.wait(["of another rank"])
        ranks = RankGroup.of()
        ranks.roll_call().wait("this")
        ranks.roll_call("by name").wait("this")
        assert ranks.all_gather([3.0], torch.device("cpu")) == [[3.0]] * 16
        assert ranks.all_gather_text("text") == ["text"] * 16
        assert ranks.all_reduce(torch.ones(2)).tolist() == [16.0, 16.0]
        assert ranks.all_reduce(torch.ones(2), largest=True).tolist() == [1.0, 1.0]
        agree(ranks, {"scale": 4.0}, "")
        everything = [None] * 16
        dist.all_gather_object(everything, {"a": 1})
        assert everything == [{"a": 1}] * 16
    assert counted.requests["wait"] == 1 and counted.store_bytes > 0


def test_mistakes(monkeypatch):
    with pytest.raises(ValueError, match="world_size must be a whole number"), mh.dry_run(0):
        pass
    with pytest.raises(ValueError, match="below world_size=4, got 4"), mh.dry_run(4, 4):
        pass
    with mh.dry_run(2), pytest.raises(RuntimeError, match="there is one"), mh.dry_run(2):
        pass
    with pytest.raises(KeyError), mh.dry_run(2):
        raise KeyError
    with mh.dry_run(2), pytest.raises(RuntimeError, match=r"no other rank .* written '.*theirs'"):
        dist.distributed_c10d._get_default_store().get("theirs")
    names_of_torch.cache_clear()
    monkeypatch.delattr(torch._C._distributed_c10d, "_create_work_from_future")
    with pytest.raises(RuntimeError, match=r"tried on torch 2.13.*_create_work"), mh.dry_run(2):
        pass
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore:in the first block all")
def test_a_round_sends_what_the_formula_says():
    def make():
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))

    for size in (8, 1024):
        with mh.dry_run(size) as counted:
            model = make()
            optimizer = mh.DiLoCo(SGD(model.parameters(), lr=0.01), every=1)
            for _ in range(3):  # the first also compares samples
                counted.clear()
                model(torch.ones(2, 1024)).sum().backward()
                optimizer.step()
        sizes = measure(make(), planned_optimizers("sgd", {}, make()), 500_000)
        sent, collectives = round_cost(sizes, size)
        assert counted.calls == {"all_reduce": collectives} and collectives == 13
        assert counted.sent.total() == pytest.approx(sent, abs=collectives)
        note = f"A round of DiLoCo sends {format_bytes(sent)} in 13 collectives."
        assert note in mh.plan(make, workers=size).notes


def test_the_first_rank_holds_what_the_plan_says_and_writes_what_it_says(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

    def held():
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(memory.values())

    for level, size in itertools.product(range(4), (8, 64)):
        row, before = mh.plan(make, workers=size).rows[level], held()
        with mh.dry_run(size):
            model = make()
            model, optimizer = mh.shard(model, AdamW(model.parameters()), level=level)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 512)).sum().backward()
                optimizer.step()
            now = held() - before
            bytes_before = written()
            mh.save(tmp_path, model=model, optimizer=optimizer)
            saved = written() - bytes_before
        del model, optimizer
        planned = row.parameters + row.gradients + row.optimizer
        bucket = row.in_flight if level == 2 else 0  # the newest one is kept
        assert planned - 1000 <= now <= planned + bucket + 1000
        # What all hold alike is written tensor by tensor, so one writer has a little more.
        assert row.saved * 0.6 < saved < row.saved * 1.4 + 40_000


def written():
    """The bytes that this process has written."""
    return int(re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.parametrize("rule", [None, "AdaScale", "AdamScale"])
def test_the_plan_of_a_mesh_is_what_a_step_sends(rule):
    kind = SGD if rule == "AdaScale" else AdamW
    row = mh.plan(make_model, kind, rule=rule, mesh=(64, 16)).rows[4]
    with mh.dry_run(1024) as counted:
        mesh = init_device_mesh("cpu", (64, 16), mesh_dim_names=("copies", "shards"))
        model = make_model()
        optimizer = kind(model.parameters(), lr=0.01)
        model, optimizer = mh.shard(model, optimizer, 3, mesh=mesh)
        train(model, getattr(mh, rule)(optimizer) if rule else optimizer, counted)
        held = sum(param.to_local().nbytes for param in model.parameters())
    assert row.collectives == counted.calls.total()
    assert row.sent == pytest.approx(counted.sent.total(), abs=row.collectives)
    assert row.parameters == held
    assert row.code.endswith("level=3, mesh=mesh)  # of 64 x 16")
    assert mh.plan(make_model, mesh=(64, 16)).workers == 1024
