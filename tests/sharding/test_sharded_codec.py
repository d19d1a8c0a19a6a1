"""Gradients that travel as codes: one process that rounds in the same way gets the same numbers."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.codec_oracle import ROUNDED, make_model, with_residual
from helpers.ranks import raises_on_ranks, run_ranks
from helpers.sharding_oracle import (
    Lamb,
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    muon_and_adamw,
    one,
    oss,
    plain,
)
from manyhands._core.codec import CODECS
from manyhands._core.encoded_slices import NAMES, EncodedSlices
from manyhands._core.ranks import RankGroup
from manyhands.sharding.zero import _layout

adamw = one(AdamW, lr=0.02, weight_decay=0.1)
sgd = one(SGD, lr=0.05, momentum=0.9)
lamb = one(Lamb, lr=0.02, weight_decay=0.3)
BUCKET = 900  # elements: slices of 300 on three ranks, more than one group of any codec


def large(params, kind=SGD, **options):
    return oss(params, kind, **{"bucket_size": BUCKET, **options})


class Simulated:
    """What each rank would send, in one process: slices of buckets, rounded with a residual."""

    def __init__(self, params, workers, codec, even):
        self.params, self.workers, self.rounded = list(params), workers, ROUNDED[codec]
        self.least = CODECS[codec].size(1, torch.float64)  # bytes of a group
        sizes = [(i, p.numel()) for i, p in reversed(list(enumerate(self.params)))]
        buffers = (
            _layout.even_layout(sizes, workers, BUCKET)
            if even
            else _layout.whole_layout(sizes, workers, BUCKET, [0] * workers)
        )
        self.buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
        self.residuals = {}

    def mean(self, grads):
        """The mean of `grads` of [rank][parameter], where None is no gradient."""
        means = [torch.zeros(p.numel(), dtype=p.dtype) for p in self.params]
        for number, bucket in enumerate(self.buckets):
            total = torch.zeros(bucket.size, dtype=means[0].dtype)
            for rank, own in enumerate(grads):
                total += self.sent(number, bucket, rank, own)
            for place in bucket.ranges:
                means[place.param][place.start : place.stop] = total[
                    place.offset : place.offset + place.size
                ]
        return [m.view_as(p) / self.workers for m, p in zip(means, self.params, strict=True)]

    def sent(self, number, bucket, rank, grads):
        values = torch.zeros(bucket.size, dtype=self.params[0].dtype)
        residual = self.residuals.setdefault((number, rank), torch.zeros_like(values))
        here = torch.ones_like(values)
        for place in bucket.ranges:
            chosen = slice(place.offset, place.offset + place.size)
            if grads[place.param] is None:
                here[chosen] = 0
            else:
                values[chosen] = grads[place.param].flatten()[place.start : place.stop]
        arriving = values.clone()
        for owner in range(self.workers):
            a, b = bucket.cuts[owner], bucket.cuts[owner + 1]
            if owner != rank and 8 * (b - a) > self.least:
                wanted = with_residual(values[a:b], residual[a:b] * here[a:b])
                arriving[a:b] = self.rounded(wanted)
                left_out = wanted - arriving[a:b]
                residual[a:b] = torch.where(here[a:b] == 1, left_out, residual[a:b])
        return arriving


def train(build, codec, *, passes=1, no_sync=True, steps=4, model=make_model, make=large):
    rank, workers = everyone()
    module = model()
    optimizers = build(module, make)
    wrapped = mh.ShardedDataParallel(module, optimizers, codec=codec)
    x, y = make_batches(steps, passes, workers, dtype=next(module.parameters()).dtype)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for a in range(passes):
            silent = no_sync and a < passes - 1
            with wrapped.no_sync() if silent else contextlib.nullcontext():
                (loss_of(wrapped, x[step, a, rank], y[step, a, rank]) / passes).backward()
        for optimizer in optimizers:
            optimizer.step()
    return copied(module.parameters())


def train_simulated(build, codec, workers, *, passes=1, no_sync=True, steps=4, even=True):
    module = make_model()
    (optimizer,) = build(module, plain)
    params = list(module.parameters())
    simulated = Simulated(params, workers, codec, even)
    x, y = make_batches(steps, passes, workers)

    def grads(step, number, rank):
        loss = loss_of(module, x[step, number, rank], y[step, number, rank]) / passes
        return torch.autograd.grad(loss, params)

    for step in range(steps):
        optimizer.zero_grad()
        each = [[grads(step, a, rank) for a in range(passes)] for rank in range(workers)]
        if no_sync:
            sums = [[sum(parts) for parts in zip(*of_rank, strict=True)] for of_rank in each]
            means = [simulated.mean(sums)]
        else:
            means = [simulated.mean([of_rank[a] for of_rank in each]) for a in range(passes)]
        for param, *parts in zip(params, *means, strict=True):
            param.grad = sum(parts)
        optimizer.step()
    return copied(params)


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("name", ["AdamW", "LAMB"])
def test_the_numbers_are_those_of_one_process_that_rounds_in_the_same_way(name, codec):
    build, even = {"AdamW": (adamw, True), "LAMB": (lamb, False)}[name]
    expected = train_simulated(build, codec, 3, even=even)
    assert_same(run_ranks(3, train, build, codec), expected)


@pytest.mark.parametrize("no_sync", [True, False])
def test_passes_of_a_step_are_rounded_when_they_are_sent(no_sync):
    expected = train_simulated(sgd, "int4", 2, passes=3, no_sync=no_sync)
    assert_same(run_ranks(2, train, sgd, "int4", passes=3, no_sync=no_sync), expected)


def test_two_optimizers_have_buckets_of_their_own():
    module = make_model()
    optimizers = muon_and_adamw(module, plain)
    held = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    # Muon has whole matrices, AdamW slices.
    simulated = [
        Simulated(held[0], 2, "int8", even=False),
        Simulated(held[1], 2, "int8", even=True),
    ]
    x, y = make_batches(4, 1, 2)
    for step in range(4):
        losses = [loss_of(module, x[step, 0, rank], y[step, 0, rank]) for rank in range(2)]
        means = [
            one.mean([torch.autograd.grad(loss, params, retain_graph=True) for loss in losses])
            for one, params in zip(simulated, held, strict=True)
        ]
        for params, mean, optimizer in zip(held, means, optimizers, strict=True):
            for param, grad in zip(params, mean, strict=True):
                param.grad = grad
            optimizer.step()
    ranks = run_ranks(2, train, muon_and_adamw, "int8")
    # Muon computes in bfloat16.
    assert_same(ranks, copied(module.parameters()), rtol=1e-3, atol=1e-4)


def test_without_a_codec_nothing_is_encoded(monkeypatch):
    def refuse(*_):
        raise AssertionError("encoded")

    monkeypatch.setattr(EncodedSlices, "__init__", refuse)
    for codec in (None, "float32"):
        run_ranks(2, train, adamw, codec)


def test_one_worker_sends_nothing_and_rounds_nothing():
    module = make_model()
    (optimizer,) = sgd(module, plain)
    x, y = make_batches(4, 1, 1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(module, x[step, 0, 0], y[step, 0, 0]).backward()
        optimizer.step()
    assert_same([train(sgd, "int4")], copied(module.parameters()), rtol=0, atol=0)


@pytest.mark.parametrize("codec", NAMES)
def test_the_ready_made_collectives_bring_the_same_bytes(codec, monkeypatch):
    expected = run_ranks(3, train, adamw, codec)
    monkeypatch.setattr(RankGroup, "on_gloo", lambda self, device: False)
    assert_same(run_ranks(3, train, adamw, codec), expected[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_any_precision_are_encoded(dtype):
    build = one(SGD, lr=0.05)

    def run(codec):
        return train(build, codec, model=lambda: make_model(dtype))

    exact = run_ranks(2, run, None)[0]
    assert_same(run_ranks(2, run, "int8"), exact, rtol=0.1, atol=0.02)


# -- limits worked out on paper --------------------------------------------------------------------


class Slopes(nn.Module):
    """A sum of weights times constants: the constants are the gradient."""

    def __init__(self, slopes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(slopes))
        self.register_buffer("slopes", slopes)

    def forward(self, factor=1.0):
        return (self.weight * self.slopes).sum() * factor


def descend(slopes, codec, steps, workers=2):
    def run():
        module = Slopes(slopes)
        optimizer = oss(module.parameters(), SGD, lr=1.0, bucket_size=4096)
        model = mh.ShardedDataParallel(module, optimizer, codec=codec)
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        return module.weight.detach()

    return run_ranks(workers, run)


@pytest.mark.parametrize("codec", NAMES)
def test_gradients_that_codes_can_express_arrive_exactly(codec):
    signs = torch.where(torch.arange(2000) % 3 == 0, -1.0, 1.0)
    scale = {"int8": 127 / 64, "int4": 7 / 64, "fp4": 1.0}[codec]
    for weight in descend(scale * signs, codec, steps=5):
        assert torch.equal(weight, -5 * scale * signs)


@pytest.mark.parametrize(("codec", "step"), [("int8", 1 / 127), ("int4", 1 / 7), ("fp4", 1.0)])
def test_what_rounding_leaves_out_is_sent_later_so_that_errors_do_not_add_up(codec, step):
    torch.manual_seed(2)
    slopes = torch.randn(2000)
    for steps in (1, 10, 60):
        error = (descend(slopes, codec, steps)[0] + steps * slopes).abs().max()
        # One of two ranks has rounded, and has at most about half of a step left over.
        assert error < 0.5 * 0.6 * step * slopes.abs().max() + 1e-4


# -- what is sent ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "least"), [("int8", 0.26), ("int4", 0.14), ("fp4", 0.13)])
def test_the_bytes_are_as_few_as_the_codec_says(codec, least, monkeypatch):
    sent = []
    exchange = RankGroup.all_to_all

    def counted(self, outgoing, sizes, tag):
        sent.append(sum(data.nbytes for data in outgoing))
        return exchange(self, outgoing, sizes, tag)

    monkeypatch.setattr(RankGroup, "all_to_all", counted)

    def run():
        module = nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 10))
        optimizer = mh.OSS(module.parameters(), optim=AdamW)
        model = mh.ShardedDataParallel(module, optimizer, codec=codec)
        model(torch.randn(4, 100)).sum().backward()
        return sum(sent), sum(p.nbytes for p in module.parameters())

    for bytes_sent, of_parameters in run_ranks(4, run):
        assert bytes_sent <= least * of_parameters * 3 / 4


def test_a_slice_of_a_few_elements_travels_as_it_is():
    slopes = torch.tensor([0.1, 0.7, 1e-9, 3.0])
    for weight in descend(slopes, "int8", steps=1):
        assert torch.equal(weight, -slopes)


def test_ranks_that_own_nothing_of_a_bucket_take_part():
    slopes = torch.where(torch.arange(2000) % 3 == 0, -127 / 64, 127 / 64)

    def run():
        module = Slopes(slopes)  # a single parameter, which one rank owns
        optimizer = mh.OSS(module.parameters(), optim=SGD, layout="whole", lr=1.0)
        model = mh.ShardedDataParallel(module, optimizer, codec="int8")
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        return module.weight.detach()

    for weight in run_ranks(3, run):
        assert torch.equal(weight, -3 * slopes)


def test_residuals_take_the_memory_of_what_is_sent():
    def run():
        module = make_model()
        optimizer = large(module.parameters(), AdamW)
        model = mh.ShardedDataParallel(module, optimizer, codec="int8")
        loss_of(model, *(batch[0, 0, 0] for batch in make_batches(1, 1, 1))).backward()
        buckets = model._reducer._buckets
        held = sum(r.numel() for b in buckets for r in b.encoded._residuals.values())
        return held, sum(b.flat.layout.size for b in buckets)

    for held, size in run_ranks(3, run):
        assert held <= size * 2 / 3 + 1


# -- parameters without a gradient, frozen ones ----------------------------------------------------


class Branches(nn.Module):
    """Two branches, of which a loss may use either or both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left = nn.Linear(5, 120, dtype=torch.float64)
        self.right = nn.Linear(5, 120, dtype=torch.float64)

    def forward(self, x, use):
        out = x.sum() * 0
        for name in use:
            out = out + getattr(self, name)(x).square().mean()
        return out


