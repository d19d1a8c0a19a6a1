"""The planner: its arithmetic by itself, and its numbers beside those of real training."""

import doctest
import gc
import time
import weakref
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import manyhands as mh
from helpers.pages import ROOT, blocks, run_page
from helpers.ranks import run_ranks
from manyhands import _arguments as arguments
from manyhands import fairscale
from manyhands._arguments import format_bytes, format_seconds, parse_bytes
from manyhands._optimizers.optimizers import KNOWN, StateSizes
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands.scaling import ScalingRuleBase
from manyhands.sharding.zero import _layout
from manyhands.tools.plan import _costs, _model
from manyhands.tools.plan._costs import (
    ModelSizes,
    OptimizerParams,
    ParamSize,
    WrapParams,
    costs,
    ddp_buckets,
)
from manyhands.tools.plan._model import activation_bytes, wrap_params

FULLY = "FullyShardedDataParallel"
WAYS = ("DDP", "OSS + DDP", "OSS + ShardedDataParallel")


class Model(nn.Module):
    """1.7 M parameters of uneven sizes: convolutions, tied weights, a frozen layer, buffers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 37, 3, padding=1)
        self.norm = nn.BatchNorm2d(37)
        self.frozen = nn.Linear(37, 61).requires_grad_(False)
        self.body = nn.Sequential(
            nn.Linear(61, 1021), nn.ReLU(), nn.Linear(1021, 1021), nn.ReLU(), nn.Linear(1021, 511)
        )
        self.head = nn.Linear(511, 61, bias=False)
        self.back = nn.Linear(61, 511, bias=False)
        self.tied = nn.Linear(511, 61, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3))
        x = self.head(self.body(self.frozen(x)))
        return self.scale * self.tied(self.back(x))


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-3}),
}
INPUT = (4, 3, 8, 8)


def wrapped(way, model, kind, options):
    if way == "DDP":
        optimizer = kind(model.parameters(), **options)
    else:
        optimizer = mh.OSS(model.parameters(), optim=kind, **options)
    if way == "OSS + ShardedDataParallel":
        return mh.ShardedDataParallel(model, optimizer), optimizer
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def held(tensors):
    """Bytes of memory behind some tensors, each piece counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def parts(grads):
    for grad in grads:
        yield from grad.parts() if isinstance(grad, ShardedGradient) else [grad]


def trained(way, kind, options, steps=3):  # in its second DDP agrees on its buckets
    """What this rank holds of parameters, gradients and state, and the last step's collectives."""
    model = Model()
    module, optimizer = wrapped(way, model, kind, options)
    for _ in range(steps):
        with Collectives() as seen:
            optimizer.zero_grad()
            module(torch.randn(INPUT)).sum().backward()
            gradients = held(parts(p.grad for p in model.parameters() if p.grad is not None))
            optimizer.step()
    state = optimizer.optim.state if isinstance(optimizer, mh.OSS) else optimizer.state
    tensors = [t for entries in state.values() for t in entries.values() if torch.is_tensor(t)]
    everything = (held(model.parameters()), gradients, held(tensors))
    return everything, (seen.count, seen.sent)


class Collectives(TorchDispatchMode):
    """How many there are, and what each worker sends; the mean over the workers is meant.

    Messages between two workers are part of an exchange, which counts as one.
    """

    def __enter__(self):
        self.count, self.sent = 0, 0.0
        self.patch = pytest.MonkeyPatch()
        for name in ("reduce_scatter_slices", "all_to_all"):
            self.patch.setattr(RankGroup, name, self.counted(getattr(RankGroup, name)))
        return super().__enter__()

    def counted(self, exchange):
        def exchange_and_count(*args):
            self.count += 1
            return exchange(*args)

        return exchange_and_count

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and "recv" not in name:
            size = sum(t.nbytes for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor))
            workers = dist.get_world_size()
            share = {"send": 1, "allreduce_": 2 * (workers - 1) / workers}
            self.sent += size * share.get(name, (workers - 1) / workers)
            self.count += name != "send"
        return func(*args, **(kwargs or {}))


