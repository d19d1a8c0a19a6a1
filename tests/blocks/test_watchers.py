"""Who reads whose heartbeat in a large crew, and how all learn of one that stands still."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from threading import enumerate as enumerate_threads

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.crew_workers import SECRET, Store
from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew import _crew, _roster, _shared_roster
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._roster import WATCHED, Member, Roster, Version
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import Signer, StoreClient
from manyhands.errors import WorkerLost

STALL = 0.5


def crew_of(count, **fields):
    members = tuple(Member(f"{number}.1", Version(3)) for number in range(count))
    return Roster(generation=1, ended=False, members=members, **fields)


@pytest.mark.quick
@given(st.integers(2, 300))
def test_each_process_reads_few_heartbeats_and_has_many_watchers(count):
    roster = crew_of(count)
    watchers = dict.fromkeys(roster.ids, 0)
    for own in roster.ids:
        watched = roster.watched_by(own)
        assert own not in watched and len(set(watched)) == len(watched) == min(count - 1, WATCHED)
        for id in watched:
            watchers[id] += 1
    assert set(watchers.values()) == {min(count - 1, WATCHED)}


@pytest.mark.quick
@pytest.mark.parametrize(("count", "lost"), [(256, 128), (1024, 512), (1024, 900)])
def test_half_a_crew_may_be_lost_at_once_and_each_lost_one_has_watchers(count, lost):
    gone, roster = {f"{number}.1" for number in range(lost)}, crew_of(count)
    living = [id for id in roster.ids if id not in gone]
    seen = {id for own in living for id in roster.watched_by(own)}
    assert len(gone - seen) <= (0 if lost <= count // 2 else lost // 50)
    # Those are seen once the silence of the others is known: these are passed over.
    roster = roster.report(dict.fromkeys(gone & seen, 7), gone & seen)
    for own in living:
        watched = roster.watched_by(own)
        seen |= set(watched)
        assert len(watched) <= 2 * WATCHED
    assert seen >= gone


@pytest.mark.quick
def test_a_process_of_the_same_number_is_always_watched():
    roster = crew_of(300).ask_to_join(Member("7.2", Version()))
    assert "7.1" in roster.watched_by("7.2") and "7.2" in roster.watched_by("7.1")


@pytest.mark.quick
def test_a_report_holds_until_its_process_is_heard_again_or_asks_to_join():
    roster = crew_of(100).report({"3.1": 9, "4.1": 8, "5.1": 7}, {"3.1", "4.1", "99.9"})
    assert roster.silent == (("3.1", 9), ("4.1", 8)) and Roster.of(roster.text) == roster
    assert roster.report({"3.1": 9, "4.1": 8}, {"3.1"}) == roster  # nothing new
    assert roster.report({"3.1": 10}, set()).silent == (("4.1", 8),)
    assert roster.ask_to_join(Member("4.1", Version(3))).silent == (("3.1", 9),)
    assert roster.without("3.1").report({}, set()).silent == (("4.1", 8),)
    assert roster.undo(1, 0).next({"3.1", "4.1"}).silent == ()
    small = crew_of(WATCHED + 1)  # all read all: there is nothing to report
    assert small.report({"3.1": 9}, {"3.1"}) is small


def test_all_learn_within_the_stall_time_and_that_it_was_heard_again(monkeypatch):
    monkeypatch.setattr(_roster, "WATCHED", 2)
    monkeypatch.setattr(_shared_roster, "WATCHED", 2)
    with Store() as store:
        crew = []
        for number in range(9):
            monitor = HeartbeatMonitor(STALL)
            client = StoreClient(store.address, monitor.interval, Signer(SECRET))
            crew.append(SharedRoster(client, monitor))
            crew[-1].id = f"{number}.1"
            client.start_heartbeat(f"manyhands/heartbeat/{number}.1")
        founder, sleeper, others = crew[0], crew[3], crew[:3] + crew[4:]
        founder.change(lambda _: crew_of(9, run=founder.roster.run))

        def until(known, seconds):
            began = time.monotonic()
            while {shared.silent for shared in others} != {known}:
                for shared in others:
                    shared.refresh()
                assert time.monotonic() - began < seconds, [shared.silent for shared in others]
                time.sleep(0.01)
            return time.monotonic() - began

        until(frozenset(), 1.0)
        time.sleep(0.2)
        for shared in others:
            shared.refresh()
            assert len(shared._known_revisions) == 2  # so many heartbeats were read
        key, sleeper.client._heartbeat_key = sleeper.client._heartbeat_key, None
        assert until(frozenset({"3.1"}), STALL * 2 + 1.0) > STALL * 0.7
        assert any("3.1" not in shared.monitor.silent for shared in others)
        sleeper.client._heartbeat_key = key
        until(frozenset(), 2.0)
        for shared in crew:
            shared.client.close()


def test_a_stopped_member_is_known_to_all_before_anyone_waits_for_it(monkeypatch):
    for module in (_crew, _roster, _shared_roster):
        monkeypatch.setattr(module, "WATCHED", 1)
    monkeypatch.setattr(Crew, "_connect", lambda self: True)
    with Store() as store, ThreadPoolExecutor() as threads:
        crews = [
            Crew(store.address, number=number, expected=4, stall=STALL, secret=SECRET)
            for number in range(4)
        ]
        list(threads.map(Crew.join, crews))
        crews[2]._enrollment.shared.client._heartbeat_key = None
        time.sleep(STALL + 1.0)  # nobody is in a round: all of them train
        reader = StoreClient(store.address, 1.0, Signer(SECRET))
        assert [id for id, _ in SharedRoster(reader, HeartbeatMonitor(STALL)).roster.silent] == [
            "2.1"
        ]
        reader.close()
        began = time.monotonic()
        with pytest.raises(WorkerLost, match="worker 2 is lost"):
            crews[0].wait(lambda seconds: time.sleep(seconds))
        assert time.monotonic() - began < STALL / 2
        list(threads.map(Crew.leave, crews))
    assert not [one for one in enumerate_threads() if one.name == "manyhands watch"]


def test_members_ask_for_each_other_but_not_for_those_that_are_gone(monkeypatch):
    monkeypatch.setattr(_shared_roster, "ASK_SPREAD", 0.0)
    far = Version(9)
    with Store() as store:
        client = StoreClient(store.address, 1.0, Signer(SECRET))
        shared = SharedRoster(client, HeartbeatMonitor(5.0))
        shared.change(lambda _: crew_of(5, run=shared.roster.run).without("4.1"))
        newer = Member("2.1", Version(10))
        shared.change(lambda roster: roster.ask_to_join(newer))
        for number in (1, 2, 4):
            client.append("manyhands/asks/1", Roster(waiting=(Member(f"{number}.1", far),)).text)
        client.call("append", "manyhands/asks/1", "a stranger's line\n")
        drawn = random.getstate()
        shared.ask_to_join(Member("0.1", far))
        assert shared.roster.ended
        assert {m.id for m in shared.roster.waiting} == {"0.1", "1.1", "2.1"}
        assert newer in shared.roster.waiting  # not its line, which may be older
        again = Member("0.1", Version(10))
        shared.ask_to_join(again)
        assert again in shared.roster.waiting
        assert random.getstate() == drawn  # a script's batches may depend on it
        # One that the others think is dead asks all the same.
        shared.change(lambda roster: roster.without("3.1"))
        shared.ask_to_join(Member("3.1", far))
        assert "3.1" in {member.id for member in shared.roster.waiting}
        client.close()