def test_a_parameter_without_a_gradient_keeps_its_residual_for_the_next_one():
    """`uses` is by step and rank. Where no rank uses a branch, its parameters stay."""
    both = ("left", "right")
    uses = [[both, both], [("left",), ("right",)], [("left",), ("left",)], [both, ()], [both, both]]
    x, _ = make_batches(len(uses), 1, 2)

    def run():
        rank, _ = everyone()
        module = Branches()
        optimizer = large(module.parameters(), SGD, lr=0.1)
        model = mh.ShardedDataParallel(module, optimizer, codec="int4")
        for step, used in enumerate(uses):
            optimizer.zero_grad()
            if used[rank]:
                model(x[step, 0, rank], used[rank]).backward()
            optimizer.step()
        return copied(module.parameters())

    module = Branches()
    params = list(module.parameters())
    simulated = Simulated(params, 2, "int4", even=True)
    for step, used in enumerate(uses):
        grads = [
            torch.autograd.grad(module(x[step, 0, rank], used[rank]), params, allow_unused=True)
            if used[rank]
            else [None] * 4
            for rank in range(2)
        ]
        means = simulated.mean(grads)
        with torch.no_grad():
            for number, param in enumerate(params):
                if any(of_rank[number] is not None for of_rank in grads):
                    param -= 0.1 * means[number]
    assert_same(run_ranks(2, run), copied(params))


