"""`shard`: the same loop, losses and checkpoints at every level."""

import copy
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks

LEVELS = (0, 1, 2, 3)
DDP = DistributedDataParallel
MODELS = (DDP, DDP, mh.ShardedDataParallel, mh.FullyShardedDataParallel)


def new_model(seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def two_groups(model, kind=torch.optim.SGD, **options):
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights}, {"params": biases, "lr": 0.3, "weight_decay": 0.0}]
    return kind(groups, lr=0.1, weight_decay=0.05, **options)


def sgd(model):
    return two_groups(model, momentum=0.9, nesterov=True)


def adamw(model):
    return two_groups(model, torch.optim.AdamW, betas=(0.8, 0.95))


def muon_and_adamw(model):
    params = list(model.parameters())
    matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def draw(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 6, generator=generator), torch.randn(24, 3, generator=generator)


def gradients_of(model, step, rank=0, workers=1):
    """Run two backward passes over this rank's rows; return the mean loss of all rows."""
    x, y = (rows[rank::workers] for rows in draw(step))
    total = torch.zeros(())
    for number, part in enumerate(torch.arange(len(x)).chunk(2)):
        alone = model.no_sync() if number == 0 and hasattr(model, "no_sync") else nullcontext()
        with alone:
            loss = nn.functional.mse_loss(model(x[part]), y[part]) / 2
            loss.backward()
        total += loss.detach()
    if workers > 1:
        dist.all_reduce(total)
    return total.item() / workers


def train(model, optimizers, steps=range(5), rank=0, workers=1):
    """The user's loop, of which no line knows the level."""
    schedules = [StepLR(one, 2, gamma=0.5) for one in optimizers]
    losses = []
    for step in steps:
        losses.append(gradients_of(model, step, rank, workers))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for one in (*optimizers, *schedules):
            one.step()
        model.zero_grad()
    return losses


def sharded_losses(make_optimizer, level):
    model = new_model(seed=dist.get_rank())  # rank 0's values are everyone's
    given = make_optimizer(model)
    model, optimizer = mh.shard(model, given, level=level)
    several = isinstance(given, list)
    assert isinstance(optimizer, list) is several
    optimizers = optimizer if several else [optimizer]
    assert type(model) is MODELS[level]
    assert all(isinstance(one, mh.OSS) is (level in (1, 2)) for one in optimizers)
    return train(model, optimizers, rank=dist.get_rank(), workers=dist.get_world_size())


@pytest.mark.sample("1-sgd", "1-muon_and_adamw", "2-muon_and_adamw")
@pytest.mark.parametrize("make_optimizer", [sgd, adamw, muon_and_adamw])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_level_trains_as_the_plain_loop(workers, make_optimizer):
    model = new_model()
    made = make_optimizer(model)
    expected = train(model, made if isinstance(made, list) else [made])

    def at_every_level():
        return [sharded_losses(make_optimizer, level) for level in LEVELS]

    for found in run_ranks(workers, at_every_level):
        for level, losses in enumerate(found):
            assert losses == pytest.approx(expected, rel=2e-4), level


def test_rules_go_around_what_is_returned():
    def gains(level):
        model = new_model()
        model, optimizer = mh.shard(model, sgd(model), level=level)
        optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=2)
        train(model, [optimizer], rank=dist.get_rank(), workers=2)
        return [optimizer.gain(), optimizer.progress]

    expected, *others = run_ranks(2, lambda: [gains(level) for level in LEVELS])[0]
    assert 1.0 < expected[0] < 4.0
    for level, found in enumerate(others, 1):
        assert found == pytest.approx(expected, rel=1e-4), level


