"""The sharded module: whatever a training loop does, its numbers are the plain run's."""

import contextlib
import copy
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.sharding_oracle import (
    Lamb,
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    make_model,
    muon_and_adamw,
    one,
    oss,
    plain,
    train,
    train_averaged,
)
from manyhands._ranks.ranks import RankGroup
from manyhands.sharding import _agreement

WORKERS = 2  # where no test names another number

adamw = one(AdamW, lr=0.02, weight_decay=0.3)
lamb = one(Lamb, lr=0.02, weight_decay=0.3)


def compare(
    loop, *, workers=WORKERS, build=adamw, model=make_model, rtol=1e-9, atol=1e-11, **options
):
    """`loop(model, optimizers, data)` is the same on all ranks, on one, and in the plain run.

    It takes the data of its rank by `data(step)`, and may return tensors to compare as well.
    """

    def run():
        rank, _ = everyone()
        module = model()
        optimizers = build(module, oss)
        given = optimizers if len(optimizers) > 1 else optimizers[0]
        wrapped = mh.ShardedDataParallel(module, given, **options)
        extra = loop(wrapped, optimizers, lambda x: x[rank])
        return [*copied(module.parameters()), *(extra or [])]

    ranks = run_ranks(workers, run)
    module = model()
    extra = loop(module, build(module, plain), lambda x: x.flatten(0, 1))
    assert_same(ranks, [*copied(module.parameters()), *(extra or [])], rtol=rtol, atol=atol)


def batches(steps=4, workers=WORKERS):
    x, y = make_batches(steps, 1, workers)
    return zip(x[:, 0], y[:, 0], strict=True)