def test_parameters_may_freeze_and_thaw():
    x, y = make_batches(6, 1, 2)

    def run(codec):
        rank, _ = everyone()
        module = make_model()
        optimizer = large(module.parameters(), SGD, lr=0.05)
        model = mh.ShardedDataParallel(
            module, optimizer, codec=codec, warn_on_trainable_params_changed=False
        )
        for step in range(6):
            module[2].requires_grad_(step not in (2, 3))
            before = copied(module[2].parameters())
            optimizer.zero_grad()
            loss_of(model, x[step, 0, rank], y[step, 0, rank]).backward()
            optimizer.step()
            assert torch.equal(before[0], module[2].weight) == (step in (2, 3))
        return copied(module.parameters())

    assert_same(run_ranks(2, run, "int8"), run_ranks(2, run, None)[0], rtol=0.02, atol=0.002)


def test_a_module_that_is_converted_goes_on():
    def run():
        module = make_model()
        optimizer = large(module.parameters(), SGD, lr=0.05)
        model = mh.ShardedDataParallel(module, optimizer, codec="int8")
        for dtype in (torch.float64, torch.bfloat16):
            optimizer.zero_grad()
            model.to(dtype)
            x, y = make_batches(1, 1, 2, dtype=dtype)
            rank, _ = everyone()
            loss_of(model, x[0, 0, rank], y[0, 0, rank]).backward()
            optimizer.step()
        return copied(module.parameters())

    first, second = run_ranks(2, run)
    assert_same([first, second], first)
    assert all(p.dtype == torch.bfloat16 and torch.isfinite(p).all() for p in first)


