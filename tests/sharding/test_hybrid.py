"""Hybrid sharding: copies of the model, each sharded over some of the ranks.

Training, rules, loss scaling and checkpoints: `test_every_way.py`, whose contract two meshes keep.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import OPTIMIZERS, assert_same, make_batches, make_model, plain
from helpers.sharding_oracle import loss_of as distance

SHAPES = [(2, 2), (1, 4)]
shapes = pytest.mark.parametrize("shape", SHAPES)


def mesh_of(*shape, names=("copies", "shards")):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def hybrid(optimizers, model, shape=(2, 2)):
    return mh.shard(model, optimizers, 3, mesh=mesh_of(*shape), auto_wrap_policy={nn.Linear})


def train(model, optimizers, steps=range(3), norm=2.0, ranks=4):
    """Clipped by a norm; a rank's batches, or in one process those of all."""
    rank = dist.get_rank() if dist.is_initialized() else slice(None)
    x, y = make_batches(6, 1, ranks)
    norms = []
    for step in steps:
        distance(model, x[step, 0, rank].reshape(-1, 5), y[step, 0, rank].reshape(-1, 3)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [*whole(model), torch.tensor(norms)]


def whole(model):
    params = model.parameters()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in params]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_model()
        self.extra = nn.ModuleDict({str(n): nn.Linear(5, 3).double() for n in range(5)})

    def forward(self, x, name):
        return self.body(x) + self.extra[name](x)


@pytest.mark.sample("AdamW-shape0")
@shapes
@pytest.mark.parametrize("kind", ["AdamW", "Muon and AdamW", "LAMB"])
def test_shard_on_a_mesh_trains_as_one_process_and_goes_on_at_another_level(kind, shape, tmp_path):
    def go(level=None, steps=range(3), norm=2.0):
        model = make_model()
        made = OPTIMIZERS[kind](model, plain)
        if level == "mesh":
            model, made = hybrid(made, model, shape)
        elif level is not None:
            model, made = mh.shard(model, made, level)
        given = dict(model=model, optimizer=made)
        if steps[0]:
            mh.load(tmp_path, **given)
        found = train(model, made, steps, norm)
        if len(steps) < 6:
            mh.save(tmp_path, **given)
        return found

    expected = go(steps=range(6))
    assert_same(run_ranks(4, go, "mesh", range(6)), expected)
    run_ranks(4, go, "mesh")
    later = [*expected[:-1], expected[-1][3:]]
    assert_same(run_ranks(4, go, 2, range(3, 6)), later)
    run_ranks(4, go, 1)
    assert_same(run_ranks(4, go, "mesh", range(3, 6)), later)


