"""Runs in blocks: saved at a sync round by any combination, they go on from what was saved.

On the same workers bit for bit; on others with the anchor, the outer memories and the inner
optimizer's state that were saved.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import manyhands as mh
from helpers.blocks_runs import ALL, EVERY, FEW, SHARDINGS, Groups, Run
from helpers.checkpoint_oracle import assert_equal
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from manyhands._optimizers.wrappers import unwrap

LATER = 4  # steps after the load: there is a sync round among them


def groups_of(machines):
    """Those of a combination's sharding: one level has machines of one worker."""
    levels = {True: Groups(dist.get_world_size()), False: Groups(machines)}
    return lambda combination: levels[combination[1] == "one level"]


def all_of(run):
    return {**run.held(), **run.residuals()}


def test_the_few_have_every_value_of_the_many():
    for few, many in zip(zip(*FEW, strict=True), zip(*ALL, strict=True), strict=True):
        assert set(few) == set(many)


@pytest.mark.parametrize(
    "combinations",
    [
        pytest.param(FEW, id="few"),
        *(
            pytest.param([c for c in ALL if c[1] == way], id=way, marks=pytest.mark.long)
            for way in SHARDINGS
        ),
    ],
)
@on_ranks(4, timeout=600)
def test_the_same_workers_go_on_bit_for_bit(combinations, tmp_path):
    groups = groups_of(machines=2)
    for number, combination in enumerate(combinations):
        path, where = tmp_path / str(number), str(combination)
        run = Run(combination, groups(combination)).train(EVERY + 2)
        with pytest.raises(RuntimeError, match=r"optimizer\.synchronize\(\) on every worker first"):
            mh.save(path, **run.given())
        if number % 2 or combination[0] == "DiLoCo":  # which overlaps
            run.blocks.synchronize()
        else:
            run.train(1, EVERY + 2)
        steps = run.blocks.steps
        mh.save(path, **run.given())
        saved, counts = all_of(run), run.counts()
        run.train(LATER, steps)

        again = Run(combination, groups(combination), seed=3).train(EVERY + 1)
        mh.load(path, **again.given())
        assert_equal(all_of(again), saved, where)
        assert again.counts() == counts, where
        again.train(LATER, steps)
        assert_equal(all_of(again), all_of(run), where)
        assert again.counts() == run.counts(), where
        assert again.blocks.rounds > counts["rounds"]


# -- other numbers of workers ----------------------------------------------------------------------

SOURCES = [
    ("BMUF", "FSDP", "none", "AdamW"),
    ("DiLoCo", "DDP", "inside", "SGD"),
    ("SlowMo", "OSS", "outside", "SGD"),
    ("BMUF", "one level", "none", "AdamW"),
    ("SlowMo", "fully_shard", "none", "SGD"),
]


def write(folder, machines):
    """Save each of the sources; what each machine has, and has some steps later."""
    groups = groups_of(machines)
    results = []
    for number, source in enumerate(SOURCES):
        run = Run(source, groups(source)).train(EVERY + 1)
        run.blocks.synchronize()
        mh.save(folder / str(number), **run.given())
        held, counts = run.held(), run.counts()
        later = run.train(LATER, EVERY + 1).params()
        results.append([run.groups.machine, run.groups.machines, held, counts, later])
    return results


def read(folder, results, machines, ways):
    """Load each of the sources under these shardings, and compare."""
    groups = Groups(machines)
    for number, (source, ranks) in enumerate(zip(SOURCES, results, strict=True)):
        saved = {machine: held for machine, _, held, _, _ in ranks}
        later = {machine: params for machine, _, _, _, params in ranks}
        _, replicas, _, counts, _ = ranks[0]
        blocks, _, rule, inner = source
        for way in ways:
            where = f"{source} -> {way} on {machines} x {groups.inside}"
            run = Run((blocks, way, rule, inner), groups, seed=3).train(2)
            mh.load(folder / str(number), **run.given())
            mine, expected = run.held(), saved[groups.machine % replicas]
            if machines == 1:  # nobody to meet, so there is no outer state
                outer = ("anchor", "memory")
                expected = {k: v for k, v in expected.items() if not k.startswith(outer)}
            assert_equal(mine, expected, where)
            assert run.counts()["step"] == counts["step"]
            if machines == replicas:  # each goes on with its own data
                assert run.counts()["rounds"] == counts["rounds"]
            if machines == replicas and rule == "none":
                run.train(LATER, EVERY + 1)
                for name, value in run.params().items():
                    torch.testing.assert_close(
                        value, later[groups.machine][name], rtol=1e-9, atol=1e-9
                    )
            if machines != replicas:
                assert not any(residual.any() for residual in run.residuals().values())