# -- gradients that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_overflow_is_seen_by_the_owner_and_forgotten_by_the_sender(codec, bad):
    torch.manual_seed(2)
    slopes = torch.randn(2000)

    def run():
        module = Slopes(slopes)
        optimizer = oss(module.parameters(), SGD, lr=1.0, bucket_size=4096)
        model = mh.ShardedDataParallel(module, optimizer, codec=codec)
        scaler = mh.ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1000)
        weights = []
        for step in range(3):
            optimizer.zero_grad()
            overflows = step == 1 and dist.get_rank() == 1
            spoil = torch.tensor([7])  # an element that rank 0 owns
            hook = module.weight.register_hook(
                lambda g, at=spoil if overflows else spoil[:0]: g.index_fill(0, at, bad)
            )
            scaler.scale(model()).backward()
            hook.remove()
            scaler.step(optimizer)
            scaler.update()
            weights.append(module.weight.detach().clone())
        residuals = model._reducer._buckets[0].encoded._residuals.values()
        return [*weights, torch.cat([*residuals]), torch.tensor(scaler.get_scale())]

    for first, second, third, residual, scale in run_ranks(2, run):
        assert torch.equal(first, second)  # skipped on both ranks
        assert scale == 2.0
        assert torch.isfinite(third).all() and torch.isfinite(residual).all()
        largest = slopes.abs().max()
        near = {"int8": 0.01, "int4": 0.15, "fp4": 0.5}[codec]
        assert (third + 2 * slopes).abs().max() <= near * largest


# -- gradients that no step has used ---------------------------------------------------------------


def norms_that_arrive(codec, factors, skipped, clear=True):
    torch.manual_seed(2)
    module = Slopes(torch.randn(2000))
    optimizer = oss(module.parameters(), SGD, lr=1.0, bucket_size=4096)
    model = mh.ShardedDataParallel(module, optimizer, codec=codec)
    norms = []
    for step, factor in enumerate(factors):
        (model() * factor).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        if step not in skipped:
            optimizer.step()
        if clear or step not in skipped:
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("skipped", [(1,), ()])
def test_a_gradient_that_is_skipped_or_clipped_does_not_come_back(codec, skipped):
    factors = (1, 1e4, 1, 1)
    exact = run_ranks(2, norms_that_arrive, None, factors, skipped)[0]
    for norms in run_ranks(2, norms_that_arrive, codec, factors, skipped):
        assert norms == pytest.approx(exact, rel=0.15)


