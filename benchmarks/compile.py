"""Measure a compiled step of each level, over DDP's compiled step.

    python benchmarks/compile.py    three minutes; writes the page

torch.compile (inductor, which needs g++ and Python's headers) on a CPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pages
from sharding.contenders import CONTROL, OPTIONS, Contender, Trained
from sharding.models import SIZES, Block
from sharding.speed import Measured, Speed, Workload, times
from torch import nn
from torch.optim import AdamW

import manyhands as mh

NAMES = {0: "DDP", 1: "level 1", 2: "level 2", 3: "level 3"}
BY_BLOCKS = ", block by block"
NOT_COMPILED = ", not compiled"
HEAD = "contender | CPU | CPU, over not compiled"


def compiled(level: Any, what: str = "") -> Callable[[nn.Module], Trained]:
    """Shard and then compile the model, or block by block, or nothing."""

    def make(model: nn.Module) -> Trained:
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        options: dict[str, Any] = {"auto_wrap_policy": {Block}} if level == 3 else {}
        adamw = AdamW(model.parameters(), **OPTIONS)
        wrapped, optimizer = mh.shard(model, adamw, level=level, **options)
        if what == BY_BLOCKS:
            for block in blocks:
                block.compile()
        elif not what:
            wrapped.compile()
        return Trained(wrapped, optimizer, optimizer.zero_grad)

    return make


CONTENDERS: dict[str, Contender] = {}
RIVALS: dict[str, str] = {}
for level, name in NAMES.items():
    for what in ("", BY_BLOCKS, NOT_COMPILED):
        CONTENDERS[name + what] = Contender(name + what, compiled(level, what))
    for what in ("", BY_BLOCKS):
        RIVALS[name + what] = name + NOT_COMPILED
CONTENDERS[CONTROL] = Contender(CONTROL, compiled(0))
# Four times the tokens of the other benchmarks: more for a compiler to do in a step.
SIZES["10M"] = replace(SIZES["10M"], batch=8)
WORKLOADS = (Workload("10M", 2, rounds=10, steps=1, groups=(tuple(CONTENDERS),)),)
QUICK = Workload("tiny", 2, rounds=2, steps=1, groups=(tuple(CONTENDERS),))


def table(measured: list[Measured]) -> str:
    """Show CPU time; wall time varied too much on a machine with other work."""
    lines = []
    for row in measured[0].rows:
        over_ddp = f"{row.cpu_ms:.0f} ms" if row.name == NAMES[0] else times(row.cpu)
        lines.append([row.name, over_ddp, times(row.rival_cpu)])
    return pages.table(HEAD, lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # nothing compiled before is used, or kept
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401 - before ranks are forked

        speed = Speed("compile", "compile", "table", CONTENDERS, ("fused",), RIVALS, table)
        speed.run(__doc__, WORKLOADS, QUICK)
