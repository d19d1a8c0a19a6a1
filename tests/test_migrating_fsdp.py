"""docs/migrating.md on sharded parameters: its examples and its corrections, on both sides.

The originals' half needs fairscale (benchmarks/peers.py) and is skipped without it. It runs on a
CPU: see fairscale_on_cpu.py.
"""

import contextlib
import os
import pickle
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once, and not in every rank
from torch import nn
from torch.optim import SGD, Adam

import manyhands as mh
from helpers.fairscale_on_cpu import fairscale_on_cpu
from helpers.pages import ROOT, TORCHRUN, blocks, launch
from helpers.ranks import run_ranks
from helpers.sharding_oracle import Lamb
from manyhands import fairscale

from test_migrating import (  # isort: skip
    LOOPS,
    both_sides,
    flat,
    need_peer_of,
    outcome,
    peer,
    small_model,
    unchanged_group,
)

# -- the documented examples ---------------------------------------------------------------------

ON_CPU = str(ROOT / "tests" / "helpers" / "fairscale_on_cpu.py")
BY_TORCHRUN = ["fsdp_loop.py", "wrapped_model.py"]


def written(folder):
    """The page's scripts, on the old side, in a folder."""
    for block in blocks(LOOPS):
        if block.title is not None:
            (folder / block.title).write_text(block.side(old=True))


@pytest.mark.parametrize("title", [*BY_TORCHRUN, "nested_wrap.py"])
def test_the_old_side_of_an_example_runs_too(title, tmp_path):
    need_peer_of("fairscale.nn")
    written(tmp_path)
    ranks = [*TORCHRUN, "2"]
    start = ranks if title in BY_TORCHRUN else [sys.executable]
    done = launch([*start, ON_CPU, title], tmp_path)
    assert done.returncode == 0, done.stderr


def script(title, side="ours"):
    """A documented example, with its placeholders in it."""
    sides = {block.title: block.side(old=side == "original") for block in blocks(LOOPS)}
    return sides["sharded_problem.py"] + sides[title].replace("from sharded_problem import *", "")


def run_example(title, side, workers, folder):
    """The state of the model that an example ends with, of each rank."""
    if side == "original":
        need_peer_of("fairscale.nn")

    def run():
        os.chdir(folder)
        names = {"__name__": "a script"}
        with wrapper_of(side), unchanged_group():
            exec(script(title, side), names)
            model = names["sharded_module" if title == "fsdp_loop.py" else "model"]
            return dict(model.state_dict())

    return run_ranks(workers, run)


@pytest.mark.parametrize("side", ["original", "ours"])
def test_the_documented_loop_trains_as_one_process_does(side, tmp_path):
    names = {"__name__": "a script"}
    exec(script("fsdp_loop.py").split("import torch\nfrom manyhands")[0], names)
    alone, x = names["my_module"], names["x"]
    optim = Adam(alone.parameters(), lr=0.0001)
    (sum(alone(x + rank, y=3, z=torch.Tensor([1])).sum() for rank in range(2)) / 2).backward()
    optim.step()
    for state in run_example("fsdp_loop.py", side, 2, tmp_path):
        torch.testing.assert_close(state, dict(alone.state_dict()))


@pytest.mark.parametrize("side", ["original", "ours"])
def test_the_documented_model_trains_on_two_workers_as_on_one(side, tmp_path):
    """(The workers have the same inputs.)"""
    (alone,) = run_example("wrapped_model.py", "ours", 1, tmp_path)
    for state in run_example("wrapped_model.py", side, 2, tmp_path):
        # The gradient of the keys' bias is zero up to rounding, which Adam enlarges to 2e-5.
        torch.testing.assert_close(state, alone, rtol=1e-4, atol=5e-5)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")  # torch's
@both_sides(original="AssertionError", ours=None)
def test_the_notes_example(side, expected):
    if side == "original":
        need_peer_of("fairscale.nn")
        peer("fairscale.fair_dev.testing.testing")

    def run():  # in a process of its own, as fairscale would stay in the context that failed
        return outcome(lambda: exec(script("notes_wrap.py", side), {"__name__": "x"}))

    assert run_ranks(1, run) == [expected]


# -- what is corrected ---------------------------------------------------------------------------


@contextlib.contextmanager
def wrapper_of(side):
    """FullyShardedDataParallel; theirs with its calls to CUDA left out."""
    if side == "ours":
        yield fairscale.FullyShardedDataParallel
        return
    with warnings.catch_warnings(), fairscale_on_cpu() as wrapper:
        warnings.simplefilter("ignore")
        yield wrapper


def with_fsdp(side, fn):
    """What `fn(FullyShardedDataParallel)` returns on each of two ranks, or the error's name."""
    if side == "original":
        need_peer_of("fairscale.nn")

    def run():
        with wrapper_of(side) as wrapper:
            return outcome(lambda: fn(wrapper))

    return run_ranks(2, run)


def backward(model, inputs=None):
    inputs = torch.ones(2, 8) * (1 + dist.get_rank()) if inputs is None else inputs
    model(inputs).sum().backward()
    return model


