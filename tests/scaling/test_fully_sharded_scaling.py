"""Scaling over torch's `fully_shard`: the statistics are those of plain DDP on the same data."""

import contextlib
import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.scaling_oracle import trained_as_under_ddp
from manyhands import adaptdl
from manyhands._ranks.ranks import RankGroup

SGD_OPTIONS = {"lr": 0.05, "momentum": 0.9}
PLAIN, ONE, NESTED, WRAPPED, HYBRID = "DDP", "one group", "nested", "mh.FSDP", "two dimensions"


class Model(nn.Module):
    """Sizes that no number of workers divides, and more workers than outputs."""

    def __init__(self, body=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 133)
        self.body = body() if body else nn.Linear(133, 50)
        self.last = nn.Linear(50, 3)

    def forward(self, x):
        return self.last(self.body(self.first(x).relu()).relu())


def distributed(model, how, **options):
    if how == PLAIN:
        return DDP(model, find_unused_parameters=True)
    if how == HYBRID:
        shape = (2, dist.get_world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
    if how == WRAPPED:
        for name, child in list(model.named_children()):
            setattr(model, name, mh.FSDP(child))
        return mh.FSDP(model)
    if how != ONE:
        for child in model.children():
            fully_shard(child, **options)
    return fully_shard(model, **options)


def averaging(model, whether):
    """Whether backward passes inside average the gradients."""
    if whether:
        return contextlib.nullcontext()
    if isinstance(model, DDP | mh.FSDP):
        return model.no_sync()

    @contextlib.contextmanager
    def without():
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False)
        yield
        for module in sharded:
            module.set_requires_gradient_sync(True)

    return without()


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 7, generator=generator) for _ in range(steps)]


def whole(model):
    return [
        p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
        for p in model.parameters()
    ]


def numbers(optimizer):
    shown = optimizer.snapshot()
    measured = [0.0 if value is None else value for value in (*shown["sqr"], *shown["var"])]
    return [shown["gain"], *shown["factor"], *measured]


def train(
    how,
    rule=mh.AdaScale,
    optim=SGD,
    options=SGD_OPTIONS,
    passes=1,
    sync_all=True,
    divided=True,
    scaler=None,
    steps=6,
    body=None,
    before_step=lambda step, model: None,
    used=lambda rank: slice(None),
    shard=distributed,
):
    """Every step's gain, factor and noise, and the parameters."""
    model = shard(Model(body), how)
    optimizer = rule(
        optim(model.parameters(), **options),
        num_gradients_to_accumulate=passes,
        is_scaled_loss=divided,
    )
    accumulation = {"num_gradients_to_accumulate": passes, "is_scaled_loss": divided}
    noise = mh.NoiseScale(optimizer.optimizer, **accumulation)
    rank, size = dist.get_rank(), dist.get_world_size()
    scaler = scaler() if scaler else GradScaler("cpu", enabled=False)
    seen = []
    for step, batch in enumerate(batches(steps)):
        before_step(step, model)
        (optimizer if step % 2 else model).zero_grad(set_to_none=step % 3 != 0)
        for number, part in enumerate(batch.chunk(passes)):
            with averaging(model, sync_all or number == passes - 1):
                out = model(part.chunk(size)[rank])[:, used(rank)]
                loss = out.float().square().mean() / (passes if divided else 1)
                scaler.scale(loss).backward()
        if not divided:
            optimizer.scale_grad_by_num_grads_to_accum()
        scaler.step(optimizer)
        scaler.update()
        seen += numbers(optimizer)
    if scaler.is_enabled():
        seen.append(scaler.get_scale())
    else:
        seen += [noise.noise_scale, noise.squared_norm, noise.variance]
    return torch.tensor(seen, dtype=torch.float64), whole(model)


def check_equal_to_ddp(world, how, *args, **kwargs):
    trained_as_under_ddp(world, train, PLAIN, how, *args, **kwargs)


