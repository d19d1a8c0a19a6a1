"""A crew whose members change as a warm-up ends: all hold the same rounds, and have one anchor.

Every moment is forced. A member waits at a place in its step until a worker asks to join, so that
the round that follows ends the generation, and the members regroup there.
"""

import hashlib
import os
import signal
import time
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import manyhands as mh
from helpers.crew_workers import Workers
from manyhands.blocks import _sync
from manyhands.blocks.averaging import _round
from manyhands.blocks.crew._roster import number_of

STEPS = 24
Kind = namedtuple("Kind", "make options warmup inner")


def diloco(warmup, inner=SGD, **options):
    return Kind(mh.DiLoCo, {"every": 4, "warmup": warmup, **options}, warmup, inner)


def bmuf(warmup, inner=SGD, **options):
    options = {"global_sync_iter": 4, "warmup_iterations": warmup, **options}
    return Kind(mh.BMUF, options, warmup, inner)


SHARED = {
    "shared": diloco(6),
    "of one step": diloco(1),
    "overlap and fragments": diloco(6, overlap=1, fragments=2),
    "own steps": diloco(6, every=mh.Seconds(0.1, first=4, own_steps=True)),
    "Adam": diloco(6, inner=Adam),
    "bmuf": bmuf(6, local_warmup=False),
}
LOCAL = {
    "local": diloco(6, local_warmup=True),
    "local Adam": diloco(6, inner=Adam, local_warmup=True),
    "local bmuf": bmuf(6),
    "local bmuf, average_sync": bmuf(6, inner=Adam, average_sync=True),
    "local bmuf of one step": bmuf(1),
}


class WarmupWorkers(Workers):
    """Workers that log what they hold after each step."""

    def work(self, make_crew, log, kind, harm=None, steps=STEPS, before_step=None):
        crew = make_crew()
        if harm is not None:
            harm(crew.number)
        train(crew, log, kind, steps, before_step)

    def touched(self, name):
        self.until(lambda: (self.folder / name).exists())

    def finished_alike(self):
        """Wait until all have ended, and check their states; return their last events."""
        self.finish(25.0)
        have_same_anchors([e for number in self.incarnations for e in self.events(number)])
        return [self.events(number, "done")[-1] for number in self.incarnations]


def have_same_anchors(events):
    """Check that workers have the same bits after equally many rounds."""
    anchors, params = {}, {}
    for e in events:
        if e["anchored"]:
            assert anchors.setdefault(e["rounds"], e["anchor"]) == e["anchor"], (e, anchors)
        if e["anchored"] and e["at_anchor"]:
            found = e["steps"], e["params"]
            assert params.setdefault(e["rounds"], found) == found, (e, params)


def train(crew, log, kind, steps, before_step):
    torch.manual_seed(crew.number)
    model = nn.Linear(3, 2)
    inner = kind.inner(model.parameters(), lr=0.1)
    optimizer = kind.make(inner, model=model, crew=crew, **kind.options)
    tell(log, "in", optimizer, model)
    while optimizer.steps < steps:
        if before_step is not None:
            before_step(optimizer)
        optimizer.zero_grad()
        x = torch.randn(4, 3)
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        tell(log, "step", optimizer, model)
        time.sleep(0.005)
    optimizer.finish()
    tell(log, "done", optimizer, model)


def tell(log, event, optimizer, model):
    sync, inner = optimizer._sync, optimizer.optimizer.state.values()
    held = [t for bucket in sync.anchor.buckets for t in [bucket.anchor, *bucket.memories]]
    log(
        event,
        steps=optimizer.steps,
        own=optimizer.own_steps,
        rounds=optimizer.rounds,
        anchored=sync.state.anchor_in_use,
        at_anchor=not sync.state.diverged,
        anchor=checksum(held),
        params=checksum(model.parameters()),
        undone=optimizer.snapshot()["undone"],
        inner_steps=max((int(state.get("step", 0)) for state in inner), default=0),
        largest=max(float(param.detach().abs().max()) for param in model.parameters()),
    )


