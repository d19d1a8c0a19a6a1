"""`manyhands probe`, as it is called from a shell."""

import sys

import pytest
import torch

import manyhands as mh

MODULE = """
import torch
import manyhands as mh

model = torch.nn.Linear(4, 1)
optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))

def loss(model, batch):
    return (model(batch) - 1.0).square().mean()

def make_probe():
    return model, optimizer, loss, (torch.randn(8, 4) for _ in range(400))

def plain():
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, sgd, loss, []

def wrong():
    return model
"""
SMALL = ("--scales", "1,2", "--repeats", 3, "--held-out", 4, "--budget", 150)


@pytest.fixture
def manyhands(tmp_path, monkeypatch):
    for package in ("typer", "rich"):
        pytest.importorskip(package, reason=f'{package} is missing: pip install "manyhands[cli]"')
    from typer.testing import CliRunner

    from manyhands.cli import app

    (tmp_path / "probed_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    yield lambda *arguments: CliRunner().invoke(app(), ["probe", *map(str, arguments)])
    sys.modules.pop("probed_here", None)


def test_it_prints_the_table_and_the_decision(manyhands):
    result = manyhands("probed_here:make_probe", *SMALL)
    assert result.exit_code == 0, result.output
    for word in ("2 scales, 3 repeats", "reference", "behind scale 1", "batch"):
        assert word in result.output


def test_it_begins_from_a_checkpoint_and_leaves_it(manyhands, tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    saved = mh.save(tmp_path / "run", model=model, optimizer=optimizer).path
    files = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    result = manyhands("probed_here:make_probe", "--checkpoint", tmp_path / "run", *SMALL)
    assert result.exit_code == 0, result.output
    assert torch.equal(sys.modules["probed_here"].model.weight, model.weight)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == files


def test_scale_1_is_the_batch_that_a_ramp_has_grown_to(manyhands, tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    ramp = mh.Ramp(optimizer, 4, goal="steps", every=1)
    for micro_batches in ramp.over(torch.randn(20, 8, 4)):
        for inputs in micro_batches:
            (model(inputs).square().mean() / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    mh.save(tmp_path / "run", model=model, optimizer=optimizer, ramp=ramp)
    result = manyhands("probed_here:make_probe", "--checkpoint", tmp_path / "run", *SMALL[:-1], 300)
    assert result.exit_code == 0, result.output
    assert "the checkpoint's batch: 4 pass(es)" in result.output
    assert sys.modules["probed_here"].optimizer.scale == 4.0


def test_it_writes_a_figure(manyhands, tmp_path):
    pytest.importorskip("plotly")
    result = manyhands("probed_here:make_probe", "--figure", "probe.html", *SMALL)
    assert "wrote probe.html" in result.output
    assert "loss behind scale 1" in (tmp_path / "probe.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["probed_here"], "is not MODULE:FUNCTION"),
        (["nowhere:make_probe"], "there is no module 'nowhere'"),
        (["probed_here:nothing"], "has no 'nothing'"),
        (["probed_here:wrong"], "must return (model, optimizer, loss, batches), got an object"),
        (["probed_here:plain", "--figure", "missing/probe.html"], "there is no folder 'missing'"),
        (["probed_here:plain"], "needs a scaling rule"),
        (["probed_here:make_probe", "--scales", "1,two"], "--scales takes whole numbers"),
        (["probed_here:make_probe", "--checkpoint", "missing"], "missing"),
    ],
)
def test_mistakes_say_what_to_do(manyhands, arguments, message):
    result = manyhands(*arguments, *([] if "--scales" in arguments else SMALL[:2]), *SMALL[2:])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