def test_one_checkpoint_goes_through_all_levels(tmp_path):
    def one_step(level, step):
        model = new_model(seed=7)
        model, optimizer = mh.shard(model, adamw(model), level=level)
        if step:
            mh.load(tmp_path / f"step-{step - 1}", model=model, optimizer=optimizer)
        else:
            prefix = "" if level > 1 else "module."
            model.load_state_dict({f"{prefix}{n}": t for n, t in start.items()})
        loss = gradients_of(model, step, dist.get_rank(), dist.get_world_size())
        optimizer.step()
        mh.save(tmp_path / f"step-{step}", model=model, optimizer=optimizer)
        return loss

    start = new_model().state_dict()
    model = new_model()
    optimizer = adamw(model)
    expected = []
    for step in range(5):
        expected.append(gradients_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
    found = [
        run_ranks(workers, one_step, level, step)[0]
        for step, (level, workers) in enumerate([(0, 2), (3, 3), (1, 2), (2, 1), (0, 2)])
    ]
    assert found == pytest.approx(expected, rel=1e-5)


def test_auto_takes_the_cheapest_level_that_fits():
    def chosen(memory):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
        own = memory[dist.get_rank()] if isinstance(memory, tuple) else memory
        model, optimizer = mh.shard(model, torch.optim.AdamW(model.parameters()), memory=own)
        return [type(model).__name__, type(optimizer).__name__]

    plan = mh.plan(
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), "adamw", workers=2, backend="gloo"
    )
    ddp, _, sharded, fully = [row.total for row in plan.rows]
    assert fully < sharded < ddp
    every = [
        (None, ["DistributedDataParallel", "AdamW"]),  # on a CPU nothing is assumed
        (ddp, ["DistributedDataParallel", "AdamW"]),
        (ddp - 1, ["ShardedDataParallel", "OSS"]),
        (sharded - 1, ["FullyShardedDataParallel", "AdamW"]),
        ((ddp, sharded - 1), ["FullyShardedDataParallel", "AdamW"]),  # by rank
    ]
    for found in run_ranks(2, lambda: [chosen(memory) for memory, _ in every]):
        for (memory, expected), names in zip(every, found, strict=True):
            assert names == expected, memory
    here, there = raises_on_ranks(2, MemoryError, chosen, (1000, ddp), match="no level fits")
    assert "on this rank" in here and "on another rank" in there


def test_auto_shards_the_parameters_of_an_optimizer_of_whole_tensors():
    def build():
        return nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))

    def chosen(memory):
        model, optimizers = mh.shard(model := build(), muon_and_adamw(model), memory=memory)
        return [type(one).__name__ for one in (model, *optimizers)]

    plan = mh.plan(model := build(), muon_and_adamw(model), workers=4, backend="gloo")
    *others, fully = [row.total for row in plan.rows]
    assert fully < min(others)
    expected = ["FullyShardedDataParallel", "WholeTensorOptimizer", "AdamW"]
    assert run_ranks(4, chosen, fully) == [expected] * 4


def other_rate(model):
    return torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))


def other_class(model):
    kind = torch.optim.Muon if dist.get_rank() else torch.optim.SGD
    return kind([p for p in model.parameters() if p.ndim == 2], lr=0.1)


def only_here(model):
    optimizer = sgd(model)
    if dist.get_rank() == 1:
        optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.sample(
    "other_rate-different values of lr-0",
    "other_rate-different values of lr-2",
    "other_class-different optimizers-0",
    "other_class-different optimizers-3",
    "only_here-has a scheduler or a step hook-1",
    "only_here-has a scheduler or a step hook-3",
)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("make_optimizer", "says"),
    [
        (other_rate, "different values of lr"),
        (other_class, "different optimizers"),
        (only_here, "has a scheduler or a step hook"),
    ],
)
def test_what_differs_between_ranks_is_an_error_on_all(level, make_optimizer, says):
    def ask():
        model = new_model()
        for bias in (p for p in model.parameters() if p.ndim == 1):
            bias.requires_grad_(make_optimizer is not other_class)
        mh.shard(model, make_optimizer(model), level=level)

    raises_on_ranks(2, ValueError, ask, match=says)


