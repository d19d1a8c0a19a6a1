"""Which workers may join a crew, and what one that leaves in mid-block costs the others."""

import time

import pytest
import torch
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.crew_workers import Workers
from manyhands.blocks import _sync
from manyhands.blocks.crew._enrollment import MemberFacts
from manyhands.errors import RanksDisagree

STEPS = 300
OPTIONS = {"every": 5, "overlap": 0, "codec": "float32"}


class Net(nn.Module):
    """Two weights that neither shape nor type tells apart, and one that is not square."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3, 3))
        self.second = nn.Parameter(torch.zeros(3, 3))
        self.wide = nn.Parameter(torch.zeros(2, 6))


def as_it_is(model):
    return list(model.parameters())


def in_float64(model):
    return list(model.double().parameters())


def in_another_order(model):
    return list(model.parameters())[::-1]


def two_exchanged(model):
    return [model.second, model.first, model.wide]


def transposed(model):
    model.wide = nn.Parameter(torch.zeros(6, 2))
    return list(model.parameters())


class Joiners(Workers):
    """Workers that go down slopes of 1 and 2: after n steps `first` is -n, or work is lost."""

    def work(self, make_crew, log, steps=STEPS, options=OPTIONS, params=as_it_is, harm=None):
        crew = make_crew()
        if harm is not None:
            harm(crew.number)
        train(crew, log, steps, options, params, self.folder / "slow")

    def step(self, number, steps):
        """Wait until a worker has taken this many steps."""
        self.until(lambda: (self.last(number, "step", "steps") or 0) >= steps, 30.0)


def train(crew, log, steps, options, params, slow):
    options = dict(options)
    calls_at = options.pop("calls_at", lambda steps: False)  # of synchronize(), after a step
    calls_before = options.pop("calls_before", lambda steps: False)
    model = Net()
    optimizer = mh.LocalSGD(SGD(params(model), lr=1.0), model=model, crew=crew, **options)
    log("in", steps=optimizer.steps, size=crew.size)

    def synchronize():
        optimizer.synchronize()
        log("together", steps=optimizer.steps, first=model.first.tolist())

    while optimizer.steps < steps:
        if calls_before(optimizer.steps):
            synchronize()
        model.first.grad = torch.ones_like(model.first)
        model.second.grad = 2 * torch.ones_like(model.second)
        model.wide.grad = torch.ones_like(model.wide)
        optimizer.step()
        if calls_at(optimizer.steps):
            synchronize()
        log("step", steps=optimizer.steps, size=crew.size)
        time.sleep(0.1 if slow.exists() else 0.002)
    optimizer.finish()
    seen = optimizer.snapshot()
    values = {
        name: [float(p.detach().min()), float(p.detach().max())]
        for name, p in model.named_parameters()
    }
    log("done", **values, **{name: seen[name] for name in ("undone", "rounds", "dropped")})


BAD = [
    ({**OPTIONS, "every": 6}, as_it_is, "every: 6 here, 5 in the run"),
    ({**OPTIONS, "overlap": 1}, as_it_is, "overlap: 1 here, 0 in the run"),
    ({**OPTIONS, "codec": "int8"}, as_it_is, "codec: int8 here, float32 in the run"),
    (OPTIONS, in_float64, "parameter 0: first (3, 3) float64 on cpu here"),
    (OPTIONS, two_exchanged, "parameter 0: second (3, 3) float32 on cpu here, first (3, 3)"),
    (OPTIONS, in_another_order, "parameter 0: wide (2, 6) float32 on cpu here, first (3, 3)"),
    (OPTIONS, transposed, "wide (6, 2) float32 on cpu here, wide (2, 6) float32 on cpu in the run"),
]


def test_bad_joiners_are_refused_alone_by_name_and_the_others_lose_nothing(store, tmp_path):
    with Joiners(store, tmp_path, expected=3, stall=5.0) as workers:
        workers.start(range(3))
        workers.step(0, 20)
        workers.kill(2, report=True)
        (tmp_path / "slow").touch()
        for options, params, message in BAD:
            workers.start([2], options=options, params=params)
            ended = {}
            workers.until(lambda ended=ended: ended.update(workers.ended()) or 2 in ended, 60.0)
            assert ended == {2: 1}, workers.story()
            assert "worker 2 was not let in" in workers.errors(2)
            assert message in workers.errors(2)
            assert workers.shared.refresh().refused == (2,)
        assert workers.last(0, "step", "steps") < STEPS, "the others have not waited for it"
        workers.start([2])
        workers.present(3)  # none of the others ends before it is in
        (tmp_path / "slow").unlink()
        workers.finish(60.0)
        done = [workers.events(number, "done")[-1] for number in range(3)]
        for e in done:
            assert (e["first"], e["second"]) == ([-STEPS] * 2, [-2 * STEPS] * 2)
        assert {e["undone"] for e in done[:2]} <= {0, 1}  # the round that the killed one missed
        assert workers.shared.refresh().refused == ()


def test_the_first_to_come_says_what_the_others_must_have(store, tmp_path):
    with Joiners(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0], options={**OPTIONS, "every": 6})
        workers.until(lambda: workers.shared.refresh().waiting != ())
        workers.start([1])
        workers.until(lambda: workers.ended() == {1: 1})
        assert "every: 5 here, 6 in the run" in workers.errors(1)


def test_names_do_not_matter_where_one_model_is_wrapped_and_do_where_they_are_moved():
    def facts(*names, prefix=""):
        model = nn.Module()
        inner = nn.Module() if prefix else model
        for name in names:
            inner.register_parameter(name, nn.Parameter(torch.zeros(2)))
        if prefix:
            model.add_module(prefix, inner)
        return MemberFacts.of({}, list(model.parameters()), [], [model])

    bare, wrapped, moved = facts("a", "b"), facts("a", "b", prefix="inside"), facts("b", "a")
    assert bare.differences(wrapped.text, wrapped.digest) == []
    unknown = MemberFacts.of({}, [nn.Parameter(torch.zeros(2)) for _ in range(2)], [], [])
    assert bare.differences(unknown.text, unknown.digest) == []
    assert len(bare.differences(moved.text, moved.digest)) == 2
    assert "description" in bare.differences("{}", moved.digest)[0]  # a stranger's


def test_one_that_comes_while_the_others_synchronize_takes_part(store, tmp_path):
    """The mean in flight lets it in, and synchronize() holds a further round."""
    options = {"every": 6, "overlap": 3, "fragments": 2, "calls_at": lambda n: n % 6 in (1, 4)}
    with Joiners(store, tmp_path, expected=2, stall=5.0) as workers:
        (tmp_path / "slow").touch()
        workers.start([0, 1], options=options)
        workers.step(0, 3)
        workers.start([2], options=options)
        workers.until(lambda: bool(workers.events(2, "in")), 30.0)
        (tmp_path / "slow").unlink()
        workers.finish(60.0)
        done = [workers.events(number, "done")[-1] for number in range(3)]
        assert workers.events(2, "in")[0]["steps"] % 6 in (1, 4)  # let in by synchronize()
        for e in done:
            assert e["first"] == close_to(-STEPS) and e["undone"] == 0


OVERLAP = {"every": 6, "overlap": 3}
FRAGMENTS = {"every": 6, "fragments": 2}


@pytest.mark.long
@pytest.mark.parametrize("call", ["calls_at", "calls_before"])
@pytest.mark.parametrize("looks", [True, False], ids=["looks", "does not look"])
@pytest.mark.parametrize("options", [OVERLAP, FRAGMENTS], ids=str)
def test_one_that_a_step_lets_in_takes_part_when_the_others_synchronize_after_it(
    store, tmp_path, options, looks, call
):
    """It is in a step of its own by then, unless its script synchronizes before a step."""
    go = tmp_path / "go"

    def harm(number):
        if number == 0 and not looks:  # it finds out only in its next round
            _sync.Sync._is_awaited = lambda self: False
        original = _sync.Sync.count_step

        def count_step(self):  # the round after this step lets the joiner in
            while self.state.steps == 14 and not go.exists():
                time.sleep(0.01)
            original(self)

        _sync.Sync.count_step = count_step

    options = {**options, call: lambda n: n == 15}
    with Joiners(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([1, 2], steps=60, options=options, harm=harm)
        workers.step(1, 14)
        workers.start([0], steps=60, options=options, harm=harm)
        workers.until(lambda: workers.shared.refresh().waiting != (), 30.0)
        go.touch()
        workers.finish(60.0)
        assert workers.events(0, "in")[0]["steps"] == 15
        for number in range(3):
            at = workers.events(number, "together")
            assert [(e["steps"], e["first"]) for e in at] == [(15, [[-15.0] * 3] * 3)]
            e = workers.events(number, "done")[-1]
            assert (e["first"], e["second"]) == ([-60] * 2, [-120] * 2)
            assert e["dropped"] == 0 or (number == 0 and call == "calls_at")
            assert e["dropped"] <= 6


def test_one_that_is_too_late_for_synchronize_holds_no_round_of_its_own(store, tmp_path):
    """The others have held theirs, and are in a block: a further round would find nobody there."""

    def sleeps(number):
        if number == 2:
            original = _sync.Sync.count_step

            def count_step(self):
                if self.state.own == 14:
                    time.sleep(4.0)
                original(self)

            _sync.Sync.count_step = count_step

    options = {"every": 6, "overlap": 3, "calls_at": lambda n: n == 15}
    with Joiners(store, tmp_path, expected=3, stall=1.0, patience=1.5) as workers:
        workers.start(range(3), steps=120, options=options, harm=sleeps)
        workers.until(lambda: (workers.last(0, "step", "steps") or 0) >= 14)
        (tmp_path / "slow").touch()
        workers.until(lambda: (workers.last(2, "step", "steps") or 0) >= 24, 30.0)
        (tmp_path / "slow").unlink()
        workers.finish(60.0)
        done = [workers.events(number, "done")[-1] for number in range(3)]
        for e in done:  # it joins three steps after an anchor: the mean may lack one
            assert e["first"] == done[0]["first"] in ([-120] * 2, [-119] * 2)
        assert done[0]["dropped"] == 0 < done[2]["dropped"] <= 15


def test_many_differences_are_cut_short():
    ours = MemberFacts.of({"every": 1}, [torch.zeros(2)] * 9, [torch.zeros(1)], [])
    run = MemberFacts.of({}, [torch.zeros(3)] * 8, [], [])
    found = ours.differences(run.text, run.digest)
    assert found[0] == "every: 1 here, missing in the run"
    assert found[1] == "the number of parameters: 9 here, 8 in the run"
    assert "and further parameters" in found and len(found) == 7


# -- leaving in mid-block --------------------------------------------------------------------------


def close_to(value):
    """Least and largest: int8 rounds."""
    return pytest.approx([value] * 2, rel=2e-3)


LEAVING = [
    {"every": 5},
    {"every": 6, "codec": "int8"},
    {"every": 6, "overlap": 2, "fragments": 3},
]


@pytest.mark.sample("{'every': 5}", "{'every': 6, 'overlap': 2, 'fragments': 3}")
@pytest.mark.parametrize("options", LEAVING, ids=str)
def test_a_worker_that_leaves_in_mid_block_costs_the_others_no_more_than_a_death(
    store, tmp_path, options
):
    with Joiners(store, tmp_path, expected=3, stall=5.0) as workers:
        workers.start([0, 2], options=options)
        workers.start([1], steps=27, options=options)  # of blocks of 5 and 6
        ended = {}
        workers.until(lambda: ended.update(workers.ended()) or 1 in ended, 40.0)
        assert ended == {1: 0}, workers.errors(1)
        workers.finish(60.0)
        done = {number: workers.events(number, "done")[-1] for number in range(3)}
        for number in (0, 2):
            assert done[number]["first"] == close_to(-STEPS)  # none of their steps is missing
            assert done[number]["undone"] <= 1
        at = done[1]["first"]
        assert at[0] == at[1] and -27 < at[0] < 0  # the last anchor


@pytest.mark.parametrize("options", LEAVING, ids=str)
def test_workers_that_are_all_done_in_mid_block_hold_a_last_round(store, tmp_path, options):
    with Joiners(store, tmp_path, expected=3, stall=5.0) as workers:
        workers.start(range(3), steps=28, options=options)
        workers.finish(40.0)
        for number in range(3):
            e = workers.events(number, "done")[-1]
            assert e["first"] == close_to(-28) and e["undone"] == 0


def test_of_workers_that_are_done_after_different_steps_the_last_ones_hold_a_round(store, tmp_path):
    with Joiners(store, tmp_path, expected=3, stall=5.0) as workers:
        workers.start([0], steps=27, options={"every": 50})
        workers.start([1, 2], steps=29, options={"every": 50})
        workers.finish(40.0)
        assert [workers.events(n, "done")[-1]["first"] for n in (1, 2)] == [[-29] * 2] * 2


def test_one_that_dies_while_all_are_done_is_not_waited_for(store, tmp_path):
    with Joiners(store, tmp_path, expected=3, stall=5.0) as workers:
        # A block that ends long after the kill: at its end worker 2 would hold a round with them.
        workers.start([0, 1], steps=28, options={"every": 10_000})
        workers.start([2], steps=10_000, options={"every": 10_000})
        workers.until(lambda: len(workers.shared.refresh().closing) == 2)
        workers.kill(2, report=True)
        workers.finish(40.0)
        assert [workers.events(n, "done")[-1]["first"] for n in (0, 1)] == [[-28] * 2] * 2


def test_one_that_differs_in_the_middle_of_a_run_goes_alone(store, tmp_path):
    """One step too many: it gets the error, and the others repeat the round without it."""

    def skips(number):
        if number == 1:
            original = _sync.Sync._write_report

            def write_report(self, *args, **kwargs):
                report = original(self, *args, **kwargs)
                return report._replace(step=report.step + (report.step >= 20))

            _sync.Sync._write_report = write_report

    with Joiners(store, tmp_path, expected=3, stall=5.0) as workers:
        workers.start(range(3), harm=skips)
        ended = {}
        workers.until(lambda: ended.update(workers.ended()) or ended, 40.0)
        assert ended == {1: 1}, workers.story()
        assert "ranks have different numbers of steps at a sync round" in workers.errors(1)
        workers.finish(60.0)
        assert [workers.events(n, "done")[-1]["first"] for n in (0, 2)] == [[-STEPS] * 2] * 2


def test_the_odd_ones_are_those_that_differ_from_most():
    assert RanksDisagree("", [7, 8, 7]).odd == {1}
    assert RanksDisagree("", [8, 7, 7]).odd == {0}
    assert RanksDisagree("", [7, 8]).odd == {1}
    assert RanksDisagree("", [7, 8, 9, 9]).odd == {0, 1}
