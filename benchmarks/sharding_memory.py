"""Measure the memory of each rank with sharded states and parameters, against the formulas.

    python benchmarks/peers.py                      once, to have the peers in the comparison
    python benchmarks/sharding_memory.py            a few minutes; writes the page

Every tensor's memory is counted while AdamW(fused=True) trains a decoder on 1, 2 and 4 ranks
(`sharding/memory.py`), with so few tokens that activations are negligible. Results with sharded
parameters are in fsdp-memory.json, with the plan of `mh.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import peers

peers.run_again_beside_peers()  # before torch, which this Python may not have

import pages  # noqa: E402
import torch  # noqa: E402
from sharding.contenders import CONTENDERS, DDP, FSDP_CONTENDERS, Contender, Trained  # noqa: E402
from team import Team, largest  # noqa: E402

import manyhands as mh  # noqa: E402
from sharding import contenders, memory, models  # noqa: E402

RANKS = (1, 2, 4)
PLANNED = "manyhands FSDP, as planned"
FAIRSCALE = "fairscale, buffer 0"
UNMEASURED = (contenders.CONTROL, contenders.SHARED)
FULLY_SHARDED = (DDP, contenders.BARE, contenders.FSDP, contenders.FSDP_LEAN)
# Measured, and left out of the page: variants that hold nearly the same.
LEFT_OUT = ("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", FAIRSCALE)
HEAD = (
    "contender | 2 ranks: after backward | between steps | most in a step "
    "| 4 ranks: after backward | between steps | most in a step"
)
Row = dict[str, Any]
Formula = Callable[[str, int], tuple[float, float]]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    if not args.draw:
        contenders.import_early()
        size = replace(models.SIZES["tiny" if args.quick else "25M"], batch=1, context=8)
        known = {**pages.conditions(), "size": size.name}
        states = [one for name, one in CONTENDERS.items() if name not in UNMEASURED]
        parameters = [*(FSDP_CONTENDERS[name] for name in FULLY_SHARDED), *contenders.ZERO3]
        state_rows = measured(size, states, RANKS)
        rows = sorted(
            [*measured(size, parameters, RANKS), *planned(size)], key=lambda row: row["ranks"]
        )
        if args.quick:
            print(table(state_rows, rows))
            return
        pages.store("sharding-memory", {**known, "measured": state_rows})
        pages.store("fsdp-memory", {**known, "unit": largest_unit(size), "rows": rows})
    result = pages.read("sharding-memory")
    rows = pages.read("fsdp-memory")["rows"]
    pages.fill("sharding-memory", result, table=table(result["measured"], rows))


def measured(size: models.Size, some: Iterable[Contender], ranks: Iterable[int]) -> list[Row]:
    """Measure each contender on each number of ranks; the rank that holds most counts."""
    rows = []
    for n in ranks:
        for contender in some:
            deepspeed = contender.needs == "deepspeed"
            if not contender.present or (deepspeed and (n == 1 or "overlap" in contender.name)):
                continue
            with Team(n, memory.work(contender, size)) as team:
                rows.append({"name": contender.name, "ranks": n, **largest(team.ask({}))})
    return rows


def table(state_rows: list[Row], parameter_rows: list[Row]) -> str:
    """Show units of the parameters on 2 and 4 ranks, and a formula where it differs."""
    unit = state_rows[0]["parameters"]
    lines: dict[str, list[str]] = {}
    for rows, expected in ((state_rows, state_formula), (parameter_rows, formula)):
        for row in rows:
            name = row["name"]
            if name in LEFT_OUT or row["ranks"] == 1 or (expected is formula and name == DDP):
                continue
            after, between = expected(name, row["ranks"])
            if name.startswith(("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2")):  # no formula of ours
                after = row["after_backward"] / unit
                between = row["between_steps"] / unit
            line = lines.setdefault(name, [name])
            line.append(beside(row["after_backward"] / unit, after))
            line.append(beside(row["between_steps"] / unit, between))
            line.append(f"{row['most'] / unit:.3f}")
    return pages.table(HEAD, lines.values())


def beside(units: float, expected: float) -> str:
    if f"{units:.3f}" == f"{expected:.3f}":
        return f"{units:.3f}"
    return f"{units:.3f} ({expected:.3f})"


def state_formula(name: str, ranks: int) -> tuple[float, float]:
    """After backward and between steps, in units of the parameters' bytes: sharded states."""
    state = 2.0 if name == DDP else 2 / ranks
    if name in (contenders.OURS, FAIRSCALE):
        return 1 + 1 / ranks + state, 1 + state
    if name == "fairscale, default buffer":  # buckets are the gradients, and stay
        return 2 + state, 2 + state
    return 3 + state, 2 + state


def formula(name: str, ranks: int) -> tuple[float, float]:
    """After backward and between steps, in units of the parameters' bytes: all is sharded."""
    return (5.0, 4.0) if name == DDP else (4 / ranks, 3 / ranks)


def largest_unit(size: models.Size) -> int:
    model = models.decoder(size)
    parts = (model.tokens, model.logits, *model.blocks)
    return max(4 * sum(param.numel() for param in part.parameters()) for part in parts)


def planned(size: models.Size) -> list[Row]:
    """Measure the model wrapped by the plan's line, beside the plan's numbers."""
    rows = []
    for ranks in RANKS:
        plan = mh.plan(lambda: models.decoder(size), "adamw", ranks, backend="gloo", fused=True)
        said = plan.rows[3]
        contender = Contender(PLANNED, partial(pasted, said.code))
        known = {
            "between_steps": said.parameters + said.optimizer,
            "after_backward": said.parameters + said.gradients + said.optimizer,
            "most": said.total,
        }
        (row,) = measured(size, [contender], [ranks])
        rows.append({**row, "planned": known})
    return rows


def pasted(code: str, model: torch.nn.Module) -> Trained:
    """Wrap the model by the line that the plan gives."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=contenders.OPTIONS["lr"], fused=True)
    names: dict[str, Any] = {"mh": mh, "model": model, "optimizer": optimizer}
    exec(code, names)
    return Trained(names["model"], names["optimizer"], names["optimizer"].zero_grad)


if __name__ == "__main__":
    main()
