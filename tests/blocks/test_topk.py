"""The codec topk: few of the values, and all workers get all that is sent."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.ranks import run_ranks
from manyhands._core.codec import CODECS, LargestValues

GROUP, KEPT = 1 << 16, 512
SIZES = (GROUP + 4465, 300)  # one parameter is longer than a group; neither is a multiple of one
LR = 0.1


def largest(values):
    """Return what is left of a vector, by group: of the largest values sign and mean size."""
    left = torch.zeros_like(values)
    for start in range(0, len(values), GROUP):
        part, there = values[start : start + GROUP], left[start : start + GROUP]
        places = part.abs().sort(descending=True, stable=True).indices[:KEPT]
        places = places[part[places] != 0]
        if len(places):
            size = part[places].abs().mean().to(torch.bfloat16).to(values.dtype)
            there[places] = size * part[places].sign()
    return left


def start():
    return torch.linspace(-1, 1, sum(SIZES), dtype=torch.float64)


def gradient(x, rank, step):
    target = torch.sin(torch.arange(len(x), dtype=x.dtype) * (rank + 1.3) + step)
    return x * 0.3 - target * target.abs()


def train_plainly(workers, steps, lr, every, overlap):
    """Return each worker's vector after every step; all in one process."""
    xs = [start() for _ in range(workers)]
    anchor, left = start(), [torch.zeros(sum(SIZES), dtype=torch.float64) for _ in range(workers)]
    moved, seen = None, []
    for step in range(1, steps + 1):
        xs = [x - LR * gradient(x, rank, step) for rank, x in enumerate(xs)]
        if moved is not None and step % every == overlap:
            xs, moved = [x + m for x, m in zip(xs, moved, strict=True)], None
        if step % every == 0:
            differences = [anchor - x for x in xs]
            wanted = [r + d for r, d in zip(left, differences, strict=True)]
            sent = [largest(w) for w in wanted]
            left = [w - s for w, s in zip(wanted, sent, strict=True)]
            before = anchor
            anchor = anchor - lr * torch.stack(sent).mean(dim=0)
            moved = [anchor - before + d for d in differences]
            if overlap == 0:
                xs, moved = [anchor.clone() for _ in xs], None
        seen.append(torch.stack(xs))
    return torch.stack(seen)


def parameters():
    return [nn.Parameter(part.clone()) for part in start().split(list(SIZES))]


def flat_of(params):
    return torch.cat([param.detach().flatten() for param in params])


def step_along(optimizer, params, step):
    grads = gradient(flat_of(params), dist.get_rank(), step).split(list(SIZES))
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


@pytest.mark.parametrize(("workers", "overlap"), [(2, 0), (3, 0), (4, 1)])
def test_blocks_with_topk_equal_the_plain_loop(workers, overlap):
    def blocks():
        params = parameters()
        inner = SGD(params, lr=LR)
        optimizer = mh.DiLoCo(inner, lr=1.5, momentum=0.0, every=3, overlap=overlap, codec="topk")
        seen = []
        for step in range(1, 14):
            step_along(optimizer, params, step)
            seen.append(flat_of(params))
        anchor = [bucket.anchor for bucket in optimizer._sync.anchor.buckets]
        return torch.stack(seen), anchor[0]

    results = run_ranks(workers, blocks)
    plain = train_plainly(workers, 13, 1.5, 3, overlap)
    for rank, (seen, anchor) in enumerate(results):
        torch.testing.assert_close(seen, plain[:, rank], rtol=1e-11, atol=1e-11)
        assert torch.equal(anchor, results[0][1])  # bit for bit


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [1, 511, 513, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 77])
def test_the_largest_arrive_with_their_signs_and_mean_size(elements, dtype):
    generator = torch.Generator().manual_seed(elements)
    values = torch.randn(elements, generator=generator, dtype=dtype)
    codec = CODECS["topk"]
    back = codec.decode(codec.encode(values.clone()), elements, dtype)
    torch.testing.assert_close(back, largest(values), rtol=0.01, atol=0)  # sums in another order


@pytest.mark.quick
def test_a_group_with_few_values_sends_no_others():
    values = torch.zeros(2 * GROUP)
    values[[0, 70, GROUP - 1, 2 * GROUP - 1]] = torch.tensor([2.0, -2.0, 2.0, -1.0])
    codec = CODECS["topk"]
    assert torch.equal(
        codec.decode(codec.encode(values.clone()), len(values), values.dtype), values
    )


