"""What counts as finite: every number that is, however large, and no other."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

import manyhands as mh
from helpers.ranks import on_ranks
from manyhands.blocks.averaging._codec import CODECS
from manyhands.blocks.averaging._payload import (
    are_finite,
    by_index,
    drop_nonfinite_state,
    is_payload_finite,
    make_payloads,
)
from manyhands.blocks.averaging._round import Drift

LARGE = [3e19, -3e19, 1e30, 3e38]
NEVER = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    ("value", "finite"), [*((v, True) for v in LARGE), *((v, False) for v in NEVER)]
)
def test_a_number_is_finite_if_it_is_whatever_its_square(dtype, value, finite):
    tensors = [torch.ones(3, dtype=dtype), torch.ones(2, 70_000, dtype=dtype)]
    tensors[1][1, 5] = value
    assert are_finite(tensors) is finite
    assert all(map(is_payload_finite, make_payloads(by_index(tensors)))) is finite


def test_optimizer_state_of_large_numbers_is_kept():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = Adam(params)
    for param, value in zip(params, (3e19, math.nan), strict=True):
        optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), value)}
    drop_nonfinite_state(optimizer)
    assert params[0] in optimizer.state and params[1] not in optimizer.state


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shared_memory", [False, True])
@on_ranks(2)
def test_workers_with_large_parameters_are_in_the_mean(codec, shared_memory):
    param = nn.Parameter(torch.zeros(300))
    optimizer = mh.LocalSGD(SGD([param], lr=1.0), every=1, codec=codec, shared_memory=shared_memory)
    param.grad = torch.full((300,), -4e19 * dist.get_rank())
    optimizer.step()
    drift = [optimizer.snapshot()[name] for name in ("distance", "spread", "cosine")]
    left_out = optimizer.left_out
    assert left_out == [] and all(map(math.isnan, drift))
    torch.testing.assert_close(param, torch.full((300,), 2e19), rtol=0.15, atol=0)


def test_squares_that_overflow_say_nothing_of_the_drift():
    for found in (Drift.of([math.inf, 1.0], 1.0), Drift.of([1.0, 1.0], math.inf)):
        assert all(map(math.isnan, (found.distance, found.spread, found.cosine)))
