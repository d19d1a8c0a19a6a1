"""Synchronize the ranks of a run before each step, where rank 0 decides whether all ranks stop."""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 10.0  # seconds that a rank waits for other ranks
POLL = 0.0005  # seconds
NEVER = 2**62  # meetings of an ended rank


class Meeting:
    """Numbers in a file that all ranks map into memory."""

    def __init__(self, file: Path, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        size = 8 * (ranks + 2)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, size)  # the first rank fills the file with zeros
        memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.slots = memoryview(memory).cast("q")  # the latest meeting of each rank
        self.passed = ranks  # slot of the latest meeting that rank 0 has ended
        self.stopped = ranks + 1  # slot of the meeting at which all ranks stop
        self.alone = False  # a rank was missing, so this rank no longer waits

    def stops(self, number: int, decide: Callable[[], bool]) -> bool:
        """Wait for all ranks, and return whether to stop at meeting `number`."""
        self.slots[self.rank] = number
        if self.rank == 0:
            self._wait(lambda: min(self.slots[: self.ranks]) >= number)
            if decide():
                self.slots[self.stopped] = number
            self.slots[self.passed] = number
        else:
            self._wait(lambda: self.slots[self.passed] >= number)
        return 0 < self.slots[self.stopped] <= number

    def leave(self) -> None:
        self.slots[self.rank] = NEVER
        if self.rank == 0:
            self.slots[self.passed] = NEVER

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.alone and not ready():
            self.alone = time.monotonic() > deadline
            time.sleep(POLL)
