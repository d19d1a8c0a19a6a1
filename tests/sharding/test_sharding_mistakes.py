"""Mistakes that people make: each is an error that says what to do, on every worker."""

import copy
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW, Muon

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import Lamb, make_model, oss
from manyhands._ranks.ranks import RankGroup


def x():
    return torch.ones(2, 5, dtype=torch.float64)


# -- the group ---------------------------------------------------------------------------------


@on_ranks(3, timeout=20)
def test_a_worker_that_is_not_in_the_group():
    group = dist.new_group([0, 1])
    module = make_model()
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="not a member of the process group"):
            oss(module.parameters(), AdamW, group=group)
        return
    optimizer = oss(module.parameters(), AdamW, group=group)
    model = mh.ShardedDataParallel(module, optimizer)
    model(x()).sum().backward()
    optimizer.step()


# -- the sharded module --------------------------------------------------------------------------


def inside_ddp():
    module = make_model()
    model = mh.ShardedDataParallel(module, oss(module.parameters()))
    DistributedDataParallel(model)(x())


def around_ddp():
    module = DistributedDataParallel(make_model())
    mh.ShardedDataParallel(module, oss(module.parameters()))


def around_itself():
    module = make_model()
    model = mh.ShardedDataParallel(module, oss(module.parameters()))
    mh.ShardedDataParallel(nn.Sequential(model), oss(module.parameters()))


def one_optimizer_twice():
    module = make_model()
    optimizer = oss(module.parameters())
    first = mh.ShardedDataParallel(module, optimizer)
    mh.ShardedDataParallel(first.module, optimizer)


def one_optimizer_for_two_models():
    first, second = make_model(), make_model()
    optimizer = oss([*first.parameters(), *second.parameters()])
    mh.ShardedDataParallel(first, optimizer)


def of_a_copy():
    module = make_model()
    optimizer = oss(copy.deepcopy(module).parameters())
    mh.ShardedDataParallel(module, optimizer)


def of_some_layers():
    module = make_model()
    mh.ShardedDataParallel(module, oss(module[0].parameters()))


def plain_optimizer():
    module = make_model()
    mh.ShardedDataParallel(module, SGD(module.parameters()))


def plain_optimizer_in_a_list():
    module = make_model()
    some = [oss(module[0].parameters()), SGD(module[2:].parameters())]
    mh.ShardedDataParallel(module, some)


def no_optimizer():
    mh.ShardedDataParallel(make_model(), [])


def another_group():
    module = make_model()
    group = dist.new_group([0, 1])
    mh.ShardedDataParallel(module, oss(module.parameters()), process_group=group)


def optimizers_of_different_groups():
    module = make_model()
    group = dist.new_group([0, 1])
    first, second = oss(module[0].parameters()), oss(module[2:].parameters(), group=group)
    mh.ShardedDataParallel(module, [first, second])


MISTAKES = {
    inside_ddp: (RuntimeError, "inside DistributedDataParallel"),
    around_ddp: (TypeError, "contains a DistributedDataParallel already"),
    around_itself: (TypeError, "contains a ShardedDataParallel already"),
    one_optimizer_twice: (RuntimeError, "already belongs to a ShardedDataParallel"),
    one_optimizer_for_two_models: (ValueError, "that are not in the module"),
    of_a_copy: (ValueError, r"6 parameter\(s\) of the module are in no optimizer \['0.weight"),
    of_some_layers: (ValueError, r"4 parameter\(s\) of the module are in no optimizer"),
    plain_optimizer: (TypeError, "needs the model's manyhands.OSS, got SGD"),
    plain_optimizer_in_a_list: (TypeError, "needs the model's manyhands.OSS, got SGD"),
    no_optimizer: (ValueError, "at least one optimizer"),
    another_group: (ValueError, "process group differs from the optimizer's"),
    optimizers_of_different_groups: (ValueError, "group"),
}


NEEDS_TWO = {another_group, optimizers_of_different_groups, inside_ddp, one_optimizer_twice}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_the_module_is_an_error_everywhere(mistake):
    exception, match = MISTAKES[mistake]
    for workers in [2] if mistake in NEEDS_TWO else [1, 2]:
        raises_on_ranks(workers, exception, mistake, match=match, timeout=20)


