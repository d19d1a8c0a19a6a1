"""WholeTensorOptimizer: the plain optimizer's numbers for parameters that FSDP has sharded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adafactor, Adagrad, Muon, Rprop

import manyhands as mh
from helpers.ranks import raises_on_ranks, run_ranks
from helpers.sharding_oracle import Lamb
from manyhands._ranks.ranks import RankGroup
from manyhands.sharding.fsdp import _whole_tensors


class Net(nn.Module):
    """Uneven rows, fewer rows than ranks, a frozen layer, and one that few steps use."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(5, 17)
        self.frozen = nn.Linear(17, 3, bias=False).requires_grad_(False)
        self.rare = nn.Linear(3, 3)
        self.narrow = nn.Linear(3, 2)

    def forward(self, x, rare):
        x = self.frozen(torch.tanh(self.wide(x)))
        return self.narrow(self.rare(x) if rare else x)


def new_net():
    torch.manual_seed(3)
    return Net()


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def matrices_and_vectors(params):
    """Two groups with different options."""
    params = list(params)
    return [
        {"params": [p for p in params if p.ndim == 2]},
        {"params": [p for p in params if p.ndim == 1], "lr": 0.02, "weight_decay": 0.0},
    ]


def matrices(params):
    return [p for p in params if p.ndim == 2]


KINDS = {
    "Muon": (Muon, matrices, {"lr": 0.03}),
    "Lamb": (Lamb, matrices_and_vectors, {"lr": 0.05, "weight_decay": 0.1}),
    "Adafactor": (Adafactor, matrices_and_vectors, {"lr": 0.05}),
    "Rprop": (Rprop, list, {"lr": 0.01}),
    "Adagrad": (Adagrad, matrices_and_vectors, {"lr": 0.05}),  # its state is made with it
}


def gradients_of(model, step, rank=0, workers=1):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(60, 5, generator=generator)[rank::workers]
    y = torch.randn(60, 2, generator=generator)[rank::workers]
    # A parameter without a gradient in this step, on all ranks.
    loss = nn.functional.mse_loss(model(x, rare=step % 3 == 0), y)
    loss.backward()
    return loss.item()


def train(model, optimizer, steps, rank=0, workers=1):
    for step in steps:
        model.zero_grad()
        gradients_of(model, step, rank, workers)
        nn.utils.clip_grad_norm_(trained(model), 0.5)
        optimizer.param_groups[0]["lr"] *= 0.9  # as a schedule does
        optimizer.step()


def make(name, model, *, sharded=True):
    kind, choose, options = KINDS[name]
    params = choose(model.parameters())
    if sharded:
        return mh.WholeTensorOptimizer(params, optim=kind, **options)
    return kind(params, **options)


def wrapped():
    model = new_net()
    model.wide = mh.FSDP(model.wide)
    return mh.FSDP(model)


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def close_to(expected):
    return {
        name: pytest.approx(value.flatten().tolist(), rel=1e-3, abs=1e-5)
        for name, value in expected.items()
    }


def flat(state):
    return {name: value.flatten().tolist() for name, value in state.items()}


@pytest.mark.sample("Muon-1", "Lamb-1", "Adafactor-1", "Rprop-3", "Adagrad-3")
@pytest.mark.parametrize(
    "workers", [1, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 5))]
)
@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_the_plain_optimizer(name, workers):
    def sharded():
        model = wrapped()
        optimizer = make(name, model)
        train(model, optimizer, range(4), dist.get_rank(), workers)
        return values(model)

    model = new_net()
    train(model, make(name, model, sharded=False), range(4))
    for state in run_ranks(workers, sharded):
        assert flat(state) == close_to(model.state_dict())


