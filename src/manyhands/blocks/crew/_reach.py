"""Which other workers this one can reach: two may be cut off from each other, not from the store.

A group of workers that cannot all reach each other never connects. So before a generation begins,
each worker tries to connect to every other one, at its *door*: a port that accepts connections and
closes them. Its request to join names the workers that it cannot reach, and the next generation is
the largest set of workers that all reach each other (`Roster.together`).

    door = Door(host)          listens, until `close`
    door.address               what the others need: it is in the store
    unreachable(addresses)     the ids whose doors did not answer within `ANSWER` seconds
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from manyhands.blocks.crew._store import parse_address

ANSWER = 2.0  # seconds in which a door must answer
PAUSE = 0.2  # seconds until a door that could not accept a connection tries again


class Door:
    """A port at which others see that this worker can be reached."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=1024)
        port = self._listening.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="manyhands door", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._listening.accept()[0].close()
            except OSError:
                # Closed, or an error that passes: the caller has gone (ECONNABORTED), too many
                # files are open (EMFILE, ENFILE), no memory (ENOBUFS, ENOMEM), ... Connections that
                # are opened meanwhile wait in the backlog: to the other side that is an answer.
                self._closed.wait(PAUSE)

    def close(self) -> None:
        self._closed.set()
        # A thread that waits in accept() notices a shutdown, but not a close.
        with suppress(OSError):  # some systems have no shutdown of a listening socket
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def unreachable(addresses: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids whose doors do not answer; `addresses` has the door of each id."""
    if not addresses:
        return ()
    with ThreadPoolExecutor(len(addresses)) as threads:
        answers = threads.map(_answers, addresses.values())
        return tuple(id for id, answered in zip(addresses, answers, strict=True) if not answered)


def _answers(address: str) -> bool:
    try:
        socket.create_connection(parse_address(address), ANSWER).close()
    except OSError:
        return False
    return True
