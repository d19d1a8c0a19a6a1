"""Who meets now, and the connections between them: what every kind of crew shows and does alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.blocks.crew._transport import Links, StoreConnection
from manyhands.errors import WorkerLost

QUICK, SLOW = 0.002, 0.03  # seconds between two looks: at first, and when a wait grows long


class Members:
    """A generation: its members by their numbers, this worker's rank, and the group."""

    patience: float  # seconds that a member is waited for

    def __init__(self) -> None:
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.rank = 0
        self.source = 0  # the rank that brings newcomers the state
        self.newcomers: tuple[int, ...] = ()
        self.regroup_due = False
        self._meeting = 0
        self._links: Links | None = None

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def group(self) -> Any:
        """The members' gloo group (a ProcessGroupGloo); None where there is nobody else."""
        return None if self._links is None else self._links.group

    def wait(self, done: Callable[[float], bool]) -> None:
        """Call `done(seconds)`, which waits up to so long and says whether all is done, until so.

        Raises WorkerLost as soon as it is known that the meeting cannot be kept any more.
        """
        raise NotImplementedError

    def close(self, steps: int) -> bool:
        """Whether to hold a last meeting: if all others are done after as many steps, too."""
        return True

    def drop_out(self) -> None:
        """Be gone, as if dead, so that nobody waits for this worker."""
        raise NotImplementedError

    def abort(self) -> None:
        """Make every message that waits in the group fail, here and on the other members.

        The group is of no use afterwards. Threads that wait in it end within milliseconds, but for
        a rare one (_transport.py): nothing may wait for them.
        """
        if self._links is not None:
            self._links.give_up()

    def _drop(self) -> None:
        if self._links is not None:
            self._links.let_go()
            self._links = None

    def _connect(self, door: StoreConnection, place: str) -> bool:
        """Build the group; False if somebody was lost meanwhile, or it failed."""
        if self.size == 1:
            return True
        self._links = Links(door, place, self.rank, self.size, self.patience)
        try:
            self.wait(self._links.done)
        except WorkerLost:
            self._drop()
            return False
        if self._links.group is None:
            self._drop()
            return False
        return True