@on_ranks(2, raises=ValueError, match="different values of level")
def test_ranks_must_ask_for_the_same_level():
    model = new_model()
    mh.shard(model, sgd(model), level=2 + dist.get_rank())


class WithScalar(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(()))


class WithEmpty(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.more = nn.Parameter(torch.ones(0, 4))


def fused(kind):
    return partial(kind, fused=True)


class WithHook(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.bias.register_hook(lambda grad: grad)


@pytest.mark.parametrize(
    ("build", "kind", "says"),
    [
        (WithScalar, torch.optim.SGD, "scale is a scalar"),
        (WithEmpty, torch.optim.SGD, "more has no elements"),
        (WithHook, torch.optim.SGD, "bias has hooks"),
        (lambda: nn.Embedding(5, 4, sparse=True), torch.optim.SGD, "has sparse gradients"),
        (lambda: nn.Linear(4, 4), fused(torch.optim.SGD), "fused SGD does not.*Omit fused"),
        (lambda: nn.Linear(4, 4), fused(torch.optim.Adagrad), "fused Adagrad does not"),
        (lambda: nn.Linear(4, 4), torch.optim.LBFGS, "the state of LBFGS"),
        (lambda: nn.Linear(4, 4), torch.optim.SparseAdam, "the state of SparseAdam"),
    ],
)
def test_what_level_3_cannot_shard_it_leaves_alone(build, kind, says):
    def ask():
        model = build()
        before = list(model.parameters())
        try:
            mh.shard(model, kind(model.parameters(), lr=0.1), level=3)
        finally:
            assert all(p is q for p, q in zip(before, model.parameters(), strict=True))

    raises_on_ranks(2, ValueError, ask, match=says)


# LBFGS needs a closure, and SparseAdam sparse gradients.
WITHOUT = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
CLASSES = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
TORCHS = [k for k in CLASSES if issubclass(k, torch.optim.Optimizer) and k not in WITHOUT]
OFTEN = ("SGD", "AdamW", "Adafactor", "Muon")  # the others in the long tests only


@pytest.mark.sample("Adafactor", "SGD")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k.__name__ in OFTEN else pytest.mark.long) for k in TORCHS]
)
def test_every_optimizer_of_torchs_trains_alike_at_every_level(kind):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False))

    def losses(level):
        model = build()
        model, optimizer = mh.shard(model, kind(model.parameters(), lr=0.02), level=level)
        return train(model, [optimizer], rank=dist.get_rank(), workers=2)

    model = build()
    expected = train(model, [kind(model.parameters(), lr=0.02)])
    at_every_level, _ = run_ranks(2, lambda: [losses(level) for level in LEVELS])
    for level, found in enumerate(at_every_level):
        assert found == pytest.approx(expected, rel=1e-3), level


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_names_of_parameters_stay(level):
    model = new_model()
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(list(model.named_parameters()), lr=0.1)
    _, optimizer = mh.shard(model, optimizer, level=level)
    assert optimizer.param_groups[0]["param_names"] == names


def test_a_policy_chooses_the_wraps_of_level_3():
    model = new_model()
    model, _ = mh.shard(model, sgd(model), level=3, auto_wrap_policy={nn.Linear})
    assert isinstance(model, mh.FSDP)
    assert [isinstance(layer, mh.FSDP) for layer in model] == [True, False, True, False, True]


@pytest.mark.parametrize("level", [2, 3])
def test_one_process_without_a_group(level):
    plain, model = new_model(), new_model()
    expected = train(plain, [sgd(plain)])
    model, optimizer = mh.shard(model, sgd(model), level=level)
    assert train(model, [optimizer]) == expected


def used(model):
    optimizer = sgd(model)
    gradients_of(model, 0)
    optimizer.step()
    return optimizer


def scheduled(model):
    optimizer = sgd(model)
    StepLR(optimizer, 2)
    return optimizer


