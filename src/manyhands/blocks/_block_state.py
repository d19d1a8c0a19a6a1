"""`BlockState`: a worker's place in a block, as an immutable value.

    warmup        steps before the first block
    local_warmup  warm-up steps follow local gradients, instead of the workers' mean
    steps         number of steps; a joiner continues from the members' number
    rounds        completed sync rounds
    has_anchor    the common state is valid; False in a local warm-up
    ends_warmup   the next action is the round that makes the first anchor, also for joiners
    diverged      parameters may differ from the anchor
    just_joined   no step since the state transfer, so this worker has no contribution
    newcomer      no round since the start or the state transfer, and no state loaded
    retry         fragments to synchronize right after the members have regrouped: from an undone
                  round, or from an interrupted `synchronize()`
    in_flight     rounds sent, but neither merged nor undone
    own           steps of this worker since the start of the run
    work          steps (and samples) of this worker, neither merged nor dropped
    dropped       steps of this worker that are in no mean
    joins         state transfers received

Three fields are reset by the next step:

    joined_late   this worker received the state of a running job
    has_let_in    this worker was a member during a state transfer to joiners
    state_dropped the optimizer state was not finite and was deleted, so it is incomplete

A block with one round:

                     step               send                commit
        at the anchor ──▶ diverged ───────────▶ in flight ───────────▶ at the anchor
                             ▲                     │ undo
                             └── send ◀── retry ◀──┘

With overlap or fragments, a worker remains diverged after a commit. The end of a warm-up:

                     step               end_warmup                 begin_anchor
          a warm-up ──────▶ its last step ──────▶ ends the warm-up ────────────▶ at the anchor
                                                    │         ▲
                                        the round is undone, or members change

Invariants:

    in_flight or retry  ⇒  diverged
    retry               ⇒  not in_flight
    ends_warmup         ⇒  steps == warmup, without in_flight or retry

`Sync` (_sync.py) owns a state and carries out the transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.blocks.averaging._payload import NO_WORK, Work
from manyhands.blocks.crew._roster import Version


@dataclass(frozen=True)
class BlockState:
    """The state of a worker. Methods return a new state, and assert that they are valid now."""

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
        assert min(self.work) >= 0, f"more work was merged than was done: {self}"
        assert self.in_flight >= 0, f"a round ends that was not sent: {self}"
        assert not (self.retry and self.in_flight), f"a round overtakes a repeated one: {self}"
        sends = bool(self.in_flight or self.retry)
        assert self.diverged or not sends, f"nothing to send: {self}"
        at_end = self.steps == self.warmup and not sends
        assert at_end or not self.ends_warmup, f"no end of a warm-up: {self}"

    @classmethod
    def begin(cls, warmup: int, local_warmup: bool) -> BlockState:
        return cls(warmup, local_warmup)._at(0, 0)

    # -- questions -----------------------------------------------------------------------------

    @property
    def version(self) -> Version:
        rounds = self.rounds if self.has_anchor else -1
        return Version(rounds, not self.newcomer, self.steps, not self.ends_warmup)

    @property
    def contributes(self) -> bool:
        return not self.just_joined

    @property
    def before_blocks(self) -> bool:
        return self.steps <= self.warmup

    @property
    def steps_together(self) -> bool:
        return self.steps < self.warmup and not self.local_warmup

    @property
    def anchor_in_use(self) -> bool:
        """Whether all workers have agreed on the anchor."""
        return self.has_anchor and self.steps >= self.warmup and not self.ends_warmup

    # -- steps ---------------------------------------------------------------------------------

    def step(self, steps: int | None = None, samples: int | None = None) -> BlockState:
        """Count a step; `steps` is the common count afterwards, by default one more."""
        assert not self.retry, f"a step before an undone round is repeated: {self}"
        assert not self.ends_warmup, f"a step before the round that ends the warm-up: {self}"
        # Diverged workers remain diverged in a shared warm-up, such as after `set_num_updates`.
        diverged = self.diverged or not self.steps_together
        # Not `replace`, which is several times slower.
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
        assert self.steps <= steps and not self.retry, f"no block to end: {self}"
        return replace(self, steps=steps)

    def continue_at(self, steps: int) -> BlockState:
        """Continue from a number of steps, set by the user or loaded without state of blocks."""
        assert not self.in_flight, f"merge what is in flight first: {self}"
        assert not self.ends_warmup, f"hold the round that ends the warm-up first: {self}"
        # After a warm-up, the workers had agreed on an anchor.
        has_anchor = self.has_anchor or steps >= self.warmup
        return replace(self, steps=steps, has_anchor=has_anchor)

    # -- the end of a warm-up ------------------------------------------------------------------

    def end_warmup(self) -> BlockState:
        return replace(self, ends_warmup=True)

    def begin_anchor(self) -> BlockState:
        assert self.ends_warmup, f"no warm-up ends: {self}"
        return replace(
            self, has_anchor=True, ends_warmup=False, diverged=False, newcomer=False, work=NO_WORK
        )

    # -- a sync round --------------------------------------------------------------------------

    def send(self, fragments: Sequence[int]) -> BlockState:
        assert not self.retry or self.retry == tuple(fragments), f"not what is repeated: {self}"
        assert not self.ends_warmup, f"not the round that ends the warm-up: {self}"
        return replace(self, in_flight=self.in_flight + 1, retry=())

    def commit(self, *, complete: bool, diverges: bool, work: Work = NO_WORK) -> BlockState:
        """Count the oldest round in flight as merged, with this worker's `work`.

        `complete`: the round had all fragments. `diverges`: the merged parameters may differ from
        the anchor.
        """
        return replace(
            self,
            rounds=self.rounds + 1,
            diverged=diverges or not complete,
            just_joined=False,
            newcomer=False,
            in_flight=self.in_flight - 1,
            work=self.work.minus(work),
        )

    def undo(self, retry: Sequence[int] = ()) -> BlockState:
        return replace(self, in_flight=self.in_flight - 1, retry=tuple(retry))

    def return_to_anchor(self) -> BlockState:
        """Drop the steps of this block: the parameters are at the anchor again."""
        assert self.anchor_in_use and not self.in_flight, f"no anchor to return to: {self}"
        return replace(self.drop_steps(), diverged=False)

    def drop_steps(self) -> BlockState:
        """Drop the steps that no completed round contains, such as non-finite values."""
        # A shared warm-up loses no step, because all workers step along the mean.
        lost = self.work.steps if self.diverged else 0
        return replace(self, work=NO_WORK, dropped=self.dropped + lost)

    # -- members and state that change ---------------------------------------------------------

    def regroup(self, due: Sequence[int] = ()) -> BlockState:
        """Abandon all rounds in flight; diverged new members synchronize the fragments `due`."""
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

        A joiner takes part in a retry, without contributing, and in the round that ends a warm-up.
        A late member drops steps, which started from an old anchor.
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
            joined_late=steps > 0,  # at 0 steps the run starts for all members
        )
        return state._at(steps, rounds, ends_warmup)

    def forget_rounds(self) -> BlockState:
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
        now = self.forget_rounds()
        now = replace(now, own=own, work=work, dropped=dropped, diverged=diverged)
        return now._at(steps, rounds)

    def _at(self, steps: int, rounds: int, ends_warmup: bool = False) -> BlockState:
        started = steps >= self.warmup and not ends_warmup
        has = started or not self.local_warmup
        return replace(self, steps=steps, rounds=rounds, has_anchor=has, ends_warmup=ends_warmup)
