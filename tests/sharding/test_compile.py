"""`torch.compile` at every level: the losses, gradients and steps of the same run uncompiled.

With the backend `inductor` as well where it has what it needs, and under `Ramp`, whose steps have
more and more passes: nothing is compiled again for them.
"""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyhands as mh
from helpers.ranks import on_ranks

COMPILER = os.environ.get("CXX", "g++")  # as torch looks for it
HEADER = Path(sysconfig.get_path("include")) / "Python.h"
MISSING = [
    name
    for name, there in [
        (f"a C++ compiler ({COMPILER})", shutil.which(COMPILER)),
        (f"Python's headers ({HEADER})", HEADER.exists()),
    ]
    if not there
]
inductor = pytest.mark.skipif(bool(MISSING), reason=f"inductor needs {' and '.join(MISSING)}")
WHEN = ("whole, before", "whole, after", "blocks, before", "blocks, after")
uncompiled = []  # the modules that ran without being compiled


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            uncompiled.append("block")
        return self.layer(x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(6, 2)
        self.double()

    def forward(self, x):
        if not torch.compiler.is_compiling():
            uncompiled.append("model")
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def made(when, level, backend):
    """A model compiled before or after it is sharded, and its optimizer."""
    plain = model = Net()
    for block in plain.blocks if when == "blocks, before" else ():
        block.compile(backend=backend)
    if when == "whole, before":
        model = torch.compile(model, backend=backend)
    options = {"auto_wrap_policy": {Block}} if level == 3 else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = mh.shard(model, optimizer, level=int(level), **options)
    if when == "whole, after":
        model = torch.compile(model, backend=backend)
    if when == "blocks, after":
        for block in plain.blocks:
            getattr(block, "module", block).compile(backend=backend)
    return model, optimizer


def train(model, optimizer):
    """Take steps of 1, 2 and 4 passes; return each one's loss and norm, and the graphs so far."""
    optimizer = mh.AdaScale(optimizer)
    ramp = mh.Ramp(optimizer, max_scale=8, goal="steps", model=model)
    x = torch.randn(30, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    clip = getattr(model, "clip_grad_norm_", None)
    seen, passes, graphs = [], [], []
    for batches in ramp.over(list(x[dist.get_rank() :: 2])):
        losses = []
        for batch in batches:
            losses.append(model(batch).square().mean() / len(batches))
            losses[-1].backward()
        norm = clip(1.0) if clip else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += [sum(losses).item(), float(norm)]
        passes.append(len(batches))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return seen, passes, graphs


@pytest.fixture(scope="module")
def compilers_files(tmp_path_factory):
    """Keep what is compiled in a folder of these tests, and let the ranks compile by themselves."""
    import torch._dynamo.utils  # here, once, and not in each rank
    import torch._inductor.config

    # Not with setattr of the patch: undoing that deletes the setting, for a second time here.
    threads = torch._inductor.config.patch(compile_threads=1)
    with pytest.MonkeyPatch.context() as patch, threads:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.mark.sample("0-aot_eager", "3 by size-aot_eager")
@pytest.mark.usefixtures("compilers_files")
@pytest.mark.filterwarnings("ignore")  # torch's own, of what it does not compile
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[inductor, pytest.mark.long])]
)
@pytest.mark.parametrize("level", [0, 1, 2, 3, "3"], ids=["0", "1", "2", "3", "3 by size"])
@on_ranks(2, timeout=170.0)
def test_a_compiled_model_trains_the_same_under_ramp(level, backend):
    found = {"never": train(*made("never", level, backend))}
    for when in WHEN:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        uncompiled.clear()
        found[when] = (*train(*made(when, level, backend)), sorted(set(uncompiled)))
    expected, passes, _ = found.pop("never")
    assert set(passes) >= {1, 2, 4}, passes
    for when, (seen, ramped, graphs, ran) in found.items():
        torch.testing.assert_close(seen, expected, rtol=1e-9, atol=0.0, msg=when)
        assert ramped == passes
        assert graphs[0] >= 1 and set(graphs) == {graphs[0]}, f"{when}: compiled again {graphs}"
        # The outermost FSDP wrap interrupts the model's own code, as fully_shard does.
        whole = when.startswith("whole") and int(level) < 3
        assert ran == ([] if whole else ["model"]), when


@pytest.mark.filterwarnings("ignore")
def test_what_compile_in_place_leaves_out():
    """What the page says of `nn.Sequential`: if this fails, take that sentence away."""
    import torch._dynamo.utils

    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model.compile(backend="eager")
    model(torch.ones(1, 6))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    torch.compile(model, backend="eager")(torch.ones(1, 6))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