class Forgetful(torch.optim.SGD):
    """An optimizer with an argument that is not among its defaults."""

    def __init__(self, model, lr=0.1, factor=2.0):
        super().__init__(model.parameters(), lr=lr)
        self.factor = factor


MISTAKES = [
    ({"level": 4}, ValueError, "level must be one of 'auto', 0, 1, 2, 3, got 4"),
    ({"level": 0}, ValueError, "process group"),
    ({"model": lambda: mh.FSDP(new_model())}, RuntimeError, "0.weight is .* already"),
    ({"optimizer": 3}, TypeError, "torch.optim.Optimizer or a list of them, got int"),
    ({"optimizer": lambda _: []}, ValueError, "must be in exactly one optimizer"),
    ({"optimizer": lambda m: mh.AdaScale(sgd(m))}, TypeError, "plain .*, got AdaScale"),
    ({"optimizer": lambda m: mh.OSS(m.parameters(), lr=0.1)}, TypeError, "plain .*, got OSS"),
    ({"optimizer": used}, ValueError, "has taken steps"),
    ({"optimizer": scheduled}, ValueError, "has a scheduler or a step hook"),
    ({"optimizer": lambda _: sgd(new_model())}, ValueError, "that are not in the model"),
    ({"optimizer": lambda m: [sgd(m), adamw(m)]}, ValueError, "Check 0.weight, "),
    ({"optimizer": Forgetful}, ValueError, r"does not keep \['factor'\] in its defaults"),
    ({"optimizer": lambda m: sgd(m[0:1])}, ValueError, "one optimizer. Check 2.weight, .*a list"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("changed", "error", "says"), MISTAKES)
def test_mistakes(changed, error, says):
    call = {"model": new_model, "optimizer": sgd, "level": 2, **changed}
    model, optimizer = call["model"], call["optimizer"]
    model = model() if callable(model) else model
    optimizer = optimizer(model) if callable(optimizer) else optimizer
    with pytest.raises(error, match=says):
        mh.shard(model, optimizer, call["level"])


def once(level, choose=lambda model: model):
    """Shard a part of a model, or all of it."""

    def use(model):
        return mh.shard(choose(model), sgd(choose(model)), level)[0]

    return use


def in_sharded_ddp(model):
    return mh.ShardedDataParallel(model, mh.OSS(model.parameters(), lr=0.1))


def in_fully_shard(model):
    return fully_shard(model)


FIRST = {  # what is done with the model before, what is sharded then, and what the error says
    **{f"shard {level}": (once(level), None, "") for level in LEVELS},
    **{f"shard {level} of a layer": (once(level, lambda m: m[2]), None, "2.") for level in LEVELS},
    **{f"shard {level}, a layer next": (once(level), 2, "") for level in LEVELS},
    "DistributedDataParallel": (DistributedDataParallel, None, "0.weight is in a Distributed"),
    "DataParallel": (nn.DataParallel, None, "0.weight is in a DataParallel "),
    "ShardedDataParallel": (in_sharded_ddp, None, "0.weight is in a ShardedDataParallel "),
    "FSDP": (mh.FSDP, None, "0.weight is sharded "),
    "fully_shard": (in_fully_shard, None, "0.weight is sharded "),
}


@pytest.mark.sample(
    "shard 0",
    "shard 3",
    "shard 1 of a layer",
    "shard 0, a layer next",
    "shard 3, a layer next",
    "DataParallel",
    "fully_shard",
)
@pytest.mark.parametrize("name", FIRST)
@on_ranks(2)
def test_a_model_is_sharded_once_at_a_time(name):
    use, part, says = FIRST[name]
    for level in (*LEVELS, "auto"):
        model = new_model()
        used = use(model)
        plain = model if part is None else model[part]
        before = list(plain.parameters())
        with pytest.raises((RuntimeError, TypeError), match=rf"{says}.*already"):
            mh.shard(plain, sgd(plain), level)
        assert all(p is q for p, q in zip(before, plain.parameters(), strict=True))
        del used


@pytest.mark.parametrize("level", [0, 1, 2])
@on_ranks(2)
def test_a_model_may_be_sharded_again_when_nobody_holds_the_first_one(level):
    model = new_model()
    first, _ = mh.shard(model, sgd(model), level)
    del first
    mh.shard(model, sgd(model), level)


@pytest.mark.parametrize("level", [*LEVELS, "auto"])
@on_ranks(2, raises=Exception, match="DataParallel already")
def test_all_ranks_learn_that_the_model_of_one_is_in_use(level):
    model = new_model()
    used = nn.DataParallel(model) if dist.get_rank() == 1 else model
    mh.shard(model, sgd(model), level)
    del used


@pytest.mark.parametrize("level", [1, 2, 3])
def test_one_process_shards_a_model_once_as_well(level):
    model = new_model()
    if level == 1:
        used = in_sharded_ddp(model)
    else:
        used, _ = mh.shard(model, sgd(model), level)
    with pytest.raises((RuntimeError, TypeError), match="already"):
        mh.shard(model, sgd(model), max(level, 2))
    del used


@pytest.mark.quick
def test_the_plain_optimizer_keeps_its_options():
    model = new_model()
    given = adamw(model)
    before = copy.deepcopy([{**g, "params": None} for g in given.param_groups])
    _, made = mh.shard(model, given, level=3)
    assert [{**group, "params": None} for group in made.param_groups] == before
    assert [len(group["params"]) for group in made.param_groups] == [3, 3]


# -- torch.save(optimizer.state_dict()) ------------------------------------------------------------


def saved_by(ranks, folder, level=3, own_optimizer=False):
    """Train two steps; ranks below `ranks` save the optimizer's state; train three more."""
    rank = dist.get_rank()
    model, optimizer = sharded(level, own_optimizer)
    for step in range(5):
        gradients_of(model, step, rank, dist.get_world_size())
        optimizer.step()
        if step == 1 and rank < ranks:
            torch.save(optimizer.state_dict(), folder / f"{rank}.pt")
    return model, optimizer


def sharded(level, own_optimizer=False):
    model = new_model()
    if own_optimizer:  # made by the user, and unknown to us before its first step
        model = mh.FSDP(model)
        return model, adamw(model)
    return mh.shard(model, adamw(model), level=level)


@pytest.mark.parametrize("own_optimizer", [False, True])
def test_a_state_that_one_rank_saved_alone_is_noticed_and_loads_on_no_other(
    own_optimizer, tmp_path
):
    def alone():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved_by(1, tmp_path, own_optimizer=own_optimizer)
        return [str(each.message) for each in caught if "state_dict" in str(each.message)]

    def resume():
        _model, optimizer = sharded(3, own_optimizer)
        try:
            optimizer.load_state_dict(torch.load(tmp_path / "0.pt", weights_only=True))
            optimizer.param_groups[0]["params"][0].grad = None
            optimizer.step()
        except ValueError as error:
            return str(error)
        return ""

    first, second = run_ranks(2, alone)
    assert len(first) == 1 and "loads on no other rank. Save with mh.save(" in first[0]
    assert not second
    first, second = run_ranks(2, resume)
    assert not first  # it is its own
    assert "shard of rank 0 of 2" in second and "mh.save(" in second
    for message in run_ranks(3, resume):
        assert "shard of rank 0 of 2" in message and "mh.save(" in message


@pytest.mark.parametrize("own_optimizer", [False, True])
def test_a_state_that_every_rank_saves_for_itself_goes_on_exactly(own_optimizer, tmp_path):
    def whole_run():
        model, _ = saved_by(2, tmp_path, own_optimizer=own_optimizer)
        if dist.get_rank() == 0:
            torch.save([], tmp_path / "done.pt")
        return model.state_dict()

    def resumed():
        rank = dist.get_rank()
        model, optimizer = sharded(3, own_optimizer)
        for step in range(2):
            gradients_of(model, step, rank, 2)
            optimizer.step()
        optimizer.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))
        for step in range(2, 5):
            gradients_of(model, step, rank, 2)
            optimizer.step()
        return model.state_dict()

    expected, found = run_ranks(2, whole_run)[0], run_ranks(2, resumed)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_ranks(2)
