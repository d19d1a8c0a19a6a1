"""Sharded parameters: whatever a training loop does, its numbers are the plain run's."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
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
    one,
    plain,
    train_alone,
)
from manyhands._ranks.ranks import RankGroup

STEPS = 3
WORKERS = 2  # three and more: the first test
OPTIMIZERS = {
    "SGD": one(SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": one(AdamW, lr=0.02, weight_decay=0.3),
    "LAMB": one(Lamb, lr=0.02, weight_decay=0.1),
}
adamw = OPTIMIZERS["AdamW"]


def one_wrap(model, **options):
    return mh.FSDP(model, **options)


def nested(model, **options):
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear) and name != "4":
            setattr(model, name, mh.FSDP(child, **options))
    return mh.FSDP(model, **options)


WAYS = {"one wrap": one_wrap, "nested": nested}


def whole(model):
    """The parameters of the plain model, in its order."""
    if isinstance(model, mh.FSDP):
        state = model.state_dict()
        return [state[name] for name, _ in model.named_parameters()]
    return copied(model.parameters())


def compare(loop, *, workers=WORKERS, build=adamw, model=make_model, wrap=nested, **options):
    """`loop(model, optimizers, part)` is the same on all ranks, on one, and in the plain run.

    `part(batch)` is the rank's part of a batch. What the loop returns is compared as well.
    """

    def run():
        rank, _ = everyone()
        wrapped = wrap(model(), **options)
        optimizers = build(wrapped, plain)
        extra = loop(wrapped, optimizers, lambda x: x[rank])
        return [*whole(wrapped), *(extra or [])]

    ranks = run_ranks(workers, run)
    module = model()
    extra = loop(module, build(module, plain), lambda x: x.flatten(0, 1))
    assert_same(ranks, [*copied(module.parameters()), *(extra or [])], rtol=1e-9, atol=1e-11)


def steps(
    model, optimizers, part, *, loss=loss_of, after=lambda step: None, workers=WORKERS, count=STEPS
):
    x, y = make_batches(count, 1, workers)
    for step in range(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, part(x[step, 0]), part(y[step, 0])).backward()
        for optimizer in optimizers:
            optimizer.step()
        after(step)


# -- the plain run's numbers ------------------------------------------------------------------


@pytest.mark.sample("1-SGD-nested", "1-LAMB-nested", "3-LAMB-nested")
@pytest.mark.parametrize(
    ("name", "way"), [("SGD", "nested"), ("AdamW", "one wrap"), ("LAMB", "nested")]
)
@pytest.mark.parametrize(
    "workers", [1, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_training_equals_the_plain_run(workers, name, way):
    def run():
        rank, _ = everyone()
        results = []
        for passes, no_sync in ((1, False), (3, True), (3, False)):
            model = WAYS[way](make_model())
            (optimizer,) = OPTIMIZERS[name](model, plain)
            x, y = make_batches(STEPS, passes, workers)
            for step in range(STEPS):
                optimizer.zero_grad()
                for a in range(passes):
                    quiet = no_sync and a < passes - 1
                    with model.no_sync() if quiet else contextlib.nullcontext():
                        (loss_of(model, x[step, a, rank], y[step, a, rank]) / passes).backward()
                optimizer.step()
            results.append(whole(model))
        return results

    ranks = run_ranks(workers, run)
    exact = dict(rtol=0, atol=0) if workers == 1 else {}
    for number, passes in enumerate((1, 3, 3)):
        _, alone = train_alone(OPTIMIZERS[name], workers, passes)
        assert_same([r[number] for r in ranks], copied(alone.parameters()), way, **exact)


def test_each_worker_holds_its_share_between_steps():
    def run():
        model = nested(make_model())
        (optimizer,) = adamw(model, plain)
        steps(model, [optimizer], lambda x: x[dist.get_rank()], workers=3)
        own = sum(p.to_local().numel() for p in model.parameters())
        grads = sum(p.grad.to_local().numel() for p in model.parameters())
        moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        state = sum(moment.to_local().numel() for moment in moments)
        return own, grads, state

    total = sum(p.numel() for p in make_model().parameters())
    held = run_ranks(3, run)
    assert sum(own for own, _, _ in held) == total
    assert [grads for _, grads, _ in held] == [own for own, _, _ in held]
    assert [state for _, _, state in held] == [2 * own for own, _, _ in held]


@pytest.mark.parametrize("options", [{}, dict(mixed_precision=True, fp32_reduce_scatter=True)])
@on_ranks(2)
def test_zero_grad_clears_what_no_sync_has_left(options):
    results = []
    for given_up in (False, True):
        model = nested(make_model(torch.float32), **options)
        (optimizer,) = adamw(model, plain)
        x = torch.ones(2, 5) * (1 + dist.get_rank())
        if given_up:
            with model.no_sync():
                model(x).sum().backward()
            model.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        results.append(whole(model))
    assert all(map(torch.equal, *results))


def test_no_sync_is_left_as_it_was_after_an_error():
    model = nested(make_model())
    with contextlib.suppress(RuntimeError), model.no_sync():
        assert not model.require_backward_grad_sync
        raise RuntimeError
    assert all(m.require_backward_grad_sync for m in model.modules() if isinstance(m, mh.FSDP))


def clipping(clip):
    """A loop in which `clip(model)` comes before each step, and what it returned."""

    def loop(model, optimizers, part):
        x, y = make_batches(2, 1, WORKERS)
        norms = []
        for step in range(2):
            optimizers[0].zero_grad()
            loss_of(model, part(x[step, 0]), part(y[step, 0])).backward()
            norms += clip(model)
            optimizers[0].step()
        return norms

    return loop


@pytest.mark.parametrize(
    "norm_type", [2.0, pytest.param(1.0, marks=pytest.mark.long), float("inf")]
)
def test_clipping_is_that_of_the_whole_gradient(norm_type):
    def clip(model):
        if isinstance(model, mh.FSDP):
            return [model.clip_grad_norm_(0.1, norm_type)]
        return [nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)]

    compare(clipping(clip))


@pytest.mark.parametrize(
    "norm_type", [2.0, pytest.param(3.0, marks=pytest.mark.long), float("inf")]
)
def test_clipping_with_torchs_function_is_right_and_returns_a_plain_number(norm_type, monkeypatch):
    def clip(model):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        assert type(norm) is torch.Tensor and float(f"{norm:.3f}") > 0
        return [norm, nn.utils.get_total_norm([p.grad for p in model.parameters()])]

    compare(clipping(clip))


@on_ranks(2)
def test_clipping_with_torchs_function_takes_one_collective(monkeypatch):
    model = nested(make_model())
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    calls = []
    with monkeypatch.context() as patch:
        real = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert len(calls) == 1


def test_the_norm_of_one_gradient_is_that_of_the_whole():
    def loop(model, optimizers, part):
        x, y = make_batches(1, 1, WORKERS)
        loss_of(model, part(x[0, 0]), part(y[0, 0])).backward()
        norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters()]
        return [norms[0] + 1, norms[1].sqrt(), torch.tensor(norms[2].item()), *norms[3:]]

    compare(loop)


# -- which parameters have a gradient ---------------------------------------------------------


class Branches(nn.Module):
    """Uses one or the other branch, or neither."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.a, self.b = (nn.Linear(5, 5) for _ in range(3))
        self.c = nn.Linear(5, 5)
        self.double()

    def forward(self, x, way):
        x = self.first(x)
        return {"a": self.a, "b": self.b, "": lambda x: x}[way](x)