def clear(optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()


def update(optimizers):
    for optimizer in optimizers:
        optimizer.step()


def steps(model, optimizers, data, loss=loss_of):
    for x, y in batches():
        clear(optimizers)
        loss(model, data(x), data(y)).backward()
        update(optimizers)


def compare_ranks(
    loss,
    *,
    build=adamw,
    model=make_model,
    before=lambda step, module: None,
    by_model=False,
    warns=True,
):
    """Three ranks equal the plain run, whose loss is the mean of `loss(model, step, rank, x, y)`.

    A rank for which `loss` is None has no data in this step: it counts as zero.
    """

    def run(make, rank):
        module = model()
        optimizers = build(module, make)
        used = module
        if rank is not None:
            options = {"warn_on_trainable_params_changed": warns}
            used = mh.ShardedDataParallel(module, optimizers, **options)
        for step, (x, y) in enumerate(batches(5, 3)):
            before(step, module)
            clear([module] if by_model else optimizers)
            ranks = range(3) if rank is None else [rank]
            losses = [loss(used, step, r, x[r], y[r]) for r in ranks]
            with_data = [each for each in losses if each is not None]
            if with_data:
                (sum(with_data) / len(ranks)).backward()
            update(optimizers)
        return copied(module.parameters())

    ranks = run_ranks(3, lambda: run(oss, dist.get_rank()), timeout=20)
    assert_same(ranks, run(plain, None))


# -- options -------------------------------------------------------------------------------------


@pytest.mark.sample(
    "<lambda>0-options0-wire0", "<lambda>0-options2-None", "<lambda>1-options2-None"
)
@pytest.mark.parametrize(
    ("options", "wire"),
    [
        ({"reduce_fp16": True}, torch.float16),
        ({"reduce_dtype": torch.bfloat16}, torch.bfloat16),
        ({}, None),
    ],
)
@pytest.mark.parametrize("build", [adamw, lamb])
def test_gradients_travel_in_a_narrow_type_and_are_added_up_in_float32(build, options, wire):
    def model():
        return make_model(torch.float32)

    def run():
        _, wrapped = train(build, "OSS + ShardedDataParallel", model=model, **options)
        return copied(wrapped.parameters())

    _, expected = train_averaged(build, 3, model=model, wire=wire)
    assert_same(run_ranks(3, run), copied(expected.parameters()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_the_startup_gives_everyone_rank_0s_model_unless_told_not_to(sync):
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.fill_(float(dist.get_rank() + 1))
    mh.ShardedDataParallel(module, oss(module.parameters()), sync_models_at_startup=sync)
    expected = 1 if sync else dist.get_rank() + 1
    assert all((value == expected).all() for value in module.state_dict().values())


# -- clearing gradients --------------------------------------------------------------------------


@pytest.mark.sample("optimizer-True", "model-True", "inner module-False", "by hand-False")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", ["optimizer", "model", "inner module", "by hand"])
def test_gradients_may_be_cleared_in_every_way(who, set_to_none):
    def loop(model, optimizers, data):
        for x, y in batches():
            if who == "optimizer":
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=set_to_none)
            elif who == "model":
                model.zero_grad(set_to_none=set_to_none)
            elif who == "inner module":
                getattr(model, "module", model).zero_grad(set_to_none=set_to_none)
            else:
                for p in model.parameters():
                    if set_to_none:
                        p.grad = None
                    elif p.grad is not None:
                        p.grad.detach_()
                        p.grad.zero_()
            loss_of(model, data(x), data(y)).backward()
            update(optimizers)

    compare(loop)


# -- which parameters a step uses ----------------------------------------------------------------


class Branches(nn.Module):
    """A trunk, and two branches of which a loss may use either, both or none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = nn.Linear(5, 9), nn.Linear(9, 3), nn.Linear(9, 3)
        self.to(torch.float64)

    def forward(self, x, use):
        h = self.trunk(x).tanh()
        out = h.sum(dim=1, keepdim=True) * torch.ones(3, dtype=x.dtype)
        if "l" in use:
            out = out + self.left(h)
        if "r" in use:
            out = out + self.right(h).square()
        return out


class WithEmpty(Branches):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x, use):
        return super().forward(x, use) + self.empty.sum()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("model", [Branches, WithEmpty])
def test_a_parameter_that_nobody_uses_is_skipped(model, set_to_none):
    """No weight decay, no step of its momentum: as in the plain run."""

    def loop(model, optimizers, data):
        skipped = []
        for step, (x, y) in enumerate(batches()):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none)
            use = ["l", "", "lr", "r"][step]
            nn.functional.mse_loss(model(data(x), use), data(y)).backward()
            update(optimizers)
            right = getattr(model, "module", model).right
            skipped.append(torch.tensor(right.weight.grad is None))
        return skipped

    compare(loop, model=model)


def test_ranks_may_use_different_parameters_in_a_step():
    uses = [["lr", "l", ""], ["r", "l", "l"], ["", "", "lr"], ["l", "r", ""], ["", "", ""]]

    def loss(model, step, rank, x, y):
        return nn.functional.mse_loss(model(x, uses[step][rank]), y)

    compare_ranks(loss, model=Branches)


@pytest.mark.sample("optimizer-<lambda>", "inner module-muon_and_adamw")
@pytest.mark.parametrize("build", [adamw, muon_and_adamw])
@pytest.mark.parametrize("clear_by", ["optimizer", "inner module"])
def test_a_rank_without_data_joins_in_with_nothing(build, clear_by):
    """Its loss counts as zero, so the mean is over all ranks still."""

    def loss(model, step, rank, x, y):
        return None if rank == 1 and step in (0, 2, 3) else loss_of(model, x, y)

    compare_ranks(loss, build=build, by_model=clear_by == "inner module")


def test_a_worker_without_data_notices_what_froze_and_thawed():
    def frozen_first():
        module = make_model()
        module[0].requires_grad_(False)
        return module

    def freeze(step, module):
        if step in (1, 3):
            module[0].requires_grad_(step == 1)

    def loss(model, step, rank, x, y):
        return None if rank == 0 and step in (1, 3) else loss_of(model, x, y)

    compare_ranks(loss, model=frozen_first, before=freeze, warns=False)


@on_ranks(2)
def test_a_list_of_optimizers_is_reduced_once_a_step(monkeypatch):
    """Each further step() must not send everything again."""
    calls = []
    exchange = RankGroup.reduce_scatter_slices

    def counted(*args, **kwargs):
        calls.append(1)
        return exchange(*args, **kwargs)

    monkeypatch.setattr(RankGroup, "reduce_scatter_slices", counted)
    train(muon_and_adamw, "OSS + ShardedDataParallel", steps=1)
    once = len(calls)
    train(muon_and_adamw, "OSS + ShardedDataParallel", steps=3)
    buckets = 4  # two of each optimizer, of about 64 elements
    assert buckets <= once < 2 * buckets
    assert len(calls) == 4 * once


# -- shapes of a backward ------------------------------------------------------------------------


class Tied(nn.Module):
    """A weight that two modules share, used once more by hand, and one applied three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.outward = nn.Linear(5, 12, bias=False), nn.Linear(12, 5)
        self.outward.weight = nn.Parameter(torch.randn(5, 12) / 3)
        self.again = nn.Linear(12, 5)
        self.again.weight = self.outward.weight
        self.reused = nn.Linear(12, 12)
        self.to(torch.float64)

    def forward(self, x):
        h = self.inward(x)
        for _ in range(3):
            h = self.reused(h).tanh()
        out = self.outward(h) + self.again(h.square())
        return (out + nn.functional.linear(h, self.again.weight))[:, :3]


def test_shared_and_reused_parameters():
    compare(steps, model=Tied)
    compare(steps, model=Tied, build=lamb)


def test_several_forwards_before_one_backward():
    W = torch.randn(3, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def loss(model, x, y):
        return loss_of(model, x, y) + loss_of(model, y @ W, y)

    compare(lambda *run: steps(*run, loss=loss))


@pytest.mark.parametrize("retain_graph", [True, False])
def test_several_backwards_before_a_step(retain_graph):
    def loop(model, optimizers, data):
        for x, y in batches():
            clear(optimizers)
            if retain_graph:
                out = model(data(x))
                nn.functional.mse_loss(out, data(y)).backward(retain_graph=True)
                (out.square().mean() / 10).backward()
            else:
                loss_of(model, data(x), data(y)).backward()
                loss_of(model, data(x) * 2, data(y)).backward()
            update(optimizers)

    compare(loop)
    compare(loop, build=muon_and_adamw)


def test_a_gradient_penalty_goes_through_backward_twice():
    def loop(model, optimizers, data):
        for x, y in batches():
            clear(optimizers)
            inputs = data(x).clone().requires_grad_()
            loss = nn.functional.mse_loss(model(inputs), data(y))
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            # a mean over samples of a batch of 2 a rank, and of 6 in the plain run
            (loss + 0.1 * (slope * len(inputs)).square().mean()).backward()
            update(optimizers)

    compare(loop)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model()

        def forward(self, x):
            x = x.clone().requires_grad_()
            for pair in (self.layers[:2], self.layers[2:4]):
                x = checkpoint(pair, x, use_reentrant=use_reentrant)
            return self.layers[4](x)

    def loop(model, optimizers, data):
        for x, y in batches():
            clear(optimizers)
            for part in (1.0, 0.5):
                (loss_of(model, data(x), data(y)) * part).backward()
            update(optimizers)

    compare(loop, model=Checkpointed)
    compare(loop, model=Checkpointed, build=lamb)


def test_a_weight_inside_two_checkpoints():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model()
            self.extra = nn.Linear(11, 11).double()

        def forward(self, x):
            x = self.layers[:4](x)
            for _ in range(2):
                x = checkpoint(lambda h: self.extra(h).tanh(), x, use_reentrant=False)
            return self.layers[4](x)

    compare(steps, model=Twice)


# -- evaluation, buffers -------------------------------------------------------------------------


def test_evaluation_in_between_may_be_on_one_rank_alone():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.norm = make_model(), nn.BatchNorm1d(5, momentum=0.0).double()
            self.norm.requires_grad_(False)

        def forward(self, x):
            self.norm.eval()
            return self.layers(self.norm(x))

    def loop(model, optimizers, data):
        for step, (x, y) in enumerate(batches()):
            clear(optimizers)
            loss_of(model, data(x), data(y)).backward()
            if everyone()[0] == 0 and step % 2:
                with torch.no_grad():
                    model(data(x))  # between backward and step
            update(optimizers)
            if everyone()[0] == 0:
                model.eval()
                model(data(x)).sum()  # with a graph, never used
                with torch.inference_mode():
                    model(data(x))
                model.train()

    compare(loop, model=Normed)


def test_buffers_are_rank_0s_in_training():
    def run():
        rank, _ = everyone()
        torch.manual_seed(rank)
        results = []
        for broadcast in (True, False):
            module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
            optimizer = oss(module.parameters(), lr=0.1)
            model = mh.ShardedDataParallel(module, optimizer, broadcast_buffers=broadcast)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 5)).square().sum().backward()
                optimizer.step()
            own = [b.clone() for b in module.buffers()]
            model.sync_buffers(blocking=True)
            results.append((own, [b.clone() for b in module.buffers()]))
            with model.no_sync():  # local: no buffers are sent
                if rank == 0:
                    model(torch.randn(4, 5))
        return results

    (first, apart), (second, apart_2) = run_ranks(2, run)
    assert all(torch.equal(p, q) for p, q in zip(first[1], second[1], strict=True))
    assert all(torch.equal(p, q) for p, q in zip(apart[1], apart_2[1], strict=True))
    assert not torch.equal(apart[0][0], apart_2[0][0])
    for mine, theirs in zip(first[0], first[1], strict=True):
        assert torch.equal(mine, theirs), "rank 0's own statistics are what is sent"


def test_batch_norm_is_ddps():
    def run():
        result = []
        for sharded in (True, False):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(5, 13), nn.BatchNorm1d(13), nn.Linear(13, 3)).double()
            if sharded:
                optimizer = oss(module.parameters(), SGD, lr=0.02, momentum=0.9)
                model = mh.ShardedDataParallel(module, optimizer)
            else:
                optimizer = SGD(module.parameters(), lr=0.02, momentum=0.9)
                model = nn.parallel.DistributedDataParallel(module)
            x, y = make_batches(4, 1, 3, size=4)
            rank = dist.get_rank()
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, x[step, 0, rank], y[step, 0, rank]).backward()
                optimizer.step()
            result.append([t.detach().clone() for t in module.state_dict().values()])
        return result

    ranks = run_ranks(3, run)  # DDP's other ranks take rank 0's buffers in the next forward only
    assert_same([ours for ours, _ in ranks], ranks[0][1])


