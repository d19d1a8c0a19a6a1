"""Which process writes a record, and whether it still runs.

A process number alone may be another's by now, and another machine's processes cannot be seen. So
the identity has four parts: the boot of the kernel, the namespace of process numbers (a container
has its own), the number, and the moment at which the process began, in the kernel's clock ticks.
Linux has all of them in `/proc`. On other systems, and from another machine, nothing is known.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

_PROC = Path("/proc")


def this_process() -> dict[str, object]:
    """Return this process's identity, in plain JSON."""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        **_pid_space(),
        "started": _start(os.getpid()),
    }


def is_alive(process: object) -> bool | None:
    """Return whether a process of `this_process` runs; None if that cannot be seen from here."""
    if not isinstance(process, dict):
        return None
    pid, started, here = process.get("pid"), process.get("started"), _pid_space()
    if type(pid) is not int or type(started) is not int or None in here.values():
        return None
    if any(process.get(key) != value for key, value in here.items()):
        return None  # on another machine, in another container, or before this machine's start
    return _start(pid) == started


def _pid_space() -> dict[str, str | None]:
    """Return within what process numbers are unique: this boot, and this namespace."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "namespace": os.readlink(_PROC / "self/ns/pid")}
    except OSError:
        return {"boot": None, "namespace": None}


def _start(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the machine's start; None if it is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # "1234 (name) S ...": the name may have spaces and brackets of its own
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])  # a zombie has ended
