"""The statistics are right, whatever way the gradients are computed.

Each test takes the small batches' gradients one at a time with plain autograd, works the
estimate out by hand, and compares with what the hooks have measured.
"""

import contextlib
import copy
import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.scaling_oracle import TrunkAndExtra, loss_of, make_batches, make_model


def sgd(model, **options):
    return mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), **options)


def by_hand(small_gradients):
    """(sqr, var) of one step whose small batches have these gradients, at scale n."""
    n = len(small_gradients)
    flat = torch.stack(
        [torch.cat([g.double().flatten() for g in gradient]) for gradient in small_gradients]
    )
    small = flat.square().sum(dim=1).mean()
    big = flat.mean(dim=0).square().sum()
    return float((n * big - small) / (n - 1)), float((small - big) * n / (n - 1))


def grads_alone(model, losses):
    """The gradient of each loss, one at a time, zeros where a parameter takes no part."""
    params = list(model.parameters())
    result = []
    for loss in losses:
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        pairs = zip(params, grads, strict=True)
        result.append([torch.zeros_like(p) if g is None else g.to_dense() for p, g in pairs])
    return result


def check(optimizer, gradients, rel=1e-5):
    sqr, var = by_hand(gradients)
    assert sum(optimizer.noise.raw_sqr) == pytest.approx(sqr, rel=rel)
    assert sum(optimizer.noise.raw_var) == pytest.approx(var, rel=rel)


def check_passes(optimizer, model, loss):
    """Two backward passes, of `loss(0)` and `loss(1)`: the statistics are those by hand."""
    expected = grads_alone(model, [loss(a) for a in range(2)])
    for a in range(2):
        (loss(a) / 2).backward()
    check(optimizer, expected)


# -- the ways a loop may clear its gradients ----------------------------------------------------


