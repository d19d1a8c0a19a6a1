"""Measure training that survives lost ranks: cost without faults, pauses and throughput with kills.

    pip install torchft==0.2.0        optional, for the comparison
    python benchmarks/survive.py      25 minutes, with torch 2.15; writes the page

Part 1 compares a step with `mh.start(survive=True)` with a step of plain DDP. Part 2 kills a random
rank (SIGKILL) every 30 s and every 10 s, under manyhands and under torchft in turns. The ranks'
script is `faults/ranks.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from statistics import median
from typing import Any

import pages
import peers

peers.this_checkout()
HERE = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] += f"{os.pathsep}{HERE}"  # of the ranks

from faults.ranks import COUNTED  # noqa: E402
from rounds import Ratio, Times, in_turns, ratio  # noqa: E402

from manyhands.blocks.crew._processes import die_with_parent  # noqa: E402

LAUNCH = (sys.executable, "-m", "manyhands", "run", "--restarts", "1000", "--workers")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
RANKS = ("-m", "faults.ranks")
PLAIN = "DDP"
AGAIN = "DDP again (A/A)"
SURVIVE = "DDP, survive=True"
RULES = {PLAIN: "plain", AGAIN: "again", SURVIVE: "survive"}
WARM_UP = 10
GENERATIONS = 3  # of processes: two with equal work differ by 2 to 3 %
# Otherwise the layout of the heap decides whether each step gives memory back to the system, which
# lets equal contenders differ by up to 15 %.
HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
SIZE = 4  # ranks under kills
SEGMENT = 170.0  # seconds of a run
LIBRARIES = {"manyhands": "survive", "torchft": "torchft"}
Log = list[dict[str, Any]]


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--part", type=int, choices=(1, 2), help="only this part")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    if not args.draw and args.part != 2:
        result |= pages.conditions() | {"rounds": args.rounds, "cost": {}}
        for ranks in (2, 4):
            result["cost"][str(ranks)] = cost(ranks, 3 if args.quick else args.rounds)
            print(cost_table(result["cost"]), flush=True)
    if not args.draw and args.part != 1:
        result |= {"kills": [], "kills_load": pages.conditions()["load"]}
        for library, interval, seconds in plans(args.quick):
            result["kills"].append(kills(library, interval, seconds, len(result["kills"])))
            print(kills_table(result["kills"]), flush=True)
    if not args.quick:
        with suppress(FileNotFoundError):
            result = pages.read("survive") | result
        pages.store("survive", result)
        parts = {"rounds": result["rounds"], "kills_load": result["kills_load"]}
        parts["parts"] = parts_of_pauses(result["kills"])
        tables = {"cost": cost_table(result["cost"]), "kills": kills_table(result["kills"])}
        pages.fill("survive", result, **parts, **tables)


# -- cost without faults --------------------------------------------------------------------------


def cost(ranks: int, rounds: int) -> dict[str, Any]:
    """Return each contender's times of a step, of all generations of processes."""
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(GENERATIONS):
        for name, seen in turns_of_steps(ranks, rounds // GENERATIONS).items():
            found = times.setdefault(name, {"cpu": [], "wall": []})
            for kind in found:
                found[kind] += seen[kind]
    base = times[PLAIN]
    rows = {}
    for name, found in times.items():
        row: dict[str, Any] = {}
        for kind in found:
            row[f"{kind}_ms"] = 1e3 * median(found[kind])
            row[kind] = asdict(ratio(found[kind], base[kind]))
        rows[name] = row
    return rows


def turns_of_steps(ranks: int, rounds: int) -> Times[str]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        turns: dict[str, Callable[[], Any]] = {}
        for name, rule in RULES.items():
            command = LAUNCH if rule == "survive" else TORCHRUN
            words = [*command, str(ranks), *RANKS, "cost", rule, f"{folder}/{rule}"]
            listener = stack.enter_context(Listener(words[-1], "AF_UNIX"))
            stack.enter_context(started(words, Path(folder, "output"), **HEAP))
            pipes = [stack.enter_context(listener.accept()) for _ in range(ranks)]
            turns[name] = partial(steps, pipes, COUNTED)
            for pipe in pipes:
                pipe.recv_bytes()
            steps(pipes, WARM_UP)
        return in_turns(turns, rounds)


def steps(pipes: Sequence[Connection], count: int) -> list[Any]:
    for pipe in pipes:
        pipe.send_bytes(json.dumps(count).encode())
    return [json.loads(pipe.recv_bytes()) for pipe in pipes]


class started:
    """Run a command within a `with` statement. Ranks die with the launcher."""

    def __init__(self, words: Sequence[str], output: Path, **more: str) -> None:
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                words, stdout=file, stderr=file, env={**os.environ, **more}, **die_with_parent()
            )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def cost_table(cost: dict[str, Any]) -> str:
    lines: dict[str, list[str]] = {name: [name] for name in RULES}
    head = "step"
    for ranks, rows in cost.items():
        head += f" | {ranks} ranks: CPU | elapsed"
        for name, row in rows.items():
            for kind in ("cpu", "wall"):
                text = f"{row[f'{kind}_ms']:.1f} ms"
                if name != PLAIN:
                    value = Ratio(**row[kind])
                    text = f"{value.value:.3f} ({value.low:.3f}–{value.high:.3f})"
                lines[name].append(text)
    return pages.table(head, lines.values())


