"""What is saved comes back: values, random state, names under wrappers; and when, and how many."""

import collections
import random
import threading

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.checkpoint_oracle import ADAMW, SGD, Setup, assert_equal
from helpers.forge import complete, data_file, only
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from manyhands import adaptdl
from manyhands.checkpoint import _folder, _format, _reader, _values
from manyhands.checkpoint import _tensor_parts as tensor_parts


def names(path):
    return [p.name for p in complete(path)]


# -- arithmetic ------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_flat_range_is_a_few_slices_in_order(shape, data):
    total = torch.Size(shape).numel()
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = torch.arange(total).view(shape)
    boxes = list(tensor_parts.slices_of_range(tuple(shape), start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = []
    for offsets, sizes in boxes:
        box = numbers
        for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(dim, at, size)
        found += box.flatten().tolist()
    assert found == list(range(start, stop))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers() | st.booleans(), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.just(collections.Counter("aab"))
        | st.just({1, 2, 3})
        | st.just(torch.float16)
        | st.just(b"\x80\x00")
        | st.just(complex(1, float("inf")))
        | st.just(collections.OrderedDict(z=1, a=2))
    ),
    max_leaves=8,
)


@given(VALUES)
def test_values_are_the_same_after_json(value):
    import json

    encoded = json.loads(json.dumps(_values.encode(value, "value", None), allow_nan=False))
    again = _values.decode(encoded, None)
    assert again == value
    assert repr(again) == repr(value)  # also types, and the order of dicts


# -- values ----------------------------------------------------------------------------------------


def test_values_of_many_kinds(tmp_path):
    values = {
        "numbers": [1, 2.5, None, True, "three"],
        "tensors": {"a": torch.arange(6).view(2, 3).t(), ("b", 1): torch.tensor(2.0)},
        "types": [
            torch.ones(3, dtype=dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.complex64)
        ],
        "empty": torch.zeros(0, 3),
        "numpy_number": numpy.float32(1.5),
        "inf": float("-inf"),
    }
    mh.save(tmp_path, **values)
    again = mh.load(tmp_path)
    assert again["numbers"] == values["numbers"] and again["inf"] == values["inf"]
    assert again["numpy_number"] == 1.5
    torch.testing.assert_close(again["tensors"], values["tensors"], rtol=0, atol=0)
    torch.testing.assert_close(again["types"], values["types"], rtol=0, atol=0)
    assert again["empty"].shape == (0, 3)


def test_objects_with_a_state_dict_are_loaded_in_place(tmp_path):
    class Sampler:
        epoch = 3

        def state_dict(self):
            return {"epoch": self.epoch, "order": torch.arange(3)}

        def load_state_dict(self, state):
            self.epoch = state["epoch"]

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    ema = nn.Linear(2, 2)
    expected = ema.weight.detach().clone()
    mh.save(tmp_path, scaler=scaler, sampler=Sampler(), ema=ema, best=0.5)
    other, sampler = torch.amp.GradScaler("cpu", init_scale=2.0), Sampler()
    sampler.epoch = 0
    with torch.no_grad():
        ema.weight.zero_()
    values = mh.load(tmp_path, scaler=other, sampler=sampler, ema=ema)
    assert values == {"scaler": other, "sampler": sampler, "ema": ema, "best": 0.5}
    assert other.state_dict() == scaler.state_dict() and sampler.epoch == 3
    assert torch.equal(ema.weight, expected)
    plain = mh.load(tmp_path)
    assert plain["scaler"] == scaler.state_dict() and plain["sampler"]["epoch"] == 3
    assert torch.equal(plain["ema"]["weight"], expected)


