"""What fairscale documents of its FullyShardedDataParallel, and what its users built on it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.sharding_oracle import make_model
from manyhands import fairscale
from manyhands.errors import RanksDisagree
from manyhands.fairscale import FullyShardedDataParallel, TrainingState

IDLE, FORWARD = TrainingState.IDLE, TrainingState.FORWARD
BACKWARD = {TrainingState.BACKWARD_PRE, TrainingState.BACKWARD_POST}


# -- subclasses ----------------------------------------------------------------------------------


class AsFairseq(mh.FSDP):
    """One state dict of slices or of wholes, as asked for; fairseq's class does this."""

    sharded = True

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        kind = super().local_state_dict if self.sharded else super().state_dict
        return kind(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict, strict=True):
        kind = super().load_local_state_dict if self.sharded else super().load_state_dict
        return kind(state_dict, strict=strict)


class ByName(mh.FSDP):
    """The same, without `super()`."""

    def state_dict(self, *args, **kwargs):
        return self.local_state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True):
        return self.load_local_state_dict(state_dict, strict=strict)


@pytest.mark.parametrize("kind", [AsFairseq, ByName])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_subclass_whose_state_dict_is_local(kind, workers):
    def build():
        model = make_model()
        model[0], model[2] = kind(model[0]), kind(model[2])
        return kind(model)

    def run():
        model = build()
        local = model.state_dict()
        assert local.keys() == make_model().state_dict().keys()
        assert all(
            torch.equal(value, mh.FSDP.local_state_dict(model)[name])
            for name, value in local.items()
        )
        other = build()
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other.load_state_dict(local)
        whole = mh.FSDP.state_dict(other) if kind is ByName else None
        if kind is AsFairseq:
            AsFairseq.sharded = False
            whole = other.state_dict()
            AsFairseq.sharded = True
        return local, model.local_metadata_dict(), whole

    ranks = run_ranks(workers, run)
    slices, facts = ([rank[part] for rank in ranks] for part in range(2))
    plain = make_model().state_dict()
    for name, value in mh.FSDP.consolidate_shard_weights(slices, facts).items():
        assert torch.equal(value, plain[name])
    if kind is AsFairseq:
        assert all(torch.equal(ranks[0][2][name], plain[name]) for name in plain)


# -- wrapping again --------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_a_larger_module_around_a_wrap_is_no_second_one(workers):
    first = mh.FSDP(nn.Sequential(mh.FSDP(nn.Linear(4, 4))))
    model = mh.FSDP(nn.Sequential(first, nn.Linear(4, 4)))
    model(torch.ones(1, 4)).sum().backward()


@on_ranks(2, raises=ValueError, match=r"0\.weight is already sharded")
def test_what_fully_shard_has_sharded_is_not_wrapped():
    mh.FSDP(nn.Sequential(fully_shard(nn.Linear(4, 4))))


# -- attributes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_documented_attributes(workers):
    inner = mh.FSDP(nn.Linear(4, 4))
    model = mh.FSDP(nn.Sequential(inner, nn.Linear(4, 3), nn.Linear(3, 3)))
    assert model.process_group is dist.group.WORLD
    assert len(model.params) == 4 and len(inner.params) == 2
    everything = [*inner.params, *model.params]
    assert sorted(map(id, model.parameters())) == sorted(map(id, everything))
    assert model.gradient_predivide_factor * model.gradient_postdivide_factor == workers
    model.gradient_postdivide_factor = 4.0
    assert (model.gradient_predivide_factor, model.gradient_postdivide_factor) == (1.0, 4.0)
    assert inner.gradient_postdivide_factor == workers
    model.set_gradient_divide_factors(2.0, 3.0, recursive=True)
    assert not model.params_with_grad
    model(torch.ones(1, 4)).sum().backward()
    assert len(model.params_with_grad) == 6
    assert inner.gradient_predivide_factor == 2.0
    last = dict(model.named_parameters())["2.bias"].grad  # on each worker it was 1
    last = last.full_tensor() if workers > 1 else last
    torch.testing.assert_close(last, torch.full((3,), workers / 6))


def test_the_process_group_without_a_launcher_is_a_stand_in_of_one():
    group = mh.FSDP(nn.Linear(2, 2)).process_group
    assert (group.rank(), group.size()) == (0, 1)


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_the_training_state_is_what_a_wrap_is_doing(workers):
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append((model.training_state, inner.training_state))
            out = super().forward(x)
            out.register_hook(lambda _: seen.append((model.training_state, inner.training_state)))
            return out * 1

    inner = FullyShardedDataParallel(Watched(4, 4))
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(4, 3)))
    model.assert_state(IDLE)
    loss = model(torch.ones(1, 4)).sum()
    model.assert_state([IDLE])
    loss.backward()
    inner.assert_state((IDLE, FORWARD))
    assert seen[0] == (FORWARD, FORWARD)
    assert set(seen[1]) <= BACKWARD
    with model.summon_full_params():
        assert inner.training_state is TrainingState.SUMMON_FULL_PARAMS
    with pytest.raises(ValueError, match="expected FORWARD or BACKWARD_PRE, not IDLE"):
        model.assert_state([FORWARD, TrainingState.BACKWARD_PRE])