@pytest.mark.quick
def test_the_places_of_the_last_values_and_of_a_run_of_neighbours():
    codec = LargestValues(1 << 10)  # 8 of 1,024
    for places in (range(8), range(1016, 1024), range(0, 1024, 128), [0, 1, 2, 3, 1020, 1021]):
        values = torch.zeros(1 << 10)
        values[list(places)] = 1.0
        data = codec.encode(values.clone())
        assert len(data) == codec.size(1 << 10, values.dtype) == 2 + 8 + 3
        assert torch.equal(codec.decode(data, 1 << 10, values.dtype), values)


@pytest.mark.quick
def test_eight_workers_send_3000_times_less_than_ddp():
    elements, every, workers = 10_000_000, 32, 8
    ddp = 2 * (workers - 1) / workers * 4 * elements * every
    assert ddp / ((workers - 1) * CODECS["topk"].size(elements, torch.float32)) > 3000


def test_parameters_that_rest_and_workers_that_are_not_finite():
    def blocks():
        moving, still = nn.Parameter(torch.ones(900)), nn.Parameter(torch.linspace(-1, 1, 900))
        optimizer = mh.LocalSGD(SGD([moving, still], lr=0.1), every=2, codec="topk")
        left_out = []
        for step in range(6):
            moving.grad = torch.linspace(1, 2, 900) * (1 + dist.get_rank())
            if step == 2 and dist.get_rank() == 1:
                moving.grad[5] = float("nan")
            still.grad = torch.zeros(900)
            optimizer.step()
            left_out.append(optimizer.left_out)
        residual = optimizer._sync.anchor.buckets[0].residual
        return moving.detach(), still.detach(), left_out, residual.isfinite().all().item()

    results = run_ranks(2, blocks)
    for moving, still, left_out, finite in results:
        assert torch.equal(still, torch.linspace(-1, 1, 900)) and finite
        assert torch.equal(moving, results[0][0]) and (moving < 1).any() and moving.isfinite().all()
        assert left_out == [[], [], [], [1], [1], []]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_frozen_parameter_rests_although_not_all_was_sent(overlap):
    def blocks():
        params = parameters()
        inner = SGD(params, lr=LR)
        optimizer = mh.DiLoCo(inner, lr=1.0, momentum=0.0, every=2, overlap=overlap, codec="topk")
        seen = []
        for step in range(1, 11):
            if step == 6:
                params[0].requires_grad_(False)
            grads = gradient(flat_of(params), dist.get_rank(), step).split(list(SIZES))
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone() if param.requires_grad else None
            optimizer.step()
            seen.append(params[0].detach().clone())
        return torch.stack(seen)

    first, second = run_ranks(2, blocks)
    torch.testing.assert_close(first[6 + overlap :], second[6 + overlap :], rtol=0, atol=1e-14)
    assert (first[8:] - first[6 + overlap]).abs().max() <= 1e-14


def test_what_was_not_sent_is_saved_and_is_of_use_to_the_same_workers_and_codec_only():
    def first():
        params = parameters()
        optimizer = mh.LocalSGD(SGD(params, lr=LR), every=2, codec="topk")
        for step in range(1, 5):
            step_along(optimizer, params, step)
        return {"params": [p.detach() for p in params], "state": optimizer.state_dict()}

    saved = run_ranks(2, first)

    def second(codec):
        params = parameters()
        state = copy.deepcopy(saved[dist.get_rank() % 2]["state"])
        optimizer = mh.LocalSGD(SGD(params, lr=LR), every=2, codec=codec)
        optimizer.load_state_dict(state, optimizer_overrides={"codec": codec})
        return optimizer._sync.anchor.buckets[0].residual

    for rank, residual in enumerate(run_ranks(2, second, "topk")):
        assert torch.equal(residual, saved[rank]["state"]["blocks"]["residual"][0])
        assert residual.count_nonzero() > GROUP
    assert not any(residual.any() for residual in run_ranks(2, second, "int8"))
    assert not any(residual.any() for residual in run_ranks(3, second, "topk"))


def test_a_crew_and_an_interval_by_the_drift_are_errors():
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="codec='topk' is for a process group"):
        mh.LocalSGD(SGD(params, lr=0.1), codec="topk", crew=mh.Crew())
    with pytest.raises(ValueError, match="measures the drift by what the workers send"):
        mh.LocalSGD(SGD(params, lr=0.1), codec="topk", every=mh.ByDrift(0.3, least=8, most=256))