@pytest.mark.sample("AdamW-1", "Adafactor-2")
@pytest.mark.parametrize("workers", [1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_is_what_training_holds_and_sends_to_the_byte(name, workers):
    kind, options = OPTIMIZERS[name]
    found = mh.plan(Model, kind, workers, backend="gloo", **options)
    for row, way in zip(found.rows, WAYS, strict=False):
        assert row.name == way
        ranks = run_ranks(workers, trained, way, kind, options)
        most = max((everything for everything, _ in ranks), key=sum)
        assert (row.parameters, row.gradients, row.optimizer) == most, way
        if workers == 1:
            assert (row.sent, row.collectives) == (0, 0)  # DDP's own are with itself
            continue
        assert {row.collectives} == {count for _, (count, _) in ranks}, way
        assert row.sent == pytest.approx(sum(sent for _, (_, sent) in ranks) / workers, abs=1), way


class Memory(TorchDispatchMode):
    """The most bytes that new tensors have taken at once."""

    def __init__(self):
        super().__init__()
        self.now, self.most = 0, 0
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if is_plain(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(is_plain, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage not in self.storages:
                self.storages.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def freed(self, size):
        self.now -= size


def is_plain(thing):
    return isinstance(thing, torch.Tensor) and not isinstance(thing, ShardedGradient)


def deep():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)))


def broad():
    return nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 512), nn.Linear(512, 64))