def wrap_branches(model, **options):
    model.a, model.b = mh.FSDP(model.a, **options), mh.FSDP(model.b, **options)
    return mh.FSDP(model, **options)


@pytest.mark.parametrize("wrap", [one_wrap, wrap_branches])
def test_a_parameter_that_nobody_uses_is_left_alone(wrap):
    def loop(model, optimizers, part):
        x, _ = make_batches(3, 1, WORKERS)
        missing = []
        for step, way in enumerate(("a", "", "a")):
            optimizers[0].zero_grad()
            model(part(x[step, 0]), way).square().mean().backward()
            missing.append(sum(p.grad is None for p in model.parameters()))
            optimizers[0].step()  # weight decay and momentum would move what has a gradient
        return [torch.tensor(missing)]

    compare(loop, model=Branches, wrap=wrap)


def plain_branches(steps, ways):
    """The parameters after training on the mean of what each of three workers computes."""
    model = Branches()
    (optimizer,) = adamw(model, plain)
    x, _ = make_batches(steps, 1, 3)
    for step in range(steps):
        optimizer.zero_grad()
        for rank, way in enumerate(ways):
            (model(x[step, 0, rank], way).square().mean() / 3).backward()
        optimizer.step()
    return copied(model.parameters())


needs_reduced_unused = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="this torch's fully_shard has no set_reduce_scatter_unused_params",
)


