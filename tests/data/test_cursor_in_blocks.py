"""A `Cursor` in blocks: samples are committed with the sync round, and handed out for the next."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.data_oracle import global_batches, permutation
from helpers.ranks import on_ranks, run_ranks
from manyhands.blocks._schedule import Schedule
from manyhands.blocks.averaging import _round
from manyhands.blocks.averaging._round import StepClock
from manyhands.errors import RanksDisagree

SAMPLES = 101


def make(samples=SAMPLES, batch_size=4, every=3, **options):
    """A model of one number, in blocks, and its cursor."""
    blocks = {
        k: options.pop(k)
        for k in ("overlap", "fragments", "warmup", "local_warmup")
        if k in options
    }
    model = nn.Linear(1, 1)
    optimizer = mh.Blocks(torch.optim.SGD(model.parameters(), lr=0.001), every=every, **blocks)
    return (
        model,
        optimizer,
        mh.Cursor(torch.arange(samples), batch_size, optimizer=optimizer, **options),
    )


def step(model, optimizer, cursor, batch):
    optimizer.zero_grad()
    noise = dist.get_rank() + 1.0  # workers that move alike are warned of
    loss = (model(batch[:, None].float() / 100) - noise).square().sum()
    cursor.mean(loss).backward()
    optimizer.step()


def epochs(count, **options):
    """What this worker trained on in each epoch, and the committed positions after each step."""
    model, optimizer, cursor = make(**options)
    seen, positions = [], []
    for _ in range(count):
        seen.append([])
        for batch in cursor:
            step(model, optimizer, cursor, batch)
            seen[-1] += batch.tolist()[: cursor.samples]
            positions.append(cursor.position)
    return seen, positions, optimizer.steps, cursor.state_dict()


def of_own_speed(**options):
    """Worker r takes 2 r + 1 ms for a step, by a clock of the test; a block takes 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        seconds = 0.001 * (1 + 2 * dist.get_rank())
        patch.setattr(StepClock, "seconds_per_step", lambda clock, step: seconds)
        patch.setattr(Schedule, "is_late", lambda schedule, seconds: False)
        every = mh.Seconds(0.02, first=3, own_steps=True)
        _, positions, *_ = found = epochs(2, samples=501, every=every, **options)
        return *found, len(positions)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
def test_workers_of_different_speed_take_different_amounts(options):
    found = run_ranks(3, of_own_speed, **options)
    for epoch in range(2):
        trained = [sample for seen, *_ in found for sample in seen[epoch]]
        assert sorted(trained) == list(range(501))
    assert found[0][3] == found[1][3] == found[2][3]
    first, second, third = (steps for *_, steps in found)
    assert first > 2 * second > 2 * third


@pytest.mark.sample(
    "{}-1", "{'overlap': 1}-2", "{'fragments': 2}-2", "{'warmup': 4, 'local_warmup': True}-3"
)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"overlap": 1},
        {"overlap": 2, "num_workers": 1},
        {"fragments": 2},
        {"warmup": 4},
        {"warmup": 4, "local_warmup": True},
    ],
    ids=str,
)
def test_workers_see_each_sample_once_in_an_epoch(workers, options):
    found = run_ranks(workers, epochs, 2, **options)
    for epoch in range(2):
        trained = [sample for seen, *_ in found for sample in seen[epoch]]
        assert sorted(trained) == list(range(SAMPLES))
    assert len({steps for _, _, steps, _ in found}) == 1
    assert all(state == found[0][3] for *_, state in found)
    if workers > 1:
        assert all(positions == found[0][1] for _, positions, *_ in found)


def test_samples_count_once_their_round_took_place():
    for _, positions, *_ in run_ranks(2, epochs, 1, samples=40):
        assert positions == [0, 0, 24, 24, 24]  # after the last step all synchronize


def test_workers_take_neighbouring_parts_and_share_the_last_steps():
    (first, *_), (second, *_) = run_ranks(2, epochs, 1, samples=29)
    order = permutation(29, 0, 0)
    assert first[0] == order[:12] + order[24:26]
    assert second[0] == order[12:24] + order[26:]


def interrupted(folder, load, stop):
    model, optimizer, cursor = make(every=2)
    seen = []
    if load:
        mh.load(folder, model=model, optimizer=optimizer, cursor=cursor)
    for batch in cursor:
        step(model, optimizer, cursor, batch)
        seen += batch.tolist()[: cursor.samples]
        if optimizer.steps == stop:
            break
    optimizer.synchronize()
    mh.save(folder, model=model, optimizer=optimizer, cursor=cursor)
    return seen, cursor.epoch


def test_other_workers_go_on_in_the_middle_of_an_epoch(tmp_path):
    found = run_ranks(3, interrupted, tmp_path, False, 3)  # in the middle of a block
    found += run_ranks(1, interrupted, tmp_path, True, 8)
    found += run_ranks(2, interrupted, tmp_path, True, None)
    assert sorted(sample for seen, _ in found for sample in seen) == list(range(SAMPLES))
    assert [epoch for _, epoch in found] == [0, 0, 0, 0, 1, 1]