@pytest.mark.parametrize(
    ("workers", "machines"),
    [
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.long),
        pytest.param(3, 3, marks=pytest.mark.long),
        pytest.param(4, 2, marks=pytest.mark.long),
        pytest.param(4, 4, marks=pytest.mark.long),
        pytest.param(6, 2, marks=pytest.mark.long),
        pytest.param(6, 3, marks=pytest.mark.long),
    ],
)
def test_other_workers_go_on_from_the_same_outer_state(sources, workers, machines):
    folder, results = sources
    ways = ["one level"] if workers == machines else []
    ways += SHARDINGS[1:] if workers > machines else ["DDP", "FSDP"]
    run_ranks(workers, read, folder, results, machines, ways, timeout=600)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints of two machines of two workers (or four of one), and what each rank had."""
    folder = tmp_path_factory.mktemp("sources")
    ranks = run_ranks(4, write, folder, 2, timeout=600)
    return folder, list(zip(*ranks, strict=True))


def test_from_one_worker_to_two_and_back(tmp_path):
    """One worker has no outer state; its steps count, and the anchor is where it has come to."""

    def made():
        return Run(("BMUF", "one level", "none", "SGD"), Groups(dist.get_world_size()))

    def one():
        run = made().train(5)
        mh.save(tmp_path / "one", **run.given())
        return run.params()

    def two(path):
        run = made()
        mh.load(tmp_path / path, **run.given())
        assert run.blocks.steps == 5
        start = {**run.params(), **run.outer()}
        run.train(1, 5)  # to the sixth, which is a sync round
        assert run.blocks.rounds == 1
        mh.save(tmp_path / "two", **run.given())
        return start, run.params()

    def back():
        run = made()
        mh.load(tmp_path / "two", **run.given())
        assert (run.blocks.steps, run.blocks.rounds) == (6, 1)
        return run.params()

    (params,) = run_ranks(1, one)
    (start, later), _ = run_ranks(2, two, "one")
    for name, value in params.items():
        assert torch.equal(start[name], value) and torch.equal(start[f"anchor of {name}"], value)
        if name != "rests":
            assert (start[f"memory 0 of {name}"] == 0).all()
    assert_equal(run_ranks(1, back)[0], later)


def test_with_and_without_blocks(tmp_path):
    """A plain run goes on in blocks from where it is, and one in blocks without, as replica 0."""

    def go():
        groups = Groups(2)
        run = Run(("DiLoCo", "one level", "none", "AdamW"), groups).train(3)
        bare = Run(("DiLoCo", "one level", "none", "AdamW"), groups, seed=2)
        run.blocks.synchronize()
        mh.save(tmp_path / "blocks", **run.given())
        mh.load(tmp_path / "blocks", model=bare.model, optimizer=bare.inner)
        mh.save(tmp_path / "bare", model=bare.model, optimizer=bare.inner)
        again = Run(("DiLoCo", "one level", "none", "AdamW"), groups, seed=3).train(4)
        mh.load(tmp_path / "bare", **again.given())
        for name, value in again.params().items():
            assert torch.equal(again.outer()[f"anchor of {name}"], value)
        assert_equal(again.state(), bare.state())
        return run.state(), bare.state()

    (first, bare), (other, bare_too) = run_ranks(2, go)
    assert_equal(bare, first)
    assert_equal(bare_too, first)
    assert not torch.equal(first["exp_avg of first.weight"], other["exp_avg of first.weight"])


# -- corners ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("there", "here"), [(True, False), (False, True)])
@on_ranks(2)
def test_a_parameter_that_has_thawed_begins_where_it_is(there, here, tmp_path):
    def build(frozen):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        model[0].bias.requires_grad_(not frozen)
        return model, mh.DiLoCo(SGD(model.parameters(), lr=0.1), every=2)

    def two_steps(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
            optimizer.step()

    model, optimizer = build(there)
    two_steps(model, optimizer)
    mh.save(tmp_path, model=model, optimizer=optimizer)
    other, twin = build(here)
    mh.load(tmp_path, model=other, optimizer=twin)
    found = {id(e.param): e for e in twin._sync.anchor.outer_parts()}
    for e in optimizer._sync.anchor.outer_parts():
        name = next(n for n, p in model.named_parameters() if p is e.param)
        mine = found.get(id(dict(other.named_parameters())[name]))
        if mine is not None:
            for entry in ("anchor", "memory.0"):
                assert torch.equal(mine.entries[entry], e.entries[entry])
            assert e.entries["memory.0"].any()
    bias = found.get(id(other[0].bias))
    assert (bias is None) == here
    if bias is not None:
        assert torch.equal(bias.entries["anchor"], model[0].bias)
        assert not bias.entries["memory.0"].any()
    two_steps(other, twin)


def test_parameters_of_other_kinds(tmp_path):
    """Complex ones, an order of memory of its own, none and several dimensions, 16 bits, tied."""

    class Odd(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.image = nn.Conv2d(3, 2, (2, 3)).to(memory_format=torch.channels_last)
            self.pairs = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
            self.number = nn.Parameter(torch.randn(()))
            self.narrow = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
            self.empty = nn.Parameter(torch.zeros(0, 2))
            self.strided = nn.Parameter(torch.randn(6, 8)[:, ::2])
            self.tied = self.number

    def made(groups, seed):
        model = Odd(seed)
        inside, machines = groups.group("inside"), groups.group("machines")
        optimizer = mh.DiLoCo(
            SGD(model.parameters(), lr=0.1), every=2, process_group=machines, inner_group=inside
        )
        for step in range(2):
            for number, param in enumerate(model.parameters()):
                param.grad = torch.full_like(param, 1.0 + number + step + groups.machine)
            optimizer.step()
        return model, optimizer

    def outer(optimizer):
        """Anchor and memory by way of the parameters, exactly."""
        point, found = optimizer._sync.anchor, []
        for what in (lambda s: s.anchor, lambda s: s.memories[0]):
            kept = [segment.anchor for segment in point.buckets]
            for segment in point.buckets:
                segment.anchor = what(segment)
            with torch.no_grad():
                point.restore_params()
            found.append([p.detach().clone() for p in point.params])
            for segment, anchor in zip(point.buckets, kept, strict=True):
                segment.anchor = anchor
        return found

    def first():
        model, optimizer = made(Groups(2), 0)
        mh.save(tmp_path, model=model, optimizer=optimizer)
        return outer(optimizer)

    def second(expected):
        model, optimizer = made(Groups(2), 5)
        mh.load(tmp_path, model=model, optimizer=optimizer)
        for mine, others in zip(outer(optimizer), expected, strict=True):
            for param, value in zip(mine, others, strict=True):
                assert torch.equal(param, value)

    expected, *_ = run_ranks(4, first)
    run_ranks(4, second, expected)
    run_ranks(2, second, expected)


@on_ranks(4)
def test_shards_that_an_inner_group_has_copies_of(tmp_path):
    """Hybrid sharding inside: a rank has its share of its shard."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("machines", "copies", "shards"))

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Linear(5, 3)
        fully_shard(model, mesh=mesh["copies", "shards"])
        optimizer = mh.DiLoCo(
            SGD(model.parameters(), lr=0.1, momentum=0.9),
            every=2,
            process_group=mesh["machines"].get_group(),
            inner_group=mesh["copies"].get_group(),
        )
        return model, optimizer

    def train(model, optimizer, steps):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 5), 1.0 + dist.get_rank() // 2 + step)).square().sum().backward()
            optimizer.step()
        return [p.full_tensor().detach() for p in model.parameters()]

    model, optimizer = made(0)
    train(model, optimizer, 2)
    mh.save(tmp_path, model=model, optimizer=optimizer)
    other, twin = made(1)
    train(other, twin, 3)
    mh.load(tmp_path, model=other, optimizer=twin)
    for mine, expected in zip(train(other, twin, 2), train(model, optimizer, 2), strict=True):
        assert torch.equal(mine, expected)


