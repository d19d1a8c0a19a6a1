"""A checkpoint of any sharding on any number of workers loads into any other, bit for bit."""

import itertools

import pytest

import manyhands as mh
from helpers.checkpoint_oracle import ADAFACTOR, ADAMW, LAMB, SGD, Setup, assert_equal
from helpers.ranks import run_ranks
from helpers.ways import WAYS

WORLDS = (1, 2, 3, 4)
STEPS = 3
KINDS = {"AdamW": ADAMW, "SGD": SGD}


def written(folder, way, kind, rule=None):
    """Train, save, and go on: what was saved, and what came of it."""
    setup = Setup(way, kind, rule=rule).train(STEPS, draw=True)
    saved = setup.held()
    mh.save(folder, **setup.given(), step=STEPS, way=way)
    return saved, setup.train(2, start=STEPS, draw=True).held()


def kind_of(way, workers):
    return ("AdamW", "SGD")[(list(WAYS).index(way) + workers) % 2]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkpoint of each way on each number of workers, what it holds, and what came of it."""
    folder = tmp_path_factory.mktemp("sources")

    def write_all(workers):
        return [
            written(folder / f"{way}{workers}", way, KINDS[kind_of(way, workers)]) for way in WAYS
        ]

    found = {}
    for workers in WORLDS:
        for way, result in zip(WAYS, run_ranks(workers, write_all, workers)[0], strict=True):
            found[way, workers] = (folder / f"{way}{workers}", *result)
    return found


@pytest.mark.parametrize(
    "there", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 4))], ids=str
)
def test_any_to_any(sources, there):
    def read_all():
        later = []
        for to, kind in itertools.product(WAYS, KINDS):
            setup = Setup(to, KINDS[kind], seed=7).train(1)
            for (way, workers), (folder, saved, went_on) in sources.items():
                if kind_of(way, workers) != kind:
                    continue
                where = f"{way} on {workers} -> {to} on {there}"
                assert mh.load(folder, **setup.given()) == {"step": STEPS, "way": way}
                assert_equal(setup.held(), saved, where)
                if (way, workers) == (to, there):
                    mine = setup.train(2, STEPS, draw=True).held()
                    assert_equal(mine, went_on, where)
                elif (list(WAYS).index(way) + workers) % 4 == 0:
                    later.append((f"{way}{workers}", where, setup.train(2, STEPS).held()))
        return later

    first = {}
    for source, where, held in run_ranks(there, read_all, timeout=300)[0]:
        assert_equal(held, first.setdefault(source, held), where, rtol=2e-3, atol=2e-4)


@pytest.mark.long
def test_torchs_fully_shard_is_as_good_as_ours(tmp_path):
    def read():
        setups = [Setup(way, seed=7).train(1) for way in ("fully_shard", "FSDP")]
        for way, setup in zip(("FSDP", "fully_shard"), setups, strict=True):
            mh.load(tmp_path / way, **setup.given())
            assert_equal(setup.held(), saved[way], way)

    saved = {
        w: run_ranks(2, written, tmp_path / w, w, ADAMW)[0][0] for w in ("FSDP", "fully_shard")
    }
    run_ranks(3, read)


@pytest.mark.parametrize("kind", [LAMB, ADAFACTOR], ids=["LAMB", "Adafactor"])
def test_state_of_whole_parameters(kind, tmp_path):
    """It has other shapes than the parameter's, numbers that are no tensors, and one owner."""

    def read(folder, saved):
        for to in ("plain", "OSS", "ShardedDataParallel"):
            setup = Setup(to, kind, seed=7).train(1)
            mh.load(folder, **setup.given())
            assert_equal(setup.held(), saved, to)

    for way, workers in (("plain", 1), ("OSS", 3)):
        saved, _ = run_ranks(workers, written, tmp_path / way, way, kind)[0]
        for there in (1, 2):
            run_ranks(there, read, tmp_path / way, saved)


@pytest.mark.sample("kind0-AdaScale-3-plain", "kind1-AdamScale-3-plain", "kind1-AdamScale-3-FSDP")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(("kind", "rule"), [(SGD, mh.AdaScale), (ADAMW, mh.AdamScale)])
def test_a_rule_goes_on_with_its_averages(way, workers, kind, rule, tmp_path):
    def scaled(optimizer):
        return rule(optimizer, smoothing=0.5)

    def go():
        setup = Setup(way, kind, rule=scaled).train(STEPS, draw=True)
        mh.save(tmp_path / "run", **setup.given(), step=STEPS)
        after = setup.train(2, STEPS, draw=True)
        expected = after.held(), after.optimizer.snapshot()["progress"], after.optimizer.gain()
        del after, setup
        again = Setup(way, kind, seed=5, rule=scaled).train(1)
        mh.load(tmp_path / "run", **again.given())
        again.train(2, STEPS, draw=True)
        assert_equal(again.held(), expected[0])
        return expected[1:], (again.optimizer.snapshot()["progress"], again.optimizer.gain())

    for expected, mine in run_ranks(workers, go):
        assert mine == expected
        assert workers == 1 or expected[0] != STEPS + 2
