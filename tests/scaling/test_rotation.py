"""`measured=1/k`: a step measures one k-th of the gradients, and k steps measure all of them.

The oracle is the same measurement without the option: of the same gradients, over whole rotations.
"""

import contextlib
import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import raises_on_ranks, run_ranks
from helpers.scaling_oracle import trained_as_under_ddp
from manyhands._core.ranks import RankGroup
from manyhands.errors import RanksDisagree
from manyhands.scaling import _hooks, _noise_scale, _rotation, _rule_base
from manyhands.scaling._hooks import PlainNorm
from manyhands.scaling._preconditioned import PreconditionedNorm
from manyhands.scaling._rotation import RotatingNorms, turn_of

K = 4
MEMORY = 1000.0


@pytest.fixture
def short(monkeypatch):
    """Tensors of a few hundred elements are long, and measured whole unless a test says not to."""
    for module in (_rule_base, _noise_scale):
        monkeypatch.setattr(module, "default_share", lambda examples: 1.0)
    monkeypatch.setattr(_rotation, "LONG", 200)
    monkeypatch.setattr(_rotation, "BLOCK", 5)
    monkeypatch.setattr(_rotation, "LEAST_BLOCKS", 3)


# -- what has its turn --------------------------------------------------------------------------


def chosen(number, width, total, k, turn, start, stop):
    """How often each element of a range is measured."""
    seen = torch.zeros(total, dtype=torch.int8)
    for at, rows, size in _rotation._blocks_of_turn(start, stop, total, number, width, k, turn):
        for row in range(rows):
            first = at + row * k * width
            assert start <= first and first + size <= stop
            seen[first : first + size] += 1
    return seen


@pytest.mark.parametrize("k", [2, 3, 8, 64])
@pytest.mark.parametrize("total", [131_072, 200_003, 1_000_000, 4_194_381])
def test_every_element_has_one_turn(total, k):
    layout = _rotation._divide_into_blocks(total, k)
    seen, shares = torch.zeros(total, dtype=torch.int8), []
    for turn in range(k):
        elements = chosen(*layout, total, k, turn, 0, total)
        seen += elements
        shares.append(int(elements.sum()) * k / total)
    assert bool((seen == 1).all())
    # the first turn has what is left over
    assert max(shares) < (1.25 if k == 64 else 1.02) and min(shares) > 0.98


