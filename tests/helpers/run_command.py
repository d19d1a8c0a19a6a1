"""`manyhands run ...` in a fork of this process, and whether processes are alive."""

import os
import re
import signal
import sys
import textwrap
import time

from helpers.crew_workers import fork


class Command:
    """`manyhands run ...` in a fork of this process, which has everything imported."""

    def __init__(self, folder, script, *options, arguments=(), name="train", instead=()):
        """`instead` has other places for its output: {1: stdout's, 2: stderr's}."""
        self.folder = folder
        self.script = folder / f"{name}.py"
        self.script.write_text(textwrap.dedent(script))
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        words = ["run", *options, str(self.script), *arguments]

        def call():
            from manyhands.tools.cli import app

            os.chdir(folder)
            for number, path in {1: self.out, 2: self.err, **dict(instead)}.items():
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w")
            try:
                app()(words)
            except SystemExit as end:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(int(end.code or 0))

        self.pid = fork(call, folder / f"{name}.fork")
        self.code = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.code is None:
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)

    def wait(self, timeout=20):
        until = time.monotonic() + timeout
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            assert time.monotonic() < until, self.said()
            time.sleep(0.01)
        return self.code

    def said(self):
        return f"{self.out.read_text()}\n{self.err.read_text()}"

    def until(self, pattern, timeout=20):
        limit = time.monotonic() + timeout
        while not (found := re.search(pattern, self.said() if self.err.exists() else "")):
            assert time.monotonic() < limit, self.said()
            time.sleep(0.01)
        return found


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def gone(pids, seconds=15.0):
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(alive, pids))
