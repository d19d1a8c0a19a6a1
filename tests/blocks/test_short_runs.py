"""The benchmark of short runs simulates in one process what methods do on ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.blocks._anchor import Average, BlockMomentum

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DILOCO = {"kind": "DiLoCo", "lr": 0.7, "momentum": 0.9}
NESTEROV = BlockMomentum(0.7, 0.9, nesterov=True)


@pytest.mark.sample("5-0-outer0-method0", "5-6-outer3-method3")
@pytest.mark.parametrize(
    ("every", "warmup", "outer", "method"),
    [
        (5, 0, NESTEROV, DILOCO),
        (5, 7, NESTEROV, DILOCO),  # the first block is shorter
        (6, 12, BlockMomentum(), {"kind": "BMUF"}),
        (5, 6, Average(), {"kind": "LocalSGD"}),
    ],
)
def test_the_simulation_ends_where_four_ranks_end(monkeypatch, every, warmup, outer, method):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from blocks.learning import run
    from blocks.short import SHORT, simulate

    task = replace(next(each for each in SHORT if each.name.startswith("regression")), steps=24)
    (simulated,) = simulate(task, BENCHMARKS, 0, [(every, warmup, outer)])
    ranks = run(task, BENCHMARKS, 0, {"every": every, "warmup": warmup, **method})
    assert simulated > 0
    assert simulated == pytest.approx(ranks, abs=1e-3)