def test_each_rank_owns_a_part_and_all_have_the_same_values():
    def own():
        model = mh.FSDP(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))))
        optimizer = mh.WholeTensorOptimizer(model.parameters(), optim=Muon)
        model(torch.ones(2, 8) * dist.get_rank()).sum().backward()
        optimizer.step()
        owned = [p for group in optimizer.optim.param_groups for p in group["params"]]
        assert all(p.grad is None for p in owned)
        assert all(optimizer.state[p]["momentum_buffer"].shape == (8, 8) for p in owned)
        return [len(owned), values(model)]

    (two, here), (also_two, there), (too, everywhere) = run_ranks(3, own)
    assert two == also_two == too == 2
    for name in here:
        assert torch.equal(here[name], there[name]) and torch.equal(here[name], everywhere[name])


def test_a_step_sends_at_most_half_of_what_a_pass_sends(monkeypatch):
    def sent():
        total = []
        original = RankGroup.all_to_all

        def counting(self, outgoing, sizes, tag):
            total.append(sum(len(data) for data in outgoing))
            return original(self, outgoing, sizes, tag)

        monkeypatch.setattr(RankGroup, "all_to_all", counting)
        monkeypatch.setattr(_whole_tensors, "BUCKET", 3 * 64**2)
        model = mh.FSDP(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))))
        optimizer = mh.WholeTensorOptimizer(model.parameters(), optim=Muon)
        total.clear()  # the owners have their tensors now
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        assert len(total) == 2 * 2 * 3  # there and back, in three buckets
        return sum(total) / 2

    def build():
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    for workers in (2, 4):
        extra = run_ranks(workers, sent)
        parameters = 8 * 64 * 64 * 4
        assert sum(extra) / workers == 2 * parameters * (workers - 1) / workers**2
        elementwise = mh.plan(build, "sgd", workers=workers).rows[-1].sent
        assert max(extra) <= 0.5 * elementwise


def test_changed_parameters_are_sent_to_their_owners_again():
    """A loaded model, or values written into full parameters: the next step begins from them."""

    def sharded():
        model = wrapped()
        optimizer = make("Lamb", model)
        train(model, optimizer, range(2), dist.get_rank(), 2)
        model.load_state_dict(start)
        train(model, optimizer, range(2, 4), dist.get_rank(), 2)
        with model.summon_full_params():
            model.narrow.weight.data.mul_(0.5)
        train(model, optimizer, range(4, 5), dist.get_rank(), 2)
        model.wide.weight.to_local().data.mul_(0.5)  # which torch does not count as a change
        train(model, optimizer, range(5, 6), dist.get_rank(), 2)
        return values(model)

    start = new_net().state_dict()
    model = new_net()
    optimizer = make("Lamb", model, sharded=False)
    train(model, optimizer, range(2))
    model.load_state_dict(start)
    train(model, optimizer, range(2, 4))
    model.narrow.weight.data.mul_(0.5)
    train(model, optimizer, range(4, 5))
    model.wide.weight.data.mul_(0.5)
    train(model, optimizer, range(5, 6))
    for state in run_ranks(2, sharded):
        assert flat(state) == close_to(model.state_dict())


@pytest.mark.parametrize(
    "name", ["Muon", *(pytest.param(n, marks=pytest.mark.long) for n in ("Adafactor", "Adagrad"))]
)
def test_a_checkpoint_goes_to_other_ranks_and_shardings(name, tmp_path):
    def part(steps, folder, saved, way):
        model = wrapped() if way == "fsdp" else new_net()
        if way == "oss":
            kind, choose, options = KINDS[name]
            optimizer = mh.OSS(choose(model.parameters()), optim=kind, **options)
            model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        else:
            optimizer = make(name, model)
        if saved is not None:
            mh.load(saved, model=model, optimizer=optimizer)
        train(model, optimizer, steps, dist.get_rank(), dist.get_world_size())
        mh.save(folder, model=model, optimizer=optimizer)
        state = values(model.module if way == "oss" else model)
        return state

    plain = new_net()
    optimizer, done, saved = make(name, plain, sharded=False), 0, None
    for workers, way in [(2, "fsdp"), (3, "fsdp"), (2, "oss"), (1, "fsdp"), (2, "fsdp")]:
        steps = range(done, done + 2)
        train(plain, optimizer, steps)
        for state in run_ranks(workers, part, steps, tmp_path / str(done), saved, way):
            assert flat(state) == close_to(plain.state_dict()), (workers, way)
        done, saved = done + 2, tmp_path / str(done)


