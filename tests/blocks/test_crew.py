"""Workers that die, stall, leave and join, and what the others do meanwhile."""

import os
import random
import signal
import time

import pytest
from crew_workers import Store, Team

from manyhands.blocks import _crew, _line
from manyhands.blocks._crew import Crew, CrewFinished
from manyhands.blocks._line import StoreLost

AT_ONCE = 1.0  # seconds in which the others go on when a death is reported


@pytest.fixture
def store():
    with Store() as store:
        yield store


def kill_at(place, number, meeting):
    """A hook: that worker dies at a place once it has settled so many meetings."""

    def of(worker):
        def hook(where, crew):
            if worker == number and where == place and crew._meeting >= meeting:
                os.kill(os.getpid(), signal.SIGKILL)

        return hook

    return of


@pytest.mark.parametrize("place", ["steps", "exchange", "settle"])
def test_the_others_go_on_at_once_when_a_death_is_reported(store, tmp_path, place):
    with Team(store, tmp_path, expected=4, stall=5.0) as team:
        team.start(range(4), 30, kill_at(place, 2, 4))
        team.until(lambda: team.ended() == {2: -signal.SIGKILL})
        died = time.monotonic()
        team.board.report(2)
        assert max(team.next_kept(number, died) for number in (0, 1, 3)) < AT_ONCE
        team.start([2], 30)
        team.finish()
        answers = team.agreed()
        assert [kept for kept in answers.values()].count(False) <= 1
        back = team.events(2, "entered")[-1]
        assert back["members"] == [0, 1, 2, 3] and back["newcomers"] == [2]
        assert back["source"] == 0


def test_a_worker_that_dies_while_all_regroup_is_left_behind(store, tmp_path):
    with Team(store, tmp_path, expected=4, stall=5.0) as team:
        team.start(range(3), 40, kill_at("regroup", 1, 1))
        time.sleep(0.1)
        team.start([3], 40)
        team.until(lambda: 1 in team.ended() or team.events(3, "entered") != [], 40)
        if 1 in team.pids:  # all four began together: another one has to come
            team.kill(3, report=True)
            team.until(lambda: 1 in team.ended())
        died = time.monotonic()
        team.board.report(1)
        assert max(team.next_kept(number, died) for number in (0, 2)) < AT_ONCE
        team.start([n for n in (1, 3) if n not in team.pids], 40)
        team.finish()
        team.agreed()


def test_without_a_report_silence_tells(store, tmp_path):
    with Team(store, tmp_path, expected=3, stall=1.0) as team:
        team.start(range(3), 150)
        team.met(0, 3)
        team.kill(1)
        died = time.monotonic()
        assert max(team.next_kept(number, died + 0.1) for number in (0, 2)) < 1.0 + 1.0
        team.start([1], 150)
        team.finish()
        team.agreed()
        assert team.events(1, "entered")[-1]["newcomers"] == [1]
