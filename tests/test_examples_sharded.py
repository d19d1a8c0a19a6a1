"""examples/sharded.py, shortened: two workers, stopped, and one worker that goes on."""

import re

import pytest
import torch

from helpers.pages import ROOT, in_forks, needs_sklearn

pytestmark = needs_sklearn

SCRIPT = str(ROOT / "examples" / "sharded.py")


@pytest.mark.long
def test_it_goes_on_with_another_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, first = in_forks(2, SCRIPT, "--steps", "60", "--accumulate", "2")
    assert code == 0, first
    saved = torch.load(tmp_path / "runs" / "sharded.pt", weights_only=True)
    told = re.search(r"of ([\d,]+) bytes of momentum this worker holds ([\d,]+)", first)
    whole, held = (int(number.replace(",", "")) for number in told.groups())
    assert held <= whole / 2 + 5 * 64
    momenta = [entry["momentum_buffer"] for entry in saved["optimizer"]["state"].values()]
    shapes = [value.shape for value in saved["model"].values()]
    assert [momentum.shape for momentum in momenta] == shapes  # whole ones: the plain optimizer's
    assert sum(momentum.nbytes for momentum in momenta) == whole

    code, second = in_forks(None, SCRIPT, "--steps", "90")
    assert code == 0, second
    assert f"going on at step {saved['optimizer']['manyhands']['progress']:.0f}" in second