def test_a_rule_and_another_group_go_around_it():
    def gains():
        model = wrapped()
        groups = [
            {"params": list(model.wide.parameters())},
            {"params": list(model.narrow.parameters()), "lr": 0.01},
        ]
        inner = mh.WholeTensorOptimizer(groups, optim=Lamb, lr=0.05)
        assert [group["lr"] for group in inner.optim.param_groups] == [0.05, 0.01]
        optimizer = mh.AdaScale(inner)
        train(model, optimizer, range(1, 3), dist.get_rank(), 2)
        return [optimizer.gain(), values(model)]

    def plain_gains():
        model = new_net()
        groups = [
            {"params": list(model.wide.parameters())},
            {"params": list(model.narrow.parameters()), "lr": 0.01},
        ]
        optimizer = mh.AdaScale(Lamb(groups, lr=0.05))
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        train(ddp, optimizer, range(1, 3), dist.get_rank(), 2)
        return [optimizer.gain(), values(model)]

    (gain, state), _ = run_ranks(2, gains)
    (expected, plain), _ = run_ranks(2, plain_gains)
    assert gain == pytest.approx(expected, rel=1e-4) and 1.0 < gain < 2.0
    assert flat(state) == close_to(plain)


def test_fingerprints_change_with_bits_and_with_the_order_of_rows():
    values = torch.randn(5, 3)
    changed = [values.flip(0), values.clone(), values * 2, -values]
    changed[1].data[4, 2] += 1e-6
    changed.append(values.index_select(0, torch.tensor([0, 2, 1, 3, 4])))
    found = _whole_tensors.fingerprints([values, *changed])
    assert len({*found}) == len(found)
    same = [values.clone(), values[:0], values.double(), values.bfloat16(), values.to(torch.cfloat)]
    assert _whole_tensors.fingerprints(same)[0] == found[0]


def test_a_closure_runs_once():
    def step():
        model = mh.FSDP(nn.Linear(4, 4, bias=False))
        optimizer = mh.WholeTensorOptimizer(model.parameters(), optim=Muon)
        calls = []

        def closure():
            calls.append(1)
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).ndim == 0
        return len(calls)

    assert step() == 1
    assert run_ranks(2, step) == [1, 1]


def on_two_ranks(mistake):
    def call():
        mistake(mh.FSDP(nn.Linear(4, 4, bias=False)))

    return call


def step_alike(model, **options):
    return mh.WholeTensorOptimizer(model.parameters(), **{"optim": Muon, **options})


MISTAKES = {
    "unsharded": (
        lambda _: step_alike(nn.Linear(4, 4, bias=False)),
        TypeError,
        r"a parameter of shape \(4, 4\) is not. Wrap the model first",
    ),
    "coupled parameters": (
        lambda model: step_alike(model, optim=torch.optim.LBFGS),
        ValueError,
        "LBFGS combines all parameters in a step",
    ),
    "other rates": (
        lambda model: step_alike(model, lr=0.1 + dist.get_rank()),
        ValueError,
        "different values of lr",
    ),
    "state_dict": (
        lambda model: step_alike(model).state_dict(),
        RuntimeError,
        r"mh.save\(\)",
    ),
    "load_state_dict": (
        lambda model: step_alike(model).load_state_dict({}),
        RuntimeError,
        r"mh.load\(\)",
    ),
    "AdamScale": (
        lambda model: mh.AdamScale(step_alike(model, optim=torch.optim.AdamW, lr=0.1)),
        TypeError,
        "needs no whole tensors",
    ),
    "another group": (
        lambda model: step_alike(model).add_param_group({"params": [torch.ones(2, 2)]}),
        RuntimeError,
        "has no add_param_group",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    mistake, error, says = MISTAKES[name]
    raises_on_ranks(2, error, on_two_ranks(mistake), match=says)