# -- kills ----------------------------------------------------------------------------------------


def plans(quick: bool) -> list[tuple[str, float, float]]:
    """Return library, seconds between kills (0: none), and seconds of the runs, in order."""
    libraries = list(filter(peers.installed, LIBRARIES))
    if quick:
        return [(each, interval, 40.0) for interval in (0.0, 8.0) for each in libraries]
    found = [(each, 0.0, 60.0) for each in libraries]
    for interval, seconds in ((10.0, SEGMENT), (30.0, SEGMENT), (10.0, SEGMENT)):
        found += [(each, interval, seconds) for each in libraries]
    return found


def kills(library: str, interval: float, seconds: float, seed: int) -> dict[str, Any]:
    """Train for some seconds after the first step of all ranks, with kills."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.touch()
        run = RUNS[library](path, Path(folder, "output"))
        with run:
            log, killed = _kill(run, path, interval, random.Random(seed // 2), seconds)
    return {"library": library, "interval": interval, **tally(log, killed)}


class OurRun(ExitStack):
    def __init__(self, log: Path, output: Path) -> None:
        super().__init__()
        words = [*LAUNCH, str(SIZE), "--preload", "faults.ranks", *RANKS, "survive", str(log)]
        self.enter_context(started(words, output))

    def tend(self) -> None:
        """Nothing: the launcher restarts ranks."""


class TorchftRun(ExitStack):
    """A lighthouse with the options of torchft's README, and replicas that are restarted."""

    def __init__(self, log: Path, output: Path) -> None:
        super().__init__()
        self.log = log
        self.output = output
        self.replicas: dict[int, subprocess.Popen[bytes]] = {}
        words = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", "[::]:29510"]
        words += ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        self.enter_context(started(words, output))
        time.sleep(1.0)
        self.tend()

    def tend(self) -> None:
        words = [sys.executable, *RANKS, "torchft", str(self.log)]
        for number in range(SIZE):
            if number not in self.replicas or self.replicas[number].poll() is not None:
                self.replicas[number] = self.enter_context(
                    started(
                        words,
                        self.output,
                        TORCHFT_LIGHTHOUSE="http://localhost:29510",
                        REPLICA_GROUP_ID=str(number),
                        NUM_REPLICA_GROUPS=str(SIZE),
                    )
                )


RUNS: dict[str, Any] = {"manyhands": OurRun, "torchft": TorchftRun}


def _kill(
    run: Any, path: Path, interval: float, dice: random.Random, seconds: float
) -> tuple[Log, Log]:
    """Kill ranks while the run trains. Return its log since all ranks trained, and the kills."""
    log: Log = []
    killed: Log = []
    began = 0.0
    due = interval + dice.uniform(0, 1)
    limit = time.monotonic() + seconds + 120
    rest = ""
    with path.open() as file:
        while not began or time.monotonic() < began + seconds:
            if time.monotonic() > limit:
                output = path.with_name("output").read_text()
                raise RuntimeError(f"the run hangs:\n{output[-4000:]}")
            run.tend()
            *lines, rest = (rest + file.read()).split("\n")  # a rank may be writing
            log += map(json.loads, lines)
            here = members(log, killed)
            if not began and len(here) == SIZE and log[-1]["event"] == "step":
                began = time.monotonic()
            now = time.monotonic() - began
            if began and interval and now > due and len(here) >= SIZE - 1 and now < seconds - 5:
                number = dice.choice(sorted(here))
                killed.append({"time": time.monotonic(), "pid": here[number], "size": len(here)})
                os.kill(here[number], signal.SIGKILL)
                due = interval * (len(killed) + 1) + dice.uniform(0, 1)
            time.sleep(0.01)
    return [line for line in log if line["time"] >= began], killed


def members(log: Log, killed: Log) -> dict[int, int]:
    """Return the process of each rank that has committed one of the last steps."""
    newest = max((line["step"] for line in log if line["event"] == "step"), default=0)
    dead = {kill["pid"] for kill in killed}
    found = {}
    for line in log[-40:]:
        if line["event"] == "step" and line["step"] >= newest - 2 and line["pid"] not in dead:
            found[line["number"]] = line["pid"]
    return found


