"""The sharded optimizer: every way to use torch's optimizers works as it does with them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.sharding_oracle import (
    AROUND_OSS,
    STEPS,
    Lamb,
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    make_model,
    one,
    oss,
    plain,
    train,
    train_alone,
    train_averaged,
    wrap,
)
from manyhands import fairscale


def two_rates(model, make):
    """Groups of their own options, one of them with parameters of both layers."""
    first, second, third = (list(model[i].parameters()) for i in (0, 2, 4))
    groups = [
        {"params": [*first, third[1]], "lr": 0.05},
        {"params": [*second, third[0]], "weight_decay": 0.3, "betas": (0.8, 0.99)},
    ]
    return [make(groups, AdamW, lr=0.02)]


def named(model, make):
    return [make(model.named_parameters(), AdamW, lr=0.02)]


def tensor_rate(model, make):
    return [make(model.parameters(), torch.optim.Adam, lr=torch.tensor(0.02), foreach=False)]


WORKERS = 2  # where no test names another number
BUILDS = {
    "foreach": one(AdamW, lr=0.02, foreach=True),
    "fused": one(AdamW, lr=0.02, fused=True),
    "fused SGD": one(SGD, lr=0.05, momentum=0.9, fused=True),
    "maximize": one(torch.optim.Adam, lr=0.02, maximize=True, amsgrad=True),
    "without state": one(SGD, lr=0.05),
    "nesterov": one(SGD, lr=0.05, momentum=0.9, nesterov=True, dampening=0.0),
    "RMSprop centred": one(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": one(torch.optim.NAdam, lr=0.02),
    "ASGD": one(torch.optim.ASGD, lr=0.02),
    "Rprop": one(torch.optim.Rprop, lr=0.01),
    "a tensor as learning rate": tensor_rate,
    "groups": two_rates,
    "named parameters": named,
    "AdamW left whole": one(AdamW, lr=0.02),  # layout="whole", below
}


def test_any_optimizer_and_option_is_the_plain_run():
    def run():
        result = {}
        for name, build in BUILDS.items():
            for way in AROUND_OSS:

                def laid_out(model, make, build=build, name=name):
                    layout = "whole" if name == "AdamW left whole" else None
                    return build(model, lambda p, kind, **o: make(p, kind, layout=layout, **o))

                optimizers, module = train(laid_out, way, passes=2)
                result[f"{name}, {way}"] = copied(module.parameters())
                if name == "AdamW left whole":
                    assert optimizers[0].layout == "whole"
                elif name != "groups":
                    assert optimizers[0].layout == "even"
        return result

    ranks = run_ranks(WORKERS, run)
    for name, build in BUILDS.items():
        _, expected = train_alone(build, WORKERS, passes=2)
        for way in AROUND_OSS:
            what = f"{name}, {way}"
            assert_same([r[what] for r in ranks], list(expected.parameters()), what)


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_each_worker_keeps_its_share_of_the_state(kind):
    def run():
        (optimizer,), module = train(one(kind), "OSS + ShardedDataParallel")
        held = sum(s["exp_avg"].numel() for s in optimizer.optim.state.values())
        return held, optimizer.layout, sum(p.numel() for p in module.parameters())

    ranks = run_ranks(3, run)
    total = ranks[0][2]
    assert sum(held for held, _, _ in ranks) == total
    if kind is AdamW:
        assert ranks[0][1] == "even"
        assert max(held for held, _, _ in ranks) <= total / 3 + 6 * 16
    else:
        assert ranks[0][1] == "whole"
        assert max(held for held, _, _ in ranks) <= 143  # the largest parameter has one owner


def test_partition_parameters_tells_who_holds_what():
    def run():
        model = make_model()
        result = []
        for kind in (AdamW, Lamb):
            (optimizer,) = two_rates(model, lambda p, _, k=kind, **o: oss(p, k, **o))
            optimizer.refresh_trainable()
            parts = optimizer.partition_parameters()
            assert len(parts) == dist.get_world_size()
            with torch.no_grad():
                before = copied(model.parameters())
                for p in model.parameters():
                    p.zero_()
                for rank, groups in enumerate(parts):
                    assert [g["lr"] for g in groups] == [0.05, 0.02]
                    for group in groups:
                        for part in group["params"]:
                            part.add_(rank + 1)  # views of the parameters
                owners = copied(model.parameters())
                for p, value in zip(model.parameters(), before, strict=True):
                    p.copy_(value)
            assert all((o >= 1).all() and (o <= 3).all() for o in owners)
            if kind is Lamb:
                assert all(len(o.unique()) == 1 for o in owners)
            held = sum(p.numel() for g in optimizer.optim.param_groups for p in g["params"])
            rank = dist.get_rank()
            assert held == sum(int((o == rank + 1).sum()) for o in owners)
            result.append(owners)
        return result

    ranks = run_ranks(3, run)
    for ours, theirs in zip(ranks[0], ranks[2], strict=True):
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


# -- what comes between the steps ----------------------------------------------------------------


def training(make, way, act=None, *, build=two_rates, steps=6, model=make_model, loss=loss_of):
    """Train; `act(step, module, optimizer)` is called before each step's forward, and may
    return a loss function for this step. `way` None: the plain run."""
    rank, workers = everyone()
    module = model()
    (optimizer,) = build(module, make)
    wrapped = module
    if way is not None:
        options = {"warn_on_trainable_params_changed": False} if "Sharded" in way else {}
        wrapped = wrap(way, module, [optimizer], **options)
    else:
        workers = WORKERS
    x, y = make_batches(steps, 1, workers, dtype=next(module.parameters()).dtype)
    for step in range(steps):
        if act is not None:
            act(step, module, optimizer)
        optimizer.zero_grad()
        if way is None:
            loss(wrapped, x[step, 0].flatten(0, 1), y[step, 0].flatten(0, 1)).backward()
        else:
            loss(wrapped, x[step, 0, rank], y[step, 0, rank]).backward()
        optimizer.step()
    return module, optimizer


def check(act, *, ways=AROUND_OSS, exact_groups=True, **options):
    """The training with `act` is the plain one's, and so are the optimizer's groups."""

    def groups_of(optimizer):
        return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    def run():
        result = {}
        for way in ways:
            module, optimizer = training(oss, way, act, **options)
            result[way] = copied(module.parameters()), groups_of(optimizer)
        return result

    ranks = run_ranks(WORKERS, run)
    expected, optimizer = training(plain, None, act, **options)
    for way in ways:
        assert_same([r[way][0] for r in ranks], list(expected.parameters()), way)
        if exact_groups:
            assert all(r[way][1] == groups_of(optimizer) for r in ranks), way


def test_options_that_are_changed_between_steps_count():
    def act(step, module, optimizer):
        optimizer.param_groups[step % 2]["lr"] *= 0.7
        optimizer.param_groups[0]["betas"] = (0.5, 0.9 + step / 100)

    check(act)


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "LambdaLR"])
def test_schedulers_set_the_options(scheduler):
    made = {}

    def act(step, module, optimizer):
        if step == 0:
            made["scheduler"] = (
                torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=9)
                if scheduler == "OneCycleLR"
                else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.8**n)
            )
        else:
            made["scheduler"].step()  # cycles beta1, too

    check(act)


def test_a_group_that_is_added_later_joins_in():
    def build(model, make):
        return [make(model[0].parameters(), AdamW, lr=0.02)]

    def freeze_rest():
        model = make_model()
        for p in [*model[2].parameters(), *model[4].parameters()]:
            p.requires_grad_(False)
        return model

    def act(step, module, optimizer):
        if step in (2, 3):
            layer = module[step if step == 2 else 4]
            for p in layer.parameters():
                p.requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.07})

    check(act, build=build, model=freeze_rest, ways=AROUND_OSS[1:])


def test_parameters_that_thaw_and_freeze_again():
    """The step count, and so Adam's correction of the bias, is each parameter's own."""

    def freeze_first():
        model = make_model()
        model[0].requires_grad_(False)
        return model

    def act(step, module, optimizer):
        if step in (2, 5):
            module[0].requires_grad_(True)
        if step in (3, 5):
            module[2].requires_grad_(step == 5)
        if step == 4:
            module[0].requires_grad_(False)

    check(act, model=freeze_first, ways=AROUND_OSS[1:])
    check(act, model=freeze_first, ways=AROUND_OSS[1:], build=one(Lamb, weight_decay=0.1))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_that_freeze_between_backward_and_step(set_to_none):
    """torch's optimizers update what has a gradient; the workers must not drift apart."""

    def run(make, way):
        rank, _ = everyone()
        module = make_model()
        (optimizer,) = two_rates(module, make)
        wrapped = module
        if way:
            wrapped = wrap(way, module, [optimizer], warn_on_trainable_params_changed=False)
        x, y = make_batches(4, 1, 3)
        for step in range(4):
            optimizer.zero_grad(set_to_none)
            own = (x[step, 0].flatten(0, 1), y[step, 0].flatten(0, 1))
            loss_of(wrapped, *((x[step, 0, rank], y[step, 0, rank]) if way else own)).backward()
            if step == 1:
                module[0].requires_grad_(False)
            optimizer.step()
        return copied(module.parameters())

    ranks = run_ranks(3, run, oss, AROUND_OSS[1])
    assert_same(ranks, run(plain, None))


