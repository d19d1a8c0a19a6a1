"""A bound on memory: what a damaged file claims must not be allocated."""

import contextlib
import resource
from pathlib import Path

ROOM = 2**29  # bytes of memory that a load may take, whatever a file says


@contextlib.contextmanager
def little_memory(room=ROOM):
    """Let an allocation of more than so many bytes fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
