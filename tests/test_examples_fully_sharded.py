"""examples/fully_sharded.py, shortened: two workers, stopped, and one worker that goes on."""

import re

import pytest
import torch

from helpers.pages import ROOT, in_forks, needs_sklearn

pytestmark = needs_sklearn

SCRIPT = str(ROOT / "examples" / "fully_sharded.py")
SMALL = ["--width", "32", "--depth", "2"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def on(workers, *options):
    """On so many, as torchrun starts them; None: by itself."""
    code, output = in_forks(workers, SCRIPT, *SMALL, *options)
    assert code == 0, output
    return output


def saved(folder, name="runs/fully_sharded.pt"):
    return torch.load(folder / name, weights_only=True)


@pytest.mark.long
def test_it_goes_on_with_another_number_of_workers_as_if_nothing_had_happened(tmp_path):
    first = on(2, "--steps", "10")
    told = re.search(r"of ([\d,]+) parameters this worker holds ([\d,]+)", first)
    whole, held = (int(number.replace(",", "")) for number in told.groups())
    weights = saved(tmp_path)["model"]
    assert sum(weight.numel() for weight in weights.values()) == whole
    assert held <= whole / 2 + sum(weight[0].numel() for weight in weights.values())
    averages = [entry["exp_avg"] for entry in saved(tmp_path)["optimizer"]["state"].values()]
    assert [average.shape for average in averages] == [w.shape for w in weights.values()]

    assert "going on at step 10" in on(None, "--steps", "15")
    on(None, "--steps", "15", "--checkpoint", "alone.pt")
    at_once = saved(tmp_path, "alone.pt")["model"]
    torch.testing.assert_close(saved(tmp_path)["model"], at_once, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_it_computes_in_bfloat16(tmp_path):
    on(None, "--steps", "2", "--bf16", "--accumulate", "1")
    assert {weight.dtype for weight in saved(tmp_path)["model"].values()} == {torch.float32}