def test_a_closure_runs_once_and_its_loss_comes_back():
    def run(make, way):
        rank, _ = everyone()
        module = make_model()
        (optimizer,) = two_rates(module, make)
        wrapped = wrap(way, module, [optimizer]) if way else module
        x, y = make_batches(4, 1, 3)
        calls, losses = [], []
        for step in range(4):

            def closure(step=step):
                calls.append(step)
                optimizer.zero_grad()
                if way:
                    loss = loss_of(wrapped, x[step, 0, rank], y[step, 0, rank])
                else:
                    loss = loss_of(wrapped, x[step, 0].flatten(0, 1), y[step, 0].flatten(0, 1))
                loss.backward()
                return loss

            loss = optimizer.step(closure).detach()
            if way:
                dist.all_reduce(loss)
            losses.append(loss / 3 if way else loss)
        assert calls == [0, 1, 2, 3]
        return [*losses, *copied(module.parameters())]

    ranks = run_ranks(3, lambda: [run(oss, way) for way in AROUND_OSS])
    for i, way in enumerate(AROUND_OSS):
        assert_same([r[i] for r in ranks], run(plain, None), way)


@on_ranks(2)
def test_step_hooks_run_once_around_each_step():
    calls, optimizer = [], None

    def act(step, module, optimizer):
        if step == 0:
            optimizer.register_step_pre_hook(lambda o, *_: calls.append(("pre", o)))
            optimizer.register_step_post_hook(lambda o, *_: calls.append(("post", o)))

    _, optimizer = training(oss, AROUND_OSS[1], act, steps=2)
    assert [o is optimizer for _, o in calls] == [True] * 4
    assert [name for name, _ in calls] == ["pre", "post", "pre", "post"]