# -- no_sync -------------------------------------------------------------------------------------


def test_no_sync_in_every_order_and_depth():
    def loop(model, optimizers, data):
        plan = [("s",), ("n", "s"), ("s", "n", "s"), ("n", "n", "s", "s"), ("s", "n", "r")]
        for passes, (x, y) in zip(plan, batches(5), strict=True):
            clear(optimizers)
            for kind in passes:
                silent = kind in "nr" and hasattr(model, "no_sync")
                with contextlib.ExitStack() as stack:
                    if silent:
                        stack.enter_context(model.no_sync())
                        stack.enter_context(model.no_sync())
                    loss_of(model, data(x), data(y)).backward()
                if kind == "r" and hasattr(model, "reduce"):
                    model.reduce()
            update(optimizers)

    compare(loop)
    compare(loop, build=muon_and_adamw)


def test_no_sync_around_the_backward_alone_is_enough():
    def loop(model, optimizers, data):
        for x, y in batches():
            clear(optimizers)
            for kind in "ns":
                loss = loss_of(model, data(x), data(y))
                silent = kind == "n" and hasattr(model, "no_sync")
                with model.no_sync() if silent else contextlib.nullcontext():
                    loss.backward()
            update(optimizers)

    compare(loop)


def test_an_exception_inside_no_sync_turns_averaging_on_again():
    def loop(model, optimizers, data):
        for x, y in batches():
            clear(optimizers)
            if hasattr(model, "no_sync"):
                with pytest.raises(ZeroDivisionError), model.no_sync(), model.no_sync():
                    raise ZeroDivisionError
                assert model.require_backward_grad_sync is True
            loss_of(model, data(x), data(y)).backward()
            update(optimizers)

    compare(loop)


