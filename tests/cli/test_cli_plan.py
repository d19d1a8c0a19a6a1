"""`manyhands plan`, as it is called from a shell."""

import subprocess
import sys

import pytest

MODULE = """
import torch
from torch import nn

class Model(nn.Sequential):
    def __init__(self, *parts):
        super().__init__(*(parts or [nn.Linear(1024, 1024) for _ in range(24)]))

built_on = []

def build_model():
    model = Model()
    built_on.append(next(model.parameters()).device.type)
    return model

def tokens():
    return nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100))

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.logits = nn.Embedding(100, 64), nn.Linear(64, 100)

    def forward(self, input_ids, labels=None):
        logits = self.logits(self.words(input_ids))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def with_loss():
    return WithLoss()

ready = Model(nn.Linear(4, 4))
number = 3
"""


@pytest.fixture
def manyhands(tmp_path, monkeypatch):
    for package in ("typer", "rich"):
        pytest.importorskip(package, reason=f'{package} is missing: pip install "manyhands[cli]"')
    from typer.testing import CliRunner

    from manyhands.tools.cli import app

    (tmp_path / "planned_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    yield lambda *arguments: CliRunner().invoke(app(), ["plan", *map(str, arguments)])
    sys.modules.pop("planned_here", None)


def words(result):
    return " ".join(result.output.split())


def test_it_prints_the_table_and_the_lines_for_the_cheapest_that_fits(manyhands):
    result = manyhands("planned_here:build_model", "--workers", 4, "--memory", "250MiB")
    assert result.exit_code == 0
    said = words(result)
    assert "25,190,400 parameters, AdamW, 4 workers" in said
    for name in ("OSS +", "Fully", "optimizer state", "in flight", "collectives", "fits"):
        assert name in said
    assert "Activations are not counted" in said
    assert "The cheapest that fits 250 MiB: OSS + ShardedDataParallel" in said
    assert "model, optimizer = mh.shard(model, optimizer, level=2)" in said
    assert max(map(len, result.output.split("\n\n")[0].splitlines())) <= 80
    assert sys.modules["planned_here"].built_on == ["meta"]
    assert str(sys.modules["planned_here"].__file__) and "" not in sys.path[:1]


def test_optimizers_options_and_inputs_are_taken(manyhands):
    result = manyhands(
        *("planned_here:tokens", "--optimizer", "SGD", "--optimizer-option", "momentum=0.9"),
        *("--optimizer-option", "nesterov=True", "--input", "8x16:int64", "--backend", "gloo"),
    )
    assert result.exit_code == 0
    said = words(result)
    assert "SGD, 8 workers" in said and "activations" in said
    assert "level=0" in said
    plain = manyhands("planned_here:tokens", "--optimizer", "sgd")
    assert plain.output != result.output


def test_inputs_by_name_types_rules_and_blocks_are_taken(manyhands):
    model = ("planned_here:with_loss", "--workers", 2)
    ids = ("--input", "input_ids=8x16:int64")
    plain, loss = (words(manyhands(*model, *ids, *more))
                   for more in ((), ("--input", "labels=8x16:int64")))  # fmt: skip
    assert "activations" in plain and plain != loss
    cast = words(manyhands(*model, *ids, "--autocast", "bfloat16"))
    assert cast != plain
    more = manyhands(*model, *ids, "--rule", "AdamScale")
    assert more.exit_code == 0
    assert "AdamScale" in words(more)


@pytest.mark.long
def test_rules_have_names_in_a_process_of_their_own(manyhands):
    command = [sys.executable, "-m", "manyhands", "plan", "planned_here:tokens", "--rule"]
    done = subprocess.run([*command, "AdamScale"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AdamScale" in done.stdout
    done = subprocess.run([*command, "Ada"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'AdaScale', " in done.stderr


@pytest.mark.parametrize(("columns", "more"), [(50, ()), (60, ()), (80, ("--mesh", "2x4"))])
def test_a_narrow_window_cuts_no_heading(columns, more, manyhands, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    table = manyhands("planned_here:build_model", *more).output.split("\nAdamW updates")[0]
    assert "\u2026" not in table
    assert columns == 50 or table.count("Parallel") == 2 + len(more) // 2
    assert max(map(len, table.splitlines()[1:])) <= columns


def test_a_class_and_a_module_do_as_well(manyhands):
    assert manyhands("planned_here:Model").exit_code == 0
    assert "20 parameters" in manyhands("planned_here:ready", "--workers", 1).output


def test_with_a_network_it_shows_the_time_of_a_step(manyhands):
    network = ("planned_here:build_model", "--workers", 4, "--network", "50 Mbit/s")
    said = words(manyhands(*network))
    assert "at 50 Mbit/s │ 24 s" in said
    slower = words(manyhands(*network, "--latency", 0.1, "--pass-seconds", 100))
    assert "at 50 Mbit/s │ 125 s" in slower


def test_the_exit_code_says_that_nothing_fits(manyhands):
    result = manyhands("planned_here:build_model", "--memory", "5MB")
    assert result.exit_code == 1
    assert "Nothing fits" in words(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["planned_here"], "is not MODULE:FUNCTION"),
        (["planned_there:build_model"], "no module 'planned_there'"),
        (["planned_here:build"], "planned_here has no 'build'"),
        (["planned_here:build_modle"], "Did you mean 'build_model'?"),
        (["planned_here:number"], "model must be a torch.nn.Module, or a function"),
        (["planned_here:tokens", "--optimizer-option", "momentum"], "takes NAME=VALUE"),
        (["planned_here:tokens", "--input", "8*16"], "takes a shape"),
        (["planned_here:tokens", "--input", "8x16:ints"], "torch has no type 'ints'"),
        (["planned_here:tokens", "--input", "8x16", "--input", "a=8"], "needs a name for each"),
        (["planned_here:tokens", "--input", "a=8", "--input", "a=8"], "needs a name for each"),
        (["planned_here:tokens", "--autocast", "float17"], "torch has no type 'float17'"),
    ],
)
def test_a_mistake_is_said_and_exit_code_2(manyhands, arguments, message):
    result = manyhands(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("manyhands plan: ")
