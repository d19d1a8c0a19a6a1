"""Start Python interpreters that fork ranks for `manyhands check`.

Ranks need different seeds of Python's string hashes, and therefore separate interpreters. Each
starts once, and imports torch while the command does so. An interpreter forks twice for each rank,
so that the rank becomes a child of the command (a subreaper, prctl(2)).
"""

import ctypes
import os
import socket
import sys
from functools import cache

AVAILABLE = sys.platform.startswith("linux")  # elsewhere, all ranks are forks of the command
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
# `python -c` adds the working folder to sys.path.
COMMAND = """
import sys
if sys.path[0] == "":
    sys.path.pop(0)
from manyhands.tools.check._processes import serve
serve()
"""


@cache
def start_interpreter(number: int) -> socket.socket:
    """Start interpreter `number` if necessary, and return the socket for its requests."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.set_inheritable(True)
        words = [sys.executable, "-c", COMMAND, str(theirs.fileno())]
        os.posix_spawn(sys.executable, words, os.environ, setsid=True)
    return ours