@on_ranks(2)
def test_several_optimizers_and_schedulers(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        params = list(model.parameters())
        muon = mh.OSS([p for p in params if p.dim() == 2], optim=torch.optim.Muon, lr=0.02)
        adamw = mh.OSS([p for p in params if p.dim() == 1], optim=torch.optim.AdamW, lr=0.01)
        wrapped = mh.ShardedDataParallel(model, [muon, adamw])
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (muon, adamw)]
        return {"model": wrapped, "optimizer": [muon, adamw], "scheduler": schedulers}

    def step(model, optimizer, scheduler):
        model.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        for each in (*optimizer, *scheduler):
            each.step()

    run, other = build(0), build(1)
    step(**run)
    mh.save(tmp_path, **run)
    step(**run)
    step(**other)
    mh.load(tmp_path, **other)
    step(**other)
    assert_equal(other["model"].state_dict(), run["model"].state_dict())


def test_random_state_goes_on_on_every_worker(tmp_path):
    def draws():
        return [random.random(), random.gauss(0, 1), torch.rand(1).item(), numpy.random.rand()]

    def go():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        rank = dist.get_rank()
        random.seed(rank), torch.manual_seed(rank), numpy.random.seed(rank)
        random.gauss(0, 1)
        mh.save(tmp_path, model=model, optimizer=optimizer)
        expected = draws()
        mh.load(tmp_path, model=model)  # to be evaluated: draws on
        assert draws() != expected
        mh.load(tmp_path, model=model, optimizer=optimizer)
        assert draws() == expected
        return expected

    first, second = run_ranks(2, go)
    assert all(a != b for a, b in zip(first, second, strict=True))
    third = run_ranks(3, lambda: mh.load(tmp_path) == {} or torch.rand(1).item())
    assert third[0] == third[1]


# -- names -----------------------------------------------------------------------------------------


class Stateful(nn.Linear):
    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_names_are_the_plain_models_under_any_wrapper(tmp_path):
    def build():
        return nn.Sequential(Stateful(2, 2), nn.ModuleDict({"module": nn.Linear(2, 2)}))

    plain = build()
    plain[0].seen = 5
    mh.save(tmp_path / "plain", model=plain)
    expected = {
        name: tensor.clone() for name, tensor in plain.state_dict().items() if "extra" not in name
    }

    def go():
        model = build()
        model[0] = torch.compile(model[0], backend="eager")
        wrapped = DistributedDataParallel(torch.compile(model, backend="eager"))
        mh.load(tmp_path / "plain", model=wrapped)
        assert model[0]._orig_mod.seen == 5
        mh.save(tmp_path / "wrapped", model=wrapped)
        again = build()
        mh.load(tmp_path / "wrapped", model=again)
        assert again[0].seen == 5
        for name, tensor in expected.items():
            assert torch.equal(again.state_dict()[name], tensor)

    run_ranks(2, go)
    checkpoint = only(tmp_path / "wrapped")
    found = [load_file(data_file(checkpoint, rank)) for rank in range(2)]
    saved = [name for part in found for name in part if name.startswith("model/")]
    assert sorted(saved) == sorted(f"model/{name}" for name in expected)