def test_blocks_in_a_trainers_wrapper_are_found(tmp_path):
    class Wrapper(torch.optim.Optimizer):
        """As Accelerate's: it shows the inner optimizer's state and groups as its own."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        state = property(lambda self: self.optimizer.state)
        param_groups = property(lambda self: self.optimizer.param_groups)

        def state_dict(self):
            return self.optimizer.state_dict()

        def load_state_dict(self, state):
            self.optimizer.load_state_dict(state)

        def step(self, closure=None):
            return self.optimizer.step(closure)

    class Lookahead(Wrapper):
        """It has state of its own, which nobody may leave out."""

        state = property(lambda self: self.__dict__.setdefault("slow", {}))

    def go():
        groups, path = Groups(2), tmp_path / "run"
        run = Run(("DiLoCo", "one level", "outside", "SGD"), groups).train(4)
        wrapper = Wrapper(run.optimizer)
        assert unwrap(wrapper) == [wrapper, run.optimizer, run.blocks, run.inner]
        with pytest.raises(RuntimeError, match=r"optimizer\.synchronize\(\)"):
            mh.save(path, model=run.model, optimizer=wrapper)
        run.blocks.synchronize()
        mh.save(path, model=run.model, optimizer=wrapper)
        again = Run(("DiLoCo", "one level", "outside", "SGD"), groups, seed=3).train(4)
        mh.load(path, model=again.model, optimizer=Wrapper(again.optimizer))
        assert_equal(all_of(again), all_of(run))
        assert again.counts() == run.counts()

    run_ranks(2, go)

    def hidden():
        run = Run(("LocalSGD", "one level", "none", "SGD"), Groups(2)).train(1)
        run.blocks.synchronize()
        mh.save(tmp_path / "hidden", model=run.model, optimizer=Lookahead(run.optimizer))

    raises_on_ranks(2, TypeError, hidden, match="this Lookahead contains blocks")


@on_ranks(2)
def test_rules_and_blocks_go_around_each_other_once():
    def params():
        return [nn.Parameter(torch.ones(3))]

    with pytest.raises(TypeError, match="wraps already"):
        mh.AdaScale(mh.LocalSGD(mh.AdaScale(SGD(params(), lr=0.1))))
    with pytest.raises(TypeError, match="in blocks already"):
        mh.LocalSGD(mh.AdaScale(mh.LocalSGD(SGD(params(), lr=0.1))))
    outside = mh.AdaScale(mh.LocalSGD(SGD(params(), lr=0.1)))
    inside = mh.LocalSGD(mh.AdaScale(SGD(params(), lr=0.1)))
    assert outside.snapshot().keys() == inside.snapshot().keys()
    assert {"gain", "progress", "spread", "rounds"} <= outside.snapshot().keys()


@on_ranks(2)
def test_a_rule_goes_to_the_other_side_of_the_blocks(tmp_path):
    groups = Groups(2)
    inside, outside = (("DiLoCo", "one level", rule, "SGD") for rule in ("inside", "outside"))
    for there, here in ((inside, outside), (outside, inside)):
        run = Run(there, groups).train(4)
        run.blocks.synchronize()
        mh.save(tmp_path / there[2], **run.given())
        again = Run(here, groups, seed=3).train(5)
        mh.load(tmp_path / there[2], **again.given())
        assert_equal(all_of(again), all_of(run))
        assert again.counts() == run.counts()
