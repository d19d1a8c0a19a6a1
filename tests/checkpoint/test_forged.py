"""Checkpoints whose index says something else than was saved: refused before anything changes."""

import contextlib
import random
import shutil

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import manyhands as mh
from helpers.checkpoint_oracle import Setup
from helpers.forge import content, only, sign
from helpers.ranks import run_ranks
from manyhands.checkpoint import _folder, _reader
from manyhands.checkpoint import _tensor_parts as tensor_parts


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


def forged(source, tmp_path, change):
    """A copy whose index `change` was let at."""
    target = tmp_path / "forged"
    shutil.copytree(source, target)
    meta = content(target)
    change(meta)
    sign(target, meta)
    return target


def first_cut(meta):
    """The slices of a tensor that has several."""
    return next(chunks for _, _, chunks in meta["table"]["slices"].values() if len(chunks) > 1)


def double_a_chunk(meta):
    chunks = first_cut(meta)
    chunks[1] = chunks[0]


def leave_out_a_chunk(meta):
    del first_cut(meta)[0]


def grow_the_shape(meta):
    meta["table"]["slices"]["value/values.t.0"][0] = [1000]


def move_a_chunk(meta):
    first_cut(meta)[1][1][0] += 1


def overflow(meta):
    meta["table"]["slices"]["value/values.t.0"][0] = [2**62, 4]


def leave_the_folder(meta):
    meta["token"] = "../other"


def reach_for_an_attribute_of_torch(meta):
    meta["table"]["slices"]["value/values.t.0"][1] = "load"


def leave_out_a_field(meta):
    del meta["optimizers"]


@pytest.mark.parametrize(
    "change",
    [
        double_a_chunk,
        leave_out_a_chunk,
        grow_the_shape,
        move_a_chunk,
        overflow,
        leave_the_folder,
        reach_for_an_attribute_of_torch,
        leave_out_a_field,
    ],
)
def test_an_index_that_would_read_a_wrong_place_is_refused(source, tmp_path, change):
    target = forged(source, tmp_path, change)
    with pytest.raises(ValueError, match="has invalid content"):
        mh.load(target)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A checkpoint of two workers whose tensors are cut in pieces."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    run_ranks(2, lambda: mh.save(folder, model=Setup("fully_shard").model) and None)
    return only(folder)


def double_a_piece(meta):
    meta["table"]["pieces"][1] = meta["table"]["pieces"][0]


def leave_out_a_piece(meta):
    meta["table"]["pieces"][1] = []


def more_pieces(meta):
    meta["table"]["grids"][0][0] = 3


def another_dimension(meta):
    meta["table"]["grids"][0][1]["model/first.weight"][2] = 2


def another_grid(meta):
    meta["table"]["pieces"][1][0][0] = 1


@pytest.mark.parametrize(
    "change",
    [double_a_piece, leave_out_a_piece, more_pieces, another_dimension, another_grid],
)
def test_pieces_that_are_not_there_once_are_refused(cut, tmp_path, change):
    target = forged(cut, tmp_path, change)
    with pytest.raises(ValueError, match="has invalid content"):
        mh.load(target)


def unknown_kind(meta):
    meta["values"]["values"]["inf"]["$"] = "os.system"


def unknown_dtype(meta):
    meta["values"]["values"]["inf"] = {"$": "dtype", "value": "load"}


def missing_tensor(meta):
    meta["values"]["values"]["inf"] = {"$": "tensor", "key": "nowhere"}


def missing_state(meta):
    del meta["optimizers"][0]["groups"]


@pytest.mark.parametrize("change", [unknown_kind, unknown_dtype, missing_tensor, missing_state])
def test_content_of_another_form_is_refused_and_changes_nothing(source, tmp_path, change):
    target = forged(source, tmp_path, change)
    setup = Setup("plain", seed=3, rule=mh.AdamScale).train(1)
    before, generator = setup.held(), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"no known form|unknown kind|invalid"):
        mh.load(target, **setup.given())
    assert all(torch.equal(tensor, before[name]) for name, tensor in setup.held().items())
    assert torch.equal(torch.get_rng_state(), generator)


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


def test_a_tensor_of_another_type_than_the_index_says(tmp_path):
    mh.save(tmp_path, value=torch.ones(3))
    checkpoint = only(tmp_path)
    meta = content(checkpoint)
    meta["table"]["slices"]["value/value"][1] = "int32"
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
        source = _folder.OpenFile(path)
        with contextlib.closing(source), pytest.raises(ValueError, match="is damaged"):
            _reader.SafetensorsFile(source, path)


def test_a_value_nested_too_deeply_is_refused_when_it_is_saved(tmp_path):
    value = []
    for _ in range(99):
        value = [value]
    mh.save(tmp_path, value=value)
    assert mh.load(tmp_path) == {"value": value}
    value.append(value)
    with pytest.raises(ValueError, match="nested"):
        mh.save(tmp_path, value=value)


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
    assert tensor_parts.covers_once(shape, boxes)

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
    assert tensor_parts.covers_once(shape, boxes) == expected
