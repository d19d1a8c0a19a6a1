"""What scripts do around the loop, at every level: one process that trains on all samples is right.

That `torch.save(optimizer.state_dict())` on one rank is an error or a warning is tested in
`planning/test_shard.py`, that a rank does not evaluate alone in `test_fsdp_unusual_loops.py`, and
`save_pretrained` in `integrations/test_weights.py`, `torch.compile` in `test_compile.py`.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks

any_level = pytest.mark.parametrize("level", (0, 1, 2, 3))
STEPS = 4


class Net(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, outputs)
        self.register_buffer("passes", torch.zeros(()))
        self.double()

    def forward(self, x):
        self.passes += self.training
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def made(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, after=lambda: None):
    """Take some steps, on this rank's half of the samples if there are two; return the losses."""
    rank, ranks = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
    x = torch.randn(STEPS, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in x[:, rank::ranks]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses


@pytest.mark.sample("False-0", "False-2", "True-1", "True-3")
@any_level
@pytest.mark.parametrize("buffers", (False, True))
def test_a_moving_average_of_the_model(level, buffers):
    x = torch.ones(2, 6, dtype=torch.float64)

    def run(level=None):
        model = Net()
        how = (
            {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True}
            if buffers
            else {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
        )
        average = AveragedModel(model, **how)
        optimizer = made(model)
        if level is not None:
            model, optimizer = mh.shard(model, optimizer, level=level)
        if level == 3:  # a sharded average, from which each rank has its part
            average.module, _ = mh.shard(average.module, made(average.module), level=3)
        train(model, optimizer, lambda: average.update_parameters(model))
        with torch.no_grad():
            return average(x), average.module.passes + 0.0

    for found in run_ranks(2, run, level):
        torch.testing.assert_close(found, run())


@pytest.mark.parametrize("level", (2, 3))
def test_a_copy_of_a_sharded_model_is_refused(level):
    def copies():
        model, _ = mh.shard(model := Net(), made(model), level=level)
        AveragedModel(model)

    advice = {2: "copy model.module instead", 3: "copy the plain model before wrapping"}
    raises_on_ranks(2, TypeError, copies, match=advice[level])


@pytest.mark.sample("None-0", "None-2", "0-0", "0-3", "1-1", "1-3")
@any_level
@pytest.mark.parametrize("wrong", [None, 0, 1])
@on_ranks(2)
def test_whether_gradients_are_finite_is_the_same_on_every_rank(level, wrong):
    model, _ = mh.shard(model := Net(), made(model), level=level)
    x = torch.ones(2, 6, dtype=torch.float64)
    x[0, 0] = torch.nan if dist.get_rank() == wrong else 1.0
    model(x).sum().backward()
    found = [bool(torch.isfinite(p.grad).all()) for p in model.parameters()]
    # A gradient of the sum by the last bias is the number of samples.
    assert found == [wrong is None] * (len(found) - 1) + [True]


READ = {
    "norm": lambda g: g.norm().item(),
    "norm of data": lambda g: g.data.norm(2).item(),
    "norm, detached": lambda g: float(g.detach().norm(2)),
    "torch.norm": lambda g: torch.norm(g, 2.0).item(),
    "largest": lambda g: g.norm(torch.inf).tolist(),
    "of a product": lambda g: (g * 2).norm().item(),
    "isnan": lambda g: bool(torch.isnan(g).any()),
    "isfinite": lambda g: bool(torch.isfinite(g).all()),
    "compared": lambda g: bool((g.abs() > 1.0).any()),
}
SUMS = {  # an error at level 2
    "sum": lambda g: g.sum().item(),
    "mean": lambda g: float(g.mean()),
    "absolute": lambda g: g.abs().max().item(),
    "square": lambda g: ((g**2).sum() + (g * g).sum() + g.pow(2).sum()).item(),
    "of data": lambda g: g.data.abs().mean().item(),
    "of others": lambda g: ((-g - 1).clamp(-1, 2).square().sum() + (2 * g + g).norm(1)).item(),
    "extremes": lambda g: [g.max().item(), g.amin().item(), g.norm(p=torch.inf).item()],
    "count": lambda g: g.count_nonzero().item(),
    "std": lambda g: g.std(correction=0).item(),
}


def numbers_of_gradients(model, level):
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rank, ranks = (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)
    model(x[rank::ranks]).square().mean().backward()
    read = READ if level == 2 else READ | SUMS
    return {name: [each(p.grad) for p in model.parameters()] for name, each in read.items()}


@any_level
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_number_that_is_read_from_a_gradient_is_of_the_whole_gradient(level, outputs):
    """As for clipping by hand, for a log, or to leave out a step. A rank may hold nothing of it."""

    def read():
        model, optimizer = mh.shard(model := Net(outputs), made(model), level=level)
        classes = [type(param) for param in model.parameters()]
        found = numbers_of_gradients(model, level)
        with torch.no_grad():
            for param in model.parameters() if level != 2 else ():
                param.mul_(param.grad.abs()).addcmul_(param.grad, param.grad)
        optimizer.step()
        assert [type(param) for param in model.parameters()] == classes
        return found

    expected = numbers_of_gradients(Net(outputs), level)
    for found in run_ranks(2, read):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", (2, 3))
def test_the_data_of_a_gradient_may_be_set_to_what_is_made_from_it(level):
    """As older scripts do. At levels 0 and 1 DDP's views of its buckets do not allow it."""

    def halved(model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            numbers_of_gradients(model, level)
            for param in model.parameters():
                param.grad.data = param.grad.data * 0.5
            optimizer.step()
        return numbers_of_gradients(model, level)

    def sharded():
        model, optimizer = mh.shard(model := Net(), sgd(model), level=level)
        found = halved(model, optimizer)
        with pytest.raises(RuntimeError, match="takes one that was made from it"):
            model.module.last.weight.grad.data = torch.zeros(2, 6, dtype=torch.float64)
        return found

    expected = halved(model := Net(), sgd(model))
    for found in run_ranks(2, sharded):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
