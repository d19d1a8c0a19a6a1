"""The states of a block by themselves: which change makes sense when, and what always holds."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manyhands.blocks._block_state import BlockState
from manyhands.blocks.averaging._payload import NO_WORK, Work
from manyhands.blocks.crew._roster import Version

pytestmark = pytest.mark.quick

FRAGMENTS = 3
ALL = tuple(range(FRAGMENTS))


def after(steps, warmup=0, local_warmup=False):
    """Return the state after this many steps, with the round that ends the warm-up."""
    state = BlockState.begin(warmup, local_warmup)
    for _ in range(steps):
        state = state.step()
        if state.steps == warmup:
            state = state.end_warmup().begin_anchor()
    return state


def flags(state):
    return state.has_anchor, state.diverged, state.anchor_in_use


# -- by hand ---------------------------------------------------------------------------------------


def test_in_a_shared_warm_up_workers_stay_equal_and_hold_the_state():
    start, middle = after(0, 2), after(1, 2)
    assert flags(start) == flags(middle) == (True, False, False)
    assert start.steps_together and middle.steps_together and not after(2, 2).steps_together
    end = middle.step().end_warmup()
    assert flags(end) == (True, False, False)
    assert (
        Version(0) < middle.version < end.version < end.begin_anchor().version < after(3, 2).version
    )
    assert flags(after(2, 2)) == (True, False, True) and flags(after(3, 2)) == (True, True, True)


def test_a_joiner_is_a_newcomer_until_it_has_held_a_round():
    joined = BlockState().join(7, 1, diverged=True, retry=[]).step()
    assert joined.version == Version(1, False, 8)
    assert joined.send(ALL).undo(ALL).regroup().newcomer
    held = joined.send(ALL).commit(complete=True, diverges=False)
    assert held.version == Version(2, True, 8) and not joined.load(8, 1).newcomer


def test_work_is_what_no_kept_round_has_yet():
    state = after(0).step(samples=8).step(samples=4).step()
    assert (state.own, state.work) == (3, Work(3, 2, 12))
    sent = state.send(ALL)
    later = sent.step(samples=1)
    assert later.undo().work == Work(4, 3, 13)  # sent again with what was done since
    merged = later.commit(complete=True, diverges=True, work=sent.work)
    assert merged.work == Work(1, 1, 1) and merged.own == 4
    for gives_up in (
        lambda s: s.drop_steps(),
        lambda s: s.return_to_anchor(),
        lambda s: s.join(9, 2, diverged=False, retry=[]),
        lambda s: s.load(9, 2, own=4),
    ):
        assert gives_up(merged).work == NO_WORK and gives_up(merged).own == 4
    assert merged.load(9, 2, own=7, work=Work(2)).work == Work(2)


def test_steps_that_are_given_up_are_counted_and_those_along_a_mean_are_not():
    state = after(3).send(ALL).step()  # 3 in flight, and a fourth
    late = state.undo().join(20, 4, diverged=False, retry=[])
    assert (late.own, late.dropped, late.work) == (4, 4, NO_WORK)
    assert late.step().drop_steps().dropped == 5
    assert late.step().return_to_anchor().dropped == 5
    merged = state.commit(complete=True, diverges=True, work=Work(3))
    assert merged.join(20, 4, diverged=False, retry=[]).dropped == 1
    assert after(1, 2).join(2, 0, diverged=False, retry=[]).dropped == 0  # in a shared warm-up
    assert after(1, 2, True).join(2, 0, diverged=False, retry=[]).dropped == 1
    assert merged.load(9, 2, own=7, dropped=3).dropped == 3


# -- any sequence of changes -----------------------------------------------------------------------


# Rounds that end a warm-up and are undone: whether the others go on without this worker.
UNDONE = st.lists(st.booleans(), max_size=2)


class Life(RuleBasedStateMachine):
    """One worker, whose state changes in the order in which `Sync` changes it.

    What the others and the network do is drawn. `moved` are the fragments whose parameters are not
    at the anchor, `sent` the rounds in flight: the model that the state is compared with.
    """

    @initialize(warmup=st.integers(0, 3), local=st.booleans())
    def begin(self, warmup, local):
        self.state = BlockState.begin(warmup, local)
        self.moved, self.sent, self.steps_since_joining = set(), [], 1
        self.unmerged = 0  # steps that are in no kept round
        self.given_up = 0  # steps that never will be

    def change(self, state, falls=False):
        assert falls or state.version >= self.state.version
        self.state = state

    def settle(self, kept, elastic, joins, due=()):
        """The oldest round in flight is kept, or undone; then the members regroup."""
        fragments, overlaps, work = self.sent.pop(0)
        if not kept:
            self.change(self.state.undo([] if overlaps else fragments))
            self.regroup(joins, due)
            return
        complete = len(fragments) == FRAGMENTS
        # Of two rounds in flight, the second was sent with the first one's work, too.
        self.sent = [(these, flag, later.minus(work)) for these, flag, later in self.sent]
        self.change(self.state.commit(complete=complete, diverges=overlaps, work=work))
        self.unmerged -= work.steps
        if not overlaps:
            self.moved -= set(fragments)
        if elastic:
            self.regroup(joins, due)

    def regroup(self, joins, due=()):
        """All members begin without rounds in flight; this one may be behind the others."""
        self.sent.clear()
        self.change(self.state.regroup(due))
        if joins:
            further = self.state.begin_anchor() if self.state.ends_warmup else self.state
            source = replace(further, steps=further.steps + 1, rounds=further.rounds + 1)
            others = {"diverged": source.diverged, "retry": source.retry}
            self.given_up += self.unmerged if self.state.diverged else 0
            joined = self.state.join(source.steps, source.rounds, **others)
            assert not joined.contributes
            self.change(joined, falls=not joined.has_anchor)
            self.moved, self.steps_since_joining, self.unmerged = set(), 0, 0
        assert self.state.in_flight == 0
        assert not due or not self.state.diverged or self.state.retry == tuple(due)
        if self.state.retry:
            self.send(self.state.retry, overlaps=False)
            self.settle(True, False, False)

    def send(self, fragments, overlaps):
        self.sent.append((tuple(fragments), overlaps, self.state.work))
        self.change(self.state.send(fragments))

    def begin_anchor(self, undone):
        """Hold the round that ends the warm-up, unless the others have held it."""
        for joins in undone:
            self.regroup(joins)
        if self.state.ends_warmup:
            self.change(self.state.begin_anchor())
            self.moved, self.unmerged = set(), 0

    @precondition(lambda self: not self.sent and self.state.warmup)
    @rule(undone=UNDONE, diverged=st.booleans())
    def join_as_a_warmup_ends(self, undone, diverged):
        self.given_up += self.unmerged if self.state.diverged else 0
        told = {"diverged": diverged, "retry": [], "ends_warmup": True}
        self.change(self.state.join(self.state.warmup, self.state.rounds, **told), falls=True)
        assert not self.state.contributes
        self.moved, self.steps_since_joining, self.unmerged = set(), 0, 0
        self.begin_anchor(undone)

    @rule(undone=UNDONE, ahead=st.none() | st.integers(0, 5))
    def step(self, undone, ahead):
        blocks = self.state.steps >= max(self.state.warmup, 1)
        count = self.state.steps + ahead if ahead is not None and blocks else None
        self.change(self.state.step(count))
        self.steps_since_joining += 1
        self.unmerged += 1
        if count is not None:
            self.moved = set(ALL)
            return
        if self.state.local_warmup or self.state.steps > self.state.warmup:
            self.moved = set(ALL)
        if self.state.steps == self.state.warmup:
            before = self.state.version
            self.change(self.state.end_warmup(), falls=True)
            assert self.state.version == before._replace(settled=False) < before
            self.begin_anchor(undone)

    @precondition(lambda self: self.state.diverged and not self.state.before_blocks)
    @rule(fragments=st.sets(st.sampled_from(ALL), min_size=1))
    def send_with_overlap(self, fragments):
        self.send(sorted(fragments), overlaps=True)

    @precondition(lambda self: self.sent)
    @rule(
        kept=st.booleans(),
        elastic=st.booleans(),
        joins=st.booleans(),
        due=st.sampled_from([(), ALL]),
    )
    def merge(self, kept, elastic, joins, due):
        self.settle(kept, elastic, joins, due)

    @precondition(lambda self: self.state.diverged and not self.sent)
    @rule(
        fragments=st.sets(st.sampled_from(ALL), min_size=1),
        kept=st.booleans(),
        elastic=st.booleans(),
        joins=st.booleans(),
    )
    def synchronize(self, fragments, kept, elastic, joins):
        self.send(sorted(fragments), overlaps=False)
        self.settle(kept, elastic, joins)

    @precondition(lambda self: self.sent)
    @rule()
    def fail(self):
        self.sent.pop(0)
        self.change(self.state.undo())

    @precondition(lambda self: not self.sent)
    @rule(steps=st.integers(0, 9))
    def set_steps(self, steps):
        self.change(self.state.continue_at(steps), falls=True)

    @precondition(lambda self: not self.sent and self.state.anchor_in_use)
    @rule()
    def leave(self):
        self.given_up += self.unmerged if self.state.diverged else 0
        self.change(self.state.return_to_anchor())
        self.moved, self.unmerged = set(), 0

    @rule()
    def is_not_finite(self):
        self.given_up += self.unmerged if self.state.diverged else 0
        self.change(self.state.drop_steps())
        self.sent = [(fragments, overlaps, NO_WORK) for fragments, overlaps, _ in self.sent]
        self.unmerged = 0

    @precondition(lambda self: not self.state.before_blocks)
    @rule(steps=st.integers(0, 9))
    def end_block(self, steps):
        self.change(self.state.end_block(self.state.steps + steps))

    @rule(steps=st.integers(0, 9), rounds=st.integers(0, 3), diverged=st.booleans())
    def load(self, steps, rounds, diverged):
        self.change(self.state.load(steps, rounds, diverged=diverged), falls=True)
        self.moved = set(ALL) if diverged else set()
        self.sent, self.steps_since_joining, self.unmerged = [], 1, 0
        self.given_up = 0

    @invariant()
    def no_step_is_weighed_twice_or_not_at_all(self):
        assert self.state.work.steps == self.unmerged
        assert self.state.dropped == self.given_up

    @invariant()
    def at_the_anchor_unless_it_says_so(self):
        assert self.state.diverged or not self.moved

    @invariant()
    def nothing_is_in_flight_at_the_anchor(self):
        assert self.state.in_flight == len(self.sent)
        assert self.state.diverged or not self.sent

    @invariant()
    def nothing_is_left_to_be_repeated(self):
        assert self.state.retry == ()

    @invariant()
    def a_joiner_contributes_nothing_until_it_steps(self):
        assert self.state.contributes or self.steps_since_joining == 0

    @invariant()
    def the_version_is_that_of_the_state_it_holds(self):
        state = self.state
        assert state.version.has_state == state.has_anchor
        assert state.has_anchor or state.local_warmup

    @invariant()
    def no_warm_up_is_left_to_be_ended(self):
        assert not self.state.ends_warmup


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=30)