def most_in_backward(build, kind):
    model = build()
    optimizer = mh.OSS(model.parameters(), optim=kind)
    module = mh.ShardedDataParallel(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        loss = module(torch.randn(2, model[0].in_features)).sum()
        with Memory() as memory:
            loss.backward()
        optimizer.step()
    return memory.most


@pytest.mark.sample("SGD-deep", "Adafactor-broad")
@pytest.mark.parametrize("build", [deep, broad])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_what_is_in_flight_is_the_most_that_backward_takes(build, kind):
    row = mh.plan(build, kind, 2, backend="gloo").rows[2]
    measured = max(run_ranks(2, most_in_backward, build, kind))
    assert row.gradients + row.in_flight == pytest.approx(measured, rel=0.02)


class Sharded(nn.Module):
    """Uneven sizes, a frozen layer, wraps in wraps, and weights that are tied across blocks."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1021, 64)
        self.blocks = nn.Sequential(*(Residual(64, 251) for _ in range(3)))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.last = Residual(64, 1300)
        self.logits = nn.Linear(64, 509)
        self.tied = nn.Linear(64, 509, bias=False)
        self.tied.weight = self.logits.weight

    def forward(self, x):
        x = self.last(self.frozen(self.blocks(self.words(x))))
        return self.logits(x) + self.tied(x)


class Residual(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.narrow(self.wide(self.norm(x)).relu())


def even():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(512, 256), *(nn.Linear(256, 256) for _ in range(12)))


def pasted(code, model, optimizer):
    """Run the line that a row shows."""
    plural = "s" * isinstance(optimizer, list)
    names = {"mh": mh, "model": model, f"optimizer{plural}": optimizer}
    exec(code, names)
    gc.collect()  # the plain optimizer
    return names["model"], names[f"optimizer{plural}"]


class Held(TorchDispatchMode):
    """The bytes of all tensors that were made or touched while it was active, and the most."""

    def __init__(self):
        super().__init__()
        self.known, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does to its slice comes here, too
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.known[storage._cdata] = StorageWeakRef(storage)
                del storage
        self.most = max(self.most, self.now())
        return result

    def now(self):
        """What is alive; the engine empties whole parameters, and fills them again."""
        self.known = {key: ref for key, ref in self.known.items() if not ref.expired()}
        alive = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.known.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


def fully_sharded(build, kind, options, code):
    """Bytes held at rest, after backward and at most; collectives and bytes sent in a step."""
    tokens = torch.randint(500, (4,))  # of Linear's result on two dimensions torch warns
    with Held() as held:
        model, optimizer = pasted(code, model := build(), kind(model.parameters(), **options))
        afters, most = [], []
        for _ in range(3):
            held.most = 0
            with Collectives() as seen:
                model(tokens).square().sum().backward()
                afters.append(settled(held))
                optimizer.step()
            optimizer.zero_grad()
            most.append(held.most)
            rest = settled(held)
    return rest - tokens.nbytes, min(afters[1:]), min(most[1:]), seen.count, seen.sent


def settled(held):
    """What is alive when gloo's threads have let go of what they have sent, a moment later."""
    seen = [held.now()]
    while len(seen) < 5 or (min(seen[-5:]) < min(seen[:-5], default=seen[0] + 1)):
        time.sleep(0.02)
        seen.append(held.now())
    return min(seen)


@pytest.mark.parametrize("build", [Sharded, pytest.param(even, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.AdamW, {"fused": True}), (torch.optim.Adafactor, {})]
)
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_what_fully_sharded_training_holds_and_sends_is_planned(workers, kind, options, build):
    row = mh.plan(build, kind, workers, backend="gloo", **options).rows[3]
    assert row.name == FULLY
    ranks = run_ranks(workers, fully_sharded, build, kind, options, row.code)
    rest, after, most = (max(rank[i] for rank in ranks) for i in range(3))
    between = row.parameters + row.optimizer
    assert between == pytest.approx(rest, rel=0.01)
    assert between + row.gradients == pytest.approx(after, rel=0.05)
    assert row.total == pytest.approx(most, rel=0.05)
    assert {row.collectives} == {rank[3] for rank in ranks}
    assert row.sent == pytest.approx(sum(rank[4] for rank in ranks) / workers, rel=0.01)


# -- rules --------------------------------------------------------------------------


def held_with_a_rule(way, rule, options):
    """What the rule holds on top on this rank, and what a step sends and how often."""
    model = deep()
    module, optimizer = wrapped(way, model, torch.optim.AdamW, options)
    if rule is not None:
        optimizer = rule(optimizer)
    for _ in range(3):
        with Collectives() as seen:
            optimizer.zero_grad()
            module(torch.randn(2, 256)).sum().backward()
            optimizer.step()
    replica = None
    if rule is not None:
        replica = getattr(optimizer._core.measurement.norms, "_replica", None)
    memory = [] if replica is None else list(replica._memory.values())
    return held(memory), seen.sent


@pytest.mark.parametrize("way", WAYS)
def test_what_adamscale_holds_and_sends_on_top_is_planned(way):
    found = mh.plan(deep, "adamw", 2, backend="gloo", rule="AdamScale")
    (row,) = (row for row in found.rows if row.name == way)
    (plain,) = (r for r in mh.plan(deep, "adamw", 2, backend="gloo").rows
                if r.name == way)  # fmt: skip
    ranks = run_ranks(2, held_with_a_rule, way, mh.AdamScale, {"lr": 1e-3})
    without = run_ranks(2, held_with_a_rule, way, None, {"lr": 1e-3})
    assert {memory for memory, _ in ranks} == {row.scaling}
    assert row.total - plain.total == row.scaling
    more = sum(a - b for (_, a), (_, b) in zip(ranks, without, strict=True)) / 2
    # the step's own statistics are some hundred bytes more
    assert row.sent - plain.sent == pytest.approx(more, abs=2000)
    lines = {cells[0]: cells[1:] for cells in found.cells}
    assert lines["AdamScale"] == [format_bytes(each.scaling) for each in found.rows]


def fully_sharded_with_adamscale(code):
    model, optimizer = pasted(code, model := even(), torch.optim.AdamW(model.parameters()))
    optimizer = mh.AdamScale(optimizer)
    for _ in range(3):
        model(torch.randint(500, (4,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return held(optimizer._core.measurement.norms._replica._memory.values())


def test_what_adamscale_holds_of_sharded_parameters_is_planned():
    row = mh.plan(even, "adamw", 2, backend="gloo", rule="AdamScale").rows[3]
    assert set(run_ranks(2, fully_sharded_with_adamscale, row.code)) == {row.scaling}


def test_the_rule_of_an_existing_optimizer_is_found():
    model = deep()
    optimizer = mh.LocalSGD(mh.AdamScale(torch.optim.AdamW(model.parameters())), every=7)
    found = mh.plan(model, optimizer, 4)
    assert found.rule == "AdamScale"
    assert found.rows[2].scaling > 0 == found.rows[0].scaling


def test_a_rule_derived_from_adamscale_holds_its_replica_too():
    class Cautious(mh.AdamScale):
        pass

    model = nn.Linear(4, 4)
    found, expected = (
        mh.plan(model, rule(torch.optim.AdamW(model.parameters())), 2)
        for rule in (Cautious, mh.AdamScale)
    )
    assert found.rule == "Cautious"
    assert found.rows[1].scaling == expected.rows[1].scaling > 0


def test_every_rule_of_the_library_can_be_named():
    public = {name: getattr(mh, name) for name in mh.__all__}
    classes = {name: each for name, each in public.items() if isinstance(each, type)}
    names = [name for name, each in classes.items() if issubclass(each, ScalingRuleBase)]
    assert len(names) >= 5
    for name in names:
        assert mh.plan(nn.Linear(2, 2), rule=name).rule == name


# -- inputs by name, and time ---------------------------------------------------------------------


def test_activations_under_autocast_are_those_of_a_real_run():
    input = torch.randn(64, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = really_saved(deep(), input)
        planned = mh.plan(deep, input=input).rows[0].activations
    assert planned == measured
    assert planned != mh.plan(deep, input=input).rows[0].activations


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.logits = nn.Embedding(500, 32), nn.Linear(32, 500)

    def forward(self, input_ids, labels=None):
        logits = self.logits(self.words(input_ids))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_with_labels_the_loss_is_counted():
    ids = torch.empty(4, 16, dtype=torch.int64, device="meta")
    without = mh.plan(WithLoss, input={"input_ids": ids}).rows[0].activations
    with_loss = mh.plan(WithLoss, input={"input_ids": ids, "labels": ids}).rows[0].activations
    # the logarithms of the probabilities, and cross_entropy's one number of all weights
    assert with_loss - without == pytest.approx(4 * 4 * 16 * 500, abs=1000)


def test_the_time_of_a_step_is_one_formula():
    found = mh.plan(Model, workers=4, network="8kbit", latency=0.5, pass_seconds=2)
    expected = [2 + row.sent / 1000 + 0.5 * row.collectives for row in found.rows]
    assert [row.seconds for row in found.rows] == expected
    lines = {cells[0]: cells[1:] for cells in found.cells}
    assert lines["at 8 kbit/s"] == list(map(format_seconds, expected))
    assert {row.seconds for row in mh.plan(Model, workers=4).rows} == {None}


# -- arithmetic --------------------------------------------------------------------------------

weights = st.lists(
    st.builds(
        ParamSize,
        elements=st.integers(1, 5000),
        itemsize=st.just(4),
        kind=st.just("float32"),
        trained=st.booleans(),
        state_fixed=st.just(4),
        state_per_element=st.just(8),
    ),
    min_size=1,
    max_size=12,
)


@given(weights, st.booleans(), st.integers(2, 9), st.booleans())
def test_the_formulas_are_the_limits_of_the_layout(weights, even, workers, gloo):
    weights = [*weights, ParamSize(1, 4, trained=True, state_fixed=4, state_per_element=8)]
    job = ModelSizes((OptimizerParams(tuple(weights), even),), wraps=(WrapParams(tuple(weights)),))
    ddp, oss, sharded, fully = costs(job, workers, gloo)
    padded = sum(16 * workers * 4 + w.bytes for w in weights) * 3
    of_gradients, of_all = ddp.gradients, sum(w.bytes for w in weights)
    assert ddp.parameters == of_all <= oss.parameters == sharded.parameters <= of_all + padded
    assert of_gradients / workers <= sharded.gradients <= of_gradients + padded
    assert ddp.optimizer / workers <= oss.optimizer <= ddp.optimizer + 4 * workers
    assert ddp.sent <= min(sharded.sent, oss.sent)
    assert of_all / workers <= fully.parameters <= of_all
    assert min(oss.in_flight, sharded.in_flight, fully.in_flight) >= 0
    if even:
        assert sharded.gradients <= of_gradients / workers + padded / workers


@given(weights)
def test_with_one_worker_all_ways_are_alike_and_nothing_is_sent(weights):
    job = ModelSizes((OptimizerParams(tuple(weights)),))
    assert len(set(costs(job, 1, gloo=True))) == 1
    assert costs(job, 1, gloo=True)[0].sent == 0


@given(weights, st.booleans(), st.integers(1, 9), st.integers(16, 4000))
def test_every_element_has_one_owner(weights, even, workers, bucket):
    sizes = [(i, weight.elements) for i, weight in enumerate(weights)]
    if even:
        segments = _layout.even_layout(sizes, workers, bucket)
    else:
        segments = _layout.whole_layout(sizes, workers, bucket, [0] * workers)
    for piece in (piece for segment in segments for piece in segment.buckets):
        here = sorted(_costs._owned_ranges(piece))
        library = [(r, run.param, run.size) for r in range(workers) for run in piece.owned(r)]
        assert here == sorted(library)


@given(st.lists(st.integers(1, 8_000_000), min_size=1, max_size=20), st.integers(0, 3))
@settings(max_examples=50)
def test_buckets_of_ddp_are_torchs(sizes, halves):
    dtypes = [torch.float16 if i % 4 < halves else torch.float32 for i in range(len(sizes))]
    pairs = zip(sizes, dtypes, strict=True)
    tensors = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in pairs]
    limits, dense = list(_costs.DDP_BUCKETS), [False] * len(sizes)
    indices, _ = dist._compute_bucket_assignment_by_size(tensors[::-1], limits, dense)
    found = ddp_buckets([_model._param_size(tensor.requires_grad_()) for tensor in tensors])
    assert found == len(indices)


def test_what_fully_sharded_costs_is_its_formula():
    weights = tuple(
        ParamSize(1000, 4, state_fixed=4, state_per_element=8, rows=10) for _ in range(3)
    )
    block, root = WrapParams(weights, outer=2), WrapParams(weights[:0])
    job = ModelSizes((OptimizerParams(weights * 2),), wraps=(block, block, root))
    fully = costs(job, 2, gloo=False)[3]
    assert (fully.parameters, fully.gradients) == (12_000, 12_000)
    assert fully.optimizer == 6 * (4 + 8 * 500)
    # the second wrap computes: whole, with gradients, while the first one is coming;
    # then the first: whole, with gradients, while half of the second's are there, and all leave
    assert fully.in_flight == 36_000 + 6000 - 12_000
    assert (fully.sent, fully.collectives) == ((3 * 24_000 + 12 + 16) // 2, 2 * 2 + 2 + 1)
    fully = costs(job, 4, gloo=True)[3]  # of 10 rows 3, and 2 of padding
    assert (fully.parameters, fully.gradients) == (2 * 3 * 1200, 2 * 3 * 1200)
    assert fully.collectives == 2 * 2 * 4 + 2 + 1


def wraps_of(model, least):
    """(elements, the wrap around it) of each."""
    return [
        (sum(p.numel() for p in params), inside) for params, inside in wrap_params(model, least)
    ]


def test_units_are_gathered_from_the_leaves_up():
    model = nn.Sequential(
        nn.Linear(10, 10), nn.ModuleList([nn.Linear(20, 20), nn.Linear(5, 5)]), nn.Linear(30, 30)
    )
    assert wraps_of(model, 400) == [(420, 2), (930, 2), (140, None)]  # the last is the root's
    inner = nn.Sequential(nn.Linear(20, 20), nn.Linear(15, 15), nn.Linear(15, 15))
    assert wraps_of(nn.Sequential(inner, nn.Linear(5, 5)), 400) == [(420, 1), (480, 2), (30, None)]


@pytest.mark.parametrize("build", [Sharded, even, Model])
def test_units_are_what_auto_wrap_wraps(build):
    least = sum(p.numel() for p in build().parameters()) // 50
    with fairscale.enable_wrap(
        process_group=fairscale.DummyProcessGroup(0, 1), skip_params_check_for_root=True
    ):
        wrapped = fairscale.auto_wrap(build(), min_num_params=least)
    wraps = [module for module in wrapped.modules() if isinstance(module, mh.FSDP)]
    held = [sum(p.numel() for p in {module._parameters[name] for module, name in
            wrap._places.values()}) for wrap in wraps]  # fmt: skip
    assert sorted(held) == sorted(elements for elements, _ in wraps_of(build(), least))


# -- the optimizer's state ---------------------------------------------------------------------

SHAPES = [(3, 4), (8,), (), (2, 3, 5), (1, 9), (6, 1, 2, 2)]
KINDS = {
    **{kind.__name__: (kind, {}) for kind in KNOWN if KNOWN[kind].elementwise},
    "Adafactor": (torch.optim.Adafactor, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "capturable": True}),
    "centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_as_large_as_that_of_the_real_parameter(name, dtype):
    kind, options = KINDS[name]
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = kind(
        params, **{**options, "capturable": False} if "amsgrad" in options else options
    )
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    states = StateSizes(kind, options)
    for param in params:
        real = sum(t.nbytes for t in optimizer.state[param].values() if torch.is_tensor(t))
        assert states.bytes(param.shape, dtype, options) == real, tuple(param.shape)
        if KNOWN[kind].elementwise:
            fixed, each = states.by_element(dtype, options)
            assert fixed + each * prod(param.shape) == real


def test_an_optimizer_may_be_given_in_many_ways():
    model = Model()

    def adam(params):
        return torch.optim.AdamW(params, lr=1e-2, amsgrad=True)

    made = adam(model.parameters())
    rows = mh.plan(model, "AdamW", 4, lr=1e-2, amsgrad=True).rows

    def costs(plan):
        return [(row.total, row.sent, row.collectives) for row in plan.rows]

    for way in (
        made,
        [made],
        mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-2, amsgrad=True),
    ):
        assert costs(mh.plan(model, way, 4)) == [(r.total, r.sent, r.collectives) for r in rows]
    named = mh.plan(model, "AdamW", 4, rule="AdaScale", lr=1e-2, amsgrad=True)
    assert costs(mh.plan(model, mh.AdaScale(adam(model.parameters())), 4)) == costs(named)
    plain = mh.plan(model, torch.optim.AdamW, 4)
    assert [a.optimizer > b.optimizer for a, b in zip(rows, plain.rows, strict=True)] == [True] * 4


def test_groups_have_the_state_of_their_own_options():
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 50, bias=False))
    first, second = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.9}], lr=1)
    assert mh.plan(model, optimizer, 1).rows[0].optimizer == 4 * 5000


