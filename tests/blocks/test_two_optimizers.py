"""Two optimizers of one model, each in blocks: Muon for the matrices, AdamW for the rest."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Muon

import manyhands as mh
from helpers.blocks_plain import gradient, outer_step, train
from helpers.ranks import run_ranks
from manyhands.blocks.averaging._codec import CODECS

LR, STEPS = 0.1, 17
OUTER = {"lr": 0.7, "momentum": 0.9}
SIZES = (23, 40)  # of the parameters that each optimizer has


def start(size):
    return torch.linspace(-1, 1, size, dtype=torch.float64)


def step_both(**options):
    params = [nn.Parameter(start(size)) for size in SIZES]
    optimizers = [mh.DiLoCo(SGD([param], lr=LR), **OUTER, **options) for param in params]
    seen = []
    for step in range(1, STEPS + 1):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradient(param.detach(), dist.get_rank(), step)
            optimizer.step()
        seen.append(torch.cat([param.detach() for param in params]))
    return torch.stack(seen)


@pytest.mark.parametrize("shared_memory", [None, False])
@pytest.mark.parametrize(("every", "overlap", "fragments"), [(4, 0, 1), (4, 2, 1), (6, 1, 3)])
def test_the_rounds_of_two_optimizers_never_meet(every, overlap, fragments, shared_memory):
    lengths = {"every": every, "overlap": overlap, "fragments": fragments}
    results = run_ranks(3, step_both, **lengths, shared_memory=shared_memory)
    plain = [
        train(start(size), gradient, 3, STEPS, LR, "DiLoCo", OUTER, **lengths) for size in SIZES
    ]
    for rank, ours in enumerate(results):
        expected = torch.cat([each[:, rank] for each in plain], dim=1)
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.symbol, self.hidden, self.out = (
            nn.Embedding(11, 8),
            nn.Linear(8, 16),
            nn.Linear(16, 11),
        )

    def forward(self, x):
        return self.out(self.hidden(self.symbol(x)).tanh())


def inner_optimizers(model):
    matrices = [model.hidden.weight, model.out.weight]
    rest = [model.symbol.weight, model.hidden.bias, model.out.bias]
    return [Muon(matrices, lr=0.02), AdamW(rest, lr=0.02)]


def step_alone(model, optimizers, rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x, y = torch.randint(11, (2, 6), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()


def flat_of(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def learn(steps, **options):
    model = Model()
    optimizers = [mh.DiLoCo(each, **OUTER, **options) for each in inner_optimizers(model)]
    seen = []
    for step in range(1, steps + 1):
        step_alone(model, optimizers, dist.get_rank(), step)
        seen.append(flat_of(model))
    return torch.stack(seen)


def learn_plainly(workers, steps, every):
    """Return each worker's parameters after every step; all in one process."""
    models = [Model() for _ in range(workers)]
    optimizers = [inner_optimizers(model) for model in models]
    anchor, memory = flat_of(models[0]), torch.zeros(len(flat_of(models[0])))
    seen = []
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            step_alone(model, optimizers[rank], rank, step)
        if step % every == 0:
            mean = torch.stack([anchor - flat_of(model) for model in models]).mean(dim=0)
            anchor, memory = outer_step("DiLoCo", OUTER, anchor, mean, memory)
            for model in models:
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
        seen.append(torch.stack([flat_of(model) for model in models]))
    return torch.stack(seen)


def test_muon_and_adamw_in_blocks_equal_the_plain_loop():
    results, plain = run_ranks(2, learn, 9, every=3), learn_plainly(2, 9, 3)
    for rank, ours in enumerate(results):
        torch.testing.assert_close(ours, plain[:, rank], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_with_every_codec_fragments_and_a_warmup_all_workers_end_equal(codec):
    def ends():
        model = Model()
        before = flat_of(model)
        options = {"every": 4, "fragments": 2, "warmup": 3, "codec": codec}
        optimizers = [mh.DiLoCo(each, **OUTER, **options) for each in inner_optimizers(model)]
        for step in range(1, 12):
            step_alone(model, optimizers, dist.get_rank(), step)
        for optimizer in optimizers:
            optimizer.synchronize()
        return flat_of(model), (flat_of(model) - before).norm().item()

    (first, moved), (second, _) = run_ranks(2, ends)
    assert torch.equal(first, second)
    assert 0.01 < moved < 100


def test_a_crew_carries_one_optimizer_and_the_second_is_refused_with_the_way_out():
    crew = mh.Crew()
    muon, adamw = inner_optimizers(Model())
    first = mh.DiLoCo(muon, every=4, crew=crew)
    with pytest.raises(
        RuntimeError, match="A crew carries one optimizer: for a model that has several"
    ):
        mh.DiLoCo(adamw, every=4, crew=crew)
    first.finish()