def test_require_backward_grad_sync_may_be_set_by_hand():
    def loop(model, optimizers, data):
        for x, y in batches():
            clear(optimizers)
            for model.require_backward_grad_sync in (False, False, True):
                loss_of(model, data(x), data(y)).backward()
            update(optimizers)

    compare(loop)


def test_a_step_after_no_sync_alone_is_an_error_with_a_way_out():
    def loop(model, optimizers, data):
        for x, y in batches():
            clear(optimizers)
            sharded = hasattr(model, "no_sync")
            with model.no_sync() if sharded else contextlib.nullcontext():
                loss_of(model, data(x), data(y)).backward()
            if sharded:
                with pytest.raises(RuntimeError, match=r"inside no_sync.*reduce\(\)"):
                    update(optimizers)
                model.reduce()
            update(optimizers)

    compare(loop)


def test_an_exception_inside_backward_spoils_nothing_that_follows():
    class Bomb(torch.autograd.Function):
        armed = False

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if Bomb.armed:
                raise ZeroDivisionError("boom")
            return grad

    class Explosive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model()

        def forward(self, x):
            return self.layers[3:](Bomb.apply(self.layers[:3](x)))

    def loop(model, optimizers, data):
        Bomb.armed = False
        for step, (x, y) in enumerate(batches()):
            clear(optimizers)
            Bomb.armed = step in (0, 2)
            if Bomb.armed:
                with pytest.raises(ZeroDivisionError):
                    loss_of(model, data(x), data(y)).backward()
                Bomb.armed = False
                clear(optimizers)
            loss_of(model, data(x), data(y)).backward()
            update(optimizers)

    compare(loop, model=Explosive)


