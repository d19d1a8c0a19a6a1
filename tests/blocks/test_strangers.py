"""What a stranger can do: a process that reaches a run's store and does not know its secret."""

import json
import logging
import random
import threading
import time

import pytest
import torch

from helpers.crew_workers import SECRET, Workers
from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew import _shared_roster
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._roster import Member, Roster, Version
from manyhands.blocks.crew._shared_roster import REVISION, ROSTER, SharedRoster
from manyhands.blocks.crew._store import Signer, StoreClient, connect_to_store
from manyhands.blocks.crew._transport import GlooTransport, SignedStore, StoreConnection
from manyhands.errors import StoreLost

OTHER = "a secret that is not the run's"
REPAIR_DELAY = _shared_roster.REPAIR_DELAY


@pytest.fixture(autouse=True)
def repair_soon(monkeypatch):
    monkeypatch.setattr(_shared_roster, "REPAIR_DELAY", 0.5)


def shared(store, secret=SECRET, stall=1.0):
    monitor = HeartbeatMonitor(stall)
    return SharedRoster(StoreClient(store.address, monitor.interval, Signer(secret)), monitor)


# -- signatures ------------------------------------------------------------------------------------


def test_a_value_is_verified_under_its_key_and_nowhere_else(caplog):
    signer = Signer(SECRET)
    value = signer.sign("manyhands/arrived/1/0.1", "7").encode()
    assert signer.verify_or_ignore("manyhands/arrived/1/0.1", value) == "7" and signer.ignored == 0
    with caplog.at_level(logging.WARNING, "manyhands"):
        assert (
            signer.verify_or_ignore("manyhands/arrived/2/0.1", value) is None
        )  # another generation
        assert signer.verify_or_ignore("manyhands/arrived/1/1.1", value) is None  # another member
        assert signer.verify_or_ignore("manyhands/arrived/1/0.1", value[:-1] + b"8") is None
        assert signer.verify_or_ignore("manyhands/arrived/1/0.1", b"\xff\x00") is None
        assert signer.verify_or_ignore("manyhands/arrived/1/0.1", b"") is None
        assert Signer(OTHER).verify_or_ignore("manyhands/arrived/1/0.1", value) is None
    assert signer.ignored == 5
    assert "ignoring a value in the store (1 so far): 'manyhands/arrived/2/0.1'" in caplog.text
    assert SECRET not in caplog.text


def test_of_many_values_that_are_ignored_few_are_logged(caplog):
    signer = Signer(SECRET)
    with caplog.at_level(logging.WARNING, "manyhands"):
        for _ in range(1000):
            signer.verify_or_ignore("key", b"forged")
    assert signer.ignored == 1000 and len(caplog.records) == 10


def test_a_secret_is_needed_and_must_be_long(monkeypatch):
    monkeypatch.delenv("MANYHANDS_SECRET")
    with pytest.raises(ValueError, match="Set MANYHANDS_SECRET to the same text"):
        Crew("127.0.0.1:9", number=0)
    assert Crew().ignored == 0  # alone
    with pytest.raises(ValueError, match="at least 16 characters, got 5"):
        Crew("127.0.0.1:9", number=0, secret="short")
    assert Crew("127.0.0.1:9", number=0, secret=SECRET).number == 0


# -- the roster ------------------------------------------------------------------------------------


def forged_rosters():
    """What the run's end, another member, or nonsense would look like."""
    done = Roster(generation=1, members=(Member("0.1", Version(5)),), left=("0.1",), revision=10**6)
    other = Signer(OTHER)
    return {
        "garbage": "garbage",
        "nothing": "",
        "not text": "\x00\x7f",
        "a finished run, not signed": done.text,
        "a finished run, signed by a stranger": other.sign(ROSTER, done.text),
        "signed for another key": Signer(SECRET).sign(REVISION, done.text),
        "not well-formed": Signer(SECRET).sign(ROSTER, "[1]"),
        "of another version": Signer(SECRET).sign(ROSTER, json.dumps({"generation": 3})),
        "large": "x" * 10**6,
    }


@pytest.mark.sample("garbage", "a finished run, not signed", "signed for another key", "large")
@pytest.mark.parametrize("name", forged_rosters())
def test_a_forged_roster_is_put_right(store, name):
    ours, stranger = shared(store), connect_to_store(store.address)
    ours.change(lambda roster: roster.ask_to_join(Member("0.1", Version(3))))
    stranger.set(ROSTER, forged_rosters()[name])
    stranger.check([ROSTER])  # its answer comes after what was set is there
    assert [member.id for member in ours.refresh().waiting] == ["0.1"]
    assert ours.client.signer.ignored == 1
    assert ours.change(lambda roster: roster.ask_to_join(Member("1.1", Version(3)))).revision == 2
    assert [member.id for member in shared(store).refresh().waiting] == ["0.1", "1.1"]
    ours.client.close()


