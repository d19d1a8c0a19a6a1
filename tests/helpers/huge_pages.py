"""Make forks of a large process cheap: its memory moves to pages of 2 MB.

A fork copies the page tables of its parent, and ends by walking through its own. For the 350 MB
of a test process with all tests collected, that is 90,000 entries each time, and a fifth of the
processor time of a test on ranks; in huge pages it is 170. What a fork writes to is copied in
small pages as before.

Only Linux 6.1 and later can do so on request. Elsewhere, and where huge pages are switched off,
nothing happens.
"""

import ctypes
import re
import sys
from pathlib import Path

HUGE = 2**21
MADV_COLLAPSE = 25  # <linux/mman.h>
EVERY = 100  # forks: pages that both sides write to become small again

_forks = 0


def before_fork() -> None:
    """Move memory into huge pages before every hundredth fork, but not for a few tests."""
    global _forks
    _forks += 1
    if _forks % EVERY == EVERY // 4 and sys.platform == "linux":
        _collapse()


def _collapse() -> None:
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        # private memory that no file is behind: "7f00-7f80 rw-p 00000000 00:00 0   [heap]"
        found = re.match(r"(\w+)-(\w+) rw-p 0+ 00:00 0", line)
        if found is None:
            continue
        start, stop = int(found[1], 16), int(found[2], 16)
        if stop - start >= HUGE:  # an error is no harm: the pages stay as they are
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), MADV_COLLAPSE)
