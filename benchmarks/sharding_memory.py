"""Measure the memory of each rank with sharded states and parameters, against the formulas.

    python benchmarks/peers.py                      once, to have the peers in the comparison
    python benchmarks/sharding_memory.py            a few minutes; writes two pages
    python benchmarks/sharding_memory.py --quick    a smoke test: a small model, writes nothing

Every tensor's memory is counted while a decoder is trained by AdamW(fused=True) on 1, 2 and 4
ranks (`sharding/memory.py`), with so few tokens that activations are next to nothing. Two pages:
sharding-memory.md (`OSS` and `ShardedDataParallel`) and fsdp-memory.md, with what `mh.plan` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import pages  # noqa: E402
import torch  # noqa: E402
from sharding.contenders import (  # noqa: E402
    BARE,
    CONTENDERS,
    CONTROL,
    DDP,
    FSDP,
    FSDP_CONTENDERS,
    FSDP_LEAN,
    OPTIONS,
    OURS,
    SHARED,
    ZERO3,
    Contender,
    Trained,
    import_early,
)
from team import Team  # noqa: E402

import manyhands as mh  # noqa: E402
from manyhands.sharding.zero._layout import bucket_size  # noqa: E402
from sharding import memory, models  # noqa: E402

RANKS = (1, 2, 4)
PLANNED = "manyhands FSDP, as planned"
KEEP_BUCKETS, FAIRSCALE = "fairscale, default buffer", "fairscale, buffer 0"
STATES = [one for name, one in CONTENDERS.items() if name not in (CONTROL, SHARED)]
PARAMETERS = [*(FSDP_CONTENDERS[name] for name in (DDP, BARE, FSDP, FSDP_LEAN)), *ZERO3]
# Measured, and left out of the pages: variants that hold nearly the same.
LEFT_OUT = (*(f"DeepSpeed ZeRO-{stage}" for stage in (1, 2, 3)), FAIRSCALE)
Row = dict[str, Any]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    if not args.draw:
        import_early()
        size = replace(models.SIZES["tiny" if args.quick else "25M"], batch=1, context=8)
        known = {**pages.conditions(), "size": size.name}
        states = {**known, "measured": measured(size, STATES)}
        rows = planned(size, measured(size, PARAMETERS))
        parameters = {**known, "unit": largest_unit(size), "rows": rows}
        if args.quick:
            print(table(states["measured"], state_formula), table(rows, formula), sep="\n\n")
            return
        pages.store("sharding-memory", states)
        pages.store("fsdp-memory", parameters)
    write_states(pages.read("sharding-memory"))
    write_parameters(pages.read("fsdp-memory"))


def measured(size: models.Size, contenders: Iterable[Contender], ranks: Any = RANKS) -> list[Row]:
    """Each contender on each number of ranks; of ranks that differ, the one that holds most."""
    rows = []
    for n in ranks:
        for contender in contenders:
            deepspeed = contender.needs == "deepspeed"
            if not contender.present or (deepspeed and (n == 1 or "overlap" in contender.name)):
                continue
            with Team(n, memory.work(contender, size)) as team:
                seen = team.ask({})
            most = {key: max(rank[key] for rank in seen) for key in seen[0]}
            rows.append({"name": contender.name, "ranks": n, **most})
    return rows


def table(rows: list[Row], expected: Any) -> str:
    """In units of the parameters, of which DeepSpeed's stage 3 shows none."""
    cells = []
    for row in rows:
        if row["name"] in LEFT_OUT:
            continue
        after, between = (f"{units:.3f}" for units in expected(row["name"], row["ranks"]))
        if row["name"].startswith(("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2")):  # hold more
            after = between = ""
        names = ("after_backward", "between_steps", "most")
        held = [f"{row[name] / rows[0]['parameters']:.3f}" for name in names]
        cells.append([row["name"], row["ranks"], held[0], after, held[1], between, held[2]])
    head = "contender | ranks | after backward | formula | between steps | formula | most in a step"
    return pages.table(head, cells)


# -- sharded states and gradients ----------------------------------------------------------------


def state_formula(name: str, ranks: int) -> tuple[float, float]:
    """After backward and between steps, in units of the parameters' bytes."""
    state = 2.0 if name == DDP else 2 / ranks
    if name in (OURS, FAIRSCALE):
        return 1 + 1 / ranks + state, 1 + state
    if name == KEEP_BUCKETS:  # buckets are the gradients, and stay
        return 2 + state, 2 + state
    return 3 + state, 2 + state


