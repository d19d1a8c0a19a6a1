"""What `Crew` and `TorchftCrew` have in common: the present generation, and its connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.blocks.crew._transport import GlooTransport, StoreConnection
from manyhands.errors import WorkerLost

# Seconds between two checks of something that is waited for: at first, and in a long wait.
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.03


class CrewBase:
    """A generation: its members by number, this worker's rank, and their process group."""

    patience: float  # seconds that a living member is waited for

    def __init__(self) -> None:
        self.generation = 0
        self.members: tuple[int, ...] = ()  # worker numbers, in rank order
        self.rank = 0
        self.source = 0  # the rank that sends joiners the state
        self.joiners: tuple[int, ...] = ()  # the ranks that need the state
        self.regroup_due = False
        self._round = 0  # index of the current round of this generation
        self._transport: GlooTransport | None = None

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def group(self) -> Any:
        """The members' gloo group (a ProcessGroupGloo); None for a worker that is alone."""
        return None if self._transport is None else self._transport.group

    def wait(self, done: Callable[[float], bool]) -> None:
        """Call `done(seconds)`, which waits up to that long, until it returns True.

        Raise WorkerLost as soon as it is known that the round cannot be kept.
        """
        raise NotImplementedError

    def close(self, steps: int) -> bool:
        """Return whether to hold a last round: whether all others finished after as many steps."""
        return True

    def drop_out(self) -> None:
        """Leave as if dead, so that the others do not wait for this worker."""
        raise NotImplementedError

    def abort(self) -> None:
        """Make every message that waits in the group fail, here and on the other members.

        The group is unusable afterwards. Threads that wait in it end within milliseconds, with
        rare exceptions (_transport.py): do not wait for them.
        """
        if self._transport is not None:
            self._transport.abort()

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.release()
            self._transport = None

    def _connect(self, connection: StoreConnection, prefix: str) -> bool:
        """Connect the members; return False if that failed, or if a member was lost meanwhile."""
        if self.size == 1:
            return True
        self._transport = GlooTransport(connection, prefix, self.rank, self.size, self.patience)
        try:
            # Not a plain join of the transport's thread: a member may die before it connects.
            self.wait(self._transport.wait)
        except WorkerLost:
            self._disconnect()
            return False
        if self._transport.group is None:
            self._disconnect()
            return False
        return True
