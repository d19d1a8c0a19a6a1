"""What forked processes add to the coverage of their test process.

coverage.py's own way (`patch = fork`) begins a new measurement in each fork, and at its end writes
a database with all files of the package: more work than the rank itself has. Here a fork goes on
with the measurement that it inherits, and at its end writes only what its parent did not know,
which is nothing for most ranks. The parent reads it before it forks again, and at its own end.

`Coverage.current` and `save` are public. The collector's arcs are not; constraints.txt pins the
version.
"""

from __future__ import annotations

import marshal
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

Arcs = dict[str, set[int]]  # by file; the two lines of an arc are packed into one number


class MeasuredForks:
    """Coverage of the processes that are forked from this one, and from those."""

    @classmethod
    def begin(cls, config: pytest.Config) -> None:
        """Measure the forks of this process until pytest ends, if it is measured itself."""
        coverage = Coverage.current()
        if coverage is not None:
            config.add_cleanup(cls(coverage).collect)

    def __init__(self, coverage: Coverage) -> None:
        self._coverage: Any = coverage
        self._collector: Any = coverage._collector
        self._temporary = tempfile.TemporaryDirectory(prefix="coverage-")
        self._folder = Path(self._temporary.name, ".cache")  # `manyhands check` leaves it alone
        self._folder.mkdir()
        self._pid = os.getpid()
        self._known: Arcs = {}
        os.register_at_fork(before=self.collect, after_in_child=self._begin)

    def collect(self) -> None:
        """Take over what forks have written."""
        if os.getpid() != self._pid:
            return  # a fork that forks: this is left to the test process
        for path in self._folder.glob("*.arcs"):
            for name, arcs in marshal.loads(path.read_bytes()).items():
                self._collector.data.setdefault(name, set()).update(arcs)
            path.unlink()

    def _begin(self) -> None:
        self._collector.data_lock = threading.Lock()  # a thread of the parent may have held it
        self._known = self._arcs()
        self._coverage.save = self._write  # coverage.py calls it before `os._exit`

    def _arcs(self) -> Arcs:
        # each copy is atomic: other threads go on adding
        return {name: arcs.copy() for name, arcs in self._collector.data.copy().items()}

    def _write(self) -> None:
        new = {
            name: added
            for name, arcs in self._arcs().items()
            if (added := arcs - self._known.get(name, set()))
        }
        if new:
            path = self._folder / f"{os.getpid()}.part"
            path.write_bytes(marshal.dumps(new))
            path.rename(path.with_suffix(".arcs"))  # whole, or not there