def test_an_older_roster_and_a_deleted_one_are_put_right(store):
    ours, stranger = shared(store), connect_to_store(store.address)
    ours.change(lambda roster: roster.ask_to_join(Member("0.1", Version(3))))
    old = stranger.get(ROSTER)
    ours.change(lambda roster: roster.ask_to_join(Member("1.1", Version(3))))
    stranger.set(ROSTER, old)
    stranger.check([ROSTER])
    assert ours.change(lambda roster: roster.ask_to_join(Member("2.1", Version(3)))).revision == 3
    for key in (ROSTER, REVISION):
        stranger.delete_key(key)
    assert ours.change(lambda roster: roster.ask_to_join(Member("3.1", Version(3)))).revision == 4
    assert len(shared(store).refresh().waiting) == 4 and ours.client.signer.ignored == 2
    ours.client.close()


def test_a_process_that_knows_less_than_a_live_one_does_not_put_back_what_it_knows(store):
    first, second, stranger = shared(store), shared(store), connect_to_store(store.address)
    first.change(lambda roster: roster.ask_to_join(Member("0.1", Version(3))))
    second.refresh()
    first.client.start_heartbeat("manyhands/heartbeat/0.1")
    first.change(
        lambda roster: roster.ask_to_join(Member("1.1", Version(3)))
    )  # that the second has not seen
    stranger.set(ROSTER, "garbage")
    seen = []
    looking = threading.Thread(target=lambda: seen.append(second.refresh()))
    looking.start()
    time.sleep(1.5)
    assert seen == [] and stranger.get(ROSTER) == b"garbage"
    first.refresh()
    looking.join(5.0)
    assert len(seen[0].waiting) == 2
    for one in (first, second):
        one.client.close()


def test_what_only_a_dead_process_has_read_is_lost_with_it(store):
    first, second, stranger = shared(store), shared(store), connect_to_store(store.address)
    first.change(lambda roster: roster.ask_to_join(Member("0.1", Version(3))))
    second.refresh()
    first.client.start_heartbeat("manyhands/heartbeat/0.1")
    first.change(lambda roster: roster.ask_to_join(Member("1.1", Version(3))))
    first.client.close()
    stranger.set(ROSTER, "garbage")
    stranger.check([ROSTER])
    assert [member.id for member in second.refresh().waiting] == ["0.1"]
    second.client.close()


def test_a_stranger_that_does_not_stop_is_an_error(store, monkeypatch):
    monkeypatch.setattr(_shared_roster, "REPAIR_TIMEOUT", 1.0)
    monkeypatch.setattr(_shared_roster, "REPAIR_DELAY", 0.1)
    ours, stranger = shared(store), connect_to_store(store.address)
    ours.change(lambda roster: roster.ask_to_join(Member("0.1", Version(3))))

    def overwrite():
        stranger.set(ROSTER, "garbage")
        stranger.check([ROSTER])

    heal = ours._repair
    monkeypatch.setattr(ours, "_repair", lambda: (heal(), overwrite()))
    overwrite()
    with pytest.raises(StoreLost, match="its roster stays wrong"):
        ours.refresh()
    ours.client.close()


def test_a_beat_that_is_put_back_or_forged_is_no_sign_of_life(store):
    ours, stranger = shared(store, stall=1.0), connect_to_store(store.address)
    ours.change(lambda roster: roster.ask_to_join(Member("0.1", Version(3))))
    signer = Signer(SECRET)
    for value in ("3 0", "2 0", "forged", "1 0", "2 0"):
        signed = value if value == "forged" else signer.sign("manyhands/heartbeat/0.1", value)
        stranger.set("manyhands/heartbeat/0.1", signed)
        ours.observe_heartbeats()
        time.sleep(0.35)
    assert ours.monitor.silent == {"0.1"} and not ours.monitor.has_advanced("0.1")
    stranger.set("manyhands/heartbeat/0.1", signer.sign("manyhands/heartbeat/0.1", "4 0"))
    ours.observe_heartbeats()
    assert ours.monitor.silent == frozenset()
    ours.client.close()


def test_an_arrival_counts_for_its_member_its_generation_and_its_round(store):
    ours, stranger = shared(store), connect_to_store(store.address)
    ours.arrive(1, 0, "0.1")
    assert ours.not_arrived(1, 0, ["0.1", "1.1"]) == ("1.1",)
    stranger.set("manyhands/arrived/1/1.1", "0")
    stranger.set("manyhands/arrived/2/1.1", stranger.get("manyhands/arrived/1/0.1"))
    assert ours.not_arrived(1, 0, ["0.1", "1.1"]) == ("1.1",) and ours.client.signer.ignored == 1
    ours.arrive(1, 0, "1.1")
    assert not ours.not_arrived(1, 0, ["0.1", "1.1"]) and ours.not_arrived(1, 1, ["0.1"])
    stranger.set("manyhands/group/nonsense", "x")
    stranger.set("manyhands/arrived/", "x")
    ours.sweep(2)
    assert not stranger.check(["manyhands/arrived/1/1.1"])
    ours.client.close()