def test_several_optimizers_are_laid_out_each_by_its_own():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    found = mh.plan(model, optimizers, 2)
    assert found.optimizer == "Muon and AdamW"
    assert found.rows[0].optimizer == 4 * 2 * 64 * 32 + 2 * (8 * (64 + 32) // 2 + 4)
    assert found.rows[2].optimizer == 4 * 64 * 32 + 8 * 48 + 2 * 4
    assert "AdamW updates each element" in str(found) and "Muon needs whole" in str(found)


# -- models ------------------------------------------------------------------------------------


def test_a_function_is_built_without_memory_and_tied_weights_count_once():
    devices = []

    def build():
        model = Model()
        devices.extend(p.device.type for p in model.parameters())
        return model

    found = mh.plan(build, workers=2)
    assert set(devices) == {"meta"}
    assert found.elements == sum(p.numel() for p in Model().parameters())
    assert [r.total for r in found.rows] == [r.total for r in mh.plan(Model(), workers=2).rows]


def test_a_function_that_needs_values_is_built_for_real():
    def build():
        widths = [int(width.item()) for width in torch.linspace(4, 8, 2)]
        return nn.Linear(*widths)

    assert mh.plan(build).elements == 40


def test_frozen_parameters_have_no_gradient_and_no_state():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100).requires_grad_(False))
    row = mh.plan(model, workers=1).rows[0]
    assert (row.parameters, row.gradients, row.optimizer) == (80_800, 40_400, 80_808)


