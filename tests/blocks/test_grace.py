"""How long a late member is waited for, and how many hold a round."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import manyhands as mh
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