def checksum(tensors):
    found = hashlib.sha1()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


# -- forced moments --------------------------------------------------------------------------------


def before(method, moment, action):
    """Make `action(sync)` happen once, before the first call of a method of Sync at this moment."""
    original, done = getattr(_sync.Sync, method), []

    def forced(self, *args, **kwargs):
        if not done and moment(self):
            done.append(True)
            action(self)
        return original(self, *args, **kwargs)

    setattr(_sync.Sync, method, forced)


def wait_for_a_joiner(folder):
    """Return an action: ask for a joiner, so that the next round is its generation's last."""

    def wait(sync):
        (folder / "come").touch()
        shared = sync.members.crew._enrollment.shared
        until = time.monotonic() + 15
        while not shared.refresh().present(set()):
            assert time.monotonic() < until, "nobody has come"
            time.sleep(0.005)

    return wait


def stop_here(folder):
    """Return an action: be stopped, as if the machine slept."""

    def stop(_):
        (folder / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    return stop


def die_in_the_round_that_ends(warmup, before_that=lambda: None):
    """Kill this worker in the round after the last step of the warm-up."""
    original = _round.SyncRound._send

    def fatal(self, *args, **kwargs):
        if self.report.step == warmup:
            before_that()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    _round.SyncRound._send = fatal


# -- a joiner --------------------------------------------------------------------------------------


def come_after_step(step, folder):
    """Return a harm: one joins after this step of a shared warm-up: its mean ends a generation."""

    def harm(_):
        at = step - 1
        before("average_gradients", lambda sync: sync.state.own == at, wait_for_a_joiner(folder))

    return harm


@pytest.mark.sample("shared", "overlap and fragments", "bmuf")
@pytest.mark.parametrize("name", SHARED)
def test_one_that_comes_after_the_last_step_of_a_warm_up_takes_part_in_the_round_that_ends_it(
    store, tmp_path, name
):
    kind = SHARED[name]
    with WarmupWorkers(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0, 1], kind, come_after_step(kind.warmup, tmp_path))
        workers.touched("come")
        workers.start([2], kind)
        assert {e["undone"] for e in workers.finished_alike()} == {0}
        joined = workers.events(2, "in")[0]
        others = [workers.events(number, "step")[kind.warmup - 1] for number in (0, 1)]
        assert joined["steps"] == kind.warmup and joined["own"] == 0
        assert {e["params"] for e in others} == {joined["params"]}


@pytest.mark.parametrize("step", [1, 5])
def test_one_that_comes_inside_of_a_warm_up_averages_gradients_from_the_next_step_on(
    store, tmp_path, step
):
    kind = SHARED["shared"]
    with WarmupWorkers(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0, 1], kind, come_after_step(step, tmp_path))
        workers.touched("come")
        workers.start([2], kind)
        assert {e["undone"] for e in workers.finished_alike()} == {0}
        joined = workers.events(2, "in")[0]
        assert joined["steps"] == step
        assert joined["params"] == workers.events(0, "step")[step - 1]["params"]
        after = [workers.events(number, "step") for number in (0, 2)]
        assert after[0][step]["params"] == after[1][0]["params"]


@pytest.mark.sample("shared", "bmuf", "local bmuf of one step")
@pytest.mark.parametrize("name", [*SHARED, *LOCAL])
def test_one_that_comes_in_the_round_that_ends_a_warm_up_begins_with_the_first_block(
    store, tmp_path, name
):
    kind = {**SHARED, **LOCAL}[name]

    def harm(_):
        at = kind.warmup
        before("after_step", lambda sync: sync.state.own == at, wait_for_a_joiner(tmp_path))

    with WarmupWorkers(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0, 1], kind, harm)
        workers.touched("come")
        workers.start([2], kind)
        assert {e["undone"] for e in workers.finished_alike()} == {0}
        assert workers.events(2, "in")[0]["steps"] == kind.warmup