# -- memory --------------------------------------------------------------------------------------


def held(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("build", [adamw, lamb])
def test_after_backward_a_worker_holds_its_share_of_the_gradients(build):
    def run():
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))
        (optimizer,) = build(module, lambda p, k, **o: oss(p, k, **{**o, "bucket_size": 512}))
        model = mh.ShardedDataParallel(module, optimizer)
        everything = 4 * sum(p.numel() for p in module.parameters())
        result = []
        for _ in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                model(torch.ones(1, 16)).sum().backward()
            for p in module.parameters():
                assert type(p.grad) is torch.Tensor  # this worker's own, in full
            for _ in range(2):
                model(torch.ones(1, 16)).sum().backward()
            grads = [p.grad for p in module.parameters()]
            assert all(g.local is None for g in grads)
            pieces = [piece for g in grads for piece in g.slices]
            result.append((sum(p.nbytes for p in pieces), held(pieces)))
            optimizer.step()
        return everything, result, sum(s["exp_avg"].nbytes for s in optimizer.optim.state.values())

    ranks = run_ranks(3, run)
    everything = ranks[0][0]
    for step in range(3):
        assert sum(r[1][step][0] for r in ranks) == everything
    for _, result, state in ranks:
        for exact, storages in result:
            assert exact == state  # where the state is, the gradient is
            assert storages <= everything / 3 * 1.15 + 4 * 16 * 16  # padding, or a parameter more
    if build is adamw:
        assert all(result[0][1] <= everything / 3 * 1.1 for _, result, _ in ranks)


@on_ranks(2)
def test_dropping_the_module_drops_its_hooks():
    rank, _ = everyone()
    module = make_model()
    optimizer = oss(module.parameters(), AdamW)
    model = mh.ShardedDataParallel(module, optimizer)
    loss_of(model, *(t[0, 0, rank] for t in make_batches(1, 1, 2))).backward()
    optimizer.step()
    del model, optimizer
    module.zero_grad()
    loss_of(module, *(t[0, 0, 0] for t in make_batches(1, 1, 2))).backward()
    assert all(type(p.grad) is torch.Tensor for p in module.parameters())


# -- parameters that freeze, thaw, move ----------------------------------------------------------


