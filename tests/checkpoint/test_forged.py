"""Checkpoints whose index says something else than was saved: refused before anything changes."""

import contextlib
import json
import random
import shutil

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import manyhands as mh
from helpers.checkpoint_oracle import Setup, assert_equal
from helpers.forge import content, data_file, only, sign
from helpers.memory import little_memory
from helpers.ranks import raises_on_ranks, run_ranks
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
    holders = meta["table"]["grids"][0][1]
    holders[1] = holders[0]


def leave_out_a_piece(meta):
    del meta["table"]["grids"][0][1][1]


def more_pieces(meta):
    meta["table"]["grids"][0][0] = 3


def another_dimension(meta):
    meta["table"]["grids"][0][2]["model/first.weight"][2] = 2


def another_file(meta):
    meta["table"]["grids"][0][1][1] = 2


@pytest.mark.parametrize(
    "change",
    [double_a_piece, leave_out_a_piece, more_pieces, another_dimension, another_file],
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
    with pytest.raises(ValueError, match=r"invalid value|unknown type|invalid"):
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


@pytest.mark.parametrize("count", [10**8, 10**12, 2**62, 2**70, -1, 2.0, True, None, "2"])
@pytest.mark.parametrize("members", [{}, {"model/x": [[4], "float32", 0]}])
def test_a_grid_that_claims_any_number_of_pieces_is_refused_at_once(tmp_path, count, members):
    mh.save(tmp_path, value=1)
    checkpoint = only(tmp_path)
    meta = content(checkpoint)
    meta["table"]["grids"] = [[count, [0], members]]
    sign(checkpoint, meta)
    assert (checkpoint / _folder.COMMIT).stat().st_size < 600
    with little_memory(2**24), pytest.raises(ValueError, match=r"index\.json has invalid content"):
        mh.load(tmp_path)


@pytest.mark.parametrize("shape", [[2**40], [2**62, 4], [2**70], [1] * 65, [2**62, 0, 2**62]])
def test_a_tensor_that_claims_any_size_is_refused_before_there_is_room_for_it(tmp_path, shape):
    mh.save(tmp_path, value=torch.ones(4))
    checkpoint = only(tmp_path)
    meta = content(checkpoint)
    offsets = [0] * len(shape)
    meta["table"]["slices"]["value/value"] = [shape, "float32", [[0, offsets, shape]]]
    sign(checkpoint, meta)
    with little_memory(2**24), pytest.raises(ValueError, match=str(checkpoint)):
        mh.load(tmp_path)


def test_a_tensor_that_is_named_a_thousand_times_is_refused(tmp_path):
    mh.save(tmp_path, value=torch.ones(2**20))
    checkpoint = only(tmp_path)
    meta = content(checkpoint)
    meta["values"]["value"] = [meta["values"]["value"]] * 1000
    sign(checkpoint, meta)
    with little_memory(2**26), pytest.raises(ValueError, match="is in two places"):
        mh.load(tmp_path)


@pytest.mark.parametrize("kept", [0, 70, None])
def test_a_sparse_index_is_read_as_far_as_it_goes(tmp_path, kept):
    mh.save(tmp_path, value=1)
    path = only(tmp_path) / _folder.COMMIT
    with path.open("r+b") as file:
        file.truncate(kept if kept is not None else path.stat().st_size)
        file.truncate(2**36)
    with little_memory(2**26), pytest.raises(ValueError, match=r"index\.json is damaged: byte"):
        mh.load(tmp_path)


@pytest.mark.parametrize("known", [True, False])
def test_a_sparse_header_is_read_as_far_as_it_goes(tmp_path, known):
    mh.save(tmp_path, value=torch.ones(4))
    checkpoint = only(tmp_path)
    path = data_file(checkpoint)
    with path.open("r+b") as file:
        file.write((2**36 - 8).to_bytes(8, "little"))
        file.truncate(2**36)
    if known:
        meta = content(checkpoint)
        meta["files"][0] = [2**36, 2**36, 0]
        sign(checkpoint, meta)
    with little_memory(2**26), pytest.raises(ValueError, match=r"worker-00000-.* is damaged"):
        mh.load(tmp_path)


def test_checksums_of_a_sparse_file_are_compared_before_they_are_kept(tmp_path):
    mh.save(tmp_path, value=torch.ones(4))
    checkpoint = only(tmp_path)
    size = 2**39
    header = {
        "value/value": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "manyhands.crc32": {"dtype": "U8", "shape": [size >> 12], "data_offsets": [size]},
    }
    header["manyhands.crc32"]["data_offsets"].append(size + (size >> 12))
    text = json.dumps(header).encode()
    path = data_file(checkpoint)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size + (size >> 12))
    meta = content(checkpoint)
    meta["table"]["slices"]["value/value"] = [[size], "uint8", [[0, [0], [size]]]]
    meta["files"][0] = [path.stat().st_size, 8 + len(text), 0]
    sign(checkpoint, meta)
    with little_memory(2**26), pytest.raises(ValueError, match="header is not the one"):
        mh.load(tmp_path)


ENTRIES = ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.sample("OSS-step", "fully_shard-exp_avg_sq")
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("way", ["OSS", "fully_shard"])
def test_a_state_that_lacks_an_entry_of_one_parameter_is_refused(way, entry, tmp_path):
    def write():
        mh.save(tmp_path / "run", **Setup(way).train(2).given())

    run_ranks(2, write)
    checkpoint = only(tmp_path / "run")
    meta = content(checkpoint)
    key = f"optimizer.0/{entry}/last.bias"
    for members in (meta["table"]["slices"], *(grid for _, _, grid in meta["table"]["grids"])):
        members.pop(key, None)
    sign(checkpoint, meta)

    def load(way):
        setup = Setup(way, seed=3).train(1)
        before = setup.held()
        schedule = setup.scheduler.state_dict()
        try:
            mh.load(tmp_path / "run", **setup.given())
        finally:
            assert_equal(setup.held(), before)
            assert setup.scheduler.state_dict() == schedule

    for message in raises_on_ranks(
        2, ValueError, load, way, match="AdamW cannot continue from the"
    ):
        assert "'last.bias'" in message and str(checkpoint) in message
    with pytest.raises(ValueError, match=r"state of 'last.bias': KeyError"):
        load("plain")