def test_types_may_be_mixed():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100, dtype=torch.bfloat16))
    row = mh.plan(model, workers=1).rows[0]
    assert (row.gradients, row.optimizer) == (60_600, 121_200 + 4 * 4)
    row = mh.plan(model, workers=2).rows[2]
    assert row.gradients == pytest.approx(30_300, rel=0.02)


def test_a_huge_model_on_many_workers_takes_seconds():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.join = nn.Linear(8192, 10_240), nn.Linear(8192, 8192)
            self.wide, self.narrow = nn.Linear(8192, 57_344), nn.Linear(28_672, 8192)

    def build():
        blocks = [Block() for _ in range(80)]
        return nn.Sequential(nn.Embedding(128_256, 8192), *blocks, nn.Linear(8192, 128_256))

    start = time.perf_counter()
    found = mh.plan(build, workers=1024, memory="80GiB")
    assert time.perf_counter() - start < 30  # 1 s on a quiet machine
    assert found.elements == pytest.approx(70.6e9, rel=0.01)
    assert found.rows[2].optimizer == pytest.approx(8 * found.elements / 1024, rel=0.01)
    assert [row.fits for row in found.rows] == [False, False, False, True]
    assert found.rows[3].parameters == pytest.approx(4 * found.elements / 1024, rel=0.01)


