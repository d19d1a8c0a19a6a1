"""How much memory loading takes: at level 3 a rank's share and one tensor, or else the model.

SIZE_GB=8 LEVELS=3 pytest tests/weights/test_weights_memory.py -m long -s
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks

WIDTH = 4096  # one tensor has 64 MiB
TENSOR = 4 * WIDTH * WIDTH
TENSORS = max(2, int(float(os.environ.get("SIZE_GB", "1")) * 2**30) // TENSOR)
# The block that converts types, torch's and gloo's first allocations, Python's.
SLACK = 48 * 2**20

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="not on Linux"),
]


def resident(what):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{what}:")[1].split()[0])


class Peak:
    """The most of resident memory inside of the block, above what was there before."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the most counts from here
        self.before = resident("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = resident("VmHWM") - self.before


def make():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(TENSORS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of four tensors each."""
    path = tmp_path_factory.mktemp("weights")
    where = {}
    for first in range(0, TENSORS, 4):
        file = f"model-{first:05d}.safetensors"
        names = [f"{number}.weight" for number in range(first, min(first + 4, TENSORS))]
        save_file({name: torch.full((WIDTH, WIDTH), float(first)) for name in names}, path / file)
        where |= dict.fromkeys(names, file)
    text = str({"weight_map": where}).replace("'", '"')
    (path / "model.safetensors.index.json").write_text(text)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("level", [3, "plain"])
def test_loading_takes_what_the_rank_holds_and_one_tensor(level, ranks, dtype, folder):
    if str(level) not in os.environ.get("LEVELS", "3 plain").split():
        pytest.skip(f"LEVELS={os.environ['LEVELS']} leaves level {level} out")

    def load():
        model = make().to(dtype)
        if level == 3:
            model, _ = mh.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), level=3)
        with Peak() as peak:
            mh.load_weights(model, folder)
        local = [getattr(p, "_local_tensor", p.detach()) for p in model.parameters()]
        assert float(local[-1][-1, -1]) == TENSORS - 4
        return peak.bytes, sum(tensor.nbytes for tensor in local)

    for peak, own in run_ranks(ranks, load, timeout=300):
        print(f"\nlevel {level}, {ranks} ranks, {dtype}: {peak >> 20} of {own >> 20} MiB")
        assert own == TENSORS * TENSOR * dtype.itemsize // 4 // (ranks if level == 3 else 1)
        assert peak < own + TENSOR + SLACK


@pytest.mark.parametrize("level", [1, 2, 3])
def test_loading_into_a_model_with_memory_takes_one_tensor(level, folder):
    def load():
        model = make()
        model = model if level == 3 else model.to_empty(device="cpu")
        model, _ = mh.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level)
        if level == 3:
            model.to_empty(device="cpu")
        for param in model.parameters():
            torch.nn.init.zeros_(param)
        with Peak() as peak:
            mh.load_weights(model, folder)
        return peak.bytes

    if str(level) not in os.environ.get("LEVELS", "1 2 3").split():
        pytest.skip(f"LEVELS={os.environ['LEVELS']} leaves level {level} out")
    for peak in run_ranks(2, load, timeout=300):
        print(f"\nlevel {level}, in place: peak {peak / 2**20:.0f} MiB")
        assert peak < SLACK


@on_ranks(2, timeout=300)
def test_saving_at_level_3_takes_a_few_tensors(folder, tmp_path):
    """torch's `full_tensor` has what is sent, what arrives, and the result."""
    model = make()
    model, _ = mh.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), level=3)
    mh.load_weights(model, folder)
    with Peak() as peak:
        mh.save_weights(model, tmp_path, max_shard_size="256MiB")
    peak = peak.bytes
    print(f"\nsaved: peak {peak / 2**20:.0f} MiB")
    assert peak < 3 * TENSOR + SLACK