def test_what_is_cleared_without_a_step_leaves_no_residual():
    def left(clear):
        module = Slopes(torch.randn(2000, generator=torch.Generator().manual_seed(1)))
        optimizer = oss(module.parameters(), SGD, lr=1.0, bucket_size=4096)
        model = mh.ShardedDataParallel(module, optimizer, codec="int8")
        for step in range(2):
            optimizer.zero_grad()
            model().backward()
            if step == 0 or not clear:
                optimizer.step()
        if clear:
            model.zero_grad()
        return [len(bucket.encoded._residuals) for bucket in model._reducer._buckets]

    assert run_ranks(2, left, False) == [[1], [1]]
    assert run_ranks(2, left, True) == [[0], [0]]


def test_a_state_that_is_loaded_leaves_no_residual():
    def left():
        module = Slopes(torch.randn(2000, generator=torch.Generator().manual_seed(1)))
        optimizer = oss(module.parameters(), SGD, lr=1.0, bucket_size=4096)
        model = mh.ShardedDataParallel(module, optimizer, codec="int8")
        model().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(-1)
        optimizer.load_state_dict(optimizer.state_dict())
        return [len(bucket.encoded._residuals) for bucket in model._reducer._buckets]

    assert run_ranks(2, left) == [[0], [0]]


# -- with the rest of the library ------------------------------------------------------------------


def test_a_scaling_rule_finds_about_the_same_gain():
    def run(codec):
        rank, workers = everyone()
        module = make_model()
        optimizer = mh.AdaScale(large(module.parameters(), SGD, lr=0.05))
        model = mh.ShardedDataParallel(module, optimizer, codec=codec)
        x, y = make_batches(5, 1, workers)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, x[step, 0, rank], y[step, 0, rank]).backward()
            optimizer.step()
        return optimizer.gain()

    exact = run_ranks(2, run, None)
    rounded = run_ranks(2, run, "int8")
    assert rounded[0] == rounded[1] == pytest.approx(exact[0], rel=0.01)


def test_the_norm_for_clipping_is_that_of_what_arrived():
    def run():
        rank, workers = everyone()
        module = make_model()
        optimizer = large(module.parameters(), SGD, lr=0.05)
        model = mh.ShardedDataParallel(module, optimizer, codec="int4")
        x, y = make_batches(1, 1, workers)
        loss_of(model, x[0, 0, rank], y[0, 0, rank]).backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()

    module = make_model()
    params = list(module.parameters())
    x, y = make_batches(1, 1, 2)
    grads = [torch.autograd.grad(loss_of(module, x[0, 0, r], y[0, 0, r]), params) for r in (0, 1)]
    means = Simulated(params, 2, "int4", even=True).mean(grads)
    expected = torch.stack([mean.norm() for mean in means]).norm().item()
    assert run_ranks(2, run) == pytest.approx([expected] * 2, rel=1e-9)


# -- mistakes --------------------------------------------------------------------------------------


def wrapped_with(optimizer_options=None, **options):
    module = make_model()
    optimizer = oss(module.parameters(), SGD, **(optimizer_options or {}))
    return mh.ShardedDataParallel(module, optimizer, **options)


MISTAKES = [
    ({"codec": "int2"}, "codec must be one of int8, int4, fp4, or None.*'int2'"),
    ({"codec": "bfloat16"}, "codec must be one of"),
    ({"codec": "int8", "reduce_dtype": torch.bfloat16}, "both say how gradients travel"),
    ({"codec": "int8", "reduce_fp16": True}, "both say how gradients travel"),
    (
        {"codec": "int4", "optimizer_options": {"shared_memory": True}},
        "no effect with shared_memory=True",
    ),
]


@pytest.mark.parametrize(("options", "match"), MISTAKES)
def test_mistakes_say_what_to_do_on_all_ranks(options, match):
    raises_on_ranks(2, ValueError, wrapped_with, match=match, **options)


def test_one_worker_makes_the_same_mistakes():
    with pytest.raises(ValueError, match="codec must be one of"):
        wrapped_with(codec="int2")


def test_ranks_that_give_different_codecs_are_told_so():
    def run():
        wrapped_with(codec="int8" if dist.get_rank() else None)

    raises_on_ranks(3, ValueError, run, match="values of codec: rank 0: None; ranks 1, 2: int8")