# -- the optimizer -------------------------------------------------------------------------------


ARGUMENTS = [
    ({"kind": Lamb, "layout": "even"}, ValueError, r'Lamb needs whole parameters.*layout="whole"'),
    ({"kind": Muon, "layout": "even"}, ValueError, r'Muon needs whole parameters.*layout="whole"'),
    ({"kind": LBFGS}, ValueError, "LBFGS combines all parameters in a step"),
    ({"kind": AdamW, "layout": "flat"}, ValueError, "layout must be one of None, 'even', 'whole'"),
    ({"kind": "AdamW"}, TypeError, "must be an optimizer class"),
    ({"kind": nn.Linear}, TypeError, "must be an optimizer class"),
    ({"kind": AdamW, "bucket_size": 0}, ValueError, "bucket_size must be a whole number"),
    ({"kind": AdamW, "rate": 0.1}, TypeError, "rate"),
]


@pytest.mark.parametrize(("options", "exception", "match"), ARGUMENTS)
def test_arguments_that_make_no_sense(options, exception, match):
    def run():
        model = nn.Linear(4, 4, bias=False) if options["kind"] is Muon else make_model()
        oss(model.parameters(), **options)

    raises_on_ranks(2, exception, run, match=match, timeout=20)


@on_ranks(2, raises=ValueError, match="more than one parameter group", timeout=20)
def test_a_parameter_in_two_groups():
    module = make_model()
    optimizer = oss(module[0].parameters(), AdamW)
    optimizer.add_param_group({"params": list(module[0].parameters())})


@on_ranks(2, timeout=20)
def test_a_failed_add_param_group_leaves_the_optimizer_usable():
    module = make_model()
    optimizer = oss(module[0].parameters(), AdamW, lr=0.02)
    before = len(optimizer.param_groups)
    layer = module[2] if dist.get_rank() == 0 else module[4]
    with pytest.raises(ValueError, match="different parameters"):
        optimizer.add_param_group({"params": list(layer.parameters())})
    assert len(optimizer.param_groups) == before
    module(x()).sum().backward()
    for p in module.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()


@pytest.mark.parametrize("copying", [pickle.dumps, copy.deepcopy, copy.copy])
def test_pickling_says_what_to_do(copying):
    with pytest.raises(TypeError, match=r"state_dict\(\) after consolidate_state_dict\(\)"):
        copying(oss(make_model().parameters()))


# -- gradients that nothing averages ---------------------------------------------------------------


@on_ranks(
    2,
    raises=RuntimeError,
    match="rank 0: .*rank 1: .*ShardedDataParallel.*DistributedDataParallel.*all_reduce",
)
def test_gradients_that_nothing_averages_are_an_error_in_the_first_step():
    model = make_model()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = oss(model.parameters(), AdamW, lr=0.1)
    (model(x()) * (1 + dist.get_rank())).square().sum().backward()
    try:
        optimizer.step()
    finally:
        assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("how", ["thawed", "added"])
@on_ranks(2, raises=RuntimeError, match="norms differ.*with all parameters that are trained later")
def test_parameters_that_ddp_has_not_seen_are_an_error_in_their_first_step(how):
    """DDP averages the gradients of what was trained when it was made."""
    model = make_model()
    first, last = model[0], model[-1]
    last.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = oss((model if how == "thawed" else first).parameters(), AdamW, lr=0.1)
    for step in range(3):
        if step == 2:
            last.requires_grad_(True)
            if how == "added":
                optimizer.add_param_group({"params": list(last.parameters())})
        ddp.zero_grad()
        (ddp(x()) * (1 + dist.get_rank())).square().sum().backward()
        before = [param.detach().clone() for param in model.parameters()]
        if step < 2:
            optimizer.step()
    try:
        optimizer.step()
    finally:
        assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("layout", ["even", "whole"])
