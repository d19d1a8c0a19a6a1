"""The benchmark of the time to a loss: its smoke test, its bookkeeping and its page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark():
    """The script as a module, from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        for name in ("PYTHONPATH", "OMP_NUM_THREADS"):  # which it changes
            patch.setenv(name, os.environ.get(name, ""))
        import time_to_loss

        yield time_to_loss


def row(line, ranks, way, seconds, reached=True, seed=0, **more):
    return {
        **{"line": line, "ranks": ranks, "way": way, "seed": seed, "seconds": seconds},
        **{"reached": reached, "target": 0.25, "steps": 10, "samples": 320, "mean_passes": 1.0},
        **{"sent": 2e6, "cpu_seconds": 0.5, "load": 0.1, "machine": "2 cores", "versions": "torch"},
        **more,
    }


FIT = {"fixed_ms": 120.0, "pass_ms": 0.5}
SLOW = "50 Mbit/s, 20 ms"


@pytest.mark.long
def test_the_smoke_test_trains_in_every_kind_of_way_and_writes_nothing():
    pytest.importorskip("sklearn", reason="scikit-learn, which has the digits, is missing")
    before = files()
    command = [sys.executable, "benchmarks/time_to_loss.py", "--quick"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    for name in ("DDP + AdaScale, 4 passes", "Ramp", "DiLoCo, H = 16", "Ramp inside"):
        assert any(name in line for line in lines if line.startswith("loopback, 2 ranks"))
    # over a line as well, or else the reason why there is none here
    assert any(line.startswith(("1 Gbit/s, 2 ranks", "1 Gbit/s is left out")) for line in lines)
    assert files() == before


def files():
    folders = (ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks")
    found = [path for folder in folders for path in folder.glob("time_to_loss*")]
    return {path: path.read_bytes() for path in found}


def test_seeds_come_first_and_ways_take_turns(benchmark):
    groups = list(benchmark.planned(["loopback"], (2, 4), ["a", "b", "c", "d"], seeds=2))
    ways = [[run.way for run in group if run.ranks == 2] for group in groups]
    assert ways == [["a", "b", "c", "d"], ["d", "a", "b", "c"]]
    assert [group[0].seed for group in groups] == [0, 1]
    assert len({run for group in groups for run in group}) == 2 * 2 * 4


def test_only_missing_runs_are_measured(benchmark, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setattr(benchmark, "RESULTS", rows)
    monkeypatch.setattr(benchmark, "measure", lambda run, *_: row(**vars(run), seconds=1.0))
    monkeypatch.setattr(benchmark, "target_of", lambda *_: 0.25)
    # the last line was cut off
    rows.write_text(json.dumps(row("loopback", 2, "DDP", 1.0)) + '\n{"line": "loop')
    ways = list(benchmark.WAYS)[:2]
    for _ in range(2):
        benchmark.run_all(benchmark.planned(["loopback"], (2,), ways, 1), Path())
    assert [found["way"] for found in benchmark.pages.read_rows(rows)] == ways


def test_the_page_names_the_fastest_way_for_each_line(benchmark):
    rows = [
        row("loopback", 2, "DDP", 2.0),
        row("loopback", 2, "DDP + AdaScale, 1 pass", 1.0),
        row(SLOW, 2, "DDP", 60.0),
        row(SLOW, 2, "DDP", 40.0, seed=1),
        row(SLOW, 2, "DDP + AdaScale, 16 passes", 12.0),
        row(SLOW, 2, "DDP + AdaScale + Ramp", 10.0, **FIT),
        row(SLOW, 2, "DiLoCo, H = 16", 5.0),
        row(SLOW, 2, "DiLoCo, H = 64", 180.0, reached=False),
    ]
    text = "\n".join(benchmark.parts(rows).values())
    rule = "DDP + AdaScale, 1 pass: 1.00 s (2.0×)"
    assert f"| loopback | 2 |  | 2.00 s | {rule} |  |  |" in text
    ramp = "DDP + AdaScale + Ramp: 10.00 s (5.0×)"
    blocks = "DiLoCo, H = 16: 5.00 s (10.0×)"
    over_best_fixed = "0.83"
    assert f"| {SLOW} | 2 | 240 | 50.00 s | {ramp} | {blocks} | {over_best_fixed} |" in text
    assert "| DDP | 2.00 | 50.00 (40.00–60.00) |" in text
    assert "| DiLoCo, H = 64 |  | not reached in 180 s (1 of 1) |" in text


def test_the_loss_is_the_mean_of_the_last_progress(benchmark):
    from ways import SmoothLoss

    smooth = SmoothLoss(over=20.0)
    found = [smooth.add(*seen) for seen in ((10, 3.0), (20, 1.0), (35, 0.0))]
    assert found == [3.0, 2.0, 0.5]


def test_the_clock_stands_during_evaluations(benchmark, monkeypatch):
    import ways

    class Clock:
        now = 10.0

        def perf_counter(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    time = Clock()
    monkeypatch.setattr(ways, "time", time)
    clock = ways.TrainingClock()
    time.sleep(1.0)
    assert clock.perf_counter() == 11.0
    clock.pause(lambda: time.sleep(2.0) or 15.0)  # works until 13, and goes on at 15
    assert time.now == 15.0
    assert clock.perf_counter() == 11.0
