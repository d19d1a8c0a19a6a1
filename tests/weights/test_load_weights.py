"""`load_weights`: plain files into a model of any sharding. torch's `load_state_dict` is right."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.fsdp import fully_shard

import manyhands as mh
from helpers.checkpoint_oracle import Model
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import everyone

LEVELS = (0, 1, 2, 3)


def shard(model, level):
    """The model and AdamW at a level; `fully_shard` is torch's alone."""
    if level == "fully_shard":
        model.image.to(memory_format=torch.contiguous_format)  # the only one it takes
        fully_shard(model.last)
        return fully_shard(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    return mh.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), level=level)


def whole(model):
    """The plain model's tensors, by name."""
    state = model.state_dict()
    return {
        name.removeprefix("module."): t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
        for name, t in state.items()
    }


def write(kind, folder):
    """Write the model of seed 1 as `kind`, and return its path and the dict of its tensors."""
    state, path = Model(1).state_dict(), folder / kind
    if kind == "state.pt":
        torch.save(state, path)
    elif kind == "one.safetensors":
        save_model(Model(1), str(path))  # drops the second name of a tied tensor
    elif kind == "torch folder":
        path.mkdir()
        torch.save(state, path / "pytorch_model.bin")
    else:  # two files, behind links as in the cache of a hub, and an index
        (path / "blobs").mkdir(parents=True)
        where = {}
        for number in (0, 1):
            name = f"model-0000{number + 1}-of-00002.safetensors"
            part = {key: state[key].contiguous().clone() for key in list(state)[number::2]}
            save_file(part, path / "blobs" / str(number), {"format": "pt"})
            (path / name).symlink_to(f"blobs/{number}")
            where |= dict.fromkeys(part, name)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


KINDS = ("state.pt", "one.safetensors", "torch folder", "folder")


