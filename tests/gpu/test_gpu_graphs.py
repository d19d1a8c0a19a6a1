"""A step of level 2 under CUDA graphs and the compiler, and steps under the CUDA sanitizer.

A dry run answers the collectives of 8 ranks on a single GPU. Buckets and shards are real.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from torch.optim import AdamW

import manyhands as mh
from helpers.sharding_oracle import assert_same, copied, loss_of, make_batches, make_model

pytestmark = pytest.mark.gpu

SANITIZED = """
import sys, torch, manyhands as mh
device, level = sys.argv[1], int(sys.argv[2])
with mh.dry_run(8):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device)
    model, optimizer = mh.shard(model, torch.optim.SGD(model.parameters(), lr=0.01), level)
    optimizer = mh.AdaScale(optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 64, device=device)).sum().backward()
        optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
"""


@pytest.mark.parametrize("level", [2, 3])
def test_the_sanitizer_finds_no_race(level, device):
    """It does not see NCCL's streams."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if device == "cuda":
        environ["TORCH_CUDA_SANITIZER"] = "1"
    command = [sys.executable, "-c", SANITIZED, device, str(level)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "CSAN" not in done.stderr, done.stderr


def trained(device, way):
    x, y = (each[0, 0, 0].to(device) for each in make_batches(1, 1, 1, dtype=torch.float32))
    with mh.dry_run(8):
        model = make_model(torch.float32).to(device)
        optimizer = AdamW(model.parameters(), lr=0.01, capturable=device == "cuda")
        model, optimizer = mh.shard(model, optimizer, 2)
        ran = torch.compile(model, mode="reduce-overhead") if way == "compiled" else model

        def step():
            optimizer.zero_grad()
            loss_of(ran, x, y).backward()
            optimizer.step()

        for _ in range(3):
            step()
        if way == "captured":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(3):
            step()
        return [copied(model.parameters())]


def test_a_captured_step(cuda):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch asks for the steps before a capture
        captured = trained(cuda, "captured")
    assert_same(captured, trained(cuda, "eager")[0])


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own code
def test_a_step_compiled_with_little_overhead(device):
    counters.clear()
    compiled = trained(device, "compiled")
    assert_same(compiled, trained(device, "eager")[0], rtol=1e-5, atol=1e-6)
    assert not counters["inductor"]["cudagraph_skips"]
