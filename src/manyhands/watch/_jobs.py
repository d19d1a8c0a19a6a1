"""Several jobs: the records that were named, and all those that appear in a named folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from manyhands.watch._job import WatchedJob

LOOK_EVERY = 2.0  # seconds between two looks into a folder
SUFFIX = ".jsonl"


class Jobs:
    """Jobs in the order in which they were named or found."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._folders = [path for path in paths if path.is_dir()]
        self._jobs = {path: WatchedJob(path) for path in paths if path not in self._folders}
        self._looked = -LOOK_EVERY
        self._look()

    def _look(self) -> None:
        """Find new records in the folders."""
        self._looked = time.monotonic()
        for folder in self._folders:
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                if path not in self._jobs:
                    self._jobs[path] = WatchedJob(path)

    @property
    def all(self) -> list[WatchedJob]:
        """The jobs as they were read last."""
        return list(self._jobs.values())

    def read(self, seconds: float = 0.3) -> list[WatchedJob]:
        """Take in what is new, for about so many seconds at most, and return all jobs."""
        if time.monotonic() - self._looked >= LOOK_EVERY:
            self._look()
        jobs = self.all
        for job in jobs:
            job.read(seconds / max(1, len(jobs)))
        return jobs