@pytest.mark.parametrize("who", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("abandoned", [0, 1, 2])
def test_a_step_starts_clean_however_gradients_are_cleared(who, set_to_none, abandoned):
    """Also after backward passes that no step followed."""
    model = make_model()
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    x, y = make_batches(4, 2)
    for step in range(4):
        if step == 2:  # passes of batches that are then given up
            for a in range(abandoned):
                (loss_of(model, x[0, a] * 9, y[0, a]) / 2).backward()
        (optimizer if who == "optimizer" else model).zero_grad(set_to_none=set_to_none)
        before = optimizer._core.history.average
        for a in range(2):
            (loss_of(model, x[step, a], y[step, a]) / 2).backward()
        seen = optimizer.noise
        fresh = copy.deepcopy(model)
        losses = [loss_of(fresh, x[step, a], y[step, a]) for a in (0, 1)]
        _, var = by_hand(grads_alone(fresh, losses))
        s = optimizer.smoothing
        weight = before.var.seen[0] if step else 0.0
        total = before.var.mean[0] * weight if step else 0.0
        assert seen.raw_var[0] == pytest.approx(
            (s * total + (1 - s) * var) / (s * weight + 1 - s), rel=1e-5
        )
        optimizer.step()
    assert optimizer.snapshot()["step"] == 4


def test_autograd_grad_is_not_a_backward_pass():
    model = make_model()
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    x, y = make_batches(1, 2)
    torch.autograd.grad(loss_of(model, x[0, 0], y[0, 0]), list(model.parameters()))
    for a in range(2):
        (loss_of(model, x[0, a], y[0, a]) / 2).backward()
        torch.autograd.grad(loss_of(model, x[0, 0], y[0, 0]), list(model.parameters()))
    check(optimizer, grads_alone(model, [loss_of(model, x[0, a], y[0, a]) for a in range(2)]))
    optimizer.step()


def test_an_error_in_the_middle_of_backward_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise OverflowError("on purpose")

    model = make_model()
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    x, y = make_batches(1, 2)
    for _ in range(2):
        with pytest.raises(OverflowError):
            hidden = Fails.apply(torch.tanh(model[0](x[0, 0])))
            nn.functional.mse_loss(model[2](hidden), y[0, 0]).backward()
        model.zero_grad()
    check_passes(optimizer, model, lambda a: loss_of(model, x[0, a], y[0, a]))


def test_clipping_changes_the_step_and_not_the_statistics():
    model = make_model()
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    x, y = make_batches(1, 2)
    expected = grads_alone(model, [loss_of(model, x[0, a], y[0, a]) for a in range(2)])
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for a in range(2):
        (loss_of(model, x[0, a], y[0, a]) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    check(optimizer, expected)
    optimizer.step()
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    assert float(moved.norm()) == pytest.approx(0.1 * optimizer.factors[0] * 1e-3, rel=1e-3)


# -- the ways a gradient may be computed -------------------------------------------------------


class Checkpointed(nn.Module):
    """Two checkpointed layers, optionally the same one twice, and perhaps a plain head."""

    def __init__(self, reentrant, shared, head):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.second = self.first if shared else nn.Linear(3, 3)
        self.head = nn.Linear(3, 2) if head else nn.Identity()
        self.reentrant = reentrant

    def forward(self, x):
        x = x.detach().requires_grad_()
        for layer in (self.first, self.second):
            if self.reentrant is None:
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(
                    lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=self.reentrant
                )
        return self.head(x)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(
    ("reentrant", "shared"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_activation_checkpointing(reentrant, shared, head):
    model = Checkpointed(reentrant, shared, head).double()
    alone = copy.deepcopy(model)
    alone.reentrant = None
    optimizer = sgd(model, num_gradients_to_accumulate=2, smoothing=0.0)
    x, _ = make_batches(3, 2, dtype=torch.float64)
    for step in range(3):
        optimizer.zero_grad()
        alone.load_state_dict(model.state_dict())
        for a in range(2):
            # each checkpoint of a shared layer is a backward pass inside the pass
            with optimizer.one_sample() if reentrant and shared else contextlib.nullcontext():
                (model(x[step, a]).square().mean() / 2).backward()
        check(optimizer, grads_alone(alone, [alone(x[step, a]).square().mean() for a in range(2)]))
        optimizer.step()


def test_reentrant_checkpoints_that_share_a_layer_are_an_error_that_says_what_to_do():
    model = Checkpointed(True, True, True)
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    for _ in range(2):
        (model(torch.ones(4, 3)).square().mean() / 2).backward()
    with pytest.raises(RuntimeError, match=r"use_reentrant=False to .* inside one_sample\(\)"):
        optimizer.step()


def test_several_losses_of_one_micro_batch_are_one_sample():
    model = make_model()
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    x, y = make_batches(2, 2)
    for step in range(2):
        optimizer.zero_grad()
        before = optimizer.noise
        expected = grads_alone(model, [loss_of(model, x[step, a], y[step, a]) for a in range(2)])
        for a in range(2):
            out = model(x[step, a])
            first, second = ((out - y[step, a]) ** 2).mean(dim=0) / 2
            with optimizer.one_sample():
                (first / 2).backward(retain_graph=True)
                (second / 2).backward()
        if step == 0:
            check(optimizer, expected)
        assert optimizer.noise != before
        optimizer.step()


def test_a_parameter_without_gradient_in_a_step_counts_as_zero():
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1), "never": nn.Linear(3, 1)})
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    x, _ = make_batches(1, 2)
    uses = ["ab", "a"]
    check_passes(optimizer, model, lambda a: sum(model[name](x[0, a]).sum() for name in uses[a]))
    optimizer.step()
    assert model["never"].weight.grad is None


def test_frozen_parameters_are_measured_from_when_they_thaw():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = sgd(model, num_gradients_to_accumulate=2, smoothing=0.0)
    assert not model[0].weight.requires_grad
    x, y = make_batches(2, 2)
    for step in range(2):
        optimizer.zero_grad()
        if step == 1:
            model.requires_grad_(True)
        trained = nn.ParameterList([p for p in model.parameters() if p.requires_grad])
        check_passes(
            optimizer, trained, lambda a, step=step: loss_of(model, x[step, a], y[step, a])
        )
        optimizer.step()


def test_sparse_gradients():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    index = torch.tensor([[1, 2, 2], [2, 3, 9]])
    dense = nn.Embedding.from_pretrained(model.weight.detach().clone(), freeze=False)
    expected = grads_alone(dense, [dense(i).square().mean() for i in index])
    for i in index:
        (model(i).square().mean() / 2).backward()
    check(optimizer, expected)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    for i in index:
        (model(i).square().mean() / 2).backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_measured_in_float32(dtype):
    """Squares of fp16 gradients overflow at 256; their norms do not, in float32."""
    model = nn.Linear(64, 64, bias=False).to(dtype)
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    coefficients = torch.randn(2, 64, 64) * 400
    for a in range(2):
        (model.weight * coefficients[a].to(dtype)).sum().backward()
    # (the mean is rounded to the dtype as well, which the difference of the norms amplifies)
    check(optimizer, [[c.to(dtype).float() * 2] for c in coefficients], rel=5e-2)


def test_a_large_gradient_is_summed_exactly():
    """Adding ten million squares in float32 one after the other is 7e-4 off."""
    model = nn.Linear(4096, 600, bias=False)
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    coefficients = torch.randn(2, 600, 4096) + 0.5
    for a in range(2):
        ((model.weight * coefficients[a]).sum() / 2).backward()
    check(optimizer, [[c] for c in coefficients], rel=1e-6)


@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_gradients_that_do_not_lie_in_order(layout):
    weight = torch.randn(64, 32, 8, 8)
    if layout == "channels_last":
        weight = weight.to(memory_format=torch.channels_last)
    else:
        weight = weight.transpose(0, 3)
    model = nn.ParameterList([nn.Parameter(weight)])
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    coefficients = [torch.randn_like(weight) + 1.0 for _ in range(2)]
    check_passes(optimizer, model, lambda a: (model[0] * coefficients[a]).sum())


def test_compiled_models():
    model = make_model()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    x, y = make_batches(1, 2)
    expected = grads_alone(model, [loss_of(model, x[0, a], y[0, a]) for a in range(2)])
    for a in range(2):
        (loss_of(compiled, x[0, a], y[0, a]) / 2).backward()
    check(optimizer, expected)
    optimizer.step()


def test_double_backward_through_the_gradient():
    """A gradient penalty: backward of a loss that contains a gradient with respect to x."""
    model = make_model()
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    x, y = make_batches(1, 2)

    def loss(a):
        inputs = x[0, a].clone().requires_grad_()
        value = loss_of(model, inputs, y[0, a])
        (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
        return value + slope.square().sum()

    check_passes(optimizer, model, loss)


# -- under DistributedDataParallel ----------------------------------------------------------------

DDP = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "tiny buckets": {"bucket_cap_mb": 1e-5},
}


@pytest.mark.sample(
    "plain-1-True-True",
    "bucket views-1-True-True",
    "static graph-1-True-True",
    "static graph-3-False-False",
    "unused parameters-3-False-False",
    "tiny buckets-3-False-False",
)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("passes", "use_no_sync"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("options", DDP.values(), ids=DDP.keys())
@on_ranks(2)
def test_under_ddp(options, passes, use_no_sync, set_to_none):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    model.add_module("unused", nn.Identity())
    wrapped = DistributedDataParallel(model, **options)
    optimizer = sgd(model, num_gradients_to_accumulate=passes, smoothing=0.0)
    x, y = make_batches(3, world * passes)
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        alone = copy.deepcopy(model)
        for a in range(passes):
            i = rank * passes + a
            first = step == 0 and options.get("static_graph")  # torch needs to see that one whole
            quiet = use_no_sync and a < passes - 1 and not first
            with wrapped.no_sync() if quiet else torch.enable_grad():
                (loss_of(wrapped, x[step, i], y[step, i]) / passes).backward()
        losses = [loss_of(alone, x[step, i], y[step, i]) for i in range(world * passes)]
        check(optimizer, grads_alone(alone, losses))
        optimizer.step()


@pytest.mark.parametrize("use_no_sync", [True, False])
@on_ranks(2)
def test_several_losses_of_one_micro_batch_under_ddp(use_no_sync):
    rank = dist.get_rank()
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model, num_gradients_to_accumulate=2, smoothing=0.0)
    x, y = make_batches(3, 4)
    for step in range(3):
        optimizer.zero_grad()
        alone = copy.deepcopy(model)
        for a in range(2):
            i = 2 * rank + a
            with optimizer.one_sample():
                for part in range(2):  # each with a forward of its own, as DDP wants it
                    quiet = use_no_sync and (a, part) != (1, 1)
                    with wrapped.no_sync() if quiet else torch.enable_grad():
                        losses = ((wrapped(x[step, i]) - y[step, i]) ** 2).mean(dim=0) / 4
                        losses[part].backward()
        losses = [loss_of(alone, x[step, i], y[step, i]) for i in range(4)]
        check(optimizer, grads_alone(alone, losses))
        optimizer.step()


@on_ranks(2)
def test_ranks_may_use_different_parameters():
    rank = dist.get_rank()
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)

    class Choose(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x, which):
            return sum(self.parts[name](x).sum() for name in which)

    wrapped = DistributedDataParallel(Choose(), find_unused_parameters=True)
    optimizer = sgd(model)
    uses = ["a", "ab"]
    x, _ = make_batches(1, 2)
    wrapped(x[0, rank], uses[rank]).backward()
    losses = [sum(model[name](x[0, r]).sum() for name in uses[r]) for r in range(2)]
    check(optimizer, grads_alone(model, losses))
    optimizer.step()


