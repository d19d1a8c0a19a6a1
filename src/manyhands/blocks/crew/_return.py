"""Reach a lost store again, on a thread of its own.

    returning = ReturnToStore(store, connect)    connect() returns a SharedRoster, or raises
    while returning.shared is None:
        do_other_things()
    returning.close()                            if it is not needed any more

A single try may take as long as the store's timeout, in which the launcher has other things to do.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from manyhands.blocks.crew._store import SharedRoster, parse_address
from manyhands.errors import StoreLost

PAUSE = 1.0  # seconds between two tries: without a route there is an answer at once
ANSWER = 5.0  # seconds in which the store's host must answer


class ReturnToStore:
    """Tries to connect until the store answers."""

    def __init__(self, store: str, connect: Callable[[], SharedRoster]) -> None:
        self.shared: SharedRoster | None = None  # once the store answers
        self.error = f"the store at {store} does not answer."  # of the last try
        self._address = parse_address(store)
        self._connect = connect
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="manyhands return", daemon=True).start()

    def close(self) -> None:
        """Try no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(PAUSE):
            try:
                # torch's own tries are long, and each prints a trace of the stack.
                socket.create_connection(self._address, ANSWER).close()
                self.shared = self._connect()
                return
            except OSError as error:
                host, port = self._address
                self.error = f"the store at {host}:{port} does not answer ({error})."
            except (StoreLost, ValueError) as error:  # ValueError: it is another run's store
                self.error = str(error)
