"""Options of FullyShardedDataParallel: precision, one worker, and mistakes."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Rprop
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import Lamb, make_batches, make_model, torch_version
from manyhands import fairscale

from test_fsdp import Tied, nested, one_wrap, steps, whole  # isort: skip


class Group:
    """A stand-in for a process group."""

    def __init__(self, size):
        self._size = size

    def rank(self):
        return 0

    def size(self):
        return self._size


# -- precision --------------------------------------------------------------------------------


def casts(model, dtype, workers, reduce=None):
    """Mixed precision written out: casts of parameters and inputs, the mean of the gradients."""
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = make_batches(3, 1, workers, dtype=torch.float32)
    for step in range(3):
        each = []
        for rank in range(workers):
            low = copy.deepcopy(model).to(dtype)
            loss = (low(x[step, 0, rank].to(dtype)).float() - y[step, 0, rank]).square().mean()
            each.append(torch.autograd.grad(loss, list(low.parameters())))
        for param, grads in zip(model.parameters(), zip(*each, strict=True), strict=True):
            mean = sum(grad.float() for grad in grads) / workers
            param.grad = mean if reduce else mean.to(dtype).float()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.sample("1-one_wrap-True", "1-nested-True", "2-one_wrap-False", "2-nested-False")
@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("wrap", [one_wrap, nested])
@pytest.mark.parametrize("workers", [1, 2])
def test_mixed_precision_computes_in_a_smaller_type_and_keeps_the_parameters(workers, wrap, fp32):
    def run():
        model = wrap(
            make_model(torch.float32),
            mixed_precision=True,
            compute_dtype=torch.bfloat16,
            fp32_reduce_scatter=fp32,
        )
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        x, y = make_batches(3, 1, workers, dtype=torch.float32)
        for step in range(3):
            optimizer.zero_grad()
            out = model(x[step, 0, dist.get_rank()])
            assert out.dtype == torch.bfloat16
            (out.float() - y[step, 0, dist.get_rank()]).square().mean().backward()
            optimizer.step()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        return whole(model)

    exact = fp32 or (workers > 1 and torch_version() >= (2, 15))  # as bare fully_shard
    expected = casts(make_model(torch.float32), torch.bfloat16, workers, reduce=exact)
    for rank in run_ranks(workers, run):
        for mine, theirs in zip(rank, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_mixed_precision_is_float16_unless_given():
    layer = mh.FSDP(nn.Linear(3, 3), mixed_precision=True)
    assert layer.mixed_precision and layer.compute_dtype == torch.float16
    assert layer.buffer_dtype == torch.float16
    assert layer(torch.ones(2, 3)).dtype == torch.float16
    assert layer.module.weight.dtype == torch.float32


@pytest.mark.parametrize("workers", [1, 2])
def test_float16_with_loss_scaling_trains_as_float32(workers):
    def run():
        model = nested(make_model(torch.float32), mixed_precision=True)
        optimizer = SGD(model.parameters(), lr=0.05)
        scaler = mh.ShardedGradScaler(device="cpu", init_scale=2.0**17, growth_interval=100)
        x, y = make_batches(6, 1, workers, dtype=torch.float32)
        for step in range(6):
            optimizer.zero_grad()
            out = model(x[step, 0, dist.get_rank()]).float()
            scaler.scale((out - y[step, 0, dist.get_rank()]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), whole(model)

    ranks = run_ranks(workers, run)
    assert len({scale for scale, _ in ranks}) == 1 and ranks[0][0] < 2.0**17  # overflows, on all
    start = list(make_model(torch.float32).parameters())
    for mine, first, before in zip(ranks[-1][1], ranks[0][1], start, strict=True):
        assert torch.equal(mine, first) and mine.isfinite().all()
        assert not torch.equal(mine, before)


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_checkpointed_modules_inside_a_mixed_precision_wrap(workers):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model(torch.float32)

        def forward(self, x):
            x = self.layers[0](x)
            return checkpoint(self.layers[1:], x, use_reentrant=False)

    grads = []
    for module in (make_model(torch.float32), Checkpointed()):
        model = mh.FSDP(module, mixed_precision=True, compute_dtype=torch.bfloat16)
        model(torch.ones(2, 5)).sum().backward()
        grads.append([p.grad.to_local() if workers > 1 else p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_recurrent_layers_and_attention_compute_in_the_smaller_type(workers):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn = nn.LSTM(8, 8, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x, _ = self.rnn(x)
            return self.attention(x, x, x)[0]

    model = mh.FSDP(Model(), mixed_precision=True, compute_dtype=torch.bfloat16)
    out = model(torch.ones(2, 3, 8))
    out.float().sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all((g.to_local() if workers > 1 else g).isfinite().all() for g in grads)
    assert out.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_buffers_compute_in_their_type_and_are_saved_in_the_models(workers):
    options = {"mixed_precision": True, "compute_dtype": torch.bfloat16}
    model = mh.FSDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **options)
    model(torch.arange(8.0).view(2, 4)).float().sum().backward()
    state = model.state_dict()
    assert model.module[1].running_mean.dtype == torch.bfloat16
    assert state["1.running_mean"].dtype == torch.float32
    assert state["1.num_batches_tracked"].dtype == torch.int64
    fresh = mh.FSDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    fresh.load_state_dict(state)


def test_inputs_as_float32_where_asked_for():
    seen = []
    layer = nn.Linear(3, 3)
    layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    mh.FSDP(layer, force_input_to_fp32=True)(torch.ones(2, 3, dtype=torch.bfloat16))
    assert seen == [torch.float32]


@on_ranks(2)
def test_parameters_in_bfloat16_are_sharded_as_they_are():
    model = nested(make_model(torch.bfloat16))
    optimizer = AdamW(model.parameters(), lr=0.02)
    steps(model, [optimizer], lambda x: x[dist.get_rank()].bfloat16(), workers=2)
    assert {p.dtype for p in whole(model)} == {torch.bfloat16}


# -- one worker -------------------------------------------------------------------------------


def test_one_worker_without_a_process_group_is_the_bare_module_bit_for_bit():
    bare, wrapped = make_model(), nested(make_model())
    for model in (bare, wrapped):
        optimizer = AdamW(model.parameters(), lr=0.02)
        steps(model, [optimizer], lambda x: x[0], workers=1)
    assert not dist.is_initialized()
    for mine, theirs in zip(wrapped.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert list(wrapped.state_dict()) == list(bare.state_dict())
    full = wrapped.gather_full_optim_state_dict(optimizer)
    optimizer.load_state_dict(wrapped.get_shard_from_optim_state_dict(full))


def test_a_stand_in_of_one_worker_needs_no_launcher():
    layer = fairscale.FullyShardedDataParallel(
        nn.Linear(5, 5), process_group=Group(1), mixed_precision=True
    )
    assert isinstance(layer, mh.FullyShardedDataParallel) and layer.flatten_parameters
    assert isinstance(layer.module, nn.Linear) and layer.world_size == 1
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="of 2 ranks cannot send"):
        mh.FSDP(nn.Linear(5, 5), process_group=Group(2))


def test_a_group_of_some_workers():
    def run():
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        mine = dist.get_rank() // 2
        model = nested(make_model(), process_group=groups[mine])
        optimizer = AdamW(model.parameters(), lr=0.02)
        place = dist.get_rank() % 2
        steps(model, [optimizer], lambda x: x[place], workers=2 - mine)
        return model.world_size, whole(model)

    ranks = run_ranks(3, run)
    assert [size for size, _ in ranks] == [2, 2, 1]
    for place, workers in ((0, 2), (2, 1)):
        plain = make_model()
        optimizer = AdamW(plain.parameters(), lr=0.02)
        steps(plain, [optimizer], lambda x: x.flatten(0, 1), workers=workers)
        for mine, theirs in zip(ranks[place][1], plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=1e-11)


def test_what_the_wrapper_does_not_have_is_the_modules():
    model = mh.FSDP(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), verbose=True)
    assert len(model) == 2 and isinstance(model[1], nn.ReLU)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU]
    assert "reshard_after_forward=True" in repr(model)
    assert mh.FSDP(nn.Linear(2, 3)).out_features == 3
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential()])
def test_a_wrapped_module_is_true_whatever_its_length(module):
    assert mh.FSDP(module)


@pytest.mark.parametrize("option", ["cpu_offload", "move_params_to_cpu"])
def test_the_older_name_of_move_params_to_cpu(option):
    layer = fairscale.FullyShardedDataParallel(nn.Linear(2, 2), **{option: True})
    assert layer.cpu_offload and layer.move_params_to_cpu and layer.move_grads_to_cpu
    assert not fairscale.FullyShardedDataParallel(nn.Linear(2, 2)).cpu_offload


def test_importing_the_library_does_not_import_torchs_engine():
    code = (
        "import manyhands as mh, sys, torch\n"
        "mh.FSDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()\n"
        "assert 'torch.distributed.fsdp' not in sys.modules\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# -- mistakes ---------------------------------------------------------------------------------


@on_ranks(2, raises=RuntimeError, match="was made before the model was wrapped")
def test_an_optimizer_made_before_wrapping_says_so():
    model = make_model()
    optimizer = AdamW(model.parameters())
    model = nested(model)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()


class Centred(torch.optim.Optimizer):
    """Takes the mean off each gradient: wrong on a slice of it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                grad = grad.to_local() if hasattr(grad, "to_local") else grad
                here = param.to_local() if hasattr(param, "to_local") else param
                here.sub_(grad - grad.mean(), alpha=group["lr"])


