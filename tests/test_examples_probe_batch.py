"""examples/probe_batch.py: its verdicts where the answer is known, and the run that goes on."""

import importlib.util
import math

import pytest
import torch
from torch import nn

import manyhands as mh
from helpers.pages import ROOT, in_forks, needs_sklearn

pytestmark = needs_sklearn

SCRIPT = ROOT / "examples" / "probe_batch.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("probe_batch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(passes, dimensions=20):
    model = nn.Linear(dimensions, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, mh.AdaScale(plain, num_gradients_to_accumulate=passes)


def loss(model, target):
    """|w - x|^2 / 2, at w = 1 with x of mean 0: the noise scale is the variance of x."""
    return 0.5 * (model.weight - target).square().sum()


def probe(example, noise, scales, length=64, repeats=5):
    generator = torch.Generator().manual_seed(0)
    count = repeats * length + 64
    targets = noise * torch.randn(count, 1, 20, generator=generator, dtype=torch.float64)
    held_out, rest = targets[:64], targets[64:].reshape(repeats, length, 1, 20)
    return example.probe(make, *make(1), loss, rest, held_out, scales)


@pytest.mark.parametrize(
    ("noise", "scales", "expected"),
    [
        (4.0, (1, 2, 64), ["no worse", "worse"]),  # the noise scale is 16
        (0.3, (1, 2, 4), ["worse", "worse"]),  # 0.09: nothing to average away
        (6.0, (1, 2, 4), ["no worse", "no worse"]),  # 36
    ],
)
def test_the_verdicts_follow_the_noise_scale(example, noise, scales, expected):
    found = probe(example, noise, scales)
    assert [verdict for verdict, *_ in found.values()] == ["reference", *expected]


def test_the_first_scale_that_may_lose_ends_the_sequence(example):
    words = ("reference", "no worse", "undecided", "no worse")
    assert example.largest({2**i: (word, 0.0, 0.0) for i, word in enumerate(words)}) == 2
    same = [[1.0, 2.0], [1.0, 2.0]]  # nothing was shown: margin and difference are both zero
    assert example.compare(list(same), same)[0] == "undecided"
    assert example.compare([[math.nan, 2.0], [1.0, 2.0]], same)[0] == "worse"


def test_the_run_is_unaffected(example):
    runs = []
    for with_probe in (False, True):
        torch.manual_seed(0)
        model, optimizer = make(2)
        for step in range(30):
            if step == 15 and with_probe:
                batches = torch.randn(2, 8, 1, 20, generator=torch.Generator(), dtype=torch.float64)
                example.probe(make, model, optimizer, loss, batches, batches[0], scales=(1, 2))
            for _ in range(2):
                target = torch.randn(1, 20, dtype=torch.float64)
                (loss(model, target) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model.weight.tolist(), optimizer.snapshot(), torch.get_rng_state().tolist()))
    assert runs[0] == runs[1]


@pytest.mark.long
def test_the_script_runs():
    code, text = in_forks(None, str(SCRIPT), "--at", "40", "--steps", "80", "--repeats", "2")
    assert code == 0, text
    assert "scale 8" in text and "largest batch that loses nothing" in text