RULES = [
    pytest.param(mh.AdaScale, SGD, SGD_OPTIONS, id="AdaScale"),
    pytest.param(mh.AdamScale, AdamW, {"lr": 0.005, "fused": True}, id="AdamScale"),
    pytest.param(mh.LinearScale, Adam, {"lr": 0.001, "amsgrad": True}, id="LinearScale"),
    pytest.param(
        lambda o, **k: mh.SqrtScale(o, rescale_adam=True, **k), AdamW, {"lr": 1e-3}, id="SqrtScale"
    ),
    pytest.param(
        lambda o, **k: mh.LEGWScale(1, 48, o, batch_size=6, **k), SGD, {"lr": 0.01}, id="LEGWScale"
    ),
]


@pytest.mark.sample("AdaScale-nested", "AdamScale-mh.FSDP")
@pytest.mark.parametrize("how", [pytest.param(ONE, marks=pytest.mark.long), NESTED, WRAPPED])
@pytest.mark.parametrize(("rule", "optim", "options"), RULES[:2])
def test_statistics_and_training_are_those_of_ddp(how, rule, optim, options):
    check_equal_to_ddp(2, how, rule, optim, options)


@pytest.mark.parametrize(("rule", "optim", "options"), RULES[:2])
def test_four_ranks_of_which_some_hold_nothing_of_a_parameter(rule, optim, options):
    check_equal_to_ddp(4, WRAPPED, rule, optim, options, steps=4)


@pytest.mark.long
@pytest.mark.parametrize(("rule", "optim", "options"), RULES[2:])
def test_rules_that_only_report_the_statistics(rule, optim, options):
    check_equal_to_ddp(2, WRAPPED, rule, optim, options)


@pytest.mark.sample("AdaScale-False", "AdamScale-True")
@pytest.mark.parametrize("sync_all", [False, True])
@pytest.mark.parametrize(("rule", "optim", "options"), RULES[:2])
def test_accumulated_passes_are_measured_as_under_ddp(rule, optim, options, sync_all):
    check_equal_to_ddp(3, WRAPPED, rule, optim, options, passes=2, sync_all=sync_all)


def test_an_undivided_loss_is_divided_by_hand():
    check_equal_to_ddp(2, ONE, passes=3, sync_all=False, divided=False)


@pytest.mark.parametrize(("rule", "optim", "options"), RULES[:2])
def test_replicas_of_shards_are_counted_once(rule, optim, options):
    check_equal_to_ddp(4, HYBRID, rule, optim, options, passes=2, sync_all=False, steps=4)


