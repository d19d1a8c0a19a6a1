"""Describe a worker's place in the life of a block as an immutable value, and all its changes.

    warmup        steps before the first block
    local_warmup  in the warm-up each worker follows its own gradients; otherwise all workers step
                  along their mean, and stay equal
    steps         steps taken; a joiner continues from the number of the members
    rounds        sync rounds that took place
    has_anchor    this worker holds the common state: not so in a local warm-up
    ends_warmup   the warm-up's last step was taken, and the round that makes the first anchor is
                  still to be held, before anything else; a worker that joins meanwhile holds it too
    diverged      parameters may differ from the anchor
    just_joined   no step was taken since the state transfer, so this worker has no contribution
    newcomer      no round was held since the start or the state transfer, and no state was loaded
    retry         fragments that the members synchronize as soon as they have regrouped: those of
                  an undone round, or those that `synchronize()` was about to send
    in_flight     rounds that were sent, and neither merged nor undone yet
    own           steps that this worker has taken itself, since the run began
    work          of these steps, those that no kept round has merged, and that were not given up
    dropped       of these steps, those that were given up: they are in no mean, and never will be
    joins         state transfers that this worker has received

These three hold until the next step:

    joined_late   this worker has received the state of a run under way
    has_let_in    this worker was a member when others received the state
    state_dropped the optimizer's state was not finite, and was deleted: it is incomplete

A block with one round:

                     step               send                commit
        at the anchor ──▶ diverged ───────────▶ in flight ───────────▶ at the anchor
                             ▲                     │ undo
                             └── send ◀── retry ◀──┘

With overlap or fragments a worker stays diverged after a commit: steps were taken meanwhile, or
other fragments have moved on. The end of a warm-up has a separate round:

                     step               end_warmup                 begin_anchor
          a warm-up ──────▶ its last step ──────▶ ends the warm-up ────────────▶ at the anchor
                                                    │         ▲
                                      the round is undone, or members change

Three things always hold:

    something is in flight, or to be repeated    ⇒  diverged
    something is to be repeated                  ⇒  nothing is in flight
    ends the warm-up                             ⇒  after `warmup` steps, with neither of them

Everything here is plain values: no tensors, no process group, no clock. `Sync` (_sync.py) holds one
of these values. When it changes the value, it also carries out the change: it sends, waits, or
moves parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.blocks.averaging._payload import NO_WORK, Work
from manyhands.blocks.crew._roster import Version


@dataclass(frozen=True)
class BlockState:
    """One worker's state. Each method that changes something returns a new state.

    A change that makes no sense in the present state is an AssertionError.
    """

    warmup: int = 0
    local_warmup: bool = False
    steps: int = 0
    rounds: int = 0
    has_anchor: bool = True
    ends_warmup: bool = False
    diverged: bool = False
    just_joined: bool = False
    newcomer: bool = True
    retry: tuple[int, ...] = ()
    in_flight: int = 0
    own: int = 0
    work: Work = NO_WORK
    dropped: int = 0
    joins: int = 0
    joined_late: bool = False
    has_let_in: bool = False
    state_dropped: bool = False

    def __post_init__(self) -> None:
        """Check the three invariants (see above); a failure is an error in this package."""
        assert min(self.work) >= 0, f"more work was merged than was done: {self}"
        assert self.in_flight >= 0, f"a round ends that was not sent: {self}"
        assert not (self.retry and self.in_flight), f"a round overtakes a repeated one: {self}"
        sends = bool(self.in_flight or self.retry)
        assert self.diverged or not sends, f"nothing to send: {self}"
        at_end = self.steps == self.warmup and not sends
        assert at_end or not self.ends_warmup, f"no end of a warm-up: {self}"

    @classmethod
    def begin(cls, warmup: int, local_warmup: bool) -> BlockState:
        """Return the state before the first step."""
        return cls(warmup, local_warmup)._at(0, 0)

    # -- questions -----------------------------------------------------------------------------

    @property
    def version(self) -> Version:
        """How far this worker is; its state is the anchor."""
        rounds = self.rounds if self.has_anchor else -1
        return Version(rounds, not self.newcomer, self.steps, not self.ends_warmup)

    @property
    def contributes(self) -> bool:
        """Whether this worker's difference from the anchor is the result of its steps."""
        return not self.just_joined

    @property
    def before_blocks(self) -> bool:
        """Whether the first block has not begun: its anchor is still to be made."""
        return self.steps <= self.warmup

    @property
    def steps_together(self) -> bool:
        """Whether the next step follows the mean of all workers' gradients."""
        return self.steps < self.warmup and not self.local_warmup

    @property
    def in_local_warmup(self) -> bool:
        """Whether the next step is one of a local warm-up."""
        return self.steps < self.warmup and self.local_warmup

    @property
    def anchor_in_use(self) -> bool:
        """Whether the workers have agreed on the anchor (not so in a warm-up)."""
        return self.has_anchor and self.steps >= self.warmup and not self.ends_warmup

    # -- steps ---------------------------------------------------------------------------------

    def step(self, steps: int | None = None, samples: int | None = None) -> BlockState:
        """Count a step. Workers part with it, except in a shared warm-up."""
        # `steps` is the common count after it, if it is not one more than before: workers may take
        # different numbers of steps in a block. `samples`: those of this step, if they are known.
        assert not self.retry, f"a step before an undone round is repeated: {self}"
        assert not self.ends_warmup, f"a step before the round that ends the warm-up: {self}"
        # Workers that were apart stay so in a shared warm-up, as when the steps are set back.
        diverged = self.diverged or not self.steps_together
        # Written out: `replace` takes several times as long, and every step comes here.
        return BlockState(
            self.warmup,
            self.local_warmup,
            self.steps + 1 if steps is None else steps,
            self.rounds,
            self.has_anchor,
            diverged=diverged,
            just_joined=False,
            newcomer=self.newcomer,
            in_flight=self.in_flight,
            own=self.own + 1,
            work=self.work.plus(samples),
            dropped=self.dropped,
            joins=self.joins,
        )

    def end_block(self, steps: int) -> BlockState:
        """End the block before all of its steps were taken, at this common count."""
        assert self.steps <= steps and not self.retry, f"no block to end: {self}"
        return replace(self, steps=steps)

    def continue_at(self, steps: int) -> BlockState:
        """Count on from this number of steps: a user has set it, or loaded no state of blocks."""
        assert not self.in_flight, f"merge what is in flight first: {self}"
        assert not self.ends_warmup, f"hold the round that ends the warm-up first: {self}"
        # After the warm-up the workers had agreed on an anchor, in the run that is continued.
        has_anchor = self.has_anchor or steps >= self.warmup
        return replace(self, steps=steps, has_anchor=has_anchor)

    # -- the end of a warm-up ------------------------------------------------------------------

    def end_warmup(self) -> BlockState:
        """Ask for the round that makes the first anchor, after the last step of the warm-up."""
        return replace(self, ends_warmup=True)

    def begin_anchor(self) -> BlockState:
        """Make the parameters, which are equal on all workers now, the first anchor."""
        assert self.ends_warmup, f"no warm-up ends: {self}"
        return replace(
            self, has_anchor=True, ends_warmup=False, diverged=False, newcomer=False, work=NO_WORK
        )

    # -- a sync round --------------------------------------------------------------------------

    def send(self, fragments: Sequence[int]) -> BlockState:
        """Begin a round about these fragments. One that is to be repeated comes before others."""
        assert not self.retry or self.retry == tuple(fragments), f"not what is repeated: {self}"
        assert not self.ends_warmup, f"not the round that ends the warm-up: {self}"
        return replace(self, in_flight=self.in_flight + 1, retry=())

    def commit(self, *, complete: bool, overlaps: bool, work: Work = NO_WORK) -> BlockState:
        """Count the oldest round in flight: it took place, and is merged."""
        # `complete`: all fragments were in it. `overlaps`: steps were taken while it was in flight.
        # `work`: the steps that this worker sent with it.
        return replace(
            self,
            rounds=self.rounds + 1,
            diverged=overlaps or not complete,
            just_joined=False,
            newcomer=False,
            in_flight=self.in_flight - 1,
            work=self.work.minus(work),
        )

    def undo(self, retry: Sequence[int] = ()) -> BlockState:
        """Give up the oldest round in flight, and repeat these fragments of it."""
        return replace(self, in_flight=self.in_flight - 1, retry=tuple(retry))

    def return_to_anchor(self) -> BlockState:
        """Give up the steps of this block: the parameters are at the anchor again."""
        assert self.anchor_in_use and not self.in_flight, f"no anchor to return to: {self}"
        return replace(self.drop_steps(), diverged=False)

    def drop_steps(self) -> BlockState:
        """Give up the steps that are in no kept round, such as those of values not finite."""
        # In a shared warm-up the workers step along their mean, and no step is lost.
        lost = self.work.steps if self.diverged else 0
        return replace(self, work=NO_WORK, dropped=self.dropped + lost)

    # -- members and state that change ---------------------------------------------------------

    def regroup(self, due: Sequence[int] = ()) -> BlockState:
        """Give up all rounds in flight: other members begin without them."""
        # If workers are apart, the new members hold a round about the fragments that are `due`.
        retry = tuple(due) if due and self.diverged else self.retry
        return replace(self, in_flight=0, retry=retry)

    def join(
        self,
        steps: int,
        rounds: int,
        *,
        diverged: bool,
        retry: Sequence[int],
        ends_warmup: bool = False,
    ) -> BlockState:
        """Take over another member's state.

        A joiner takes part in a round that is repeated, although it does not contribute, and in the
        round that ends a warm-up. A member that came too late gives up its steps: they started from
        an anchor that the other members have left.
        """
        assert not self.in_flight, f"rounds of former members are in flight: {self}"
        state = replace(
            self.drop_steps(),
            ends_warmup=False,
            diverged=diverged,
            just_joined=True,
            newcomer=True,
            retry=tuple(retry),
            joins=self.joins + 1,
            joined_late=steps > 0,  # otherwise the run begins for all members
        )
        return state._at(steps, rounds, ends_warmup)

    def forget_rounds(self) -> BlockState:
        """Give up the rounds in flight, because other values are loaded."""
        return replace(
            self,
            in_flight=0,
            ends_warmup=False,
            just_joined=False,
            newcomer=False,
            state_dropped=False,
        )

    def load(
        self,
        steps: int,
        rounds: int,
        *,
        diverged: bool = False,
        own: int = 0,
        work: Work = NO_WORK,
        dropped: int = 0,
    ) -> BlockState:
        """Continue from saved counters, with no round in flight."""
        now = self.forget_rounds()
        now = replace(now, own=own, work=work, dropped=dropped, diverged=diverged)
        return now._at(steps, rounds)

    def _at(self, steps: int, rounds: int, ends_warmup: bool = False) -> BlockState:
        """Return the state with these counters, which decide whether there is an anchor."""
        begun = steps >= self.warmup and not ends_warmup
        has = begun or not self.local_warmup
        return replace(self, steps=steps, rounds=rounds, has_anchor=has, ends_warmup=ends_warmup)
