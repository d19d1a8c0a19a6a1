"""A `Cursor` on ranks that step together: the same batches on any number of them."""

import contextlib
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import manyhands as mh
from helpers.data_oracle import global_batches
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from manyhands.errors import RanksDisagree
from manyhands.ramp import _ramp

SAMPLES, BATCH = 103, 12
DATA = TensorDataset(
    torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)),
    torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(2)),
)


def batches(most=None, stop=None, state=None, keep="batch", size=BATCH, **options):
    """This rank's samples of each step, without fillers, and the state after `stop` steps."""
    cursor = mh.Cursor(torch.arange(SAMPLES), size, keep=keep, max_local_batch_size=most, **options)
    if state is not None:
        cursor.load_state_dict(state)
    steps, step = [], []
    for batch in cursor:
        cursor.mean(torch.zeros(()))
        step += batch.tolist()[: cursor.samples]
        if cursor.last_pass:
            steps.append(step)
            step = []
        if stop is not None and len(steps) == stop:
            break
    return steps, cursor.state_dict()


def together(ranks):
    """The steps of all ranks together."""
    assert len({len(steps) for steps, _ in ranks}) == 1
    assert all(state == ranks[0][1] for _, state in ranks)
    return [list(chain(*parts)) for parts in zip(*(steps for steps, _ in ranks), strict=True)]


def sets(steps):
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("most", [None, 2])
def test_the_batches_do_not_depend_on_the_number_of_ranks(most):
    """A run of 3, then 1, then 4 ranks, in the middle of an epoch; 12 divides by none but 5."""
    wanted, state, done = global_batches(SAMPLES, BATCH), None, 0
    for ranks, stop in ((3, 2), (1, 1), (4, 3), (5, None)):
        found = run_ranks(ranks, batches, most, stop, state)
        steps, state = together(found), found[0][1]
        upto = done + len(steps)
        # (passes are cut inside each rank's part)
        assert steps == wanted[done:upto]
        done = upto
    assert done == len(wanted) and (state["epoch"], state["fresh"]) == (1, 0)


def test_keep_micro_lets_the_batch_follow_the_ranks():
    first = run_ranks(2, batches, None, 3, None, "micro", 4)
    assert together(first) == global_batches(SAMPLES, 8)[:3]
    rest = run_ranks(3, batches, None, None, first[0][1], "micro", 4)
    order = list(chain(*global_batches(SAMPLES, 8)))
    assert list(chain(*together(rest))) == order[24:]
    assert {len(step) for step in together(rest)[:-1]} == {12}


@pytest.mark.parametrize("workers", [0, 2])
def test_short_steps_leave_no_sample_out_and_ranks_without_one_take_part(workers):
    def run():
        cursor = mh.Cursor(torch.arange(13), 4, num_workers=workers)
        sizes = []
        for batch in cursor:
            cursor.mean(torch.zeros(()))
            assert len(batch) == max(1, cursor.samples)
            sizes.append(cursor.samples)
        return sizes

    found = run_ranks(4, run)
    assert [sum(sizes) for sizes in zip(*found, strict=True)] == [4, 4, 4, 1]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_sum(model, x, y):
    return (model(x) - y).square().sum()


def train_alone(epochs):
    """The same training written plainly."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for step in global_batches(SAMPLES, BATCH, epoch=epoch):
            x, y = DATA[step]
            optimizer.zero_grad()
            (loss_sum(model, x, y) / len(step)).backward()
            optimizer.step()
    return [param.detach() for param in model.parameters()]


def wrap(kind, model):
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    if kind == "oss":
        optimizer = mh.OSS(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
        return mh.ShardedDataParallel(model, optimizer), optimizer
    wrapped = mh.FSDP(model)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)


def train(kind, folder, epochs, steps=None, load=False):
    model, optimizer = wrap(kind, make_model())
    cursor = mh.Cursor(DATA, BATCH, optimizer=optimizer)
    if load:
        mh.load(folder, model=model, optimizer=optimizer, cursor=cursor)
    done = 0
    for _ in range(cursor.epoch, epochs):
        for x, y in cursor:
            optimizer.zero_grad()
            cursor.mean(loss_sum(model, x, y)).backward()
            optimizer.step()
            done += 1
            if done == steps:
                mh.save(folder, model=model, optimizer=optimizer, cursor=cursor)
                return None
    full = {}
    if kind == "fsdp":
        full = model.state_dict()
        return [full[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("kind", ["ddp", "oss", "fsdp"])
def test_training_on_changing_ranks_is_training_alone(kind, tmp_path):
    """12 samples on 5 ranks, then 2, then 3: parts differ, and the gradients do not."""
    run_ranks(5, train, kind, tmp_path, 2, 3)
    run_ranks(2, train, kind, tmp_path, 2, 9, True)
    for params in run_ranks(3, train, kind, tmp_path, 2, None, True):
        torch.testing.assert_close(params, train_alone(2))


def gains(of_cursor):
    """AdaScale's gains on steps of which 5 ranks have 2 or 3 samples, in two passes."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=2)
    cursor = mh.Cursor(DATA, BATCH, optimizer=optimizer, max_local_batch_size=2)
    found = []
    for x, y in cursor:
        if cursor.passes != 2:
            break
        if of_cursor:
            loss = cursor.mean(loss_sum(model, x, y))
        else:
            cursor.mean(torch.zeros(()))
            if not cursor.last_pass:
                mean = mh.WeightedMean([1, cursor._now.counts[1]], optimizer)
            loss = mean(loss_sum(model, x, y))
        with contextlib.nullcontext() if cursor.last_pass else model.no_sync():
            loss.backward()
        if cursor.last_pass:
            optimizer.step()
            optimizer.zero_grad()
            found.append(optimizer.gain())
    return found


