"""The state of a sharded run is the plain optimizer's, and goes there and back."""

import copy
import io
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import (
    AROUND_OSS,
    OPTIMIZERS,
    Lamb,
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    make_model,
    one,
    oss,
    plain,
    train,
    train_alone,
)
from manyhands._ranks.presence import RollCall


class WithWide(nn.Module):
    """A layer whose rows are many, for optimizers that keep a number for each row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(4))
        self.to(torch.float64)

    def forward(self, x):
        return self.layers(x) * self.scale


def groups_of_two_kinds(kind, **options):
    def build(model, make):
        params = list(model.parameters())
        groups = [
            {"params": params[1::2], "lr": 0.03},
            {"params": params[::2], "weight_decay": 0.2},
        ]
        return [make(groups, kind, **options)]

    return build


BUILDS = {
    "SGD momentum": groups_of_two_kinds(SGD, lr=0.05, momentum=0.9),
    "SGD without state": groups_of_two_kinds(SGD, lr=0.05),
    "AdamW": groups_of_two_kinds(AdamW, lr=0.02),
    "fused AdamW": groups_of_two_kinds(AdamW, lr=0.02, fused=True, amsgrad=True),
    "NAdam": groups_of_two_kinds(torch.optim.NAdam, lr=0.02),
    "ASGD": groups_of_two_kinds(torch.optim.ASGD, lr=0.02),
    "Adafactor": groups_of_two_kinds(torch.optim.Adafactor, lr=0.02),
    "LAMB": groups_of_two_kinds(Lamb, lr=0.02),
    "AdamW that gathers": lambda model, make: [
        make(model.parameters(), AdamW, lr=0.02, **({"gather_state": True} if make is oss else {}))
    ],
    "named": lambda model, make: [make(model.named_parameters(), AdamW, lr=0.02)],
}


def assert_states_match(mine, expected, **near):
    """Keys, types, shapes, dtypes, values and groups, not the order of entries."""
    assert mine["param_groups"] == expected["param_groups"]
    assert list(mine["state"]) == sorted(expected["state"])
    for index, entries in expected["state"].items():
        assert set(mine["state"][index]) == set(entries), index
        for name, value in entries.items():
            ours = mine["state"][index][name]
            assert type(ours) is type(value), name
            if isinstance(value, torch.Tensor):
                assert ours.dtype == value.dtype
                assert ours.device == value.device
                assert ours.stride() == value.stride() or value.numel() < 2
                torch.testing.assert_close(ours, value, **{"rtol": 1e-8, "atol": 1e-11, **near})
            else:
                assert ours == value


def trained(name, steps=3):
    (optimizer,), wrapped = train(BUILDS[name], AROUND_OSS[1], model=WithWide, steps=steps)
    return optimizer, wrapped


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_the_consolidated_state_is_the_plain_optimizers(workers):
    def run():
        result = {}
        for name in BUILDS:
            optimizer, _ = trained(name)
            optimizer.consolidate_state_dict()
            first = optimizer.state_dict() if everyone()[0] == 0 else None
            optimizer.consolidate_state_dict(recipient_rank=workers - 1)
            last = optimizer.state_dict() if everyone()[0] == workers - 1 else None
            optimizer.consolidate_state_dict(-1)
            result[name] = first, last, optimizer.state_dict(), optimizer.state_dict(all_ranks=True)
        return copy.deepcopy(result)

    ranks = run_ranks(workers, run)
    for name, build in BUILDS.items():
        (expected,), _ = train_alone(build, workers, model=WithWide, steps=3)
        expected = expected.state_dict()
        assert_states_match(ranks[0][name][0], expected)
        assert_states_match(ranks[-1][name][1], expected)
        for rank in ranks:
            assert_states_match(rank[name][2], expected)
            assert_states_match(rank[name][2], ranks[0][name][0], rtol=0, atol=0)
            assert_states_match(rank[name][3], ranks[0][name][0], rtol=0, atol=0)


def test_a_frozen_parameter_has_no_state():
    def build(model, make):
        model.layers[0].requires_grad_(False)
        return [make(model.parameters(), AdamW, lr=0.02)]

    def run():
        (optimizer,), _ = train(build, AROUND_OSS[0], model=Used)
        return optimizer.state_dict(all_ranks=True)

    class Used(WithWide):
        def __init__(self):
            super().__init__()
            self.unused.requires_grad_(False)

    (expected,), _ = train_alone(build, 2, model=Used)
    for state in run_ranks(2, run):
        assert_states_match(state, expected.state_dict())


@on_ranks(2)
def test_a_state_dict_is_a_snapshot():
    """What was taken does not change as training goes on."""
    for name in BUILDS:
        optimizer, wrapped = trained(name)
        state = optimizer.state_dict(all_ranks=True)
        before = copy.deepcopy(state)
        loss_of(wrapped, torch.ones(2, 5).double(), torch.ones(2, 3).double()).backward()
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.step()
        assert_states_match(state, before, rtol=0, atol=0)


@on_ranks(2, raises=RuntimeError, match=r"consolidate_state_dict\(\) on every rank")
def test_a_state_dict_of_some_time_ago_is_an_error():
    optimizer, wrapped = trained("AdamW")
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        optimizer.state_dict()
        optimizer.state_dict()
    else:
        with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(\) on every rank"):
            optimizer.state_dict()
    optimizer.consolidate_state_dict(-1)
    loss_of(wrapped, torch.ones(2, 5).double(), torch.ones(2, 3).double()).backward()
    optimizer.step()
    optimizer.state_dict()


@on_ranks(2, raises=ValueError, match="recipient_rank must be one of 2 ranks")
def test_a_recipient_that_is_no_rank_is_an_error():
    optimizer, _ = trained("AdamW")
    optimizer.consolidate_state_dict(2)


@on_ranks(2)
def test_before_the_first_step_there_is_nothing_to_collect():
    model = make_model()
    plain = AdamW(model.parameters(), lr=0.01)
    optimizer = mh.OSS(model.parameters(), optim=AdamW, lr=0.01)
    state = optimizer.state_dict()
    assert state == optimizer.state_dict(all_ranks=True) == plain.state_dict()
    optimizer.load_state_dict(state)  # as Accelerate does when it prepares an optimizer
    assert optimizer.state_dict() == state
    mh.ShardedDataParallel(model, optimizer)


@on_ranks(2, raises=RuntimeError, match=r"consolidate_state_dict\(\) on every rank")
def test_an_optimizer_that_begins_with_state_has_to_be_collected():
    mh.OSS(make_model().parameters(), optim=Adagrad, lr=0.01).state_dict()


@on_ranks(2)
def test_a_state_that_gathers_itself_where_every_rank_calls():
    optimizer, wrapped = trained("AdamW that gathers")
    for _ in range(2):
        first, second = optimizer.state_dict(), optimizer.state_dict(all_ranks=True)
        assert_states_match(first, second, rtol=0, atol=0)
        assert_states_match(optimizer.state_dict(), first, rtol=0, atol=0)
        loss_of(wrapped, torch.ones(2, 5).double(), torch.ones(2, 3).double()).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(0)  # as before: for one rank
    if dist.get_rank() == 0:
        optimizer.state_dict()
    else:
        with pytest.raises(RuntimeError, match=r"has only its shard"):
            optimizer.state_dict()


def test_a_state_that_gathers_itself_where_one_rank_calls(monkeypatch):
    """That rank gets an error, without a collective; when all call, it works again."""
    monkeypatch.setattr(RollCall, "give_up_after", 0.2)

    def run():
        optimizer, _ = trained("AdamW that gathers")
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"\[1\] have not called OSS.state_dict\(\)"):
                optimizer.state_dict()
        dist.barrier()
        RollCall.give_up_after = 60.0
        return len(optimizer.state_dict()["state"])

    first, second = run_ranks(2, run)
    assert first == second > 0


@on_ranks(2)
def test_a_rank_that_others_wait_for_is_named_by_a_warning(monkeypatch):
    monkeypatch.setattr(RollCall, "warn_after", 0.05)
    optimizer, _ = trained("AdamW that gathers")
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=r"state_dict\(\) waits: rank\(s\) \[1\] have not"):
            optimizer.state_dict()
    else:
        time.sleep(0.5)
        optimizer.state_dict()


# -- there and back ------------------------------------------------------------------------------


def on(module, optimizer, wrapped, first, steps, rank, workers):
    """Go on training from step `first`; rank None: on everybody's data."""
    x, y = make_batches(6, 1, workers)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        if rank is None:
            loss_of(wrapped, x[step, 0].flatten(0, 1), y[step, 0].flatten(0, 1)).backward()
        else:
            loss_of(wrapped, x[step, 0, rank], y[step, 0, rank]).backward()
        optimizer.step()
    return copied(module.parameters())


