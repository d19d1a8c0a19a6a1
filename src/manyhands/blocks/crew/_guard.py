"""A process that kills the workers, and their children, if their launcher is killed.

The launcher runs this file as a script and writes to its standard input, one per line, `+PID` for
each process group that it has started and `-PID` for each that has ended. When the launcher dies,
for whatever reason, its end of the pipe closes. The remaining process groups are then killed.

This file imports only the standard library, so that it starts within milliseconds and stays small.
"""

import contextlib
import os
import signal
import sys
import time


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:  # ends when the launcher does
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for _ in range(3):  # again: a child may be forking while the first signal arrives
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.1 if groups else 0.0)


if __name__ == "__main__":
    main()