@pytest.mark.parametrize("total", [23, 200, 1_003])
def test_slices_measure_the_same_elements_as_the_whole(total):
    for k in (2, 3, 5):
        layout = max(total // (k * 7), 2), total // (k * max(total // (k * 7), 2))
        for turn in range(k):
            whole = chosen(*layout, total, k, turn, 0, total)
            for size in (1, 4, 9, 50):
                cuts = [*range(0, total, size), total]
                slices = sum(chosen(*layout, total, k, turn, *ends) for ends in pairwise(cuts))
                assert torch.equal(slices, whole)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_k_steps_have_all_turns_and_rotations_begin_in_different_ones(k):
    turns = [turn_of(step, k) for step in range(k * k)]
    for first in range(0, k * k, k):
        assert sorted(turns[first : first + k]) == list(range(k))
    assert sorted(turns[::k]) == list(range(k))


def rotation_of(norms, params):
    return RotatingNorms(norms, params, {}, K)


def make_params():
    torch.manual_seed(0)
    shapes = [(40, 30), (30, 40), (9, 50), *[(n,) for n in range(1, 20)]]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def few_rows(params):
    """Gradients with nearly everything in a few rows."""
    grads = [torch.randn_like(p) for p in params]
    grads[0][3] *= 300.0
    grads[1][5:7] *= 100.0
    return grads


@pytest.mark.parametrize("kind", ["plain", "preconditioned"])
@pytest.mark.parametrize("make_grads", [lambda ps: [torch.randn_like(p) for p in ps], few_rows])
def test_the_mean_over_a_rotation_is_the_whole_square(short, kind, make_grads):
    params = make_params()
    grads = make_grads(params)
    optimizer = AdamW(params, lr=0.1)
    for _ in range(6):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    norms = PlainNorm() if kind == "plain" else PreconditionedNorm(optimizer, 1e-3)
    rotation = rotation_of(norms, params)
    means = torch.zeros(len(params), dtype=torch.float64)
    for step in range(2 * K, 3 * K):
        rotation.begin_step(step, MEMORY)
        one = [float(rotation.one(i, g)) ** 2 for i, g in enumerate(grads)]
        many = [float(norm) ** 2 for norm in rotation.many(range(len(params)), grads)]
        assert many == pytest.approx(one, rel=1e-5)
        means += torch.tensor(one, dtype=torch.float64) / K
    whole = [float(norms.one(i, g)) ** 2 for i, g in enumerate(grads)]
    assert means.tolist() == pytest.approx(whole, rel=1e-5)


def test_other_strides_measure_the_same_elements(short):
    """A gradient need not have its parameter's strides, and the mean has those of the bucket."""
    param = nn.Parameter(torch.randn(40, 30))
    grad = torch.randn(40, 30)
    turned = grad.t().contiguous().t()
    assert turned.stride() != grad.stride()
    rotation = rotation_of(PlainNorm(), [param])
    for step in range(K, 2 * K):
        rotation.begin_step(step, MEMORY)
        assert float(rotation.one(0, grad)) == pytest.approx(float(rotation.one(0, turned)))


def test_the_first_rotation_and_short_averages_are_measured_whole(short):
    params, norms = make_params(), PlainNorm()
    grads = [torch.randn_like(p) for p in params]
    rotation = rotation_of(norms, params)
    whole = [norms.one(i, g) for i, g in enumerate(grads)]
    for step, memory, all_of_it in ((0, MEMORY, True), (K - 1, MEMORY, True), (K, 2.0, True)):
        rotation.begin_step(step, memory)
        assert ([rotation.one(i, g) for i, g in enumerate(grads)] == whole) is all_of_it
    rotation.begin_step(K, 2.0 * K)
    assert [rotation.one(i, g) for i, g in enumerate(grads)] != whole


# -- in training --------------------------------------------------------------------------------


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 133), nn.ReLU(), nn.Linear(133, 50), nn.Linear(50, 5))


def make_batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 7, generator=generator) for _ in range(steps)]


def step_of(model, optimizer, batch, passes=4):
    optimizer.zero_grad()
    for inputs in batch.chunk(passes):
        (model(inputs).square().mean() / passes).backward()
    optimizer.step()


def test_gains_stay_close_to_those_of_the_whole_gradients(short):
    model = make_model()
    optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.01), num_gradients_to_accumulate=4)
    watch = {"num_gradients_to_accumulate": 4, "smoothing": optimizer.smoothing}
    part = mh.NoiseScale(optimizer.optimizer, measured=1 / K, **watch)
    whole = mh.NoiseScale(optimizer.optimizer, **watch)
    differ = 0
    for batch in make_batches(40):
        step_of(model, optimizer, batch)
        assert part.variance == pytest.approx(whole.variance, rel=0.25)
        assert part.noise_scale == pytest.approx(whole.noise_scale, rel=0.25)
        differ += part.variance != whole.variance
    assert differ == 40 - K


@pytest.mark.parametrize("rule", [mh.AdaScale, mh.AdamScale])
@pytest.mark.parametrize("stop", [3, 7, 10])
def test_a_continued_run_is_bitwise_the_same(short, rule, stop):
    def make(**options):
        model = make_model()
        inner = (SGD if rule is mh.AdaScale else AdamW)(model.parameters(), lr=0.01)
        return model, rule(inner, num_gradients_to_accumulate=4, **options)

    batches = make_batches(16)
    model, optimizer = make(measured=1 / K)
    for batch in batches[:stop]:
        step_of(model, optimizer, batch)
    # with a step's gradients measured, and not stepped along
    for inputs in batches[stop].chunk(4):
        (model(inputs).square().mean() / 4).backward()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    other, continued = make()  # takes the option from the state dict
    other.load_state_dict(weights)
    continued.load_state_dict(state)
    optimizer.zero_grad()
    for batch in batches[stop:]:
        for each in ((model, optimizer), (other, continued)):
            step_of(*each, batch)
        assert continued.gain() == optimizer.gain()
        assert continued.noise == optimizer.noise
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_noise_scale_continues_bitwise(short):
    batches, model = make_batches(16), make_model()
    inner = SGD(model.parameters(), lr=0.01)

    def make(**options):
        return mh.NoiseScale(inner, num_gradients_to_accumulate=4, **options)

    noise = make(measured=1 / K)
    for batch in batches[:7]:
        step_of(model, inner, batch)
    continued = make()
    continued.load_state_dict(copy.deepcopy(noise.state_dict()))
    for batch in batches[7:]:
        step_of(model, inner, batch)
    assert (continued.variance, continued.noise_scale) == (noise.variance, noise.noise_scale)
    assert "rotated" not in make().state_dict()


