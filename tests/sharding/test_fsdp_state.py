"""State of sharded parameters: whole and in slices, and between sharded runs and plain ones."""

import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW

import manyhands as mh
from helpers.ranks import RanksFailed, on_ranks, run_ranks
from helpers.sharding_oracle import make_batches, make_model
from manyhands.sharding import _agreement

from test_fsdp import WAYS, Tied, nested, one_wrap, steps  # isort: skip


def trained(wrap=nested, workers=1, kind=AdamW):
    model = wrap(make_model())
    optimizer = kind(model.parameters(), lr=0.02, weight_decay=0.1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    steps(model, [optimizer], lambda x: x[rank], workers=workers)
    return model, optimizer


def plainly(steps_=1):
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for _ in range(steps_):
        steps(model, [optimizer], lambda x: x[0], workers=1)
    return model, optimizer


def file_trip(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.sample("1-one wrap", "2-one wrap", "3-nested")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_state_dict_is_the_plain_models(workers, way):
    def run():
        model, _ = trained(WAYS[way], workers)
        state = model.state_dict()
        plain = make_model()
        plain.load_state_dict(state)
        other = WAYS[way](make_model())
        other.load_state_dict(plain.state_dict())
        again = other.state_dict()
        assert list(state) == list(plain.state_dict()) == list(again)
        return [state[k] for k in state], [again[k] for k in state]

    first, *others = run_ranks(workers, run)
    for saved, again in (first, *others):
        for one, two, three in zip(first[0], saved, again, strict=True):
            assert torch.equal(one, two) and torch.equal(one, three)


class Versioned(nn.Linear):
    """Changes what was saved by an older version of it."""

    _version = 3

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        assert metadata.get("version") == self._version
        super()._load_from_state_dict(state, prefix, metadata, *args)


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_versions_of_modules_are_saved_and_loaded(workers):
    build = {
        "plain": lambda: nn.Sequential(nn.Linear(2, 2), Versioned(2, 2)),
        "one wrap": lambda: mh.FSDP(build["plain"]()),
        "nested": lambda: mh.FSDP(nn.Sequential(nn.Linear(2, 2), mh.FSDP(Versioned(2, 2)))),
        "inside": lambda: nn.Sequential(nn.Linear(2, 2), mh.FSDP(Versioned(2, 2))),
    }
    states = {name: make().state_dict() for name, make in build.items()}
    for state in states.values():
        assert states["plain"]._metadata.items() <= state._metadata.items()
        for make in ("plain", "one wrap", "nested"):
            build[make]().load_state_dict(state)
    build["inside"]().load_state_dict(states["inside"])


class Small(nn.Module):
    """With a tied parameter and a buffer in what is checkpointed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inside = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
        self.inside[2].weight = self.inside[0].weight
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.inside(x).float())


def wrapped_inside(module, **options):
    return mh.FSDP(checkpoint_wrapper(module), **options)


def wrapped_outside(module, **options):
    return checkpoint_wrapper(mh.FSDP(module, **options))


@pytest.mark.parametrize("way", [wrapped_inside, wrapped_outside])
@pytest.mark.parametrize("workers", [1, 2])
def test_names_with_torchs_checkpoint_wrapper_are_the_plain_models(workers, way):
    def run():
        model = Small()
        model.inside = way(model.inside, mixed_precision=True, compute_dtype=torch.bfloat16)
        model = mh.FSDP(model)
        optimizer = AdamW(model.parameters())
        model(torch.randn(4, 5)).float().sum().backward()
        optimizer.step()
        state = model.state_dict()
        tied = [state[f"inside.{i}.weight"].data_ptr() for i in (0, 2)]
        assert tied[0] == tied[1]
        Small().load_state_dict(state)
        kinds = [str(value.dtype) for value in state.values()]
        fresh = Small()
        fresh.inside = way(fresh.inside)
        fresh = mh.FSDP(fresh)
        fresh.load_state_dict(state)
        again = fresh.state_dict()
        local = [fresh.local_state_dict(), fresh.local_metadata_dict()]
        full = model.gather_full_optim_state_dict(optimizer)
        names = sorted(full["param_id_map"]) if full else []
        return list(state), kinds, [torch.equal(again[k], state[k]) for k in state], names, local

    ranks = run_ranks(workers, run)
    plain = Small()
    assert ranks[0][0] == list(plain.state_dict())
    assert ranks[0][1] == [str(value.dtype) for value in plain.state_dict().values()]
    assert all(ranks[0][2])
    assert ranks[0][3] == sorted(name for name, _ in plain.named_parameters())
    slices, metadata = ([rank[4][part] for rank in ranks] for part in range(2))
    whole = mh.FSDP.consolidate_shard_weights(slices, metadata)
    assert sorted(whole) == sorted(plain.state_dict())


@on_ranks(2)
def test_a_state_dict_of_a_larger_module_has_plain_names():
    inner = nested(make_model())
    outer = nn.Sequential(nn.Linear(5, 5), inner)
    other = nn.Sequential(nn.Linear(5, 5), make_model())
    other.load_state_dict(outer.state_dict())
    outer.load_state_dict(other.state_dict())
    assert list(outer.state_dict()) == list(other.state_dict())


class Adapted(nn.Module):
    """Saves parameters in a method of its own, by the names of modules, as PEFT does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inside, self.outside = Small(), nn.Linear(5, 5)

    def forward(self, x):
        return self.outside(self.inside(x))

    def chosen(self):
        state = self.state_dict()
        names = [name for name, module in self.named_modules() if isinstance(module, nn.Linear)]
        return {f"{name}.weight": state[f"{name}.weight"] for name in names}


@pytest.mark.parametrize("wrap_inside", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_a_method_of_the_module_saves_what_it_saves_of_the_plain_model(workers, wrap_inside):
    model = Adapted()
    if wrap_inside:
        model.inside = mh.FSDP(model.inside)
    wrapped = mh.FSDP(model)
    saved = wrapped.chosen()
    torch.testing.assert_close(saved, Adapted().chosen())


def test_torchs_functions_for_checkpoints_save_and_load_optimizer_state(tmp_path):
    def run():
        model, optimizer = trained(workers=2)
        state = get_optimizer_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id=tmp_path)
        again = nested(make_model())
        other = AdamW(again.parameters(), lr=0.5)
        loaded = get_optimizer_state_dict(again, other)
        dcp.load(loaded, checkpoint_id=tmp_path)
        set_optimizer_state_dict(again, other, optim_state_dict=loaded)
        pairs = zip(optimizer.state.values(), other.state.values(), strict=True)
        equal = [torch.equal(a["exp_avg"].to_local(), b["exp_avg"].to_local()) for a, b in pairs]
        return sorted(state["state"]), equal, other.param_groups[0]["lr"]

    plain = sorted(name for name, _ in make_model().named_parameters())
    for names, equal, lr in run_ranks(2, run):
        assert names == plain
        assert len(equal) == len(plain) and all(equal)
        assert lr == 0.02


@on_ranks(2)
def test_a_tied_parameter_is_one_tensor_in_the_state_dict():
    model = one_wrap(Tied())
    state = model.state_dict()
    assert state["first.weight"].data_ptr() == state["last.weight"].data_ptr()


def test_the_device_of_a_state_dict_and_only_on_rank_0():
    def run():
        model = nested(make_model(), state_dict_on_rank_0_only=True, state_dict_device="cpu")
        return sorted(model.state_dict())

    assert run_ranks(2, run) == [sorted(make_model().state_dict()), []]


def test_a_state_dict_asked_for_by_one_worker_is_an_error_that_names_the_others(monkeypatch):
    monkeypatch.setattr(_agreement, "PATIENCE", 0.5)

    def run():
        model = nested(make_model())
        if dist.get_rank() == 1:
            model.state_dict()

    with pytest.raises(RanksFailed, match=r"\[0\] have not called state_dict\(\).*on every worker"):
        run_ranks(2, run)


@on_ranks(2, raises=RuntimeError, match=r"(?s)2\..*size mismatch|size mismatch.*2\.")
def test_a_tensor_of_another_shape_is_an_error_that_names_it():
    model = nested(make_model())
    state = model.state_dict()
    state["2.weight"] = torch.zeros(3, 3)
    model.load_state_dict(state)


def test_slices_go_round_and_make_the_whole_without_workers():
    def run():
        model, _ = trained(nested, 3)
        weights = model.local_state_dict()
        other = nested(make_model())
        other.load_local_state_dict(file_trip(weights))
        same = [torch.equal(a, b) for a, b in zip(*map(values, (model, other)), strict=True)]
        return dict(weights), model.local_metadata_dict(), values(model), all(same)

    def values(model):
        return list(model.state_dict().values())

    ranks = run_ranks(3, run)
    assert all(same for *_, same in ranks)
    plain = make_model()
    weights, metadata = [r[0] for r in ranks], [r[1] for r in ranks]
    whole = mh.FSDP.consolidate_shard_weights(weights, file_trip(metadata))
    plain.load_state_dict(whole)
    for mine, theirs in zip(plain.state_dict().values(), ranks[0][2], strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="in rank order"):
        mh.FSDP.consolidate_shard_weights(weights[:2], metadata)
    with pytest.raises(ValueError, match=r"slices .* together, not"):
        mh.FSDP.consolidate_shard_weights(weights[:2], metadata[:2])
    del weights[1]["0.weight"]
    with pytest.raises(ValueError, match=r"rank\(s\) \[1\]"):
        mh.FSDP.consolidate_shard_weights(weights, metadata)
    left = mh.FSDP.consolidate_shard_weights(weights, metadata, strict=False)
    assert set(whole) - set(left) == {"0.weight"}


@on_ranks(2, raises=ValueError, match="needs an equal number of ranks")
def test_slices_of_another_number_of_workers_are_refused():
    model = nested(make_model())
    state = model.local_state_dict()
    state["0.weight"] = torch.zeros(1, 5, dtype=torch.float64)
    model.load_local_state_dict(state)


def test_optimizer_state_goes_to_a_plain_run_and_back():
    """Train sharded, go on in a plain run; and the other way round."""
    reference, _ = plainly(steps_=2)
    expected = list(reference.state_dict().values())

    def sharded_then():
        model = nested(make_model())
        optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        steps(model, [optimizer], lambda x: x[0], workers=1)
        return dict(model.state_dict()), model.gather_full_optim_state_dict(optimizer)

    (weights, full), (_, nothing) = run_ranks(2, sharded_then)
    assert nothing is None
    plain = make_model()
    plain.load_state_dict(weights)
    optimizer = AdamW(plain.parameters(), lr=1.0)
    optimizer.load_state_dict(file_trip(full))
    steps(plain, [optimizer], lambda x: x[0], workers=1)
    found = list(plain.state_dict().values())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    def then_sharded():
        model, optimizer = plainly()
        wrapped = nested(make_model())
        wrapped.load_state_dict(model.state_dict())
        adamw = AdamW(wrapped.parameters(), lr=1.0)
        adamw.load_state_dict(wrapped.get_shard_from_optim_state_dict(optimizer.state_dict()))
        steps(wrapped, [adamw], lambda x: x[0], workers=1)
        return list(wrapped.state_dict().values())

    for found in run_ranks(3, then_sharded):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@on_ranks(2)
def test_optimizer_state_of_several_groups_finds_its_parameters_by_name():
    model = nested(make_model())
    named = dict(model.named_parameters())
    decayed = [p for n, p in named.items() if n.endswith("weight")]
    others = [p for n, p in named.items() if n.endswith("bias")]
    groups = [{"params": others, "lr": 0.01}, {"params": decayed, "weight_decay": 0.3}]
    optimizer = AdamW(groups, lr=0.02)
    steps(model, [optimizer], lambda x: x[0], workers=1)
    kept = [model.gather_full_optim_state_dict(optimizer)]
    if kept[0] is not None:
        kept[0] = file_trip(kept[0])
    dist.broadcast_object_list(kept, 0)
    other = AdamW([dict(g, params=list(g["params"])) for g in optimizer.param_groups])
    other.load_state_dict(model.get_shard_from_optim_state_dict(kept[0]))
    for param in named.values():
        for key, value in optimizer.state[param].items():
            mine = other.state[param][key]
            if value.dim():
                mine, value = mine.to_local(), value.to_local()
            assert torch.equal(mine, value)
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.02]


@on_ranks(2, raises=ValueError, match="belongs to a different model")
def test_optimizer_state_of_another_model_is_refused():
    model = nested(make_model())
    other = nn.Linear(5, 5)
    optimizer = AdamW(other.parameters())
    other(torch.ones(5)).sum().backward()
    optimizer.step()
    model.get_shard_from_optim_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_whole_parameters_may_be_read_and_changed(workers):
    model = nested(make_model())
    expected = list(make_model().parameters())
    with model.summon_full_params():
        assert all(map(torch.equal, model.parameters(), expected))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
    with model.summon_full_params(volatile=True), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    after = model.state_dict().values()
    assert workers == 1 or all(torch.equal(a, 2 * b) for a, b in zip(after, expected, strict=True))
    sizes = [p.numel() for p in model.parameters()]
    assert sum(sizes) == sum(p.numel() for p in expected)


@on_ranks(2)
def test_only_the_wraps_own_parameters_without_recursion():
    model = nested(make_model())
    with model.summon_full_params(recurse=False):
        kinds = {n: hasattr(p, "placements") for n, p in model.named_parameters()}
    assert (kinds["0.weight"], kinds["4.weight"]) == (True, False)


@on_ranks(2)
def test_apply_initialises_whole_parameters():
    def init(module):
        if isinstance(module, nn.Linear):
            torch.nn.init.orthogonal_(module.weight)

    model, plain = nested(make_model()), make_model()
    torch.manual_seed(5)
    assert model.apply(init) is model
    torch.manual_seed(5)
    plain.apply(init)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers")
def test_initialisation_of_a_model_made_without_memory(workers):
    def filled(model):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        return model

    with torch.device("meta"):
        model = nested(nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3)))
    model.to_empty(device="cpu")
    with model.summon_full_params():
        filled(model)
    plain = filled(nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3)))
    for each in (model, plain):
        each(torch.ones(2, 5)).sum().backward()
        SGD(each.parameters(), lr=0.1).step()
    found, expected = (list(each.state_dict().values()) for each in (model, plain))
    torch.testing.assert_close(found, expected)


def test_reset_parameters_only_if_asked_for():
    layer = mh.FSDP(nn.Linear(3, 3), allow_reset_parameters=True)
    before = layer.state_dict()["weight"].clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.state_dict()["weight"])
    with pytest.raises(RuntimeError, match="allow_reset_parameters=True"):
        mh.FSDP(nn.Linear(3, 3)).reset_parameters()


@on_ranks(2)
def test_moving_to_another_type_keeps_training_right():
    x, _ = make_batches(1, 1, 1, dtype=torch.float32)
    models = nested(make_model()).to(torch.float32), make_model().float()
    for model in models:
        model(x[0, 0, 0]).sum().backward()
        SGD(model.parameters(), lr=0.1).step()
    found, expected = (list(model.state_dict().values()) for model in models)
    torch.testing.assert_close(found, expected)