def continued(build, checkpoint, first, steps, data_of):
    """Load, then go on as one of the workers; `data_of` ranks' data is there to be shared."""
    module = WithWide()
    (optimizer,) = build(module, oss)
    wrapped = mh.ShardedDataParallel(module, optimizer)
    wrapped.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    rank, workers = everyone()
    rank = None if workers != data_of else rank
    return on(module, optimizer, wrapped, first, steps, rank, data_of)


def saved(optimizer, module):
    """Through a file that is read with weights_only."""
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": module.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.sample("SGD momentum", "named")
@pytest.mark.parametrize("name", BUILDS)
def test_a_plain_run_goes_on_sharded_and_a_sharded_one_plain_or_on_more_workers(name):
    build = BUILDS[name]
    (optimizer,), module = train_alone(build, 2, model=WithWide, steps=3)
    start = saved(optimizer, module)
    expected = on(module, optimizer, module, 3, 3, None, 2)

    def from_plain():
        module = WithWide()
        (optimizer,) = build(module, oss)
        wrapped = mh.ShardedDataParallel(module, optimizer)
        wrapped.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
        rank, workers = everyone()
        first = on(module, optimizer, wrapped, 3, 1, rank, workers)
        optimizer.consolidate_state_dict(-1)
        checkpoint = saved(optimizer, wrapped)
        there = on(module, optimizer, wrapped, 4, 2, rank, workers)
        again = continued(build, checkpoint, 4, 2, data_of=2)
        assert len(first) == len(there)
        for p, q in zip(there, again, strict=True):
            assert torch.equal(p, q), "the same number of workers goes on bit for bit"
        return {"params": there, "checkpoint": checkpoint}

    ranks = run_ranks(2, from_plain)
    assert_same([r["params"] for r in ranks], expected, f"{name}: plain to OSS")
    checkpoint = ranks[1]["checkpoint"]

    module = WithWide()
    (optimizer,) = build(module, plain)
    module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # torch's trains on it
    alone = on(module, optimizer, module, 4, 2, None, 2)
    assert_same([alone], expected, f"{name}: OSS to plain")

    more = run_ranks(3, continued, build, checkpoint, 4, 2, 2)
    assert_same(more, expected, f"{name}: OSS on two to OSS on three")


