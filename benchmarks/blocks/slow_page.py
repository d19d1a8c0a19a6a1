"""The tables, the verdicts and the page of `blocks_slow_link.py`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from blocks.contenders import ALONE, ALONE_AGAIN, BYTES, DDP, INT4, OVERLAPPED, PER_TENSOR, SLOW

PAGE_AT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "blocks-slow-link.md"
# The aims: a step over the line, in seconds and over no communication; bytes, DDP's over ours.
SECONDS, HIDDEN_RATIO, FEWER = 0.40, 1.02, 400
Rows = dict[str, dict[str, Any]]


def line(link: dict[str, Any]) -> str:
    """What the line gives, in a sentence."""
    if not link:
        return "The line was not measured."
    return (
        f"A TCP connection ({link['congestion_control']}) gets {link['one_way']:.1f} Mbit/s in one "
        f"direction and {link['both_ways']:.1f} Mbit/s in each of both at once; a byte is back "
        f"after {link['round_trip_ms']:.1f} ms. At full rate in both directions the relay takes "
        f"{100 * link['relay_cpu']:.0f} % of a core for {link['packets_per_second']:,.0f} packets "
        "a second."
    )


HEADER = (
    "| contender | ms a step | of each block | over no communication, ms | MB sent a step "
    "| DDP's over it | CPU ms a step |\n|---|--:|---|--:|--:|--:|--:|"
)


def row(name: str, measured: dict[str, Any], rows: Rows | None = None) -> str:
    """One line of the table; `rows` are those that it is compared with."""
    known = rows or {}
    alone, ddp = known.get(ALONE.name), known.get(DDP.name)
    cells = [
        f"{measured['ms']:,.0f}",
        ", ".join(f"{block:,.0f}" for block in measured["blocks"]),
        f"{measured['ms'] - alone['ms']:,.0f}" if alone else "",
        f"{measured['sent'] / 1e6:.2f}",
        f"{ddp['sent'] / measured['sent']:.1f}" if ddp and measured["sent"] else "",
        f"{measured['cpu_ms']:,.0f}",
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def table(rows: Rows) -> str:
    return "\n".join([HEADER, *(row(name, rows[name], rows) for name in SLOW if name in rows)])


def lines_table(lines: dict[str, Any]) -> str:
    """What overlap leaves of each line."""
    text = [
        "| line | contender | ms a step | over no communication | in each round | CPU ms a step |",
        "|---|---|--:|--:|---|--:|",
    ]
    for name, found in lines.items():
        for contender, row in found["rows"].items():
            ratios = "" if contender == ALONE.name else _ratios(row["rounds"])
            middle = "" if contender == ALONE.name else f"{median(row['rounds']):.3f}"
            cells = [name, contender, f"{row['ms']:,.1f}", middle, ratios, f"{row['cpu_ms']:,.0f}"]
            text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def _ratios(rounds: list[float]) -> str:
    return ", ".join(f"{ratio:.3f}" for ratio in sorted(rounds))


def lines_verdict(lines: dict[str, Any]) -> str:
    """For each line the best of ours, and whether it meets the aim."""
    text = []
    for name, found in lines.items():
        medians = {c.name: median(found["rows"][c.name]["rounds"]) for c in OVERLAPPED}
        best = min(medians, key=medians.__getitem__)
        text.append(
            f"- **At most {HIDDEN_RATIO:.2f} × no communication, {name}:** "
            f"{_met(medians[best] <= HIDDEN_RATIO)}, {medians[best]:.3f} with {best}. "
            f"{line(found['link'])}"
        )
    return "\n".join(text)


def bytes_table(counts: dict[str, dict[str, float]]) -> str:
    worlds = [world for world, row in counts.items() if row]
    lines = [
        "| contender |" + "".join(f" {n} workers: bytes a step | DDP's over it |" for n in worlds),
        "|---|" + "--:|--:|" * len(worlds),
    ]
    for name in BYTES:
        if all(name in counts[world] for world in worlds):
            cells = [
                f" {counts[n][name]:,.0f} | {counts[n][DDP.name] / counts[n][name]:,.1f} |"
                for n in worlds
            ]
            lines.append(f"| {name} |" + "".join(cells))
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> str:
    """Each aim, and whether it is met."""
    rows, lines = result["rows"], []
    overlapped = {c.name: rows[c.name]["ms"] / 1e3 for c in OVERLAPPED if c.name in rows}
    if overlapped and ALONE.name in rows:
        best = min(overlapped, key=overlapped.__getitem__)
        lines.append(
            f"- **At most {SECONDS:.2f} s a step with overlap and int8 or int4:** "
            f"{_met(overlapped[best] <= SECONDS)}, {overlapped[best]:.3f} s with {best} ("
            + ", ".join(f"{name}: {s:.3f} s" for name, s in overlapped.items() if name != best)
            + f"). Without any communication a step takes {rows[ALONE.name]['ms'] / 1e3:.3f} s."
        )
    for world, counts in result["bytes"].items():
        if INT4.name in counts and DDP.name in counts:
            fewer = counts[DDP.name] / counts[INT4.name]
            lines.append(
                f"- **At least {FEWER} times fewer bytes than DDP at H = 100 with int4, "
                f"{world} workers:** {_met(fewer >= FEWER)}, {fewer:,.0f} times fewer."
            )
    return "\n".join(lines) or "- No verdict: manyhands' own were not measured."


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


PAGE = """# Two hosts and a slow line