def test_dcp_saves_and_loads_the_state_of_level_3(tmp_path):
    _, optimizer = saved_by(0, tmp_path)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp")
    model, other = sharded(3)
    gradients_of(model, 9, dist.get_rank(), 2)
    other.step()
    loaded = {"optimizer": other.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    other.load_state_dict(loaded["optimizer"])
    pairs = zip(optimizer.state.values(), other.state.values(), strict=True)
    equal = [bool((a["exp_avg"].to_local() == b["exp_avg"].to_local()).all()) for a, b in pairs]
    assert len(equal) == 6 and all(equal)


def test_a_shard_of_level_3_is_refused_where_parameters_are_whole(tmp_path):
    def at(level):
        _, optimizer = sharded(level)
        optimizer.load_state_dict(torch.load(tmp_path / "1.pt", weights_only=True))

    run_ranks(2, lambda: saved_by(2, tmp_path) and None)
    for level, workers in ((1, 2), (2, 2), (2, 1), (3, 1)):
        says = "shard of rank 1 of 2.*parameters are not sharded.*mh.save"
        raises_on_ranks(workers, ValueError, lambda level=level: at(level), match=says)


@pytest.mark.parametrize("level", [1, 2])
@on_ranks(2)
def test_a_state_dict_of_one_rank_names_save_first(level):
    model, optimizer = sharded(level)
    gradients_of(model, 0, dist.get_rank(), 2)
    optimizer.step()
    if dist.get_rank() == 0:
        match = r"mh\.save\(.*consolidate_state_dict\(\).*gather_state=True to OSS or mh.shard"
        with pytest.raises(RuntimeError, match=match):
            optimizer.state_dict()


@pytest.mark.parametrize("level", [1, 2])
@on_ranks(2)
def test_gather_state_makes_state_dict_that_of_the_plain_optimizer(level):
    plain, model = new_model(), new_model()
    expected = adamw(plain)
    gradients_of(plain, 0)
    expected.step()
    model, optimizer = mh.shard(model, adamw(model), level=level, gather_state=True)
    gradients_of(model, 0, dist.get_rank(), 2)
    optimizer.step()
    torch.testing.assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"])


@on_ranks(2, raises=ValueError, match="for levels 1 and 2.*mh.save")
def test_gather_state_is_refused_at_level_3_before_anything_changes():
    model = new_model()
    try:
        mh.shard(model, adamw(model), level=3, gather_state=True)
    finally:
        assert not any(isinstance(each, mh.FSDP) for each in model.modules())


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it does not compile
@pytest.mark.parametrize("compiled", ["model", "layer"])
def test_a_model_that_was_compiled_before_it_is_sharded_trains_like_any_other(compiled):
    def train(level):
        model = new_model()
        if compiled == "layer":
            model[0] = torch.compile(model[0], backend="eager")
        elif level is not None:
            model = torch.compile(model, backend="eager")
        optimizer = adamw(model)
        used = model
        if level is not None:
            used, optimizer = mh.shard(model, optimizer, level=level)
        for step in range(3):
            gradients_of(used, step, *((0, 1) if level is None else (dist.get_rank(), 2)))
            optimizer.step()
        return [param.detach() for param in used.state_dict().values()]

    expected = train(None)
    for found in run_ranks(2, lambda: train(3)):
        torch.testing.assert_close(found, expected)