def test_members_find_each_others_addresses_and_no_strangers(store):
    stranger = connect_to_store(store.address)
    for key in ("member/0", "member/1", "0/0", "0/1"):
        stranger.set(f"here/{key}", "10.9.9.9")
    connections = [StoreConnection(store.address, Signer(SECRET)) for _ in range(2)]
    transports = [
        GlooTransport(connections[rank], "here", rank, 2, timeout=30.0) for rank in range(2)
    ]
    assert all(transport.wait(40.0) and transport.group is not None for transport in transports)
    tensors = [torch.ones(3), torch.ones(3)]
    for work in [
        transport.group.allreduce([tensors[rank]]) for rank, transport in enumerate(transports)
    ]:
        work.wait()
    assert tensors[0].tolist() == [2.0] * 3
    for transport in transports:
        transport.release()


def test_an_address_that_only_a_stranger_has_written_is_waited_for_in_vain(store):
    stranger = connect_to_store(store.address)
    stranger.set("here/ports/1", "1234")
    signer = Signer(SECRET)
    with pytest.raises(RuntimeError, match=r"no member has written here/ports/1 for 0\.3 s"):
        SignedStore(connect_to_store(store.address), "here", signer, 0.3).get("ports/1")
    assert signer.ignored == 1


# -- a run -----------------------------------------------------------------------------------------


class Stranger:
    """Writes to every key that it finds, again and again."""

    def __init__(self, address, seed, pause):
        self._client, self._dice, self._pause = (
            connect_to_store(address),
            random.Random(seed),
            pause,
        )
        self.writes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _run(self):
        values = list(forged_rosters().values())[:-1]
        old = {}
        while not self._over.wait(self._pause * (0.5 + self._dice.random())):
            keys = [key for key in self._client.list_keys() if key.startswith("manyhands/")]
            key = self._dice.choice([ROSTER, self._dice.choice(keys)]) if keys else ROSTER
            kind = self._dice.random()
            if kind < 0.3 and key in old:
                self._client.set(key, old[key])
            elif kind < 0.4:
                self._client.delete_key(key)
            else:
                if self._client.check([key]):
                    old.setdefault(key, self._client.get(key))
                self._client.set(key, self._dice.choice(values))
            self.writes += 1


@pytest.mark.long
def test_a_crew_goes_on_whatever_a_stranger_writes(store, tmp_path, monkeypatch):
    monkeypatch.setattr(
        _shared_roster, "REPAIR_DELAY", REPAIR_DELAY
    )  # a heartbeat comes every 0.4 s

    def is_known_to_others() -> bool:
        """Stop worker 1, and wake it again unless the others have read its last decision, too."""
        # If the stranger has overwritten one that nobody else has read, it is lost with worker 1.
        workers.stop(1)
        last = workers.last(1, "settled", "generation"), workers.last(1, "settled", "round")
        settled = [workers.events(number, "settled") for number in (0, 2)]
        if all(last in {(e["generation"], e["round"]) for e in events} for events in settled):
            return True
        workers.wake(1)
        return False

    with Workers(store, tmp_path, expected=3, stall=2.0) as workers:
        workers.start(range(3), 400, steps=0.02)
        workers.wait_for_rounds(0, 3)
        with Stranger(store.address, 5, 1.0) as stranger:
            workers.until(lambda: stranger.writes >= 1)
            workers.until(is_known_to_others)
            workers.kill(1, report=True)
            workers.start([1], 400, steps=0.02)
            workers.until(lambda: stranger.writes >= 4, 60.0)
        workers.finish(60.0)
        workers.agreed()
        done = [workers.events(number, "done")[-1]["version"] for number in range(3)]
        assert done == [400] * 3


def test_a_worker_with_another_secret_gets_an_error_and_changes_nothing(store, monkeypatch):
    ours = shared(store)
    ours.change(lambda roster: roster.ask_to_join(Member("0.1", Version(3))))
    before = ours.client.fetch(ROSTER)
    monkeypatch.setattr(_shared_roster, "REPAIR_TIMEOUT", 0.5)
    with pytest.raises(ValueError, match=r"cannot be used: it is not signed .* the same MANY"):
        shared(store, OTHER)
    assert ours.client.fetch(ROSTER) == before
    ours.client.close()
