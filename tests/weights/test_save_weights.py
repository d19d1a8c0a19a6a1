"""`save_weights`, and `checkpoint consolidate --to hf`: files that other libraries read."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import manyhands as mh
from helpers.checkpoint_oracle import Model
from helpers.ranks import raises_on_ranks, run_ranks
from manyhands.checkpoint._format import TensorEntry
from manyhands.checkpoint.weights._saving import split_into_files
from weights.test_load_weights import LEVELS, shard

# One name of each tied pair.
STATE = {name: t for name, t in Model(1).state_dict().items() if name != "pair.1.weight"}


def read(folder):
    """The tensors of a folder, by the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    where, found = json.loads(index.read_text())["weight_map"], {}
    for file in sorted(set(where.values())):
        tensors = load_file(folder / file)
        assert {name for name, its in where.items() if its == file} == set(tensors)
        found |= tensors
    assert (
        sum(t.nbytes for t in found.values())
        == json.loads(index.read_text())["metadata"]["total_size"]
    )
    return found


@pytest.mark.sample("0-2", "1-2", "2-2", "3-3", "fully_shard-3")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("level", [*LEVELS, "fully_shard"])
def test_a_folder_has_the_plain_model_at_every_level(level, ranks, tmp_path):
    def save():
        model, _ = shard(Model(1), level)
        return [path.name for path in mh.save_weights(model, tmp_path, max_shard_size="1 KiB")]

    files = run_ranks(ranks, save)[-1]
    assert files == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert {path.name for path in tmp_path.iterdir()} == {*files, "model.safetensors.index.json"}
    torch.testing.assert_close(read(tmp_path), STATE, rtol=0, atol=0)
    model = Model(0)
    mh.load_weights(model, tmp_path)
    torch.testing.assert_close(model.state_dict(), Model(1).state_dict(), rtol=0, atol=0)


def test_files_of_an_earlier_call_are_replaced(tmp_path):
    for size in (100, 2000, "5GB"):
        files = [path.name for path in mh.save_weights(Model(1), tmp_path, max_shard_size=size)]
        others = {path.name for path in tmp_path.iterdir()} - set(files)
        assert others == ({"model.safetensors.index.json"} if len(files) > 1 else set())
        torch.testing.assert_close(read(tmp_path), STATE, rtol=0, atol=0)


def test_a_file_has_at_most_its_size_or_one_tensor():
    entries = [TensorEntry(str(i), torch.float32, (n,)) for i, n in enumerate((1, 2, 9, 1, 1))]
    files = split_into_files(entries, 16)
    assert [[e.name for e in file] for file in files.values()] == [["0", "1"], ["2"], ["3", "4"]]
    assert next(iter(files)) == "model-00001-of-00003.safetensors"
    assert list(split_into_files(entries, 10**6)) == ["model.safetensors"]
    assert list(split_into_files([], 1)) == ["model.safetensors"]


def test_buffers_are_rank_0s(tmp_path):
    def save(level):
        model, _ = shard(Model(1), level)
        model.get_submodule("norm" if level == 3 else "module.norm").running_mean.fill_(
            dist.get_rank()
        )
        mh.save_weights(model, tmp_path / str(level), max_shard_size=100)

    for level in LEVELS:
        run_ranks(2, save, level)
        assert not read(tmp_path / str(level))["norm.running_mean"].any()


def test_between_sync_rounds_rank_0s_copy_is_written(tmp_path):
    """Workers in blocks have other values; a file mixed from several would be nobody's model."""

    def save(inside):
        rank, model = dist.get_rank(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if inside:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "inside"))
            model, rank = mh.FSDP(model, process_group=mesh["inside"].get_group()), rank // 2
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(rank)
        mh.save_weights(model, tmp_path / str(inside), max_shard_size=80)

    for inside in (False, True):
        run_ranks(4 if inside else 2, save, inside)
        found = read(tmp_path / str(inside))
        assert len(found) == 4
        assert not any(tensor.any() for tensor in found.values())


@pytest.mark.parametrize("level", [2, 3])
def test_a_rank_that_cannot_write_is_told_to_all_and_earlier_files_stay(
    level, tmp_path, monkeypatch
):
    def save():
        model, _ = shard(Model(1), level)
        mh.save_weights(model, tmp_path, max_shard_size="1 KiB")
        if dist.get_rank() == 0:

            def full(*_):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr("manyhands.checkpoint._folder.NewFile.write", full)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        mh.save_weights(model, tmp_path, max_shard_size="1 KiB")

    raises_on_ranks(2, OSError, save, match="No space left")
    torch.testing.assert_close(read(tmp_path), STATE, rtol=0, atol=0)
    assert not list(tmp_path.glob(".partial*"))


class Config:
    def to_json_string(self):
        return '{"hidden": 4, "dtype": "bfloat16"}'


class Described(nn.Linear):
    config = Config()


@pytest.mark.parametrize("level", [*LEVELS, "fully_shard"])
def test_the_config_says_class_and_type(level, tmp_path):
    def save():
        model = Described(2, 2)
        if level == "fully_shard":
            torch.distributed.fsdp.fully_shard(model)
        else:
            model, _ = mh.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level)
        mh.save_weights(model, tmp_path)

    run_ranks(2, save)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"architectures": ["Described"], "dtype": "float32", "hidden": 4}


def test_consolidate_to_hf_writes_the_same_files(tmp_path):
    typer = pytest.importorskip("typer.testing", reason="manyhands[cli] is not installed")
    from manyhands.tools.cli import app

    class Configured(Model):
        config = Config()

    def save():
        model, optimizer = shard(Configured(1), 3)
        mh.save(tmp_path / "run", model=model, optimizer=optimizer)
        mh.save_weights(model, tmp_path / "one", max_shard_size="1 KiB")

    run_ranks(2, save)
    options = ("--to", "hf", "--max-shard-size", "1KiB")
    command = ("checkpoint", "consolidate", str(tmp_path / "run"), str(tmp_path / "two"), *options)
    result = typer.CliRunner().invoke(app(), command)
    assert result.exit_code == 0, result.output
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two
    assert len(one) == 5

    wrong = typer.CliRunner().invoke(app(), [*command[:-4], "--to", "gguf"])
    assert wrong.exit_code == 2
    assert "--to must be one of 'plain', 'hf'" in " ".join(wrong.output.split())