def trained(model, kind=Adam, **options):
    """The wrapped model after a step, and its optimizer."""
    optimizer = kind(model.parameters(), lr=0.1, **options)
    backward(model)
    optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore")  # fairscale's
@both_sides(original="KeyError", ours="stepped")
def test_a_step_on_cpus(side, expected):
    wrapper = mh.FSDP
    if side == "original":
        need_peer_of("fairscale.nn")
        wrapper = peer("fairscale.nn").FullyShardedDataParallel

    def step():
        trained(wrapper(small_model(), compute_device=torch.device("cpu")))
        return "stepped"

    assert run_ranks(2, lambda: outcome(step)) == [expected] * 2


@both_sides(original="ValueError", ours="stepped")
def test_parameters_in_bfloat16(side, expected):
    def step(wrapper):
        backward(wrapper(small_model().bfloat16()), torch.ones(2, 8, dtype=torch.bfloat16))
        return "stepped"

    assert with_fsdp(side, step) == [expected] * 2


@both_sides(original="AssertionError", ours=True)
def test_a_frozen_parameter_in_a_wrap(side, expected):
    def step(wrapper):
        module = small_model()
        module[0].weight.requires_grad_(False)
        before = module[0].weight.clone()
        model, _ = trained(wrapper(module))
        return torch.equal(model.state_dict()["0.weight"], before)

    assert with_fsdp(side, step) == [expected] * 2


@both_sides(original=[5.86, 9.10], ours=[10.83, 10.83])
def test_torchs_clipping_of_sharded_parameters(side, expected):
    def clip(wrapper):
        model = backward(wrapper(small_model()))
        return round(float(nn.utils.clip_grad_norm_(model.parameters(), 99)), 2)

    assert with_fsdp(side, clip) == expected


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.used(x)


@both_sides(original=True, ours=False)
def test_weight_decay_of_what_nobody_used(side, expected):
    def moves(wrapper):
        before = HalfUsed().unused.weight
        model, _ = trained(wrapper(HalfUsed()), SGD, weight_decay=0.1)
        return not torch.equal(model.state_dict()["unused.weight"], before)

    assert with_fsdp(side, moves) == [expected] * 2


@both_sides(original=0.0175, ours=0.0)
def test_lamb(side, expected):
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 2, 4, 8, generator=draw), torch.randn(10, 2, 4, 3, generator=draw)

    def train(model, samples):
        optimizer = Lamb(model.parameters(), lr=0.02, weight_decay=0.1)
        for step in range(10):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(samples(x[step])), samples(y[step])).backward()
            optimizer.step()
        return model

    def off(wrapper):
        model = train(wrapper(small_model()), lambda both: both[dist.get_rank()])
        found = torch.cat([value.flatten() for value in model.state_dict().values()])
        alone = flat(train(small_model(), lambda both: both.flatten(0, 1)))
        return float((found - alone).norm() / alone.norm())

    assert with_fsdp(side, off) == pytest.approx([expected] * 2, abs=5e-4 if expected else 1e-6)


@both_sides(original=["_fsdp_wrapped_module.flat_param_0"], ours=["weight", "bias"])
def test_names_of_parameters(side, expected):
    def names(wrapper):
        return [name for name, _ in wrapper(nn.Linear(3, 3)).named_parameters()]

    assert with_fsdp(side, names) == [expected] * 2


@both_sides(original=2, ours=4)
def test_workers_that_begin_differently(side, expected):
    def rows_of_rank_0(wrapper):
        torch.manual_seed(0)
        first = nn.Linear(4, 4, bias=False).weight
        torch.manual_seed(dist.get_rank())
        weight = wrapper(nn.Linear(4, 4, bias=False)).state_dict()["weight"]
        return int((weight == first).all(1).sum())

    assert with_fsdp(side, rows_of_rank_0) == [expected] * 2


@both_sides(original=False, ours="ValueError")
def test_one_weight_in_two_wraps(side, expected):
    def one_weight(wrapper):
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)), nn.Linear(8, 1))
        layers[1].weight = layers[0].weight
        layers[0] = wrapper(layers[0])
        model, _ = trained(wrapper(layers), SGD)
        state = model.state_dict()
        return torch.equal(state["0.weight"], state["1.weight"])

    assert with_fsdp(side, one_weight) == [expected] * 2


@both_sides(original="nothing changed", ours="RuntimeError")
def test_an_optimizer_from_before(side, expected):
    def step(wrapper):
        module = small_model()
        optimizer = SGD(module.parameters(), lr=0.1)
        model = backward(wrapper(module))
        optimizer.step()
        state, before = model.state_dict(), small_model().state_dict()
        return "nothing changed" if all(torch.equal(state[k], before[k]) for k in before) else ""

    assert with_fsdp(side, step) == [expected] * 2