@on_ranks(2)
def test_a_rank_whose_loss_uses_none_of_the_parameters_reports_zero():
    """The optimizer has parameters that rank 1's loss does not touch at all."""
    rank = dist.get_rank()
    torch.manual_seed(0)

    model = TrunkAndExtra()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(model.extra)
    x, _ = make_batches(1, 2)
    wrapped(x[0, rank], extra=rank == 0).backward()
    optimizer.step()
    mine = [x[0, 0].sum(dim=0)[None], torch.tensor([4.0])]
    check(optimizer, [mine, [torch.zeros_like(m) for m in mine]])


@pytest.mark.parametrize("head", [True, False])
@on_ranks(2)
def test_reentrant_checkpointing_under_ddp(head):
    rank = dist.get_rank()
    model = Checkpointed(True, False, head)
    alone = copy.deepcopy(model)
    alone.reentrant = None
    wrapped = DistributedDataParallel(model, static_graph=True)
    optimizer = sgd(model, smoothing=0.0)
    x, _ = make_batches(3, 2)
    for step in range(3):
        optimizer.zero_grad()
        alone.load_state_dict(model.state_dict())
        wrapped(x[step, rank]).square().mean().backward()
        check(optimizer, grads_alone(alone, [alone(x[step, r]).square().mean() for r in range(2)]))
        optimizer.step()


