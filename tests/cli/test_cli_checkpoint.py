"""`manyhands checkpoint`, as it is called from a shell."""

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from helpers.checkpoint_oracle import Setup
from helpers.forge import content, data_file, only, sign
from helpers.ranks import run_ranks


@pytest.fixture
def manyhands(monkeypatch):
    for package in ("typer", "rich"):
        pytest.importorskip(package, reason=f'{package} is missing: pip install "manyhands[cli]"')
    from typer.testing import CliRunner

    from manyhands.tools.cli import app

    monkeypatch.setenv("COLUMNS", "100")
    yield lambda *arguments: CliRunner().invoke(app(), ["checkpoint", *map(str, arguments)])


def saved(path, way="OSS", **options):
    def go():
        setup = Setup(way, **options).train(2)
        mh.save(path, **setup.given(), step=1234, best=0.5)
        return setup.held()

    return run_ranks(2, go)[0]


def test_inspect_shows_what_there_is(manyhands, tmp_path):
    saved(tmp_path / "run", rule=mh.AdamScale)
    result = manyhands("inspect", tmp_path / "run", "--verify")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    for words in (
        "step 1,234, saved 2",
        f"by 2 rank(s) with torch {torch.__version__}",
        "optimizer AdamW under AdamScale, 2 parameter group(s)",
        "scheduler CosineAnnealingLR",
        "values: best",
        "model/image.weight",
        "3 × 2 × 2 × 3",
        "all checksums match",
    ):
        assert words in said, words


def test_verify_finds_what_is_damaged(manyhands, tmp_path):
    saved(tmp_path / "run")
    checkpoint = only(tmp_path / "run")
    path = data_file(checkpoint, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert manyhands("inspect", checkpoint).exit_code == 0
    result = manyhands("inspect", checkpoint, "--verify")
    assert result.exit_code == 1 and "safetensors is damaged" in result.output


@pytest.mark.sample("False-OSS", "True-fully_shard")
@pytest.mark.parametrize("way", ["OSS", "fully_shard"])
@pytest.mark.parametrize("large", [False, True])
def test_consolidate_writes_what_one_worker_would_have(
    manyhands, tmp_path, monkeypatch, way, large
):
    held = saved(tmp_path / "run", way)
    if large:
        monkeypatch.setattr("manyhands.tools.cli._consolidate.IN_A_FILE", 16)
    result = manyhands("consolidate", tmp_path / "run", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "optimizer.pt",
    ]
    model = load_file(tmp_path / "out" / "model.safetensors")
    setup = Setup("plain", seed=3)
    setup.module.load_state_dict(model)
    state = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    setup.optimizer.load_state_dict(state)
    mine = setup.held()
    assert set(mine) == set(held)
    for name, value in held.items():
        assert torch.equal(mine[name], value), name


def test_a_mistake_is_said_and_exit_code_2(manyhands, tmp_path):
    for command in (["inspect", tmp_path], ["consolidate", tmp_path, tmp_path / "out"]):
        result = manyhands(*command)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"manyhands checkpoint {command[0]}: ")
        assert "has no complete checkpoint" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_a_file_says_is_no_command_to_the_terminal(manyhands, tmp_path):
    odd = "\x1b[31mred\x1b]8;;http://x\x07\r\x9b2J\u202ereversed [bold]"
    mh.save(tmp_path / odd / "run", **{odd: {odd: torch.ones(2)}, "plain": 1})
    results = [
        manyhands("inspect", tmp_path / odd / "run", "--verify"),
        manyhands("inspect", tmp_path / odd),
        manyhands("consolidate", tmp_path / odd, tmp_path / "out"),
    ]
    assert [result.exit_code for result in results] == [0, 2, 2]
    for result in results:
        said = result.output + result.stderr
        assert all(line.isprintable() for line in said.splitlines()), repr(said)
        assert "\\x1b[31mred" in said.replace("\n", "") and "[bold]" in said.replace("\n", "")


def test_a_forged_class_is_no_command_to_the_terminal(manyhands, tmp_path):
    saved(tmp_path / "run")
    checkpoint = only(tmp_path / "run")
    told = content(checkpoint)
    told["optimizers"][0]["class"] = "\x1b[31mAdamW"
    sign(checkpoint, told)
    result = manyhands("inspect", checkpoint)
    assert "\\x1b[31mAdamW" in result.stdout and "\x1b[31m" not in result.stdout