def test_gradients_that_the_user_averages_train_as_in_one_process(layout):
    def train(average):
        model = make_model()
        optimizer = oss(model.parameters(), AdamW, lr=0.1, layout=layout)
        for step in range(3):
            model.zero_grad()
            if average:
                (model(x()) * (1 + step + dist.get_rank())).square().sum().backward()
                for param in model.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= 2
            else:
                losses = [(model(x()) * (1 + step + rank)).square().sum() for rank in range(2)]
                (sum(losses) / 2).backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    expected = train(average=False)
    for found in run_ranks(2, lambda: train(average=True)):
        torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_gradients_are_compared_in_the_first_step_only(monkeypatch):
    calls = []
    model = make_model()
    optimizer = oss(model.parameters(), AdamW, lr=0.1)
    gather = RankGroup.all_gather
    monkeypatch.setattr(RankGroup, "all_gather", lambda *args: calls.append(1) or gather(*args))
    for _ in range(3):
        model.zero_grad()
        model(x()).square().sum().backward()
        optimizer.step()
    assert len(calls) == 1


# -- arguments in the wrong place ------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"optim": SGD}])
def test_an_optimizer_that_is_made_already_is_named(arguments):
    model = nn.Linear(2, 2)
    made = AdamW(model.parameters())
    given = {"params": made, **arguments} if arguments else {"params": [], "optim": made}
    which = "params" if arguments else "optim"
    with pytest.raises(TypeError, match=f"^{which} is an optimizer.*optim=AdamW, lr=.*shard"):
        mh.OSS(**given)


# -- a rank that goes on alone after an exception --------------------------------------------------


class Fragile(nn.Module):
    """Fails in the forward or backward pass in which `fails` says so."""

    def __init__(self):
        super().__init__()
        self.inner, self.fails = make_model(), ""

    def forward(self, inputs):
        output = self.inner(inputs)
        if self.fails == "forward":
            raise ValueError("a bad sample")
        if self.fails in ("backward", "interrupt"):  # after the last layer's gradients
            self.inner[0].weight.register_hook(self.fail)
        return output

    def fail(self, grad):
        if self.fails:
            raise KeyboardInterrupt if self.fails == "interrupt" else ValueError("a bad sample")


def steps_of_a_loop_that_catches(fails, ranks, size, loop="skip", steps=5):
    """Return in which steps there was which error, and how many this rank has taken."""
    torch.manual_seed(0)
    model = Fragile()
    optimizer = oss(model.parameters(), SGD, lr=0.01, bucket_size=size)
    module = mh.ShardedDataParallel(model, optimizer)
    caught = []
    for step in range(steps):
        model.fails = fails if step == 2 and dist.get_rank() in ranks else ""
        try:
            optimizer.zero_grad()
            module(x()).sum().backward()
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            caught.append((step, type(error).__name__, str(error)))
            if isinstance(error, RuntimeError):
                return caught
            if loop == "skip":
                continue
        optimizer.step()
    return caught


@pytest.mark.parametrize("size", [1000, 10])  # one bucket, several
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_rank_that_skips_a_step_alone_after_an_exception_is_an_error_everywhere(fails, size):
    here, there = run_ranks(2, steps_of_a_loop_that_catches, fails, [1], size)
    assert [(step, kind) for step, kind, _ in here] == [(2, "RuntimeError")]
    assert [(step, kind) for step, kind, _ in there] == [(2, "ValueError"), (3, "RuntimeError")]
    assert "on another rank, and the rank continued" in here[0][2]
    assert "on this rank, and the rank continued" in there[1][2]


@pytest.mark.parametrize("size", [1000, 10])  # one bucket, several
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_ranks_that_all_skip_a_step_or_take_part_with_zeros_go_on(fails, size):
    for caught in run_ranks(2, steps_of_a_loop_that_catches, fails, [0, 1], size):
        assert [(step, kind) for step, kind, _ in caught] == [(2, "ValueError")]
    here, there = run_ranks(2, steps_of_a_loop_that_catches, fails, [1], size, loop="step")
    assert here == [] and [step for step, *_ in there] == [2]


@pytest.mark.parametrize("size", [1000, 10])
def test_an_interrupted_step_is_an_error_at_once_if_the_rank_goes_on(size):
    def rank():
        began = time.monotonic()
        caught = steps_of_a_loop_that_catches("interrupt", [1], size)
        assert time.monotonic() - began < 20.0  # the group's timeout is 30 minutes
        return [kind for _, kind, _ in caught]

    assert run_ranks(2, rank) == [["RuntimeError"], ["KeyboardInterrupt", "RuntimeError"]]