def test_consecutive_gradients_are_measured_whole(short):
    """They would need the same part in both steps."""
    gains = []
    for options in ({}, {"measured": 1 / K}):
        model = make_model()
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.01), scale=4, **options)
        for batch in make_batches(12):
            step_of(model, optimizer, batch, passes=1)
        gains.append((optimizer.gain(), *[p.sum().item() for p in model.parameters()]))
    assert gains[0] == gains[1]


def test_an_added_group_and_a_copy_go_on_in_the_rotation(short):
    model, more = make_model(), nn.Linear(30, 30)
    optimizer = mh.AdaScale(
        SGD(model.parameters(), lr=0.01), num_gradients_to_accumulate=4, measured=1 / K
    )
    for batch in make_batches(6):
        step_of(model, optimizer, batch)
    optimizer.add_param_group({"params": list(more.parameters())})
    assert optimizer.scaling_state_dict()["rotated"] == 6
    assert copy.deepcopy(optimizer).scaling_state_dict()["rotated"] == 6


def test_a_step_reads_a_share_of_long_tensors_and_all_of_short_ones(short, monkeypatch):
    read = []
    many = PlainNorm.many
    monkeypatch.setattr(_hooks, "norm_of_rows", lambda e: read.append(e.numel()) or e.norm())
    monkeypatch.setattr(
        PlainNorm,
        "many",
        lambda self, i, grads: read.extend(g.numel() for g in grads) or many(self, i, grads),
    )
    params = [nn.Parameter(torch.randn(shape)) for shape in ((60, 40), (50, 30), (90,))]
    rotation = rotation_of(PlainNorm(), params)
    for step in range(3 * K):
        rotation.begin_step(step, MEMORY)
        read.clear()
        rotation.many(range(3), [torch.randn_like(p) for p in params])
        assert sum(read) == pytest.approx(90 + 3900 / (1 if step < K else K), abs=60)


def test_hooks_take_no_short_way_past_the_rotation_or_adams_norm(short):
    model = nn.Linear(60, 40)
    sgd = SGD(model.parameters(), lr=0.01)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for rule, inner, directly in ((mh.AdaScale, sgd, {1}), (mh.AdamScale, adam, set())):
        optimizer = rule(inner, num_gradients_to_accumulate=2, measured=1 / K)
        assert optimizer._tap.hooks._plain_and_short == directly


# -- on several ranks ---------------------------------------------------------------------------


def train(how, rule, inner, passes=1):
    model = make_model()
    if how == "fully_shard":
        for child in model:
            fully_shard(child) if isinstance(child, nn.Linear) else None
        fully_shard(model)
    if how == "OSS":
        optimizer = mh.OSS(model.parameters(), optim=inner, bucket_size=640, lr=0.01)
        optimizer = rule(optimizer, num_gradients_to_accumulate=passes, measured=1 / K)
        model = mh.ShardedDataParallel(model, optimizer)
    else:
        optimizer = inner(model.parameters(), lr=0.01)
        optimizer = rule(optimizer, num_gradients_to_accumulate=passes, measured=1 / K)
        model = DDP(model) if how == "DDP" else model
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = []
    for batch in make_batches(3 * K):
        optimizer.zero_grad()
        for number, part in enumerate(batch.chunk(passes)):
            alone = number < passes - 1 and how != "fully_shard"
            with model.no_sync() if alone else contextlib.nullcontext():
                (model(part.chunk(size)[rank]).square().mean() / passes).backward()
        optimizer.step()
        noise = optimizer.noise
        seen += [optimizer.gain(), *noise.raw_sqr, *noise.raw_var]
    params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.tensor(seen, dtype=torch.float64), [p.detach().clone() for p in params]