def test_a_rule_learns_the_numbers_as_from_a_weighted_mean():
    (first, by_hand), *others = run_ranks(5, lambda: [gains(True), gains(False)])
    assert len(first) == 8 and [found for found, _ in others] == [first] * 4
    assert by_hand == pytest.approx(first)


@on_ranks(2)
def test_steps_take_no_collective():
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cursor = mh.Cursor(DATA, BATCH, optimizer=optimizer)
    counted = []

    def count(name):
        original = getattr(dist.ProcessGroupGloo, name)

        def call(*args, **kwargs):
            counted.append(name)
            return original(*args, **kwargs)

        return call

    loop = iter(cursor)
    next(loop)  # (the ranks compare their positions once in an epoch)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("allreduce", "allgather", "broadcast", "barrier"):
            patch.setattr(dist.ProcessGroup, name, count(name))
        for x, y in loop:
            cursor.mean(loss_sum(model.module, x, y)).backward()
            optimizer.step()
    assert len(counted) == 0


@pytest.mark.parametrize("name", ["batch_size", "seed", "shuffle", "drop_last"])
def test_ranks_with_other_arguments_are_told(name):
    def run():
        first = dist.get_rank() == 0
        values = {"batch_size": 8, "seed": 1, "shuffle": True, "drop_last": True}
        other = {"batch_size": 6, "seed": 2, "shuffle": False, "drop_last": False}
        mh.Cursor(torch.arange(40), **{**values, name: (values if first else other)[name]})

    raises_on_ranks(3, RanksDisagree, run, match=f"is {name}: rank 0: .*Make the same Cursor")


@on_ranks(2, raises=RanksDisagree, match="samples: rank 0: 40; rank 1: 41")
def test_ranks_with_datasets_of_different_lengths_are_told():
    mh.Cursor(torch.arange(40 + dist.get_rank()), 8)


@on_ranks(2, raises=ValueError, match="batch_size must be a whole number of at least 1")
def test_a_mistake_on_one_rank_is_told_to_all():
    mh.Cursor(torch.arange(40), 0 if dist.get_rank() else 8)


@on_ranks(2, raises=RanksDisagree, match="position.*load the same state on all of them")
def test_ranks_that_loaded_different_positions_are_told():
    cursor = mh.Cursor(torch.arange(40), 8)
    state = cursor.state_dict()
    cursor.load_state_dict({**state, "fresh": 8 * dist.get_rank()})
    next(iter(cursor))


@on_ranks(3, raises=ValueError, match="batch_size=2 must be at least the number of ranks, 3")
def test_a_batch_of_fewer_samples_than_ranks_is_refused():
    mh.Cursor(torch.arange(40), 2)


def ramped(folder, stop, load):
    model = DistributedDataParallel(make_model())
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.05))
    ramp = mh.Ramp(optimizer, max_scale=40, goal="steps", model=model)
    cursor = mh.Cursor(torch.arange(SAMPLES), 7, optimizer=optimizer)
    if load:
        mh.load(folder, model=model, optimizer=optimizer, ramp=ramp, cursor=cursor)
    steps = []
    for micro_batches in ramp.over(cursor):
        steps.append([])
        counts = micro_batches._mean._left[::-1]
        for count, batch in zip(counts, micro_batches, strict=True):
            x, y = DATA[batch]
            micro_batches.mean(loss_sum(model, x, y)).backward()
            steps[-1] += batch.tolist()[: int(count)]
        optimizer.step()
        optimizer.zero_grad()
        if len(steps) == stop:
            mh.save(folder, model=model, optimizer=optimizer, ramp=ramp, cursor=cursor)
            break
    return steps, cursor.state_dict()


def test_a_ramp_counts_samples_while_the_batch_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(_ramp, "EVERY", 1)
    first = run_ranks(2, ramped, tmp_path, 3, False)
    assert len(first[0][0][0]) < len(first[0][0][2]), "the batch should have grown"
    rest = run_ranks(3, ramped, tmp_path, None, True)
    steps = [*together(first), *together(rest)]
    order = list(chain(*global_batches(SAMPLES, 7)))
    done = 0
    for step in steps:
        assert sorted(step) == sorted(order[done : done + len(step)])
        done += len(step)
    assert done == SAMPLES and rest[0][1]["epoch"] == 1


def test_a_ramp_makes_the_passes_itself():
    optimizer = mh.AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.05))
    cursor = mh.Cursor(DATA, 8, optimizer=optimizer, max_local_batch_size=4)
    with pytest.raises(ValueError, match="Create the Cursor without max_local_batch_size"):
        next(mh.Ramp(optimizer, max_scale=4).over(cursor))
