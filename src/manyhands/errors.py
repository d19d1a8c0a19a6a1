"""The errors that a training script may want to catch.

A mistake in the arguments raises Python's own ValueError, TypeError or RuntimeError. The classes
here stand for events that a correct script can meet: ranks that disagree, and machines that fail.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class RanksDisagree(ValueError):
    """Ranks were given different options, parameters or steps. Every rank raises this error.

    `odd` holds the ranks that differ from the majority. Without a majority it holds the ranks that
    differ from the lowest rank.

    >>> from manyhands.errors import RanksDisagree
    >>> error = RanksDisagree("lr differs: rank 0: 0.1, rank 1: 0.1, rank 2: 0.2", [0.1, 0.1, 0.2])
    >>> error.odd
    frozenset({2})
    """

    def __init__(self, message: str, claims: Sequence[Hashable] = ()) -> None:
        super().__init__(message)
        usual = max(claims, key=list(claims).count, default=None)  # the first of equally many
        self.odd = frozenset(rank for rank, claim in enumerate(claims) if claim != usual)


class WorkerLost(RuntimeError):
    """A sync round of a crew cannot take place, because a worker is lost.

    `numbers` holds the lost workers' numbers, where they are known. `Blocks` catches this error: it
    undoes the round and repeats it with the workers that are left. A script sees it only where
    nobody is left to go on with.

    >>> from manyhands.errors import WorkerLost
    >>> WorkerLost("no heartbeat from worker 3 for 5 s", (3,)).numbers
    (3,)
    """

    def __init__(self, message: str, numbers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.numbers = numbers


class JoinRefused(ValueError):
    """This worker may not join the crew: its options or its model differ from the crew's.

    >>> from manyhands.errors import JoinRefused
    >>> print(JoinRefused(4, ["every: 50 here, 32 in the crew"]))
    worker 4 was not let in: it differs from the workers of this run in
      every: 50 here, 32 in the crew
    Give it the options and the model that the run was begun with, or start a new run.
    """

    def __init__(self, number: int, differs: Sequence[str]) -> None:
        super().__init__(
            f"worker {number} was not let in: it differs from the workers of this run in\n"
            + "".join(f"  {line}\n" for line in differs)
            + "Give it the options and the model that the run was begun with, or start a new run."
        )


class StoreLost(RuntimeError):
    """The store of a crew does not answer. A crew cannot go on without its store.

    >>> from manyhands.errors import StoreLost
    >>> StoreLost("10.0.0.1:29400", "no answer for 30 s").why
    'no answer for 30 s'
    """

    def __init__(self, store: str, why: object) -> None:
        self.why = str(why)
        super().__init__(
            f"the store at {store} is lost: {why}. It is the one place where the workers agree on "
            "who takes part, and it cannot be replaced while they run. Start the store (`manyhands "
            "run` hosts it) and all workers again, from a checkpoint."
        )


class CrewFinished(SystemExit):
    """The other workers finished the run before this worker could join it, or join it again.

    Nothing is wrong. Without a handler the process prints the message and ends, without a
    traceback.

    >>> from manyhands.errors import CrewFinished
    >>> issubclass(CrewFinished, SystemExit)
    True
    """