# -- activations -------------------------------------------------------------------------------


def test_activations_of_one_layer_are_its_input():
    assert activation_bytes(nn.Linear(4, 8), torch.empty(2, 4, device="meta")) == 2 * 4 * 4


def really_saved(model, *inputs):
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(*inputs)
    return held(t for t in kept if t.untyped_storage().data_ptr() not in own)


def transformer():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2)
    return nn.Sequential(nn.Embedding(50, 64), layers, nn.Linear(64, 50))


@pytest.mark.parametrize(
    ("build", "input"),
    [(Model, torch.randn(INPUT)), (transformer, torch.randint(50, (3, 40)))],
)
def test_activations_without_memory_are_those_of_a_real_run(build, input):
    model = build()
    before = [t.clone() for t in model.state_dict().values()]
    measured = activation_bytes(model, input)
    after = list(model.state_dict().values())
    torch.testing.assert_close(after, before, rtol=0, atol=0)  # not even BatchNorm's averages
    assert measured == really_saved(model, input)
    with torch.device("meta"):
        assert activation_bytes(build(), input.to("meta")) == measured
    found = mh.plan(build, input=(input,))
    assert {row.activations for row in found.rows} == {measured}
    assert [row.total - measured for row in found.rows] == [r.total for r in mh.plan(build).rows]


