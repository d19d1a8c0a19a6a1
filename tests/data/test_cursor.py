"""A `Cursor` in one process: batches, saving, what counts, and mistakes."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from helpers.data_oracle import global_batches


def numbers(samples):
    return torch.arange(samples)


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def epoch_of(cursor):
    return [batch.tolist() for batch in cursor]


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_those_of_the_oracle(workers):
    cursor = mh.Cursor(numbers(53), 8, seed=5, num_workers=workers)
    for epoch in range(3):
        assert cursor.epoch == epoch
        assert epoch_of(cursor) == global_batches(53, 8, seed=5, epoch=epoch)
    assert len(cursor) == 7


def test_without_shuffling_the_order_is_the_dataset_s():
    assert epoch_of(mh.Cursor(numbers(5), 2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_drop_last_leaves_out_a_short_batch():
    cursor = mh.Cursor(numbers(53), 8, drop_last=True)
    assert epoch_of(cursor) == global_batches(53, 8, drop_last=True)
    assert (cursor.epoch, cursor.position, len(cursor)) == (1, 0, 6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cursor_has_the_attributes_of_a_loader_that_other_code_reads(workers):
    data = TensorDataset(numbers(53))
    loader = DataLoader(data, batch_size=8, drop_last=True, num_workers=workers)
    cursor = mh.Cursor(data, 8, drop_last=True, num_workers=workers)
    for name in ("dataset", "batch_size", "drop_last", "num_workers", "collate_fn"):
        assert getattr(cursor, name) == getattr(loader, name), name
        with pytest.raises(AttributeError):  # it would change nothing
            setattr(cursor, name, None)
    cursor = mh.Cursor(data, 8, collate_fn=list)
    assert (cursor.collate_fn, cursor.drop_last) == (list, False)


def test_the_attributes_of_a_cursor_over_shards_are_its_own():
    data = mh.DataShards([0, 1], [5, 5], lambda shard, start: iter(range(start, 5)))
    assert mh.Cursor(data, 4).dataset is data


def test_a_loader_without_a_collate_function_shows_the_option():
    def batches(dataset, batch_sampler, **_):
        return [[dataset[i] for i in batch] for batch in batch_sampler]

    assert mh.Cursor(numbers(4), 2, loader=batches, collate_fn=len).collate_fn is len
    assert mh.Cursor(numbers(4), 2, loader=batches).collate_fn is None


def test_a_dataset_smaller_than_a_batch_is_one_short_batch():
    assert [sorted(batch) for batch in epoch_of(mh.Cursor(numbers(3), 8))] == [[0, 1, 2]]
    assert epoch_of(mh.Cursor(numbers(3), 8, drop_last=True)) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bound", [True, False])
def test_a_loop_that_was_left_goes_on_where_it_was(workers, bound):
    optimizer = sgd() if bound else None
    cursor = mh.Cursor(numbers(53), 8, optimizer=optimizer, num_workers=workers)
    seen = []
    for stop in (1, 3, 100):
        for batch in cursor:
            seen.append(batch.tolist())
            if optimizer:
                optimizer.step()
            if cursor.position >= 8 * stop:
                break
    assert seen == global_batches(53, 8)


def test_what_the_optimizer_has_not_stepped_on_does_not_count():
    optimizer = sgd()
    cursor = mh.Cursor(numbers(40), 8, optimizer=optimizer, num_workers=2)
    batches = iter(cursor)
    first = next(batches)
    assert cursor.position == 0  # saved here, a run trains on it again
    optimizer.step()
    assert cursor.position == 8
    next(batches)
    assert cursor.position == 8
    batches.close()
    assert first.tolist() == global_batches(40, 8)[0]
    assert epoch_of(cursor)[0] == global_batches(40, 8)[1]


def test_a_step_that_a_scaler_skips_counts_with_the_next():
    optimizer = sgd()
    cursor = mh.Cursor(numbers(40), 8, optimizer=optimizer)
    positions = []
    for step, _ in enumerate(cursor):
        if step not in (1, 4):
            optimizer.step()
        positions.append(cursor.position)
    assert positions == [8, 8, 24, 32, 32]
    assert (cursor.epoch, cursor.position) == (1, 0)


@pytest.mark.parametrize("wrap", [mh.AdaScale, lambda optimizer: mh.Blocks(optimizer, every=3)])
def test_an_optimizer_of_ours_counts_as_the_one_inside(wrap):
    model = nn.Linear(1, 1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.01))
    cursor = mh.Cursor(TensorDataset(torch.randn(40, 1)), 8, optimizer=optimizer)
    for step, (x,) in enumerate(cursor):
        assert cursor.position == 8 * step
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        assert cursor.position == 8 * (step + 1)


def test_passes_of_a_step_hold_its_samples():
    cursor = mh.Cursor(numbers(53), 20, max_local_batch_size=8)
    assert (cursor.passes, len(cursor)) == (3, 8)
    steps, step = [], []
    for batch in cursor:
        cursor.mean(torch.zeros(()))
        assert len(batch) == cursor.samples <= 8 and cursor.passes in (2, 3)
        step += batch.tolist()
        if cursor.last_pass:
            steps.append(step)
            step = []
    assert steps == global_batches(53, 20)


def test_the_mean_over_uneven_passes_is_that_of_the_whole_step():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(50, 3), torch.randn(50, 1))
    model = nn.Linear(3, 1)
    cursor = mh.Cursor(data, 20, max_local_batch_size=8)
    batches = iter(global_batches(50, 20))
    for x, y in cursor:
        cursor.mean((model(x) - y).square().sum()).backward()
        if cursor.last_pass:
            found = model.weight.grad.clone()
            model.zero_grad()
            x, y = data[next(batches)]
            (model(x) - y).square().mean().backward()
            torch.testing.assert_close(found, model.weight.grad)
            model.zero_grad()


def test_uneven_passes_without_a_mean_are_warned_of_once():
    cursor = mh.Cursor(numbers(50), 20, max_local_batch_size=8)
    with pytest.warns(UserWarning, match=r"divided unevenly.*cursor.mean") as warned:
        epoch_of(cursor)
        epoch_of(cursor)
    assert len(warned) == 1


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, workers):
    def run(steps, load=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        data = TensorDataset(torch.linspace(0, 1, 53)[:, None])
        cursor = mh.Cursor(data, 8, optimizer=optimizer, num_workers=workers)
        if load:
            values = mh.load(tmp_path, model=model, optimizer=optimizer, cursor=cursor)
            assert values["cursor"] is cursor
        while True:
            for (x,) in cursor:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                steps -= 1
                if steps == 0:
                    mh.save(tmp_path, model=model, optimizer=optimizer, cursor=cursor)
                    return model.state_dict(), (cursor.epoch, cursor.position)

    run(10)
    resumed = run(9, load=True)
    torch.testing.assert_close(resumed, run(19), rtol=0, atol=0)
    assert resumed[1] == (2, 40)


def saved_cursor():
    cursor = mh.Cursor(numbers(40), 8, seed=3)
    next(iter(cursor))
    return cursor.state_dict()


def test_the_state_is_plain_numbers():
    state = saved_cursor()
    assert state["fresh"] == 8 and state["returned"] == []
    assert all(type(value) in (int, bool, list, type(None)) for value in state.values())


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"dataset": numbers(41)},
            "samples=40, but this Cursor has samples=41. Create the Cursor as in the saved run",
        ),
        ({"seed": 4}, "seed=3, but this Cursor has seed=4"),
        ({"shuffle": False}, "shuffle=True, but this Cursor has shuffle=False"),
    ],
)
def test_a_position_in_another_order_is_refused(changed, match):
    cursor = mh.Cursor(**{"dataset": numbers(40), "batch_size": 8, "seed": 3, **changed})
    with pytest.raises(ValueError, match=match):
        cursor.load_state_dict(saved_cursor())
    assert cursor.position == 0


def test_a_state_of_another_version_is_refused():
    with pytest.raises(ValueError, match="has version=2, but this Cursor has version=1"):
        mh.Cursor(numbers(40), 8).load_state_dict({**saved_cursor(), "version": 2})


def test_another_batch_size_is_no_other_position():
    cursor = mh.Cursor(numbers(40), 5, seed=3)
    cursor.load_state_dict(saved_cursor())
    order = [sample for step in global_batches(40, 8, seed=3) for sample in step]
    assert [sample for step in epoch_of(cursor) for sample in step] == order[8:]


# -- mistakes --------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"dataset": Stream()}, TypeError, "cannot resume a Stream, which has no positions"),
        ({"dataset": numbers(0)}, ValueError, "got a dataset of length 0"),
        ({"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 2.0}, ValueError, "batch_size must be a whole number"),
        ({"seed": -1}, ValueError, "seed must be a whole number of at least 0"),
        ({"keep": "all"}, ValueError, "keep must be one of"),
        ({"max_local_batch_size": -1}, ValueError, "max_local_batch_size must be"),
        ({"sampler": [1]}, ValueError, "omit sampler: a Cursor"),
        ({"in_order": False}, ValueError, "omit in_order=False"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        mh.Cursor(**{"dataset": numbers(4), "batch_size": 2, **arguments})


def test_two_loops_at_once_are_refused():
    cursor = mh.Cursor(numbers(40), 8)
    batches = iter(cursor)
    next(batches)
    with pytest.raises(RuntimeError, match=r"in use by a loop\. Create"):
        next(iter(cursor))
    with pytest.raises(RuntimeError, match=r"in use by a loop\. Load its state before"):
        cursor.load_state_dict(saved_cursor())


def test_a_mean_outside_of_the_loop_is_refused():
    cursor = mh.Cursor(numbers(40), 8)
    with pytest.raises(RuntimeError, match="needs a batch"):
        cursor.mean(torch.zeros(()))
    for _ in cursor:
        cursor.mean(torch.zeros(()))
        with pytest.raises(RuntimeError, match="once per batch"):
            cursor.mean(torch.zeros(()))


def test_a_cursor_that_is_gone_leaves_its_optimizer():
    optimizer = sgd()
    cursor = mh.Cursor(numbers(40), 8, optimizer=optimizer)
    del cursor
    gc.collect()
    assert not optimizer._optimizer_step_post_hooks
    optimizer.step()


def test_a_loader_of_another_class_loads_the_same():
    class Loader(DataLoader):
        pass

    assert epoch_of(mh.Cursor(numbers(53), 8, loader=Loader)) == global_batches(53, 8)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torch says so of torchdata
def test_a_stateful_loader_of_torchdata_loads_the_same():
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    cursor = mh.Cursor(numbers(53), 8, loader=loaders.StatefulDataLoader, num_workers=2)
    batches = iter(cursor)
    first = [next(batches).tolist() for _ in range(3)]
    batches.close()
    assert first + epoch_of(cursor) == global_batches(53, 8)
    assert epoch_of(cursor) == global_batches(53, 8, epoch=1)