def test_a_checkpoint_of_blocks_is_one_for_ranks_in_step(tmp_path):
    def go_on():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        cursor = mh.Cursor(torch.arange(SAMPLES), 4, optimizer=optimizer)
        mh.load(tmp_path, model=model, cursor=cursor)
        return [sample for batch in cursor for sample in batch.tolist()]

    seen = [sample for own, _ in run_ranks(3, interrupted, tmp_path, False, 3) for sample in own]
    assert sorted(seen + go_on()) == list(range(SAMPLES))


def inside_workers():
    """Two workers of two ranks each: a worker's batch is divided between its ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    inside = groups[rank // 2]
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), process_group=inside)
    optimizer = mh.Blocks(
        torch.optim.SGD(model.parameters(), lr=0.001),
        every=3,
        process_group=across[rank % 2],
        inner_group=inside,
    )
    cursor = mh.Cursor(torch.arange(SAMPLES), 6, optimizer=optimizer)
    seen = []
    for batch in cursor:
        step(model, optimizer, cursor, batch)
        seen += batch.tolist()[: cursor.samples]
    return seen


def test_workers_of_several_ranks_see_each_sample_once():
    found = run_ranks(4, inside_workers)
    assert sorted(sample for seen in found for sample in seen) == list(range(SAMPLES))
    assert all(found)


def test_one_worker_alone_is_in_step():
    ((seen, positions, *_),) = run_ranks(1, epochs, 1, samples=40)
    assert seen[0] == [sample for batch in global_batches(40, 4) for sample in batch]
    assert positions == list(range(4, 44, 4))


@on_ranks(2, raises=RanksDisagree, match="positions of a Cursor")
def test_workers_with_other_cursors_are_told():
    model, optimizer, cursor = make(seed=dist.get_rank())
    for batch in cursor:
        step(model, optimizer, cursor, batch)


@on_ranks(2, raises=RuntimeError, match="took more than one batch")
def test_more_batches_than_steps_are_told():
    model, optimizer, cursor = make(batch_size=2, every=2)
    for index, batch in enumerate(cursor):
        cursor.mean(model(batch[:, None].float()).sum()).backward()
        if index % 3 == 2:
            optimizer.step()


@on_ranks(2, raises=ValueError, match="Pass the Ramp a DataLoader")
def test_a_ramp_in_blocks_is_refused_and_says_what_to_do():
    rule = mh.AdaScale(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), world_size=1)
    optimizer = mh.Blocks(rule, every=3)
    cursor = mh.Cursor(torch.arange(SAMPLES), 4, optimizer=optimizer)
    next(mh.Ramp(rule, max_scale=4).over(cursor))


@on_ranks(2, raises=ValueError, match="these blocks already have a Cursor")
def test_a_second_cursor_on_the_same_blocks_is_refused():
    _, optimizer, _cursor = make()
    mh.Cursor(torch.arange(SAMPLES), 4, optimizer=optimizer)


# -- workers that take steps of their own ----------------------------------------------------------


def unequal_epochs(count, speeds, drop_last=False, samples=SAMPLES):
    """What this worker trained on in each epoch; only its steps advance its clock."""
    clock = SimpleNamespace(now=0.0)
    _round.time = SimpleNamespace(perf_counter=lambda: clock.now)
    every = mh.Seconds(4.0, first=2, own_steps=True)
    model, optimizer, cursor = make(every=every, drop_last=drop_last, samples=samples)
    seen, positions = [], set()
    for _ in range(count):
        seen.append([])
        for batch in cursor:
            clock.now += speeds[dist.get_rank()]
            step(model, optimizer, cursor, batch)
            seen[-1] += batch.tolist()[: cursor.samples]
            positions.add((optimizer.rounds, cursor.epoch * samples + cursor.position))
    optimizer.synchronize()
    return seen, sorted(positions), optimizer.own_steps, optimizer.rounds, model.weight.item()


@pytest.mark.sample("40", "103")
@pytest.mark.parametrize("samples", [40, 57, 101, 103])
def test_unequal_workers_see_each_sample_once_and_the_fast_ones_see_more(samples):
    found = run_ranks(3, unequal_epochs, 3, [1.0, 2.0, 4.0], samples=samples)
    for epoch in range(3):
        trained = [sample for seen, *_ in found for sample in seen[epoch]]
        assert sorted(trained) == list(range(samples))
    own = [steps for *_, steps, _, _ in found]
    assert own[0] > own[1] > own[2]
    assert len({(rounds, weight) for *_, rounds, weight in found}) == 1
    committed = {}
    for _, positions, *_ in found:
        for rounds, position in positions:
            assert committed.setdefault(rounds, position) == position


def test_unequal_workers_leave_out_less_than_a_batch_each():
    found = run_ranks(3, unequal_epochs, 2, [1.0, 2.0, 4.0], drop_last=True)
    for epoch in range(2):
        trained = [sample for seen, *_ in found for sample in seen[epoch]]
        assert len(set(trained)) == len(trained) and len(trained) > SAMPLES - 30
    assert len({(rounds, weight) for *_, rounds, weight in found}) == 1


@on_ranks(2, raises=ValueError, match="needs overlap=0")
def test_an_overlap_of_own_steps_is_an_error():
    make(every=mh.Seconds(4.0, first=4, least=2, own_steps=True), overlap=1)