def in_two_groups():
    """Ranks 0 and 1 train one model, ranks 2 and 3 another; only the latter wrap a second one."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    model = make_model()
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = sgd(model, process_group=group, smoothing=0.0)
    if rank > 1:
        sgd(make_model(), process_group=group)
    x, y = make_batches(3, 4)
    for step in range(3):
        optimizer.zero_grad()
        alone = copy.deepcopy(model)
        loss_of(wrapped, x[step, rank], y[step, rank]).backward()
        pair = (0, 1) if rank < 2 else (2, 3)
        losses = [loss_of(alone, x[step, i], y[step, i]) for i in pair]
        check(optimizer, grads_alone(alone, losses))
        optimizer.step()
    return optimizer.progress


def test_process_groups_of_their_own():
    a, b, c, d = run_ranks(4, in_two_groups, timeout=20)
    assert a == b != c == d


# -- one gradient a step: consecutive ones ---------------------------------------------------------


def test_one_gradient_a_step_is_compared_with_the_one_before():
    model = make_model()
    optimizer = sgd(model, scale=4.0, smoothing=0.0)
    x, y = make_batches(3, 1)
    before = None
    for step in range(3):
        optimizer.zero_grad()
        (now,) = grads_alone(model, [loss_of(model, x[step, 0], y[step, 0])])
        loss_of(model, x[step, 0], y[step, 0]).backward()
        if before is not None:
            sqr, var = by_hand([before, now])  # at scale 2: each of the two is one small batch
            assert optimizer.noise.raw_sqr[0] == pytest.approx(sqr, rel=1e-5)
            assert optimizer.noise.raw_var[0] == pytest.approx(var * 4.0, rel=1e-5)
        optimizer.step()
        before = now


def test_the_average_restarts_after_consecutive_gradients():
    model = make_model()
    optimizer = sgd(model, scale=1.0)
    x, y = make_batches(4, 2)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, x[step, 0], y[step, 0]).backward()
        optimizer.step()
    optimizer.set_num_gradients_to_accumulate(2)
    optimizer.set_scale(2.0)
    optimizer.zero_grad()
    check_passes(optimizer, model, lambda a: loss_of(model, x[3, a], y[3, a]))


def test_dropping_the_optimizer_drops_its_hooks():
    model = make_model()
    optimizer = sgd(model)
    tap = weakref.ref(optimizer._core.measurement)
    calls = []
    optimizer._core.measurement.hooks.passes.enter = lambda task: calls.append(task)
    (model[0].weight.sum() + 0.0).backward()
    assert len(calls) == 1
    del optimizer
    assert tap() is None
    (model[0].weight.sum() + 0.0).backward()
    assert len(calls) == 1


def test_hooks_of_the_user_are_seen_whenever_they_were_registered():
    gains = []
    for registered in ("never", "before", "after"):
        model = make_model()
        optimizer = None
        if registered == "after":
            optimizer = sgd(model, num_gradients_to_accumulate=2)
        for p in model.parameters() if registered != "never" else ():
            p.register_hook(lambda g: g * 0.1)
        optimizer = optimizer or sgd(model, num_gradients_to_accumulate=2)
        x, y = make_batches(1, 2)
        for a in range(2):
            (loss_of(model, x[0, a], y[0, a]) / 2).backward()
        gains.append(optimizer.gain())
    assert gains == pytest.approx([gains[0]] * 3, rel=1e-5)


def test_a_gradient_that_is_zero_and_clipped_is_not_taken_for_cleared():
    """As that of a LoRA's first factor, while the second is zero."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))])
    optimizer = sgd(model, num_gradients_to_accumulate=2)
    for factor in (1.0, 2.0):
        ((model[0] * model[1]).sum() * factor).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()