@pytest.mark.sample(
    "state.pt-0",
    "state.pt-2",
    "state.pt-fully_shard",
    "one.safetensors-1",
    "one.safetensors-3",
    "torch folder-1",
    "torch folder-3",
    "folder-0",
    "folder-2",
    "folder-fully_shard",
)
@pytest.mark.parametrize("level", [*LEVELS, "fully_shard"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_at_every_level(kind, level, tmp_path):
    path = write(kind, tmp_path)

    def load():
        model, _ = shard(Model(0), level)
        assert mh.load_weights(model, path) == ([], [])
        return whole(model)

    for found in run_ranks(2, load):
        torch.testing.assert_close(found, dict(Model(1).state_dict()), rtol=0, atol=0)


def on_meta():
    """The model without memory, but for the buffer that no file has."""
    model = Model(0)
    scratch = model.scratch
    model.to("meta")
    model.pair[1].weight = model.pair[0].weight
    model.scratch = scratch
    return model


@pytest.mark.sample("0", "fully_shard")
@pytest.mark.parametrize("level", [*LEVELS, "fully_shard"])
def test_a_model_on_meta_gets_memory_and_trains_like_one_that_had_it(level, tmp_path):
    path = write("folder", tmp_path)

    def train(meta):
        model = on_meta() if meta else Model(0)
        if level in (0, 1, 2):
            mh.load_weights(model, path)
        model, optimizer = shard(model, level)
        if level not in (0, 1, 2):
            mh.load_weights(model, path)
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
        return whole(model)

    for found in run_ranks(2, train, True):
        torch.testing.assert_close(found, run_ranks(2, train, False)[0], rtol=0, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_types_are_converted_while_reading(level, tmp_path):
    state = {key: value.contiguous() for key, value in Model(1).state_dict().items()}
    half = {k: v.half() if v.dtype.is_floating_point else v for k, v in state.items()}
    save_file({k: v.clone() for k, v in half.items()}, tmp_path / "half.safetensors")

    def load():
        model, _ = shard(Model(0), level)
        mh.load_weights(model, tmp_path / "half.safetensors")
        return whole(model)

    for found in run_ranks(2, load):
        for name, value in found.items():
            assert value.dtype == state[name].dtype
            torch.testing.assert_close(value, state[name], rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_missing_and_unexpected_names_are_said_as_torch_does(level, tmp_path):
    state = dict(Model(1).state_dict())
    state["extra"] = state.pop("first.bias")
    state["last.bias"] = torch.zeros(4)
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(RuntimeError) as theirs:
        Model(0).load_state_dict(state)

    def load():
        model, _ = shard(Model(0), level)
        before = whole(model)
        try:
            mh.load_weights(model, tmp_path / "other.pt")
        finally:
            torch.testing.assert_close(whole(model), before, rtol=0, atol=0)

    for message in raises_on_ranks(2, RuntimeError, load):
        for line in str(theirs.value).splitlines()[1:3]:
            assert line in message
        assert "size mismatch for last.bias: (4,) in the source and (3,) here" in message

    state["last.bias"] = torch.zeros(3)
    torch.save(state, tmp_path / "other.pt")

    def load_what_is_there():
        model, _ = shard(Model(0), level)
        left = mh.load_weights(model, tmp_path / "other.pt", strict=False)
        return [*left.missing_keys, *left.unexpected_keys], whole(model)["last.weight"]

    for names, weight in run_ranks(2, load_what_is_there):
        assert names == ["first.bias", "extra"]
        torch.testing.assert_close(weight, state["last.weight"], rtol=0, atol=0)


def test_names_of_wrappers_are_left_out_and_others_translated():
    state = Model(1).state_dict()
    for saved in (
        {f"module.{name}": value for name, value in state.items()},
        {f"_orig_mod.{name}": value for name, value in state.items()},
    ):
        model = Model(0)
        mh.load_weights(model, saved)
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    model = Model(0)
    theirs = {f"model.{name}": value for name, value in state.items()}
    mh.load_weights(model, theirs, name_in_source=lambda name: f"model.{name}")
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


class Counter(nn.Module):
    def __init__(self, count=0):
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(2)), count

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_extra_states_are_loaded_from_a_state_dict_and_missed_in_safetensors(tmp_path):
    torch.save(Counter(3).state_dict(), tmp_path / "state.pt")
    model = Counter()
    mh.load_weights(model, tmp_path / "state.pt")
    assert model.count == 3
    save_file({"weight": torch.zeros(2)}, tmp_path / "plain.safetensors")
    with pytest.raises(RuntimeError, match=r'Missing key.*"_extra_state"'):
        mh.load_weights(model, tmp_path / "plain.safetensors")
    assert mh.load_weights(model, tmp_path / "plain.safetensors", strict=False)[0] == [
        "_extra_state"
    ]


class TensorState(Counter):
    def get_extra_state(self):
        return torch.tensor([self.count])

    def set_extra_state(self, state):
        self.count = state.item()


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
def test_an_extra_state_may_be_a_tensor(name, tmp_path):
    state = TensorState(3).state_dict()
    (torch.save if name == "state.pt" else save_file)(state, tmp_path / name)
    model = TensorState()
    mh.load_weights(model, tmp_path / name)
    assert model.count == 3


class Danger:
    def __reduce__(self):
        return (print, ("unpickled",))


def wrong_files(folder):
    """Files that cannot be loaded, and what is said of each."""
    torch.save({"weight": torch.ones(2), "x": Danger()}, folder / "pickle.pt")
    yield "pickle.pt", "Weights only load failed"
    (folder / "empty.bin").write_bytes(b"")
    yield "empty.bin", "not a readable file of weights"
    save_file({"weight": torch.ones(2)}, folder / "cut.safetensors")
    data = (folder / "cut.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(data[:-1])
    yield "cut.safetensors", "has an invalid position"
    (folder / "head.safetensors").write_bytes((10**9).to_bytes(8, "little") + b"{}")
    yield "head.safetensors", "header is longer than the file"
    text = json.dumps({"weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (folder / "type.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    yield "type.safetensors", "unknown type 'F4'"
    torch.save({"model": {"weight": torch.ones(2)}, "step": 1}, folder / "nested.pt")
    yield "nested.pt", "has no tensors, but 'model'"
    torch.save([torch.ones(2)], folder / "list.pt")
    yield "list.pt", "must contain a state dict, got a list"
    (folder / "index").mkdir()
    (folder / "index" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "../cut.safetensors"}})
    )
    yield "index", "is not an index of weights"
    (folder / "nothing").mkdir()
    yield "nothing", "has none of model.safetensors"
    yield "nowhere", "huggingface_hub.snapshot_download"
    save_file({"weight": torch.ones(2, dtype=torch.int64)}, folder / "whole.safetensors")
    yield "whole.safetensors", "is torch.int64 in the source and torch.float32 here"


def test_what_cannot_be_loaded_is_refused_on_every_rank(tmp_path):
    wrong = list(wrong_files(tmp_path))

    def load():
        said = []
        for name, _ in wrong:
            model = Counter()
            try:
                # Only one rank has the wrong source.
                mh.load_weights(
                    model,
                    tmp_path / name if dist.get_rank() else {"weight": torch.ones(2)},
                    strict=False,
                )
            except Exception as error:
                said.append(str(error))
            assert torch.equal(model.weight, torch.ones(2))
        return said

    for said in run_ranks(2, load):
        assert len(said) == len(wrong)
        for text, (name, words) in zip(said, wrong, strict=True):
            different = "ranks have different weights" in text
            assert re.search(re.escape(words), text) or different, (name, text)
    for name, words in wrong:
        with pytest.raises((OSError, ValueError, TypeError, RuntimeError), match=re.escape(words)):
            mh.load_weights(Counter(), tmp_path / name, strict=False)


def test_a_model_on_meta_is_not_left_without_values():
    model = Model(1)
    state = dict(model.state_dict())
    every = model.to("meta")
    with pytest.raises(
        RuntimeError, match=r"'scratch' of the model are on the meta device and not"
    ):
        mh.load_weights(every, state)
    del state["last.bias"]
    with pytest.raises(RuntimeError, match=r"'last.bias' of the model"):
        mh.load_weights(on_meta(), state, strict=False)
    with pytest.raises(ValueError, match=r"have no memory \(meta device\)"):
        mh.save_weights(on_meta(), "nowhere")


@on_ranks(2, raises=RuntimeError, match="Call mh.load_weights")
def test_meta_inside_sharded_data_parallel_is_refused():
    optimizer = mh.OSS((model := on_meta()).parameters(), lr=0.1)
    mh.load_weights(mh.ShardedDataParallel(model, optimizer), Model(1).state_dict())


@on_ranks(2, raises=ValueError, match="ranks have different weights")
def test_ranks_with_other_weights_are_told():
    state = nn.Linear(2, 1 + dist.get_rank()).state_dict()
    mh.load_weights(nn.Linear(2, 1 + dist.get_rank()), state)


def test_a_rank_that_does_not_call_is_named(monkeypatch):
    monkeypatch.setattr("manyhands.sharding._agreement.PATIENCE", 0.5)

    def load():
        if everyone()[0] == 0:
            mh.load_weights(nn.Linear(2, 1), nn.Linear(2, 1).state_dict())

    with pytest.raises(AssertionError, match=r"\[1\] have not called mh.load_weights"):
        run_ranks(2, load)


def test_a_level_3_model_trains_on_what_was_loaded_after_a_forward(tmp_path):
    """After a forward, gathered parameters are freed before the slices are filled."""
    state = Model(1).state_dict()

    def load():
        model, _ = shard(Model(0), 3)
        x = torch.ones(2, 5)
        model(x)
        mh.load_weights(model, state)
        return model(x).detach()

    model = Model(0)
    model(torch.ones(2, 5))
    model.load_state_dict(state)
    for found in run_ranks(2, load):
        torch.testing.assert_close(found, model(torch.ones(2, 5)).detach())
