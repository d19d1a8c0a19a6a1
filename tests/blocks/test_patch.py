"""The codec patch: what has changed in 16 bits, and all workers get all that is sent."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.ranks import run_ranks
from manyhands._core.codec import CODECS, DENSE

PATCH = CODECS["patch"]
ELEMENTS = 300_000  # two chunks
START = torch.linspace(0.5, 1, ELEMENTS).to(torch.bfloat16)


@pytest.mark.quick
@given(
    seed=st.integers(0, 99),
    elements=st.one_of(st.integers(0, 20), st.integers(250, 260), st.integers(3_000, 5_000)),
    share=st.sampled_from([0.0, 0.01, 1 / DENSE, 0.2, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_what_is_not_0_arrives_where_it_was(seed, elements, share, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator).to(torch.bfloat16).to(dtype)
    values[torch.rand(elements, generator=generator) >= share] = 0
    data = PATCH.encode(values.clone())
    assert data.numel() <= PATCH.size(elements, dtype)
    assert torch.equal(PATCH.decode(data, elements, dtype), values)


@pytest.mark.quick
@pytest.mark.parametrize(("share", "bytes_each"), [(0.0, 6e-4), (0.01, 0.032), (0.05, 0.157)])
def test_what_a_value_costs(share, bytes_each):
    values = torch.zeros(1_000_000)
    values[: round(share * len(values))] = 1
    values = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    assert PATCH.encode(values).numel() <= bytes_each * len(values)


def fine_tune(codec, steps, **options):
    """Train a tensor in bfloat16 by small steps; return it and what its sync rounds have shown."""
    params = [nn.Parameter(START.clone()), nn.Parameter(torch.ones(3))]
    inner = SGD(params, lr=1e-3)
    optimizer = mh.LocalSGD(inner, every=2, codec=codec, shared_memory=False, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        params[0].grad = torch.randn(ELEMENTS, generator=generator).to(torch.bfloat16)
        params[1].grad = torch.full((3,), step + dist.get_rank() + 1.0)
        optimizer.step()
    buckets = optimizer._sync.anchor.buckets
    return [p.detach() for p in params], [b.anchor for b in buckets], optimizer.snapshot()


@pytest.mark.parametrize("overlap", [0, 1])
def test_two_workers_train_as_without_a_codec(overlap):
    for mine, theirs in zip(
        run_ranks(2, fine_tune, "patch", 6, overlap=overlap),
        run_ranks(2, fine_tune, "float32", 6, overlap=overlap),
        strict=True,
    ):
        moved = (mine[0][0] != START).float().mean()
        assert 0.01 < moved < 0.9  # most steps are less than half of the last bit
        assert torch.equal(mine[0][0], theirs[0][0])
        torch.testing.assert_close(mine[0][1], theirs[0][1], rtol=1e-4, atol=0)  # in float32
        for name in ("distance", "spread", "cosine"):
            assert mine[2][name] == pytest.approx(theirs[2][name], rel=0.01)


def test_more_workers_agree_bit_for_bit():
    first, *others = run_ranks(3, fine_tune, "patch", 5)
    plain = run_ranks(3, fine_tune, "float32", 5)[0]
    for _, anchors, _ in others:
        assert all(map(torch.equal, anchors, first[1]))
    torch.testing.assert_close(first[1][0], plain[1][0], rtol=1e-6, atol=1e-6)


def test_a_worker_that_is_not_finite_is_left_out():
    def blocks():
        param = nn.Parameter(torch.ones(900, dtype=torch.bfloat16))
        optimizer = mh.LocalSGD(SGD([param], lr=0.1), every=1, codec="patch")
        left_out = []
        for step in range(3):
            param.grad = torch.zeros_like(param)
            param.grad[: 10 * dist.get_rank()] = float("nan") if step == 1 else 1.0
            optimizer.step()
            left_out.append(optimizer.left_out)
        return param.detach().float(), left_out

    for param, left_out in run_ranks(2, blocks):
        assert left_out == [[], [1], []]
        assert torch.isfinite(param).all() and torch.equal(param[10:], torch.ones(890))
        assert (param[:10] == param[0]).all() and param[0] == pytest.approx(0.9, abs=0.01)


def test_by_drift_goes_with_it():
    def blocks():
        param = nn.Parameter(torch.linspace(1, 2, 500, dtype=torch.bfloat16))
        every = mh.ByDrift(cosine=0.3, least=2, most=8)
        optimizer = mh.LocalSGD(SGD([param], lr=0.1), every=every, codec="patch")
        for _ in range(8):
            param.grad = torch.ones_like(param)
            param.grad[dist.get_rank() :: 2] = 2  # the workers agree, though not altogether
            optimizer.step()
        return optimizer.snapshot()["every"]

    assert run_ranks(2, blocks) == [8, 8]
