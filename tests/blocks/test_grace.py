"""How long a late member is waited for, how many hold a round, and who reaches whom."""

import errno
import math
import socket
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import manyhands as mh
from manyhands.blocks.crew import _enrollment
from manyhands.blocks.crew._enrollment import Door, unreachable
from manyhands.blocks.crew._grace import SHORTEST, GraceWindow
from manyhands.blocks.crew._roster import Member, Roster, Version

pytestmark = pytest.mark.quick

seconds = st.floats(0.0, 1e4)


def window(waits, block=10.0, regroups=()):
    found = GraceWindow()
    for wait in waits:
        found.add_round(block, wait)
    for each in regroups:
        found.add_regroup(each)
    return found


def test_nothing_is_known_before_the_third_round():
    assert window([1.0, 1.0]).seconds(8) == math.inf
    assert window([1.0] * 3).seconds(1) == math.inf  # nobody else to wait for
    assert window([1.0] * 3).seconds(8) < math.inf


def test_a_member_is_waited_for_until_that_costs_as_much_as_to_go_on_without_it():
    """By hand: 9 others wait, each second costs 9; its block is 60 s, and 10 regroup twice."""
    assert window([0.0] * 3, block=60.0, regroups=[1.5]).seconds(10) == pytest.approx(10.0)
    assert window([0.0] * 3, block=60.0, regroups=[1.5]).seconds(2) == pytest.approx(66.0)


def test_what_is_usual_is_waited_for():
    """Workers with equal steps: the others always wait for the slowest."""
    assert window([100.0, 104.0, 101.0, 103.0, 102.0], block=5.0).seconds(20) == 102.0 + 4 * 1.0


