"""The contract: whatever is sharded and however batches are made up, the numbers are the plain
run's. A new optimizer, or a new way to use one, joins by a line in a list."""

import pytest

from helpers.ranks import run_ranks
from helpers.sharding_oracle import AROUND_OSS, OPTIMIZERS, assert_same, copied, train, train_alone

ACCUMULATION = {"none": (1, True), "no_sync": (3, True), "every pass averaged": (3, False)}


@pytest.mark.sample("SGD-1", "Muon and AdamW-3")
@pytest.mark.parametrize(
    "workers", [1, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_plain_run(optimizer, workers):
    build = OPTIMIZERS[optimizer]

    def run():
        result = {}
        for way in AROUND_OSS:
            for name, (passes, no_sync) in ACCUMULATION.items():
                _, module = train(build, way, passes, no_sync)
                result[f"{way}, {name}"] = copied(module.parameters())
        return result

    ranks = run_ranks(workers, run)
    for way in AROUND_OSS:
        for name, (passes, _) in ACCUMULATION.items():
            _, expected = train_alone(build, workers, passes)
            what = f"{way}, {name}"
            exact = {"rtol": 0, "atol": 0} if workers == 1 else {}
            assert_same([r[what] for r in ranks], list(expected.parameters()), what, **exact)
