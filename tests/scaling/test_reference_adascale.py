"""`mh.AdaScale` under DDP equals examples/reference/adascale.py, which has a single process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.scaling_oracle import OPTIMIZERS, loss_of, make_batches, make_model
from reference import adascale

STEPS = 20


def learning_rates(optimizer):
    """Return a list that receives the learning rate of each step."""
    rates = []

    def note_rate(optimizer, args, kwargs):
        rates.append(optimizer.param_groups[0]["lr"])

    optimizer.register_step_pre_hook(note_rate)
    return rates


def params_of(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def train_reference(kind, n):
    """Return a row for each step: gain, learning rate, progress and parameters."""
    model = make_model(torch.float64)
    x, y = make_batches(STEPS, n, dtype=torch.float64)
    inner = OPTIMIZERS[kind](model.parameters())
    rates = learning_rates(inner)
    optimizer = adascale.AdaScale(inner, n)
    rows = []
    for step in range(STEPS):
        batches = zip(x[step], y[step], strict=True)
        gain = optimizer.step(adascale.worker_gradients(model, batches))
        numbers = torch.tensor([gain, rates[step], optimizer.progress], dtype=torch.float64)
        rows.append(torch.cat([numbers, params_of(model)]))
    return torch.stack(rows)


def train_on_a_rank(kind):
    """Return the same rows from `mh.AdaScale` around DDP."""
    model = make_model(torch.float64)
    x, y = make_batches(STEPS, dist.get_world_size(), dtype=torch.float64)
    inner = OPTIMIZERS[kind](model.parameters())
    rates = learning_rates(inner)
    ddp = DistributedDataParallel(model)
    optimizer = mh.AdaScale(inner)
    rows = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, x[step, dist.get_rank()], y[step, dist.get_rank()]).backward()
        gain = optimizer.gain()
        optimizer.step()
        numbers = torch.tensor([gain, rates[step], optimizer.progress], dtype=torch.float64)
        rows.append(torch.cat([numbers, params_of(model)]))
    return torch.stack(rows)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", ["SGD", "SGD momentum"])
def test_gains_learning_rates_progress_and_parameters_are_those_of_the_reference(kind, n):
    expected = train_reference(kind, n)
    assert expected[:, 0].min() > 1.0 and expected[:, 0].max() < n  # no gain is at a limit
    for rows in run_ranks(n, train_on_a_rank, kind):
        torch.testing.assert_close(rows, expected, rtol=1e-11, atol=1e-12)
