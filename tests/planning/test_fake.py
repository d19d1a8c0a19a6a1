"""Dry runs without memory: equal messages, and errors for code that needs values."""

import resource
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Muon

import manyhands as mh
from manyhands.tools.plan._order import PeakMemory


def make_model():
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 8))


def with_adamw(model):
    return AdamW(model.parameters())


def with_sgd(model):
    return SGD(model.parameters(), lr=0.01)


def with_muon(model):
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [Muon(matrices), AdamW(others)]


def train(model, optimizer, steps=3):
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for _ in range(steps):
        for each in optimizers:
            each.zero_grad()
        model(torch.randn(2, model.in_features)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in optimizers:
            each.step()


def counts(make_optimizer, level, rank, fake, rule=None):
    with mh.dry_run(64, rank, fake=fake) as counted:
        model = make_model()
        model, optimizer = mh.shard(model, make_optimizer(model), level=level)
        model.in_features = 64
        train(model, optimizer if rule is None else rule(optimizer))
        return counted.calls, counted.sent, counted.requests


@pytest.mark.sample(
    "0-with_adamw-0",
    "1-with_muon-63",
    "2-with_adamw-63",
    "2-with_muon-0",
    "3-with_adamw-0",
    "3-with_muon-63",
)
@pytest.mark.parametrize("rank", [0, 63])
@pytest.mark.parametrize("make_optimizer", [with_adamw, with_muon])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_messages_do_not_depend_on_memory(level, make_optimizer, rank):
    found = counts(make_optimizer, level, rank, fake=True)
    assert found == counts(make_optimizer, level, rank, fake=False)


@pytest.mark.parametrize("fake", [True, False])
def test_messages_of_dtensors(fake):
    with mh.dry_run(8, fake=fake) as counted:
        model = fully_shard(make_model())
        model(torch.randn(2, 64)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model[0].weight.full_tensor()
        dist.barrier()
    found = [(each.operation, each.nbytes) for each in counted.sequence]
    fully = [(name, size) for name, size in found if name != "all_reduce"]
    assert fully[:2] == [("all_gather", 51872), ("reduce_scatter", 51872)]
    assert ("all_reduce", 24) in found  # six norms
    assert found[-2:] == [("all_gather", 4 * 96 * 64), ("barrier", 0)]


@pytest.mark.parametrize("level", [0, 2, 3])
def test_messages_of_a_rule(level):
    found = counts(with_sgd, level, 5, fake=True, rule=mh.AdaScale)
    assert found == counts(with_sgd, level, 5, fake=False, rule=mh.AdaScale)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_model_larger_than_memory(level, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with mh.dry_run(1024, 1, fake=True) as counted:
        model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(4)))
        model, optimizer = mh.shard(model, with_adamw(model), level=level)
        model.in_features = 100_000
        train(model, optimizer, steps=1)
        mh.save(tmp_path, model=model, optimizer=optimizer)
    assert counted.sent.total() > 2 * 4 * 4 * 100_000**2  # P and G, in float32
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("level", "make_optimizer"), [*((n, with_adamw) for n in range(4)), (2, with_muon)]
)
def test_the_peak_is_planned_within_a_tenth(level, make_optimizer):
    def make():
        return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)))

    batch = torch.empty(64, 512, device="meta")
    with torch.device("meta"):
        model = make()
    planned = mh.plan(model, make_optimizer(model), workers=8, input=batch).rows[level].total
    with mh.dry_run(8, fake=True), PeakMemory() as memory:
        model = make()
        model, optimizers = mh.shard(model, make_optimizer(model), level=level)
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(64, 512)).square().mean().backward()
            for each in optimizers if isinstance(optimizers, list) else [optimizers]:
                each.step()
        del model, optimizers
    assert planned == pytest.approx(memory.peak, rel=0.1)


def test_seeds_data_and_buffers_are_real():
    with mh.dry_run(4, fake=True):
        data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.arange(8))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        seen = [labels.tolist() for _, labels in loader]
        assert sorted(seen[0] + seen[1]) == list(range(8))
        job = mh.start()
        assert not mh.stopping() and job.world_size == 4
        norm = nn.BatchNorm1d(2)
        norm(torch.randn(4, 2)).sum().backward()
        assert norm.num_batches_tracked == 1


READS = {
    "item": lambda loss: loss.item(),
    "float": float,
    "tolist": lambda loss: loss.tolist(),
    "if": lambda loss: 1 if loss > 0 else 0,
    "nonzero": lambda loss: loss.nonzero(),
    "format": lambda loss: f"{loss:.3f}",
    "numpy": lambda loss: loss.detach().numpy(),
}


@pytest.mark.parametrize("name", READS)
def test_a_script_that_reads_a_value(name):
    line = ""
    if name not in ("format", "numpy"):
        line = r"line \d+\) reads the value .*"
    with (
        pytest.raises(RuntimeError, match=f"{line}have no values. Leave the line out"),
        mh.dry_run(4, fake=True),
    ):
        READS[name](make_model()(torch.ones(1, 64)).sum())


@contextmanager
def rejected(kind, message):
    with pytest.raises(kind, match=message), mh.dry_run(4, fake=True):
        yield


def test_mistakes(tmp_path):
    model = make_model()
    optimizer = with_adamw(model)
    mh.save(tmp_path, model=model, optimizer=optimizer)
    with rejected(ValueError, "mh.load cannot read .* no memory. Leave mh.load out"):
        mh.load(tmp_path, model=make_model())
    for level in (0, 1, 2):
        with rejected(RuntimeError, "has memory. Create the model inside of dry_run"):
            mh.shard(model, optimizer, level=level)[0](torch.ones(1, 64))
    with rejected(RuntimeError, r"optimizer.step\(\) .*reads the value"):
        model = make_model()
        optimizer = mh.DiLoCo(SGD(model.parameters(), lr=0.1), every=1)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    with rejected(TypeError, "unrelated"):
        raise TypeError("unrelated")
    with pytest.raises(ValueError, match="below world_size=4, got 4"), mh.dry_run(4, 4, fake=True):
        pass
    assert type(torch.ones(1)) is torch.Tensor
