"""The table, the verdicts and the page of `blocks_faults.py`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

PAGE_AT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "blocks-faults.md"
NONE, AGAIN = "no faults", "no faults, other batches"
HOSTILE = "all kinds"
OTHERS = ("partition", "stranger", "newcomer", "leave")
FINE = {"refused", "left", "late"}  # outcomes of processes that are no members
AIM, AIM_AT = 0.90, 30.0  # of the throughput, with a fault in so many seconds
Row = dict[str, Any]


def every(seconds: float) -> str:
    return f"every {seconds:g} s"


def is_sound(row: Row) -> bool:
    """Return whether no worker differs, no survivor has lost a step, and the run has ended well."""
    agree = row["differing"] == 0 and row["finals"] == 1
    nothing_lost = row["missing"]["survivors"] == 0 and row["thrown_away"] == 0
    outcomes = {one for kind in OTHERS for one in row.get(kind, {}).get("outcomes", {})}
    ended = row["code"] == 0 and row["loss"] is not None
    return agree and nothing_lost and ended and outcomes <= FINE


def summary(row: Row) -> str:
    """For the terminal."""
    return (
        f"{row['seconds']:.1f} s, {row['rounds']} rounds, {row['rate']:.1f} steps/s, "
        f"{row['kill']['count']} kills, {row['stop']['count']} stops, {_others(row)}, "
        f"missing {row['missing']}, "
        f"thrown away {row['thrown_away']}, differing {row['differing']} of {row['compared']} "
        f"states, {row['finished']} finished with {row['finals']} result(s), loss {row['loss']}, "
        f"{row['cores']:.2f} cores, {row['tracebacks']} tracebacks, exit code {row['code']}"
    )


def _others(row: Row) -> str:
    """Return how often each of the other faults happened, and how it ended."""
    parts = []
    for kind in OTHERS:
        found = row.get(kind, {"count": 0, "outcomes": {}})
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in found["outcomes"].items())
        parts.append(f"{kind} {found['count']}" + (f" ({outcomes})" if outcomes else ""))
    return "; ".join(parts)


def kept(rows: dict[str, Row], name: str) -> float:
    """Throughput, of that without faults."""
    return float(rows[name]["rate"] / rows[NONE]["rate"])


def table(rows: dict[str, Row]) -> str:
    """One column for each run."""
    names = list(rows)

    def line(what: str, cells: list[str]) -> str:
        return f"| {what} | " + " | ".join(cells) + " |"

    def each(what: str, form: Any) -> str:
        return line(what, [form(rows[name]) for name in names])

    return "\n".join(
        [
            line("", names),
            "|---|" + "--:|" * len(names),
            each("killed, stopped", lambda r: f"{r['kill']['count']}, {r['stop']['count']}"),
            each("partitions, strangers, newcomers, leaves", _others),
            each("seconds", lambda r: f"{r['seconds']:.1f}"),
            each("worker-steps that count, a second", lambda r: f"{r['rate']:.1f}"),
            line("throughput kept, %", [f"{100 * kept(rows, name):.1f}" for name in names]),
            each("sync rounds kept", lambda r: f"{r['rounds']}"),
            each("of these, at the second attempt", lambda r: f"{r['undone']}"),
            each("victims' blocks that are missing", lambda r: f"{r['missing']['victims']:.0f}"),
            each("survivors' blocks missing", lambda r: f"{r['missing']['survivors']:.0f}"),
            each("survivors' steps thrown away", lambda r: f"{r['thrown_away']}"),
            each("delay after a kill, s", lambda r: _spread(r["kill"]["delays"])),
            each("delay after a stop, s", lambda r: _spread(r["stop"]["delays"])),
            each("a killed worker counts again after, s", lambda r: _spread(r["kill"]["back"])),
            each("a stopped worker counts again after, s", lambda r: _spread(r["stop"]["back"])),
            each("states compared", lambda r: f"{r['compared']:,}"),
            each("rounds after which some differ", lambda r: f"{r['differing']}"),
            each(
                "workers at the end, different results",
                lambda r: f"{r['finished']}, {r['finals'] - 1}",
            ),
            each("steps of each worker", lambda r: f"{r['steps']:,}"),
            each("loss, nats a character", lambda r: _loss(r["loss"])),
            each("cores used", lambda r: f"{r['cores']:.2f}"),
        ]
    )


def _spread(values: list[float]) -> str:
    """Median, and the worst."""
    return f"{median(values):.1f}, {max(values):.1f}" if values else ""


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def verdict(rows: dict[str, Row]) -> str:
    """Each claim, and whether it holds."""
    faulty = [name for name in rows if rows[name]["interval"]]
    lines = []
    for name in [name for name in faulty if name != HOSTILE]:
        share = kept(rows, name)
        aim = ""
        if rows[name]["interval"] == AIM_AT:
            aim = f" At least {100 * AIM:.0f} % was the aim: {_met(share >= AIM)}."
        lines.append(
            f"- **A fault {name}:** {100 * share:.1f} % of the throughput is kept, with "
            f"{rows[name]['kill']['count']} kills and {rows[name]['stop']['count']} stops in "
            f"{rows[name]['seconds']:.0f} s.{aim}"
        )
    if HOSTILE in rows:
        row = rows[HOSTILE]
        lines.append(
            f"- **All kinds, one every {row['interval']:g} s:** {100 * kept(rows, HOSTILE):.1f} % "
            f"of the throughput is kept, with {row['kill']['count']} kills, {row['stop']['count']} "
            f"stops, {_others(row)}. Nothing lost, nothing differs, all newcomers refused and the "
            f"exit code right: {_yes(is_sound(row))}."
        )
    differing = sum(row["differing"] for row in rows.values())
    compared = sum(row["compared"] for row in rows.values())
    ends = sum(row["finals"] - 1 for row in rows.values())
    blocks = sum(rows[name]["missing"]["survivors"] for name in faulty)
    steps = sum(rows[name]["thrown_away"] for name in faulty)
    codes = [name for name in rows if rows[name]["code"]]
    lines += [
        "- **After a sync round all its members have bitwise the same state:** "
        f"{_yes(not differing)}, {differing} rounds with different states; {compared:,} states "
        "were compared.",
        f"- **All parameters are bitwise equal at the end of each run:** {_yes(not ends)}.",
        f"- **Workers that are not hit lose nothing:** {_yes(not blocks and not steps)}, "
        f"{blocks:.0f} blocks and {steps} steps.",
        f"- **Each run ends with exit code 0:** {_yes(not codes)}.",
    ]
    base = rows[NONE]["loss"]
    if base and all(rows[name]["loss"] for name in faulty):
        losses = [f"{100 * (rows[n]['loss'] / base - 1):+.2f} % with a fault {n}" for n in faulty]
        again = rows.get(AGAIN, {}).get("loss")
        apart = f" ({100 * (again / base - 1):+.2f} % without, on other batches)" if again else ""
        lines.append(f"- **Loss after equally many steps:** {', '.join(losses)}{apart}.")
    return "\n".join(lines)


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


def _yes(true: bool) -> str:
    return "yes" if true else "**no**"


PAGE = """# Workers that are killed and stopped