# -- unusual parameters --------------------------------------------------------------------------


class Unusual(nn.Module):
    """0-dim, empty, channels-last and transposed parameters, and a table of embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.conv = nn.Conv2d(3, 5, 3)
        self.turned = nn.Parameter(torch.randn(6, 7).t())
        self.table = nn.Embedding(9, 4)
        self.to(torch.float64)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        image = x[..., :3].reshape(-1, 3, 1, 1).expand(-1, 3, 5, 5)
        image = image.contiguous(memory_format=torch.channels_last)
        place = (x[:, 3] * 10).long() % 9
        out = self.conv(image).flatten(1).mean(dim=1, keepdim=True) * self.scale
        out = out + self.table(place).sum(dim=1, keepdim=True) + self.empty.sum()
        return torch.cat([out, (x @ self.turned[:5, :2])], dim=1)


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_parameters_of_every_shape_and_order_of_memory(kind):
    check(None, build=one(kind, lr=0.02, weight_decay=0.1), model=Unusual, exact_groups=False)


def test_a_parameter_keeps_its_shape_and_order_of_memory():
    def run():
        module, before = Unusual(), [p.stride() for p in Unusual().parameters()]
        oss(module.parameters(), AdamW)
        assert [p.stride() for p in module.parameters()] == before
        assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
        return copied(module.parameters())

    assert_same(run_ranks(2, run), list(Unusual().parameters()), rtol=0, atol=0)


class Mixed(nn.Module):
    """bfloat16, float32 and float64 in one parameter group."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 12).to(torch.bfloat16)
        self.second = nn.Linear(12, 11)
        self.third = nn.Linear(11, 3).to(torch.float64)

    def forward(self, x):
        x = self.first(x.to(torch.bfloat16))
        return self.third(self.second(x.float().tanh()).double())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_dtypes_mixed_in_a_group_and_bfloat16_parameters(options):
    """bfloat16 gradients are added up in float32 and rounded once, so the last bit is known."""

    def loss(model, x, y):
        return nn.functional.mse_loss(model(x), y.double())

    build = one(AdamW, lr=0.02, weight_decay=0.1, **options)

    def run():
        _, module = train(build, AROUND_OSS[1], model=Mixed, loss=loss)
        return copied(module.parameters())

    _, expected = train_averaged(build, 3, model=Mixed, loss=loss)
    # float64 gradients are averaged in float64, and in the oracle in float32: 1e-7
    assert_same(run_ranks(3, run), copied(expected.parameters()), rtol=1e-5, atol=1e-6)


