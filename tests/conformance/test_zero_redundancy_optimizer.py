"""torch's tests of `ZeroRedundancyOptimizer`, with `OSS` in its place.

The cases are those of pytorch's `test/distributed/optim/test_zero_redundancy_optimizer.py`
(0807990) that run without GPUs. `docs/conformance.md` lists the cases that do not apply. Each case
trains with both optimizers, and returns the values that must agree.
"""

import copy
import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import manyhands as mh
from helpers.ranks import on_ranks
from helpers.sharding_oracle import copied

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the module uses torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer


def zero(params, kind, process_group=None, **options):
    return ZeroRedundancyOptimizer(params, kind, process_group=process_group, **options)


def oss(params, kind, process_group=None, **options):
    return mh.OSS(params, optim=kind, group=process_group, **options)


def on_all_ranks(optimizer):
    """Return the collected state dict on every rank."""
    optimizer.consolidate_state_dict(0)
    box = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def one():
    return torch.tensor([1.0], requires_grad=True)


def layers(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def averaged(model, group=None):
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)


# -- cases -----------------------------------------------------------------------------------------


def state_dict(make):
    x = one()
    first = make([x], SGD, lr=0.1, momentum=0.9)
    x.backward()
    first.step()
    first.zero_grad()
    state = on_all_ranks(first)
    options = {name: state["param_groups"][0][name] for name in ("lr", "momentum", "nesterov")}
    later = make([x], SGD, lr=0.01)
    later.load_state_dict(state)
    x.backward()
    later.step()
    momentum = on_all_ranks(later)["state"][0]["momentum_buffer"]
    return x, momentum, options, later.param_groups[0]["lr"]


def lr_scheduler(make):
    x = one()
    optimizer = make([x], SGD, lr=0.01)
    schedule = StepLR(optimizer, 1)
    history = []
    for _ in range(5):
        optimizer.zero_grad()
        x.backward()
        optimizer.step()
        schedule.step()
        history.append(x.detach().clone())
    return history


class AddsOption(SGD):
    def step(self, closure=None, value=0.5):
        super().step()
        self.param_groups[0]["new"] = value


class WithoutClosure(SGD):
    def step(self):
        return super().step()


def step_of(kind, *given, make, **arguments):
    x = one()
    optimizer = make([x], kind, lr=0.1)
    x.backward()
    optimizer.step(*given, **arguments)
    return x, optimizer.param_groups[0].get("new")


def zero_grad(make):
    model = layers(1, 1)
    optimizer = make(model.parameters(), SGD, lr=0.01)
    model(torch.rand(1)).backward()
    optimizer.zero_grad()
    return [param.grad for param in model.parameters()]


def constructor(make):
    model = layers(5, 10, 10, 10)
    weights = {"params": [layer.weight for layer in model], "weight_decay": 0.0}
    biases = {"params": [layer.bias for layer in model], "weight_decay": 0.01}
    wrong = [([], ValueError), (torch.randn(1), TypeError), (1.2, TypeError)]
    wrong.append(([*model.parameters(), 42], TypeError))
    for params, error in wrong:
        with pytest.raises(error):
            make(params, SGD, lr=0.01)
    for params in (model.parameters(), list(model.parameters())):
        make(params, SGD, lr=0.01)
    optimizer = make([weights, biases], AdamW, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    return len(optimizer.param_groups), len(optimizer.optim.param_groups)


def step(make):
    """With and without a closure, which averages here."""
    model = layers(1, 1)
    optimizer = make(model.parameters(), SGD, lr=0.1)
    x = torch.tensor([dist.get_rank() + 1.0])

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(x), torch.full((1,), 9.0))
        loss.backward()
        averaged(model)
        return loss

    closure()
    optimizer.step()
    after_one = copied(model.parameters())
    return optimizer.step(closure=closure), after_one, copied(model.parameters())


def multiple_param_groups(make):
    results = []
    for later in (False, True):
        model = layers(5, 10, 10, 5)
        weights = {"params": [layer.weight for layer in model], "weight_decay": 0.0}
        biases = {"params": [layer.bias for layer in model], "weight_decay": 0.01}
        optimizer = make([weights] if later else [weights, biases], AdamW, lr=0.01)
        if later:
            optimizer.add_param_group(biases)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 5)).sum().backward()
            optimizer.step()
        results.append(copied(model.parameters()))
    return results