@both_sides(original="AssertionError", ours=2)
def test_optimizer_state_of_two_groups(side, expected):
    def groups(wrapper):
        model = wrapper(nn.Sequential(wrapper(nn.Linear(8, 8)), wrapper(nn.Linear(8, 3))))
        optimizer = Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
        backward(model)
        optimizer.step()
        state = model.gather_full_optim_state_dict(optimizer)
        return len(state["param_groups"]) if state else 2

    assert with_fsdp(side, groups) == [expected] * 2


@both_sides(original="NotImplementedError", ours="gathered")
def test_optimizer_state_without_flatten_parameters(side, expected):
    def gather(wrapper):
        model, optimizer = trained(wrapper(small_model(), flatten_parameters=False))
        model.gather_full_optim_state_dict(optimizer)
        return "gathered"

    assert with_fsdp(side, gather) == [expected] * 2


@both_sides(original=[98], ours=[16, 8])
def test_the_optimizer_state_that_is_sharded(side, expected):
    def shape_left(wrapper):
        model, optimizer = trained(wrapper(small_model()))
        box = [model.gather_full_optim_state_dict(optimizer)]
        dist.broadcast_object_list(box)
        assert box[0]["state"][0]["exp_avg"].shape == (16, 8)
        model.get_shard_from_optim_state_dict(box[0])
        return list(box[0]["state"][0]["exp_avg"].shape)

    assert with_fsdp(side, shape_left) == [expected] * 2


@both_sides(original="RuntimeError", ours="made")
def test_one_worker_without_a_process_group(side, expected):
    if side == "original":
        need_peer_of("fairscale.nn")
    with wrapper_of(side) as wrapper:
        assert outcome(lambda: wrapper(nn.Linear(3, 3)) and "made") == expected


# -- what fairscale's own tests look at ----------------------------------------------------------


def own_tests():
    """Yield attributes that fairscale's own tests read, and whether they differ as expected."""
    torch.manual_seed(0)
    linear = fairscale.FullyShardedDataParallel(nn.Linear(4, 3))
    inner = nn.Sequential(mh.FSDP(nn.Linear(4, 3)))
    mh.FSDP(inner)
    with linear.summon_full_params():
        whole = linear.training_state.name, linear.weight.shape
    yield "`is_singleton_tensor(x)`", not hasattr(fairscale, "is_singleton_tensor")
    lacks = not hasattr(linear, "buffer_size")
    yield "`buffer_size`", lacks and sum(p.numel() for p in linear.params) == 15
    lacks = not hasattr(linear, "has_full_params")
    yield "`has_full_params`", lacks and whole == ("SUMMON_FULL_PARAMS", (3, 4))
    yield "`uncollected_opt_state`", not hasattr(linear, "uncollected_opt_state")
    yield "`flat_param_0`", list(linear.state_dict()) == ["weight", "bias"]
    yield "`process_group_reduce_scatter`", linear.process_group_reduce_scatter is None
    yield "pickle a wrap", "Save its state_dict()" in said(lambda: pickle.dumps(linear))
    yield "wrap a wrapped model again", "Use the first wrap" in said(lambda: mh.FSDP(inner))
    few = fairscale.DummyProcessGroup(0, 2)
    refused = said(lambda: mh.FSDP(nn.Linear(4, 3), process_group=few))
    yield "`DummyProcessGroup` of several ranks", "new_group" in refused

    module = nn.Linear(4, 3)
    wrapper = fairscale.AdaScaleWrapper
    refused = said(lambda: mh.OSS(module.parameters(), wrapper, optim_cls=SGD, lr=0.1))
    rule = mh.AdaScale(mh.OSS(module.parameters(), SGD, lr=0.1))
    model = mh.ShardedDataParallel(module, rule)
    model(torch.ones(2, 4)).sum().backward()
    rule.step()
    yield "`OSS(params, AdaScaleWrapper)`", "ranks have different" in refused

    module = nn.Linear(4, 3)
    optimizer = mh.OSS(module.parameters(), SGD, lr=0.1)
    ranks = len(optimizer.partition_parameters())
    yield "`OSS.buckets`", not hasattr(optimizer, "buckets") and ranks == 2
    for param in module.parameters():
        param.grad = torch.full_like(param, float(dist.get_rank()))
    refused = said(optimizer.step)
    yield "`OSS` without averaged gradients", "ShardedDataParallel" in refused

    module = nn.Linear(4, 3)
    optimizer = mh.OSS(module.parameters(), SGD, lr=0.1)
    model = mh.ShardedDataParallel(module, optimizer)
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    refused = said(optimizer.step)
    model.reduce()
    optimizer.step()
    yield "`step()` after `no_sync()` alone", "reduce()" in refused

    described = [{"param_metadata": [{"fsdp_path": "", "params": {}}], "buffer_names": []}]
    refused = said(lambda: mh.FSDP.consolidate_shard_weights([{}], described))
    yield "slices saved by fairscale", "these slices are from fairscale" in refused


def said(action):
    """The message of the error that it raises."""
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


def test_attributes_of_fairscales_own_tests():
    ranks = run_ranks(2, lambda: dict(own_tests()))
    assert all(all(found.values()) for found in ranks), ranks