def test_a_state_of_fairscales_own_enum_is_known_by_its_name():
    theirs = pytest.importorskip(
        "fairscale.nn.data_parallel", reason="fairscale is not installed to compare with"
    ).TrainingState
    assert [state.name for state in theirs] == [state.name for state in TrainingState]
    model = FullyShardedDataParallel(nn.Linear(2, 2))
    model.assert_state(theirs.IDLE)
    with pytest.raises(ValueError, match="IDLE"):
        model.assert_state([theirs.FORWARD])


# -- a group of one inside: each worker's own expert ---------------------------------------------


class Mixture(nn.Module):
    """A shared layer, an expert that each worker has for itself, and a shared layer."""

    def __init__(self, expert_seed, wrap=lambda module, **options: module, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first = wrap(nn.Linear(4, 4).double(), **options)
        torch.manual_seed(expert_seed)
        self.expert = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
        torch.manual_seed(1)
        self.last = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.last(self.expert(self.first(x)).tanh())


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def of_expert(name):
    return name.startswith("expert")


def trained_mixtures(workers):
    """The plain run: one replica for each worker, with the shared gradients averaged by hand."""
    models = [Mixture(expert_seed=5 + rank) for rank in range(workers)]
    optimizers = [Adam(model.parameters(), lr=0.05) for model in models]
    for step in range(3):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(batch_of(step, rank)).square().mean().backward()
        for name, _ in models[0].named_parameters():
            if not of_expert(name):
                grads = [dict(model.named_parameters())[name].grad for model in models]
                mean = torch.stack(grads).mean(0)
                for grad in grads:
                    grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
    return [model.state_dict() for model in models]


def wrapped_mixture(rank):
    model = Mixture(5 + rank, mh.FSDP)
    alone = dist.new_group([rank], use_local_synchronization=True)
    model.expert = mh.FSDP(model.expert, process_group=alone)
    return mh.FSDP(model)


def test_an_expert_in_a_group_of_one_trains_on_its_own():
    def run():
        rank = dist.get_rank()
        model = wrapped_mixture(rank)
        optimizer = Adam(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            model(batch_of(step, rank)).square().mean().backward()
            optimizer.step()
        state = model.state_dict()
        again = wrapped_mixture(rank)
        again.load_state_dict(state)
        assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
        with pytest.raises(ValueError, match="single-rank process group"):
            model.gather_full_optim_state_dict(optimizer)
        return dict(state)

    ranks = run_ranks(2, run)
    for state, plain in zip(ranks, trained_mixtures(2), strict=True):
        assert state.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


def test_clipping_counts_every_workers_expert():
    def run():
        rank = dist.get_rank()
        model = wrapped_mixture(rank)
        model(batch_of(0, rank)).square().mean().backward()
        return model.clip_grad_norm_(0.5)

    models = [Mixture(5 + rank) for rank in range(2)]
    for rank, model in enumerate(models):
        model(batch_of(0, rank)).square().mean().backward()
    named = [dict(model.named_parameters()) for model in models]
    shared = [
        (named[0][name].grad + named[1][name].grad) / 2 for name in named[0] if not of_expert(name)
    ]
    experts = [named[rank][name].grad for rank in range(2) for name in named[0] if of_expert(name)]
    norm = torch.cat([grad.flatten() for grad in [*shared, *experts]]).norm()
    for clipped in run_ranks(2, run):
        torch.testing.assert_close(clipped, norm)


def test_workers_may_have_experts_of_different_sizes_and_a_stand_in_for_the_group():
    def run():
        rank = dist.get_rank()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        expert = nn.Sequential(nn.Linear(4, 3 + rank), nn.Tanh(), nn.Linear(3 + rank, 4))
        model.append(mh.FSDP(expert, process_group=fairscale.DummyProcessGroup(0, 1)))
        model = mh.FSDP(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return [list(p.shape) for p in model[2].params]

    assert [shapes[0] for shapes in run_ranks(2, run)] == [[3, 4], [4, 4]]


@pytest.mark.parametrize("what", [mh.save, mh.load])
@on_ranks(2, raises=ValueError, match="single-rank process group")
def test_a_checkpoint_that_would_hold_one_workers_expert_is_an_error(what, tmp_path):
    if what is mh.load:
        mh.save(tmp_path / "checkpoint", model=Mixture(5))
    what(tmp_path / "checkpoint", model=wrapped_mixture(dist.get_rank()))


@on_ranks(2, raises=RanksDisagree, match="different gradients")
def test_a_scaling_rule_over_experts_is_an_error_before_its_first_step():
    rank = dist.get_rank()
    model = wrapped_mixture(rank)
    optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1))
    model(batch_of(0, rank)).square().mean().backward()
    optimizer.step()


def test_gradients_of_a_group_of_one_are_divided_where_asked_for():
    model = mh.FSDP(nn.Linear(2, 1, bias=False))
    model(torch.ones(1, 2)).sum().backward()
    model.set_gradient_divide_factors(2.0, 4.0, recursive=True)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[0.125, 0.125]]
    model.set_gradient_divide_factors(1.0, 1.0, recursive=True)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