def collect_shards(make):
    model = layers(20, 10, 5)
    optimizer = make(model.parameters(), SGD, lr=1e-3, momentum=0.99)
    inputs = torch.rand(3, 20)
    target = torch.rand(3, 5)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(inputs), target)
        loss.backward()
        return loss

    optimizer.step(closure=closure)
    state = on_all_ranks(optimizer)
    momenta = copied(state["state"][i]["momentum_buffer"] for i in range(4))
    optimizer.load_state_dict(state)
    optimizer.step(closure=closure)
    return momenta, copied(model.parameters())


def nondefault_process_group(make):
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return []
    model = layers(20, 10, 5)
    optimizer = make(model.parameters(), SGD, lr=1e-3, momentum=0.99, process_group=group)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.l1_loss(model(torch.rand(3, 20)), torch.rand(3, 5)).backward()
        averaged(model, group)
        optimizer.step()
    return copied(model.parameters())


def local_optimizer_parity(kind, maximize, make):
    model = layers(2, 3, 3, 3)
    optimizer = make(model.parameters(), kind, lr=1e-3, maximize=maximize)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    twin = copy.deepcopy(model)
    plain = kind(twin.parameters(), lr=1e-3, maximize=maximize)
    twin_ddp = DistributedDataParallel(twin, find_unused_parameters=True)
    torch.manual_seed(dist.get_rank())

    def check_step():
        x = torch.rand(64, 2)
        for module, its_optimizer in ((ddp, optimizer), (twin_ddp, plain)):
            its_optimizer.zero_grad()
            module(x).abs().sum().backward()
            its_optimizer.step()
        torch.testing.assert_close(copied(model.parameters()), copied(twin.parameters()))

    for number in range(20):
        check_step()
        if number > 10:
            for module in (model, twin):
                next(module.parameters()).requires_grad = bool(number % 2)
    of_plain = copy.deepcopy(plain.state_dict())
    of_sharded = on_all_ranks(optimizer)
    for to_plain, to_sharded in ((of_sharded, of_plain), (of_plain, of_sharded)):
        # Copies, because torch's optimizer clears the loaded dict.
        plain.load_state_dict(copy.deepcopy(to_plain))
        optimizer.load_state_dict(copy.deepcopy(to_sharded))
        check_step()
    return copied(model.parameters())


ON_ONE = [
    state_dict,
    lr_scheduler,
    partial(step_of, AddsOption),  # an added option
    partial(step_of, AddsOption, 0, value=0.1),  # arguments of step
    partial(step_of, WithoutClosure),
    zero_grad,
    constructor,
]
PARITY = itertools.product((Adam, AdamW, SGD), (False, True))
ON_THREE = [
    step,  # two cases
    lr_scheduler,
    multiple_param_groups,
    collect_shards,
    nondefault_process_group,
    *(partial(local_optimizer_parity, *options) for options in PARITY),
]


@pytest.mark.parametrize(
    ("ranks", "cases"), [(1, ON_ONE), (3, ON_THREE)], ids=["one rank", "three ranks"]
)
@on_ranks("ranks")
def test_oss_agrees_with_zero_redundancy_optimizer(ranks, cases):
    for case in cases:
        results = []
        for make in (zero, oss):
            torch.manual_seed(1)
            results.append(case(make=make))
        torch.testing.assert_close(results[1], results[0], msg=lambda m, c=case: f"{c}: {m}")


# -- a difference ----------------------------------------------------------------------------------


def test_sparse_parameters_are_refused_and_types_may_be_mixed():
    sparse = torch.sparse_coo_tensor(size=(2, 3), check_invariants=False)
    mixed = [torch.ones(1, dtype=torch.float32), torch.ones(1, dtype=torch.float64)]
    for params in ([sparse], mixed):
        with pytest.raises(ValueError):
            zero(params, SGD, lr=0.01)
    with pytest.raises(ValueError, match="needs dense parameters"):
        oss([sparse], SGD, lr=0.01)
    oss(mixed, SGD, lr=0.01)