{workers} workers train an LSTM (93,000 parameters) on the characters of Shakespeare's plays, with
AdamW inside `mh.DiLoCo` (H = {every}, int8) in a `mh.Crew`, started by `manyhands run --workers
{workers} --stall {stall:g}`. A block takes {usual:.2f} s without faults. At set times a
random worker is killed (SIGKILL) or stopped (SIGSTOP), the one as often as the other. A killed
worker is started again by `manyhands run`; a stopped one is woken after {asleep:g} s, like a host
that hung. In the column "{hostile}" four further things happen as often: the line between the store
and the host of the last two workers is cut for {asleep:g} s; a worker tries to join with another
interval, overlap, codec, type or order of parameters; a process without the run's secret
overwrites, replays or deletes a key of the store; a further worker joins, and leaves in mid-block.
Each run is of {steps:,} steps, which take {minutes:.1f} minutes without faults. Measured on
{machine}, with {versions}. The load average when the run began was {load}.

```bash
python benchmarks/blocks_faults.py --data FOLDER
```

{verdict}

{table}

- **Throughput** is the number of worker-steps that count over the time from the first sync round to
  the last: for each round that was kept, the workers whose differences are in the mean times the
  steps of the block. What a victim did since its last round does not count, nor does anything
  while it is away, nor its first round afterwards if it contributes nothing to that.
- **Each step is padded by a sleep** to {pace:.0f} ms, so that a dead worker's share of the cores
  makes the others no faster. Without faults {cores:.2f} of {machine_cores} cores are used, which is
  {share:.0f} %. What a restart costs (Python, torch, the data) is in the time.
- **Missing** is a worker's block that does not count. A victim's, if the worker was hit since one
  block before; a survivor's otherwise. "Thrown away" are steps of workers that were not hit, and
  went back.
- **Delay** is the longer of the two blocks after a fault, over the usual time of one. (Of
  two: a worker that is hit when the others have its difference already is missed only in the next
  round.) After a kill, which `manyhands run` sees, the others go on at once; a stopped worker is
  waited for as long as the stall time allows, {stall:g} s here. (The default is 5 s; each second of
  it is a second that all wait for each stop.)
- **Counts again**: from the fault to the end of the first block that the worker contributes.
  Stopped ones have slept for {asleep:g} s of it. Delays and these are medians, and the worst.
- **States** are SHA-1 sums of the anchor and the outer momentum, which each worker logs after
  each round, and when it has received the common state.
- **Loss** is on the last tenth of the text, of the parameters at the end. "{again}" is the first
  run with other batches and another start: what lies between the two is chance.
- Victim, kind and time of each fault are drawn from a fixed seed; the moment within a block is
  not, because it depends on the time that blocks take. Faults go on until the first worker is done.

torchft's published run has 32 replicas on one machine of 16 cores and 62 faults in 30 minutes, and
keeps 97.7 % of its throughput. It is another workload on another machine: it says what is possible,
and cannot be compared with the figures above.
"""


def write(result: dict[str, Any]) -> None:
    """The page of a run."""
    rows, plan = result["rows"], result["plan"]
    base = rows[NONE]
    page = PAGE.format(
        **{name: plan[name] for name in ("workers", "every", "stall", "asleep", "steps")},
        **{name: result[name] for name in ("machine", "versions", "load")},
        usual=base["usual"],
        minutes=base["seconds"] / 60,
        pace=1e3 * plan["pace"],
        cores=base["cores"],
        machine_cores=result["cores"],
        share=100 * base["cores"] / result["cores"],
        verdict=verdict(rows),
        table=table(rows),
        again=AGAIN,
        hostile=HOSTILE,
    )
    PAGE_AT.write_text(page)
