"""Checkpoints that somebody has made up: refused before anything changes, and Python lives on."""

import random
import shutil
import struct

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import manyhands as mh
from helpers.checkpoint_oracle import SGD, Setup
from helpers.forge import content, forge_many, sign
from helpers.ranks import run_ranks
from manyhands.checkpoint import _folder, _index, _index_checks, _safetensors


def only(path):
    (checkpoint,) = _folder.list_complete(path)
    return checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of two workers with all that there can be in one."""
    folder = tmp_path_factory.mktemp("forged") / "run"

    def write():
        setup = Setup("OSS", rule=mh.AdamScale).train(2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(1))
        values = {"t": (torch.ones(3), {1, 2}), "d": {1.5: complex(1, 2)}, "inf": float("inf")}
        mh.save(folder, **setup.given(), step=5, values=values, ema=setup.module, scaler=scaler)

    run_ranks(2, write)
    return only(folder)


def fresh():
    return Setup("plain", seed=3, rule=mh.AdamScale).train(1)


@pytest.mark.parametrize(
    ("seed", "times"),
    [
        (0, 100),
        pytest.param(3, 300, marks=pytest.mark.long),
        *(pytest.param(n, 1000, marks=pytest.mark.exhaustive) for n in (1, 2)),
    ],
)
def test_a_forged_index_with_a_right_checksum_does_no_harm(source, tmp_path, seed, times):
    wrong, refusals = forge_many(fresh, source, tmp_path, times, seed)
    assert not wrong, "\n".join(wrong)
    assert refusals > times // 2


def forged(source, tmp_path, change):
    """A copy whose index `change` was let at."""
    target = tmp_path / "forged"
    shutil.copytree(source, target)
    meta = content(target)
    change(meta)
    sign(target, meta)
    return target


def first_cut(meta):
    """A tensor of several chunks."""
    return next(key for key, (_, _, chunks) in meta["tensors"].items() if len(chunks) > 1)


def double_a_chunk(meta):
    chunks = meta["tensors"][first_cut(meta)][2]
    chunks[1] = chunks[0]


def leave_out_a_chunk(meta):
    del meta["tensors"][first_cut(meta)][2][0]


def grow_the_shape(meta):
    meta["tensors"]["value/values.t.0"][0] = [1000]


def grow_the_shape_of_none(meta):
    meta["tensors"]["value/values.t.0"] = [[1000], "float32", []]


def move_a_chunk(meta):
    meta["tensors"][first_cut(meta)][2][1][0][0] += 1


def overflow(meta):
    meta["tensors"]["value/values.t.0"][0] = [2**62, 4]


def share_bytes(meta):
    meta["tensors"]["value/values.t.0"] = meta["tensors"]["model/norm.weight"]


@pytest.mark.parametrize(
    "change",
    [
        double_a_chunk,
        leave_out_a_chunk,
        grow_the_shape,
        grow_the_shape_of_none,
        move_a_chunk,
        overflow,
        share_bytes,
    ],
)
def test_each_chunk_covers_its_tensor_exactly_once(source, tmp_path, change):
    target = forged(source, tmp_path, change)
    with pytest.raises(ValueError, match="has invalid content"):
        mh.load(target)


def resave(path, key, tensor):
    """Put another tensor into a checkpoint of one worker, all checksums right."""
    checkpoint = only(path)
    meta = content(checkpoint)
    (name,) = [file["name"] for file in meta["files"]]
    file = _safetensors.SafetensorsFile(checkpoint / name)
    entries, tensors = list(file.entries.values()), []
    for number, entry in enumerate(entries):
        found = torch.empty(entry.shape, dtype=entry.dtype)
        file.read_slice(entry.name, (0,) * found.dim(), found.shape, found)
        if entry.name == key:
            found = tensor
            entries[number] = _safetensors.TensorEntry(key, tensor.dtype, tuple(tensor.shape))
        tensors.append(found)
    file.close()
    (checkpoint / name).unlink()
    written = _safetensors.write(checkpoint / name, entries, tensors.__getitem__)
    meta["files"] = [{"name": name, "nbytes": written.nbytes, "crc32": written.header_crc32}]
    for entry, total in zip(entries, written.tensor_crc32s, strict=True):
        dtype = str(entry.dtype).removeprefix("torch.")
        chunk = [[0] * len(entry.shape), list(entry.shape), 0, entry.name, total]
        meta["tensors"][entry.name] = [list(entry.shape), dtype, [chunk]]
    sign(checkpoint, meta)


def numpys(place=0, has_gauss=0, keys=624, key=1):
    return torch.tensor([key] * keys + [place, has_gauss])


def torchs(left, following):
    state = bytearray(bytes(torch.get_rng_state().tolist()))
    state[8:12], state[16:24] = struct.pack("<i", left), struct.pack("<Q", following)
    return torch.tensor(list(state), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("generator", "state"),
    [
        ("numpy", numpys(10**9)),
        ("numpy", numpys(-1)),
        ("numpy", numpys(625)),
        ("numpy", numpys(has_gauss=2)),
        ("numpy", numpys(keys=600)),
        ("numpy", numpys(key=-1)),
        ("numpy", numpys(key=2**40)),
        ("numpy", numpys().double()),
        ("numpy.gauss", torch.ones(2, dtype=torch.float64)),
        ("numpy.gauss", torch.tensor(1)),
        ("python", torch.tensor([3, *[1] * 624, 625])),
        ("python", torch.tensor([3, *[2**40] * 624, 1])),
        ("python", torch.tensor([2, *[1] * 625])),
        ("python", torch.tensor([3, 1])),
        ("python", torch.tensor(3)),
        ("python.gauss", torch.ones(3)),
        ("torch", torch.ones(5)),
        ("torch", torch.zeros(5056, dtype=torch.uint8)),
        ("torch", torchs(624, 624)),  # reads behind its own memory
        ("torch", torchs(624, 2)),
        ("torch", torchs(10, 10**6)),
    ],
)
def test_a_generator_state_that_would_read_beyond_its_own_memory(generator, state, tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mh.save(tmp_path, model=model, optimizer=optimizer)
    resave(tmp_path, f"random/0/{generator}", state)
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    with pytest.raises(ValueError, match="random generator"):
        mh.load(tmp_path, model=model, optimizer=optimizer)
    assert not model.weight.any()
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert str(numpy.random.get_state()) == str(before[2])
    mh.load(tmp_path, model=model)  # to be evaluated: generators are left as they are
    assert torch.equal(model.weight, weight)


def test_generators_in_every_position_are_taken(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for draws in (0, 1, 2, 623, 624, 625):
        torch.manual_seed(draws), random.seed(draws), numpy.random.seed(draws)
        torch.rand(draws), torch.randn(draws % 2), numpy.random.rand(draws // 2)
        _ = [random.random() for _ in range(draws // 2)]
        mh.save(tmp_path, model=model, optimizer=optimizer)
        expected = torch.rand(700), random.random(), numpy.random.rand()
        mh.load(tmp_path, model=model, optimizer=optimizer)
        assert torch.equal(torch.rand(700), expected[0])
        assert (random.random(), numpy.random.rand()) == expected[1:]


@pytest.mark.parametrize("where", ["option", "range", "entry", "number", "scheduler", "shadow"])
def test_state_of_another_kind_than_the_optimizers_is_refused(where, tmp_path):
    setup = Setup("plain", SGD).train(1)
    mh.save(tmp_path, **setup.given())
    checkpoint = only(tmp_path)
    meta = content(checkpoint)
    if where == "option":
        meta["optimizers"][0]["groups"][1]["options"]["lr"] = "0.1"
    elif where == "range":  # SGD's constructor refuses it, and its load_state_dict does not
        meta["optimizers"][0]["groups"][1]["options"]["momentum"] = -2
    elif where == "entry":
        meta["optimizers"][0]["state"]["last.bias"]["momentum_buffer"] = "0.1"
    elif where == "number":  # the only parameter of four dimensions, like no other
        meta["optimizers"][0]["state"]["image.weight"]["momentum_buffer"] = 1
    elif where == "scheduler":
        meta["schedulers"][0]["state"]["last_epoch"] = [1]
    else:
        meta["schedulers"][0]["state"]["step"] = 1
    sign(checkpoint, meta)
    before = setup.held()
    with pytest.raises(ValueError, match=r"lr|momentum|last_epoch|step"):
        mh.load(tmp_path, **setup.given())
    assert all(torch.equal(tensor, before[name]) for name, tensor in setup.held().items())


def test_options_that_the_optimizer_inside_an_oss_refuses_are_refused(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = mh.OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    mh.save(tmp_path, model=model, optimizer=optimizer)
    meta = content(only(tmp_path))
    meta["optimizers"][0]["groups"][0]["options"]["momentum"] = -2
    sign(only(tmp_path), meta)
    with pytest.raises(ValueError, match="no SGD takes"):
        mh.load(tmp_path, model=model, optimizer=optimizer)


@pytest.mark.parametrize("how", ["left out", "none", "number"])
@pytest.mark.parametrize("entry", ["step", "exp_avg_sq"])
def test_state_that_the_optimizer_cannot_go_on_with_is_refused(entry, how, tmp_path):
    def adam():
        model = nn.Linear(2, 1, bias=False)  # one parameter: there is no other to compare it with
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer

    model, optimizer = adam()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    mh.save(tmp_path, model=model, optimizer=optimizer)
    checkpoint = only(tmp_path)
    meta = content(checkpoint)
    state = meta["optimizers"][0]["state"]["weight"]
    state[entry] = None if how == "none" else 1
    if how == "left out":
        del state[entry]
    sign(checkpoint, meta)
    model, optimizer = adam()
    with pytest.raises(ValueError, match=r"Adam cannot go on .* 'weight'"):
        mh.load(tmp_path, model=model, optimizer=optimizer)


def test_a_tensor_of_another_type_than_the_index_says(tmp_path):
    mh.save(tmp_path, value=torch.ones(3))
    checkpoint = only(tmp_path)
    meta = content(checkpoint)
    meta["tensors"]["value/value"][1] = "int32"
    sign(checkpoint, meta)
    with pytest.raises(ValueError, match="int32"):
        mh.load(tmp_path)


def test_a_file_of_tensors_whose_header_is_made_up(tmp_path):
    for header in (
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0.0,4]}}',
        b'{"a":{"dtype":[],"shape":[1],"data_offsets":[0,4]}}',
        b"[" * 100_000,
        b"3",
    ):
        path = tmp_path / "file"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(ValueError, match="is damaged"):
            _safetensors.SafetensorsFile(path)


def test_a_value_nested_too_deeply_is_refused_when_it_is_saved(tmp_path):
    value = []
    for _ in range(99):
        value = [value]
    mh.save(tmp_path, value=value)
    assert mh.load(tmp_path) == {"value": value}
    value.append(value)
    with pytest.raises(ValueError, match="nested"):
        mh.save(tmp_path, value=value)


def test_the_index_is_not_read_if_it_is_huge(tmp_path, monkeypatch):
    mh.save(tmp_path, value=1)
    monkeypatch.setattr(_index, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="index"):
        mh.load(tmp_path)


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_covers_once_accepts_exact_tilings_only(shape, data):
    def cut(at, sizes):
        """A tiling, cut at random."""
        longer = [dim for dim, size in enumerate(sizes) if size > 1]
        if not longer or not data.draw(st.booleans()):
            return [(at, sizes)]
        dim = data.draw(st.sampled_from(longer))
        first = data.draw(st.integers(1, sizes[dim] - 1))
        rest = sizes[dim] - first
        one = cut(at, (*sizes[:dim], first, *sizes[dim + 1 :]))
        then = (*at[:dim], at[dim] + first, *at[dim + 1 :])
        return one + cut(then, (*sizes[:dim], rest, *sizes[dim + 1 :]))

    boxes = data.draw(st.permutations(cut((0,) * len(shape), tuple(shape))))
    assert _index_checks.covers_once(shape, boxes)

    # and against counting, for boxes that are anything
    box = st.tuples(*(st.tuples(st.integers(0, 4), st.integers(0, 4)) for _ in shape))
    for each in data.draw(st.lists(box, max_size=2)):
        boxes.append((tuple(at for at, _ in each), tuple(size for _, size in each)))
    boxes = data.draw(st.lists(st.sampled_from(boxes), max_size=len(boxes), unique=True))
    counts, inside = torch.zeros(shape), True
    for at, sizes in boxes:
        places = list(zip(at, sizes, shape, strict=True))
        inside = inside and all(start + size <= whole for start, size, whole in places)
        counts[tuple(slice(start, start + size) for start, size, _ in places)] += 1
    expected = inside and bool((counts == 1).all())
    assert _index_checks.covers_once(shape, boxes) == expected
