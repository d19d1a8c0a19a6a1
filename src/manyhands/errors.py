"""Exceptions that a training script may want to catch.

Invalid arguments raise the built-in ValueError, TypeError or RuntimeError. The classes in this
module report events that also occur in correct scripts, such as machine failures.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class RanksDisagree(ValueError):
    """Ranks were given different options, parameters or steps. Every rank raises this error.

    `odd` contains the ranks that differ from the majority or, if no majority exists, from the
    lowest rank.

    >>> from manyhands.errors import RanksDisagree
    >>> error = RanksDisagree("lr differs: rank 0: 0.1, rank 1: 0.1, rank 2: 0.2", [0.1, 0.1, 0.2])
    >>> error.odd
    frozenset({2})
    """

    def __init__(self, message: str, claims: Sequence[Hashable] = ()) -> None:
        super().__init__(message)
        usual = max(claims, key=list(claims).count, default=None)  # the first in a tie
        self.odd = frozenset(rank for rank, claim in enumerate(claims) if claim != usual)


class WorkerLost(RuntimeError):
    """A crew lost a worker and cannot complete a sync round.

    `numbers` lists the lost workers, if known. `Blocks` catches this error, undoes the round and
    repeats it with the remaining workers. A script receives it only if no worker remains.

    >>> from manyhands.errors import WorkerLost
    >>> WorkerLost("no heartbeat from worker 3 for 5 s", (3,)).numbers
    (3,)
    """

    def __init__(self, message: str, numbers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.numbers = numbers


class JoinRefused(ValueError):
    """The crew rejected this worker because of different options or a different model.

    >>> from manyhands.errors import JoinRefused
    >>> print(JoinRefused(4, ["every: 50 here, 32 in the crew"]))
    worker 4 was not let in: it differs from the workers of this run in
      every: 50 here, 32 in the crew
    Use the options and the model that this run was started with, or start a new run.
    """

    def __init__(self, number: int, differs: Sequence[str]) -> None:
        super().__init__(
            f"worker {number} was not let in: it differs from the workers of this run in\n"
            + "".join(f"  {line}\n" for line in differs)
            + "Use the options and the model that this run was started with, or start a new run."
        )


class StoreLost(RuntimeError):
    """The store of a crew does not respond, so the crew cannot continue.

    >>> from manyhands.errors import StoreLost
    >>> StoreLost("10.0.0.1:29400", "no answer for 30 s").why
    'no answer for 30 s'
    """

    def __init__(self, store: str, why: object) -> None:
        self.why = str(why)
        super().__init__(
            f"the store at {store} is lost: {why}. The store records the members of the crew and "
            "cannot be replaced during a run. Restart the store (`manyhands run` hosts it) and all "
            "workers from a checkpoint."
        )


class CrewFinished(SystemExit):
    """The run finished before this worker could join or rejoin.

    Without a handler, the process prints only the message and exits.

    >>> from manyhands.errors import CrewFinished
    >>> issubclass(CrewFinished, SystemExit)
    True
    """