@pytest.mark.parametrize("how", ["OSS", "fully_shard"])
@pytest.mark.parametrize(("rule", "inner"), [(mh.AdaScale, SGD), (mh.AdamScale, AdamW)])
def test_sharded_gradients_are_measured_as_under_ddp(short, how, rule, inner):
    for _, params in trained_as_under_ddp(3, train, "DDP", how, rule, inner):
        assert len(params) == 6


def test_accumulated_and_sharded_gradients_are_measured_as_under_ddp(short):
    trained_as_under_ddp(2, train, "DDP", "OSS", mh.AdaScale, SGD, passes=2)


def test_ranks_must_measure_the_same_share():
    def make():
        mh.AdaScale(SGD(make_model().parameters(), lr=0.1), measured=1 / (dist.get_rank() + 2))

    raises_on_ranks(2, RanksDisagree, make, match="ranks have different measured")


def test_ranks_must_be_in_the_same_step_of_the_rotation(short):
    def run():
        model = DDP(make_model())
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1), measured=1 / 2)
        if dist.get_rank() == 1:
            entry = optimizer.scaling_state_dict()
            optimizer.load_scaling_state_dict({**entry, "rotated": 3})
        model(torch.randn(3, 7)).sum().backward()
        optimizer.step()

    raises_on_ranks(2, RuntimeError, run, match="Load the state dict on every worker")


def test_no_collective_is_added(short):
    def count(**options):
        model = DDP(make_model())
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.01), **options)
        sent = []
        send = RankGroup.sum_and_gather
        with pytest.MonkeyPatch.context() as patch:

            def counted(self, payload, summed):
                sent.append(payload.numel())
                return send(self, payload, summed)

            patch.setattr(RankGroup, "sum_and_gather", counted)
            for batch in make_batches(2 * K):
                optimizer.zero_grad()
                model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
                optimizer.step()
        return sent

    for whole, part in run_ranks(2, lambda: [count(), count(measured=1 / K)]):
        assert whole == part


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("measured", [0, -0.5, 2, 0.3, 1 / 65, float("nan"), "all"])
@pytest.mark.parametrize("make", [mh.AdaScale, mh.NoiseScale])
def test_a_share_is_one_divided_by_a_small_number(make, measured):
    with pytest.raises(ValueError, match=r"measured must be 1 or a fraction 1/2, 1/3, ... 1/64"):
        make(SGD(make_model().parameters(), lr=0.1), measured=measured)


@pytest.mark.parametrize("make", [mh.AdaScale, mh.NoiseScale])
def test_examples_are_whole_layers(make):
    model = make_model()
    with pytest.raises(ValueError, match="measured= below 1 does not work with examples="):
        make(SGD(model.parameters(), lr=0.1), model=model, examples=True, measured=1 / 8)


def test_a_damaged_share_is_found_when_a_state_is_loaded():
    optimizer = mh.AdaScale(SGD(make_model().parameters(), lr=0.1), measured=1 / 8)
    state = optimizer.state_dict()
    state["manyhands"]["options"]["measured"] = 0.3
    with pytest.raises(ValueError, match="damaged"):
        optimizer.load_state_dict(state)


def test_an_eighth_is_measured_by_default_but_for_examples():
    model = make_model()
    assert mh.AdaScale(SGD(model.parameters(), lr=0.1))._options["measured"].number == 1 / 8
    assert mh.NoiseScale(model.parameters())._options["measured"].number == 1 / 8
    rule = mh.AdaScale(SGD(model.parameters(), lr=0.1), model=model, examples=True)
    assert rule._options["measured"].number == 1