def test_an_abandoned_gradient_is_not_compared_with_the_next():
    readings = []
    for abandoned in (False, True):
        model = make_model()
        optimizer = sgd(model, scale=4.0)
        x, y = make_batches(5, 1)
        for step in range(5):
            optimizer.zero_grad()
            if abandoned:
                (loss_of(model, x[step, 0], y[step, 0]) * 100).backward()
                model.zero_grad()
            loss_of(model, x[step, 0], y[step, 0]).backward()
            optimizer.state_dict()
            optimizer.step()
        readings.append(optimizer.noise)
    assert readings[0] == readings[1]


def test_a_hook_costs_one_python_call_for_each_short_parameter():
    """`_on_gradient`: more would slow backward down."""

    def calls(number):
        params = [nn.Parameter(torch.ones(2)) for _ in range(number)]
        optimizer = mh.AdaScale(torch.optim.SGD(params, lr=0.1), num_gradients_to_accumulate=2)
        loss = sum(param.sum() for param in params)
        seen = []
        gc.collect()
        gc.disable()  # a former rule's finalizers are in `_hooks.py` too
        sys.setprofile(lambda frame, event, _: event == "call" and seen.append(frame.f_code))
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
            gc.enable()
        assert optimizer.passes == 2
        hooked = [code for code in seen if code.co_filename.endswith(("_hooks.py", "_kinds.py"))]
        return len(hooked)

    assert calls(12) - calls(2) == 10
