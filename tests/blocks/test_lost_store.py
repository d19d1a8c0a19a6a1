"""`manyhands run` while the store does not answer, and when it answers again.

The store is in a process of its own. While that is stopped, connections stay open and no call is
answered, as if the network were cut.
"""

import contextlib
import os
import signal
import time
from types import SimpleNamespace

import pytest

from helpers.crew_workers import SECRET, Store
from helpers.run_command import Command
from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew import _link, _store
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._roster import Member, Roster, Version
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import Signer, StoreClient
from manyhands.errors import StoreLost

# Each life of worker N prints its number. It ends as the file "end N" says.
SCRIPT = """
    import os, signal, time
    own = os.environ["MANYHANDS_WORKER"]
    with open(f"lives {own}", "a") as file:
        file.write("x")
    print("life", os.path.getsize(f"lives {own}"), os.getpid(), flush=True)
    while not os.path.exists("enough"):
        time.sleep(0.01)
        if os.path.exists(f"end {own}"):
            with open(f"end {own}") as file:
                code = int(file.read())
            os.remove(f"end {own}")
            os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""
AFTER_A_KILL = "worker 1 ended (SIGKILL) and is started again."


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(_store, "STORE_TIMEOUT", 2.0)
    with Store() as store:
        yield store


@contextlib.contextmanager
def silence(store, command):
    """Let the store not answer, from when the launcher has noticed it."""
    command.until(r"\[1\] life 1")
    os.kill(store.pid, signal.SIGSTOP)
    command.until("is lost: no answer for 2 s")
    yield
    os.kill(store.pid, signal.SIGCONT)
    command.until("answers again")


def end(command, number, code):
    new = command.folder / "end.new"  # no worker reads half of it
    new.write_text(str(code))
    new.rename(command.folder / f"end {number}")


def launcher(tmp_path, store, *options, numbers="1"):
    options = ("--store", store.address, "--numbers", numbers, *options)
    return Command(tmp_path, SCRIPT, *options)


def finish(command, code=0):
    (command.folder / "enough").touch()
    assert command.wait() == code, command.said()


def read_roster(store) -> Roster:
    client = StoreClient(store.address, 1.0, Signer(SECRET))
    roster = SharedRoster(client, HeartbeatMonitor(1.0)).refresh()
    client.close()
    return roster


def hold_round(store, *ids) -> StoreClient:
    """Let these processes be members that have held a round; the first has a heartbeat."""
    client = StoreClient(store.address, 0.2, Signer(SECRET))
    shared = SharedRoster(client, HeartbeatMonitor(1.0))
    client.start_heartbeat(f"manyhands/heartbeat/{ids[0]}")
    shared.change(lambda roster: roster.ask_to_join(*(Member(id, Version(0)) for id in ids)))
    shared.change(lambda roster: roster.next(frozenset()))
    shared.change(lambda roster: roster.keep(roster.generation, 0))
    return client


def test_a_worker_that_dies_after_the_store_answers_again_is_started_again(tmp_path, store):
    with launcher(tmp_path, store) as command:
        with silence(store, command):
            pass
        end(command, 1, -signal.SIGKILL)
        command.until(r"\[1\] life 2")
        finish(command)
    assert AFTER_A_KILL in command.said()
    assert read_roster(store).launchers == ()


@pytest.mark.long
@pytest.mark.parametrize("code", [-signal.SIGKILL, 1])
def test_a_worker_that_ends_meanwhile_is_started_when_the_store_answers(tmp_path, store, code):
    """It may have failed because the store is lost. So its error does not count."""
    with launcher(tmp_path, store, "--restarts", "0") as command:
        with silence(store, command):
            end(command, 1, code)
            command.until(r"worker 1 ended \(.*\) while the store does not answer")
            time.sleep(0.5)
            assert "life 2" not in command.said()
        command.until(r"\[1\] life 2")
        end(command, 1, 5)  # this error counts: there has been no sync round
        assert command.wait() == 5, command.said()
    assert "worker 1 ended (exit code 5) before the first sync round" in command.said()


@pytest.mark.long
def test_the_crew_learns_who_has_finished_meanwhile(tmp_path, store):
    hold_round(store, "1.1", "2.1").close()
    with launcher(tmp_path, store, numbers="1-2") as command:
        with silence(store, command):
            end(command, 1, 0)
            time.sleep(0.5)
        command.until("answers again")
        until = time.monotonic() + 10.0
        while not (roster := read_roster(store)).left:
            assert time.monotonic() < until
        assert (roster.left, roster.done) == (("1.1",), 1)
        finish(command)


@pytest.mark.long
def test_a_store_that_does_not_come_back_is_awaited_for_the_patience(tmp_path, store):
    with launcher(tmp_path, store, "--patience", "6", numbers="0-1") as command:
        command.until(r"(?s)life 1.*life 1")
        store.kill()
        command.until("is lost")
        lost = time.monotonic()
        end(command, 1, -signal.SIGKILL)
        command.until("worker 1 is not started again: the store at .* does not answer .*refused")
        assert 5.0 < time.monotonic() - lost < 9.0
        finish(command, 128 + signal.SIGKILL)  # worker 0 goes on
    assert "[1] life 2" not in command.said()


@pytest.mark.long
def test_a_worker_that_was_cut_off_is_not_taken_for_a_stopped_one(tmp_path, store, monkeypatch):
    """It has lost the store as well, and may have no heartbeat until its block ends."""
    monkeypatch.setattr(_link, "STOPPED_LIMIT", 1.0)
    heartbeat = hold_round(store, "1.1")
    with launcher(tmp_path, store, "--patience", "6") as command:
        with silence(store, command):
            heartbeat.close()
        back = time.monotonic()
        command.until("worker 1 had no heartbeat")
        assert 5.0 < time.monotonic() - back < 12.0
        command.until(r"\[1\] life 2")
        finish(command)


def test_a_worker_with_a_newer_id_is_not_stopped(tmp_path, store, monkeypatch):
    """A member that was considered lost asks to join under a new id, and may wait long to be in."""
    monkeypatch.setattr(_link, "STOPPED_LIMIT", 1.0)
    client = hold_round(store, "1.1")
    shared = SharedRoster(client, HeartbeatMonitor(1.0))
    with launcher(tmp_path, store) as command:
        command.until(r"\[1\] life 1")
        shared.change(lambda roster: roster.count_incarnation(1).count_incarnation(1))
        client.start_heartbeat("manyhands/heartbeat/1.2")
        shared.change(lambda roster: roster.ask_to_join(Member("1.2", Version(0))))
        time.sleep(4.0)
        assert shared.refresh().ids == ("1.1",)
        assert "no heartbeat" not in command.said()
        finish(command)
    client.close()


def test_a_worker_that_does_not_reach_the_store_for_its_patience_gives_up(monkeypatch):
    def fail(crew, connection):
        raise StoreLost(connection.store, TimeoutError("no answer"))

    monkeypatch.setattr(Crew, "_return_to_store", fail)
    crew = Crew("127.0.0.1:9", number=0, quorum=2, secret=SECRET)
    crew._enrollment = SimpleNamespace(cut_off=True)
    with pytest.raises(StoreLost, match="no answer"):
        crew.regroup(Version(0))
