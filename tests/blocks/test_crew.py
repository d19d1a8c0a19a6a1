"""Workers that die, stall, leave and join, and what the others do meanwhile."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers.crew_workers import SECRET, Workers
from manyhands._ranks import groups
from manyhands._ranks.ranks import RankGroup
from manyhands.blocks.averaging._round import BackgroundSync
from manyhands.blocks.crew import _enrollment, _store, _transport
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._roster import Version
from manyhands.blocks.crew._store import Signer
from manyhands.errors import CrewFinished, StoreLost

AT_ONCE = 3.0  # seconds in which the others go on when a death is reported; unreported: 5


def kill_at(place, number, rounds):
    """Return a hook: this worker dies at this place once it has settled this many rounds."""

    def of(worker):
        def hook(where, crew):
            if worker == number and where == place and crew._round >= rounds:
                os.kill(os.getpid(), signal.SIGKILL)

        return hook

    return of


@pytest.mark.parametrize("place", ["steps", "exchange", "settle"])
def test_the_others_go_on_at_once_when_a_death_is_reported(store, tmp_path, place):
    with Workers(store, tmp_path, expected=4, stall=5.0) as workers:
        workers.start(range(4), hook=kill_at(place, 2, 4))
        workers.until(lambda: workers.ended() == {2: -signal.SIGKILL})
        died = time.monotonic()
        workers.shared.report_end(2)
        assert max(workers.next_kept(number, died) for number in (0, 1, 3)) < AT_ONCE
        workers.start([2])
        workers.finish_together(60)
        answers = workers.agreed()
        assert [kept for kept in answers.values()].count(False) <= 1
        back = workers.events(2, "entered")[-1]
        assert back["members"] == [0, 1, 2, 3] and back["joiners"] == [2]
        assert back["source"] == 0


def test_a_worker_that_dies_while_all_regroup_is_left_behind(store, tmp_path):
    with Workers(store, tmp_path, expected=3, stall=5.0) as workers:
        workers.start(range(3), hook=kill_at("regroup", 1, 1))
        workers.wait_for_rounds(0, 3)
        workers.start([3])  # for whose sake all regroup
        workers.until(lambda: 1 in workers.ended())
        died = time.monotonic()
        workers.shared.report_end(1)
        assert max(workers.next_kept(number, died) for number in (0, 2, 3)) < AT_ONCE
        workers.start([1])
        workers.finish_together(60)
        workers.agreed()


def test_without_a_report_silence_tells(store, tmp_path):
    with Workers(store, tmp_path, expected=3, stall=1.0) as workers:
        workers.start(range(3))
        workers.wait_for_rounds(0, 3)
        workers.kill(1)
        died = time.monotonic()
        assert max(workers.next_kept(number, died + 0.1) for number in (0, 2)) < 1.0 + 3.0
        workers.start([1])
        workers.finish_together(60)
        workers.agreed()
        assert workers.events(1, "entered")[-1]["joiners"] == [1]


@pytest.mark.parametrize(
    "place",
    [
        "steps",
        "exchange",
        *(pytest.param(p, marks=pytest.mark.long) for p in ("settle", "regroup")),
    ],
)
def test_a_stopped_worker_comes_back_with_what_it_had(store, tmp_path, place):
    def stop_itself(worker):
        def hook(where, crew):
            if worker == 1 and where == place and crew.generation == 1 and crew._round >= 3:
                os.kill(os.getpid(), signal.SIGSTOP)

        return hook

    with Workers(store, tmp_path, expected=3, stall=0.5) as workers:
        workers.start(range(3), hook=stop_itself)
        workers.wait_for_rounds(0, 3)
        if place == "regroup":
            workers.start([3])
        workers.until(lambda: workers.last(0, "entered", "members") not in (None, [0, 1, 2]))
        workers.wait_for_rounds(0, 8)
        workers.wake(1)
        workers.until(lambda: workers.last(1, "entered", "generation") > 1)
        workers.finish_together(60)
        workers.agreed()
        first, *others = workers.events(1, "entered")
        assert first["generation"] == 1
        # On a busy machine it may stall once more, and then enters another time.
        back = next(each for each in others if each["joiners"] == [each["rank"]])
        assert back["members"][back["rank"]] == 1
        assert 0 < back["version"] < workers.events(0, "done")[0]["version"]


def test_a_worker_that_comes_when_all_have_finished_gets_an_error(store, tmp_path):
    with Workers(store, tmp_path, expected=2) as workers:
        workers.start(range(2), 3)
        workers.finish()
        crew = Crew(store.address, number=1, stall=1.0)
        with pytest.raises(CrewFinished, match="the run has ended"):
            crew.join()
        assert issubclass(
            CrewFinished, SystemExit
        )  # uncaught, it prints the message and ends the script


def test_when_all_have_died_new_ones_begin_again(store, tmp_path):
    with Workers(store, tmp_path, expected=2, stall=0.5) as workers:
        workers.start(range(2), 1000)
        workers.wait_for_rounds(0, 2)
        for number in (0, 1):
            workers.kill(number)
        workers.start([0], 6, version=4)  # as from checkpoints, one older than the other
        workers.start([1], 6, version=2)
        workers.finish()
        first = [workers.events(n, "entered")[-1] for n in (0, 1)]
        assert [e["members"] for e in first] == [[0, 1]] * 2
        assert first[0]["generation"] > 1
        assert (first[0]["source"], first[0]["joiners"]) == (0, [1])
        workers.agreed()


def test_when_all_have_died_and_nothing_is_left_that_is_said(store, tmp_path):
    with Workers(store, tmp_path, expected=1, stall=0.5) as workers:
        workers.start([0], 1000)
        workers.wait_for_rounds(0, 2)
        workers.kill(0)
        crew = Crew(store.address, number=0, expected=1, stall=0.5)
        with pytest.warns(RuntimeWarning, match="all workers of this run were lost at once"):
            crew.join()
        crew.leave()


def test_a_start_waits_for_those_expected_but_not_for_ever(store, tmp_path, monkeypatch):
    monkeypatch.setattr(_enrollment, "START_PATIENCE", 0.5)
    with Workers(store, tmp_path, expected=3) as workers:
        workers.start(range(2), 3)
        workers.finish()
        assert [workers.events(n, "entered")[0]["members"] for n in (0, 1)] == [[0, 1]] * 2


def test_patience_ends_with_a_live_worker_that_does_not_come(store, tmp_path):
    def dawdle(worker):
        def hook(where, crew):
            if worker == 1 and where == "steps" and crew._round == 2 and crew.generation == 1:
                time.sleep(1.5)

        return hook

    with Workers(store, tmp_path, expected=2, stall=0.5, patience=0.7) as workers:
        workers.start(range(2), 80, dawdle, steps=0.02)
        workers.wait_for_rounds(0, 10)  # alone by now
        workers.finish()
        workers.agreed()
        assert [0] in [e["members"] for e in workers.events(0, "entered")]
        assert workers.events(1, "entered")[-1]["joiners"] == [1]


@pytest.mark.long
def test_a_decision_is_the_same_for_all_however_workers_die(store, tmp_path):
    """Each worker dies at a random call to the store, or stops for a time, again and again."""
    draw = random.Random(7)

    def die_somewhere(worker):
        seed = draw.random()  # drawn before the fork

        def hook(where, crew, calls=[None, 0]):  # noqa: B006
            if calls[0] is None:
                calls[0] = random.Random(seed).randrange(20, 400)
                original = crew._enrollment.shared.client.call

                def call(name, *args):
                    calls[1] += 1
                    if calls[1] == calls[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(name, *args)

                crew._enrollment.shared.client.call = call

        return hook

    with Workers(store, tmp_path, expected=4, stall=0.6) as workers:
        workers.start(range(4), 100_000, die_somewhere, steps=0.002)
        until, kills, stopped = time.monotonic() + 7, 0, None
        while time.monotonic() < until:
            for number, code in workers.ended().items():
                assert code == -signal.SIGKILL, workers.errors(number)
                kills += 1
                if draw.random() < 0.7:
                    workers.shared.report_end(number)
                workers.start([number], 100_000, die_somewhere, steps=0.002)
            if stopped in workers.pids and draw.random() < 0.01:
                workers.wake(stopped)
                stopped = None
            elif stopped is None and draw.random() < 0.005:
                stopped = draw.choice(list(workers.pids))
                workers.stop(stopped)
            time.sleep(0.01)
        answers = list(workers.agreed().values())
        assert kills >= 3 and answers.count(False) >= 3 and answers.count(True) >= 20


def test_a_lost_store_is_an_error_that_says_so(store, tmp_path):
    with Workers(store, tmp_path, expected=2) as workers:
        workers.start(range(2), 1000)
        workers.wait_for_rounds(0, 2)
        store.kill()
        ended = {}
        workers.until(lambda: ended.update(workers.ended()) or len(ended) == 2, 10)
        assert set(ended.values()) == {1}
        for number in (0, 1):
            assert f"the store at {store.address} is lost" in workers.errors(number)
            assert "from a checkpoint" in workers.errors(number)


def test_a_frozen_store_is_an_error_too(store, tmp_path, monkeypatch):
    monkeypatch.setattr(_store, "STORE_TIMEOUT", 1.0)
    with Workers(store, tmp_path, expected=2) as workers:
        workers.start(range(2), 1000)
        workers.wait_for_rounds(0, 2)
        os.kill(store.pid, signal.SIGSTOP)
        ended = {}
        workers.until(lambda: ended.update(workers.ended()) or len(ended) == 2, 10)
        os.kill(store.pid, signal.SIGCONT)
        assert set(ended.values()) == {1}
        assert "no answer for 1 s" in workers.errors(0) + workers.errors(1)


def test_a_store_that_was_never_there_is_an_error(monkeypatch):
    monkeypatch.setattr(_store, "STORE_TIMEOUT", 0.3)
    with pytest.raises(StoreLost, match=r"127\.0\.0\.1:9 is lost"):
        Crew("127.0.0.1:9", number=0).join()


def test_two_workers_with_one_number_are_an_error(store, tmp_path):
    with Workers(store, tmp_path, expected=2, stall=0.5) as workers:
        workers.start(range(2), 1000, steps=0.5)
        workers.until(lambda: workers.events(0, "entered") != [])
        with pytest.raises(RuntimeError, match="two workers with the number 1 are alive"):
            Crew(store.address, number=1, stall=0.5).join()


def test_the_store_does_not_fill_up(store, tmp_path):
    with Workers(store, tmp_path, expected=2) as workers:
        workers.start(range(2), steps=0.0)
        workers.wait_for_rounds(0, 3)
        for _ in range(3):
            workers.kill(1, report=True)
            workers.start([1], steps=0.0)
            workers.wait_for_rounds(1, 20)
        workers.finish_together(200)
        keys = [key.removeprefix("manyhands/") for key in workers.shared.client.call("list_keys")]
        kinds = [key.partition("/")[0] for key in keys]
        assert kinds.count("group") == 0 and kinds.count("arrived") <= 2
        assert len(keys) < 14


def test_without_a_store_a_worker_holds_rounds_alone():
    crew = Crew()
    crew.join()
    assert (crew.size, crew.rank, crew.number, crew.group, crew.joiners) == (1, 0, 0, None, ())
    rest = [False, True]
    crew.wait(lambda seconds: rest.pop(0))
    assert rest == []
    assert crew.settle(True) and not crew.regroup_due
    assert not crew.settle(False) and crew.regroup_due
    crew.regroup(Version(1))
    assert not crew.regroup_due and crew.members == (0,)
    crew.leave()
    crew.leave()


def test_what_is_missing_or_wrong_is_said(monkeypatch):
    with pytest.raises(ValueError, match="needs a unique number"):
        Crew("127.0.0.1:9")
    with pytest.raises(ValueError, match='store is "host:port"'):
        Crew("nowhere", number=0)
    with pytest.raises(ValueError, match="patience must be a finite number at least 5"):
        Crew("127.0.0.1:9", number=0, patience=1)
    monkeypatch.setenv("MANYHANDS_STALL", "soon")
    with pytest.raises(ValueError, match="MANYHANDS_STALL must be a number, got 'soon'"):
        Crew()
    monkeypatch.setenv("MANYHANDS_STALL", "2.5")
    monkeypatch.setenv("MANYHANDS_STORE", "127.0.0.1:9")
    monkeypatch.setenv("MANYHANDS_WORKER", "3")
    monkeypatch.setenv("MANYHANDS_WORKERS", "8")
    crew = Crew()
    assert (crew.store, crew.number, crew.expected, crew.stall) == ("127.0.0.1:9", 3, 8, 2.5)
    with pytest.raises(RuntimeError, match="Call join"):
        crew.settle(True)


def test_a_worker_that_gives_up_learns_that_the_others_have_kept_the_round(store, monkeypatch):
    crews = [Crew(store.address, number=number, expected=2) for number in range(2)]
    threads = [threading.Thread(target=crew.join) for crew in crews]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = crews
    answers = []

    def too_late(*_):
        answers.append(first.settle(True))  # the second has said so too: kept
        return "seen a moment after", ()

    with monkeypatch.context() as patch:
        patch.setattr(second, "_find_hindrance", too_late)
        answers.append(second.settle(True))
    assert answers == [True, True]
    for crew in crews:
        crew.leave()


@pytest.mark.long
def test_a_worker_that_ends_without_leaving_is_gone_but_not_done(store, tmp_path):
    script = "from manyhands.blocks.crew._crew import Crew\ncrew = Crew()\ncrew.join()\n1 / 0\n"
    environment = {**os.environ, "MANYHANDS_STORE": store.address, "MANYHANDS_WORKER": "0"}
    subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    with Workers(store, tmp_path, expected=1) as workers:
        roster = workers.shared.refresh()
        assert roster.dead == ("0.1",) and not roster.finished


def test_an_interface_that_this_host_lacks_is_refused_before_the_others_notice(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0,nosuch")
    crew = Crew("127.0.0.1:1", number=0, secret=SECRET)  # where no store is
    with pytest.raises(ValueError, match=r"got 'lo0,nosuch'. The host has .*lo"):
        crew.join()


def test_members_that_never_connect_say_why(store, monkeypatch, caplog):
    """As behind a firewall: all are alive, and the next generation fails like the last one."""
    failures, make = iter(range(40)), _transport.make_gloo

    def make_gloo(*args):
        if next(failures, None) is not None:
            raise RuntimeError("connection refused by the firewall")
        return make(*args)

    monkeypatch.setattr(_transport, "make_gloo", make_gloo)
    crews = [Crew(store.address, number=n, expected=2, secret=SECRET) for n in range(2)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(Crew.join, crews))
        assert crews[0].size == crews[1].size == 2
        list(threads.map(Crew.leave, crews))
    said = "cannot connect to the other workers and retries: connection refused by the firewall"
    assert any(said in record.getMessage() for record in caplog.records)


def test_what_waits_in_a_group_ends_when_one_gives_it_up(store):
    connections = [_transport.StoreConnection(store.address, Signer(SECRET)) for _ in range(2)]
    transports = [
        _transport.GlooTransport(connections[rank], "given up", rank, 2, timeout=30.0)
        for rank in range(2)
    ]
    assert all(transport.wait(40.0) and transport.group is not None for transport in transports)
    works = [
        transport.group.recv([torch.ones(3)], 1 - rank, 0)
        for rank, transport in enumerate(transports)
    ]
    began = time.monotonic()
    transports[0].abort()
    for work in works:
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()
    assert time.monotonic() - began < 10.0
    for transport in transports:
        transport.release()


def test_a_group_with_a_message_that_gloo_forgot_ends_without_a_wait(store, monkeypatch):
    """Its destructor waits for its threads, and one of those until the timeout, here 8 s."""
    before = threading.enumerate()
    connections = [_transport.StoreConnection(store.address, Signer(SECRET)) for _ in range(2)]
    transports = [
        _transport.GlooTransport(connections[rank], "forgotten", rank, 2, timeout=8.0)
        for rank in range(2)
    ]
    assert all(transport.wait(40.0) and transport.group is not None for transport in transports)
    work = transports[0].group.allreduce([torch.ones(3)])
    with monkeypatch.context() as patch:  # so that nothing ends it
        patch.setattr(_transport, "shut_connections", lambda epolls: set())
        patch.setattr(groups, "shut_connections", lambda epolls: set())
        began = time.monotonic()
        transports[0].release()
        gc.collect()
        assert time.monotonic() - began < 6.0
        with pytest.raises(RuntimeError, match="Timed out"):
            work.wait()
    transports[1].release()
    until = time.monotonic() + 20.0
    while any(t.name == "manyhands end" and t not in before for t in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_round_that_failed_holds_no_group():
    class Group:
        pass

    def sync_round(workers):
        group = workers.group
        raise RuntimeError(f"of {group}")

    group = Group()
    seen = weakref.ref(group)
    gc.disable()
    try:
        background = BackgroundSync(sync_round, RankGroup(2, 0, group), None)
        del group
        background.run()
        assert seen() is None
    finally:
        gc.enable()
    lines = traceback.format_exception(background.error)
    assert "in sync_round" in "".join(lines) and "of <" in lines[-1]