# -- what a log shows -----------------------------------------------------------------------------
#
# pause        from a kill to the first step of the smaller group, minus the usual step of a group
#              of that size; from the last step with the killed rank, if that was after the kill
# detection    from the kill to the last survivor that notices the failure
# meeting      from then to the last survivor that has met the others
# live         ranks from their first step to their kill, or their last step
# crashes      processes that ended without a kill
# throughput   samples of committed steps per second; per live rank, relative to the run without
#              kills: 1 is what the remaining ranks allow


def tally(log: Log, killed: Log) -> dict[str, Any]:
    committed: dict[int, dict[str, Any]] = {}
    for line in log:
        if line["event"] == "step":
            committed.setdefault(line["step"], line)
    done = sorted(committed.values(), key=lambda line: line["time"])
    usual: dict[int, list[float]] = {}
    for before, after in pairwise(done):
        if before["ranks"] == after["ranks"]:
            usual.setdefault(after["ranks"], []).append(after["time"] - before["time"])
    pauses = [pause_after(kill, done, log, usual) for kill in killed]
    began = log[0]["time"]
    seconds = log[-1]["time"] - began
    return {
        "kills": len(killed),
        "seconds": seconds,
        "samples": sum(line["samples"] for line in done),
        "live": live_seconds(log, killed) / seconds,
        "pauses": [each for each in pauses if each],
    }


def pause_after(
    kill: dict[str, Any], done: Log, log: Log, usual: dict[int, list[float]]
) -> dict[str, float]:
    after = [line for line in done if line["time"] > kill["time"]]
    size = min((line["ranks"] for line in after[:3]), default=SIZE)
    first = next((line for line in after if line["ranks"] == size), None)
    if first is None or size not in usual:
        return {}
    last = max([kill["time"]] + [e["time"] for e in after if e["time"] < first["time"]])
    found = {"pause": first["time"] - last - median(usual[size])}
    for event in ("failed", "met"):
        times = [
            line["time"]
            for line in log
            if line["event"] == event and kill["time"] < line["time"] < first["time"]
        ]
        if times:
            found[event] = max(times) - last
    return found


def live_seconds(log: Log, killed: Log) -> float:
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for line in log:
        if line["event"] == "step":
            first.setdefault(line["pid"], line["time"])
            last[line["pid"]] = line["time"]
    last |= {kill["pid"]: kill["time"] for kill in killed}
    return sum(last[pid] - began for pid, began in first.items())


def kills_table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each library and interval, over all runs."""
    cells = []
    groups = dict.fromkeys((row["interval"], row["library"]) for row in rows)
    alone: dict[str, float] = {}
    for interval, library in groups:
        runs = [r for r in rows if (r["interval"], r["library"]) == (interval, library)]
        seconds = sum(run["seconds"] for run in runs)
        rate = sum(run["samples"] for run in runs) / seconds
        alone.setdefault(library, rate)
        live = sum(run["live"] * run["seconds"] for run in runs) / seconds / SIZE
        pauses = [pause for run in runs for pause in run["pauses"]]
        cell = [f"every {interval:g} s" if interval else "none", library]
        cell += [str(sum(run["kills"] for run in runs)), f"{rate:.0f}", f"{100 * live:.1f}"]
        cell.append(f"{100 * rate / alone[library] / live:.1f}")
        cells.append([*cell, spread([each["pause"] for each in pauses])])
    head = "kills | library | number | samples/s | live ranks, % "
    return pages.table(head + "| of the allowed, % | pause, s: median, maximum", cells, left=2)


def parts_of_pauses(rows: list[dict[str, Any]]) -> str:
    """Return a sentence about the kills under manyhands that all survivors have noticed."""
    seen = []
    for row in rows:
        seen += [pause for pause in row["pauses"] if "failed" in pause and "met" in pause]
    if not seen:
        return "No pause was observed."
    noticed = median(pause["failed"] for pause in seen)
    met = median(pause["met"] - pause["failed"] for pause in seen)
    repeated = median(pause["pause"] - pause["met"] for pause in seen)
    return (
        f"**Parts of a pause** of manyhands (medians of {len(seen)}): {noticed:.2f} s until the "
        f"last rank has noticed the failure,\n  {met:.2f} s to meet, "
        f"{max(0.0, repeated):.2f} s for a longer repeated step."
    )


def spread(values: list[float]) -> str:
    return f"{median(values):.2f}, {max(values):.2f}" if values else ""


if __name__ == "__main__":
    main()