def test_autocast_is_the_plain_runs():
    def loss(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.mse_loss(model(x).float(), y)

    def model():
        return make_model(torch.float32)

    build = one(AdamW, lr=0.02)

    def run():
        return [copied(train(build, w, model=model, loss=loss)[1].parameters()) for w in AROUND_OSS]

    ranks = run_ranks(2, run)
    _, expected = train_averaged(build, 2, model=model, loss=loss)
    for i, way in enumerate(AROUND_OSS):
        assert_same([r[i] for r in ranks], copied(expected.parameters()), way, 1e-5, 1e-6)


# -- with DDP ------------------------------------------------------------------------------------


def test_ddp_may_come_first_and_keep_gradients_in_its_buckets():
    def run():
        result = []
        for views in (False, True):
            rank, workers = everyone()
            module = make_model()
            wrapped = DistributedDataParallel(module, gradient_as_bucket_view=views)
            (optimizer,) = two_rates(module, oss)
            x, y = make_batches(STEPS, 1, workers)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(wrapped, x[step, 0, rank], y[step, 0, rank]).backward()
                optimizer.step()
            result.append(copied(module.parameters()))
        return result

    ranks = run_ranks(3, run)
    _, expected = train_alone(two_rates, 3)
    for i in range(2):
        assert_same([r[i] for r in ranks], list(expected.parameters()))


def test_without_a_process_group_it_is_the_bare_optimizer():
    _, expected = train_alone(two_rates, 1)
    _, module = train(two_rates, AROUND_OSS[1])
    assert_same([copied(module.parameters())], list(expected.parameters()), rtol=0, atol=0)


def test_in_a_group_of_some_ranks_those_train_together():
    def run():
        rank = dist.get_rank()
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group, place = groups[rank % 2], rank // 2
        module = make_model()
        optimizer = oss(module.parameters(), AdamW, lr=0.02, group=group)
        wrapped = mh.ShardedDataParallel(module, optimizer, process_group=group)
        x, y = make_batches(3, 1, 4)
        for step in range(3):
            optimizer.zero_grad()
            i = 2 * (rank % 2) + place
            loss_of(wrapped, x[step, 0, i], y[step, 0, i]).backward()
            optimizer.clip_grad_norm(100.0)
            optimizer.step()
        optimizer.consolidate_state_dict(1)
        if place == 1:
            assert len(optimizer.state_dict()["state"]) == 6
        return copied(module.parameters())

    ranks = run_ranks(4, run)
    for pair in (0, 1):
        module = make_model()
        optimizer = AdamW(module.parameters(), lr=0.02)
        x, y = make_batches(3, 1, 4)
        for step in range(3):
            optimizer.zero_grad()
            both = slice(2 * pair, 2 * pair + 2)
            loss_of(
                module, x[step, 0, both].flatten(0, 1), y[step, 0, both].flatten(0, 1)
            ).backward()
            optimizer.step()
        assert_same([ranks[pair], ranks[pair + 2]], list(module.parameters()))


@on_ranks(2)
def test_the_world_given_by_name_is_the_default_group():
    module = make_model()
    optimizer = oss(module.parameters(), AdamW)
    mh.ShardedDataParallel(module, optimizer, process_group=dist.group.WORLD)
    other = make_model()
    optimizer = oss(other.parameters(), AdamW, group=dist.group.WORLD)
    mh.ShardedDataParallel(other, optimizer)


def test_fairscales_attributes():
    def run():
        groups = [dist.new_group([1, 2]), dist.new_group([0])]
        mine = groups[0 if dist.get_rank() else 1]
        optimizer = fairscale.OSS(make_model().parameters(), SGD, mine, -1, True, lr=0.1)
        assert optimizer.group is mine
        assert mh.OSS(make_model().parameters(), lr=0.1).group is dist.group.WORLD
        assert (optimizer.broadcast_fp16, optimizer.force_broadcast_object) == (True, False)
        return optimizer.rank, optimizer.global_rank, optimizer.world_size, optimizer.backend

    assert run_ranks(3, run) == [(0, 0, 1, "gloo"), (0, 1, 2, "gloo"), (1, 2, 2, "gloo")]


def test_fairscales_attributes_without_a_process_group():
    for group in (None, fairscale.DummyProcessGroup(0, 1)):
        optimizer = mh.OSS(make_model().parameters(), SGD, group, lr=0.1)
        assert (optimizer.rank, optimizer.global_rank, optimizer.world_size) == (0, 0, 1)
        assert optimizer.backend is None
        assert optimizer.group is group


@on_ranks(2)
def test_arguments_are_in_fairscales_order():
    x, y = make_batches(1, 1, 2)
    small = []
    for given in ((4, True, False), (-1, False, True)):
        module = make_model(torch.float32)
        optimizer = fairscale.OSS(module.parameters(), SGD, None, *given, lr=0.1)
        assert optimizer.force_broadcast_object is given[2]
        loss_of(module, x[0, 0, 0].float(), y[0, 0, 0].float()).backward()
        optimizer.step()
        largest = max(bucket.data.numel() for bucket in optimizer._shards.buckets)
        small.append(largest <= 32)
    assert small == [True, False]