@on_ranks(2)
def test_thawing_warns_unless_told_not_to():
    said = []
    for options in ({}, {"warn_on_trainable_params_changed": False}):
        module = make_model()
        module[0].requires_grad_(False)
        optimizer = oss(module.parameters(), AdamW, lr=0.02)
        model = mh.ShardedDataParallel(module, optimizer, **options)
        x = torch.ones(2, 5).double()
        model(x)
        module[0].requires_grad_(True)
        catch = pytest.warns(UserWarning, match="frozen or unfrozen")
        with contextlib.nullcontext() if options else catch:
            model(x).sum().backward()
        said.append([int(p.grad is not None) for p in module.parameters()])
    assert said == [[1] * 6] * 2


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one rank", "another parameter each"])
def test_a_freeze_that_differs_between_ranks_is_said_in_seconds(ranks, monkeypatch):
    def run():
        module = make_model()
        model = mh.ShardedDataParallel(module, oss(module.parameters(), AdamW, lr=0.02))
        x = torch.ones(2, 5).double()
        model(x).sum().backward()
        if dist.get_rank() in ranks:
            list(module.parameters())[dist.get_rank()].requires_grad_(False)
            with pytest.raises(RuntimeError, match=r"rank\(s\) .* have not called .* 0.5\d* s"):
                model(x)

    monkeypatch.setattr(_agreement, "SOON", 0.2)
    monkeypatch.setattr(_agreement, "PATIENCE", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(2, run, timeout=20)


def test_a_rank_that_freezes_later_than_the_others_is_waited_for(monkeypatch):
    def run():
        module = make_model()
        model = mh.ShardedDataParallel(module, oss(module.parameters(), AdamW, lr=0.02))
        x = torch.ones(2, 5).double()
        module[0].requires_grad_(False)
        if dist.get_rank() == 0:
            time.sleep(0.6)
        model(x).sum().backward()
        return [int(p.grad is not None) for p in module.parameters()]

    monkeypatch.setattr(_agreement, "SOON", 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(2, run) == [[0, 0, 1, 1, 1, 1]] * 2


def test_without_auto_refresh_one_refreshes_by_hand():
    def loop(model, optimizers, data):
        layers = getattr(model, "module", model)
        for step, (x, y) in enumerate(batches()):
            clear(optimizers)
            if step in (1, 2):
                layers[0].requires_grad_(step == 2)
                if hasattr(model, "refresh_trainable"):
                    model.refresh_trainable()
            loss_of(model, data(x), data(y)).backward()
            update(optimizers)

    compare(loop, auto_refresh_trainable=False)


@on_ranks(2, raises=RuntimeError, match="with a gradient that is not averaged", timeout=20)
def test_without_auto_refresh_a_forgotten_one_is_an_error():
    module = make_model()
    module[0].requires_grad_(False)
    optimizer = oss(module.parameters(), AdamW, lr=0.02)
    model = mh.ShardedDataParallel(module, optimizer, auto_refresh_trainable=False)
    module[0].requires_grad_(True)
    model(torch.ones(2, 5).double()).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("build", [adamw, lamb, muon_and_adamw])
def test_a_module_may_be_converted_after_it_was_wrapped(build):
    def float32():
        return make_model(torch.float32)

    def loop(model, optimizers, data):
        model.to(torch.float64)
        steps(model, optimizers, data)

    compare(loop, build=build, model=float32, rtol=1e-9, atol=1e-9)


# -- as a module ---------------------------------------------------------------------------------


class Versioned(nn.Linear):
    """A module that reads old checkpoints in another way, as BatchNorm does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def inner_module():
    return nn.Sequential(Versioned(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_state_dicts_are_the_plain_modules(workers):
    plain_module, module = inner_module(), inner_module()
    model = mh.ShardedDataParallel(module, oss(module.parameters()))
    assert list(model.state_dict()) == list(plain_module.state_dict())
    result = model.load_state_dict(plain_module.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    for ours, theirs in zip(
        model.state_dict().values(), plain_module.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs)
    inner_module().load_state_dict(model.state_dict())
    given = dict(plain_module.state_dict())
    del given["2.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*2\.bias"):
        model.load_state_dict(given)
    assert model.load_state_dict(given, strict=False).missing_keys[0].endswith("2.bias")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**plain_module.state_dict(), "other": torch.ones(1)})


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_it_may_be_part_of_a_larger_module(workers):
    def larger(trunk, head):
        return nn.ModuleDict({"trunk": trunk, "head": head})

    module = inner_module()
    sharded = mh.ShardedDataParallel(module, oss(module.parameters()))
    model = larger(sharded, nn.Linear(2, 1))
    other = larger(inner_module(), nn.Linear(2, 1))
    assert list(model.state_dict()) == list(other.state_dict())
    model.load_state_dict(other.state_dict())
    for p, q in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(p, q)
    other.load_state_dict(model.state_dict())
    assert list(model.state_dict(prefix="a.")) == list(other.state_dict(prefix="a."))


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_a_modules_version_reaches_it_and_the_callers_dict_stays_as_it_is(workers):
    module = inner_module()
    given = inner_module().state_dict()
    keys, versions = list(given), copy.deepcopy(given._metadata)
    mh.ShardedDataParallel(module, oss(module.parameters())).load_state_dict(given)
    assert module[0].seen == 2
    assert list(given) == keys
    assert given._metadata == versions


def test_training_inside_a_larger_module():
    compare(lambda model, *others: steps(nn.Sequential(nn.Identity(), model), *others))


def test_attributes_are_the_wrapped_modules():
    module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    module.colour = "blue"
    model = mh.ShardedDataParallel(module, oss(module.parameters()))
    assert model.colour == "blue"
    assert model[1] is module[1]
    assert model.module is module
    with pytest.raises(AttributeError, match="shade"):
        _ = model.shade
    assert not hasattr(model, "weight")
    assert [n for n, _ in model.named_parameters()] == [
        f"module.{n}" for n, _ in module.named_parameters()
    ]
    assert model.eval().training is module.training is False


def test_fairscales_attributes():
    module = make_model()
    model = mh.ShardedDataParallel(module, oss(module.parameters()))
    assert (model.device_type, model.is_multi_device_module) == ("cpu", False)
    module[4].to("meta")
    assert (model.device_type, model.is_multi_device_module) == ("cpu", True)
    module.to("meta")
    assert (model.device_type, model.is_multi_device_module) == ("meta", False)
