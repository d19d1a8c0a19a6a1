"""A probe on several ranks, under every sharding: one verdict, and a run that goes on unchanged."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import raises_on_ranks, run_ranks

SIZES = dict(budget=128, scales=(1, 2, 4), repeats=2, held_out=4)


def make_batches(count, seed):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    inputs = torch.randn(count, 4, 6, generator=generator)
    return list(zip(inputs, inputs[..., :2] + 0.5, strict=True))


def loss(model, batch):
    inputs, targets = batch
    return mse_loss(model(inputs), targets)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


def ddp():
    model = DistributedDataParallel(make_model())
    return model, mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def oss():
    model = make_model()
    optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=0.01)
    return mh.ShardedDataParallel(model, optimizer), mh.AdamScale(optimizer)


def oss_overlapped():
    model = make_model()
    optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=0.01)
    wrapped = mh.ShardedDataParallel(model, optimizer, overlap_gather=True)
    return wrapped, mh.AdamScale(optimizer)


def oss_with_exact_copies():
    model = make_model()
    arguments = {"optim": torch.optim.AdamW, "lr": 0.01, "broadcast_fp16": True}
    optimizer = mh.OSS(model.parameters(), **arguments)
    return mh.ShardedDataParallel(model, optimizer), mh.AdaScale(optimizer)


def fsdp():
    model = mh.FSDP(make_model())
    return model, mh.AdamScale(torch.optim.AdamW(model.parameters(), lr=0.01))


def torch_fsdp():
    model = make_model()
    fully_shard(model[0])
    fully_shard(model)
    return model, mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


WAYS = [ddp, oss, oss_overlapped, oss_with_exact_copies, fsdp, torch_fsdp]


def run(way, probed):
    model, optimizer = way()

    def train(batches):
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(make_batches(8, seed=1))
    found = []
    if probed:
        result = mh.probe_batch(model, optimizer, loss, make_batches(100, seed=2), **SIZES)
        found = [
            [row.scale, list(row.losses), row.difference, row.verdict] for row in result.rows
        ] + [result.largest, result.samples]
    torch.manual_seed(3)  # dropout of what follows
    train(make_batches(8, seed=4))
    with torch.no_grad():
        model.eval()
        outputs = model(torch.ones(4, 6)).clone()
    params = [p.detach() for p in model.parameters()]
    shards = [p.to_local().clone() if hasattr(p, "to_local") else p.clone() for p in params]
    return found, outputs, shards, optimizer.progress


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ranks_agree_and_go_on_as_if_there_had_been_no_probe(way):
    def both():
        return run(way, probed=True), run(way, probed=False)

    ranks = run_ranks(2, both)
    verdicts = [probed[0] for probed, _ in ranks]
    assert verdicts[0] == verdicts[1] and len(verdicts[0]) == 5
    assert verdicts[0][-1] == 2 * 2 * 3 * 20 * 4  # ranks, repeats, scales, micro-batches, samples
    for probed, plain in ranks:
        for one, other in zip([probed[1], *probed[2]], [plain[1], *plain[2]], strict=True):
            assert torch.equal(one, other)
        assert probed[3] == plain[3]


def test_the_sharded_branches_have_the_losses_of_ddp():
    def plain():
        model = DistributedDataParallel(make_model())
        return model, mh.AdamScale(torch.optim.AdamW(model.parameters(), lr=0.01))

    def losses():
        found = []
        for way in (plain, oss, fsdp):
            model, optimizer = way()
            result = mh.probe_batch(model, optimizer, loss, make_batches(100, seed=2), **SIZES)
            found.append(torch.tensor([row.losses for row in result.rows]))
        return found

    expected, *sharded = run_ranks(2, losses)[0]
    for each in sharded:
        torch.testing.assert_close(each, expected)


def test_a_rank_with_too_few_micro_batches_is_named_on_every_rank():
    def short():
        model, optimizer = ddp()
        count = (100, 30)[dist.get_rank()]
        mh.probe_batch(model, optimizer, loss, make_batches(count, seed=2), **SIZES)

    raises_on_ranks(2, ValueError, short, match=r"needs 44 .* had 30 on rank 1\.")


def test_ranks_that_ask_for_different_probes_all_raise():
    def different():
        model, optimizer = ddp()
        sizes = {**SIZES, "repeats": 2 + dist.get_rank()}
        mh.probe_batch(model, optimizer, loss, make_batches(100, seed=2), **sizes)

    raises_on_ranks(2, ValueError, different, match="repeats")
