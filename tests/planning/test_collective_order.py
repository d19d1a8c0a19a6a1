"""The order of collectives, compared between ranks: five scripts that hang."""

import re
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.tools.cli import app
from manyhands.tools.plan._order import compare_order

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
frozen = rank == 1 and {name!r} == "frozen"
model[2].requires_grad_(not frozen)
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
model, optimizer = mh.shard(model, optimizer, level={level})
batches = 3
{before}
for step in range(batches):
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    {inside}
dist.destroy_process_group()
"""
HANGS = {
    "equal": (2, "", "", ""),
    "branch": (
        1,
        "",
        "if rank == 0: dist.all_reduce(torch.ones(3))",
        r"rank 0: all_reduce of 12 B, shape \(3,\), in if rank == 0: dist.all_reduce\(.*line 23\)",
    ),
    "batches": (
        2,
        "batches -= rank == 1023",
        "",
        r"rank 0: reduce_scatter .* in model\(.*\.backward\(\) \(train.py, line 20\).*"
        r"rank 1023: no further",
    ),
    "frozen": (
        0,
        "",
        "",
        r"rank 0: .* in model, optimizer = mh.shard.*rank 1: .* in model, optimizer = mh.shard",
    ),
    "evaluation": (
        3,
        "",
        "if rank == 0: model(torch.randn(2, 64))",
        r"rank 0: all_gather .* in if rank == 0: model\(.*line 23\).*rank 1: ",
    ),
    "save": (
        2,
        "",
        'if rank == 0: mh.save("/tmp/never", model=model, optimizer=optimizer)',
        r"rank 0: mh.save in if rank == 0: mh.save\(.*\(train.py, line 23\)",
    ),
}


@pytest.fixture
def script(tmp_path):
    def write(name):
        level, before, inside, _ = HANGS[name]
        text = SCRIPT.format(name=name, level=level, before=before, inside=inside)
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text).lstrip())
        return str(path)

    return write


@pytest.mark.parametrize("name", HANGS)
def test_the_first_difference_is_reported_with_the_line(name, script):
    found = compare_order(script(name), world_size=1024)
    expected = HANGS[name][-1]
    if expected:
        assert re.search(expected, found.difference, re.DOTALL), found.difference
        assert "of the group of ranks 0, 1, 2, 3, ... 1023" in found.difference
    else:
        assert found.difference == ""
    assert [rank.rank for rank in found.ranks] == [0, 1, 1023]
    assert found.ranks[0].peak > 0


def manyhands(*arguments):
    return CliRunner().invoke(app(), ["plan", *map(str, arguments)])


def test_the_command(script):
    result = manyhands("--script", script("equal"), "--ranks", 1024, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert "rank 1,023: " in result.output and "peak memory 5" in result.output
    assert "group of ranks 0, 1, 2, 3, ... 1023: 3 reduce_scatter, 192 KiB" in result.output
    assert "The order of collectives is equal." in result.output
    result = manyhands("--script", script("save"), "--ranks", 64)
    assert result.exit_code == 1 and "rank 0: mh.save in if rank == 0" in result.output


READER = """
import torch
import manyhands as mh
print(mh.start().world_size, torch.ones(2).sum().item())
"""


def test_mistakes(tmp_path):
    path = tmp_path / "read.py"
    path.write_text(READER)
    result = manyhands("--script", path, "--ranks", 4)
    assert result.exit_code == 2
    assert "(read.py, line 4) reads the value of a tensor" in result.output
    assert "--values" in result.output
    assert manyhands("--script", path, "--ranks", 4, "--values").exit_code == 0
    result = manyhands("--script", tmp_path / "none.py")
    assert result.exit_code == 2 and "none.py' is not a file" in result.output
    assert "give either MODULE:FUNCTION" in manyhands().output
    assert "--script cannot be split into words" in manyhands("--script", "read.py 'a").output
    assert "give only --ranks" in manyhands("--script", path, "--memory", "2GiB").output
    assert "need --script" in manyhands("a:b", "--values").output


def test_files_that_the_script_changes_are_restored(tmp_path, script):
    path = Path(script("equal"))
    (tmp_path / "last.pt").write_text("trained")
    for file in ("last.pt", "new.txt"):
        line = f"open({str(tmp_path / file)!r}, 'w').write('overwritten')\n"
        path.write_text(line + path.read_text())
    compare_order(str(path), world_size=64)
    assert (tmp_path / "last.pt").read_text() == "trained"
    assert not (tmp_path / "new.txt").exists()
