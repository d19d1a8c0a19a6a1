"""`mix=` of DiLoCo: local parameters are mixed into a merged mean, as in Streaming DiLoCo.

`RECORDED` has the parameters of two layers before every step, from the fixtures
`test_diloco_mocked_updates_{0..5}.json` of torchft (7eb7087): two 1x1 layers as two fragments,
gradients of 2, an inner SGD with lr=1, an outer SGD with lr=2, and a sync round every 6 steps. All
workers are equal.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks

LOCAL = [1.0 - 2.0 * step for step in range(16)]
RECORDED = {  # (delay, alpha): parameters of both layers
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (0, 1.0): (LOCAL, LOCAL),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
    (1, 1.0): (LOCAL, LOCAL),
}


def ones():
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for param in layers.parameters():
        nn.init.ones_(param)
    return layers


def step(model, optimizer, gradient):
    for param in model.parameters():
        param.grad = torch.full_like(param, gradient)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:in the first block all 2 workers have taken the same steps")
@pytest.mark.parametrize(("delay", "alpha"), list(RECORDED))
@on_ranks(2)
def test_the_recorded_runs_of_torchft_are_reproduced(delay, alpha):
    model = ones()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = {"lr": 2.0, "momentum": 0.0, "every": 6, "fragments": 2}
    optimizer = mh.DiLoCo(inner, overlap=delay, mix=alpha, **outer)
    # torchft sends `delay` steps before the end of a block and merges at the end. manyhands
    # sends at the end and merges `overlap` steps later: the same run, `delay` steps later.
    for _ in range(delay):
        step(model, optimizer, 0.0)
    history = []
    for _ in range(16):
        history.append([param.item() for param in model.parameters()])
        step(model, optimizer, 2.0)
    assert history == [list(pair) for pair in zip(*RECORDED[delay, alpha], strict=True)]


# -- workers that differ ---------------------------------------------------------------------------


def rank_gradient(rank, number):
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, generator=generator)


def plain(workers, steps, *, every, overlap, mix, lr):
    """Train all workers in one process."""
    anchor = torch.zeros(3)
    params = [torch.zeros(3) for _ in range(workers)]
    sent = {}
    for number in range(1, steps + 1):
        for rank, param in enumerate(params):
            param -= 0.1 * rank_gradient(rank, number)
        if number % every == 0:
            sent[number + overlap] = torch.stack([anchor - param for param in params]).mean(0)
        if number in sent:
            anchor = anchor - lr * sent[number]
            params = [(1 - mix) * anchor + mix * param for param in params]
    return params, anchor


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("overlap", [0, 2])
def test_workers_train_as_in_a_plain_loop(overlap, on_host):
    options = {"every": 4, "overlap": overlap, "mix": 0.3, "lr": 0.7}

    def run():
        param = nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([param], lr=0.1)
        optimizer = mh.DiLoCo(inner, momentum=0.0, anchor_on_host=on_host, **options)
        for number in range(1, 16):
            param.grad = rank_gradient(dist.get_rank(), number)
            optimizer.step()
        with optimizer.at_anchor():
            anchor = param.detach().clone()
        local = param.detach().clone()
        optimizer.synchronize()
        return local, anchor, param.detach().clone()

    params, anchor = plain(2, 15, **options)
    results = run_ranks(2, run)
    for rank, (local, at_anchor, _) in enumerate(results):
        torch.testing.assert_close(local, params[rank])
        torch.testing.assert_close(at_anchor, anchor)
    assert torch.equal(results[0][2], results[1][2])


def test_a_worker_that_is_excluded_takes_the_anchor():
    def run():
        param = nn.Parameter(torch.zeros(3))
        optimizer = mh.DiLoCo(torch.optim.SGD([param], lr=0.1), every=2, mix=0.5)
        for number in range(1, 3):
            gradient = rank_gradient(0, number)
            param.grad = gradient * float("nan") if dist.get_rank() == 1 else gradient
            optimizer.step()
        with optimizer.at_anchor():
            anchor = param.detach().clone()
        return param.detach().clone(), anchor

    (_, anchor), (excluded, _) = run_ranks(2, run)
    assert torch.equal(excluded, anchor) and anchor.isfinite().all()