@pytest.mark.parametrize("tied_there", [True, False])
def test_tied_weights_are_saved_once_and_loaded_into_both(tied_there, tmp_path):
    class Pair(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            if tied:
                self.b.weight = self.a.weight

    saved, other = Pair(tied_there), Pair(not tied_there)
    mh.save(tmp_path, model=saved)
    mh.load(tmp_path, model=other)
    assert torch.equal(other.a.weight, saved.a.weight)
    if tied_there:
        assert torch.equal(other.b.weight, saved.a.weight)


# -- when, and how many ----------------------------------------------------------------------------


@on_ranks(2)
def test_an_asynchronous_save_is_of_the_moment_it_was_called(tmp_path, monkeypatch):
    go_on, write = threading.Event(), _format.write
    monkeypatch.setattr(_format, "write", lambda *args, **kw: go_on.wait() and write(*args, **kw))
    setup = Setup("ShardedDataParallel").train(2)
    before = setup.held()
    saving = mh.save(tmp_path, **setup.given(), step=2, wait=False)
    assert not saving.done and "being written" in repr(saving)
    setup.train(1)  # trains while it is being written
    assert names(tmp_path) == []
    go_on.set()
    other = Setup("OSS", seed=3)
    assert mh.load(tmp_path, **other.given())["step"] == 2  # has waited for it
    assert saving.done and saving.wait() == saving.path and saving.path.exists()
    assert_equal(other.train(0).held(), before)


def test_keep_limits_the_number_of_checkpoints(tmp_path):
    for step in range(4):
        mh.save(tmp_path, step=step)
    assert names(tmp_path) == ["000003-step-2", "000004-step-3"]
    mh.save(tmp_path, keep=None)
    assert names(tmp_path)[-1] == "000005"
    mh.save(tmp_path, step=1, keep=1)  # an earlier step that was saved later is the newest
    assert names(tmp_path) == ["000006-step-1"]
    assert mh.load(tmp_path) == {"step": 1}
    assert mh.load(tmp_path / "000006-step-1") == {"step": 1}


def test_a_checkpoint_that_is_being_read_is_kept(tmp_path):
    mh.save(tmp_path, step=1)
    with _reader.Reader(_folder.Folder(tmp_path), "000001-step-1"):
        mh.save(tmp_path, step=2, keep=1)
        assert names(tmp_path) == ["000001-step-1", "000002-step-2"]
    mh.save(tmp_path, step=3, keep=1)
    assert names(tmp_path) == ["000003-step-3"]


@pytest.mark.parametrize("opened", [False, True])
def test_a_reader_whose_checkpoint_goes_takes_the_newest(opened, tmp_path, monkeypatch):
    """Where there are no locks for readers, it may go once the commit was read."""
    from manyhands.checkpoint import _reading

    mh.save(tmp_path, value=torch.ones(3), step=1, keep=1)
    reader = _reading.Reader

    def late(*args):
        monkeypatch.setattr(_reading, "Reader", reader)
        found = reader(*args) if opened else None
        mh.save(tmp_path, value=torch.zeros(3), step=2, keep=1)
        return found or reader(*args)

    if opened:
        monkeypatch.setattr(_folder, "fcntl", None)
    monkeypatch.setattr(_reading, "Reader", late)
    assert mh.load(tmp_path)["step"] == 2
    if opened:
        with reader(_folder.Folder(tmp_path), "000002-step-2") as found:
            mh.save(tmp_path, step=3, keep=1)
            with pytest.raises(FileNotFoundError, match=r"was removed while it was read.* newer"):
                found.read_whole("value/value")


def test_the_files_are_safetensors(tmp_path):
    setup = Setup("plain").train(1)
    mh.save(tmp_path, **setup.given())
    found = load_file(data_file(only(tmp_path)))
    for name, tensor in setup.module.named_parameters():
        assert torch.equal(found[f"model/{name}"], tensor)


def test_large_tensors_are_written_and_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(_format, "CHECKED", 16)
    monkeypatch.setattr(_reader, "CHECKED", 16)
    monkeypatch.setattr(_format, "BLOCK", 96)
    monkeypatch.setattr(_reader, "BLOCK", 96)
    monkeypatch.setattr(_reader, "SCANNED", 96)
    test_the_files_are_safetensors(tmp_path)
    setup = Setup("plain", seed=3).train(1)
    expected = Setup("plain").train(1).held()
    mh.load(tmp_path, **setup.given())
    assert_equal(setup.held(), expected)


# -- corners ---------------------------------------------------------------------------------------


def test_some_of_the_workers_may_share_a_run(tmp_path):
    def go():
        groups = [dist.new_group([0]), dist.new_group([1, 2])]
        rank = dist.get_rank()
        group = groups[min(rank, 1)]
        model = nn.Linear(3, 3)
        optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, group=group)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        path = tmp_path / str(min(rank, 1))
        mh.save(path, model=model, optimizer=optimizer, process_group=group, value=rank)
        return mh.load(path, model=model, optimizer=optimizer, process_group=group)["value"]

    assert run_ranks(3, go) == [0, 1, 1]
    assert len(list((tmp_path / "1" / "000001").glob("worker-*"))) == 2


