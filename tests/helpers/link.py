"""A line between two hosts that can be cut: a process that can be stopped.

Nothing is closed when it is cut, as when a cable is pulled: bytes wait until it is mended.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

from helpers.crew_workers import fork


class Link:
    """Listens at an address of its own, and passes on what comes to another one and back."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
            self.address = f"127.0.0.1:{listening.getsockname()[1]}"
            self.pid = fork(lambda: _serve(listening, (host, int(port))), Path(os.devnull))

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def cut(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def mend(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def _serve(listening: socket.socket, to: tuple[str, int]) -> None:
    while True:
        here, _ = listening.accept()
        there = socket.create_connection(to)
        for ends in ((here, there), (there, here)):
            threading.Thread(target=_pass_on, args=ends, daemon=True).start()


def _pass_on(come: socket.socket, go: socket.socket) -> None:
    with suppress(OSError):
        while data := come.recv(1 << 16):
            go.sendall(data)
    for end in (come, go):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
