"""Ranks with unequal numbers of batches: torch's `Join` is refused, and the remedies work."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import assert_same, copied, loss_of, make_batches, make_model

STEPS = 4  # of rank 1; rank 0 has one batch less
X, Y = (batches[:, 0] for batches in make_batches(STEPS, 1, 2))  # of [step][worker]


def own_batches():
    rank = dist.get_rank()
    return list(zip(X[:, rank], Y[:, rank], strict=True))[: STEPS - 1 + rank]


def sgd(params, **options):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, **options)


def train(model, optimizer):
    for x, y in own_batches():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


def under_ddp(around):
    def way():
        module = DistributedDataParallel(make_model())
        return module, around(module)

    return way


def at_level(level):
    def way():
        model = make_model()
        return mh.shard(model, sgd(model.parameters()), level=level)

    return way


def oss(module):
    return mh.OSS(module.parameters(), optim=torch.optim.SGD, lr=0.1, momentum=0.9)


def adascale(module):
    return mh.AdaScale(sgd(module.parameters()))


class JoinableSGD(torch.optim.SGD):
    def join_hook(self, **kwargs):
        return JoinHook()


def adascale_of_joinable(module):
    return mh.AdaScale(JoinableSGD(module.parameters(), lr=0.1))


def noise_scale(module):
    optimizer = sgd(module.parameters())
    optimizer.measures = mh.NoiseScale(optimizer)
    return optimizer


def diloco():
    model = make_model()
    return model, mh.DiLoCo(sgd(model.parameters()), every=2)


WAYS = {
    "OSS": under_ddp(oss),
    "AdaScale": under_ddp(adascale),
    "AdaScale of a joinable": under_ddp(adascale_of_joinable),
    "DiLoCo": diloco,
    "level 1": at_level(1),
    "level 2": at_level(2),
    "level 3": at_level(3),
}


@pytest.mark.parametrize("way", WAYS)
def test_join_is_refused_when_it_is_made(way):
    def mistake():
        module, optimizer = WAYS[way]()
        joinables = [each for each in (module, optimizer) if hasattr(each, "join_hook")]
        with Join(joinables):
            train(module, optimizer)

    texts = raises_on_ranks(2, RuntimeError, mistake, match="does not support torch's Join")
    assert all("Give every rank the same number of batches" in text for text in texts)
    assert len(set(texts)) == 1


@pytest.mark.parametrize("around", [oss, adascale, noise_scale])
@on_ranks(2, raises=RuntimeError, match="does not support torch's Join", timeout=20)
def test_a_step_inside_the_join_of_ddp_is_refused_and_does_not_hang(around):
    """Torch's own optimizers are not given to `Join`, so ours are left out of it, too."""
    module = DistributedDataParallel(make_model())
    optimizer = around(module)
    with module.join():
        train(module, optimizer)


@pytest.mark.parametrize("around", [oss, adascale])
def test_the_join_of_ddp_ends_all_ranks_together(around):
    """The first remedy in the error's text."""

    def run():
        module = DistributedDataParallel(make_model())
        optimizer = around(module)
        with (
            pytest.raises(RuntimeError, match="exhausted"),
            module.join(throw_on_early_termination=True),
        ):
            train(module, optimizer)
        return copied(module.parameters())

    first, second = run_ranks(2, run)
    assert_same([first, second], first)
    if around is oss:
        assert_same([first], plain(STEPS - 1))


@pytest.mark.parametrize("rule", [False, True], ids=["OSS", "AdaScale"])
def test_a_rank_without_data_steps_with_zeros_under_sharded_data_parallel(rule):
    """The second remedy: gradients are divided by the number of ranks, as in DDP's `join`."""

    def run():
        model = make_model()
        optimizer = oss(model)
        if rule:
            optimizer = mh.LinearScale(optimizer, scale=1.0)  # the factor is 1
        module = mh.ShardedDataParallel(model, optimizer)
        train(module, optimizer)
        for _ in range(STEPS - len(own_batches())):
            optimizer.zero_grad()
            optimizer.step()
        return copied(module.parameters())

    assert_same(run_ranks(2, run), plain(STEPS))


def plain(steps):
    """Train alone; in the last of `STEPS` steps, rank 0 has no data and counts as zeros."""
    model = make_model()
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(2):
            if step < STEPS - 1 + rank:
                (loss_of(model, X[step, rank], Y[step, rank]) / 2).backward()
        optimizer.step()
    return copied(model.parameters())


@pytest.mark.parametrize("level", [2, 3])
@on_ranks(
    2,
    raises=AttributeError,
    match="no attribute 'join', .*Give every rank the same number of batches",
)
def test_the_join_method_of_ddp_is_missed_with_advice(level):
    module, _ = at_level(level)()
    module.join()


def test_a_join_that_is_switched_off_is_not_refused():
    def run():
        module = DistributedDataParallel(make_model())
        optimizer = oss(module)
        with module.join(enable=False):
            for x, y in own_batches()[: STEPS - 1]:
                optimizer.zero_grad()
                loss_of(module, x, y).backward()
                optimizer.step()
        return copied(module.parameters())

    assert_same(run_ranks(2, run), plain(STEPS - 1))
