"""The named ranges in the traces of torch.profiler."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # the profiler's

PREFIX = "manyhands::"


def recorded(call):
    """The ranges of manyhands while `call` runs, in order of their start: names, all parents."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    found = []
    for event in events:
        parents = []
        parent = event.cpu_parent
        while parent is not None:
            parents.append(parent.name)
            parent = parent.cpu_parent
        if event.name.startswith(PREFIX):
            inside = [child.name for child in event.cpu_children]
            found.append([event.name.removeprefix(PREFIX), parents, inside])
    return found


def names(found):
    return [name for name, _, _ in found]


def without_repetitions(found):
    kept = []
    for name in names(found):
        if not kept or kept[-1] != name:
            kept.append(name)
    return kept


def step_at_level_2(rule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    inner = mh.OSS(model.parameters(), optim=AdamW)
    optimizer = rule(inner)
    wrapped = mh.ShardedDataParallel(model, optimizer)

    def step():
        optimizer.zero_grad()
        wrapped(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    for _ in range(6):  # ranks agree on the order of buckets; AdamScale reads second moments
        step()
    return recorded(step)


@pytest.mark.parametrize("rule", [mh.AdaScale, mh.AdamScale])
def test_a_step_at_level_2_with_a_rule_has_named_ranges(rule):
    for found in run_ranks(2, step_at_level_2, rule):
        per_gradient = ["norm", "copy gradient and free it"]
        assert names(found)[:8] == per_gradient * 4
        in_pass = [
            *per_gradient,
            "launch reduce_scatter",
            "launch all_reduce",
            "wait reduce_scatter",
            "wait all_reduce",
            "norm of the mean",
            "launch numbers",
        ]
        in_step = ["wait numbers", "launch all_gather", "wait all_gather"]
        order = without_repetitions(found)[6:]
        assert order[: len(in_pass + in_step)] == in_pass + in_step
        if rule is mh.AdaScale:  # AdamScale then gathers second moments
            assert len(order) == len(in_pass + in_step)
        for name, parents, inside in found:
            if name == "norm":
                assert any("AccumulateGrad" in parent for parent in parents)
                assert any(child.startswith("aten::") for child in inside)
            assert PREFIX + name not in parents
            if name.startswith(("launch", "wait")):
                assert not any(parent.startswith(PREFIX) for parent in parents)


def test_an_unmeasured_step_has_no_norms():
    def steps():
        model = nn.Linear(4, 1)
        optimizer = mh.AdaScale(SGD(model.parameters(), lr=0.1), scale=2.0, world_size=1)
        optimizer._core._period = lambda: 2

        def step():
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()

        step()
        return names(recorded(step))

    assert "norm" not in steps()


def test_a_sync_round_encodes_and_takes_the_outer_step():
    def block():
        params = [nn.Parameter(torch.randn(600))]
        optimizer = mh.DiLoCo(SGD(params, lr=0.1), every=1, codec="int8", shared_memory=False)

        def step():
            params[0].grad = torch.randn(600)
            optimizer.step()

        step()
        return recorded(step)

    for found in run_ranks(2, block):
        seen = without_repetitions(found)
        round_of_ranges = ["encode", "launch all_to_all", "wait all_to_all", "decode", "encode"]
        assert seen[: len(round_of_ranges)] == round_of_ranges
        assert seen[-1] == "outer step"


def test_a_save_has_named_stages(tmp_path):
    def save():
        model = nn.Linear(3, 2)
        return dist.get_rank(), names(recorded(lambda: mh.save(tmp_path, model=model)))

    for rank, found in run_ranks(2, save):
        stages = [name for name in found if name.startswith("save")]
        last = "save wait" if rank else "save publish"
        assert stages == ["save collect", "save prepare", "save write", last]


def test_parameters_are_gathered_and_freed_at_level_3():
    def summon():
        model = mh.FSDP(nn.Linear(4, 4))

        def read():
            with model.summon_full_params():
                pass

        return names(recorded(read))

    for found in run_ranks(2, summon):
        assert found == ["gather parameters", "free parameters"]