@pytest.mark.parametrize("rows", [True, False])
def test_an_optimizer_sharded_in_each_of_several_groups_is_saved_once(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_parts, "LEAST", 100)  # so that every rank writes a part

    def go():
        sets = [[0, 1], [2, 3]] if rows else [[0, 2], [1, 3]]
        groups = [dist.new_group(ranks) for ranks in sets]
        (group,) = (g for g, ranks in zip(groups, sets, strict=True) if dist.get_rank() in ranks)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, bucket_size=16, group=group)
        model(torch.ones(1, 7)).sum().backward()
        optimizer.step()
        mh.save(tmp_path, model=model, optimizer=optimizer)
        optimizer.consolidate_state_dict(-1)
        return optimizer.state_dict()["state"]

    states = run_ranks(4, go)
    written = [data_file(only(tmp_path), rank).stat().st_size for rank in range(4)]
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    mh.load(tmp_path, model=model, optimizer=optimizer)
    for state in states:
        for mine, expected in zip(optimizer.state.values(), state.values(), strict=True):
            assert_equal(mine, expected)
    assert min(written) > 6000  # the random generators' state is 5 kB


def test_ranks_outside_of_an_optimizers_group_are_an_error_before_anything_is_written(tmp_path):
    def go():
        group = dist.new_group([0, 1])
        model = nn.Linear(3, 3)
        inside = {"optim": torch.optim.SGD, "momentum": 0.9, "lr": 0.1, "group": group}
        if dist.get_rank() < 2:
            optimizer = mh.OSS(model.parameters(), **inside)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        mh.save(tmp_path, model=model, optimizer=optimizer)

    said = r"sharded over ranks \[0, 1\], but ranks \[0, 1, 2\] save.*process_group="
    raises_on_ranks(3, ValueError, go, match=said)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@on_ranks(2)
def test_parameters_that_a_forward_has_left_whole_are_saved_and_loaded_sharded(tmp_path):
    setup = Setup("fully_shard").train(1)
    expected = setup.held()
    with torch.no_grad():
        setup.model(torch.ones(2, 5))  # the root stays whole until the next backward
    expected["passes"] += 1
    mh.save(tmp_path, **setup.given())
    other = Setup("fully_shard", seed=3).train(1)
    with torch.no_grad():
        other.model(torch.ones(2, 5))
    mh.load(tmp_path, **other.given())
    assert_equal(other.held(), expected)