@needs_reduced_unused
@pytest.mark.parametrize("wrap", [one_wrap, wrap_branches])
def test_a_parameter_that_some_workers_use_gets_their_mean(wrap):
    ways = ("a", "b", "a")

    def run():
        rank = dist.get_rank()
        model = wrap(Branches())
        (optimizer,) = adamw(model, plain)
        x, _ = make_batches(2, 1, 3)
        for step in range(2):
            optimizer.zero_grad()
            # every worker runs every wrap, as all workers gather its parameters together
            loss = model(x[step, 0, rank], "a").square().mean() * (ways[rank] == "a")
            other = model(x[step, 0, rank], "b").square().mean() * (ways[rank] == "b")
            (loss + other).backward()
            optimizer.step()
        return whole(model)

    ranks = run_ranks(3, run)
    assert_same(ranks, plain_branches(2, ways))
    c = [n for n, _ in Branches().named_parameters()].index("c.weight")
    assert torch.equal(ranks[0][c], Branches().c.weight)


@needs_reduced_unused
def test_within_one_wrap_workers_may_use_different_parameters():
    ways = ("a", "b", "a")

    def run():
        rank = dist.get_rank()
        model = mh.FSDP(Branches())
        (optimizer,) = adamw(model, plain)
        x, _ = make_batches(1, 1, 3)
        model(x[0, 0, rank], ways[rank]).square().mean().backward()
        optimizer.step()
        return whole(model)

    assert_same(run_ranks(3, run), plain_branches(1, ways))


def test_frozen_parameters_stay_and_thaw():
    def loop(model, optimizers, part):
        def switch(step):
            for name, param in model.named_parameters():
                if name.startswith("2."):
                    param.requires_grad_(step == 0)

        switch(1)
        steps(model, optimizers, part, after=switch)

    compare(loop, wrap=nested)
    compare(loop, wrap=one_wrap)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x):
        return self.last(self.first(x).tanh())


def test_tied_parameters_of_one_wrap_stay_tied():
    def loop(model, optimizers, part):
        steps(model, optimizers, part, loss=lambda m, x, y: m(x).square().mean())

    compare(loop, model=Tied, wrap=one_wrap)


def test_a_module_that_runs_several_times_and_two_forwards_before_one_backward():
    def loss(model, x, y):
        return loss_of(model, x, y) + loss_of(model, x * 2, y)

    def twice():
        torch.manual_seed(0)
        layer = nn.Linear(5, 5)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3)).double()

    def wrap(model, **options):
        model[0] = model[2] = mh.FSDP(model[0], **options)
        return mh.FSDP(model, **options)

    def loop(model, optimizers, part):
        steps(model, optimizers, part, loss=loss)

    compare(loop, model=twice, wrap=wrap)
    compare(loop)


def test_two_backward_passes_of_one_forward():
    def loop(model, optimizers, part):
        x, y = make_batches(1, 1, WORKERS)
        loss = loss_of(model, part(x[0, 0]), part(y[0, 0]))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizers[0].step()

    compare(loop)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model()

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    def wrap(model, **options):
        for i in (0, 2):
            model.layers[i] = mh.FSDP(model.layers[i], **options)
        return mh.FSDP(model, **options)

    def loop(model, optimizers, part):
        steps(model, optimizers, lambda x: part(x).requires_grad_())

    compare(loop, model=Checkpointed, wrap=wrap)


def test_evaluation_in_between_changes_nothing():
    def loop(model, optimizers, part):
        x, _ = make_batches(1, 1, 1)

        def look(step):
            with torch.no_grad():
                model(x[0, 0, 0])
            model.eval()
            model(x[0, 0, 0])
            model.train()

        steps(model, optimizers, part, after=look)

    compare(loop)


def test_a_forward_that_raised_does_not_spoil_the_next():
    def loop(model, optimizers, part):
        with contextlib.suppress(RuntimeError):
            model(torch.ones(2, 7, dtype=torch.float64))
        steps(model, optimizers, part)

    compare(loop)


