"""How gradients on a device are measured: several in one call, with the numbers of one at a time.

The tests take this way with a CPU's tensors, and tests/gpu takes it with a GPU's.
"""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import on_ranks
from helpers.scaling_oracle import loss_of, make_batches, make_model
from manyhands._tensors.flat import in_groups
from manyhands.scaling import _hooks, _preconditioned
from manyhands.scaling._preconditioned import PreconditionedNorm

RULES = {
    "AdaScale": lambda p, n=3: mh.AdaScale(torch.optim.SGD(p, 0.05), num_gradients_to_accumulate=n),
    "AdamScale": lambda p, n=3: mh.AdamScale(torch.optim.Adam(p), num_gradients_to_accumulate=n),
}


def train(rule, held, steps=8, hook=None):
    model = make_model(torch.float64)
    optimizer = RULES[rule](list(model.parameters()))
    optimizer._core.measurement.hooks._on_cpu = not held
    if hook is not None:
        model[0].weight.register_post_accumulate_grad_hook(hook)
    x, y = make_batches(steps, 3, dtype=torch.float64)
    progress = []
    for step in range(steps):
        optimizer.zero_grad()
        for a in range(3):
            (loss_of(model, x[step, a], y[step, a]) / 3).backward()
        optimizer.step()
        progress.append(optimizer.progress)
    return progress, optimizer


@pytest.mark.parametrize("together", [1, 20, 10**9])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_that_are_held_have_the_norms_of_those_that_are_not(rule, together, monkeypatch):
    monkeypatch.setattr(_hooks, "TOGETHER", together)
    found, expected = (train(rule, held)[0] for held in (True, False))
    assert found == pytest.approx(expected, rel=1e-12)


DDP = {"": {}, "views": {"gradient_as_bucket_view": True}, "static graph": {"static_graph": True}}


@pytest.mark.sample(
    "AdaScale-1-", "AdaScale-3-views", "AdamScale-1-views", "AdamScale-3-static graph"
)
@pytest.mark.parametrize("options", DDP.values(), ids=DDP)
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("rule", RULES)
@on_ranks(2)
def test_ddp_averages_after_the_last_gradient_was_measured(rule, passes, options):
    def trained(held):
        model = make_model(torch.float64)
        ddp = DistributedDataParallel(model, **options)
        optimizer = RULES[rule](list(model.parameters()), passes)
        optimizer._core.measurement.hooks._on_cpu = not held
        x, y = make_batches(8, 2 * passes, dtype=torch.float64)
        progress = []
        for step in range(8):
            optimizer.zero_grad()
            for a in range(passes):
                # torch's static graph is recorded in a pass that is averaged
                silent = a < passes - 1 and "static_graph" not in options
                with ddp.no_sync() if silent else nullcontext():
                    at = 2 * a + dist.get_rank()
                    (loss_of(ddp, x[step, at], y[step, at]) / passes).backward()
            optimizer.step()
            progress.append(optimizer.progress)
        return progress

    held = trained(True)
    at_once = trained(False)
    assert held == pytest.approx(at_once, rel=1e-12)


def test_a_held_gradient_becomes_the_parameters_without_a_copy():
    seen = []

    def pointer(grads):
        seen.append(grads[0].data_ptr())

    model = make_model()
    optimizer = RULES["AdaScale"](list(model.parameters()))
    optimizer._core.measurement.hooks._on_cpu = False
    node = torch.autograd.graph.get_gradient_edge(model[0].weight).node
    node.register_prehook(pointer)
    loss_of(model, *(t[0, 0] for t in make_batches(1, 1))).backward()
    assert model[0].weight.grad.data_ptr() == seen[0]


def test_a_gradient_that_a_hook_changes_within_the_pass_spoils_one_step():
    """From the next step on it is measured before the hook changes it, as on a CPU."""

    def double(param):
        param.grad.mul_(2.0)

    progress, optimizer = train("AdaScale", held=True, hook=double)
    assert progress[0] == pytest.approx(1.0)  # nothing is known yet
    assert all(b > a for a, b in pairwise(progress))
    assert optimizer.snapshot()["nonfinite"] == 1
    _, optimizer = train("AdaScale", held=False, hook=double)
    assert optimizer.snapshot()["nonfinite"] == 0


@pytest.mark.parametrize("floor", [0.0, 1e-3, 0.5])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_quotients_together_have_the_norms_of_each(kind, floor):
    model = make_model(torch.float64)
    optimizer = kind(model.parameters(), lr=0.01)
    x, y = make_batches(8, 1, dtype=torch.float64)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, x[step, 0], y[step, 0]).backward()
        optimizer.step()
    grads = [p.grad for p in model.parameters()]
    alone = PreconditionedNorm(optimizer, floor)
    expected = [float(alone.one(i, grad)) for i, grad in enumerate(grads)]
    together = PreconditionedNorm(optimizer, floor)
    quotients = [together._quotient(i, g, lambda t: t) for i, g in enumerate(grads)]
    chunks = list(in_groups(quotients, lambda each: each.grad.numel(), limit=12))
    assert len(chunks) == 3
    found = [n for chunk in chunks for n in _preconditioned._norms_of(chunk)]
    assert [float(n) for n in found] == pytest.approx(expected, rel=1e-9)
    for ours, theirs in zip(together.to_state(), alone.to_state(), strict=True):
        assert ours[:4] == pytest.approx(theirs[:4], rel=1e-9)


def test_a_count_on_a_device_is_followed_without_reading_it():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = make_batches(10, 1)

    def step(number):
        optimizer.zero_grad()
        loss_of(model, x[number, 0], y[number, 0]).backward()
        optimizer.step()

    step(0)
    norms = PreconditionedNorm(optimizer)
    count = optimizer.state[model[0].weight]["step"]
    assert norms._counts == {}
    norms._counts[0] = count, count._version, 1.0  # as it is for a count on a device
    for number in range(1, 5):
        step(number)
        norms.optimizer_stepped()
    assert norms._counts[0][2] == float(count) == 5.0
    norms.optimizer_stepped()  # of a step without a gradient for it
    assert norms._counts[0][2] == 5.0
