"""A line between two hosts that can be cut: all connections go through it, and stand still.

Nothing is closed when it is cut, as when a cable is pulled: bytes wait until it is mended.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Link:
    """Listens at an address of its own, and passes on what comes to another one and back."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._whole = threading.Event()
        self._whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self.mend()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:  # closed
                return
            try:
                there = socket.create_connection(self._to, 10.0)
            except OSError:
                here.close()
                continue
            there.settimeout(None)
            for end in (here, there):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, come: socket.socket, go: socket.socket) -> None:
        with suppress(OSError):
            while data := come.recv(1 << 16):
                self._whole.wait()
                go.sendall(data)
        for end in (come, go):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