def write_states(result: Row) -> None:
    rows = result["measured"]
    peak = max(
        (row["most"] - state_formula(OURS, row["ranks"])[0] * row["parameters"])
        / (4 * bucket_size(row["ranks"], row["parameters"] // 4))
        for row in rows
        if row["name"] == OURS and row["ranks"] > 1
    )
    known = {**result, "unit": rows[0]["parameters"] / 1e6, "peak": peak}
    pages.write("sharding-memory", STATES_PAGE, known, table=table(rows, state_formula))


STATES_PAGE = """# Memory of each rank

Bytes of parameters, gradients, optimizer state and buckets on a rank, compared with DDP, torch's
ZeroRedundancyOptimizer, fairscale 0.4.13 and DeepSpeed 0.19.8: a decoder of {size} parameters
(float32) with `AdamW(fused=True)`. With {versions}.

```bash
python benchmarks/peers.py             # once: an environment with the peers
python benchmarks/sharding_memory.py
```

Everything is in units of the parameters' {unit:.1f} MB, and of the rank that holds most. Every
tensor's memory is counted; gloo's own scratch memory is not. A step has eight tokens, so that
activations are next to nothing. "After backward" is before `step()`, "between steps" after
`zero_grad()`. The formulas are ZeRO's: parameters 1, AdamW's state 2/N, gradients 1/N where they
are sharded. DDP holds gradients twice, in `param.grad` and in its buckets.

{table}

- The most in a step of `OSS` with `ShardedDataParallel` is up to {peak:.1f} buckets above the
  formula after backward. A bucket is a tenth of so small a model.
- On one rank nothing is sharded: `OSS` is the optimizer itself.
- fairscale gives every parameter to one rank whole: its ranks hold unequal shares, and the
  largest counts.
"""

# -- sharded parameters --------------------------------------------------------------------------


def largest_unit(size: models.Size) -> int:
    """Bytes of the largest wrap of `contenders.nested`."""
    model = models.decoder(size)
    parts = (model.tokens, model.logits, *model.blocks)
    return max(4 * sum(param.numel() for param in part.parameters()) for part in parts)


def planned(size: models.Size, rows: list[Row]) -> list[Row]:
    """Add what the plan says, and what is measured with its line."""
    for ranks in RANKS:
        plan = mh.plan(lambda: models.decoder(size), "adamw", ranks, backend="gloo", fused=True)
        said = plan.rows[3]
        contender = Contender(PLANNED, lambda model, code=said.code: pasted(model, code))
        known = {
            "between_steps": said.parameters + said.optimizer,
            "after_backward": said.parameters + said.gradients + said.optimizer,
            "most": said.total,
        }
        rows.append({**measured(size, [contender], [ranks])[0], "planned": known})
    return sorted(rows, key=lambda row: row["ranks"])


def pasted(model: torch.nn.Module, code: str) -> Trained:
    """Wrapped by the line that the plan gives."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"], fused=True)
    names: dict[str, Any] = {"mh": mh, "model": model, "optimizer": optimizer}
    exec(code, names)
    return Trained(names["model"], names["optimizer"], names["optimizer"].zero_grad)


def formula(name: str, ranks: int) -> tuple[float, float]:
    """After backward and between steps, in units of the parameters' bytes."""
    return (5.0, 4.0) if name == DDP else (4 / ranks, 3 / ranks)


def write_parameters(result: Row) -> None:
    rows, wrap = result["rows"], result["unit"]
    unit = rows[0]["parameters"]
    lean, most = (
        max(
            (row["most"] - formula(name, row["ranks"])[0] * unit) / wrap
            for row in rows
            if row["name"] == name and row["ranks"] > 1
        )
        for name in (FSDP_LEAN, FSDP)
    )
    off = max(
        abs(row["planned"][key] / row[key] - 1) for row in rows for key in row.get("planned", ())
    )
    known = {**result, "unit": unit / 1e6, "wrap": wrap / unit, "most": most, "lean": lean}
    shown = table(rows, formula)
    pages.write("fsdp-memory", PARAMETERS_PAGE, known, table=shown, off=100 * off)


PARAMETERS_PAGE = """# Memory of each rank with sharded parameters

Bytes of parameters, gradients and optimizer state on a rank, compared with DDP, torch's
`fully_shard` and DeepSpeed's ZeRO-3: a decoder of {size} parameters (float32) with
`AdamW(fused=True)`. Embedding, blocks and logits are wrapped each by itself. With {versions}; gloo.

```bash
python benchmarks/peers.py            # once: an environment with the peers
python benchmarks/sharding_memory.py
```

- The most in a step is up to {most:.1f} wraps above the formula after backward; with
  `overlap=False` {lean:.1f}.
- [The plan](../plan.md) is within {off:.1f} % of what is measured (as planned: wrapped by the line
  that `mh.plan` prints).

Everything is in units of the parameters' {unit:.1f} MB, and of the rank that holds most; the
largest wrap is {wrap:.3f}. Every tensor's memory is counted; gloo's own scratch memory is not. The
formula is (parameters 1 + gradients 1 + AdamW's state 2) / N, without gradients between steps.

{table}
"""


if __name__ == "__main__":
    main()