@pytest.mark.sample("1.0-shape0")
@shapes
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_both_ways_to_clip_take_the_norm_of_one_copy(norm, shape):
    def go(ours):
        model = make_model()
        made = OPTIMIZERS["SGD"](model, plain)
        if dist.is_initialized():
            model, made = hybrid(made, model, shape)
        clip = nn.utils.clip_grad_norm_
        if ours:
            nn.utils.clip_grad_norm_ = lambda _, most, norm: model.clip_grad_norm_(most, norm)
        try:
            return train(model, made, norm=norm)
        finally:
            nn.utils.clip_grad_norm_ = clip

    expected = go(ours=False)
    assert_same(run_ranks(4, go, ours=False), expected)
    assert_same(run_ranks(4, go, ours=True), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": torch.bfloat16},
        {"compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True},
        {"compute_dtype": torch.float16, "gradient_predivide_factor": 2.0},
    ],
    ids=["bfloat16", "averaged in float32", "float16"],
)
def test_mixed_precision_and_divisors_are_those_of_one_dimension(options):
    def go(group):
        model = mh.FSDP(make_model(torch.float32), mixed_precision=True, process_group=group())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = make_batches(4, 1, 4, dtype=torch.float32)
        for step in range(4):
            distance(model, x[step, 0, dist.get_rank()], y[step, 0, dist.get_rank()]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    for one, two in run_ranks(4, lambda: [go(lambda: None), go(lambda: mesh_of(2, 2))]):
        torch.testing.assert_close(two, one, rtol=0.02, atol=0.004)


def test_parameters_of_which_some_ranks_make_no_gradient():
    """Each is used by one rank, by some, or by none."""

    def go(sharded):
        model = Branches()
        if sharded:
            model = mh.FSDP(model, process_group=mesh_of(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        x, y = make_batches(3, 1, 4)
        for step in range(3):
            optimizer.zero_grad()
            for rank in [dist.get_rank()] if sharded else range(4):
                out = model(x[step, 0, rank], str(rank // 3 * 3 if step else rank))
                ((out - y[step, 0, rank]).square().mean() / (1 if sharded else 4)).backward()
            optimizer.step()
        return whole(model)

    assert_same(run_ranks(4, go, True), go(False))


@on_ranks(4)
def test_state_of_all_kinds():
    model, (optimizer,) = hybrid(OPTIMIZERS["AdamW"](made := make_model(), plain), made)
    train(model, [optimizer])
    state, full = model.state_dict(), whole(model)
    assert_same([list(state.values())], full)
    with model.summon_full_params():
        assert_same([list(model.parameters())], full)
    kept = model.gather_full_optim_state_dict(optimizer)
    if dist.get_rank() == 0:
        alone = torch.optim.AdamW(make_model().parameters())
        alone.load_state_dict({k: kept[k] for k in ("state", "param_groups")})
    parts = [None] * 4
    given = model.local_state_dict(), model.local_metadata_dict()
    dist.all_gather_object(parts, given)
    plain_state = mh.FSDP.consolidate_shard_weights(*zip(*parts, strict=True))
    assert_same([list(plain_state.values())], full)
    model.load_state_dict(make_model().state_dict())
    assert_same([whole(model)], whole(make_model()))


def test_blocks_around_hybrid_workers():
    """Two workers of a mesh each train as two ranks do that hold everything."""

    def go(shape):
        mesh = mesh_of(2, *shape, names=("workers", "copies", "shards"))
        torch.manual_seed(0)
        model = make_model()
        if shape[1] == 1:
            inner = mesh["copies"].get_group()
            model = nn.parallel.DistributedDataParallel(model, process_group=inner)
            groups = {"inner_group": inner}
        else:
            model = mh.FSDP(model, process_group=mesh["copies", "shards"])
            groups = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        workers = mesh["workers"].get_group()
        optimizer = mh.DiLoCo(optimizer, every=2, process_group=workers, **groups)
        x, y = make_batches(4, 1, 4)
        for step in range(4):
            optimizer.zero_grad()
            distance(model, x[step, 0, dist.get_rank()], y[step, 0, dist.get_rank()]).backward()
            optimizer.step()
        return whole(model)

    for plainly, sharded in run_ranks(4, lambda: [go((2, 1)), go((1, 2))]):
        torch.testing.assert_close(sharded, plainly, rtol=1e-9, atol=1e-11)


def test_ramp_takes_the_steps_that_it_takes_under_ddp():
    def go(sharded):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if sharded:
            model, optimizer = mh.shard(model, optimizer, 3, mesh=mesh_of(2, 2))
        else:
            model = nn.parallel.DistributedDataParallel(model)
        rule = mh.AdaScale(optimizer)
        ramp = mh.Ramp(rule, 16, goal="steps", model=model)
        x, y = make_batches(8, 4, 4)
        mine = [each[:, :, dist.get_rank()].flatten(0, 1) for each in (x, y)]
        own = [*zip(*mine, strict=True)]
        for batches in ramp.over(own):
            for a, b in batches:
                distance(model, a, b).backward()
            rule.step()
            rule.zero_grad()
        return [*whole(model), torch.tensor([ramp.scale, rule.gain(), rule.progress])]

    for under_ddp, sharded in run_ranks(4, lambda: [go(False), go(True)]):
        torch.testing.assert_close(sharded, under_ddp, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("match", "go"),
    [
        ("for level 3, and this is level 2", lambda m, o: mh.shard(m, o, 2, mesh=mesh_of(2, 2))),
        ("for level 3, and this is level auto", lambda m, o: mh.shard(m, o, mesh=mesh_of(2, 2))),
        (
            "leave one out",
            lambda m, o: mh.shard(m, o, 3, mesh=mesh_of(2, 2), process_group=dist.group.WORLD),
        ),
        ("two or more ranks", lambda m, o: mh.shard(m, o, 3, mesh=mesh_of(4, 1))),
        (
            "mesh_dim_names=",
            lambda m, o: mh.FSDP(m, process_group=init_device_mesh("cpu", (2, 2))),
        ),
        ("different ranks", lambda m, o: mh.FSDP(nn.Sequential(mh.FSDP(m)), mesh_of(2, 2))),
        (
            "different ranks",
            lambda m, o: mh.FSDP(nn.Sequential(mh.FSDP(m, mesh_of(1, 4))), mesh_of(2, 2)),
        ),
        (
            "the mesh is for cpu, but the module computes on cuda",
            lambda m, o: mh.FSDP(
                m, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), compute_device="cuda"
            ),
        ),
    ],
)
def test_what_is_refused(match, go):
    def fails():
        model = make_model()
        go(model, torch.optim.SGD(model.parameters(), lr=0.1))

    raises_on_ranks(4, ValueError, fails, match=match)


def test_a_mesh_of_one_dimension_is_its_process_group():
    def go(level):
        model = make_model()
        mesh = mesh_of(2, 2)["shards"]
        model, optimizer = mh.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), level, mesh=mesh
        )
        x, y = make_batches(1, 1, 4)
        distance(model, x[0, 0, dist.get_rank() % 2], y[0, 0, dist.get_rank() % 2]).backward()
        optimizer.step()
        return whole(model)

    found = run_ranks(4, lambda: [go(level) for level in range(4)])
    for results in zip(*found, strict=True):
        assert_same(results, found[0][0])