@pytest.mark.sample("no warm-up", "local")
@pytest.mark.parametrize(
    "kind",
    [diloco(0), diloco(1), diloco(6), diloco(6, local_warmup=True)],
    ids=["no warm-up", "one step", "shared", "local"],
)
def test_one_that_comes_at_step_0_begins_as_the_others_do(store, tmp_path, kind):
    def harm(_):
        before("transfer_state", lambda _: True, wait_for_a_joiner(tmp_path))

    with WarmupWorkers(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0, 1], kind, harm)
        workers.touched("come")
        workers.start([2], kind)
        assert {e["undone"] for e in workers.finished_alike()} == {0}
        begun = [workers.events(number, "in")[0] for number in range(3)]
        assert {e["steps"] for e in begun} == {0}
        assert {e["params"] for e in begun} == {begun[0]["params"]}


# -- a death, and a member that comes back ---------------------------------------------------------

EACH = ["shared", "of one step", "overlap and fragments", "own steps", *LOCAL]


def wait_for_the_return_of(number, step, then=lambda optimizer: None):
    """Return a `before_step`: none goes on from this step before worker `number` is back."""

    def before_step(optimizer):
        then(optimizer)
        if optimizer.steps == step:
            shared = optimizer._sync.members.crew._enrollment.shared
            until = time.monotonic() + 15
            while not is_in(shared.refresh(), number):
                assert time.monotonic() < until, f"worker {number} has not come back"
                time.sleep(0.005)

    return before_step


def is_in(roster, number):
    """Return whether the worker is a member, or will be one after the next round."""
    return number in {number_of(id) for id in {*roster.ids} - roster.gone} | {
        member.number for member in roster.present(set())
    }


def synchronize_at(step):
    def before_step(optimizer):
        if optimizer.steps == step:
            optimizer.synchronize()

    return before_step


@pytest.mark.sample("shared-0", "own steps-0", "local Adam-1", "local bmuf of one step-1")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", EACH)
def test_the_round_that_ends_a_warm_up_is_repeated_when_a_member_dies_and_another_comes(
    store, tmp_path, name, victim
):
    """Worker 0's parameters are those that the others take."""
    kind = {**SHARED, **LOCAL}[name]

    def harm(number):
        if number == victim:
            at = kind.warmup
            before("after_step", lambda sync: sync.state.own == at, wait_for_a_joiner(tmp_path))
            die_in_the_round_that_ends(kind.warmup)

    with WarmupWorkers(store, tmp_path, expected=3, stall=5.0) as workers:
        # A joiner agrees with the others whether it has moved from the anchor.
        calls = wait_for_the_return_of(victim, kind.warmup + 2, then=synchronize_at(kind.warmup))
        workers.start(range(3), kind, harm, before_step=calls)
        workers.touched("come")
        workers.start([3], kind, before_step=calls)
        workers.until(lambda: workers.ended() == {victim: -signal.SIGKILL})
        workers.shared.report_end(victim)
        workers.start([victim], kind, before_step=calls)
        workers.finished_alike()
        assert {workers.last(n, "done", "undone") for n in {1, 2} - {victim}} == {1}
        assert workers.events(3, "in")[0]["steps"] == kind.warmup
        begun = [n for n in range(3) if n != victim]
        states = [workers.events(n, "step")[kind.warmup - 1] for n in begun]
        assert {e["params"] for e in states} == {workers.events(3, "in")[0]["params"]}


def test_one_that_missed_the_last_mean_of_a_warm_up_comes_back_for_the_round_that_ends_it(
    store, tmp_path
):
    """It was stopped before that mean, and sets nobody back by a step."""
    kind = SHARED["shared"]

    def harm(number):
        last = kind.warmup - 1
        if number == 1:
            before("average_gradients", lambda sync: sync.state.own == last, stop_here(tmp_path))
        else:
            missed = lambda sync: sync.state.own == last and sync.members.crew.size == 2  # noqa: E731
            before("_average_once", missed, wait_for_a_joiner(tmp_path))

    with WarmupWorkers(store, tmp_path, expected=3, stall=0.8) as workers:
        workers.start(range(3), kind, harm)
        workers.touched("come")
        workers.wake(1)
        workers.finished_alike()
        for number in (0, 2):  # each step once
            assert [e["steps"] for e in workers.events(number, "step")] == [*range(1, STEPS + 1)]
        assert workers.events(1, "step")[kind.warmup - 1]["steps"] == kind.warmup + 1