@pytest.mark.parametrize(
    "scaler", [GradScaler, pytest.param(mh.ShardedGradScaler, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("optim", "options"),
    [(SGD, SGD_OPTIONS), (AdamW, {"lr": 0.001, "fused": True})],
    ids=["SGD", "fused AdamW"],
)
def test_loss_scaling_is_divided_out(scaler, optim, options):
    def make_scaler():
        return scaler(device="cpu", init_scale=2.0**120, growth_interval=3)

    check_equal_to_ddp(2, NESTED, optim=optim, options=options, scaler=make_scaler, steps=12)


def test_parameters_come_and_go():
    """One that no step uses at first, and one that is frozen for a time."""
    used = {"late": False}

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.late = (nn.Linear(133, 50) for _ in range(3))

        def forward(self, x):
            return self.a(x) + (self.b(x) if x.is_leaf else 0.0) + self.get_extra(x)

        def get_extra(self, x):
            return self.late(x) if used["late"] else 0.0

    def before_step(step, model):
        used["late"] = step >= 3
        next(p for n, p in model.named_parameters() if "last.weight" in n).requires_grad_(
            step not in (1, 2)
        )

    check_equal_to_ddp(2, NESTED, body=Branches, before_step=before_step)
    check_equal_to_ddp(2, ONE, body=Branches, before_step=before_step)


class Repeated(nn.Module):
    """A module that runs three times, perhaps in checkpoints."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.inner = nn.Linear(133, 133)
        self.out = nn.Linear(133, 50)
        self.reentrant = reentrant

    def forward(self, x):
        for _ in range(3):
            x = self.run(self.inner, x).tanh()
        return self.run(self.out, x)

    def run(self, module, x):
        if self.reentrant is None:
            return module(x)
        return checkpoint(module, x, use_reentrant=self.reentrant)


def shard_within(model, how):
    """The modules that are repeated are sharded themselves."""
    if how == PLAIN:
        model.body.reentrant = None  # DDP has no such thing
        return DDP(model)
    if how == NESTED:
        fully_shard(model.body.inner)
        fully_shard(model.body.out)
    return distributed(model, how)


@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(("how", "reentrant"), [(NESTED, None), (NESTED, False)])
def test_modules_run_several_times_and_in_checkpoints(how, reentrant, passes):
    def body():
        return Repeated(reentrant)

    # (nested and reentrant, torch's own gradients are wrong: the next test)
    check_equal_to_ddp(2, how, body=body, shard=shard_within, passes=passes, sync_all=False)


@on_ranks(2, raises=RuntimeError, match=r"reentrant checkpoints.*use_reentrant=False")
def test_torchs_wrong_gradient_of_a_module_repeated_in_reentrant_checkpoints_is_an_error():
    model = shard_within(Model(lambda: Repeated(True)), NESTED)
    optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for module in self:
            x = checkpoint(module, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("how", [pytest.param(ONE, marks=pytest.mark.long), NESTED])
def test_reentrant_checkpoints(how):
    def body():
        return Checkpointed(nn.Linear(133, 60), nn.Linear(60, 50))

    def shard(model, how):
        if how == NESTED:
            for module in model.body:
                fully_shard(module)
        return DDP(model) if how == PLAIN else distributed(model, how)

    check_equal_to_ddp(2, how, body=body, shard=shard)


class Cast(nn.Module):
    """What `MixedPrecisionPolicy(bfloat16, reduce in float32)` computes, without it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        cast = {name: p.bfloat16() for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, cast, x.bfloat16())


@pytest.mark.sample("AdaScale-True", "AdamScale-False")
@pytest.mark.parametrize("sync_all", [True, False])
@pytest.mark.parametrize(("rule", "optim", "options"), RULES[:2])
def test_norms_of_bfloat16_gradients_are_taken_in_float32(rule, optim, options, sync_all):
    def shard(model, how):
        if how == PLAIN:
            return DDP(Cast(model))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return distributed(model, how, mp_policy=policy)

    check_equal_to_ddp(
        2, NESTED, rule, optim, options, shard=shard, passes=1 if sync_all else 2, sync_all=sync_all
    )


def test_parameters_cut_in_another_dimension():
    def shard(model, how):
        if how == PLAIN:
            return DDP(model)
        dims = {(133, 7): 0, (50, 133): 0, (3, 50): 1}
        return fully_shard(
            model,
            shard_placement_fn=lambda p: torch.distributed.tensor.Shard(
                dims.get(tuple(p.shape), 0)
            ),
        )

    options = {"lr": 0.005}
    check_equal_to_ddp(2, ONE, mh.AdamScale, AdamW, options, shard=shard, steps=8)


@pytest.mark.parametrize("how", [ONE, WRAPPED])
def test_adaptive_data_parallel_counts_passes(how):
    def run(how):
        model = Model() if how == PLAIN else distributed(Model(), how)
        optimizer = SGD(model.parameters(), **SGD_OPTIONS)
        parallel = adaptdl.AdaptiveDataParallel(model, optimizer, scaling_rule=mh.AdaScale())
        seen = []
        for step, batch in enumerate(batches(6)):
            parallel.zero_grad()
            *before, last = batch.chunk(dist.get_world_size())[dist.get_rank()].chunk(1 + step % 3)
            for part in before:
                with parallel.no_sync():
                    parallel(part).square().mean().backward()
                assert how == PLAIN or all(p.grad is None for p in model.parameters())
            parallel(last).square().mean().backward()
            optimizer.step()
            seen += [*numbers(parallel.scaling_rule), parallel.scaling_rule.progress]
        return torch.tensor(seen, dtype=torch.float64), whole(model)

    plain = run_ranks(2, run, PLAIN)[0]
    for seen, params in run_ranks(2, run, how):
        torch.testing.assert_close(seen, plain[0], rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(params, plain[1], rtol=1e-4, atol=1e-6)


def by_state_dicts(old, new, folder):
    for each, fresh in zip(old, new, strict=True):
        fresh.load_state_dict(copy.deepcopy(each.state_dict()))


def as_documented_for_sharded_parameters(old, new, folder):
    (model, optimizer, _), (model_2, optimizer_2, _) = old, new
    whole = model.state_dict(), model.gather_full_optim_state_dict(optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()
    weights, state = torch.load(folder / "whole.pt", weights_only=True)
    model_2.load_state_dict(weights)
    optimizer_2.load_state_dict(model_2.get_shard_from_optim_state_dict(state))


def by_torch_with_the_scalings_beside_it(old, new, folder):
    (model, optimizer, _), (model_2, optimizer_2, _) = old, new
    file = io.BytesIO()
    state = model.state_dict(), get_optimizer_state_dict(model, optimizer.optimizer)
    torch.save((*state, optimizer.scaling_state_dict()), file)
    file.seek(0)
    weights, state, scaling = torch.load(file, weights_only=True)
    model_2.load_state_dict(weights)
    set_optimizer_state_dict(model_2, optimizer_2.optimizer, state)
    optimizer_2.load_scaling_state_dict(scaling)


@pytest.mark.parametrize(
    ("continues", "how"),
    [
        (by_state_dicts, NESTED),
        (as_documented_for_sharded_parameters, WRAPPED),
        (by_torch_with_the_scalings_beside_it, NESTED),
    ],
)
@pytest.mark.parametrize(("rule", "optim", "options"), RULES[:2])
@on_ranks(2)
def test_state_continues_bitwise(rule, optim, options, continues, how, tmp_path):
    def made():
        model = distributed(Model(), how)
        optimizer = rule(optim(model.parameters(), **options))
        return model, optimizer, StepLR(optimizer, 4, gamma=0.5)

    def train(run, batches):
        seen = []
        for batch in batches:
            seen += step_of_two(*run[:2], batch)
            run[2].step()
        return seen, whole(run[0])

    old, new = made(), made()
    train(old, batches(8)[:5])
    continues(old, new, tmp_path)
    if continues is not by_state_dicts:
        new[2].load_state_dict(old[2].state_dict())
    straight, resumed = train(old, batches(8)[5:]), train(new, batches(8)[5:])
    assert resumed[0] == straight[0]
    torch.testing.assert_close(resumed[1], straight[1], rtol=0, atol=0)


def step_of_two(model, optimizer, batch):
    """One step of each of two workers, and what it was like."""
    optimizer.zero_grad()
    model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    return [*numbers(optimizer), optimizer.progress]


def test_a_model_may_have_run_before():
    """After an evaluation the outermost module's parameters are unsharded."""

    def run(how):
        model = distributed(Model(), how)
        inner = SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(torch.ones(1, 7))
        optimizer = mh.AdaScale(inner)
        model(batches(1)[0].chunk(2)[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        return numbers(optimizer)

    assert run_ranks(2, run, ONE)[1] == pytest.approx(run_ranks(2, run, PLAIN)[0], rel=1e-5)


def test_parameter_groups_can_be_added():
    def run(how):
        model = distributed(Model(), how)
        first, *others = model.parameters()
        optimizer = mh.AdaScale(SGD([first], **SGD_OPTIONS))
        optimizer.add_param_group({"params": others, "lr": 0.01})
        seen = []
        for batch in batches(3):
            optimizer.zero_grad()
            model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
            optimizer.step()
            seen += [*numbers(optimizer), optimizer.gain(0), optimizer.gain(1)]
        return seen

    assert run_ranks(2, run, NESTED)[1] == pytest.approx(run_ranks(2, run, PLAIN)[0], rel=1e-5)


def test_a_step_that_was_begun_can_be_given_up():
    def run(how):
        model = distributed(Model(), how)
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
        rank = dist.get_rank()
        given_up, *others = batches(5)
        with averaging(model, False):
            model(given_up.chunk(2)[rank]).square().mean().backward()
        optimizer.zero_grad()
        for first, second in zip(others[::2], others[1::2], strict=True):
            with averaging(model, False):
                (model(first.chunk(2)[rank]).square().mean() / 2).backward()
            (model(second.chunk(2)[rank]).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return numbers(optimizer)

    assert run_ranks(2, run, NESTED)[1] == pytest.approx(run_ranks(2, run, PLAIN)[0], rel=1e-5)


def test_gradients_that_were_cleared_by_hand_begin_a_new_step():
    def run(how):
        model = distributed(Model(), how)
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
        given_up, *others = batches(3)
        rank = dist.get_rank()
        model(given_up.chunk(2)[rank]).square().mean().backward()
        for param in model.parameters():
            param.grad.zero_()
        for batch in others:
            (model(batch.chunk(2)[rank]).square().mean() / 2).backward()
        optimizer.step()
        return numbers(optimizer)

    assert run_ranks(2, run, NESTED)[1] == pytest.approx(run_ranks(2, run, PLAIN)[0], rel=1e-5)


def test_workers_of_a_mesh_share_their_statistics_and_no_others_do():
    def run(grouped):
        rank = dist.get_rank()
        if grouped:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("jobs", "workers"))["workers"]
            rank, job = rank % 2, rank // 2
            model = fully_shard(Model(), mesh=mesh)
        else:
            job, model = 0, fully_shard(Model())
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1))
        for batch in batches(6)[job::2]:
            optimizer.zero_grad()
            model(batch.chunk(2)[rank]).square().mean().backward()
            optimizer.step()
        return [*numbers(optimizer), optimizer.scale]

    alone, (*together, other, _) = run_ranks(2, run, False)[0], run_ranks(4, run, True)
    assert together == [alone, alone]
    assert other != alone


def test_one_worker_compares_consecutive_gradients():
    def run(how):
        model = Model() if how == PLAIN else fully_shard(Model())
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1), scale=4.0)
        seen = []
        for batch in batches(4):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            seen += numbers(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        return seen

    assert run_ranks(1, run, ONE)[0] == pytest.approx(run_ranks(1, run, PLAIN)[0], rel=1e-5)


@on_ranks(2)
def test_a_step_costs_one_collective(monkeypatch):
    calls = []
    for name in ("sum_and_gather", "all_gather_slices", "all_reduce", "all_gather_text"):
        method = getattr(RankGroup, name)
        monkeypatch.setattr(
            RankGroup, name, lambda *a, method=method, **k: calls.append(1) or method(*a, **k)
        )
    for watch in (mh.AdaScale, mh.NoiseScale):
        model = distributed(Model(), NESTED)
        optimizer = SGD(model.parameters(), lr=0.1)
        watching = watch(optimizer)
        for batch in batches(3):
            calls.clear()
            optimizer.zero_grad()
            model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
            with CommDebugMode() as mode:  # what operations on DTensors would send
                (watching if watch is mh.AdaScale else optimizer).step()
            assert (len(calls), mode.get_total_counts()) == (1, 0)


# -- mistakes ------------------------------------------------------------------------------------


@on_ranks(2, raises=RuntimeError, match="not averaged")
def test_the_last_pass_must_be_averaged():
    model = distributed(Model(), NESTED)
    optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1))
    with averaging(model, False):
        model(torch.ones(2, 7)).sum().backward()
    optimizer.step()


@on_ranks(2, raises=ValueError, match="no module that fully_shard was called on")
def test_tensor_parallelism_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(Model(), mesh, {"first": ColwiseParallel()})
    mh.AdaScale(SGD(model.first.parameters(), lr=0.1))


@on_ranks(4, raises=ValueError, match="tensor parallelism")
def test_tensor_parallelism_inside_fully_shard_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Model(), mesh["tp"], {"first": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    mh.AdaScale(SGD(model.first.parameters(), lr=0.1))


@on_ranks(2, raises=ValueError, match=r"call gc.unfreeze\(\)")
def test_modules_that_the_garbage_collector_does_not_find():
    model = fully_shard(Model())
    gc.freeze()
    mh.AdaScale(SGD(model.parameters(), lr=0.1))


@on_ranks(2, raises=ValueError, match="sharded over 2 workers")
def test_other_workers_than_the_meshs_are_refused():
    mh.AdaScale(SGD(fully_shard(Model()).parameters(), lr=0.1), world_size=1)


@on_ranks(2, raises=TypeError, match="AdaptiveDataParallel")
def test_a_bare_module_does_not_count_passes():
    model = fully_shard(Model())
    mh.AdaScale().initialize(model, SGD(model.parameters(), lr=0.1))
