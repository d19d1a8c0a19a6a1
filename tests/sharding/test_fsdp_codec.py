"""Sharded parameters, gradients as codes: one process that rounds in the same way agrees."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.codec_oracle import ROUNDED, make_model, with_residual
from helpers.ranks import raises_on_ranks, run_ranks
from helpers.sharding_oracle import assert_same, copied, everyone, loss_of, make_batches, oss
from manyhands._core.codec import CODECS
from manyhands._core.encoded_slices import NAMES, EncodedSlices
from manyhands._core.ranks import RankGroup

STEPS = 4


def nested(model, **options):
    for number in (0, 2):
        model[number] = mh.FSDP(model[number], **options)
    return mh.FSDP(model, **options)


def gather(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


def train(codec, *, passes=1, no_sync=True, wrap=nested, kind=AdamW, **options):
    rank, workers = everyone()
    dtype = torch.float32 if options.get("mixed_precision") else torch.float64
    model = wrap(make_model(dtype), codec=codec, **options)
    optimizer = kind(model.parameters(), lr=0.02)
    x, y = make_batches(STEPS, passes, workers, dtype=dtype)
    for step in range(STEPS):
        optimizer.zero_grad()
        for a in range(passes):
            silent = no_sync and a < passes - 1
            with model.no_sync() if silent else contextlib.nullcontext():
                (loss_of(model, x[step, a, rank], y[step, a, rank]) / passes).backward()
        optimizer.step()
    return gather(model)


class Simulated:
    """One wrap: what each rank would send of its gradients to each owner, rounded."""

    def __init__(self, workers, codec):
        self.workers, self.rounded = workers, ROUNDED[codec]
        self.least = CODECS[codec].size(1, torch.float64)
        self.residuals = {}

    def mean(self, grads):
        """The mean of `grads` of [rank][parameter]; each is cut along its first dimension."""
        means = [torch.zeros_like(grad) for grad in grads[0]]
        for owner in range(self.workers):
            for rank, of_rank in enumerate(grads):
                chunks = [self.chunk(grad, owner) for grad in of_rank]
                sent = torch.cat([chunk.flatten() for chunk in chunks])
                if owner != rank and 8 * len(sent) > self.least:
                    wanted = with_residual(sent, self.residuals.get((rank, owner), 0 * sent))
                    sent = self.rounded(wanted)
                    self.residuals[rank, owner] = wanted - sent
                parts = sent.split([chunk.numel() for chunk in chunks])
                for mean, part, chunk in zip(means, parts, chunks, strict=True):
                    rows = mean[owner * len(chunk) : (owner + 1) * len(chunk)]
                    rows += part.view_as(chunk)[: len(rows)] / self.workers
        return means

    def chunk(self, grad, owner):
        """An owner's rows, filled up with zeros."""
        rows = -(-len(grad) // self.workers)
        own = grad[owner * rows : (owner + 1) * rows]
        return torch.cat([own, own.new_zeros(rows - len(own), *grad.shape[1:])])


def train_simulated(codec, workers, *, passes=1, no_sync=True, groups=((0, 1), (2, 3), (4, 5))):
    module = make_model()
    params = list(module.parameters())
    optimizer = AdamW(params, lr=0.02)
    wraps = [(Simulated(workers, codec), [params[i] for i in group]) for group in groups]
    x, y = make_batches(STEPS, passes, workers)

    def grads(step, number, rank, chosen):
        loss = loss_of(module, x[step, number, rank], y[step, number, rank]) / passes
        return torch.autograd.grad(loss, chosen)

    for step in range(STEPS):
        for simulated, chosen in wraps:
            each = [[grads(step, a, r, chosen) for a in range(passes)] for r in range(workers)]
            if no_sync:
                sums = [[sum(parts) for parts in zip(*of_rank, strict=True)] for of_rank in each]
                means = [simulated.mean(sums)]
            else:
                means = [simulated.mean([of_rank[a] for of_rank in each]) for a in range(passes)]
            for param, *parts in zip(chosen, *means, strict=True):
                param.grad = sum(parts)
        optimizer.step()
    return copied(params)


@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("overlap", [True, False])
def test_the_numbers_are_those_of_one_process_that_rounds_in_the_same_way(codec, overlap):
    expected = train_simulated(codec, 3)
    assert_same(run_ranks(3, train, codec, overlap=overlap), expected)


@pytest.mark.parametrize("no_sync", [True, False])
def test_passes_of_a_step_are_rounded_when_they_are_sent(no_sync):
    whole = ((0, 1, 2, 3, 4, 5),)
    expected = train_simulated("int8", 2, passes=3, no_sync=no_sync, groups=whole)
    ranks = run_ranks(2, train, "int8", passes=3, no_sync=no_sync, wrap=mh.FSDP)
    assert_same(ranks, expected)


def test_the_ready_made_collectives_bring_the_same_bytes(monkeypatch):
    expected = run_ranks(3, train, "int8")
    monkeypatch.setattr(RankGroup, "on_gloo", lambda self, device: False)
    assert_same(run_ranks(3, train, "int8"), expected[0], rtol=1e-12, atol=1e-14)


def test_without_a_codec_nothing_is_encoded(monkeypatch):
    def refuse(*_):
        raise AssertionError("encoded")

    monkeypatch.setattr(EncodedSlices, "__init__", refuse)
    for codec in (None, "float32"):
        run_ranks(2, train, codec)


@pytest.mark.parametrize("fp32", [False, True])
def test_gradients_in_bfloat16_are_encoded(fp32):
    options = {
        "mixed_precision": True,
        "compute_dtype": torch.bfloat16,
        "fp32_reduce_scatter": fp32,
        "kind": SGD,
    }
    exact = run_ranks(2, train, None, **options)
    rounded = run_ranks(2, train, "int8", **options)
    assert_same(rounded, exact[0], rtol=0.1, atol=0.02)
    assert not torch.equal(rounded[0][0], exact[0][0])


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_divisors_of_gradients_apply(factor):
    exact = run_ranks(2, train, None, kind=SGD, gradient_predivide_factor=factor)
    rounded = run_ranks(2, train, "int8", kind=SGD, gradient_predivide_factor=factor)
    assert_same(rounded, exact[0], rtol=0.02, atol=0.002)


def test_parameters_may_freeze_and_thaw():
    x, y = make_batches(6, 1, 2)

    def run(codec):
        rank, _ = everyone()
        model = mh.FSDP(make_model(), codec=codec)
        optimizer = SGD(model.parameters(), lr=0.05)
        for step in range(6):
            model.module[2].requires_grad_(step not in (2, 3))
            optimizer.zero_grad()
            loss_of(model, x[step, 0, rank], y[step, 0, rank]).backward()
            optimizer.step()
        return gather(model)

    assert_same(run_ranks(2, run, "int8"), run_ranks(2, run, None)[0], rtol=0.02, atol=0.002)


class Heads(nn.Module):
    """Two parameters of one size, of which each forward uses one; their gradients are given."""

    def __init__(self, sizes=(100.0, 0.01), dtype=torch.float32):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.heads = nn.ParameterList(torch.zeros(2000, dtype=dtype) for _ in sizes)
        for number, size in enumerate(sizes):
            slope = torch.randn(2000, generator=draw, dtype=dtype) * size
            self.register_buffer(f"slope{number}", slope, persistent=False)

    def forward(self, number, factor=1.0):
        return (self.heads[number] * getattr(self, f"slope{number}")).sum().abs() * factor


def weights_after(codec, calls, sends_unused=True, dtype=torch.float32, skipped=()):
    if not sends_unused and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        del FSDPModule.set_reduce_scatter_unused_params  # in this process, a fork
    model = mh.FSDP(Heads(dtype=dtype), codec=codec)
    optimizer = SGD(model.parameters(), lr=1.0)
    for step, call in enumerate(calls):
        optimizer.zero_grad()
        model(*call).backward()
        if step not in skipped:
            optimizer.step()
    return gather(model)


@pytest.mark.parametrize("sends_unused", [True, False])
def test_what_is_left_out_of_one_parameter_is_not_added_to_another(sends_unused):
    calls = [(0,), (1,), (0,), (1,)]
    exact = run_ranks(2, weights_after, None, calls, sends_unused)[0]
    for rounded in run_ranks(2, weights_after, "int8", calls, sends_unused):
        for a, b in zip(rounded, exact, strict=True):
            assert (a - b).abs().max() <= 0.02 * b.abs().max()


@pytest.mark.parametrize("codec", NAMES)
def test_a_gradient_that_is_skipped_does_not_come_back(codec):
    calls = [(0, 1.0), (0, 1e4), (0, 1.0)]
    exact = run_ranks(2, weights_after, None, calls, skipped=(1,))[0][0]
    for rounded in run_ranks(2, weights_after, codec, calls, skipped=(1,)):
        assert (rounded[0] - exact).norm() <= 0.2 * exact.norm()


def test_complex_gradients_travel_as_they_are():
    calls, options = [(0,), (1,)], {"dtype": torch.complex64}
    exact = run_ranks(2, weights_after, None, calls, **options)[0]
    assert_same(run_ranks(2, weights_after, "int8", calls, **options), exact)


def test_a_wrap_that_is_frozen_keeps_no_residual():
    def left():
        model = nested(make_model(torch.float32), codec="int8")
        sizes = []
        for frozen in (False, True, False):
            model.module[0].requires_grad_(not frozen)
            model(torch.ones(2, 5)).sum().backward()
            hook = model.module[0]._engine.module._get_fsdp_state()._fsdp_param_group
            encoded = hook._reduce_scatter_comm._encoded
            sizes.append(len(encoded._residuals))
            model.zero_grad()
        return sizes

    assert run_ranks(2, left) == [[1, 0, 1], [1, 0, 1]]


@pytest.mark.parametrize("codec", NAMES)
def test_an_overflow_is_seen_by_the_owner_and_forgotten_by_the_sender(codec):
    x, y = make_batches(3, 1, 2, dtype=torch.float32)

    def run():
        rank, _ = everyone()
        model = nested(make_model(torch.float32), codec=codec)
        optimizer = SGD(model.parameters(), lr=0.05)
        scaler = mh.ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1000)
        states = []
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, x[step, 0, rank], y[step, 0, rank])
            if (step, rank) == (1, 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            states.append(gather(model))
        return [*states, scaler.get_scale()]

    for first, second, third, scale in run_ranks(2, run):
        assert all(map(torch.equal, first, second))  # skipped on both ranks
        assert scale == 2.0
        assert all(torch.isfinite(tensor).all() for tensor in third)
        assert not any(map(torch.equal, second, third))


def test_gradients_take_a_quarter_of_the_bytes(monkeypatch):
    sent = []
    exchange = RankGroup.all_to_all

    def counted(self, outgoing, sizes, tag):
        sent.append(sum(data.nbytes for data in outgoing))
        return exchange(self, outgoing, sizes, tag)

    monkeypatch.setattr(RankGroup, "all_to_all", counted)

    def run():
        module = nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 12))
        size = sum(p.nbytes for p in module.parameters())
        model = mh.FSDP(module, codec="int8")
        model(torch.randn(4, 100)).sum().backward()
        return sum(sent), size

    for bytes_sent, size in run_ranks(4, run):
        assert bytes_sent <= 0.26 * size * 3 / 4


def test_one_rank_rounds_nothing():
    (alone,) = run_ranks(1, train, "int4")
    (exact,) = run_ranks(1, train, None)
    assert_same([alone], exact, rtol=0, atol=0)


def test_an_unknown_codec_is_an_error_on_all_ranks():
    def run():
        mh.FSDP(nn.Linear(4, 4), codec="int2")

    raises_on_ranks(2, ValueError, run, match="codec must be one of int8, int4, fp4.*'int2'")


def test_ranks_that_give_different_codecs_are_told_so():
    def run():
        mh.FSDP(nn.Linear(4, 4), codec="int8" if dist.get_rank() else None)

    raises_on_ranks(2, ValueError, run, match="codec: rank 0: None; rank 1: int8")


@pytest.mark.parametrize(
    "wrap", [mh.FSDP, lambda m: mh.ShardedDataParallel(m, oss(m.parameters()))]
)
def test_a_modules_own_codec_is_not_hidden(wrap):
    module = nn.Linear(4, 4)
    module.codec = nn.Identity()
    assert wrap(module).codec is module.codec
