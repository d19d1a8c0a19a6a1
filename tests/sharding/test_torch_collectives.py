"""The ready-made collectives, which are taken with NCCL: here on gloo, which has them too."""

import pytest
import torch

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.sharding_oracle import (
    AROUND_OSS,
    OPTIMIZERS,
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    make_model,
    oss,
    train,
    train_alone,
    train_averaged,
)
from manyhands._ranks.ranks import RankGroup


@pytest.fixture(autouse=True)
def _not_gloo(monkeypatch):
    monkeypatch.setattr(RankGroup, "on_gloo", lambda self, device: False)


@pytest.mark.sample(
    "SGD-OSS + DDP",
    "AdamW-OSS + DDP",
    "Adafactor-OSS + DDP",
    "LAMB-OSS + ShardedDataParallel",
    "Muon and AdamW-OSS + ShardedDataParallel",
)
@pytest.mark.parametrize("way", AROUND_OSS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_the_plain_run(name, way):
    def run():
        _, wrapped = train(OPTIMIZERS[name], way)
        return copied(wrapped.parameters())

    _, expected = train_alone(OPTIMIZERS[name], 3)
    assert_same(run_ranks(3, run), list(expected.parameters()))


@pytest.mark.parametrize("name", ["SGD", "LAMB"])
def test_narrow_gradients_are_added_up_in_float32(name):
    def run():
        _, wrapped = train(
            OPTIMIZERS[name], AROUND_OSS[1], model=in_float32, reduce_dtype=torch.bfloat16
        )
        return copied(wrapped.parameters())

    def in_float32():
        return make_model(torch.float32)

    _, expected = train_averaged(OPTIMIZERS[name], 3, model=in_float32, wire=torch.bfloat16)
    assert_same(run_ranks(3, run), list(expected.parameters()), rtol=1e-5, atol=1e-6)


def test_a_worker_without_data_joins_in():
    def run():
        rank, _ = everyone()
        module = make_model()
        optimizer = oss(module.parameters(), lr=0.1)
        model = mh.ShardedDataParallel(module, optimizer)
        x, y = make_batches(2, 1, 3)
        for step in range(2):
            optimizer.zero_grad()
            if (rank, step) != (1, 1):
                loss_of(model, x[step, 0, rank], y[step, 0, rank]).backward()
            optimizer.step()
        return copied(module.parameters())

    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = make_batches(2, 1, 3)
    for step in range(2):
        optimizer.zero_grad()
        with_data = [r for r in range(3) if (r, step) != (1, 1)]
        (sum(loss_of(module, x[step, 0, r], y[step, 0, r]) for r in with_data) / 3).backward()
        optimizer.step()
    assert_same(run_ranks(3, run), list(module.parameters()))