def test_layers_that_are_cut_twice_along_one_dimension_are_saved_once(tmp_path):
    """The first layer's rows are cut by tensor parallelism, and each part by `fully_shard`."""

    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))

    def go():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tensors"))
        model = build(0)
        parallelize_module(model, mesh["tensors"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shards"])
        mh.save(tmp_path, model=model)

    run_ranks(4, go)
    model = build(1)
    mh.load(tmp_path, model=model)
    assert_equal(model.state_dict(), build(0).state_dict())


@on_ranks(2)
def test_state_of_a_frozen_parameter_waits_until_it_thaws(tmp_path):
    setup = Setup("OSS").train(2)
    mh.save(tmp_path / "first", **setup.given())
    other = nn.ModuleDict({"model": Setup("plain").module})["model"]
    other.last.weight.requires_grad_(False)
    optimizer = mh.OSS(
        [
            {"params": [p for p in other.parameters() if p.dim() > 1]},
            {"params": [p for p in other.parameters() if p.dim() <= 1]},
        ],
        optim=torch.optim.AdamW,
        bucket_size=64,
    )
    mh.load(tmp_path / "first", model=other, optimizer=optimizer)
    mh.save(tmp_path / "second", model=other, optimizer=optimizer)  # still frozen
    mh.load(tmp_path / "second", model=other, optimizer=optimizer)
    other.last.weight.requires_grad_(True)
    optimizer.refresh_trainable()
    again = Setup("plain", seed=3)
    mh.save(tmp_path / "third", model=other, optimizer=optimizer)
    mh.load(tmp_path / "third", **again.given() | {"scheduler": None})
    expected, mine = setup.held(), again.held()
    del expected["lr"], mine["lr"]
    assert_equal(mine, expected)


class Counting(torch.optim.SGD):
    """An optimizer that keeps state of all parameters together."""

    def step(self, closure=None):
        self.state["steps"] = 1 + (self.state["steps"] or 0)
        self.state["global"]["seen"] = self.state["global"].get("seen", torch.zeros(9)) + 1
        return super().step(closure)


def test_state_of_no_parameter_continues(tmp_path):
    def go(path):
        setups = [Setup("OSS", (Counting, {"lr": 0.1}), seed) for seed in (0, 1, 2)]
        setups[0].train(2)
        mh.save(path, **setups[0].given())
        mh.load(path, **setups[1].given())
        setups[0].optimizer.consolidate_state_dict(-1)
        setups[2].optimizer.load_state_dict(setups[0].optimizer.state_dict())
        for setup in setups:
            state = setup.train(2).optimizer.optim.state
            assert state["steps"] == 4 and state["global"]["seen"].tolist() == [4] * 9

    go(tmp_path / "one")
    run_ranks(2, go, tmp_path / "two")


def test_a_rule_that_patches_its_optimizer_is_saved_with_it(tmp_path):
    def build():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return adaptdl.AdaptiveDataParallel(model, optimizer, scaling_rule=mh.AdaScale()), optimizer

    model, optimizer = build()
    for _ in range(3):
        model(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mh.save(tmp_path, model=model, optimizer=optimizer)
    other, twin = build()
    mh.load(tmp_path, model=other, optimizer=twin)
    assert other.scaling_rule.progress == model.scaling_rule.progress > 0
    assert str(other.scaling_rule.state_dict()) == str(model.scaling_rule.state_dict())


def test_state_of_the_parameters_size_in_another_shape_continues(tmp_path):
    def build():
        layer = nn.Linear(3, 2, bias=False)
        return layer, torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=3)

    def step(layer, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = layer(torch.eye(3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    (layer, optimizer), (other, twin) = build(), build()
    step(layer, optimizer)
    mh.save(tmp_path, model=layer, optimizer=optimizer)
    mh.load(tmp_path, model=other, optimizer=twin)
    step(layer, optimizer), step(other, twin)
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize("way", ["plain", "OSS", "FSDP"])
@pytest.mark.parametrize("kind", [ADAMW, SGD])
def test_state_follows_its_parameters_into_another_precision(kind, way, tmp_path):
    def go(here, there):
        torch.set_default_dtype(here)
        setup = Setup(way, kind).train(2)
        mh.save(tmp_path, **setup.given())
        torch.set_default_dtype(there)
        other = Setup(way, kind, seed=3)
        mh.load(tmp_path, **other.given())
        for name, tensor in setup.held().items():
            step = name.startswith("step ")  # always float32
            if tensor.is_floating_point() and name != "lr":
                expected = tensor if step else tensor.to(there)
                assert torch.equal(other.held()[name], expected), name
        other.train(1)

    for types in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        run_ranks(2, go, *types)


@on_ranks(2)
def test_the_default_device_may_be_any(tmp_path):
    setup, other = Setup("OSS").train(1), Setup("OSS", seed=3)
    expected = setup.held()
    with torch.device("meta"):
        for wait in (False, True):
            mh.save(tmp_path, **setup.given(), value=torch.ones(2, device="cpu"), wait=wait)
        assert mh.load(tmp_path, **other.given())["value"].tolist() == [1, 1]
    assert_equal(other.held(), expected)


def test_state_in_another_type_than_the_parameter_keeps_it(tmp_path):
    class Wide(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["wide"] = torch.full(param.shape, 1 / 3)

    def build():
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
        return model, Wide(model.parameters(), lr=0.1)

    model, optimizer = build()
    optimizer.step()
    mh.save(tmp_path, model=model, optimizer=optimizer)
    other, twin = build()
    mh.load(tmp_path, model=other, optimizer=twin)
    assert torch.equal(twin.state[other.weight]["wide"], torch.full((2, 2), 1 / 3))


# -- views of numbers, and names -------------------------------------------------------------------


def views():
    """Numbers which are not those that stand in memory."""
    spectrum = torch.fft.rfft(torch.arange(10.0).view(2, 5))
    return {
        "conjugate": spectrum.conj(),
        "negative": spectrum.conj().imag,
        "number": spectrum[1, 1].conj(),
        "turned": spectrum.conj().t(),
    }


@pytest.mark.parametrize("wait", [True, False])
def test_conjugate_and_negative_views_are_saved_and_loaded_as_what_they_are(wait, tmp_path):
    class Filter(nn.Module):
        def __init__(self, tensors):
            super().__init__()
            for name, tensor in tensors.items():
                self.register_buffer(name, tensor)

    expected = {name: tensor.resolve_conj().resolve_neg() for name, tensor in views().items()}
    assert views()["conjugate"].is_conj() and views()["negative"].is_neg()
    mh.save(tmp_path / "run", model=Filter(views()), wait=wait, values=views()).wait()
    plain = Filter({name: torch.zeros_like(tensor) for name, tensor in expected.items()})
    view = Filter(views())  # loads into views as well
    with torch.no_grad():
        for tensor in view.buffers():
            tensor.zero_()
    for model in (plain, view):
        values = mh.load(tmp_path / "run", model=model)["values"]
        for name, tensor in expected.items():
            assert torch.equal(model.get_buffer(name), tensor), name
            assert torch.equal(values[name], tensor), name
    pytest.importorskip("typer", reason='typer is missing: pip install "manyhands[cli]"')
    from manyhands.tools.cli._consolidate import write_plain_files

    write_plain_files(tmp_path / "run", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


COLLIDING = {
    "dicts": {"a": {"encoder": {"mean": 1}, "encoder.mean": 2, "encoder%2Emean": 3}},
    "values": {"a": {"b": 1}, "a.b": 2, "a/b": 3, "a%2Eb": 4},
    "lists": {"a": [1, [2]], "a.1": [3], "a.1.0": 4},
    "keys": {"a": {(1, "x"): 1, (1, "y"): 2, "x": 3, 0: 4}},
}


@pytest.mark.parametrize("name", COLLIDING)
def test_tensors_whose_names_are_alike_are_kept_apart(name, tmp_path):
    def tensors(value):
        if isinstance(value, dict):
            return {key: tensors(each) for key, each in value.items()}
        if isinstance(value, list):
            return [tensors(each) for each in value]
        return torch.full((3,), float(value))

    values = tensors(COLLIDING[name])
    mh.save(tmp_path, **values)
    torch.testing.assert_close(mh.load(tmp_path), values, rtol=0, atol=0)


def test_tensors_as_options_of_several_groups_are_kept_apart(tmp_path):
    def build(*rates):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [
            {"params": layer.parameters(), "lr": torch.tensor(rate)}
            for layer, rate in zip(model, rates, strict=True)
        ]
        return model, torch.optim.SGD(groups)

    model, optimizer = build(0.25, 0.5)
    mh.save(tmp_path, model=model, optimizer=optimizer)
    model, optimizer = build(1.0, 1.0)
    mh.load(tmp_path, model=model, optimizer=optimizer)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.5]


def test_a_module_and_a_tensor_of_the_same_name_are_kept_apart(tmp_path):
    layer = nn.Linear(2, 2)
    mh.save(tmp_path, **{"a": layer, "a/weight": torch.zeros(2)})
    again = mh.load(tmp_path)
    assert torch.equal(again["a"]["weight"], layer.weight) and again["a/weight"].tolist() == [0, 0]


def test_two_tensors_of_one_name_are_an_error(tmp_path):
    model = nn.Module()
    model.register_parameter("_extra_state", nn.Parameter(torch.ones(2)))

    class WithState(nn.Module):
        def get_extra_state(self):
            return torch.zeros(2)

        def set_extra_state(self, state): ...

    model.__class__ = type("Both", (WithState,), {})
    with pytest.raises(ValueError, match="'model/_extra_state'"):
        mh.save(tmp_path, model=model)