STOPS = {"before its last mean": "average_gradients", "after its last step": "count_step"}


@pytest.mark.sample(
    "shared-before its last mean",
    "overlap and fragments-before its last mean",
    "own steps-after its last step",
)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, where) for name in ("shared", "overlap and fragments") for where in STOPS),
        ("own steps", "after its last step"),
        *(pytest.param(name, "after its last step", marks=pytest.mark.long) for name in LOCAL),
    ],
)
def test_one_that_missed_the_end_of_a_warm_up_comes_back_into_a_block(store, tmp_path, name, where):
    kind = {**SHARED, **LOCAL}[name]

    def harm(number):
        if number == 1:
            last = kind.warmup - 1
            before(STOPS[where], lambda sync: sync.state.own == last, stop_here(tmp_path))

    with WarmupWorkers(store, tmp_path, expected=3, stall=0.8) as workers:
        calls = wait_for_the_return_of(1, 100)
        workers.start(range(3), kind, harm, steps=120, before_step=calls)
        workers.until(lambda: (workers.last(0, "step", "rounds") or 0) >= 3)
        workers.wake(1)
        workers.finished_alike()
        back = next(e for e in workers.events(1, "step") if e["own"] == kind.warmup)
        assert back["steps"] > kind.warmup and back["rounds"] >= 3
        if kind.options.get("local_warmup"):  # its moments are of parameters that it has left
            assert back["inner_steps"] == 0


def test_one_that_comes_back_inside_of_a_warm_up_keeps_its_old_gradients_to_itself(store, tmp_path):
    """They are of parameters that the others have left."""
    kind = diloco(80)

    def harm(number):
        def stop_with_large_gradients(sync):
            for param in sync.anchor.params:
                param.grad.fill_(1e6)
            stop_here(tmp_path)(sync)

        if number == 1:
            moment = lambda sync: sync.state.own == 2  # noqa: E731
            before("average_gradients", moment, stop_with_large_gradients)

    with WarmupWorkers(store, tmp_path, expected=3, stall=0.8) as workers:
        calls = wait_for_the_return_of(1, 70)
        workers.start(range(3), kind, harm, steps=100, before_step=calls)
        workers.until(lambda: (workers.last(0, "step", "steps") or 0) >= 6)
        workers.wake(1)
        workers.finished_alike()
        back = workers.events(1, "step")[2]
        assert back["own"] == 3 and 6 < back["steps"] <= kind.warmup
        assert max(e["largest"] for n in range(3) for e in workers.events(n)) < 100.0


# -- other ends, and other beginnings --------------------------------------------------------------


IN_A_BLOCK = {  # after 22 steps
    **{name: SHARED[name] for name in ("shared", "overlap and fragments")},
    "own steps": diloco(6, every=mh.Seconds(60, first=4, own_steps=True)),
    "local bmuf": LOCAL["local bmuf"],
}


@pytest.mark.sample("shared", "local bmuf")
@pytest.mark.parametrize("name", IN_A_BLOCK)
def test_one_may_come_in_the_last_round_of_finish(store, tmp_path, name):
    kind, steps = IN_A_BLOCK[name], 22

    def harm(_):
        before("close", lambda _: True, wait_for_a_joiner(tmp_path))

    with WarmupWorkers(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0, 1], kind, harm, steps=steps)
        workers.touched("come")
        workers.start([2], kind, steps=steps)
        done = workers.finished_alike()
        assert {(e["anchor"], e["params"]) for e in done} == {
            (done[0]["anchor"], done[0]["params"])
        }