def test_a_closure():
    def loop(model, optimizers, part):
        x, y = make_batches(STEPS, 1, WORKERS)
        for step in range(STEPS):

            def closure(step=step):
                optimizers[0].zero_grad()
                loss = loss_of(model, part(x[step, 0]), part(y[step, 0]))
                loss.backward()
                return loss

            optimizers[0].step(closure)

    compare(loop)


def test_inputs_that_need_a_gradient_get_it():
    def loop(model, optimizers, part):
        x, y = make_batches(1, 1, 1)
        data = x[0, 0, 0].clone().requires_grad_()
        loss_of(model, data, y[0, 0, 0]).backward()
        return [data.grad]

    compare(loop)


@pytest.mark.parametrize("factors", [dict(gradient_predivide_factor=1.5), {}])
def test_division_of_gradients_before_and_after_the_sum(factors):
    def loop(model, optimizers, part):
        if not factors and isinstance(model, mh.FSDP):
            model.set_gradient_divide_factors(WORKERS, 1.0, recursive=True)
            assert model.gradient_predivide_factor == WORKERS
        steps(model, optimizers, part)

    compare(loop, **factors)


def test_uneven_and_small_parameters():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2), nn.LayerNorm(2)).double()

    def loop(model, optimizers, part):
        steps(model, optimizers, part, loss=lambda m, x, y: m(x).square().mean(), workers=4)

    compare(loop, workers=4, model=build, wrap=one_wrap)


def test_a_wrap_without_parameters_of_its_own():
    def wrap(model, **options):
        inner = nn.Sequential(*(mh.FSDP(m, **options) for m in model))
        return mh.FSDP(inner, **options)

    compare(steps, wrap=wrap)


# -- what is sent ----------------------------------------------------------------------------


def test_bytes_are_those_of_two_gatherings_and_one_averaging(monkeypatch):
    """Half as many again as an all-reduce, which is what resharding after forward costs."""
    sent = []

    def run():
        share, exchange = RankGroup.all_gather_slices, RankGroup.reduce_scatter_slices

        def counted_share(self, bucket, cuts):
            sent.append(("gather", bucket.numel()))
            return share(self, bucket, cuts)

        def counted_exchange(self, bucket, *how):
            sent.append(("average", bucket.numel()))
            return exchange(self, bucket, *how)

        model = nn.Sequential(*(mh.FSDP(nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 2))
        model = mh.FSDP(model)
        x = torch.ones(2, 8)
        model(x).sum().backward()  # makes all ready
        with monkeypatch.context() as patch:
            patch.setattr(RankGroup, "all_gather_slices", counted_share)
            patch.setattr(RankGroup, "reduce_scatter_slices", counted_exchange)
            model(x).sum().backward()
        return [sum(n for kind, n in sent if kind == k) for k in ("gather", "average")]

    inner, root = 3 * 72, 18
    assert run_ranks(2, run) == [[2 * inner + root, inner + root]] * 2


def test_without_our_collectives_on_gloo_the_numbers_are_the_same(monkeypatch):
    monkeypatch.setattr(RankGroup, "on_gloo", lambda self, device: False)
    compare(steps)


@pytest.mark.parametrize("wrap", [one_wrap, nested])
def test_outputs_may_be_views_and_changed_in_place(wrap):
    def build():
        model = make_model()
        model.insert(1, nn.Flatten(0, 1))
        return model

    def loss(model, x, y):
        out = model(x.unsqueeze(0))
        out += 1
        return nn.functional.mse_loss(out, y)

    def loop(model, optimizers, part):
        steps(model, optimizers, part, loss=loss)

    compare(loop, model=build, wrap=wrap)


class ReturnsNothing(nn.Module):
    """Keeps its loss, and returns nothing."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, x, y):
        self.loss = nn.functional.mse_loss(self.inner(x), y)


@on_ranks(2, raises=TypeError, match="Return the output or the loss")
def test_a_forward_that_returns_none_is_an_error_unless_there_is_no_backward():
    model = mh.FSDP(ReturnsNothing())
    x, y = (batches[0, 0, 0] for batches in make_batches(1, 1, 1))
    with torch.no_grad():
        assert model(x, y) is None
    model(x, y)
