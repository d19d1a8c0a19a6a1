"""The roster by itself: which change wins, which members count, and what each one learns."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.blocks.crew._roster import Member, Roster
from manyhands.blocks.crew._shared_roster import HeartbeatMonitor

pytestmark = pytest.mark.quick

NONE_SILENT: frozenset[str] = frozenset()


def generation_of(*ids, version=3):
    """Return a roster with a generation of these members, in its first round."""
    roster = Roster()
    for id in ids:
        roster = roster.ask_to_join(id, version)
    return roster.next(NONE_SILENT)


def test_the_first_generation_waits_for_those_expected_unless_it_is_late():
    roster = Roster().ask_to_join("2.1", -1).ask_to_join("0.1", -1)
    assert not roster.complete(NONE_SILENT, 3)
    assert roster.complete(NONE_SILENT, 3, late=True)
    assert roster.ask_to_join("1.1", -1).complete(NONE_SILENT, 3)
    assert roster.ask_to_join("1.1", -1).next(NONE_SILENT).ids == ("0.1", "1.1", "2.1")


def test_if_no_member_holds_a_state_the_first_sends_its_own_to_all():
    assert (
        generation_of("0.1", "1.1", version=-1).source,
        generation_of("0.1", "1.1", version=-1).joiners,
    ) == (
        0,
        (1,),
    )


def test_the_member_with_the_most_sends_the_state_to_those_with_less():
    roster = (
        Roster()
        .ask_to_join("0.2", -1)
        .ask_to_join("1.1", 7)
        .ask_to_join("2.1", 7)
        .ask_to_join("3.1", 6)
    )
    roster = roster.next(NONE_SILENT)
    assert (roster.source, roster.joiners) == (1, (0, 3))
    assert generation_of("0.1", "1.1").joiners == ()


def test_the_first_to_decide_about_a_round_decides():
    roster = generation_of("0.1", "1.1")
    assert roster.settled(1, 0, "0.1") is None
    kept = roster.keep(1, 0)
    assert kept.undo(1, 0) == kept and kept.settled(1, 0, "0.1") is True
    undone = roster.undo(1, 0)
    assert undone.keep(1, 0) == undone and undone.settled(1, 0, "0.1") is False
    assert kept.settled(1, 1, "0.1") is None  # the next one


def test_a_kept_round_is_the_last_when_a_process_waits_or_a_member_has_gone():
    roster = generation_of("0.1", "1.1")
    assert not roster.keep(1, 0).ended
    assert roster.ask_to_join("2.1", -1).keep(1, 0).ended
    assert roster.without("1.1").keep(1, 0).ended


def test_all_living_members_are_waited_for():
    roster = (
        generation_of("0.1", "1.1", "2.1").undo(1, 0).ask_to_join("0.1", 3).ask_to_join("3.1", -1)
    )
    assert roster.absent(NONE_SILENT) == ("1.1", "2.1")
    roster = roster.without("2.1")
    assert not roster.complete(NONE_SILENT, 4)
    assert roster.complete(frozenset({"1.1"}), 4)
    assert roster.next(frozenset({"1.1"})).ids == ("0.1", "3.1")


def test_a_stopped_member_learns_what_became_of_its_round_and_the_dead_are_forgotten():
    roster = (
        generation_of("0.1", "1.1", "2.1")
        .keep(1, 0)
        .undo(1, 1)
        .without("2.1")
        .ask_to_join("0.1", 4)
    )
    roster = (
        roster.next(frozenset({"1.1"}))
        .keep(2, 0)
        .undo(2, 1)
        .ask_to_join("0.1", 5)
        .next(NONE_SILENT)
    )
    assert roster.settled(1, 0, "1.1") is True
    assert roster.settled(1, 1, "1.1") is False
    assert roster.missed == (("1.1", 1, 1, False),)
    assert roster.ask_to_join("1.2", 4).missed == ()  # it is back
    with pytest.raises(RuntimeError, match="worker 1 was stopped for some time"):
        roster.ask_to_join("1.2", 4).settled(1, 0, "1.1")


def test_of_two_with_one_number_neither_begins():
    roster = Roster().ask_to_join("0.1", -1).ask_to_join("0.2", -1)
    assert not roster.complete(NONE_SILENT, 2, late=True)
    assert roster.complete(frozenset({"0.1"}), 1)


def test_finished_is_when_all_are_gone_and_some_were_done():
    roster = generation_of("0.1", "1.1")
    assert not Roster().finished
    assert not roster.without("0.1", "1.1").finished
    assert not roster.without("0.1", left=True).finished
    assert roster.without("0.1", left=True).without_number(1).finished


STEPS = ("ask", "keep", "undo", "left", "dead", "next")


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([1, 2]))
def test_whatever_happens_no_answer_is_taken_back_and_the_text_is_the_value(seed, length, parts):
    draw = random.Random(seed)
    roster, answers, last = Roster(processes=parts), {}, {}
    ids = [f"{number}.{incarnation}" for number in range(4) for incarnation in (1, 2)]
    for _ in range(length):
        step, id = draw.choice(STEPS), draw.choice(ids)
        generation, round_index = roster.generation, roster.rounds
        silent = frozenset(draw.sample(ids, draw.randrange(3)))
        if step == "ask":
            roster = roster.ask_to_join(id, draw.randrange(-1, 5))
        elif step == "next":
            roster = (
                roster.next(silent) if roster.complete(silent, 2, draw.random() < 0.2) else roster
            )
        elif step in ("left", "dead"):
            roster = roster.without(id, left=step == "left")
        else:
            roster = getattr(roster, step)(generation, round_index)
        assert Roster.of(roster.text) == roster
        numbers = [member.number for member in roster.members]
        assert numbers == sorted(set(numbers))
        assert all(isinstance(member, Member) for member in roster.members)
        for member in roster.ids:
            for at in range(roster.rounds + 1):
                if (answer := roster.settled(roster.generation, at, member)) is not None:
                    key = (roster.generation, at)
                    assert answers.setdefault(key, answer) == answer
                    ends = roster.ends_with(*key, member)
                    assert parts == 1 or last.setdefault(key, ends) == ends
        for sleeper, its, kept, _ in roster.missed:
            for at in range(kept + 1):
                answer = roster.settled(its, at, sleeper)
                assert answer is not None and answers.setdefault((its, at), answer) == answer
                ends = roster.ends_with(its, at, sleeper)
                assert parts == 1 or last.setdefault((its, at), ends) == ends


def test_silence_is_what_was_watched_and_not_what_was_slept():
    monitor = HeartbeatMonitor(stall=5.0)
    monitor.observe({"0.1": 1}, now=0.0)
    monitor.observe({"0.1": 1}, now=1000.0)  # this process was stopped, too
    assert monitor.silent == NONE_SILENT
    for second in range(1001, 1005):
        monitor.observe({"0.1": 1}, now=float(second))
    assert monitor.silent == {"0.1"} and not monitor.has_advanced("0.1")
    monitor.observe({"0.1": 2}, now=1005.0)
    assert monitor.silent == NONE_SILENT and monitor.has_advanced("0.1")
