"""The roster by itself: which change wins, which members count, and what each one learns."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew._roster import Member, Roster, Version

pytestmark = pytest.mark.quick

NONE_SILENT: frozenset[str] = frozenset()


def ask(roster, *members):
    """These ask to join, each given by its id and what its version is made of."""
    for id, *version in members:
        roster = roster.ask_to_join(Member(id, Version(*version)))
    return roster


def generation_of(*ids, version=3):
    """Return a roster with a generation of these members, in its first round."""
    return ask(Roster(), *((id, version) for id in ids)).next(NONE_SILENT)


def test_a_start_waits_for_the_expected_workers_unless_it_is_late():
    roster = ask(Roster(), ("2.1", -1), ("0.1", -1))
    assert not roster.complete(NONE_SILENT, 3)
    assert roster.complete(NONE_SILENT, 3, late=True)
    whole = ask(roster, ("1.1", -1))
    assert whole.complete(NONE_SILENT, 3)
    assert whole.next(NONE_SILENT).ids == ("0.1", "1.1", "2.1")


def test_source_is_the_first_rank_if_no_member_holds_a_state():
    roster = generation_of("0.1", "1.1", version=-1)
    assert (roster.source, roster.joiners) == (0, (1,))


def test_source_is_the_first_rank_with_the_highest_version_and_joiners_are_those_below():
    roster = ask(Roster(), ("0.2", -1), ("1.1", 7), ("2.1", 7), ("3.1", 6)).next(NONE_SILENT)
    assert (roster.source, roster.joiners) == (1, (0, 3))
    assert generation_of("0.1", "1.1").joiners == ()


@pytest.mark.parametrize(("steps", "joiners"), [(15, ()), (18, (0,))])
def test_the_steps_of_a_newcomer_set_no_other_worker_forward(steps, joiners):
    newcomer, others = ("0.1", 3, False, steps), [("1.1", 3, True, 15), ("2.1", 3, True, 15)]
    roster = ask(Roster(), newcomer, *others).next(NONE_SILENT)
    assert (roster.source, roster.joiners) == (1, joiners)
    # Without an established worker the steps decide: one that has just started sets nobody back.
    lost = roster.undo(1, 0).without("1.1", "2.1")
    lost = ask(lost, ("1.2", 3), newcomer).next(NONE_SILENT)
    assert (lost.source, lost.joiners) == (0, (1,))


def test_keep_and_undo_change_nothing_once_a_round_is_settled():
    roster = generation_of("0.1", "1.1")
    assert roster.settled(1, 0, "0.1") is None
    kept = roster.keep(1, 0)
    assert kept.undo(1, 0) == kept and kept.settled(1, 0, "0.1") is True
    undone = roster.undo(1, 0)
    assert undone.keep(1, 0) == undone and undone.settled(1, 0, "0.1") is False
    assert kept.settled(1, 1, "0.1") is None  # the next one


def test_keep_ends_the_generation_if_a_process_waits_or_a_member_is_gone():
    roster = generation_of("0.1", "1.1")
    assert not roster.keep(1, 0).ended
    assert ask(roster, ("2.1", -1)).keep(1, 0).ended
    assert roster.without("1.1").keep(1, 0).ended


def test_the_next_generation_waits_for_absent_members_unless_they_are_silent():
    roster = ask(generation_of("0.1", "1.1", "2.1").undo(1, 0), ("0.1", 3), ("3.1", -1))
    assert roster.absent(NONE_SILENT) == ("1.1", "2.1")
    roster = roster.without("2.1")
    assert not roster.complete(NONE_SILENT, 4)
    assert roster.complete(frozenset({"1.1"}), 4)
    assert roster.next(frozenset({"1.1"})).ids == ("0.1", "3.1")


def test_a_missed_member_learns_whether_its_round_was_kept_and_a_dead_one_is_forgotten():
    roster = generation_of("0.1", "1.1", "2.1").keep(1, 0).undo(1, 1).without("2.1")
    roster = ask(roster, ("0.1", 4)).next(frozenset({"1.1"})).keep(2, 0).undo(2, 1)
    roster = ask(roster, ("0.1", 5)).next(NONE_SILENT)
    assert roster.settled(1, 0, "1.1") is True
    assert roster.settled(1, 1, "1.1") is False
    assert roster.missed == (("1.1", 1, 1, False),)
    assert ask(roster, ("1.2", 4)).missed == ()  # it is back
    with pytest.raises(RuntimeError, match="worker 1 was stopped for some time"):
        ask(roster, ("1.2", 4)).settled(1, 0, "1.1")


def test_no_generation_begins_with_two_processes_of_one_number():
    roster = ask(Roster(), ("0.1", -1), ("0.2", -1))
    assert not roster.complete(NONE_SILENT, 2, late=True)
    assert roster.complete(frozenset({"0.1"}), 1)


def test_finished_means_all_members_are_gone_and_one_of_them_left():
    roster = generation_of("0.1", "1.1")
    assert not Roster().finished
    assert not roster.without("0.1", "1.1").finished
    assert not roster.without("0.1", left=True).finished
    assert roster.without("0.1", left=True).without_number(1).finished


def test_ends_with_is_true_for_the_round_after_which_a_generation_regroups_and_for_no_other():
    roster = generation_of("0.1", "1.1").keep(1, 0)
    assert not roster.ends_with(1, 0, "0.1")  # nobody waits, so there is another round
    kept = ask(roster, ("2.1", -1)).keep(1, 1)
    assert [kept.ends_with(1, at, "0.1") for at in (0, 1)] == [False, True]
    undone = roster.undo(1, 1)
    assert [undone.ends_with(1, at, "0.1") for at in (0, 1)] == [False, True]


def test_a_process_that_asks_again_waits_once_with_its_latest_version():
    roster = ask(Roster(), ("0.1", 3), ("0.1", 4))
    assert roster.waiting == (Member("0.1", Version(4)),)


def test_all_is_lost_only_if_a_sync_round_was_kept_and_no_survivor_joins():
    begun = generation_of("0.1", "1.1").keep(1, 0)
    transferred = generation_of("0.1", "1.1").keep(1, 0, sync_round=False)
    survivor = ask(begun.undo(1, 1).without("1.1"), ("0.1", 4), ("1.2", -1))
    strangers = ask(begun.without("0.1", "1.1"), ("0.2", -1))
    checkpoint = ask(begun.without("0.1", "1.1"), ("0.2", 4))
    nothing_to_lose = ask(transferred.without("0.1", "1.1"), ("0.2", -1))
    assert strangers.next(NONE_SILENT).all_lost
    assert not survivor.next(NONE_SILENT).all_lost
    assert not checkpoint.next(NONE_SILENT).all_lost
    assert not nothing_to_lose.next(NONE_SILENT).all_lost


def test_an_error_of_a_member_ends_the_run_only_before_the_first_sync_round():
    roster = generation_of("0.1", "1.1")
    assert roster.fail("0.1").failed == ("0.1",)
    assert ask(roster, ("2.1", -1)).fail("2.1").failed == ()  # no member
    after = roster.keep(1, 0).fail("0.1")
    assert (after.failed, after.dead) == ((), ("0.1",))


def test_a_member_closes_at_one_round_and_the_next_generation_forgets_it():
    roster = generation_of("0.1", "1.1").close("0.1", 1, 0, steps=8).close("0.1", 1, 1, steps=10)
    assert roster.closing_at(0) == {}
    assert roster.closing_at(1) == {"0.1": 10}
    assert roster.close("0.1", 2, 1, steps=12) == roster  # of another generation
    regrouped = ask(roster.undo(1, 1), ("0.1", 3)).without("1.1").next(NONE_SILENT)
    assert regrouped.closing_at(1) == {}


def test_a_missed_member_that_ends_is_forgotten():
    roster = ask(generation_of("0.1", "1.1").undo(1, 0), ("0.1", 3)).next(frozenset({"1.1"}))
    assert [missed.id for missed in roster.missed] == ["1.1"]
    assert roster.without("1.1").missed == ()


STEPS = ("ask", "keep", "undo", "left", "dead", "next")


@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([1, 2]))
def test_no_change_takes_a_settled_answer_back_and_the_text_restores_the_roster(
    seed, length, parts
):
    draw = random.Random(seed)
    roster, answers, last = Roster(processes=parts), {}, {}
    ids = [f"{number}.{incarnation}" for number in range(4) for incarnation in (1, 2)]
    for _ in range(length):
        step, id = draw.choice(STEPS), draw.choice(ids)
        generation, round_index = roster.generation, roster.rounds
        silent = frozenset(draw.sample(ids, draw.randrange(3)))
        if step == "ask":
            roster = ask(roster, (id, draw.randrange(-1, 5), draw.randrange(3)))
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


def test_a_heartbeat_monitor_counts_only_silence_that_it_watched():
    monitor = HeartbeatMonitor(stall=5.0)
    monitor.observe({"0.1": 1}, now=0.0)
    monitor.observe({"0.1": 1}, now=1000.0)  # this process was stopped, too
    assert monitor.silent == NONE_SILENT
    for second in range(1001, 1005):
        monitor.observe({"0.1": 1}, now=float(second))
    assert monitor.silent == {"0.1"} and not monitor.has_advanced("0.1")
    monitor.observe({"0.1": 2}, now=1005.0)
    assert monitor.silent == NONE_SILENT and monitor.has_advanced("0.1")