@pytest.mark.parametrize("kind", [Rprop, Adafactor, LBFGS, Centred])
def test_an_optimizer_that_needs_whole_tensors_is_refused(kind):
    def mistake():
        model = nested(make_model())
        optimizer = kind(model.parameters())
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step(lambda: 0)

    for text in raises_on_ranks(2, TypeError, mistake, match=kind.__name__):
        assert "WholeTensorOptimizer" in text or kind is LBFGS


@on_ranks(2)
def test_an_optimizer_of_ones_own_that_can_is_not_refused():
    model = nested(make_model())
    optimizer = Lamb(model.parameters())
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()


@on_ranks(2, raises=ValueError, match="last.weight is tied to a parameter")
def test_parameters_tied_across_wraps_are_an_error():
    model = Tied()
    model.first = mh.FSDP(model.first)
    mh.FSDP(model)


@on_ranks(2, raises=ValueError, match="parameter scale has no elements")
def test_an_empty_parameter_is_an_error():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(0, 3))
    mh.FSDP(model)


def test_a_module_dict_with_a_forward_can_be_wrapped():
    class Both(nn.ModuleDict):
        def forward(self, x):
            return self["a"](x) + self["b"](x)

    model = mh.FSDP(Both({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    assert model(torch.ones(1, 2)).shape == (1, 2)


def linear(**options):
    return mh.FSDP(nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: mh.FSDP(linear()), TypeError, "already in a FullyShardedDataParallel"),
        (lambda: linear(fp32_reduce_scatter=True), ValueError, "requires mixed_precision=True"),
        (lambda: linear(gradient_predivide_factor=0.0), ValueError, "a finite number above 0"),
        (lambda: copy.deepcopy(linear()), TypeError, "cannot be copied or pickled"),
        (lambda: pickle.dumps(linear()), TypeError, "cannot be copied or pickled"),
    ],
)
def test_mistakes_say_what_is_needed(build, error, match):
    with pytest.raises(error, match=match):
        build()


@on_ranks(2, raises=TypeError, match="averaged twice")
def test_ddp_inside_is_an_error():
    mh.FSDP(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))))


@on_ranks(2, raises=TypeError, match="FullyShardedDataParallel")
def test_oss_of_sharded_parameters_is_an_error():
    mh.OSS(nested(make_model()).parameters(), optim=SGD, lr=0.1)