def test_checkpointing_and_autocast_are_heard():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

        def forward(self, *, x):
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    x = torch.empty(16, 8, requires_grad=True)
    assert activation_bytes(Checkpointed(), {"x": x}) == 16 * 8 * 4
    full = activation_bytes(Checkpointed().body, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert activation_bytes(Checkpointed().body, x) < full


# -- what is chosen ----------------------------------------------------------------------------


def test_the_cheapest_is_the_simplest_that_fits():
    names = []
    totals = [row.total for row in mh.plan(deep, workers=4).rows]
    for memory in (totals[0], totals[0] - 1, totals[2], totals[2] - 1, totals[3] - 1):
        best = mh.plan(deep, workers=4, memory=memory).cheapest
        names.append(best and best.name)
    assert names == ["DDP", "OSS + ShardedDataParallel", "OSS + ShardedDataParallel", FULLY, None]
    assert mh.plan(deep).cheapest.name == "DDP"


def test_where_nothing_fits_it_says_what_is_missing():
    room = mh.plan(deep, workers=8).rows[3].total - 2**20
    found = mh.plan(deep, workers=8, memory=room)
    assert found.cheapest is None
    assert f"Nothing fits. {FULLY} is 1.00 MiB over" in str(found)
    found = mh.plan(lambda: nn.Sequential(deep(), Scale()), workers=2, memory=room)
    assert "Nothing fits. OSS + ShardedDataParallel is " in found.verdict


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))  # which FSDP cannot divide


def mixed():
    layer = nn.Linear(8, 8)
    layer.bias = nn.Parameter(layer.bias.double())
    return nn.Sequential(layer, nn.Linear(8, 8))


def test_fully_sharded_is_chosen_where_only_it_fits():
    row = mh.plan(deep, workers=8).rows[3]
    assert row.available
    assert mh.plan(deep, workers=8, memory=row.total).cheapest.name == FULLY


@pytest.mark.parametrize(
    ("build", "optimizer", "said"),
    [
        (deep, "adafactor", None),
        (Model, "adamw", "scale is a scalar"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double()), "sgd", None),
        (mixed, "sgd", "one wrap would contain parameters of torch.float32 and torch.float64"),
    ],
)
def test_what_fully_sharded_cannot_train_is_not_chosen(build, optimizer, said):
    found = mh.plan(build, optimizer, workers=8)
    row = found.rows[3]
    assert row.available == (said is None)
    if said is not None:
        assert f"{FULLY} cannot be used: " in str(found) and said in str(found)
        best = mh.plan(build, optimizer, workers=8, memory=row.total).cheapest
        assert best is None or best.name != FULLY
    assert mh.plan(build, optimizer, workers=1).rows[3].available