@given(waits=st.lists(seconds, min_size=3, max_size=60), block=seconds, members=st.integers(2, 64))
def test_the_window_is_never_below_the_median_wait_nor_too_short(waits, block, members):
    found = window(waits, block).seconds(members)
    assert found >= max(SHORTEST, sorted(waits[-32:])[len(waits[-32:]) // 2 - 1])
    assert found <= 5 * max(waits) + block + 4.0 + SHORTEST


def test_the_rounds_of_a_warm_up_do_not_say_how_long_blocks_take():
    """Otherwise the slowest of workers with equal steps would be dropped in every block."""
    found = window([0.01] * 40, block=0.1, regroups=[1.5])
    found.forget_rounds()
    assert found.seconds(8) == math.inf
    for _ in range(3):
        found.add_round(block=30.0, waited=25.0)
    assert found.seconds(8) == 25.0


def test_a_crew_forgets_them_as_its_warm_up_ends(monkeypatch):
    monkeypatch.setenv("MANYHANDS_PATIENCE", "auto")
    crew, param = mh.Crew(), torch.nn.Parameter(torch.zeros(1))
    optimizer = mh.LocalSGD(torch.optim.SGD([param], lr=0.1), every=2, warmup=3, crew=crew)
    for step in range(1, 5):
        crew._grace.add_round(1.0, 1.0)
        optimizer.step()
        assert len(crew._grace._waits) == {1: 1, 2: 2, 3: 0, 4: 1}[step]


def test_one_long_wait_does_not_make_the_next_one_longer():
    assert window([0.1] * 20 + [500.0]).seconds(4) == window([0.1] * 21).seconds(4)


# -- the quorum ------------------------------------------------------------------------------------


def waiting(*ids, **more):
    return Roster(waiting=tuple(Member(id, Version(3)) for id in ids), **more)


def test_fewer_than_a_quorum_wait_for_others():
    three = waiting(
        "0.1", "1.1", "2.1", members=tuple(Member(f"{n}.1", Version(3)) for n in range(5))
    )
    gone = {"3.1", "4.1"}
    assert three.complete(gone, expected=5, quorum=3)
    assert not three.complete(gone, expected=5, quorum=4)
    assert not three.complete(gone, expected=5, late=True, quorum=4)


def test_workers_that_have_finished_are_not_missed():
    roster = Roster(members=tuple(Member(f"{n}.1", Version(3)) for n in range(4)), generation=1)
    roster = roster.without("2.1", left=True).without("3.1", left=True)
    assert roster.done == 2 and Roster.of(roster.text) == roster
    for id in ("0.1", "1.1"):
        roster = roster.ask_to_join(Member(id, Version(3)))
    assert roster.complete(set(), expected=4, quorum=4)
    assert roster.next(set()).done == 2  # also in later generations
    assert not roster.without("1.1").complete(set(), expected=4, quorum=4)  # dead is not done


def test_the_options_of_a_crew(monkeypatch):
    assert mh.Crew().patience == 600.0 and mh.Crew().quorum == 1
    monkeypatch.setenv("MANYHANDS_PATIENCE", "auto")
    monkeypatch.setenv("MANYHANDS_QUORUM", "3")
    crew = mh.Crew()
    assert (crew.patience, crew.quorum) == (600.0, 3) and crew._grace is not None
    assert mh.Crew(patience=7)._grace is None
    with pytest.raises(ValueError, match='or "auto"'):
        mh.Crew(patience="soon")
    with pytest.raises(ValueError, match="quorum must be a whole number"):
        mh.Crew(quorum=0)


# -- who reaches whom ------------------------------------------------------------------------------


def cut(first, second, version=3):
    """Return a roster in which two groups wait that do not reach each other."""
    waiting = [Member(id, Version(version), 0, tuple(second)) for id in first]
    waiting += [Member(id, Version(version), 0, tuple(first)) for id in second]
    return Roster(waiting=tuple(waiting), members=tuple(waiting), generation=1)


def test_the_larger_half_goes_on_and_the_other_one_waits():
    roster = cut(["0.1", "4.1"], ["1.1", "2.1", "3.1"])
    assert Roster.of(roster.text) == roster
    assert roster.complete(set(), expected=5, quorum=3)
    following = roster.next(set())
    assert following.ids == ("1.1", "2.1", "3.1")
    assert [m.id for m in following.waiting] == ["0.1", "4.1"]
    assert not following.keep(2, 0).ended  # who cannot be reached is not let in
    back = following.ask_to_join(Member("0.1", Version(3)))  # it reaches all again
    assert back.keep(2, 0).ended
    assert not back.complete(set(), expected=5, quorum=3)  # all members come first


def test_two_equal_halves_wait():
    assert not cut(["0.1", "1.1"], ["2.1", "3.1"]).complete(set(), expected=4, quorum=3)


def test_one_end_that_says_so_is_enough_and_one_without_a_line_to_one_other_is_left_out():
    waiting = [
        Member("0.1", Version(3)),
        Member("1.1", Version(3), 0, ("3.1",)),
        Member("2.1", Version(3)),
        Member("3.1", Version(3)),
    ]
    assert [m.id for m in Roster(waiting=tuple(waiting)).together(set())] == ["0.1", "1.1", "2.1"]


@given(
    lines=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=15),
    silent=st.sets(st.integers(0, 6)),
)
def test_those_who_are_together_reach_each_other_and_nobody_could_be_added(lines, silent):
    apart = {frozenset(line) for line in lines if line[0] != line[1]}
    cuts = {n: tuple(f"{b}.1" for a, b in lines if a == n != b) for n in range(7)}
    roster = Roster(waiting=tuple(Member(f"{n}.1", Version(0), 0, cuts[n]) for n in range(7)))
    quiet = {f"{n}.1" for n in silent}
    chosen = [member.number for member in roster.together(quiet)]
    assert chosen == sorted(chosen) and silent.isdisjoint(chosen)
    assert not any(frozenset((a, b)) in apart for a in chosen for b in chosen if a != b)
    for other in set(range(7)) - silent - set(chosen):
        assert any(frozenset((other, one)) in apart for one in chosen)


def test_a_door_answers_until_it_is_closed():
    door = Door("127.0.0.1")
    try:
        assert unreachable({"0.1": door.address, "1.1": "127.0.0.1:1"}) == ("1.1",)
    finally:
        door.close()
    assert unreachable({"0.1": door.address}) == ("0.1",)
    assert unreachable({}) == ()


def test_a_door_that_does_not_answer_is_not_waited_for_when_its_process_is_silent(monkeypatch):
    """A cut line: each member would wait 2 s for the processes beyond it."""
    monkeypatch.setattr(_enrollment, "ANSWER", 0.6)
    door = Door("127.0.0.1")
    with ExitStack() as stack:
        stack.callback(door.close)
        beyond = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # fill the line of those who wait for it, so that it answers no more
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(beyond.getsockname())
        address = f"127.0.0.1:{beyond.getsockname()[1]}"
        doors = {"0.1": door.address, "1.1": address, "2.1": address}
        silent = iter([frozenset(), frozenset({"1.1", "2.1"})])
        began = time.monotonic()
        assert unreachable(doors, lambda: next(silent)) == ("1.1", "2.1")
        assert time.monotonic() - began < 0.3
        assert unreachable(doors, lambda: frozenset({"1.1"})) == ("1.1", "2.1")
        assert time.monotonic() - began > 0.6  # the other one is waited for


def test_a_door_that_cannot_be_tried_does_not_answer(monkeypatch):
    def too_many(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(_enrollment.socket, "socket", too_many)
    assert unreachable({"0.1": "127.0.0.1:1"}) == ("0.1",)


PASSING = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM]


def doors():
    return {thread for thread in threading.enumerate() if thread.name == "manyhands door"}


def test_a_door_goes_on_after_errors_that_pass_and_ends_when_it_is_closed(monkeypatch):
    """As while too many files are open: one that has ended would be cut off for ever."""
    errors = [OSError(number, "") for number in PASSING]

    class Listening(socket.socket):
        def accept(self):
            if errors:
                raise errors.pop()
            return super().accept()

    def create_server(*args, **kwargs):
        return Listening(fileno=made(*args, **kwargs).detach())

    made = socket.create_server
    monkeypatch.setattr(_enrollment.socket, "create_server", create_server)
    monkeypatch.setattr(_enrollment, "PAUSE", 0.01)
    before = doors()  # of former tests: they may end meanwhile
    door = Door("127.0.0.1")
    try:
        host, _, port = door.address.partition(":")
        with socket.create_connection((host, int(port)), 10.0) as caller:
            caller.settimeout(10.0)
            assert caller.recv(1) == b""  # it has been accepted, and closed
        assert errors == [] and len(doors() - before) == 1
    finally:
        door.close()
    until = time.monotonic() + 10.0
    while doors() - before:
        assert time.monotonic() < until, "the thread of a closed door goes on"
        time.sleep(0.01)
