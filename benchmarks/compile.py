"""How fast is a compiled step at each level, over DDP's compiled step?

    python benchmarks/compile.py           three minutes; writes the page
    python benchmarks/compile.py --quick   a smoke test; writes nothing

torch.compile (inductor, which needs g++ and Python's headers) on a CPU. `sharding/speed.py` and
`rounds.py` say how times are taken and become ratios.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace

import pages
from sharding.contenders import CONTROL, OPTIONS, Contender, Trained
from sharding.models import SIZES, Block
from sharding.speed import Row, Workload
from torch import nn
from torch.optim import AdamW

import manyhands as mh
from sharding import speed

NAMES = {0: "DDP", 1: "level 1", 2: "level 2", 3: "level 3"}
PARTS = {"whole": "", "blocks": ", block by block", "nothing": ", not compiled"}


def compiled(level: int, what: str = "whole") -> Callable[[nn.Module], Trained]:
    """Shard and then compile: the whole model, or `blocks`, or nothing."""

    def make(model: nn.Module) -> Trained:
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        options = {"auto_wrap_policy": {Block}} if level == 3 else {}
        optimizer = AdamW(model.parameters(), **OPTIONS)
        wrapped, optimizer = mh.shard(model, optimizer, level=level, **options)
        for block in blocks if what == "blocks" else ():
            block.compile()
        if what == "whole":
            wrapped.compile()
        return Trained(wrapped, optimizer, optimizer.zero_grad)

    return make


CONTENDERS: Mapping[str, Contender] = {
    f"{name}{PARTS[what]}": Contender(f"{name}{PARTS[what]}", compiled(level, what))
    for level, name in [*NAMES.items(), (0, CONTROL)]
    for what in (PARTS if name != CONTROL else ["whole"])
}
RIVALS = {
    f"{name}{PARTS[what]}": f"{name}{PARTS['nothing']}"
    for name in NAMES.values()
    for what in ("whole", "blocks")
}
# Four times the tokens of the other benchmarks: more for a compiler to do in a step.
SIZES["10M"] = replace(SIZES["10M"], batch=8)
WORKLOADS = (Workload("10M", 2, rounds=10, steps=1, groups=(tuple(CONTENDERS),)),)
QUICK = (Workload("tiny", 2, rounds=2, steps=1, groups=(tuple(CONTENDERS),)),)

PAGE = """# Speed of a compiled step

A step of each level of `mh.shard` under `torch.compile` (backend inductor), compared with DDP under
`torch.compile`: `AdamW(fused=True)` on a decoder transformer. Measured on {machine}, with
{versions}, and g++ as inductor's compiler; ranks talk through gloo on one machine and have one
thread each. There are no GPU measurements.

```bash
python benchmarks/compile.py
```

{how}

"DDP" is compiled, too. "CPU" is its CPU time of all ranks over the contender's, "tokens/s" the same
of wall time, which varies more on two cores; "over not compiled" is over the same without
`torch.compile`. "block by block" is `block.compile()` of every block, after sharding; level 3 has a
wrap around each block (`auto_wrap_policy={{Block}}`), where compiling the whole model compiles the
same blocks. Two steps come before the first time, so compiling is not in it. The
[recipe](../recipes.md#torchcompile) says what to compile, and when. The machine was
busy with other work, which wall time shows: read the A/A row before any other.

{tables}
"""
HEAD = "contender | CPU ms | CPU | tokens/s | CPU, over not compiled | MB sent"


def cells(rows: list[Row]) -> list[list[str]]:
    return [
        [
            row.name,
            f"{row.cpu_ms:,.0f}",
            speed.times(row.cpu),
            speed.times(row.wall),
            speed.times(row.rival_cpu),
            f"{row.sent / 1e6:.1f}",
        ]
        for row in rows
    ]


def write(result: speed.Result) -> None:
    pages.write("compile", PAGE, result, tables=speed.tables(result, HEAD, cells), how=speed.HOW)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # nothing compiled before is used, or kept
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401 - before ranks are forked

        choices = {"fused": True}
        speed.run(__doc__, "compile", WORKLOADS, QUICK, CONTENDERS, choices, write, RIVALS)