def test_the_lines_to_paste_run():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20), nn.Linear(20, 4))

    def made(model, several):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        if several:
            return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.01)]
        groups = [{"params": matrices, "lr": 0.02}, {"params": rest, "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, betas=(0.5, 0.9))

    def trained(code, several):
        model, optimizer = pasted(code, model := build(), made(model, several))
        for _ in range(2):
            model(torch.linspace(-1, 1, 60).view(3, 20)).square().sum().backward()
            for one in optimizer if several else [optimizer]:
                one.step()
                one.zero_grad()
        return list(model.state_dict().values())

    for several in (False, True):
        rows = mh.plan(model := build(), made(model, several), 2).rows
        alone = run_ranks(1, trained, "", several)[0]
        for rank in run_ranks(2, lambda: [trained(row.code, several) for row in rows]):  # noqa: B023
            for row, found in zip(rows, rank, strict=True):
                torch.testing.assert_close(found, alone, msg=row.code)
    assert rows[2].code == "model, optimizers = mh.shard(model, optimizers, level=2)"


# -- sizes and mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("24 gb", 24 * 10**9), ("512MiB", 2**29), (7, 7)],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@given(st.integers(1, 2**60))
def test_sizes_are_written_with_three_digits(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"workers": 0}, ValueError, "workers must be a whole number of at least 1, got 0"),
        ({"backend": "mpi"}, ValueError, "one of 'nccl', 'gloo', got 'mpi'"),
        ({"memory": "24 gigs"}, ValueError, 'such as "24GiB"'),
        ({"memory": "1.5k"}, ValueError, 'such as "24GiB"'),
        ({"memory": -1}, ValueError, "above 0, got -1"),
        ({"network": "50MB"}, ValueError, "got '50MB'.*such as \"50Mbit\""),
        ({"network": "50 MBps"}, ValueError, "Give bits per second"),
        ({"network": "0Mbit"}, ValueError, "above 0, got 0.0"),
        ({"network": True}, ValueError, "network must be"),
        ({"network": "1Gbit", "pass_seconds": -1}, ValueError, "at least 0, got -1"),
        ({"network": "1Gbit", "latency": "1s"}, ValueError, "latency must be a finite number"),
        ({"rule": "AdaScala"}, ValueError, "rule must be one of 'AdaScale', 'AdamScale', .*, got"),
        ({"model": 3}, TypeError, "torch.nn.Module, or a function"),
        ({"model": lambda: 3}, TypeError, "a function that returns one, got 3"),
        ({"optimizer": "adamm"}, ValueError, "one of 'adadelta', .*'adam', .*got 'adamm'"),
        ({"optimizer": 3}, TypeError, "a name, a class or"),
        ({"momentum": 0.9}, ValueError, "unexpected keyword argument 'momentum'"),
        ({"optimizer": "muon"}, ValueError, "a list of optimizers if this one is for some"),
        ({"optimizer": "lbfgs"}, ValueError, "cannot be divided"),
        ({"input": torch.empty(3, 3)}, ValueError, "forward pass could not be run"),
    ],
)
def test_mistakes_are_named(arguments, error, message):
    arguments = {"model": Model, **arguments}
    with pytest.raises(error, match=message):
        mh.plan(arguments.pop("model"), **arguments)


def test_an_optimizer_of_other_parameters_is_named():
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"2 parameter\(s\) that are not in the model"):
        mh.plan(model, torch.optim.SGD(nn.Linear(3, 3).parameters()))
    with pytest.raises(ValueError, match=r"must be in exactly one optimizer\. Check bias"):
        mh.plan(model, torch.optim.SGD([model.weight]))


def test_examples_of_sizes_run():
    assert doctest.testmod(arguments).failed == 0


def test_the_page_shows_what_is_printed(tmp_path, capsys):
    page = ROOT / "docs" / "plan.md"
    run_page(page, tmp_path)
    texts = [block.code for block in blocks(page) if block.language == "text"]
    printed = capsys.readouterr().out
    assert texts
    assert all(text.strip() in printed for text in texts)