def test_loaded_options_and_names_are_the_dicts():
    (expected,), _ = train_alone(BUILDS["AdamW"], 2, model=WithWide, steps=2)
    expected.param_groups[1]["lr"] = 0.5
    expected.param_groups[0]["betas"] = (0.1, 0.2)
    expected = expected.state_dict()

    def run():
        (optimizer,) = BUILDS["AdamW"](WithWide(), oss)
        optimizer.load_state_dict(expected)
        assert optimizer.param_groups[1]["lr"] == 0.5
        return optimizer.state_dict(all_ranks=True)

    for state in run_ranks(3, run):
        assert_states_match(state, expected, rtol=0, atol=0)


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_the_callers_dict_is_left_alone(workers):
    for name in BUILDS:
        (there,), _ = train_alone(BUILDS[name], 2, model=WithWide, steps=2)
        given = copy.deepcopy(there.state_dict())
        before = copy.deepcopy(given)
        module = WithWide()
        (optimizer,) = BUILDS[name](module, oss)
        wrapped = mh.ShardedDataParallel(module, optimizer)
        optimizer.load_state_dict(given)
        assert_states_match(given, before, rtol=0, atol=0)
        loss_of(wrapped, torch.ones(2, 5).double(), torch.ones(2, 3).double()).backward()
        optimizer.step()
        assert_states_match(given, before, rtol=0, atol=0)


def another_size_of_group(state):
    state["param_groups"][0]["params"].append(99)
    return state


def another_number_of_groups(state):
    state["param_groups"].append({**state["param_groups"][0], "params": [99]})
    return state


def another_shape(state):
    """Of the model's smallest parameter, which only one rank holds."""
    state["state"][5]["exp_avg"] = torch.zeros(17, dtype=torch.float64)
    return state


def another_dimension(state):
    state["state"][0]["exp_avg_sq"] = torch.zeros(5, 13, dtype=torch.float64)
    return state


def numbers_as_strings(state):
    """As JSON has them: no parameter would find its state."""
    return {**state, "state": {str(number): held for number, held in state["state"].items()}}


WRONG = [
    numbers_as_strings,
    another_size_of_group,
    another_number_of_groups,
    another_shape,
    another_dimension,
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_dict_raises_everywhere_and_changes_nothing(wrong):
    build = OPTIMIZERS["AdamW"]
    (there,), _ = train_alone(build, 2, steps=2)
    given = wrong(copy.deepcopy(there.state_dict()))

    def run():
        (optimizer,), _ = train(build, AROUND_OSS[1], steps=3)
        before = optimizer.state_dict(all_ranks=True)
        try:
            optimizer.load_state_dict(given)
        finally:
            assert_states_match(optimizer.state_dict(all_ranks=True), before, rtol=0, atol=0)

    raises_on_ranks(3, ValueError, run, timeout=20)


def test_a_momentum_of_another_shape_raises_with_whole_parameters_too():
    build = one(SGD, lr=0.1, momentum=0.9, layout="whole")
    (there,), _ = train_alone(OPTIMIZERS["SGD"], 2, steps=2)
    given = copy.deepcopy(there.state_dict())
    given["state"][0]["momentum_buffer"] = torch.zeros(5, 13, dtype=torch.float64)

    def run():
        (optimizer,), _ = train(build, AROUND_OSS[1], steps=1)
        optimizer.load_state_dict(given)

    raises_on_ranks(2, ValueError, run, timeout=20)
