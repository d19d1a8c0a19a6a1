"""`mh.DiLoCo` on ranks equals examples/reference/diloco.py, which has a single process."""

import pytest
import torch
import torch.distributed as dist

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.scaling_oracle import OPTIMIZERS, loss_of, make_batches, make_model
from reference import diloco

WORKERS = 3
EVERY = 4
BLOCKS = 5
STEPS = EVERY * BLOCKS + 2  # the last two are in an unfinished block


def params_of(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def train_reference(kind, options):
    """Return the parameters of each worker after each block, and after the last steps."""
    x, y = make_batches(STEPS, WORKERS, dtype=torch.float64)

    def batches(worker, first, end):
        return [(x[step, worker], y[step, worker]) for step in range(first, end)]

    model = make_model(torch.float64)
    training = diloco.DiLoCo(model, OPTIMIZERS[kind], WORKERS, **options)
    seen = []
    for first in range(0, EVERY * BLOCKS, EVERY):
        training.block([batches(rank, first, first + EVERY) for rank in range(WORKERS)])
        seen.append(torch.stack([worker.params for worker in training.workers]))
    for rank, worker in enumerate(training.workers):
        worker.local_steps(batches(rank, EVERY * BLOCKS, STEPS))
    seen.append(torch.stack([worker.params for worker in training.workers]))
    return torch.stack(seen)


def train_on_a_rank(kind, options):
    """Return the same of this rank's parameters, trained with `mh.DiLoCo`."""
    x, y = make_batches(STEPS, WORKERS, dtype=torch.float64)
    model = make_model(torch.float64)
    optimizer = mh.DiLoCo(OPTIMIZERS[kind](model.parameters()), every=EVERY, **options)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, x[step, dist.get_rank()], y[step, dist.get_rank()]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0 or step == STEPS - 1:
            seen.append(params_of(model))
    return torch.stack(seen)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("AdamW", {}), ("SGD momentum", {"lr": 0.5, "momentum": 0.6})],
    ids=["AdamW, defaults", "SGD, other outer options"],
)
def test_the_parameters_of_each_worker_are_those_of_the_reference(kind, options):
    expected = train_reference(kind, options)
    assert not torch.equal(expected[-1, 0], expected[-1, 1])  # in mid-block workers differ
    for rank, seen in enumerate(run_ranks(WORKERS, train_on_a_rank, kind, options)):
        torch.testing.assert_close(seen, expected[:, rank], rtol=1e-11, atol=1e-12)