Two ranks, each on a host of its own, train {elements:.1f} M parameters in {tensors} tensors over
{rate:.0f} Mbit/s with a round trip of {round_trip:.0f} ms. A step "computes" by sleeping for
300 ms, a third of that in its forward pass, and then has the real step of the inner optimizer,
`AdamW(fused=True)`. Blocks are of H = 16 steps. Measured on {machine}, with {versions}; ranks talk
through gloo and have one thread each. The load average when the run began was {load}.

```bash
sudo python benchmarks/blocks_slow_link.py      # Linux, with /dev/net/tun
```

{verdict}

{table}

- A figure is the slower rank's time over 2 blocks after one that does not count ("of each block"
  is each of the 2; DDP, which sends in every step: 2 steps after one). Contenders run one after the
  other, each with processes of its own and with the line for itself. "{again}" is the first row a
  second time, at the end: what lies between the two is noise.
- Bytes are what a rank's sockets have sent, without what TCP had to send again; CPU time is that of
  a rank with all its threads, of which sleeping takes none.
- An overlapped synchronisation may travel for 8 steps. What is still under way when the clock
  starts is under way again when it stops.
- "{per_tensor}" is fairseq's block momentum after its published recurrence, with one all-reduce for
  each tensor (`benchmarks/blocks/recurrence.py`); fairseq itself is awkward to install today.
- All contenders of a formula compute the same parameters: [what one synchronisation
  costs](blocks-sync.md) checks that.

## What overlap leaves of three lines

The rows that overlap, on lines that differ. Every host has a line of its own to a switch. Four
hosts share the two cores of this machine, as no four hosts would. Contenders take turns: in each of
{rounds} rounds each trains for two blocks, and is compared with "no communication" of that round.
The load average at the end was {lines_load}.

```bash
sudo python benchmarks/blocks_slow_link.py --lines
```

{lines_verdict}

{lines_table}

The lost packets are chosen at random, each by itself, in each direction.

## How much is sent at H = 100

Counted between processes of one host, without the slow line, over a block of 100 steps (DDP: 3
steps after a first one). That everyone takes rank 0's parameters before the first step, which DDP
does as well, is left out.

{bytes_table}

## The line

{line}

The hosts are network namespaces on one machine, each with a TUN interface. A process reads the
packets of one and writes them to another when they would have arrived: each takes its bits'
time at {rate:.0f} Mbit/s, in each direction for itself, and then {delay:.0f} ms. A packet that
would have to wait for more than {queue:.0f} ms is dropped. Packets are of up to {mtu:,} bytes: the
smaller they are, the more CPU time the relay takes, which it shares with the ranks.
"""


def write(result: dict[str, Any]) -> None:
    """The page of a run."""
    terms, lines = result["terms"], result["lines"]
    page = PAGE.format(
        elements=result["elements"] / 1e6,
        rate=terms["rate"] / 1e6,
        delay=1e3 * terms["delay"],
        round_trip=2e3 * terms["delay"],
        queue=1e3 * terms["queue"],
        mtu=terms["mtu"],
        verdict=verdict(result),
        table=table(result["rows"]),
        bytes_table=bytes_table(result["bytes"]),
        line=line(result["link"]),
        lines_verdict=lines_verdict(lines),
        lines_table=lines_table(lines),
        rounds=len(next(iter(lines.values()))["rows"][ALONE.name]["rounds"]),
        lines_load=result["lines_load"],
        again=ALONE_AGAIN.name,
        per_tensor=PER_TENSOR.name,
        **{name: result[name] for name in ("machine", "versions", "tensors", "load")},
    )
    PAGE_AT.write_text(page)
