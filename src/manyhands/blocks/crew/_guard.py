"""A process that ends what a killed launcher leaves behind: its workers, and their children.

The launcher runs this file and writes to it, one to a line, `+PID` for each process group that it
has started and `-PID` for each that it has ended. When the launcher dies, however that happens, its
end of the pipe is closed, and the groups that are left are killed.

Nothing but the standard library is imported, so that it starts within milliseconds and is small.
"""

import contextlib
import os
import signal
import sys
import time


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for _ in range(3):  # a child may be in the middle of making another
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.1 if groups else 0.0)


if __name__ == "__main__":
    main()
