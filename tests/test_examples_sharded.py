"""examples/sharded.py, shortened: two workers, stopped, and one worker that goes on."""

import re
import sys

import pytest
import torch

from pages import ROOT, RUN, launch

pytest.importorskip("sklearn", reason='scikit-learn is missing: pip install "manyhands[cli]"')

SCRIPT = str(ROOT / "examples" / "sharded.py")
START = {1: [sys.executable], 2: [*RUN["torchrun"], "--standalone", "--nproc-per-node", "2"]}


def train(workers, folder, *options):
    done = launch([*START[workers], SCRIPT, *options], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_goes_on_with_another_number_of_workers(tmp_path):
    first = train(2, tmp_path, "--steps", "60", "--accumulate", "2")
    saved = torch.load(tmp_path / "runs" / "sharded.pt", weights_only=True)
    told = re.search(r"of ([\d,]+) bytes of momentum this worker holds ([\d,]+)", first)
    whole, held = (int(number.replace(",", "")) for number in told.groups())
    assert held <= whole / 2 + 5 * 64
    momenta = [entry["momentum_buffer"] for entry in saved["optimizer"]["state"].values()]
    shapes = [value.shape for value in saved["model"].values()]
    assert [momentum.shape for momentum in momenta] == shapes  # whole ones: the plain optimizer's
    assert sum(momentum.nbytes for momentum in momenta) == whole

    second = train(1, tmp_path, "--steps", "90")
    assert f"going on at step {saved['optimizer']['manyhands']['progress']:.0f}" in second
